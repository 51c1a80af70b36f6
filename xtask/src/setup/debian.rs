//! Packages of other Debian suites, unpacked into a directory of ours and never installed: for tests beside what this
//! machine has.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};

use super::apt::PrivateApt;
use super::toolchain;
use crate::exec::{command, output};

/// One package of one suite, at whatever version the suite has when it is fetched; removed from the cache, it is fetched anew.
#[derive(Debug)]
pub struct DebianPackage {
    /// Its directory in the cache.
    pub name: &'static str,
    package: &'static str,
    suite: &'static str,
    /// Tells tests where its programs are.
    pub variable: &'static str,
    /// One that has to run here: a program of a newer suite may need a newer C library.
    program: &'static str,
}

/// Rows of [`super::need::TABLE`] name these.
pub static CONTAINERD_1_7: DebianPackage = DebianPackage {
    name: "containerd-1.7",
    package: "containerd",
    suite: "trixie",
    variable: "NOBYPASS_TEST_CONTAINERD_1_7",
    program: "containerd",
};
pub static CONTAINERD_2: DebianPackage = DebianPackage {
    name: "containerd-2",
    package: "containerd",
    suite: "sid",
    variable: "NOBYPASS_TEST_CONTAINERD_2",
    program: "containerd",
};

impl DebianPackage {
    /// Its directory, and one beside it that ends like this.
    fn home(&self, suffix: &str) -> Result<PathBuf> {
        Ok(toolchain::dir()?.join("debian").join(format!("{}{suffix}", self.name)))
    }

    /// The directory of its programs, or what is missing.
    pub fn find(&self) -> Result<PathBuf, String> {
        let bin = self.home("").map_err(|error| format!("{error:#}"))?.join("usr/bin");
        let program = bin.join(self.program);
        if program.is_file() { Ok(bin) } else { Err(format!("no {}", program.display())) }
    }

    /// Fetches it, by way of package lists of our own.
    pub fn install(&self) -> Result<()> {
        let (home, part, lists) = (self.home("")?, self.home(".part")?, self.home(".apt")?);
        for old in [&home, &part, &lists] {
            if old.exists() {
                fs::remove_dir_all(old).with_context(|| format!("cannot remove {}", old.display()))?;
            }
        }
        fs::create_dir_all(&part).with_context(|| format!("cannot create {}", part.display()))?;
        let apt = PrivateApt::new(&lists, &[self.suite])?;
        apt.update()?;
        let versions = apt.versions(self.package)?;
        let version = versions.first().with_context(|| format!("{} has no {}", self.suite, self.package))?;
        apt.unpack(self.package, version, &part)?;
        output(command(part.join("usr/bin").join(self.program)).arg("--version"))
            .with_context(|| format!("{} {version} of {} does not run here", self.package, self.suite))?;
        fs::rename(&part, &home).with_context(|| format!("cannot create {}", home.display()))?;
        // Large, and of no use any more.
        fs::remove_dir_all(&lists).with_context(|| format!("cannot remove {}", lists.display()))
    }
}
