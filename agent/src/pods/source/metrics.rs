//! How the sources fare, for `/metrics` and `/readyz`.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use tokio::sync::watch;

use super::cri::CriState;
use super::kube::KubeState;
use crate::metrics::{Labels, counters, gauges};

/// The states of the sources in use.
#[derive(Debug, Clone, Default)]
pub struct States {
    /// The container runtime.
    pub cri: Option<watch::Receiver<CriState>>,
    /// The API server.
    pub kube: Option<watch::Receiver<KubeState>>,
}

/// What is to be said of any source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// As in `--pods`.
    pub name: &'static str,
    /// It answers.
    pub connected: bool,
    /// It told all it knows at least once.
    pub synced: bool,
    /// Pods that it knows.
    pub pods: usize,
    /// When it spoke last.
    pub last_event: Option<SystemTime>,
    /// Failures by reason.
    pub errors: Vec<(&'static str, u64)>,
    /// Why it did not answer, last time.
    pub last_error: Option<String>,
}

impl Source {
    /// What is missing, for people.
    #[must_use]
    pub fn pending(&self) -> String {
        match (self.connected, &self.last_error) {
            (true, _) => format!("{}: connected, listing", self.name),
            (false, Some(error)) => format!("{}: {error}", self.name),
            (false, None) => format!("{}: not connected yet", self.name),
        }
    }
}

impl States {
    /// All of them, as they are now.
    #[must_use]
    pub fn read(&self) -> Vec<Source> {
        let cri = self.cri.as_ref().map(|state| {
            let state = state.borrow();
            Source {
                name: "cri",
                connected: state.connected,
                synced: state.synced,
                pods: state.pods,
                last_event: state.last_round_at,
                errors: vec![("connection", state.failures), ("details", state.details_failed)],
                last_error: state.last_error.clone(),
            }
        });
        let kube = self.kube.as_ref().map(|state| {
            let state = state.borrow();
            Source {
                name: "kube",
                connected: state.connected,
                synced: state.synced,
                pods: state.pods,
                last_event: state.last_event,
                errors: state.errors().collect(),
                last_error: state.last_error.clone(),
            }
        });
        cri.into_iter().chain(kube).collect()
    }

    /// Waits until one changes. Whether it did: a source that ended changes no more.
    pub async fn changed(&mut self) -> bool {
        async fn next<T>(state: Option<&mut watch::Receiver<T>>) -> bool {
            match state {
                Some(state) => state.changed().await.is_ok(),
                None => std::future::pending().await,
            }
        }
        tokio::select! {
            changed = next(self.cri.as_mut()) => changed,
            changed = next(self.kube.as_mut()) => changed,
        }
    }
}

impl Collector for States {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let sources = self.read();
        let labels = |source: &Source| -> Labels { vec![("source", source.name.into())] };
        let flag =
            |what: fn(&Source) -> u64| sources.iter().map(move |source| (labels(source), what(source)));
        gauges(
            &mut encoder,
            "pod_source_connected",
            "1 while a source of facts about pods answers.",
            flag(|source| source.connected.into()),
        )?;
        gauges(
            &mut encoder,
            "pod_source_synced",
            "1 once a source has told all it knows.",
            flag(|source| source.synced.into()),
        )?;
        gauges(
            &mut encoder,
            "pod_source_pods",
            "Pods that a source knows; while it is away, the last ones.",
            flag(|source| u64::try_from(source.pods).unwrap_or(u64::MAX)),
        )?;
        gauges(
            &mut encoder,
            "pod_source_last_event_timestamp_seconds",
            "When a source spoke last, in seconds since 1970; 0 if never.",
            flag(|source| {
                source
                    .last_event
                    .and_then(|at| at.duration_since(UNIX_EPOCH).ok())
                    .map_or(0, |at| at.as_secs())
            }),
        )?;
        let errors = sources.iter().flat_map(|source| {
            source.errors.iter().map(|(reason, count)| {
                (vec![("source", source.name.into()), ("reason", (*reason).into())], *count)
            })
        });
        counters(&mut encoder, "pod_source_errors", "Requests to a source that failed.", errors)
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::pods::model::Wanted;
    use crate::pods::source::cri::{CriOptions, CriSource};
    use crate::pods::source::kube::{KubeOptions, KubeSource};

    #[test]
    fn every_source_in_use_is_exported() {
        let (_cri, cri) = CriSource::new(CriOptions::new(watch::channel(Wanted::default()).1));
        let (_kube, kube) = KubeSource::new(KubeOptions::new("n1", watch::channel(Wanted::default()).1));
        let mut registry = Registry::with_prefix("nobypass");
        registry.register_collector(Box::new(States { cri: Some(cri.clone()), kube: Some(kube) }));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "nobypass_pod_source_connected{source=\"cri\"} 0",
            "nobypass_pod_source_synced{source=\"kube\"} 0",
            "nobypass_pod_source_last_event_timestamp_seconds{source=\"kube\"} 0",
            "nobypass_pod_source_errors_total{source=\"cri\",reason=\"connection\"} 0",
            "nobypass_pod_source_errors_total{source=\"kube\",reason=\"gone\"} 0",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
        let alone = States { cri: Some(cri), kube: None }.read();
        assert_eq!(alone.iter().map(|source| source.name).collect::<Vec<_>>(), ["cri"]);
        assert_eq!(alone.first().map(Source::pending).as_deref(), Some("cri: not connected yet"));
    }
}
