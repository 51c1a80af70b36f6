//! What the gate counts.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::desired::Output;
use super::gate::Reason;

/// Upper bounds of [`Metrics::untaint`], in seconds.
const UNTAINT: [f64; 9] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];

/// Labels of [`Metrics::writes`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WriteLabels {
    /// What was written: `condition`, `label` or `taint`.
    pub output: &'static str,
    /// `success`, `conflict`, `forbidden`, `failed` or `put_off`.
    pub result: &'static str,
}

/// Labels of [`Metrics::reason`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabels {
    /// The reason of the Node condition.
    pub reason: &'static str,
}

/// Counters of the gate; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// 1 while the gate is open.
    pub ready: Gauge,
    /// 1 for the reason of the gate's state.
    pub reason: Family<ReasonLabels, Gauge>,
    /// Pods whose sandbox was made while the node was not protected.
    pub started_unprotected: Counter,
    /// 1 while one of the startup taints is on the node.
    pub tainted: Gauge,
    /// From the gate's opening until no startup taint is left.
    pub untaint: Histogram,
    /// Writes to the Node object.
    pub writes: Family<WriteLabels, Counter>,
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            ready: Gauge::default(),
            reason: Family::default(),
            started_unprotected: Counter::default(),
            tainted: Gauge::default(),
            untaint: Histogram::new(UNTAINT),
            writes: Family::default(),
        };
        for output in Output::ALL {
            for result in ["success", "failed"] {
                drop(metrics.writes.get_or_create(&WriteLabels { output: output.label(), result }));
            }
        }
        metrics
    }
}

impl Metrics {
    /// Adds them to a registry, which gives the prefix.
    pub fn register(&self, registry: &mut Registry) {
        let Self { ready, reason, started_unprotected, tainted, untaint, writes } = self.clone();
        registry.register("node_ready", "1 while this node is safe for meshed pods", ready);
        registry.register("node_gate", "1 for the reason of the gate's state", reason);
        registry.register(
            "pods_started_unprotected",
            "Meshed pods that started while the CNI configuration had no mesh plugin",
            started_unprotected,
        );
        registry.register("startup_taint_present", "1 while a startup taint is on the node", tainted);
        registry.register_with_unit(
            "untaint_duration",
            "From the gate's opening until no startup taint was left",
            Unit::Seconds,
            untaint,
        );
        registry.register("node_writes", "Writes to the Node object by how they ended", writes);
    }

    /// Shows the gate's state.
    pub fn show(&self, open: bool, reason: Reason) {
        self.ready.set(i64::from(open));
        for each in Reason::ALL {
            self.reason.get_or_create(&ReasonLabels { reason: each.label() }).set(i64::from(each == reason));
        }
    }

    pub(super) fn wrote(&self, output: Output, result: &'static str) {
        self.writes.get_or_create(&WriteLabels { output: output.label(), result }).inc();
    }
}
