//! The gate's outputs, against either API server: what the Node object is in the end, whoever else writes to it, and how
//! many requests that took.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use nobypass::cluster::access::{Feature, missing};
use nobypass::node::apply::Applier;
use nobypass::node::desired::{CONDITION, Effect, LABEL, Outputs, TAINT};
use nobypass::node::gate::{Part, Reason, Verdict};
use nobypass::node::metrics::Metrics;
use nobypass::node::pods::{self, Selector};
use nobypass_testkit::servers::Server;
use nobypass_testkit::wait;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::wire::{Admin, Wire, allowed_only};

pub fn open() -> Verdict {
    Verdict { open: true, reason: Reason::Protected, message: "well".into() }
}

pub fn closed() -> Verdict {
    Verdict { open: false, reason: Reason::CniUnprotected, message: "no entry".into() }
}

fn foreign() -> Value {
    json!({ "key": "node.kubernetes.io/unreachable", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z" })
}

fn ours(effect: &str) -> Value {
    json!({ "key": TAINT, "effect": effect })
}

pub fn all() -> Outputs {
    Outputs { condition: true, label: true, taints: vec![TAINT.into()], retaint: None }
}

fn taints_of(node: &Value) -> Value {
    // A list without any is left out by the server.
    let taints = node["spec"]["taints"].clone();
    if taints.is_null() { json!([]) } else { taints }
}

fn condition_of(node: &Value) -> Value {
    let all = node["status"]["conditions"].as_array().into_iter().flatten();
    all.clone().find(|condition| condition["type"] == CONDITION).cloned().unwrap_or_default()
}

/// A node of this test alone, as a kubelet registers it.
async fn node(admin: &Admin, taints: Value) -> String {
    let name = Server::unique("gate");
    admin
        .create(json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name, "labels": { "a": "b" } } }))
        .await;
    let ready = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True", "reason": "KubeletReady" }] } });
    admin.merge_status("Node", "", &name, ready).await;
    // The server itself taints new nodes; its controllers would remove that.
    admin.merge("Node", "", &name, json!({ "spec": { "taints": taints } })).await;
    name
}

/// A running applier.
pub struct Running {
    /// Lives as long as this, unless the test has it.
    server: Option<Server>,
    name: String,
    admin: Admin,
    wire: Wire,
    pub verdict: watch::Sender<Verdict>,
    outputs: watch::Sender<Outputs>,
    metrics: Metrics,
    task: tokio::task::JoinHandle<()>,
}

impl Running {
    async fn start(taints: Value, outputs: Outputs, verdict: Verdict) -> Self {
        let server = crate::server();
        let mut running = Self::on(&server, taints, outputs, verdict).await;
        running.server = Some(server);
        running
    }

    pub async fn on(server: &Server, taints: Value, outputs: Outputs, verdict: Verdict) -> Self {
        let admin = Admin::new(server).await;
        let name = node(&admin, taints).await;
        Self::with(Wire::new(server).await, admin, name, outputs, verdict)
    }

    fn with(wire: Wire, admin: Admin, name: String, outputs: Outputs, verdict: Verdict) -> Self {
        let (verdict, verdicts) = watch::channel(verdict);
        let (outputs, wanted) = watch::channel(outputs);
        let metrics = Metrics::default();
        let applier = Applier::new(wire.client(), &name, verdicts, wanted, metrics.clone());
        Self { server: None, name, admin, wire, verdict, outputs, metrics, task: tokio::spawn(applier.run()) }
    }

    async fn node(&self) -> Value {
        self.admin.get("Node", "", &self.name).await.unwrap()
    }

