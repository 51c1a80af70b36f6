//! The task that keeps the pods' verdicts: it looks when something happens and on a slow timer, tells each change once
//! and publishes what is known.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nobypass_common::abi::PodCounters;
use tokio::sync::{broadcast, mpsc, watch};

use super::evidence::{Evidence, Family, Reason};
use super::recent::Recent;
use super::report::Report;
use super::state::{PodState, PodStates, Transition};
use super::verdict::PodVerdict;
use crate::bpf::Maps;
use crate::mesh::{Membership, Meshed, Profiles, recognise};
use crate::pods::PodUid;
use crate::policy::{PodView, Snapshot};
use crate::sys::clock::{monotonic_ns, monotonic_of};

/// How often all pods are looked at: a connection that is redirected reports itself to nobody.
const LOOK: Duration = Duration::from_secs(5);
/// Findings on their way.
const QUEUE: usize = 1024;

/// A sign of one pod. The UID goes with it, since an id of a cgroup may be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The pod.
    pub uid: PodUid,
    /// Its cgroup id.
    pub cgroup: u64,
    /// What was seen.
    pub evidence: Evidence,
}

/// See the module.
#[derive(Debug)]
pub struct Tracker {
    maps: Maps,
    states: HashMap<u64, PodState>,
    profiles: Arc<Profiles>,
    findings: mpsc::Receiver<Finding>,
    recent: Arc<Recent>,
    out: watch::Sender<PodStates>,
    version: u64,
}

/// What other tasks get of the tracker.
#[derive(Clone, Debug)]
pub struct Handle {
    /// What is known.
    pub states: watch::Receiver<PodStates>,
    /// For who looks at pods by other means. When it is full, whoever sends decides what may be lost.
    pub findings: mpsc::Sender<Finding>,
    /// The last reports of each meshed pod.
    pub recent: Arc<Recent>,
}

impl Tracker {
    /// A tracker that knows nothing yet.
    pub fn new(maps: Maps) -> (Self, Handle) {
        let (out, states) = watch::channel(PodStates::default());
        let (sender, findings) = mpsc::channel(QUEUE);
        let recent = Arc::<Recent>::default();
        let handle = Handle { states, findings: sender, recent: Arc::clone(&recent) };
        let profiles = Arc::default();
        (Self { maps, states: HashMap::new(), profiles, findings, recent, out, version: 0 }, handle)
    }

    /// Works until the keeper ends, which is an error of the whole agent.
    pub async fn run(
        mut self,
        mut snapshots: watch::Receiver<Snapshot>,
        mut reports: broadcast::Receiver<Arc<Report>>,
    ) {
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        snapshots.mark_changed();
        loop {
            tokio::select! {
                changed = snapshots.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let snapshot = snapshots.borrow_and_update().clone();
                    let changed = self.follow(&snapshot);
                    self.publish(changed);
                }
                Some(finding) = self.findings.recv() => {
                    let changed = self.take(&finding);
                    self.publish(changed);
                }
                report = reports.recv() => match report {
                    Ok(report) => {
                        let changed = self.report(&report);
                        self.publish(changed);
                    }
                    // The counters tell what the missed ones would have.
                    Err(broadcast::error::RecvError::Lagged(_)) => self.look(),
                    Err(broadcast::error::RecvError::Closed) => return,
                },
                _ = look.tick() => self.look(),
            }
        }
    }

    /// Makes the states those of the snapshot's pods; true when anything changed.
    fn follow(&mut self, snapshot: &Snapshot) -> bool {
        self.profiles = Arc::clone(&snapshot.profiles);
        let meshed = |pod: &PodView| !pod.mesh.is_empty();
        let before = self.states.len();
        // A cgroup of the same id may be another pod's by now.
        self.states.retain(|id, state| snapshot.pods.get(id).is_some_and(|pod| meshed(pod) && state.is(pod)));
        let mut changed = self.states.len() != before;
        self.recent.retain(|id| self.states.contains_key(&id));
        let now = monotonic_ns();
        for (id, pod) in snapshot.pods.iter().filter(|(_, pod)| meshed(pod)) {
            let created = created(pod);
            match self.states.get_mut(id) {
                Some(state) if Arc::ptr_eq(&state.pod, pod) => continue,
                Some(state) => state.renew(Arc::clone(pod), created, now),
                None => {
                    self.states.insert(*id, PodState::new(Arc::clone(pod), created, now));
                }
            }
            changed = true;
            if let Some(state) = self.states.get_mut(id)
                && let Some(sign) = meshed_of(pod, &self.profiles).and_then(|meshed| validator(pod, &meshed))
            {
                state.add(&sign);
            }
            self.evaluate(*id);
        }
        changed
    }

    /// Adds what somebody found; true when a verdict changed.
    fn take(&mut self, finding: &Finding) -> bool {
        let Finding { uid, cgroup, evidence } = finding;
        match self.states.get_mut(cgroup) {
            Some(state) if state.pod.uid == *uid => state.add(evidence),
            _ => return false,
        }
        self.evaluate(*cgroup)
    }

    fn report(&mut self, report: &Arc<Report>) -> bool {
        let Some(state) = self.states.get_mut(&report.cgroup) else { return false };
        for sign in signs(report, meshed_of(&state.pod, &self.profiles).as_deref()) {
            state.add(&sign);
        }
        self.recent.keep(report.cgroup, report);
        self.evaluate(report.cgroup)
    }

    /// Looks at all pods, and publishes the evidence as it is now.
    fn look(&mut self) {
        let ids: Vec<u64> = self.states.keys().copied().collect();
        for id in ids {
            self.evaluate(id);
        }
        let published = self.out.borrow().pods.clone();
        let same = |(id, state): (&u64, &PodState)| published.get(id).is_some_and(|old| **old == *state);
        let changed = published.len() != self.states.len() || !self.states.iter().all(same);
        self.publish(changed);
    }

    /// Reads a pod's counters and judges it; true when its verdict changed.
    fn evaluate(&mut self, id: u64) -> bool {
        let Some(state) = self.states.get_mut(&id) else { return false };
        state.count(&self.maps.counters(id).unwrap_or(PodCounters::ZERO));
        let changes = state.evaluate(monotonic_ns());
        for change in &changes {
            tell(&state.pod, change);
        }
        !changes.is_empty()
    }

    fn publish(&mut self, changed: bool) {
        if !changed {
            return;
        }
        self.version += 1;
        let before = self.out.borrow().pods.clone();
        let pods = self.states.iter().map(|(id, state)| {
            let same = before.get(id).filter(|old| ***old == *state);
            (*id, same.map_or_else(|| Arc::new(state.clone()), Arc::clone))
        });
        self.out.send_replace(PodStates { version: self.version, pods: Arc::new(pods.collect()) });
    }
}

