//! What the machine asks for.

use std::sync::Arc;
use std::time::Duration;

use super::subject::{Pod, Workload};

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// An Event on pod and node. It comes before what it speaks of.
    Say(Saying),
    /// Set the label on the pod.
    Label,
    /// Remove it.
    Unlabel,
    /// Run the mesh's plugin, and ask the probe; answered by [`super::subject::Outcome::Repair`].
    Repair,
    /// Ask the API who would replace the pod; answered by [`super::subject::Outcome::Inspect`].
    Inspect,
    /// Evict it; answered by [`super::subject::Outcome::Evict`].
    Evict,
}

/// What an Event says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Saying {
    /// It bypasses its proxy.
    Detected { gate_open: bool },
    /// It is about to be repaired.
    Repairing,
    /// It would be.
    WouldRepair,
    /// The repair failed, and why.
    RepairFailed { detail: String, last: bool },
    /// It is redirected again.
    Repaired { took: Duration },
    /// The plugin ran well, and nobody can say whether that helped.
    Unconfirmed { detail: String },
    /// It is about to be evicted.
    Evicting { workload: Workload },
    /// It would be.
    WouldEvict { workload: Workload },
    /// Nothing more can be done, and what people can do.
    Helpless { why: &'static str },
}

/// What to do for one pod, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// The pod.
    pub pod: Arc<Pod>,
    /// The actions.
    pub actions: Vec<Action>,
}
