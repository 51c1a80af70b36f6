//! The network namespace of a pod, found by its cgroup.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::sys::caps::Capabilities;
use crate::sys::netns::{is_namespace, open_cgroup};

/// Cgroups below a pod's that are looked through: containers, what crun and nested managers make in them.
const DEPTH: usize = 4;
/// Processes of one pod that are looked at.
const PROCESSES: usize = 256;
/// Where the host's files are for a container that shares the host's process ids.
const HOST: &str = "/proc/1/root";

/// Why a pod's network namespace cannot be entered. The labels are bounded and appear in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum NetnsError {
    /// See the message.
    #[error("the pod's cgroup is gone")]
    NoCgroup,
    /// See the message.
    #[error("no process runs in the pod yet, and the runtime names no network namespace")]
    NoProcess,
    /// See the message.
    #[error("the pod uses the node's network")]
    HostNetwork,
    /// See the message.
    #[error(
        "the agent may not look: it needs CAP_SYS_ADMIN, CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH, and the host's process ids"
    )]
    Denied,
    /// See the message.
    #[error("the kernel failed to open the pod's network namespace")]
    Failed,
}

impl NetnsError {
    /// All values.
    pub const ALL: [Self; 5] =
        [Self::NoCgroup, Self::NoProcess, Self::HostNetwork, Self::Denied, Self::Failed];

    /// The label.
    pub const fn label(self) -> &'static str {
        match self {
            Self::NoCgroup => "no_cgroup",
            Self::NoProcess => "no_process",
            Self::HostNetwork => "host_network",
            Self::Denied => "denied",
            Self::Failed => "failed",
        }
    }

    #[expect(clippy::needless_pass_by_value, reason = "for map_err")]
    fn of(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ESTALE | libc::ENOENT | libc::ENODEV) => Self::NoCgroup,
            Some(libc::EPERM | libc::EACCES) => Self::Denied,
            _ => Self::Failed,
        }
    }
}

/// Finds pods' network namespaces.
#[derive(Debug)]
pub struct Finder {
    /// The cgroup v2 file system.
    cgroups: File,
    /// Inode numbers of the namespaces that are the node's and no pod's.
    host: Vec<u64>,
}

impl Finder {
    /// `root` is a directory of the cgroup v2 file system.
    ///
    /// # Errors
    /// As open(2) says for it, or for this process's own network namespace.
    pub fn new(root: &Path) -> io::Result<Self> {
        let mut host = vec![fs::metadata("/proc/self/ns/net")?.ino()];
        // The agent may have a network of its own; the node's is that of its first process.
        host.extend(fs::metadata("/proc/1/ns/net").map(|meta| meta.ino()));
        Ok(Self { cgroups: File::open(root)?, host })
    }

    /// Opens the network namespace of the pod with this cgroup id. `path` is what the container runtime says, in its
    /// own mount namespace: it wins, since it needs no process.
    ///
    /// # Errors
    /// [`NetnsError`].
    pub fn open(&self, cgroup: u64, path: Option<&Path>) -> Result<OwnedFd, NetnsError> {
        if let Some(path) = path {
            // A path of an earlier sandbox leads nowhere.
            for path in [&in_host(path), path] {
                if let Ok(file) = File::open(path)
                    && is_namespace(&file)
                {
                    return self.not_the_hosts(file);
                }
            }
        }
        let dir = open_cgroup(self.cgroups.as_fd(), cgroup).map_err(NetnsError::of)?;
        self.by_process(&dir)
    }

