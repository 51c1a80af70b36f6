//! Puts a new version in place and looks at what came out, until that is what was expected.

use std::ffi::{OsStr, OsString};
use std::ops::ControlFlow;
use std::sync::Arc;

use bytes::Bytes;
use rustix::fs::{AtFlags, RenameFlags};
use rustix::io::Errno;

use super::file::{Found, Stamp, Target, Version};
use super::grace::Displaced;
use super::name::{self, Hidden};
use super::temp::Put;
use super::{Outcome, Patch, Patched, Step, SwapError, Swapper};
use crate::cni::plan::{FileKind, Plan};

/// Times that other writers may come in between before the patch is put off. Every one of them is a change of the
/// file within the microseconds of an exchange.
const MAX_ROUNDS: u32 = 16;

/// What one exchange did.
enum Swapped {
    /// The new version is in place; the displaced one is under this hidden name.
    Out(OsString),
    /// In place, but the displaced one could not be kept.
    NotKept,
    /// There was nothing to displace.
    OwnerDeleted,
    /// The hidden file or the directory is gone.
    HiddenGone,
}

/// The state between two exchanges.
struct Turn {
    target: Target,
    kind: FileKind,
    /// What goes in next.
    put: Put,
    /// What is in place, and so should come out.
    expect: Version,
    /// Another writer's version that `put` was made from, under its hidden name; not merged before `put` is in place.
    pending: Option<(OsString, Version)>,
    /// The answer if `put` gets into place and nobody was in between.
    outcome: Result<Outcome, SwapError>,
    writes: u32,
    /// Of the bytes that `put` was made from; `None` as long as those are the bytes of `expect`.
    stamp: Option<Stamp>,
}

impl Swapper {
    /// Exchanges until what comes out is what was expected. In the end the newest bytes of any other writer are in
    /// place, patched if they need it.
    pub(super) fn exchange(
        &mut self,
        patch: Patch,
        plan: &mut super::Planner<'_>,
    ) -> Result<Outcome, SwapError> {
        let Patch { target, kind, put, expect, pending } = patch;
        let bytes = put.version.bytes.clone();
        let from = pending.as_ref().map_or(&expect.bytes, |(_, version)| &version.bytes).clone();
        let patched = Patched { bytes, from, writes: 0, exchanged: true };
        let outcome = Ok(Outcome::Patched(patched));
        self.exchange_as(Turn { target, kind, put, expect, pending, outcome, writes: 0, stamp: None }, plan)
    }

    /// Puts another writer's version back that came out earlier, without changing it.
    pub(super) fn put_back(
        &mut self,
        patch: Patch,
        outcome: Outcome,
        plan: &mut super::Planner<'_>,
    ) -> Result<Outcome, SwapError> {
        let Patch { target, kind, put, expect, pending } = patch;
        let stamp = Some(put.version.stamp());
        let turn = Turn { target, kind, put, expect, pending, outcome: Ok(outcome), writes: 0, stamp };
        self.exchange_as(turn, plan)
    }

    fn exchange_as(&mut self, mut turn: Turn, plan: &mut super::Planner<'_>) -> Result<Outcome, SwapError> {
        for _ in 0..MAX_ROUNDS {
            if !turn.put.ours && !self.is_untouched(&turn.target, &turn.expect) {
                // Its owner has something newer there, which must not be hidden for even a moment by what goes back.
                self.unlink(&turn.target.dir, &turn.put.name);
                return turn.outcome.map(|_| Outcome::Changed);
            }
            let out = match self.swap_in(&turn.target, &turn.put, &turn.expect) {
                Ok(Swapped::Out(out)) => Some(out),
                Ok(Swapped::NotKept) => None,
                Ok(Swapped::OwnerDeleted) => return Ok(self.owner_deleted(&turn)),
                Ok(Swapped::HiddenGone) => return Ok(Outcome::Changed),
                Err(error) => {
                    self.give_up(turn);
                    return Err(error);
                }
            };
            turn.writes += u32::from(turn.put.ours);
            self.placed(&mut turn);
            let Some(out) = out else { return self.done(turn, None) };
            match self.inspect(&turn.target, &out, &turn.expect) {
                Ok(None) => return self.done(turn, Some(out)),
                Ok(Some(found)) => match self.answer(turn, found, out, plan) {
                    ControlFlow::Continue(next) => turn = next,
                    ControlFlow::Break(outcome) => return outcome,
                },
                Err(error) => return Err(self.undo(&turn.target, &turn.put, &out, error)),
            }
        }
        let name = turn.target.name.clone();
        self.give_up(turn);
        Err(SwapError::Contended { name, rounds: MAX_ROUNDS })
    }

