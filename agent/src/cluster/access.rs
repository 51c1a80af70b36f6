//! Whether the service account may do what a feature needs: asked before the feature is relied upon.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::Client;
use kube::api::{Api, PostParams};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

/// Something that needs permissions of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Feature {
    /// Events on pods and the node.
    Events,
    /// The Node condition.
    GateCondition,
    /// The node label.
    GateLabel,
    /// Startup taints.
    GateTaint,
    /// Other pods that have to be ready.
    GatePods,
    /// The label on bypassing pods.
    PodLabel,
    /// Evictions.
    Evict,
}

/// One permission: verb, API group, resource, sub-resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Permission(pub &'static str, pub &'static str, pub &'static str, pub &'static str);

impl std::fmt::Display for Permission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self(verb, group, resource, sub) = self;
        write!(f, "{verb} {resource}")?;
        if !sub.is_empty() {
            write!(f, "/{sub}")?;
        }
        if group.is_empty() { Ok(()) } else { write!(f, ".{group}") }
    }
}

/// What following this node's pods needs. That is no feature: without it nothing is known of pods by the API server.
pub const PODS: [Permission; 4] = [
    Permission("list", "", "pods", ""),
    Permission("watch", "", "pods", ""),
    Permission("list", "", "namespaces", ""),
    Permission("watch", "", "namespaces", ""),
];

impl Feature {
    /// All values.
    pub const ALL: [Self; 7] = [
        Self::Events,
        Self::GateCondition,
        Self::GateLabel,
        Self::GateTaint,
        Self::GatePods,
        Self::PodLabel,
        Self::Evict,
    ];

    /// Label in metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Events => "events",
            Self::GateCondition => "gate_condition",
            Self::GateLabel => "gate_label",
            Self::GateTaint => "gate_taint",
            Self::GatePods => "gate_pods",
            Self::PodLabel => "pod_label",
            Self::Evict => "evict",
        }
    }

    /// What it needs.
    pub const fn needs(self) -> &'static [Permission] {
        const WATCH_NODE: [Permission; 2] =
            [Permission("list", "", "nodes", ""), Permission("watch", "", "nodes", "")];
        match self {
            Self::Events => &[
                Permission("create", "events.k8s.io", "events", ""),
                Permission("patch", "events.k8s.io", "events", ""),
            ],
            Self::GateCondition => {
                &[WATCH_NODE[0], WATCH_NODE[1], Permission("patch", "", "nodes", "status")]
            }
            Self::GateLabel | Self::GateTaint => {
                &[WATCH_NODE[0], WATCH_NODE[1], Permission("patch", "", "nodes", "")]
            }
            Self::GatePods => &[Permission("list", "", "pods", ""), Permission("watch", "", "pods", "")],
            Self::PodLabel => &[Permission("patch", "", "pods", "status")],
            Self::Evict => &[Permission("get", "", "pods", ""), Permission("create", "", "pods", "eviction")],
        }
    }
}

/// Which of a feature's permissions are missing.
///
/// # Errors
/// The API server cannot be asked.
pub async fn missing(client: &Client, feature: Feature) -> Result<Vec<Permission>, kube::Error> {
    lacking(client, feature.needs()).await
}

/// Which of these permissions are missing.
///
/// # Errors
/// As [`missing`].
pub async fn lacking(client: &Client, needs: &[Permission]) -> Result<Vec<Permission>, kube::Error> {
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let mut missing = Vec::new();
    for permission in needs {
        let Permission(verb, group, resource, sub) = *permission;
        let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let attributes = ResourceAttributes {
            verb: text(verb),
            group: Some(group.to_owned()),
            resource: text(resource),
            subresource: text(sub),
            ..ResourceAttributes::default()
        };
        let review = SelfSubjectAccessReview {
            spec: SelfSubjectAccessReviewSpec {
                resource_attributes: Some(attributes),
                ..SelfSubjectAccessReviewSpec::default()
            },
            ..SelfSubjectAccessReview::default()
        };
        let answer = reviews.create(&PostParams::default(), &review).await?;
        if !answer.status.is_some_and(|status| status.allowed) {
            missing.push(*permission);
        }
    }
    Ok(missing)
}

