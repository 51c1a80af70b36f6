//! The CNI half against a real container runtime: what it loads, when, and what pods get from it.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests stop at the first surprise")]
#![expect(clippy::print_stderr, reason = "a test tells its figures")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use k8s_cri::v1 as api;
use nobypass_testkit::node::{Containerd, Cri, EXT_PORT, EXT4, Node, PodSpec};
use nobypass_testkit::proc::{self, Proc};
use nobypass_testkit::wait;
use serde_json::Value;

/// The same tests with each containerd: Debian's of this machine, and newer ones that are kept unpacked.
macro_rules! with_each_containerd {
    ($($test:ident),* $(,)?) => {
        with_each_containerd!(@one machine, Containerd::Machine, $($test),*);
        with_each_containerd!(@one v1_7, Containerd::V1_7, $($test),*);
        with_each_containerd!(@one v2, Containerd::V2, $($test),*);
    };
    (@one $name:ident, $which:expr, $($test:ident),*) => {
        mod $name {
            use super::Containerd;
            $(
                #[test]
                fn $test() {
                    if let Some(node) = $which.node().unwrap() {
                        super::$test(node);
                    }
                }
            )*
        }
    };
}

with_each_containerd!(
    a_pod_made_when_the_node_says_protected_has_the_plugin_whoever_wrote_the_config,
    fifty_rewrites_are_each_loaded_and_the_network_is_never_lost,
    a_runtime_that_missed_a_change_is_woken,
    an_entry_that_was_learnt_outlives_sigterm_and_goes_when_uninstalled,
    nothing_less_than_the_runtimes_word_makes_the_node_protected,
);

#[test]
fn with_a_drop_in_file_even_what_a_primary_writes_at_boot_is_protected() {
    if let Some(node) = Containerd::V2.node().unwrap() {
        drop_in(node);
    }
}

#[test]
fn a_runtime_that_reads_no_drop_in_files_gets_the_entry_in_the_list() {
    for which in [Containerd::Machine, Containerd::V1_7] {
        if let Some(node) = which.node().unwrap() {
            no_drop_in(node);
        }
    }
}

const PROTECTED: &str = "protection of new pods changed state=\"protected\"";

fn nobypass(node: &Node, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nobypass"));
    command.env_clear().arg("cni").args(words).arg("--cni-dir").arg(node.cni_net_dir());
    command
}

/// A running `nobypass cni run`, killed when dropped.
struct Half {
    proc: Proc,
    log: PathBuf,
}

impl Half {
    /// Keeps the node's mesh entry in the node's directory.
    fn start(node: &Node) -> Self {
        let entry = node.base_dir().join("entry.json");
        fs::write(&entry, node.mesh_entry().to_string()).unwrap();
        let mut command = nobypass(node, &["run", "--log=nobypass=debug"]);
        command.arg("--cni-entry").arg(entry).arg("--cri-endpoint").arg(node.cri_socket());
        Self::spawn(node, command)
    }

    /// In place of the mesh's installer, with a drop-in file.
    fn install(node: &Node) -> Self {
        let image = node.base_dir().join("image");
        if !image.exists() {
            let account = node.base_dir().join("account");
            fs::create_dir(&image).unwrap();
            fs::create_dir(&account).unwrap();
            fs::copy(nobypass_testkit::bin("cni-mesh").unwrap(), image.join("linkerd-cni")).unwrap();
            fs::write(account.join("token"), "token").unwrap();
            let pem = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
            fs::write(account.join("ca.crt"), pem).unwrap();
        }
        let mut command =
            nobypass(node, &["run", "--log=nobypass=debug", "--cni-mode=install", "--cni-drop-in"]);
        command
            .env("CNI_NETWORK_CONFIG", node.mesh_entry().to_string())
            .env("CONTAINER_CNI_BIN_DIR", &image)
            .env("NOBYPASS_SERVICE_ACCOUNT_DIR", node.base_dir().join("account"))
            .env("KUBERNETES_SERVICE_HOST", "192.0.2.1")
            .arg("--cni-bin-dir")
            .arg(node.cni_bin_dir())
            .arg("--cri-endpoint")
            .arg(node.cri_socket());
        Self::spawn(node, command)
    }

