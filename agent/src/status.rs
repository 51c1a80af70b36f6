//! The state of this node, for `nobypass status`: the same report from a running agent and from pins alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use nobypass_common::abi::{Config, PodCounters, PodPolicy};
use nobypass_common::ids::{Counter, MODE_INHERIT, PodKind, UnknownPolicy, V4, V6};
use serde::{Deserialize, Serialize};

use crate::bpf::pins::PinDir;
use crate::bpf::{BpfError, Hook, Maps};
use crate::detect::verdict::{PodVerdict, bypasses, count, dropped, mode_label, of_pod, reason, worst};
use crate::detect::{PodState, PodStates};
use crate::policy::text;
use crate::policy::{Effective, PodView, Snapshot};
use crate::sys::clock::monotonic_ns;

/// An agent that shows no sign of life for longer is not running.
pub const ALIVE_NS: u64 = 15_000_000_000;

/// The whole report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The agent.
    pub agent: AgentStatus,
    /// The node's mode.
    pub mode: String,
    /// Where it comes from; empty without an agent.
    #[serde(default)]
    pub mode_source: String,
    /// What happens to connections of pods that nobody has classified yet.
    pub unknown_pods: String,
    /// The hooks.
    pub hooks: Vec<HookStatus>,
    /// Pods, sorted by namespace and name.
    pub pods: Vec<PodStatus>,
    /// The node's counters, by name.
    pub totals: BTreeMap<String, u64>,
}

/// The agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentStatus {
    /// Whether one answers, or has shown a sign of life lately.
    pub running: bool,
    /// Seconds since its last sign of life.
    pub last_seen_seconds: f64,
    /// Its version; empty when it does not answer.
    pub version: String,
    /// What keeps it from being ready.
    pub pending: Vec<String>,
    /// What else is to be known, as that the policy file is not taken.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// One hook.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HookStatus {
    /// Its name.
    pub hook: String,
    /// Whether it runs for the pods.
    pub effective: bool,
    /// Why not.
    pub reason: String,
}

/// One pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodStatus {
    /// Namespace; empty while not known.
    pub namespace: String,
    /// Name; likewise.
    pub name: String,
    /// UID; empty without an agent.
    pub uid: String,
    /// Mesh profile.
    pub mesh: String,
    /// `unknown`, `exempt`, `meshed`.
    pub kind: String,
    /// Why it is of that kind.
    pub reason: String,
    /// The mode in effect.
    pub mode: String,
    /// Who says so: `pod`, `namespace_label`, `namespace_rule`, `node`; empty without an agent.
    #[serde(default)]
    pub mode_level: String,
    /// The worst verdict of its families.
    pub verdict: String,
    /// Verdict on IPv4, and why if it is bad.
    pub v4: FamilyStatus,
    /// Verdict on IPv6.
    pub v6: FamilyStatus,
    /// Counters, by name.
    pub counters: BTreeMap<String, u64>,
    /// Bypasses of all kinds, dropped ones included.
    pub bypasses: u64,
    /// Of those, dropped.
    pub dropped: u64,
    /// The pod's cgroup id.
    pub cgroup: u64,
    /// The proxy container's cgroup id; 0 while unknown.
    pub proxy_cgroup: u64,
    /// Malformed annotations.
    pub problems: Vec<String>,
    /// Containers that may send by packet sockets, which nothing here sees.
    #[serde(default)]
    pub packet_sockets: Vec<String>,
}

/// One IP family of a pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FamilyStatus {
    /// The verdict.
    pub verdict: String,
    /// Why it is bad; empty if it is not.
    pub reason: String,
    /// Seconds since verdict and reason are these; `None` without an agent.
    #[serde(default)]
    pub since_seconds: Option<f64>,
    /// Seconds since the last redirect proof, if there was one.
    pub last_redirect_seconds: Option<f64>,
    /// Seconds since the last bypass, if there was one.
    pub last_bypass_seconds: Option<f64>,
}

/// What only a running agent knows.
#[derive(Clone, Debug)]
pub struct Known {
    /// Pods.
    pub snapshot: Snapshot,
    /// Their verdicts.
    pub states: PodStates,
    /// What holds.
    pub policy: Arc<Effective>,
}

/// Reads the report from the maps, and adds what only a running agent knows.
///
/// # Errors
/// [`BpfError::Map`].
pub fn read(maps: &Maps, hooks: Vec<HookStatus>, known: Option<&Known>) -> Result<Status, BpfError> {
    let snapshot = known.map(|known| &known.snapshot);
    let now = monotonic_ns();
    let config = maps.config()?;
    let silent_ns = now.saturating_sub(maps.heartbeat()?);
    let agent = AgentStatus {
        running: snapshot.is_some() || silent_ns < ALIVE_NS,
        last_seen_seconds: seconds(silent_ns),
        version: snapshot.map_or_else(String::new, |_| env!("CARGO_PKG_VERSION").into()),
        pending: Vec::new(),
        notes: Vec::new(),
    };
    let mut pods: Vec<PodStatus> = maps
        .policies()
        .into_iter()
        .filter(|(_, policy)| policy.kind != PodKind::Qos.code())
        .map(|(id, policy)| {
            let counters = maps.counters(id).unwrap_or(PodCounters::ZERO);
            match snapshot.and_then(|snapshot| snapshot.pods.get(&id)) {
                Some(view) => {
                    let state = known.and_then(|known| known.states.pods.get(&id));
                    let state = state.filter(|state| state.is(view)).map(|state| state.with(&counters, now));
                    pod(id, &config, &policy, &counters, now, (Some(view), state), None)
                }
                None => pod(id, &config, &policy, &counters, now, (None, None), maps.name(id)),
            }
        })
        .collect();
    pods.sort_by(|a, b| (&a.namespace, &a.name, a.cgroup).cmp(&(&b.namespace, &b.name, b.cgroup)));
    Ok(Status {
        agent,
        mode: mode_label(config.mode).into(),
        mode_source: known.map_or("", |known| known.policy.mode_source.label()).into(),
        unknown_pods: UnknownPolicy::from_code(config.unknown_policy)
            .map_or("invalid", UnknownPolicy::label)
            .into(),
        hooks,
        pods,
        totals: named(&maps.totals()?),
    })
}

