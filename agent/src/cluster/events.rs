//! Events on pods and on the node (events.k8s.io/v1): a bounded queue to one task, which counts what it cannot deliver.
//!
//! The library's recorder makes series of what repeats. An Event comes before the action that it tells of: who acts waits
//! for it, but never for long.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

/// Events on their way.
const QUEUE: usize = 512;
/// Who acts waits so long for its Event.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long one delivery may take.
const DELIVERY: Duration = Duration::from_secs(5);
/// Events on pods in a minute; as many may come at once.
const PER_MINUTE: u32 = 600;
/// The node is told of the same thing this often: it is about the node, not about each pod.
const NODE_PAUSE: Duration = Duration::from_secs(30);
/// Longest note, in bytes (events.k8s.io/v1: 1kB).
const NOTE: usize = 1000;
/// Who says it.
const CONTROLLER: &str = "nobypass.dev/agent";

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// A pod's connections bypass its proxy.
    MeshBypassDetected,
    /// And were dropped.
    MeshBypassBlocked,
    /// A pod is redirected again.
    MeshRedirectRepaired,
    /// A pod is evicted.
    MeshPodEvicted,
    /// Pods started while the node was not protected.
    MeshPodsStartedUnprotected,
}

impl Reason {
    /// All values.
    pub const ALL: [Self; 5] = [
        Self::MeshBypassDetected,
        Self::MeshBypassBlocked,
        Self::MeshRedirectRepaired,
        Self::MeshPodEvicted,
        Self::MeshPodsStartedUnprotected,
    ];

    /// The Event's reason.
    pub const fn label(self) -> &'static str {
        match self {
            Self::MeshBypassDetected => "MeshBypassDetected",
            Self::MeshBypassBlocked => "MeshBypassBlocked",
            Self::MeshRedirectRepaired => "MeshRedirectRepaired",
            Self::MeshPodEvicted => "MeshPodEvicted",
            Self::MeshPodsStartedUnprotected => "MeshPodsStartedUnprotected",
        }
    }
}

/// A pod that an Event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodRef {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
}

/// One Event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// What happened.
    pub reason: Reason,
    /// What is done about it, in CamelCase.
    pub action: &'static str,
    /// For people.
    pub text: String,
    /// The pod; without one it is about the node alone.
    pub pod: Option<PodRef>,
}

/// Labels of [`Metrics`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    reason: &'static str,
    result: &'static str,
}

/// Events by what became of them; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Metrics(Family<Labels, Counter>);

impl Metrics {
    /// Adds them to a registry, which gives the prefix.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("kube_events", "Kubernetes Events by what became of them", self.0.clone());
    }

    fn count(&self, reason: Reason, result: &'static str) {
        self.0.get_or_create(&Labels { reason: reason.label(), result }).inc();
    }

    /// How many.
    pub fn counted(&self, reason: Reason, result: &'static str) -> u64 {
        self.0.get(&Labels { reason: reason.label(), result }).map_or(0, |counter| counter.get())
    }
}

type Item = (Note, oneshot::Sender<()>);

/// Where Events are given up.
#[derive(Clone, Debug)]
pub struct Events {
    queue: mpsc::Sender<Item>,
    metrics: Metrics,
}

impl Events {
    /// A queue, and the task that empties it.
    pub fn new(client: Client, node: &str, metrics: Metrics) -> (Self, Task) {
        let (queue, items) = mpsc::channel(QUEUE);
        let reporter = Reporter { controller: CONTROLLER.to_owned(), instance: Some(node.to_owned()) };
        let task = Task {
            recorder: Recorder::new(client, reporter),
            node: node.to_owned(),
            items,
            metrics: metrics.clone(),
            pace: Pace::new(Instant::now()),
            told: Vec::new(),
        };
        (Self { queue, metrics }, task)
    }

    /// Gives up an Event, and waits until it was delivered or cannot be, at most two seconds.
    pub async fn say(&self, note: Note) {
        let (done, delivered) = oneshot::channel();
        let reason = note.reason;
        if self.queue.try_send((note, done)).is_err() {
            self.metrics.count(reason, "dropped");
            return;
        }
        // What is still on its way then is delivered all the same.
        let _ = timeout(PATIENCE, delivered).await;
    }
}

/// Refills one piece at a time.
#[derive(Debug)]
struct Pace {
    saved: Duration,
    at: Instant,
}

impl Pace {
    fn new(now: Instant) -> Self {
        Self { saved: Duration::from_secs(60), at: now }
    }

    fn take(&mut self, now: Instant) -> bool {
        let minute = Duration::from_secs(60);
        self.saved = (self.saved + now.saturating_duration_since(self.at)).min(minute);
        self.at = now;
        let Some(left) = self.saved.checked_sub(minute / PER_MINUTE) else { return false };
        self.saved = left;
        true
    }
}

/// Delivers Events.
pub struct Task {
    recorder: Recorder,
    node: String,
    items: mpsc::Receiver<Item>,
    metrics: Metrics,
    pace: Pace,
    /// What the node was last told, and when.
    told: Vec<(Reason, &'static str, Instant)>,
}

impl std::fmt::Debug for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Task").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Task {
    /// Works until nobody can say anything any more.
    pub async fn run(mut self) {
        while let Some((note, done)) = self.items.recv().await {
            self.deliver(note).await;
            // Who said it may not wait any more.
            let _ = done.send(());
        }
    }

    async fn deliver(&mut self, note: Note) {
        let Note { reason, action, mut text, pod } = note;
        if text.len() > NOTE {
            text.truncate(text.floor_char_boundary(NOTE));
            text.push('…');
        }
        let node = ObjectReference {
            kind: Some("Node".to_owned()),
            api_version: Some("v1".to_owned()),
            name: Some(self.node.clone()),
            // As the kubelet's own Events say it, by which `kubectl describe node` finds them.
            uid: Some(self.node.clone()),
            ..ObjectReference::default()
        };
        let event = |secondary, text: String| Event {
            type_: EventType::Warning,
            reason: reason.label().to_owned(),
            note: Some(text),
            action: action.to_owned(),
            secondary,
        };
        let Some(PodRef { namespace, name, uid }) = pod else {
            return self.publish(reason, &event(None, text), &node).await;
        };
        let now = Instant::now();
        if !self.pace.take(now) {
            return self.metrics.count(reason, "limited");
        }
        let about = format!("pod {namespace}/{name}: {text}");
        let pod = ObjectReference {
            kind: Some("Pod".to_owned()),
            api_version: Some("v1".to_owned()),
            namespace: Some(namespace),
            name: Some(name),
            uid: Some(uid),
            ..ObjectReference::default()
        };
        self.publish(reason, &event(Some(node.clone()), text), &pod).await;
        self.told.retain(|(_, _, at)| now.duration_since(*at) < NODE_PAUSE);
        if self.told.iter().any(|(told, of, _)| (*told, *of) == (reason, action)) {
            return self.metrics.count(reason, "deduplicated");
        }
        self.told.push((reason, action, now));
        self.publish(reason, &event(None, about), &node).await;
    }

    async fn publish(&self, reason: Reason, event: &Event, about: &ObjectReference) {
        let result = match timeout(DELIVERY, self.recorder.publish(event, about)).await {
            Ok(Ok(())) => "sent",
            Ok(Err(kube::Error::Api(status))) if status.code == 403 => "forbidden",
            Ok(Err(error)) => {
                tracing::debug!(%error, reason = reason.label(), "an Event could not be delivered");
                "failed"
            }
            Err(_) => "failed",
        };
        self.metrics.count(reason, result);
    }
}
