//! Replaces config files without losing what another writer does at the same time.
//!
//! A new version is written under a hidden name in the same directory, made durable, and *exchanged* with the target.
//! What comes out is compared with what the new version was made from. When another writer was in between, that
//! writer's bytes are planned in turn and exchanged again, until what comes out is what was read. The displaced file
//! stays under its hidden name for a grace time, since an in-place writer may have opened it before the exchange;
//! what such a writer goes on writing is merged. Nothing is removed before it has been compared.
//!
//! The order in which bytes and names become durable is kept before the exchange; waiting for the disk comes after it,
//! and before the displaced file may go.
//!
//! A crash at any system call leaves the old or the new version under the target's name, and hidden files that
//! [`Swapper::recover`] sorts out at the next start.

mod convert;
mod exchange;
mod file;
mod grace;
mod name;
mod recover;
mod step;
mod sync;
mod temp;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};

use super::plan::{FileKind, Leave, Plan};
use super::refusal::Refusal;
use file::{Found, Target};
use grace::Displaced;
use sync::{Syncer, Unsynced};
use temp::Put;

pub use convert::Converted;
pub use name::{hash, is_hidden, passing_name as hidden_name};
pub use recover::Recovered;
pub use step::{Plain, Seam, Step};

/// Decides about the bytes of one config file; see [`super::plan::plan`].
pub type Planner<'a> = dyn FnMut(FileKind, &[u8]) -> Plan + 'a;

/// How long a displaced file is kept although nobody has it open: 2 s.
pub const GRACE: Duration = Duration::from_secs(2);
/// New versions prepared while the disk writes as many others.
const BATCH: usize = 8;

/// What became of one config file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Needs no edit.
    Left(Leave, Bytes),
    /// Not touched, for this reason.
    Refused(Refusal),
    /// Not there; a file deleted by its owner stays deleted.
    Gone,
    /// Patched.
    Patched(Patched),
    /// A single-plugin file became a list.
    Converted(Converted),
    /// Another writer changed what the name stands for in the middle; look again.
    Changed,
}

/// A patch that is in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patched {
    /// The bytes that are there now.
    pub bytes: Bytes,
    /// The owner's bytes they were made from.
    pub from: Bytes,
    /// New versions put in place: one, and one more for each time another writer came in between.
    pub writes: u32,
    /// False where the file system has no exchange, so that a writer in the same microseconds could be lost.
    pub exchanged: bool,
}

/// Why a patch did not happen. The file is as its owner left it.
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// A system call failed.
    #[error("{step} {} failed: {source}", name.display())]
    Io {
        /// Which one.
        step: Step,
        /// The config file.
        name: OsString,
        /// The system's answer.
        source: io::Error,
    },
    /// Other writers changed the file faster than it could be patched; it is tried again.
    #[error("{} changed {rounds} times while it was being patched; trying again", name.display())]
    Contended {
        /// The config file.
        name: OsString,
        /// How often another writer came in between.
        rounds: u32,
    },
}

impl SwapError {
    fn io(step: Step, name: &OsStr, source: io::Error) -> Self {
        Self::Io { step, name: name.to_owned(), source }
    }

    /// The bounded reason for metrics and `cni status`; `None` when trying again is all there is to do.
    pub fn refusal(&self) -> Option<Refusal> {
        match self {
            Self::Io { source, .. } => Some(Refusal::from(source)),
            Self::Contended { .. } => None,
        }
    }
}

/// Patches the files of one directory. Belongs to one thread.
pub struct Swapper {
    dir: Arc<OwnedFd>,
    /// Paths under which the directory is known, for absolute links.
    roots: Vec<PathBuf>,
    seam: Box<dyn Seam>,
    grace: Duration,
    /// False once the file system refused an exchange.
    exchange: bool,
    displaced: Vec<Displaced>,
    /// New versions in place that are not durable yet, with their directories.
    to_sync: Vec<Unsynced>,
    syncer: Option<Syncer>,
    /// Versions displaced so far.
    seq: u64,
    /// Batches given to it.
    batches: u64,
    /// When this machine was booted, in seconds since 1970.
    booted: i64,
    /// Lists made from single-plugin files, by the name of those.
    converted: BTreeMap<OsString, Converted>,
}

