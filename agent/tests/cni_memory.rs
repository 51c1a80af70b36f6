//! What outlives the agent: the learned entry, unless its mesh went meanwhile, and entries of others that were replaced.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests stop at the first surprise")]

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nobypass::cni::entry::{Place, WantedEntry};
use nobypass::cni::guard::{Config, Guard, Want};
use nobypass::cni::memory::{NAME, Remember};
use nobypass::cni::metrics::Metrics;
use nobypass::cni::runtime::equipped::Places;
use nobypass::cni::swap::{Seam, Step};
use nobypass::cni::uninstall::{Removal, Report, Which, uninstall};

/// Far above anything that is waited for.
const LIMIT: Duration = Duration::from_secs(30);
const FILE: &str = "10-x.conflist";

struct Node(tempfile::TempDir);

fn entry(version: u32) -> String {
    format!(r#"{{"type":"linkerd-cni","v":{version},"kubernetes":{{"kubeconfig":"/etc/cni/net.d/ZZZ-k"}}}}"#)
}

fn list(network: &str, entries: &[&str]) -> String {
    let entries: String = entries.iter().map(|entry| format!(",\n    {entry}")).collect();
    format!(
        "{{\n  \"cniVersion\": \"0.4.0\",\n  \"name\": \"{network}\",\n  \"plugins\": [\n    {{\"type\":\"calico\"}}{entries}\n  ]\n}}\n"
    )
}

impl Node {
    fn new() -> Self {
        let node = Self(tempfile::tempdir().unwrap());
        fs::create_dir(node.net("")).unwrap();
        fs::create_dir(node.0.path().join("bin")).unwrap();
        node.install_mesh();
        node
    }

    fn net(&self, name: &str) -> PathBuf {
        self.0.path().join("net.d").join(name)
    }

    fn binary(&self) -> PathBuf {
        self.0.path().join("bin/linkerd-cni")
    }

    fn install_mesh(&self) {
        fs::write(self.net("ZZZ-k"), "kubeconfig").unwrap();
        fs::write(self.binary(), "binary").unwrap();
        fs::set_permissions(self.binary(), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// In the order of Linkerd's installer, after the entry.
    fn uninstall_mesh(&self) {
        fs::remove_file(self.net("ZZZ-k")).unwrap();
        fs::remove_file(self.binary()).unwrap();
    }

    /// As installers with manners do.
    fn put(&self, name: &str, text: &str) {
        fs::write(self.net(".owner"), text).unwrap();
        fs::rename(self.net(".owner"), self.net(name)).unwrap();
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.net(name)).unwrap_or_default()
    }

    fn guard(&self, want: Want, remember: Remember, seam: Option<Arc<dyn Seam>>) -> Guard {
        let config = Config {
            host: "/etc/cni/net.d".into(),
            grace: Duration::from_millis(20),
            heartbeat: Duration::from_millis(20),
            remember,
            seam,
            ..Config::new(self.net(""))
        };
        Guard::start(config, want, Metrics::default()).unwrap()
    }

    fn learning(&self) -> Guard {
        let places =
            Places { dir: self.net(""), host: "/etc/cni/net.d".into(), bin_dir: self.0.path().join("bin") };
        let want = Want::Learn { plugins: vec!["linkerd-cni".to_owned()], place: Place::Last };
        self.guard(want, Remember::Learned(places), None)
    }

    fn installing(&self, version: u32, seam: Option<Arc<dyn Seam>>) -> Guard {
        let wanted = WantedEntry::from_text(&entry(version), Place::Last).unwrap();
        self.guard(Want::Entry(wanted), Remember::Replaced, seam)
    }

    async fn uninstall(&self, version: u32) -> Report {
        let which = Which::Exactly(WantedEntry::from_text(&entry(version), Place::Last).unwrap());
        let removal = Removal {
            dir: self.net(""),
            host: "/etc/cni/net.d".into(),
            which,
            kubeconfig: Some("ZZZ-k".into()),
            bin_dir: Some(self.0.path().join("bin")),
            grace: Duration::from_millis(1),
        };
        uninstall(&removal).await.unwrap()
    }

    #[track_caller]
    fn until(&self, what: &str, condition: impl Fn() -> bool) {
        let start = Instant::now();
        while !condition() {
            if start.elapsed() > LIMIT {
                panic!("not within {LIMIT:?}: {what}: {}, state {}", self.text(FILE), self.text(NAME));
            }
            std::thread::park_timeout(Duration::from_millis(2));
        }
    }

    #[track_caller]
    fn until_is(&self, what: &str, name: &str, text: &str) {
        self.until(what, || self.text(name) == text);
    }
}

/// linkerd2#12490, istio#55968: the primary has written its config anew while no agent was there.
/// linkerd2#4789, #7855, #2970: a reboot.
#[test]
fn linkerd2_12490_a_learned_entry_is_put_back_after_a_restart() {
    let node = Node::new();
    node.put(FILE, &list("x", &[&entry(1)]));
    let guard = node.learning();
    node.until("it is remembered", || node.text(NAME).contains("learned"));
    assert_eq!(fs::metadata(node.net(NAME)).unwrap().permissions().mode() & 0o777, 0o600);
    guard.stop();
    node.put(FILE, &list("x", &[]));
    let guard = node.learning();
    node.until_is("the entry", FILE, &list("x", &[&entry(1)]));
    guard.stop();
    // Not even a config was there.
    fs::remove_file(node.net(FILE)).unwrap();
    let guard = node.learning();
    node.put("20-y.conflist", &list("y", &[]));
    node.until_is("the entry in a new file", "20-y.conflist", &list("y", &[&entry(1)]));
    guard.stop();
    // A damaged memory is none, and disturbs nothing.
    fs::write(node.net(NAME), "{\"learned\": \"{").unwrap();
    let guard = node.learning();
    node.put(FILE, &list("x", &[]));
    node.until_is("what a config has", FILE, &list("x", &[&entry(1)]));
    guard.stop();
}

#[test]
fn what_the_installer_changed_while_no_agent_was_there_counts() {
    for (first, second) in [(1, 2), (2, 1)] {
        let node = Node::new();
        node.put("10-x.conflist", &list("x", &[&entry(1)]));
        let guard = node.learning();
        node.until("it is remembered", || node.text(NAME).contains("learned"));
        guard.stop();
        // It has got to one of the files.
        node.put("10-x.conflist", &list("x", &[&entry(first)]));
        node.put("20-y.conflist", &list("y", &[&entry(second)]));
        let guard = node.learning();
        node.until_is("the newer one", "10-x.conflist", &list("x", &[&entry(2)]));
        node.until_is("the newer one", "20-y.conflist", &list("y", &[&entry(2)]));
        node.until("it is remembered", || node.text(NAME).contains("\\\"v\\\":2"));
        guard.stop();
    }
}

#[test]
fn an_entry_whose_mesh_was_uninstalled_while_no_agent_was_there_stays_away() {
    for gone in ["kubeconfig", "binary"] {
        let node = Node::new();
        node.put(FILE, &list("x", &[&entry(1)]));
        let guard = node.learning();
        node.until("it is remembered", || node.text(NAME).contains("learned"));
        guard.stop();
        node.put(FILE, &list("x", &[]));
        fs::remove_file(if gone == "binary" { node.binary() } else { node.net("ZZZ-k") }).unwrap();
        let guard = node.learning();
        node.until("it is forgotten", || !node.net(NAME).exists());
        // Until now nothing was written, and from now on there is nothing to write.
        assert_eq!(node.text(FILE), list("x", &[]), "{gone}");
        // Installed anew, the entry is what its installer says.
        node.install_mesh();
        node.put(FILE, &list("x", &[&entry(2)]));
        node.until("the new one", || node.text(NAME).contains("\\\"v\\\":2"));
        guard.stop();
    }
}

/// The entry, then kubeconfig and binary, as all installers do: the guard puts the entry back once, since a primary might
/// have written it away, but an entry without its files would fail every pod.
#[test]
fn an_installer_that_leaves_the_node_is_not_fought() {
    let node = Node::new();
    node.put(FILE, &list("x", &[&entry(1)]));
    let guard = node.learning();
    node.until("it is remembered", || node.text(NAME).contains("learned"));
    node.put(FILE, &list("x", &[]));
    node.until_is("the entry is back", FILE, &list("x", &[&entry(1)]));
    node.uninstall_mesh();
    node.until_is("the entry is gone", FILE, &list("x", &[]));
    node.until("it is forgotten", || !node.net(NAME).exists());
    // And it comes again, with the same entry.
    node.install_mesh();
    node.until("the files are seen", || {
        node.put(FILE, &list("x", &[&entry(1)]));
        node.text(NAME).contains("learned")
    });
    node.put(FILE, &list("x", &[]));
    node.until_is("it is kept again", FILE, &list("x", &[&entry(1)]));
    guard.stop();
}

/// A binary that is lost is no uninstallation: pods that fail are better than pods that bypass.
#[test]
fn an_entry_that_nobody_took_out_stays_without_its_binary() {
    let node = Node::new();
    node.put(FILE, &list("x", &[&entry(1)]));
    let guard = node.learning();
    node.until("it is remembered", || node.text(NAME).contains("learned"));
    node.uninstall_mesh();
    let ticks = Instant::now() + Duration::from_millis(300);
    node.until("some looks at the files", || {
        assert_eq!(node.text(FILE), list("x", &[&entry(1)]));
        Instant::now() > ticks
    });
    guard.stop();
    assert!(node.text(NAME).contains("learned"));
}

#[tokio::test]
async fn a_replaced_entry_comes_back_when_nobypass_is_uninstalled() {
    let node = Node::new();
    let theirs = r#"{"type":"linkerd-cni",  "theirs": 1.50, "v": 7}"#;
    let (one, two) = (list("x", &[theirs]), list("y", &[]));
    node.put(FILE, &one);
    node.put("20-y.conflist", &two);
    // The second agent has a newer template: the first one's entry is not somebody else's.
    for version in [1, 2] {
        let guard = node.installing(version, None);
        let has = |name: &str| node.text(name).contains(&format!("\"v\":{version}"));
        node.until("the entries", || has(FILE) && has("20-y.conflist"));
        guard.stop();
    }
    assert!(!node.text(FILE).contains("theirs"));
    let report = node.uninstall(2).await;
    assert_eq!((node.text(FILE), node.text("20-y.conflist")), (one.clone(), two));
    assert_eq!((&*report.given_back, &*report.cleaned), (&[FILE.into()][..], &["20-y.conflist".into()][..]));
    assert!(report.complete(), "{report:?}");
    assert!(node.binary().exists() && node.net("ZZZ-k").exists(), "the entry that is back needs them");
    assert!(!node.net(NAME).exists());
    // Once more, there is nothing to give back or to remove.
    node.uninstall(2).await;
    assert_eq!(node.text(FILE), one);
}

#[tokio::test]
async fn an_owner_who_wrote_its_config_without_the_entry_since_gets_that_one() {
    let node = Node::new();
    node.put(FILE, &list("x", &[&entry(9)]));
    let guard = node.installing(1, None);
    node.until_is("ours", FILE, &list("x", &[&entry(1)]));
    node.put(FILE, &list("x", &[]));
    node.until_is("ours", FILE, &list("x", &[&entry(1)]));
    guard.stop();
    let report = node.uninstall(1).await;
    assert_eq!(node.text(FILE), list("x", &[]));
    assert!(report.given_back.is_empty() && report.complete() && !node.binary().exists(), "{report:?}");
}

/// Where it cannot be kept, it is not replaced.
#[tokio::test]
async fn an_entry_that_cannot_be_kept_is_not_replaced() {
    let node = Node::new();
    let theirs = list("x", &[&entry(9)]);
    node.put(FILE, &theirs);
    fs::create_dir(node.net(NAME)).unwrap();
    let guard = node.installing(1, None);
    let refused = async || guard.snapshot().await.unwrap().files.iter().any(|file| file.why.is_some());
    let start = Instant::now();
    while !refused().await {
        assert!(start.elapsed() < LIMIT, "never refused: {}", node.text(FILE));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    guard.stop();
    assert_eq!(node.text(FILE), theirs);
}

/// Whatever happens in the middle of a patch: nothing of the other writer's is lost.
#[tokio::test]
async fn a_failure_at_any_system_call_loses_no_replaced_entry() {
    for step in Step::ALL {
        let node = Node::new();
        let theirs = list("x", &[&entry(9)]);
        node.put(FILE, &theirs);
        let failed = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&failed);
        let seam = move |at: Step| {
            if at == step {
                seen.store(true, Ordering::Relaxed);
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            Ok(())
        };
        let guard = node.installing(1, Some(Arc::new(seam)));
        node.until("a patch or a failure", || {
            failed.load(Ordering::Relaxed) || node.text(FILE) == list("x", &[&entry(1)])
        });
        guard.stop();
        node.uninstall(1).await;
        assert_eq!(node.text(FILE), theirs, "{step:?}");
    }
}
