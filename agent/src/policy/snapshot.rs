//! What the agent knows, as other tasks see it: a value that is replaced whole, never changed.

use std::collections::HashMap;
use std::sync::Arc;

use nobypass_common::abi::PodCounters;
use nobypass_common::ids::{COUNTERS, PodKind};

use crate::mesh::Exemptions;
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
    /// Its connections cannot be seen (gVisor, Kata).
    pub unsupported: bool,
    /// The proxy's container, and its cgroup id once it has one.
    pub proxy: Option<ContainerId>,
    /// See `proxy`; 0 while unknown.
    pub proxy_cgroup: u64,
    /// Families that the mesh redirects: IPv4, IPv6.
    pub families: [bool; 2],
    /// Annotations that could not be taken as they are.
    pub problems: Vec<String>,
    /// Path of its network namespace, as the container runtime says it.
    pub netns: Option<Box<str>>,
    /// The proxy's user, if the mesh has one.
    pub proxy_uid: Option<u32>,
    /// What the mesh lets out.
    pub exemptions: Arc<Exemptions>,
    /// Names of containers by cgroup id.
    pub containers: Vec<(u64, Box<str>)>,
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
    /// The pod source has told all it knows once.
    pub synced: bool,
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
