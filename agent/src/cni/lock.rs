//! Two agents on one node, as during an upgrade: the one that started last writes, the other leaves it alone.
//!
//! A lock on the directory itself keeps their writes apart. A mark in the directory holds a generation number; each
//! agent that starts takes the next one, and keeps a lock on its mark as long as it lives. An agent that finds a
//! higher number stands back, until the lock on that mark is gone although the mark is there: then its holder died,
//! and it takes over again. Locks are `flock` locks, so they work across mount namespaces and end with the process.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::swap::hidden_name;

/// The mark's name.
pub const MARK: &str = ".nobypass-generation";

/// Held while the agent writes to the directory.
#[derive(Debug)]
pub struct DirLock(Arc<OwnedFd>);

impl DirLock {
    /// `None` while another agent writes, which takes milliseconds.
    pub fn try_take(dir: &Arc<OwnedFd>) -> io::Result<Option<Self>> {
        match rustix::fs::flock(dir, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self(Arc::clone(dir)))),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for DirLock {
    fn drop(&mut self) {
        // Fails only for a bad descriptor.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// This agent's generation in one directory.
#[derive(Debug)]
pub struct Claim {
    dir: Arc<OwnedFd>,
    /// Locked as long as this lives.
    mark: OwnedFd,
    generation: u64,
}

/// Where a [`Claim`] stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// This agent writes.
    Current,
    /// A living agent of this generation does.
    Superseded(u64),
    /// The mark was removed, or its holder died: claim again.
    Free,
}

impl Claim {
    /// Takes the next generation. Hold the [`DirLock`].
    pub fn take(dir: &Arc<OwnedFd>) -> io::Result<Self> {
        let generation = read_mark(dir)?.map_or(0, |(_, number)| number).saturating_add(1);
        let temp = hidden_name();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(dir, &temp, flags, Mode::from_raw_mode(0o644))?);
        let written = (|| {
            writeln!(&file, "{generation}")?;
            // A descriptor that can write would keep the file system from being remounted read-only.
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mark = rustix::fs::openat(dir, &temp, flags, Mode::empty())?;
            rustix::fs::flock(&mark, FlockOperation::NonBlockingLockExclusive)?;
            rustix::fs::renameat(dir, &temp, dir, MARK)?;
            Ok(mark)
        })();
        if written.is_err() {
            // What cannot be removed now is removed at the next start.
            let _ = rustix::fs::unlinkat(dir, &temp, AtFlags::empty());
        }
        written.map(|mark| Self { dir: Arc::clone(dir), mark, generation })
    }

    /// The number.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Looks at the mark again.
    pub fn standing(&self) -> io::Result<Standing> {
        let own = rustix::fs::fstat(&self.mark)?;
        match rustix::fs::statat(&self.dir, MARK, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(mark) if (mark.st_dev, mark.st_ino) == (own.st_dev, own.st_ino) => {
                return Ok(Standing::Current);
            }
            Ok(_) => {}
            Err(Errno::NOENT) => return Ok(Standing::Free),
            Err(error) => return Err(error.into()),
        }
        match read_mark(&self.dir)? {
            Some((file, number)) if number > self.generation && is_held(&file) => {
                Ok(Standing::Superseded(number))
            }
            _ => Ok(Standing::Free),
        }
    }

    /// Removes the mark, when nothing of the agent is to stay; another agent's mark stays.
    pub fn remove(self) -> io::Result<()> {
        if self.standing()? == Standing::Current {
            rustix::fs::unlinkat(&self.dir, MARK, AtFlags::empty())?;
        }
        Ok(())
    }
}

/// Whether a living agent looks after this directory, and its generation.
pub fn holder(dir: &OwnedFd) -> io::Result<Option<u64>> {
    Ok(read_mark(dir)?.filter(|(file, _)| is_held(file)).map(|(_, number)| number))
}

fn is_held(mark: impl AsFd) -> bool {
    // The lock that this may take for a moment ends with the descriptor, and a claim never waits.
    matches!(rustix::fs::flock(mark, FlockOperation::NonBlockingLockShared), Err(Errno::WOULDBLOCK))
}

/// The mark and its number; a damaged one counts as zero.
fn read_mark(dir: impl AsFd) -> io::Result<Option<(File, u64)>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::openat(dir, MARK, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut text = String::new();
    let number = match (&file).take(64).read_to_string(&mut text) {
        Ok(_) => text.trim().parse().unwrap_or(0),
        Err(_) => 0,
    };
    Ok(Some((file, number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir(path: &std::path::Path) -> Arc<OwnedFd> {
        Arc::new(File::open(path).unwrap().into())
    }

    #[test]
    fn the_last_starter_writes_and_the_other_takes_over_when_it_dies() {
        let temp = tempfile::tempdir().unwrap();
        let (old_dir, new_dir) = (dir(temp.path()), dir(temp.path()));
        let old = Claim::take(&old_dir).unwrap();
        assert_eq!((old.generation(), old.standing().unwrap()), (1, Standing::Current));
        let new = Claim::take(&new_dir).unwrap();
        assert_eq!(new.standing().unwrap(), Standing::Current);
        assert_eq!(old.standing().unwrap(), Standing::Superseded(2));
        assert_eq!(holder(&old_dir).unwrap(), Some(2));
        drop(new);
        assert_eq!(holder(&old_dir).unwrap(), None);
        assert_eq!(old.standing().unwrap(), Standing::Free);
        let again = Claim::take(&old_dir).unwrap();
        assert_eq!((again.generation(), again.standing().unwrap()), (3, Standing::Current));
        // An old agent that cleans up leaves the mark of the newer one.
        old.remove().unwrap();
        assert_eq!(again.standing().unwrap(), Standing::Current);
        again.remove().unwrap();
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_removed_or_damaged_mark_is_claimed_again() {
        let temp = tempfile::tempdir().unwrap();
        let fd = dir(temp.path());
        let claim = Claim::take(&fd).unwrap();
        std::fs::remove_file(temp.path().join(MARK)).unwrap();
        assert_eq!(claim.standing().unwrap(), Standing::Free);
        std::fs::write(temp.path().join(MARK), "nonsense").unwrap();
        assert_eq!(claim.standing().unwrap(), Standing::Free);
        assert_eq!(Claim::take(&fd).unwrap().generation(), 1);
    }

    #[test]
    fn one_agent_writes_at_a_time() {
        let temp = tempfile::tempdir().unwrap();
        let (a, b) = (dir(temp.path()), dir(temp.path()));
        let lock = DirLock::try_take(&a).unwrap().unwrap();
        assert!(DirLock::try_take(&b).unwrap().is_none());
        drop(lock);
        assert!(DirLock::try_take(&b).unwrap().is_some());
    }
}
