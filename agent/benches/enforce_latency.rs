//! How long an application waits for a refusal, and what a question to a pod takes: `cargo bench -p nobypass --features
//! kernel-tests --bench enforce_latency`, as root. After `--`: `--tries <n>`.
//!
//! The agent is this build's, the pod a cgroup and a network namespace. A p99 above its promise is exit code 1. All of it
//! runs before the machine's other work (`SCHED_FIFO`, by chrt(1)): otherwise a busy machine shows for how long it lets others
//! run first. `--fair` leaves that to the machine.

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

use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use nobypass::bpf::Maps;
use nobypass_common::abi::{POD_FASTFAIL4, POD_FASTFAIL6, PodName, PodPolicy};
use nobypass_common::ids::PodKind;
use nobypass_testkit::cgroup::{Cgroup, Pod, Qos};
use nobypass_testkit::figures::{Figure, argument};
use nobypass_testkit::netns::{FAR4, FAR6, PodNet, World, world_with_pod};
use nobypass_testkit::proc::{self, Proc};
use nobypass_testkit::redirect::{Variant, apply_redirect};
use nobypass_testkit::traffic::{Report, Traffic};
use nobypass_testkit::wait;
use serde_json::Value;
use support::agent::Agent;
use support::machine::{Machine, UID, sees_pod};

/// The most that the p99 may be, µs.
const QUESTION: u64 = 1_000;
const FIRST: u64 = 5_000;
const LATER: u64 = 100;

/// A meshed pod with a process and without rules.
struct Scene {
    _process: Proc,
    _world: World,
    net: PodNet,
    _pod: Pod,
    app: Cgroup,
    id: u64,
}

fn scene(machine: &Machine, maps: &mut Maps) -> Scene {
    let (world, net) = world_with_pod("latency").unwrap();
    let pod = machine.scratch.pod(Qos::Burstable, UID).unwrap();
    let [app, proxy] = ["a", "b"].map(|digit| pod.container(&digit.repeat(64)).unwrap());
    let id = pod.id().unwrap();
    let known = wait::until("the pod's entry", wait::HANG, || maps.policy(id)).unwrap();
    let policy = PodPolicy { kind: PodKind::Meshed.code(), proxy_cgroup: proxy.id().unwrap(), ..known };
    maps.set_policy(id, &policy).unwrap();
    let mut command = net.ns.command("sleep").unwrap();
    command.arg("3600");
    app.start(&mut command).unwrap();
    Scene { _process: proc::spawn(command).unwrap(), _world: world, net, _pod: pod, app, id }
}

/// From now on an agent that starts knows the pod as meshed, although no runtime tells.
fn name(maps: &mut Maps, id: u64) {
    let mut name = PodName { namespace: [0; 64], name: [0; 256], mesh: [0; 32] };
    name.namespace[..4].copy_from_slice(b"shop");
    name.name[..4].copy_from_slice(b"cart");
    name.mesh[..7].copy_from_slice(b"linkerd");
    maps.set_name(id, &name).unwrap();
}

fn enforcing(machine: &Machine) -> Agent {
    machine.launch().args(["--mode", "enforce", "--event-rate", "100000"]).start().attached()
}

fn connects(scene: &Scene, v4: bool, tries: usize) -> Report {
    let to = if v4 { FAR4.to_string() } else { FAR6.to_string() };
    let traffic = Traffic::new().netns(&scene.net.ns).cgroup(&scene.app).uid(1000);
    traffic.option("timeout-ms", 20_000).run(&[&"again", &to, &8080, &tries]).unwrap()
}

/// Tells the figures, and says whether the promise is kept.
fn show(what: &str, [p50, p99, most]: [u64; 3], promise: u64) -> bool {
    let figure = format!("p50 {p50} µs, p99 {p99} µs, most {most} µs");
    Figure::new(what, figure).promised(format!("p99 ≤ {promise} µs"), p99 <= promise).tell().unwrap()
}

fn of(report: &Report) -> [u64; 3] {
    ["p50_us", "p99_us", "max_us"].map(|name| report.count(name))
}

fn questions(agent: &Agent, scene: &Scene, tries: usize) -> [u64; 3] {
    let ask = || {
        let (code, body) = agent.put("/v1/probe", &format!("cgroup:{}", scene.id));
        assert_eq!(code, 200, "{body}");
        serde_json::from_str::<Value>(&body).unwrap()["took_us"].as_u64().unwrap()
    };
    // The first one starts the helper.
    ask();
    let mut took: Vec<u64> = (0..tries).map(|_| ask()).collect();
    took.sort_unstable();
    [tries / 2, tries * 99 / 100, tries - 1].map(|at| took[at])
}

/// Set once this process runs before others.
const FIRST_OF_ALL: &str = "ENFORCE_LATENCY_FIRST_OF_ALL";

/// Runs this program again, before the machine's other work; returns where that cannot be had.
fn first_of_all() {
    if std::env::var_os(FIRST_OF_ALL).is_some() || std::env::args().any(|arg| arg == "--fair") {
        return;
    }
    let mut command = Command::new("chrt");
    command.args(["-f", "10"]).arg(std::env::current_exe().unwrap()).args(std::env::args_os().skip(1));
    let error = command.env(FIRST_OF_ALL, "1").exec();
    println!("chrt: {error}: the machine's other work counts too");
}

fn main() -> ExitCode {
    first_of_all();
    let tries: usize = argument("--tries", 1000).unwrap();
    let load = std::fs::read_to_string("/proc/loadavg").unwrap();
    println!("{tries} tries each; load of the machine {}", load.trim());
    let mut kept = true;

    // The agent has not heard that the pod is meshed, so each connection is judged at its SYN.
    let machine = Machine::new();
    let agent = enforcing(&machine);
    let mut maps = machine.maps();
    let scene = scene(&machine, &mut maps);
    for v4 in [true, false] {
        let report = connects(&scene, v4, tries);
        assert_eq!(report.json()["ends"]["ECONNABORTED"].as_u64(), u64::try_from(tries).ok(), "{report}");
        let family = if v4 { "IPv4" } else { "IPv6" };
        kept &= show(
            &format!("a refused `connect()`, {family}, the first ones: at the SYN, `ECONNABORTED`"),
            of(&report),
            FIRST,
        );
    }
    name(&mut maps, scene.id);
    agent.kill();

    let agent = enforcing(&machine);
    agent.until("the pod", |agent| sees_pod(agent, scene.id).then_some(()));
    for (v4, flag) in [(true, POD_FASTFAIL4), (false, POD_FASTFAIL6)] {
        connects(&scene, v4, 1);
        agent.until("the refusal", |_| (maps.policy(scene.id)?.flags & flag != 0).then_some(()));
        let report = connects(&scene, v4, tries);
        assert!(report.json()["ends"]["EPERM"].as_u64() > Some(0), "{report}");
        let family = if v4 { "IPv4" } else { "IPv6" };
        kept &= show(
            &format!("a refused `connect()`, {family}, later ones: by connect(2), `EPERM`"),
            of(&report),
            LATER,
        );
    }
    kept &=
        show("a question to a pod, both families, without rules", questions(&agent, &scene, tries), QUESTION);
    apply_redirect(&scene.net.ns, Variant::IptablesLinkerd).unwrap();
    kept &= show(
        "a question to a pod, both families, with Linkerd's iptables rules",
        questions(&agent, &scene, tries),
        QUESTION,
    );
    agent.kill();
    if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
