//! Scratch cgroups look like a kubelet's and leave nothing behind.

use std::process::Command;

use nobypass_testkit::cgroup::{Driver, Qos, Scratch};
use nobypass_testkit::proc;

const UID: &str = "0a1b2c3d-0000-4000-8000-000000000001";

#[test]
fn a_child_starts_inside_and_drop_removes_all() {
    for driver in [Driver::Cgroupfs, Driver::Systemd] {
        let scratch = Scratch::with(driver).unwrap();
        let top = scratch.top().to_path_buf();
        let container = scratch.pod(Qos::Burstable, UID).unwrap().container("c1").unwrap();
        let nested = container.child("init").unwrap();
        let mut command = Command::new("sleep");
        nested.start(command.arg("1000")).unwrap();
        let child = proc::spawn(command).unwrap();
        assert_eq!(nested.pids().unwrap(), [child.pid()]);
        assert!(container.pids().unwrap().is_empty());
        assert_ne!(nested.id().unwrap(), container.id().unwrap());
        drop(scratch);
        assert!(!top.exists());
    }
}

#[test]
fn drop_also_happens_on_panic_and_frees_the_test_itself() {
    let mut top = None;
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let scratch = Scratch::new().unwrap();
        top = Some(scratch.top().to_path_buf());
        let pod = scratch.pod(Qos::Guaranteed, UID).unwrap();
        pod.add(std::process::id()).unwrap();
        panic!("on purpose");
    }));
    assert!(panicked.is_err());
    assert!(!top.unwrap().exists());
}
