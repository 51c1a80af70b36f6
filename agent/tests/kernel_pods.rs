//! The agent with an API server for its pods, and the races between their objects and their cgroups.

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

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use nobypass::detect::verdict::count;
use nobypass_common::ids::Counter;

use nobypass_testkit::apiserver::{ApiServer, Pod as Object, namespace};
use nobypass_testkit::cgroup::{Cgroup, Pod, Qos};
use nobypass_testkit::netns::{FAR4, world_with_pod};
use nobypass_testkit::traffic::Traffic;
use serde_json::{Value, json};
use support::agent::{Agent, Launch};
use support::machine::Machine;

const NODE: &str = "n1";

fn uid(n: usize) -> String {
    format!("2c48913c-b29f-11e7-9350-{n:012x}")
}

/// A container id of pod `n`.
fn id(n: usize, of: &str) -> String {
    let hex: String = of.bytes().map(|byte| format!("{byte:02x}")).collect();
    format!("{hex:0<48}{n:016x}")
}

/// A pod of Linkerd's, its containers running.
fn meshed(n: usize, name: &str) -> Value {
    Object::new("shop", name)
        .node(NODE)
        .uid(&uid(n))
        .annotation("linkerd.io/proxy-version", "edge-26.8.1")
        .annotation("linkerd.io/trust-root-sha256", "ab")
        .init_container("linkerd-network-validator", "l:1", false)
        .container("linkerd-proxy", "l:1")
        .running("app", &format!("containerd://{}", id(n, "app")))
        .running("linkerd-proxy", &format!("containerd://{}", id(n, "proxy")))
        .build()
}

fn plain(n: usize, name: &str) -> Value {
    Object::new("shop", name).node(NODE).uid(&uid(n)).build()
}

struct Cluster {
    machine: Machine,
    server: ApiServer,
    kubeconfig: PathBuf,
}

impl Cluster {
    fn new() -> Self {
        let (machine, server) = (Machine::new(), ApiServer::start().unwrap());
        let kubeconfig = machine.home.path().join("kubeconfig");
        server.write_kubeconfig(&kubeconfig).unwrap();
        Self { machine, server, kubeconfig }
    }

    fn launch(&self, pods: &str) -> Launch {
        let kubeconfig = self.kubeconfig.display().to_string();
        self.machine.launch().args(["--pods", pods, "--node-name", NODE, "--kubeconfig", &kubeconfig])
    }

    /// The cgroup of pod `n`, and its proxy's.
    fn cgroups(&self, n: usize) -> (Pod, Cgroup) {
        let pod = self.machine.scratch.pod(Qos::Burstable, &uid(n)).unwrap();
        pod.container(&id(n, "app")).unwrap();
        let proxy = pod.container(&id(n, "proxy")).unwrap();
        (pod, proxy)
    }
}

/// What the agent says of the pod with this cgroup: name, kind, and its proxy's cgroup.
fn said(agent: &Agent, cgroup: u64) -> Option<(String, String, u64)> {
    let status = agent.status();
    let pod = status["pods"].as_array().unwrap().iter().find(|pod| pod["cgroup"] == cgroup)?.clone();
    let text = |key: &str| pod[key].as_str().unwrap().to_owned();
    Some((text("name"), text("kind"), pod["proxy_cgroup"].as_u64().unwrap()))
}

fn wait_for(agent: &Agent, cgroup: u64, wanted: (&str, &str, u64)) {
    let wanted = (wanted.0.to_owned(), wanted.1.to_owned(), wanted.2);
    agent.until(&format!("{wanted:?}"), |agent| (said(agent, cgroup)? == wanted).then_some(()));
}

