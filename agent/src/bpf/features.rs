//! What this kernel can do, found by trying: versions lie, since distributions backport.

use std::fs;
use std::fs::File;
use std::path::{Path, PathBuf};

use aya::EbpfLoader;

use super::OBJECT;
use super::attach::{attach_program, load_program};
use super::error::{Chain, is_denied};
use super::hooks::Hook;
use super::kernel::LOG_LEVEL;
use super::pins::PinDir;
use crate::sys::caps::{CAP_SYS_ADMIN, Capabilities};
use crate::sys::mount::{TRACEFS, has_tracefs, is_bpffs};

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Pass,
    /// nobypass runs, with less.
    Warn,
    /// nobypass does not run.
    Fail,
}

/// One line of the table.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Check {
    /// What was checked.
    pub name: String,
    /// How it ended.
    pub level: Level,
    /// What was found.
    pub found: String,
    /// What to do; empty when passed.
    pub remedy: String,
}

impl Check {
    /// A passed check.
    pub fn pass(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self { name: name.into(), level: Level::Pass, found: found.into(), remedy: String::new() }
    }

    /// A check that did not pass.
    pub fn not(level: Level, name: &str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name: name.into(), level, found: found.into(), remedy: remedy.into() }
    }
}

/// Checks the kernel: version, capabilities, file systems, each program.
pub fn checks(bpf_dir: &Path, cgroup_root: Option<&Path>) -> Vec<Check> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut checks =
        vec![version(release.trim()), capabilities(Capabilities::current()), bpffs(bpf_dir), tracefs()];
    checks.extend(programs(cgroup_root));
    checks
}

fn version(release: &str) -> Check {
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= (5, 10) {
        Check::pass("kernel", release)
    } else {
        Check::not(
            Level::Fail,
            "kernel",
            release,
            "use Linux 5.10 or later; the checks below tell what works on this one",
        )
    }
}

fn capabilities(have: Capabilities) -> Check {
    let missing = have.missing();
    if missing.is_empty() {
        let all = if have.has(CAP_SYS_ADMIN) { "CAP_SYS_ADMIN and the rest" } else { "the reduced set" };
        return Check::pass("capabilities", all);
    }
    let remedy = "run as root or give the container these capabilities";
    Check::not(Level::Fail, "capabilities", format!("missing {}", missing.join(", ")), remedy)
}

fn bpffs(dir: &Path) -> Check {
    let existing = dir.ancestors().find(|path| path.exists()).unwrap_or_else(|| Path::new("/"));
    match is_bpffs(existing) {
        Ok(true) if PinDir::new(dir).check_none_newer().is_err() => Check::not(
            Level::Fail,
            "bpffs",
            format!("{} has the pins of a later version of nobypass, which stay in effect", dir.display()),
            "run that version or a later one, or `nobypass cleanup` first, after which nothing is enforced until this one runs",
        ),
        Ok(true) => Check::pass("bpffs", existing.display().to_string()),
        Ok(false) => Check::not(
            Level::Fail,
            "bpffs",
            format!("{} is not on one", dir.display()),
            "mount -t bpf bpf /sys/fs/bpf, or give another --bpf-dir",
        ),
        Err(error) => Check::not(
            Level::Fail,
            "bpffs",
            format!("{}: {error}", existing.display()),
            "run as root; mount -t bpf bpf /sys/fs/bpf",
        ),
    }
}

fn tracefs() -> Check {
    if has_tracefs() {
        return Check::pass("tracefs", "mounted");
    }
    let remedy = format!("mount -t tracefs tracefs {TRACEFS}; the agent mounts one for itself if it may");
    Check::not(Level::Warn, "tracefs", "not mounted", remedy)
}

/// Loads every program without pinning anything, and attaches the cgroup programs to an empty scratch cgroup.
fn programs(cgroup_root: Option<&Path>) -> Vec<Check> {
    let mut ebpf = match EbpfLoader::new().verifier_log_level(LOG_LEVEL).load(OBJECT) {
        Ok(ebpf) => ebpf,
        Err(error) => {
            let remedy = remedy(&error);
            let found = Chain(Box::new(error)).to_string();
            return vec![Check::not(Level::Fail, "BPF maps", found, remedy)];
        }
    };
    let scratch = cgroup_root.and_then(Scratch::make);
    let mut checks = vec![Check::pass("BPF maps", "hash, per-CPU, LPM trie, ring buffer, socket storage")];
    for hook in Hook::ALL {
        let name = format!("program {}", hook.label());
        let level = if hook == Hook::Egress { Level::Fail } else { Level::Warn };
        if let Err(error) = load_program(&mut ebpf, hook) {
            let remedy = format!("{}; without it {}", remedy(&error), hook.without());
            checks.push(Check::not(level, &name, Chain(Box::new(error)).to_string(), remedy));
            continue;
        }
        let attached = match (&scratch, hook.attach_type()) {
            (Some(Scratch { dir, .. }), Some(_)) => {
                attach_program(&mut ebpf, hook, dir).map(|_| "loads and attaches")
            }
            _ => Ok("loads"),
        };
        checks.push(match attached {
            Ok(found) => Check::pass(name, found),
            Err(error) => {
                let remedy = "see which programs sit on ancestors: `bpftool cgroup tree`";
                Check::not(level, &name, Chain(Box::new(error)).to_string(), remedy)
            }
        });
    }
    checks
}

fn remedy(error: &(dyn std::error::Error + 'static)) -> &'static str {
    if is_denied(error) { super::BpfError::NEEDS_CAPS } else { "use Linux 5.10 or later" }
}

/// An empty cgroup below the root, removed on drop.
struct Scratch {
    path: PathBuf,
    dir: File,
}

impl Scratch {
    fn make(root: &Path) -> Option<Self> {
        let path = root.join(format!("nobypass-preflight-{}", std::process::id()));
        fs::create_dir(&path).ok()?;
        match File::open(&path) {
            Ok(dir) => Some(Self { path, dir }),
            Err(_) => {
                let _ = fs::remove_dir(&path);
                None
            }
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_versions() {
        for (release, level) in [
            ("6.18.44-fc-v669", Level::Pass),
            ("5.10.0-46-cloud-amd64", Level::Pass),
            ("5.4.0", Level::Fail),
            ("4.19", Level::Fail),
            ("7.3", Level::Pass),
            ("", Level::Fail),
        ] {
            assert_eq!(version(release).level, level, "{release}");
        }
    }

    #[test]
    fn what_does_not_pass_says_what_to_do() {
        let tmp = tempfile::tempdir().unwrap();
        for check in checks(&tmp.path().join("pins"), None) {
            assert_eq!(check.level == Level::Pass, check.remedy.is_empty(), "{check:?}");
        }
    }
}
