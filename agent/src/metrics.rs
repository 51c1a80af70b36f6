//! `/metrics`: OpenMetrics, read from the kernel's counters at each scrape.
//!
//! Per-pod series exist only while a pod is bypassing. Counters of pods that are gone stay in the sums.

use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::sync::Arc;

use nobypass_common::abi::PodCounters;
use nobypass_common::ids::{COUNTERS, Counter, Mode, PodKind};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

mod policy;

use crate::bpf::pins::PinDir;
use crate::bpf::{BpfError, Maps};
use crate::cni;
use crate::detect::verdict::{PodVerdict, count, mode_label};
use crate::detect::{Family, PodState, PodStates, Reason};
use crate::policy::{PolicyState, Snapshot};
use crate::server::Health;
use crate::sys::clock::monotonic_ns;

/// Prefix of every name.
const PREFIX: &str = "nobypass";
/// A scrape that meets a pod's removal looks again; more often than this it takes what it has.
const RETRIES: usize = 3;

/// A registry with everything this node exports.
///
/// # Errors
/// [`BpfError::Map`].
pub fn registry(
    dir: &PinDir,
    sources: Sources,
    cni: Option<&cni::metrics::Metrics>,
) -> Result<Registry, BpfError> {
    let mut registry = Registry::with_prefix(PREFIX);
    if let Some(cni) = cni {
        cni.register(&mut registry);
    }
    registry.register_collector(Box::new(Node { maps: Maps::open(dir)?, sources }));
    Ok(registry)
}

/// What tasks say about themselves and the pods.
#[derive(Clone, Debug)]
pub struct Sources {
    /// Pods.
    pub snapshots: watch::Receiver<Snapshot>,
    /// Verdicts.
    pub states: watch::Receiver<PodStates>,
    /// What holds.
    pub policy: watch::Receiver<PolicyState>,
    /// Readiness, hooks.
    pub health: Arc<Health>,
}

struct Node {
    maps: Maps,
    sources: Sources,
}

impl Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").finish_non_exhaustive()
    }
}

/// Labels of one series.
pub(crate) type Labels = Vec<(&'static str, String)>;

/// Sums of one namespace and mesh.
type Sums = BTreeMap<(String, String), [u64; COUNTERS]>;

/// One pod while it bypasses: labels of `pod_bypass`.
type Bypassing = Vec<Labels>;

impl Collector for Node {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let seen = self.read();
        self.connections(&mut encoder, &seen.sums)?;
        self.pods(&mut encoder, &seen)?;
        self.events(&mut encoder)?;
        self.state(&mut encoder)?;
        let snapshot = self.sources.snapshots.borrow().clone();
        let hooks = self.sources.health.hooks();
        policy::encode(&mut encoder, &self.sources.policy.borrow(), &snapshot, &hooks)
    }
}

/// What one scrape read.
struct Seen {
    sums: Sums,
    bypassing: Bypassing,
    pods: BTreeMap<(String, &'static str), u64>,
}

impl Node {
    /// Reads snapshot and counters so that they belong together: a pod that is folded into the ledger while we
    /// read would be counted in neither.
    fn read(&self) -> Seen {
        let mut turn = 0;
        loop {
            let snapshot = self.sources.snapshots.borrow().clone();
            let seen = self.read_with(&snapshot);
            turn += 1;
            if self.sources.snapshots.borrow().version == snapshot.version || turn > RETRIES {
                return seen;
            }
        }
    }

