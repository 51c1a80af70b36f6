//! What a refused application sees and when, that a repaired pod recovers, and that nobody else is touched.

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

use std::collections::BTreeSet;

use nobypass::bpf::Maps;
use nobypass::cgroup::netns::Finder;
use nobypass::mesh::Exemptions;
use nobypass::refuse::diag::Socket;
use nobypass::refuse::metrics::{Metrics, ResultLabel};
use nobypass::refuse::preexisting::Rules;
use nobypass::refuse::sockets::{Job, PodRef, Sockets, Target};
use nobypass_common::abi::{HALF_OPEN_NS, POD_FASTFAIL4, POD_FASTFAIL6, PodName, PodPolicy};
use nobypass_common::ids::{Counter, PodKind};
use nobypass_testkit::cgroup::{Cgroup, Pod, Qos, v2_root};
use nobypass_testkit::netns::{FAR4, FAR6, Netns, PodNet, World, world_with_pod};
use nobypass_testkit::proc::{self, Proc};
use nobypass_testkit::redirect::{Variant, apply_redirect};
use nobypass_testkit::traffic::{Report, Running, Traffic};
use nobypass_testkit::wait;
use serde_json::json;
use support::agent::Agent;
use support::machine::{Machine, UID, sees_pod};

const PORT: u16 = 8080;

/// A meshed pod without rules.
struct Scene {
    _server: Running,
    _process: Proc,
    world: World,
    net: PodNet,
    pod: Pod,
    app: Cgroup,
    proxy: Cgroup,
    id: u64,
}

impl Scene {
    fn new(machine: &Machine, maps: &mut Maps) -> Self {
        let (world, net) = world_with_pod("refused").unwrap();
        let server = Traffic::new().netns(world.far()).server(&[PORT]).unwrap();
        let pod = machine.scratch.pod(Qos::Burstable, UID).unwrap();
        let [app, proxy] = ["a", "b"].map(|digit| pod.container(&digit.repeat(64)).unwrap());
        let id = pod.id().unwrap();
        let known = wait::until("the pod's entry", wait::HANG, || maps.policy(id)).unwrap();
        let policy = PodPolicy { kind: PodKind::Meshed.code(), proxy_cgroup: proxy.id().unwrap(), ..known };
        maps.set_policy(id, &policy).unwrap();
        let process = process(&net.ns, &app);
        Self { _server: server, _process: process, world, net, pod, app, proxy, id }
    }

    /// From now on an agent that starts knows the pod as meshed, although no runtime tells.
    fn name(&self, maps: &mut Maps) {
        let mut name = PodName { namespace: [0; 64], name: [0; 256], mesh: [0; 32] };
        name.namespace[..4].copy_from_slice(b"shop");
        name.name[..4].copy_from_slice(b"cart");
        name.mesh[..7].copy_from_slice(b"linkerd");
        maps.set_name(self.id, &name).unwrap();
    }

    fn traffic(&self) -> Traffic {
        Traffic::new().netns(&self.net.ns).cgroup(&self.app).uid(1000).option("timeout-ms", 20_000)
    }

    fn again(&self, kind: &str, n: u32) -> Report {
        let to = if kind.contains('6') { FAR6.to_string() } else { FAR4.to_string() };
        let mut traffic = self.traffic();
        for flag in ["nonblock", "mapped"] {
            if kind.contains(flag) {
                traffic = traffic.flag(flag);
            }
        }
        traffic.run(&[&"again", &to, &PORT, &n]).unwrap()
    }

    /// The rules and the proxy that should have been there.
    fn repair(&self) -> Running {
        let proxy =
            Traffic::new().netns(&self.net.ns).cgroup(&self.proxy).proxy(Variant::IptablesLinkerd).unwrap();
        apply_redirect(&self.net.ns, Variant::IptablesLinkerd).unwrap();
        proxy
    }
}

/// What keeps a pod's network findable.
fn process(ns: &Netns, cgroup: &Cgroup) -> Proc {
    let mut command = ns.command("sleep").unwrap();
    command.arg("3600");
    cgroup.start(&mut command).unwrap();
    proc::spawn(command).unwrap()
}

const KINDS: [&str; 6] = ["v4", "v6", "v4 mapped", "v4 nonblock", "v6 nonblock", "v4 mapped nonblock"];

