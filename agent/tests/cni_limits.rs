//! Full and read-only file systems, missing permission, no descriptors, no inotify: clear, bounded, recovered.
//!
//! Each test runs its body in a process of its own, in namespaces where mounting and limits touch nothing else.
#![allow(missing_docs, reason = "test binary")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

mod cni_support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cni_support::*;
use nobypass::cni::guard::{Config, Guard, Snapshot, Want, Watching};
use nobypass::cni::metrics::Metrics;

const NAME: &str = "10-a.conflist";

/// Runs `body`, one of the ignored tests, after `setup` in a new mount namespace; `$DIR` is its CNI directory.
fn in_namespace(body: &str, flags: &[&str], setup: &str, launch: &str) {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("net.d");
    fs::create_dir(&dir).unwrap();
    let open: fs::Permissions = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(root.path(), open).unwrap();
    let program = std::env::current_exe().unwrap();
    let script = format!(
        "mount --make-rprivate / && {setup} && exec {launch} {} --exact {body} --ignored --nocapture",
        program.display()
    );
    let output = Command::new("unshare")
        .arg("--mount")
        .args(flags)
        .args(["sh", "-c", &script])
        .env("DIR", &dir)
        .output()
        .unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

fn dir() -> PathBuf {
    std::env::var("DIR").expect("started by another test").into()
}

fn guard(dir: &Path) -> (Guard, Metrics) {
    let metrics = Metrics::default();
    let config = Config {
        heartbeat: Duration::from_millis(100),
        poll: Duration::from_millis(100),
        grace: Duration::from_millis(100),
        ..Config::new(dir.to_path_buf())
    };
    (Guard::start(config, Want::Entry(wanted()), metrics.clone()).unwrap(), metrics)
}

fn snapshot(guard: &Guard) -> Snapshot {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(guard.snapshot()).unwrap()
}

fn until(guard: &Guard, what: &str, condition: impl Fn(&Snapshot) -> bool) {
    let start = Instant::now();
    while !condition(&snapshot(guard)) {
        assert!(start.elapsed() < HANG, "never: {what}\n{:#?}", snapshot(guard));
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

fn refused(snapshot: &Snapshot, reason: &str) -> bool {
    snapshot.files.iter().any(|file| file.name == NAME && file.state == reason && file.why.is_some())
}

fn sh(command: &str) {
    assert!(Command::new("sh").args(["-c", command]).status().unwrap().success(), "{command}");
}

#[test]
fn no_space() {
    in_namespace("no_space_body", &[], "mount -t tmpfs -o size=64k tmpfs $DIR", "");
}

#[test]
#[ignore = "body of no_space"]
fn no_space_body() {
    let dir = dir();
    fs::write(dir.join(NAME), list("a", 0)).unwrap();
    // All pages but none for a new file.
    let filler = dir.join("filler");
    sh(&format!("dd if=/dev/zero of={} bs=4096 2>/dev/null || true", filler.display()));
    let (guard, metrics) = guard(&dir);
    until(&guard, "refused", |now| refused(now, "no_space"));
    assert_eq!(fs::read_to_string(dir.join(NAME)).unwrap(), list("a", 0));
    // While it tries, a new file may be there for a moment.
    until(&guard, "nothing left", |_| hidden(&dir).is_empty());
    assert_eq!(snapshot(&guard).protection, "unprotected");
    assert!(metrics.counted("failed") < 5, "{} tries", metrics.counted("failed"));
    fs::remove_file(filler).unwrap();
    until(&guard, "patched", |now| now.protection == "protected");
    assert_patched(&dir.join(NAME), &list("a", 0));
}

/// linkerd2#7391: a clean-up that could not write left an empty config.
#[test]
fn read_only() {
    let setup = "mount --bind $DIR $DIR && printf '' > $DIR/x && mount -o remount,ro,bind $DIR";
    in_namespace("read_only_body", &[], setup, "");
}

#[test]
#[ignore = "body of read_only"]
fn read_only_body() {
    let dir = dir();
    sh("mount -o remount,rw,bind $DIR");
    fs::write(dir.join(NAME), list("a", 0)).unwrap();
    sh("mount -o remount,ro,bind $DIR");
    let (guard, _) = guard(&dir);
    until(&guard, "refused", |now| refused(now, "read_only"));
    sh("mount -o remount,rw,bind $DIR");
    until(&guard, "patched", |now| now.protection == "protected");
    // And in the middle of its life.
    sh("mount -o remount,ro,bind $DIR");
    sh("mount -o remount,rw,bind $DIR");
    fs::write(dir.join(NAME), list("b", 0)).unwrap();
    until(&guard, "patched", |_| {
        serial_of(&fs::read_to_string(dir.join(NAME)).unwrap()).as_deref() == Some("b")
    });
    until(&guard, "protected", |now| now.protection == "protected");
}

/// istio#41363, #54815, #23605: SELinux.
#[test]
fn no_permission() {
    let setup = "chmod 777 $DIR && printf '%s' '{\"cniVersion\":\"0.4.0\",\"name\":\"n\",\"plugins\":[{\"type\":\"bridge\"}]}' > $DIR/10-a.conflist && chmod 755 $DIR";
    in_namespace("no_permission_body", &[], setup, "setpriv --reuid 65534 --regid 65534 --clear-groups");
}

#[test]
#[ignore = "body of no_permission"]
fn no_permission_body() {
    let dir = dir();
    let before = fs::read_to_string(dir.join(NAME)).unwrap();
    let (guard, _) = guard(&dir);
    until(&guard, "refused", |now| refused(now, "permission"));
    let now = snapshot(&guard);
    let why = now.files.iter().find_map(|file| file.why.clone()).unwrap();
    assert!(why.contains("SELinux"), "{why}");
    assert_eq!((now.generation, now.protection), (0, "unprotected"));
    assert_eq!(fs::read_to_string(dir.join(NAME)).unwrap(), before);
}

/// linkerd2-proxy-init#424, linkerd2#13198: silently unwatched.
/// pouch#2282: nobody was told.
#[test]
fn no_inotify() {
    let setup = "echo 0 > /proc/sys/user/max_inotify_instances";
    in_namespace("no_inotify_body", &["--user", "--map-root-user"], setup, "");
}

#[test]
#[ignore = "body of no_inotify"]
fn no_inotify_body() {
    let dir = dir();
    let (guard, metrics) = guard(&dir);
    until(
        &guard,
        "polled",
        |now| matches!(&now.watching, Watching::Polled { why } if why.contains("max_user_instances")),
    );
    fs::write(dir.join(NAME), list("a", 0)).unwrap();
    until(&guard, "patched", |now| now.protection == "protected");
    assert_patched(&dir.join(NAME), &list("a", 0));
    let summary = guard.summary();
    assert!(!summary.borrow().ready(), "polling is not good enough to be ready");
    assert_eq!(metrics.watched.get(), 0);
    fs::write("/proc/sys/user/max_inotify_instances", "100").unwrap();
    until(&guard, "watched", |now| now.watching == Watching::Watched);
    assert_eq!(metrics.watched.get(), 1);
}

#[test]
fn few_descriptors() {
    in_namespace("few_descriptors_body", &[], "ulimit -n 28", "");
}

#[test]
#[ignore = "body of few_descriptors"]
fn few_descriptors_body() {
    let dir = dir();
    let (guard, _) = guard(&dir);
    until(&guard, "watched", |now| now.watching == Watching::Watched);
    for n in 0..40 {
        fs::write(dir.join(format!("{n}.conflist")), list(&n.to_string(), 0)).unwrap();
    }
    let start = Instant::now();
    for n in 0..40 {
        let path = dir.join(format!("{n}.conflist"));
        // Reading needs a descriptor too.
        while fs::read_to_string(&path).map_or(0, |text| entries(&text)) != 1 {
            assert!(start.elapsed() < HANG, "{n}: {:?}", fs::read_to_string(&path));
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }
    guard.stop();
    assert_eq!(hidden(&dir), Vec::<String>::new());
}

/// Nothing reports this, so the path is looked at now and then.
#[test]
fn a_mount_over_the_directory_is_noticed() {
    in_namespace("mount_body", &[], "true", "");
}

#[test]
#[ignore = "body of a_mount_over_the_directory_is_noticed"]
fn mount_body() {
    let dir = dir();
    fs::write(dir.join(NAME), list("below", 0)).unwrap();
    let (guard, _) = guard(&dir);
    until(&guard, "patched", |now| now.protection == "protected");
    sh("mount -t tmpfs tmpfs $DIR");
    fs::write(dir.join("20-b.conflist"), list("above", 0)).unwrap();
    until(&guard, "patched", |now| {
        now.active.as_deref() == Some("20-b.conflist") && now.protection == "protected"
    });
    assert_patched(&dir.join("20-b.conflist"), &list("above", 0));
    sh("umount -l $DIR");
    until(&guard, "back", |now| now.active.as_deref() == Some(NAME) && now.protection == "protected");
    fs::write(dir.join(NAME), list("again", 0)).unwrap();
    until(&guard, "patched", |_| {
        serial_of(&fs::read_to_string(dir.join(NAME)).unwrap()).as_deref() == Some("again")
    });
}
