//! The one task that writes the pods' maps.

mod say;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use nobypass_common::abi::{LedgerKey, LedgerSums, PodPolicy};
use nobypass_common::ids::PodKind;
use tokio::sync::{mpsc, watch};

use super::desired::{self, Wishes};
use super::devices;
use super::enrol::Enrolling;
use super::exempt::{KernelExemptions, Sets, entries, is_fit};
use super::mode::{self, Choice};
use super::refuse::{self, Refuse};
use super::registry::{Change, PodCgroup, Registry};
use super::reload::PolicyState;
use super::snapshot::{Ledger, PodView, Snapshot, fold};
use super::view::{mode_problems, name, padded, remembered, text, view};
use crate::bpf::{BpfError, Maps};
use crate::cgroup::model::{CgroupEvent, CgroupEventKind};
use crate::cgroup::parents::PodParent;
use crate::cgroup::scan::scan;
use crate::cgroup::stream::{CgroupReceiver, Item};
use crate::mesh::{Membership, recognise};
use crate::pods::PodUid;
use crate::pods::source::PodUpdate;
use crate::sys::clock::monotonic_ns;

/// How often all pod cgroups are scanned, whatever the events said.
const RESCAN: Duration = Duration::from_secs(30);

/// What is left to do for a pod: its cgroup, its entry, and the set that nobody uses any more then.
type Prepared = (u64, PodPolicy, Option<(u32, KernelExemptions)>);

/// See the module.
#[derive(Debug)]
pub struct Keeper {
    maps: Maps,
    parents: Vec<PodParent>,
    policy: watch::Receiver<PolicyState>,
    registry: Registry,
    sets: Sets,
    /// Sets that the maps had no room for.
    unfit: HashSet<u32>,
    /// What each pod's entry says, and the exemptions that it holds on to.
    written: HashMap<u64, (PodPolicy, KernelExemptions)>,
    views: HashMap<u64, Arc<PodView>>,
    ledger: Ledger,
    /// Families of pods that are refused at once, by cgroup id.
    refused: HashMap<u64, [bool; 2]>,
    enrolling: Enrolling,
    revision: u64,
    state: Snapshot,
    out: watch::Sender<Snapshot>,
}

impl Keeper {
    /// Takes over what an earlier agent left in the maps.
    pub fn new(
        maps: Maps,
        parents: Vec<PodParent>,
        mut policy: watch::Receiver<PolicyState>,
    ) -> (Self, watch::Receiver<Snapshot>) {
        let earlier = maps.policies();
        let last_set = earlier.iter().map(|(_, policy)| policy.exempt_set).max().unwrap_or(0);
        let revision = earlier.iter().map(|(_, policy)| policy.revision).max().unwrap_or(0);
        let mut ledger = Ledger::new();
        for (LedgerKey { namespace, mesh }, LedgerSums { count }) in maps.ledger() {
            ledger.insert((text(&namespace).into(), text(&mesh).into()), count);
        }
        let (profiles, policy_revision) = {
            let now = policy.borrow_and_update();
            (Arc::clone(&now.profiles), now.revision)
        };
        let state =
            Snapshot { ledger: Arc::new(ledger.clone()), profiles, policy_revision, ..Snapshot::default() };
        let (out, snapshots) = watch::channel(state.clone());
        let keeper = Self {
            maps,
            parents,
            policy,
            registry: Registry::default(),
            sets: Sets::starting_after(last_set),
            unfit: HashSet::new(),
            written: HashMap::new(),
            views: HashMap::new(),
            ledger,
            refused: HashMap::new(),
            enrolling: Enrolling::default(),
            revision,
            state,
            out,
        };
        (keeper, snapshots)
    }

