//! What must hold without exception: nothing gets out first, nothing is counted twice or not at all, and an agent
//! that dies takes nothing with it.

#![allow(
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

use nobypass::bpf::Maps;
use nobypass::detect::verdict::{bypasses, count};
use nobypass_common::abi::{NAME_MAX, PodCounters, PodName, PodPolicy};
use nobypass_common::ids::{Counter, PodKind};
use nobypass_testkit::cgroup::{Cgroup, Pod, Qos};
use nobypass_testkit::figures::Figure;
use nobypass_testkit::netns::{FAR4, Netns, world_with_pod};
use nobypass_testkit::traffic::Traffic;
use nobypass_testkit::wait;
use support::agent::Agent;
use support::machine::Machine;

const PORT: u16 = 8080;
const UID: &str = "2c48913c-b29f-11e7-9350-020968147796";

/// How many new cgroups each way of entering them is tried with.
fn tries() -> u64 {
    number("NOBYPASS_TEST_FIRST_PACKETS", 10_000)
}

/// How many connections each of two processes makes in each part of the flood.
fn flooded() -> u64 {
    number("NOBYPASS_TEST_FLOOD", 20_000)
}

/// A smaller number is for trying things out, and where emulation is slow.
fn number(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// A pod that its agent knows as meshed, with an app container in it.
fn meshed(machine: &Machine, maps: &mut Maps) -> (Pod, Cgroup) {
    let pod = machine.scratch.pod(Qos::Burstable, UID).unwrap();
    let app = pod.container(&"a".repeat(64)).unwrap();
    let id = pod.id().unwrap();
    let known = wait::until("the pod's entry", wait::HANG, || maps.policy(id)).unwrap();
    maps.set_policy(id, &PodPolicy { kind: PodKind::Meshed.code(), ..known }).unwrap();
    (pod, app)
}

fn first_packets(machine: &Machine, netns: &Netns, enter: &str, n: u64) -> (u64, u64) {
    let below = machine.scratch.kubepods().join("burstable");
    std::fs::create_dir_all(&below).unwrap();
    let traffic = Traffic::new()
        .netns(netns)
        .option("parent", below.display())
        .option("count", n)
        .option("enter", enter);
    let report = traffic.run(&[&"first-packet", &FAR4, &PORT]).unwrap();
    (report.count("tried"), report.count("established"))
}

/// A brand-new pod's first process's first action is connect(): with unknown pods held, not one SYN gets out, with
/// an agent and without.
#[test]
fn no_first_packet_of_a_brand_new_pod_gets_out() {
    let machine = Machine::new();
    let (world, pod) = world_with_pod("first").unwrap();
    let _server = Traffic::new().netns(world.far()).server(&[PORT]).unwrap();
    let args = ["--mode", "enforce", "--unknown-pods", "hold", "--hold-ms", "60000"];
    let agent = machine.launch().args(args).start().attached();
    world.count_syns().unwrap();
    let tries = tries();
    for enter in ["procs", "clone3"] {
        assert_eq!(first_packets(&machine, &pod.ns, enter, tries), (tries, 0), "by {enter}, agent alive");
    }
    let maps = machine.maps();
    assert_eq!(count(&maps.totals().unwrap(), Counter::Held), 2 * tries, "each held once");
    agent.kill();
    for enter in ["procs", "clone3"] {
        assert_eq!(first_packets(&machine, &pod.ns, enter, tries), (tries, 0), "by {enter}, agent dead");
    }
    assert_eq!(count(&maps.totals().unwrap(), Counter::Held), 4 * tries, "each held once, nobody watching");
    assert_eq!(world.syns().unwrap(), 0, "SYNs seen outside");
    let what = "connections out of brand-new pods whose first action is `connect()`, unknown pods held, agent alive and dead";
    Figure::new(what, format!("0 of {}", 4 * tries)).promised("0", true).tell().unwrap();
    // The same try without a hold: the test can tell the difference.
    let agent = machine.launch().start().attached();
    assert_eq!(first_packets(&machine, &pod.ns, "clone3", 200), (200, 200));
    agent.kill();
}

/// As when many pods came and went while no agent and, before 5.15, no tracepoint removed their entries.
#[test]
fn no_first_packet_gets_out_where_the_map_of_pods_is_full() {
    let machine = Machine::new();
    let (world, pod) = world_with_pod("full").unwrap();
    let _server = Traffic::new().netns(world.far()).server(&[PORT]).unwrap();
    let args = ["--mode", "enforce", "--unknown-pods", "hold", "--hold-ms", "60000", "--max-pods", "64"];
    let agent = machine.launch().args(args).start().attached();
    // The QoS class has its entry before the map is full.
    let mut maps = machine.maps();
    meshed(&machine, &mut maps);
    agent.kill();
    world.count_syns().unwrap();
    // No cgroup has such an id.
    let full = (1..=1024).any(|n| maps.set_policy(u64::MAX - n, &PodPolicy::default()).is_err());
    assert!(full, "the map is full");
    assert_eq!(first_packets(&machine, &pod.ns, "clone3", 50), (50, 0));
    assert_eq!(world.syns().unwrap(), 0, "SYNs seen outside");
    assert_eq!(count(&maps.totals().unwrap(), Counter::Held), 50, "each held once");
}

/// Two processes flood; one more counter than connection, or one less, fails.
fn flood(pod: &Cgroup, netns: &Netns, n: u64) -> u64 {
    std::thread::scope(|scope| {
        let one = || {
            let traffic = Traffic::new().netns(netns).cgroup(pod).option("parallel", 2);
            traffic.run(&[&"flood", &FAR4, &PORT, &n]).unwrap().count("started")
        };
        let other = scope.spawn(one);
        one() + other.join().unwrap()
    })
}

fn events(totals: &PodCounters) -> [u64; 3] {
    [Counter::EventsEmitted, Counter::EventsSuppressed, Counter::EventsRingFull]
        .map(|counter| count(totals, counter))
}

#[test]
fn a_flood_is_counted_to_the_unit_with_and_without_a_reader() {
    let machine = Machine::new();
    let (world, net) = world_with_pod("flood").unwrap();
    let _server = Traffic::new().netns(world.far()).server(&[PORT]).unwrap();
    // Without a limit worth the name the ring buffer is what overflows.
    let agent = machine.launch().args(["--event-rate", "100000"]).start().attached();
    let mut maps = machine.maps();
    let (pod, app) = meshed(&machine, &mut maps);
    let id = pod.id().unwrap();

    let mut connects = flood(&app, &net.ns, flooded());
    let exact = |maps: &Maps, connects: u64| {
        let totals = maps.totals().unwrap();
        assert_eq!(count(&maps.counters(id).unwrap(), Counter::Bypass), connects, "the pod's counter");
        assert_eq!(bypasses(&totals), connects, "the node's counter");
        assert_eq!(
            events(&totals).iter().sum::<u64>(),
            connects,
            "emitted + suppressed + lost: {:?}",
            events(&totals)
        );
        totals
    };
    exact(&maps, connects);
    agent.kill();
    connects += flood(&app, &net.ns, flooded());
    let totals = exact(&maps, connects);
    assert!(
        count(&totals, Counter::EventsRingFull) > 0,
        "nobody read, so the ring buffer was full: {totals:?}"
    );
    assert!(count(&totals, Counter::Retry) == 0, "an answered SYN is not repeated");

    // With the usual limit, what is left out is suppressed, not lost, and a new agent reads what waited.
    let agent = machine.launch().start().attached();
    let before = resident_kb(agent.pid());
    connects += flood(&app, &net.ns, flooded());
    let totals = exact(&maps, connects);
    let grown = resident_kb(agent.pid()).saturating_sub(before);
    assert!(grown < 8_000, "memory grew by {grown} kB");
    assert!(count(&totals, Counter::EventsSuppressed) > flooded(), "{totals:?}");
    // What the agent exports is what the kernel counted.
    let status = agent.status();
    assert_eq!(status["pods"][0]["bypasses"], connects);
    assert!(
        agent.log().lines().filter(|line| line.contains("bypasses its proxy")).count() <= 10,
        "{}",
        agent.log()
    );
    agent.kill();
    let what = format!("a flood of {connects} bypasses from two processes, with and without a reader");
    let figure =
        format!("counter, and emitted + suppressed + lost, exact to the unit; the agent grew by {grown} kB");
    Figure::new(what, figure).promised("exact; memory flat, log bounded", true).tell().unwrap();
}

fn resident_kb(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// A pod that ends takes nothing from the sums, nor does an agent that ends after it.
#[test]
fn sums_of_pods_that_are_gone_outlive_pods_and_agents() {
    const TRIES: u64 = 300;
    let machine = Machine::new();
    let (world, net) = world_with_pod("sums").unwrap();
    let _server = Traffic::new().netns(world.far()).server(&[PORT]).unwrap();
    let agent = machine.launch().start().attached();
    let mut maps = machine.maps();
    let (pod, app) = meshed(&machine, &mut maps);
    let field = |text: &str| {
        let mut bytes = [0; 64];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        bytes
    };
    let mut name = PodName { namespace: field("shop"), name: [0; NAME_MAX], mesh: [0; 32] };
    name.name[..4].copy_from_slice(b"cart");
    name.mesh[..7].copy_from_slice(b"linkerd");
    maps.set_name(pod.id().unwrap(), &name).unwrap();
    let traffic = Traffic::new().netns(&net.ns).cgroup(&app);
    assert_eq!(traffic.run(&[&"flood", &FAR4, &PORT, &TRIES]).unwrap().count("started"), TRIES);

    let labels = [("namespace", "shop"), ("mesh", "linkerd")];
    let sum = |agent: &Agent| agent.metrics().sum("bypass_connections_total", &labels);
    agent.kill();
    // The pod lives, its source is silent: the new agent remembers what the last one knew of it.
    let agent = machine.launch().start().attached();
    assert_eq!(sum(&agent), TRIES, "of a living pod");
    (*pod).clone().remove().unwrap();
    agent.until("the pod to be forgotten", |agent| {
        agent.status()["pods"].as_array().unwrap().is_empty().then_some(())
    });
    assert_eq!(sum(&agent), TRIES, "after the pod");
    agent.kill();
    let agent = machine.launch().start().attached();
    assert_eq!(sum(&agent), TRIES, "after the pod and the agent");
    agent.kill();
}
