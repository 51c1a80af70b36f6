//! One run of a virtual machine: qemu with software emulation, and the results read from its serial line.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::Say;
use crate::exec::{shown, tool};
use crate::tally::{Libtest, Tally};
use crate::test::read_lines;

/// Before the name of a test program that starts, and of one that has ended, with its exit code.
pub const BEGIN: &str = "== begin ";
pub const END: &str = "== end ";
/// The last line.
pub const DONE: &str = "== done";

/// What to start.
#[derive(Debug)]
pub struct Machine<'a> {
    pub image: &'a Path,
    pub initramfs: &'a Path,
    pub memory_mib: u32,
    pub cpus: u32,
    /// It is ended after this long.
    pub limit: Duration,
    /// Where the kernel's own messages go.
    pub console: &'a Path,
}

/// What came of it.
#[derive(Debug, Default)]
pub struct Outcome {
    pub tally: Tally,
    /// What did not go as it should, beyond tests that failed.
    pub trouble: Option<String>,
}

impl Machine<'_> {
    /// Runs to the end, passing the results through as they come.
    pub fn run(&self, say: Say<'_>) -> Result<Outcome> {
        // It ends with us, however we end.
        let mut qemu = tool("setpriv");
        qemu.args(["--pdeathsig", "KILL", "--", "qemu-system-x86_64"]);
        // Software emulation is slow but the same everywhere. KVM is not: a nested one may be there and hang.
        qemu.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-nodefaults", "-no-user-config"]);
        qemu.args(["-display", "none", "-no-reboot", "-nic", "none"]);
        qemu.args(["-m", &format!("{}M", self.memory_mib), "-smp", &self.cpus.to_string()]);
        qemu.arg("-serial").arg(format!("file:{}", self.console.display())).args(["-serial", "stdio"]);
        qemu.arg("-kernel").arg(self.image).arg("-initrd").arg(self.initramfs);
        // A panic ends the machine, mitigations only cost time, and a clock that emulation makes jump stays in use.
        qemu.args([
            "-append",
            "console=ttyS0 rdinit=/vm/init panic=-1 quiet nokaslr mitigations=off tsc=reliable",
        ]);
        let name = shown(&qemu);
        let mut child =
            qemu.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot run `{name}`"))?;
        let lines = read_lines(child.stdout.take().context("qemu has no stdout")?);
        let deadline = Instant::now() + self.limit;
        let mut results = Results::default();
        loop {
            match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    let line = String::from_utf8_lossy(&line).replace('\r', "");
                    say(&line);
                    results.line(line.trim_end());
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    results.trouble = Some(format!("not done after {} s", self.limit.as_secs()));
                    break;
                }
            }
        }
        stop(&mut child)?;
        Ok(results.finish(self.console))
    }
}

fn stop(child: &mut Child) -> Result<()> {
    // It may have ended: its output has.
    let _ = child.kill();
    child.wait().context("cannot wait for qemu")?;
    Ok(())
}

/// Reads the machine's lines.
#[derive(Debug, Default)]
struct Results {
    total: Tally,
    running: Option<(String, Libtest)>,
    done: bool,
    trouble: Option<String>,
}

impl Results {
    fn line(&mut self, line: &str) {
        if let Some(name) = line.strip_prefix(BEGIN) {
            self.end(false);
            self.running = Some((name.to_owned(), Libtest::default()));
        } else if let Some(code) = line.strip_prefix(END).and_then(|rest| rest.rsplit(' ').next()) {
            self.end(code == "0");
        } else if line == DONE {
            self.done = true;
        } else if let Some((_, libtest)) = &mut self.running {
            libtest.line(line);
        }
    }

    fn end(&mut self, success: bool) {
        if let Some((_, libtest)) = self.running.take() {
            self.total += libtest.finish(success);
        }
    }

    /// A machine that did not come to its end has failed, whatever passed before.
    fn finish(mut self, console: &Path) -> Outcome {
        let during = self.running.as_ref().map(|(name, _)| format!(" during {name}")).unwrap_or_default();
        self.end(false);
        if !self.done {
            let why = self.trouble.take().unwrap_or_else(|| "it stopped".into());
            self.total.failed = self.total.failed.max(1);
            self.trouble = Some(format!("{why}{during}; the kernel's last words: {}", last_words(console)));
        }
        Outcome { tally: self.total, trouble: self.trouble }
    }
}

fn last_words(console: &Path) -> String {
    let text = fs::read(PathBuf::from(console)).unwrap_or_default();
    crate::exec::last_lines(&String::from_utf8_lossy(&text), 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OK: &str =
        "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.0s";

    fn outcome(lines: &[&str]) -> Outcome {
        let mut results = Results::default();
        lines.iter().for_each(|line| results.line(line));
        results.finish(Path::new("/no such console"))
    }

    #[test]
    fn counts_what_ran() {
        let done = outcome(&[
            "== begin a",
            "running 3 tests",
            OK,
            "== end a 0",
            "== begin b",
            OK,
            "== end b 0",
            DONE,
        ]);
        assert_eq!(done.tally, Tally { passed: 6, failed: 0, skipped: 0 });
        assert!(done.trouble.is_none());
    }

    #[test]
    fn a_program_that_dies_or_never_ran_is_a_failure() {
        for lines in [
            ["== begin a", "running 3 tests", "== end a 139", "== begin b", OK, "== end b 0", DONE]
                .as_slice(),
            &["== begin a", "/x: not found", "== end a 127", "== begin b", OK, "== end b 0", DONE],
        ] {
            let done = outcome(lines);
            assert_eq!(done.tally, Tally { passed: 3, failed: 1, skipped: 0 }, "{lines:?}");
            assert!(done.trouble.is_none());
        }
    }

    #[test]
    fn a_machine_that_does_not_end_is_a_failure() {
        let panic = outcome(&["== begin a", "running 3 tests", OK]);
        assert_eq!(panic.tally.failed, 1);
        assert!(panic.trouble.unwrap().starts_with("it stopped during a;"));
        assert_eq!(outcome(&[]).tally, Tally::FAILED);
        assert_eq!(
            outcome(&["== begin a", OK, "== end a 0"]).tally,
            Tally { passed: 3, failed: 1, skipped: 0 }
        );
    }
}
