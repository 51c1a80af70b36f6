//! A kube-rs watcher against the test API server: it works, and it meets each fault as it would a real server's.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::pin::pin;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher::{self, Event, ListSemantic};
use kube::{Api, Client, Config, ResourceExt as _};
use nobypass_testkit::apiserver::{ApiServer, Cut, Fault, Pod as TestPod};
use nobypass_testkit::wait::HANG;
use serde_json::json;

fn server() -> ApiServer {
    let server = ApiServer::start().unwrap();
    for (name, node) in [("a", "n1"), ("b", "n1"), ("other", "n2")] {
        server.create(TestPod::new("shop", name).node(node).build()).unwrap();
    }
    server
}

fn client(server: &ApiServer) -> Client {
    Client::try_from(Config::new(server.url().parse().unwrap())).unwrap()
}

fn pods(
    server: &ApiServer,
    config: watcher::Config,
) -> impl Stream<Item = watcher::Result<Event<Pod>>> + use<> {
    watcher::watcher(Api::all(client(server)), config.fields("spec.nodeName=n1"))
}

async fn next<S>(stream: &mut S) -> Result<String, String>
where
    S: Stream<Item = watcher::Result<Event<Pod>>> + Unpin,
{
    let item = tokio::time::timeout(HANG, stream.next()).await.expect("an event within the bound");
    match item.expect("a watcher never ends") {
        Ok(Event::Apply(pod)) => Ok(format!("apply {}", pod.name_any())),
        Ok(Event::Delete(pod)) => Ok(format!("delete {}", pod.name_any())),
        Ok(Event::Init) => Ok("init".into()),
        Ok(Event::InitApply(pod)) => Ok(format!("init {}", pod.name_any())),
        Ok(Event::InitDone) => Ok("done".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// Reads events until one is `last`; gives all that came, without errors.
async fn until<S>(stream: &mut S, last: &str) -> Vec<String>
where
    S: Stream<Item = watcher::Result<Event<Pod>>> + Unpin,
{
    let mut seen = Vec::new();
    loop {
        if let Ok(event) = next(stream).await {
            let end = event == last;
            seen.push(event);
            if end {
                return seen;
            }
        }
    }
}

/// Polls a watcher, which says nothing, until its watch is open.
async fn watching<S>(server: &ApiServer, stream: &mut S)
where
    S: Stream<Item = watcher::Result<Event<Pod>>> + Unpin,
{
    let open = async {
        while server.watches("pods") == 0 {
            if let Ok(event) = tokio::time::timeout(Duration::from_millis(20), next(stream)).await {
                assert!(event.is_err(), "{event:?}");
            }
        }
    };
    tokio::time::timeout(HANG, open).await.expect("an open watch");
}

#[tokio::test]
async fn both_ways_of_listing_begin_with_what_is_there_and_go_on() {
    for semantic in [ListSemantic::Any, ListSemantic::MostRecent] {
        for streaming in [false, true] {
            let server = server();
            let config = watcher::Config { list_semantic: semantic.clone(), ..Default::default() };
            let config =
                if streaming { watcher::Config::default().streaming_lists() } else { config.page_size(1) };
            let mut stream = pin!(pods(&server, config));
            assert_eq!(until(&mut stream, "done").await, ["init", "init a", "init b", "done"]);
            let seen = tokio::spawn({
                let server = client(&server);
                async move { Api::<Pod>::namespaced(server, "shop").get("a").await.is_ok() }
            });
            assert!(seen.await.unwrap());
            server.create(TestPod::new("shop", "c").node("n1").build()).unwrap();
            server.create(TestPod::new("shop", "elsewhere").node("n2").build()).unwrap();
            server.edit("pods", "shop", "c", |pod| pod["metadata"]["labels"]["x"] = json!("1")).unwrap();
            server.delete("pods", "shop", "a").unwrap();
            assert_eq!(
                until(&mut stream, "delete a").await,
                ["apply c", "apply c", "delete a"],
                "{streaming}"
            );
            assert_eq!(server.count("list", "pods") == 0, streaming);
        }
    }
}

#[tokio::test]
async fn a_cut_watch_goes_on_where_it_was_without_a_list() {
    for how in [Cut::Clean, Cut::Abrupt, Cut::MidEvent] {
        let server = server();
        server.inject(Fault::cut_after(1, how).on("watch", "pods"));
        let mut stream = pin!(pods(&server, watcher::Config::default()));
        until(&mut stream, "done").await;
        for name in ["c", "d"] {
            server.create(TestPod::new("shop", name).node("n1").build()).unwrap();
        }
        assert_eq!(until(&mut stream, "apply d").await, ["apply c", "apply d"], "{how:?}");
        watching(&server, &mut stream).await;
        server.cut_watches(how);
        server.create(TestPod::new("shop", "e").node("n1").build()).unwrap();
        assert_eq!(until(&mut stream, "apply e").await, ["apply e"], "{how:?}");
        assert_eq!(server.count("list", "pods"), 1, "{how:?}");
        assert!(server.count("watch", "pods") >= 3);
    }
}

#[tokio::test]
async fn an_expired_version_is_listed_anew() {
    type Break = fn(&ApiServer);
    let mid_stream: Break = ApiServer::expire_watches;
    let compacted: Break = |server| {
        server.stop();
        server.delete("pods", "shop", "b").unwrap();
        server.create(TestPod::new("shop", "b").node("n1").build()).unwrap();
        server.compact();
        server.restart().unwrap();
    };
    for (name, break_it) in [("event", mid_stream), ("compaction", compacted)] {
        let server = server();
        let mut stream = pin!(pods(&server, watcher::Config::default()));
        until(&mut stream, "done").await;
        watching(&server, &mut stream).await;
        break_it(&server);
        assert_eq!(until(&mut stream, "done").await, ["init", "init a", "init b", "done"], "{name}");
        assert_eq!(server.count("list", "pods"), 2, "{name}");
    }
}

/// A real server never answers a watch so. kube-rs does not list anew then, it watches from the same version again.
#[tokio::test]
async fn a_status_of_410_is_met_by_another_watch() {
    let server = server();
    server.inject(Fault::answer(410).on("watch", "pods"));
    let mut stream = pin!(pods(&server, watcher::Config::default()));
    until(&mut stream, "done").await;
    server.create(TestPod::new("shop", "c").node("n1").build()).unwrap();
    let refused = next(&mut stream).await.expect_err("the first watch");
    assert!(refused.contains("410"), "{refused}");
    assert_eq!(until(&mut stream, "apply c").await, ["apply c"]);
    assert_eq!((server.count("list", "pods"), server.count("watch", "pods")), (1, 2));
}

#[tokio::test]
async fn errors_of_a_list_are_met_and_then_it_works() {
    let server = server();
    for code in [429, 500, 503, 504] {
        server.inject(Fault::answer(code).on("list", "pods"));
    }
    server.inject(Fault::drop_connection().on("list", "pods"));
    server.inject(Fault::garbage().on("list", "pods"));
    let mut stream = pin!(pods(&server, watcher::Config::default()));
    // The client itself asks again after some of them.
    until(&mut stream, "done").await;
    let statuses: Vec<_> = server.matching("list", "pods").iter().map(|request| request.status).collect();
    assert_eq!(statuses, [Some(429), Some(500), Some(503), Some(504), None, Some(200), Some(200)]);
}

#[tokio::test]
async fn a_watch_whose_time_is_up_ends_with_a_bookmark() {
    let server = server();
    let mut stream = pin!(pods(&server, watcher::Config::default().timeout(1)));
    until(&mut stream, "done").await;
    server.skip_versions(100);
    // Compaction takes the versions away that the list had; the bookmark says the newest.
    let again = async {
        loop {
            let _ = tokio::time::timeout(Duration::from_millis(20), stream.next()).await;
            if server.count("watch", "pods") >= 2 {
                break;
            }
        }
    };
    tokio::time::timeout(HANG, again).await.expect("a second watch");
    let newest = server.version().to_string();
    let second = server.matching("watch", "pods").remove(1);
    assert!(second.query.contains(&format!("resourceVersion={newest}")), "{}", second.query);
}

#[tokio::test]
async fn a_frozen_server_says_nothing_and_a_silent_watch_stays_open() {
    let server = server();
    let mut stream = pin!(pods(&server, watcher::Config::default()));
    until(&mut stream, "done").await;
    let silent = async |stream: &mut std::pin::Pin<&mut _>| {
        tokio::time::timeout(Duration::from_millis(100), next(stream)).await.is_err()
    };
    assert!(silent(&mut stream).await);
    server.freeze();
    server.create(TestPod::new("shop", "c").node("n1").build()).unwrap();
    assert!(silent(&mut stream).await);
    server.thaw();
    assert_eq!(until(&mut stream, "apply c").await, ["apply c"]);
    server.silence_watches();
    server.create(TestPod::new("shop", "d").node("n1").build()).unwrap();
    assert!(silent(&mut stream).await);
    assert_eq!(server.watches("pods"), 1);
}
