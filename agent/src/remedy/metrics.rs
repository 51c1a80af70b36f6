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
    /// The node lacks the mesh's plugin or its entry at this moment.
    NotReady,
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
            Self::NotReady => "not_ready",
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

/// How far the remedies of a pod are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// For its grace, the gate, a budget or its next try.
    Waiting,
    /// The plugin runs, or the probe that proves it.
    Repairing,
    /// Its owner is looked up, or it is being evicted.
    Evicting,
    /// Redirected again since a moment.
    Healed,
    /// Evicted, or gone.
    Leaving,
    /// No remedy is left.
    Helpless,
}

impl Stage {
    /// All values.
    pub const ALL: [Self; 6] =
        [Self::Waiting, Self::Repairing, Self::Evicting, Self::Healed, Self::Leaving, Self::Helpless];

    /// Label in metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Repairing => "repairing",
            Self::Evicting => "evicting",
            Self::Healed => "healed",
            Self::Leaving => "leaving",
            Self::Helpless => "helpless",
        }
    }
}

/// Label of [`Metrics::pods`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StageLabel {
    /// See [`Stage`].
    pub stage: &'static str,
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
    /// Pods that bypass, or did a moment ago, by how far remedies are.
    pub pods: Family<StageLabel, Gauge>,
    /// 1 while repairs are paused because the plugin keeps failing.
    pub paused: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            actions: Family::default(),
            repair_time: Histogram::new(REPAIR_TIME),
            pods: Family::default(),
            paused: Gauge::default(),
        };
        metrics.show([]);
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
        let Self { actions, repair_time, pods, paused } = self.clone();
        registry.register("remedy_actions", "Remedies for bypassing pods, by how they ended", actions);
        registry.register_with_unit(
            "remedy_repair_duration",
            "From the start of a pod's repair in place until it was proven",
            Unit::Seconds,
            repair_time,
        );
        registry.register(
            "remedy_pods",
            "Pods that bypass, or did a moment ago, by how far their remedies are",
            pods,
        );
        registry.register(
            "remedy_paused",
            "1 while repairs and evictions are paused because the mesh's plugin keeps failing",
            paused,
        );
    }

    /// How far the remedies of all pods are now.
    pub fn show(&self, stages: impl IntoIterator<Item = Stage>) {
        let mut counts = Stage::ALL.map(|stage| (stage, 0));
        for stage in stages {
            counts.iter_mut().filter(|(of, _)| *of == stage).for_each(|(_, count)| *count += 1);
        }
        for (stage, count) in counts {
            self.pods.get_or_create(&StageLabel { stage: stage.label() }).set(count);
        }
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
