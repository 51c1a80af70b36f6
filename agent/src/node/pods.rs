//! Other pods of this node that have to be ready before the gate opens, such as a mesh's own DaemonSet.

use std::collections::BTreeMap;

use futures_util::StreamExt as _;
use kube::Client;
use kube::api::Api;
use kube::core::{ApiResource, NotUsed, Object};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::gate::{Part, Reason};
use super::object::Condition;

/// Which pods.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Selector {
    /// Their namespace.
    pub namespace: String,
    /// A label selector, as the API takes it.
    pub labels: String,
}

impl Selector {
    /// Reads `NAMESPACE/SELECTOR`.
    ///
    /// # Errors
    /// How to write it.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some((namespace, labels)) if !namespace.is_empty() && labels.contains(['=', '!', ' ']) => {
                Ok(Self { namespace: namespace.to_owned(), labels: labels.to_owned() })
            }
            _ => Err("write NAMESPACE/SELECTOR, as istio-system/app=ztunnel".to_owned()),
        }
    }
}

impl std::fmt::Display for Selector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.labels)
    }
}

/// Whether the pods of a selector are ready, by name; `None` until they were listed.
pub type Seen = Option<BTreeMap<String, bool>>;

/// What all selectors together mean for the gate. Each must match a pod, and all its pods must be ready.
pub fn part(seen: &[(Selector, Seen)]) -> Part {
    if seen.is_empty() {
        return Part::Off;
    }
    for (selector, pods) in seen {
        let bad = |what: String| Part::Bad(Reason::PodsNotReady, what);
        match pods {
            None => return Part::Pending("the pods that have to be ready are not listed yet"),
            Some(pods) if pods.is_empty() => return bad(format!("no pod of {selector} runs on this node")),
            Some(pods) => {
                if let Some((name, _)) = pods.iter().find(|(_, ready)| !**ready) {
                    return bad(format!("the pod {}/{name} is not ready", selector.namespace));
                }
            }
        }
    }
    Part::Good
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Status {
    #[serde(default)]
    conditions: Vec<Condition>,
}

type Pod = Object<NotUsed, Status>;

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| &status.conditions);
    let ready =
        conditions.filter(|condition| condition.r#type == "Ready").any(|ready| ready.status == "True");
    ready && pod.metadata.deletion_timestamp.is_none()
}

/// Follows the pods of one selector on this node until nobody wants to know.
pub async fn follow(client: Client, node: String, selector: Selector, seen: watch::Sender<Seen>) {
    let resource = ApiResource::erase::<k8s_openapi::api::core::v1::Pod>(&());
    let api: Api<Pod> = Api::namespaced_with(client, &selector.namespace, &resource);
    let config = watcher::Config::default().fields(&format!("spec.nodeName={node}")).labels(&selector.labels);
    let events = watcher(api, config).default_backoff();
    tokio::pin!(events);
    let mut pods = BTreeMap::new();
    let mut listing = BTreeMap::new();
    while let Some(event) = events.next().await {
        let name = |pod: &Pod| pod.metadata.name.clone().unwrap_or_default();
        let told = !matches!(event, Ok(Event::Init | Event::InitApply(_)) | Err(_));
        match event {
            Ok(Event::Init) => listing.clear(),
            Ok(Event::InitApply(pod)) => drop(listing.insert(name(&pod), is_ready(&pod))),
            Ok(Event::InitDone) => pods = std::mem::take(&mut listing),
            Ok(Event::Apply(pod)) => drop(pods.insert(name(&pod), is_ready(&pod))),
            Ok(Event::Delete(pod)) => drop(pods.remove(&name(&pod))),
            Err(error) => {
                tracing::debug!(%error, %selector, "the watch of pods that have to be ready failed, trying again");
            }
        }
        if told && seen.send(Some(pods.clone())).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors() {
        let parsed = Selector::parse("istio-system/app=ztunnel,x!=y").unwrap();
        assert_eq!((parsed.namespace.as_str(), parsed.labels.as_str()), ("istio-system", "app=ztunnel,x!=y"));
        for wrong in ["", "app=ztunnel", "/app=x", "istio-system/", "istio-system"] {
            assert!(Selector::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn each_selector_needs_a_pod_and_all_of_them_ready() {
        let selector = |name: &str| Selector { namespace: "ns".into(), labels: format!("app={name}") };
        let pods = |pods: &[(&str, bool)]| {
            Some(pods.iter().map(|(name, ready)| ((*name).to_owned(), *ready)).collect())
        };
        let part = |seen: &[(Selector, Seen)]| match part(seen) {
            Part::Off => "off".to_owned(),
            Part::Good => "good".to_owned(),
            Part::Pending(_) => "pending".to_owned(),
            Part::Bad(reason, text) => format!("{}: {text}", reason.label()),
        };
        assert_eq!(part(&[]), "off");
        assert_eq!(part(&[(selector("a"), None)]), "pending");
        assert_eq!(part(&[(selector("a"), pods(&[]))]), "PodsNotReady: no pod of ns/app=a runs on this node");
        let ready = (selector("a"), pods(&[("a1", true)]));
        assert_eq!(part(std::slice::from_ref(&ready)), "good");
        let two = [ready, (selector("b"), pods(&[("b1", true), ("b2", false)]))];
        assert_eq!(part(&two), "PodsNotReady: the pod ns/b2 is not ready");
    }
}
