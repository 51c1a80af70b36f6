//! Commands that ask either API server: what an operator is told about permissions, and what uninstalling takes back.

use std::path::{Path, PathBuf};
use std::process::Command;

use nobypass::node::desired::{CONDITION, LABEL, TAINT};
use nobypass_testkit::servers::Server;
use serde_json::{Value, json};

use crate::wire::{Admin, allowed_only};

struct Said {
    code: Option<i32>,
    out: String,
    err: String,
}

async fn nobypass(args: &[&str], kubeconfig: &Path) -> Said {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nobypass"));
    command.env_clear().args(args).arg("--kubeconfig").arg(kubeconfig);
    let out = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let said = Said { code: out.status.code(), out: text(out.stdout), err: text(out.stderr) };
    assert!(!said.err.contains("panicked"), "{}", said.err);
    said
}

fn written(dir: &tempfile::TempDir, name: &str, kubeconfig: &str) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, kubeconfig).unwrap();
    path
}

#[tokio::test]
async fn preflight_shows_what_each_feature_may() {
    let (server, dir) = (crate::server(), tempfile::tempdir().unwrap());
    let admin = Admin::new(&server).await;
    let may: Vec<(&str, &str, &str)> = ["list", "watch"]
        .into_iter()
        .flat_map(|verb| ["pods", "namespaces", "nodes"].map(|of| (verb, "", of)))
        .chain([("patch", "", "nodes"), ("get", "", "pods")])
        .collect();
    let denied = [
        ("patch", "nodes/status"),
        ("create", "pods/eviction"),
        ("create", "events"),
        ("patch", "events"),
        ("patch", "pods/status"),
    ];
    let limited = written(&dir, "limited", &allowed_only(&server, &admin, &may, &denied).await);
    let policy = dir.path().join("policy.yaml");
    std::fs::write(&policy, "apiVersion: nobypass.dev/v1alpha1\nremedies: {evict: on, event: off}\n")
        .unwrap();
    let checks = async |more: &[&str]| {
        let mut args = vec!["preflight", "-o", "json", "--pods", "kube", "--node-name", "n1"];
        args.extend(more);
        let said = nobypass(&args, &limited).await;
        let all: Vec<Value> = serde_json::from_str(&said.out).unwrap_or_else(|_| panic!("{}", said.err));
        let ours = all.into_iter().filter(|check| check["name"].as_str().unwrap().starts_with("may-"));
        let shown = |check: &Value| {
            let text = |key: &str| check[key].as_str().unwrap().to_owned();
            (text("name"), text("level"), text("found"))
        };
        ours.map(|check| shown(&check)).collect::<Vec<_>>()
    };
    let row = |name: &str, level: &str, found: &str| (name.to_owned(), level.to_owned(), found.to_owned());
    let pods = row("may-pods", "pass", "list pods, watch pods, list namespaces, watch namespaces");
    let events = "may not create events.events.k8s.io, patch events.events.k8s.io";
    assert_eq!(checks(&[]).await, [pods.clone(), row("may-events", "warn", events)]);
    let gate = ["--gate-condition", "--gate-label", "--policy", policy.to_str().unwrap()];
    let expected = [
        pods,
        row("may-gate_condition", "warn", "may not patch nodes/status"),
        row("may-gate_label", "pass", "list nodes, watch nodes, patch nodes"),
        row("may-evict", "warn", "may not create pods/eviction"),
    ];
    assert_eq!(checks(&gate).await, expected, "what the policy file says goes before the flags");
    // For people, with what to do; and nobody is asked where there is no cluster.
    let said = nobypass(&["preflight", "--pods", "kube", "--node-name", "n1"], &limited).await;
    assert!(said.out.contains("warn may-events: grant it in the ClusterRole"), "{}", said.out);
    assert!(!nobypass(&["preflight", "--pods", "cri"], &limited).await.out.contains("may-"));
}

