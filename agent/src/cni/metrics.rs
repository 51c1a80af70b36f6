//! What the CNI half counts.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::refusal::Refusal;

/// Results of [`Metrics::patches`], each of which starts at zero.
pub const RESULTS: [&str; 7] = ["patched", "merged", "unsafe", "converted", "refused", "failed", "contended"];

/// Upper bounds of [`Metrics::latency`], in seconds.
const LATENCY: [f64; 12] = [0.000_25, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0];

/// How a look at a config file ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ResultLabel {
    /// One of [`RESULTS`].
    pub result: &'static str,
}

/// Why a config file is left alone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabel {
    /// One of [`Refusal::LABELS`].
    pub reason: &'static str,
}

/// Counters of the CNI half; clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Changes of config files by result. `merged` is a patch in which another writer came in between, `unsafe` one
    /// on a file system without exchange.
    pub patches: Family<ResultLabel, Counter>,
    /// Files put in place; never more than other writers' changes.
    pub writes: Counter,
    /// Refusals by reason, counted when a file gets into that state.
    pub refusals: Family<ReasonLabel, Counter>,
    /// From the notice of another writer's change until the patched file is in place.
    pub latency: Histogram,
    /// 1 while a pod that starts gets the mesh's plugin.
    pub protected: Gauge,
    /// Time in which a pod could start without it.
    pub unprotected: Counter<f64, std::sync::atomic::AtomicU64>,
    /// How often such a time began.
    pub windows: Counter,
    /// 1 while the directory is watched; 0 while it is polled or not there.
    pub watched: Gauge,
    /// Files that another writer keeps undoing patches of.
    pub fights: Gauge,
    /// Patches put off by the limit on all writing.
    pub throttled: Counter,
    /// Scans of the whole directory because events were lost.
    pub overflows: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            patches: Family::default(),
            writes: Counter::default(),
            refusals: Family::default(),
            latency: Histogram::new(LATENCY),
            protected: Gauge::default(),
            unprotected: Counter::default(),
            windows: Counter::default(),
            watched: Gauge::default(),
            fights: Gauge::default(),
            throttled: Counter::default(),
            overflows: Counter::default(),
        };
        for result in RESULTS {
            drop(metrics.patches.get_or_create(&ResultLabel { result }));
        }
        for reason in Refusal::LABELS {
            drop(metrics.refusals.get_or_create(&ReasonLabel { reason }));
        }
        metrics
    }
}

impl Metrics {
    /// Adds them to a registry, which gives the prefix.
    pub fn register(&self, registry: &mut Registry) {
        let Self {
            patches,
            writes,
            refusals,
            latency,
            protected,
            unprotected,
            windows,
            watched,
            fights,
            throttled,
            overflows,
        } = self.clone();
        registry.register("cni_patches", "Changes of CNI config files by result", patches);
        registry.register("cni_writes", "CNI config files that nobypass put in place", writes);
        registry.register("cni_refusals", "CNI config files left alone, by reason", refusals);
        registry.register_with_unit(
            "cni_patch_latency",
            "From the notice of a change until the patched file is in place",
            Unit::Seconds,
            latency,
        );
        registry.register("cni_protected", "1 while a pod that starts gets the mesh's CNI plugin", protected);
        registry.register_with_unit(
            "cni_unprotected",
            "Time in which a pod could start without the mesh's CNI plugin",
            Unit::Seconds,
            unprotected,
        );
        registry.register("cni_unprotected_windows", "Times that protection was lost", windows);
        registry.register(
            "cni_watched",
            "1 while the CNI directory is watched, 0 while polled or missing",
            watched,
        );
        registry.register(
            "cni_fights",
            "CNI config files whose patches another writer keeps undoing",
            fights,
        );
        registry.register("cni_throttled", "Patches put off by the limit on writing", throttled);
        registry.register(
            "cni_watch_overflows",
            "Scans of the CNI directory because events were lost",
            overflows,
        );
    }

    /// Counts a result, which must be one of [`RESULTS`].
    pub fn count(&self, result: &'static str) {
        self.patches.get_or_create(&ResultLabel { result }).inc();
    }

    /// Counts a refusal.
    pub fn refused(&self, refusal: &Refusal) {
        self.refusals.get_or_create(&ReasonLabel { reason: refusal.label() }).inc();
        self.count("refused");
    }

    /// How often `result` was counted.
    pub fn counted(&self, result: &'static str) -> u64 {
        self.patches.get_or_create(&ResultLabel { result }).get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_the_documentation() {
        let metrics = Metrics::default();
        let mut registry = Registry::with_prefix("nobypass");
        metrics.register(&mut registry);
        metrics.count("patched");
        metrics.refused(&Refusal::Empty);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            r#"nobypass_cni_patches_total{result="patched"} 1"#,
            r#"nobypass_cni_patches_total{result="failed"} 0"#,
            r#"nobypass_cni_refusals_total{reason="empty"} 1"#,
            r#"nobypass_cni_refusals_total{reason="bom"} 0"#,
            r#"nobypass_cni_patch_latency_seconds_bucket{le="0.001"} 0"#,
            "nobypass_cni_protected 0",
            "nobypass_cni_unprotected_seconds_total 0.0",
        ] {
            assert!(text.contains(line), "{line} not in\n{text}");
        }
    }
}
