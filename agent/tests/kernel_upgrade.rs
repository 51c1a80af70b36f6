//! Agents come and go, and versions with them, while a pod that must not get out never stops trying.
//!
//! `NOBYPASS_TEST_CYCLES` multiplies the rounds of each test: 10 makes 200 kills and 500 upgrades.

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
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nobypass::bpf::Maps;
use nobypass::bpf::pins::PinDir;
use nobypass::detect::verdict::count;
use nobypass::sys::clock::monotonic_ns;
use nobypass_common::abi::{ABI_VERSION, LedgerKey, LedgerSums, PodName, PortKey};
use nobypass_common::ids::{COUNTERS, Counter};
use nobypass_testkit::figures::Figure;
use nobypass_testkit::foreign::pin_map;
use nobypass_testkit::{proc, wait};
use support::agent::{Agent, BIN, Launch, Metrics};
use support::load::{NOTHING_PASSES, Target, Tried};
use support::machine::{BPF_DIR, Machine, says};

fn rounds(usual: u32) -> u32 {
    let times = std::env::var("NOBYPASS_TEST_CYCLES").ok().and_then(|text| text.parse().ok());
    usual * times.unwrap_or(1)
}

fn start(machine: &Machine) -> Agent {
    machine.launch().args(NOTHING_PASSES).start().attached()
}

/// One round after the other; no counter of the agent's goes back.
fn cycles(name: &str, what: &str, rounds: u32, end: impl Fn(Agent)) {
    let (mut target, mut agent) = Target::new(name, start);
    let (last, tried) = target.under_load(|| {
        let mut before = agent.metrics();
        for round in 0..rounds {
            end(agent);
            agent = start(&target.machine);
            assert!(agent.log().contains("adopted=true"), "round {round}: {}", agent.log());
            before = no_counter_went_back(&agent, &before);
        }
        agent
    });
    target.nothing_got_out(tried);
    tell(&format!("{rounds} {what} under load"), tried);
    target.would_have_been_seen(&mut target.machine.maps());
    last.kill();
}

/// What [`Target::nothing_got_out`] has shown.
fn tell(what: &str, tried: Tried) {
    let Tried { connections, datagrams } = tried;
    let figure =
        format!("0 packets out of {connections} connections and {datagrams} datagrams, each counted once");
    Figure::new(what, figure).promised("0 packets get out", true).tell().unwrap();
}

/// Those of the kernel half: the agent's own begin at 0 with it, as Prometheus expects.
fn no_counter_went_back(agent: &Agent, before: &Metrics) -> Metrics {
    let now = agent.metrics();
    for name in ["bypass_connections_total", "kernel_counts_total", "redirected_connections_total"] {
        assert!(now.sum(name, &[]) >= before.sum(name, &[]), "{name}: {before:?} → {now:?}");
    }
    now
}

#[test]
fn killed_and_started_again_under_load() {
    cycles("kill", "agents killed and started again", rounds(20), Agent::kill);
}

#[test]
fn upgraded_in_place_under_load() {
    cycles("upgrade", "upgrades in place", rounds(50), |agent| assert!(agent.terminate().success()));
}

/// What the pins of the layout before looked like: no `CARRIED`, and `CONFIG` as nobody knows it.
fn becomes_layout(machine: &Machine, version: u32) {
    let dir = machine.mounts.see(BPF_DIR);
    fs::rename(dir.join(format!("v{ABI_VERSION}")), dir.join(format!("v{version}"))).unwrap();
    for map in ["CARRIED", "CONFIG"] {
        fs::remove_file(dir.join(format!("v{version}/{map}"))).unwrap();
    }
    pin_map(&dir.join(format!("v{version}/CONFIG"))).unwrap();
}

fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    bytes
}