#[tokio::test]
async fn preflight_says_that_the_api_server_cannot_be_asked() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = json!({ "server": "http://127.0.0.1:1" });
    let nobody = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{ "name": "c", "cluster": cluster }], "users": [{ "name": "c", "user": {} }],
        "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "c" } }],
    });
    let nobody = written(&dir, "nobody", &nobody.to_string());
    let said = nobypass(&["preflight", "--pods", "kube", "--node-name", "n1"], &nobody).await;
    assert!(said.out.contains("the API server cannot be asked"), "{}", said.out);
    assert_eq!(said.out.matches("api-server").count(), 2, "one line and what to do: {}", said.out);
    let said = nobypass(&["preflight", "--pods", "kube"], &nobody).await;
    assert!(said.out.contains("--node-name"), "{}", said.out);
}

#[tokio::test]
async fn uninstalling_takes_back_what_was_said_of_a_node_and_nothing_else() {
    let (server, dir) = (crate::server(), tempfile::tempdir().unwrap());
    let admin = Admin::new(&server).await;
    let config = written(&dir, "admin", &server.kubeconfig().unwrap());
    let pins = dir.path().join("pins");
    let names = [Server::unique("said"), Server::unique("silent")];
    for name in &names {
        let metadata = json!({ "name": name, "labels": { "nobypass.dev/other": "1", "a": "b" } });
        admin.create(json!({ "apiVersion": "v1", "kind": "Node", "metadata": metadata })).await;
        let ready =
            json!({ "status": { "conditions": [{ "type": "Ready", "status": "True", "reason": "r" }] } });
        admin.merge_status("Node", "", name, ready).await;
        let taints =
            json!([{ "key": TAINT, "effect": "NoExecute" }, { "key": "other", "effect": "NoSchedule" }]);
        admin.merge("Node", "", name, json!({ "spec": { "taints": taints } })).await;
    }
    let untouched = admin.get("Node", "", &names[1]).await.unwrap();
    admin.merge("Node", "", &names[0], json!({ "metadata": { "labels": { LABEL: "ready" } } })).await;
    let ours = json!([
        { "type": "Ready", "status": "True", "reason": "r" },
        { "type": CONDITION, "status": "True", "reason": "Protected" },
    ]);
    admin.merge_status("Node", "", &names[0], json!({ "status": { "conditions": ours } })).await;

    let cleanup = async |node: &str, config: &Path| {
        nobypass(&["cleanup", "--bpf-dir", pins.to_str().unwrap(), "--node", node], config).await
    };
    let both = names.join(",");
    for (first, second) in
        [("removed label and condition", "nothing to do"), ("nothing to do", "nothing to do")]
    {
        let said = cleanup(&both, &config).await;
        assert_eq!(said.code, Some(0), "{}", said.err);
        for (name, done) in [(&names[0], first), (&names[1], second)] {
            assert!(said.out.contains(&format!("node {name}: {done}\n")), "{}", said.out);
            assert!(said.out.contains(&format!("kubectl taint node {name} {TAINT}-")), "{}", said.out);
        }
    }
    let node = admin.get("Node", "", &names[0]).await.unwrap();
    assert_eq!(node["metadata"]["labels"], json!({ "a": "b", "nobypass.dev/other": "1" }));
    let types: Vec<&Value> =
        node["status"]["conditions"].as_array().unwrap().iter().map(|condition| &condition["type"]).collect();
    assert_eq!(types, ["Ready"]);
    assert_eq!(node["spec"]["taints"].as_array().unwrap().len(), 2, "no taint is touched");
    let other = admin.get("Node", "", &names[1]).await.unwrap();
    assert_eq!(other["metadata"]["resourceVersion"], untouched["metadata"]["resourceVersion"], "not written");

    let said = cleanup("no-such-node", &config).await;
    assert!(said.code == Some(1) && said.err.contains("there is no node no-such-node"), "{}", said.err);
    admin.merge("Node", "", &names[0], json!({ "metadata": { "labels": { LABEL: "ready" } } })).await;
    let (may, denied) = ([("get", "", "nodes")], [("patch", "nodes")]);
    let reader = written(&dir, "reader", &allowed_only(&server, &admin, &may, &denied).await);
    let said = cleanup(&names[0], &reader).await;
    assert!(said.code == Some(1) && said.err.contains("not allowed to remove the label"), "{}", said.err);
}
