//! Reading config files without being caught by what else may have such a name.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::{Step, SwapError, Swapper};
use crate::cni::plan::MAX_BYTES;
use crate::cni::refusal::Refusal;

/// Symbolic links followed one after the other before giving up; the kernel's own limit is 40.
const MAX_LINKS: usize = 8;

/// The real file behind a config's name: for a symbolic link another name, maybe in another directory.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub dir: Arc<OwnedFd>,
    pub name: OsString,
    /// The name in the CNI directory.
    pub config: OsString,
}

/// One state of a file: which inode, and the bytes it held when it was read. The open file keeps the inode's number
/// from being used again.
#[derive(Clone, Debug)]
pub(super) struct Version {
    /// Read-only; `None` for what is not a regular file.
    pub file: Option<Arc<OwnedFd>>,
    /// Keeps the inode's number where there is no `file`.
    #[expect(dead_code, reason = "only held")]
    pub pin: Option<Arc<OwnedFd>>,
    pub stat: Stat,
    pub bytes: Bytes,
    /// Greater for a version that was displaced later; 0 for one that never was.
    pub seq: u64,
}

/// When bytes were written that a version was made from. Only late in-place writers of *different* files of one name
/// need it: the later one counts. Among equal times (a kernel's clock tick) the file that was displaced later does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Stamp {
    /// Change time of the inode, which unlike the modification time nobody can set.
    pub time: (i64, i64),
    pub seq: u64,
}

impl Version {
    pub fn stamp(&self) -> Stamp {
        Stamp { time: change_time(&self.stat), seq: self.seq }
    }

    /// Something under a hidden name that is not read.
    pub fn opaque(dir: impl AsFd, hidden: &OsStr, stat: Stat) -> Self {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let pin = rustix::fs::openat(dir, hidden, flags, Mode::empty()).ok().map(Arc::new);
        Self { file: None, pin, stat, bytes: Bytes::new(), seq: 0 }
    }

    pub fn same_inode(&self, stat: &Stat) -> bool {
        self.stat.st_ino == stat.st_ino && self.stat.st_dev == stat.st_dev
    }

    /// What the same inode holds now.
    pub fn read_again(&self) -> io::Result<Result<Bytes, Refusal>> {
        match &self.file {
            Some(file) => read_all(file.as_fd(), self.bytes.len()),
            None => Ok(Ok(Bytes::new())),
        }
    }
}

/// What was found under a name.
#[derive(Debug)]
pub(super) enum Found {
    /// A regular file of acceptable size.
    File(Version),
    /// Something else, or a file too large to read; left alone.
    Other(Stat, Refusal),
    /// A symbolic link.
    Link(Stat),
    /// Nothing.
    Nothing,
}

impl Swapper {
    /// The file of this name in the directory itself.
    pub(super) fn target(&self, name: &OsStr) -> Target {
        Target { dir: Arc::clone(&self.dir), name: name.to_owned(), config: name.to_owned() }
    }

