//! The guard on real directories: everything in which CNI installers in the field are known to fail, and races.
#![allow(missing_docs, reason = "test binary")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

mod cni_support;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cni_support::*;
use nobypass::cni::entry::{Place, WantedEntry};
use nobypass::cni::guard::{Config, Guard, Snapshot, Summary, Want, Watching};
use nobypass::cni::metrics::Metrics;
use nobypass::cni::window::Protection;

struct Guarded {
    /// The CNI directory.
    dir: PathBuf,
    metrics: Metrics,
    guard: Option<Guard>,
    _root: tempfile::TempDir,
}

fn config(dir: &Path) -> Config {
    Config {
        grace: Duration::from_millis(50),
        heartbeat: Duration::from_millis(100),
        burst: 1_000_000,
        ..Config::new(dir.to_path_buf())
    }
}

/// The version in the mesh entry.
fn version(text: &str) -> Option<u64> {
    let value: serde_json::Value = serde_json::from_str(text).ok()?;
    value["plugins"].as_array()?.last()?.get("v")?.as_u64()
}

fn learning() -> Want {
    Want::Learn { plugins: vec!["linkerd-cni".to_owned(), "istio-cni".to_owned()], place: Place::Last }
}

impl Guarded {
    /// Guards a directory that `fill` has filled.
    fn start_with(fill: impl FnOnce(&Path), change: impl FnOnce(&mut Config), want: Want) -> Self {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("net.d");
        fs::create_dir(&dir).unwrap();
        fill(&dir);
        let mut config = config(&dir);
        change(&mut config);
        let metrics = Metrics::default();
        let guard = Guard::start(config, want, metrics.clone()).unwrap();
        let guarded = Self { dir, metrics, guard: Some(guard), _root: root };
        guarded.until("the first scan is over", |summary, _| summary.watching != Watching::Missing);
        guarded
    }

    fn start(fill: impl FnOnce(&Path)) -> Self {
        Self::start_with(fill, |_| {}, Want::Entry(wanted()))
    }

    fn guard(&self) -> &Guard {
        self.guard.as_ref().unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// As installers with manners do.
    fn rename(&self, name: &str, text: &str) {
        let temp = self.path(".owner-temp");
        fs::write(&temp, text).unwrap();
        fs::rename(temp, self.path(name)).unwrap();
    }

    fn summary(&self) -> Summary {
        self.guard().summary().borrow().clone()
    }

    fn snapshot(&self) -> Snapshot {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(self.guard().snapshot()).unwrap()
    }

    fn state_of(&self, name: &str) -> Option<String> {
        self.snapshot().files.into_iter().find(|file| file.name == name).map(|file| file.state.to_owned())
    }

    fn until(&self, what: &str, condition: impl Fn(&Summary, &Self) -> bool) {
        wait(what, || condition(&self.summary(), self), || format!("{:#?}", self.snapshot()));
    }

    fn until_patched(&self, name: &str, owner: &str) {
        let path = self.path(name);
        self.until(&format!("{name} is patched"), |_, _| {
            let text = fs::read_to_string(&path).unwrap_or_default();
            serial_of(&text) == serial_of(owner) && serial_of(owner).is_some() && entries(&text) == 1
        });
        assert_patched(&path, owner);
    }

    /// Nothing is left to do, and nothing more is done.
    fn until_quiet(&self) {
        let mut last = (0, Instant::now());
        self.until("the guard is quiet", |_, guarded| {
            let _ = guarded;
            self.snapshot().displaced == 0
        });
        wait(
            "no more writes",
            || {
                let writes = self.metrics.writes.get();
                if writes != last.0 {
                    last = (writes, Instant::now());
                }
                last.1.elapsed() > Duration::from_millis(300)
            },
            || format!("{:#?}", self.snapshot()),
        );
    }
}

fn wait(what: &str, mut condition: impl FnMut() -> bool, state: impl Fn() -> String) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < HANG, "not in {HANG:?}: {what}\n{}", state());
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// linkerd2#11549, #11228: rewritten in place; #10720: moved in. amazon-vpc-cni-k8s#1437, containerd#8662: seen half-written.
#[test]
fn every_writer_style_is_patched() {
    let guarded = Guarded::start(|_| {});
    guarded.rename("10-a.conflist", &list("renamed", 3));
    guarded.until_patched("10-a.conflist", &list("renamed", 3));
    guarded.write("10-a.conflist", &list("truncated", 30));
    guarded.until_patched("10-a.conflist", &list("truncated", 30));
    fs::remove_file(guarded.path("10-a.conflist")).unwrap();
    guarded.write("elsewhere", &list("linked", 0));
    fs::hard_link(guarded.path("elsewhere"), guarded.path("10-a.conflist")).unwrap();
    guarded.until_patched("10-a.conflist", &list("linked", 0));
    symlink("elsewhere", guarded.path("20-b.conflist")).unwrap();
    guarded.until_patched("elsewhere", &list("linked", 0));
    // Through the link's file, which has no config's name.
    guarded.write("elsewhere", &list("behind the link", 0));
    guarded.until_patched("elsewhere", &list("behind the link", 0));
    assert!(guarded.path("20-b.conflist").is_symlink());
}

