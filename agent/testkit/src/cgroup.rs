//! Scratch cgroup trees that look like a kubelet's.

use std::fs::{self, File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::proc::Place;
use crate::wait;

/// How the kubelet names its cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// `kubepods/burstable/pod<uid>/<id>`
    Cgroupfs,
    /// `kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid_>.slice/cri-containerd-<id>.scope`
    Systemd,
}

/// Quality-of-service class, which decides the depth: guaranteed pods sit one level higher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Qos {
    /// Directly below kubepods.
    Guaranteed,
    /// Below `burstable`.
    Burstable,
    /// Below `besteffort`.
    BestEffort,
}

impl Qos {
    fn dir(self) -> Option<&'static str> {
        match self {
            Self::Guaranteed => None,
            Self::Burstable => Some("burstable"),
            Self::BestEffort => Some("besteffort"),
        }
    }
}

/// Path of a pod relative to the directory that holds `kubepods`.
#[must_use]
pub fn pod_path(driver: Driver, qos: Qos, uid: &str) -> PathBuf {
    let uid_ = uid.replace('-', "_");
    match (driver, qos.dir()) {
        (Driver::Cgroupfs, None) => format!("kubepods/pod{uid}").into(),
        (Driver::Cgroupfs, Some(qos)) => format!("kubepods/{qos}/pod{uid}").into(),
        (Driver::Systemd, None) => format!("kubepods.slice/kubepods-pod{uid_}.slice").into(),
        (Driver::Systemd, Some(qos)) => {
            format!("kubepods.slice/kubepods-{qos}.slice/kubepods-{qos}-pod{uid_}.slice").into()
        }
    }
}

/// Mount point of the cgroup2 hierarchy, also where it lies beside version 1 ("hybrid").
pub fn v2_root() -> Result<PathBuf> {
    mounts()?
        .into_iter()
        .find_map(|(point, kind)| (kind == "cgroup2").then_some(point))
        .context("no cgroup2 file system is mounted")
}

/// Mount points of every cgroup hierarchy, both versions.
pub fn all_roots() -> Result<Vec<PathBuf>> {
    Ok(mounts()?.into_iter().map(|(point, _)| point).collect())
}

fn mounts() -> Result<Vec<(PathBuf, String)>> {
    let text = fs::read_to_string("/proc/self/mountinfo").context("cannot read mountinfo")?;
    Ok(text.lines().filter_map(mount_line).collect())
}

/// Mount point and type of a cgroup mount whose root is the hierarchy's root, see proc_pid_mountinfo(5).
fn mount_line(line: &str) -> Option<(PathBuf, String)> {
    let (mount, fs) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let (root, point) = (mount.next()?, mount.next()?);
    let kind = fs.split(' ').next()?;
    (root == "/" && kind.starts_with("cgroup")).then(|| (point.into(), kind.to_owned()))
}

/// A tree `<cgroup2>/nobypass-test-<pid>-<n>` with an empty `kubepods` (or `kubepods.slice`) in it.
///
/// Dropping it kills what still runs inside, which can only be what the test put there, and removes everything.
#[derive(Debug)]
pub struct Scratch {
    top: PathBuf,
    driver: Driver,
}

impl Scratch {
    /// With cgroupfs names.
    pub fn new() -> Result<Self> {
        Self::with(Driver::Cgroupfs)
    }

    /// With the names of `driver`.
    pub fn with(driver: Driver) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let top = v2_root()?.join(format!("nobypass-test-{}-{n}", std::process::id()));
        let scratch = Self { top, driver };
        make(&scratch.kubepods())?;
        Ok(scratch)
    }

    /// The directory that holds `kubepods`.
    #[must_use]
    pub fn top(&self) -> &Path {
        &self.top
    }

    /// The parent of all pods: where programs are attached.
    #[must_use]
    pub fn kubepods(&self) -> PathBuf {
        self.top.join(match self.driver {
            Driver::Cgroupfs => "kubepods",
            Driver::Systemd => "kubepods.slice",
        })
    }

    /// Makes a pod's cgroup. `uid` is a pod UID, or 32 hex digits for a static pod.
    pub fn pod(&self, qos: Qos, uid: &str) -> Result<Pod> {
        let path = self.top.join(pod_path(self.driver, qos, uid));
        Ok(Pod { cgroup: Cgroup::make(path)?, driver: self.driver })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.top) {
            report(&error);
        }
    }
}

#[expect(clippy::print_stderr, reason = "a guard cannot return an error, and the test's author must see it")]
pub(crate) fn report(error: &anyhow::Error) {
    eprintln!("test clean-up: {error:#}");
}

/// One cgroup. Removed with its [`Scratch`], or earlier by [`Cgroup::remove`].
#[derive(Clone, Debug)]
pub struct Cgroup {
    path: PathBuf,
}

/// This process is in a scratch cgroup. Dropping it moves it back where it was.
#[derive(Debug)]
pub struct Entered {
    home: PathBuf,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Err(error) = fs::write(self.home.join("cgroup.procs"), "0") {
            report(&anyhow::Error::new(error).context(format!("cannot go back to {}", self.home.display())));
        }
    }
}

/// A pod's cgroup.
#[derive(Clone, Debug)]
pub struct Pod {
    cgroup: Cgroup,
    driver: Driver,
}

