//! What makes a refusal felt: a connection whose SYN was dropped fails in about a millisecond instead of after minutes,
//! and connections that are older than the programs are found.
//!
//! [`sockets`] is a thread of its own, since it enters pods' network namespaces.

pub mod diag;
pub mod metrics;
pub mod preexisting;
pub mod sockets;
