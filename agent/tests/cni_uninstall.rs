//! Uninstalling against real directories: what goes, what stays, in any state a node may be in.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests stop at the first surprise")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use nobypass::cni::entry::{Place, WantedEntry};
use nobypass::cni::plan::{FileKind, Options, Plan, plan};
use nobypass::cni::uninstall::{Removal, Report, UninstallError, Which, uninstall};

const ENTRY: &str = r#"{"type":"linkerd-cni","kubernetes":{"kubeconfig":"/etc/cni/net.d/ZZZ-k"}}"#;
const BARE: &str =
    "{\n  \"name\": \"x\",\n  \"plugins\": [\n    {\n      \"type\": \"calico\"\n    }\n  ]\n}\n";
const CONF: &str = "{\"cniVersion\":\"0.3.0\",\"name\":\"terway\",\"type\":\"terway\"}\n";

fn wanted() -> WantedEntry {
    WantedEntry::from_text(ENTRY, Place::Last).unwrap()
}

fn patched(kind: FileKind, text: &str) -> Vec<u8> {
    match plan(kind, text.as_bytes(), &wanted(), Options::default()) {
        Plan::Write(bytes) | Plan::Convert(bytes) => bytes.to_vec(),
        other => panic!("{other:?}"),
    }
}

struct Node(tempfile::TempDir);

impl Node {
    fn new() -> Self {
        let node = Self(tempfile::tempdir().unwrap());
        fs::create_dir(node.net()).unwrap();
        fs::create_dir(node.bin()).unwrap();
        fs::write(node.net().join("ZZZ-k"), "kubeconfig").unwrap();
        fs::write(node.bin().join("linkerd-cni"), "binary").unwrap();
        fs::write(node.bin().join("calico"), "binary").unwrap();
        node
    }

    fn net(&self) -> std::path::PathBuf {
        self.0.path().join("net.d")
    }

    fn bin(&self) -> std::path::PathBuf {
        self.0.path().join("bin")
    }

    fn put(&self, name: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.net().join(name), bytes).unwrap();
    }

    fn names(&self, dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    async fn uninstall(&self, which: Which) -> Report {
        uninstall(&self.removal(which)).await.unwrap()
    }

    fn removal(&self, which: Which) -> Removal {
        Removal {
            dir: self.net(),
            host: "/etc/cni/net.d".into(),
            which,
            kubeconfig: Some("ZZZ-k".into()),
            bin_dir: Some(self.bin()),
            grace: Duration::from_millis(1),
        }
    }
}

/// linkerd2#2355 (config not cleaned on uninstall), istio#16748 (entry left, binary gone).
#[tokio::test]
async fn everything_goes_and_owners_bytes_stay() {
    let node = Node::new();
    node.put("10-calico.conflist", patched(FileKind::Conflist, BARE));
    node.put("20-other.conflist", BARE);
    node.put("30-x.conflist.cilium_bak", "bak");
    let report = node.uninstall(Which::Exactly(wanted())).await;
    assert!(report.complete(), "{report:?}");
    assert_eq!(report.cleaned, ["10-calico.conflist"]);
    assert_eq!(fs::read_to_string(node.net().join("10-calico.conflist")).unwrap(), BARE);
    assert_eq!(
        node.names(&node.net()),
        ["10-calico.conflist", "20-other.conflist", "30-x.conflist.cilium_bak"]
    );
    assert_eq!(node.names(&node.bin()), ["calico"]);
    // Again: nothing to do, and no error.
    let again = node.uninstall(Which::Exactly(wanted())).await;
    assert_eq!(again, Report::default());
}

/// Linkerd's installers strip a foreign file's own entry on cleanup. An entry that is not ours stays, and so does
/// what it needs, until it is asked for by type.
#[tokio::test]
async fn a_foreign_entry_stays_with_its_binary() {
    let node = Node::new();
    let foreign = r#"{"name":"y","plugins":[{"type":"calico"},{"type":"linkerd-cni","own":true}]}"#;
    node.put("10-calico.conflist", patched(FileKind::Conflist, BARE));
    node.put("20-y.conflist", foreign);
    let report = node.uninstall(Which::Exactly(wanted())).await;
    assert!(!report.complete());
    assert_eq!(report.cleaned, ["10-calico.conflist"]);
    assert_eq!(report.remaining.len(), 1);
    assert!(report.remaining[0].1.contains("did not write"), "{report:?}");
    assert_eq!(fs::read_to_string(node.net().join("20-y.conflist")).unwrap(), foreign);
    assert!(node.bin().join("linkerd-cni").exists() && node.net().join("ZZZ-k").exists());
    let report = node.uninstall(Which::Type("linkerd-cni".into())).await;
    assert!(report.complete(), "{report:?}");
    assert_eq!(
        fs::read_to_string(node.net().join("20-y.conflist")).unwrap(),
        r#"{"name":"y","plugins":[{"type":"calico"}]}"#
    );
    assert!(!node.bin().join("linkerd-cni").exists());
}