impl Pod {
    /// Makes a container's cgroup; `id` is 64 hex digits in life, any name here.
    pub fn container(&self, id: &str) -> Result<Cgroup> {
        match self.driver {
            Driver::Cgroupfs => self.cgroup.child(id),
            Driver::Systemd => self.cgroup.child(&format!("cri-containerd-{id}.scope")),
        }
    }
}

impl std::ops::Deref for Pod {
    type Target = Cgroup;
    fn deref(&self) -> &Cgroup {
        &self.cgroup
    }
}

impl Cgroup {
    fn make(path: PathBuf) -> Result<Self> {
        make(&path)?;
        Ok(Self { path })
    }

    /// A cgroup below this one, as nested runtimes and crun make them.
    pub fn child(&self, name: &str) -> Result<Self> {
        Self::make(self.path.join(name))
    }

    /// Absolute path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The id BPF helpers give: the inode number of the directory.
    pub fn id(&self) -> Result<u64> {
        Ok(fs::metadata(&self.path).with_context(|| format!("no cgroup {}", self.path.display()))?.ino())
    }

    /// Moves a process in.
    pub fn add(&self, pid: u32) -> Result<()> {
        fs::write(self.path.join("cgroup.procs"), pid.to_string())
            .with_context(|| format!("cannot move process {pid} to {}", self.path.display()))
    }

    /// Moves this process in, all its threads, until the guard is dropped.
    pub fn enter(&self) -> Result<Entered> {
        let text = fs::read_to_string("/proc/self/cgroup").context("cannot read /proc/self/cgroup")?;
        let home = text.lines().find_map(|line| line.strip_prefix("0::/")).context("no cgroup2 hierarchy")?;
        let home = v2_root()?.join(home);
        self.add(std::process::id())?;
        Ok(Entered { home })
    }

    /// `cgroup.procs` open for writing, for a child that moves itself.
    pub fn procs_fd(&self) -> Result<OwnedFd> {
        let path = self.path.join("cgroup.procs");
        let file: File = OpenOptions::new()
            .write(true)
            .open(&path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        Ok(file.into())
    }

    /// Makes `command` start inside.
    pub fn start<'a>(&self, command: &'a mut Command) -> Result<&'a mut Command> {
        Ok(command.in_cgroup_fd(self.procs_fd()?))
    }

    /// Processes inside, not counting cgroups below.
    pub fn pids(&self) -> Result<Vec<u32>> {
        pids(&self.path)
    }

    /// Kills what runs inside and removes the directory and all below.
    pub fn remove(self) -> Result<()> {
        remove_tree(&self.path)
    }
}

fn make(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("cannot make cgroup {}", path.display()))
}

fn pids(dir: &Path) -> Result<Vec<u32>> {
    let text = fs::read_to_string(dir.join("cgroup.procs"))?;
    Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
}

/// Kills every process in `top` and below, by id, and removes the directories; a missing `top` is fine.
///
/// Only for directories that the caller made: their members are there because the caller put them there.
pub fn remove_tree(top: &Path) -> Result<()> {
    let removed = wait::until("", wait::HANG, || match try_remove(top) {
        Ok(()) => Some(()),
        Err(_) if !top.exists() => Some(()),
        Err(_) => None,
    });
    if removed.is_err() {
        bail!("cgroup {} cannot be emptied; processes left: {:?}", top.display(), pids(top));
    }
    Ok(())
}

fn try_remove(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            try_remove(&entry.path())?;
        }
    }
    for pid in pids(dir)? {
        evict(pid)?;
    }
    fs::remove_dir(dir)?;
    Ok(())
}

/// Kills a member of a doomed cgroup; a test that moved itself in is moved out again.
fn evict(pid: u32) -> Result<()> {
    if pid == std::process::id() {
        return Ok(fs::write(v2_root()?.join("cgroup.procs"), "0")?);
    }
    // 0 is a process of another PID namespace: not ours.
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // It may have ended meanwhile.
        let _ = kill_process(pid, Signal::KILL);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_pods_as_the_kubelet_does() {
        let uid = "0a1b2c3d-0000-4000-8000-000000000001";
        for (driver, qos, want) in [
            (Driver::Cgroupfs, Qos::Guaranteed, "kubepods/pod0a1b2c3d-0000-4000-8000-000000000001"),
            (Driver::Cgroupfs, Qos::Burstable, "kubepods/burstable/pod0a1b2c3d-0000-4000-8000-000000000001"),
            (
                Driver::Systemd,
                Qos::Guaranteed,
                "kubepods.slice/kubepods-pod0a1b2c3d_0000_4000_8000_000000000001.slice",
            ),
            (
                Driver::Systemd,
                Qos::BestEffort,
                "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod0a1b2c3d_0000_4000_8000_000000000001.slice",
            ),
        ] {
            assert_eq!(pod_path(driver, qos, uid), PathBuf::from(want));
        }
    }

    #[test]
    fn finds_cgroup_mounts_and_nothing_else() {
        for (line, want) in [
            (
                "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw",
                Some(("/sys/fs/cgroup/unified", "cgroup2")),
            ),
            ("41 31 0:38 / /a rw shared:9 master:2 - cgroup2 none rw", Some(("/a", "cgroup2"))),
            (
                "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu",
                Some(("/sys/fs/cgroup/cpu", "cgroup")),
            ),
            ("41 31 0:38 /kubepods /sub rw,relatime - cgroup2 cgroup2 rw", None),
            ("31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755", None),
            ("", None),
        ] {
            assert_eq!(mount_line(line), want.map(|(point, kind)| (point.into(), kind.to_owned())), "{line}");
        }
    }
}
