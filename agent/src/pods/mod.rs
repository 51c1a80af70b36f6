//! What is known of the pods on this node: plain facts, and the sources they come from.

mod id;
pub mod join;
pub mod model;
pub mod source;

pub use id::{ContainerId, IdError, PodUid};
