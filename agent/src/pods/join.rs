//! Joins what the container runtime and the API server know of a pod. Pure.
//!
//! Intent comes from the API, identity and earliness from the runtime; either alone is enough. What joins is the UID
//! that the pod's cgroup carries: `metadata.uid`, for a static pod the hash of its manifest. A pod that was deleted and
//! made again under its old name is another pod.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::model::{Container, KeyValues, Keys, KnownBy, PodFacts, State};
use super::source::PodUpdate;
use super::{ContainerId, PodUid};

/// Who says something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The container runtime.
    Runtime,
    /// The API server.
    Api,
}

/// The pods, by the UID that their cgroup carries.
#[derive(Debug)]
pub struct Join {
    slots: HashMap<PodUid, Slot>,
    /// From `metadata.uid` to the slot, where they differ.
    mirrors: HashMap<PodUid, PodUid>,
    /// When this kernel started, in nanoseconds since 1970.
    booted_at: i64,
}

/// All that was said of one pod.
#[derive(Debug, Default)]
struct Slot {
    runtime: Option<Arc<PodFacts>>,
    /// Objects that claim this cgroup. One, but for mirrors: anybody who may make pods can claim a static pod's hash.
    claims: Vec<Arc<PodFacts>>,
    /// The object is gone, and the sandbox is not yet.
    departed: Option<Arc<PodFacts>>,
    sandbox: Option<ContainerId>,
    /// Without a runtime: that the API said that the sandbox is not there (any more).
    interrupted: bool,
    generation: u32,
    /// Annotations when the sandbox was made, as far as the API alone can tell.
    at_start: Option<KeyValues>,
    /// Other annotations are kept by now than these, of which `at_start` is.
    kept: Option<Arc<Keys>>,
    sent: Option<Arc<PodFacts>>,
}

impl Join {
    /// Nothing known. `booted_at`: when this kernel started, in nanoseconds since 1970.
    #[must_use]
    pub fn new(booted_at: i64) -> Self {
        Self { slots: HashMap::new(), mirrors: HashMap::new(), booted_at }
    }

    /// Pods known.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether none are.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// What follows from a source's word. [`PodUpdate::Gone`] names the UID that the cgroup carries.
    /// [`PodUpdate::Synced`] passes as it is.
    pub fn update(&mut self, origin: Origin, update: PodUpdate) -> Vec<PodUpdate> {
        match update {
            PodUpdate::Synced => vec![PodUpdate::Synced],
            PodUpdate::Rekeyed(before) => {
                for slot in self.slots.values_mut().filter(|slot| slot.at_start.is_some()) {
                    slot.kept.get_or_insert_with(|| Arc::clone(&before));
                }
                Vec::new()
            }
            PodUpdate::Upsert(pod) => {
                let key = pod.cgroup_uid();
                let mut left = None;
                if origin == Origin::Api {
                    let before = if key == pod.uid {
                        self.mirrors.remove(&pod.uid)
                    } else {
                        self.mirrors.insert(pod.uid, key)
                    };
                    // The object claims another cgroup than before.
                    left = before.filter(|before| *before != key);
                    if let Some(left) = left {
                        self.slot(left).claims.retain(|claim| claim.uid != pod.uid);
                    }
                }
                let slot = self.slot(key);
                match origin {
                    Origin::Runtime => slot.runtime = Some(pod),
                    Origin::Api => {
                        slot.departed = None;
                        match slot.claims.iter_mut().find(|claim| claim.uid == pod.uid) {
                            Some(claim) => *claim = pod,
                            None => slot.claims.push(pod),
                        }
                    }
                }
                left.into_iter().chain([key]).filter_map(|key| self.settle(key)).collect()
            }
            PodUpdate::Gone(uid) => {
                let key = match origin {
                    Origin::Runtime => uid,
                    Origin::Api => self.mirrors.remove(&uid).unwrap_or(uid),
                };
                if let Some(slot) = self.slots.get_mut(&key) {
                    match origin {
                        Origin::Runtime => slot.runtime = None,
                        Origin::Api => {
                            let at = slot.claims.iter().position(|claim| claim.uid == uid);
                            let gone = at.map(|at| slot.claims.swap_remove(at));
                            slot.departed =
                                gone.filter(|_| slot.claims.is_empty()).or_else(|| slot.departed.take());
                        }
                    }
                }
                self.settle(key).into_iter().collect()
            }
        }
    }

