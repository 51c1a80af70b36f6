//! The command line as scripts and people meet it, without any privilege.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the helpers of a test may panic as the test may"
)]

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

const BIN: &str = env!("CARGO_BIN_EXE_nobypass");
const COMMANDS: [&str; 9] =
    ["agent", "status", "events", "explain", "mode", "policy", "preflight", "cleanup", "version"];

/// `nobypass` with these arguments and no settings from the environment of whoever runs the tests.
fn nobypass(args: &[&str]) -> Command {
    let mut command = Command::new(BIN);
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("NOBYPASS_")) {
        command.env_remove(name);
    }
    command.args(args).stdin(Stdio::null());
    command
}

struct Said {
    code: Option<i32>,
    out: String,
    err: String,
}

fn said(mut command: Command) -> Said {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let said = Said {
        code: status.code(),
        out: String::from_utf8(stdout).unwrap(),
        err: String::from_utf8(stderr).unwrap(),
    };
    assert!(!said.err.contains("panicked"), "{command:?}: {}", said.err);
    assert!(said.code.is_some(), "{command:?} was killed: {status}");
    said
}

fn run(args: &[&str]) -> Said {
    said(nobypass(args))
}

#[test]
fn wrong_arguments_exit_64_and_name_what_is_wrong_and_what_would_be_right() {
    for (args, says) in [
        (&["agnet"][..], &["agnet", "agent"][..]),
        (&["agent", "--enforce"], &["--enforce", "--help"]),
        (&["agent", "--mode", "strict"], &["strict", "--mode", "off, audit, enforce"]),
        (&["agent", "--mod", "audit"], &["--mod", "--mode"]),
        (&["agent", "--mode"], &["--mode", "value is required", "off, audit, enforce"]),
        (&["agent", "--mode", "audit", "--mode", "off"], &["--mode", "multiple times"]),
        (&["agent", "--hold-ms", "0"], &["--hold-ms", "1..=60000"]),
        (&["agent", "--hold-ms", "3s"], &["--hold-ms", "3s"]),
        (&["agent", "--max-pods", "1000000"], &["--max-pods", "16..=65536"]),
        (&["agent", "--event-rate", "-1"], &["-1"]),
        (&["agent", "--metrics-addr", "localhost:9910"], &["--metrics-addr", "localhost", "none"]),
        (&["agent", "--metrics-addr", ":9910"], &["--metrics-addr", "HOST:PORT"]),
        (&["agent", "--cgroup-root-level", "2"], &["--cgroup-root "]),
        (&["agent", "--pods", "docker"], &["--pods", "auto, cri, kube, both"]),
        (&["agent", "--pods", "kube"], &["--node-name", "NOBYPASS_NODE_NAME", "--pods=cri"]),
        (
            &["agent", "--pods", "both", "--node-name", "n1"],
            &["service account", "--kubeconfig", "--pods=cri"],
        ),
        (&["agent", "--pods", "kube", "--node-name", "N 1"], &["--node-name", "lower-case"]),
        (
            &["agent", "--pods", "kube", "--node-name", "n1", "--kubeconfig", "/nonexistent/config"],
            &["/nonexistent/config", "No such file"],
        ),
        (&["agent", "now"], &["now"]),
        (&["agent", "--log", "loud=louder=loudest"], &["--log", "loud=louder=loudest", "debug"]),
        (&["agent", "--cri-endpoint", "tcp://127.0.0.1:1"], &["--cri-endpoint", "tcp://127.0.0.1:1", "unix"]),
        (&["agent", "--profiles", "/nonexistent/mesh.yaml"], &["/nonexistent/mesh.yaml", "No such file"]),
        (&["status", "-o", "xml"], &["--output", "xml", "json"]),
        (&["status", "extra"], &["extra"]),
        (&["status", "--watch", "0"], &["--watch", "1..=3600"]),
        (&["explain"], &["<NAMESPACE/POD>", "not provided"]),
        (&["explain", "shop/cart 0"], &["shop/cart 0", "NAMESPACE/NAME"]),
        (&["explain", "-o", "wide", "shop/cart"], &["--output", "wide", "table, json"]),
        (&["probe"], &["<NAMESPACE/POD>", "not provided"]),
        (&["policy"], &["check", "show"]),
        (&["policy", "check"], &["<FILE>", "not provided"]),
        (&["validate", "--port", "0"], &["--port"]),
        (&["completions", "csh"], &["csh", "bash"]),
        (&["events", "--output", "yaml"], &["--output", "json"]),
        (&["mode", "on"], &["'on'", "off, audit, enforce, policy"]),
        (&["preflight", "--fix"], &["--fix"]),
        (&["cleanup", "--force"], &["--force"]),
        (&["version", "--short"], &["--short"]),
        (&["--verbose"], &["--verbose"]),
    ] {
        let Said { code, out, err } = run(args);
        assert_eq!(code, Some(64), "{args:?}: {err}");
        assert_eq!(out, "", "{args:?}");
        for words in says {
            assert!(err.contains(words), "{args:?} should say {words:?}: {err}");
        }
    }
}

