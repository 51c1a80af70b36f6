//! What a connection costs an application with nobypass, without it, and with a firewall rule that does the nearest
//! equivalent: `cargo bench -p nobypass --features kernel-tests --bench connect_cost`, as root.
//!
//! Each round makes the same connections from one network namespace for each candidate, right after one another, in an
//! order that turns. What is compared is the CPU time of the process that connects and closes; on veth and lo most of what
//! a packet costs is done in its context. After `--`: `--rounds <n>`, `--connections <n>`.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a benchmark"
)]

#[path = "../tests/support"]
mod support {
    #![allow(dead_code, reason = "each target uses its part")]
    pub mod agent;
    pub mod machine;
    pub mod mounts;
}

use std::process::ExitCode;

use nobypass::bpf::Maps;
use nobypass_common::abi::PodPolicy;
use nobypass_common::ids::PodKind;
use nobypass_testkit::cgroup::{Cgroup, Pod, Qos, Scratch, v2_root};
use nobypass_testkit::figures::{Figure, Samples, argument};
use nobypass_testkit::netns::{FAR4, PodNet, World};
use nobypass_testkit::redirect::{Variant, apply_redirect};
use nobypass_testkit::traffic::{Running, Traffic};
use nobypass_testkit::wait;
use support::machine::Machine;

const PORT: u16 = 8080;
const PROXY_UID: u32 = 2102;
/// The most that nobypass may add: a ratio.
const PROMISE: f64 = 1.04;

/// What stands between an application and its connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Candidate {
    Nothing,
    Nobypass,
    /// As a second "nothing": how far apart two equal candidates are measured.
    Again,
    NftSkuid,
    NftCgroup,
    Iptables,
}

impl Candidate {
    const ALL: [Self; 6] =
        [Self::Nothing, Self::Nobypass, Self::Again, Self::NftSkuid, Self::NftCgroup, Self::Iptables];

    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Nobypass => "nobypass",
            Self::Again => "nothing, once more",
            Self::NftSkuid => "an nft `meta skuid` rule",
            Self::NftCgroup => "an nft `socket cgroupv2` rule",
            Self::Iptables => "an iptables `owner` rule",
        }
    }

    /// Drops new connections that leave the pod and are not the proxy's, as nobypass would; here there are none.
    fn apply(self, net: &PodNet, proxy: &Cgroup) {
        let nft = |who: &str| {
            let syn = "tcp flags & (syn|ack) == syn";
            let table = format!(
                "table inet guard {{\n chain out {{\n type filter hook output priority 0; policy accept;\n \
                 {syn} {who} oifname \"elsewhere\" counter drop\n }}\n}}\n"
            );
            net.ns.check("nft", &["-f", "-"], &table).unwrap();
        };
        match self {
            Self::Nothing | Self::Again | Self::Nobypass => {}
            Self::NftSkuid => nft(&format!("meta skuid != {PROXY_UID}")),
            Self::NftCgroup => {
                let level = proxy.path().strip_prefix(v2_root().unwrap()).unwrap().components().count();
                // nft looks for the path below /sys/fs/cgroup, wherever cgroup v2 is mounted.
                let path = proxy.path().strip_prefix("/sys/fs/cgroup").unwrap().display();
                nft(&format!("socket cgroupv2 level {level} != \"{path}\""));
            }
            Self::Iptables => {
                let rule =
                    format!("-A OUTPUT -p tcp --syn -m owner ! --uid-owner {PROXY_UID} -o elsewhere -j DROP");
                net.ns.check("iptables", &rule.split(' ').collect::<Vec<_>>(), "").unwrap();
            }
        }
    }
}

/// What the pods are.
#[derive(Clone, Copy)]
enum Setting {
    /// Most pods of most nodes.
    NotMeshed,
    /// The application's connections go to its proxy, as they should.
    Redirected,
}

/// A pod for one candidate.
struct Subject {
    candidate: Candidate,
    net: PodNet,
    app: Cgroup,
    _proxy: Option<Running>,
    _pod: Pod,
}

