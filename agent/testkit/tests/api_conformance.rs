//! The test API server answers a script of requests as the real one did, whose transcript is kept.

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
    let given = conformance::Given {
        client: Client::try_from(Config::new(server.url().parse().unwrap())).unwrap(),
        namespace: "conformance".into(),
        node: "conformance-node".into(),
        compact: Box::new(move || compacted.compact()),
    };
    let transcript = conformance::run(given).await;
    conformance::compare(&transcript);
}
