//! Every kind of traffic against every way of redirecting and every mode: what the pod's counters say, what the
//! application saw, and what reached the outside. Then each policy on its own.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the helpers of a test may panic as the test may"
)]

#[path = "../support"]
mod support {
    #![allow(dead_code, reason = "each test target uses its part")]
    #![allow(clippy::expect_used, clippy::panic, reason = "the helpers of a test may panic as the test may")]
    pub mod agent;
    pub mod machine;
    pub mod mounts;
}

mod changes;
mod depths;
mod exemptions;
mod held;
mod inbound;
mod matrix;
mod policies;
mod refusals;
mod scene;