#[test]
fn an_agent_that_starts_last_knows_fifty_pods_by_the_api_alone() {
    let cluster = Cluster::new();
    let pods: Vec<(Pod, Cgroup)> = (0..50).map(|n| cluster.cgroups(n)).collect();
    for n in 0..50 {
        let object = if n % 2 == 0 { meshed(n, &format!("p{n}")) } else { plain(n, &format!("p{n}")) };
        cluster.server.create(object).unwrap();
    }
    let agent = cluster.launch("kube").start().ready();
    for (n, (pod, proxy)) in pods.iter().enumerate() {
        let (kind, proxy) = if n % 2 == 0 { ("meshed", proxy.id().unwrap()) } else { ("exempt", 0) };
        wait_for(&agent, pod.id().unwrap(), (&format!("p{n}"), kind, proxy));
    }
    let metrics = agent.metrics();
    let kube = [("source", "kube")];
    assert_eq!(metrics.sum("pod_source_pods", &kube), 50);
    assert_eq!((metrics.sum("pod_source_connected", &kube), metrics.sum("pod_source_synced", &kube)), (1, 1));
    assert!(metrics.sum("pod_source_last_event_timestamp_seconds", &kube) > 1_700_000_000);
    assert_eq!(metrics.series("pod_source_connected", &[("source", "cri")]), 0, "it is not asked");
    assert!(agent.terminate().success());
}

#[test]
fn object_late_container_before_its_name_and_a_pod_made_again_under_its_name() {
    let cluster = Cluster::new();
    let agent = cluster.launch("kube").start().ready();
    // The cgroups are there long before anybody says whose they are.
    let (pod, proxy) = cluster.cgroups(1);
    let first = pod.id().unwrap();
    wait_for(&agent, first, ("", "unknown", 0));
    cluster.server.create(meshed(1, "db-0")).unwrap();
    wait_for(&agent, first, ("db-0", "meshed", proxy.id().unwrap()));

    // Its object goes and comes again with another UID, not in the mesh, while the old cgroup still lives.
    cluster.server.delete("pods", "shop", "db-0").unwrap();
    cluster.server.create(plain(2, "db-0")).unwrap();
    let (again, _) = cluster.cgroups(2);
    let second = again.id().unwrap();
    wait_for(&agent, second, ("db-0", "exempt", 0));
    assert_eq!(said(&agent, first).unwrap().1, "meshed", "the old one is what it was");
    (*pod).clone().remove().unwrap();
    agent.until("the end of the old one", |agent| said(agent, first).is_none().then_some(()));
    assert_eq!(said(&agent, second), Some(("db-0".into(), "exempt".into(), 0)));

    // An object of the same name and another UID says nothing about a cgroup that nobody claims.
    let (other, _) = cluster.cgroups(3);
    cluster.server.delete("pods", "shop", "db-0").unwrap();
    cluster.server.create(meshed(4, "db-0")).unwrap();
    let metrics = |agent: &Agent| agent.metrics().sum("pod_source_pods", &[("source", "kube")]);
    agent.until("the news", |agent| (metrics(agent) == 1).then_some(()));
    wait_for(&agent, other.id().unwrap(), ("", "unknown", 0));
    assert!(agent.terminate().success());
}

#[test]
fn cgroups_made_and_removed_at_once_never_get_each_others_verdict() {
    let cluster = Cluster::new();
    let agent = cluster.launch("kube").start().ready();
    // The kernel may give ids again, and objects come and go in another order than cgroups.
    for round in 0..20 {
        let (a, b) = (2 * round, 2 * round + 1);
        cluster.server.create(meshed(a, &format!("mesh-{a}"))).unwrap();
        let (old, _) = cluster.cgroups(a);
        (*old).clone().remove().unwrap();
        let (pod, _) = cluster.cgroups(b);
        cluster.server.create(plain(b, &format!("plain-{b}"))).unwrap();
        cluster.server.delete("pods", "shop", &format!("mesh-{a}")).unwrap();
        wait_for(&agent, pod.id().unwrap(), (&format!("plain-{b}"), "exempt", 0));
    }
    for pod in agent.status()["pods"].as_array().unwrap() {
        let (uid, name) = (pod["uid"].as_str().unwrap(), pod["name"].as_str().unwrap());
        let n = usize::from_str_radix(&uid[24..], 16).unwrap();
        assert_eq!(name, format!("plain-{n}"), "{pod}");
    }
    assert!(agent.terminate().success());
}