    /// Works until a source ends, which is an error of the whole agent.
    ///
    /// # Errors
    /// What failed for good. A full map is not among it: that is counted and shown.
    pub async fn run(
        mut self,
        mut cgroups: CgroupReceiver,
        mut pods: mpsc::Receiver<PodUpdate>,
        mut refusals: mpsc::Receiver<Refuse>,
    ) -> Result<(), BpfError> {
        let mut rescan = tokio::time::interval(RESCAN);
        rescan.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                item = cgroups.recv() => match item {
                    Some(Item::Event(event)) => self.cgroup(&event)?,
                    Some(Item::Rescan) => self.rescan()?,
                    None => return Ok(()),
                },
                update = pods.recv() => match update {
                    Some(update) => self.pod(update)?,
                    None => return Ok(()),
                },
                Some(refuse) = refusals.recv() => self.refuse(refuse),
                changed = self.policy.changed() => match changed {
                    Ok(()) => self.decide_anew()?,
                    Err(_) => return Ok(()),
                },
                () = until(self.enrolling.next()) => self.decide_on_enrolled()?,
                _ = rescan.tick() => self.rescan()?,
            }
        }
    }

    /// The policy changed: every pod may need another entry.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    fn decide_anew(&mut self) -> Result<(), BpfError> {
        {
            let policy = self.policy.borrow_and_update();
            self.state.policy_revision = policy.revision;
            self.state.profiles = Arc::clone(&policy.profiles);
        }
        let pods: Vec<Change> = self.registry.with_cgroup().map(|(uid, _, _)| Change::Pod(uid)).collect();
        self.publish();
        self.apply(pods)
    }

    /// Some pods' meshes have been waited for long enough.
    fn decide_on_enrolled(&mut self) -> Result<(), BpfError> {
        let over: Vec<u64> = self.enrolling.over(monotonic_ns()).collect();
        over.iter().for_each(|cgroup| self.enrolling.forget(*cgroup));
        let uid = |cgroup| Some(Change::Pod(self.views.get(cgroup)?.uid));
        let pods = over.iter().filter_map(uid).collect();
        self.apply(pods)
    }

    fn cgroup(&mut self, event: &CgroupEvent) -> Result<(), BpfError> {
        let CgroupEvent { kind, id, level, path } = event;
        let Some(parent) = self.parents.iter().find(|parent| is_below(&parent.rel, path)) else {
            return Ok(());
        };
        let changes = match kind {
            CgroupEventKind::Made => self.registry.made(&parent.rel, path, *id, *level),
            CgroupEventKind::Removed => self.registry.removed(&parent.rel, path, *id),
        };
        self.apply(changes)
    }

    fn pod(&mut self, update: PodUpdate) -> Result<(), BpfError> {
        let changes = match update {
            PodUpdate::Upsert(facts) => self.registry.facts(facts),
            PodUpdate::Gone(uid) => {
                self.registry.facts_gone(uid);
                Vec::new()
            }
            // For who remembers what was told by the old keys.
            PodUpdate::Rekeyed(_) => Vec::new(),
            PodUpdate::Synced => {
                if !self.state.synced {
                    self.state.synced = true;
                    self.maps.drop_unused_exempt_sets()?;
                    self.publish();
                }
                Vec::new()
            }
        };
        self.apply(changes)
    }

    /// Scans everything, and drops entries of cgroups that are not there any more.
    ///
    /// The map is listed before the scan: a pod made in between is in the scan but not in the list.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn rescan(&mut self) -> Result<(), BpfError> {
        let listed: Vec<u64> = self.maps.policies().into_iter().map(|(id, _)| id).collect();
        let counted = self.maps.counted();
        let named = self.maps.named();
        let mut scans = Vec::with_capacity(self.parents.len());
        for parent in &self.parents {
            match scan(parent) {
                Ok(found) => scans.push(found),
                Err(error) => {
                    // Nothing is dropped on the word of a failed scan.
                    tracing::warn!(%error, "cannot scan pod cgroups");
                    return Ok(());
                }
            }
        }
        let changes = self.registry.scanned(&scans);
        self.apply(changes)?;
        let live: HashSet<u64> = scans
            .iter()
            .flat_map(|scan| {
                scan.pods.iter().map(|pod| pod.dir.id).chain(scan.classes.iter().map(|class| class.id))
            })
            .collect();
        let stale: HashSet<u64> =
            listed.into_iter().chain(counted).chain(named).filter(|id| !live.contains(id)).collect();
        for id in stale {
            if !self.registry.knows(id) {
                self.retire(id)?;
            }
        }
        Ok(())
    }

    fn apply(&mut self, changes: Vec<Change>) -> Result<(), BpfError> {
        let mut pods: Vec<PodUid> = Vec::new();
        for change in changes {
            match change {
                Change::Class(id, level) => self.class(id, level),
                Change::Removed(id) => self.retire(id)?,
                Change::Pod(uid) if pods.contains(&uid) => {}
                Change::Pod(uid) => pods.push(uid),
            }
        }
        let mut ready = Vec::with_capacity(pods.len());
        for uid in pods {
            ready.extend(self.prepare(uid)?);
        }
        if ready.is_empty() {
            return Ok(());
        }
        // First everybody can tell whose cgroup it is, then the programs act on it.
        self.publish();
        let mut stale = Vec::new();
        for (cgroup, policy, released) in ready {
            if !self.write(cgroup, policy) {
                stale.push(cgroup);
            }
            if let Some((set, exemptions)) = released {
                self.remove_set(set, &exemptions);
            }
        }
        self.decide_again(&stale)
    }

    /// Entries that somebody else wrote later than this decided on them. What is known now is newer than either.
    fn decide_again(&mut self, cgroups: &[u64]) -> Result<(), BpfError> {
        for cgroup in cgroups {
            self.state.conflicts += 1;
            tracing::warn!(cgroup, "somebody else wrote a pod's entry, deciding on it anew");
            if let Some((written, _)) = self.written.get_mut(cgroup) {
                // Nothing that is decided is the same as this.
                written.kind = u32::MAX;
            }
            let Some(uid) = self.views.get(cgroup).map(|view| view.uid) else { continue };
            if let Some((id, policy, released)) = self.prepare(uid)? {
                self.write(id, policy);
                if let Some((set, exemptions)) = released {
                    self.remove_set(set, &exemptions);
                }
            }
        }
        if !cgroups.is_empty() {
            self.publish();
        }
        Ok(())
    }

    fn class(&mut self, id: u64, level: u32) {
        let known = self.maps.policy(id).is_some_and(|policy| policy.kind == PodKind::Qos.code());
        if !known {
            let policy = PodPolicy { kind: PodKind::Qos.code(), level, ..PodPolicy::default() };
            if let Err(error) = self.maps.set_policy(id, &policy) {
                self.count_without_entry(&error);
            }
        }
    }

    /// Decides on a pod and prepares its view and exemptions. The result is what is left to write: cgroup, entry,
    /// and the set that nobody uses any more then.
    fn prepare(&mut self, uid: PodUid) -> Result<Option<Prepared>, BpfError> {
        let Some(entry) = self.registry.get(uid) else { return Ok(None) };
        let Some(PodCgroup { id, level }) = entry.cgroup.clone() else { return Ok(None) };
        let since_ns = self.maps.policy(id).map_or_else(monotonic_ns, |policy| policy.since_ns);
        let Some(facts) = &entry.facts else {
            if !self.views.contains_key(&id) {
                self.views
                    .insert(id, Arc::new(remembered(uid, id, self.maps.policy(id), self.maps.name(id))));
            }
            let policy = PodPolicy { level, since_ns, ..PodPolicy::default() };
            // What an earlier agent wrote of this pod holds until the source has spoken.
            if let Err(error) = self.maps.add_policy(id, &policy) {
                self.count_without_entry(&error);
            }
            self.publish();
            return Ok(None);
        };
        let (profiles, policy) = {
            let now = self.policy.borrow();
            (Arc::clone(&now.profiles), Arc::clone(&now.effective))
        };
        let mut membership = recognise(facts, profiles.as_slice());
        let before = self.views.get(&id).map(Arc::as_ref);
        let meshed = match &mut membership {
            Membership::Meshed(meshed) => Some(&mut **meshed),
            _ => None,
        };
        let waits = self.enrolling.waits(id, before, facts, meshed.as_deref(), monotonic_ns());
        if let Some(meshed) = meshed {
            meshed.is_enrolling = waits;
        }
        let mut view = view(uid, id, facts, entry, &membership);
        let choice = mode::choose(facts, &policy, view.unsupported);
        let traffic = policy.traffic(&facts.namespace, facts.namespace_labels.as_ref());
        let wishes = Wishes::new(traffic, &choice);
        view.problems.extend(mode_problems(&choice));
        (view.choice, view.traffic) = (Some(choice), Some(traffic));
        let of_mesh = desired::exemptions(&membership);
        let devices = devices::indices(facts, &of_mesh.devices);
        let exemptions = KernelExemptions { of_mesh, devices };
        let held = self.written.get(&id).map(|(_, held)| held.clone());
        let (set, released) = if held.as_ref() == Some(&exemptions) {
            (self.written.get(&id).map_or(0, |(policy, _)| policy.exempt_set), None)
        } else {
            let (set, new) = self.sets.acquire(&exemptions);
            if new {
                self.write_set(set, &exemptions);
            }
            let set = if self.unfit.contains(&set) { 0 } else { set };
            (set, held.and_then(|held| Some((self.release_set(&held)?, held))))
        };
        let none = KernelExemptions::default();
        let exempt = if set == 0 { (0, &none) } else { (set, &exemptions) };
        if set == 0 && exemptions != none {
            view.problems.push("no room in the kernel for its exemptions: nothing is exempt".to_owned());
        }
        let mut policy = desired::policy(&membership, level, since_ns, view.proxy_cgroup, exempt, wishes);
        policy.flags |= refuse::flags(&self.refused, id, &policy);
        let same_view = self.views.get(&id).is_some_and(|old| **old == view);
        let same_policy = self
            .written
            .get(&id)
            .is_some_and(|(old, _)| PodPolicy { revision: 0, ..*old } == PodPolicy { revision: 0, ..policy });
        if same_view && same_policy {
            return Ok(None);
        }
        let before = self.views.insert(id, Arc::new(view.clone()));
        if same_policy && before.as_ref().is_some_and(|before| before.without_facts() == view.without_facts())
        {
            // News that changes nothing here, but for those who look at the facts.
            self.publish();
            return Ok(None);
        }
        tracing::info!(
            namespace = %view.namespace, pod = %view.name, mesh = %view.mesh, kind = view.kind.label(),
            reason = view.reason, cgroup = id, proxy_cgroup = view.proxy_cgroup,
            mode = view.choice.as_ref().map_or("", |choice| choice.mode.label()), "pod classified"
        );
        self.tell_problems(before.as_deref(), &view);
        self.written.insert(id, (policy, exemptions));
        Ok(Some((id, policy, released)))
    }

    fn refuse(&mut self, refuse: Refuse) {
        if let Some(policy) = refuse::change(&mut self.refused, &mut self.maps, &refuse) {
            self.written.entry(refuse.cgroup).and_modify(|(written, _)| written.flags = policy.flags);
            self.write(refuse.cgroup, policy);
        }
        // Nobody waiting is no error.
        let _ = refuse.done.map(|done| done.send(()));
    }

    /// Writes an entry, unless a newer one is there: false, and the next write goes beyond that.
    fn write(&mut self, id: u64, policy: PodPolicy) -> bool {
        if let Some(there) =
            self.maps.policy(id).map(|there| there.revision).filter(|there| *there > self.revision)
        {
            self.revision = there;
            return false;
        }
        self.revision += 1;
        let policy = PodPolicy { revision: self.revision, ..policy };
        if let Err(error) = self.maps.set_policy(id, &policy) {
            self.count_without_entry(&error);
            return true;
        }
        if let Some(view) = self.views.get(&id)
            && let Err(error) = self.maps.set_name(id, &name(view))
        {
            tracing::warn!(%error, "cannot keep a pod's name for `nobypass status` without an agent");
        }
        true
    }

    /// Writes a set; whole or not at all, because half a list of what is redirected would exempt the other half.
    fn write_set(&mut self, set: u32, exemptions: &KernelExemptions) {
        let all = entries(set, exemptions);
        if !is_fit(&all) {
            tracing::error!(
                set,
                networks = all.cidrs.len(),
                ports = all.ports.len(),
                "a pod has more exemptions than one may have: nothing is exempt for it"
            );
            self.unfit.insert(set);
        } else if let Err(error) = self.maps.add_exemptions(&all) {
            tracing::error!(%error, set, "no room for a pod's exemptions: nothing is exempt for it");
            self.unfit.insert(set);
            self.remove_set(set, exemptions);
        }
    }

    fn remove_set(&mut self, set: u32, exemptions: &KernelExemptions) {
        if let Err(error) = self.maps.remove_exemptions(&entries(set, exemptions)) {
            tracing::warn!(%error, set, "cannot remove exemptions that no pod uses");
        }
    }

    fn release_set(&mut self, exemptions: &KernelExemptions) -> Option<u32> {
        let set = self.sets.release(exemptions)?;
        (!self.unfit.remove(&set)).then_some(set)
    }

    /// A cgroup is gone: keep its sums, tell everybody, then forget it.
    fn retire(&mut self, id: u64) -> Result<(), BpfError> {
        let mut sums = None;
        if let Some(counters) = self.maps.counters(id) {
            let (namespace, mesh) = match self.views.get(&id) {
                Some(view) => (view.namespace.clone(), view.mesh.clone()),
                None => self.maps.name(id).map_or_else(Default::default, |name| {
                    (text(&name.namespace).into(), text(&name.mesh).into())
                }),
            };
            let count = fold(&mut self.ledger, &namespace, &mesh, &counters);
            sums = Some((
                LedgerKey { namespace: padded(&namespace), mesh: padded(&mesh) },
                LedgerSums { count },
            ));
        }
        self.views.remove(&id);
        self.refused.remove(&id);
        self.enrolling.forget(id);
        self.publish();
        self.maps.forget(id)?;
        // In this order: an agent that dies in between loses a pod's counts, but never counts them twice.
        if let Some((key, sums)) = sums
            && let Err(error) = self.maps.set_ledger(&key, &sums)
        {
            tracing::warn!(%error, "sums of pods that are gone will not outlive this agent");
        }
        if let Some((_, exemptions)) = self.written.remove(&id)
            && let Some(set) = self.release_set(&exemptions)
        {
            self.remove_set(set, &exemptions);
        }
        Ok(())
    }

    fn publish(&mut self) {
        self.state.version += 1;
        self.state.pods = Arc::new(self.views.clone());
        self.state.ledger = Arc::new(self.ledger.clone());
        self.out.send_replace(self.state.clone());
    }
}

/// Until a time of `CLOCK_MONOTONIC` in ns; without one, for ever.
async fn until(at: Option<u64>) {
    match at {
        Some(at) => tokio::time::sleep(Duration::from_nanos(at.saturating_sub(monotonic_ns()))).await,
        None => std::future::pending().await,
    }
}

/// Whether `path` lies below `parent`, component-wise.
fn is_below(parent: &str, path: &str) -> bool {
    path.strip_prefix(parent).is_some_and(|rest| rest.starts_with('/'))
}
