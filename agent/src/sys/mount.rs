//! File systems: what a path is on, and a tracefs of the agent's own.

use std::io;
use std::path::Path;

use rustix::fs::statfs;
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Magic numbers (`linux/magic.h`).
const BPF_FS_MAGIC: u64 = 0xcafe_4a11;
const CGROUP2_SUPER_MAGIC: u64 = 0x6367_7270;
const TRACEFS_MAGIC: u64 = 0x7472_6163;

/// Where tracefs belongs.
pub const TRACEFS: &str = "/sys/kernel/tracing";
const DEBUG_TRACEFS: &str = "/sys/kernel/debug/tracing";

fn is_on(path: &Path, magic: u64) -> io::Result<bool> {
    let found = statfs(path)?.f_type;
    Ok(u64::try_from(found).is_ok_and(|found| found & 0xffff_ffff == magic))
}

/// Whether a path is on a bpffs.
///
/// # Errors
/// As statfs(2) says, `NotFound` without such a path.
pub fn is_bpffs(path: &Path) -> io::Result<bool> {
    is_on(path, BPF_FS_MAGIC)
}

/// Whether a path is on a cgroup2 file system.
///
/// # Errors
/// As statfs(2) says.
pub fn is_cgroup2(path: &Path) -> io::Result<bool> {
    is_on(path, CGROUP2_SUPER_MAGIC)
}

/// Whether tracefs is mounted where aya looks for it.
pub fn has_tracefs() -> bool {
    [TRACEFS, DEBUG_TRACEFS].iter().any(|path| is_on(Path::new(path), TRACEFS_MAGIC).unwrap_or(false))
}

/// Mounts tracefs for this process alone: a mount namespace of its own, into which later mounts of the host
/// still propagate and from which nothing goes out.
///
/// # Errors
/// As unshare(2) and mount(2) say, `PermissionDenied` without `CAP_SYS_ADMIN`; fails while there are other threads that
/// share the file system state with this one.
pub fn private_tracefs() -> io::Result<()> {
    // SAFETY: only the mount namespace (and with it the file system state) is unshared; no memory or
    // descriptor table is split from other threads.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    mount("tracefs", TRACEFS, "tracefs", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, None)?;
    Ok(())
}
