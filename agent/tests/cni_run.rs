//! `nobypass cni run` as a process on a made-up node: guard and install mode, rotation, upgrades, cleaning up.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests stop at the first surprise")]

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const BARE: &str = "{\n  \"cniVersion\": \"0.3.1\",\n  \"name\": \"x\",\n  \"plugins\": [\n    {\"type\": \"calico\"}\n  ]\n}\n";
const TEMPLATE: &str = r#"{"type":"linkerd-cni","kubernetes":{"kubeconfig":"__KUBECONFIG_FILEPATH__"}}"#;
const PLUGIN: &str = "#!/bin/sh\ncat >/dev/null\necho '{\"cniVersion\":\"1.0.0\",\"supportedVersions\":[\"0.3.0\",\"0.3.1\",\"1.0.0\"]}'\n";
const PEM: &str = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
const KUBECONFIG: &str = "ZZZ-linkerd-cni-kubeconfig";
/// Far above anything that is waited for.
const LIMIT: Duration = Duration::from_secs(30);

struct Node(tempfile::TempDir);

impl Node {
    fn new() -> Self {
        let node = Self(tempfile::tempdir().unwrap());
        for dir in ["host/etc/cni/net.d", "host/opt/cni/bin", "image", "sa"] {
            fs::create_dir_all(node.0.path().join(dir)).unwrap();
        }
        let plugin = node.0.path().join("image/linkerd-cni");
        fs::write(&plugin, PLUGIN).unwrap();
        fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755)).unwrap();
        for name in ["token", "ca.crt"] {
            symlink(format!("..data/{name}"), node.0.path().join("sa").join(name)).unwrap();
        }
        node
    }

    fn net(&self, name: &str) -> PathBuf {
        self.0.path().join("host/etc/cni/net.d").join(name)
    }

    fn bin(&self) -> PathBuf {
        self.0.path().join("host/opt/cni/bin/linkerd-cni")
    }

    fn rotate(&self, token: &str) {
        let root = self.0.path().join("sa");
        fs::create_dir(root.join(format!("..{token}"))).unwrap();
        fs::write(root.join(format!("..{token}")).join("token"), token).unwrap();
        fs::write(root.join(format!("..{token}")).join("ca.crt"), PEM).unwrap();
        symlink(format!("..{token}"), root.join("..data_tmp")).unwrap();
        fs::rename(root.join("..data_tmp"), root.join("..data")).unwrap();
    }

    fn command(&self, args: &[&str]) -> Command {
        let path = |name: &str| self.0.path().join(name);
        let mut command = Command::new(env!("CARGO_BIN_EXE_nobypass"));
        command
            .env_clear()
            .env("CONTAINER_MOUNT_PREFIX", path("host"))
            .env("CONTAINER_CNI_BIN_DIR", path("image"))
            .env("NOBYPASS_SERVICE_ACCOUNT_DIR", path("sa"))
            .env("CNI_NETWORK_CONFIG", TEMPLATE)
            .env("KUBERNETES_SERVICE_HOST", "fd00::1")
            .env("KUBERNETES_SERVICE_PORT", "6443")
            .arg("cni")
            .args(args);
        command
    }

    fn run(&self, args: &[&str]) -> Agent {
        let log = fs::File::options().create(true).append(true).open(self.0.path().join("log")).unwrap();
        let mut command = self.command(&["run"]);
        Agent(Some(command.args(args).stderr(log).stdout(Stdio::null()).spawn().unwrap()))
    }

    #[track_caller]
    fn until(&self, what: &str, condition: impl Fn() -> bool) {
        let start = Instant::now();
        while !condition() {
            if start.elapsed() > LIMIT {
                panic!(
                    "not within {LIMIT:?}: {what}\n{}",
                    fs::read_to_string(self.0.path().join("log")).unwrap()
                );
            }
            std::thread::park_timeout(Duration::from_millis(2));
        }
    }

    fn has_entry(&self, name: &str) -> bool {
        fs::read_to_string(self.net(name)).is_ok_and(|text| text.contains("linkerd-cni"))
    }
}

/// A process that is ended with the test.
struct Agent(Option<Child>);

