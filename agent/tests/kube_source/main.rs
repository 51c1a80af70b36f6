//! The source of pods at the API server, against a server that fails on demand.

#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

mod collection;
mod faults;
mod harness;
mod namespaces;
