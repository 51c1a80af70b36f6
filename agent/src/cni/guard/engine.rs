//! The guard's loop: collects changes, decides when to look at which file, and keeps the books.

mod say;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::super::fight::{Bucket, Fights};
use super::super::lock::{Claim, DirLock, Standing};
use super::super::metrics::Metrics;
use super::super::plan::{FileKind, original_name};
use super::super::swap::{Swapper, is_hidden};
use super::super::watch::{Armed, Change, Watch, WatchError};
use super::super::window::{Protection, Window};
use super::files::Files;
use super::inbox::Inbox;
use super::want::{Planner, Want};
use super::{Config, Signal, Summary, Watching};

/// When to try again while another agent writes to the directory.
const LOCKED: Duration = Duration::from_millis(2);
/// A writer that keeps writing is waited for this long at most.
const WRITING: Duration = Duration::from_secs(1);
/// The directory is looked for this often when not even its coming can be watched.
const MISSING: Duration = Duration::from_secs(1);

/// A name to look at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dirty {
    /// When to look.
    pub due: Instant,
    /// When the first change was noticed.
    pub noticed: Instant,
    /// Something was noticed; false for a name that is only looked at again.
    pub news: bool,
}

pub(super) struct Engine {
    pub config: Config,
    pub planner: Planner,
    pub metrics: Metrics,
    publish: watch::Sender<Summary>,
    summary: Summary,
    watch: Watch,
    pub swapper: Option<Swapper>,
    claim: Option<Claim>,
    superseded_by: Option<u64>,
    pub files: Files,
    pub dirty: BTreeMap<OsString, Dirty>,
    /// Hidden names that somebody wrote to.
    pub touched: BTreeSet<OsString>,
    pub bucket: Bucket,
    pub fights: Fights,
    window: Window,
    unprotected: Duration,
    /// The version of the active file that the runtime was asked about, and what pods get from it.
    loaded: Option<(u64, Protection)>,
    rescan: bool,
    rearm: bool,
    /// The directory was opened, and files of an earlier agent in it are not sorted out yet.
    fresh: bool,
    /// Whether the newer agent is still there is looked at in the next pass.
    recheck: bool,
    not_before: Instant,
    /// Descriptors ran out.
    pub crowded: bool,
    next_scan: Instant,
    next_look: Instant,
}

impl Engine {
    pub fn new(
        config: Config,
        want: Want,
        metrics: Metrics,
        publish: watch::Sender<Summary>,
        report: impl Fn(Change, Instant) + Send + Sync + 'static,
    ) -> Self {
        let now = Instant::now();
        Self {
            planner: Planner::new(want, config.options, config.remember.clone()),
            watch: Watch::new(&config.dir, report),
            bucket: Bucket::new(config.burst, config.rate, now),
            config,
            metrics,
            publish,
            summary: Summary::new(),
            swapper: None,
            claim: None,
            superseded_by: None,
            files: Files::default(),
            dirty: BTreeMap::new(),
            touched: BTreeSet::new(),
            fights: Fights::default(),
            window: Window::new(now),
            unprotected: Duration::ZERO,
            loaded: None,
            rescan: false,
            rearm: true,
            fresh: false,
            recheck: false,
            not_before: now,
            crowded: false,
            next_scan: now,
            next_look: now,
        }
    }

    /// Runs until [`Signal::Stop`].
    pub fn run(mut self, inbox: &Inbox<Signal>) {
        loop {
            let start = Instant::now();
            self.turn();
            let timeout = self.next_wake().saturating_duration_since(Instant::now());
            let waited = inbox.wait(self.watch.fd(), timeout);
            // What was there already happened at some time during this turn.
            let at = if waited { Instant::now() } else { start };
            let mut changes = Vec::new();
            self.watch.read(&mut |change| changes.push(change));
            for change in changes {
                self.note(change, at);
            }
            let mut stop = false;
            for signal in inbox.take() {
                stop |= !self.take(signal);
            }
            if stop {
                break;
            }
        }
        self.finish();
    }

    /// False at the end.
    fn take(&mut self, signal: Signal) -> bool {
        match signal {
            Signal::Change(change, at) => self.note(change, at),
            Signal::Want(want) => self.planner.set(want),
            Signal::Runtime(version, protection) => {
                self.loaded = Some((version, protection));
                self.evaluate(Instant::now());
            }
            Signal::Poke => {
                self.planner.poke = true;
                self.wake();
            }
            Signal::Snapshot(answer) => {
                // Nobody waits for it any more when this fails.
                let _ = answer.send(self.snapshot());
            }
            Signal::Stop => return false,
        }
        true
    }

    /// Wakes the runtime if it has not noticed something.
    fn wake(&mut self) {
        if std::mem::take(&mut self.planner.poke)
            && let Some(swapper) = &self.swapper
            && let Err(error) = swapper.poke()
        {
            tracing::debug!(%error, "cannot wake the container runtime");
        }
    }

