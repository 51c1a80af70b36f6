//! Tells which names of the CNI directory changed. Events only say where to look: what is done is decided from
//! content, so a change of the agent's own needs no filter, and a lost event costs time and nothing else.
//!
//! The directory itself has a watch of its own ([`hot`]); notify watches the directories above it, so that its coming
//! and going is noticed, and those with files that links lead to. A directory that is replaced by a mount is found by
//! comparing the path with the open directory now and then.

mod hot;

use std::ffi::OsString;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use notify::event::{AccessKind, AccessMode, ModifyKind, RenameMode};
use notify::{Event, EventKind, INotifyWatcher, RecursiveMode, Watcher as _};
use rustix::fs::{Mode, OFlags};

use hot::Hot;

/// Arming is tried again this often when the directory is replaced in the very moment.
const ARM_TRIES: usize = 8;

/// A change in or of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// This name may stand for other bytes now.
    Name(OsString),
    /// Somebody who has this name open writes to it, and may not be finished.
    Writing(OsString),
    /// Events were lost.
    Overflow,
    /// The directory or one above it was made, moved or removed.
    Directory,
}

/// Why the directory is not watched.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// It is not there.
    #[error("{} is not there yet", path.display())]
    Missing {
        /// The directory.
        path: PathBuf,
    },
    /// It cannot be opened.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// The directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// There is no inotify instance or watch left.
    #[error(
        "cannot watch {}: {source}; raise fs.inotify.max_user_instances and max_user_watches on the node", path.display()
    )]
    NoWatch {
        /// The directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

/// The directory, and whether changes of it are reported.
#[derive(Debug)]
pub struct Armed {
    /// Open for reading.
    pub dir: OwnedFd,
    /// Why it must be polled instead.
    pub unwatched: Option<WatchError>,
}

/// Watches one directory, and those above it as far as needed to notice that it comes, goes, or is replaced.
pub struct Watch {
    path: PathBuf,
    hot: Option<Hot>,
    /// Of the directories above and beside.
    watcher: Option<INotifyWatcher>,
    /// Directories above `path` that are watched.
    above: Vec<PathBuf>,
    /// Directories with files that symbolic links lead to.
    beside: Vec<PathBuf>,
    report: Arc<dyn Fn(Change, Instant) + Send + Sync>,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { path, hot, watcher, above, beside, report: _ } = self;
        f.debug_struct("Watch")
            .field("path", path)
            .field("watching", &hot.is_some())
            .field("watching_above", &watcher.is_some())
            .field("above", above)
            .field("beside", beside)
            .finish()
    }
}

impl Watch {
    /// Watches nothing yet. `report` is called on notify's thread, with changes above and beside the directory; those
    /// in it are [read](Self::read).
    pub fn new(path: &Path, report: impl Fn(Change, Instant) + Send + Sync + 'static) -> Self {
        Self {
            path: path.to_owned(),
            hot: None,
            watcher: None,
            above: Vec::new(),
            beside: Vec::new(),
            report: Arc::new(report),
        }
    }

