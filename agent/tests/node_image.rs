//! The image, in a pod that has what deploy/manifests grants and nothing more.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the helpers of a test may panic as the test may"
)]

mod support {
    #![allow(dead_code, reason = "each test target uses its part")]
    pub mod agent;
    pub mod manifest;
    pub mod node;
}

use nobypass_testkit::node::{ExecOutput, Node, Pod};
use nobypass_testkit::wait;
use serde_json::Value;
use support::manifest::{CONTAINER, Manifest, build_image};
use support::node::{connect, node, unprotected};

fn nobypass(node: &Node, pod: &Pod, words: &[&str]) -> ExecOutput {
    node.exec(pod, CONTAINER, &[&["nobypass"], words].concat()).unwrap()
}

/// The node's state; null while the agent starts.
fn status(node: &Node, pod: &Pod) -> Value {
    let said = nobypass(node, pod, &["status", "-o", "json"]);
    if said.exit_code != 0 {
        return Value::Null;
    }
    serde_json::from_str(&said.stdout).unwrap_or_else(|error| panic!("{error}: {said:?}"))
}

fn until<T>(node: &Node, pod: &Pod, what: &str, poll: impl Fn(&Value) -> Option<T>) -> T {
    let found = wait::until(what, wait::HANG, || {
        assert_eq!(node.exit_code(pod, CONTAINER).unwrap(), None, "{}", log(node, pod));
        poll(&status(node, pod))
    });
    found.unwrap_or_else(|error| panic!("{error}: {}\n{}", status(node, pod), log(node, pod)))
}

fn log(node: &Node, pod: &Pod) -> String {
    node.logs(pod, CONTAINER).unwrap_or_default()
}

/// A pod's part of the status.
fn of<'a>(status: &'a Value, pod: &Pod) -> Option<&'a Value> {
    status["pods"].as_array()?.iter().find(|shown| shown["uid"] == pod.spec.uid.as_str())
}

#[test]
fn two_builds_of_the_image_are_the_same_to_the_byte() {
    let dir = tempfile::tempdir().unwrap();
    let first = build_image(&dir.path().join("1"));
    // Linked anew, not copied.
    let main = support::manifest::repository().join("agent/src/main.rs");
    std::fs::File::options()
        .append(true)
        .open(main)
        .unwrap()
        .set_modified(std::time::SystemTime::now())
        .unwrap();
    assert!(first == build_image(&dir.path().join("2")), "two images differ");
}

#[test]
fn it_does_the_demos_job_with_what_the_manifest_grants() {
    let node = node();
    let early = unprotected(&node, "early");
    let manifest = Manifest::read(&node, "audit");
    let agent = manifest.start(&node, &manifest.capabilities());

    until(&node, &agent, "the pod", |status| {
        of(status, &early).filter(|pod| pod["proxy_cgroup"] != 0).map(drop)
    });
    let shown = status(&node, &agent);
    for hook in shown["hooks"].as_array().unwrap() {
        assert_eq!(hook["effective"], true, "{hook}\n{}", log(&node, &agent));
    }
    assert_eq!(connect(&node, &early, "app").answer(), Some("plain"));
    until(&node, &agent, "the bypass", |status| {
        of(status, &early).filter(|pod| pod["verdict"] == "bypassing").map(drop)
    });

    let said = nobypass(&node, &agent, &["mode", "enforce"]);
    assert_eq!((said.exit_code, said.stdout.trim()), (0, "enforce"), "{said:?}");
    assert_eq!(connect(&node, &early, "app").answer(), None);
    until(&node, &agent, "the drop", |status| of(status, &early).filter(|pod| pod["dropped"] != 0).map(drop));

    // The CNI half sees the node's files and keeps the mesh's entry in them.
    assert_eq!(nobypass(&node, &agent, &["cni", "status"]).exit_code, 1, "nothing is protected yet");
    node.write_conflist(true).unwrap();
    let path = node.cni_net_dir().join("10-node.conflist");
    wait::until("the protection", wait::HANG, || {
        (nobypass(&node, &agent, &["cni", "status"]).exit_code == 0).then_some(())
    })
    .unwrap();
    std::fs::write(&path, node.conflist(&[])).unwrap();
    wait::until("the mesh's entry to be put back", wait::HANG, || {
        std::fs::read_to_string(&path).unwrap().contains("linkerd-cni").then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}: {}", log(&node, &agent)));
    assert!(!log(&node, &agent).contains("panicked"));
    node.remove_pod(&agent).unwrap();
}

#[test]
fn without_any_one_of_its_capabilities_something_with_a_name_fails() {
    let node = node();
    let manifest = Manifest::read(&node, "audit");
    let all = manifest.capabilities();
    for (capability, code, words) in
        [("BPF", 77, "CAP_BPF"), ("NET_ADMIN", 77, "CAP_NET_ADMIN"), ("PERFMON", 77, "CAP_PERFMON")]
    {
        let rest: Vec<String> = all.iter().filter(|name| *name != capability).cloned().collect();
        assert_eq!(rest.len() + 1, all.len(), "{capability} is not in the manifest");
        let agent = manifest.start(&node, &rest);
        let ended = wait::until("the agent's end", wait::HANG, || node.exit_code(&agent, CONTAINER).unwrap());
        let log = log(&node, &agent);
        assert_eq!(ended.unwrap(), code, "without {capability}: {log}");
        assert!(log.lines().last().unwrap_or_default().contains(words), "without {capability}: {log}");
        node.remove_pod(&agent).unwrap();
    }
    assert_eq!(all.len(), 3, "a capability of the manifest is not in this test: {all:?}");
}