impl fmt::Debug for Swapper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Swapper")
            .field("dir", &self.dir)
            .field("roots", &self.roots)
            .field("exchange", &self.exchange)
            .field("displaced", &self.displaced.len())
            .finish_non_exhaustive()
    }
}

/// A config file after the first half of a patch.
enum Prepared {
    Done(Outcome),
    Ready(Box<Patch>),
    /// A single-plugin file that becomes a list.
    Convert(Box<file::Version>, Bytes),
}

/// A new version that is written, but not in place yet.
#[derive(Debug)]
struct Patch {
    target: Target,
    kind: FileKind,
    put: Put,
    /// What is expected to come out.
    expect: file::Version,
    /// A version under a hidden name that `put` was made from, where that is not `expect`.
    pending: Option<(OsString, file::Version)>,
}

impl Swapper {
    /// For the directory behind `dir`. `roots` are its paths here and on the host.
    pub fn new(dir: OwnedFd, roots: Vec<PathBuf>) -> Self {
        Self {
            dir: Arc::new(dir),
            roots,
            seam: Box::new(Plain),
            grace: GRACE,
            exchange: true,
            displaced: Vec::new(),
            to_sync: Vec::new(),
            syncer: None,
            seq: 0,
            batches: 0,
            booted: boot_time(),
            converted: BTreeMap::new(),
        }
    }

    /// Puts a test's seam before each system call.
    pub fn set_seam(&mut self, seam: Box<dyn Seam>) {
        self.seam = seam;
    }

    /// Changes [`GRACE`].
    pub fn set_grace(&mut self, grace: Duration) {
        self.grace = grace;
    }

    /// Pretends that the machine was booted then, in seconds since 1970.
    pub fn set_boot_time(&mut self, booted: i64) {
        self.booted = booted;
    }

    /// The directory.
    pub fn dir(&self) -> &Arc<OwnedFd> {
        &self.dir
    }