    fn read_with(&self, snapshot: &Snapshot) -> Seen {
        let now = monotonic_ns();
        let states = Arc::clone(&self.sources.states.borrow().pods);
        let mut seen = Seen { sums: Sums::new(), bypassing: Vec::new(), pods: BTreeMap::new() };
        for ((namespace, mesh), sums) in snapshot.ledger.iter() {
            add(&mut seen.sums, namespace, mesh, sums);
        }
        for view in snapshot.pods.values() {
            let counters = self.maps.counters(view.cgroup).unwrap_or(PodCounters::ZERO);
            add(&mut seen.sums, &view.namespace, &view.mesh, &counters.count);
            if view.kind != PodKind::Meshed && view.unsupported.is_none() {
                continue;
            }
            let state = states.get(&view.cgroup).filter(|state| state.is(view));
            let state = match state {
                Some(state) => state.with(&counters, now),
                // The tracker has not heard of it yet.
                None => PodState::new(Arc::clone(view), 0, now).with(&counters, now),
            };
            *seen.pods.entry((view.mesh.to_string(), state.verdict().label())).or_default() += 1;
            for (family, of) in Family::ALL.iter().zip(&state.families) {
                if matches!(of.verdict, PodVerdict::Bypassing | PodVerdict::Partial) {
                    seen.bypassing.push(vec![
                        ("namespace", view.namespace.to_string()),
                        ("pod", view.name.to_string()),
                        ("mesh", view.mesh.to_string()),
                        ("family", family.label().into()),
                        ("reason", of.reason.map_or("", Reason::label).into()),
                    ]);
                }
            }
        }
        seen
    }

    fn connections(&self, encoder: &mut DescriptorEncoder<'_>, sums: &Sums) -> fmt::Result {
        // Reason, direction, all of them, dropped ones.
        const KINDS: [(Counter, &str, Counter); 5] = [
            (Counter::Bypass, "outbound", Counter::BypassDropped),
            (Counter::BypassRaw, "outbound", Counter::BypassRawDropped),
            (Counter::ProxyUidImpersonation, "outbound", Counter::ImpersonationDropped),
            (Counter::FamilyGap, "outbound", Counter::FamilyGapDropped),
            (Counter::InboundBypass, "inbound", Counter::InboundDropped),
        ];
        let at = |sums: &[u64; COUNTERS], counter: Counter| {
            sums.get(counter.code() as usize).copied().unwrap_or(0)
        };
        let mut bypasses = Vec::new();
        for ((namespace, mesh), sums) in sums.iter().filter(|((_, mesh), _)| !mesh.is_empty()) {
            for (all, direction, dropped) in KINDS {
                let dropped = at(sums, dropped);
                for (action, value) in
                    [("passed", at(sums, all).saturating_sub(dropped)), ("dropped", dropped)]
                {
                    // A series begins with its first connection: five reasons for each namespace would be noise.
                    if value > 0 {
                        bypasses.push((
                            vec![
                                ("namespace", namespace.clone()),
                                ("mesh", mesh.clone()),
                                ("reason", all.label().into()),
                                ("direction", direction.into()),
                                ("action", action.into()),
                            ],
                            value,
                        ));
                    }
                }
            }
        }
        counters(
            encoder,
            "bypass_connections",
            "New connections of meshed pods past their proxy.",
            bypasses,
        )?;
        let by_mesh = |counter: Counter| {
            sums.iter().filter(|((_, mesh), _)| !mesh.is_empty()).map(move |((namespace, mesh), sums)| {
                (vec![("namespace", namespace.clone()), ("mesh", mesh.clone())], at(sums, counter))
            })
        };
        counters(
            encoder,
            "redirected_connections",
            "New connections of meshed pods that went to their proxy.",
            by_mesh(Counter::RedirectProof),
        )?;
        counters(
            encoder,
            "exempt_connections",
            "New connections that the mesh itself lets out past the proxy.",
            by_mesh(Counter::Exempt),
        )?;
        counters(
            encoder,
            "would_drop_connections",
            "Connections and packets that audit let pass and enforce would drop.",
            by_mesh(Counter::WouldDrop),
        )
    }

