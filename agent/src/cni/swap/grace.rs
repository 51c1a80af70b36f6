//! Displaced versions: kept under a hidden name as long as an in-place writer may still write to them.

use std::ffi::{OsStr, OsString};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::file::{Stamp, Target, Version, change_time};
use super::temp::Put;
use super::{Outcome, Patch, Planner, SwapError, Swapper};
use crate::cni::plan::{FileKind, Plan};
use crate::cni::refusal::Refusal;
use crate::sys::file::{Writers, give_lease_back, take_read_lease};

/// When to look again at a version that a writer has open, or whose merge failed.
const AGAIN: Duration = Duration::from_secs(1);
/// Where nothing tells whether a writer is there, an unfinished version counts as given up after this.
const UNFINISHED: Duration = Duration::from_secs(30);
/// Displaced versions kept at once, two open files each. With more, those that nobody writes to go early.
const MAX: usize = 128;

/// A version that this agent displaced.
#[derive(Debug)]
pub(super) struct Displaced {
    pub target: Target,
    kind: FileKind,
    /// Its hidden name.
    pub name: OsString,
    /// With the bytes that are merged.
    pub version: Version,
    /// False when even those bytes are not merged.
    merged: bool,
    /// What replaced it. Once that is no longer in place, another writer's newer version is, and this one is history.
    pub successor: Version,
    since: Instant,
    due: Instant,
    /// What replaced it must be durable before it may go.
    batch: u64,
    /// Of the bytes in place; what is written here counts if it is later.
    pub stamp: Stamp,
}

impl Displaced {
    pub fn new(
        target: Target,
        kind: FileKind,
        name: OsString,
        version: Version,
        successor: Version,
        grace: Duration,
    ) -> Self {
        let since = Instant::now();
        Self {
            target,
            kind,
            name,
            version,
            merged: true,
            successor,
            since,
            due: since + grace,
            batch: 0,
            stamp: Stamp::default(),
        }
    }

    /// One whose bytes are still to be merged.
    pub fn unmerged(
        target: Target,
        kind: FileKind,
        name: OsString,
        version: Version,
        successor: Version,
        grace: Duration,
    ) -> Self {
        let new = Self::new(target, kind, name, version, successor, grace);
        Self { merged: false, due: new.since, ..new }
    }
}

impl Displaced {
    /// It must stay until this batch is durable.
    pub fn until(self, batch: u64) -> Self {
        Self { batch, ..self }
    }

    /// The bytes in place are from then.
    pub fn since(self, stamp: Stamp) -> Self {
        Self { stamp, ..self }
    }

    /// Are the bytes here, last changed at the version's time, newer than those in place?
    fn is_newer(&self) -> bool {
        let own = self.version.stamp();
        own.seq == self.stamp.seq || own > self.stamp
    }
}

/// What to do with a displaced version after a look at it.
enum Next {
    Keep,
    Drop,
    Merge(Bytes),
    PutBack(Outcome),
}

impl Swapper {
    /// When [`settle`](Self::settle) has something to do.
    pub fn next_settle(&self) -> Option<Instant> {
        self.displaced.iter().map(|displaced| displaced.due).min()
    }

    /// Another agent looks after the directory now, and has taken over the displaced versions as well.
    pub fn hand_over(&mut self) {
        self.displaced.clear();
    }

    /// Number of displaced versions that are kept.
    pub fn kept(&self) -> usize {
        self.displaced.len()
    }

    /// Looks at displaced versions: those that are due and those whose hidden name is in `touched`. Merges what
    /// in-place writers wrote to them, removes those that nobody has open any more.
    pub fn settle(
        &mut self,
        now: Instant,
        touched: &dyn Fn(&OsStr) -> bool,
        plan: &mut Planner<'_>,
        report: &mut dyn FnMut(&OsStr, Result<Outcome, SwapError>),
    ) {
        let crowd = self.displaced.len().saturating_sub(MAX);
        // Merging adds to the list, so it is taken apart by name, not by position.
        let names: Vec<_> = (0..)
            .zip(&self.displaced)
            .filter(|(at, displaced)| *at < crowd || displaced.due <= now || touched(&displaced.name))
            .map(|(at, displaced)| (displaced.name.clone(), at < crowd || displaced.due <= now))
            .collect();
        for (name, due) in names {
            let Some(at) = self.displaced.iter().position(|displaced| displaced.name == name) else {
                continue;
            };
            let displaced = self.displaced.swap_remove(at);
            if let Some((config, outcome)) = self.settle_one(displaced, now, due, plan) {
                report(&config, outcome);
            }
        }
        self.make_durable();
    }

    /// Before the agent ends: everything that nobody writes to is settled now. The rest stays for the next start.
    pub fn settle_all(
        &mut self,
        plan: &mut Planner<'_>,
        report: &mut dyn FnMut(&OsStr, Result<Outcome, SwapError>),
    ) {
        let now = Instant::now();
        // Twice, since a merge displaces another version.
        for _ in 0..2 {
            for displaced in &mut self.displaced {
                displaced.due = now;
            }
            self.settle(now, &|_| false, plan, report);
        }
    }