/// The links run the new programs from one packet to the next, pods are known from the first, sums go on.
#[test]
fn another_layout_of_the_maps_is_taken_over_under_load() {
    for (round, version) in (0..rounds(2)).zip([ABI_VERSION - 1, ABI_VERSION - 2].into_iter().cycle()) {
        let (mut target, agent) = Target::new("layout", start);
        let mut maps = target.machine.maps();
        let name = PodName { namespace: padded("shop"), name: padded("cart"), mesh: padded("linkerd") };
        maps.set_name(target.id(), &name).unwrap();
        let gone = LedgerKey { namespace: padded("gone"), mesh: padded("linkerd") };
        let mut sums = LedgerSums { count: [0; COUNTERS] };
        sums.count[Counter::Bypass.code() as usize] = 7;
        maps.set_ledger(&gone, &sums).unwrap();
        let port = PortKey::new(5, 6, 0, 443);
        maps.add_exempt_port(16, port).unwrap();
        let mut known = maps.policy(target.id()).unwrap();
        known.exempt_set = 5;
        maps.set_policy(target.id(), &known).unwrap();

        let ((last, before), tried) = target.under_load(|| {
            let before = agent.metrics();
            assert!(agent.terminate().success());
            becomes_layout(&target.machine, version);
            let agent = start(&target.machine);
            agent.line(&["carried over what another version knew and counted", &format!("layout={version}")]);
            agent.line(&["removed the pins of another version"]);
            (agent, before)
        });
        let after = no_counter_went_back(&last, &before);
        target.nothing_got_out(tried);
        target.machine.all_is_attached();
        let maps = target.machine.maps();
        assert_eq!(maps.ledger().into_iter().find(|(key, _)| *key == gone), Some((gone, sums)));
        assert_eq!(maps.name(target.id()), Some(name));
        let of_shop = [("namespace", "shop"), ("mesh", "linkerd")];
        assert!(after.sum("bypass_connections_total", &of_shop) > 0, "{after:?}");
        assert!(maps.exempt_sets().contains(&5), "what is exempt");

        // And what follows is an upgrade like any other: it keeps what was carried.
        let counters = maps.counters(target.id()).unwrap();
        assert!(last.terminate().success());
        let last = start(&target.machine);
        assert_eq!(
            count(&target.machine.maps().counters(target.id()).unwrap(), Counter::Bypass),
            count(&counters, Counter::Bypass)
        );
        tell(&format!("upgrade {round} of the maps' layout, {version} to {ABI_VERSION}, under load"), tried);
        last.kill();
    }
}

/// Killed at any moment of it, the next start goes on.
#[test]
fn an_upgrade_of_the_layout_that_is_killed_is_finished_by_the_next_start() {
    let (mut target, agent) = Target::new("cut", start);
    let (last, tried) = target.under_load(|| {
        assert!(agent.terminate().success());
        becomes_layout(&target.machine, ABI_VERSION - 1);
        for turn in 0..rounds(12) {
            let agent = target.machine.launch().args(NOTHING_PASSES).start();
            let moment = Instant::now() + Duration::from_millis(u64::from(turn) * 30 % 360);
            wait::until("the moment", wait::HANG, || (Instant::now() >= moment).then_some(())).unwrap();
            agent.kill();
        }
        start(&target.machine)
    });
    target.nothing_got_out(tried);
    target.machine.all_is_attached();
    last.kill();
}

/// A start that cannot prove its programs gives the links back: the version before works as it did.
#[test]
fn a_failed_upgrade_of_the_layout_leaves_the_version_before_at_work() {
    let (mut target, agent) = Target::new("back", start);
    let kubepods = target.machine.scratch.kubepods();
    let (last, tried) = target.under_load(|| {
        assert!(agent.terminate().success());
        becomes_layout(&target.machine, ABI_VERSION - 1);
        let programs = target.machine.programs();
        let old = target.machine.mounts.pins();
        fs::write(kubepods.join("cgroup.max.descendants"), "0").unwrap();
        says(&target.machine.launch().args(NOTHING_PASSES).fail(), 69, &["did not see a test connection"]);
        fs::write(kubepods.join("cgroup.max.descendants"), "max").unwrap();
        assert_eq!(target.machine.programs(), programs);
        assert_eq!(target.machine.mounts.pins(), old);
        start(&target.machine)
    });
    // What the failed one counted itself went with it, so that only this is exact.
    let _ = tried;
    target.nothing_arrived();
    target.machine.all_is_attached();
    last.kill();
}