    /// Becomes readable when there is something to [read](Self::read).
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.hot.as_ref().map(Hot::fd)
    }

    /// Reports what happened in the directory since the last call; never waits.
    pub fn read(&self, report: &mut dyn FnMut(Change)) {
        if let Some(hot) = &self.hot {
            hot.read(report);
        }
    }

    /// Opens the directory and watches it. What happens to it from the return of this call on is reported, so scan it
    /// then. An error means that it is not there; its coming is reported if it can be.
    pub fn arm(&mut self) -> Result<Armed, WatchError> {
        let mut unwatched = self.start().err();
        for _ in 0..ARM_TRIES {
            if let Err(error) = self.watch_above() {
                unwatched = unwatched.or(Some(error));
            }
            let dir = open(&self.path)?;
            self.hot = match Hot::new(&self.path) {
                Ok(hot) => Some(hot),
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(source) => {
                    unwatched = Some(WatchError::NoWatch { path: self.path.clone(), source });
                    None
                }
            };
            // Else it was replaced between the two calls.
            if self.is_same(&dir) {
                return Ok(Armed { dir, unwatched });
            }
        }
        Err(WatchError::Missing { path: self.path.clone() })
    }

    /// Is `dir` still what the path stands for?
    pub fn is_same(&self, dir: &OwnedFd) -> bool {
        match (rustix::fs::stat(&self.path), rustix::fs::fstat(dir)) {
            (Ok(path), Ok(dir)) => (path.st_dev, path.st_ino) == (dir.st_dev, dir.st_ino),
            _ => false,
        }
    }

    /// Also watches these directories, which hold files that symbolic links in the directory lead to. Every change
    /// there is reported from the return of this call on; true when there is a new one to look at then.
    pub fn watch_beside(&mut self, directories: Vec<PathBuf>) -> bool {
        let Some(watcher) = &mut self.watcher else { return false };
        for old in self.beside.iter().filter(|old| !directories.contains(old)) {
            // Gone already if the directory is.
            let _ = watcher.unwatch(old);
        }
        for new in &directories {
            if !self.beside.contains(new)
                && let Err(error) = watcher.watch(new, RecursiveMode::NonRecursive)
            {
                tracing::debug!(directory = %new.display(), %error, "cannot watch; looked at now and then");
            }
        }
        let new = directories.iter().any(|directory| !self.beside.contains(directory));
        self.beside = directories;
        new
    }

    fn start(&mut self) -> Result<(), WatchError> {
        if self.watcher.is_some() {
            return Ok(());
        }
        let (path, report) = (self.path.clone(), Arc::clone(&self.report));
        let handler = move |event: notify::Result<Event>| {
            let at = Instant::now();
            translate(&path, event, &mut |change| report(change, at));
        };
        let watcher = INotifyWatcher::new(handler, notify::Config::default())
            .map_err(|error| WatchError::NoWatch { path: self.path.clone(), source: system(error) })?;
        self.watcher = Some(watcher);
        (self.above, self.beside) = (Vec::new(), Vec::new());
        Ok(())
    }

    /// Watches the nearest directory that is there, and the one above the CNI directory.
    fn watch_above(&mut self) -> Result<(), WatchError> {
        let Some(watcher) = &mut self.watcher else { return Ok(()) };
        let Some(nearest) = self.path.ancestors().skip(1).find(|path| path.is_dir()) else { return Ok(()) };
        for old in std::mem::take(&mut self.above) {
            let _ = watcher.unwatch(&old);
        }
        match watcher.watch(nearest, RecursiveMode::NonRecursive) {
            Ok(()) => self.above.push(nearest.to_owned()),
            Err(source) if matches!(source.kind, notify::ErrorKind::PathNotFound) => {}
            Err(error) => {
                // A new instance may fare better.
                self.watcher = None;
                return Err(WatchError::NoWatch { path: nearest.to_owned(), source: system(error) });
            }
        }
        Ok(())
    }
}

fn open(path: &Path) -> Result<OwnedFd, WatchError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(|error| match error {
        rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR => WatchError::Missing { path: path.to_owned() },
        error => WatchError::Open { path: path.to_owned(), source: error.into() },
    })
}

/// What one of notify's events means for the directory.
fn translate(directory: &Path, event: notify::Result<Event>, report: &mut dyn FnMut(Change)) {
    let event = match event {
        Ok(event) if event.need_rescan() => return report(Change::Overflow),
        Ok(event) => event,
        Err(error) => {
            tracing::warn!(%error, "the watch of the CNI directory reported an error; looking at everything");
            return report(Change::Overflow);
        }
    };
    let writing = match event.kind {
        // Comes in addition to both of its halves; opening and reading change nothing.
        EventKind::Modify(ModifyKind::Name(RenameMode::Both)) => return,
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => false,
        EventKind::Access(_) => return,
        kind => matches!(kind, EventKind::Modify(ModifyKind::Data(_))),
    };
    for path in &event.paths {
        if directory.starts_with(path) {
            report(Change::Directory); // it, or one on the way to it
        } else if path.starts_with(directory)
            && let Some(name) = path.file_name()
        {
            // A file that a link leads to.
            let name = name.to_owned();
            report(if writing { Change::Writing(name) } else { Change::Name(name) });
        }
    }
}

