//! What is asked, and what comes of it, while all is well.

use std::time::Duration;

use nobypass_testkit::apiserver::{ApiServer, Cut, Fault, Pod};

use crate::harness::{Harness, NODE, parameter, patience, pod};

#[tokio::test]
async fn kubewarden_716_five_thousand_pods_elsewhere_cost_nothing() {
    let elsewhere = |n: usize| Pod::new("big", &format!("p{n}")).node(&format!("other{}", n % 100)).build();
    let mut h = Harness::with((0..5_000).map(elsewhere).chain([pod("shop", "web")])).await;
    h.synced().await;
    assert_eq!(h.names(), ["shop/web"]);
    h.watching().await;
    for n in 0..500 {
        h.server
            .edit("pods", "big", &format!("p{n}"), |pod| pod["metadata"]["labels"]["mode"] = "x".into())
            .unwrap();
    }
    h.edit("shop", "web", "off");
    h.agree().await;
    // First, perhaps again with its namespace, changed.
    assert!(h.upserts <= 3 && h.state.borrow().skipped == 0, "{} updates", h.upserts);
    let asked = h.server.matching("*", "pods");
    assert!(!asked.is_empty());
    for request in asked {
        let selector = parameter(&request.query, "fieldSelector");
        assert_eq!(selector.as_deref(), Some("spec.nodeName=n1"), "{request:?}");
    }
}

#[tokio::test]
async fn one_streamed_listing_then_changes_and_bookmarks() {
    let mut h = Harness::with((0..20).map(|n| pod("shop", &format!("p{n}")))).await;
    h.synced().await;
    assert_eq!((h.server.count("list", "*"), h.server.count("watch", "pods")), (0, 1));
    let query = &h.server.matching("watch", "pods")[0].query;
    for (name, value) in [
        ("sendInitialEvents", "true"),
        ("resourceVersionMatch", "NotOlderThan"),
        ("allowWatchBookmarks", "true"),
    ] {
        assert_eq!(parameter(query, name).as_deref(), Some(value), "{query}");
    }
    h.server.create(pod("shop", "new")).unwrap();
    h.edit("shop", "p3", "off");
    h.server.delete("pods", "shop", "p4").unwrap();
    h.agree().await;
    // Much happens elsewhere; only a bookmark says that this history is of no concern.
    h.watching().await;
    h.server.skip_versions(10_000);
    let mut next = 0;
    while next != h.server.version() {
        let before = h.server.count("watch", "pods");
        // The server may be asked for a bookmark before it has counted on.
        h.server.send_bookmarks();
        h.server.cut_watches(Cut::Clean);
        h.until("the next watch", |h| h.server.count("watch", "pods") > before).await;
        let asked = h.server.matching("watch", "pods");
        next = parameter(&asked[before].query, "resourceVersion").unwrap().parse().unwrap();
        h.watching().await;
    }
    h.edit("shop", "p5", "off");
    h.agree().await;
    assert_eq!((h.synced, h.gone, h.state.borrow().listings), (1, 1, 1));
}

#[tokio::test]
async fn a_server_without_streamed_listings_is_listed_in_pages() {
    // It says so, or knows nothing of them and never ends the first part.
    for fault in [Fault::answer(422), Fault::answer(400), Fault::stale()] {
        let server = ApiServer::start().unwrap();
        for n in 0..250 {
            server.create(pod("shop", &format!("p{n}"))).unwrap();
        }
        server.inject(fault.on("watch", "pods"));
        let patience = nobypass::cluster::watch::Patience { answer: Duration::from_secs(2), ..patience() };
        let mut h = Harness::start(server, patience).await;
        h.synced().await;
        assert_eq!(h.known.len(), 250);
        let pages = h.server.matching("list", "pods");
        assert_eq!(pages.len(), 3);
        assert!(
            pages.iter().all(|page| parameter(&page.query, "limit").as_deref() == Some("100")),
            "{pages:?}"
        );
        h.edit("shop", "p7", "off");
        h.agree().await;
        assert_eq!(h.state.borrow().listings, 1);
    }
}

#[tokio::test]
async fn a_page_that_expired_begins_the_listing_again() {
    let server = ApiServer::start().unwrap();
    for n in 0..150 {
        server.create(pod("shop", &format!("p{n}"))).unwrap();
    }
    server.inject(Fault::answer(422).on("watch", "pods"));
    // Not for the first page.
    server.inject(Fault::delay(Duration::ZERO).on("list", "pods"));
    let mut h = Harness::start(server, patience()).await;
    h.synced().await;
    h.server.inject(Fault::answer(410).on("list", "pods"));
    h.server.compact();
    h.server.expire_watches();
    h.server.delete("pods", "shop", "p0").unwrap();
    h.agree().await;
    assert_eq!((h.known.len(), h.gone), (149, 1));
}