#[test]
fn a_newer_layout_is_refused_and_goes_on_enforcing() {
    let (mut target, agent) = Target::new("newer", start);
    assert!(agent.terminate().success());
    let newer = ABI_VERSION + 1;
    target.machine.mounts.sh(&format!("mv {BPF_DIR}/v{ABI_VERSION} {BPF_DIR}/v{newer}"));
    let old = target.machine.mounts.pins();
    let ((), _) = target.under_load(|| {
        let words =
            ["later version of nobypass", &format!("layout {newer}"), "go on enforcing", "nobypass cleanup"];
        says(&target.machine.launch().args(NOTHING_PASSES).fail(), 1, &words);
        let preflight = target.machine.nobypass(&["preflight"]);
        assert!(preflight.out.contains("later version of nobypass"), "{}", preflight.out);
    });
    assert_eq!(target.machine.mounts.pins(), old);
    target.nothing_arrived();
    // The way back that the message names.
    assert_eq!(target.machine.cleanup().code, Some(0));
    assert_eq!((target.machine.mounts.pins(), target.machine.programs()), (vec![], vec![]));
    start(&target.machine).kill();
}

/// Two at once, started at the same moment: one works, the other says why not; and so again when the first is gone.
#[test]
fn of_two_agents_at_once_one_works() {
    let (mut target, agent) = Target::new("two", start);
    let home = tempfile::tempdir().unwrap();
    let (last, tried) = target.under_load(|| {
        let mut agent = agent;
        for _ in 0..rounds(4) {
            let kubepods = target.machine.scratch.kubepods();
            let second = Launch::new(target.machine.mounts.command(BIN), home.path())
                .args(["--metrics-addr", "none", "--pod-parent"])
                .args([kubepods])
                .args(NOTHING_PASSES);
            says(&second.fail(), 1, &["another nobypass agent works with", "stop it first"]);
            assert!(agent.is_running());
            target.machine.all_is_attached();
            agent.kill();
            agent = start(&target.machine);
        }
        agent
    });
    target.nothing_got_out(tried);
    last.kill();
}

/// What `bpftool`, backup programs and curious people do to a bpffs.
#[test]
fn listing_and_reading_the_pins_disturbs_nothing() {
    let (mut target, mut agent) = Target::new("listing", start);
    let done = AtomicBool::new(false);
    let (agent, tried) = target.under_load(|| {
        std::thread::scope(|scope| {
            let bpffs = target.machine.mounts.see("/sys/fs/bpf");
            let walk = |script: &'static str| {
                let (bpffs, done) = (bpffs.clone(), &done);
                move || {
                    let mut walks = 0_u32;
                    while !done.load(Ordering::Relaxed) {
                        let mut sh = Command::new("sh");
                        sh.args(["-c", script, "sh"]).arg(&bpffs);
                        proc::check(sh, "").unwrap();
                        walks += 1;
                    }
                    walks
                }
            };
            let one = scope.spawn(walk("ls -lR $1 > /dev/null; find $1 -exec stat {} + > /dev/null"));
            let two =
                scope.spawn(walk("for pin in $1/nobypass/v*/*; do cat $pin > /dev/null 2>&1 || :; done"));
            // As `bpftool map dump pinned`: everything that is in every map.
            let pins = PinDir::new(&target.machine.mounts.see(BPF_DIR));
            let dump = scope.spawn({
                let done = &done;
                move || {
                    let mut dumps = 0_u32;
                    while !done.load(Ordering::Relaxed) {
                        let maps = Maps::open(&pins).unwrap();
                        let pods = (maps.policies(), maps.counted(), maps.totals().unwrap());
                        let _ = (pods, maps.ledger(), maps.exempt_sets());
                        dumps += 1;
                    }
                    dumps
                }
            });
            for _ in 0..rounds(5) {
                agent.kill();
                agent = start(&target.machine);
            }
            done.store(true, Ordering::Relaxed);
            let walks = one.join().unwrap() + two.join().unwrap();
            println!("{walks} walks, {} dumps", dump.join().unwrap());
            agent
        })
    });
    target.nothing_got_out(tried);
    target.machine.all_is_attached();
    agent.kill();
}