    fn settle_one(
        &mut self,
        mut displaced: Displaced,
        now: Instant,
        due: bool,
        plan: &mut Planner<'_>,
    ) -> Option<(OsString, Result<Outcome, SwapError>)> {
        let next = self.next_step(&mut displaced, now, due, plan);
        if let Some(file) = &displaced.version.file {
            give_lease_back(file.as_fd());
        }
        let config = displaced.target.config.clone();
        match next {
            Next::Keep => self.displaced.push(displaced),
            Next::Drop => self.unlink(&displaced.target.dir, &displaced.name),
            Next::Merge(bytes) => return Some((config, self.merge(displaced, now, &bytes, plan))),
            Next::PutBack(outcome) => {
                let Displaced { target, kind, name, version, successor, .. } = displaced;
                let put = Put { name, version, ours: false, unsynced: None };
                let patch = Patch { target, kind, put, expect: successor, pending: None };
                return Some((config, self.put_back(patch, outcome, plan)));
            }
        }
        None
    }

    /// Decides; on [`Next::Merge`] and [`Next::PutBack`] the version has the bytes it was decided on.
    fn next_step(&self, displaced: &mut Displaced, now: Instant, due: bool, plan: &mut Planner<'_>) -> Next {
        let Some(file) = &displaced.version.file else { return Next::Drop };
        // Before reading, so that nobody can begin to write after it.
        let writers = if due { self.writers(file.as_fd(), &displaced.name) } else { Writers::Some };
        let late = now.saturating_duration_since(displaced.since) >= UNFINISHED;
        let given_up = writers == Writers::None || (due && writers == Writers::Unknown && late);
        if due {
            displaced.due = now + AGAIN;
        }
        let bytes = match displaced.version.read_again() {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(refusal)) => return self.unfinished(displaced, given_up, refusal),
            Err(_) => return Next::Keep,
        };
        if displaced.merged && bytes == displaced.version.bytes {
            return match writers {
                Writers::Some => Next::Keep,
                Writers::None | Writers::Unknown if self.is_durable(displaced.batch) => Next::Drop,
                Writers::None | Writers::Unknown => Next::Keep,
            };
        }
        if !self.in_place(displaced) {
            return Next::Drop;
        }
        if let Ok(stat) = rustix::fs::fstat(file) {
            displaced.version.stat = stat;
        }
        if !displaced.is_newer() || !Self::beats_successor(displaced) {
            displaced.version.bytes = bytes;
            displaced.merged = true;
            return Next::Keep;
        }
        match plan(displaced.kind, &bytes) {
            Plan::Write(new) => {
                displaced.version.bytes = bytes;
                if new == displaced.successor.bytes {
                    displaced.merged = true;
                    return if given_up { Next::Drop } else { Next::Keep };
                }
                Next::Merge(new)
            }
            // A copy, since whoever still writes to the original may be older than what comes next.
            Plan::Leave(_) => {
                displaced.version.bytes = bytes.clone();
                Next::Merge(bytes)
            }
            Plan::Refuse(refusal) => {
                if given_up {
                    displaced.version.bytes = bytes;
                }
                self.unfinished(displaced, given_up, refusal)
            }
            Plan::Convert(_) => Next::Drop,
        }
    }

    /// What replaced it may have been written to in place as well, and not been looked at yet: the later one counts.
    fn beats_successor(displaced: &mut Displaced) -> bool {
        let own = displaced.version.stamp();
        let successor = &mut displaced.successor;
        let Some(file) = &successor.file else { return true };
        let (Ok(Ok(bytes)), Ok(stat)) = (successor.read_again(), rustix::fs::fstat(file)) else {
            return true;
        };
        if bytes == successor.bytes {
            return true;
        }
        if change_time(&stat) >= own.time {
            return false;
        }
        (successor.bytes, successor.stat) = (bytes, stat);
        true
    }

    /// Not (yet) a config. When its writer is gone, that is how the owner left it, and so it goes back.
    fn unfinished(&self, displaced: &Displaced, given_up: bool, refusal: Refusal) -> Next {
        match (given_up, self.in_place(displaced)) {
            (false, true) => Next::Keep,
            (true, true) => Next::PutBack(Outcome::Refused(refusal)),
            (_, false) => Next::Drop,
        }
    }

    /// Whether nobody has this version open for writing, and it still holds the bytes that were read.
    pub(super) fn has_finished(&self, version: &Version, name: &OsStr) -> bool {
        let Some(file) = &version.file else { return true };
        let writers = self.writers(file.as_fd(), name);
        // Under the lease, so that this is its final state.
        let same = version.read_again().is_ok_and(|bytes| bytes.is_ok_and(|bytes| bytes == version.bytes));
        give_lease_back(file.as_fd());
        writers == Writers::None && same
    }

    fn writers(&self, file: std::os::fd::BorrowedFd<'_>, name: &OsStr) -> Writers {
        match self.step(super::Step::Lease, name) {
            Ok(()) => take_read_lease(file),
            Err(_) => Writers::Unknown,
        }
    }

    /// Is what replaced it still in place?
    fn in_place(&self, displaced: &Displaced) -> bool {
        self.is_in_place(&displaced.target, &displaced.successor)
    }

    /// Puts the patch of what a late writer wrote in place.
    fn merge(
        &mut self,
        displaced: Displaced,
        now: Instant,
        bytes: &Bytes,
        plan: &mut Planner<'_>,
    ) -> Result<Outcome, SwapError> {
        let expected = &displaced.successor.bytes;
        let put = match self.create_synced(&displaced.target, bytes, &displaced.version, expected) {
            Ok(put) => put,
            Err(error) => {
                self.displaced.push(Displaced { merged: false, due: now + AGAIN, ..displaced });
                return Err(error);
            }
        };
        let Displaced { target, kind, name, version, successor, .. } = displaced;
        let pending = Some((name, version));
        self.exchange(Patch { target, kind, put, expect: successor, pending }, plan)
    }
}