    fn slot(&mut self, key: PodUid) -> &mut Slot {
        self.slots.entry(key).or_default()
    }

    /// What is new of one pod.
    fn settle(&mut self, key: PodUid) -> Option<PodUpdate> {
        let slot = self.slots.get_mut(&key)?;
        let Some(facts) = slot.facts(self.booted_at) else {
            let told = slot.sent.is_some();
            self.slots.remove(&key);
            return told.then_some(PodUpdate::Gone(key));
        };
        if slot.sent.as_deref() == Some(&facts) {
            return None;
        }
        let facts = Arc::new(facts);
        slot.sent = Some(Arc::clone(&facts));
        Some(PodUpdate::Upsert(facts))
    }
}

impl Slot {
    /// All that is known, or `None` if nobody knows the pod any more.
    fn facts(&mut self, booted_at: i64) -> Option<PodFacts> {
        let api = self.claim();
        let departed = api.is_none();
        let api = api.or_else(|| self.departed.clone().filter(|_| self.runtime.is_some()));
        let mut facts = match (self.runtime.as_deref(), api.as_deref()) {
            (None, None) => return None,
            (Some(runtime), None) => runtime.clone(),
            (Some(runtime), Some(api)) => both(runtime, api, departed, booted_at),
            (None, Some(api)) => {
                let containers = api.containers.iter().map(|container| since(container, booted_at)).collect();
                PodFacts { containers, ..api.clone() }
            }
        };
        self.count_sandboxes(&facts);
        facts.generation = self.generation;
        if self.runtime.is_none() {
            self.keep_first_annotations(&mut facts);
        }
        Some(facts)
    }

    /// The object whose cgroup this is.
    fn claim(&self) -> Option<Arc<PodFacts>> {
        match self.runtime.as_deref() {
            Some(runtime) => self.claims.iter().find(|claim| {
                // Only a mirror's claim is its own word; the kubelet gives it the static pod's name.
                claim.static_pod_hash.is_none()
                    || (claim.namespace == runtime.namespace && claim.name == runtime.name)
            }),
            None => self.claims.iter().min_by_key(|claim| (claim.created_at, claim.uid)),
        }
        .cloned()
    }

    /// Another sandbox means another network namespace: what was seen before says nothing any more.
    fn count_sandboxes(&mut self, facts: &PodFacts) {
        let another = match facts.sandbox.as_ref().map(|sandbox| sandbox.id) {
            Some(id) => self.sandbox.replace(id).is_some_and(|before| before != id),
            // The runtime's word is better where there is one.
            None if self.sandbox.is_some() => false,
            None => match facts.ready_to_start {
                Some(false) => {
                    self.interrupted = true;
                    false
                }
                Some(true) => std::mem::take(&mut self.interrupted) && self.at_start.is_some(),
                None => false,
            },
        };
        if another {
            self.generation = self.generation.saturating_add(1);
            self.at_start = None;
        }
    }

