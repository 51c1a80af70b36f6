//! One pass: the files that are due are looked at and patched, and the outcomes are noted.

use std::ffi::{OsStr, OsString};
use std::time::{Duration, Instant};

use super::super::fight::Fight;
use super::super::plan::{FileKind, Leave, original_name};
use super::super::refusal::Refusal;
use super::super::swap::{Outcome, Patched, SwapError, Swapper};
use super::engine::{Dirty, Engine};
use super::files::Judged;

/// When to look again at a file that could not be read or written.
const RETRY: Duration = Duration::from_secs(5);
/// When to try again after displaced files were closed early, for want of descriptors.
const CROWDED: Duration = Duration::from_millis(100);
/// When to look again at a file that others change faster than it can be patched.
const CONTENDED: Duration = Duration::from_millis(5);

impl Engine {
    /// Looks at everything that is due.
    pub fn pass(&mut self, now: Instant) {
        self.planner.news = true;
        self.follow_displaced(now);
        let mut due: Vec<(OsString, Dirty)> = Vec::new();
        let allowed = self.bucket.available(now);
        for (name, dirty) in &mut self.dirty {
            if dirty.due > now {
                continue;
            }
            if let Some(until) = self.fights.until(name, now) {
                dirty.due = until;
            } else if due.len() < allowed {
                due.push((name.clone(), *dirty));
            } else {
                dirty.due = now + self.bucket.wait();
                self.metrics.throttled.inc();
            }
        }
        for (name, _) in &due {
            self.dirty.remove(name);
        }
        let originals: Vec<_> = due.iter().filter_map(|(name, _)| original_name(name)).collect();
        for original in originals {
            self.follow_original(&original);
        }
        due.retain(|(name, _)| FileKind::of(name).is_some());
        let (news, others): (Vec<_>, Vec<_>) = due.into_iter().partition(|(_, dirty)| dirty.news);
        for (due, news) in [(news, true), (others, false)] {
            self.planner.news = news;
            self.replace(&due);
        }
    }

    fn replace(&mut self, due: &[(OsString, Dirty)]) {
        if due.is_empty() {
            return;
        }
        let Some(mut swapper) = self.swapper.take() else { return };
        let names: Vec<_> = due.iter().map(|(name, _)| name.clone()).collect();
        let mut outcomes = Vec::with_capacity(names.len());
        let planner = &mut self.planner;
        swapper.replace_all(&names, &mut |kind, bytes| planner.plan(kind, bytes), &mut |_, outcome| {
            outcomes.push((outcome, Instant::now()));
        });
        for ((name, dirty), (outcome, at)) in due.iter().zip(outcomes) {
            self.note_outcome(&swapper, name, outcome, Some(dirty.noticed), at);
        }
        if std::mem::take(&mut self.crowded) {
            let planner = &mut self.planner;
            swapper.settle_all(&mut |kind, bytes| planner.plan(kind, bytes), &mut |_, _| {});
        }
        self.swapper = Some(swapper);
        self.note_links(&names);
    }

    /// What in-place writers wrote to displaced files.
    fn follow_displaced(&mut self, now: Instant) {
        let Some(mut swapper) = self.swapper.take() else { return };
        let touched = std::mem::take(&mut self.touched);
        let planner = &mut self.planner;
        let mut outcomes = Vec::new();
        swapper.settle(
            now,
            &|name| touched.contains(name),
            &mut |kind, bytes| planner.plan(kind, bytes),
            &mut |name, outcome| outcomes.push((name.to_owned(), outcome)),
        );
        for (name, outcome) in outcomes {
            if matches!(outcome, Ok(Outcome::Patched(_))) {
                self.metrics.count("merged");
            }
            self.note_outcome(&swapper, &name, outcome, None, Instant::now());
        }
        self.swapper = Some(swapper);
    }