fn enforcing(machine: &Machine) -> Agent {
    machine.launch().args(["--mode", "enforce", "--event-rate", "100000"]).start().attached()
}

/// An agent that knows the pod of [`Scene::new`] as meshed.
fn remembering(machine: &Machine) -> (Scene, Maps, Agent) {
    let agent = enforcing(machine);
    let mut maps = machine.maps();
    let scene = Scene::new(machine, &mut maps);
    scene.name(&mut maps);
    agent.kill();
    let agent = enforcing(machine);
    agent.until("the pod", |agent| sees_pod(agent, scene.id).then_some(()));
    (scene, maps, agent)
}

#[test]
fn the_first_refused_connect_fails_at_once_whatever_its_kind() {
    let machine = Machine::new();
    let agent = enforcing(&machine);
    let mut maps = machine.maps();
    let scene = Scene::new(&machine, &mut maps);
    scene.world.count_syns().unwrap();
    for kind in KINDS {
        // The agent has not heard that the pod is meshed, so each is judged at its SYN.
        let report = scene.again(kind, 200);
        println!(
            "{kind}: first {} µs, p50 {}, p99 {}",
            report.count("first_us"),
            report.count("p50_us"),
            report.count("p99_us")
        );
        assert_eq!(report.json()["ends"], json!({"ECONNABORTED": 200}), "{kind}: {report}");
    }
    assert_eq!(scene.world.syns().unwrap(), 0);
    assert_eq!(agent.metrics().sum("refused_sockets_total", &[("result", "aborted")]), 1200);
    agent.kill();
}

/// Once the pod's network has said so, connect(2) itself refuses: but for one a second, which is judged.
#[test]
fn later_connects_of_a_pod_that_is_known_to_bypass_are_refused_by_connect() {
    let machine = Machine::new();
    let (scene, maps, agent) = remembering(&machine);
    scene.world.count_syns().unwrap();
    for (kind, flag) in [("v4", POD_FASTFAIL4), ("v6", POD_FASTFAIL6)] {
        // Asked before, but no bypass was seen: a pod that is still being set up looks the same.
        assert_eq!(maps.policy(scene.id).unwrap().flags & flag, 0);
        assert_eq!(scene.again(kind, 1).json()["ends"], json!({"ECONNABORTED": 1}));
        agent.until("the refusal", |_| (maps.policy(scene.id)?.flags & flag != 0).then_some(()));
    }
    for kind in KINDS {
        let report = scene.again(kind, 1000);
        println!(
            "{kind}: p50 {} µs, p99 {}, max {}",
            report.count("p50_us"),
            report.count("p99_us"),
            report.count("max_us")
        );
        let refused = report.json()["ends"]["EPERM"].as_u64().unwrap_or(0);
        let judged = report.json()["ends"]["ECONNABORTED"].as_u64().unwrap_or(0);
        assert_eq!(refused + judged, 1000, "{report}");
        assert!(refused > 0, "{report}");
    }
    assert_eq!(scene.world.syns().unwrap(), 0);
    agent.kill();
}

/// Nobody tells the agent of the repair, and nothing is restarted.
#[test]
fn a_repaired_pod_recovers_with_an_agent_and_without() {
    for alive in [true, false] {
        let machine = Machine::new();
        let (scene, maps, agent) = remembering(&machine);
        assert_eq!(scene.again("v4", 1).json()["ends"], json!({"ECONNABORTED": 1}));
        agent.until("the refusal", |_| (maps.policy(scene.id)?.flags & POD_FASTFAIL4 != 0).then_some(()));
        let agent = if alive {
            Some(agent)
        } else {
            agent.kill();
            None
        };
        let _proxy = scene.repair();
        let connect = || scene.traffic().run(&[&"tcp4", &FAR4, &PORT]).unwrap();
        // A helper starts slower than a second on a slow machine: what counts is that none fails after the first.
        let mut tries = 0;
        let first = wait::until("a redirected connection", wait::HANG, || {
            tries += 1;
            let report = connect();
            assert!(["mesh", "EPERM", "ECONNABORTED"].contains(&report.saw()), "{report}");
            (report.saw() == "mesh").then_some(report)
        });
        assert!(first.is_ok(), "agent alive: {alive}, {tries} tries");
        for _ in 0..5 {
            assert_eq!(connect().saw(), "mesh", "agent alive: {alive}");
        }
        assert_ne!(maps.refusal(scene.id).unwrap().healed_ns[0], 0);
        if let Some(agent) = agent {
            // What the agent knows follows.
            agent.until("the end of the refusal", |_| {
                (maps.policy(scene.id)?.flags & (POD_FASTFAIL4 | POD_FASTFAIL6) == 0).then_some(())
            });
            agent.kill();
        }
    }
    const { assert!(HALF_OPEN_NS <= 1_000_000_000, "the second that README names") };
}

