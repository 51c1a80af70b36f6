//! The whole way on a real container runtime: pods start before the mesh's plugin, the agent puts that into the config,
//! finds the pods bypassing and repairs them in place, or says why it cannot.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    reason = "tests stop at the first surprise"
)]

mod support {
    #![allow(dead_code, reason = "each test target uses its part")]
    pub mod agent;
    pub mod node;
}

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nobypass::node::desired::{CONDITION, LABEL, TAINT};
use nobypass_testkit::apiserver::{self, ApiServer, Pod as Object};
use nobypass_testkit::node::{EXT_PORT, EXT4, Node, Pod};
use nobypass_testkit::traffic::{Running, Traffic};
use nobypass_testkit::wait;
use serde_json::{Value, json};
use support::agent::{Agent, Launch, Metrics};
use support::node::{connect, launch, node, recognised, shown, unprotected};

/// An agent that keeps `entry` in the node's config and repairs at once; evictions are only said.
fn repairing(node: &Node, entry: &Value) -> Agent {
    repairing_launch(node, entry, "1").args(["--pods", "cri"]).start().ready()
}

fn repairing_launch(node: &Node, entry: &Value, timeout: &str) -> Launch {
    let file = node.base_dir().join("entry.json");
    fs::write(&file, entry.to_string()).unwrap();
    let net_d = node.cni_net_dir();
    launch(node)
        .args([
            "--cni-mode",
            "guard",
            "--remedy-repair",
            "on",
            "--remedy-evict",
            "dry-run",
            "--remedy-grace",
            "0",
        ])
        .args(["--settle-ms", "100", "--repair-timeout", timeout, "--cni-dir"])
        .args([net_d.as_os_str(), "--cni-entry".as_ref(), file.as_os_str()])
}

/// An API server in the node's own network, with the node and these pods, each of a ReplicaSet's.
struct Cluster {
    server: ApiServer,
    kubeconfig: PathBuf,
}

const NODE: &str = "n1";

impl Cluster {
    fn new(node: &Node, pods: &[&Pod]) -> Self {
        let server = node.netns().run_in(ApiServer::start).unwrap().unwrap();
        let mut object = apiserver::node(NODE);
        object["spec"]["taints"] = json!([{ "key": TAINT, "effect": "NoExecute" }]);
        server.create(object).unwrap();
        for pod in pods {
            let object = Object::new(&pod.spec.namespace, &pod.spec.name).uid(&pod.spec.uid).node(NODE);
            let object = object.owner("apps/v1", "ReplicaSet", "early", "owner-uid");
            let object = object.label("linkerd.io/control-plane-ns", "linkerd");
            let object = pod.spec.annotations.iter().fold(object, |object, (k, v)| object.annotation(k, v));
            server.create(object.container("linkerd-proxy", "p:1").build()).unwrap();
        }
        let kubeconfig = node.base_dir().join("kubeconfig");
        server.write_kubeconfig(&kubeconfig).unwrap();
        Self { server, kubeconfig }
    }

    fn start(&self, launch: Launch) -> Agent {
        let gate = ["--gate-condition", "--gate-label", "--startup-taint", TAINT];
        let launch = launch.args(["--pods", "both", "--node-name", NODE, "--kubeconfig"]);
        launch.args([&self.kubeconfig]).args(gate).start().ready()
    }

    /// Whether the node's condition, label and taints say that it is safe.
    fn says_ready(&self) -> bool {
        let node = self.server.get("nodes", "", NODE).unwrap();
        let mut conditions = node["status"]["conditions"].as_array().into_iter().flatten();
        let is_true = |of: &Value| of["type"] == CONDITION && of["status"] == "True";
        let told = node["metadata"]["labels"][LABEL] == "ready" && conditions.any(is_true);
        told && node["spec"]["taints"].as_array().is_none_or(Vec::is_empty)
    }

    /// Actions of the Events on pods, in the order in which they came.
    fn said(&self) -> Vec<String> {
        let events = self.server.bodies("create", "events").into_iter();
        let of_pods = events.filter(|event| event["regarding"]["kind"] == "Pod");
        of_pods.map(|event| event["action"].as_str().unwrap().to_owned()).collect()
    }
}

