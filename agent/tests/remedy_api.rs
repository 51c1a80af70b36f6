//! Remedies against an API server: what is asked, in which order, and what is counted.
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use nobypass::cluster::events::{self, Events, Note, PodRef, Reason};
use nobypass::pods::PodUid;
use nobypass::probe::Answer;
use nobypass::remedy::kube::{LABEL, Labelled, evict, inspect, label};
use nobypass::remedy::metrics::{End, Kind, Metrics};
use nobypass::remedy::policy::{Remedies, Step};
use nobypass::remedy::proof::{Later, Proof};
use nobypass::remedy::shell::{Hands, Inputs, run};
use nobypass::remedy::subject::{self, Evicted, Inspected, Owner, Seen, Subject};
use nobypass_testkit::apiserver::{ApiServer, Fault, Pod};
use nobypass_testkit::wait;
use serde_json::{Value, json};
use tokio::sync::watch;

fn client(server: &ApiServer) -> kube::Client {
    let mut config = kube::Config::new(server.url().parse().unwrap());
    config.default_retry = false;
    kube::Client::try_from(config).unwrap()
}

fn pod(name: &str, uid: &str) -> subject::Pod {
    subject::Pod {
        uid: PodUid::parse(uid).unwrap(),
        namespace: "shop".into(),
        name: name.into(),
        mesh: "linkerd".into(),
        cgroup: 1,
        sandbox: None,
        families: [true, true],
        blocked: false,
    }
}

const UID: &str = "2c48913c-b29f-11e7-9350-000000000001";
const OTHER: &str = "2c48913c-b29f-11e7-9350-000000000002";

fn object(name: &str, uid: &str) -> Pod {
    Pod::new("shop", name).uid(uid).node("n1").label("app", "cart").phase("Running")
}

fn owned(name: &str, uid: &str, kind: &str) -> Value {
    object(name, uid).owner("apps/v1", kind, "cart", "owner-uid").build()
}

/// Nobody can say anything.
#[derive(Debug)]
struct Silent;

impl Proof for Silent {
    fn prepare<'a>(&'a self, _: &'a subject::Pod) -> Later<'a, ()> {
        Box::pin(std::future::ready(()))
    }

    fn prove<'a>(&'a self, _: &'a subject::Pod) -> Later<'a, [Answer; 2]> {
        Box::pin(std::future::ready([Answer::Failed { reason: "test" }; 2]))
    }
}

#[tokio::test]
async fn evictions_name_the_pod_and_no_grace_period() {
    let server = ApiServer::start().unwrap();
    let client = client(&server);
    server.create(owned("cart", UID, "ReplicaSet")).unwrap();
    server.create(owned("other", OTHER, "ReplicaSet")).unwrap();
    let cart = pod("cart", UID);
    assert!(
        matches!(inspect(&client, &cart).await, Inspected::Owner(Owner::Workload(of)) if of.name == "shop/cart")
    );

    assert_eq!(evict(&client, &pod("other", UID)).await, Evicted::Conflict, "another pod has this name");
    server.block_evictions("shop", "app=cart", Some(7)).unwrap();
    let blocked = |retry_after| Evicted::Blocked { retry_after };
    assert_eq!(evict(&client, &cart).await, blocked(Some(Duration::from_secs(7))));
    server.allow_evictions("shop");
    server.block_evictions("shop", "app=cart", None).unwrap();
    assert_eq!(evict(&client, &cart).await, blocked(None));
    server.allow_evictions("shop");
    server.deny("create", "pods/eviction");
    assert_eq!(evict(&client, &cart).await, Evicted::Forbidden);
    server.allow_all();
    server.inject(Fault::answer(500).on("create", "pods/eviction"));
    assert!(matches!(evict(&client, &cart).await, Evicted::Failed { .. }));
    server.inject(Fault::drop_connection().on("create", "pods/eviction"));
    assert!(matches!(evict(&client, &cart).await, Evicted::Failed { .. }));
    assert!(server.get("pods", "shop", "cart").unwrap()["metadata"]["deletionTimestamp"].is_null());

    assert_eq!(evict(&client, &cart).await, Evicted::Done);
    let gone = server.get("pods", "shop", "cart");
    assert!(gone.is_none_or(|pod| pod["metadata"]["deletionTimestamp"].is_string()));
    for body in server.bodies("create", "pods/eviction") {
        assert_eq!(body["deleteOptions"]["preconditions"]["uid"], json!(UID), "{body}");
        assert!(body["deleteOptions"]["gracePeriodSeconds"].is_null(), "{body}");
    }
    assert_eq!(server.count("delete", "*"), 0);
    assert_eq!(evict(&client, &pod("never", UID)).await, Evicted::Gone);
    server.stop();
    assert!(matches!(evict(&client, &cart).await, Evicted::Failed { .. }));
    assert_eq!(inspect(&client, &cart).await, Inspected::Unavailable);
}