    /// The API tells annotations as they are now. Until there is a sandbox these are what its plugins will read; from
    /// then on they are kept.
    fn keep_first_annotations(&mut self, facts: &mut PodFacts) {
        let has_sandbox = facts.ready_to_start == Some(true)
            || !facts.pod_ips.is_empty()
            || facts.containers.iter().any(|container| container.id.is_some());
        if has_sandbox && self.at_start.is_none() {
            self.at_start = Some(facts.annotations.clone());
        }
        if let (Some(at_start), Some(kept)) = (&mut self.at_start, self.kept.take()) {
            // What nobody kept has not been edited as far as anybody knows.
            let new = facts.annotations.iter().filter(|(key, _)| !kept.keeps(key));
            *at_start = at_start.iter().chain(new).collect();
        }
        if let Some(at_start) = &self.at_start
            && *at_start != facts.annotations
        {
            facts.edited_annotations = Some(std::mem::replace(&mut facts.annotations, at_start.clone()));
        }
    }
}

/// What two sources say of the same pod. `departed`: the object is gone.
fn both(runtime: &PodFacts, api: &PodFacts, departed: bool, booted_at: i64) -> PodFacts {
    let edited = (api.annotations != runtime.annotations).then(|| api.annotations.clone());
    PodFacts {
        static_pod_hash: api.static_pod_hash.or(runtime.static_pod_hash),
        // The runtime keeps what the kubelet gave it when the sandbox was made.
        annotations: runtime.annotations.clone(),
        edited_annotations: edited,
        sandbox: runtime.sandbox.clone(),
        containers: containers(runtime, api, booted_at),
        terminating: api.terminating || departed,
        known_by: KnownBy { runtime: true, api: !departed },
        ..api.clone()
    }
}

/// The specification's containers in its order, each with what the runtime has of it; then what only the runtime has.
fn containers(runtime: &PodFacts, api: &PodFacts, booted_at: i64) -> Vec<Container> {
    let start = runtime.sandbox.as_ref().map_or(booted_at, |sandbox| sandbox.created_at.max(booted_at));
    let mut all = Vec::with_capacity(api.containers.len().max(runtime.containers.len()));
    for wanted in &api.containers {
        let wanted = since(wanted, start);
        let before = all.len();
        all.extend(
            runtime
                .containers
                .iter()
                .filter(|have| have.name == wanted.name)
                .map(|have| specified(have, &wanted)),
        );
        // The API may know a run that the runtime was not asked about yet; or none exists.
        let known = |have: &Container| have.id == wanted.id;
        if all.len() == before || (wanted.id.is_some() && !all.iter().skip(before).any(known)) {
            all.push(wanted);
        }
    }
    let specified: HashSet<&str> = api.containers.iter().map(|container| &*container.name).collect();
    all.extend(runtime.containers.iter().filter(|have| !specified.contains(&*have.name)).cloned());
    all
}

/// A container of the runtime's, with what its specification says.
fn specified(have: &Container, wanted: &Container) -> Container {
    let same_run = have.id == wanted.id;
    let Container { role, run_as_user, run_as_group, last_exit_code, .. } = *wanted;
    Container {
        role,
        run_as_user,
        run_as_group,
        exit_code: have
            .exit_code
            .or_else(|| wanted.exit_code.filter(|_| same_run && have.state == State::Exited)),
        last_exit_code,
        restart_count: have.restart_count.max(if same_run { wanted.restart_count } else { 0 }),
        args: if wanted.args.is_empty() { &have.args } else { &wanted.args }.clone(),
        // The runtime's have no references any more (`valueFrom`).
        env: if have.env.is_empty() { &wanted.env } else { &have.env }.clone(),
        ..have.clone()
    }
}

/// A container of the API's without a run that is older than `start`: it was in an earlier sandbox, or before the
/// node was started anew, and the kubelet has not told yet. The API rounds down to seconds.
fn since(container: &Container, start: i64) -> Container {
    let mut container = container.clone();
    let seconds = |ns: i64| ns.div_euclid(1_000_000_000);
    let known = container.id.is_some() && container.created_at != 0;
    if known && seconds(container.created_at) < seconds(start) {
        container.id = None;
        container.state = State::Waiting;
        container.exit_code = None;
        container.created_at = 0;
    }
    container
}

#[cfg(test)]
mod tests;