#[test]
fn with_both_sources_one_that_is_away_is_mentioned_and_stops_nothing() {
    let cluster = Cluster::new();
    let (pod, proxy) = cluster.cgroups(1);
    cluster.server.create(namespace("shop")).unwrap();
    cluster.server.create(meshed(1, "web")).unwrap();
    // The runtime's socket of a test machine does not exist.
    let agent = cluster.launch("both").start().ready();
    wait_for(&agent, pod.id().unwrap(), ("web", "meshed", proxy.id().unwrap()));
    let body = agent.until("the mention", |agent| {
        let (code, body) = agent.get("/readyz")?;
        assert_eq!(code, 200, "{body}");
        body.contains("pods of the runtime").then_some(body)
    });
    assert!(body.starts_with("ready\n") && body.contains("no-runtime.sock"), "{body}");

    // Now nobody speaks: what was known holds, and readiness says why.
    cluster.server.stop();
    let body = agent.until("both reasons", |agent| {
        let (code, body) = agent.get("/readyz")?;
        (code == 503).then_some(body)
    });
    assert!(body.contains("cri: ") && body.contains("kube: the API server does not answer"), "{body}");
    assert_eq!(agent.get("/livez"), Some((200, "ok\n".into())));
    agent.until("tries", |agent| {
        let unreachable = [("source", "kube"), ("reason", "unreachable")];
        (agent.metrics().sum("pod_source_errors_total", &unreachable) >= 3).then_some(())
    });
    let web = ("web".into(), "meshed".into(), proxy.id().unwrap());
    assert_eq!(said(&agent, pod.id().unwrap()), Some(web));
    agent.line(&["WARN", "no facts from the API server, keeping what is known"]);
    cluster.server.delete("pods", "shop", "web").unwrap();
    cluster.server.create(plain(2, "new")).unwrap();
    let (new, _) = cluster.cgroups(2);
    cluster.server.restart().unwrap();
    wait_for(&agent, new.id().unwrap(), ("new", "exempt", 0));
    assert!(agent.terminate().success());
}

#[test]
fn refusals_of_the_api_server_are_said_in_the_log_with_what_to_do() {
    let cluster = Cluster::new();
    cluster.server.deny("*", "pods");
    let agent = cluster.launch("kube").start().attached();
    agent.line(&["forbids the agent to watch pods (403)", "add to its ClusterRole", "verbs: [list, watch]"]);
    cluster.server.allow_all();
    agent.until("readiness", |agent| agent.get("/readyz").filter(|(code, _)| *code == 200));
    assert!(agent.terminate().success());
}

#[test]
fn a_policy_that_reads_other_labels_is_followed_without_a_restart() {
    const POLICY: &str = "apiVersion: nobypass.dev/v1alpha1\n";
    const WITH_PROFILE: &str = "namespaces: [{matchLabels: {team.io/tier: gold}, mode: enforce}]\n\
        profiles:\n- name: team\n  recognise: {any: [{label: {key: team.io/mesh}}]}\n  \
        containers: {proxy: [sidecar]}\n  ports: {outbound: 1, inbound: 2}\n";
    let cluster = Cluster::new();
    let policy = cluster.machine.home.path().join("policy.yaml");
    std::fs::write(&policy, POLICY).unwrap();
    let mut shop = namespace("shop");
    shop["metadata"]["labels"] = json!({"team.io/tier": "gold"});
    cluster.server.create(shop).unwrap();
    let (pod, proxy) = cluster.cgroups(1);
    let object = Object::new("shop", "web").node(NODE).uid(&uid(1)).label("team.io/mesh", "on");
    let object = object.container("sidecar", "s:1").running("app", &format!("containerd://{}", id(1, "app")));
    cluster
        .server
        .create(object.running("sidecar", &format!("containerd://{}", id(1, "proxy"))).build())
        .unwrap();
    let path = policy.display().to_string();
    let agent = cluster.launch("kube").args(["--policy", &path]).start().ready();
    wait_for(&agent, pod.id().unwrap(), ("web", "exempt", 0));

    std::fs::write(&policy, format!("{POLICY}{WITH_PROFILE}")).unwrap();
    wait_for(&agent, pod.id().unwrap(), ("web", "meshed", proxy.id().unwrap()));
    agent.until("the namespace's rule", |agent| {
        let status = agent.status();
        let web = status["pods"].as_array().unwrap().iter().find(|pod| pod["name"] == "web")?;
        (web["mode"] == "enforce" && web["mesh"] == "team").then_some(())
    });
    agent.line(&["other labels or annotations are wanted", "listed anew"]);
    let body = agent.get("/readyz").unwrap().1;
    assert!(!body.contains("restart"), "{body}");
    assert!(agent.terminate().success());
}

