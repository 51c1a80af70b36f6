//! Threads in other network namespaces, and as whom they make sockets; directories by their cgroup id.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// `NSFS_MAGIC` (`linux/magic.h`).
const NSFS_MAGIC: u64 = 0x6e73_6673;
/// `FILEID_KERNFS`: the handle is the node's 64-bit id
/// (<https://github.com/torvalds/linux/blob/v6.12/include/linux/exportfs.h#L107>, since 5.5).
const FILEID_KERNFS: i32 = 0xfe;

/// Moves the calling thread, and no other, into a network namespace.
///
/// # Errors
/// As setns(2) says: `EINVAL` if it is none, `EPERM` without `CAP_SYS_ADMIN`.
pub fn enter(netns: impl AsFd) -> io::Result<()> {
    move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network)).map_err(Into::into)
}

/// Whether a file is a namespace's.
pub fn is_namespace(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file)
        .is_ok_and(|stat| u64::try_from(stat.f_type).is_ok_and(|kind| kind & 0xffff_ffff == NSFS_MAGIC))
}

/// Runs `f` with these file-system ids: they become the owner of sockets that the calling thread makes, for which the
/// rules of meshes look, and change nothing else. Other threads keep theirs.
///
/// # Errors
/// `EPERM` without `CAP_SETUID` or `CAP_SETGID`; `f` has not run then.
pub fn as_owner<T>(uid: u32, gid: u32, f: impl FnOnce() -> T) -> io::Result<T> {
    let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    // The group first: without the user's privileges it could not be changed.
    let changed = set_fs_gid(gid) && set_fs_uid(uid);
    let result = changed.then(f);
    // Back from another user takes CAP_SETUID, which the change of this id does not drop.
    let back = set_fs_uid(own.0) && set_fs_gid(own.1);
    match (result, back) {
        (Some(result), true) => Ok(result),
        _ => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

/// Both calls give the previous id and no error; an id that no user has changes nothing and so tells the present one
/// (setfsuid(2)).
fn set_fs_uid(uid: u32) -> bool {
    // SAFETY: no pointer is passed, and only the calling thread is changed.
    unsafe {
        libc::setfsuid(uid);
        u32::try_from(libc::setfsuid(u32::MAX)) == Ok(uid)
    }
}

fn set_fs_gid(gid: u32) -> bool {
    // SAFETY: as above.
    unsafe {
        libc::setfsgid(gid);
        u32::try_from(libc::setfsgid(u32::MAX)) == Ok(gid)
    }
}

/// Opens the cgroup with this id, wherever it is: an id is never used twice, a path may be.
///
/// `mount` is any directory of the cgroup v2 file system.
///
/// # Errors
/// `ESTALE` when there is no such cgroup any more; `EPERM` without `CAP_DAC_READ_SEARCH`.
pub fn open_cgroup(mount: BorrowedFd<'_>, id: u64) -> io::Result<OwnedFd> {
    /// `struct file_handle` with the bytes of a kernfs handle.
    #[repr(C, align(8))]
    struct Handle {
        bytes: u32,
        kind: i32,
        id: u64,
    }
    let mut handle = Handle { bytes: 8, kind: FILEID_KERNFS, id };
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: the handle is as long as it says, and the kernel only reads it.
    let fd =
        unsafe { libc::open_by_handle_at(mount.as_raw_fd(), std::ptr::from_mut(&mut handle).cast(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
