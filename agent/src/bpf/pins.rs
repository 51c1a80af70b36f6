//! The pin directory: `<bpf-dir>/v<ABI>/`, one file a map or link.
//!
//! The ABI's number in the name keeps an agent from adopting maps of another layout (aya compares nothing). The
//! links of an older layout are removed only when the new ones are attached.

use std::fs;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nobypass_common::abi::ABI_VERSION;
use rustix::fs::{FlockOperation, flock};

use super::error::BpfError;
use super::hooks::Hook;
use crate::sys::bpf as raw;
use crate::sys::mount::is_bpffs;

/// Default of `--bpf-dir`.
pub const DEFAULT_DIR: &str = "/sys/fs/bpf/nobypass";

/// See [`PinDir::lock`].
const LOCK_PATIENCE: Duration = Duration::from_millis(500);

/// The pin directory of this ABI.
#[derive(Clone, Debug)]
pub struct PinDir {
    base: PathBuf,
    versioned: PathBuf,
}

impl PinDir {
    /// Names only; nothing is touched.
    pub fn new(base: &Path) -> Self {
        Self { base: base.into(), versioned: base.join(format!("v{ABI_VERSION}")) }
    }

    /// `--bpf-dir` itself.
    pub fn base(&self) -> &Path {
        &self.base
    }

    /// The pin of a map.
    pub fn map(&self, name: &str) -> PathBuf {
        self.versioned.join(name)
    }

    /// The pin of a hook's link; `parent` is the cgroup id of a cgroup hook's parent.
    pub fn link(&self, hook: Hook, parent: Option<u64>) -> PathBuf {
        let name = match parent {
            Some(id) => format!("link_{}_{id}", hook.label()),
            None => format!("link_{}", hook.label()),
        };
        self.versioned.join(name)
    }

    /// Whether an agent has pinned anything here.
    pub fn exists(&self) -> bool {
        self.versioned.is_dir()
    }

    /// Checks that the directory is on a bpffs, or would be.
    ///
    /// # Errors
    /// [`BpfError::NotBpffs`], [`BpfError::Pin`].
    pub fn check_on_bpffs(&self) -> Result<(), BpfError> {
        let existing = self.existing();
        match is_bpffs(existing) {
            Ok(true) => Ok(()),
            Ok(false) => Err(BpfError::NotBpffs { dir: self.base.clone() }),
            Err(source) => Err(BpfError::Pin { what: "examine", path: existing.into(), source }),
        }
    }

    /// The part of `--bpf-dir` that exists.
    fn existing(&self) -> &Path {
        self.base.ancestors().find(|path| path.exists()).unwrap_or_else(|| Path::new("/"))
    }

    /// Checks that the directory can hold pins, whether it exists or not.
    ///
    /// # Errors
    /// [`BpfError::NotBpffs`], [`BpfError::DotInName`], [`BpfError::Newer`], [`BpfError::Pin`].
    pub fn check(&self) -> Result<(), BpfError> {
        self.check_on_bpffs()?;
        let existing = self.existing();
        if self.base.strip_prefix(existing).is_ok_and(|new| new.to_string_lossy().contains('.')) {
            return Err(BpfError::DotInName { dir: self.base.clone() });
        }
        self.check_none_newer()
    }

    /// The directories of other layouts, with their numbers.
    pub fn others(&self) -> Vec<(u32, PathBuf)> {
        let versions = fs::read_dir(&self.base).into_iter().flatten().flatten().map(|entry| entry.path());
        versions
            .filter_map(|path| {
                let name = path.file_name()?.to_str().filter(|name| is_version(name))?;
                Some((name.get(1..)?.parse().ok()?, path))
            })
            .filter(|(version, _)| *version != ABI_VERSION)
            .collect()
    }

    /// Checks that no later version's programs are at work here.
    ///
    /// # Errors
    /// [`BpfError::Newer`].
    pub fn check_none_newer(&self) -> Result<(), BpfError> {
        match self.others().into_iter().max() {
            Some((version, dir)) if version > ABI_VERSION => Err(BpfError::Newer { dir, version }),
            _ => Ok(()),
        }
    }

    /// As [`PinDir::check`], and makes the directory.
    ///
    /// # Errors
    /// The same.
    pub fn prepare(&self) -> Result<(), BpfError> {
        self.check()?;
        fs::create_dir_all(&self.versioned).map_err(|source| BpfError::Pin {
            what: "make",
            path: self.versioned.clone(),
            source,
        })
    }

