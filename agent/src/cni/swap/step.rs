//! Every system call of a patch by name, so that tests can fail or kill the process at each of them.

use std::fmt;
use std::io;

/// One system call of a patch. The order is the usual one; the tests go through [`Step::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// `fstatat` of the target, so that FIFOs and devices are never opened.
    Stat,
    /// `openat` of the target.
    Open,
    /// `read` of the target.
    Read,
    /// `openat` of the new file, exclusively.
    Create,
    /// `fsetxattr` of the new file.
    CopyXattr,
    /// `write` of the new file.
    Write,
    /// `fchown` of the new file.
    Chown,
    /// `fchmod` of the new file; from here on it counts as finished.
    Chmod,
    /// The new file's bytes are written to disk: before the exchange, `fsync` where nothing less keeps the order.
    WriteBack,
    /// `fsync` of the new file, after the exchange.
    SyncFile,
    /// `renameat2(RENAME_EXCHANGE)` of the new file and the target.
    Exchange,
    /// Look at what was swapped out.
    Inspect,
    /// `linkat` of the target to a hidden name, where exchange is not supported or a `.conf` is kept.
    Link,
    /// `renameat` onto the target or of a `.conf` to its hidden name.
    Rename,
    /// `renameat2(RENAME_NOREPLACE)` of a new list.
    Place,
    /// `fsync` of the directory.
    SyncDir,
    /// `fcntl(F_SETLEASE)` on the displaced file.
    Lease,
    /// `unlinkat` of a hidden file.
    Unlink,
}

impl Step {
    /// All of them.
    pub const ALL: [Self; 18] = [
        Self::Stat,
        Self::Open,
        Self::Read,
        Self::Create,
        Self::CopyXattr,
        Self::Write,
        Self::Chown,
        Self::Chmod,
        Self::WriteBack,
        Self::SyncFile,
        Self::Exchange,
        Self::Inspect,
        Self::Link,
        Self::Rename,
        Self::Place,
        Self::SyncDir,
        Self::Lease,
        Self::Unlink,
    ];
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stat => "looking at",
            Self::Open => "opening",
            Self::Read => "reading",
            Self::Create => "creating a new file for",
            Self::CopyXattr => "copying the extended attributes of",
            Self::Write => "writing a new file for",
            Self::Chown => "keeping the owner of",
            Self::Chmod => "keeping the mode of",
            Self::WriteBack => "writing back the new file for",
            Self::SyncFile => "syncing the new file for",
            Self::Exchange => "exchanging",
            Self::Inspect => "looking at the displaced",
            Self::Link => "linking",
            Self::Rename => "renaming",
            Self::Place => "putting in place",
            Self::SyncDir => "syncing the directory of",
            Self::Lease => "taking a lease on the displaced",
            Self::Unlink => "removing the displaced",
        })
    }
}

/// Called before each system call of a patch. Product code uses [`Plain`]; a test may return an error in place of the
/// call, change the directory behind the patch's back, or end the process.
pub trait Seam: Send + Sync {
    /// Runs before `step`; an error is taken as the result of the call, which is then not made.
    fn before(&self, step: Step) -> io::Result<()>;
}

/// Does nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain;

impl Seam for Plain {
    fn before(&self, _: Step) -> io::Result<()> {
        Ok(())
    }
}

impl<F: Fn(Step) -> io::Result<()> + Send + Sync> Seam for F {
    fn before(&self, step: Step) -> io::Result<()> {
        self(step)
    }
}
