//! What probes count.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::Answer;

/// Upper bounds of [`Metrics::duration`], in seconds.
const DURATION: [f64; 10] = [0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.05, 0.25, 2.0];

/// What a question came to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ResultLabel {
    /// One of [`Answer::LABELS`].
    pub result: &'static str,
}

/// Whose pods.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PodsLabel {
    /// Their namespace.
    pub namespace: String,
    /// Their mesh.
    pub mesh: String,
}

/// Counters of probes; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Questions by answer, one for each IP family of each probe.
    pub answers: Family<ResultLabel, Counter>,
    /// From a probe's turn until its answers.
    pub duration: Histogram,
    /// Meshed pods with a process that may open packet sockets.
    pub packet: Family<PodsLabel, Gauge>,
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            answers: Family::default(),
            duration: Histogram::new(DURATION),
            packet: Family::default(),
        };
        for result in Answer::LABELS {
            drop(metrics.answers.get_or_create(&ResultLabel { result }));
        }
        metrics
    }
}

impl Metrics {
    /// Adds them to the registry.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "probe",
            "Questions to pods' networks whether a new connection would be redirected, by answer.",
            self.answers.clone(),
        );
        registry.register_with_unit(
            "probe_duration",
            "Time that the questions to one pod took.",
            Unit::Seconds,
            self.duration.clone(),
        );
        registry.register(
            "packet_socket_pods",
            "Meshed pods with a process that may open packet sockets (CAP_NET_RAW), whose packets nothing here sees.",
            self.packet.clone(),
        );
    }
}