    pub async fn until(&self, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let end = tokio::time::Instant::now() + wait::HANG;
        loop {
            let node = self.node().await;
            if is(&node) {
                return node;
            }
            assert!(tokio::time::Instant::now() < end, "{what}: {node}\n{:#?}", self.wire.requests());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn edit(&self, change: impl Fn(&mut Value)) {
        self.admin.edit("Node", "", &self.name, change).await;
    }

    async fn set_taints(&self, taints: Value) {
        self.edit(|node| node["spec"]["taints"] = taints.clone()).await;
    }

    fn written(&self) -> Vec<String> {
        self.wire.writes().into_iter().map(|sent| sent.target).collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub fn says(node: &Value, open: bool) -> bool {
    let wanted = if open { (json!("True"), json!("ready")) } else { (json!("False"), Value::Null) };
    (condition_of(node)["status"].clone(), node["metadata"]["labels"][LABEL].clone()) == wanted
}

#[tokio::test]
async fn the_node_is_told_once_and_then_nothing_is_asked_any_more() {
    let running =
        Running::start(json!([foreign(), ours("NoSchedule"), ours("NoExecute")]), all(), open()).await;
    let node = running.until("told", |node| says(node, true) && taints_of(node) == json!([foreign()])).await;
    running.wire.calm().await;
    assert_eq!(running.written(), ["nodes/status", "nodes", "nodes"], "what lets pods in comes last");
    assert_eq!((running.wire.count("list", "nodes"), running.wire.count("watch", "nodes")), (1, 1));
    let condition = condition_of(&node);
    assert_eq!((&condition["reason"], &condition["message"]), (&json!("Protected"), &json!("well")));
    assert!(condition["lastTransitionTime"].is_string() && condition["lastHeartbeatTime"].is_string());
    let conditions = node["status"]["conditions"].as_array().unwrap();
    assert!(
        conditions.iter().any(|condition| condition["type"] == "Ready"),
        "the kubelet's own stay: {node}"
    );
    assert_eq!(node["metadata"]["labels"]["a"], "b");

    // What others do to the object is none of our business.
    running.wire.clear();
    for n in 0..20 {
        let value = json!({ "metadata": { "annotations": { "volumes": n.to_string() } } });
        running.admin.merge("Node", "", &running.name, value).await;
    }
    running.wire.calm().await;
    assert_eq!(running.wire.requests().len(), 0, "{:?}", running.wire.requests());
}

/// What is due is five minutes after the last one: here somebody turned the clock of that on.
#[tokio::test]
async fn the_condition_is_said_again_before_it_is_old_and_that_is_no_transition() {
    let outputs = Outputs { condition: true, ..Outputs::default() };
    let running = Running::start(json!([]), outputs, open()).await;
    let told = running.until("told", |node| condition_of(node)["status"] == "True").await;
    running.wire.calm().await;
    running.wire.clear();
    let (since, beat) =
        (condition_of(&told)["lastTransitionTime"].clone(), condition_of(&told)["lastHeartbeatTime"].clone());
    let old = Timestamp::now() - SignedDuration::from_secs(298);
    let old = json!(old.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    let api = running.admin.api("Node", "");
    let patch = json!({ "status": { "conditions": [{ "type": CONDITION, "lastHeartbeatTime": old }] } });
    api.patch_status(&running.name, &Default::default(), &kube::api::Patch::Strategic(patch)).await.unwrap();
    let node = running.until("the next one", |node| condition_of(node)["lastHeartbeatTime"] != old).await;
    assert!(condition_of(&node)["lastHeartbeatTime"].as_str() >= beat.as_str());
    assert_eq!(condition_of(&node)["lastTransitionTime"], since);
    running.wire.calm().await;
    assert_eq!(running.written(), ["nodes/status"]);
}

#[tokio::test]
async fn a_lost_protection_is_told_and_taken_back() {
    let outputs = Outputs { retaint: Some(Effect::NoSchedule), ..all() };
    let running = Running::start(json!([foreign()]), outputs, open()).await;
    let node = running.until("open", |node| says(node, true)).await;
    let since = condition_of(&node)["lastTransitionTime"].clone();
    running.verdict.send_replace(closed());
    let tainted = json!([foreign(), ours("NoSchedule")]);
    let node = running
        .until("closed", |node| {
            let shown: Vec<Value> = taints_of(node).as_array().unwrap().iter().map(untimed).collect();
            says(node, false) && json!(shown) == json!([untimed(&foreign()), ours("NoSchedule")])
        })
        .await;
    assert_eq!(tainted.as_array().unwrap().len(), taints_of(&node).as_array().unwrap().len());
    assert_eq!(condition_of(&node)["reason"], "CNIUnprotected");
    assert!(condition_of(&node)["lastTransitionTime"].as_str() >= since.as_str());
    running.verdict.send_replace(open());
    running.until("open again", |node| says(node, true) && taints_of(node) == json!([foreign()])).await;
    running.wire.calm().await;
    assert_eq!(running.written().len(), 8, "{:?}", running.wire.writes());
}

/// A taint without the time, which a server may set.
fn untimed(taint: &Value) -> Value {
    let mut taint = taint.clone();
    taint.as_object_mut().unwrap().shift_remove("timeAdded");
    taint
}

#[tokio::test]
async fn what_another_boot_left_open_is_closed_first() {
    let server = crate::server();
    let admin = Admin::new(&server).await;
    let name = node(&admin, json!([])).await;
    admin.merge("Node", "", &name, json!({ "metadata": { "labels": { LABEL: "ready" } } })).await;
    let condition = json!({
        "type": CONDITION, "status": "True", "reason": "Protected", "message": "well",
        "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    admin.merge_status("Node", "", &name, json!({ "status": { "conditions": [condition] } })).await;
    let rebooted =
        Verdict { open: false, reason: Reason::Rebooted, message: "the machine was started anew".into() };
    let running = Running::with(Wire::new(&server).await, admin, name, all(), rebooted);
    let node = running.until("closed", |node| says(node, false)).await;
    assert_eq!(condition_of(&node)["reason"], "Rebooted");
    assert_eq!(
        running.written(),
        ["nodes", "nodes/status"],
        "the label, by which pods are let in, goes first"
    );
}

#[tokio::test]
async fn a_taint_that_comes_back_goes_again_and_others_are_left_alone() {
    let running = Running::start(json!([ours("NoSchedule")]), all(), open()).await;
    running.until("removed", |node| taints_of(node) == json!([])).await;
    // Whoever restores it until the node is registered, and whoever adds it an hour later.
    for effect in ["NoSchedule", "NoExecute", "PreferNoSchedule"] {
        running.set_taints(json!([ours(effect), foreign()])).await;
        running.until("removed again", |node| taints_of(node) == json!([foreign()])).await;
    }
    running.wire.calm().await;
    assert_eq!(running.metrics.tainted.get(), 0);
}

/// An autoscaler that puts its startup taint back whenever it is missing, until it takes the node for registered.
#[tokio::test]
async fn whoever_restores_the_taint_before_registration_has_it_removed_in_the_end() {
    let running = Running::start(json!([foreign(), ours("NoExecute")]), all(), open()).await;
    let mut restored = 0;
    while restored < 6 {
        let node = running.node().await;
        if !taints_of(&node).as_array().unwrap().iter().any(|taint| taint["key"] == TAINT) {
            running.edit(|node| node["spec"]["taints"].as_array_mut().unwrap().push(ours("NoExecute"))).await;
            restored += 1;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    running.until("removed for good", |node| taints_of(node) == json!([foreign()])).await;
    running.wire.calm().await;
    assert_eq!(taints_of(&running.node().await), json!([foreign()]));
    let patches = running.wire.count("patch", "nodes");
    assert!((7..=14).contains(&patches), "{patches} for six restorations, the first removal and the label");
}

#[tokio::test]
async fn a_taint_that_is_added_or_removed_while_we_patch_is_neither_lost_nor_brought_back() {
    let outputs = Outputs { condition: false, label: false, ..all() };
    for (name, before, meanwhile, after) in [
        ("added", json!([ours("NoSchedule")]), json!([ours("NoSchedule"), foreign()]), json!([foreign()])),
        ("removed", json!([foreign(), ours("NoSchedule")]), json!([ours("NoSchedule")]), json!([])),
        ("ours removed too", json!([foreign(), ours("NoSchedule")]), json!([foreign()]), json!([foreign()])),
    ] {
        // As who may do what the chart grants, and no more.
        let server = crate::server();
        let admin = Admin::new(&server).await;
        let wire = Wire::granted(&server, &admin, &[Feature::GateTaint]).await;
        let name_of_node = node(&admin, before).await;
        let running = Running::with(wire, admin, name_of_node, outputs.clone(), closed());
        let held = running.wire.hold("patch", "nodes");
        running.verdict.send_replace(open());
        let go = held.arrived().await;
        running.set_taints(meanwhile).await;
        drop(go);
        let first = || running.wire.matching("patch", "nodes").first().and_then(|patch| patch.status);
        wait::until_async("the answer", wait::HANG, first).await.unwrap();
        assert_eq!(first(), Some(422), "{name}: the test of the patch failed");
        running.until(name, |node| taints_of(node) == after).await;
        running.wire.calm().await;
        assert_eq!(taints_of(&running.node().await), after, "{name}");
        running.wire.was_never_refused();
    }
}

/// Another editor adds taints of its own, somebody restores ours, and another remover removes ours, all at once.
#[tokio::test]
async fn editors_that_write_at_the_same_time_lose_nothing() {
    const EDITS: usize = 40;
    let running = Running::start(json!([foreign(), ours("NoSchedule")]), all(), open()).await;
    let mut editors = tokio::task::JoinSet::new();
    for editor in ["add", "remove", "restore"] {
        let (admin, name) = (running.admin.clone(), running.name.clone());
        editors.spawn(async move {
            for n in 0..EDITS {
                let mine = json!({ "key": format!("editor/{n}"), "effect": "NoSchedule" });
                let change = |node: &mut Value| {
                    let taints = &mut node["spec"]["taints"];
                    if taints.is_null() {
                        *taints = json!([]);
                    }
                    let taints = taints.as_array_mut().unwrap();
                    match editor {
                        "add" => taints.push(mine.clone()),
                        "remove" => taints.retain(|taint| taint["key"] != TAINT),
                        _ if n % 5 != 0 || taints.iter().any(|taint| taint["key"] == TAINT) => {}
                        _ => taints.push(ours("NoExecute")),
                    }
                };
                admin.edit("Node", "", &name, change).await;
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
        });
    }
    while let Some(ended) = editors.join_next().await {
        ended.unwrap();
    }
    let mut expected = BTreeSet::from([foreign().to_string()]);
    expected.extend(
        (0..EDITS).map(|n| json!({ "key": format!("editor/{n}"), "effect": "NoSchedule" }).to_string()),
    );
    let have = |node: &Value| {
        let list: Vec<String> = taints_of(node).as_array().unwrap().iter().map(ToString::to_string).collect();
        (list.len(), list.into_iter().collect::<BTreeSet<_>>())
    };
    running
        .until("all of theirs and none of ours", |node| have(node) == (expected.len(), expected.clone()))
        .await;
}

#[tokio::test]
async fn without_a_permission_the_other_outputs_go_on() {
    let server = crate::server();
    let admin = Admin::new(&server).await;
    let name = node(&admin, json!([])).await;
    let may = [("list", "", "nodes"), ("watch", "", "nodes"), ("get", "", "nodes"), ("patch", "", "nodes")];
    let wire = Wire::with(&allowed_only(&server, &admin, &may, &[("patch", "nodes/status")]).await).await;
    let outputs = Outputs { taints: Vec::new(), ..all() };
    let running = Running::with(wire, admin, name, outputs, open());
    running.until("the label", |node| node["metadata"]["labels"][LABEL] == "ready").await;
    running.wire.calm().await;
    assert_eq!(running.wire.count("patch", "nodes/status"), 1, "not asked again and again");
    assert_eq!(running.wire.matching("patch", "nodes/status")[0].status, Some(403));
    let client = running.wire.client();
    assert!(missing(&client, Feature::GateLabel).await.unwrap().is_empty());
    let lacks = missing(&client, Feature::GateCondition).await.unwrap();
    assert_eq!(lacks.iter().map(ToString::to_string).collect::<Vec<_>>(), ["patch nodes/status"]);
    // What the check finds is switched off.
    running.outputs.send_replace(Outputs { label: true, ..Outputs::default() });
    running.wire.calm().await;
    assert_eq!(running.wire.writes().len(), 2);
}

#[tokio::test]
async fn a_node_that_is_made_anew_is_told_anew() {
    let server = crate::server();
    let running = Running::on(&server, json!([ours("NoSchedule")]), all(), open()).await;
    running.until("open", |node| says(node, true) && taints_of(node) == json!([])).await;
    running.admin.delete("Node", "", &running.name).await;
    let taints = [ours("NoSchedule")];
    let node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": running.name }, "spec": { "taints": taints },
    });
    running.admin.create(node).await;
    let servers_own = |taint: &Value| taint["key"] == "node.kubernetes.io/not-ready";
    running
        .until("open again", |node| {
            says(node, true) && taints_of(node).as_array().unwrap().iter().all(servers_own)
        })
        .await;
}

#[tokio::test]
async fn other_pods_that_have_to_be_ready() {
    let server = crate::server();
    let admin = Admin::new(&server).await;
    let namespace = server.namespace("mesh").unwrap();
    let selector = Selector::parse(&format!("{namespace}/app=ztunnel")).unwrap();
    let (sender, mut seen) = watch::channel(None);
    let client = Wire::new(&server).await.client();
    let (here, there) = (Server::unique("here"), Server::unique("there"));
    let task = tokio::spawn(pods::follow(client, here.clone(), selector.clone(), sender));
    let mut expect = async |expected: &str| {
        let part = |seen: &pods::Seen| match pods::part(&[(selector.clone(), seen.clone())]) {
            Part::Good => "good".to_owned(),
            Part::Bad(_, text) => text,
            other => format!("{other:?}"),
        };
        let found = seen.wait_for(|seen| part(seen).contains(expected));
        let found = tokio::time::timeout(wait::HANG, found).await;
        assert!(found.is_ok_and(|found| found.is_ok()), "never {expected}");
    };
    expect("no pod of").await;
    let set = async |name: &str, status: &str| {
        let conditions = json!([{ "type": "Ready", "status": status }]);
        admin.merge_status("Pod", &namespace, name, json!({ "status": { "conditions": conditions } })).await;
    };
    for (name, node) in [("here", &here), ("there", &there)] {
        let metadata = json!({ "name": name, "namespace": namespace, "labels": { "app": "ztunnel" } });
        let spec = json!({ "nodeName": node, "containers": [{ "name": "app", "image": "app:1" }] });
        admin.create(json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec })).await;
        set(name, "False").await;
    }
    expect("/here is not ready").await;
    set("here", "True").await;
    expect("good").await;
    set("here", "False").await;
    expect("not ready").await;
    admin.delete("Pod", &namespace, "here").await;
    expect("no pod of").await;
    task.abort();
    if let Err(error) = task.await {
        assert!(error.is_cancelled(), "{error}");
    }
}
