//! The agent's own question to a pod's network namespace: would a new connection be redirected?
//!
//! [`helper`] asks it, in a process of its own; [`client`] starts that and passes questions on; [`schedule`] knows when.

pub mod answer;
pub mod ask;
pub mod client;
pub mod conntrack;
pub mod failure;
pub mod handle;
pub mod helper;
pub mod metrics;
pub mod packet;
pub mod routes;
pub mod schedule;
pub mod target;
pub mod validate;
pub mod wire;

pub use answer::Answer;
pub use failure::Failure;
pub use handle::{Answers, Handle, Probed};
pub use packet::PacketSockets;
pub use target::Target;
