//! What this machine allows: why a tier cannot run here.

use std::fs;

use crate::exec::{is_root, output, tool};
use crate::{bpf, snapshot};

/// Root, cgroup v2, bpf(2) and network namespaces.
pub fn cannot_run_kernel_tests() -> Option<String> {
    if !is_root() {
        return Some(
            "not root (run it as root or with `sudo -E env \"PATH=$PATH\" cargo xtask test`)".into(),
        );
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    if !snapshot::mounts(&mounts).iter().any(|mount| mount.kind == "cgroup2") {
        return Some("no cgroup v2 hierarchy is mounted".into());
    }
    if let Some(error) = bpf::KINDS.into_iter().find_map(|kind| bpf::ids(kind).err()) {
        return Some(format!("bpf(2) is refused here: {error}"));
    }
    let namespace = output(tool("unshare").args(["--net", "--mount", "true"]));
    namespace.err().map(|error| format!("no new network namespace can be made here: {error:#}"))
}
