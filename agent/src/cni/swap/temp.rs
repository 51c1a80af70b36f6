//! New versions: a hidden file in the target's own directory, like the old one in everything but its bytes.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use bytes::Bytes;
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Stat, Uid, XattrFlags};
use rustix::io::Errno;

use super::file::{Target, Version};
use super::name::{self, Hidden};
use super::{Step, SwapError, Swapper};
use crate::sys::file::{orders_data_before_rename, start_writeback, write_back};

/// Mode of a file that is still being written. The sticky bit means nothing on a file, so no owner's config looks like
/// this; the last change before the exchange is the one to the real mode.
pub(super) const UNFINISHED: u32 = 0o1200;
/// Attributes larger than this are not copied; the kernel's own limit for names and values is 64 KiB.
const XATTR_MAX: usize = 64 << 10;

/// A file under a hidden name that is about to be put in place.
#[derive(Debug)]
pub(super) struct Put {
    pub name: OsString,
    pub version: Version,
    /// Made by this agent, as opposed to another writer's file that goes back.
    pub ours: bool,
    /// Open for writing until written back.
    pub unsynced: Option<OwnedFd>,
}

impl Swapper {
    /// Writes `bytes` to a hidden file beside `target`, with mode, owner and extended attributes of `like`.
    /// `expected` are the bytes that will be displaced. Nothing is left behind on an error.
    pub(super) fn create(
        &self,
        target: &Target,
        bytes: &Bytes,
        like: &Version,
        expected: &[u8],
    ) -> Result<Put, SwapError> {
        let said = Hidden::Version {
            target: name::hash(target.name.as_encoded_bytes()),
            expected: name::hash(expected),
            planned: name::hash(bytes),
        };
        let hidden = said.name();
        self.step(Step::Create, &target.name)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&target.dir, &hidden, flags, Mode::from_raw_mode(UNFINISHED))
            .map_err(|error| SwapError::io(Step::Create, &target.name, error.into()))?;
        self.fill(target, &hidden, file, bytes, like).inspect_err(|_| {
            // Without space or descriptors this may fail too; the next start removes it then.
            let _ = rustix::fs::unlinkat(&target.dir, &hidden, AtFlags::empty());
        })
    }

    fn fill(
        &self,
        target: &Target,
        hidden: &OsStr,
        file: OwnedFd,
        bytes: &Bytes,
        like: &Version,
    ) -> Result<Put, SwapError> {
        let at = |step| move |source: Errno| SwapError::io(step, &target.name, source.into());
        let mut stat = rustix::fs::fstat(&file).map_err(at(Step::Create))?;
        // Opened again for reading only: a descriptor that can write would look like an in-place writer later.
        let reader = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.step(Step::Write, &target.name)?;
        write_all(&file, bytes).map_err(|source| SwapError::io(Step::Write, &target.name, source))?;
        self.step(Step::CopyXattr, &target.name)?;
        if let Some(old) = &like.file {
            copy_xattrs(old, &file).map_err(at(Step::CopyXattr))?;
        }
        self.step(Step::Chown, &target.name)?;
        chown(&file, &stat, &like.stat).map_err(at(Step::Chown))?;
        self.step(Step::Chmod, &target.name)?;
        rustix::fs::fchmod(&file, Mode::from_raw_mode(like.stat.st_mode & 0o7777))
            .map_err(at(Step::Chmod))?;
        let reader =
            rustix::fs::openat(&target.dir, hidden, reader, Mode::empty()).map_err(at(Step::Create))?;
        stat.st_mode = like.stat.st_mode;
        stat.st_uid = like.stat.st_uid;
        stat.st_gid = like.stat.st_gid;
        let version = Version { file: Some(Arc::new(reader)), pin: None, stat, bytes: bytes.clone(), seq: 0 };
        Ok(Put { name: hidden.to_owned(), version, ours: true, unsynced: Some(file) })
    }

    /// Starts writing `put` to disk; see [`start_writeback`].
    pub(super) fn start_sync(put: &Put) {
        if let Some(file) = &put.unsynced {
            start_writeback(file.as_fd());
        }
    }

    /// Makes sure that `put` can take the target's name: whenever the name is durable, so are the bytes. Closes the
    /// writing descriptor.
    pub(super) fn write_back(&self, target: &Target, put: &mut Put) -> Result<(), SwapError> {
        let Some(file) = put.unsynced.take() else { return Ok(()) };
        self.step(Step::WriteBack, &target.name)?;
        let written = if orders_data_before_rename(file.as_fd()) {
            write_back(file.as_fd())
        } else {
            rustix::fs::fsync(&file).map_err(io::Error::from)
        };
        written.map_err(|source| SwapError::io(Step::WriteBack, &target.name, source))
    }

    /// Removes a hidden file; what cannot be removed now is removed at the next start.
    pub(super) fn unlink(&self, dir: impl AsFd, hidden: &OsStr) {
        let removed = self.step(Step::Unlink, hidden).and_then(|()| {
            rustix::fs::unlinkat(dir, hidden, AtFlags::empty())
                .map_err(|error| SwapError::io(Step::Unlink, hidden, error.into()))
        });
        if let Err(error) = removed {
            tracing::debug!(file = %hidden.display(), %error, "hidden file stays until the next start");
        }
    }
}

fn write_all(file: &OwnedFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(file, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn chown(file: &OwnedFd, have: &Stat, want: &Stat) -> rustix::io::Result<()> {
    if have.st_uid == want.st_uid && have.st_gid == want.st_gid {
        return Ok(());
    }
    rustix::fs::fchown(file, Some(Uid::from_raw(want.st_uid)), Some(Gid::from_raw(want.st_gid)))
}

/// Copies the SELinux label, POSIX ACL and user attributes. Signatures over the content (`security.ima`,
/// `security.evm`) would be wrong for the new bytes and are left out.
fn copy_xattrs(from: impl AsFd, to: impl AsFd) -> rustix::io::Result<()> {
    let mut names = [0_u8; 1024];
    let names = match rustix::fs::flistxattr(&from, &mut names) {
        Ok(filled) => names.get(..filled).unwrap_or_default().to_vec(),
        Err(Errno::RANGE) => {
            let mut names = vec![0; XATTR_MAX];
            let filled = rustix::fs::flistxattr(&from, names.as_mut_slice())?;
            names.truncate(filled);
            names
        }
        Err(Errno::NOTSUP) => return Ok(()),
        Err(error) => return Err(error),
    };
    for name in names.split(|byte| *byte == 0).filter(|name| is_kept(name)) {
        let mut value = vec![0; XATTR_MAX];
        let filled = match rustix::fs::fgetxattr(&from, name, value.as_mut_slice()) {
            Ok(filled) => filled,
            Err(Errno::NODATA) => continue,
            Err(error) => return Err(error),
        };
        value.truncate(filled);
        set_xattr(&to, name, &value)?;
    }
    Ok(())
}

fn is_kept(name: &[u8]) -> bool {
    name == b"security.selinux" || name == b"system.posix_acl_access" || name.starts_with(b"user.")
}

fn set_xattr(to: impl AsFd, name: &[u8], value: &[u8]) -> rustix::io::Result<()> {
    let error = match rustix::fs::fsetxattr(&to, name, value, XattrFlags::empty()) {
        Ok(()) => return Ok(()),
        Err(error) => error,
    };
    // A file made in this directory often has the right label already, and then need not be allowed to set it.
    let mut have = vec![0; XATTR_MAX];
    match rustix::fs::fgetxattr(&to, name, have.as_mut_slice()) {
        Ok(filled) if have.get(..filled) == Some(value) => Ok(()),
        _ => Err(error),
    }
}
