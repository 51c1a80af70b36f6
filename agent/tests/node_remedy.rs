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

use nobypass_testkit::node::{EXT_PORT, EXT4, Node, Pod};
use nobypass_testkit::traffic::{Running, Traffic};
use nobypass_testkit::wait;
use serde_json::{Value, json};
use support::agent::{Agent, Metrics};
use support::node::{connect, launch, node, recognised, shown, unprotected};

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
