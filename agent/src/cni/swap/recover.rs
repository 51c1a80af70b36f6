//! Hidden files of an agent that was killed: sorted out at the next start.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::AtFlags;

use super::file::{self, Found, Target, Version};
use super::grace::Displaced;
use super::name::{self, Hidden};
use super::temp::UNFINISHED;
use super::{Planner, SwapError, Swapper};
use crate::cni::plan::{self, FileKind, Plan};

/// What was found at start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Hidden files removed at once.
    pub removed: usize,
    /// Hidden files with bytes of another writer, or that one may still write to; [`Swapper::settle`] decides.
    pub kept: usize,
}

/// What becomes of a hidden file.
enum Fate {
    Remove,
    Keep(Box<Displaced>),
    /// It cannot be judged now; nothing is removed unread.
    Leave,
}

impl Swapper {
    /// Sorts out what a killed agent left: new versions that never got into place go; what they displaced is kept for
    /// the grace time, and merged first if it was never merged.
    pub fn recover(&mut self, plan: &mut Planner<'_>) -> Result<Recovered, SwapError> {
        let own = Arc::clone(&self.dir);
        let names = self.listing(&own)?;
        let mut recovered = self.recover_in(&own, &names, plan);
        // Files behind symbolic links are patched in their own directory.
        for link in names.iter().filter(|name| FileKind::of(name).is_some()) {
            let Ok(Found::Link(_)) = self.look(&own, link) else { continue };
            let Ok(Ok(target)) = self.resolve(link) else { continue };
            if Arc::ptr_eq(&target.dir, &own) {
                continue;
            }
            let there = self.listing(&target.dir)?;
            let found = self.recover_in(&target.dir, &there, plan);
            recovered =
                Recovered { removed: recovered.removed + found.removed, kept: recovered.kept + found.kept };
        }
        Ok(recovered)
    }

    /// Names in one directory.
    fn listing(&self, dir: &OwnedFd) -> Result<Vec<OsString>, SwapError> {
        file::names(dir)
            .map_err(|source: io::Error| SwapError::io(super::Step::Read, OsStr::new("."), source))
    }

    fn recover_in(&mut self, dir: &Arc<OwnedFd>, names: &[OsString], plan: &mut Planner<'_>) -> Recovered {
        let mut recovered = Recovered::default();
        for name in names {
            let fate = match Hidden::parse(name) {
                None => continue,
                Some(Hidden::Poke) => Fate::Remove,
                Some(Hidden::Aside(hash)) => {
                    self.recover_aside(dir, name, hash, names);
                    recovered.removed += 1;
                    continue;
                }
                Some(Hidden::Version { target, expected, planned }) => {
                    match names.iter().find(|name| name::hash(name.as_encoded_bytes()) == target) {
                        Some(target) => {
                            let target =
                                Target { dir: Arc::clone(dir), name: target.clone(), config: target.clone() };
                            self.recover_version(target, name, expected, planned, plan)
                        }
                        None => Fate::Remove, // deleted by its owner
                    }
                }
            };
            match fate {
                Fate::Keep(displaced) => {
                    recovered.kept += 1;
                    self.displaced.push(*displaced);
                }
                Fate::Remove => {
                    recovered.removed += 1;
                    self.unlink(dir, name);
                }
                Fate::Leave => recovered.kept += 1,
            }
        }
        recovered
    }

    fn recover_version(
        &self,
        target: Target,
        hidden: &OsStr,
        expected: u64,
        planned: u64,
        plan: &mut Planner<'_>,
    ) -> Fate {
        let Some(kind) = FileKind::of(&target.name) else { return Fate::Remove };
        let version = match self.look(&target.dir, hidden) {
            Ok(Found::File(version)) => version,
            Ok(Found::Nothing | Found::Link(_)) => return Fate::Remove,
            Ok(Found::Other(..)) | Err(_) => return Fate::Leave,
        };
        // Never finished, or never put in place: ours.
        if version.stat.st_mode & 0o7777 == UNFINISHED || name::hash(&version.bytes) == planned {
            return Fate::Remove;
        }
        // In place must be what replaced it; everything else is newer.
        let live = match self.look(&target.dir, &target.name) {
            Ok(Found::File(live)) => live,
            Ok(_) => return Fate::Remove,
            Err(_) => return Fate::Leave,
        };
        let merged = name::hash(&version.bytes) == expected;
        if self.was_lost(kind, &version, &live, plan) {
            return Fate::Keep(Box::new(Displaced::unmerged(
                target,
                kind,
                hidden.to_owned(),
                version,
                live,
                self.grace,
            )));
        }
        let follows = name::hash(&live.bytes) == planned || Self::follows(kind, &version, &live, plan);
        let make = if merged { Displaced::new } else { Displaced::unmerged };
        if !follows {
            return Fate::Remove;
        }
        Fate::Keep(Box::new(make(target, kind, hidden.to_owned(), version, live, self.grace)))
    }

    /// Nothing whole is in place since the machine was booted: a power cut on a file system that did not keep the order
    /// of bytes and names, or ended in the middle of it.
    fn was_lost(&self, kind: FileKind, old: &Version, live: &Version, plan: &mut Planner<'_>) -> bool {
        let broken = |bytes: &[u8], plan: &mut Planner<'_>| matches!(plan(kind, bytes), Plan::Refuse(why) if why.may_be_unfinished());
        // Both inodes were given their names by the same exchange.
        live.stat.st_ctime < self.booted
            && old.stat.st_ctime < self.booted
            && broken(&live.bytes, plan)
            && !broken(&old.bytes, plan)
    }

    fn follows(kind: FileKind, old: &Version, live: &Version, plan: &mut Planner<'_>) -> bool {
        matches!(plan(kind, &old.bytes), Plan::Write(bytes) if bytes == live.bytes)
    }

    /// A `.conf` on its way to its hidden place: finishes the way, unless its owner made a new one.
    fn recover_aside(&self, dir: &OwnedFd, hidden: &OsStr, hash: u64, names: &[OsString]) {
        let of = |name: &OsStr| name::hash(name.as_encoded_bytes()) == hash;
        let original = names
            .iter()
            .filter_map(|name| plan::original_name(name))
            .chain(names.iter().flat_map(|name| singles(name)))
            .find(|name| of(name));
        let Some(original) = original else {
            tracing::warn!(file = %hidden.display(), "kept: a converted CNI config whose list is gone");
            return;
        };
        if names.contains(&original) {
            self.unlink(dir, hidden);
            return;
        }
        let aside = plan::aside_name(&original);
        let inode = |name: &OsStr| {
            rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)
                .ok()
                .map(|stat| (stat.st_dev, stat.st_ino))
        };
        if inode(hidden) == inode(&aside) {
            // Renaming one hard link over another of the same file does nothing.
            self.unlink(dir, hidden);
        } else if let Err(error) = rustix::fs::renameat(dir, hidden, dir, &aside) {
            tracing::warn!(file = %hidden.display(), %error, "cannot finish keeping a converted CNI config");
        }
    }
}

/// The single-plugin names that a list may have been made from.
fn singles(list: &OsStr) -> Vec<OsString> {
    if FileKind::of(list) != Some(FileKind::Conflist) {
        return Vec::new();
    }
    let path = std::path::Path::new(list);
    ["conf", "json"].iter().map(|ending| path.with_extension(ending).into_os_string()).collect()
}