    /// An owner goes on writing to its `.conf` that was moved aside.
    fn follow_original(&mut self, original: &OsStr) {
        let Some(swapper) = &mut self.swapper else { return };
        let planner = &mut self.planner;
        match swapper.follow_aside(original, &mut |kind, bytes| planner.plan(kind, bytes)) {
            Ok(Some(Outcome::Patched(patched))) => {
                self.metrics.writes.inc_by(u64::from(patched.writes));
                self.bucket.take(patched.writes);
                self.metrics.count("merged");
                tracing::info!(file = %original.display(), "list made again from its changed original");
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(%error, "cannot follow a converted CNI config"),
        }
    }

    fn note_outcome(
        &mut self,
        swapper: &Swapper,
        name: &OsStr,
        outcome: Result<Outcome, SwapError>,
        noticed: Option<Instant>,
        at: Instant,
    ) {
        let since = noticed.unwrap_or(at);
        match outcome {
            Ok(Outcome::Left(leave, bytes)) => {
                self.files.set(name, Some(bytes), Judged::Fine(leave), at);
            }
            Ok(Outcome::Patched(patched)) => self.note_patch(name, &patched, noticed, at),
            Ok(Outcome::Converted(converted)) => {
                self.metrics.count("converted");
                self.metrics.writes.inc();
                self.bucket.take(1);
                self.files.remove(name);
                let list = converted.list;
                self.files.set(&list, Some(converted.bytes), Judged::Fine(Leave::Satisfied), at);
                self.files.wrote(&list, 1);
                tracing::info!(
                    file = %name.display(), list = %list.display(), kept_as = %converted.aside.display(),
                    "turned a single-plugin CNI config into a list"
                );
            }
            Ok(Outcome::Gone) => self.files.remove(name),
            Ok(Outcome::Changed) => self.mark_dirty(name.to_owned(), at, since, true),
            Ok(Outcome::Refused(refusal)) => self.note_refusal(swapper, name, refusal, at),
            Err(error) => {
                let Some(refusal) = error.refusal() else {
                    self.metrics.count("contended");
                    return self.mark_dirty(name.to_owned(), at + CONTENDED, since, true);
                };
                self.metrics.count("failed");
                tracing::debug!(%error, "cannot patch a CNI config");
                let retry = if refusal == Refusal::NoFiles { CROWDED } else { RETRY };
                self.crowded |= refusal == Refusal::NoFiles;
                self.note_refusal(swapper, name, refusal, at);
                self.mark_dirty(name.to_owned(), at + retry, at, false);
            }
        }
    }

    fn note_patch(&mut self, name: &OsStr, patched: &Patched, noticed: Option<Instant>, at: Instant) {
        self.files.set(name, Some(patched.bytes.clone()), Judged::Fine(Leave::Satisfied), at);
        self.files.wrote(name, patched.writes);
        self.metrics.writes.inc_by(u64::from(patched.writes));
        self.bucket.take(patched.writes);
        if let Some(noticed) = noticed {
            self.was_unprotected(name, noticed);
            let result = match (patched.exchanged, patched.writes) {
                (false, _) => "unsafe",
                (true, 1) => "patched",
                (true, _) => "merged",
            };
            self.metrics.count(result);
            self.metrics.latency.observe(at.saturating_duration_since(noticed).as_secs_f64());
        }
        tracing::info!(file = %name.display(), writes = patched.writes, "CNI config patched");
        let from = super::super::swap::hash(&patched.from);
        if let Some(Fight { reverts, until, new }) = self.fights.patched(name, from, at) {
            let pause = until.saturating_duration_since(at).as_secs();
            if new {
                tracing::warn!(
                    file = %name.display(), reverts, pause_seconds = pause,
                    "another writer keeps putting the CNI config back; patching it less often. Stop that writer, or \
                     take it out of its exclusive mode"
                );
            } else {
                tracing::debug!(file = %name.display(), reverts, pause_seconds = pause, "undone again");
            }
        }
    }

    #[expect(clippy::needless_pass_by_value, reason = "it is kept in some of its ways on")]
    fn note_refusal(&mut self, swapper: &Swapper, name: &OsStr, refusal: Refusal, at: Instant) {
        // These say nothing about the bytes, which a runtime may well load.
        let loadable = matches!(
            refusal,
            Refusal::NoEntry
                | Refusal::Superseded
                | Refusal::ListExists { .. }
                | Refusal::Permission
                | Refusal::ReadOnly
                | Refusal::NoSpace
                | Refusal::NoFiles
                | Refusal::Io(_)
        );
        let bytes = if loadable { swapper.read(name) } else { None };
        let soon = !refusal.may_be_unfinished();
        if self.files.set(name, bytes, Judged::Refused(refusal.clone()), at) {
            self.metrics.refused(&refusal);
            if soon {
                self.files.reported(name);
                tracing::warn!(
                    file = %name.display(), reason = refusal.label(), why = %refusal, "CNI config is left alone"
                );
            }
        }
    }

    /// Keeps the list of links up to date.
    fn note_links(&mut self, names: &[OsString]) {
        let Some(swapper) = &self.swapper else { return };
        let before = self.files.links.clone();
        self.files.links.retain(|link| !names.contains(link));
        self.files.links.extend(names.iter().filter(|name| swapper.is_link(name)).cloned());
        self.files.links.sort();
        if !self.files.links.is_empty() || !before.is_empty() {
            self.watch_links();
        }
    }

    /// Before the end: removes displaced files that nobody has open.
    pub fn finish(mut self) {
        let Some(mut swapper) = self.swapper.take() else { return };
        swapper.finish_sync();
        let planner = &mut self.planner;
        swapper.settle_all(&mut |kind, bytes| planner.plan(kind, bytes), &mut |name, outcome| {
            tracing::debug!(file = %name.display(), ?outcome, "settled at the end");
        });
    }
}