#[test]
fn without_a_sub_command_it_shows_the_status() {
    let here = [("NOBYPASS_SOCKET", "/nonexistent/agent.sock"), ("NOBYPASS_BPF_DIR", "/nonexistent/bpf")];
    let [alone, status] = [&[][..], &["status"]].map(|args: &[&str]| {
        let mut command = nobypass(args);
        command.envs(here);
        said(command)
    });
    assert_eq!((alone.code, &alone.out, &alone.err), (status.code, &status.out, &status.err));
    assert_eq!(alone.code, Some(69), "{}", alone.err);
    assert!(alone.err.contains("no agent runs"), "{}", alone.err);
}

#[test]
fn status_is_shown_again_and_again_until_nobody_reads() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = nobypass(&["status", "--watch", "1"]);
    command.args(nowhere(dir.path())).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut shown = 0;
    while shown < 2 {
        let line = out.next().expect("it goes on").unwrap();
        assert!(!line.contains('\u{1b}'), "only a terminal is painted: {line}");
        // An agent may come.
        shown += u32::from(line.contains("no agent runs"));
    }
    drop(out);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// Long flags in a help text, and the environment variables it names.
fn flags_and_variables(help: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let flags = help.lines().filter_map(|line| {
        // Deeper lines are text that happens to begin with a flag.
        let text = line.trim_start();
        let flag = text.starts_with('-') && line.len() - text.len() < 8;
        let flag = flag.then(|| text.split("--").nth(1))??;
        flag.split([' ', ',']).next().map(str::to_owned)
    });
    let variables = help.split("[env: ").skip(1).filter_map(|rest| Some(rest.split('=').next()?.to_owned()));
    (flags.collect(), variables.collect())
}