#[test]
fn a_label_on_the_namespace_is_heard_of() {
    // Until a profile reads it nothing shows but that the collection is followed.
    let cluster = Cluster::new();
    let mut shop = namespace("shop");
    shop["metadata"]["labels"] = json!({"linkerd.io/inject": "enabled"});
    cluster.server.create(shop).unwrap();
    let agent = cluster.launch("kube").start().ready();
    agent.until("the watch", |_| (cluster.server.watches("namespaces") == 1).then_some(()));
    assert!(cluster.server.writes().is_empty(), "facts are read, never written");
    assert!(agent.terminate().success());
}

/// The first thing that each pod does is to connect, and nobody knows it then: half of them have no object until their
/// cgroup is there.
#[test]
fn the_first_connections_of_a_thousand_held_pods_are_late_by_tenths_of_a_second_and_counted_once() {
    const PODS: u64 = 1000;
    let cluster = Cluster::new();
    let (world, net) = world_with_pod("held").unwrap();
    let _server = Traffic::new().netns(world.far()).server(&[8080]).unwrap();
    let agent = cluster.launch("kube").args(["--unknown-pods", "hold"]).start().ready();
    let object = |n: u64| {
        let (n, name) = (usize::try_from(n).unwrap(), format!("p{n}"));
        if n % 4 < 2 { plain(n, &name) } else { meshed(n, &name) }
    };
    (0..PODS).filter(|n| n % 2 == 0).for_each(|n| drop(cluster.server.create(object(n)).unwrap()));
    let known = |agent: &Agent| agent.metrics().sum("pod_source_pods", &[("source", "kube")]);
    agent.until("the first half", |agent| (known(agent) == PODS / 2).then_some(()));

    let below = cluster.machine.scratch.kubepods().join("burstable");
    std::fs::create_dir_all(&below).unwrap();
    let traffic = Traffic::new()
        .netns(&net.ns)
        .option("uid", 1000)
        .option("parent", below.display())
        .option("prefix", &uid(0)[..24])
        .option("count", PODS)
        .option("parallel", 32)
        .option("timeout-ms", 60_000);
    let stop = AtomicBool::new(false);
    let report = std::thread::scope(|scope| {
        let late = scope.spawn(|| {
            for n in (0..PODS).filter(|n| n % 2 == 1) {
                let pod = below.join(format!("pod{}", uid(usize::try_from(n).unwrap())));
                while !pod.exists() && !stop.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                cluster.server.create(object(n)).unwrap();
            }
        });
        let report = traffic.run(&[&"first-packet", &FAR4, &8080]);
        stop.store(true, Ordering::Relaxed);
        late.join().unwrap();
        report.unwrap()
    });
    let totals = cluster.machine.maps().totals().unwrap();
    let counted = |counter| count(&totals, counter);
    println!("{report}, held: {}", counted(Counter::Held));
    assert_eq!((report.count("tried"), report.count("established")), (PODS, PODS), "{report}");
    // Not one of half of them was known when it connected.
    assert!(counted(Counter::Held) >= PODS / 4, "{totals:?}");
    assert_eq!(counted(Counter::Unknown), counted(Counter::Held), "none was let out unknown");
    assert_eq!(counted(Counter::Bypass), PODS / 2, "each meshed one is judged once");
    assert_eq!(counted(Counter::WouldDrop), PODS / 2);
    assert_eq!(counted(Counter::NotJudged), PODS / 2, "and each other one");
    // A whole second is what the kernel alone would wait.
    assert!(report.count("p50_us") < 1_000_000, "{report}");
    assert!(agent.terminate().success());
}
