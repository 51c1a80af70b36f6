//! Turns a single-plugin file into a list: the list first, then the file moves to a hidden name. Until that move the
//! file wins with every runtime, so there is no moment without a network.

use std::ffi::{OsStr, OsString};

use std::sync::Arc;

use bytes::Bytes;
use rustix::fs::{AtFlags, RenameFlags};
use rustix::io::Errno;

use super::file::{Found, Version};
use super::name::{self, Hidden};
use super::{Outcome, Patch, Planner, Step, SwapError, Swapper};
use crate::cni::edit;
use crate::cni::plan::{FileKind, Plan, aside_name, list_name};
use crate::cni::refusal::Refusal;

/// Owners that change the file while it is being moved are followed this often.
const MAX_ROUNDS: u32 = 8;

/// A single-plugin file that became a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted {
    /// Name of the list.
    pub list: OsString,
    /// Its bytes.
    pub bytes: Bytes,
    /// Hidden name under which the original is kept.
    pub aside: OsString,
    /// The original's bytes.
    pub from: Bytes,
}

/// How far the move of the original got.
enum Moved {
    Done,
    /// The owner had written something else there by then.
    Newer(Version),
    /// The owner deleted it.
    Gone,
}

impl Swapper {
    pub(super) fn convert(
        &mut self,
        name: &OsStr,
        found: Version,
        list: Bytes,
        plan: &mut Planner<'_>,
    ) -> Result<Outcome, SwapError> {
        let (mut found, mut bytes) = (found, list);
        for _ in 0..MAX_ROUNDS {
            let Some(list) = list_name(name) else { return Ok(Outcome::Changed) };
            if let Some(outcome) = self.place_list(name, &list, &bytes, &found, plan)? {
                return Ok(outcome);
            }
            match self.move_aside(name, &found)? {
                Moved::Done => {
                    self.to_sync.push((Arc::clone(&self.dir), None));
                    self.make_durable();
                    let converted = Converted { list, bytes, aside: aside_name(name), from: found.bytes };
                    self.converted.insert(name.to_owned(), converted.clone());
                    return Ok(Outcome::Converted(converted));
                }
                Moved::Gone => {
                    self.withdraw(&list, &bytes);
                    let aside = aside_name(name);
                    self.unlink(&self.dir, &aside);
                    return Ok(Outcome::Gone);
                }
                Moved::Newer(newer) => match plan(FileKind::Conf, &newer.bytes) {
                    Plan::Convert(newer_list) => (found, bytes) = (newer, newer_list),
                    Plan::Refuse(refusal) => return self.bring_back(name, Outcome::Refused(refusal)),
                    _ => return self.bring_back(name, Outcome::Changed),
                },
            }
        }
        Err(SwapError::Contended { name: name.to_owned(), rounds: MAX_ROUNDS })
    }

    /// An in-place writer wrote to an original after it was moved aside: the list follows, as long as it is still the
    /// one made from it.
    pub fn follow_aside(
        &mut self,
        original: &OsStr,
        plan: &mut Planner<'_>,
    ) -> Result<Option<Outcome>, SwapError> {
        let Some(known) = self.converted.get(original).cloned() else { return Ok(None) };
        let Found::File(now) = self.look(&self.dir, &known.aside)? else { return Ok(None) };
        if now.bytes == known.from {
            return Ok(None);
        }
        let kind = FileKind::of(original).unwrap_or(FileKind::Conf);
        let Plan::Convert(bytes) = plan(kind, &now.bytes) else { return Ok(None) };
        let Found::File(live) = self.look(&self.dir, &known.list)? else { return Ok(None) };
        if !edit::same(&String::from_utf8_lossy(&live.bytes), &String::from_utf8_lossy(&known.bytes)) {
            return Ok(None);
        }
        let outcome = self.exchange_list(&known.list, &bytes, live, plan)?;
        self.converted.insert(original.to_owned(), Converted { bytes, from: now.bytes, ..known });
        Ok(Some(outcome))
    }

    /// Makes sure that the list holds `bytes`. An outcome means that it cannot.
    fn place_list(
        &mut self,
        name: &OsStr,
        list: &OsStr,
        bytes: &Bytes,
        found: &Version,
        plan: &mut Planner<'_>,
    ) -> Result<Option<Outcome>, SwapError> {
        let exists = Outcome::Refused(Refusal::ListExists { list: list.to_string_lossy().into_owned() });
        match self.look(&self.dir, list)? {
            Found::File(live) if live.bytes == *bytes => Ok(None),
            Found::File(live) => {
                if !self.made_here(name, &live, plan)? {
                    return Ok(Some(exists));
                }
                match self.exchange_list(list, bytes, live, plan)? {
                    Outcome::Patched(patched) if patched.bytes == *bytes => Ok(None),
                    _ => Ok(Some(Outcome::Changed)),
                }
            }
            Found::Nothing => {
                self.mark(name)?;
                self.place_new(list, bytes, found)
            }
            Found::Other(..) | Found::Link(_) => Ok(Some(exists)),
        }
    }

