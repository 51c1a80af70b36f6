//! Pods of this node as the API server knows them, with what their namespaces say.
//!
//! Two watches: the pods of this node alone, so that a large cluster costs nothing, and the metadata of all
//! namespaces, of which only what somebody wants is kept. While the server is away, what is known holds; what
//! happened meanwhile comes with the next listing.

mod book;
mod facts;
#[cfg(test)]
mod manifests;
mod object;

use std::sync::Arc;
use std::time::SystemTime;

use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use self::book::Book;
use self::object::{Namespace, Pod};
use super::{PodUpdate, other_wanted};
use crate::cluster::error::RequestError;
use crate::cluster::watch::{Change, Collection, Patience, follow};
use crate::pods::model::Wanted;

/// Objects on their way from a watch to the book.
const QUEUE: usize = 64;

/// What to follow, and what to keep of it.
#[derive(Debug, Clone)]
pub struct KubeOptions {
    /// The node's name.
    pub node: Box<str>,
    /// The facts to keep, which may change.
    pub wanted: watch::Receiver<Wanted>,
    /// How patient the watches are.
    pub patience: Patience,
}

impl KubeOptions {
    /// The defaults, for the pods of `node`, keeping `wanted`.
    #[must_use]
    pub fn new(node: &str, wanted: watch::Receiver<Wanted>) -> Self {
        Self { node: node.into(), wanted, patience: Patience::default() }
    }
}

/// How the source fares, for `/readyz` and metrics.
#[derive(Debug, Clone)]
pub struct KubeState {
    /// The server answers, as far as pods are concerned.
    pub connected: bool,
    /// Since when it does, or does not.
    pub since: Instant,
    /// Why it did not answer, last time: pods, or namespaces.
    pub last_error: Option<String>,
    /// Everything that exists was sent at least once.
    pub synced: bool,
    /// Pods known now. While the server is away: the last ones known.
    pub pods: usize,
    /// Objects without facts: of another node, or with a UID that no cgroup can carry.
    pub skipped: u64,
    /// Listings of pods that were completed.
    pub listings: u64,
    /// When the server said something of pods last.
    pub last_event: Option<SystemTime>,
    /// Failed requests, in the order of [`RequestError::REASONS`].
    pub errors: [u64; RequestError::REASONS.len()],
}

impl KubeState {
    fn new() -> Self {
        Self {
            connected: false,
            since: Instant::now(),
            last_error: None,
            synced: false,
            pods: 0,
            skipped: 0,
            listings: 0,
            last_event: None,
            errors: [0; RequestError::REASONS.len()],
        }
    }

    /// Failed requests by reason.
    pub fn errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        RequestError::REASONS.into_iter().zip(self.errors)
    }
}

/// The source. It remembers what it sent, also while the server is away.
#[derive(Debug)]
pub struct KubeSource {
    options: KubeOptions,
    state: watch::Sender<KubeState>,
    book: Book,
    /// Whether requests for pods, and for namespaces, fail for now.
    failing: [bool; 2],
}

/// The two collections.
#[derive(Debug, Clone, Copy)]
enum Which {
    Pods,
    Namespaces,
}

impl KubeSource {
    /// A source that has not connected yet, and its state.
    #[must_use]
    pub fn new(options: KubeOptions) -> (Self, watch::Receiver<KubeState>) {
        let (state, receiver) = watch::channel(KubeState::new());
        let book = Book::new(&options.node, options.wanted.borrow().clone());
        (Self { options, state, book, failing: [false; 2] }, receiver)
    }

    /// Sends what the server knows to `out` and keeps it up to date, whatever happens to the server. Ends only when
    /// nobody takes the updates any more.
    pub async fn run(mut self, client: Client, out: mpsc::Sender<PodUpdate>) {
        while self.follow(&client, &out).await {
            tracing::info!("other labels or annotations are wanted: pods and namespaces are listed anew");
            let before = self.book.want(self.options.wanted.borrow_and_update().clone());
            if out.send(PodUpdate::Rekeyed(Arc::new(before.keys))).await.is_err() {
                return;
            }
        }
    }

