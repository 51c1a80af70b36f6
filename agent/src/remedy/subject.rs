//! Whom remedies are about: plain values.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::pods::{ContainerId, PodUid};

/// A pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its UID in the API.
    pub uid: PodUid,
    /// Namespace.
    pub namespace: Box<str>,
    /// Name.
    pub name: Box<str>,
    /// The mesh profile.
    pub mesh: Box<str>,
    /// Its cgroup id.
    pub cgroup: u64,
    /// Its sandbox, if the container runtime was asked.
    pub sandbox: Option<ContainerId>,
    /// Families that the mesh redirects: IPv4, IPv6.
    pub families: [bool; 2],
    /// Its connections are dropped meanwhile.
    pub blocked: bool,
}

/// What detection says of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// New connections bypass the proxy for want of redirection; the last one did then.
    Bypassing { last: Instant },
    /// They are redirected.
    Redirected,
    /// Neither is known.
    Unknown,
    /// Nothing here can see or mend it (gVisor, Kata, the node's network).
    Unsupported,
}

/// A pod and what is known of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// Who.
    pub pod: Arc<Pod>,
    /// What detection says.
    pub seen: Seen,
    /// It ends already.
    pub terminating: bool,
    /// It has the label of a bypassing pod.
    pub labelled: bool,
}

/// Who would replace the pod, as the API server says at the time of acting.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// Nobody.
    Bare,
    /// The kubelet, from a file: the API's object is only a mirror.
    Mirror,
    /// It ends already.
    Terminating,
    /// It has ended.
    Finished,
    /// This controller.
    Workload(Workload),
}

/// The controller of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Workload {
    /// Its kind, such as `ReplicaSet`.
    pub kind: String,
    /// Its UID.
    pub uid: String,
    /// `namespace/name`.
    pub name: String,
}

/// How a repair ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Repaired {
    /// The probe says that a new connection is redirected.
    Proven { took: Duration },
    /// The plugin was content, and a new connection is not redirected.
    Unproven { detail: String },
    /// The plugin was content, and nobody can say whether it helped.
    Unconfirmed { detail: String },
    /// The plugin failed.
    Failed { detail: String },
    /// The plugin did not end in time, and was killed.
    TimedOut { detail: String },
    /// It cannot be tried here.
    Impossible { detail: String },
    /// It cannot be tried at this moment: the node lacks what the plugin needs.
    NotYet { detail: String },
    /// The pod is no more.
    Gone,
}

/// How looking at the pod in the API ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inspected {
    /// This is who would replace it.
    Owner(Owner),
    /// There is no such pod any more.
    Gone,
    /// The permission is missing.
    Forbidden,
    /// The API server cannot be asked.
    Unavailable,
}

/// How an eviction ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Evicted {
    /// It was accepted.
    Done,
    /// A disruption budget, or the server's own limit, does not allow it now.
    Blocked { retry_after: Option<Duration> },
    /// There is no such pod any more.
    Gone,
    /// Another pod has the name now, or somebody changed it at the same moment.
    Conflict,
    /// The permission is missing.
    Forbidden,
    /// It failed for another reason.
    Failed { detail: String },
}

/// What an action led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Of [`super::machine::Action::Repair`].
    Repair(Repaired),
    /// Of [`super::machine::Action::Inspect`].
    Inspect(Inspected),
    /// Of [`super::machine::Action::Evict`].
    Evict(Evicted),
}
