//! What runs in a virtual machine: the tests as cargo builds them, and the programs that they call.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::initramfs::Initramfs;
use super::level::Level;
use crate::exec::{cargo, find_program, output, tool};
use crate::test::build_bins;
use crate::workspace::Workspace;

/// Packages whose programs the tests start.
const WITH_PROGRAMS: [&str; 2] = ["nobypass", "nobypass-testkit"];

/// Programs of this machine that tests call, or the shell scripts in them.
const CALLED: [&str; 20] = [
    "busybox",
    "cat",
    "conntrack",
    "ip",
    "ip6tables",
    "ip6tables-restore",
    "iptables",
    "iptables-restore",
    "ls",
    "mount",
    "mv",
    "nft",
    "nsenter",
    "rm",
    "setpriv",
    "sh",
    "sleep",
    "true",
    "umount",
    "unshare",
];

/// Where iptables keeps its extensions, which it loads by name, beside its library.
const XTABLES: [&str; 4] = [
    "/usr/lib/x86_64-linux-gnu/xtables",
    "/lib/x86_64-linux-gnu/xtables",
    "/usr/lib64/xtables",
    "/usr/lib/xtables",
];

/// The programs of this workspace.
#[derive(Debug)]
pub struct Built {
    /// The agent and the programs that tests start.
    bins: Vec<PathBuf>,
    /// Names and files of the test targets, in the order of the level.
    pub tests: Vec<(String, PathBuf)>,
}

impl Built {
    /// Builds what a level takes; `None` if it does not build.
    pub fn new(workspace: &Workspace, level: Level) -> Result<Option<Self>> {
        if !build_bins()? {
            return Ok(None);
        }
        let mut tests = Vec::new();
        for run in level.invocations(workspace) {
            let mut build = cargo();
            build.args(["test", "--no-run", "--message-format=json-render-diagnostics"]).args(run);
            tests.extend(executables(&output(build.stderr(std::process::Stdio::inherit()))?));
        }
        let dir = workspace.target_dir.join("debug");
        let bins = WITH_PROGRAMS.iter().flat_map(|package| workspace.bins(package));
        Ok(Some(Self { bins: bins.map(|name| dir.join(name)).collect(), tests }))
    }

    /// As if these had been built.
    #[cfg(test)]
    pub fn of(tests: &[(&str, &str)]) -> Self {
        Self {
            bins: Vec::new(),
            tests: tests.iter().map(|(name, file)| ((*name).into(), file.into())).collect(),
        }
    }
}

/// Name and file of each test that cargo says it has built.
fn executables(messages: &str) -> Vec<(String, PathBuf)> {
    let read = |line: &str| {
        let message: Value = serde_json::from_str(line).ok()?;
        let test = message.pointer("/profile/test").and_then(Value::as_bool)?;
        let file = message.get("executable").and_then(Value::as_str).filter(|_| test)?;
        Some((message.pointer("/target/name")?.as_str()?.to_owned(), PathBuf::from(file)))
    };
    messages.lines().filter_map(read).collect()
}

/// Adds all of it at the paths that it has on this machine, which tests know each other by.
pub fn add(initramfs: &mut Initramfs, built: &Built, staging: &Path) -> Result<()> {
    for name in CALLED {
        // What no test of this level calls may be missing; another fails by the program's name.
        if let Some(file) = find_program(name) {
            initramfs.program(&file)?;
        }
    }
    for dir in XTABLES.map(Path::new).into_iter().filter(|dir| dir.is_dir() && !dir.is_symlink()) {
        initramfs.directory(dir)?;
    }
    for bin in &built.bins {
        stripped(initramfs, bin, staging)?;
    }
    for (_, file) in &built.tests {
        stripped(initramfs, file, staging)?;
    }
    Ok(())
}

/// Without symbols: the machine has them all in memory.
fn stripped(initramfs: &mut Initramfs, file: &Path, staging: &Path) -> Result<()> {
    let name = file.file_name().context("a program without a name")?;
    let small = staging.join(name);
    output(tool("strip").arg("-o").arg(&small).arg(file))?;
    initramfs.program(file)?;
    initramfs.copy(file, &small)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_which_tests_cargo_has_built() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"nobypass","kind":["bin"]},"profile":{"test":false},"executable":"/t/nobypass"}
{"reason":"compiler-artifact","target":{"name":"kernel_a","kind":["test"]},"profile":{"test":true},"executable":"/t/deps/kernel_a-1"}
{"reason":"build-finished","success":true}
not json"#;
        assert_eq!(executables(messages), [("kernel_a".into(), PathBuf::from("/t/deps/kernel_a-1"))]);
    }
}
