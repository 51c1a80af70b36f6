//! What remedies count.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// Upper bounds of [`Metrics::repair_time`], in seconds.
const REPAIR_TIME: [f64; 9] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];

/// Kinds of actions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// An Event.
    Event,
    /// The pod's label.
    Label,
    /// Repair in place.
    Repair,
    /// Eviction.
    Evict,
}

/// How they end. What is put off is counted when that begins, not again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum End {
    /// Done; a repair: and proven.
    Success,
    /// Only said.
    DryRun,
    /// Failed.
    Failed,
    /// Did not end in time.
    Timeout,
    /// The plugin was content, the probe is not.
    Unproven,
    /// The plugin was content, and nobody can say whether it helped.
    Unconfirmed,
    /// Cannot be tried for this pod.
    Impossible,
    /// The node's gate is closed.
    GateClosed,
    /// The budget of the node or the workload is used up.
    RateLimited,
    /// The mesh's plugin keeps failing on this node: nothing is done to further pods for a while.
    Paused,
    /// A disruption budget does not allow it now.
    BlockedPdb,
    /// Nobody would replace the pod.
    Unowned,
    /// The pod is a mirror of a static one.
    Mirror,
    /// The pod ends, or has ended.
    Ending,
    /// The pod is gone.
    Gone,
    /// Another pod has the name.
    Conflict,
    /// The permission is missing.
    Forbidden,
    /// The API server cannot be reached.
    Unavailable,
}

impl Kind {
    /// All values.
    pub const ALL: [Self; 4] = [Self::Event, Self::Label, Self::Repair, Self::Evict];

    /// Label in metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Event => "event",
            Self::Label => "label",
            Self::Repair => "repair",
            Self::Evict => "evict",
        }
    }
}

impl End {
    /// Label in metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::DryRun => "dry_run",
            Self::Failed => "failed",
            Self::Timeout => "timeout",
            Self::Unproven => "unproven",
            Self::Unconfirmed => "unconfirmed",
            Self::Impossible => "impossible",
            Self::GateClosed => "gate_closed",
            Self::RateLimited => "rate_limited",
            Self::Paused => "paused",
            Self::BlockedPdb => "blocked_pdb",
            Self::Unowned => "unowned",
            Self::Mirror => "mirror",
            Self::Ending => "ending",
            Self::Gone => "gone",
            Self::Conflict => "conflict",
            Self::Forbidden => "forbidden",
            Self::Unavailable => "unavailable",
        }
    }
}

/// Labels of [`Metrics::actions`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Labels {
    /// See [`Kind`].
    pub action: &'static str,
    /// See [`End`].
    pub result: &'static str,
}

/// Counters of remedies; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Actions by how they ended.
    pub actions: Family<Labels, Counter>,
    /// From the start of a repair to its proof.
    pub repair_time: Histogram,
    /// Pods that bypass and for which nothing more can be done.
    pub helpless: Gauge,
    /// 1 while repairs are paused because the plugin keeps failing.
    pub paused: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            actions: Family::default(),
            repair_time: Histogram::new(REPAIR_TIME),
            helpless: Gauge::default(),
            paused: Gauge::default(),
        };
        for kind in Kind::ALL {
            for end in
                [End::Success, End::Failed, End::Timeout, End::Unproven, End::Impossible, End::Forbidden]
            {
                drop(metrics.actions.get_or_create(&Labels { action: kind.label(), result: end.label() }));
            }
        }
        metrics
    }
}

impl Metrics {
    /// Adds them to a registry, which gives the prefix.
    pub fn register(&self, registry: &mut Registry) {
        let Self { actions, repair_time, helpless, paused } = self.clone();
        registry.register("remedy_actions", "Remedies for bypassing pods, by how they ended", actions);
        registry.register_with_unit(
            "remedy_repair_duration",
            "From the start of a pod's repair in place until it was proven",
            Unit::Seconds,
            repair_time,
        );
        registry.register("remedy_helpless_pods", "Bypassing pods for which no remedy is left", helpless);
        registry.register(
            "remedy_paused",
            "1 while repairs and evictions are paused because the mesh's plugin keeps failing",
            paused,
        );
    }

    /// Counts one.
    pub fn count(&self, kind: Kind, end: End) {
        self.actions.get_or_create(&Labels { action: kind.label(), result: end.label() }).inc();
    }

    /// How many were counted.
    pub fn counted(&self, kind: Kind, end: End) -> u64 {
        let labels = Labels { action: kind.label(), result: end.label() };
        self.actions.get(&labels).map_or(0, |counter| counter.get())
    }
}