#[tokio::test]
async fn only_the_pod_itself_is_labelled() {
    let server = ApiServer::start().unwrap();
    let client = client(&server);
    server.create(owned("cart", UID, "ReplicaSet")).unwrap();
    let shown = || server.get("pods", "shop", "cart").unwrap()["metadata"]["labels"][LABEL].clone();
    assert_eq!(label(&client, &pod("cart", OTHER), true).await, Labelled::Gone, "another pod of this name");
    assert_eq!(shown(), Value::Null);
    assert_eq!(label(&client, &pod("cart", UID), true).await, Labelled::Done);
    assert_eq!(shown(), "true");
    assert_eq!(label(&client, &pod("cart", UID), false).await, Labelled::Done);
    assert_eq!(shown(), Value::Null);
    assert_eq!(label(&client, &pod("never", UID), true).await, Labelled::Gone);
    server.deny("patch", "pods/status");
    assert_eq!(label(&client, &pod("cart", UID), true).await, Labelled::Forbidden);
}

fn said(server: &ApiServer) -> Vec<(String, String, String, u64)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let events = server.list("events");
    let all = events.iter().map(|event| {
        let count = event["series"]["count"].as_u64().unwrap_or(1);
        (text(&event["regarding"]["kind"]), text(&event["reason"]), text(&event["action"]), count)
    });
    all.collect()
}

#[tokio::test]
async fn events_are_on_pod_and_node_and_repeats_are_a_series() {
    let server = ApiServer::start().unwrap();
    for (name, uid) in [("cart", UID), ("other", OTHER)] {
        server.create(object(name, uid).build()).unwrap();
    }
    let metrics = events::Metrics::default();
    let (events, task) = Events::new(client(&server), "n1", metrics.clone());
    let task = tokio::spawn(task.run());
    let of = |name: &str, uid: &str| PodRef { namespace: "shop".into(), name: name.into(), uid: uid.into() };
    let reason = Reason::MeshBypassDetected;
    let note = |pod| Note { reason, action: "Detecting", text: "x".repeat(5000), pod };
    for (name, uid) in [("cart", UID), ("cart", UID), ("cart", UID), ("other", OTHER)] {
        events.say(note(Some(of(name, uid)))).await;
    }
    let mut all = said(&server);
    all.sort();
    let on = |kind: &str, count| (kind.to_owned(), reason.label().to_owned(), "Detecting".to_owned(), count);
    assert_eq!(all, [on("Node", 1), on("Pod", 1), on("Pod", 3)]);
    for event in server.list("events") {
        assert_eq!(
            (&event["type"], &event["reportingController"]),
            (&json!("Warning"), &json!("nobypass.dev/agent"))
        );
        assert!(event["note"].as_str().unwrap().len() <= 1024);
        assert_eq!(event["reportingInstance"], "n1");
    }
    assert_eq!((metrics.counted(reason, "sent"), metrics.counted(reason, "deduplicated")), (5, 3));

    // A server that says nothing holds nobody up for long, and what does not fit is counted.
    server.freeze();
    let start = Instant::now();
    events.say(note(Some(of("cart", UID)))).await;
    assert!(start.elapsed() < Duration::from_secs(10));
    let many: Vec<_> = (0..2000).map(|_| events.say(note(None))).collect();
    let all = futures_util::future::join_all(many);
    tokio::time::timeout(wait::HANG, all).await.unwrap();
    assert!(metrics.counted(reason, "dropped") >= 1000, "{metrics:?}");
    server.thaw();
    task.abort();
    if let Err(error) = task.await {
        assert!(error.is_cancelled(), "{error}");
    }
}

/// Remedies at work on subjects that the test sets.
struct Running {
    server: ApiServer,
    metrics: Metrics,
    subjects: watch::Sender<Arc<[Subject]>>,
    gate: watch::Sender<bool>,
    limits: watch::Sender<Remedies>,
    tasks: tokio::task::JoinSet<()>,
}

impl Running {
    fn start(limits: Remedies) -> Self {
        let server = ApiServer::start().unwrap();
        let metrics = Metrics::default();
        let (events, task) = Events::new(client(&server), "n1", events::Metrics::default());
        let (subjects, following) = watch::channel(Arc::from(Vec::new()));
        let (gate, open) = watch::channel(true);
        let (limits, allowed) = watch::channel(limits);
        let hands = Hands {
            client: Some(client(&server)),
            events: Some(events),
            repairer: None,
            proof: Arc::new(Silent),
            metrics: metrics.clone(),
        };
        let inputs = Inputs { subjects: following, gate: open, limits: allowed };
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(task.run());
        tasks.spawn(run(hands, inputs));
        Self { server, metrics, subjects, gate, limits, tasks }
    }

