//! What a running CNI half shows of itself to the rest of the process: to the gate, to metrics and to `cni status`.

use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;
use tokio::sync::watch;

use super::guard::{Guard, Questions, Snapshot, Summary};
use super::runtime::Word;

/// The whole state.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// What the guard knows.
    pub guard: Snapshot,
    /// What the container runtime says.
    pub runtime: Word,
}

/// Filled by the half once it runs; clones show the same.
#[derive(Clone, Debug)]
pub struct Desk(Arc<Shown>);

#[derive(Debug)]
struct Shown {
    summary: watch::Sender<Summary>,
    word: watch::Sender<Word>,
    questions: Mutex<Option<Questions>>,
}

impl Default for Desk {
    fn default() -> Self {
        Self(Arc::new(Shown {
            summary: watch::Sender::new(Summary::new()),
            word: watch::Sender::default(),
            questions: Mutex::default(),
        }))
    }
}

impl Desk {
    /// The state in short; until the half runs, nothing is protected.
    #[must_use]
    pub fn summary(&self) -> watch::Receiver<Summary> {
        self.0.summary.subscribe()
    }

    /// The container runtime's word.
    #[must_use]
    pub fn runtime(&self) -> watch::Receiver<Word> {
        self.0.word.subscribe()
    }

    /// The whole state; `None` while the half does not run.
    pub async fn report(&self) -> Option<Report> {
        let questions = self.0.questions.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let guard = questions?.snapshot().await?;
        Some(Report { guard, runtime: self.0.word.borrow().clone() })
    }

    pub(super) fn open(&self, guard: &Guard) {
        *self.0.questions.lock().unwrap_or_else(PoisonError::into_inner) = Some(guard.questions());
    }

    pub(super) fn show(&self, summary: Summary) {
        self.0.summary.send_replace(summary);
    }

    pub(super) fn word(&self) -> &watch::Sender<Word> {
        &self.0.word
    }
}
