//! `cargo xtask demo`: builds what the demo needs and hands over to it.

use std::ffi::OsString;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::exec::{cargo, command, find_program, is_root, succeeds};
use crate::setup::{self, BUILD, KERNEL, NODE};
use crate::workspace::Workspace;

const TESTKIT: &str = "nobypass-testkit";
const BIN: &str = "demo";

/// Does this checkout have a demo?
pub fn exists(workspace: &Workspace) -> bool {
    workspace.has_bin(TESTKIT, BIN)
}

/// Everything ready to run: the command that runs the demo as root.
///
/// Debug builds: they are there soonest, tests use them too, and the demo shows behaviour, not speed.
pub fn prepare(args: &[OsString]) -> Result<Command> {
    let workspace = Workspace::read()?;
    if !exists(&workspace) {
        bail!("this checkout has no demo: {TESTKIT} has no program `{BIN}`");
    }
    setup::ensure(&[BUILD, KERNEL, NODE].concat())?;
    eprintln!("demo: building nobypass (the first time takes some minutes)");
    if !succeeds(cargo().args(["build", "--package", "nobypass", "--package", TESTKIT, "--bins"]))? {
        bail!("nobypass does not build here, see above");
    }
    let bins = workspace.target_dir.join("debug");
    let nobypass = bins.join("nobypass");
    let demo = bins.join(BIN);
    let mut run = if is_root() {
        command(demo)
    } else {
        let sudo = find_program("sudo").with_context(|| {
            let demo = demo.display();
            format!("the demo needs root; run as root: NOBYPASS_BIN={} {demo}", nobypass.display())
        })?;
        eprintln!(
            "demo: it makes network namespaces, containers and loads BPF programs: asking sudo for root"
        );
        let mut run = command(sudo);
        let mut setting = OsString::from("NOBYPASS_BIN=");
        setting.push(&nobypass);
        run.args(["-E", "--", "env"]).arg(setting).arg(demo);
        run
    };
    run.env("NOBYPASS_BIN", nobypass).args(args);
    Ok(run)
}
