//! What becomes of sockets.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// What became of an attempt to abort a socket.
pub const RESULTS: [&str; 4] = ["aborted", "gone", "failed", "dropped"];

/// What was done with a connection older than the programs.
pub const ACTIONS: [&str; 2] = ["reported", "aborted"];

/// A result.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ResultLabel {
    /// One of [`RESULTS`].
    pub result: &'static str,
}

/// An action.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ActionLabel {
    /// One of [`ACTIONS`].
    pub action: &'static str,
}

/// Counters; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Sockets whose SYN was dropped.
    pub aborts: Family<ResultLabel, Counter>,
    /// Connections older than the programs.
    pub preexisting: Family<ActionLabel, Counter>,
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self { aborts: Family::default(), preexisting: Family::default() };
        for result in RESULTS {
            drop(metrics.aborts.get_or_create(&ResultLabel { result }));
        }
        for action in ACTIONS {
            drop(metrics.preexisting.get_or_create(&ActionLabel { action }));
        }
        metrics
    }
}

impl Metrics {
    /// Counts one attempt.
    pub fn abort(&self, result: &'static str) {
        self.aborts.get_or_create(&ResultLabel { result }).inc();
    }

    /// Counts connections older than the programs.
    pub fn old(&self, action: &'static str, connections: usize) {
        let connections = u64::try_from(connections).unwrap_or(u64::MAX);
        self.preexisting.get_or_create(&ActionLabel { action }).inc_by(connections);
    }

    /// Adds them to the registry.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "refused_sockets",
            "Sockets whose SYN was dropped, by what became of the attempt to let connect() fail at once.",
            self.aborts.clone(),
        );
        registry.register(
            "preexisting_connections",
            "Connections past the proxy that were there before the programs or the redirection, by what was done.",
            self.preexisting.clone(),
        );
    }
}
