//! nobypass keeps service-mesh pods from talking around their proxy.
//!
//! The binary is `main.rs`; this library exists so that integration tests and benchmarks reach the modules.
//! ARCHITECTURE.md shows how the modules relate; [`app`] alone joins them.

pub mod cli;
pub mod cni;
pub mod sys;