    fn bypassing(&self, pods: &[(&str, &str)]) {
        let last = Instant::now();
        let subject = |(name, uid): &(&str, &str)| Subject {
            pod: Arc::new(pod(name, uid)),
            seen: Seen::Bypassing { last },
            terminating: false,
            labelled: false,
        };
        self.subjects.send_replace(pods.iter().map(subject).collect());
    }

    async fn counted(&self, kind: Kind, end: End, times: u64) {
        let limit = tokio::time::Instant::now() + wait::HANG;
        while self.metrics.counted(kind, end) < times {
            assert!(tokio::time::Instant::now() < limit, "{kind:?} {end:?}: {:?}", said(&self.server));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

fn all_on() -> Remedies {
    Remedies { label: Step::On, repair: Step::On, evict: Step::On, grace_seconds: 0, ..Remedies::default() }
}

#[tokio::test]
async fn an_event_comes_before_each_step() {
    let mut running = Running::start(all_on());
    running.server.create(owned("cart", UID, "ReplicaSet")).unwrap();
    running.bypassing(&[("cart", UID)]);
    running.counted(Kind::Evict, End::Success, 1).await;
    let order: Vec<String> = running
        .server
        .requests()
        .iter()
        .filter(|request| request.body["regarding"]["kind"] != "Node")
        .map(|request| match request.target.as_str() {
            "events" => format!("event {}", request.body["action"].as_str().unwrap_or_default()),
            other => format!("{} {other}", request.verb),
        })
        .collect();
    let expected = [
        "event Detecting",
        "patch pods/status",
        "event Repairing",
        "event RepairFailed",
        "get pods",
        "event Evicting",
        "create pods/eviction",
    ];
    assert_eq!(order, expected);
    assert_eq!(running.metrics.counted(Kind::Repair, End::Impossible), 1, "the CNI half is off");
    running.tasks.shutdown().await;
}

#[tokio::test]
async fn the_gate_the_budget_and_the_owner_are_respected() {
    let mut running = Running::start(Remedies { repair: Step::Off, ..all_on() });
    running.gate.send_replace(false);
    running.server.create(object("bare", UID).build()).unwrap();
    running.bypassing(&[("bare", UID)]);
    running.counted(Kind::Evict, End::GateClosed, 1).await;
    assert_eq!(running.server.count("get", "pods"), 0);
    running.gate.send_replace(true);
    running.counted(Kind::Evict, End::Unowned, 1).await;

    let uid = |n: u32| format!("2c48913c-b29f-11e7-9350-{n:012}");
    let names: Vec<(String, String)> = (10..16).map(|n| (format!("cart-{n}"), uid(n))).collect();
    for (name, uid) in &names {
        running.server.create(owned(name, uid, "StatefulSet")).unwrap();
    }
    let pods: Vec<(&str, &str)> = names.iter().map(|(name, uid)| (name.as_str(), uid.as_str())).collect();
    running.bypassing(&pods);
    running.counted(Kind::Evict, End::RateLimited, 5).await;
    running.counted(Kind::Evict, End::Success, 1).await;
    assert_eq!(running.server.count("create", "pods/eviction"), 1, "one pod of a workload");
    running.tasks.shutdown().await;
}

#[tokio::test]
async fn a_dry_run_asks_and_says_and_does_nothing() {
    let mut running =
        Running::start(Remedies { label: Step::DryRun, repair: Step::Off, evict: Step::DryRun, ..all_on() });
    running.server.create(owned("cart", UID, "Job")).unwrap();
    running.bypassing(&[("cart", UID)]);
    running.counted(Kind::Evict, End::DryRun, 1).await;
    running.counted(Kind::Event, End::Success, 2).await;
    let writes: Vec<String> = running.server.writes().iter().map(|write| write.target.clone()).collect();
    assert!(writes.iter().all(|target| target == "events"), "{writes:?}");
    assert_eq!(running.metrics.counted(Kind::Label, End::DryRun), 1);
    // And when it is allowed while the agent runs, it is done.
    running.limits.send_replace(Remedies { repair: Step::Off, ..all_on() });
    running.counted(Kind::Evict, End::Success, 1).await;
    running.tasks.shutdown().await;
}

#[tokio::test]
async fn without_an_api_server_nothing_is_evicted_and_nothing_loops() {
    let mut running = Running::start(all_on());
    running.server.stop();
    running.bypassing(&[("cart", UID)]);
    running.counted(Kind::Evict, End::Unavailable, 1).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(running.metrics.counted(Kind::Evict, End::Unavailable), 1);
    assert_eq!(running.metrics.counted(Kind::Label, End::Failed), 1);
    running.tasks.shutdown().await;
}
