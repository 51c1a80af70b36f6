//! Remedies against the test API server, and what only that can do: faults.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the helpers of a test may panic as the test may"
)]

#[path = "both/remedy.rs"]
mod remedy;
#[path = "both/wire.rs"]
mod wire;

use std::time::{Duration, Instant};

use nobypass::cluster::events::{self, Events, Note, PodRef, Reason};
use nobypass::remedy::kube::{evict, inspect};
use nobypass::remedy::metrics::{End, Kind};
use nobypass::remedy::subject::{Evicted, Inspected};
use nobypass_testkit::apiserver::{ApiServer, Fault};
use nobypass_testkit::wait;
use remedy::{Running, World, all_on};
use serde_json::{Value, json};

fn server() -> nobypass_testkit::servers::Server {
    nobypass_testkit::servers::Server::fake().unwrap()
}

#[tokio::test]
async fn an_eviction_that_meets_faults_evicts_nobody() {
    let world = World::new().await;
    let (server, client) = (world.server.as_fake().unwrap(), world.wire.client());
    let cart = world.owned("cart", "ReplicaSet").await;
    // A budget that says when to come again, as some proxies' and servers' limits do.
    server.block_evictions(&world.namespace, "app=cart", Some(7)).unwrap();
    let told = Evicted::Blocked { retry_after: Some(Duration::from_secs(7)) };
    assert_eq!(evict(&client, &cart).await, told);
    server.allow_evictions(&world.namespace);
    server.inject(Fault::answer(500).on("create", "pods/eviction"));
    assert!(matches!(evict(&client, &cart).await, Evicted::Failed { .. }));
    server.inject(Fault::drop_connection().on("create", "pods/eviction"));
    assert!(matches!(evict(&client, &cart).await, Evicted::Failed { .. }));
    assert!(server.get("pods", &world.namespace, "cart").unwrap()["metadata"]["deletionTimestamp"].is_null());
    server.stop();
    assert!(matches!(evict(&client, &cart).await, Evicted::Failed { .. }));
    assert_eq!(inspect(&client, &cart).await, Inspected::Unavailable);
}

#[tokio::test]
async fn without_an_api_server_nothing_is_evicted_and_nothing_loops() {
    let world = World::new().await;
    let cart = world.owned("cart", "ReplicaSet").await;
    let mut running = Running::start(&world, all_on());
    world.server.as_fake().unwrap().stop();
    running.bypassing(&[&cart]);
    running.counted(Kind::Evict, End::Unavailable, 1).await;
    world.wire.calm().await;
    assert_eq!(running.metrics.counted(Kind::Evict, End::Unavailable), 1);
    assert_eq!(running.metrics.counted(Kind::Label, End::Failed), 1);
    running.tasks.shutdown().await;
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
    let world = World::new().await;
    let server = world.server.as_fake().unwrap();
    let metrics = events::Metrics::default();
    let (events, task) = Events::new(world.wire.client(), "n1", metrics.clone());
    let task = tokio::spawn(task.run());
    let of = |pod: &nobypass::remedy::subject::Pod| PodRef {
        namespace: pod.namespace.to_string(),
        name: pod.name.to_string(),
        uid: pod.uid.to_string(),
    };
    let (cart, other) = (world.owned("cart", "Job").await, world.owned("other", "Job").await);
    let reason = Reason::MeshBypassDetected;
    let note = |pod| Note { reason, action: "Detecting", text: "x".repeat(5000), pod };
    for pod in [&cart, &cart, &cart, &other] {
        events.say(note(Some(of(pod)))).await;
    }
    let mut all = said(server);
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
    events.say(note(Some(of(&cart)))).await;
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
