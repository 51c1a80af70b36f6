//! What holds may change at any moment: the next connection obeys, and no count is lost.

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

#[path = "../kernel_matrix/scene.rs"]
#[allow(dead_code, reason = "each test target uses its part")]
mod scene;

mod file;
mod pods;
mod recognition;
mod series;
