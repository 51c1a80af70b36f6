//! What the agent knows, as other tasks see it: a value that is replaced whole, never changed.

use std::collections::HashMap;
use std::sync::Arc;

use nobypass_common::abi::PodCounters;
use nobypass_common::ids::{COUNTERS, PodKind};

use super::effective::Traffic;
use super::mode::Choice;
use crate::mesh::{Profiles, Unsupported};
use crate::pods::model::PodFacts;
use crate::pods::{ContainerId, PodUid};

/// One pod with a cgroup on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodView {
    /// Its UID.
    pub uid: PodUid,
    /// Namespace; empty while only the cgroup is known.
    pub namespace: Box<str>,
    /// Name; likewise.
    pub name: Box<str>,
    /// The mesh profile; empty if none.
    pub mesh: Box<str>,
    /// Its cgroup id.
    pub cgroup: u64,
    /// What its entry says.
    pub kind: PodKind,
    /// Why.
    pub reason: &'static str,
    /// Its connections cannot be seen (gVisor, Kata), or not be judged.
    pub unsupported: Option<Unsupported>,
    /// The proxy's container, and its cgroup id once it has one.
    pub proxy: Option<ContainerId>,
    /// See `proxy`; 0 while unknown.
    pub proxy_cgroup: u64,
    /// Families that the mesh redirects: IPv4, IPv6.
    pub families: [bool; 2],
    /// Annotations that could not be taken as they are.
    pub problems: Vec<String>,
    /// Names of containers by cgroup id.
    pub containers: Vec<(u64, Box<str>)>,
    /// The sandbox; a pod may get another one.
    pub sandbox: Option<ContainerId>,
    /// The mode and where it comes from, as soon as the pod is classified.
    pub choice: Option<Choice>,
    /// Other things that hold for it, likewise.
    pub traffic: Option<Traffic>,
    /// All that the source knows; `None` while only the cgroup is known.
    pub facts: Option<Arc<PodFacts>>,
}

impl PodView {
    /// The same without the facts that it was made of.
    pub(super) fn without_facts(&self) -> Self {
        Self { facts: None, ..self.clone() }
    }

    /// Path of its network namespace, as the container runtime says it, in the runtime's mount namespace.
    pub fn netns(&self) -> Option<&str> {
        self.facts.as_ref()?.sandbox.as_ref()?.netns.as_deref()
    }

    /// A pod of which only the cgroup is known.
    pub fn unknown(uid: PodUid, cgroup: u64) -> Self {
        Self {
            uid,
            namespace: "".into(),
            name: "".into(),
            mesh: "".into(),
            cgroup,
            kind: PodKind::Unknown,
            reason: "not_classified",
            unsupported: None,
            proxy: None,
            proxy_cgroup: 0,
            families: [false; 2],
            problems: Vec::new(),
            containers: Vec::new(),
            sandbox: None,
            choice: None,
            traffic: None,
            facts: None,
        }
    }
}

/// Counters of pods that are gone, by namespace and mesh.
pub type Ledger = HashMap<(Box<str>, Box<str>), [u64; COUNTERS]>;

/// Everything at one moment.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Grows with each change.
    pub version: u64,
    /// By cgroup id.
    pub pods: Arc<HashMap<u64, Arc<PodView>>>,
    /// What dead pods counted. Counters never go backwards when a pod dies.
    pub ledger: Arc<Ledger>,
    /// The profiles in use.
    pub profiles: Arc<Profiles>,
    /// The pod source has told all it knows once.
    pub synced: bool,
    /// The policy that this was decided by.
    pub policy_revision: u64,
    /// How often a pod asked for a mode that it is not allowed to choose.
    pub overrides_refused: u64,
    /// Entries that another writer had changed meanwhile.
    pub conflicts: u64,
    /// Entries that the maps had no room for.
    pub without_entry: u64,
}

/// Adds a pod's counters to the ledger, and gives the new sums.
pub fn fold(ledger: &mut Ledger, namespace: &str, mesh: &str, counters: &PodCounters) -> [u64; COUNTERS] {
    let sums = ledger.entry((namespace.into(), mesh.into())).or_insert([0; COUNTERS]);
    for (sum, count) in sums.iter_mut().zip(counters.count) {
        *sum = sum.saturating_add(count);
    }
    *sums
}
