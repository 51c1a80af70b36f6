//! A machine to run an agent on: mounts, pods' cgroups, a directory for socket and log.

use std::path::Path;
use std::process::Command;

use nobypass::bpf::Maps;
use nobypass::bpf::pins::PinDir;
use nobypass_testkit::cgroup::Scratch;

use super::agent::{BIN, Launch};
use super::mounts::Mounts;

/// Where the pins are, inside the machine's mounts.
pub const BPF_DIR: &str = "/sys/fs/bpf/nobypass";

/// See the module.
pub struct Machine {
    /// Its mounts.
    pub mounts: Mounts,
    /// Its pods' cgroups.
    pub scratch: Scratch,
    /// For socket and log.
    pub home: tempfile::TempDir,
}

impl Machine {
    /// With bpffs and tracefs.
    pub fn new() -> Self {
        Self::with(Mounts::new())
    }

    /// With other mounts.
    pub fn with(mounts: Mounts) -> Self {
        Self { mounts, scratch: Scratch::new().unwrap(), home: tempfile::tempdir().unwrap() }
    }

    /// An agent without a container runtime and without a metrics port.
    pub fn launch(&self) -> Launch {
        self.launch_by(self.mounts.command(BIN))
    }

    /// Through another program, which runs the agent in the end: `setpriv ... nobypass agent ...`.
    pub fn launch_through(&self, program: &str, args: &[&str]) -> Launch {
        let mut command = self.mounts.command(program);
        command.args(args).arg(BIN);
        self.launch_by(command)
    }

    /// By a command that is the binary, or runs it.
    pub fn launch_by(&self, command: Command) -> Launch {
        let runtime = self.home.path().join("no-runtime.sock").display().to_string();
        let kubepods = self.scratch.kubepods().display().to_string();
        let args = ["--metrics-addr", "none", "--cri-endpoint", &runtime, "--pod-parent", &kubepods];
        Launch::new(command, self.home.path()).args(args)
    }

    /// The pinned maps, seen from outside the machine's mounts.
    pub fn maps(&self) -> Maps {
        Maps::open(&PinDir::new(&self.mounts.see(Path::new(BPF_DIR)))).unwrap()
    }
}