    fn spawn(node: &Node, mut command: Command) -> Self {
        let log = node.base_dir().join("half.log");
        let file = fs::File::create(&log).unwrap();
        Self {
            proc: proc::spawn({
                command.stderr(file);
                command
            })
            .unwrap(),
            log,
        }
    }

    fn log(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap();
        assert!(!log.contains("panicked"), "{log}");
        log
    }

    fn count(&self, text: &str) -> usize {
        self.log().matches(text).count()
    }

    #[track_caller]
    fn until<T>(&self, what: &str, poll: impl FnMut() -> Option<T>) -> T {
        let found = wait::until(what, wait::HANG, poll);
        found.unwrap_or_else(|error| panic!("{error}; the log:\n{}", self.log()))
    }

    /// Does something that takes the protection away or may have, and waits until it is back.
    #[track_caller]
    fn protected_again(&self, what: &str, change: impl FnOnce()) {
        let before = self.count(PROTECTED);
        change();
        self.until(&format!("protection after: {what}"), || (self.count(PROTECTED) > before).then_some(()));
    }

    fn terminate(mut self) {
        self.proc.terminate().unwrap();
        let status = self.proc.wait(wait::HANG).unwrap_or_else(|error| panic!("{error}: {}", self.log()));
        assert!(status.success(), "{status}: {}", self.log());
    }
}

fn active(node: &Node) -> PathBuf {
    node.cni_net_dir().join("10-node.conflist")
}

/// The primary CNI's list, told apart by `serial`; without the mesh's entry.
fn bare(node: &Node, serial: usize) -> String {
    numbered(&node.conflist(&[]), serial)
}

/// The same as the mesh's own installer would leave it.
fn meshed(node: &Node, serial: usize) -> String {
    numbered(&node.conflist(&[node.mesh_entry()]), serial)
}

fn numbered(list: &str, serial: usize) -> String {
    let mut list: Value = serde_json::from_str(list).unwrap();
    list["serial"] = serial.into();
    format!("{list:#}\n")
}

/// As most primaries write: beside it, then renamed over it.
fn rename_over(path: &Path, text: &str) {
    let temporary = path.with_file_name(".primary.tmp");
    fs::write(&temporary, text).unwrap();
    fs::rename(temporary, path).unwrap();
}

/// Number and mesh entries of what the runtime has loaded.
fn loaded(node: &Node) -> Option<(u64, usize)> {
    let list = node.loaded_conflist().ok()?;
    let plugins = list["plugins"].as_array()?;
    let own = plugins.iter().filter(|plugin| plugin["type"] == "linkerd-cni").count();
    Some((list["serial"].as_u64()?, own))
}

/// A pod made now runs the plugin and is redirected to its proxy.
#[track_caller]
fn pod_is_meshed(node: &Node, name: &str) {
    let pod = node.run_pod(PodSpec::meshed(name).unwrap()).unwrap();
    let calls = fs::read_to_string(node.mesh_log()).unwrap_or_default();
    let add = |line: &str| line.contains("\"ADD\"") && line.contains(&format!("\"pod\":\"{name}\""));
    assert_eq!(calls.lines().filter(|line| add(line)).count(), 1, "{name}: {calls}");
    node.wait_for_log(&pod, "linkerd-proxy", |line| line.contains("\"ready\":true")).unwrap();
    assert_eq!(node.traffic(&pod, "app", &["tcp4", EXT4, EXT_PORT]).unwrap().saw(), "mesh", "{name}");
    node.remove_pod(&pod).unwrap();
}

fn a_pod_made_when_the_node_says_protected_has_the_plugin_whoever_wrote_the_config(node: Node) {
    let half = Half::start(&node);
    let path = active(&node);
    half.protected_again("the first config", || rename_over(&path, &bare(&node, 1)));
    assert_eq!(loaded(&node), Some((1, 1)));
    pod_is_meshed(&node, "first");
    half.protected_again("a rename", || rename_over(&path, &bare(&node, 2)));
    assert_eq!(loaded(&node), Some((2, 1)));
    pod_is_meshed(&node, "renamed");
    half.protected_again("a write in place", || fs::write(&path, bare(&node, 3)).unwrap());
    assert_eq!(loaded(&node), Some((3, 1)));
    pod_is_meshed(&node, "in-place");
    half.protected_again("delete and create", || {
        fs::remove_file(&path).unwrap();
        fs::write(&path, bare(&node, 4)).unwrap();
    });
    assert_eq!(loaded(&node), Some((4, 1)));
    pod_is_meshed(&node, "created");
    // The very bytes that were there before the patch: the runtime has seen them without the entry.
    half.protected_again("the same again", || rename_over(&path, &bare(&node, 4)));
    assert_eq!(loaded(&node), Some((4, 1)));
    pod_is_meshed(&node, "same");
    half.terminate();
    node.stop().unwrap();
}

