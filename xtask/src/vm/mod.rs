//! `cargo xtask vm`: the kernel tests on other kernels, in small virtual machines.
//!
//! A machine has this machine's programs, the tests as they were built for it, and nothing else: no disk, no network.

mod initramfs;
mod kernel;
mod level;
mod machine;
mod modules;
mod programs;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result};

use crate::exec::in_ci;
use crate::setup::{self, BUILD, KERNEL, VM};
use crate::tally::Tally;
use crate::workspace::Workspace;
use initramfs::Initramfs;
use kernel::SERIES;
use kernel::{Kernel, Store};
pub use level::{CHOSEN, Level};
use machine::Machine;
use programs::Built;

/// A machine keeps one processor busy, and some memory.
const AT_ONCE: usize = 2;

/// Takes the name of a kernel series.
pub fn series(text: &str) -> Result<String, String> {
    if kernel::is_series(text) {
        Ok(text.to_owned())
    } else {
        Err("a series is named as 6.12, or `newest`".into())
    }
}

/// Runs the tests of a level on each kernel; `filter` goes to the test programs as it is.
///
/// Kernels that cannot be had are skipped with their name, or failures where `required` or with CI=true.
pub fn run(series: &[String], level: Level, filter: &[String], required: bool) -> Result<Tally> {
    let required = required || in_ci();
    let lacking = setup::ensure(&[BUILD, KERNEL, VM].concat()).err().map(|lacking| lacking.reason());
    if let Some(reason) = level::ruled_out().or(lacking) {
        return Ok(not_run("vm", &reason, required));
    }
    let store = match Store::open() {
        Ok(store) => store,
        Err(error) => return Ok(not_run("vm", &format!("{error:#}"), required)),
    };
    let workspace = Workspace::read()?;
    let Some(built) = Built::new(&workspace, level)? else { return Ok(Tally::FAILED) };
    let work = Work::new(&workspace)?;
    let base = base(&built, &work, level, filter)?;
    let mut total = Tally::default();
    let mut kernels = Vec::new();
    let all: &[&str] = &SERIES;
    let series = if series.is_empty() { all.to_vec() } else { series.iter().map(String::as_str).collect() };
    for series in series {
        let name = format!("vm {series} {level}");
        match store.get(series) {
            Ok(kernel) => kernels.push((name, kernel)),
            Err(error) => total += not_run(&name, &format!("{error:#}"), required),
        }
    }
    total += run_all(&kernels, |kernel, name, say| run_on(kernel, &base, &work, level, name, say));
    Ok(total)
}

/// Takes what a machine says, line by line with its end.
type Say<'a> = &'a mut dyn FnMut(&str);

/// Runs one machine as it goes, several at most [`AT_ONCE`] at once, each one's output when it is done.
fn run_all<K: Sync>(
    kernels: &[(String, K)],
    run: impl Fn(&K, &str, Say<'_>) -> Result<Tally> + Sync,
) -> Tally {
    let run = |(name, kernel): &(String, K), say: Say<'_>| {
        run(kernel, name, say).unwrap_or_else(|error| {
            say(&format!("== {name}: FAILED: {error:#}\n"));
            Tally::FAILED
        })
    };
    if let [only] = kernels {
        return run(only, &mut |text| print!("{text}"));
    }
    let left = Mutex::new(kernels.iter());
    let total = Mutex::new(Tally::default());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(kernel) = next() {
                    let mut text = String::new();
                    let tally = run(kernel, &mut |more| text.push_str(more));
                    // One lock for both: outputs do not mix.
                    let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
                    print!("{text}");
                    *total += tally;
                }
            });
        }
    });
    total.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn not_run(name: &str, reason: &str, required: bool) -> Tally {
    if required {
        println!("== {name}: FAILED, it is required: {reason}");
        Tally::FAILED
    } else {
        println!("== {name}: skipped: {reason}");
        Tally::SKIPPED
    }
}

/// What is the same for each kernel.
fn base(built: &Built, work: &Work, level: Level, filter: &[String]) -> Result<Initramfs> {
    let mut base = Initramfs::new();
    programs::add(&mut base, built, work.dir())?;
    let busybox = crate::exec::find_program("busybox").context("no busybox")?;
    base.copy(Path::new("/vm/busybox"), &busybox)?;
    base.bytes("/vm/init", 0o755, include_str!("init.sh"));
    base.bytes("/vm/run", 0o644, level.script(built, filter)?);
    base.bytes("/vm/limit", 0o644, level.limit().as_secs().to_string());
    Ok(base)
}

fn run_on(
    kernel: &Kernel,
    base: &Initramfs,
    work: &Work,
    level: Level,
    name: &str,
    say: Say<'_>,
) -> Result<Tally> {
    eprintln!("vm: starting Linux {}", kernel.release);
    say(&format!("== {name}: Linux {}\n", kernel.release));
    let start = Instant::now();
    let mut initramfs = base.clone();
    let mut order = String::new();
    for (module, bytes) in modules::with_dependencies(&kernel.modules, level.modules())? {
        initramfs.bytes(&format!("/vm/lib/{module}.ko"), 0o644, bytes);
        order.push_str(&module);
        order.push('\n');
    }
    initramfs.bytes("/vm/modules", 0o644, order);
    let file = work.dir().join(format!("{}.initramfs", kernel.release));
    initramfs.save(&file)?;
    let machine = Machine {
        image: &kernel.image,
        initramfs: &file,
        memory_mib: level.memory_mib(),
        cpus: 2,
        limit: level.limit(),
        // Kept, for who wants to see why a kernel stopped.
        console: &work.dir().with_file_name(format!("{}-{level}.console", kernel.release)),
    };
    let outcome = machine.run(say)?;
    if let Some(trouble) = outcome.trouble {
        say(&format!("== {name}: {trouble}\n"));
    }
    say(&format!("== {name}: {} ({} s)\n", outcome.tally, start.elapsed().as_secs()));
    Ok(outcome.tally)
}

/// A directory for this run alone, removed in the end.
struct Work(PathBuf);

impl Work {
    fn new(workspace: &Workspace) -> Result<Self> {
        let dir = workspace.target_dir.join("vm").join(std::process::id().to_string());
        fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        Ok(Self(dir))
    }

    fn dir(&self) -> &Path {
        &self.0
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // What is left lies in the target directory.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_runs_once_and_every_result_counts() {
        let kernels = [1, 2, 3, 0, 5].map(|n| (format!("k{n}"), n));
        let run = |n: &u64, _: &str, say: Say<'_>| {
            anyhow::ensure!(*n > 0, "no kernel");
            say("ran\n");
            Ok(Tally { passed: *n, ..Tally::default() })
        };
        assert_eq!(run_all(&kernels, run), Tally { passed: 11, failed: 1, skipped: 0 });
        assert_eq!(run_all(&kernels[..1], run), Tally::PASSED);
        assert_eq!(run_all(&kernels[..0], run), Tally::default());
    }

    #[test]
    fn a_kernel_that_is_missing_is_skipped_unless_required() {
        assert_eq!(not_run("vm 5.10 object", "no package", false), Tally::SKIPPED);
        assert_eq!(not_run("vm 5.10 object", "no package", true), Tally::FAILED);
    }
}
