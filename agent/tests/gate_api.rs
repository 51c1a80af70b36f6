//! The gate's outputs against an API server: what the Node object is in the end, whoever else writes to it, and how many
//! requests that took.
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nobypass::cluster::access::{Feature, missing};
use nobypass::node::apply::Applier;
use nobypass::node::desired::{CONDITION, Effect, LABEL, Outputs, TAINT};
use nobypass::node::gate::{Part, Reason, Verdict};
use nobypass::node::metrics::Metrics;
use nobypass::node::pods::{self, Selector};
use nobypass_testkit::apiserver::{ApiServer, Fault, Pod, node};
use nobypass_testkit::wait;
use serde_json::{Value, json};
use tokio::sync::watch;

fn client(server: &ApiServer) -> kube::Client {
    let mut config = kube::Config::new(server.url().parse().unwrap());
    config.default_retry = false;
    kube::Client::try_from(config).unwrap()
}

fn open() -> Verdict {
    Verdict { open: true, reason: Reason::Protected, message: "well".into() }
}

fn closed() -> Verdict {
    Verdict { open: false, reason: Reason::CniUnprotected, message: "no entry".into() }
}

fn foreign() -> Value {
    json!({ "key": "node.kubernetes.io/unreachable", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z" })
}

fn ours(effect: &str) -> Value {
    json!({ "key": TAINT, "effect": effect })
}

/// A running applier for the node `n1`.
struct Running {
    server: ApiServer,
    verdict: watch::Sender<Verdict>,
    outputs: watch::Sender<Outputs>,
    metrics: Metrics,
    task: tokio::task::JoinHandle<()>,
}

impl Running {
    fn start(taints: Value, outputs: Outputs, verdict: Verdict) -> Self {
        let server = ApiServer::start().unwrap();
        let mut object = node("n1");
        object["spec"]["taints"] = taints;
        server.create(object).unwrap();
        Self::with(server, outputs, verdict)
    }

    fn with(server: ApiServer, outputs: Outputs, verdict: Verdict) -> Self {
        let (verdict, verdicts) = watch::channel(verdict);
        let (outputs, wanted) = watch::channel(outputs);
        let metrics = Metrics::default();
        let applier = Applier::new(client(&server), "n1", verdicts, wanted, metrics.clone());
        Self { server, verdict, outputs, metrics, task: tokio::spawn(applier.run()) }
    }

    fn node(&self) -> Value {
        self.server.get("nodes", "", "n1").unwrap()
    }

    /// A list without any is left out by the server.
    fn taints(&self) -> Value {
        let taints = self.node()["spec"]["taints"].clone();
        if taints.is_null() { json!([]) } else { taints }
    }

    fn condition(&self) -> Value {
        let node = self.node();
        let all = node["status"]["conditions"].as_array().unwrap();
        all.iter().find(|condition| condition["type"] == CONDITION).cloned().unwrap_or_default()
    }

    fn says(&self, open: bool) -> bool {
        let label = self.node()["metadata"]["labels"][LABEL].clone();
        let wanted = if open { (json!("True"), json!("ready")) } else { (json!("False"), Value::Null) };
        (self.condition()["status"].clone(), label) == wanted
    }

    async fn until(&self, what: &str, poll: impl Fn(&Self) -> bool) {
        let end = tokio::time::Instant::now() + wait::HANG;
        while !poll(self) {
            let requests: Vec<String> = self
                .server
                .requests()
                .iter()
                .map(|r| format!("{} {} {:?}", r.verb, r.target, r.status))
                .collect();
            assert!(tokio::time::Instant::now() < end, "{what}: {}\n{requests:#?}", self.node());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn edit(&self, change: impl FnOnce(&mut Value)) {
        self.server.edit("nodes", "", "n1", change).unwrap();
    }

    /// Lets everything that is under way come to its end: a change that the watch brings in order.
    async fn calm(&self) {
        let watched = self.server.requests().len();
        tokio::time::sleep(Duration::from_millis(300)).await;
        if self.server.requests().len() != watched {
            Box::pin(self.calm()).await;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn all() -> Outputs {
    Outputs { condition: true, label: true, taints: vec![TAINT.into()], retaint: None }
}

#[tokio::test]
async fn the_node_is_told_once_and_then_nothing_is_asked_any_more() {
    let running = Running::start(json!([foreign(), ours("NoSchedule"), ours("NoExecute")]), all(), open());
    running.until("told", |r| r.says(true) && r.taints() == json!([foreign()])).await;
    running.calm().await;
    assert_eq!(running.server.writes().len(), 3, "{:?}", running.server.writes());
    assert_eq!((running.server.count("list", "nodes"), running.server.count("watch", "nodes")), (1, 1));
    let condition = running.condition();
    assert_eq!((&condition["reason"], &condition["message"]), (&json!("Protected"), &json!("well")));
    assert!(condition["lastTransitionTime"].is_string() && condition["lastHeartbeatTime"].is_string());
    let node = running.node();
    let conditions = node["status"]["conditions"].as_array().unwrap();
    assert!(
        conditions.iter().any(|condition| condition["type"] == "Ready"),
        "the kubelet's own stay: {node}"
    );

    // What others do to the object is none of our business.
    running.server.clear_requests();
    for n in 0..20 {
        running.edit(|node| node["metadata"]["annotations"]["volumes"] = json!(n.to_string()));
    }
    running.calm().await;
    assert_eq!(running.server.requests().len(), 0, "{:?}", running.server.requests());
}

#[tokio::test]
async fn a_lost_protection_is_told_and_taken_back() {
    let outputs = Outputs { retaint: Some(Effect::NoSchedule), ..all() };
    let running = Running::start(json!([foreign()]), outputs, open());
    running.until("open", |r| r.says(true)).await;
    let since = running.condition()["lastTransitionTime"].clone();
    running.verdict.send_replace(closed());
    running.until("closed", |r| r.says(false)).await;
    running.until("tainted", |r| r.taints() == json!([foreign(), ours("NoSchedule")])).await;
    assert_eq!(running.condition()["reason"], "CNIUnprotected");
    assert!(running.condition()["lastTransitionTime"].as_str() >= since.as_str());
    running.verdict.send_replace(open());
    running.until("open again", |r| r.says(true) && r.taints() == json!([foreign()])).await;
    assert_eq!(running.server.writes().len(), 8, "{:?}", running.server.writes());
}

#[tokio::test]
async fn what_another_boot_left_open_is_closed_first() {
    let server = ApiServer::start().unwrap();
    let mut object = node("n1");
    object["metadata"]["labels"][LABEL] = json!("ready");
    object["status"]["conditions"].as_array_mut().unwrap().push(json!({
        "type": CONDITION, "status": "True", "reason": "Protected", "message": "well",
        "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z",
    }));
    server.create(object).unwrap();
    let rebooted =
        Verdict { open: false, reason: Reason::Rebooted, message: "the machine was started anew".into() };
    let running = Running::with(server, all(), rebooted);
    running.until("closed", |r| r.says(false)).await;
    assert_eq!(running.condition()["reason"], "Rebooted");
    let writes: Vec<String> = running.server.writes().iter().map(|write| write.target.clone()).collect();
    assert_eq!(writes, ["nodes", "nodes/status"], "the label, by which pods are let in, goes first");
}

#[tokio::test]
async fn a_taint_that_comes_back_goes_again_and_others_are_left_alone() {
    let running = Running::start(json!([ours("NoSchedule")]), all(), open());
    running.until("removed", |r| r.taints() == json!([])).await;
    // Whoever restores it until the node is registered, and whoever adds it an hour later.
    for effect in ["NoSchedule", "NoExecute", "PreferNoSchedule"] {
        running.edit(|node| node["spec"]["taints"] = json!([ours(effect), foreign()]));
        running.until("removed again", |r| r.taints() == json!([foreign()])).await;
    }
    assert_eq!(running.metrics.tainted.get(), 0);
}

#[tokio::test]
async fn a_taint_that_is_added_while_we_patch_is_not_lost() {
    let server = ApiServer::start().unwrap();
    let mut object = node("n1");
    object["spec"]["taints"] = json!([ours("NoSchedule")]);
    server.create(object).unwrap();
    server.inject(Fault::delay(Duration::from_millis(300)).on("patch", "nodes"));
    let running = Running::with(server, Outputs { condition: false, label: false, ..all() }, open());
    running.until("the patch", |r| r.server.count("patch", "nodes") == 1).await;
    running.edit(|node| node["spec"]["taints"] = json!([ours("NoSchedule"), foreign()]));
    running.until("exactly the other one", |r| r.taints() == json!([foreign()])).await;
    let statuses: Vec<_> =
        running.server.matching("patch", "nodes").iter().map(|patch| patch.status).collect();
    assert_eq!(statuses.len(), 2, "{statuses:?}");
    assert_ne!(statuses[0], Some(200), "the first one was refused");
}

/// Another editor adds and removes taints of its own, and another remover removes ours, all the time.
#[tokio::test]
async fn editors_that_write_at_the_same_time_lose_nothing() {
    let running = Running::start(json!([foreign(), ours("NoSchedule")]), all(), open());
    let running = Arc::new(running);
    let stop = Arc::new(AtomicBool::new(false));
    let editor = {
        let (running, stop) = (Arc::clone(&running), Arc::clone(&stop));
        tokio::spawn(async move {
            for n in 0..60 {
                let mine = json!({ "key": format!("editor/{n}"), "effect": "NoSchedule" });
                running.edit(|node| node["spec"]["taints"].as_array_mut().unwrap().push(mine));
                if n % 3 == 0 {
                    running
                        .edit(|node| node["spec"]["taints"].as_array_mut().unwrap().push(ours("NoExecute")));
                }
                if n % 5 == 0 {
                    running.edit(|node| {
                        node["spec"]["taints"].as_array_mut().unwrap().retain(|taint| taint["key"] != TAINT);
                    });
                }
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
            stop.store(true, Ordering::Relaxed);
        })
    };
    editor.await.unwrap();
    assert!(stop.load(Ordering::Relaxed));
    let mut expected = vec![foreign()];
    expected.extend((0..60).map(|n| json!({ "key": format!("editor/{n}"), "effect": "NoSchedule" })));
    running.until("all of theirs and none of ours", |r| r.taints() == json!(expected)).await;
}

#[tokio::test]
async fn without_a_permission_the_other_outputs_go_on() {
    let server = ApiServer::start().unwrap();
    server.create(node("n1")).unwrap();
    server.deny("patch", "nodes/status");
    let running = Running::with(server, Outputs { taints: Vec::new(), ..all() }, open());
    running.until("the label", |r| r.node()["metadata"]["labels"][LABEL] == "ready").await;
    running.calm().await;
    assert_eq!(running.server.count("patch", "nodes/status"), 1, "not asked again and again");
    let client = client(&running.server);
    assert!(missing(&client, Feature::GateLabel).await.unwrap().is_empty());
    let lacks = missing(&client, Feature::GateCondition).await.unwrap();
    assert_eq!(lacks.iter().map(ToString::to_string).collect::<Vec<_>>(), ["patch nodes/status"]);
    // What the check finds is switched off.
    running.outputs.send_replace(Outputs { label: true, ..Outputs::default() });
    running.calm().await;
    assert_eq!(running.server.writes().len(), 2);
}

#[tokio::test]
async fn a_server_that_was_away_is_told_when_it_is_back() {
    let running = Running::start(json!([]), all(), open());
    running.until("open", |r| r.says(true)).await;
    running.server.stop();
    running.verdict.send_replace(closed());
    tokio::time::sleep(Duration::from_millis(200)).await;
    running.server.restart().unwrap();
    running.until("closed", |r| r.says(false)).await;
}

#[tokio::test]
async fn a_node_that_is_made_anew_is_told_anew() {
    let running = Running::start(json!([ours("NoSchedule")]), all(), open());
    running.until("open", |r| r.says(true) && r.taints() == json!([])).await;
    running.server.delete("nodes", "", "n1").unwrap();
    let mut object = node("n1");
    object["spec"]["taints"] = json!([ours("NoSchedule")]);
    running.server.create(object).unwrap();
    running.until("open again", |r| r.says(true) && r.taints() == json!([])).await;
}

#[tokio::test]
async fn other_pods_that_have_to_be_ready() {
    let server = ApiServer::start().unwrap();
    let selector = Selector::parse("istio-system/app=ztunnel").unwrap();
    let (sender, mut seen) = watch::channel(None);
    let task = tokio::spawn(pods::follow(client(&server), "n1".into(), selector.clone(), sender));
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
    expect("no pod of istio-system/app=ztunnel").await;
    let ready = |status: &str| json!([{ "type": "Ready", "status": status }]);
    for (name, node) in [("here", "n1"), ("there", "n2")] {
        let pod = Pod::new("istio-system", name).node(node).label("app", "ztunnel").phase("Running");
        server.create(pod.with(|pod| pod["status"]["conditions"] = ready("False")).build()).unwrap();
    }
    expect("istio-system/here is not ready").await;
    let set = |status: &str| {
        server
            .edit("pods", "istio-system", "here", |pod| pod["status"]["conditions"] = ready(status))
            .unwrap();
    };
    set("True");
    expect("good").await;
    set("False");
    expect("not ready").await;
    server.delete("pods", "istio-system", "here").unwrap();
    expect("no pod of").await;
    task.abort();
    if let Err(error) = task.await {
        assert!(error.is_cancelled(), "{error}");
    }
}