impl Agent {
    fn terminate(mut self) -> ExitStatus {
        let mut child = self.0.take().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let start = Instant::now();
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status;
            }
            if start.elapsed() > LIMIT {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("did not obey SIGTERM within {LIMIT:?}");
            }
            std::thread::park_timeout(Duration::from_millis(2));
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// istio#36821, #55894, cri-o#4276: binary, then kubeconfig, then entry. linkerd2#12573: the token is followed.
/// istio#14327: an agent that is told to stop leaves everything for the next one.
/// multus-cni#1527, #1387: a config that went with its pod. consul-k8s#5062: the kubeconfig's name stays.
#[test]
fn install_mode_from_start_to_hand_over() {
    let node = Node::new();
    node.rotate("token-1");
    fs::write(node.net("10-x.conflist"), BARE).unwrap();
    let agent = node.run(&["--cni-mode=install"]);
    node.until("the entry", || {
        let entry = node.has_entry("10-x.conflist");
        // Read after the entry was seen: what it needs was there before.
        assert!(!entry || (node.bin().exists() && node.net(KUBECONFIG).exists()));
        entry
    });
    let text = fs::read_to_string(node.net("10-x.conflist")).unwrap();
    assert!(text.contains("\"/etc/cni/net.d/ZZZ-linkerd-cni-kubeconfig\""), "{text}");
    let kubeconfig = fs::read_to_string(node.net(KUBECONFIG)).unwrap();
    assert!(kubeconfig.contains("https://[fd00::1]:6443") && kubeconfig.contains("token-1"), "{kubeconfig}");
    assert_eq!(fs::metadata(node.net(KUBECONFIG)).unwrap().permissions().mode() & 0o777, 0o600);
    node.rotate("token-2");
    node.until("the new token", || fs::read_to_string(node.net(KUBECONFIG)).unwrap().contains("token-2"));
    // A cleanup while it runs would only be undone.
    let busy = node.command(&["uninstall", "--cni-mode=install"]).output().unwrap();
    assert_eq!(busy.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&busy.stderr).contains("stop it first"), "{busy:?}");
    assert!(agent.terminate().success());
    assert!(node.has_entry("10-x.conflist") && node.bin().exists() && node.net(KUBECONFIG).exists());
    let done = node.command(&["uninstall", "--cni-mode=install"]).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    assert_eq!(fs::read_to_string(node.net("10-x.conflist")).unwrap(), BARE);
    assert_eq!(names(&node.net("")), ["10-x.conflist"]);
    assert_eq!(names(&node.0.path().join("host/opt/cni/bin")), Vec::<String>::new());
}

/// linkerd2#2355: asked for, everything goes with the agent.
#[test]
fn cleaning_up_on_exit_when_asked_for() {
    let node = Node::new();
    node.rotate("token-1");
    fs::write(node.net("10-x.conflist"), BARE).unwrap();
    fs::write(node.net("20-t.conf"), r#"{"cniVersion":"0.3.0","name":"t","type":"terway"}"#).unwrap();
    let agent = node.run(&["--cni-mode=install", "--cni-cleanup-on-exit"]);
    node.until("both entries", || node.has_entry("10-x.conflist") && node.has_entry("20-t.conflist"));
    node.until("the conversion's end", || !node.net("20-t.conf").exists());
    assert!(agent.terminate().success());
    assert_eq!(
        names(&node.net("")),
        ["10-x.conflist", "20-t.conf"],
        "{}",
        fs::read_to_string(node.0.path().join("log")).unwrap()
    );
    assert_eq!(fs::read_to_string(node.net("10-x.conflist")).unwrap(), BARE);
    assert!(!node.bin().exists());
}

/// istio#55894: no entry as long as its kubeconfig cannot be written. linkerd2#10738: no network of its own either.
#[test]
fn no_entry_without_a_kubeconfig_and_no_network_of_its_own() {
    let node = Node::new();
    let agent = node.run(&["--cni-mode=install"]);
    node.until("the binary", || node.bin().exists());
    fs::write(node.net("10-x.conflist"), BARE).unwrap();
    let log = || fs::read_to_string(node.0.path().join("log")).unwrap();
    node.until("the complaint", || log().contains("lacks something") && log().contains("/sa/token"));
    assert!(!node.has_entry("10-x.conflist"));
    assert_eq!(names(&node.net("")).iter().filter(|name| !name.starts_with('.')).count(), 1);
    node.rotate("token-1");
    node.until("the entry", || node.has_entry("10-x.conflist"));
    assert!(node.net(KUBECONFIG).exists());
    assert!(agent.terminate().success());
}

/// An OS upgrade may empty the plugins' directory.
#[test]
fn a_binary_that_was_removed_comes_back() {
    let node = Node::new();
    node.rotate("token-1");
    let agent = node.run(&["--cni-mode=install"]);
    node.until("the kubeconfig", || node.net(KUBECONFIG).exists());
    fs::remove_file(node.bin()).unwrap();
    node.until("the binary", || node.bin().exists());
    assert!(agent.terminate().success());
}

/// A list whose version the plugin does not support would fail every pod with the entry.
#[test]
fn the_plugin_s_versions_are_respected() {
    let node = Node::new();
    node.rotate("token-1");
    fs::write(node.net("10-x.conflist"), BARE).unwrap();
    fs::write(node.net("20-y.conflist"), BARE.replace("0.3.1", "1.1.0")).unwrap();
    let agent = node.run(&["--cni-mode=install"]);
    node.until("the entry", || node.has_entry("10-x.conflist"));
    let log = || fs::read_to_string(node.0.path().join("log")).unwrap();
    node.until("the reason", || {
        log().contains("cniVersion 1.1.0 is not one that the plugin linkerd-cni supports")
    });
    assert!(!node.has_entry("20-y.conflist"));
    assert!(agent.terminate().success());
}

/// Guard mode beside the mesh's installer: the entry is learnt from it, and nothing else is touched.
#[test]
fn guard_mode_learns_the_entry_and_keeps_it() {
    let node = Node::new();
    let good = BARE.replace("}\n  ]", "},\n    {\"type\": \"linkerd-cni\", \"v\": 1}\n  ]");
    fs::write(node.net("10-x.conflist"), BARE).unwrap();
    let mut command = node.command(&["run", "--cni-plugin=linkerd-cni"]);
    let log = fs::File::create(node.0.path().join("log")).unwrap();
    let child = command.env_remove("CNI_NETWORK_CONFIG").stderr(log).stdout(Stdio::null()).spawn().unwrap();
    let agent = Agent(Some(child));
    fs::write(node.net("20-y.conflist"), &good).unwrap();
    node.until("the learnt entry", || fs::read_to_string(node.net("10-x.conflist")).unwrap() == good);
    fs::write(node.net("10-x.conflist"), BARE).unwrap();
    node.until("it again", || fs::read_to_string(node.net("10-x.conflist")).unwrap() == good);
    assert_eq!(fs::read_to_string(node.net("20-y.conflist")).unwrap(), good);
    assert!(agent.terminate().success());
    assert!(!node.bin().exists() && !node.net(KUBECONFIG).exists());
}

#[test]
fn wrong_environments_end_with_64() {
    let node = Node::new();
    for (name, value, text) in [
        ("CNI_NETWORK_CONFIG", "{", "CNI_NETWORK_CONFIG: the mesh entry cannot be read"),
        ("CNI_NETWORK_CONFIG", "", "CNI_NETWORK_CONFIG is not set"),
        ("KUBERNETES_SERVICE_HOST", "", "KUBERNETES_SERVICE_HOST is not set"),
        ("DEST_CNI_NET_DIR", "x", "DEST_CNI_NET_DIR=\"x\": must be an absolute path"),
    ] {
        let output = node.command(&["run", "--cni-mode=install"]).env(name, value).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(64), "{err}");
        assert!(err.contains(text), "{err}");
    }
    let output = node.command(&["run", "--log", "a=b=c"]).output().unwrap();
    assert_eq!(output.status.code(), Some(64));
    assert!(node.command(&["run", "--cni-mode=off"]).status().unwrap().success());
}

