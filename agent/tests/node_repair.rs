//! Repair in place against a real container runtime: a pod that started before the mesh's plugin gets its rules by that
//! plugin, called as the runtime would have called it.
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use nobypass::cni::entry::{Place, WantedEntry};
use nobypass::cni::guard::{Summary, Watching};
use nobypass::cni::window::Protection;
use nobypass::remedy::repair::{Patient, RepairError, Repairer};
use nobypass_testkit::node::{EXT_PORT, EXT4, Node, Pod, PodSpec};
use nobypass_testkit::wait;
use serde_json::{Value, json};
use tokio::sync::watch;

const LIMIT: Duration = Duration::from_secs(30);

/// A node without the mesh's plugin in its config.
fn node() -> Node {
    let node = Node::new().unwrap();
    node.write_conflist(false).unwrap();
    node
}

/// Puts `entry` into the config, and gives who repairs by it.
fn repairer(node: &Node, entry: &Value) -> Repairer {
    let text = node.conflist(std::slice::from_ref(entry));
    node.install_conflist(&text).unwrap();
    let (_, config) = watch::channel(Summary {
        files: Protection::Protected,
        protection: Protection::Protected,
        watching: Watching::Watched,
        active: Some("10-node.conflist".into()),
        content: Some(text.into()),
        version: 1,
        wanted: Some(WantedEntry::from_text(&entry.to_string(), Place::Last).unwrap()),
    });
    Repairer { endpoint: Some(node.cri_socket()), config }
}

fn patient(pod: &Pod) -> Patient {
    Patient {
        sandbox: pod.sandbox.parse().unwrap(),
        namespace: pod.spec.namespace.clone(),
        name: pod.spec.name.clone(),
        uid: pod.spec.uid.clone(),
    }
}

fn saw(node: &Node, pod: &Pod) -> String {
    node.traffic(pod, "app", &["tcp4", EXT4, EXT_PORT, "--timeout-ms", "300"]).unwrap().saw().to_owned()
}

fn proxy_is_up(node: &Node, pod: &Pod) {
    node.wait_for_log(pod, "linkerd-proxy", |line| line.contains("\"ready\":true")).unwrap();
}

fn rules(pod: &Pod) -> String {
    pod.enter().unwrap().check("nft", &["list", "ruleset"], "").unwrap()
}

/// Lines that the plugin wrote about calls with this command.
fn calls(node: &Node, command: &str) -> Vec<Value> {
    let text = fs::read_to_string(node.mesh_log()).unwrap_or_default();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|call| call["command"] == command).collect()
}

#[tokio::test]
async fn a_pod_that_started_before_the_plugin_is_repaired_by_it() {
    let node = node();
    let pod = node.run_pod(PodSpec::meshed("early").unwrap()).unwrap();
    proxy_is_up(&node, &pod);
    assert_eq!(saw(&node, &pod), "plain");
    let processes = || fs::read_to_string(pod.container_cgroup("app").unwrap().join("cgroup.procs")).unwrap();
    let addresses = || pod.enter().unwrap().check("ip", &["-j", "addr"], "").unwrap();
    let (before, had) = (processes(), addresses());

    let repairer = repairer(&node, &node.mesh_entry());
    repairer.repair(&patient(&pod), LIMIT).await.unwrap();
    assert_eq!(saw(&node, &pod), "mesh", "the next connection");
    let after: Value = serde_json::from_str(&addresses()).unwrap();
    let had: Value = serde_json::from_str(&had).unwrap();
    assert_eq!(after[1]["addr_info"], had[1]["addr_info"], "its addresses are the same");
    assert_eq!(processes(), before, "nobody was restarted");

    // As the runtime calls it for a pod that comes later.
    let later = node.run_pod(PodSpec::meshed("later").unwrap()).unwrap();
    let calls = calls(&node, "ADD");
    let [repaired, started] = &calls[..] else { panic!("{calls:?}") };
    assert_eq!(repaired["prevResult"]["ips"][0]["address"], json!(format!("{}/24", pod.ip)));
    for (call, pod) in [(repaired, &pod), (started, &later)] {
        assert_eq!(
            (&call["pod"], &call["uid"], &call["container"], &call["netns"]),
            (&json!(pod.spec.name), &json!(pod.spec.uid), &json!(pod.sandbox), &json!(pod.netns)),
        );
    }
    let keys =
        |call: &Value| call["prevResult"].as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(keys(repaired), keys(started));
    node.stop().unwrap();
}