/// Asks all the time; the second value is the number of answers.
fn worst_status(socket: &Path, done: &AtomicBool) -> (Vec<String>, usize) {
    let cri = Cri::new(socket).unwrap();
    let (mut bad, mut answers) = (Vec::new(), 0);
    while !done.load(Ordering::Relaxed) {
        let mut client = cri.runtime();
        let request = api::StatusRequest { verbose: true };
        let status = cri.call("Status", async move { client.status(request).await }).unwrap();
        answers += 1;
        std::thread::park_timeout(Duration::from_micros(500));
        let conditions = status.status.unwrap().conditions;
        let network = conditions.into_iter().find(|condition| condition.r#type == "NetworkReady").unwrap();
        if !network.status {
            bad.push(format!("{}, load: {:?}", network.message, status.info.get("lastCNILoadStatus")));
        }
    }
    (bad, answers)
}

fn fifty_rewrites_are_each_loaded_and_the_network_is_never_lost(node: Node) {
    let half = Half::start(&node);
    half.protected_again("the first config", || rename_over(&active(&node), &bare(&node, 0)));
    let done = AtomicBool::new(false);
    let socket = node.cri_socket();
    let (times, (bad, answers)) = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| worst_status(&socket, &done));
        let times: Vec<Duration> = (1..=50)
            .map(|serial| {
                let text = bare(&node, serial);
                let start = Instant::now();
                rename_over(&active(&node), &text);
                while loaded(&node) != Some((serial as u64, 1)) {
                    assert!(start.elapsed() < wait::HANG, "{serial}: {:?}\n{}", loaded(&node), half.log());
                    std::thread::park_timeout(Duration::from_millis(1));
                }
                start.elapsed()
            })
            .collect();
        done.store(true, Ordering::Relaxed);
        (times, watcher.join().unwrap())
    });
    assert_eq!(bad, Vec::<String>::new(), "of {answers} answers");
    assert!(answers >= 50, "only {answers} answers");
    let mut sorted = times;
    sorted.sort();
    eprintln!("rewrite to loaded: p50 {:?}, p99 {:?}, {answers} answers", sorted[25], sorted[49]);
    pod_is_meshed(&node, "afterwards");
    half.terminate();
    node.stop().unwrap();
}

/// containerd#11711: a file that is renamed or linked in from elsewhere is not noticed by containerd.
fn a_runtime_that_missed_a_change_is_woken(node: Node) {
    let path = active(&node);
    let aside = node.base_dir().join("aside");
    // Nobody wakes it here: what follows is not noticed by itself.
    rename_over(&path, &bare(&node, 1));
    wait::until("the first list", wait::HANG, || (loaded(&node) == Some((1, 0))).then_some(())).unwrap();
    fs::write(&aside, meshed(&node, 2)).unwrap();
    fs::rename(&aside, &path).unwrap();
    let later = Instant::now() + Duration::from_millis(300);
    wait::until("a while", wait::HANG, || {
        assert_eq!(loaded(&node), Some((1, 0)), "this runtime notices such files: the test is void");
        (Instant::now() > later).then_some(())
    })
    .unwrap();

    let half = Half::start(&node);
    half.until("protection", || (half.count(PROTECTED) == 1).then_some(()));
    assert_eq!(loaded(&node), Some((2, 1)));
    // The agent's mark in the directory has woken it already, or a poke.
    let woken = half.count("waking the container runtime");
    pod_is_meshed(&node, "woken");

    // While it runs, with the entry in it: nothing to patch, only to wake.
    fs::write(&aside, meshed(&node, 3)).unwrap();
    fs::rename(&aside, &path).unwrap();
    half.until("the third list", || (loaded(&node) == Some((3, 1))).then_some(()));
    assert!(half.count("waking the container runtime") > woken, "{}", half.log());

    // No network, then a hard link.
    fs::remove_file(&path).unwrap();
    wait::until("no network", wait::HANG, || node.loaded_conflist().is_err().then_some(())).unwrap();
    fs::write(&aside, meshed(&node, 4)).unwrap();
    half.protected_again("a hard link", || fs::hard_link(&aside, &path).unwrap());
    assert_eq!(loaded(&node), Some((4, 1)));
    assert_eq!(fs::read_to_string(&path).unwrap(), meshed(&node, 4), "not a byte was changed");
    let left = fs::read_dir(node.cni_net_dir()).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = left.filter(|name| !name.to_string_lossy().starts_with(".nobypass")).collect();
    assert_eq!(left, ["10-node.conflist"]);
    pod_is_meshed(&node, "linked");
    half.terminate();
    node.stop().unwrap();
}

