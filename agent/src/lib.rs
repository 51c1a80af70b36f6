//! nobypass keeps service-mesh pods from talking around their proxy.
//!
//! The binary is `main.rs`; this library exists so that integration tests and benchmarks reach the modules.
//! ARCHITECTURE.md shows how the modules relate; [`app`] alone joins them.

pub mod app;
pub mod backoff;
pub mod bpf;
pub mod cgroup;
pub mod cli;
pub mod cluster;
pub mod cni;
pub mod config;
pub mod detect;
pub mod explain;
pub mod mesh;
pub mod metrics;
pub mod node;
pub mod pods;
pub mod policy;
pub mod probe;
pub mod refuse;
pub mod remedy;
pub mod server;
pub mod status;
pub mod sys;
pub mod telemetry;
