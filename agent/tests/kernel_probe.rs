//! The probe: the right answer for every way of redirecting and none, and no trace of the question.

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

use nobypass_testkit::cgroup::{Cgroup, Pod, Qos};
use nobypass_testkit::netns::{FAR4, FAR6, Netns, PodNet, World, world_with_pod};
use nobypass_testkit::proc::{self, Proc};
use nobypass_testkit::redirect::{Ports, Variant, apply_redirect, linkerd};
use nobypass_testkit::sniff::Sniffer;
use nobypass_testkit::traffic::Traffic;
use serde_json::{Value, json};
use support::agent::{Agent, BIN, request, run};
use support::machine::{Machine, sees_pod};

/// A pod that the agent knows by its cgroup, with one process.
struct Scene {
    _process: Proc,
    world: World,
    net: PodNet,
    _pod: Pod,
    app: Cgroup,
    id: u64,
}

fn process(ns: &Netns, cgroup: &Cgroup) -> Proc {
    let mut command = ns.command("sleep").unwrap();
    command.arg("3600");
    cgroup.start(&mut command).unwrap();
    proc::spawn(command).unwrap()
}

fn uid(n: u32) -> String {
    format!("2c48913c-b29f-11e7-9350-{n:012x}")
}

fn scene(machine: &Machine, agent: &Agent, n: u32) -> Scene {
    let (world, net) = world_with_pod("probe").unwrap();
    let pod = machine.scratch.pod(Qos::Burstable, &uid(n)).unwrap();
    let app = pod.container(&"a".repeat(64)).unwrap();
    let id = pod.id().unwrap();
    let process = process(&net.ns, &app);
    agent.until("the pod", |agent| sees_pod(agent, id).then_some(()));
    Scene { _process: process, world, net, _pod: pod, app, id }
}

/// The whole answer, of a pod by its cgroup id.
fn probe(agent: &Agent, id: u64) -> Value {
    let (code, body) = agent.put("/v1/probe", &format!("cgroup:{id}"));
    assert_eq!(code, 200, "{body}; the agent's log:\n{}", agent.log());
    serde_json::from_str(&body).unwrap()
}

/// The answers, IPv4 and IPv6.
fn answers(agent: &Agent, id: u64) -> [Value; 2] {
    let probe = probe(agent, id);
    [0, 1].map(|family| {
        let mut answer = probe["families"][family].clone();
        let fields = answer.as_object_mut().unwrap();
        fields.remove("family");
        fields.remove("due");
        answer
    })
}

fn redirected(port: u16) -> Value {
    json!({"answer": "redirected", "port": port})
}

fn not_redirected() -> Value {
    json!({"answer": "not_redirected", "ifindex": 2})
}

fn failed(reason: &str) -> Value {
    json!({"answer": "failed", "reason": reason})
}

/// What is set in a pod's network, and what the probe is to say.
struct Case {
    name: &'static str,
    rules: fn(&Netns),
    answers: [Value; 2],
}

fn restore(program: &str, rules: String) -> impl Fn(&Netns) {
    let program = program.to_owned();
    move |ns: &Netns| ns.check(&program, &["-w", "5", "--noflush"], &rules).map(drop).unwrap()
}

/// Consul's chains, as its plugin sets them.
fn consul(ns: &Netns) {
    let rules = "*nat\n:CONSUL_PROXY_OUTPUT - [0:0]\n:CONSUL_PROXY_REDIRECT - [0:0]\n:CONSUL_PROXY_INBOUND - [0:0]\n\
        -A CONSUL_PROXY_REDIRECT -p tcp -j REDIRECT --to-ports 15001\n-A OUTPUT -p tcp -j CONSUL_PROXY_OUTPUT\n\
        -A CONSUL_PROXY_OUTPUT -m owner --uid-owner 5996 -j RETURN\n-A CONSUL_PROXY_OUTPUT -d 127.0.0.1/32 -j RETURN\n\
        -A CONSUL_PROXY_OUTPUT -j CONSUL_PROXY_REDIRECT\nCOMMIT\n";
    restore("iptables-restore", rules.into())(ns);
}

