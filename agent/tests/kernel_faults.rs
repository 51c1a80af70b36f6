//! Faults of the machine and of the agent's surroundings, each with what must hold meanwhile and afterwards.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the helpers of a test may panic as the test may"
)]

mod support {
    #![allow(dead_code, reason = "each test target uses its part")]
    pub mod agent;
    pub mod load;
    pub mod machine;
    pub mod mounts;
}

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use nobypass::sys::clock::monotonic_ns;
use nobypass_testkit::cgroup::Qos;
use nobypass_testkit::{proc, wait};
use support::agent::Agent;
use support::load::{NOTHING_PASSES, Target};
use support::machine::{Machine, kernel_has, says, sees_pod};

fn start(machine: &Machine) -> Agent {
    machine.launch().args(NOTHING_PASSES).start().attached()
}

/// A smaller number is for trying things out, and where emulation is slow.
fn number(variable: &str, usual: usize) -> usize {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

fn run(program: &str, args: &[&str]) {
    let mut command = Command::new(program);
    command.args(args);
    proc::check(command, "").unwrap();
}

fn signal(agent: &Agent, name: &str) {
    run("kill", &[&format!("-{name}"), &agent.pid().to_string()]);
}

/// A cgroup with little memory: in version 1's hierarchy, or in version 2's where the root hands memory out.
struct LittleMemory(PathBuf);

impl LittleMemory {
    fn new(bytes: u32) -> Option<Self> {
        let name = format!("nobypass-test-oom-{}", std::process::id());
        let v1 = Path::new("/sys/fs/cgroup/memory");
        let v2 = nobypass_testkit::cgroup::v2_root().unwrap();
        let handed = fs::read_to_string(v2.join("cgroup.subtree_control")).unwrap();
        let (root, limit) = if v1.join("cgroup.procs").exists() {
            (v1, "memory.limit_in_bytes")
        } else if handed.split_whitespace().any(|controller| controller == "memory") {
            (v2.as_path(), "memory.max")
        } else {
            return None;
        };
        let this = Self(root.join(name));
        fs::create_dir(&this.0).unwrap();
        fs::write(this.0.join(limit), bytes.to_string()).unwrap();
        // So that nothing is swapped out instead; absent without swap accounting.
        let _ = fs::write(this.0.join("memory.swap.max"), "0");
        Some(this)
    }

    fn kills(&self) -> u32 {
        let text = ["memory.oom_control", "memory.events"].map(|file| fs::read_to_string(self.0.join(file)));
        let mut lines = text.iter().flatten().flat_map(|text| text.lines());
        lines.find_map(|line| line.strip_prefix("oom_kill ")).unwrap().parse().unwrap()
    }
}

impl Drop for LittleMemory {
    fn drop(&mut self) {
        wait::until("the end of what ran in it", wait::HANG, || fs::remove_dir(&self.0).ok()).unwrap();
    }
}

/// The kernel kills it wherever it happens to be: like SIGKILL, and what it attached stays.
#[test]
fn an_agent_that_the_oom_killer_ends_lets_nothing_out() {
    let Some(little) = LittleMemory::new(4 << 20) else {
        println!("skipped: no cgroup hierarchy of this machine hands out memory");
        return;
    };
    let (mut target, agent) = Target::new("oom", start);
    let (last, tried) = target.under_load(|| {
        agent.kill();
        let enter = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", little.0.display());
        for _ in 0..3 {
            let launch = target.machine.launch_through("sh", &["-c", &enter, "sh"]);
            let ended = launch.args(NOTHING_PASSES).start().wait();
            assert_eq!(ended.code, None, "ended by a signal: {}", ended.err);
        }
        assert!(little.kills() >= 3, "{} kills", little.kills());
        start(&target.machine)
    });
    target.nothing_got_out(tried);
    target.machine.all_is_attached();
    last.kill();
}

/// Where its socket should be there is no room: it says so and ends, and what is attached goes on.
#[test]
fn a_full_run_directory_is_named_and_lets_nothing_out() {
    let (mut target, agent) = Target::new("run", start);
    let home = target.machine.home.path().display().to_string();
    let (last, tried) = target.under_load(|| {
        assert!(agent.terminate().success());
        target.machine.mounts.sh(&format!("mount -t tmpfs -o nr_inodes=1 tmpfs {home}"));
        let words = ["agent.sock", "No space left", "--socket"];
        says(&target.machine.launch().args(NOTHING_PASSES).fail(), 1, &words);
        target.machine.mounts.sh(&format!("umount {home}"));
        start(&target.machine)
    });
    target.nothing_got_out(tried);
    last.kill();
}

/// The pins are out of its sight, not out of the kernel: it ends, says why, and whoever sees them takes over.
#[test]
fn a_bpffs_unmounted_in_the_agents_namespace_lets_nothing_out() {
    let through = |machine: &Machine| {
        let launch = machine.launch_through("unshare", &["-m", "--propagation", "private"]);
        launch.args(NOTHING_PASSES).start().attached()
    };
    let (mut target, agent) = Target::new("unmounted", through);
    let (last, tried) = target.under_load(|| {
        run("nsenter", &["-t", &agent.pid().to_string(), "-m", "umount", "-l", "/sys/fs/bpf"]);
        let ended = agent.wait();
        says(&ended, 1, &["/sys/fs/bpf/nobypass"]);
        target.machine.all_is_attached();
        let agent = start(&target.machine);
        agent.line(&["attached", "adopted=true"]);
        agent
    });
    target.nothing_got_out(tried);
    target.machine.all_is_attached();
    last.kill();
}

fn uid(n: usize) -> String {
    format!("2c48913c-b29f-11e7-9350-{n:012x}")
}

/// With 10,000 pods known there is no room for one more: that is said, and the others stay as they are.
#[test]
fn the_ten_thousand_and_first_pod_is_named_and_the_others_stay_enforced() {
    let room = number("NOBYPASS_TEST_PODS", 10_000);
    let max = room.to_string();
    let launch = |machine: &Machine| {
        machine.launch().args(NOTHING_PASSES).args(["--max-pods", &max]).start().attached()
    };
    let (mut target, mut agent) = Target::new("full", launch);
    // One entry is that of the load's pod, one that of its QoS class.
    let pods: Vec<_> =
        (0..room).map(|n| target.machine.scratch.pod(Qos::Burstable, &uid(n)).unwrap()).collect();
    agent.line(&["ERROR", "no room for a pod's entry", "--max-pods"]);
    let maps = target.machine.maps();
    assert_eq!(maps.policies().len(), room);
    let (last, tried) = target.under_load(|| {
        assert!(agent.is_running());
        agent.kill();
        launch(&target.machine)
    });
    target.nothing_got_out(tried);
    // Where one goes, the next one finds room.
    for pod in pods.into_iter().take(room / 10) {
        fs::remove_dir(pod.path()).unwrap();
    }
    let late = target.machine.scratch.pod(Qos::Burstable, &uid(room)).unwrap();
    let id = late.id().unwrap();
    last.until("the late pod's entry", |_| maps.policy(id));
    assert_eq!(last.get("/livez"), Some((200, "ok\n".into())));
    last.kill();
}

/// Cgroups that come and go faster than anybody reads: no entry stays, none is lost, nothing gets out.
#[test]
fn ten_thousand_cgroups_made_and_removed_leave_nothing_and_lose_nobody() {
    let churn = number("NOBYPASS_TEST_CHURN", 10_000);
    let (mut target, mut agent) = Target::new("churn", start);
    let maps = target.machine.maps();
    let before = maps.policies().len();
    let come_and_go = |from: usize, count: usize| {
        for n in from..from + count {
            let pod = target.machine.scratch.pod(Qos::BestEffort, &uid(n)).unwrap();
            fs::remove_dir(pod.path()).unwrap();
        }
    };
    let ((stay, resident), tried) = target.under_load(|| {
        come_and_go(0, churn / 2);
        // While it reads nothing, the ring of cgroups overflows: what was lost is found by looking.
        signal(&agent, "STOP");
        come_and_go(churn / 2, churn / 2);
        let stay: Vec<_> = (churn..churn + 5)
            .map(|n| target.machine.scratch.pod(Qos::BestEffort, &uid(n)).unwrap())
            .collect();
        signal(&agent, "CONT");
        for pod in &stay {
            let id = pod.id().unwrap();
            agent.until("a pod that came while it hung", |agent| sees_pod(agent, id).then_some(()));
        }
        (stay, resident_kb(agent.pid()))
    });
    assert!(agent.is_running());
    target.nothing_got_out(tried);
    // The QoS class of the others is one more.
    agent
        .until("the end of all others", |_| (maps.policies().len() <= before + stay.len() + 1).then_some(()));
    println!("{churn} cgroups made and removed beside {tried:?}; resident {resident} kB");
    assert!(resident < 64_000, "{resident} kB");
    agent.kill();
}

fn resident_kb(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// The programs read the machine's clock, whatever clock the agent's namespace shows: heartbeat and holds go by the former.
#[test]
fn an_agent_with_another_clock_beats_by_the_machines() {
    if !kernel_has(5, 6) {
        return;
    }
    let machine = Machine::new();
    let ahead = ["--time", "--monotonic", "1000000", "--fork", "--kill-child"];
    let args = ["--mode", "enforce", "--unknown-pods", "hold", "--hold-ms", "500"];
    // Known by looking at the directories: the agent writes when it was first seen.
    let pod = machine.scratch.pod(Qos::Burstable, &uid(1)).unwrap();
    let agent = machine.launch_through("unshare", &ahead).args(args).start().attached();
    let maps = machine.maps();
    let known = wait::until("the pod's entry", wait::HANG, || maps.policy(pod.id().unwrap())).unwrap();
    for (what, at) in [("heartbeat", maps.heartbeat().unwrap()), ("first seen", known.since_ns)] {
        assert!(at <= monotonic_ns(), "{what} is {} s ahead", (at - monotonic_ns()) / 1_000_000_000);
    }
    agent.kill();
}
