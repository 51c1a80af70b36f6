//! What was seen of a pod's connections, and what follows from it: pure.
//!
//! Evidence has a time and does not expire: a verdict is never inferred from silence. Times are ns of
//! `CLOCK_MONOTONIC`.

use std::time::Duration;

use nobypass_common::abi::PodCounters;
use nobypass_common::ids::{Counter, V4, V6};

use super::verdict::{PodVerdict, count};
use crate::mesh::Unsupported;
use crate::probe::Answer;

/// While the last good and the last bad sign are both younger than this, a pod does both.
pub const RECENT: Duration = Duration::from_secs(60);
/// A pod that does both goes on doing so until one of the signs is older than this: what comes now and then must not
/// make the verdict flap.
pub const SETTLED: Duration = Duration::from_secs(300);

/// An IP family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// Its place in arrays.
    pub const fn index(self) -> usize {
        match self {
            Self::V4 => V4,
            Self::V6 => V6,
        }
    }

    /// In metrics and logs.
    pub const fn label(self) -> &'static str {
        match self {
            Self::V4 => "ipv4",
            Self::V6 => "ipv6",
        }
    }
}

/// Why a verdict is not `redirected`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// New connections leave the pod without having been redirected.
    NotRedirected,
    /// The mesh does not redirect this family of this pod.
    FamilyGap,
    /// Connections that are older than the programs go around the proxy; new ones may not.
    Preexisting,
    /// Another container uses the proxy's UID, which the mesh's own rules let out.
    ProxyUidImpersonation,
    /// A raw socket sends what no rule redirects.
    RawSocket,
    /// The family has no route: nothing can leave.
    NoRoute,
    /// The probe could not be asked.
    ProbeFailed,
    /// The pod's network stack is none that this kernel sees.
    ForeignKernel,
    /// The group decides whether a connection of the pod is redirected, and no packet tells it.
    GroupRules,
}

impl Reason {
    /// All values.
    pub const ALL: [Self; 9] = [
        Self::NotRedirected,
        Self::FamilyGap,
        Self::Preexisting,
        Self::ProxyUidImpersonation,
        Self::RawSocket,
        Self::NoRoute,
        Self::ProbeFailed,
        Self::ForeignKernel,
        Self::GroupRules,
    ];

    /// In metrics, logs and JSON.
    pub const fn label(self) -> &'static str {
        match self {
            Self::NotRedirected => "not_redirected",
            Self::FamilyGap => "family_gap",
            Self::Preexisting => "preexisting",
            Self::ProxyUidImpersonation => "proxy_uid_impersonation",
            Self::RawSocket => "raw_socket",
            Self::NoRoute => "no_route",
            Self::ProbeFailed => "probe_failed",
            Self::ForeignKernel => "foreign_kernel",
            Self::GroupRules => "group_rules",
        }
    }

    /// The reason with this label.
    pub fn from_label(label: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.label() == label)
    }

    /// Whether a probe that finds the redirection in place says that this is over.
    const fn is_answered_by_probe(self) -> bool {
        match self {
            Self::NotRedirected | Self::FamilyGap | Self::NoRoute | Self::ProbeFailed => true,
            // The rules are in place, and this goes around them.
            Self::Preexisting
            | Self::ProxyUidImpersonation
            | Self::RawSocket
            | Self::ForeignKernel
            | Self::GroupRules => false,
        }
    }
}

impl From<Unsupported> for Reason {
    fn from(reason: Unsupported) -> Self {
        match reason {
            Unsupported::UserspaceKernel | Unsupported::VirtualMachine => Self::ForeignKernel,
            Unsupported::GroupRules => Self::GroupRules,
        }
    }
}

