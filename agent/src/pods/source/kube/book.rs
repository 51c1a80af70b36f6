//! What the API has told: changes of two collections in, updates about pods out. Pure.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::facts::{Useless, facts, kept};
use super::object::{Namespace, Pod};
use crate::cluster::error::RequestError;
use crate::cluster::watch::Change;
use crate::pods::PodUid;
use crate::pods::model::{KeyValues, PodFacts, Wanted};
use crate::pods::source::PodUpdate;

/// Everything known, by UID.
#[derive(Debug)]
pub(super) struct Book {
    node: Box<str>,
    wanted: Wanted,
    pods: HashMap<PodUid, Arc<PodFacts>>,
    /// Pods that the listing under way has named.
    named: Option<HashSet<PodUid>>,
    namespaces: Namespaces,
    /// Objects that gave no facts.
    pub(super) skipped: u64,
    /// All pods have been told at least once.
    listed: bool,
}

/// Namespaces with labels or annotations that somebody wants. The others, thousands perhaps, cost nothing.
#[derive(Debug, Default)]
struct Namespaces {
    known: HashMap<Box<str>, (KeyValues, KeyValues)>,
    named: Option<HashSet<Box<str>>>,
    /// All have been told: one that is not known has nothing of interest.
    listed: bool,
    /// They cannot be had for now: pods are not to wait for them.
    failed: bool,
}

impl Namespaces {
    fn of(&self, name: &str) -> (Option<KeyValues>, Option<KeyValues>) {
        match self.known.get(name) {
            Some((labels, annotations)) => (Some(labels.clone()), Some(annotations.clone())),
            None if self.listed => (Some(KeyValues::default()), Some(KeyValues::default())),
            None => (None, None),
        }
    }
}

impl Book {
    pub(super) fn new(node: &str, wanted: Wanted) -> Self {
        Self {
            node: node.into(),
            wanted,
            pods: HashMap::new(),
            named: None,
            namespaces: Namespaces::default(),
            skipped: 0,
            listed: false,
        }
    }

    /// Keeps other facts from now on; gives the ones that it kept so far. Everything is to be listed anew then.
    pub(super) fn want(&mut self, wanted: Wanted) -> Wanted {
        std::mem::replace(&mut self.wanted, wanted)
    }

    pub(super) fn pods(&self) -> usize {
        self.pods.len()
    }

    /// Both collections have been told, or cannot be had: [`PodUpdate::Synced`] may be said.
    pub(super) fn is_synced(&self) -> bool {
        self.listed && (self.namespaces.listed || self.namespaces.failed)
    }

    pub(super) fn pod(&mut self, change: Change<Pod>) -> Vec<PodUpdate> {
        match change {
            Change::Listing => {
                self.named = Some(HashSet::new());
                Vec::new()
            }
            Change::Applied(pod) => self.applied(pod).into_iter().collect(),
            Change::Deleted(pod) => {
                let uid = pod.metadata.uid.as_deref().and_then(PodUid::parse);
                uid.and_then(|uid| self.gone(uid)).into_iter().collect()
            }
            Change::Listed => {
                self.listed = true;
                let named = self.named.take().unwrap_or_default();
                let unnamed: Vec<PodUid> =
                    self.pods.keys().filter(|uid| !named.contains(uid)).copied().collect();
                unnamed.into_iter().filter_map(|uid| self.gone(uid)).collect()
            }
            Change::Alive | Change::Failed(_) => Vec::new(),
        }
    }

    fn applied(&mut self, pod: Pod) -> Option<PodUpdate> {
        let mut facts = match facts(pod, &self.node, &self.wanted) {
            Ok(facts) => facts,
            // The server was asked for this node's pods alone.
            Err(Useless::Elsewhere | Useless::Uid) => {
                self.skipped = self.skipped.saturating_add(1);
                return None;
            }
        };
        if let Some(named) = &mut self.named {
            named.insert(facts.uid);
        }
        (facts.namespace_labels, facts.namespace_annotations) = self.namespaces.of(&facts.namespace);
        self.upsert(facts)
    }

    fn upsert(&mut self, facts: PodFacts) -> Option<PodUpdate> {
        if self.pods.get(&facts.uid).is_some_and(|known| **known == facts) {
            return None;
        }
        let facts = Arc::new(facts);
        self.pods.insert(facts.uid, Arc::clone(&facts));
        Some(PodUpdate::Upsert(facts))
    }

    fn gone(&mut self, uid: PodUid) -> Option<PodUpdate> {
        self.pods.remove(&uid).map(|_| PodUpdate::Gone(uid))
    }

    pub(super) fn namespace(&mut self, change: Change<Namespace>) -> Vec<PodUpdate> {
        let all = &mut self.namespaces;
        match change {
            Change::Listing => {
                all.named = Some(HashSet::new());
                Vec::new()
            }
            Change::Applied(namespace) => {
                let name = namespace.metadata.name.unwrap_or_default();
                let labels = kept(namespace.metadata.labels.as_ref(), &self.wanted.keys);
                let annotations = kept(namespace.metadata.annotations.as_ref(), &self.wanted.keys);
                if labels.is_empty() && annotations.is_empty() {
                    all.known.remove(&name);
                } else {
                    if let Some(named) = &mut all.named {
                        named.insert(name.clone());
                    }
                    all.known.insert(name.clone(), (labels, annotations));
                }
                self.retold(|pod| pod.namespace == name)
            }
            Change::Deleted(namespace) => {
                let name = namespace.metadata.name.unwrap_or_default();
                all.known.remove(&name);
                self.retold(|pod| pod.namespace == name)
            }
            Change::Listed => {
                let named = all.named.take().unwrap_or_default();
                all.known.retain(|name, _| named.contains(name));
                all.listed = true;
                self.retold(|_| true)
            }
            Change::Failed(RequestError::Cut(_)) | Change::Alive => Vec::new(),
            Change::Failed(_) => {
                all.failed = true;
                Vec::new()
            }
        }
    }

    /// Pods whose namespace is known differently by now.
    fn retold(&mut self, which: impl Fn(&PodFacts) -> bool) -> Vec<PodUpdate> {
        let pods: Vec<Arc<PodFacts>> = self.pods.values().filter(|pod| which(pod)).cloned().collect();
        let retold = pods.into_iter().filter_map(|pod| {
            let (namespace_labels, namespace_annotations) = self.namespaces.of(&pod.namespace);
            if (&namespace_labels, &namespace_annotations)
                == (&pod.namespace_labels, &pod.namespace_annotations)
            {
                return None;
            }
            self.upsert(PodFacts { namespace_labels, namespace_annotations, ..(*pod).clone() })
        });
        retold.collect()
    }
}

#[cfg(test)]
mod tests;