/// Kuma's chains, as its installer sets them.
fn kuma(ns: &Netns) {
    let rules = |local: &str| {
        format!(
            "*nat\n:KUMA_MESH_OUTBOUND - [0:0]\n:KUMA_MESH_OUTBOUND_REDIRECT - [0:0]\n\
             -A OUTPUT -p tcp -j KUMA_MESH_OUTBOUND\n-A KUMA_MESH_OUTBOUND -m owner --uid-owner 5678 -j RETURN\n\
             -A KUMA_MESH_OUTBOUND -o lo -j RETURN\n-A KUMA_MESH_OUTBOUND -d {local} -j RETURN\n\
             -A KUMA_MESH_OUTBOUND -j KUMA_MESH_OUTBOUND_REDIRECT\n\
             -A KUMA_MESH_OUTBOUND_REDIRECT -p tcp -j REDIRECT --to-ports 15001\nCOMMIT\n"
        )
    };
    restore("iptables-restore", rules("127.0.0.1/32"))(ns);
    restore("ip6tables-restore", rules("::1/128"))(ns);
}

fn cases() -> Vec<Case> {
    let case = |name, rules, answers| Case { name, rules, answers };
    let both = |port| [redirected(port), redirected(port)];
    let gone = || [json!({"answer": "no_route"}), json!({"answer": "no_route"})];
    vec![
        case("no rules", |_| {}, [not_redirected(), not_redirected()]),
        case("linkerd", |ns| apply_redirect(ns, Variant::IptablesLinkerd).unwrap(), both(4140)),
        case("istio", |ns| apply_redirect(ns, Variant::IptablesIstio).unwrap(), both(15001)),
        case("nft", |ns| apply_redirect(ns, Variant::Nft).unwrap(), both(4140)),
        // The packet keeps its port; the proxy's is chosen behind lo.
        case("tproxy", |ns| apply_redirect(ns, Variant::Tproxy).unwrap(), both(0)),
        case(
            "ipv4 alone",
            |ns| apply_redirect(ns, Variant::V4Only).unwrap(),
            [redirected(4140), not_redirected()],
        ),
        case(
            "ipv6 alone",
            |ns| restore("ip6tables-restore", linkerd(Ports::LINKERD))(ns),
            [not_redirected(), redirected(4140)],
        ),
        case(
            "iptables-legacy",
            |ns| restore("iptables-legacy-restore", linkerd(Ports::LINKERD))(ns),
            [redirected(4140), not_redirected()],
        ),
        case(
            "iptables-nft",
            |ns| restore("iptables-nft-restore", linkerd(Ports::LINKERD))(ns),
            [redirected(4140), not_redirected()],
        ),
        case("consul", consul, [redirected(15001), not_redirected()]),
        case("kuma", kuma, both(15001)),
        // Who asks is an ordinary user: rules that let out user 0 do not let it out.
        case(
            "a proxy of user 0",
            |ns| restore("iptables-restore", linkerd(Ports { uid: 0, ..Ports::LINKERD }))(ns),
            [redirected(4140), not_redirected()],
        ),
        case(
            "an inbound rule alone",
            |ns| {
                let rules = "*nat\n-A PREROUTING -p tcp -j REDIRECT --to-ports 4143\nCOMMIT\n";
                restore("iptables-restore", rules.into())(ns);
            },
            [not_redirected(), not_redirected()],
        ),
        // Presence is not effect: the mesh's rules are there, behind one that lets everything out.
        case(
            "rules that are never reached",
            |ns| {
                apply_redirect(ns, Variant::IptablesLinkerd).unwrap();
                ns.check("iptables", &["-w", "5", "-t", "nat", "-I", "OUTPUT", "-j", "ACCEPT"], "").unwrap();
            },
            [not_redirected(), redirected(4140)],
        ),
        case(
            "somebody else drops",
            |ns| {
                let rules = "table inet x {\n chain out {\n type filter hook output priority 0;\n \
                             meta l4proto tcp drop\n }\n}\n";
                ns.check("nft", &["-f", "-"], rules).unwrap();
            },
            [failed("not_seen"), failed("not_seen")],
        ),
        case(
            "no default route",
            |ns| {
                ns.ip("route del default").unwrap();
                ns.ip6("route del default").unwrap();
            },
            [not_redirected(), not_redirected()],
        ),
        case("the device is down", |ns| ns.ip("link set eth0 down").unwrap(), gone()),
        case("no device", |ns| ns.ip("link del eth0").unwrap(), gone()),
        case(
            "no ipv6",
            |ns| ns.sysctl("net/ipv6/conf/all/disable_ipv6", "1").unwrap(),
            [not_redirected(), json!({"answer": "no_route"})],
        ),
        case(
            "the address is the pod's own",
            |ns| ns.ip("addr add 192.0.2.1/32 dev lo\naddr add 2001:db8::1/128 dev lo nodad").unwrap(),
            [failed("local_route"), failed("local_route")],
        ),
    ]
}

