//! The last few reports of each meshed pod, for `nobypass explain`.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use super::report::Report;

/// Reports that are kept of a pod.
const KEPT: usize = 5;

/// See the module. Locked for a copy, never across an await.
#[derive(Debug, Default)]
pub struct Recent(Mutex<HashMap<u64, VecDeque<Arc<Report>>>>);

impl Recent {
    /// Keeps a report of the pod with this cgroup id.
    pub(super) fn keep(&self, cgroup: u64, report: &Arc<Report>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of = all.entry(cgroup).or_default();
        if of.len() == KEPT {
            of.pop_front();
        }
        of.push_back(Arc::clone(report));
    }

    /// Forgets pods that are gone.
    pub(super) fn retain(&self, lives: impl Fn(u64) -> bool) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|cgroup, _| lives(*cgroup));
    }

    /// A pod's last reports, the latest first.
    pub fn of(&self, cgroup: u64) -> Vec<Arc<Report>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(&cgroup).into_iter().flatten().rev().map(Arc::clone).collect()
    }
}
