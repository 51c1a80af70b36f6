//! From facts about pods to entries of the `POLICY` map.
//!
//! [`registry`] joins cgroups with pods, [`desired`] decides, both pure; [`keeper`] is the one task that writes
//! the maps. What it knows is published as a [`snapshot::Snapshot`] before the programs act on it, so that an
//! event always finds its pod.

pub mod desired;
pub mod exempt;
pub mod keeper;
pub mod refuse;
pub mod registry;
pub mod snapshot;

pub use keeper::Keeper;
pub use snapshot::{PodView, Snapshot};
