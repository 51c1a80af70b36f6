//! The test API server answers a script of requests as the real one did, whose transcript is kept.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

#[path = "both/conformance.rs"]
mod conformance;
#[path = "both/script.rs"]
mod script;

use std::sync::Arc;

use kube::{Client, Config};
use nobypass_testkit::apiserver::{self, ApiServer};

#[tokio::test]
async fn the_test_server_answers_as_a_real_one() {
    let server = Arc::new(ApiServer::start().unwrap());
    server.create(apiserver::namespace("conformance")).unwrap();
    let compacted = Arc::clone(&server);
    let mut config = Config::new(server.url().parse().unwrap());
    // The transcript shows what the server answers, not what the client makes of it.
    config.default_retry = false;
    let given = conformance::Given {
        client: Client::try_from(config).unwrap(),
        namespace: "conformance".into(),
        node: "script-node".into(),
        forget: Box::new(move || compacted.compact()),
    };
    let transcript = conformance::run(given).await;
    conformance::compare(&transcript);
}