/// The system's error in notify's.
fn system(error: notify::Error) -> io::Error {
    match error.kind {
        notify::ErrorKind::Io(error) => error,
        notify::ErrorKind::MaxFilesWatch => io::Error::from_raw_os_error(libc::ENOSPC),
        _ => io::Error::other(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use super::*;

    const HANG: Duration = Duration::from_secs(20);

    fn watch(path: &Path) -> (Watch, Receiver<Change>) {
        let (tx, rx) = channel();
        (Watch::new(path, move |change, _| tx.send(change).unwrap()), rx)
    }

    /// Everything up to `last`, which must come.
    fn until(watch: &Watch, rx: &Receiver<Change>, last: &Change) -> Vec<Change> {
        let (mut seen, start) = (Vec::new(), Instant::now());
        while seen.last() != Some(last) {
            let mut hot = Vec::new();
            watch.read(&mut |change| hot.push(change));
            let end = hot.iter().position(|change| change == last).map_or(hot.len(), |at| at + 1);
            seen.extend(hot.into_iter().take(end));
            if seen.last() != Some(last) {
                seen.extend(rx.recv_timeout(Duration::from_millis(1)));
            }
            assert!(start.elapsed() < HANG, "{last:?} never came: {seen:?}");
        }
        seen
    }

    fn name(name: &str) -> Change {
        Change::Name(name.into())
    }

    #[test]
    fn every_way_to_change_a_name_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let (mut watch, rx) = watch(dir.path());
        assert!(watch.arm().unwrap().unwatched.is_none());
        fs::write(at("a.conflist"), "x").unwrap();
        let seen = until(&watch, &rx, &name("a.conflist"));
        assert!(seen.len() <= 3, "{seen:?}");
        let held = fs::OpenOptions::new().write(true).open(at("a.conflist")).unwrap();
        io::Write::write_all(&mut &held, b"y").unwrap();
        until(&watch, &rx, &Change::Writing("a.conflist".into()));
        fs::rename(at("a.conflist"), at("b.conflist")).unwrap();
        until(&watch, &rx, &name("b.conflist"));
        fs::hard_link(at("b.conflist"), at("c.conflist")).unwrap();
        until(&watch, &rx, &name("c.conflist"));
        std::os::unix::fs::symlink("b.conflist", at("d.conflist")).unwrap();
        until(&watch, &rx, &name("d.conflist"));
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        fs::set_permissions(at("c.conflist"), open).unwrap();
        until(&watch, &rx, &name("c.conflist"));
        fs::remove_file(at("c.conflist")).unwrap();
        until(&watch, &rx, &name("c.conflist"));
        // Reading reports nothing, nor do our own hidden files.
        fs::read(at("b.conflist")).unwrap();
        fs::rename(at("b.conflist"), at(".nobypass-x.tmp")).unwrap();
        fs::remove_file(at(".nobypass-x.tmp")).unwrap();
        fs::write(at("end"), "").unwrap();
        let seen = until(&watch, &rx, &name("end"));
        assert!(!seen.iter().any(|change| *change == name(".nobypass-x.tmp")), "{seen:?}");
    }

    #[test]
    fn what_others_write_to_displaced_files_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let (mut watch, rx) = watch(dir.path());
        watch.arm().unwrap();
        fs::write(dir.path().join(".nobypass-x.tmp"), "x").unwrap();
        until(&watch, &rx, &name(".nobypass-x.tmp"));
    }

    #[test]
    fn a_directory_that_comes_goes_and_comes_again_is_armed_each_time() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("cni/net.d");
        let (mut watch, rx) = watch(&path);
        for round in 0..3 {
            assert!(matches!(watch.arm(), Err(WatchError::Missing { .. })), "{round}");
            fs::create_dir_all(&path).unwrap();
            let armed = loop {
                until(&watch, &rx, &Change::Directory);
                // Reported for cni first.
                if let Ok(armed) = watch.arm() {
                    break armed;
                }
            };
            assert!(watch.is_same(&armed.dir));
            fs::write(path.join("a.conflist"), "").unwrap();
            until(&watch, &rx, &name("a.conflist"));
            fs::remove_dir_all(root.path().join("cni")).unwrap();
            until(&watch, &rx, &Change::Directory);
            assert!(!watch.is_same(&armed.dir));
            while rx.try_recv().is_ok() {}
        }
    }

    #[test]
    fn a_directory_that_is_swapped_is_noticed() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        fs::create_dir(at("net.d")).unwrap();
        fs::create_dir(at("other")).unwrap();
        let (mut watch, rx) = watch(&at("net.d"));
        let old = watch.arm().unwrap().dir;
        fs::rename(at("net.d"), at("gone")).unwrap();
        fs::rename(at("other"), at("net.d")).unwrap();
        until(&watch, &rx, &Change::Directory);
        assert!(!watch.is_same(&old));
        let new = watch.arm().unwrap().dir;
        assert!(watch.is_same(&new));
        while rx.try_recv().is_ok() {}
        fs::write(at("gone/a.conflist"), "").unwrap();
        fs::write(at("net.d/b.conflist"), "").unwrap();
        let seen = until(&watch, &rx, &name("b.conflist"));
        assert!(!seen.contains(&name("a.conflist")), "the old directory is still watched: {seen:?}");
    }

    #[test]
    fn files_behind_links_are_watched_too() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("data")).unwrap();
        let (mut watch, rx) = watch(dir.path());
        watch.arm().unwrap();
        watch.watch_beside(vec![dir.path().join("data")]);
        fs::write(dir.path().join("data/net"), "x").unwrap();
        until(&watch, &rx, &name("net"));
    }
}