fn proxy_is_up(node: &Node, pod: &Pod) {
    node.wait_for_log(pod, "linkerd-proxy", |line| line.contains("\"ready\":true")).unwrap();
}

fn repairs(metrics: &Metrics, result: &str) -> u64 {
    metrics.sum("remedy_actions_total", &[("action", "repair"), ("result", result)])
}

fn safe(agent: &Agent) {
    agent.until("the gate", |agent| (agent.metrics().sum("node_ready", &[]) == 1).then_some(()));
}

/// The time of a log line, since midnight.
fn at(line: &str) -> Duration {
    let clock = line.split_once('T').unwrap().1.split_once('Z').unwrap().0;
    let mut parts = clock.split(':').map(|part| part.parse::<f64>().unwrap());
    let mut next = || parts.next().unwrap();
    Duration::from_secs_f64(next() * 3600.0 + next() * 60.0 + next())
}

fn calls(node: &Node, command: &str) -> usize {
    let text = fs::read_to_string(node.mesh_log()).unwrap_or_default();
    text.lines().filter(|line| line.contains(&format!("\"command\":\"{command}\""))).count()
}

#[test]
fn a_pod_that_started_before_the_plugin_gets_well_without_a_restart() {
    let node = node();
    let pod = unprotected(&node, "early");
    proxy_is_up(&node, &pod);
    let processes = || fs::read_to_string(pod.container_cgroup("app").unwrap().join("cgroup.procs")).unwrap();
    let before = processes();
    assert_eq!(connect(&node, &pod, "app").saw(), "plain");

    let agent = repairing(&node, &node.mesh_entry());
    safe(&agent);
    let start = Instant::now();
    agent.until("redirection", |_| (connect(&node, &pod, "app").saw() == "mesh").then_some(()));
    println!("redirected {:?} after the gate opened", start.elapsed());
    agent.until("the proof", |agent| (repairs(&agent.metrics(), "success") == 1).then_some(()));
    let address: Value = serde_json::from_str(
        &pod.enter().unwrap().check("ip", &["-j", "-4", "addr", "show", "eth0"], "").unwrap(),
    )
    .unwrap();
    assert_eq!(address[0]["addr_info"][0]["local"], json!(pod.ip), "its address is the same");
    assert_eq!(processes(), before, "nobody was restarted");
    assert_eq!(calls(&node, "ADD"), 1);
    agent.line(&["remedy", "pod=early", "MeshRedirectRepaired"]);
    // A second is what is promised; the bound leaves room for a machine that is busy with something else.
    let took = at(&agent.line(&["MeshRedirectRepaired"])) - at(&agent.line(&["gate changed", "open=true"]));
    println!("proven {took:?} after the gate opened");
    assert!(took < Duration::from_secs(10), "{took:?}");

    let metrics = agent.metrics();
    assert_eq!(metrics.sum("pods_started_unprotected_total", &[]), 1);
    assert_eq!(metrics.sum("node_gate", &[("reason", "Protected")]), 1);
    assert_eq!(metrics.sum("remedy_actions_total", &[("action", "evict")]), 0);
    let later = unprotected(&node, "later");
    proxy_is_up(&node, &later);
    assert_eq!(connect(&node, &later, "app").saw(), "mesh");
    assert_eq!(agent.metrics().sum("pods_started_unprotected_total", &[]), 1, "only those from before");
    assert!(agent.terminate().success());
    node.stop().unwrap();
}

/// A connection of the application that is there until it breaks or this is dropped.
fn hold(pod: &Pod) -> Running {
    let netns = pod.enter().unwrap();
    let traffic = Traffic::new().netns(&netns).uid(1000).option("interval-ms", 0);
    let cgroup = pod.container_cgroup("app").unwrap();
    traffic.option("cgroup", cgroup.display()).spawn(&[&"hold", &EXT4, &EXT_PORT]).unwrap()
}