#[test]
fn every_help_exits_0_shows_every_flag_with_its_variable_and_the_exit_codes_are_in_the_first_one() {
    let Said { code, out, err } = run(&["--help"]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    for command in COMMANDS {
        assert!(out.contains(command), "{command} is not in {out}");
    }
    assert!(!out.contains("canary"), "the agent's own sub-command is nobody's business");
    for code in ["  0 ", "  1 ", "  64 ", "  69 ", "  77 "] {
        assert!(out.contains(code), "exit code {code} is not in {out}");
    }
    for command in COMMANDS {
        let Said { code, out, err } = run(&[command, "--help"]);
        assert_eq!((code, err.as_str()), (Some(0), ""), "{command}");
        let (flags, variables) = flags_and_variables(&out);
        let without: BTreeSet<&str> = ["help", "output", "follow", "all", "watch", "node"].into();
        let expected: BTreeSet<String> = flags
            .iter()
            .filter(|flag| !without.contains(flag.as_str()))
            .map(|flag| format!("NOBYPASS_{}", flag.replace('-', "_").to_uppercase()))
            .collect();
        assert_eq!(variables, expected, "{command}: {out}");
        if command == "agent" {
            assert!(flags.len() > 15 && flags.contains("mode") && flags.contains("pod-parent"), "{flags:?}");
        }
        assert!(out.lines().all(|line| line.chars().count() <= 110), "{command} --help is too wide");
    }
}

#[test]
fn the_version_is_the_packages() {
    let expected = format!("nobypass {}\n", env!("CARGO_PKG_VERSION"));
    for args in [&["version"][..], &["--version"], &["-V"]] {
        let Said { code, out, err } = run(args);
        assert_eq!((code, out, err), (Some(0), expected.clone(), String::new()), "{args:?}");
    }
}

/// An agent that gets as far as its configuration and no further, whoever runs it: the profiles do not exist.
fn agent_that_ends(args: &[&str], env: &[(&str, &str)]) -> Said {
    let mut command = nobypass(&["agent", "--profiles", "/nonexistent/mesh.yaml", "--log-format", "json"]);
    command.args(args).envs(env.iter().copied());
    said(command)
}

#[test]
fn a_flag_wins_over_its_variable_and_the_variable_over_the_default() {
    for (args, env, mode) in [
        (&[][..], &[][..], "Audit"),
        (&[], &[("NOBYPASS_MODE", "enforce")], "Enforce"),
        (&["--mode", "off"], &[("NOBYPASS_MODE", "enforce")], "Off"),
    ] {
        let Said { code, err, .. } = agent_that_ends(args, env);
        assert_eq!(code, Some(64), "{err}");
        let first = err.lines().next().unwrap();
        let line: serde_json::Value = serde_json::from_str(first).unwrap();
        let config = line["config"].as_str().unwrap();
        assert!(config.contains(&format!("mode: {mode}")), "{args:?} {env:?}: {config}");
    }
}

#[test]
fn a_wrong_variable_is_named_as_such() {
    for (name, value, says) in [
        ("NOBYPASS_MODE", "strict", "off, audit, enforce"),
        ("NOBYPASS_HOLD_MS", "soon", "--hold-ms"),
        ("NOBYPASS_METRICS_ADDR", "here", "HOST:PORT"),
    ] {
        let Said { code, err, .. } = agent_that_ends(&[], &[(name, value)]);
        assert_eq!(code, Some(64), "{err}");
        assert!(err.contains(name) && err.contains(value) && err.contains(says), "{name}={value}: {err}");
    }
    let Said { err, .. } = agent_that_ends(&["--mode", "strict"], &[("NOBYPASS_MODE", "off")]);
    assert!(!err.contains("NOBYPASS_MODE"), "the flag is wrong, not the variable: {err}");
}

#[test]
fn an_empty_variable_is_as_good_as_none() {
    // Helm charts and systemd units set variables that way.
    for name in
        ["NOBYPASS_MODE", "NOBYPASS_CRI_ENDPOINT", "NOBYPASS_POD_PARENT", "NOBYPASS_CGROUP_ROOT_LEVEL"]
    {
        let Said { code, err, .. } = agent_that_ends(&[], &[(name, "")]);
        assert_eq!(code, Some(64), "{name}: {err}");
        assert!(err.contains("/nonexistent/mesh.yaml"), "{name} was in the way: {err}");
        let config = err.lines().next().unwrap();
        assert!(config.contains("mode: Audit") && config.contains("cri_endpoint: None"), "{config}");
        assert!(config.contains("pod_parent: []"), "{config}");
    }
}

/// `--socket` and `--bpf-dir` where nothing is.
fn nowhere(dir: &Path) -> [String; 4] {
    let path = |name: &str| dir.join(name).display().to_string();
    ["--socket".into(), path("agent.sock"), "--bpf-dir".into(), path("bpf")]
}

#[test]
fn without_agent_and_pins_commands_exit_69_and_say_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let place = nowhere(dir.path());
    let place: Vec<&str> = place.iter().map(String::as_str).collect();
    for (words, says) in [
        (&["status"][..], &["no agent runs", "--bpf-dir"][..]),
        (&["status", "-o", "json"], &["no agent runs", "--bpf-dir"]),
        (&["events"], &["agent.sock", "is it running", "--socket"]),
        (&["events", "-f"], &["agent.sock", "is it running", "--socket"]),
        (&["mode"], &["no nobypass pins", "--bpf-dir"]),
        (&["mode", "enforce"], &["no nobypass pins", "--bpf-dir"]),
    ] {
        let Said { code, out, err } = run(&[words, &place].concat());
        assert_eq!((code, out.as_str()), (Some(69), ""), "{words:?}: {err}");
        assert_eq!(err.lines().count(), 1, "one sentence, not a report: {err}");
        assert!(err.starts_with("nobypass: "), "{err}");
        for words in says {
            assert!(err.contains(words), "should say {words:?}: {err}");
        }
        let bpf = dir.path().join("bpf").display().to_string();
        assert!(err.contains(&bpf) || words[0] == "events", "the place is named: {err}");
    }
    assert!(!dir.path().join("bpf").exists(), "asking makes nothing");
}

