//! The verdict on a pod, per IP family, from what the kernel counted. Pure.

use nobypass_common::abi::{POD_GAP4, POD_GAP6, PodCounters};
use nobypass_common::ids::{Counter, Mode, V4, V6, Verdict};
use serde::Serialize;

use super::evidence::{FamilyEvidence, Reason, judge};

/// What is known of a pod's connections of one family. Never inferred from silence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PodVerdict {
    /// Neither a proof nor a bypass was seen.
    Unknown,
    /// Nothing on this node can see this pod's connections (gVisor, Kata).
    Unsupported,
    /// Connections go to the proxy.
    Redirected,
    /// Some do, some do not.
    Partial,
    /// Connections go out directly.
    Bypassing,
}

impl PodVerdict {
    /// All values.
    pub const ALL: [Self; 5] =
        [Self::Unknown, Self::Unsupported, Self::Redirected, Self::Partial, Self::Bypassing];

    /// The label in metrics and tables.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Unsupported => "unsupported",
            Self::Redirected => "redirected",
            Self::Partial => "partial",
            Self::Bypassing => "bypassing",
        }
    }
}

/// The verdict from the last proof and the last bypass of a family alone; times in ns of one clock, 0 = never.
pub fn of_family(redirect_ns: u64, bypass_ns: u64, now_ns: u64) -> PodVerdict {
    let seen = |at: u64| (at != 0).then_some(at);
    let evidence = FamilyEvidence {
        proof: seen(redirect_ns),
        bypass: seen(bypass_ns).map(|at| (Reason::NotRedirected, at)),
        ..FamilyEvidence::default()
    };
    judge(&evidence, false, PodVerdict::Unknown, now_ns).0
}

/// The verdicts of a pod, IPv4 and IPv6.
pub fn of_pod(counters: &PodCounters, unsupported: bool, now_ns: u64) -> [PodVerdict; 2] {
    if unsupported {
        return [PodVerdict::Unsupported; 2];
    }
    [V4, V6].map(|family| {
        let time = |times: &[u64; 2]| times.get(family).copied().unwrap_or(0);
        of_family(time(&counters.redirect_ns), time(&counters.bypass_ns), now_ns)
    })
}

/// The verdict that counts for the pod as a whole: the worst of its families.
pub fn worst(verdicts: [PodVerdict; 2]) -> PodVerdict {
    let [v4, v6] = verdicts;
    v4.max(v6)
}

/// Why a pod counts as bypassing in a family: the most telling of what was counted.
pub fn reason(counters: &PodCounters, policy_flags: u32, family: usize) -> &'static str {
    let gap = if family == V6 { POD_GAP6 } else { POD_GAP4 };
    if policy_flags & gap != 0 {
        return Verdict::FamilyGap.label();
    }
    [Counter::Bypass, Counter::ProxyUidImpersonation, Counter::BypassRaw]
        .into_iter()
        .find(|counter| count(counters, *counter) > 0)
        .unwrap_or(Counter::Bypass)
        .label()
}

/// One counter.
pub fn count(counters: &PodCounters, counter: Counter) -> u64 {
    counters.count.get(counter.code() as usize).copied().unwrap_or(0)
}

/// The bypasses among the counters, dropped and passed together.
pub fn bypasses(counters: &PodCounters) -> u64 {
    Verdict::ALL
        .iter()
        .filter(|verdict| verdict.is_bypass())
        .filter_map(|verdict| counters.count.get(verdict.code() as usize))
        .fold(0, |sum, count| sum.saturating_add(*count))
}

/// Of [`bypasses`], those that were dropped.
pub fn dropped(counters: &PodCounters) -> u64 {
    [
        Counter::FamilyGapDropped,
        Counter::ImpersonationDropped,
        Counter::BypassRawDropped,
        Counter::BypassDropped,
        Counter::InboundDropped,
    ]
    .into_iter()
    .fold(0, |sum, counter| sum.saturating_add(count(counters, counter)))
}

/// The label of a mode's number; what no version knows is shown as such.
pub fn mode_label(mode: u32) -> &'static str {
    Mode::from_code(mode).map_or("invalid", Mode::label)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn families() {
        for (name, redirect, bypass, expected) in [
            ("silence", 0, 0, PodVerdict::Unknown),
            ("proofs only", 5 * S, 0, PodVerdict::Redirected),
            ("bypasses only", 0, 5 * S, PodVerdict::Bypassing),
            ("proof after a recent bypass", 999 * S, 990 * S, PodVerdict::Partial),
            ("proof long after the last bypass", 999 * S, 900 * S, PodVerdict::Redirected),
            ("bypass after a recent proof", 990 * S, 999 * S, PodVerdict::Partial),
            ("bypass long after the last proof", 900 * S, 999 * S, PodVerdict::Bypassing),
        ] {
            assert_eq!(of_family(redirect, bypass, 1000 * S), expected, "{name}");
        }
    }

    #[test]
    fn a_pod_is_as_bad_as_its_worst_family() {
        let counters = PodCounters { redirect_ns: [S, 0], bypass_ns: [0, S], ..PodCounters::ZERO };
        let verdicts = of_pod(&counters, false, 2 * S);
        assert_eq!(verdicts, [PodVerdict::Redirected, PodVerdict::Bypassing]);
        assert_eq!(worst(verdicts), PodVerdict::Bypassing);
        assert_eq!(of_pod(&counters, true, 2 * S), [PodVerdict::Unsupported; 2], "never redirected");
    }

    #[test]
    fn reasons() {
        let with = |counter: Counter| {
            let mut counters = PodCounters::ZERO;
            counters.count[counter.code() as usize] = 1;
            counters
        };
        assert_eq!(reason(&with(Counter::Bypass), 0, V4), "not_redirected");
        assert_eq!(reason(&with(Counter::ProxyUidImpersonation), 0, V4), "proxy_uid_impersonation");
        assert_eq!(reason(&with(Counter::Bypass), POD_GAP6, V6), "family_gap");
        assert_eq!(reason(&with(Counter::Bypass), POD_GAP6, V4), "not_redirected");
    }

    #[test]
    fn sums() {
        let mut counters = PodCounters::ZERO;
        for counter in
            [Counter::Bypass, Counter::BypassDropped, Counter::InboundBypass, Counter::Retry, Counter::Exempt]
        {
            counters.count[counter.code() as usize] = 10;
        }
        assert_eq!((bypasses(&counters), dropped(&counters)), (20, 10));
    }
}
