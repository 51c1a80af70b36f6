//! A meshed pod without rules that never stops trying to get out: what an agent's absence must not let through.

use std::sync::atomic::{AtomicBool, Ordering};

use nobypass::bpf::Maps;
use nobypass::detect::verdict::{bypasses, count};
use nobypass_common::abi::{POD_NON_TCP_DROP, PodPolicy};
use nobypass_common::ids::{Counter, PodKind};
use nobypass_testkit::cgroup::{Cgroup, Pod, Qos};
use nobypass_testkit::netns::{FAR4, FAR6, PodNet, World, world_with_pod};
use nobypass_testkit::traffic::{Report, Running, Traffic};
use nobypass_testkit::wait;

use super::agent::Agent;
use super::machine::{Machine, UID};

const PORT: u16 = 8080;
/// Of one process of the load.
const BATCH: u64 = 300;

/// Arguments of an agent that lets nothing of it pass.
pub const NOTHING_PASSES: [&str; 4] = ["--mode", "enforce", "--non-tcp", "drop"];

/// A machine with an agent, and the pod.
pub struct Target {
    pub machine: Machine,
    world: World,
    net: PodNet,
    pod: Pod,
    app: Cgroup,
    server: Running,
}

/// What the pod tried.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tried {
    pub connections: u64,
    pub datagrams: u64,
}

/// Counts everything but ARP and ICMP that arrives outside.
const WITNESS: &str = "table inet witness {\n counter any { }\n chain arrived {\n \
    type filter hook prerouting priority -350; policy accept;\n \
    iifname \"br0\" meta l4proto { tcp, udp } counter name any\n }\n}\n";

impl Target {
    /// Starts an agent; the pod is known to it as meshed.
    pub fn new(name: &str, launch: impl Fn(&Machine) -> Agent) -> (Self, Agent) {
        let machine = Machine::new();
        let (world, net) = world_with_pod(name).unwrap();
        let server = Traffic::new().netns(world.far()).server(&[PORT]).unwrap();
        let agent = launch(&machine);
        let mut maps = machine.maps();
        let pod = machine.scratch.pod(Qos::Burstable, UID).unwrap();
        let app = pod.container(&"a".repeat(64)).unwrap();
        let id = pod.id().unwrap();
        let known = wait::until("the pod's entry", wait::HANG, || maps.policy(id)).unwrap();
        let policy = PodPolicy { kind: PodKind::Meshed.code(), flags: POD_NON_TCP_DROP, ..known };
        maps.set_policy(id, &policy).unwrap();
        world.far().check("nft", &["-f", "-"], WITNESS).unwrap();
        (Self { machine, world, net, pod, app, server }, agent)
    }

    pub fn id(&self) -> u64 {
        self.pod.id().unwrap()
    }

    fn traffic(&self) -> Traffic {
        Traffic::new().netns(&self.net.ns).cgroup(&self.app)
    }

    /// Does something while the pod tries to connect by IPv4 and IPv6 and sends datagrams.
    pub fn under_load<T>(&self, work: impl FnOnce() -> T) -> (T, Tried) {
        let stop = Stop::default();
        std::thread::scope(|scope| {
            let repeat = |words: [String; 2], what: &'static str| {
                let (stop, traffic) = (&stop, self.traffic());
                move || {
                    let mut tried = 0;
                    while !stop.0.load(Ordering::Relaxed) {
                        let report = traffic.run(&[&words[0], &words[1], &PORT, &BATCH]).unwrap();
                        tried += report.count(what);
                    }
                    tried
                }
            };
            let v4 = scope.spawn(repeat(["flood".into(), FAR4.to_string()], "started"));
            let v6 = scope.spawn(repeat(["flood".into(), FAR6.to_string()], "started"));
            let udp = scope.spawn(repeat(["datagrams".into(), FAR4.to_string()], "tried"));
            // Stops the load also when `work` panics.
            let ending = Ending(&stop);
            let done = work();
            drop(ending);
            let connections = v4.join().unwrap() + v6.join().unwrap();
            (done, Tried { connections, datagrams: udp.join().unwrap() })
        })
    }

    /// One connection of the pod's.
    pub fn connect(&self) -> Report {
        self.traffic().option("timeout-ms", 300).run(&[&"tcp4", &FAR4, &PORT]).unwrap()
    }

    /// Nothing arrived outside, and nobody was served.
    pub fn nothing_arrived(&mut self) {
        let words = ["-j", "list", "counter", "inet", "witness", "any"];
        let json: serde_json::Value =
            serde_json::from_str(&self.world.far().check("nft", &words, "").unwrap()).unwrap();
        let items = json["nftables"].as_array().unwrap();
        let packets = items.iter().find_map(|item| item["counter"]["packets"].as_u64());
        assert_eq!(packets, Some(0), "packets seen outside");
        let served = self.server.stats().unwrap();
        assert_eq!(served.count("tcp_accepted"), 0, "{served}");
    }

    /// As [`Target::nothing_arrived`], and each try was counted once.
    pub fn nothing_got_out(&mut self, tried: Tried) {
        self.nothing_arrived();
        let maps = self.machine.maps();
        let Tried { connections, datagrams } = tried;
        assert!(connections > 0 && datagrams > 0, "{tried:?}");
        let counters = maps.counters(self.id()).unwrap();
        let counted = |counter| count(&counters, counter);
        assert_eq!(counted(Counter::Bypass), connections, "each connection counts once, whoever watched");
        assert_eq!(counted(Counter::BypassDropped), connections);
        assert_eq!(counted(Counter::Udp), datagrams, "each datagram counts once");
        assert_eq!(counted(Counter::NonTcpDropped), datagrams);
        let totals = maps.totals().unwrap();
        assert_eq!(bypasses(&totals), connections, "the node's sums");
        let events = [Counter::EventsEmitted, Counter::EventsSuppressed, Counter::EventsRingFull];
        let events: u64 = events.map(|counter| count(&totals, counter)).iter().sum();
        assert_eq!(events, connections, "emitted + suppressed + lost");
    }

    /// The same tries where nothing is dropped: the witnesses would have seen them.
    pub fn would_have_been_seen(&mut self, maps: &mut Maps) {
        let known = maps.policy(self.id()).unwrap();
        maps.set_policy(self.id(), &PodPolicy { kind: PodKind::Exempt.code(), ..known }).unwrap();
        for (what, address) in
            [("tcp4", FAR4.to_string()), ("tcp6", FAR6.to_string()), ("udp", FAR4.to_string())]
        {
            let report = self.traffic().run(&[&what, &address, &PORT]).unwrap();
            assert!(report.ok(), "{what}: {report}");
        }
        assert_eq!(self.server.stats().unwrap().count("tcp_accepted"), 2);
    }
}

#[derive(Default)]
struct Stop(AtomicBool);

struct Ending<'a>(&'a Stop);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}
