//! The test API server as tests meet it: its handle, its faults on writes, its record.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

#[path = "both/servers.rs"]
mod servers;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{EvictParams, Patch, PatchParams};
use kube::{Api, Client, Config, Error};
use nobypass_testkit::apiserver::{self, ApiServer, Fault, Pod as TestPod};
use nobypass_testkit::servers::Server;
use serde_json::json;

fn server() -> Server {
    Server::fake().unwrap()
}

fn client(server: &ApiServer) -> Client {
    let mut config = Config::new(server.url().parse().unwrap());
    config.default_retry = false;
    Client::try_from(config).unwrap()
}

fn code<T>(result: Result<T, Error>) -> u16 {
    match result {
        Ok(_) => 200,
        Err(Error::Api(status)) => status.code,
        Err(_) => 0,
    }
}

#[tokio::test]
async fn faults_of_writes_are_met_once_each_and_all_is_recorded() {
    let server = ApiServer::start().unwrap();
    server.create(apiserver::node("n1")).unwrap();
    let nodes: Api<Node> = Api::all(client(&server));
    let patch = json!({ "metadata": { "labels": { "l": "1" } } });
    let send = || async { code(nodes.patch("n1", &PatchParams::default(), &Patch::Merge(&patch)).await) };
    server.inject(Fault::answer(429).retry_after(7).on("patch", "nodes").times(2));
    server.inject(Fault::drop_connection().on("patch", "nodes"));
    server.deny("patch", "nodes/status");
    let codes = [send().await, send().await, send().await, send().await];
    assert_eq!(codes, [429, 429, 0, 200]);
    assert_eq!(code(nodes.patch_status("n1", &PatchParams::default(), &Patch::Merge(&patch)).await), 403);
    assert_eq!(server.count("patch", "nodes"), 4);
    assert_eq!(server.bodies("patch", "nodes"), vec![patch.clone(); 4]);
    assert_eq!(server.writes().len(), 5);
    let version = server.version();
    server.allow_all();
    server.clear_requests();
    assert_eq!(code(nodes.get("n1").await), 200);
    assert!(server.writes().is_empty(), "reading is no write");
    assert_eq!(send().await, 200);
    assert_eq!(server.version(), version, "the same again changes nothing");
}

#[tokio::test]
async fn a_stopped_server_refuses_and_comes_back_with_its_objects() {
    let server = ApiServer::start().unwrap();
    server.create(TestPod::new("shop", "a").uid("u1").build()).unwrap();
    let pods: Api<Pod> = Api::namespaced(client(&server), "shop");
    assert_eq!(code(pods.get("a").await), 200);
    for _ in 0..3 {
        server.stop();
        assert_eq!(code(pods.get("a").await), 0);
        server.restart().unwrap();
        assert_eq!(pods.get("a").await.unwrap().metadata.uid.as_deref(), Some("u1"));
    }
}

#[tokio::test]
async fn blocked_evictions_are_refused_until_they_are_allowed() {
    let server = ApiServer::start().unwrap();
    server.create(TestPod::new("shop", "a").node("n1").label("app", "web").build()).unwrap();
    server.create(TestPod::new("shop", "b").node("n1").build()).unwrap();
    let pods: Api<Pod> = Api::namespaced(client(&server), "shop");
    server.block_evictions("shop", "app=web", None).unwrap();
    assert_eq!(code(pods.evict("a", &EvictParams::default()).await), 429);
    assert_eq!(code(pods.evict("b", &EvictParams::default()).await), 200);
    server.allow_evictions("shop");
    assert_eq!(code(pods.evict("a", &EvictParams::default()).await), 200);
    for name in ["a", "b"] {
        let pod = server.get("pods", "shop", name).unwrap();
        assert!(pod["metadata"]["deletionTimestamp"].is_string(), "{name} is terminating");
    }
    assert_eq!(server.count("create", "pods/eviction"), 3);
}

#[tokio::test]
async fn five_thousand_pods_elsewhere_are_not_sent() {
    let server = ApiServer::start().unwrap();
    for number in 0..5000 {
        server.create(TestPod::new("crowd", &format!("p{number}")).node("other").build()).unwrap();
    }
    server.create(TestPod::new("shop", "mine").node("n1").build()).unwrap();
    let params = kube::api::ListParams::default().fields("spec.nodeName=n1");
    let pods = Api::<Pod>::all(client(&server)).list(&params).await.unwrap();
    assert_eq!(pods.items.len(), 1);
    let page =
        Api::<Pod>::all(client(&server)).list(&kube::api::ListParams::default().limit(500)).await.unwrap();
    assert_eq!((page.items.len(), page.metadata.remaining_item_count), (500, Some(4501)));
}