/// One sign, from whoever looked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// The probe was answered.
    Probe { family: Family, answer: Answer, at: u64 },
    /// The mesh's own validator ended with this code; `at` is when it was started.
    Validator { family: Family, exit_code: i32, at: u64 },
    /// A connection to the validator's address left the pod: no rule caught it.
    Canary { family: Family, at: u64 },
    /// A connection left the pod.
    Bypass { family: Family, reason: Reason, at: u64 },
    /// So many connections are older than the programs and go around the proxy.
    Preexisting { family: Family, connections: u32, at: u64 },
}

impl Evidence {
    /// When.
    pub const fn at(&self) -> u64 {
        match self {
            Self::Probe { at, .. }
            | Self::Validator { at, .. }
            | Self::Canary { at, .. }
            | Self::Bypass { at, .. }
            | Self::Preexisting { at, .. } => *at,
        }
    }
}

/// What is known of one family of a pod: the last sign of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FamilyEvidence {
    /// A connection that was redirected.
    pub proof: Option<u64>,
    /// A connection that was not, and why not.
    pub bypass: Option<(Reason, u64)>,
    /// The probe's answer.
    pub probe: Option<(Answer, u64)>,
    /// The validator's exit code.
    pub validator: Option<(i32, u64)>,
    /// A connection to the validator's address that left the pod.
    pub canary: Option<u64>,
    /// Connections older than the programs.
    pub preexisting: Option<(u32, u64)>,
}

/// What is known of a pod, by [`Family::index`].
pub type PodEvidence = [FamilyEvidence; 2];

/// Adds a sign. One that is older than what is known of its kind changes nothing.
pub fn add(evidence: &mut PodEvidence, sign: &Evidence) {
    match *sign {
        Evidence::Probe { family, answer, at } => {
            let of = &mut evidence[family.index()].probe;
            if of.is_none_or(|(_, before)| before <= at) {
                *of = Some((answer, at));
            }
        }
        Evidence::Validator { family, exit_code, at } => {
            let of = &mut evidence[family.index()].validator;
            if of.is_none_or(|(_, before)| before <= at) {
                *of = Some((exit_code, at));
            }
        }
        Evidence::Canary { family, at } => {
            let of = &mut evidence[family.index()].canary;
            *of = (*of).max(Some(at));
        }
        Evidence::Bypass { family, reason, at } => {
            let of = &mut evidence[family.index()].bypass;
            if of.is_none_or(|(_, before)| before <= at) {
                *of = Some((reason, at));
            }
        }
        Evidence::Preexisting { family, connections, at } => {
            let of = &mut evidence[family.index()].preexisting;
            if of.is_none_or(|(_, before)| before <= at) {
                *of = Some((connections, at));
            }
        }
    }
}

/// Adds what the programs counted. `before` are the counters at the last look; what is older than `not_before` is of
/// an earlier sandbox.
pub fn add_counters(
    evidence: &mut PodEvidence,
    counters: &PodCounters,
    before: Option<&PodCounters>,
    not_before: u64,
) {
    let valid = |at: u64| (at != 0 && at >= not_before).then_some(at);
    for family in Family::ALL {
        let of = |times: &[u64; 2]| times.get(family.index()).copied().and_then(valid);
        let known = &mut evidence[family.index()];
        known.proof = known.proof.max(of(&counters.redirect_ns));
        let Some(at) = of(&counters.bypass_ns) else { continue };
        // The event of this very connection knows better.
        if known.bypass.is_none_or(|(_, before)| before < at) {
            known.bypass = Some((grown(counters, before), at));
        }
    }
}

/// Which kind of bypass was counted since the last look: the most telling of those.
fn grown(counters: &PodCounters, before: Option<&PodCounters>) -> Reason {
    const KINDS: [(Counter, Reason); 4] = [
        (Counter::Bypass, Reason::NotRedirected),
        (Counter::ProxyUidImpersonation, Reason::ProxyUidImpersonation),
        (Counter::BypassRaw, Reason::RawSocket),
        (Counter::FamilyGap, Reason::FamilyGap),
    ];
    let grew = |counter| count(counters, counter) > before.map_or(0, |before| count(before, counter));
    KINDS.iter().find(|(counter, _)| grew(*counter)).map_or(Reason::NotRedirected, |(_, reason)| *reason)
}