/// One process that never gives up, through the repair: from its first redirected connection on none fails, and none ever
/// got out.
#[test]
fn an_application_that_retries_meanwhile_is_redirected_from_the_repair_on() {
    for alive in [true, false] {
        let machine = Machine::new();
        let (scene, maps, agent) = remembering(&machine);
        assert_eq!(scene.again("v4", 1).json()["ends"], json!({"ECONNABORTED": 1}));
        agent.until("the refusal", |_| (maps.policy(scene.id)?.flags & POD_FASTFAIL4 != 0).then_some(()));
        let agent = alive.then_some(agent);
        let tried = || maps.counters(scene.id).map_or(0, |all| all.count[Counter::FastFail.code() as usize]);
        let (before, app) = (tried(), scene.traffic().option("interval-ms", 5));
        let report = std::thread::scope(|threads| {
            let retrying = threads.spawn(|| app.run(&[&"again", &FAR4, &PORT, &2000]).unwrap());
            wait::until("the tries", wait::HANG, || (tried() > before + 20).then_some(())).unwrap();
            let proxy = scene.repair();
            let report = retrying.join().unwrap();
            drop(proxy);
            report
        });
        let ends = &report.json()["ends"];
        assert!(ends["ok"].as_u64().unwrap_or(0) > 0, "agent alive: {alive}: {report}");
        assert!(ends["EPERM"].as_u64().unwrap_or(0) > 0, "agent alive: {alive}: {report}");
        assert_eq!(report.count("failed_again"), 0, "agent alive: {alive}: {report}");
        // What reached the outside is the proxy's own.
        let [bypasses, dropped] = [Counter::Bypass, Counter::BypassDropped]
            .map(|counter| maps.counters(scene.id).unwrap().count[counter.code() as usize]);
        assert!(bypasses > 0 && bypasses == dropped, "agent alive: {alive}: {bypasses} {dropped}");
        drop(agent);
    }
}

/// Packet sockets are seen by nothing that judges here: who may open them is said.
#[test]
fn a_pod_that_may_open_packet_sockets_is_reported() {
    let machine = Machine::new();
    let (mut scene, _, agent) = remembering(&machine);
    let id = scene.id;
    let said = |agent: &Agent| {
        let status = agent.status();
        let pod = status["pods"].as_array().unwrap().iter().find(|pod| pod["cgroup"] == id).cloned();
        pod.map(|pod| pod["packet_sockets"].clone())
    };
    let pods = |agent: &Agent| {
        let labels = [("namespace", "shop"), ("mesh", "linkerd")];
        agent.metrics().sum("packet_socket_pods", &labels)
    };
    let app = json!([format!("cgroup {}", scene.app.id().unwrap())]);
    agent.until("the report", |agent| (said(agent)? == app).then_some(()));
    assert_eq!(pods(&agent), 1);
    agent.line(&["WARN", "may send by packet sockets", "reason=\"packet_socket\""]);
    let (_, explained) = agent.get("/v1/explain?pod=shop/cart").unwrap();
    assert!(explained.contains("has CAP_NET_RAW"), "{explained}");
    assert!(explained.contains(app[0].as_str().unwrap()), "{explained}");

    // Without it, and with it in a user namespace of one's own alone.
    let start = |program: &str, args: &[&str]| {
        let mut command = scene.net.ns.command(program).unwrap();
        command.args(args).args(["sleep", "3600"]);
        scene.app.start(&mut command).unwrap();
        proc::spawn(command).unwrap()
    };
    let without = start("setpriv", &["--bounding-set", "-net_raw"]);
    let elsewhere = start("unshare", &["--user", "--map-root-user"]);
    scene._process = without;
    // Asked again, since they are root until they have become what they are to be.
    agent.until("the end of the report", |agent| {
        let (code, body) = agent.put("/v1/probe", &format!("cgroup:{id}"));
        assert_eq!(code, 200, "{body}");
        (said(agent)? == json!([]) && pods(agent) == 0).then_some(())
    });
    drop(elsewhere);
    agent.kill();
}