/// Everything in its order, and by the policy file alone: seen, protected, repaired, and what was open before dealt with.
#[test]
fn a_policy_leads_from_the_bypass_to_the_end_of_its_last_connection() {
    let node = node();
    let conflist = || fs::read_to_string(node.cni_net_dir().join("10-node.conflist")).unwrap();
    let pod = unprotected(&node, "early");
    proxy_is_up(&node, &pod);
    let mut old = hold(&pod);
    assert_eq!(old.ready.answer(), Some("plain"));
    assert!(!conflist().contains("linkerd-cni"), "nobody has written the plugin's entry");

    let policy = node.base_dir().join("policy.yaml");
    let say = |rest: &str| fs::write(&policy, format!("apiVersion: nobypass.dev/v1alpha1\n{rest}")).unwrap();
    say("mode: audit\n");
    let entry = node.base_dir().join("entry.json");
    fs::write(&entry, node.mesh_entry().to_string()).unwrap();
    let agent = launch(&node)
        .args(["--cni-mode", "guard", "--settle-ms", "100", "--preexisting-grace-s", "1", "--cni-dir"])
        .args([node.cni_net_dir().as_os_str(), "--cni-entry".as_ref(), entry.as_os_str()])
        .args(["--policy".as_ref(), policy.as_os_str()])
        .start()
        .ready();
    recognised(&agent, &pod);
    let verdict = |agent: &Agent, of: &str| {
        let shown = shown(agent, &pod).unwrap();
        (shown["v4"]["verdict"] == of).then_some(shown)
    };
    agent.until("the bypass", |agent| verdict(agent, "bypassing"));
    agent.line(&["reason=\"preexisting\"", "pod=early", "repaired=false"]);
    safe(&agent);
    assert!(conflist().contains("linkerd-cni"), "the agent has");
    assert_eq!(connect(&node, &pod, "app").saw(), "plain", "the plugin alone does not mend a running pod");
    assert_eq!(calls(&node, "ADD"), 0);

    say("mode: audit\nremedies: {repair: on, graceSeconds: 0}\n");
    agent.until("the proof", |agent| (repairs(&agent.metrics(), "success") == 1).then_some(()));
    assert_eq!(connect(&node, &pod, "app").saw(), "mesh", "the next connection");
    let redirected = hold(&pod);
    assert_eq!(redirected.ready.answer(), Some("mesh"));
    // The rules are there, and one connection goes around them: said, and left alone in audit.
    let partial = agent.until("what is left", |agent| verdict(agent, "partial"));
    assert_eq!(partial["v4"]["reason"], "preexisting", "{partial}");
    let old_ones =
        |agent: &Agent, action| agent.metrics().sum("preexisting_connections_total", &[("action", action)]);
    assert_eq!((old_ones(&agent, "reported"), old_ones(&agent, "aborted")), (1, 0));

    say("mode: enforce\nremedies: {repair: on, graceSeconds: 0}\n");
    assert_eq!(old.report().unwrap().errno(), Some("ECONNABORTED"));
    agent.until("a pod that is well", |agent| verdict(agent, "redirected"));
    assert_eq!(old_ones(&agent, "aborted"), 1);
    assert!(redirected.finish().unwrap().ok(), "the redirected one was not touched");
    assert_eq!(connect(&node, &pod, "app").saw(), "mesh");
    assert!(agent.terminate().success());
    node.stop().unwrap();
}

