//! What is known of one bypassing pod, and what comes next for it. Pure.

use std::sync::Arc;
use std::time::Instant;

use super::{Action, Pod, Stage, Workload};

/// The step that comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Repair,
    Evict,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    New,
    Announced(Instant),
    Later(Instant, Next),
    Repairing,
    Inspecting,
    Evicting(Workload),
    /// It is redirected since then.
    Healed(Instant),
    /// It was evicted, or is gone.
    Leaving,
    /// Nothing more can be done.
    Over,
}

impl Phase {
    pub(super) fn stage(&self) -> Stage {
        match self {
            Self::New | Self::Announced(_) | Self::Later(..) => Stage::Waiting,
            Self::Repairing => Stage::Repairing,
            Self::Inspecting | Self::Evicting(_) => Stage::Evicting,
            Self::Healed(_) => Stage::Healed,
            Self::Leaving => Stage::Leaving,
            Self::Over => Stage::Helpless,
        }
    }

    pub(super) fn is_busy(&self) -> bool {
        matches!(self, Self::Repairing | Self::Inspecting | Self::Evicting(_))
    }
}

#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) pod: Arc<Pod>,
    pub(super) phase: Phase,
    pub(super) labelled: bool,
    pub(super) repairs: u32,
    /// How often a repair could not be tried since the node lacked something.
    pub(super) waits: u32,
    pub(super) tries: u32,
    /// What it was put off for since it was last acted upon (bits of [`End`]), so that each is counted once.
    pub(super) put_off: u32,
    pub(super) queue: Vec<Action>,
}

impl Case {
    pub(super) fn new(pod: Arc<Pod>) -> Self {
        Self {
            pod,
            phase: Phase::New,
            labelled: false,
            repairs: 0,
            waits: 0,
            tries: 0,
            put_off: 0,
            queue: Vec::new(),
        }
    }
}