/// The verdict on one family. `gap`: the mesh does not redirect it. `before`: the verdict so far.
pub fn judge(
    evidence: &FamilyEvidence,
    gap: bool,
    before: PodVerdict,
    now: u64,
) -> (PodVerdict, Option<Reason>) {
    let window = if before == PodVerdict::Partial { SETTLED } else { RECENT };
    let recent = |at: u64| Duration::from_nanos(now.saturating_sub(at)) < window;
    let preexisting = evidence.preexisting.is_some_and(|(connections, _)| connections > 0);
    match (good(evidence), bad(evidence, gap)) {
        (None, None) if preexisting => (PodVerdict::Bypassing, Some(Reason::Preexisting)),
        (None, None) => (PodVerdict::Unknown, unknown(evidence, gap)),
        (None, Some((_, reason))) => (PodVerdict::Bypassing, Some(reason)),
        (Some(good), Some((bad, reason))) if recent(good.min(bad)) => (PodVerdict::Partial, Some(reason)),
        (Some(good), Some((bad, reason))) if bad >= good => (PodVerdict::Bypassing, Some(reason)),
        // Those last until somebody says that there are none left.
        (Some(_), _) if preexisting => (PodVerdict::Partial, Some(Reason::Preexisting)),
        (Some(_), _) => (PodVerdict::Redirected, None),
    }
}

/// When the family was last seen to be redirected; a probe that found the contrary voids what was before.
fn good(evidence: &FamilyEvidence) -> Option<u64> {
    let FamilyEvidence { proof, probe, validator, .. } = *evidence;
    let voided = match probe {
        Some((Answer::NotRedirected { .. }, at)) => at,
        _ => 0,
    };
    let probe = probe.and_then(|(answer, at)| matches!(answer, Answer::Redirected { .. }).then_some(at));
    let validator = validator.and_then(|(code, at)| (code == 0).then_some(at));
    [proof, probe, validator].into_iter().flatten().filter(|at| *at > voided).max()
}

/// When it was last seen not to be, and why.
fn bad(evidence: &FamilyEvidence, gap: bool) -> Option<(u64, Reason)> {
    let FamilyEvidence { proof: _, bypass, probe, validator, canary, preexisting: _ } = *evidence;
    let voided = match probe {
        Some((Answer::Redirected { .. } | Answer::NoRoute, at)) => at,
        _ => 0,
    };
    let not_redirected = if gap { Reason::FamilyGap } else { Reason::NotRedirected };
    let bypass = bypass
        .map(|(reason, at)| (at, if reason == Reason::NotRedirected { not_redirected } else { reason }));
    // That the mesh leaves a family alone is known; news is only a connection that uses it.
    let probe = probe.and_then(|(answer, at)| {
        (matches!(answer, Answer::NotRedirected { .. }) && !gap).then_some((at, not_redirected))
    });
    let validator = validator.and_then(|(code, at)| (code != 0).then_some((at, not_redirected)));
    let canary = canary.map(|at| (at, not_redirected));
    [canary, validator, probe, bypass]
        .into_iter()
        .flatten()
        .filter(|(at, reason)| *at > voided || !reason.is_answered_by_probe())
        // Of those at the same time the last: what a connection did says most.
        .max_by_key(|(at, _)| *at)
}

/// Why nothing is known.
fn unknown(evidence: &FamilyEvidence, gap: bool) -> Option<Reason> {
    match evidence.probe {
        Some((Answer::NoRoute, _)) => Some(Reason::NoRoute),
        Some((Answer::Failed { .. }, _)) => Some(Reason::ProbeFailed),
        _ if gap => Some(Reason::FamilyGap),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
