//! The node gate: tells the cluster when this node is safe for meshed pods.
//!
//! [`gate`] decides from plain values, [`desired`] compares that with the Node object; [`apply`] carries it out.

pub mod apply;
pub mod boot;
pub mod desired;
pub mod flags;
pub mod gate;
pub mod metrics;
pub mod object;
pub mod pods;
pub mod started;
pub mod withdraw;