/// The report of a node without an agent.
///
/// # Errors
/// [`BpfError::NoPins`], [`BpfError::Map`].
pub fn from_pins(dir: &PinDir) -> Result<Status, BpfError> {
    let maps = Maps::open(dir)?;
    let config = maps.config()?;
    let wanted = dir.attached().into_iter().filter(|(hook, _)| hook.is_wanted(&config));
    let hooks = wanted.map(|(hook, effective)| hook_status(hook, effective, "")).collect();
    read(&maps, hooks, None)
}

/// One hook's line.
pub fn hook_status(hook: Hook, effective: bool, reason: &str) -> HookStatus {
    let reason = match (effective, reason) {
        (true, _) => "",
        (false, "") => "not attached",
        (false, reason) => reason,
    };
    HookStatus { hook: hook.label().into(), effective, reason: reason.into() }
}

fn pod(
    id: u64,
    config: &Config,
    policy: &PodPolicy,
    counters: &PodCounters,
    now: u64,
    (view, state): (Option<&Arc<PodView>>, Option<PodState>),
    name: Option<nobypass_common::abi::PodName>,
) -> PodStatus {
    let kind = PodKind::from_code(policy.kind).unwrap_or(PodKind::Unknown);
    let unsupported = view.is_some_and(|view| view.unsupported.is_some());
    let verdicts = state.as_ref().map_or_else(|| of_pod(counters, unsupported, now), PodState::verdicts);
    let mode = if policy.mode == MODE_INHERIT { config.mode } else { policy.mode };
    let (namespace, pod_name, mesh) = match (view, name) {
        (Some(view), _) => (view.namespace.to_string(), view.name.to_string(), view.mesh.to_string()),
        (None, Some(name)) => (text(&name.namespace), text(&name.name), text(&name.mesh)),
        (None, None) => Default::default(),
    };
    let family = |family: usize| {
        let mut shown = family_status(counters, policy.flags, family, verdicts, now);
        if let Some(of) = state.as_ref().and_then(|state| state.families.get(family)) {
            shown.reason = of.reason.map_or("", |reason| reason.label()).into();
            shown.since_seconds = Some(seconds(now.saturating_sub(of.since)));
        }
        shown
    };
    PodStatus {
        namespace,
        name: pod_name,
        uid: view.map_or_else(String::new, |view| view.uid.to_string()),
        mesh,
        kind: kind.label().into(),
        reason: view.map_or_else(String::new, |view| view.reason.into()),
        mode: if kind == PodKind::Meshed { mode_label(mode).into() } else { String::new() },
        mode_level: view
            .and_then(|view| view.choice.as_ref())
            .filter(|_| kind == PodKind::Meshed)
            .map_or("", |choice| choice.level.label())
            .into(),
        verdict: worst(verdicts).label().into(),
        v4: family(V4),
        v6: family(V6),
        counters: named(counters),
        bypasses: bypasses(counters),
        dropped: dropped(counters),
        cgroup: id,
        proxy_cgroup: policy.proxy_cgroup,
        problems: view.map_or_else(Vec::new, |view| view.problems.clone()),
        packet_sockets: Vec::new(),
    }
}

fn family_status(
    counters: &PodCounters,
    flags: u32,
    family: usize,
    verdicts: [PodVerdict; 2],
    now: u64,
) -> FamilyStatus {
    let verdict = verdicts.get(family).copied().unwrap_or(PodVerdict::Unknown);
    let bad = matches!(verdict, PodVerdict::Bypassing | PodVerdict::Partial);
    let since = |times: &[u64; 2]| match times.get(family) {
        None | Some(0) => None,
        Some(at) => Some(seconds(now.saturating_sub(*at))),
    };
    FamilyStatus {
        verdict: verdict.label().into(),
        reason: if bad { reason(counters, flags, family).into() } else { String::new() },
        since_seconds: None,
        last_redirect_seconds: since(&counters.redirect_ns),
        last_bypass_seconds: since(&counters.bypass_ns),
    }
}

fn named(counters: &PodCounters) -> BTreeMap<String, u64> {
    Counter::ALL.iter().map(|counter| (counter.label().into(), count(counters, *counter))).collect()
}

/// ns as seconds, to the millisecond: more says nothing here.
fn seconds(ns: u64) -> f64 {
    let millis = u32::try_from(ns / 1_000_000).unwrap_or(u32::MAX);
    f64::from(millis) / 1000.0
}