fn an_entry_that_was_learnt_outlives_sigterm_and_goes_when_uninstalled(node: Node) {
    let path = active(&node);
    let mut learning = nobypass(&node, &["run"]);
    learning.arg("--cri-endpoint").arg(node.cri_socket());
    let half = Half::spawn(&node, learning);
    half.protected_again("the mesh's installer", || rename_over(&path, &meshed(&node, 1)));
    half.protected_again("the primary", || rename_over(&path, &bare(&node, 2)));
    assert_eq!(loaded(&node), Some((2, 1)));
    half.terminate();
    assert_eq!(loaded(&node), Some((2, 1)));
    pod_is_meshed(&node, "between");

    let entry = node.base_dir().join("entry.json");
    fs::write(&entry, node.mesh_entry().to_string()).unwrap();
    let mut uninstall = nobypass(&node, &["uninstall", "--cni-mode=install"]);
    // The plugin itself is the node's.
    uninstall.arg("--cni-entry").arg(&entry).arg("--cni-bin-dir").arg(node.base_dir().join("pods"));
    let ended = proc::output(uninstall, "", wait::HANG).unwrap();
    assert!(ended.status.success(), "{ended:?}");
    assert_eq!(fs::read_to_string(&path).unwrap(), bare(&node, 2));
    wait::until("the runtime to follow", wait::HANG, || (loaded(&node) == Some((2, 0))).then_some(()))
        .unwrap();
    node.stop().unwrap();
}

fn nothing_less_than_the_runtimes_word_makes_the_node_protected(node: Node) {
    let other = node.base_dir().join("other.d");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("10-node.conflist"), meshed(&node, 1)).unwrap();
    let run = |endpoint: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nobypass"));
        command.env_clear().args(["cni", "run", "--cni-dir"]).arg(&other).arg("--cri-endpoint").arg(endpoint);
        command.arg("--socket").arg(node.base_dir().join("cni.sock"));
        Half::spawn(&node, command)
    };
    let status = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nobypass"));
        command.env_clear().args(["cni", "status", "--cni-dir"]).arg(&other);
        let output = command.arg("--socket").arg(node.base_dir().join("cni.sock")).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    // It reads another directory.
    node.write_conflist(false).unwrap();
    let half = run(&node.cri_socket());
    half.until("the reason", || (half.count("read another directory") == 1).then_some(()));
    assert_eq!(half.count(PROTECTED), 0, "{}", half.log());
    let (code, text) = status();
    assert_eq!(code, Some(1), "files are right, the runtime's word is not: {text}");
    assert!(text.contains("has NOT loaded the entry: it reads /"), "{text}");
    half.terminate();
    // It does not answer, then it does.
    let late = node.base_dir().join("late.sock");
    let half = run(&late);
    half.until("the complaint", || (half.count("cannot be asked") == 1).then_some(()));
    assert!(half.log().contains("late.sock") && half.count(PROTECTED) == 0, "{}", half.log());
    rename_over(&active(&node), &meshed(&node, 2));
    wait::until("the list", wait::HANG, || (loaded(&node) == Some((2, 1))).then_some(())).unwrap();
    std::os::unix::fs::symlink(node.cri_socket(), &late).unwrap();
    half.protected_again("the socket", || {});
    half.terminate();
    node.stop().unwrap();
}

