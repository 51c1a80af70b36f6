//! What stays in the kernel: pins of other agents, versions and layouts, pins and cgroups that others remove, and agents that
//! end at any moment.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the helpers of a test may panic as the test may"
)]

mod support {
    #![allow(dead_code, reason = "each test target uses its part")]
    pub mod agent;
    pub mod machine;
    pub mod mounts;
}

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use nobypass_common::abi::ABI_VERSION;
use nobypass_testkit::foreign::pin_map;
use nobypass_testkit::wait;
use support::agent::{BIN, Launch};
use support::machine::{BPF_DIR, Machine, hook, pins, pins_tracepoints, says};

#[test]
fn one_set_of_pins_has_one_agent_and_cleanup_waits_for_its_end() {
    let machine = Machine::new();
    let agent = machine.launch().start().attached();
    machine.all_is_attached();

    let home = tempfile::tempdir().unwrap();
    let kubepods = machine.scratch.kubepods();
    let second = || Launch::new(machine.mounts.command(BIN), home.path()).args(["--metrics-addr", "none"]);
    let ended = second().args([Path::new("--pod-parent"), &kubepods]).fail();
    says(&ended, 1, &["another nobypass agent works with", BPF_DIR, "stop it first", "--bpf-dir"]);
    says(&machine.cleanup(), 1, &["another nobypass agent works with", "stop it first"]);
    machine.all_is_attached();
    assert_eq!(hook(&agent.status(), "egress")["effective"], true);

    assert!(agent.terminate().success());
    machine.all_is_attached();
    let status = machine.nobypass(&["status", "--socket", "/nonexistent"]);
    assert_eq!(status.code, Some(0), "{}", status.err);
    assert!(status.out.contains("NO AGENT"), "{}", status.out);
    let first = machine.cleanup();
    assert_eq!(first.code, Some(0), "{}", first.err);
    assert!(first.out.contains(&format!("removed {} pins", pins())), "{}", first.out);
    machine.nothing_is_left();
    let second = machine.cleanup();
    assert_eq!(second.code, Some(0), "{}", second.err);
    assert!(second.out.contains("nothing to do"), "{}", second.out);
}

#[test]
fn pins_that_another_file_system_hides_are_not_attached_a_second_time() {
    let machine = Machine::new();
    let agent = machine.launch().start().attached();
    agent.kill();
    fs::remove_file(machine.home.path().join("agent.sock")).unwrap();
    machine.mounts.sh("mount -t bpf bpf /sys/fs/bpf");
    let ended = machine.launch().fail();
    let words = ["already attached to", "nb_egress", "findmnt -t bpf", "nobypass cleanup"];
    says(&ended, 1, &words.map(|word| if word == "nb_egress" { "on egress" } else { word }));
    assert_eq!(machine.mounts.pins(), [""; 0]);
    machine.mounts.sh("umount /sys/fs/bpf");
    machine.all_is_attached();
    let agent = machine.launch().start().attached();
    agent.line(&["attached", "adopted=true"]);
    machine.all_is_attached();
}

#[test]
fn pins_of_another_version_go_once_ours_work() {
    let machine = Machine::new();
    assert!(machine.launch().start().attached().terminate().success());
    machine.mounts.sh(&format!("mv {BPF_DIR}/v{ABI_VERSION} {BPF_DIR}/v0"));
    let old = machine.mounts.pins();
    assert!(old.len() == pins() && old.iter().all(|pin| pin.starts_with("nobypass/v0/")), "{old:?}");

    // A start that fails leaves the old version at work.
    fs::write(machine.scratch.kubepods().join("cgroup.max.descendants"), "0").unwrap();
    says(&machine.launch().fail(), 69, &["did not see a test connection"]);
    fs::write(machine.scratch.kubepods().join("cgroup.max.descendants"), "max").unwrap();
    assert_eq!(machine.programs(), ["nb_egress", "nb_ingress", "nb_connect4", "nb_connect6"]);

    let agent = machine.launch().start().attached();
    // The links to the parent are ours now.
    agent.line(&["removed the pins of another version", &format!("pins={}", pins() - 4)]);
    agent.line(&["attached", "adopted=false"]);
    machine.all_is_attached();
    let ours = format!("nobypass/v{ABI_VERSION}/");
    assert!(machine.mounts.pins().iter().all(|pin| pin.starts_with(&ours)));
}

#[test]
fn a_pinned_map_of_another_layout_is_refused() {
    let machine = Machine::new();
    assert!(machine.launch().start().attached().terminate().success());
    let pin = machine.mounts.see(BPF_DIR).join(format!("v{ABI_VERSION}/POLICY"));
    fs::remove_file(&pin).unwrap();
    pin_map(&pin).unwrap();
    let ended = machine.launch().fail();
    says(&ended, 1, &["POLICY", "another layout (4+4 bytes, expected 8+", "nobypass cleanup"]);
    machine.all_is_attached();
    assert_eq!(machine.cleanup().code, Some(0));
    machine.nothing_is_left();
    machine.launch().start().attached();
}

