//! Tells which names of the CNI directory changed. Events only say where to look: what is done is decided from
//! content, so a change of the agent's own needs no filter, and a lost event costs time and nothing else.
//!
//! notify's inotify back end reports every event that matters here. What it hides is made up for: `IN_UNMOUNT` and a
//! directory that is replaced by a mount are found by comparing the path with the open directory now and then.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use notify::event::{AccessKind, AccessMode, ModifyKind, RenameMode};
use notify::{Event, EventKind, INotifyWatcher, RecursiveMode, Watcher as _};
use rustix::fs::{Mode, OFlags};

use super::plan::original_name;
use super::swap::is_hidden;

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
        /// notify's answer.
        source: notify::Error,
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
    watcher: Option<INotifyWatcher>,
    /// Directories above `path` that are watched.
    above: Vec<PathBuf>,
    /// Directories with files that symbolic links lead to.
    beside: Vec<PathBuf>,
    report: Arc<dyn Fn(Change, Instant) + Send + Sync>,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { path, watcher, above, beside, report: _ } = self;
        f.debug_struct("Watch")
            .field("path", path)
            .field("watching", &watcher.is_some())
            .field("above", above)
            .field("beside", beside)
            .finish()
    }
}

impl Watch {
    /// Watches nothing yet. `report` is called on notify's thread.
    pub fn new(path: &Path, report: impl Fn(Change, Instant) + Send + Sync + 'static) -> Self {
        Self {
            path: path.to_owned(),
            watcher: None,
            above: Vec::new(),
            beside: Vec::new(),
            report: Arc::new(report),
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
            if unwatched.is_none() {
                unwatched = self.watch_dir().err();
            }
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
            .map_err(|source| WatchError::NoWatch { path: self.path.clone(), source })?;
        self.watcher = Some(watcher);
        (self.above, self.beside) = (Vec::new(), Vec::new());
        Ok(())
    }

    fn watch_dir(&mut self) -> Result<(), WatchError> {
        let Some(watcher) = &mut self.watcher else { return Ok(()) };
        // The path may still stand for a directory that was moved away.
        let _ = watcher.unwatch(&self.path);
        let watched = watcher.watch(&self.path, RecursiveMode::NonRecursive);
        match watched {
            Err(source) if !matches!(source.kind, notify::ErrorKind::PathNotFound) => {
                // Without this watch the others are of little use, and a new instance may fare better.
                self.watcher = None;
                Err(WatchError::NoWatch { path: self.path.clone(), source })
            }
            _ => Ok(()),
        }
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
            Err(source) => {
                self.watcher = None;
                return Err(WatchError::NoWatch { path: nearest.to_owned(), source });
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
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => Some(false),
        EventKind::Access(_) => return,
        EventKind::Modify(ModifyKind::Data(_)) => Some(true),
        _ => None,
    };
    for path in &event.paths {
        let inside = path.parent() == Some(directory);
        let Some(name) = path.file_name().filter(|_| path != directory) else {
            report(Change::Directory);
            continue;
        };
        if !inside {
            if directory.starts_with(path) {
                report(Change::Directory); // on the way to it
            } else if path.starts_with(directory) {
                report(beside(name, writing)); // a file that a link leads to
            }
        } else if writing.is_none() && is_hidden(name) && original_name(name).is_none() {
            // Making and moving our own files; what others write to them matters.
        } else if writing == Some(true) {
            report(Change::Writing(name.to_owned()));
        } else {
            report(Change::Name(name.to_owned()));
        }
    }
}

fn beside(name: &OsStr, writing: Option<bool>) -> Change {
    match writing {
        Some(true) => Change::Writing(name.to_owned()),
        _ => Change::Name(name.to_owned()),
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
    fn until(rx: &Receiver<Change>, last: &Change) -> Vec<Change> {
        let mut seen = Vec::new();
        while seen.last() != Some(last) {
            seen.push(rx.recv_timeout(HANG).unwrap_or_else(|_| panic!("{last:?} never came: {seen:?}")));
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
        let seen = until(&rx, &name("a.conflist"));
        assert!(seen.len() <= 3, "{seen:?}");
        let held = fs::OpenOptions::new().write(true).open(at("a.conflist")).unwrap();
        io::Write::write_all(&mut &held, b"y").unwrap();
        until(&rx, &Change::Writing("a.conflist".into()));
        fs::rename(at("a.conflist"), at("b.conflist")).unwrap();
        until(&rx, &name("b.conflist"));
        fs::hard_link(at("b.conflist"), at("c.conflist")).unwrap();
        until(&rx, &name("c.conflist"));
        std::os::unix::fs::symlink("b.conflist", at("d.conflist")).unwrap();
        until(&rx, &name("d.conflist"));
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        fs::set_permissions(at("c.conflist"), open).unwrap();
        until(&rx, &name("c.conflist"));
        fs::remove_file(at("c.conflist")).unwrap();
        until(&rx, &name("c.conflist"));
        // Reading reports nothing, nor do our own hidden files.
        fs::read(at("b.conflist")).unwrap();
        fs::rename(at("b.conflist"), at(".nobypass-x.tmp")).unwrap();
        fs::remove_file(at(".nobypass-x.tmp")).unwrap();
        fs::write(at("end"), "").unwrap();
        let seen = until(&rx, &name("end"));
        assert!(!seen.iter().any(|change| *change == name(".nobypass-x.tmp")), "{seen:?}");
    }

    #[test]
    fn what_others_write_to_displaced_files_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let (mut watch, rx) = watch(dir.path());
        watch.arm().unwrap();
        fs::write(dir.path().join(".nobypass-x.tmp"), "x").unwrap();
        until(&rx, &name(".nobypass-x.tmp"));
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
                until(&rx, &Change::Directory);
                // Reported for cni first.
                if let Ok(armed) = watch.arm() {
                    break armed;
                }
            };
            assert!(watch.is_same(&armed.dir));
            fs::write(path.join("a.conflist"), "").unwrap();
            until(&rx, &name("a.conflist"));
            fs::remove_dir_all(root.path().join("cni")).unwrap();
            until(&rx, &Change::Directory);
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
        until(&rx, &Change::Directory);
        assert!(!watch.is_same(&old));
        let new = watch.arm().unwrap().dir;
        assert!(watch.is_same(&new));
        while rx.try_recv().is_ok() {}
        fs::write(at("gone/a.conflist"), "").unwrap();
        fs::write(at("net.d/b.conflist"), "").unwrap();
        let seen = until(&rx, &name("b.conflist"));
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
        until(&rx, &name("net"));
    }
}