#[test]
fn a_plugin_that_fails_or_hangs_is_reported_and_leads_on() {
    let node = node();
    let pod = unprotected(&node, "unlucky");
    proxy_is_up(&node, &pod);
    let rules = || pod.enter().unwrap().check("nft", &["list", "ruleset"], "").unwrap();
    let before = rules();
    let mut entry = node.mesh_entry();
    entry["testkit"]["fail"] = json!("iptables: no such chain");
    let agent = repairing(&node, &entry);
    safe(&agent);
    assert_eq!(connect(&node, &pod, "app").saw(), "plain");
    agent.line(&["remedy", "pod=unlucky", "RepairFailed", "iptables: no such chain"]);
    // Three tries, and then whatever comes next: here there is no API server that would know an owner.
    agent.until("the next step", |agent| {
        (agent.metrics().sum("remedy_actions_total", &[("action", "evict")]) > 0).then_some(())
    });
    assert_eq!((repairs(&agent.metrics(), "failed"), calls(&node, "ADD"), calls(&node, "DEL")), (3, 3, 3));
    assert_eq!(rules(), before, "nothing half done");
    assert!(agent.terminate().success());

    entry["testkit"]["fail"] = Value::Null;
    entry["testkit"]["delay-ms"] = json!(600_000);
    let agent = repairing(&node, &entry);
    safe(&agent);
    assert_eq!(connect(&node, &pod, "app").saw(), "plain");
    agent.line(&["remedy", "pod=unlucky", "RepairFailed", "did not end within 1s and was killed"]);
    assert_eq!(rules(), before, "nothing half done");
    assert!(agent.terminate().success());
    node.stop().unwrap();
}

/// The entry is there before the binary, as when the agent is faster than the mesh's installer. Evicting would not help.
#[test]
fn a_plugin_that_is_installed_late_repairs_the_pod_then() {
    let node = node();
    let pod = unprotected(&node, "patient");
    proxy_is_up(&node, &pod);
    let (plugin, aside) = (node.cni_bin_dir().join("linkerd-cni"), node.cni_bin_dir().join("aside"));
    fs::rename(&plugin, &aside).unwrap();
    let agent = repairing(&node, &node.mesh_entry());
    assert_eq!(connect(&node, &pod, "app").saw(), "plain");
    agent.line(&["remedy", "pod=patient", "RepairFailed", "linkerd-cni is not in"]);
    agent.until("the wait", |agent| (repairs(&agent.metrics(), "not_ready") == 1).then_some(()));
    fs::rename(&aside, &plugin).unwrap();
    agent.until("redirection", |_| (connect(&node, &pod, "app").saw() == "mesh").then_some(()));
    agent.until("the proof", |agent| (repairs(&agent.metrics(), "success") == 1).then_some(()));
    let metrics = agent.metrics();
    assert_eq!(metrics.sum("remedy_actions_total", &[("action", "evict")]), 0, "{metrics:?}");
    assert_eq!((repairs(&metrics, "failed"), repairs(&metrics, "impossible")), (0, 0), "{metrics:?}");
    assert!(agent.terminate().success());
    node.stop().unwrap();
}

#[test]
fn many_pods_that_started_before_the_plugin_are_all_repaired() {
    const PODS: usize = 30;
    let node = node();
    let pods: Vec<Pod> = (0..PODS).map(|n| unprotected(&node, &format!("early-{n}"))).collect();
    for pod in &pods {
        proxy_is_up(&node, pod);
    }
    let agent = repairing(&node, &node.mesh_entry());
    safe(&agent);
    let start = Instant::now();
    let mut left: Vec<&Pod> = pods.iter().collect();
    let deadline = Instant::now() + wait::LONG;
    while !left.is_empty() {
        assert!(Instant::now() < deadline, "{} pods left: {}", left.len(), agent.log());
        left.retain(|pod| connect(&node, pod, "app").saw() != "mesh");
    }
    println!("{PODS} pods redirected {:?} after the gate opened", start.elapsed());
    let all = u64::try_from(PODS).unwrap();
    agent.until("all proofs", |agent| (repairs(&agent.metrics(), "success") == all).then_some(()));
    let metrics = agent.metrics();
    assert_eq!(calls(&node, "ADD"), PODS, "once each");
    assert_eq!(metrics.sum("remedy_actions_total", &[("action", "evict")]), 0, "{metrics:?}");
    assert_eq!(metrics.sum("pods_started_unprotected_total", &[]), all);
    // Rate and order: how many, how long each took, and that each was said before it was done.
    assert_eq!(metrics.sum("remedy_repair_duration_seconds_count", &[]), all);
    assert_eq!(repairs(&metrics, "rate_limited") + repairs(&metrics, "paused"), 0, "{metrics:?}");
    agent.until("nobody who waits", |agent| {
        let at = |stage| agent.metrics().sum("remedy_pods", &[("stage", stage)]);
        (at("waiting") + at("repairing") + at("evicting") + at("helpless") == 0).then_some(())
    });
    let log = agent.log();
    let place =
        |words: &[&str]| log.lines().position(|line| words.iter().all(|word| line.contains(word))).unwrap();
    for pod in &pods {
        let name = format!("pod={} ", pod.spec.name);
        let [seen, begun, done] =
            ["Detecting", "Repairing", "MeshRedirectRepaired"].map(|word| place(&["remedy", &name, word]));
        assert!(seen < begun && begun < done, "{name}: {seen} {begun} {done}");
    }
    assert!(agent.terminate().success());
    node.stop().unwrap();
}

