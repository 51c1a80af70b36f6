//! What the guard says of itself: the protection of new pods, and its state for people.

use std::ffi::OsStr;
use std::time::Instant;

use super::super::super::discover::Look;
use super::super::super::lock::Claim;
use super::super::super::swap::Swapper;
use super::super::super::window::Protection;
use super::super::{Snapshot, Summary};
use super::Engine;

impl Engine {
    /// Says what pods get now, and counts the time in which that is not the plugin.
    pub(super) fn evaluate(&mut self, now: Instant) {
        let look = self.planner.wanted().map(Look::For);
        let (files, active) = match self.swapper {
            Some(_) => {
                let dir = self.config.options.drop_in.then_some(&*self.config.dir);
                self.files.protection(self.config.runtime, look, dir)
            }
            None => (Protection::NoNetwork, None),
        };
        let content = active.as_ref().and_then(|name| self.files.bytes(name)).cloned();
        let before = &self.summary;
        let version = before.version + u64::from(before.active != active || before.content != content);
        let protection = match files {
            // As long as the runtime has not said so of this very file, pods may get what was there before.
            Protection::Protected if self.config.verify => match self.loaded {
                Some((asked, says)) if asked == version => says,
                _ => Protection::Unprotected,
            },
            files => files,
        };
        self.window.set(protection, now);
        self.metrics.protected.set(i64::from(protection == Protection::Protected));
        self.metrics.windows.inc_by(self.window.count().saturating_sub(self.metrics.windows.get()));
        let total = self.window.total(now);
        self.metrics.unprotected.inc_by((total - self.unprotected).as_secs_f64());
        self.unprotected = total;
        self.metrics.fights.set(i64::try_from(self.fights.going_on(now).count()).unwrap_or(i64::MAX));
        let wanted = self.planner.wanted().cloned();
        let watching = self.summary.watching.clone();
        let summary = Summary { files, protection, watching, active, content, version, wanted };
        if summary.protection != self.summary.protection {
            let file = summary.active.as_ref().map(|name| name.to_string_lossy());
            let state = summary.protection.label();
            tracing::info!(
                state,
                file = file.as_deref().unwrap_or_default(),
                "protection of new pods changed"
            );
        }
        self.summary = summary;
        self.publish.send_if_modified(|published| {
            let changed = *published != self.summary;
            if changed {
                published.clone_from(&self.summary);
            }
            changed
        });
    }

    pub(super) fn snapshot(&mut self) -> Snapshot {
        let now = Instant::now();
        self.evaluate(now);
        let undone = |name: &OsStr| {
            self.fights.going_on(now).find(|(file, _)| *file == name).map(|(_, reverts)| reverts)
        };
        Snapshot {
            dir: self.config.dir.to_string_lossy().into_owned(),
            watching: self.summary.watching.clone(),
            generation: self.claim.as_ref().map_or(0, Claim::generation),
            superseded_by: self.superseded_by,
            plugin: self.planner.wanted().map(|entry| entry.plugin().to_owned()),
            protection: self.summary.protection.label(),
            seconds: now.saturating_duration_since(self.window.since()).as_secs(),
            active: self.summary.active.as_ref().map(|name| name.to_string_lossy().into_owned()),
            unprotected_seconds: self.window.total(now).as_secs_f64(),
            files: self.files.reports(now, undone),
            exchange: self.swapper.as_ref().is_none_or(Swapper::exchanges),
            displaced: self.swapper.as_ref().map_or(0, Swapper::kept),
        }
    }
}
