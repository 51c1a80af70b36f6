//! File calls that rustix does not offer: leases and early writeback.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

/// `F_SETSIG` of asm-generic/fcntl.h; the libc crate has no name for it.
const F_SETSIG: libc::c_int = 10;

/// Whether anybody can still write through a descriptor opened earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writers {
    /// Nobody has the file open for writing, and as long as `fd` lives an opener for writing waits.
    None,
    /// Somebody has it open for writing.
    Some,
    /// The file system or the missing `CAP_LEASE` gives no answer.
    Unknown,
}

/// Takes a read lease on `fd`, which must have been opened read-only; it is given back when `fd` is closed or by
/// [`give_lease_back`].
///
/// The kernel refuses a read lease with `EAGAIN` while the inode is open for writing anywhere, see
/// `check_conflicting_open` in <https://github.com/torvalds/linux/blob/v6.12/fs/locks.c#L1760>.
pub fn take_read_lease(fd: BorrowedFd<'_>) -> Writers {
    // A broken lease raises SIGIO, which kills by default; SIGURG is ignored by default and nobody here uses it.
    // SAFETY: the descriptor is open for the whole call and both commands take an integer.
    let taken = unsafe {
        libc::fcntl(fd.as_raw_fd(), F_SETSIG, libc::SIGURG) == 0
            && libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) == 0
    };
    if taken {
        return Writers::None;
    }
    match io::Error::last_os_error().raw_os_error() {
        Some(libc::EAGAIN) => Writers::Some,
        _ => Writers::Unknown,
    }
}

/// Gives a lease back at once, so that nobody waits for it.
pub fn give_lease_back(fd: BorrowedFd<'_>) {
    // SAFETY: the descriptor is open for the whole call and the command takes an integer. Without a lease the call
    // fails with EAGAIN, which is what is wanted anyway.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
}

/// Starts writing the file's dirty pages to disk without waiting. Calling this for several files before the first
/// `fsync` lets the file system put all of them into one journal commit; on its own it promises nothing.
pub fn start_writeback(fd: BorrowedFd<'_>) {
    // SAFETY: the descriptor is open for the whole call; no pointer is passed. Failure only costs speed.
    unsafe { libc::sync_file_range(fd.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Writes the file's dirty pages and waits until the device has them, which may still be in a volatile cache. The
/// file's metadata is not made durable: see [`orders_data_before_rename`] for where this is enough to rename the file.
pub fn write_back(fd: BorrowedFd<'_>) -> io::Result<()> {
    let flags =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: the descriptor is open for the whole call; no pointer is passed.
    match unsafe { libc::sync_file_range(fd.as_raw_fd(), 0, 0, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether a rename that follows [`write_back`] becomes durable only together with the file's size and blocks.
///
/// True for ext4 and XFS: both end the writeback of a page only after the transaction that holds the size and the
/// extent is open (`ext4_end_io_end` in
/// <https://github.com/torvalds/linux/blob/v6.12/fs/ext4/page-io.c#L132>, `iomap_finish_ioend` after `xfs_end_ioend` in
/// <https://github.com/torvalds/linux/blob/v6.12/fs/xfs/xfs_aops.c#L96>), commit transactions in order, and flush the
/// device's cache before a commit record. True for tmpfs, which no power cut survives. Others are not known to.
pub fn orders_data_before_rename(fd: BorrowedFd<'_>) -> bool {
    const EXT4: u64 = 0xef53;
    const XFS: u64 = 0x5846_5342;
    const TMPFS: u64 = 0x0102_1994;
    rustix::fs::fstatfs(fd)
        .is_ok_and(|stat| u64::try_from(stat.f_type).is_ok_and(|kind| matches!(kind, EXT4 | XFS | TMPFS)))
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn a_lease_tells_whether_a_writer_has_the_file_open() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let writer = File::create(&path).unwrap();
        let reader = File::open(&path).unwrap();
        assert_eq!(take_read_lease(reader.as_fd()), Writers::Some);
        drop(writer);
        assert_eq!(take_read_lease(reader.as_fd()), Writers::None);
        give_lease_back(reader.as_fd());
        OpenOptions::new().write(true).open(&path).unwrap();
    }

    #[test]
    fn a_broken_lease_does_not_kill_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        File::create(&path).unwrap();
        let reader = File::open(&path).unwrap();
        assert_eq!(take_read_lease(reader.as_fd()), Writers::None);
        // Breaks the lease: the opener is told to wait and this process gets the signal.
        let refused = rustix::fs::open(
            &path,
            rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::NONBLOCK,
            rustix::fs::Mode::empty(),
        );
        assert_eq!(refused.unwrap_err(), rustix::io::Errno::AGAIN);
    }
}
