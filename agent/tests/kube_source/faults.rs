//! The server fails, in every way that is known.

use std::time::Duration;

use nobypass::cluster::watch::Patience;
use nobypass_testkit::apiserver::{ApiServer, Cut, Fault};

use crate::harness::{Harness, parameter, patience, pod};

fn pods(count: usize) -> impl Iterator<Item = serde_json::Value> {
    (0..count).map(|n| pod("shop", &format!("p{n}")))
}

#[tokio::test]
async fn history_lost_in_the_middle_of_a_watch() {
    let mut h = Harness::with(pods(20)).await;
    h.synced().await;
    h.watching().await;
    h.server.expire_watches();
    h.server.delete("pods", "shop", "p1").unwrap();
    h.server.create(pod("shop", "new")).unwrap();
    h.until("the second listing", |h| h.state.borrow().listings == 2 && h.synced == 2).await;
    h.agree().await;
    assert_eq!((h.errors("gone"), h.gone), (2, 1), "both watches, one pod");
    // What was known is not older than what the second listing asked for.
    let second = h.server.matching("watch", "pods").into_iter().find(|watch| {
        parameter(&watch.query, "sendInitialEvents").is_some()
            && parameter(&watch.query, "resourceVersion").is_some_and(|version| !version.is_empty())
    });
    assert!(second.is_some(), "{:?}", h.server.matching("watch", "pods"));
}

#[tokio::test]
async fn history_lost_as_an_http_status() {
    let mut h = Harness::with(pods(5)).await;
    h.synced().await;
    h.watching().await;
    h.server.inject(Fault::answer(410).on("watch", "pods"));
    h.server.cut_watches(Cut::Abrupt);
    h.server.delete("pods", "shop", "p1").unwrap();
    h.until("the second listing", |h| h.synced == 2).await;
    h.agree().await;
    assert_eq!((h.errors("gone"), h.gone), (1, 1), "asked once, not for ever");
}

#[tokio::test]
async fn watches_cut_after_every_few_events() {
    for how in [Cut::Clean, Cut::Abrupt, Cut::MidEvent] {
        for events in [1, 3] {
            let mut h = Harness::with(pods(2)).await;
            h.synced().await;
            h.watching().await;
            h.server.inject(Fault::cut_after(events, how).on("watch", "pods").always());
            h.server.cut_watches(how);
            for n in 2..12 {
                h.server.create(pod("shop", &format!("p{n}"))).unwrap();
                h.edit("shop", &format!("p{}", n - 1), "off");
            }
            h.server.delete("pods", "shop", "p4").unwrap();
            h.agree().await;
            assert_eq!(
                (h.gone, h.state.borrow().listings),
                (1, 1),
                "{how:?} after {events}: no listing is needed"
            );
        }
    }
}

#[tokio::test]
async fn listings_cut_short_remove_nobody() {
    let mut h = Harness::with(pods(10)).await;
    h.synced().await;
    h.watching().await;
    for _ in 0..5 {
        h.server.inject(Fault::cut_after(4, Cut::Abrupt).on("watch", "pods"));
    }
    h.server.expire_watches();
    h.until("the listing that was not cut", |h| h.synced == 2).await;
    assert_eq!((h.known.len(), h.gone), (10, 0));
}

#[tokio::test]
async fn refusals_are_tried_again_and_counted() {
    for (code, reason) in
        [(429, "too_many_requests"), (500, "server_error"), (503, "server_error"), (504, "timeout")]
    {
        let server = ApiServer::start().unwrap();
        server.create(pod("shop", "a")).unwrap();
        // At the start, and again at the next watch.
        server.inject(Fault::answer(code).on("watch", "pods").times(3));
        let mut h = Harness::start(server, patience()).await;
        h.synced().await;
        assert_eq!(h.errors(reason), 3, "{code}");
        h.watching().await;
        h.server.inject(Fault::answer(code).on("watch", "pods").times(2));
        h.server.cut_watches(Cut::Clean);
        h.until("the refusals", |h| h.errors(reason) == 5).await;
        h.edit("shop", "a", "off");
        h.agree().await;
        assert_eq!((h.errors(reason), h.gone, h.state.borrow().listings), (5, 0, 1), "{code}");
        assert!(h.state.borrow().connected);
    }
}

#[tokio::test]
async fn a_server_that_wants_to_be_left_alone_is() {
    let server = ApiServer::start().unwrap();
    server.inject(Fault::answer(429).retry_after(2).on("watch", "pods"));
    let patience = Patience { pauses: (Duration::from_millis(5), Duration::from_secs(30)), ..patience() };
    let mut h = Harness::start(server, patience).await;
    h.until("the refusal", |h| h.errors("too_many_requests") == 1).await;
    let refused = tokio::time::Instant::now();
    h.until("the next try", |h| h.server.count("watch", "pods") == 2).await;
    assert!(refused.elapsed() > Duration::from_secs(1), "{:?}", refused.elapsed());
}