#[test]
fn a_file_behind_a_link_in_another_directory_is_patched_on_change() {
    let guarded = Guarded::start(|dir| {
        fs::create_dir(dir.join("data")).unwrap();
        fs::write(dir.join("data/net"), list("one", 0)).unwrap();
        symlink("data/net", dir.join("10-a.conflist")).unwrap();
    });
    guarded.until_patched("data/net", &list("one", 0));
    guarded.write("data/net", &list("two", 0));
    guarded.until_patched("data/net", &list("two", 0));
}

#[test]
fn a_writer_that_keeps_its_file_open_is_patched_too() {
    let guarded = Guarded::start(|_| {});
    let mut held = File::create(guarded.path("10-a.conflist")).unwrap();
    for serial in ["one", "two", "three"] {
        held.set_len(0).unwrap();
        std::io::Seek::rewind(&mut held).unwrap();
        for piece in list(serial, 200).as_bytes().chunks(50) {
            held.write_all(piece).unwrap();
        }
        guarded.until_patched("10-a.conflist", &list(serial, 200));
    }
    drop(held);
    guarded.until_quiet();
    assert_eq!(hidden(&guarded.dir), Vec::<String>::new());
}

/// linkerd2-proxy-init#477: two different lists back to back made the shell script rewrite both for ever.
#[test]
fn two_files_that_loop_in_the_shell_script_are_written_once_each() {
    let guarded = Guarded::start(|_| {});
    guarded.rename("01-foo.conflist", &list("foo", 0));
    guarded.rename("02-bar.conflist", &list("bar", 9));
    guarded.until_patched("01-foo.conflist", &list("foo", 0));
    guarded.until_patched("02-bar.conflist", &list("bar", 9));
    guarded.until_quiet();
    assert_eq!(guarded.metrics.writes.get(), 2);
}

/// A file made between the first scan and the watch was never patched by the shell script.
#[test]
fn files_made_while_it_starts_are_patched() {
    for round in 0..20 {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("net.d");
        fs::create_dir(&dir).unwrap();
        let guard = Guard::start(config(&dir), Want::Entry(wanted()), Metrics::default()).unwrap();
        for n in 0..10 {
            let pause = Instant::now();
            while pause.elapsed() < Duration::from_micros(round * 17) {
                std::hint::spin_loop();
            }
            fs::write(dir.join(format!("{n}.conflist")), list(&n.to_string(), 0)).unwrap();
        }
        for n in 0..10 {
            let path = dir.join(format!("{n}.conflist"));
            wait("patched", || entries(&fs::read_to_string(&path).unwrap()) == 1, String::new);
        }
        guard.stop();
    }
}

/// linkerd2-proxy-init's installer in Go exits on one of these and hangs on three at its start.
#[test]
fn files_that_are_no_configs_disturb_nothing() {
    let half = &list("half", 100)[..80];
    let guarded = Guarded::start(|dir| {
        for n in 0..20 {
            fs::write(dir.join(format!("{n}-half.conflist")), half).unwrap();
            fs::write(dir.join(format!("{n}-empty.conf")), "").unwrap();
        }
        fs::create_dir(dir.join("30-dir.conflist")).unwrap();
        fs::write(dir.join("31-bom.conflist"), format!("\u{feff}{}", list("bom", 0))).unwrap();
        fs::write(dir.join("32-binary.conflist"), [0, 159, 146, 150]).unwrap();
        fs::write(dir.join("40-good.conflist"), list("good", 0)).unwrap();
    });
    guarded.until_patched("40-good.conflist", &list("good", 0));
    assert_eq!(guarded.text("0-half.conflist"), half);
    guarded.until("refused", |_, _| guarded.state_of("31-bom.conflist").as_deref() == Some("bom"));
    assert_eq!(guarded.state_of("30-dir.conflist").as_deref(), Some("not_regular"));
    assert_eq!(guarded.state_of("0-empty.conf").as_deref(), Some("empty"));
    // And when one of them becomes a config, it is patched.
    guarded.write("0-half.conflist", &list("whole", 0));
    guarded.until_patched("0-half.conflist", &list("whole", 0));
}