    /// Every name in the directory.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        file::names(&self.dir)
    }

    /// What a config holds now, also behind a link; `None` when that cannot be read.
    pub fn read(&self, name: &OsStr) -> Option<Bytes> {
        let mut found = self.look(&self.dir, name).ok()?;
        if matches!(found, Found::Link(_)) {
            let target = self.resolve(name).ok()?.ok()?;
            found = self.look(&target.dir, &target.name).ok()?;
        }
        match found {
            Found::File(version) => Some(version.bytes),
            Found::Other(..) | Found::Link(_) | Found::Nothing => None,
        }
    }

    /// The directory, as a path below the CNI directory, of the file that a link leads to, when that is another one.
    pub fn behind(&self, link: &OsStr) -> Option<PathBuf> {
        let text = rustix::fs::readlinkat(&self.dir, link, Vec::new()).ok()?;
        let text = PathBuf::from(OsStr::from_bytes(text.as_bytes()));
        let text = if text.is_absolute() { self.inside(&text)? } else { text };
        text.parent().filter(|parent| !parent.as_os_str().is_empty()).map(Path::to_path_buf)
    }

    /// True when `name` is a symbolic link now.
    pub fn is_link(&self, name: &OsStr) -> bool {
        rustix::fs::statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink)
    }

    /// False once the file system refused an exchange, so that compare-then-rename is used.
    pub fn exchanges(&self) -> bool {
        self.exchange
    }

    /// Brings one config file into the state that `plan` wants.
    pub fn replace(&mut self, name: &OsStr, plan: &mut Planner<'_>) -> Result<Outcome, SwapError> {
        let mut result = Err(SwapError::Contended { name: name.to_owned(), rounds: 0 });
        self.replace_all(&[name.to_owned()], plan, &mut |_, outcome| result = outcome);
        result
    }

    /// Brings several config files into the state that `plan` wants, and reports each as soon as it is there. Their
    /// new versions share disk flushes, so a burst costs little more than one file.
    pub fn replace_all(
        &mut self,
        names: &[OsString],
        plan: &mut Planner<'_>,
        report: &mut dyn FnMut(&OsStr, Result<Outcome, SwapError>),
    ) {
        // While the disk writes one part of a burst, the next one is prepared.
        let mut written = Vec::new();
        for names in names.chunks(BATCH) {
            let prepared: Vec<_> = names.iter().map(|name| (name, self.prepare(name, plan))).collect();
            for (_, prepared) in &prepared {
                if let Ok(Prepared::Ready(patch)) = prepared {
                    Self::start_sync(&patch.put);
                }
            }
            for (name, prepared) in std::mem::replace(&mut written, prepared) {
                report(name, self.complete(name, prepared, plan));
            }
        }
        for (name, prepared) in written {
            report(name, self.complete(name, prepared, plan));
        }
        self.make_durable();
    }

    /// The second half.
    fn complete(
        &mut self,
        name: &OsStr,
        prepared: Result<Prepared, SwapError>,
        plan: &mut Planner<'_>,
    ) -> Result<Outcome, SwapError> {
        match prepared? {
            Prepared::Done(outcome) => Ok(outcome),
            Prepared::Convert(found, list) => self.convert(name, *found, list, plan),
            Prepared::Ready(patch) => self.finish(*patch, plan),
        }
    }

    /// Reads, decides, and writes the new version under a hidden name.
    fn prepare(&self, name: &OsStr, plan: &mut Planner<'_>) -> Result<Prepared, SwapError> {
        let done = |outcome| Ok(Prepared::Done(outcome));
        let Some(kind) = FileKind::of(name) else { return done(Outcome::Gone) };
        let mut target = self.target(name);
        let mut found = self.look(&target.dir, &target.name)?;
        if matches!(found, Found::Link(_)) {
            target = match self.resolve(name)? {
                Ok(target) => target,
                Err(refusal) => return done(Outcome::Refused(refusal)),
            };
            found = self.look(&target.dir, &target.name)?;
        }
        let found = match found {
            Found::File(found) => found,
            Found::Other(_, refusal) => return done(Outcome::Refused(refusal)),
            Found::Link(_) => return done(Outcome::Changed),
            Found::Nothing => return done(Outcome::Gone),
        };
        match plan(kind, &found.bytes) {
            Plan::Leave(leave) => done(Outcome::Left(leave, found.bytes)),
            Plan::Refuse(refusal) => done(Outcome::Refused(refusal)),
            Plan::Convert(list) => Ok(Prepared::Convert(Box::new(found), list)),
            Plan::Write(bytes) => match self.create(&target, &bytes, &found, &found.bytes) {
                Ok(put) => {
                    Ok(Prepared::Ready(Box::new(Patch { target, kind, put, expect: found, pending: None })))
                }
                Err(SwapError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                    done(Outcome::Gone) // the directory itself was removed
                }
                Err(error) => Err(error),
            },
        }
    }

    /// Writes the new version back and puts it in place.
    fn finish(&mut self, mut patch: Patch, plan: &mut Planner<'_>) -> Result<Outcome, SwapError> {
        if let Err(error) = self.write_back(&patch.target, &mut patch.put) {
            self.unlink(&patch.target.dir, &patch.put.name);
            return Err(error);
        }
        self.exchange(patch, plan)
    }

    /// Wakes a runtime that has not noticed a change, by creating and removing a hidden file. Some ignore files that
    /// are linked or moved in (<https://github.com/containerd/containerd/pull/11711>).
    pub fn poke(&self) -> Result<(), SwapError> {
        let hidden = hidden_name();
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(&self.dir, &hidden, flags, Mode::from_raw_mode(0o600))
            .and_then(|_| rustix::fs::unlinkat(&self.dir, &hidden, AtFlags::empty()))
            .map_err(|error| SwapError::io(Step::Create, &hidden, error.into()))
    }

    fn step(&self, step: Step, name: &OsStr) -> Result<(), SwapError> {
        self.seam.before(step).map_err(|source| SwapError::io(step, name, source))
    }
}

fn boot_time() -> i64 {
    let seconds = |clock| rustix::time::clock_gettime(clock).tv_sec;
    seconds(rustix::time::ClockId::Realtime) - seconds(rustix::time::ClockId::Boottime)
}