/// When a pod's sandbox was made, 0 if nobody knows.
fn created(pod: &PodView) -> u64 {
    let facts = pod.facts.as_ref();
    facts.and_then(|facts| facts.sandbox.as_ref()).map_or(0, |sandbox| monotonic_of(sandbox.created_at))
}

/// What its mesh does for a pod whose facts are known.
fn meshed_of(pod: &PodView, profiles: &Profiles) -> Option<Box<Meshed>> {
    match recognise(pod.facts.as_deref()?, profiles.as_slice()) {
        Membership::Meshed(meshed) => Some(meshed),
        _ => None,
    }
}

/// What the mesh's own validator said: of the family that the mesh redirects, IPv4 first, since it tries one only.
fn validator(pod: &PodView, meshed: &Meshed) -> Option<Evidence> {
    let (exit_code, created_at) = meshed.validator_said(pod.facts.as_deref()?)?;
    let family = if pod.families[0] { Family::V4 } else { Family::V6 };
    Some(Evidence::Validator { family, exit_code, at: monotonic_of(created_at) })
}

/// What an event says.
fn signs(report: &Report, meshed: Option<&Meshed>) -> Vec<Evidence> {
    if report.direction != "outbound" {
        return Vec::new();
    }
    let (Ok(to), Some(reason)) = (report.dst.parse::<SocketAddr>(), Reason::from_label(&report.reason))
    else {
        return Vec::new();
    };
    let family = if to.is_ipv4() { Family::V4 } else { Family::V6 };
    let mut signs = vec![Evidence::Bypass { family, reason, at: report.at_ns }];
    // A container that nobody has named yet is reported by its cgroup id.
    let container = Some(&*report.container).filter(|name| name.parse::<u64>().is_err());
    let canary = meshed.is_some_and(|meshed| meshed.is_canary(container, to));
    if canary {
        signs.push(Evidence::Canary { family, at: report.at_ns });
    }
    signs
}

/// One line a change.
fn tell(pod: &PodView, change: &Transition) {
    let Transition { family, before, after } = change;
    let reason = after.1.map_or("", Reason::label);
    let (before, verdict) = (before.0.label(), after.0.label());
    if matches!(after.0, PodVerdict::Bypassing | PodVerdict::Partial) {
        tracing::warn!(
            namespace = %pod.namespace, pod = %pod.name, mesh = %pod.mesh, family = family.label(), before, verdict,
            reason, "a pod's verdict changed"
        );
    } else {
        tracing::info!(
            namespace = %pod.namespace, pod = %pod.name, mesh = %pod.mesh, family = family.label(), before, verdict,
            reason, "a pod's verdict changed"
        );
    }
}

#[cfg(test)]
mod tests;