    /// Keeps other agents off these pins for as long as the result lives; the kernel drops the lock with us.
    ///
    /// Waits a moment for a lock that is taken: an agent that just ended may have a child that has not run its program
    /// yet and holds the lock until then.
    ///
    /// # Errors
    /// [`BpfError::Busy`], [`BpfError::Pin`].
    pub fn lock(&self) -> Result<File, BpfError> {
        let pin = |source| BpfError::Pin { what: "lock", path: self.base.clone(), source };
        let dir = File::open(&self.base).map_err(pin)?;
        let start = Instant::now();
        loop {
            match flock(&dir, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(dir),
                Err(rustix::io::Errno::WOULDBLOCK) if start.elapsed() < LOCK_PATIENCE => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(BpfError::Busy { dir: self.base.clone() }),
                Err(error) => return Err(pin(error.into())),
            }
            #[expect(clippy::disallowed_methods, reason = "before the agent has anything else to do")]
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Names of the pinned links of this ABI.
    ///
    /// # Errors
    /// As readdir(3) says.
    pub fn links(&self) -> io::Result<Vec<PathBuf>> {
        let mut links = Vec::new();
        for entry in fs::read_dir(&self.versioned)? {
            let entry = entry?;
            if is_link(&entry.path()) {
                links.push(entry.path());
            }
        }
        Ok(links)
    }

    /// Which hooks have a pinned link that is attached to something: what can be told without an agent.
    pub fn attached(&self) -> Vec<(Hook, bool)> {
        let links = self.links().unwrap_or_default();
        let attached = |hook: Hook| {
            let prefix = format!("link_{}", hook.label());
            let mut pins = links.iter().filter(|pin| {
                let name =
                    pin.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
                name == prefix || name.strip_prefix(&prefix).is_some_and(|rest| rest.starts_with('_'))
            });
            pins.any(|pin| {
                let link = raw::open_pin(pin).and_then(|link| raw::cgroup_link(link.as_fd()));
                // A tracepoint's link is of another kind; that it exists is all there is to know.
                link.is_ok_and(|link| link.is_none_or(|link| link.cgroup_id != 0))
            })
        };
        Hook::ALL.map(|hook| (hook, attached(hook))).to_vec()
    }

    /// Removes the pins of other ABI versions: their programs are detached with that.
    ///
    /// # Errors
    /// [`BpfError::Pin`].
    pub fn remove_others(&self) -> Result<usize, BpfError> {
        self.remove(|dir| dir != self.versioned)
    }

    /// Removes the pins of this ABI version, and `--bpf-dir` if nothing else is in it.
    ///
    /// # Errors
    /// [`BpfError::Pin`].
    pub fn remove_own(&self) -> Result<usize, BpfError> {
        let removed = self.remove(|dir| dir == self.versioned)?;
        // Not empty where another version has pins.
        let _ = fs::remove_dir(&self.base);
        Ok(removed)
    }

    /// Removes everything below `--bpf-dir`, links first, and the directory itself. Tells how many pins went.
    ///
    /// # Errors
    /// [`BpfError::Pin`].
    pub fn remove_all(&self) -> Result<usize, BpfError> {
        let removed = self.remove(|_| true)?;
        match fs::remove_dir(&self.base) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(BpfError::Pin { what: "remove", path: self.base.clone(), source })
            }
            _ => Ok(removed),
        }
    }

    fn remove(&self, which: impl Fn(&Path) -> bool) -> Result<usize, BpfError> {
        let fail = |path: &Path| {
            let path = path.to_path_buf();
            move |source| BpfError::Pin { what: "remove", path, source }
        };
        let versions = match fs::read_dir(&self.base) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            Err(source) => return Err(BpfError::Pin { what: "read", path: self.base.clone(), source }),
        };
        let mut removed = 0;
        for version in versions.flatten().map(|entry| entry.path()) {
            let ours = version.file_name().and_then(|name| name.to_str()).is_some_and(is_version);
            if !ours || !which(&version) {
                continue;
            }
            let mut pins: Vec<PathBuf> =
                fs::read_dir(&version).map_err(fail(&version))?.flatten().map(|entry| entry.path()).collect();
            // Links first: a program without its maps must never run.
            pins.sort_by_key(|pin| !is_link(pin));
            for pin in &pins {
                if is_link(pin)
                    && let Ok(link) = raw::open_pin(pin)
                {
                    // So that it holds when we say so. Those of tracepoints cannot, and go with their pins.
                    let _ = raw::detach_link(link.as_fd());
                }
                fs::remove_file(pin).map_err(fail(pin))?;
                removed += 1;
            }
            fs::remove_dir(&version).map_err(fail(&version))?;
        }
        Ok(removed)
    }
}

fn is_link(pin: &Path) -> bool {
    pin.file_name().is_some_and(|name| name.to_string_lossy().starts_with("link_"))
}

/// `v` and a number: a directory that some nobypass made.
fn is_version(name: &str) -> bool {
    name.strip_prefix('v')
        .is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let dir = PinDir::new(Path::new("/sys/fs/bpf/nobypass"));
        let own = Path::new("/sys/fs/bpf/nobypass").join(format!("v{ABI_VERSION}"));
        assert_eq!(dir.map("POLICY"), own.join("POLICY"));
        assert_eq!(dir.link(Hook::Egress, Some(42)), own.join("link_egress_42"));
        assert_eq!(dir.link(Hook::Mkdir, None), own.join("link_cgroup_mkdir"));
        assert!(is_version("v1") && is_version("v12"));
        assert!(!is_version("v") && !is_version("vx") && !is_version("other"));
    }

    #[test]
    fn a_directory_that_is_not_on_bpffs_is_refused_and_untouched() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = PinDir::new(&tmp.path().join("nobypass"));
        assert!(matches!(dir.prepare(), Err(BpfError::NotBpffs { .. })));
        assert!(!tmp.path().join("nobypass").exists());
    }

    #[test]
    fn removal_leaves_what_is_not_ours() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = PinDir::new(tmp.path());
        let own = tmp.path().join(format!("v{ABI_VERSION}"));
        for path in ["link_egress_1", "POLICY", "../v0/link_egress_1", "../other/POLICY"] {
            fs::create_dir_all(&own).unwrap();
            let path = own.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        assert_eq!(dir.remove_others().unwrap(), 1);
        assert!(own.join("POLICY").exists());
        assert!(!tmp.path().join("v0").exists());
        assert!(dir.remove_all().is_err(), "something foreign is still there");
        assert!(!own.exists());
        assert!(tmp.path().join("other/POLICY").exists());
    }
}