/// Entries of connection tracking that a question left.
fn tracked(ns: &Netns) -> String {
    ["ipv4", "ipv6"]
        .map(|family| ns.check("conntrack", &["-L", "-f", family], "").unwrap())
        .concat()
        .lines()
        .filter(|line| line.contains("tcp"))
        .collect()
}

#[test]
fn each_way_of_redirecting_gets_its_answer_and_no_packet_is_seen_anywhere() {
    let machine = Machine::new();
    let agent = machine.launch().start().attached();
    let mut wrong = Vec::new();
    for (n, case) in cases().into_iter().enumerate() {
        let scene = scene(&machine, &agent, u32::try_from(n).unwrap());
        (case.rules)(&scene.net.ns);
        let mut witnesses = [Sniffer::new(&scene.net.ns).unwrap(), Sniffer::new(scene.world.far()).unwrap()];
        let found = answers(&agent, scene.id);
        let syns = witnesses.each_mut().map(Sniffer::syns);
        let tracked = tracked(&scene.net.ns);
        if found != case.answers || syns != [0, 0] || !tracked.is_empty() {
            let Case { name, answers, .. } = case;
            wrong
                .push(format!("{name}: {found:?}, not {answers:?}; SYNs seen: {syns:?}; tracked: {tracked}"));
        }
    }
    assert!(wrong.is_empty(), "{}\n{}", wrong.join("\n"), agent.log());
    agent.kill();
}

/// The witnesses of the other test do see what there is to see.
#[test]
fn a_connection_is_seen_by_the_witnesses_and_a_question_by_no_proxy() {
    let machine = Machine::new();
    let agent = machine.launch().start().attached();
    let scene = scene(&machine, &agent, 1);
    let _server = Traffic::new().netns(scene.world.far()).server(&[8080]).unwrap();
    let mut witnesses = [Sniffer::new(&scene.net.ns).unwrap(), Sniffer::new(scene.world.far()).unwrap()];
    let app = Traffic::new().netns(&scene.net.ns).cgroup(&scene.app).uid(1000);
    for (command, to) in [("tcp4", FAR4.to_string()), ("tcp6", FAR6.to_string())] {
        assert_eq!(app.run(&[&command, &to, &8080]).unwrap().saw(), "plain");
    }
    let [inside, outside] = witnesses.each_mut().map(Sniffer::syns);
    assert!(inside >= 2 && outside >= 2, "{inside} {outside}");

    for variant in [Variant::IptablesLinkerd, Variant::Tproxy] {
        let scene = self::scene(&machine, &agent, 2 + u32::from(variant == Variant::Tproxy));
        apply_redirect(&scene.net.ns, variant).unwrap();
        let mut proxy = Traffic::new().netns(&scene.net.ns).proxy(variant).unwrap();
        for _ in 0..20 {
            let [v4, v6] = answers(&agent, scene.id);
            assert_eq!((&v4["answer"], &v6["answer"]), (&json!("redirected"), &json!("redirected")));
        }
        assert_eq!(proxy.stats().unwrap().count("tcp_accepted"), 0);
        // Whether it runs makes no difference.
        drop(proxy);
        assert_eq!(answers(&agent, scene.id)[0]["answer"], "redirected");
    }
    agent.kill();
}

