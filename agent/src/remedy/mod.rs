//! Remedies for pods that bypass their proxy: Event, label, repair in place, eviction.
//!
//! [`machine`] decides from plain values, [`budget`] keeps it from storms; the rest carries out what they decide.

pub mod action;
pub mod budget;
pub mod flags;
pub mod kube;
pub mod machine;
pub mod metrics;
pub mod policy;
pub mod proof;
pub mod repair;
pub mod say;
pub mod shell;
pub mod subject;
