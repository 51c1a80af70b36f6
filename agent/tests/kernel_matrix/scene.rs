//! A meshed pod with an app and a proxy on a small network, and the measure of what one try did.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

use nobypass::bpf::Maps;
use nobypass_common::abi::{POD_PROXY_UID, POD_TPROXY, PodPolicy, Refusal};
use nobypass_common::ids::{Counter, Mode, PodKind};
use nobypass_testkit::cgroup::{Cgroup, Pod, Qos};
use nobypass_testkit::netns::{FAR4, FAR6, PodNet, World, world_with_pod};
use nobypass_testkit::redirect::{Ports, Variant, apply_redirect};
use nobypass_testkit::traffic::{Report, Running, Traffic};
use nobypass_testkit::wait;

use crate::support::agent::Agent;
use crate::support::machine::Machine;

/// Where the outside listens: plain TCP, ports that UDP gives a meaning, and neighbours of an exempt range.
pub const FAR_PORTS: [u16; 6] = [8080, 53, 443, 8079, 8083, 8084];
/// Nobody listens there.
pub const CLOSED: u16 = 9999;
/// Where the application listens.
pub const OWN_PORT: u16 = 9000;
/// The application's UID.
pub const APP_UID: u32 = 1000;
/// How long an application waits that waits in vain: less than the second after which the kernel repeats a SYN.
pub const PATIENCE_MS: u64 = 300;
/// How long one waits that is answered, on however slow a machine.
const ANSWERED_MS: u64 = 20_000;
/// What an application sees of a connection whose SYN was dropped, while an agent runs.
pub const BLOCKED: &[&str] = &["ECONNABORTED"];
/// What it sees of one that is held, or dropped with no agent to tell it.
pub const HANGING: &[&str] = &["TIMEOUT"];

/// Counters that are not zero.
pub type Counts = BTreeMap<&'static str, u64>;

/// As a table has them.
pub fn counts(list: &[(Counter, u64)]) -> Counts {
    list.iter().map(|(counter, n)| (counter.label(), *n)).collect()
}

/// An agent that judges everything, on a machine of its own.
pub struct Node {
    pub maps: Maps,
    /// `None` for a test of what the kernel does alone.
    pub agent: Option<Agent>,
    pub machine: Machine,
}

impl Node {
    pub fn new() -> Self {
        Self::start(Machine::new(), &[])
    }

    pub fn start(machine: Machine, args: &[&str]) -> Self {
        let all = ["--non-tcp", "count", "--inbound", "audit", "--event-rate", "100000"];
        let agent = machine.launch().args(all).args(args).start().attached();
        Self { maps: machine.maps(), agent: Some(agent), machine }
    }

    /// A meshed pod whose network redirects in this way.
    pub fn meshed(&mut self, variant: Variant) -> Scene {
        let scene = Scene::new(self, Qos::Burstable, variant);
        let policy = scene.policy;
        self.maps.set_policy(scene.id, &policy).unwrap();
        scene
    }

    /// Changes the pod's policy for good.
    pub fn set(&mut self, scene: &mut Scene, change: impl FnOnce(&mut PodPolicy)) {
        change(&mut scene.policy);
        scene.policy.revision += 1;
        // As if a connection had been let through just now, for as long as the test takes.
        let refusal = Refusal { tried_ns: [u64::MAX; 2], healed_ns: [0; 2] };
        self.maps.set_refusal(scene.id, &refusal).unwrap();
        self.maps.set_policy(scene.id, &scene.policy).unwrap();
    }

    pub fn mode(&mut self, mode: Mode) {
        self.maps.set_mode(mode).unwrap();
    }

    /// Runs one try and checks it.
    pub fn check(&self, name: &str, scene: &Scene, expected: &Expected, run: impl FnOnce() -> Report) {
        scene.expect(expected);
        expected.check(name, &self.measure(scene, run));
    }

    /// Runs one try and measures it. Retransmits count only for who waited for them.
    pub fn measure(&self, scene: &Scene, run: impl FnOnce() -> Report) -> Seen {
        let mut seen = self.measure_all(scene, run);
        // On a machine that stood still the helper's patience outlasted the kernel's.
        if seen.report.count("total_us") >= 900_000 {
            seen.counted.remove(Counter::Retry.label());
        }
        seen
    }