#[test]
fn a_socket_that_answers_nonsense_or_nothing_is_an_error_and_not_a_hang() {
    use std::io::Write as _;
    let dir = tempfile::tempdir().unwrap();
    let place = nowhere(dir.path());
    let listener = std::os::unix::net::UnixListener::bind(dir.path().join("agent.sock")).unwrap();
    let answers = std::thread::spawn(move || {
        for answer in ["", "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n{} ", "SSH-2.0-dropbear\r\n"] {
            let (mut stream, _) = listener.accept().unwrap();
            // The client may be gone already.
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    for _ in 0..3 {
        let Said { code, err, .. } = run(&[&["status"][..], &place.each_ref().map(String::as_str)].concat());
        assert_eq!(code, Some(1), "{err}");
        assert!(err.contains("the agent's answer broke off"), "{err}");
    }
    answers.join().unwrap();
}

#[test]
fn a_closed_standard_output_is_no_error() {
    for args in [&["version"][..], &["--help"], &["preflight"]] {
        let mut child = nobypass(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // Closed before anything can have been written: the reader of the pipe is gone.
        drop(child.stdout.take());
        let Output { status, stderr, .. } = child.wait_with_output().unwrap();
        let err = String::from_utf8(stderr).unwrap();
        assert!(!err.contains("panicked") && !err.contains("roken pipe"), "{args:?}: {err}");
        let ok = if args[0] == "preflight" { &[0, 69][..] } else { &[0] };
        assert!(status.code().is_some_and(|code| ok.contains(&code)), "{args:?}: {status}");
    }
}

#[test]
fn a_full_disk_is_one() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let mut command = nobypass(&["version"]);
    let Output { status, stderr, .. } = command.stdout(full).stderr(Stdio::piped()).output().unwrap();
    let err = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(1), "{err}");
    assert!(err.contains("standard output"), "{err}");
}

#[test]
fn profiles_that_are_not_valid_exit_64_with_file_and_line() {
    let dir = tempfile::tempdir().unwrap();
    for (name, text, says) in [
        ("syntax.yaml", "profiles:\n  - name: [a\n", &["syntax.yaml", "line "][..]),
        ("type.yaml", "profiles: 3\n", &["type.yaml", "line 1"]),
        ("field.yaml", "profiles:\n  - name: a\n    prozy: b\n", &["field.yaml", "line 3", "prozy"]),
        ("empty.yaml", "", &["empty.yaml"]),
        ("binary.yaml", "\u{0}\u{1}\u{2}", &["binary.yaml"]),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        let Said { code, err, .. } = run(&["agent", "--profiles", path.to_str().unwrap()]);
        assert_eq!(code, Some(64), "{name}: {err}");
        let last = err.lines().last().unwrap();
        assert!(last.starts_with("nobypass: "), "{name}: {err}");
        for words in says {
            assert!(last.contains(words), "{name} should say {words:?}: {err}");
        }
    }
    let Said { code, err, .. } = run(&["agent", "--profiles", dir.path().to_str().unwrap()]);
    assert_eq!(code, Some(64), "a directory: {err}");
}

#[test]
fn preflight_is_json_of_a_known_shape() {
    let dir = tempfile::tempdir().unwrap();
    let bpf = dir.path().join("pins");
    let Said { code, out, err } = run(&["preflight", "-o", "json", "--bpf-dir", bpf.to_str().unwrap()]);
    assert_eq!(code, Some(69), "a temporary directory is no bpffs: {err}");
    let checks: Vec<serde_json::Map<String, serde_json::Value>> = serde_json::from_str(&out).unwrap();
    for check in &checks {
        let keys: Vec<&str> = check.keys().map(String::as_str).collect();
        assert_eq!(keys, ["name", "level", "found", "remedy"]);
        let level = check["level"].as_str().unwrap();
        assert!(["pass", "warn", "fail"].contains(&level), "{check:?}");
        assert!(!check["name"].as_str().unwrap().is_empty() && check["found"].is_string());
        assert_eq!(level == "pass", check["remedy"].as_str().unwrap().is_empty(), "{check:?}");
    }
    let names: Vec<&str> = checks.iter().map(|check| check["name"].as_str().unwrap()).collect();
    for name in ["kernel", "cgroup2", "capabilities", "bpffs", "tracefs"] {
        assert!(names.contains(&name), "{names:?}");
    }
    let bpffs = checks.iter().find(|check| check["name"] == "bpffs").unwrap();
    assert!(bpffs["found"].as_str().unwrap().contains(bpf.to_str().unwrap()), "{bpffs:?}");
    assert!(!bpf.exists(), "looking makes nothing");

    let Said { out, .. } = run(&["preflight", "--bpf-dir", bpf.to_str().unwrap()]);
    assert!(out.contains("FAIL") && out.contains("mount -t bpf"), "{out}");
    assert!(!out.contains('\u{1b}'), "colour only on a terminal");
}

#[test]
fn cleanup_touches_only_a_bpf_file_system() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let Said { code, out, .. } = run(&["cleanup", "--bpf-dir", missing.to_str().unwrap()]);
    assert_eq!(code, Some(0));
    assert!(out.contains("nothing to do"), "{out}");

    // Somebody's API, which happens to have a directory that looks like ours.
    let precious = dir.path().join("v1/precious");
    std::fs::create_dir(precious.parent().unwrap()).unwrap();
    std::fs::write(&precious, "").unwrap();
    let Said { code, err, .. } = run(&["cleanup", "--bpf-dir", dir.path().to_str().unwrap()]);
    assert_eq!(code, Some(69), "{err}");
    assert!(err.contains("not on a BPF file system") && err.contains("--bpf-dir"), "{err}");
    assert!(precious.exists());
}

#[test]
fn a_strange_environment_is_survived() {
    use std::os::unix::ffi::OsStrExt as _;
    let invalid = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    let dir = tempfile::tempdir().unwrap();
    for args in [&["version"][..], &["--help"], &["preflight"], &["status"], &["agent", "--help"]] {
        let mut bare = nobypass(args);
        bare.env_clear().current_dir(dir.path());
        let mut odd = nobypass(args);
        for name in ["HOME", "PATH", "LANG", "LC_ALL", "TERM", "COLUMNS", "NO_COLOR", "RUST_LOG", "TMPDIR"] {
            odd.env(name, invalid);
        }
        odd.env("RUST_BACKTRACE", "full");
        let mut narrow = nobypass(args);
        narrow.env("COLUMNS", "1").env("CLICOLOR_FORCE", "1").env("TERM", "dumb");
        for command in [bare, odd, narrow] {
            let mut command = command;
            if args[0] == "status" {
                command.args(nowhere(dir.path()));
            }
            let ok = match args[0] {
                "preflight" => &[0, 69][..],
                "status" => &[69],
                _ => &[0],
            };
            let code = said(command).code.unwrap();
            assert!(ok.contains(&code), "{args:?}: {code}");
        }
    }
    // Of our own variables, text that is none is refused by name.
    let mut command = nobypass(&["agent"]);
    let Said { code, err, .. } = said({
        command.env("NOBYPASS_MODE", invalid);
        command
    });
    assert_eq!(code, Some(64), "{err}");
    assert!(err.contains("NOBYPASS_MODE") && err.contains("off, audit, enforce"), "{err}");
}
