//! `cargo xtask lint`: format, clippy on both halves, and the rules of this repository.

use std::env;

use anyhow::Result;

use crate::deploy;
use crate::exec::{cargo, in_ci, succeeds};
use crate::rules;
use crate::setup::{self, BUILD, DEPLOY, FUZZ, LINT};
use crate::tally::Tally;
use crate::tier;
use crate::workspace::Workspace;

/// Each check counts as one.
pub fn run() -> Result<Tally> {
    setup::ensure(&[BUILD, FUZZ, LINT].concat())?;
    let mut total = Tally::default();
    for (name, check) in [
        ("format", format as fn() -> Result<bool>),
        ("rules of this repository", repository),
        ("clippy", clippy),
        ("clippy, kernel half", clippy_ebpf),
    ] {
        println!("== lint: {name}");
        let passed = check()?;
        if !passed {
            println!("== lint: {name}: FAILED");
        }
        total += Tally::of(passed);
    }
    println!("== lint: deploy");
    total += check_deploy();
    Ok(total)
}

/// Needs tools that not everybody who changes a line of Rust has.
fn check_deploy() -> Tally {
    match setup::ensure(DEPLOY) {
        Err(lacking) if !in_ci() => {
            println!("== lint: deploy: skipped: {}", lacking.reason());
            Tally { skipped: 1, ..Tally::default() }
        }
        Err(lacking) => {
            println!("== lint: deploy: FAILED: {}", lacking.reason());
            Tally::FAILED
        }
        Ok(()) => deploy::check().unwrap_or_else(|error| {
            println!("== lint: deploy: FAILED: {error:#}");
            Tally::FAILED
        }),
    }
}

fn format() -> Result<bool> {
    succeeds(cargo().args(["fmt", "--all", "--check"]))
}

fn repository() -> Result<bool> {
    let breaches = rules::check_repository()?;
    breaches.iter().for_each(|breach| println!("{breach}"));
    Ok(breaches.is_empty())
}

fn clippy() -> Result<bool> {
    let features = tier::all_features(&Workspace::read()?);
    let mut clippy = cargo();
    clippy.args([
        "clippy",
        "--workspace",
        "--exclude",
        "nobypass-ebpf",
        "--all-targets",
        "--features",
        &features.join(","),
    ]);
    succeeds(clippy.args(["--", "--deny", "warnings"]))
}

/// The eBPF crate builds for its own target only, as agent/build.rs does it.
fn clippy_ebpf() -> Result<bool> {
    let target = if cfg!(target_endian = "big") { "bpfeb-unknown-none" } else { "bpfel-unknown-none" };
    let mut clippy = cargo();
    clippy
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", format!("--cfg=bpf_target_arch=\"{}\"", env::consts::ARCH))
        // Of its own: these settings would make the next ordinary build start anew.
        .env("CARGO_TARGET_DIR", Workspace::read()?.target_dir.join("lint-ebpf"))
        .args([
            "clippy",
            "--package",
            "nobypass-ebpf",
            "--release",
            "-Z",
            "build-std=core",
            "--target",
            target,
        ]);
    succeeds(clippy.args(["--", "--deny", "warnings"]))
}