/// What of the wanted features is allowed: asked at the start, and again now and then while something is missing.
#[derive(Clone, Debug)]
pub struct Permissions {
    off: watch::Receiver<BTreeSet<Feature>>,
    metrics: Family<Labels, Gauge>,
}

/// Labels of the metric.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    feature: &'static str,
}

/// Asked again so soon while the API server does not answer.
const RETRY: Duration = Duration::from_secs(10);
/// What is missing is asked for again after this.
const AGAIN: Duration = Duration::from_secs(600);

impl Permissions {
    /// Everything is allowed: nobody was asked.
    pub fn unasked() -> (Self, watch::Sender<BTreeSet<Feature>>) {
        let (sender, off) = watch::channel(BTreeSet::new());
        (Self { off, metrics: Family::default() }, sender)
    }

    /// Adds the metric to a registry, which gives the prefix.
    pub fn register(&self, registry: &mut Registry) {
        let help = "1 while the service account may do what a feature needs, 0 while the feature is off for want of it";
        registry.register("permission", help, self.metrics.clone());
    }

    /// The features that are off.
    pub fn off(&self) -> watch::Receiver<BTreeSet<Feature>> {
        self.off.clone()
    }

    /// Asks for what is `wanted` until nobody wants to know; `tell` is called with each change of a feature and what to say
    /// of it if it is off.
    pub async fn follow(
        self,
        client: Client,
        mut wanted: watch::Receiver<BTreeSet<Feature>>,
        off: watch::Sender<BTreeSet<Feature>>,
        tell: impl Fn(Feature, Option<String>),
    ) {
        let mut granted = BTreeSet::new();
        loop {
            let features = wanted.borrow_and_update().clone();
            let unwanted: Vec<Feature> = off.borrow().difference(&features).copied().collect();
            for feature in unwanted {
                off.send_if_modified(|off| off.remove(&feature));
                self.metrics.remove(&Labels { feature: feature.label() });
                tell(feature, None);
            }
            let mut pause = None;
            for feature in features.difference(&granted).copied().collect::<Vec<_>>() {
                let missing = match missing(&client, feature).await {
                    Ok(missing) => missing,
                    Err(error) => {
                        tracing::debug!(%error, feature = feature.label(), "cannot ask for permissions, trying again");
                        pause = Some(RETRY);
                        continue;
                    }
                };
                let allowed = missing.is_empty();
                self.metrics.get_or_create(&Labels { feature: feature.label() }).set(i64::from(allowed));
                if allowed {
                    granted.insert(feature);
                } else {
                    pause = pause.or(Some(AGAIN));
                }
                let changed = off
                    .send_if_modified(|off| if allowed { off.remove(&feature) } else { off.insert(feature) });
                if changed {
                    let sentence = (!allowed).then(|| sentence(feature, &missing));
                    if let Some(sentence) = &sentence {
                        tracing::warn!("{sentence}");
                    }
                    tell(feature, sentence);
                }
            }
            let again = async {
                match pause {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = wanted.changed() => if changed.is_err() { break },
                () = again => {}
                () = off.closed() => return,
            }
        }
        // What is off never changes any more; nobody must take that for an end.
        off.closed().await;
    }
}

/// What to tell of missing permissions.
pub fn sentence(feature: Feature, missing: &[Permission]) -> String {
    let missing: Vec<String> = missing.iter().map(ToString::to_string).collect();
    format!(
        "{} is off: the service account may not {}; grant it in the ClusterRole, or switch the feature off",
        feature.label(),
        missing.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences() {
        let text = sentence(Feature::Evict, Feature::Evict.needs());
        assert!(
            text.starts_with("evict is off: the service account may not get pods, create pods/eviction;"),
            "{text}"
        );
        assert_eq!(Feature::Events.needs()[0].to_string(), "create events.events.k8s.io");
    }
}
