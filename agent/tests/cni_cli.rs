//! `nobypass cni …` as an operator runs it: no root, any directory, one clear line and a documented code when wrong.
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

const BARE: &str = "{\n  \"name\": \"x\",\n  \"plugins\": [\n    {\"type\": \"calico\"}\n  ]\n}\n";
const GOOD: &str = r#"{"name":"y","plugins":[{"type":"bridge"},{"type":"linkerd-cni","v":1}]}"#;
const ENTRY: &str = r#"{"type":"linkerd-cni","v":1}"#;

struct Output {
    code: i32,
    out: String,
    err: String,
}

fn run_with(env: &[(&str, &str)], args: &[&dyn AsRef<OsStr>]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_nobypass"))
        .env_clear()
        .envs(env.iter().copied())
        .arg("cni")
        .args(args.iter().map(AsRef::as_ref))
        .output()
        .unwrap();
    Output {
        code: output.status.code().unwrap(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

fn run(args: &[&dyn AsRef<OsStr>]) -> Output {
    run_with(&[], args)
}

fn dir(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap()))
        .collect();
    found.sort();
    found
}

#[test]
fn status_says_which_file_is_active_and_whether_it_protects() {
    let node = dir(&[("10-x.conflist", BARE), ("20-y.conflist", GOOD), ("30-z.conf", "{")]);
    let seen = run(&[&"status", &"--cni-dir", &node.path()]);
    assert_eq!(seen.code, 1, "{}", seen.err);
    for text in
        ["10-x.conflist sorts first", "linkerd-cni, from 20-y.conflist", "no: the mesh's entry is missing"]
    {
        assert!(seen.out.contains(text), "{text}\n{}", seen.out);
    }
    assert!(seen.out.contains("30-z.conf: ends in the middle of its JSON"), "{}", seen.out);
    let seen = run(&[&"status", &"-o", &"json", &"--cni-dir", &node.path()]);
    let json: Value = serde_json::from_str(&seen.out).unwrap();
    assert_eq!((json["protected"].as_bool(), json["active"].as_str()), (Some(false), Some("10-x.conflist")));
    assert_eq!(json["files"][1]["role"], "standby");
    assert_eq!(json["files"][1]["behind"], "10-x.conflist");
    assert_eq!(json["files"][2]["problem"]["reason"], "incomplete");
    assert_eq!(json["wanted"]["source"], "20-y.conflist");
    assert!(json["files"][0]["changedUnixSeconds"].as_u64().unwrap() > 1_600_000_000);
    fs::remove_file(node.path().join("10-x.conflist")).unwrap();
    let seen = run(&[&"status", &"--cni-dir", &node.path()]);
    assert_eq!(seen.code, 0, "{}", seen.out);
    assert!(seen.out.contains("protected     yes"), "{}", seen.out);
}

#[test]
fn status_follows_the_runtime_s_own_order() {
    let node = dir(&[("05-a.conflist", "{"), ("20-y.conflist", GOOD)]);
    let containerd = run(&[&"status", &"--cni-dir", &node.path()]);
    assert!(containerd.out.contains("no network: 05-a.conflist sorts first and cannot be loaded"));
    let crio = run(&[&"status", &"--cni-runtime", &"crio", &"--cni-dir", &node.path()]);
    assert_eq!((containerd.code, crio.code), (1, 0), "{}", crio.out);
}

#[test]
fn control_characters_in_names_do_not_reach_the_terminal() {
    let node = dir(&[("1\u{1b}[2J.conflist", &GOOD.replace("\"y\"", "\"\\u001b[31m\""))]);
    let seen = run(&[&"status", &"--cni-dir", &node.path()]);
    assert!(!seen.out.contains('\u{1b}'), "{:?}", seen.out);
}

#[test]
fn plan_shows_a_diff_of_the_entry_alone_and_writes_nothing() {
    let node = dir(&[
        ("10-x.conflist", BARE),
        ("15-t.conf", r#"{"name":"t","type":"terway"}"#),
        ("20-y.conflist", GOOD),
        ("30-z.conf", "{"),
        ("99-lo.conf", r#"{"name":"lo","type":"loopback"}"#),
    ]);
    let before = contents(node.path());
    let seen = run(&[&"plan", &"--cni-dir", &node.path()]);
    assert_eq!(seen.code, 0, "{}", seen.err);
    let expected = "--- 10-x.conflist\n+++ 10-x.conflist\n@@ -1,6 +1,7 @@\n {\n   \"name\": \"x\",\n   \"plugins\": [\n-    {\"type\": \"calico\"}\n+    {\"type\": \"calico\"},\n+    {\"type\": \"linkerd-cni\", \"v\": 1}\n   ]\n }\n";
    assert!(seen.out.starts_with(expected), "{}", seen.out);
    for text in [
        "--- /dev/null\n+++ 15-t.conflist\n",
        "# 15-t.conf: then kept as .15-t.conf.nobypass-original",
        "# 30-z.conf: not touched: ends in the middle of its JSON",
        "# 99-lo.conf: left, loopback is no pod network",
        "# 2 to write, 1 satisfied, 2 left",
    ] {
        assert!(seen.out.contains(text), "{text}\n{}", seen.out);
    }
    let seen = run(&[&"plan", &"-o", &"json", &"--cni-keep-conf", &"--cni-dir", &node.path()]);
    let json: Value = serde_json::from_str(&seen.out).unwrap();
    let actions: Vec<_> =
        json.as_array().unwrap().iter().map(|step| step["action"].as_str().unwrap()).collect();
    assert_eq!(actions, ["write", "leave", "leave", "refuse", "leave"]);
    assert_eq!(json[1]["reason"], "single_plugin");
    assert_eq!(contents(node.path()), before);
}

/// istio/cni#85: a list of a network that already has a file of that name.
#[test]
fn plan_does_not_overwrite_a_list_of_the_owner() {
    let node = dir(&[("10-t.conf", r#"{"name":"t","type":"terway"}"#), ("10-t.conflist", GOOD)]);
    let seen = run(&[&"plan", &"--cni-dir", &node.path()]);
    assert!(
        seen.out.contains("# 10-t.conf: not touched: its owner also keeps 10-t.conflist"),
        "{}",
        seen.out
    );
}

#[test]
fn the_entry_comes_from_a_file_or_the_installer_s_environment() {
    let node = dir(&[("10-x.conflist", BARE)]);
    let prefix = tempfile::tempdir().unwrap();
    let net = prefix.path().join("etc/cni/net.d");
    fs::create_dir_all(&net).unwrap();
    fs::write(net.join("10-x.conflist"), BARE).unwrap();
    let entry = prefix.path().join("entry.json");
    fs::write(&entry, ENTRY).unwrap();
    let seen = run(&[&"plan", &"--cni-dir", &node.path(), &"--cni-entry", &entry]);
    assert!(seen.out.contains("+    {\"type\": \"linkerd-cni\", \"v\": 1}"), "{}", seen.out);
    let template = r#"{"type":"linkerd-cni","kubernetes":{"kubeconfig":"__KUBECONFIG_FILEPATH__"}}"#;
    let env = [("CONTAINER_MOUNT_PREFIX", prefix.path().to_str().unwrap()), ("CNI_NETWORK_CONFIG", template)];
    let seen = run_with(&env, &[&"plan"]);
    assert!(seen.out.contains("/etc/cni/net.d/ZZZ-linkerd-cni-kubeconfig"), "{}{}", seen.out, seen.err);
    assert!(!seen.out.contains(env[0].1), "the host does not know the mount prefix: {}", seen.out);
}

#[test]
fn wrong_arguments_and_missing_directories_give_one_line_and_their_code() {
    let node = dir(&[("10-x.conflist", BARE), ("entry", "{")]);
    let (gone, file, entry) =
        (node.path().join("gone"), node.path().join("10-x.conflist"), node.path().join("entry"));
    let table: &[(&[&dyn AsRef<OsStr>], i32, &str)] = &[
        (&[&"status", &"--cni-dir", &gone], 69, "No such file or directory; say where it is with --cni-dir"),
        (&[&"plan", &"--cni-dir", &file], 69, "Not a directory"),
        (&[&"plan", &"--cni-dir", &node.path()], 64, "use --cni-entry FILE or set CNI_NETWORK_CONFIG"),
        (&[&"plan", &"--cni-dir", &node.path(), &"--cni-entry", &gone], 64, "No such file or directory"),
        (
            &[&"plan", &"--cni-dir", &node.path(), &"--cni-entry", &entry],
            64,
            "cannot be read: ends in the middle",
        ),
        (&[&"plan", &"--cni-dir", &node.path(), &"--cni-entry", &file], 64, "say which plugin of it"),
        (&[&"uninstall", &"--cni-mode=install", &"--cni-dir", &node.path()], 64, "which entry?"),
        (
            &[&"uninstall", &"--cni-mode=install", &"--all", &"--cni-plugin=m", &"--cni-dir", &gone],
            69,
            "No such",
        ),
    ];
    for (args, code, text) in table {
        let seen = run(args);
        assert_eq!(seen.code, *code, "{}", seen.err);
        assert!(seen.err.contains(text) && seen.err.lines().count() == 1, "{}", seen.err);
        assert!(seen.err.starts_with("nobypass: ") && seen.out.is_empty(), "{}{}", seen.err, seen.out);
    }
    let env = [("DEST_CNI_NET_DIR", "relative")];
    assert_eq!(run_with(&env, &[&"status"]).code, 64);
    assert_eq!(run(&[&"status", &"--nonsense"]).code, 64);
    assert_eq!(run(&[&"status", &"--cni-runtime", &"docker"]).code, 64);
}

#[test]
fn uninstall_removes_only_in_install_mode() {
    let node = dir(&[("20-y.conflist", GOOD), ("ZZZ-linkerd-cni-kubeconfig", "k"), ("entry", ENTRY)]);
    let bin = dir(&[("linkerd-cni", "b"), ("bridge", "b")]);
    let before = contents(node.path());
    let seen = run(&[&"uninstall", &"--cni-dir", &node.path()]);
    assert_eq!((seen.code, contents(node.path())), (0, before));
    assert!(seen.out.starts_with("nothing removed: in guard mode"), "{}", seen.out);
    let entry = node.path().join("entry");
    let args: [&dyn AsRef<OsStr>; 8] = [
        &"uninstall",
        &"--cni-mode=install",
        &"--cni-dir",
        &node.path(),
        &"--cni-bin-dir",
        &bin.path(),
        &"--cni-entry",
        &entry,
    ];
    let seen = run(&args);
    assert_eq!(seen.code, 0, "{}{}", seen.out, seen.err);
    assert!(seen.out.contains("20-y.conflist: entry removed"), "{}", seen.out);
    let left = contents(node.path());
    assert_eq!(left[0].1, br#"{"name":"y","plugins":[{"type":"bridge"}]}"#);
    assert_eq!((left.len(), contents(bin.path()).len()), (2, 1));
    assert_eq!(run(&args).out, "nothing to remove\n");
}