/// In this process, as the agent has it.
fn sockets() -> (Sockets, Metrics) {
    let metrics = Metrics::default();
    (Sockets::start(Finder::new(&v2_root().unwrap()).unwrap(), metrics.clone()).unwrap(), metrics)
}

fn result(metrics: &Metrics, result: &'static str) -> u64 {
    metrics.aborts.get_or_create(&ResultLabel { result }).get()
}

fn list(sockets: &Sockets, pod: u64, rules: &Rules, abort: &[u64]) -> Vec<Socket> {
    let (reply, found) = tokio::sync::oneshot::channel();
    let pod = PodRef { cgroup: pod, netns: None };
    let (rules, abort) = (Box::new(rules.clone()), abort.iter().copied().collect::<BTreeSet<_>>());
    sockets.send(Job::Preexisting { pod, rules, abort, reply });
    found.blocking_recv().unwrap().unwrap()
}

#[test]
fn no_other_socket_is_touched() {
    let machine = Machine::new();
    let agent = machine.launch().start().attached();
    let mut maps = machine.maps();
    let scene = Scene::new(&machine, &mut maps);
    // Another pod with the same addresses and, by chance, the same ports.
    let (other_world, other_net) = world_with_pod("other").unwrap();
    let _other_server = Traffic::new().netns(other_world.far()).server(&[PORT]).unwrap();
    let other = machine.scratch.pod(Qos::Burstable, "2c48913c-b29f-11e7-9350-020968147797").unwrap();
    let other_app = other.container(&"a".repeat(64)).unwrap();
    for ns in [&scene.net.ns, &other_net.ns] {
        ns.sysctl("net/ipv4/ip_local_port_range", "40000 40001").unwrap();
    }
    let _process = process(&other_net.ns, &other_app);
    let hold = |ns, cgroup: &Cgroup| {
        Traffic::new()
            .netns(ns)
            .cgroup(cgroup)
            .option("interval-ms", 0)
            .spawn(&[&"hold", &FAR4, &PORT])
            .unwrap()
    };
    let (mut mine, theirs) = (hold(&scene.net.ns, &scene.app), hold(&other_net.ns, &other_app));
    let (sockets, metrics) = sockets();
    let rules =
        Rules { proxy_cgroup: 1, proxy_uid: None, families: [true; 2], exemptions: Exemptions::default() };
    let [socket] = &list(&sockets, scene.id, &rules, &[])[..] else { panic!("one connection") };
    let [twin] = &list(&sockets, other.id().unwrap(), &rules, &[])[..] else { panic!("one connection") };
    assert_eq!((socket.local, socket.remote), (twin.local, twin.remote));
    assert_eq!(socket.cgroup, Some(scene.app.id().unwrap()));

    let target = Target { local: socket.local, remote: socket.remote, device: 0, cookie: socket.cookie };
    let abort = |cgroup, target: &Target| {
        sockets.send(Job::Abort(PodRef { cgroup, netns: None }, target.clone()));
    };
    let until = |label, count| {
        wait::until(label, wait::HANG, || (result(&metrics, label) == count).then_some(())).unwrap();
    };
    // Another cookie, the other pod, another port, a pod that is not there.
    abort(scene.id, &Target { cookie: socket.cookie + 1, ..target });
    abort(other.id().unwrap(), &target);
    abort(scene.id, &Target { local: (socket.local.ip(), 39_999).into(), ..target });
    abort(u64::MAX, &target);
    until("gone", 3);
    until("failed", 1);
    assert_eq!(list(&sockets, scene.id, &rules, &[]), std::slice::from_ref(socket));
    assert_eq!(list(&sockets, other.id().unwrap(), &rules, &[]), std::slice::from_ref(twin));
    // The right one.
    abort(scene.id, &target);
    until("aborted", 1);
    assert_eq!(mine.report().unwrap().errno(), Some("ECONNABORTED"));
    assert!(theirs.ready.answer() == Some("plain") && theirs.finish().unwrap().ok());
    agent.kill();
}