impl Subject {
    fn new(candidate: Candidate, setting: Setting, world: &World, place: &Scratch, maps: &mut Maps) -> Self {
        let net = world.pod().unwrap();
        let n = candidate as u32;
        let pod = place.pod(Qos::Burstable, &format!("2c48913c-b29f-11e7-9350-{n:012}")).unwrap();
        let [app, proxy] = ["a", "b"].map(|digit| pod.container(&digit.repeat(64)).unwrap());
        if candidate == Candidate::Nobypass {
            let id = pod.id().unwrap();
            let known = wait::until("the pod's entry", wait::HANG, || maps.policy(id)).unwrap();
            let kind = match setting {
                Setting::NotMeshed => PodKind::Exempt,
                Setting::Redirected => PodKind::Meshed,
            };
            let policy = PodPolicy { kind: kind.code(), proxy_cgroup: proxy.id().unwrap(), ..known };
            maps.set_policy(id, &policy).unwrap();
        }
        let traffic = Traffic::new().netns(&net.ns).cgroup(&proxy);
        let running = match setting {
            Setting::NotMeshed => None,
            Setting::Redirected => {
                apply_redirect(&net.ns, Variant::IptablesLinkerd).unwrap();
                Some(traffic.proxy(Variant::IptablesLinkerd).unwrap())
            }
        };
        candidate.apply(&net, &proxy);
        Self { candidate, net, app, _proxy: running, _pod: pod }
    }

    /// CPU time of a connection, ns.
    fn run(&self, connections: u32) -> f64 {
        let traffic = Traffic::new().netns(&self.net.ns).cgroup(&self.app).uid(1000);
        let report = traffic.run(&[&"again", &FAR4, &PORT, &connections]).unwrap();
        let ok = report.json()["ends"]["ok"].as_u64();
        assert_eq!(ok, Some(connections.into()), "{}: {report}", self.candidate.name());
        report.count("cpu_us") as f64 * 1000.0 / f64::from(connections)
    }
}

/// Prints a setting's figures, and says whether the promises are kept.
fn measure(machine: &Machine, setting: Setting, what: &str, rounds: u32, connections: u32) -> bool {
    let world = World::new("cost").unwrap();
    let _server = Traffic::new().netns(world.far()).server(&[PORT]).unwrap();
    // A node's other pods' parent, without programs.
    let bare = Scratch::new().unwrap();
    let mut maps = machine.maps();
    let subjects: Vec<Subject> = Candidate::ALL
        .into_iter()
        .map(|candidate| {
            let place = if candidate == Candidate::Nobypass { &machine.scratch } else { &bare };
            Subject::new(candidate, setting, &world, place, &mut maps)
        })
        .collect();
    let mut samples: Vec<Vec<f64>> = vec![Vec::new(); subjects.len()];
    for round in 0..rounds as usize {
        for turn in 0..subjects.len() {
            let n = (turn + round) % subjects.len();
            samples[n].push(subjects[n].run(connections));
        }
    }
    let base = samples[0].clone();
    let ratio = |n: usize| {
        let ratios = samples[n].iter().zip(&base).map(|(ours, nothing)| ours / nothing);
        Samples::new(ratios.collect())
    };
    println!("{what}: {rounds} rounds of {connections} connections, CPU time of a connection");
    for (n, candidate) in Candidate::ALL.into_iter().enumerate() {
        let (own, ratio) = (Samples::new(samples[n].clone()), ratio(n));
        println!(
            "  {:<30} {:>6.2} µs ({:.2}..{:.2})   ÷ nothing {:.3} ({:.3}..{:.3})",
            candidate.name(),
            own.median() / 1000.0,
            own.at(0) / 1000.0,
            own.at(100) / 1000.0,
            ratio.median(),
            ratio.at(0),
            ratio.at(100)
        );
    }
    let [_, ours, again, skuid, cgroup, iptables] = [0, 1, 2, 3, 4, 5].map(|n| ratio(n).median());
    let figure = format!(
        "{ours:.3}; an nft `skuid` rule {skuid:.3}, nft `cgroupv2` {cgroup:.3}, iptables `owner` {iptables:.3}; nothing \
         against itself {again:.3}"
    );
    let kept = ours <= PROMISE && ours <= skuid;
    let promise = format!("≤ {PROMISE} and not above the `skuid` rule");
    Figure::new(format!("CPU time of connect and close, with ÷ without: {what}"), figure)
        .promised(promise, kept)
        .tell()
        .unwrap()
}

fn main() -> ExitCode {
    let (rounds, connections) =
        (argument("--rounds", 15).unwrap(), argument("--connections", 4_000).unwrap());
    let machine = Machine::new();
    let agent = machine.launch().start().attached();
    let mut kept = measure(&machine, Setting::NotMeshed, "a pod without a mesh", rounds, connections);
    kept &= measure(&machine, Setting::Redirected, "a redirected pod", rounds, connections);
    agent.kill();
    if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