#[test]
fn programs_that_cannot_be_proven_to_work_are_withdrawn() {
    let machine = Machine::new();
    fs::write(machine.scratch.kubepods().join("cgroup.max.descendants"), "0").unwrap();
    let ended = machine.launch().fail();
    says(&ended, 69, &["did not see a test connection", "cannot make a scratch cgroup", "not covered"]);
    machine.nothing_is_left();
}

#[test]
fn a_pods_cgroup_made_anew_ends_the_agent_and_the_next_one_covers_it() {
    let machine = Machine::new();
    let agent = machine.launch().start().attached();
    let old = machine.mounts.pins();
    let kubepods = machine.scratch.kubepods();
    fs::remove_dir(&kubepods).unwrap();
    fs::create_dir(&kubepods).unwrap();
    assert_eq!(machine.programs(), [""; 0], "the kernel detached them");
    let ended = agent.wait();
    says(&ended, 1, &[&kubepods.display().to_string(), "started again"]);

    let agent = machine.launch().start().attached();
    agent.line(&["attached", "adopted=true"]);
    machine.all_is_attached();
    let links =
        |pins: &[String]| pins.iter().filter(|pin| pin.contains("link_egress")).cloned().collect::<Vec<_>>();
    assert_ne!(links(&machine.mounts.pins()), links(&old), "the links of the old one are gone");
}

#[test]
fn pins_that_somebody_removes_are_made_again() {
    let machine = Machine::new();
    let agent = machine.launch().args(["--mode", "enforce"]).start().attached();
    let all = machine.mounts.pins();
    let links = || machine.mounts.pins().into_iter().filter(|pin| pin.contains("/link_"));
    let tracepoint = pins_tracepoints().then_some("link_cgroup_mkdir");
    for which in ["link_egress_", "link_connect6_"].into_iter().chain(tracepoint).chain(["link_"]) {
        let mut removed = 0;
        for pin in links().filter(|pin| pin.contains(which)) {
            fs::remove_file(machine.mounts.see("/sys/fs/bpf").join(pin)).unwrap();
            removed += 1;
        }
        assert!(removed > 0, "{which}");
        agent.until("the pins", |_| (machine.mounts.pins() == all).then_some(()));
        agent.until("the hooks", |agent| {
            let status = agent.status();
            status["hooks"].as_array().unwrap().iter().all(|hook| hook["effective"] == true).then_some(())
        });
        machine.all_is_attached();
    }
    agent.line(&["ERROR", "somebody detached programs of ours", "egress"]);
    assert_eq!(agent.metrics().sum("mode", &[("mode", "enforce")]), 1, "the mode is as it was");

    // With the directory gone there is nothing to put them into: the next agent begins anew.
    machine.mounts.sh(&format!("rm -r {BPF_DIR}"));
    let ended = agent.wait();
    says(&ended, 1, &["cannot pin", BPF_DIR, "started again"]);
    let agent = machine.launch().start().attached();
    agent.line(&["attached", "adopted=false"]);
    machine.all_is_attached();
}

#[test]
fn an_end_at_any_moment_of_the_start_leaves_all_or_nothing() {
    let machine = Machine::new();
    let mut states = [0, 0];
    let start = Instant::now();
    machine.launch().start().attached().kill();
    // Twice the time of a whole start, in steps.
    let whole = start.elapsed();
    assert_eq!(machine.cleanup().code, Some(0));
    for turn in 0..24_u32 {
        let agent = machine.launch().start();
        let moment = Instant::now() + whole * turn / 16;
        wait::until("the moment", wait::HANG, || (Instant::now() >= moment).then_some(())).unwrap();
        let (status, log) = agent.terminate_and_log();
        assert!(status.success() || status.code().is_none(), "turn {turn}: {status}: {log}");
        if machine.mounts.pins().is_empty() {
            states[0] += 1;
            machine.nothing_is_left();
        } else {
            states[1] += 1;
            machine.all_is_attached();
            assert_eq!(machine.cleanup().code, Some(0));
            machine.nothing_is_left();
        }
    }
    // Before its signal handlers stand, an agent ends at once; afterwards it finishes what it began.
    println!("{} ends with nothing done, {} with all", states[0], states[1]);
    assert!(states[1] > 0, "{states:?}");
}

#[test]
fn killed_at_any_moment_the_next_start_puts_it_right() {
    let machine = Machine::new();
    for turn in 0..12_u64 {
        let agent = machine.launch().start();
        let moment = Instant::now() + Duration::from_millis(turn * 25);
        wait::until("the moment", wait::HANG, || (Instant::now() >= moment).then_some(())).unwrap();
        agent.kill();
    }
    let agent = machine.launch().start().attached();
    machine.all_is_attached();
    assert!(agent.terminate().success());
    assert_eq!(machine.cleanup().code, Some(0));
    machine.nothing_is_left();
}