    /// As [`Node::measure`], retransmits included.
    pub fn measure_all(&self, scene: &Scene, run: impl FnOnce() -> Report) -> Seen {
        let before = scene.state(&self.maps);
        let report = run();
        let after = scene.state(&self.maps);
        let grown = |label: &&'static str| after.0[label] - before.0.get(label).copied().unwrap_or(0);
        let mut counted: Counts = after.0.keys().map(|label| (*label, grown(label))).collect();
        counted.retain(|_, n| *n > 0);
        Seen { counted, report, outside: after.1 - before.1 }
    }
}

/// What one try did.
#[derive(Debug)]
pub struct Seen {
    /// By how much the pod's counters grew; those that did not are left out.
    pub counted: Counts,
    pub report: Report,
    /// SYNs that reached the outside.
    pub outside: u64,
}

/// What it should have done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    pub counted: Counts,
    /// One of these.
    pub saw: &'static [&'static str],
    pub outside: u64,
}

impl Expected {
    pub fn new(counted: &[(Counter, u64)], saw: &'static [&'static str], outside: u64) -> Self {
        Self { counted: counts(counted), saw, outside }
    }

    /// A connection around the proxy.
    pub fn bypass(counter: Counter, dropped: Counter, mode: Mode, plain: &'static [&'static str]) -> Self {
        Self::stopped(counter, dropped, mode, plain, BLOCKED)
    }

    /// As [`Expected::bypass`], and what the application sees in enforce.
    pub fn stopped(
        counter: Counter,
        dropped: Counter,
        mode: Mode,
        plain: &'static [&'static str],
        blocked: &'static [&'static str],
    ) -> Self {
        let event = (Counter::EventsEmitted, 1);
        match mode {
            Mode::Off => Self::new(&[(Counter::NotJudged, 1)], plain, 1),
            Mode::Audit => Self::new(&[(counter, 1), (Counter::WouldDrop, 1), event], plain, 1),
            Mode::Enforce => Self::new(&[(counter, 1), (dropped, 1), event], blocked, 0),
        }
    }

    /// An ordinary bypass.
    pub fn plain_bypass(mode: Mode) -> Self {
        Self::bypass(Counter::Bypass, Counter::BypassDropped, mode, &["plain"])
    }

    /// A connection that passes and is counted once.
    pub fn passes(counter: Counter) -> Self {
        Self::new(&[(counter, 1)], &["plain"], 1)
    }

    /// The difference in words, `None` without one.
    pub fn differs(&self, name: &str, seen: &Seen) -> Option<String> {
        let saw = self.saw.contains(&saw(&seen.report));
        let same = self.counted == seen.counted && saw && self.outside == seen.outside;
        (!same).then(|| {
            let Seen { counted, report, outside } = seen;
            format!(
                "{name}\n  expected {:?}, saw {:?}, {} SYNs outside\n  got      {counted:?}, saw {:?}, \
                 {outside} SYNs outside\n  {report}",
                self.counted,
                self.saw,
                self.outside,
                self::saw(report)
            )
        })
    }

    /// Fails with the difference.
    pub fn check(&self, name: &str, seen: &Seen) {
        let difference = self.differs(name, seen);
        assert!(difference.is_none(), "{}", difference.unwrap_or_default());
    }
}

/// In one word; datagrams have no answer of their own.
pub fn saw(report: &Report) -> &str {
    match report.json()["cmd"].as_str() {
        Some("udp") if report.ok() => "echo",
        _ => report.saw(),
    }
}

/// A pod, its network and what runs in it.
pub struct Scene {
    /// What runs: the outside's server, the application's, the proxy.
    _running: Vec<Running>,
    /// How long applications wait, ms.
    patience: Cell<u64>,
    pub world: World,
    pub net: PodNet,
    pub pod: Pod,
    pub app: Cgroup,
    pub proxy: Cgroup,
    pub proxy_uid: u32,
    pub id: u64,
    /// Its entry as [`Node::meshed`] wrote it.
    pub policy: PodPolicy,
}