/// With the cluster: the node is told, the pod's owner is looked up when the plugin fails or hangs, and Events tell it all.
#[test]
fn the_cluster_is_told_and_a_plugin_that_fails_or_hangs_leads_to_the_eviction() {
    let node = node();
    let pod = unprotected(&node, "early");
    proxy_is_up(&node, &pod);
    let cluster = Cluster::new(&node, &[&pod]);
    let rules = || pod.enter().unwrap().check("nft", &["list", "ruleset"], "").unwrap();
    let before = rules();
    let label = || {
        let found = cluster.server.get("pods", &pod.spec.namespace, "early").unwrap();
        found["metadata"]["labels"]["nobypass.dev/bypassing"].clone()
    };
    for (key, value, says) in [
        ("fail", json!("iptables: no such chain"), "iptables: no such chain"),
        ("delay-ms", json!(600_000), "did not end within 1s and was killed"),
    ] {
        cluster.server.clear_requests();
        let mut entry = node.mesh_entry();
        entry["testkit"][key] = value;
        let agent = cluster.start(repairing_launch(&node, &entry, "1").args(["--remedy-label", "on"]));
        recognised(&agent, &pod);
        safe(&agent);
        agent.until("the node", |_| cluster.says_ready().then_some(()));
        assert_eq!(connect(&node, &pod, "app").saw(), "plain");
        let dry_run = [("action", "evict"), ("result", "dry_run")];
        agent.until("the eviction", |agent| {
            (agent.metrics().sum("remedy_actions_total", &dry_run) == 1).then_some(())
        });
        agent.until("its Event", |_| cluster.said().contains(&"WouldEvict".to_owned()).then_some(()));
        let said = cluster.said();
        assert_eq!(
            (said.first().unwrap().as_str(), said.last().unwrap().as_str()),
            ("Detecting", "WouldEvict")
        );
        let notes: Vec<Value> =
            cluster.server.bodies("create", "events").iter().map(|event| event["note"].clone()).collect();
        assert!(notes.iter().any(|note| note.as_str().unwrap().contains(says)), "{notes:?}");
        assert_eq!(cluster.server.count("create", "pods/eviction"), 0, "only said");
        assert_eq!(label(), "true");
        assert_eq!(rules(), before, "nothing half done");
        assert!(agent.terminate().success());
    }

    // The plugin works again: the same pod is repaired after all, and the label goes.
    let agent =
        cluster.start(repairing_launch(&node, &node.mesh_entry(), "5").args(["--remedy-label", "on"]));
    recognised(&agent, &pod);
    agent.until("redirection", |_| (connect(&node, &pod, "app").saw() == "mesh").then_some(()));
    agent.until("the label's end", |_| label().is_null().then_some(()));
    assert!(cluster.said().contains(&"Repaired".to_owned()), "{:?}", cluster.said());
    assert!(agent.terminate().success());
    node.stop().unwrap();
}