    /// Another writer's version came out: decides what goes in instead of ours. An outcome means that it may stay.
    fn answer(
        &mut self,
        mut turn: Turn,
        found: Found,
        out: OsString,
        plan: &mut super::Planner<'_>,
    ) -> ControlFlow<Result<Outcome, SwapError>, Turn> {
        if !matches!(&found, Found::File(version) if version.same_inode(&turn.expect.stat)) {
            self.supersede(&turn);
        }
        if !turn.put.ours {
            // What went back was older than this, which was hidden by it for these microseconds.
            if let Ok(Ok(bytes)) = turn.put.version.read_again() {
                turn.put.version.bytes = bytes;
            }
            let version = match found {
                Found::File(version) => version,
                Found::Other(stat, _) | Found::Link(stat) => Version::opaque(&turn.target.dir, &out, stat),
                Found::Nothing => Version::opaque(&turn.target.dir, &out, turn.put.version.stat),
            };
            return ControlFlow::Continue(self.back(turn, out, version, Ok(Outcome::Changed)));
        }
        let (version, outcome) = match found {
            Found::File(version) => match plan(turn.kind, &version.bytes) {
                Plan::Write(bytes) => return ControlFlow::Continue(self.go_on(turn, out, version, bytes)),
                // A copy, since whoever still writes to the original may be older than what came after it.
                Plan::Leave(_) => {
                    let bytes = version.bytes.clone();
                    return ControlFlow::Continue(self.go_on(turn, out, version, bytes));
                }
                Plan::Refuse(refusal) => match self.has_finished(&version, &turn.target.name) {
                    // Like this on purpose.
                    true => (version, Ok(Outcome::Refused(refusal))),
                    // In the middle of it. Until then the version made from the older bytes is a whole one.
                    false => return ControlFlow::Break(self.wait_for_writer(turn, out, version)),
                },
                Plan::Convert(_) => (version, Ok(Outcome::Changed)),
            },
            Found::Other(stat, refusal) => {
                (Version::opaque(&turn.target.dir, &out, stat), Ok(Outcome::Refused(refusal)))
            }
            // A symbolic link took the name: it goes back, and the file behind it is looked at next.
            Found::Link(stat) => (Version::opaque(&turn.target.dir, &out, stat), Ok(Outcome::Changed)),
            Found::Nothing => {
                (Version::opaque(&turn.target.dir, &out, turn.put.version.stat), Ok(Outcome::Changed))
            }
        };
        ControlFlow::Continue(self.back(turn, out, version, outcome))
    }

    /// Another file had taken the name before `put` did. What older files of that name hold, and what late writers
    /// still put into them, has no meaning any more.
    fn supersede(&mut self, turn: &Turn) {
        let (old, kept) = std::mem::take(&mut self.displaced)
            .into_iter()
            .partition(|displaced: &Displaced| displaced.successor.same_inode(&turn.put.version.stat));
        self.displaced = kept;
        for displaced in old {
            self.unlink(&displaced.target.dir, &displaced.name);
        }
    }

    /// The next version is made from what came out.
    fn go_on(&mut self, turn: Turn, out: OsString, version: Version, bytes: Bytes) -> Turn {
        match self.create_synced(&turn.target, &bytes, &version, &turn.put.version.bytes) {
            Ok(put) => {
                let from = version.bytes.clone();
                let outcome = Ok(Outcome::Patched(Patched { bytes, from, writes: 0, exchanged: true }));
                let pending = Some((out, version));
                Turn { put, expect: turn.put.version, pending, outcome, ..turn }
            }
            Err(error) => self.back(turn, out, version, Err(error)),
        }
    }

    /// What came out goes back as it is.
    fn back(
        &mut self,
        turn: Turn,
        out: OsString,
        mut version: Version,
        outcome: Result<Outcome, SwapError>,
    ) -> Turn {
        let stamp = Some(self.stamp(&mut version));
        let put = Put { name: out, version, ours: false, unsynced: None };
        Turn { put, expect: turn.put.version, pending: None, outcome, stamp, ..turn }
    }

    /// What came out is kept until its writer has finished, and merged then.
    fn wait_for_writer(
        &mut self,
        turn: Turn,
        out: OsString,
        mut version: Version,
    ) -> Result<Outcome, SwapError> {
        self.stamp(&mut version);
        self.relink(&version, &turn.put.version, Stamp::default());
        let Turn { target, kind, put, outcome, writes, .. } = turn;
        let unmerged = Displaced::unmerged(target, kind, out, version, put.version, self.grace);
        self.displaced.push(unmerged.until(self.batch()));
        counted(outcome, writes, self.exchange)
    }