#[tokio::test]
async fn a_plugin_that_fails_or_hangs_is_told_to_undo_and_leaves_nothing() {
    let node = node();
    let pod = node.run_pod(PodSpec::meshed("unlucky").unwrap()).unwrap();
    let before = rules(&pod);

    let mut entry = node.mesh_entry();
    entry["testkit"]["fail"] = json!("iptables: no such chain");
    let error = repairer(&node, &entry).repair(&patient(&pod), LIMIT).await.unwrap_err();
    let RepairError::Failed { complaint, .. } = &error else { panic!("{error}") };
    assert_eq!(complaint, "iptables: no such chain");
    assert_eq!((calls(&node, "ADD").len(), calls(&node, "DEL").len()), (1, 1));

    let mut entry = node.mesh_entry();
    entry["testkit"]["delay-ms"] = json!(600_000);
    let limit = Duration::from_millis(500);
    let error = repairer(&node, &entry).repair(&patient(&pod), limit).await.unwrap_err();
    assert!(matches!(&error, RepairError::TimedOut { after, .. } if *after == limit), "{error}");
    assert_eq!((calls(&node, "ADD").len(), calls(&node, "DEL").len()), (2, 2));
    let running = || {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let of_pod = processes.filter(|process| {
            let environment = fs::read(process.path().join("environ")).unwrap_or_default();
            let text = String::from_utf8_lossy(&environment).into_owned();
            text.contains(&format!("CNI_CONTAINERID={}", pod.sandbox))
        });
        of_pod.count()
    };
    wait::until("the end of the plugin", wait::HANG, || (running() == 0).then_some(())).unwrap();
    assert_eq!(rules(&pod), before, "nothing half done");

    // And with a plugin that works, all is well.
    proxy_is_up(&node, &pod);
    repairer(&node, &node.mesh_entry()).repair(&patient(&pod), LIMIT).await.unwrap();
    assert_eq!(saw(&node, &pod), "mesh");
    node.stop().unwrap();
}

#[tokio::test]
async fn what_cannot_be_repaired_is_refused_with_the_reason() {
    let node = node();
    let host = PodSpec { host_network: true, ..PodSpec::meshed("host").unwrap() };
    let host = node.run_sandbox(host).unwrap();
    let pod = node.run_pod(PodSpec::meshed("pod").unwrap()).unwrap();
    let repairer = repairer(&node, &node.mesh_entry());

    let error = repairer.repair(&patient(&host), LIMIT).await.unwrap_err();
    assert!(error.to_string().contains("no result of this pod's sandbox"), "{error}");

    // A cache that somebody emptied.
    let cached = node.cni_cache_dir().join(format!("results/node-net-{}-eth0", pod.sandbox));
    let text = fs::read_to_string(&cached).unwrap();
    fs::write(&cached, text.replace("\"node-net\"", "\"other-net\"")).unwrap();
    let error = repairer.repair(&patient(&pod), LIMIT).await.unwrap_err();
    assert!(error.to_string().contains("attached to other-net and not to node-net"), "{error}");
    fs::write(&cached, "{").unwrap();
    let error = repairer.repair(&patient(&pod), LIMIT).await.unwrap_err();
    assert!(matches!(&error, RepairError::Impossible(why) if why.contains("EOF")), "{error}");
    fs::write(&cached, &text).unwrap();

    let (plugin, aside) = (node.cni_bin_dir().join("linkerd-cni"), node.cni_bin_dir().join("aside"));
    fs::rename(&plugin, &aside).unwrap();
    let error = repairer.repair(&patient(&pod), LIMIT).await.unwrap_err();
    assert!(error.to_string().contains("linkerd-cni is not in"), "{error}");
    assert!(calls(&node, "ADD").is_empty(), "the plugin was never called");

    fs::rename(&aside, &plugin).unwrap();
    node.remove_pod(&pod).unwrap();
    let error = repairer.repair(&patient(&pod), LIMIT).await.unwrap_err();
    assert!(matches!(error, RepairError::Gone), "{error}");
    node.stop().unwrap();
}