/// A gate that flaps and a plugin that fails for all: the calls of the plugin stay few.
#[test]
fn a_storm_calls_the_plugin_a_bounded_number_of_times() {
    const PODS: usize = 8;
    let node = node();
    let pods: Vec<Pod> = (0..PODS).map(|n| unprotected(&node, &format!("early-{n}"))).collect();
    for pod in &pods {
        proxy_is_up(&node, pod);
    }
    let mut entry = node.mesh_entry();
    entry["testkit"]["fail"] = json!("no");
    let agent = repairing(&node, &entry);
    safe(&agent);
    // Somebody takes the mesh's entry out, and the agent puts it back: the gate closes and opens.
    let (list, temporary) = (node.cni_net_dir().join("10-node.conflist"), node.cni_net_dir().join(".bare"));
    for _ in 0..3 {
        fs::write(&temporary, node.conflist(&[])).unwrap();
        fs::rename(&temporary, &list).unwrap();
        for pod in &pods {
            connect(&node, pod, "app");
        }
    }
    agent.line(&["gate changed", "open=false"]);
    agent.until("the pause", |agent| (agent.metrics().sum("remedy_paused", &[]) == 1).then_some(()));
    let before = calls(&node, "ADD");
    for _ in 0..5 {
        for pod in &pods {
            connect(&node, pod, "app");
        }
    }
    let after = calls(&node, "ADD");
    println!("{after} calls of the plugin");
    // Five failures in a row stop it; those that were under way then may still fail.
    assert!(after <= 5 + 4 && after - before <= 2, "{before} and then {after}");
    let metrics = agent.metrics();
    assert_eq!(metrics.sum("remedy_actions_total", &[("action", "evict")]), 0, "a successor would not start");
    assert!(repairs(&metrics, "paused") >= 1, "{metrics:?}");
    assert!(agent.terminate().success());
    node.stop().unwrap();
}

/// The plugin that Linkerd ships, if `NOBYPASS_LINKERD_CNI` names one: it asks the API server about the pod and calls
/// `nsenter` and `iptables` of the node.
#[test]
fn linkerds_own_plugin_repairs_a_running_pod() {
    let Some(plugin) = std::env::var_os("NOBYPASS_LINKERD_CNI") else {
        println!(
            "skipped: NOBYPASS_LINKERD_CNI does not name Linkerd's CNI plugin (the binary linkerd-cni of its image)"
        );
        return;
    };
    let plugin = fs::canonicalize(&plugin).unwrap_or_else(|error| panic!("NOBYPASS_LINKERD_CNI: {error}"));
    let node = node();
    let installed = node.cni_bin_dir().join("linkerd-cni");
    fs::remove_file(&installed).unwrap();
    std::os::unix::fs::symlink(&plugin, &installed).unwrap();
    let pod = unprotected(&node, "early");
    proxy_is_up(&node, &pod);
    let before = fs::read_to_string(pod.container_cgroup("app").unwrap().join("cgroup.procs")).unwrap();
    assert_eq!(connect(&node, &pod, "app").saw(), "plain");
    let cluster = Cluster::new(&node, &[&pod]);
    let mut entry = node.mesh_entry();
    // The plugin asks for the context by this name.
    let mut kubeconfig: Value = serde_json::from_str(&cluster.server.kubeconfig()).unwrap();
    kubeconfig["contexts"][0]["name"] = json!("linkerd-cni-context");
    kubeconfig["current-context"] = json!("linkerd-cni-context");
    let plugins = node.base_dir().join("ZZZ-linkerd-cni-kubeconfig");
    fs::write(&plugins, kubeconfig.to_string()).unwrap();
    entry["kubernetes"]["kubeconfig"] = json!(plugins);
    entry.as_object_mut().unwrap().shift_remove("testkit");
    let agent = cluster.start(repairing_launch(&node, &entry, "30"));
    recognised(&agent, &pod);
    safe(&agent);
    agent.until("redirection", |_| (connect(&node, &pod, "app").saw() == "mesh").then_some(()));
    agent.until("the proof", |agent| (repairs(&agent.metrics(), "success") == 1).then_some(()));
    println!("{}", agent.line(&["MeshRedirectRepaired"]));
    let after = fs::read_to_string(pod.container_cgroup("app").unwrap().join("cgroup.procs")).unwrap();
    assert_eq!(after, before, "nobody was restarted");
    assert!(agent.terminate().success());
    node.stop().unwrap();
}
