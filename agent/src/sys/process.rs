//! Processes: starting one inside a cgroup.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

/// Makes `command` enter a cgroup before it runs, so that even its first socket belongs there.
///
/// # Errors
/// As open(2) says for the cgroup's `cgroup.procs`.
pub fn start_in_cgroup(command: &mut Command, cgroup: &Path) -> io::Result<()> {
    let procs = File::options().write(true).open(cgroup.join("cgroup.procs"))?;
    // SAFETY: between fork and exec only write(2) on an open descriptor; "0" is the calling process.
    unsafe { command.pre_exec(move || (&procs).write_all(b"0")) };
    Ok(())
}

/// Lets `command` inherit a descriptor, which so lives as long as either process, and makes it end with its parent.
///
/// The parent is the thread that starts it: start it from one that lasts.
pub fn bind_life(command: &mut Command, keep: OwnedFd) {
    let parent = rustix::process::getpid();
    // SAFETY: between fork and exec only fcntl(2), prctl(2) and getppid(2), which take no lock.
    unsafe {
        command.pre_exec(move || {
            rustix::io::fcntl_setfd(keep.as_fd(), rustix::io::FdFlags::empty())?;
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
            // One that is dead by now sends no signal any more.
            if rustix::process::getppid() == Some(parent) {
                Ok(())
            } else {
                Err(io::ErrorKind::NotFound.into())
            }
        })
    };
}