/// What the runtime runs for a new pod, drop-in files included.
fn runs(node: &Node) -> Vec<String> {
    let mut client = node.cri().runtime();
    let request = api::StatusRequest { verbose: true };
    let status = node.cri().call("Status", async move { client.status(request).await }).unwrap();
    let info: Value = serde_json::from_str(&status.info["cniconfig"]).unwrap();
    let networks = info["Networks"].as_array().cloned().unwrap_or_default();
    let network = networks.iter().find(|network| network["IFName"] != "lo");
    let plugins = network.and_then(|network| network["Config"]["Plugins"].as_array());
    let kind = |plugin: &Value| plugin["Network"]["type"].as_str().map(str::to_owned);
    plugins.into_iter().flatten().filter_map(kind).collect()
}

/// containernetworking/cni#1164, #928: only the runtime knows whether it reads such files. istio#55968, antrea#3974: what a
/// primary writes before any agent runs.
fn drop_in(node: Node) {
    let path = active(&node);
    let file = node.cni_net_dir().join("node-net/zz-nobypass.conf");
    // The mesh's own installer was here: its entry and ours would run the plugin twice.
    let mut theirs = node.mesh_entry();
    theirs["theirs"] = true.into();
    rename_over(&path, &numbered(&node.conflist(std::slice::from_ref(&theirs)), 1));
    let half = Half::install(&node);
    half.until("protection", || (half.count(PROTECTED) == 1).then_some(()));
    assert_eq!(fs::read_to_string(&path).unwrap().matches("linkerd-cni").count(), 0, "out of the list");
    assert_eq!(runs(&node), ["bridge", "linkerd-cni"]);
    pod_is_meshed(&node, "installed");
    // A primary writes, and not a byte of it is touched.
    rename_over(&path, &bare(&node, 2));
    half.until("the second list", || (loaded(&node) == Some((2, 0))).then_some(()));
    assert_eq!(runs(&node), ["bridge", "linkerd-cni"]);
    pod_is_meshed(&node, "rewritten");
    assert_eq!(fs::read_to_string(&path).unwrap(), bare(&node, 2));
    half.terminate();
    // No agent, as at boot.
    rename_over(&path, &bare(&node, 3));
    wait::until("the third list", wait::HANG, || (loaded(&node) == Some((3, 0))).then_some(())).unwrap();
    pod_is_meshed(&node, "boot");
    // Without its drop-in file the runtime's word is what counts, and the file comes back.
    fs::remove_file(&file).unwrap();
    rename_over(&path, &bare(&node, 4));
    wait::until("the list alone", wait::HANG, || (runs(&node) == ["bridge"]).then_some(())).unwrap();
    let half = Half::install(&node);
    half.until("protection", || (half.count(PROTECTED) == 1).then_some(()));
    assert_eq!(runs(&node), ["bridge", "linkerd-cni"]);
    let status = nobypass(&node, &["status"]).output().unwrap();
    assert!(status.status.success(), "{status:?}");
    half.terminate();
    let mut uninstall = nobypass(&node, &["uninstall", "--cni-mode=install"]);
    uninstall.env("CNI_NETWORK_CONFIG", node.mesh_entry().to_string());
    uninstall.arg("--cni-bin-dir").arg(node.cni_bin_dir());
    let ended = proc::output(uninstall, "", wait::HANG).unwrap();
    assert!(ended.status.success() && !file.exists() && !file.parent().unwrap().exists(), "{ended:?}");
    // The mesh's own entry is back, and with it the plugin that it needs.
    wait::until("the mesh's own entry", wait::HANG, || (loaded(&node) == Some((4, 1))).then_some(()))
        .unwrap();
    assert!(fs::read_to_string(&path).unwrap().contains("\"theirs\": true"));
    assert_eq!(runs(&node), ["bridge", "linkerd-cni"]);
    pod_is_meshed(&node, "given-back");
    node.stop().unwrap();
}

fn no_drop_in(node: Node) {
    let half = Half::install(&node);
    half.protected_again("the first config", || rename_over(&active(&node), &bare(&node, 1)));
    assert_eq!(loaded(&node), Some((1, 1)));
    assert!(half.log().contains("containerd reads drop-in files from 2.1 on"), "{}", half.log());
    assert!(!node.cni_net_dir().join("node-net").exists());
    half.terminate();
    node.stop().unwrap();
}