    pub(super) fn create_synced(
        &self,
        target: &Target,
        bytes: &Bytes,
        like: &Version,
        expected: &[u8],
    ) -> Result<Put, SwapError> {
        let mut put = self.create(target, bytes, like, expected)?;
        match self.write_back(target, &mut put) {
            Ok(()) => Ok(put),
            Err(error) => {
                self.unlink(&target.dir, &put.name);
                Err(error)
            }
        }
    }

    /// Is this the file that has the name now?
    pub(super) fn is_in_place(&self, target: &Target, version: &Version) -> bool {
        rustix::fs::statat(&target.dir, &target.name, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| version.same_inode(&stat))
    }

    /// Does this file have the name now, with the bytes it was known to have?
    fn is_untouched(&self, target: &Target, version: &Version) -> bool {
        self.is_in_place(target, version)
            && version.read_again().is_ok_and(|bytes| bytes.is_ok_and(|bytes| bytes == version.bytes))
    }

    /// `put` is in place, so what it was made from is merged.
    fn placed(&mut self, turn: &mut Turn) {
        if turn.put.ours {
            self.to_sync.push((Arc::clone(&turn.target.dir), turn.put.version.file.clone()));
        }
        if let Some((name, mut version)) = turn.pending.take() {
            let stamp = self.stamp(&mut version);
            turn.stamp = Some(stamp);
            self.relink(&version, &turn.put.version, stamp);
            self.keep(turn, name, version, stamp);
        }
    }

    /// The version's stamp, now that it is displaced.
    fn stamp(&mut self, version: &mut Version) -> Stamp {
        if version.seq == 0 {
            self.seq += 1;
            version.seq = self.seq;
        }
        version.stamp()
    }

    /// What came out is what was expected.
    #[expect(clippy::needless_pass_by_value, reason = "a turn ends here")]
    fn done(&mut self, turn: Turn, out: Option<OsString>) -> Result<Outcome, SwapError> {
        let mut old = turn.expect.clone();
        let own = self.stamp(&mut old);
        let stamp = turn.stamp.unwrap_or(own);
        self.relink(&old, &turn.put.version, stamp);
        if let Some(out) = &out {
            self.keep(&turn, out.clone(), old, stamp);
        }
        counted(turn.outcome, turn.writes, self.exchange && out.is_some())
    }

    fn owner_deleted(&mut self, turn: &Turn) -> Outcome {
        self.unlink(&turn.target.dir, &turn.put.name);
        if let Some((name, _)) = &turn.pending {
            self.unlink(&turn.target.dir, name);
        }
        Outcome::Gone
    }

    /// `put` did not get into place: our own is dropped, another writer's is kept to be merged later.
    fn give_up(&mut self, turn: Turn) {
        let Turn { target, kind, put, expect, pending, .. } = turn;
        let unmerged = if put.ours {
            self.unlink(&target.dir, &put.name);
            pending
        } else {
            Some((put.name, put.version))
        };
        if let Some((name, version)) = unmerged {
            self.displaced.push(Displaced::unmerged(target, kind, name, version, expect, self.grace));
        }
    }

    /// Keeps a displaced version, now replaced by `turn.put`, for the grace time.
    fn keep(&mut self, turn: &Turn, name: OsString, old: Version, stamp: Stamp) {
        let target = turn.target.clone();
        if old.file.is_none() {
            self.unlink(&target.dir, &name);
            return;
        }
        let new = turn.put.version.clone();
        let displaced = Displaced::new(target, turn.kind, name, old, new, self.grace);
        self.displaced.push(displaced.until(self.batch()).since(stamp));
    }

    /// `old` was replaced by `new`: whoever still writes to what `old` replaced is merged into `new` from now on,
    /// unless it is older than `stamp`.
    fn relink(&mut self, old: &Version, new: &Version, stamp: Stamp) {
        for displaced in &mut self.displaced {
            if displaced.successor.same_inode(&old.stat) {
                displaced.successor = new.clone();
                displaced.stamp = displaced.stamp.max(stamp);
            }
        }
    }