#[test]
fn a_pod_that_cannot_be_asked_says_why() {
    let machine = Machine::new();
    let agent = machine.launch().start().attached();
    let why = |id| {
        let [v4, v6] = answers(&agent, id);
        assert_eq!(v4, v6);
        v4
    };
    let pod = machine.scratch.pod(Qos::Guaranteed, &uid(1)).unwrap();
    let id = pod.id().unwrap();
    agent.until("the pod", |agent| sees_pod(agent, id).then_some(()));
    assert_eq!(why(id), failed("no_process"));

    // A process in the node's own network, as of a pod with host networking: never asked.
    let container = pod.container(&"b".repeat(64)).unwrap();
    let mut command = std::process::Command::new("sleep");
    command.arg("3600");
    container.start(&mut command).unwrap();
    let host = proc::spawn(command).unwrap();
    assert_eq!(why(id), failed("host_network"));
    // One in a network of the pod's beside it is enough.
    let (_world, net) = world_with_pod("beside").unwrap();
    let process = process(&net.ns, &pod.container(&"c".repeat(64)).unwrap());
    assert_eq!(why(id), not_redirected());
    drop((host, process));

    let (code, body) = agent.put("/v1/probe", "shop/cart");
    assert_eq!((code, body.as_str()), (404, "no pod \"shop/cart\" on this node\n"));
    agent.kill();
}

/// A helper that is gone is started anew, and an agent that ends takes it along.
#[test]
fn the_helper_comes_and_goes_with_the_agent() {
    let machine = Machine::new();
    let agent = machine.launch().start().attached();
    let scene = scene(&machine, &agent, 1);
    let cgroup = machine.scratch.top().join("nobypass-probe");
    let helpers = || -> Vec<i32> {
        let text = std::fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
        text.lines().map(|line| line.parse().unwrap()).collect()
    };
    assert_eq!(answers(&agent, scene.id), [not_redirected(), not_redirected()]);
    let [first] = helpers()[..] else { panic!("{:?}", helpers()) };
    let pid = rustix::process::Pid::from_raw(first).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    let again = agent.until("another helper", |agent| {
        (answers(agent, scene.id) == [not_redirected(), not_redirected()]).then(helpers)
    });
    assert_ne!(again, [first]);
    // Killed: the kernel ends the helper; asked to end: its cgroup goes too.
    agent.kill();
    nobypass_testkit::wait::until("the helper's end", nobypass_testkit::wait::HANG, || {
        helpers().is_empty().then_some(())
    })
    .unwrap();
    let agent = machine.launch().start().attached();
    agent.until("the pod", |agent| sees_pod(agent, scene.id).then_some(()));
    assert_eq!(answers(&agent, scene.id), [not_redirected(), not_redirected()]);
    assert!(agent.terminate().success());
    assert!(!cgroup.exists(), "{:?}", helpers());
}

