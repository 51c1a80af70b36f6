//! The source of pods against the test API server.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "the helpers of a test may panic as the test may"
)]

#[path = "both/pods.rs"]
mod pods;

fn server() -> nobypass_testkit::servers::Server {
    nobypass_testkit::servers::Server::fake().unwrap()
}
