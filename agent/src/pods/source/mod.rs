//! Where facts about pods come from, and how they arrive.

pub mod cri;
pub mod kube;
pub mod metrics;

use std::sync::Arc;

use tokio::sync::watch;

use super::{
    ContainerId, PodUid,
    model::{Keys, PodFacts, Wanted},
};
use crate::cgroup::{model::CgroupEventKind, path::PodCgroup};

/// What a source says. A pod that did not change is not mentioned again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodUpdate {
    /// A pod is new, or known differently.
    Upsert(Arc<PodFacts>),
    /// A pod is no more. Never sent only because the source cannot be reached.
    Gone(PodUid),
    /// From here on other labels and annotations are kept than these. Only a source that cannot tell annotations of former
    /// times says so.
    Rekeyed(Arc<Keys>),
    /// All that exists has been sent; once for each time that the source was (re)connected.
    Synced,
}

/// Waits until other facts are wanted; for ever once nobody can want any.
async fn other_wanted(wanted: &mut watch::Receiver<Wanted>) {
    if wanted.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// A hint that something changed, so that a source looks at once and not at its next round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nudge {
    /// What happened to the cgroup.
    pub kind: CgroupEventKind,
    /// The pod.
    pub uid: PodUid,
    /// The container; `None` for the pod's own cgroup.
    pub container: Option<ContainerId>,
}

impl Nudge {
    /// The hint that a cgroup event gives; `None` for cgroups inside a container, which change nothing.
    #[must_use]
    pub fn new(kind: CgroupEventKind, cgroup: PodCgroup) -> Option<Self> {
        let PodCgroup { uid, container, pod_component: _, nested, misplaced: _ } = cgroup;
        (!nested).then_some(Self { kind, uid, container })
    }
}