/// A list written in pieces, as a slow installer does; containerd#8662, amazon-vpc-cni-k8s#1437.
/// multus-cni#1155: an empty config made from an unfinished one.
#[test]
fn a_file_written_in_pieces_is_left_alone_until_it_is_whole() {
    let guarded = Guarded::start(|_| {});
    let text = list("slow", 400);
    let mut file = File::create(guarded.path("10-a.conflist")).unwrap();
    for piece in text.as_bytes().chunks(text.len() / 4) {
        assert_eq!(guarded.metrics.writes.get(), 0);
        file.write_all(piece).unwrap();
        let part = fs::read(guarded.path("10-a.conflist")).unwrap();
        guarded.until("seen", |_, _| {
            part.len() == text.len() || guarded.state_of("10-a.conflist").as_deref() == Some("incomplete")
        });
    }
    drop(file);
    guarded.until_patched("10-a.conflist", &text);
}

/// istio pins the first file it saw: a file that sorts before it is never patched.
#[test]
fn a_file_that_sorts_first_later_is_patched_and_active() {
    let guarded = Guarded::start(|dir| fs::write(dir.join("10-a.conflist"), list("a", 0)).unwrap());
    guarded.until_patched("10-a.conflist", &list("a", 0));
    guarded.rename("05-new.conflist", &list("new", 0));
    guarded.until_patched("05-new.conflist", &list("new", 0));
    guarded.until("active", |summary, _| summary.active.as_deref() == Some("05-new.conflist".as_ref()));
    fs::remove_file(guarded.path("10-a.conflist")).unwrap();
    fs::remove_file(guarded.path("05-new.conflist")).unwrap();
    guarded.until("no network", |summary, _| summary.files == Protection::NoNetwork);
    guarded.rename("04-last.conflist", &list("last", 0));
    guarded.until_patched("04-last.conflist", &list("last", 0));
    guarded.until("protected", |summary, _| summary.protection == Protection::Protected);
}

/// consul writes a `.conflist` for ever beside a `.conf` that wins.
/// istio#20202: an owner that looks for its `.conf`.
#[test]
fn a_conf_is_converted_once_and_stays_out_of_the_way() {
    let guarded = Guarded::start(|_| {});
    guarded.write("05-cilium.conf", &single("one"));
    guarded.until("converted", |summary, _| summary.active.as_deref() == Some("05-cilium.conflist".as_ref()));
    guarded.until("protected", |summary, _| summary.protection == Protection::Protected);
    guarded.until_quiet();
    assert_eq!(guarded.metrics.writes.get(), 1);
    assert!(!guarded.path("05-cilium.conf").exists());
    let text = guarded.text("05-cilium.conflist");
    assert!(text.contains("\"terway\"") && text.contains("\"0.3.0\""), "{text}");
    // An in-place writer that still has the original open.
    let aside = guarded.path(".05-cilium.conf.nobypass-original");
    fs::write(&aside, single("two")).unwrap();
    guarded.until("followed", |_, _| guarded.text("05-cilium.conflist").contains("two"));
    guarded.until_quiet();
    assert_eq!(guarded.metrics.writes.get(), 2);
}

#[test]
fn json_files_are_configs_too() {
    let guarded = Guarded::start(|_| {});
    guarded.write("10-a.json", &single("one"));
    guarded.until("converted", |_, _| guarded.path("10-a.conflist").exists());
    guarded.until("protected", |summary, _| summary.protection == Protection::Protected);
}

