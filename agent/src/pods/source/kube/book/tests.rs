use serde_json::{Value, json};

use super::*;

fn uid(n: u32) -> PodUid {
    PodUid::parse(&format!("00000000-0000-4000-8000-{n:012x}")).unwrap()
}

fn pod(n: u32, node: &str, label: &str) -> Change<Pod> {
    let pod = json!({
        "metadata": {"uid": uid(n).to_string(), "name": format!("p{n}"), "namespace": format!("ns{}", n % 2),
            "labels": {"mesh": label}},
        "spec": {"nodeName": node},
    });
    Change::Applied(serde_json::from_value(pod).unwrap())
}

fn deleted(n: u32) -> Change<Pod> {
    match pod(n, "n1", "a") {
        Change::Applied(pod) => Change::Deleted(pod),
        other => other,
    }
}

fn namespace(name: &str, labels: &Value) -> Namespace {
    serde_json::from_value(json!({"metadata": {"name": name, "labels": labels}})).unwrap()
}

fn book() -> Book {
    Book::new("n1", Wanted { keys: ["mesh"].into_iter().collect(), ..Wanted::default() })
}

/// Updates as pairs of UID and namespace label; `None` for gone.
fn told(updates: Vec<PodUpdate>) -> Vec<(PodUid, Option<String>)> {
    let mut told: Vec<_> = updates
        .into_iter()
        .map(|update| match update {
            PodUpdate::Upsert(pod) => {
                let label =
                    pod.namespace_labels.as_ref().map(|labels| labels.get("mesh").unwrap_or("-").to_owned());
                (pod.uid, Some(label.unwrap_or_else(|| "?".into())))
            }
            PodUpdate::Gone(uid) => (uid, None),
            PodUpdate::Rekeyed(_) | PodUpdate::Synced => panic!("not the book's word"),
        })
        .collect();
    told.sort();
    told
}

#[test]
fn changes_are_told_once_and_other_nodes_pods_never() {
    let mut book = book();
    assert_eq!(told(book.pod(pod(1, "n1", "a"))).len(), 1);
    assert_eq!(told(book.pod(pod(1, "n1", "a"))), []);
    assert_eq!(told(book.pod(pod(1, "n1", "b"))).len(), 1);
    assert_eq!(told(book.pod(pod(2, "n2", "a"))), []);
    assert_eq!((book.pods(), book.skipped), (1, 1));
    assert_eq!(told(book.pod(deleted(1))), [(uid(1), None)]);
    assert_eq!(told(book.pod(deleted(1))), []);
}

#[test]
fn a_listing_says_what_is_gone_and_only_when_it_is_complete() {
    let mut book = book();
    for change in [Change::Listing, pod(1, "n1", "a"), pod(2, "n1", "a"), Change::Listed] {
        book.pod(change);
    }
    assert_eq!(told(book.pod(Change::Listing)), []);
    assert_eq!(told(book.pod(pod(3, "n1", "a"))).len(), 1, "told at once");
    // The server goes away in the middle: nobody is gone on the word of half a listing.
    assert_eq!(told(book.pod(Change::Failed(RequestError::Cut(String::new())))), []);
    assert_eq!(told(book.pod(Change::Listing)), []);
    book.pod(pod(2, "n1", "a"));
    assert_eq!(told(book.pod(Change::Listed)), [(uid(1), None), (uid(3), None)]);
    assert_eq!(book.pods(), 1);
}

#[test]
fn namespaces_reach_their_pods_in_any_order() {
    let mut book = book();
    assert_eq!(told(book.pod(pod(1, "n1", "a"))), [(uid(1), Some("?".into()))], "nobody has told yet");
    book.namespace(Change::Listing);
    let ambient = || Change::Applied(namespace("ns1", &json!({"mesh": "ambient", "x": "y"})));
    assert_eq!(told(book.namespace(ambient())), [(uid(1), Some("ambient".into()))]);
    assert_eq!(told(book.namespace(ambient())), []);
    assert_eq!(told(book.pod(pod(2, "n1", "a"))), [(uid(2), Some("?".into()))]);
    assert_eq!(told(book.namespace(Change::Listed)), [(uid(2), Some("-".into()))], "known to have none");
    // Toggled while the pod runs, and taken away with the namespace.
    let off = Change::Applied(namespace("ns1", &json!({"mesh": "none"})));
    assert_eq!(told(book.namespace(off)), [(uid(1), Some("none".into()))]);
    assert_eq!(
        told(book.namespace(Change::Deleted(namespace("ns1", &json!({}))))),
        [(uid(1), Some("-".into()))]
    );
}

#[test]
fn a_namespace_listing_forgets_what_it_does_not_name() {
    let mut book = book();
    book.pod(pod(1, "n1", "a"));
    for change in [Change::Listing, Change::Applied(namespace("ns1", &json!({"mesh": "on"}))), Change::Listed]
    {
        book.namespace(change);
    }
    book.namespace(Change::Listing);
    assert_eq!(told(book.namespace(Change::Listed)), [(uid(1), Some("-".into()))]);
}

#[test]
fn namespaces_without_anything_of_interest_cost_nothing() {
    let mut book = book();
    book.namespace(Change::Listing);
    for n in 0..5_000 {
        book.namespace(Change::Applied(namespace(&format!("n{n}"), &json!({"team": "x"}))));
    }
    book.namespace(Change::Listed);
    assert!(book.namespaces.known.is_empty() && book.namespaces.named.is_none());
}

#[test]
fn synced_when_both_are_told_or_namespaces_cannot_be_had() {
    let mut both = book();
    both.pod(Change::Listing);
    both.pod(Change::Listed);
    assert!(!both.is_synced());
    both.namespace(Change::Listing);
    both.namespace(Change::Listed);
    assert!(both.is_synced());

    let mut forbidden = book();
    forbidden.pod(Change::Listed);
    forbidden.namespace(Change::Failed(RequestError::Unauthorized { message: String::new() }));
    assert!(forbidden.is_synced());
    forbidden.pod(pod(1, "n1", "a"));
    assert_eq!(forbidden.pods(), 1, "pods do without");
}
