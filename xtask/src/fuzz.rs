//! `cargo xtask fuzz`: libFuzzer on the stable toolchain.
//!
//! Coverage is recorded by an LLVM pass that rustc has built in, so neither nightly nor cargo-fuzz is needed. Only
//! this repository's own crates are instrumented: xtask is cargo's wrapper around rustc for them, and everything else
//! is what ordinary builds have already compiled.

use std::env;
use std::fs;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};

use crate::exec::{cargo, command, repo_root, succeeds};
use crate::setup::{self, BUILD, FUZZ};
use crate::tally::Tally;
use crate::workspace::Workspace;

#[derive(Debug)]
pub struct Target {
    pub name: &'static str,
    about: &'static str,
    /// Longer input is cut.
    max_len: u32,
}

/// The binaries of `agent/fuzz`.
pub const TARGETS: [Target; 2] = [
    Target { name: "cni_plan", about: "CNI configs, as text, into the planner", max_len: 4096 },
    Target { name: "pod_text", about: "cgroup paths and ids of pods", max_len: 512 },
];

/// Tells the wrapper that it is one.
const WRAPPER: &str = "NOBYPASS_RUSTC_WRAPPER";
/// What is instrumented. Build scripts and macros run without libFuzzer, so they must not be.
const INSTRUMENTED: [&str; 4] = ["nobypass", "nobypass_common", "cni_plan", "pod_text"];
/// Edges are counted, and comparisons told to libFuzzer, as `cargo fuzz` has it.
const COVERAGE: [&str; 8] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
    "-Cdebug-assertions=yes",
    "-Coverflow-checks=yes",
];

/// `name  about` of each target, for `--help`.
pub fn help() -> String {
    let line = |target: &Target| format!("\n  {:<9} {}", target.name, target.about);
    format!("Targets:{}", TARGETS.iter().map(line).collect::<String>())
}

/// Each target counts as one test.
pub fn run(names: &[String], seconds: u32, args: &[String]) -> Result<Tally> {
    setup::ensure(&[BUILD, FUZZ].concat())?;
    let wanted: Vec<_> = TARGETS
        .iter()
        .filter(|target| names.is_empty() || names.iter().any(|name| name == target.name))
        .collect();
    let wrapper = env::current_exe().context("cannot find xtask's own program")?;
    let mut build = cargo();
    build.args(["build", "--quiet", "--package", "nobypass-fuzz"]);
    build.args(wanted.iter().flat_map(|target| ["--bin", target.name]));
    if !succeeds(build.env("RUSTC_WORKSPACE_WRAPPER", wrapper).env(WRAPPER, "1"))? {
        return Ok(Tally::FAILED);
    }
    let target_dir = Workspace::read()?.target_dir;
    let mut total = Tally::default();
    for target in wanted {
        println!("== fuzz: {}: {}", target.name, target.about);
        let work = target_dir.join("fuzz").join(target.name);
        fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
        let mut fuzzer = command(target_dir.join("debug").join(target.name));
        fuzzer
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-max_len={}", target.max_len))
            .arg(format!("-artifact_prefix={}/", work.display()))
            .args(["-timeout=10", "-rss_limit_mb=2048", "-verbosity=0", "-print_final_stats=1"])
            .args(args);
        // Where files are named in `args`, libFuzzer tries only these.
        if !args.iter().any(|arg| !arg.starts_with('-')) {
            fuzzer.arg(&work).arg(repo_root().join("agent/fuzz/corpus").join(target.name));
        }
        let ended = fuzzer.output().with_context(|| format!("cannot start {}", target.name))?;
        let said = String::from_utf8_lossy(&ended.stderr);
        if ended.status.success() {
            // The rest is a dictionary of hundreds of lines.
            said.lines().filter(|line| line.starts_with("stat::")).for_each(|line| println!("{line}"));
        } else {
            println!("{said}== fuzz: {}: FAILED; the input is in {}", target.name, work.display());
        }
        total += Tally::of(ended.status.success());
    }
    Ok(total)
}

/// Whether cargo called this program in place of rustc.
pub fn is_wrapper() -> bool {
    env::var_os(WRAPPER).is_some()
}

/// `xtask rustc ARGS...`: rustc, with coverage for what is to be fuzzed.
pub fn wrap() -> ExitCode {
    let mut args = env::args_os().skip(1);
    let Some(rustc) = args.next() else { return ExitCode::FAILURE };
    let args: Vec<_> = args.collect();
    let name = args.iter().skip_while(|arg| *arg != "--crate-name").nth(1);
    let mut rustc = Command::new(rustc);
    rustc.args(&args);
    if name.and_then(|name| name.to_str()).is_some_and(|name| INSTRUMENTED.contains(&name)) {
        rustc.args(COVERAGE);
    }
    match rustc.status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) | Err(_) => ExitCode::FAILURE,
    }
}
