//! The watch of the CNI directory itself: read by the guard's own thread, so that no other thread has to run between
//! another writer's `close` and the patch.
//!
//! Straight inotify, since notify always asks for `IN_OPEN` as well: each system call of a patch would wake a thread,
//! which on a small node is most of a patch's processor time. It also hides `IN_IGNORED` and `IN_UNMOUNT`.

use std::ffi::{OsStr, OsString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::inotify::{self, ReadFlags, WatchFlags};
use rustix::io::Errno;

use super::Change;
use crate::cni::plan::original_name;
use crate::cni::swap::is_hidden;

/// Room for some hundred events of usual names.
const BUFFER: usize = 16 << 10;

/// An inotify instance with one watch.
#[derive(Debug)]
pub(super) struct Hot(OwnedFd);

impl Hot {
    /// Watches `directory`.
    pub fn new(directory: &Path) -> io::Result<Self> {
        let fd = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
        let what = WatchFlags::CLOSE_WRITE
            | WatchFlags::MODIFY
            | WatchFlags::MOVED_TO
            | WatchFlags::MOVED_FROM
            | WatchFlags::CREATE // links are made without any other event
            | WatchFlags::DELETE
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        inotify::add_watch(&fd, directory, what)?;
        Ok(Self(fd))
    }

    /// Becomes readable with the first change.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Reports what happened since the last call.
    pub fn read(&self, report: &mut dyn FnMut(Change)) {
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut reader = inotify::Reader::new(&self.0, &mut buffer);
        loop {
            match reader.next() {
                Ok(event) => {
                    let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()));
                    if let Some(change) = translate(event.events(), name) {
                        report(change);
                    }
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::warn!(%error, "the watch of the CNI directory reported an error; looking at everything");
                    report(Change::Overflow);
                    return;
                }
            }
        }
    }
}

fn translate(events: ReadFlags, name: Option<&OsStr>) -> Option<Change> {
    if events.contains(ReadFlags::QUEUE_OVERFLOW) {
        return Some(Change::Overflow);
    }
    let Some(name) = name else {
        // Of the directory itself; its own attributes, such as the mode, may be why nothing could be read.
        return Some(Change::Directory);
    };
    let writes = ReadFlags::CLOSE_WRITE | ReadFlags::MODIFY;
    if is_hidden(name) && original_name(name).is_none() && !events.intersects(writes) {
        return None; // making and moving our own files; what others write to them matters
    }
    let name = OsString::from(name);
    Some(if events.contains(ReadFlags::MODIFY) { Change::Writing(name) } else { Change::Name(name) })
}
