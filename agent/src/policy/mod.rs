//! From facts about pods to entries of the `POLICY` map.
//!
//! [`registry`] joins cgroups with pods, [`desired`] decides, both pure; [`keeper`] is the one task that writes
//! the maps. What it knows is published as a [`snapshot::Snapshot`] before the programs act on it, so that an
//! event always finds its pod.

pub mod check;
pub mod desired;
pub mod devices;
pub mod effective;
pub mod enrol;
pub mod exempt;
pub mod file;
pub mod keeper;
pub mod mode;
pub mod refuse;
pub mod registry;
pub mod reload;
pub mod snapshot;
mod view;

pub use effective::Effective;
pub use keeper::Keeper;
pub use reload::PolicyState;
pub use snapshot::{PodView, Snapshot};
pub use view::text;