    /// Until other facts are wanted: true, or nobody takes the updates any more.
    async fn follow(&mut self, client: &Client, out: &mpsc::Sender<PodUpdate>) -> bool {
        let (pods, mut pod_changes) = mpsc::channel(QUEUE);
        let (namespaces, mut namespace_changes) = mpsc::channel(QUEUE);
        let patience = self.options.patience.clone();
        let follow_pods = follow::<Pod>(client.clone(), pods_of(&self.options.node), patience.clone(), pods);
        let follow_namespaces = follow::<Namespace>(client.clone(), all_namespaces(), patience, namespaces);
        let mut wanted = self.options.wanted.clone();
        let keep = async {
            loop {
                let updates = tokio::select! {
                    Some(change) = pod_changes.recv() => self.pod(change),
                    Some(change) = namespace_changes.recv() => self.namespace(change),
                    () = out.closed() => return false,
                    // Only here, so that nothing is noted in the book and not sent.
                    () = other_wanted(&mut wanted) => return true,
                };
                for update in updates {
                    if out.send(update).await.is_err() {
                        return false;
                    }
                }
            }
        };
        tokio::select! {
            goes_on = keep => goes_on,
            ((), ()) = async { tokio::join!(follow_pods, follow_namespaces) } => false,
        }
    }

    fn pod(&mut self, change: Change<Pod>) -> Vec<PodUpdate> {
        let listed = matches!(change, Change::Listed);
        self.hear(Which::Pods, &change);
        let mut updates = self.book.pod(change);
        self.settle(listed, &mut updates);
        updates
    }

    fn namespace(&mut self, change: Change<Namespace>) -> Vec<PodUpdate> {
        self.hear(Which::Namespaces, &change);
        let mut updates = self.book.namespace(change);
        self.settle(false, &mut updates);
        updates
    }

    /// Says `Synced` after each listing of the pods, the first time not before the namespaces.
    fn settle(&self, listed: bool, updates: &mut Vec<PodUpdate>) {
        let first = self.book.is_synced() && !self.state.borrow().synced;
        if first || (listed && self.book.is_synced()) {
            updates.push(PodUpdate::Synced);
        }
        self.state.send_if_modified(|state| {
            let before = (state.pods, state.skipped, state.synced);
            state.pods = self.book.pods();
            state.skipped = self.book.skipped;
            state.synced |= self.book.is_synced();
            state.listings = state.listings.saturating_add(u64::from(listed));
            listed || before != (state.pods, state.skipped, state.synced)
        });
    }

    /// Notes whether the server speaks.
    fn hear<T>(&mut self, which: Which, change: &Change<T>) {
        match change {
            Change::Failed(error) => self.failed(which, error),
            Change::Listing => {}
            Change::Applied(_) | Change::Deleted(_) | Change::Listed | Change::Alive => self.answers(which),
        }
    }

    fn answers(&mut self, which: Which) {
        if std::mem::take(&mut self.failing[which as usize]) {
            tracing::info!(resource = which.label(), "API server answers again");
        }
        self.state.send_if_modified(|state| {
            if matches!(which, Which::Namespaces) {
                return false;
            }
            state.last_event = Some(SystemTime::now());
            let again = !state.connected;
            if again {
                state.connected = true;
                state.since = Instant::now();
            }
            again
        });
    }

    fn failed(&mut self, which: Which, error: &RequestError) {
        let resource = which.label();
        // A stream that breaks is nothing to wake anybody for: the next one goes on from there.
        let outage = !matches!(error, RequestError::Cut(_));
        // Once for an outage, not once for every try.
        if outage && !std::mem::replace(&mut self.failing[which as usize], true) {
            tracing::warn!(resource, %error, pods = self.book.pods(), "no facts from the API server, keeping what is known");
        } else {
            tracing::debug!(resource, %error, "request to the API server failed");
        }
        self.state.send_modify(|state| {
            if outage {
                state.last_error = Some(error.to_string());
            }
            if outage && matches!(which, Which::Pods) && state.connected {
                state.connected = false;
                state.since = Instant::now();
            }
            let reason = RequestError::REASONS.iter().position(|reason| *reason == error.reason());
            if let Some(count) = reason.and_then(|reason| state.errors.get_mut(reason)) {
                *count = count.saturating_add(1);
            }
        });
    }
}

impl Which {
    fn label(self) -> &'static str {
        match self {
            Self::Pods => "pods",
            Self::Namespaces => "namespaces",
        }
    }
}

/// The pods of one node.
fn pods_of(node: &str) -> Collection {
    Collection {
        group: "",
        resource: "pods",
        path: "/api/v1/pods",
        field_selector: Some(format!("spec.nodeName={node}")),
        metadata_only: false,
    }
}

fn all_namespaces() -> Collection {
    Collection {
        group: "",
        resource: "namespaces",
        path: "/api/v1/namespaces",
        field_selector: None,
        metadata_only: true,
    }
}
