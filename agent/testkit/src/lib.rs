//! Test harness: network namespaces, scratch cgroups, a private containerd node, traffic.
//!
//! Everything here needs root and cleans up after itself: namespaces live only as long as a file descriptor of this
//! process, child processes die with it, and cgroups are removed when their guard is dropped.

pub mod apiserver;
pub mod bpf;
pub mod cgroup;
pub mod control_plane;
pub mod figures;
pub mod foreign;
pub mod images;
pub mod netns;
pub mod node;
pub mod port;
pub mod proc;
pub mod redirect;
pub mod servers;
pub mod sniff;
pub mod traffic;
pub mod wait;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

/// Names the directory of the helper binaries where they do not lie beside the running test, as in a virtual machine.
pub const BIN_DIR_ENV: &str = "NOBYPASS_TESTKIT_BIN_DIR";

/// Path of one of this package's helper binaries (`traffic`, `cni-mesh`, ...), built in the profile of the caller.
pub fn bin(name: &str) -> Result<PathBuf> {
    let dir = match std::env::var_os(BIN_DIR_ENV) {
        Some(dir) => PathBuf::from(dir),
        None => profile_dir()?,
    };
    let path = dir.join(name);
    ensure!(
        path.is_file(),
        "helper binary {} is missing: run `cargo build -p nobypass-testkit --bins` (with --release if the tests are)",
        path.display()
    );
    Ok(path)
}

/// `target/<profile>`: the directory of the running executable, or its parent for a test, which lies in `deps`.
fn profile_dir() -> Result<PathBuf> {
    let exe = std::env::current_exe().context("where does this executable lie?")?;
    let dir = exe.parent().context("the executable has no parent directory")?;
    let in_deps = dir.file_name().is_some_and(|name| name == "deps");
    let dir = if in_deps { dir.parent().context("`deps` has no parent directory")? } else { dir };
    Ok(dir.to_path_buf())
}
