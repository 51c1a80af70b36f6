//! The CNI half: keeps the mesh's entry in every network configuration that the container runtime could load.
//!
//! Knows neither BPF nor Kubernetes. [`plan`] decides from bytes, without I/O; everything else carries it out.

pub mod binaries;
pub mod desk;
pub mod discover;
pub mod document;
pub mod drop_in;
pub mod edit;
pub mod entry;
pub mod fight;
pub mod guard;
pub mod install;
pub mod kubeconfig;
pub mod layout;
pub mod listing;
pub mod lock;
pub mod memory;
pub mod metrics;
pub mod plan;
pub mod put;
pub mod refusal;
pub mod run;
pub mod runtime;
mod scan;
pub mod swap;
pub mod uninstall;
pub mod watch;
pub mod window;