/// consul-k8s and the shell script leave the second of two entries, or the entry where it does not run.
#[test]
fn duplicates_and_misplaced_entries_are_put_right() {
    let guarded = Guarded::start(|_| {});
    let stale = r#"{"type":"linkerd-cni","v":0}"#;
    let text = list("x", 0).replace("\"plugins\": [", &format!("\"plugins\": [{stale},{stale},"));
    guarded.write("10-a.conflist", &text);
    guarded.until("one entry", |_, _| entries(&guarded.text("10-a.conflist")) == 1);
    let value: serde_json::Value = serde_json::from_str(&guarded.text("10-a.conflist")).unwrap();
    assert_eq!(value["plugins"][1]["type"], "linkerd-cni");
    assert!(guarded.text("10-a.conflist").contains("12345678901234567890"));
}

/// multus-cni: the file it delegates to is patched, not both.
/// multus-cni#1312: made again from what it delegates to.
#[test]
fn a_meta_plugin_is_left_and_its_delegate_is_patched() {
    let multus = r#"{"name":"m","cniVersion":"0.4.0","plugins":[{"type":"multus-shim","clusterNetwork":"/etc/cni/net.d/10-canal.conflist"}]}"#;
    let guarded = Guarded::start(|dir| {
        fs::write(dir.join("00-multus.conflist"), multus).unwrap();
        fs::write(dir.join("10-canal.conflist"), list("canal", 0)).unwrap();
    });
    guarded.until_patched("10-canal.conflist", &list("canal", 0));
    guarded.until("protected by its delegate", |summary, _| summary.protection == Protection::Protected);
    assert_eq!(guarded.text("00-multus.conflist"), multus);
    guarded.write("10-canal.conflist", &list("canal again", 0));
    guarded.until_patched("10-canal.conflist", &list("canal again", 0));
}

#[test]
fn mode_is_kept_and_links_stay() {
    let guarded = Guarded::start(|_| {});
    guarded.write(".t", &list("mode", 0));
    fs::set_permissions(guarded.path(".t"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::rename(guarded.path(".t"), guarded.path("10-a.conflist")).unwrap();
    guarded.until_patched("10-a.conflist", &list("mode", 0));
    assert_eq!(fs::metadata(guarded.path("10-a.conflist")).unwrap().mode() & 0o7777, 0o640);
}

/// linkerd2#10738, #4049: an installer made a network of its own where there was none.
/// linkerd2#9916, #4049: a network of the installer's own.
#[test]
fn nothing_is_made_in_an_empty_directory() {
    let guarded = Guarded::start(|_| {});
    guarded.until_quiet();
    let names: Vec<_> = fs::read_dir(&guarded.dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, [".nobypass-generation"]);
    assert_eq!(guarded.summary().protection, Protection::NoNetwork);
}

#[test]
fn a_deleted_file_stays_deleted() {
    let guarded = Guarded::start(|_| {});
    for round in 0..100 {
        let path = guarded.path("10-a.conflist");
        guarded.rename("10-a.conflist", &list(&round.to_string(), 0));
        let pause = Instant::now();
        while pause.elapsed() < Duration::from_micros(round * 20) {
            std::hint::spin_loop();
        }
        fs::remove_file(&path).unwrap();
        assert!(!path.exists());
    }
    guarded.until_quiet();
    assert!(!guarded.path("10-a.conflist").exists());
}

/// All peers go blind, wait for ever, or exit.
/// containerd#5041, #6490: runtimes lose a directory that was made anew.
#[test]
fn a_directory_that_is_removed_replaced_or_missing_at_first_is_guarded_again() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("etc/cni/net.d");
    let metrics = Metrics::default();
    let guard = Guard::start(config(&dir), Want::Entry(wanted()), metrics).unwrap();
    let summary = guard.summary();
    let watched = || summary.borrow().watching == Watching::Watched;
    assert!(!watched());
    for round in 0..5 {
        fs::create_dir_all(&dir).unwrap();
        let owner = list(&round.to_string(), 0);
        fs::write(dir.join("10-a.conflist"), &owner).unwrap();
        wait(
            "patched",
            || entries(&fs::read_to_string(dir.join("10-a.conflist")).unwrap()) == 1,
            String::new,
        );
        assert_patched(&dir.join("10-a.conflist"), &owner);
        match round % 3 {
            // Again when the agent made a hidden file in between.
            0 => wait("removed", || fs::remove_dir_all(&dir).is_ok(), String::new),
            1 => fs::rename(root.path().join("etc"), root.path().join(format!("gone{round}"))).unwrap(),
            _ => {
                fs::rename(&dir, root.path().join(format!("moved{round}"))).unwrap();
                fs::create_dir(root.path().join(format!("real{round}"))).unwrap();
                symlink(root.path().join(format!("real{round}")), &dir).unwrap();
                fs::write(dir.join("20-b.conflist"), list("linked", 0)).unwrap();
                let path = dir.join("20-b.conflist");
                wait("patched", || entries(&fs::read_to_string(&path).unwrap()) == 1, String::new);
                fs::remove_file(&dir).unwrap();
            }
        }
    }
    guard.stop();
}

#[test]
fn a_directory_removed_in_the_middle_of_writing_is_survived() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("net.d");
    let guard = Guard::start(config(&dir), Want::Entry(wanted()), Metrics::default()).unwrap();
    for round in 0..60_u64 {
        fs::create_dir(&dir).unwrap();
        for n in 0..5 {
            fs::write(dir.join(format!("{n}.conflist")), list("x", 0)).unwrap();
        }
        let pause = Instant::now();
        while pause.elapsed() < Duration::from_micros(round * 50) {
            std::hint::spin_loop();
        }
        wait("removed", || fs::remove_dir_all(&dir).is_ok() || !dir.exists(), String::new);
    }
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("last.conflist"), list("last", 0)).unwrap();
    let path = dir.join("last.conflist");
    wait("patched", || entries(&fs::read_to_string(&path).unwrap()) == 1, String::new);
    guard.stop();
}