    /// Cgroup ids of those containers of a pod in which a process has a capability in effect. A process in a user namespace
    /// of its own has it there alone, and does not count.
    ///
    /// # Errors
    /// [`NetnsError`].
    pub fn containers_with(&self, cgroup: u64, capability: u32) -> Result<Vec<u64>, NetnsError> {
        let dir = open_cgroup(self.cgroups.as_fd(), cgroup).map_err(NetnsError::of)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()));
        let mut processes = Vec::new();
        for entry in fs::read_dir(&path).map_err(NetnsError::of)?.flatten() {
            let Ok(meta) = entry.metadata() else { continue };
            let mut inside = Vec::new();
            if meta.is_dir() && list(&entry.path(), DEPTH - 1, &mut inside).is_ok() {
                processes.extend(inside.into_iter().map(|(pid, _)| (pid, meta.ino())));
            }
        }
        processes.sort_unstable();
        // The sandbox's process comes first, and its user namespace is the pod's.
        let users = |pid: u32| fs::metadata(format!("/proc/{pid}/ns/user")).map(|meta| meta.ino()).ok();
        let pods = processes.iter().find_map(|(pid, _)| users(*pid));
        let counts = |pid: u32| {
            Capabilities::of(pid).is_some_and(|set| set.has(capability))
                && users(pid).is_none_or(|of| Some(of) == pods)
        };
        let mut found: Vec<u64> = Vec::new();
        for (pid, container) in processes.into_iter().take(PROCESSES) {
            if !found.contains(&container) && counts(pid) {
                found.push(container);
            }
        }
        found.sort_unstable();
        Ok(found)
    }

    fn by_process(&self, dir: &OwnedFd) -> Result<OwnedFd, NetnsError> {
        let mut processes = Vec::new();
        list(&PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd())), DEPTH, &mut processes)
            .map_err(NetnsError::of)?;
        // The sandbox's process comes first; ids grow until they wrap around.
        processes.sort();
        let mut reason = NetnsError::NoProcess;
        for (pid, procs) in processes {
            let file = match opened_while_in(&procs, pid, |pid| File::open(format!("/proc/{pid}/ns/net"))) {
                Ok(Some(file)) => file,
                Ok(None) => continue,
                Err(error) => {
                    if error.kind() == io::ErrorKind::PermissionDenied {
                        reason = NetnsError::Denied;
                    }
                    continue;
                }
            };
            // A container's first process is in the node's network for a moment, before it joins its own.
            match self.not_the_hosts(file) {
                Err(host) => reason = host,
                found => return found,
            }
        }
        Err(reason)
    }

    fn not_the_hosts(&self, file: File) -> Result<OwnedFd, NetnsError> {
        let inode = file.metadata().map_err(NetnsError::of)?.ino();
        if self.host.contains(&inode) { Err(NetnsError::HostNetwork) } else { Ok(file.into()) }
    }
}

/// Opens something of a process that was in a cgroup; `None` if it is not there any more. Its id may have been given to
/// another process before. One that is in this cgroup afterwards is of this pod, whichever it is.
fn opened_while_in(
    procs: &Path,
    pid: u32,
    open: impl FnOnce(u32) -> io::Result<File>,
) -> io::Result<Option<File>> {
    let file = open(pid)?;
    Ok(pids(procs).is_ok_and(|pids| pids.contains(&pid)).then_some(file))
}

/// An absolute path as the host's first process sees it.
fn in_host(path: &Path) -> PathBuf {
    Path::new(HOST).join(path.strip_prefix("/").unwrap_or(path))
}

fn pids(procs: &Path) -> io::Result<Vec<u32>> {
    // 0 is a process of another PID namespace.
    Ok(fs::read_to_string(procs)?
        .lines()
        .filter_map(|line| line.parse().ok())
        .filter(|pid| *pid != 0)
        .collect())
}

/// Processes in a cgroup and below, each with the file that lists it.
fn list(dir: &Path, depth: usize, into: &mut Vec<(u32, PathBuf)>) -> io::Result<()> {
    let procs = dir.join("cgroup.procs");
    // A cgroup of threads lists none (EOPNOTSUPP).
    into.extend(pids(&procs).unwrap_or_default().into_iter().map(|pid| (pid, procs.clone())));
    if depth == 0 {
        return Ok(());
    }
    for entry in fs::read_dir(dir)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            // It may have gone meanwhile.
            let _ = list(&entry.path(), depth - 1, into);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The process ends, and its id goes to one of another pod, between the listing and the opening.
    #[test]
    fn a_reused_process_id_leads_into_no_other_pod() {
        let dir = tempfile::tempdir().unwrap();
        let procs = dir.path().join("cgroup.procs");
        let own = std::process::id();
        let becomes = |after: String| {
            fs::write(&procs, format!("7\n{own}\n")).unwrap();
            let opened = opened_while_in(&procs, own, |pid| {
                fs::write(&procs, after)?;
                File::open(format!("/proc/{pid}/ns/net"))
            });
            opened.unwrap().is_some()
        };
        assert!(becomes(format!("{own}\n")), "its other process ended");
        assert!(!becomes("7\n".into()), "it ended, and its id is another's");
        assert!(!becomes(format!("7\n{own}0\n")), "a longer id is another");
        assert!(!becomes(String::new()), "the pod has no process");
        fs::remove_file(&procs).unwrap();
        let gone = opened_while_in(&procs, own, |pid| File::open(format!("/proc/{pid}/ns/net")));
        assert!(gone.unwrap().is_none(), "the cgroup is gone");
        let finder = Finder { cgroups: File::open(dir.path()).unwrap(), host: Vec::new() };
        let found = finder.by_process(&File::open(dir.path()).unwrap().into());
        assert_eq!(found.err(), Some(NetnsError::NoProcess));
    }
}