/// What a `GET` of the agent's socket answers, head and body.
fn get(socket: &Path, path: &str) -> Option<String> {
    use std::io::{Read as _, Write as _};
    let mut stream = std::os::unix::net::UnixStream::connect(socket).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: nobypass\r\nconnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

/// Alone it is a pod of its own, which kubelet and Prometheus ask; `cni status` tells who wrote what.
#[test]
fn the_half_alone_is_asked_over_http_and_by_cni_status() {
    let node = Node::new();
    node.rotate("token-1");
    let socket = node.0.path().join("cni.sock");
    let shown = socket.to_str().unwrap();
    let agent = node.run(&["--cni-mode=install", "--socket", shown, "--metrics-addr=127.0.0.1:0"]);
    node.until("an answer", || get(&socket, "/livez").is_some_and(|answer| answer.contains("200 OK")));
    let waiting = get(&socket, "/readyz").unwrap();
    assert!(waiting.contains("503") && waiting.contains("cni: "), "{waiting}");

    fs::write(node.net("10-x.conflist"), BARE).unwrap();
    node.until("readiness", || get(&socket, "/readyz").is_some_and(|answer| answer.contains("200 OK")));
    let metrics = get(&socket, "/metrics").unwrap();
    for line in ["nobypass_cni_protected 1", "nobypass_cni_patches_total{result=\"patched\"} 1"] {
        assert!(metrics.contains(line), "{line} not in\n{metrics}");
    }
    let status = || {
        let output = node.command(&["status", "--socket", shown]).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, text) = status();
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("agent         protected for") && text.contains("1 writes"), "{text}");
    assert!(text.contains("runtime       nobody to ask"), "{text}");
    let by = |text: &str| {
        let line = text.lines().find(|line| line.starts_with("10-x.conflist")).unwrap().to_owned();
        line.split_whitespace().rev().nth(1).unwrap().to_owned()
    };
    assert_eq!(by(&text), "nobypass", "{text}");
    // The mesh's own installer writes what is right already.
    let good = fs::read_to_string(node.net("10-x.conflist")).unwrap().replace("\"x\"", "\"y\"");
    fs::write(node.net("10-x.conflist"), good).unwrap();
    node.until("the other writer", || by(&status().1) == "other");

    let output = node.command(&["status", "-o", "json", "--socket", shown]).output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["agent"]["guard"]["protection"], "protected", "{json}");
    assert!(agent.terminate().success());
    assert!(!socket.exists(), "the socket goes with the agent");
    let (code, text) = status();
    assert_eq!((code, text.contains("no agent runs here")), (Some(0), true), "{text}");
}