#[test]
fn the_entry_is_learned_from_the_installer_and_follows_it() {
    let guarded = Guarded::start_with(
        |dir| fs::write(dir.join("10-a.conflist"), list("a", 0)).unwrap(),
        |_| {},
        learning(),
    );
    guarded.until("not known", |_, _| guarded.state_of("10-a.conflist").as_deref() == Some("no_entry"));
    guarded.until("unprotected", |summary, _| summary.protection == Protection::Unprotected);
    let with = |serial: &str, entry: &str| {
        list(serial, 0).replace("67890 }\n", &format!("67890 }},\n    {entry}\n"))
    };
    let one = with("b", r#"{"type":"istio-cni","v":1}"#);
    guarded.rename("20-b.conflist", &one);
    guarded.until("learned", |_, _| version(&guarded.text("10-a.conflist")) == Some(1));
    guarded.until("protected", |summary, _| summary.protection == Protection::Protected);
    assert_eq!(guarded.text("20-b.conflist"), one, "what satisfies is left byte for byte");
    // The mesh is upgraded.
    let two = with("b", r#"{"type":"istio-cni","v":2}"#);
    guarded.rename("20-b.conflist", &two);
    guarded.until("learned again", |_, _| version(&guarded.text("10-a.conflist")) == Some(2));
    guarded.until_quiet();
    assert_eq!((guarded.text("20-b.conflist"), guarded.metrics.writes.get()), (two, 2));
}

#[test]
fn the_unprotected_window_is_counted() {
    let guarded = Guarded::start_with(
        |dir| fs::write(dir.join("10-a.conflist"), list("a", 0)).unwrap(),
        |_| {},
        learning(),
    );
    guarded.until("unprotected", |summary, _| summary.protection == Protection::Unprotected);
    let start = Instant::now();
    wait("a while", || start.elapsed() > Duration::from_millis(250), String::new);
    guarded.guard().want(Want::Entry(wanted()));
    guarded.until("protected", |summary, _| summary.protection == Protection::Protected);
    let counted = guarded.snapshot().unprotected_seconds;
    assert!(counted >= 0.25 && counted <= start.elapsed().as_secs_f64() + 1.0, "{counted}");
    assert_eq!(guarded.metrics.windows.get(), 1);
    // Also when it lasts a millisecond.
    guarded.rename("10-a.conflist", &list("b", 0));
    guarded.until_patched("10-a.conflist", &list("b", 0));
    guarded.until("counted", |_, _| guarded.metrics.windows.get() == 2);
    assert!(guarded.snapshot().unprotected_seconds > counted);
    assert_eq!(guarded.metrics.protected.get(), 1);
}

/// cilium in exclusive mode, or a second installer with its own idea of the entry.
#[test]
fn a_writer_who_undoes_every_patch_is_named_and_not_fought() {
    let guarded = Guarded::start(|_| {});
    let (path, owner) = (guarded.path("05-cilium.conflist"), list("cilium", 0));
    guarded.rename("05-cilium.conflist", &owner);
    let start = Instant::now();
    let mut undone = 0;
    while start.elapsed() < Duration::from_millis(1500) {
        if entries(&fs::read_to_string(&path).unwrap()) == 1 {
            guarded.rename("05-cilium.conflist", &owner);
            undone += 1;
        }
    }
    let writes = guarded.metrics.writes.get();
    assert!((5..=9).contains(&writes), "{writes} writes, {undone} undone");
    assert_eq!(guarded.metrics.fights.get(), 1);
    let file = guarded.snapshot().files.remove(0);
    assert!(file.undone.unwrap() >= 5, "{file:?}");
    // Another file is not affected, and this one is not given up.
    guarded.rename("10-a.conflist", &list("a", 0));
    guarded.until_patched("10-a.conflist", &list("a", 0));
    guarded.until_patched("05-cilium.conflist", &owner);
}

#[test]
fn all_writing_is_bounded() {
    let guarded = Guarded::start_with(
        |_| {},
        |config| {
            config.burst = 10;
            config.rate = 20;
        },
        Want::Entry(wanted()),
    );
    for n in 0..30 {
        guarded.rename(&format!("{n:02}.conflist"), &list(&n.to_string(), 0));
    }
    let start = Instant::now();
    for n in 0..30 {
        guarded.until_patched(&format!("{n:02}.conflist"), &list(&n.to_string(), 0));
    }
    assert!(start.elapsed() > Duration::from_millis(500), "{:?}", start.elapsed());
    assert!(guarded.metrics.throttled.get() > 0);
}

/// consul's two installers during a surge upgrade never agree.
/// istio#34777: two installers at once; #32809: the gap of an upgrade.
#[test]
fn during_an_upgrade_the_newer_agent_writes_and_the_older_takes_over_when_it_dies() {
    let entry = |v: u32| {
        Want::Entry(
            WantedEntry::from_text(&format!(r#"{{"type":"linkerd-cni","v":{v}}}"#), Place::Last).unwrap(),
        )
    };
    let guarded = Guarded::start_with(
        |dir| fs::write(dir.join("10-a.conflist"), list("a", 0)).unwrap(),
        |_| {},
        entry(1),
    );
    guarded.until("first", |_, _| version(&guarded.text("10-a.conflist")) == Some(1));
    let metrics = Metrics::default();
    let newer = Guard::start(config(&guarded.dir), entry(2), metrics.clone()).unwrap();
    guarded.until("second", |_, _| version(&guarded.text("10-a.conflist")) == Some(2));
    for n in 0..20 {
        guarded.rename("10-a.conflist", &list(&n.to_string(), 0));
        guarded.until("patched", |_, _| {
            let text = guarded.text("10-a.conflist");
            serial_of(&text) == Some(n.to_string()) && entries(&text) == 1
        });
        assert!(version(&guarded.text("10-a.conflist")) == Some(2));
    }
    guarded.until("superseded", |_, _| guarded.snapshot().superseded_by == Some(2));
    assert_eq!((guarded.metrics.writes.get(), metrics.writes.get()), (1, 21));
    newer.stop();
    guarded.until("taken over", |_, _| version(&guarded.text("10-a.conflist")) == Some(1));
    assert_eq!(guarded.snapshot().generation, 3);
}

#[test]
fn nothing_but_the_mark_is_left_after_the_end() {
    let mut guarded = Guarded::start(|_| {});
    for n in 0..50 {
        guarded.rename(&format!("{n}.conflist"), &list(&n.to_string(), 0));
    }
    guarded.until_patched("49.conflist", &list("49", 0));
    let start = Instant::now();
    guarded.guard.take().unwrap().stop();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(hidden(&guarded.dir), Vec::<String>::new());
    let patched = |n: u32| fs::read_to_string(guarded.path(&format!("{n}.conflist"))).unwrap();
    let _: BTreeMap<u32, serde_json::Value> =
        (0..50).map(|n| (n, serde_json::from_str(&patched(n)).unwrap())).collect();
    let held = OpenOptions::new().write(true).open(guarded.path("0.conflist"));
    drop(held);
}