    /// One exchange, or its replacement where the file system has none.
    fn swap_in(&mut self, target: &Target, put: &Put, expect: &Version) -> Result<Swapped, SwapError> {
        if !self.exchange {
            return self.link_and_rename(target, put, expect);
        }
        let dir = &target.dir;
        let swapped = self.step(Step::Exchange, &target.name).and_then(|()| {
            rustix::fs::renameat_with(dir, &put.name, dir, &target.name, RenameFlags::EXCHANGE)
                .map_err(|error| SwapError::io(Step::Exchange, &target.name, error.into()))
        });
        let Err(error) = swapped else { return Ok(Swapped::Out(put.name.clone())) };
        let SwapError::Io { source, .. } = &error else { return Err(error) };
        match source.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::NOENT) => self.which_is_gone(target, put),
            Some(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
                tracing::warn!(
                    "the file system of the CNI directory cannot exchange files; using rename, which may lose an \
                     update that another writer makes in the same microseconds"
                );
                self.exchange = false;
                self.link_and_rename(target, put, expect)
            }
            _ => Err(error),
        }
    }

    /// `ENOENT` from an exchange: which of the two names was it?
    fn which_is_gone(&self, target: &Target, put: &Put) -> Result<Swapped, SwapError> {
        match rustix::fs::statat(&target.dir, &put.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(Swapped::OwnerDeleted),
            Err(Errno::NOENT) => Ok(Swapped::HiddenGone),
            Err(error) => Err(SwapError::io(Step::Exchange, &target.name, error.into())),
        }
    }

    /// Without exchange: the old version gets a second, hidden name, and the new one is renamed over the target. A
    /// writer that renames or deletes between the two calls is not seen.
    fn link_and_rename(
        &mut self,
        target: &Target,
        put: &Put,
        expect: &Version,
    ) -> Result<Swapped, SwapError> {
        let dir = &target.dir;
        let said = Hidden::Version {
            target: name::hash(target.name.as_encoded_bytes()),
            expected: name::hash(&expect.bytes),
            planned: name::hash(&put.version.bytes),
        };
        let hidden = said.name();
        let linked = self.step(Step::Link, &target.name).and_then(|()| {
            rustix::fs::linkat(dir, &target.name, dir, &hidden, AtFlags::empty())
                .map_err(|error| SwapError::io(Step::Link, &target.name, error.into()))
        });
        let kept = match linked {
            Ok(()) => true,
            Err(SwapError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Swapped::OwnerDeleted);
            }
            // No hard links either (VFAT): compare, and rename at once.
            Err(_) => match self.look(dir, &target.name)? {
                Found::File(now) if now.same_inode(&expect.stat) && now.bytes == expect.bytes => false,
                Found::Nothing => return Ok(Swapped::OwnerDeleted),
                _ => return Err(SwapError::Contended { name: target.name.clone(), rounds: 0 }),
            },
        };
        let renamed = self.step(Step::Rename, &target.name).and_then(|()| {
            rustix::fs::renameat(dir, &put.name, dir, &target.name)
                .map_err(|error| SwapError::io(Step::Rename, &target.name, error.into()))
        });
        match renamed {
            Ok(()) if kept => Ok(Swapped::Out(hidden)),
            Ok(()) => Ok(Swapped::NotKept),
            Err(error) => {
                if kept {
                    self.unlink(dir, &hidden);
                }
                Err(error)
            }
        }
    }

    /// Compares what came out with what was expected; `None` when it is that.
    fn inspect(&self, target: &Target, out: &OsStr, expect: &Version) -> Result<Option<Found>, SwapError> {
        self.step(Step::Inspect, &target.name)?;
        let at = |source: std::io::Error| SwapError::io(Step::Inspect, &target.name, source);
        let stat = rustix::fs::statat(&target.dir, out, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|error| at(error.into()))?;
        if !expect.same_inode(&stat) {
            return Ok(Some(self.look(&target.dir, out)?));
        }
        match expect.read_again().map_err(at)? {
            Ok(bytes) if bytes == expect.bytes => Ok(None),
            // Written in place after it was read.
            Ok(bytes) => {
                let file = expect.file.clone();
                Ok(Some(Found::File(Version { file, pin: None, stat, bytes, seq: expect.seq })))
            }
            Err(refusal) => Ok(Some(Found::Other(stat, refusal))),
        }
    }

    /// What came out cannot be read: it goes back unread, so that nothing is lost.
    fn undo(&mut self, target: &Target, put: &Put, out: &OsStr, error: SwapError) -> SwapError {
        let dir = &target.dir;
        let undone = if self.exchange {
            rustix::fs::renameat_with(dir, out, dir, &target.name, RenameFlags::EXCHANGE)
        } else {
            rustix::fs::renameat(dir, out, dir, &target.name)
        };
        match undone {
            Ok(()) => {
                let ours = rustix::fs::statat(dir, out, AtFlags::SYMLINK_NOFOLLOW)
                    .is_ok_and(|stat| put.ours && put.version.same_inode(&stat));
                if ours {
                    self.unlink(dir, out);
                }
            }
            Err(Errno::NOENT) => self.unlink(dir, out),
            Err(failed) => tracing::error!(
                file = %target.name.display(), kept_as = %out.display(), error = %failed,
                "cannot look at a displaced CNI config nor put it back; the next start does"
            ),
        }
        error
    }
}

fn counted(outcome: Result<Outcome, SwapError>, writes: u32, exchanged: bool) -> Result<Outcome, SwapError> {
    outcome.map(|outcome| match outcome {
        Outcome::Patched(patched) => Outcome::Patched(Patched { writes, exchanged, ..patched }),
        other => other,
    })
}