impl Scene {
    /// Nothing is written to the pod's entry.
    pub fn new(node: &Node, qos: Qos, variant: Variant) -> Self {
        let (world, net) = world_with_pod("matrix").unwrap();
        world.count_syns().unwrap();
        let far = Traffic::new().netns(world.far()).server(&FAR_PORTS).unwrap();
        apply_redirect(&net.ns, variant).unwrap();
        let pod = node.machine.scratch.pod(qos, &uid()).unwrap();
        let [app, proxy] = ["a", "b"].map(|digit| pod.container(&digit.repeat(64)).unwrap());
        let id = pod.id().unwrap();
        let known = wait::until("the pod's entry", wait::HANG, || node.maps.policy(id)).unwrap();
        let server = Traffic::new().netns(&net.ns).cgroup(&app).uid(APP_UID).server(&[OWN_PORT]).unwrap();
        let mut running = vec![far, server];
        if variant != Variant::None {
            running.push(Traffic::new().netns(&net.ns).cgroup(&proxy).proxy(variant).unwrap());
        }
        let proxy_uid = Ports::of(variant).uid;
        let policy = PodPolicy {
            kind: PodKind::Meshed.code(),
            flags: if variant == Variant::Tproxy { POD_PROXY_UID | POD_TPROXY } else { POD_PROXY_UID },
            proxy_cgroup: proxy.id().unwrap(),
            proxy_uid,
            ..known
        };
        Self {
            _running: running,
            patience: Cell::new(PATIENCE_MS),
            world,
            net,
            pod,
            app,
            proxy,
            proxy_uid,
            id,
            policy,
        }
    }

    /// Makes the next tries as patient as what they will see allows.
    pub fn expect(&self, expected: &Expected) {
        let answered = !expected.saw.contains(&"TIMEOUT");
        self.patience.set(if answered { ANSWERED_MS } else { PATIENCE_MS });
    }

    /// See [`Scene::expect`], ms.
    pub fn patience(&self) -> u64 {
        self.patience.get()
    }

    fn traffic(&self, cgroup: &Cgroup) -> Traffic {
        Traffic::new().netns(&self.net.ns).cgroup(cgroup).option("timeout-ms", self.patience.get())
    }

    /// Of the application.
    pub fn app(&self) -> Traffic {
        self.traffic(&self.app).uid(APP_UID)
    }

    /// One try of the application to the outside, in the family that the command has.
    pub fn out(&self, command: &str, port: u16) -> Report {
        self.app().run(&[&command, &far(command), &port]).unwrap()
    }

    /// From the application's container as another user, 0 for what needs a raw socket.
    pub fn app_as(&self, uid: u32) -> Traffic {
        let traffic = self.traffic(&self.app);
        if uid == 0 { traffic } else { traffic.uid(uid) }
    }

    /// Of the proxy itself.
    pub fn sidecar(&self) -> Traffic {
        self.traffic(&self.proxy).uid(self.proxy_uid)
    }

    /// As [`Scene::app`] in another cgroup.
    pub fn in_cgroup(&self, cgroup: &Cgroup) -> Traffic {
        self.traffic(cgroup).uid(APP_UID)
    }

    /// From outside.
    pub fn outside(&self) -> Traffic {
        Traffic::new().netns(self.world.far()).option("timeout-ms", self.patience.get())
    }

    /// All counters, and the SYNs outside.
    fn state(&self, maps: &Maps) -> (Counts, u64) {
        let all = maps.counters(self.id).unwrap_or_default().count;
        let counted = Counter::ALL.iter().map(|counter| (counter.label(), all[counter.code() as usize]));
        (counted.collect(), self.world.syns().unwrap())
    }
}

/// The outside's address for a command.
pub fn far(command: &str) -> IpAddr {
    if command.ends_with('6') { FAR6.into() } else { FAR4.into() }
}

/// Whether this kernel can do what a command does: some are built without multipath TCP.
pub fn exists(command: &str) -> bool {
    command != "mptcp" || Path::new("/proc/sys/net/mptcp").exists()
}

/// Another UID for each pod.
fn uid() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(1);
    format!("2c48913c-b29f-11e7-9350-{:012x}", NEXT.fetch_add(1, Ordering::Relaxed))
}
