//! Proof that the hooks work: "attached" is not "effective".
//!
//! A child process enters a scratch cgroup that looks like a pod's and connects to a closed port on loopback.
//! The programs must count exactly that for exactly that cgroup. The connection never leaves the child, is no
//! bypass and no proof, and the scratch cgroup goes with the child.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nobypass_common::abi::PodPolicy;
use nobypass_common::ids::{Counter, PodKind};

use super::error::BpfError;
use super::maps::Maps;
use super::parents::Parent;
use crate::sys::process::start_in_cgroup;

/// The hidden sub-command that the child runs.
pub const CHILD: &str = "canary";

/// Name of the scratch pod: a UID that no pod has.
const SCRATCH_POD: &str = "podnobypass-canary";

/// How long the child may take; it needs about a millisecond.
const DEADLINE: Duration = Duration::from_secs(10);

/// Runs the canary below one parent. Blocks for some milliseconds.
///
/// # Errors
/// [`BpfError::NotEffective`] when the programs did not count the connection, or the canary could not run.
pub fn run(maps: &mut Maps, parent: &Parent) -> Result<(), BpfError> {
    let fail = |reason: String| BpfError::NotEffective { cgroup: parent.path.clone(), reason };
    let scratch = Scratch::make(&parent.path)
        .map_err(|error| fail(format!("cannot make a scratch cgroup: {error}")))?;
    let policy = PodPolicy { kind: PodKind::Meshed.code(), level: parent.level + 1, ..PodPolicy::default() };
    maps.set_policy(scratch.id, &policy)?;
    let outcome =
        connect_in(&scratch.path).map_err(|error| fail(format!("cannot start the canary: {error}")));
    let counted = maps
        .counters(scratch.id)
        .map_or(0, |counters| counters.count.get(Counter::Local.code() as usize).copied().unwrap_or(0));
    maps.forget(scratch.id)?;
    outcome?;
    match counted {
        1 => Ok(()),
        0 => Err(fail(
            "the connection was not counted; a process that uses the net_cls or net_prio cgroup, or another BPF \
             program that overrides ours, can cause that"
                .into(),
        )),
        n => Err(fail(format!("one connection was counted {n} times: the programs are attached more than once"))),
    }
}

/// Whether a cgroup below a parent is a canary's, given its path.
pub fn is_canary(path: &str) -> bool {
    path.ends_with(SCRATCH_POD)
}

/// The child's part: one connect(2) on loopback, whatever becomes of it.
pub fn child() {
    let _ = std::net::TcpStream::connect_timeout(&([127, 0, 0, 1], 9).into(), Duration::from_secs(1));
}

fn connect_in(cgroup: &Path) -> std::io::Result<()> {
    let mut command = Command::new("/proc/self/exe");
    command.arg(CHILD).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    start_in_cgroup(&mut command, cgroup)?;
    let mut child = command.spawn()?;
    let start = Instant::now();
    loop {
        if child.try_wait()?.is_some() {
            return Ok(());
        }
        if start.elapsed() > DEADLINE {
            child.kill()?;
            child.wait()?;
            return Err(ErrorKind::TimedOut.into());
        }
        #[expect(clippy::disallowed_methods, reason = "a short wait for a child, off the runtime")]
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A scratch pod cgroup, removed on drop.
struct Scratch {
    path: PathBuf,
    id: u64,
}

impl Scratch {
    /// Always a new cgroup, with an id that nothing was counted for: what an agent that was killed meanwhile left is
    /// removed, once its child has ended.
    fn make(parent: &Path) -> std::io::Result<Self> {
        let path = parent.join(SCRATCH_POD);
        let start = Instant::now();
        loop {
            match fs::create_dir(&path) {
                Ok(()) => break,
                Err(error) if error.kind() != ErrorKind::AlreadyExists || start.elapsed() > DEADLINE => {
                    return Err(error);
                }
                Err(_) => {
                    // Busy while the child is in it.
                    let _ = fs::remove_dir(&path);
                }
            }
            #[expect(clippy::disallowed_methods, reason = "a short wait for a child, off the runtime")]
            std::thread::sleep(Duration::from_millis(1));
        }
        let id = fs::metadata(&path)?.ino();
        Ok(Self { path, id })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A leftover is harmless and removed by the next run.
        let _ = fs::remove_dir(&self.path);
    }
}