/// 200 pods are asked at once while the application of another is refused: neither waits for the other.
#[test]
fn two_hundred_pods_at_once_do_not_keep_refusals_waiting() {
    const PODS: u32 = 200;
    let machine = Machine::new();
    let agent = machine.launch().args(["--mode", "enforce", "--event-rate", "100000"]).start().attached();
    let mut maps = machine.maps();
    let refused = scene(&machine, &agent, 1);
    let meshed = nobypass_common::abi::PodPolicy {
        kind: nobypass_common::ids::PodKind::Meshed.code(),
        ..maps.policy(refused.id).unwrap()
    };
    maps.set_policy(refused.id, &meshed).unwrap();
    let (_world, net) = world_with_pod("many").unwrap();
    apply_redirect(&net.ns, Variant::IptablesLinkerd).unwrap();
    let pods: Vec<(Pod, Proc)> = (0..PODS)
        .map(|n| {
            let pod = machine.scratch.pod(Qos::BestEffort, &uid(1000 + n)).unwrap();
            let process = process(&net.ns, &pod.container(&"a".repeat(64)).unwrap());
            (pod, process)
        })
        .collect();
    let ids: Vec<u64> = pods.iter().map(|(pod, _)| pod.id().unwrap()).collect();
    agent.until("the pods", |agent| {
        let status = agent.status();
        let known: Vec<u64> =
            status["pods"].as_array().unwrap().iter().filter_map(|pod| pod["cgroup"].as_u64()).collect();
        ids.iter().all(|id| known.contains(id)).then_some(())
    });
    let socket = agent.socket();
    let report = std::thread::scope(|scope| {
        let app = Traffic::new().netns(&refused.net.ns).cgroup(&refused.app).option("timeout-ms", 20_000);
        let load = scope.spawn(move || app.run(&[&"again", &FAR4, &8080, &300]).unwrap());
        let ask = |id: u64| {
            let (code, body) = request(socket, "PUT", "/v1/probe", &format!("cgroup:{id}")).unwrap();
            let probe: Value = serde_json::from_str(&body).unwrap();
            (code, [0, 1].map(|family| probe["families"][family]["port"].as_u64()))
        };
        let askers: Vec<_> = ids.iter().map(|id| scope.spawn(move || ask(*id))).collect();
        for asker in askers {
            assert_eq!(asker.join().unwrap(), (200, [Some(4140); 2]));
        }
        load.join().unwrap()
    });
    assert_eq!(report.json()["ends"], json!({"ECONNABORTED": 300}), "{report}");
    agent.kill();
}

/// Prints what the questions took; the machine decides how long that is.
#[test]
fn a_thousand_questions() {
    let machine = Machine::new();
    let agent = machine.launch().start().attached();
    for variant in [Variant::None, Variant::IptablesLinkerd] {
        let scene = scene(&machine, &agent, 10 + u32::from(variant == Variant::None));
        apply_redirect(&scene.net.ns, variant).unwrap();
        let mut took: Vec<u64> =
            (0..1000).map(|_| probe(&agent, scene.id)["took_us"].as_u64().unwrap()).collect();
        took.sort_unstable();
        println!("{variant:?}: p50 {} µs, p99 {} µs, max {} µs", took[500], took[990], took[999]);
        assert!(took[990] < 1_000_000, "{took:?}");
        assert!(tracked(&scene.net.ns).is_empty());
    }
    agent.kill();
}

/// From inside, with no privilege: as an init container of the pod would.
#[test]
fn validate_says_what_the_probe_says() {
    let both = "IPv4 is redirected to port 4140, IPv6 is redirected to port 4140";
    let families = |list| ["--families", list];
    for (variant, args, code, says) in [
        (Variant::IptablesLinkerd, vec![], 0, both),
        (Variant::Nft, vec![], 0, both),
        (Variant::V4Only, families("ipv4").to_vec(), 0, "IPv4 is redirected to port 4140"),
        (Variant::V4Only, vec![], 95, "IPv6 connections are not redirected"),
        (Variant::None, vec![], 95, "IPv4 connections are not redirected"),
    ] {
        let (_world, net) = world_with_pod("validate").unwrap();
        apply_redirect(&net.ns, variant).unwrap();
        let mut command = net.ns.command("setpriv").unwrap();
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--bounding-set=-all", BIN]);
        command.args(["validate", "--timeout-s", if code == 0 { "20" } else { "2" }]).args(args);
        let ended = run(command);
        assert_eq!(ended.code, Some(code), "{variant:?}: {ended:?}");
        let last = if code == 0 { ended.out.trim_end() } else { ended.last() };
        assert!(last.starts_with("nobypass: validate: ") && last.contains(says), "{variant:?}: {ended:?}");
    }
    // A pod whose network is IPv4 alone.
    let (_world, net) = world_with_pod("validate").unwrap();
    apply_redirect(&net.ns, Variant::V4Only).unwrap();
    net.ns.sysctl("net/ipv6/conf/all/disable_ipv6", "1").unwrap();
    let mut command = net.ns.command(BIN).unwrap();
    command.arg("validate");
    let ended = run(command);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.out.contains("IPv4 is redirected to port 4140, IPv6 has no route"), "{ended:?}");
}