    fn pods(&self, encoder: &mut DescriptorEncoder<'_>, seen: &Seen) -> fmt::Result {
        let bypassing = seen.bypassing.iter().map(|labels| (labels.clone(), 1));
        gauges(encoder, "pod_bypass", "1 while a pod's connections bypass its proxy.", bypassing)?;
        let meshes =
            seen.pods.keys().map(|(mesh, _)| mesh.clone()).collect::<std::collections::BTreeSet<_>>();
        let pods = meshes.iter().flat_map(|mesh| {
            PodVerdict::ALL.iter().map(|verdict| {
                let label = verdict.label();
                let value = seen.pods.get(&(mesh.clone(), label)).copied().unwrap_or(0);
                (vec![("mesh", mesh.clone()), ("verdict", label.into())], value)
            })
        });
        gauges(encoder, "pods", "Meshed pods of this node by verdict.", pods)
    }

    fn events(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let totals = self.maps.totals().unwrap_or(PodCounters::ZERO);
        let plain = |counter| [(Labels::new(), count(&totals, counter))];
        counters(
            encoder,
            "events_emitted",
            "Bypass events handed to the agent. emitted + suppressed + lost = bypasses, exactly.",
            plain(Counter::EventsEmitted),
        )?;
        counters(
            encoder,
            "events_suppressed",
            "Bypass events left out by the rate limit.",
            plain(Counter::EventsSuppressed),
        )?;
        counters(
            encoder,
            "events_lost",
            "Bypass events for which the ring buffer had no room.",
            plain(Counter::EventsRingFull),
        )?;
        counters(
            encoder,
            "held_connections",
            "Connections whose first SYN was held until their pod was classified.",
            plain(Counter::Held),
        )?;
        let verdicts = Counter::ALL
            .iter()
            .map(|counter| (vec![("counter", counter.label().into())], count(&totals, *counter)));
        counters(
            encoder,
            "kernel_counts",
            "The programs' own counters, all pods together, dead ones included.",
            verdicts,
        )?;
        counters(
            encoder,
            "events_dropped",
            "Items that the agent had to drop because a channel was full.",
            self.sources.health.dropped().map(|(channel, value)| (vec![("channel", channel.into())], value)),
        )
    }

    fn state(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let hooks = self.sources.health.hooks();
        let hooks = hooks.iter().map(|hook| (vec![("hook", hook.hook.clone())], u64::from(hook.effective)));
        gauges(
            encoder,
            "hook_effective",
            "1 while a hook runs for the pods: the kernel's word, not ours.",
            hooks,
        )?;
        let mode = self.maps.config().map_or("invalid", |config| mode_label(config.mode));
        let modes = Mode::ALL
            .iter()
            .map(|each| (vec![("mode", each.label().into())], u64::from(each.label() == mode)));
        gauges(encoder, "mode", "1 for the node's mode.", modes)?;
        let entries = u64::try_from(self.maps.policies().len()).unwrap_or(u64::MAX);
        gauges(encoder, "map_entries", "Entries in use.", [(vec![("map", "policy".into())], entries)])?;
        gauges(
            encoder,
            "map_capacity",
            "Entries there is room for.",
            [(vec![("map", "policy".into())], u64::from(self.maps.capacity()))],
        )?;
        let pending = self.sources.health.pending();
        gauges(
            encoder,
            "ready",
            "1 while /readyz says ready.",
            [(Labels::new(), u64::from(pending.is_empty()))],
        )?;
        gauges(
            encoder,
            "build_info",
            "1, with the version.",
            [(vec![("version", env!("CARGO_PKG_VERSION").into())], 1)],
        )
    }
}

fn add(sums: &mut Sums, namespace: &str, mesh: &str, counts: &[u64; COUNTERS]) {
    let sum = sums.entry((namespace.into(), mesh.into())).or_insert([0; COUNTERS]);
    for (sum, count) in sum.iter_mut().zip(counts) {
        *sum = sum.saturating_add(*count);
    }
}

pub(crate) fn counters(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    series: impl IntoIterator<Item = (Labels, u64)>,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (labels, value) in series {
        ConstCounter::new(value).encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}

pub(crate) fn gauges(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    series: impl IntoIterator<Item = (Labels, u64)>,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in series {
        ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)).encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}
