//! An agent on a private node: what tests ask of its pods.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nobypass_testkit::node::{EXT_PORT, EXT4, Node, Pod, PodSpec};
use nobypass_testkit::traffic::Report;
use serde_json::Value;

use super::agent::{Agent, BIN, Launch, Metrics};

/// A node whose pods are not redirected unless its conflist is written anew.
pub fn node() -> Node {
    let node = Node::new().unwrap();
    node.write_conflist(false).unwrap();
    node
}

pub fn launch(node: &Node) -> Launch {
    launch_with(node, &node.cri_socket())
}

pub fn launch_with(node: &Node, runtime: &Path) -> Launch {
    Launch::new(node.command(BIN).unwrap(), node.base_dir())
        .args(["--metrics-addr", "none", "--cri-endpoint"])
        .args([runtime, Path::new("--pod-parent"), &node.kubepods()])
}

pub fn inode(path: &Path) -> u64 {
    fs::metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).ino()
}

/// What the status says of a pod.
pub fn shown(agent: &Agent, pod: &Pod) -> Option<Value> {
    let status = agent.status();
    let pods = status["pods"].as_array().unwrap();
    let mut of_uid = pods.iter().filter(|shown| shown["uid"] == pod.spec.uid.as_str());
    let found = of_uid.next().cloned();
    assert!(of_uid.next().is_none(), "twice: {status}");
    found
}

/// Waits until a meshed pod is classified and its proxy's cgroup known, and checks all that is said of it.
pub fn recognised(agent: &Agent, pod: &Pod) {
    let proxy = inode(&pod.container_cgroup("linkerd-proxy").unwrap());
    let shown = agent.until(&format!("{} and its proxy", pod.spec.name), |agent| {
        shown(agent, pod).filter(|shown| shown["proxy_cgroup"] == proxy)
    });
    let expected = serde_json::json!({
        "namespace": pod.spec.namespace, "name": pod.spec.name, "mesh": "linkerd", "kind": "meshed",
        "reason": "meshed", "cgroup": inode(&pod.cgroup), "problems": [],
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&shown[key], value, "{key} of {shown}");
    }
}

pub fn unprotected(node: &Node, name: &str) -> Pod {
    node.run_pod(PodSpec::meshed(name).unwrap()).unwrap()
}

pub fn connect(node: &Node, pod: &Pod, container: &str) -> Report {
    node.traffic(pod, container, &["tcp4", EXT4, EXT_PORT, "--timeout-ms", "300"]).unwrap()
}

pub fn flood(node: &Node, pod: &Pod, count: &str) -> Report {
    node.traffic(pod, "app", &["flood", EXT4, EXT_PORT, count, "--parallel", "2"]).unwrap()
}

pub fn bypasses(metrics: &Metrics) -> u64 {
    metrics.sum("bypass_connections_total", &[])
}

/// The identity that the metrics promise.
pub fn every_bypass_is_accounted_for(metrics: &Metrics) {
    let parts = ["events_emitted_total", "events_suppressed_total", "events_lost_total"];
    let sum: u64 = parts.iter().map(|part| metrics.sum(part, &[])).sum();
    let kinds = ["not_redirected", "raw_socket", "proxy_uid_impersonation", "family_gap", "inbound"];
    let all: u64 = kinds.iter().map(|kind| metrics.sum("kernel_counts_total", &[("counter", kind)])).sum();
    assert_eq!(sum, all, "{metrics:?}");
}

/// Counts the SYNs that reach the world outside: a witness that asks no program under test.
pub fn watch_outside(node: &Node) {
    const TABLE: &str = "table inet witness {\n counter syn { }\n chain arrived {\n \
        type filter hook prerouting priority -350; policy accept;\n \
        iifname \"eth0\" tcp flags & (syn|ack) == syn counter name syn\n }\n}\n";
    node.ext().check("nft", &["-f", "-"], TABLE).unwrap();
}

pub fn arrived_outside(node: &Node) -> u64 {
    let text = node.ext().check("nft", &["-j", "list", "counter", "inet", "witness", "syn"], "").unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    let items = json["nftables"].as_array().unwrap();
    items.iter().find_map(|item| item["counter"]["packets"].as_u64()).unwrap()
}
