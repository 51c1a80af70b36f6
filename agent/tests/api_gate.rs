//! The gate's outputs against the test API server.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the helpers of a test may panic as the test may"
)]

#[path = "both/commands.rs"]
mod commands;
#[path = "both/gate.rs"]
mod gate;
#[path = "both/wire.rs"]
mod wire;

use std::time::Duration;

use gate::{Running, all, closed, open, says};
use serde_json::json;

fn server() -> nobypass_testkit::servers::Server {
    nobypass_testkit::servers::Server::fake().unwrap()
}

#[tokio::test]
async fn a_server_that_was_away_is_told_when_it_is_back() {
    let server = server();
    let running = Running::on(&server, json!([]), all(), open()).await;
    running.until("open", |node| says(node, true)).await;
    let fake = server.as_fake().unwrap();
    fake.stop();
    running.verdict.send_replace(closed());
    tokio::time::sleep(Duration::from_millis(200)).await;
    fake.restart().unwrap();
    running.until("closed", |node| says(node, false)).await;
}
