//! What holds, who asks for what, and what of it cannot be had.

use std::collections::BTreeMap;
use std::fmt;
use std::time::SystemTime;

use nobypass_common::ids::{Mode, PodKind};
use prometheus_client::encoding::DescriptorEncoder;

use super::{Labels, counters, gauges};
use crate::policy::effective::Source;
use crate::policy::file::Inbound;
use crate::policy::mode::Downgrade;
use crate::policy::{PodView, PolicyState, Snapshot};
use crate::status::HookStatus;

/// Enforce of inbound connections is asked for, and the hook that would drop them is not in effect.
const INGRESS_HOOK: &str = "ingress_hook";

/// Encodes all of it.
pub(super) fn encode(
    encoder: &mut DescriptorEncoder<'_>,
    policy: &PolicyState,
    snapshot: &Snapshot,
    hooks: &[HookStatus],
) -> fmt::Result {
    let result = |result: &str| vec![("result", result.to_owned())];
    counters(
        encoder,
        "policy_reload",
        "Policy files that were taken, the first one included, and those that were not.",
        [(result("success"), policy.taken), (result("failure"), policy.refused)],
    )?;
    let loaded = policy.loaded_at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    gauges(
        encoder,
        "policy_loaded_timestamp_seconds",
        "When the policy in force was read, in seconds since 1970.",
        [(Labels::new(), loaded)],
    )?;
    gauges(
        encoder,
        "policy_valid",
        "0 while the policy file as it is now is not taken and the last good one holds.",
        [(Labels::new(), u64::from(policy.problem.is_none()))],
    )?;
    gauges(
        encoder,
        "mode_by_hand",
        "1 while the node's mode is the one that was set by `nobypass mode`.",
        [(Labels::new(), u64::from(policy.effective.mode_source == Source::Hand))],
    )?;
    counters(
        encoder,
        "mode_overrides_refused",
        "Meshed pods that asked for a mode which they are not allowed to choose.",
        [(Labels::new(), snapshot.overrides_refused)],
    )?;
    counters(
        encoder,
        "policy_conflicts",
        "Pods' entries that another writer had changed, so that they were decided on anew.",
        [(Labels::new(), snapshot.conflicts)],
    )?;
    pods(encoder, snapshot, hooks)
}

fn pods(encoder: &mut DescriptorEncoder<'_>, snapshot: &Snapshot, hooks: &[HookStatus]) -> fmt::Result {
    let no_ingress = hooks.iter().any(|hook| hook.hook == "ingress" && !hook.effective);
    let mut modes: BTreeMap<&str, u64> = Mode::ALL.iter().map(|mode| (mode.label(), 0)).collect();
    let mut downgraded: BTreeMap<&str, u64> =
        Downgrade::ALL.iter().map(|downgrade| (downgrade.label(), 0)).chain([(INGRESS_HOOK, 0)]).collect();
    let judged = |view: &&std::sync::Arc<PodView>| view.kind == PodKind::Meshed || view.unsupported.is_some();
    for view in snapshot.pods.values().filter(judged) {
        let Some(choice) = &view.choice else { continue };
        if view.kind == PodKind::Meshed {
            *modes.entry(choice.mode.label()).or_default() += 1;
        }
        if let Some(downgrade) = choice.downgrade {
            *downgraded.entry(downgrade.label()).or_default() += 1;
        }
        let inbound = view.traffic.is_some_and(|traffic| traffic.inbound == Inbound::Enforce);
        if no_ingress && inbound && choice.mode == Mode::Enforce {
            *downgraded.entry(INGRESS_HOOK).or_default() += 1;
        }
    }
    let series = |label: &'static str, of: BTreeMap<&str, u64>| {
        of.into_iter().map(move |(name, n)| (vec![(label, name.to_owned())], n)).collect::<Vec<_>>()
    };
    gauges(encoder, "pods_mode", "Meshed pods of this node by the mode in effect.", series("mode", modes))?;
    gauges(
        encoder,
        "mode_downgraded",
        "Pods for which enforce is asked for and not in effect, by reason.",
        series("reason", downgraded),
    )
}
