//! A machine to run an agent on, in kernel tests.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::process::Command;

use nobypass::bpf::Maps;
use nobypass::bpf::pins::PinDir;
use nobypass::sys::bpf::{AttachType, attached, program_name};
use nobypass_testkit::cgroup::Scratch;

use super::agent::{Agent, BIN, Ended, Launch, run};
use super::mounts::Mounts;

pub const BPF_DIR: &str = "/sys/fs/bpf/nobypass";
pub const HOOKS: [AttachType; 5] = [
    AttachType::Egress,
    AttachType::Ingress,
    AttachType::Connect4,
    AttachType::Connect6,
    AttachType::SockOps,
];
pub const UID: &str = "2c48913c-b29f-11e7-9350-020968147796";

/// Whether this kernel pins links to tracepoints: since 5.15
/// (<https://github.com/torvalds/linux/commit/b89fbfbb854c9afc3047e8273cc3a694650b802e>). Before, they live as long
/// as their agent.
pub fn pins_tracepoints() -> bool {
    kernel_has(5, 15)
}

/// Whether this kernel is of this version or a later one.
pub fn kernel_has(major: u32, minor: u32) -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(major), Some(minor))
}

/// Pins of a complete start with one parent that holds nothing: 18 maps, 4 links to it and 2 to the tracepoints.
pub fn pins() -> usize {
    if pins_tracepoints() { 24 } else { 22 }
}

/// A machine to run an agent on: mounts, pods' cgroups, a directory for socket and log.
pub struct Machine {
    pub mounts: Mounts,
    pub scratch: Scratch,
    pub home: tempfile::TempDir,
}

impl Machine {
    pub fn new() -> Self {
        Self::with(Mounts::new())
    }

    pub fn with(mounts: Mounts) -> Self {
        Self { mounts, scratch: Scratch::new().unwrap(), home: tempfile::tempdir().unwrap() }
    }

    pub fn launch(&self) -> Launch {
        self.launch_by(self.mounts.command(BIN))
    }

    /// Through another program, which runs the agent in the end: `setpriv ... nobypass agent ...`.
    pub fn launch_through(&self, program: &str, args: &[&str]) -> Launch {
        let mut command = self.mounts.command(program);
        command.args(args).arg(BIN);
        self.launch_by(command)
    }

    pub fn launch_by(&self, command: Command) -> Launch {
        let runtime = self.home.path().join("no-runtime.sock").display().to_string();
        let kubepods = self.scratch.kubepods().display().to_string();
        let args = ["--metrics-addr", "none", "--cri-endpoint", &runtime, "--pod-parent", &kubepods];
        Launch::new(command, self.home.path()).args(args)
    }

    /// As [`Machine::launch`] without `--pod-parent` and the other defaults.
    pub fn launch_bare(&self) -> Launch {
        Launch::new(self.mounts.command(BIN), self.home.path()).args(["--metrics-addr", "none"])
    }

    pub fn nobypass(&self, args: &[&str]) -> Ended {
        let mut command = self.mounts.command(BIN);
        command.args(args);
        run(command)
    }

    pub fn cleanup(&self) -> Ended {
        self.nobypass(&["cleanup"])
    }

    /// The pinned maps, seen from outside the machine's mounts.
    pub fn maps(&self) -> Maps {
        Maps::open(&PinDir::new(&self.mounts.see(BPF_DIR))).unwrap()
    }

    /// Names of the programs attached to the pods' parent and to the directory that holds it.
    pub fn programs(&self) -> Vec<String> {
        let mut found = Vec::new();
        for dir in [self.scratch.top(), &self.scratch.kubepods()] {
            let cgroup = File::open(dir).unwrap();
            for hook in HOOKS {
                let programs = attached(cgroup.as_fd(), hook, false).unwrap().programs;
                found.extend(programs.into_iter().map(|id| program_name(id).unwrap()));
            }
        }
        found
    }

    pub fn nothing_is_left(&self) {
        assert_eq!(self.mounts.pins(), [""; 0]);
        assert_eq!(self.programs(), [""; 0]);
        let inside: Vec<_> = fs::read_dir(self.scratch.kubepods()).unwrap().flatten().collect();
        assert!(inside.iter().all(|entry| !entry.file_type().unwrap().is_dir()), "{inside:?}");
        let probes = self.scratch.top().join("nobypass-probe");
        assert!(!probes.exists(), "{}", probes.display());
    }

    pub fn all_is_attached(&self) {
        let pins = self.mounts.pins();
        assert_eq!(pins.len(), self::pins(), "{pins:?}");
        assert_eq!(self.programs(), ["nb_egress", "nb_ingress", "nb_connect4", "nb_connect6"]);
    }
}

pub fn says(ended: &Ended, code: i32, words: &[&str]) {
    assert_eq!(ended.code, Some(code), "{}", ended.err);
    assert!(ended.last().starts_with("nobypass: "), "{}", ended.err);
    for word in words {
        assert!(ended.last().contains(word), "should say {word:?}: {}", ended.err);
    }
}

pub fn hook<'a>(status: &'a serde_json::Value, name: &str) -> &'a serde_json::Value {
    let hooks = status["hooks"].as_array().unwrap();
    hooks.iter().find(|hook| hook["hook"] == name).unwrap_or_else(|| panic!("no hook {name} in {status}"))
}

pub fn sees_pod(agent: &Agent, id: u64) -> bool {
    agent.status()["pods"].as_array().unwrap().iter().any(|pod| pod["cgroup"] == id)
}