#[tokio::test]
async fn what_cannot_be_read_keeps_the_binary() {
    let node = Node::new();
    node.put("10-calico.conflist", &patched(FileKind::Conflist, BARE)[..150]);
    let report = node.uninstall(Which::Exactly(wanted())).await;
    assert!(!report.complete() && node.bin().join("linkerd-cni").exists(), "{report:?}");
    assert!(report.remaining[0].1.contains("middle of its JSON"), "{report:?}");
    // multus has copied the list with its entry into its own file.
    let node = Node::new();
    let copy = format!(
        r#"{{"name":"m","type":"multus","delegates":[{{"name":"x","plugins":[{{"type":"c"}},{ENTRY}]}}]}}"#
    );
    node.put("00-multus.conf", &copy);
    let report = node.uninstall(Which::Exactly(wanted())).await;
    assert_eq!(report.remaining.len(), 1);
    assert!(node.bin().join("linkerd-cni").exists());
    assert_eq!(fs::read_to_string(node.net().join("00-multus.conf")).unwrap(), copy);
}

#[tokio::test]
async fn a_converted_conf_goes_back() {
    for crashed in [false, true] {
        let node = Node::new();
        node.put("10-terway.conflist", patched(FileKind::Conf, CONF));
        node.put(".10-terway.conf.nobypass-original", CONF);
        if crashed {
            // Interrupted after the original was back, before the list was gone.
            let (aside, original) = (".10-terway.conf.nobypass-original", "10-terway.conf");
            fs::hard_link(node.net().join(aside), node.net().join(original)).unwrap();
        }
        let report = node.uninstall(Which::Exactly(wanted())).await;
        assert!(report.complete(), "{report:?}");
        assert_eq!(report.restored, ["10-terway.conf"]);
        assert_eq!(node.names(&node.net()), ["10-terway.conf"]);
        assert_eq!(fs::read_to_string(node.net().join("10-terway.conf")).unwrap(), CONF);
    }
}

#[tokio::test]
async fn a_list_that_its_owner_changed_stays() {
    let node = Node::new();
    let list = String::from_utf8(patched(FileKind::Conf, CONF)).unwrap();
    let changed = list.replace("\"terway\",\n  \"plugins\"", "\"changed\",\n  \"plugins\"");
    assert_ne!(list, changed);
    node.put("10-terway.conflist", &changed);
    node.put(".10-terway.conf.nobypass-original", CONF);
    let report = node.uninstall(Which::Exactly(wanted())).await;
    assert_eq!(report.kept_aside, [".10-terway.conf.nobypass-original"]);
    assert_eq!(node.names(&node.net()), [".10-terway.conf.nobypass-original", "10-terway.conflist"]);
    let left = fs::read_to_string(node.net().join("10-terway.conflist")).unwrap();
    assert!(left.contains("changed") && !left.contains("linkerd-cni"));
    // The owner has written its .conf again: that one counts, ours goes.
    let node = Node::new();
    node.put("10-terway.conflist", &list);
    node.put(".10-terway.conf.nobypass-original", CONF);
    let newer = CONF.replace("0.3.0", "0.3.1");
    node.put("10-terway.conf", &newer);
    let report = node.uninstall(Which::Exactly(wanted())).await;
    assert!(report.complete(), "{report:?}");
    assert_eq!(node.names(&node.net()), ["10-terway.conf"]);
    assert_eq!(fs::read_to_string(node.net().join("10-terway.conf")).unwrap(), newer);
}

#[tokio::test]
async fn a_file_of_nothing_but_the_entry_is_reported() {
    let node = Node::new();
    node.put("10-x.conflist", format!(r#"{{"name":"x","plugins":[{ENTRY}]}}"#));
    let report = node.uninstall(Which::Exactly(wanted())).await;
    assert_eq!(report.remaining, [("10-x.conflist".into(), "it holds nothing but the mesh's entry".into())]);
    assert!(node.bin().join("linkerd-cni").exists());
}

#[tokio::test]
async fn a_directory_that_is_not_there() {
    let node = Node::new();
    let mut removal = node.removal(Which::Type("m".into()));
    removal.dir = node.net().join("gone");
    assert!(matches!(uninstall(&removal).await, Err(UninstallError::Directory { .. })));
}

#[tokio::test]
async fn modes_are_kept() {
    let node = Node::new();
    node.put("10-calico.conflist", patched(FileKind::Conflist, BARE));
    let path = node.net().join("10-calico.conflist");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    node.uninstall(Which::Exactly(wanted())).await;
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
}