    fn note(&mut self, change: Change, at: Instant) {
        match change {
            Change::Name(name) => self.mark(&name, at, at),
            Change::Writing(name) => self.mark(&name, at + self.config.quiet, at),
            Change::Overflow => {
                self.metrics.overflows.inc();
                self.rescan = true;
            }
            Change::Directory => self.rearm = true,
        }
    }

    fn mark(&mut self, name: &OsStr, due: Instant, noticed: Instant) {
        if is_hidden(name) {
            self.touched.insert(name.to_owned());
            return;
        }
        if FileKind::of(name).is_none() && original_name(name).is_none() {
            // Maybe the file behind a link.
            for link in self.files.links.clone() {
                self.mark_dirty(link, due, noticed, true);
            }
            return;
        }
        self.mark_dirty(name.to_owned(), due, noticed, true);
        for link in self.files.links.clone() {
            self.mark_dirty(link, due, noticed, true);
        }
    }

    pub fn mark_dirty(&mut self, name: OsString, due: Instant, noticed: Instant, news: bool) {
        let entry = self.dirty.entry(name).or_insert(Dirty { due, noticed, news });
        entry.news |= news;
        let urgent = |due: Instant, noticed: Instant| due <= noticed;
        if urgent(due, noticed) {
            entry.due = entry.due.min(due);
        } else if !urgent(entry.due, entry.noticed) {
            // A write that goes on, but not for ever.
            entry.due = due.min(entry.noticed + WRITING);
        }
    }

    /// One pass over everything that is due.
    fn turn(&mut self) {
        let now = Instant::now();
        self.look_at_directory(now);
        if self.swapper.is_none() {
            self.evaluate(now);
            return;
        }
        if self.rescan || now >= self.next_scan || self.planner.changed {
            self.scan(now);
        }
        let Some(dir) = self.swapper.as_ref().map(|swapper| Arc::clone(swapper.dir())) else { return };
        if self.has_work(now) {
            match DirLock::try_take(&dir) {
                Ok(Some(_lock)) => {
                    self.take_over(&dir);
                    self.pass(now);
                    self.planner.settle();
                    self.wake();
                }
                Ok(None) => self.not_before = now + LOCKED,
                Err(error) => {
                    tracing::debug!(%error, "cannot lock the CNI directory");
                    self.pass(now);
                }
            }
        }
        for (name, refusal) in self.files.overdue(now) {
            tracing::warn!(
                file = %name.display(), reason = refusal.label(), why = %refusal, "CNI config is left alone"
            );
        }
        self.evaluate(Instant::now());
    }

    fn take_over(&mut self, dir: &Arc<OwnedFd>) {
        self.recheck = false;
        if std::mem::take(&mut self.fresh) {
            self.planner.open(&self.config.dir);
            self.stand(dir);
            self.recover();
        } else {
            self.check_standing(dir);
        }
    }

    fn has_work(&self, now: Instant) -> bool {
        let displaced = self.swapper.as_ref().and_then(Swapper::next_settle).is_some_and(|due| due <= now);
        let waiting = self.fresh || self.recheck || !self.touched.is_empty();
        displaced || waiting || self.dirty.values().any(|dirty| dirty.due <= now)
    }

    /// Opens and watches the directory if it is not the one that is open.
    fn look_at_directory(&mut self, now: Instant) {
        if !self.rearm && now < self.next_look {
            return;
        }
        self.next_look = now + if self.swapper.is_some() { self.config.heartbeat } else { MISSING };
        self.rearm = false;
        self.planner.look();
        self.recheck = self.superseded_by.is_some();
        let same = self.swapper.as_ref().is_some_and(|swapper| self.watch.is_same(swapper.dir()));
        if same && self.summary.watching == Watching::Watched {
            return;
        }
        match self.watch.arm() {
            Ok(Armed { dir, unwatched }) => {
                self.watching(unwatched);
                if !same {
                    self.adopt(dir);
                }
                self.rescan = true;
            }
            Err(error) => self.lost(&error),
        }
    }

    fn watching(&mut self, unwatched: Option<WatchError>) {
        let watching = match unwatched {
            None => Watching::Watched,
            Some(error) => Watching::Polled { why: error.to_string() },
        };
        if watching != self.summary.watching {
            match &watching {
                Watching::Polled { why } => {
                    tracing::warn!(why, "changes of CNI configs are noticed late: polling");
                }
                _ => tracing::info!(dir = %self.config.dir.display(), "watching the CNI directory"),
            }
        }
        self.metrics.watched.set(i64::from(watching == Watching::Watched));
        self.summary.watching = watching;
    }

    fn adopt(&mut self, dir: OwnedFd) {
        let mut swapper = Swapper::new(dir, vec![self.config.dir.clone(), self.config.host.clone()]);
        swapper.set_grace(self.config.grace);
        if let Err(error) = swapper.sync_in_background() {
            tracing::debug!(%error, "no thread for waiting for the disk; patches wait themselves");
        }
        if let Some(seam) = self.config.seam.clone() {
            swapper.set_seam(Box::new(move |step| seam.before(step)));
        }
        self.swapper = Some(swapper);
        self.claim = None;
        self.files.clear();
        self.dirty.clear();
        self.fresh = true;
    }

