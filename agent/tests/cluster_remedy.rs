//! Remedies against a real kube-apiserver.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the helpers of a test may panic as the test may"
)]

#[path = "both/remedy.rs"]
mod remedy;
#[path = "both/wire.rs"]
mod wire;

fn server() -> nobypass_testkit::servers::Server {
    nobypass_testkit::servers::Server::real().unwrap()
}
