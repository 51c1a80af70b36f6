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
use std::time::Instant;

use nobypass_testkit::node::{Node, Pod};
use nobypass_testkit::wait;
use serde_json::{Value, json};
use support::agent::{Agent, Metrics};
use support::node::{connect, launch, node, unprotected};

/// An agent that keeps `entry` in the node's config and repairs at once; evictions are only said.
fn repairing(node: &Node, entry: &Value) -> Agent {
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
        .args(["--settle-ms", "100", "--repair-timeout", "1", "--pods", "cri", "--cni-dir"])
        .args([net_d.as_os_str(), "--cni-entry".as_ref(), file.as_os_str()])
        .start()
        .ready()
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
    assert!(agent.terminate().success());
    node.stop().unwrap();
}
