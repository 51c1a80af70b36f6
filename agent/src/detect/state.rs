//! The verdict on one pod as it goes on: evidence kept, changes told once. Pure; times are ns of `CLOCK_MONOTONIC`.

use std::collections::HashMap;
use std::sync::Arc;

use nobypass_common::abi::PodCounters;
use nobypass_common::ids::PodKind;

use super::evidence::{Evidence, Family, FamilyEvidence, PodEvidence, Reason, add, add_counters, judge};
use super::verdict::{PodVerdict, worst};
use crate::policy::PodView;

/// All pods that belong to a mesh, as other tasks see them: a value that is replaced whole.
#[derive(Clone, Debug, Default)]
pub struct PodStates {
    /// Grows with each change of a verdict, and when pods come and go.
    pub version: u64,
    /// By cgroup id.
    pub pods: Arc<HashMap<u64, Arc<PodState>>>,
}

/// What is known of one meshed pod's connections.
#[derive(Clone, Debug, PartialEq)]
pub struct PodState {
    /// Who it is: UID, names, mesh, cgroup, sandbox.
    pub pod: Arc<PodView>,
    /// By [`Family::index`].
    pub families: [FamilyState; 2],
    /// What is older than this is of an earlier sandbox.
    pub not_before: u64,
    /// The counters at the last look.
    counters: Option<PodCounters>,
}

/// What is known of one IP family of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FamilyState {
    /// The verdict.
    pub verdict: PodVerdict,
    /// Why it is not `redirected`.
    pub reason: Option<Reason>,
    /// Since when verdict and reason are these.
    pub since: u64,
    /// The signs that led to it.
    pub evidence: FamilyEvidence,
}

/// A verdict that changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition {
    /// Of this family.
    pub family: Family,
    /// What it was.
    pub before: (PodVerdict, Option<Reason>),
    /// What it is.
    pub after: (PodVerdict, Option<Reason>),
}

impl PodState {
    /// A pod of which nothing has been seen yet. `not_before` is when its sandbox was made, 0 if nobody knows.
    pub fn new(pod: Arc<PodView>, not_before: u64, now: u64) -> Self {
        let family = FamilyState {
            verdict: PodVerdict::Unknown,
            reason: None,
            since: now,
            evidence: FamilyEvidence::default(),
        };
        Self { pod, families: [family; 2], not_before, counters: None }
    }

    /// Whether this is the pod that a finding about `pod` is about: an id of a cgroup may be used again.
    pub fn is(&self, pod: &PodView) -> bool {
        self.pod.uid == pod.uid && self.pod.cgroup == pod.cgroup
    }

    /// Takes newer facts. A new sandbox, made at `created` (0 if nobody knows), has nothing to do with what was seen
    /// of the old one.
    pub fn renew(&mut self, pod: Arc<PodView>, created: u64, now: u64) {
        let remade = self.pod.sandbox.is_some() && pod.sandbox.is_some() && self.pod.sandbox != pod.sandbox;
        let created = if remade && created == 0 { now } else { created };
        self.not_before = self.not_before.max(created);
        for family in &mut self.families {
            family.evidence = since(&family.evidence, self.not_before);
        }
        self.pod = pod;
    }

    /// Adds what the programs counted.
    pub fn count(&mut self, counters: &PodCounters) {
        let mut evidence = self.evidence();
        add_counters(&mut evidence, counters, self.counters.as_ref(), self.not_before);
        self.set_evidence(&evidence);
        self.counters = Some(*counters);
    }

    /// Adds a sign, unless it is of an earlier sandbox.
    pub fn add(&mut self, sign: &Evidence) {
        if sign.at() < self.not_before {
            return;
        }
        let mut evidence = self.evidence();
        add(&mut evidence, sign);
        self.set_evidence(&evidence);
    }

    /// Judges anew, and says what changed.
    pub fn evaluate(&mut self, now: u64) -> Vec<Transition> {
        let mut changes = Vec::new();
        for family in Family::ALL {
            let gap = !self.pod.families[family.index()];
            let state = &mut self.families[family.index()];
            let before = (state.verdict, state.reason);
            let after = if let Some(reason) = self.pod.unsupported {
                (PodVerdict::Unsupported, Some(reason.into()))
            } else if self.pod.kind == PodKind::Meshed {
                judge(&state.evidence, gap, state.verdict, now)
            } else {
                (PodVerdict::Unknown, None)
            };
            if before != after {
                (state.verdict, state.reason) = after;
                state.since = now;
                changes.push(Transition { family, before, after });
            }
        }
        changes
    }

    /// The state with counters that were read just now: for whoever shows it.
    #[must_use]
    pub fn with(&self, counters: &PodCounters, now: u64) -> Self {
        let mut fresh = self.clone();
        fresh.count(counters);
        fresh.evaluate(now);
        fresh
    }

    /// The verdict that counts for the pod as a whole: the worst of its families.
    pub fn verdict(&self) -> PodVerdict {
        worst(self.verdicts())
    }

    /// The verdicts, by [`Family::index`].
    pub fn verdicts(&self) -> [PodVerdict; 2] {
        self.families.map(|family| family.verdict)
    }

    /// Whether any family goes around the proxy, wholly or in part.
    pub fn is_bypassing(&self) -> bool {
        matches!(self.verdict(), PodVerdict::Bypassing | PodVerdict::Partial)
    }

    fn evidence(&self) -> PodEvidence {
        self.families.map(|family| family.evidence)
    }

    fn set_evidence(&mut self, evidence: &PodEvidence) {
        for (family, evidence) in self.families.iter_mut().zip(evidence) {
            family.evidence = *evidence;
        }
    }
}

/// What of the evidence is not older than `not_before`.
fn since(evidence: &FamilyEvidence, not_before: u64) -> FamilyEvidence {
    let FamilyEvidence { proof, bypass, probe, validator, canary, preexisting } = *evidence;
    FamilyEvidence {
        proof: proof.filter(|at| *at >= not_before),
        bypass: bypass.filter(|(_, at)| *at >= not_before),
        probe: probe.filter(|(_, at)| *at >= not_before),
        validator: validator.filter(|(_, at)| *at >= not_before),
        canary: canary.filter(|at| *at >= not_before),
        preexisting: preexisting.filter(|(_, at)| *at >= not_before),
    }
}

#[cfg(test)]
mod tests;