fn signal(agent: &Agent, name: &str) {
    let mut kill = Command::new("kill");
    kill.args([format!("-{name}"), agent.pid().to_string()]);
    proc::check(kill, "").unwrap();
}

/// An agent that hangs is like one that is dead: what it set goes on, and nobody can take its place unnoticed.
#[test]
fn an_agent_that_hangs_lets_nothing_out() {
    let (mut target, agent) = Target::new("hang", start);
    let home = tempfile::tempdir().unwrap();
    let (agent, tried) = target.under_load(|| {
        for _ in 0..rounds(3) {
            signal(&agent, "STOP");
            let before = target.machine.maps().totals().unwrap();
            let second = Launch::new(target.machine.mounts.command(BIN), home.path())
                .args(["--metrics-addr", "none", "--pod-parent"])
                .args([target.machine.scratch.kubepods()]);
            says(&second.fail(), 1, &["another nobypass agent works with"]);
            wait::until("the load to go on", wait::HANG, || {
                let now = target.machine.maps().totals().unwrap();
                (count(&now, Counter::Bypass) > count(&before, Counter::Bypass) + 100).then_some(())
            })
            .unwrap();
            signal(&agent, "CONT");
            agent.until("its answer", |agent| agent.get("/livez").filter(|(code, _)| *code == 200));
        }
        agent
    });
    target.nothing_got_out(tried);
    agent.kill();
}

/// Hung for longer than the operator allows: what it set ends if the operator wants that, and holds again with its first
/// heartbeat.
#[test]
fn an_agent_that_hangs_for_too_long_is_treated_as_the_operator_says() {
    std::thread::scope(|scope| {
        for (on_silence, passes) in [("keep", false), ("audit", true)] {
            scope.spawn(move || hangs_for_too_long(on_silence, passes));
        }
    });
}

fn hangs_for_too_long(on_silence: &str, passes: bool) {
    let home = tempfile::tempdir().unwrap();
    let policy = home.path().join("policy.yaml");
    let text = "apiVersion: nobypass.dev/v1alpha1\nmode: enforce\nmaxAgentSilence: 30s\n";
    fs::write(&policy, format!("{text}onSilence: {on_silence}\n")).unwrap();
    let launch =
        |machine: &Machine| machine.launch().args([Path::new("--policy"), &policy]).start().attached();
    let (target, agent) = Target::new(on_silence, launch);
    assert!(!target.connect().ok(), "{on_silence}");
    signal(&agent, "STOP");
    let maps = target.machine.maps();
    let silent = || Duration::from_nanos(monotonic_ns() - maps.heartbeat().unwrap());
    wait::until("the silence", wait::HANG, || {
        let before = silent();
        let passed = target.connect().ok();
        assert!(!passed || silent() > Duration::from_secs(30), "{on_silence}: too early, after {before:?}");
        (silent() > Duration::from_secs(31)).then_some(())
    })
    .unwrap();
    assert_eq!(target.connect().ok(), passes, "{on_silence}");
    signal(&agent, "CONT");
    wait::until("enforcement", wait::HANG, || (!target.connect().ok()).then_some(())).unwrap();
    agent.kill();
}