    /// Was the list that is there made from the original that is kept aside?
    fn made_here(&self, name: &OsStr, live: &Version, plan: &mut Planner<'_>) -> Result<bool, SwapError> {
        if self.converted.get(name).is_some_and(|known| known.bytes == live.bytes) {
            return Ok(true);
        }
        let Found::File(kept) = self.look(&self.dir, &aside_name(name))? else { return Ok(false) };
        let kind = FileKind::of(name).unwrap_or(FileKind::Conf);
        let Plan::Convert(from_kept) = plan(kind, &kept.bytes) else { return Ok(false) };
        // The list may still carry the entry of an earlier configuration.
        let current = match plan(FileKind::Conflist, &live.bytes) {
            Plan::Write(bytes) => bytes,
            _ => live.bytes.clone(),
        };
        Ok(edit::same(&String::from_utf8_lossy(&current), &String::from_utf8_lossy(&from_kept)))
    }

    /// Gives the original its hidden name as a second one. After a crash this tells that the list is ours.
    fn mark(&self, name: &OsStr) -> Result<(), SwapError> {
        self.step(Step::Link, name)?;
        match rustix::fs::linkat(&self.dir, name, &self.dir, aside_name(name), AtFlags::empty()) {
            // Without hard links (VFAT), a crash in the next microseconds needs an operator.
            Ok(()) | Err(Errno::EXIST | Errno::PERM | Errno::NOTSUP | Errno::NOENT | Errno::MLINK) => Ok(()),
            Err(error) => Err(SwapError::io(Step::Link, name, error.into())),
        }
    }

    fn place_new(
        &mut self,
        list: &OsStr,
        bytes: &Bytes,
        like: &Version,
    ) -> Result<Option<Outcome>, SwapError> {
        let target = self.target(list);
        let put = self.create_synced(&target, bytes, like, b"")?;
        let placed = self.step(Step::Place, list).and_then(|()| {
            match rustix::fs::renameat_with(&self.dir, &put.name, &self.dir, list, RenameFlags::NOREPLACE) {
                // No such flag here: a hard link does not replace either.
                Err(Errno::INVAL | Errno::NOSYS) => {
                    rustix::fs::linkat(&self.dir, &put.name, &self.dir, list, AtFlags::empty())
                        .inspect(|()| self.unlink(&self.dir, &put.name))
                }
                other => other,
            }
            .map_err(|error| SwapError::io(Step::Place, list, error.into()))
        });
        match placed {
            Ok(()) => {
                self.to_sync.push((Arc::clone(&self.dir), put.version.file));
                Ok(None)
            }
            Err(error) => {
                self.unlink(&self.dir, &put.name);
                match &error {
                    SwapError::Io { source, .. } if source.kind() == std::io::ErrorKind::AlreadyExists => {
                        Ok(Some(Outcome::Changed))
                    }
                    _ => Err(error),
                }
            }
        }
    }

    fn exchange_list(
        &mut self,
        list: &OsStr,
        bytes: &Bytes,
        live: Version,
        plan: &mut Planner<'_>,
    ) -> Result<Outcome, SwapError> {
        let target = self.target(list);
        let put = self.create_synced(&target, bytes, &live, &live.bytes)?;
        self.exchange(Patch { target, kind: FileKind::Conflist, put, expect: live, pending: None }, plan)
    }

    /// Moves the original to its hidden name and looks at what was moved.
    fn move_aside(&self, name: &OsStr, found: &Version) -> Result<Moved, SwapError> {
        let hidden = Hidden::Aside(name::hash(name.as_encoded_bytes())).name();
        let aside = aside_name(name);
        let rename = |from: &OsStr, to: &OsStr| {
            self.step(Step::Rename, name)?;
            rustix::fs::renameat(&self.dir, from, &self.dir, to)
                .map_err(|error| SwapError::io(Step::Rename, name, error.into()))
        };
        match rename(name, &hidden) {
            Err(SwapError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Moved::Gone);
            }
            moved => moved?,
        }
        let (moved, kept) = (self.inode(&hidden), self.inode(&aside));
        if moved.is_some() && moved == kept {
            // A second name of the kept file; renaming it over the first would do nothing.
            self.unlink(&self.dir, &hidden);
        } else {
            rename(&hidden, &aside)?;
        }
        match self.look(&self.dir, &aside)? {
            Found::File(now) if now.bytes != found.bytes => Ok(Moved::Newer(now)),
            _ => Ok(Moved::Done),
        }
    }

    fn inode(&self, name: &OsStr) -> Option<(u64, u64)> {
        let stat = rustix::fs::statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        Some((stat.st_dev, stat.st_ino))
    }

    /// What was moved aside is not a config (yet): it goes back to where its owner will look for it.
    fn bring_back(&self, name: &OsStr, outcome: Outcome) -> Result<Outcome, SwapError> {
        let aside = aside_name(name);
        match rustix::fs::renameat_with(&self.dir, &aside, &self.dir, name, RenameFlags::NOREPLACE) {
            Ok(()) | Err(Errno::EXIST) => Ok(outcome),
            Err(error) => Err(SwapError::io(Step::Rename, name, error.into())),
        }
    }

    /// Removes a list that was made a moment ago, unless it was changed.
    fn withdraw(&self, list: &OsStr, bytes: &Bytes) {
        if let Ok(Found::File(live)) = self.look(&self.dir, list)
            && live.bytes == *bytes
        {
            self.unlink(&self.dir, list);
        }
    }
}
