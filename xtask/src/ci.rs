//! `cargo xtask ci`: all that a change has to pass, and proof that it leaves the machine as it was.

use std::process;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::exec::{self, succeeds};
use crate::snapshot::Snapshot;
use crate::tally::Tally;
use crate::vm::{self, Level};
use crate::workspace::Workspace;
use crate::{demo, fuzz, lint, setup, test};

/// Marks the environment of everything that the run starts.
const MARK: &str = "NOBYPASS_CI_RUN";

/// What has been asked to end needs a moment, and the kernel frees BPF objects later.
const SETTLE: Duration = Duration::from_secs(10);

/// How long each fuzz target runs: enough to find again what was found once.
const FUZZ_SECONDS: u32 = 15;

/// Runs every step, also after one that failed.
pub fn run() -> Tally {
    let id = process::id().to_string();
    exec::mark(MARK, id.clone());
    // The set-up comes first: what it installs is meant to stay.
    let mut total = step("setup", || Ok(Tally::of(setup::run(&[], false)?)));
    let before = Snapshot::take();
    total += step("lint", lint::run);
    total += step("test", || test::run(&[], &[]));
    total += step("fuzz", || fuzz::run(&[], FUZZ_SECONDS, &[]));
    total += step("demo", run_demo);
    total += step("other kernels", other_kernels);
    total += step("nothing left behind", || Ok(check_leftovers(&before, &id)));
    total
}

fn step(name: &str, run: impl FnOnce() -> Result<Tally>) -> Tally {
    println!("=== {name}");
    let start = Instant::now();
    let tally = run().unwrap_or_else(|error| {
        println!("=== {name}: {error:#}");
        Tally::FAILED
    });
    println!("=== {name}: {tally} ({} s)", start.elapsed().as_secs());
    tally
}

/// On every kernel what shows that the programs work there. The whole agent there is on demand:
/// `cargo xtask vm --level agent`.
fn other_kernels() -> Result<Tally> {
    vm::run(&[], Level::Object, &vm::CHOSEN.map(str::to_owned), true)
}

fn run_demo() -> Result<Tally> {
    if !demo::exists(&Workspace::read()?) {
        println!("this checkout has no demo");
        return Ok(Tally::default());
    }
    Ok(Tally::of(succeeds(&mut demo::prepare(&[])?)?))
}

#[expect(clippy::disallowed_methods, reason = "a condition with a deadline, and there is no runtime here")]
fn check_leftovers(before: &Snapshot, id: &str) -> Tally {
    let mark = format!("{MARK}={id}");
    let deadline = Instant::now() + SETTLE;
    loop {
        let differences = before.differences(&Snapshot::take(), &mark);
        if differences.is_empty() {
            return Tally::PASSED;
        }
        if Instant::now() > deadline {
            differences.iter().for_each(|difference| println!("{difference}"));
            return Tally { passed: 0, failed: differences.len().try_into().unwrap_or(1), skipped: 0 };
        }
        thread::sleep(Duration::from_millis(200));
    }
}