    /// Reads what is under `name`, without following a link and without ever waiting for a writer.
    pub(super) fn look(&self, dir: impl AsFd, name: &OsStr) -> Result<Found, SwapError> {
        let at = |step| move |source: Errno| SwapError::io(step, name, source.into());
        self.step(Step::Stat, name)?;
        let stat = match rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(Found::Nothing),
            Err(error) => return Err(at(Step::Stat)(error)),
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Symlink => return Ok(Found::Link(stat)),
            // Opening a FIFO or a device has effects on others even without reading.
            FileType::RegularFile => {}
            _ => return Ok(Found::Other(stat, Refusal::NotRegular)),
        }
        self.step(Step::Open, name)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&dir, name, flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(Found::Nothing),
            Err(Errno::LOOP) => return Ok(Found::Link(stat)),
            Err(error) => return Err(at(Step::Open)(error)),
        };
        // Between the two calls the name may have been given to something else.
        let stat = rustix::fs::fstat(&file).map_err(at(Step::Stat))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(Found::Other(stat, Refusal::NotRegular));
        }
        self.step(Step::Read, name)?;
        let size = usize::try_from(stat.st_size).unwrap_or(MAX_BYTES);
        match read_all(file.as_fd(), size).map_err(|source| SwapError::io(Step::Read, name, source))? {
            Ok(bytes) => {
                let stat = rustix::fs::fstat(&file).map_err(at(Step::Stat))?;
                Ok(Found::File(Version { file: Some(Arc::new(file)), pin: None, stat, bytes, seq: 0 }))
            }
            Err(refusal) => Ok(Found::Other(stat, refusal)),
        }
    }

    /// Follows `name` as long as it is a symbolic link that stays inside the directory.
    pub(super) fn resolve(&self, name: &OsStr) -> Result<Result<Target, Refusal>, SwapError> {
        let mut path = PathBuf::from(name);
        for _ in 0..MAX_LINKS {
            let Some(target) = self.open_parent(name, &path)? else { return Ok(Err(Refusal::Symlink)) };
            let text = match rustix::fs::readlinkat(&target.dir, &target.name, Vec::new()) {
                Ok(text) => PathBuf::from(OsString::from_vec(text.into_bytes())),
                // Not a link (any more): this is the file.
                Err(Errno::INVAL) => return Ok(Ok(target)),
                Err(Errno::NOENT) => return Ok(Err(Refusal::Symlink)),
                Err(error) => return Err(SwapError::io(Step::Open, name, error.into())),
            };
            let text = if text.is_absolute() {
                match self.inside(&text) {
                    Some(text) => text,
                    None => return Ok(Err(Refusal::Symlink)),
                }
            } else {
                path.parent().unwrap_or_else(|| Path::new("")).join(text)
            };
            path = text;
        }
        Ok(Err(Refusal::Symlink))
    }

    /// An absolute link as a path below the directory: links made on the host name the host's path.
    pub(super) fn inside(&self, text: &Path) -> Option<PathBuf> {
        self.roots.iter().find_map(|root| text.strip_prefix(root).ok()).map(Path::to_path_buf)
    }

    /// Opens the directory that holds `path`; `None` when it is not inside.
    fn open_parent(&self, name: &OsStr, path: &Path) -> Result<Option<Target>, SwapError> {
        let Some(Component::Normal(file)) = path.components().next_back() else { return Ok(None) };
        let parent = path.parent().unwrap_or_else(|| Path::new(""));
        if parent.as_os_str().is_empty() {
            return Ok(Some(Target {
                dir: Arc::clone(&self.dir),
                name: file.to_owned(),
                config: name.to_owned(),
            }));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let inside = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        match rustix::fs::openat2(&self.dir, parent, flags, Mode::empty(), inside) {
            Ok(dir) => {
                Ok(Some(Target { dir: Arc::new(dir), name: file.to_owned(), config: name.to_owned() }))
            }
            Err(Errno::NOENT | Errno::XDEV | Errno::LOOP | Errno::NOTDIR) => Ok(None),
            Err(error) => Err(SwapError::io(Step::Open, name, error.into())),
        }
    }
}

pub(super) fn change_time(stat: &Stat) -> (i64, i64) {
    (stat.st_ctime, i64::try_from(stat.st_ctime_nsec).unwrap_or(0))
}

/// Reads the whole file from its start, at most [`MAX_BYTES`]. `size` is a guess.
pub(super) fn read_all(file: impl AsFd, size: usize) -> io::Result<Result<Bytes, Refusal>> {
    // One byte more than the file, so that the second read finds its end.
    let mut bytes = vec![0; size.min(MAX_BYTES) + 1];
    let mut filled = 0;
    loop {
        let Some(free) = bytes.get_mut(filled..).filter(|free| !free.is_empty()) else {
            if filled > MAX_BYTES {
                let stat = rustix::fs::fstat(&file)?;
                return Ok(Err(Refusal::TooLarge { bytes: u64::try_from(stat.st_size).unwrap_or(0) }));
            }
            bytes.resize((filled * 2).min(MAX_BYTES + 1), 0);
            continue;
        };
        match rustix::io::pread(&file, free, filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    bytes.truncate(filled);
    Ok(Ok(bytes.into()))
}

/// Names in a directory; those that cannot be read are left out.
pub(super) fn names(dir: impl AsFd) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(dir)? {
        let name = OsStr::from_bytes(entry?.file_name().to_bytes()).to_owned();
        if name != "." && name != ".." {
            names.push(name);
        }
    }
    Ok(names)
}