/// Connections that were there first are told apart by who began them, and aborted by their cookies.
#[test]
fn connections_older_than_the_programs_are_found_and_aborted() {
    let machine = Machine::new();
    let agent = machine.launch().start().attached();
    let mut maps = machine.maps();
    let scene = Scene::new(&machine, &mut maps);
    let hold = |cgroup: &Cgroup, to: &str| {
        let traffic = Traffic::new().netns(&scene.net.ns).cgroup(cgroup).option("interval-ms", 0);
        traffic.spawn(&[&"hold", &to, &PORT]).unwrap()
    };
    let mut v4 = hold(&scene.app, &FAR4.to_string());
    let mut v6 = hold(&scene.app, &FAR6.to_string());
    let proxys = hold(&scene.proxy, &FAR4.to_string());
    // Accepted ones, and one within the pod.
    let _server = Traffic::new().netns(&scene.net.ns).cgroup(&scene.app).server(&[PORT]).unwrap();
    let inbound = Traffic::new()
        .netns(scene.world.far())
        .option("interval-ms", 0)
        .spawn(&[&"hold", &scene.net.ip4, &PORT])
        .unwrap();
    let local = hold(&scene.app, "127.0.0.1");
    let (sockets, _) = sockets();
    let rules = Rules {
        proxy_cgroup: scene.proxy.id().unwrap(),
        proxy_uid: None,
        families: [true; 2],
        exemptions: Exemptions::default(),
    };
    let found = list(&sockets, scene.id, &rules, &[]);
    let remotes: BTreeSet<String> = found.iter().map(|socket| socket.remote.ip().to_string()).collect();
    assert_eq!(remotes, BTreeSet::from([FAR4.to_string(), FAR6.to_string()]), "{found:?}");
    assert_eq!(found.len(), 2);
    let only_v6 = Rules { families: [false, true], ..rules.clone() };
    assert_eq!(list(&sockets, scene.id, &only_v6, &[]).len(), 1);

    let cookies: Vec<u64> = found.iter().map(|socket| socket.cookie).collect();
    assert_eq!(list(&sockets, scene.id, &rules, &cookies).len(), 2, "the aborted ones are told");
    for held in [&mut v4, &mut v6] {
        assert_eq!(held.report().unwrap().errno(), Some("ECONNABORTED"));
    }
    assert_eq!(list(&sockets, scene.id, &rules, &cookies), []);
    for living in [proxys, inbound, local] {
        assert!(living.finish().unwrap().ok());
    }
    assert!(
        maps.counters(scene.id)
            .is_none_or(|counters| counters.count[Counter::BypassDropped.code() as usize] == 0)
    );
    drop(scene.pod);
    agent.kill();
}

/// The kernel lists sockets one after the other, while applications begin connections.
#[test]
fn a_redirected_connection_that_begins_now_is_not_taken_for_an_old_one() {
    const LOOKS: usize = 500;
    let machine = Machine::new();
    let agent = machine.launch().start().attached();
    let mut maps = machine.maps();
    let scene = Scene::new(&machine, &mut maps);
    let _proxy = scene.repair();
    let chatter = || {
        let traffic = scene.traffic().option("interval-ms", 0);
        let words: [&dyn std::fmt::Display; 3] = [&"chatter", &FAR4, &PORT];
        proc::spawn(traffic.command(&words).unwrap()).unwrap()
    };
    let _applications = [chatter(), chatter(), chatter()];
    let (sockets, _) = sockets();
    let rules = Rules {
        proxy_cgroup: scene.proxy.id().unwrap(),
        proxy_uid: None,
        families: [true; 2],
        exemptions: Exemptions::default(),
    };
    let wrong = (0..LOOKS).map(|_| list(&sockets, scene.id, &rules, &[]).len()).sum::<usize>();
    let counters = maps.counters(scene.id).unwrap();
    assert!(
        counters.count[Counter::RedirectProof.code() as usize] > 100,
        "the applications connect: {counters:?}"
    );
    assert_eq!(wrong, 0, "of {LOOKS} looks");
    agent.kill();
}