    fn recover(&mut self) {
        let Some(swapper) = &mut self.swapper else { return };
        let planner = &mut self.planner;
        match swapper.recover(&mut |kind, bytes| planner.plan(kind, bytes)) {
            Ok(found) if found.removed + found.kept > 0 => {
                tracing::info!(
                    removed = found.removed,
                    kept = found.kept,
                    "sorted out files of an earlier agent"
                );
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "cannot look for files of an earlier agent"),
        }
    }

    fn lost(&mut self, error: &WatchError) {
        if self.swapper.take().is_some() || self.summary.watching != Watching::Missing {
            tracing::warn!(%error, "the CNI directory is gone; waiting for it");
        }
        self.claim = None;
        self.files.clear();
        self.dirty.clear();
        self.metrics.watched.set(0);
        self.summary.watching = Watching::Missing;
    }

    /// Takes a generation; without one (read-only file system) nothing can be written anyway.
    fn stand(&mut self, dir: &Arc<OwnedFd>) {
        match Claim::take(dir) {
            Ok(claim) => {
                tracing::debug!(generation = claim.generation(), "this agent looks after the CNI directory");
                self.claim = Some(claim);
                self.superseded_by = None;
                self.planner.superseded = false;
            }
            Err(error) => tracing::debug!(%error, "cannot leave a mark in the CNI directory"),
        }
    }

    fn check_standing(&mut self, dir: &Arc<OwnedFd>) {
        let standing = match &self.claim {
            Some(claim) => claim.standing(),
            None => Ok(Standing::Free),
        };
        match standing {
            Ok(Standing::Current) | Err(_) => {}
            Ok(Standing::Superseded(by)) => {
                if self.superseded_by.replace(by) != Some(by) {
                    tracing::info!(generation = by, "a newer agent looks after the CNI directory");
                }
                self.planner.superseded = true;
                if let Some(swapper) = &mut self.swapper {
                    swapper.hand_over();
                }
            }
            Ok(Standing::Free) => {
                let was = self.superseded_by.is_some();
                self.stand(dir);
                if was && self.superseded_by.is_none() {
                    self.planner.open(&self.config.dir);
                    tracing::info!("the newer agent is gone; looking after the CNI directory again");
                    self.rescan = true;
                }
            }
        }
    }

    /// Marks every config.
    fn scan(&mut self, now: Instant) {
        let polled = matches!(self.summary.watching, Watching::Polled { .. });
        self.next_scan = now + if polled { self.config.poll } else { self.config.resync };
        self.rescan = false;
        if std::mem::take(&mut self.planner.changed) {
            self.files.wanted_changed();
        }
        let Some(swapper) = &self.swapper else { return };
        let names = match swapper.names() {
            Ok(names) => names,
            Err(error) => {
                tracing::warn!(%error, "cannot list the CNI directory");
                return;
            }
        };
        let known: Vec<_> = self.files.names().cloned().collect();
        let configs = names.into_iter().chain(known).filter(|name| FileKind::of(name).is_some());
        for name in configs.collect::<BTreeSet<_>>() {
            self.mark_dirty(name, now, now, false);
        }
    }

    /// Directories of files that links lead to.
    pub fn watch_links(&mut self) {
        let Some(swapper) = &self.swapper else { return };
        let behind = self.files.links.iter().filter_map(|link| swapper.behind(link));
        let mut directories: Vec<_> = behind.map(|relative| self.config.dir.join(relative)).collect();
        directories.sort();
        directories.dedup();
        if self.watch.watch_beside(directories) {
            let now = Instant::now();
            for link in self.files.links.clone() {
                self.mark_dirty(link, now, now, false);
            }
        }
    }

    /// The active file was without its entry from then on, and just got it.
    pub fn was_unprotected(&mut self, name: &OsStr, since: Instant) {
        if self.summary.active.as_deref().is_none_or(|active| name <= active) {
            self.window.set(Protection::Unprotected, since);
            // Even if the bytes are those of before: the runtime may have loaded what was there in between.
            self.summary.version += 1;
        }
    }

    fn next_wake(&self) -> Instant {
        let now = Instant::now();
        let mut next = self.next_look;
        if self.swapper.is_some() {
            next = next.min(self.next_scan);
            let settle = self.swapper.as_ref().and_then(Swapper::next_settle);
            let dirty = self.dirty.values().map(|dirty| dirty.due).min();
            for due in [settle, dirty, self.files.next_overdue()].into_iter().flatten() {
                next = next.min(due);
            }
            if self.rescan || self.planner.changed {
                next = now;
            }
        }
        // An open window is counted while it is open.
        if self.window.state() == Protection::Unprotected {
            next = next.min(now + Duration::from_secs(1));
        }
        next.max(self.not_before)
    }
}
