//! What the pods' namespaces say.

use nobypass_testkit::apiserver::{ApiServer, Fault, namespace};
use serde_json::json;

use crate::harness::{Harness, patience, pod};

fn label<'a>(h: &'a Harness, name: &str) -> Option<&'a str> {
    let labels = h.find(name)?.namespace_labels.as_ref()?;
    Some(labels.get("mesh").unwrap_or("none"))
}

#[tokio::test]
async fn a_label_on_the_namespace_reaches_its_pods_while_they_run() {
    let mut shop = namespace("shop");
    shop["metadata"]["labels"] = json!({"mesh": "ambient"});
    let server = ApiServer::start().unwrap();
    server.create(shop).unwrap();
    for (namespace, name) in [("shop", "a"), ("shop", "b"), ("other", "c")] {
        server.create(pod(namespace, name)).unwrap();
    }
    let mut h = Harness::start(server, patience()).await;
    h.synced().await;
    h.until("labels", |h| {
        (label(h, "a"), label(h, "b"), label(h, "c")) == (Some("ambient"), Some("ambient"), Some("none"))
    })
    .await;
    h.server.edit("namespaces", "", "shop", |ns| ns["metadata"]["labels"]["mesh"] = "off".into()).unwrap();
    h.until("the change", |h| label(h, "a") == Some("off") && label(h, "b") == Some("off")).await;
    h.server.edit("namespaces", "", "other", |ns| ns["metadata"]["labels"] = json!({"mesh": "on"})).unwrap();
    h.until("the new label", |h| label(h, "c") == Some("on")).await;
    h.server.edit("namespaces", "", "other", |ns| ns["metadata"]["labels"] = json!({})).unwrap();
    h.until("its end", |h| label(h, "c") == Some("none")).await;
}

#[tokio::test]
async fn only_the_metadata_of_namespaces_is_asked_for() {
    let mut h = Harness::with([pod("shop", "a")]).await;
    h.synced().await;
    h.watching().await;
    assert_eq!(h.server.count("get", "*"), 0);
    assert_eq!(h.server.count("watch", "namespaces"), 1);
}

#[tokio::test]
async fn without_permission_for_namespaces_pods_are_known_and_the_message_says_what_to_add() {
    let server = ApiServer::start().unwrap();
    server.create(pod("shop", "a")).unwrap();
    server.deny("watch", "namespaces");
    server.deny("list", "namespaces");
    let mut h = Harness::start(server, patience()).await;
    h.synced().await;
    assert_eq!(h.find("a").unwrap().namespace_labels, None, "not known, rather than none");
    let state = h.state.borrow().clone();
    let error = state.last_error.unwrap();
    assert!(state.connected, "pods are what counts");
    assert!(error.contains("resources: [namespaces], verbs: [list, watch]"), "{error}");
    h.server.allow_all();
    h.until("the namespaces", |h| label(h, "a") == Some("none")).await;
}

#[tokio::test]
async fn a_cut_while_namespaces_are_listed_leaves_no_gap() {
    let server = ApiServer::start().unwrap();
    for n in 0..30 {
        let mut each = namespace(&format!("ns{n}"));
        each["metadata"]["labels"] = json!({"mesh": format!("m{n}")});
        server.create(each).unwrap();
        server.create(pod(&format!("ns{n}"), &format!("p{n}"))).unwrap();
    }
    for _ in 0..5 {
        server
            .inject(Fault::cut_after(7, nobypass_testkit::apiserver::Cut::Abrupt).on("watch", "namespaces"));
    }
    let mut h = Harness::start(server, patience()).await;
    h.synced().await;
    h.until("all labels", |h| (0..30).all(|n| label(h, &format!("p{n}")) == Some(&format!("m{n}")))).await;
}