#[tokio::test]
async fn slow_silent_and_senseless_answers() {
    let server = ApiServer::start().unwrap();
    server.create(pod("shop", "a")).unwrap();
    server.inject(Fault::delay(Duration::from_millis(300)).on("*", "*").times(2));
    server.inject(Fault::garbage().on("watch", "pods"));
    server.inject(Fault::drop_connection().on("watch", "pods"));
    server.inject(Fault::hang().on("watch", "pods"));
    let patience = Patience { answer: Duration::from_secs(1), ..patience() };
    let mut h = Harness::start(server, patience).await;
    h.synced().await;
    assert!(h.errors("unreachable") >= 1 && h.gone == 0);
}

#[tokio::test]
async fn a_watch_that_says_nothing_any_more_is_replaced() {
    let server = ApiServer::start().unwrap();
    server.create(pod("shop", "a")).unwrap();
    let patience = Patience { silence: Duration::from_secs(1), ..patience() };
    let mut h = Harness::start(server, patience).await;
    h.synced().await;
    h.watching().await;
    h.server.inject(Fault::stale().on("watch", "pods"));
    h.server.cut_watches(Cut::Clean);
    h.until("the watch that says nothing", |h| h.server.count("watch", "pods") == 2).await;
    h.edit("shop", "a", "off");
    h.agree().await;
    assert!(h.errors("silent") >= 1 && h.state.borrow().listings == 1);
}

#[tokio::test]
async fn the_server_is_away_and_comes_back_with_another_set_of_pods() {
    let mut h = Harness::with(pods(10)).await;
    h.synced().await;
    h.watching().await;
    h.server.stop();
    h.until("several tries", |h| h.errors("unreachable") >= 5).await;
    assert!(!h.state.borrow().connected && h.state.borrow().synced);
    h.server.delete("pods", "shop", "p1").unwrap();
    h.server.create(pod("shop", "new")).unwrap();
    h.server.delete("pods", "shop", "p2").unwrap();
    h.server.create(pod("shop", "p2")).unwrap();
    // Its memory of what happened meanwhile is gone as well: only a listing tells.
    h.server.compact();
    h.until("more tries", |h| h.errors("unreachable") >= 10).await;
    assert_eq!((h.known.len(), h.gone), (10, 0), "nobody is gone because nobody can be asked");
    h.server.restart().unwrap();
    h.agree().await;
    assert_eq!(h.gone, 2, "the deleted one, and the one made again");
    h.until("the word", |h| h.synced == 2 && h.state.borrow().connected).await;
}

#[tokio::test]
async fn a_server_that_is_away_at_the_start() {
    let server = ApiServer::start().unwrap();
    server.create(pod("shop", "a")).unwrap();
    server.stop();
    let mut h = Harness::start(server, patience()).await;
    h.until("tries", |h| h.errors("unreachable") >= 3).await;
    assert_eq!((h.upserts, h.synced), (0, 0));
    let error = h.state.borrow().last_error.clone().unwrap();
    assert!(error.contains("does not answer") && error.contains("onnection refused"), "{error}");
    h.server.restart().unwrap();
    h.synced().await;
}

#[tokio::test]
async fn a_server_that_lags_behind_is_not_believed() {
    let mut h = Harness::with(pods(3)).await;
    h.synced().await;
    h.watching().await;
    // Restored from a backup: it will never reach the version that was seen.
    h.server.inject(Fault::answer(504).on("watch", "pods"));
    h.server.expire_watches();
    h.until("the listing", |h| h.synced == 2).await;
    let versions: Vec<String> = h
        .server
        .matching("watch", "pods")
        .iter()
        .filter(|watch| parameter(&watch.query, "sendInitialEvents").is_some())
        .map(|watch| parameter(&watch.query, "resourceVersion").unwrap_or_default())
        .collect();
    let empty: Vec<bool> = versions.iter().map(String::is_empty).collect();
    assert_eq!(
        empty,
        [true, false, true],
        "none yet; not older than what was seen; the newest it has: {versions:?}"
    );
    assert_eq!(h.gone, 0);
}

#[tokio::test]
async fn without_permission_the_message_names_verb_resource_and_rule() {
    let server = ApiServer::start().unwrap();
    server.create(pod("shop", "a")).unwrap();
    server.deny("*", "pods");
    let mut h = Harness::start(server, patience()).await;
    h.until("refusals", |h| h.errors("forbidden") >= 2).await;
    let error = h.state.borrow().last_error.clone().unwrap();
    for words in ["watch pods (403)", "apiGroups: [\"\"], resources: [pods], verbs: [list, watch]"] {
        assert!(error.contains(words), "{words} in {error}");
    }
    assert!(!h.state.borrow().connected);
    h.server.allow_all();
    h.synced().await;

    // Permission taken away while all is known: nothing is forgotten.
    h.watching().await;
    h.server.deny("*", "pods");
    h.server.cut_watches(Cut::Clean);
    h.until("the refusal", |h| !h.state.borrow().connected).await;
    assert_eq!((h.names(), h.gone), (vec!["shop/a".to_owned()], 0));
    h.server.inject(Fault::answer(401).on("watch", "pods"));
    h.server.allow_all();
    h.until("the other refusal", |h| h.errors("unauthorized") == 1).await;
    h.edit("shop", "a", "off");
    h.agree().await;
}