#[tokio::test]
async fn a_pod_deleted_and_made_again_under_its_name_is_another_pod() {
    let mut h = Harness::with([pod("shop", "db-0")]).await;
    h.synced().await;
    let first = h.find("db-0").unwrap().uid;
    h.server.delete("pods", "shop", "db-0").unwrap();
    h.server.create(pod("shop", "db-0")).unwrap();
    h.agree().await;
    assert_ne!(h.find("db-0").unwrap().uid, first);
    assert_eq!((h.known.len(), h.gone), (1, 1));
}

#[tokio::test]
async fn a_pods_whole_life() {
    let mut h = Harness::with([]).await;
    h.synced().await;
    let uid = "2c48913c-b29f-11e7-9350-020968147796";
    let id = "ab".repeat(32);
    let built =
        Pod::new("shop", "web").uid(uid).phase("Pending").owner("apps/v1", "ReplicaSet", "web-1", "u");
    h.server.create(built.init_container("proxy", "p:1", true).build()).unwrap();
    // Not on a node yet: nobody's.
    h.server.edit("pods", "shop", "web", |pod| pod["spec"]["nodeName"] = NODE.into()).unwrap();
    h.until("the pod", |h| h.known.contains_key(uid)).await;
    h.server
        .edit("pods", "shop", "web", |pod| {
            pod["status"]["phase"] = "Running".into();
            pod["status"]["containerStatuses"] = serde_json::json!([{
                "name": "app", "containerID": format!("containerd://{id}"), "restartCount": 0,
                "state": {"running": {"startedAt": "2026-01-02T03:04:05Z"}},
            }]);
        })
        .unwrap();
    h.until("its container", |h| h.known[uid].containers.iter().any(|container| container.id.is_some()))
        .await;
    let app = h.known[uid].containers.iter().find(|container| container.id.is_some()).unwrap();
    assert_eq!((&*app.name, app.id.unwrap().to_string()), ("app", id));
    h.server
        .edit("pods", "shop", "web", |pod| {
            pod["metadata"]["deletionTimestamp"] = "2026-01-02T03:05:05Z".into();
        })
        .unwrap();
    h.until("its end", |h| h.known[uid].terminating).await;
    h.server.delete("pods", "shop", "web").unwrap();
    h.until("its departure", |h| h.known.is_empty()).await;
    assert_eq!(h.gone, 1);
}

#[tokio::test]
async fn the_source_ends_when_nobody_listens() {
    let h = Harness::with([pod("shop", "web")]).await;
    let mut state = h.state.clone();
    // The reader goes, and with it the source: its state has no sender any more.
    h.end();
    let ended = tokio::time::timeout(crate::harness::BOUND, async { while state.changed().await.is_ok() {} });
    assert!(ended.await.is_ok());
}

#[tokio::test]
async fn what_is_wanted_from_now_on_comes_with_a_new_listing() {
    let one = |name: &str| {
        let pod = Pod::new("shop", name).node(NODE).label("app", name).label("team.io/mesh", "on");
        pod.annotation("team.io/ports", "80").build()
    };
    let mut h = Harness::with([one("a"), one("b")]).await;
    h.synced().await;
    h.watching().await;
    assert_eq!(h.find("a").unwrap().labels.get("team.io/mesh"), None, "nobody asked");
    h.wants.send_modify(|wanted| wanted.keys.extend(["team.io/*"]));
    let told = |h: &Harness, name: &str| {
        let pod = h.find(name)?;
        Some((pod.labels.get("team.io/mesh")?.to_owned(), pod.annotations.get("team.io/ports")?.to_owned()))
    };
    h.until("both pods with what is wanted", |h| ["a", "b"].iter().all(|name| told(h, name).is_some())).await;
    assert_eq!(told(&h, "b"), Some(("on".into(), "80".into())));
    assert_eq!((h.rekeyed, h.gone), (1, 0), "nobody was forgotten");
    // It goes on as before.
    h.watching().await;
    h.edit("shop", "a", "x");
    h.agree().await;
    // What nobody wants any more is not kept.
    h.wants.send_modify(|wanted| wanted.keys = ["app", "mode"].into_iter().collect());
    h.until("the end of the label", |h| told(h, "a").is_none() && told(h, "b").is_none()).await;
    assert_eq!(h.find("a").unwrap().labels.get("app"), Some("a"));
}
