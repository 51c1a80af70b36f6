//! A mount namespace of a test's own. Nothing is ever mounted outside of one.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use nobypass_testkit::proc::{self, Place as _, Proc};
use nobypass_testkit::wait;

/// A process that holds the namespace; the mounts go with it.
pub struct Mounts {
    holder: Proc,
}

impl Mounts {
    /// With a bpffs on /sys/fs/bpf and tracefs on /sys/kernel/tracing, as on a node.
    pub fn new() -> Self {
        Self::with("mount -t bpf -o mode=700 bpf /sys/fs/bpf; mount -t tracefs tracefs /sys/kernel/tracing")
    }

    /// With what `script` mounts or unmounts, and neither a bpffs nor tracefs else, whatever this machine has.
    pub fn with(script: &str) -> Self {
        let bare = "for place in /sys/fs/bpf /sys/kernel/tracing; do umount -q $place || :; done";
        let script = format!("{bare}\nset -e\n{script}\necho ready\nexec cat");
        let mut command = Command::new("unshare");
        command.args(["-m", "--propagation", "private", "sh", "-c", &script]);
        let holder = proc::spawn(command).unwrap();
        assert_eq!(holder.line(wait::HANG).unwrap(), "ready");
        Self { holder }
    }

    /// A command that starts inside.
    pub fn command(&self, program: &str) -> Command {
        let namespace = File::open(format!("/proc/{}/ns/mnt", self.holder.pid())).unwrap();
        let mut command = Command::new(program);
        command.in_mount_ns_fd(namespace.into());
        command
    }

    /// Runs a shell script inside and gives its output.
    pub fn sh(&self, script: &str) -> String {
        let mut command = self.command("sh");
        command.args(["-ec", script]);
        proc::check(command, "").unwrap()
    }

    /// A path of the namespace, seen from outside.
    pub fn see(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        Path::new("/proc")
            .join(self.holder.pid().to_string())
            .join("root")
            .join(path.strip_prefix("/").unwrap())
    }

    /// All pins in the namespace's bpffs, relative to it, without the kernel's own (`maps.debug`, `progs.debug`).
    pub fn pins(&self) -> Vec<String> {
        let top = self.see("/sys/fs/bpf");
        let mut pins = files(&top);
        pins.iter_mut().for_each(|pin| *pin = pin.strip_prefix(&top).unwrap().into());
        pins.retain(|pin| pin.extension().is_none_or(|end| end != "debug"));
        let mut pins: Vec<String> = pins.iter().map(|pin| pin.display().to_string()).collect();
        pins.sort();
        pins
    }
}

/// All files below a directory.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() {
            found.extend(files(&entry.path()));
        } else {
            found.push(entry.path());
        }
    }
    found
}
