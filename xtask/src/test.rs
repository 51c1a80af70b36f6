//! `cargo xtask test`: runs the tiers that this machine can run and counts what happened.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::process::Stdio;

use anyhow::{Context as _, Result};

use crate::exec::{cargo, in_ci, shown, succeeds};
use crate::setup;
use crate::tally::{Libtest, Tally};
use crate::tier::{TIERS, Tier, invocations};
use crate::workspace::Workspace;

/// Runs the named tiers, or all that have tests; `filter` goes to the test programs as it is.
pub fn run(names: &[String], filter: &[String]) -> Result<Tally> {
    let workspace = Workspace::read()?;
    let mut total = Tally::default();
    let mut bins: Option<bool> = None;
    for tier in TIERS.iter().filter(|tier| names.is_empty() || names.iter().any(|name| name == tier.name)) {
        let runs = invocations(tier, &workspace);
        println!("== {}: {}", tier.name, tier.about);
        if runs.is_empty() {
            println!("== {}: no test requires its feature, nothing to run", tier.name);
            continue;
        }
        let reason = (tier.ruled_out)()
            .or_else(|| setup::ensure(&tier.needs.concat()).err().map(|lacking| lacking.reason()));
        if let Some(reason) = reason {
            total += skipped(tier, &reason, in_ci());
            continue;
        }
        let tally = match bins {
            Some(built) => Ok(built),
            None => build_bins(),
        }
        .and_then(|built| {
            bins = Some(built);
            if built { run_tier(tier, &runs, filter) } else { Ok(Tally::FAILED) }
        })?;
        println!("== {}: {tally}", tier.name);
        total += tally;
    }
    Ok(total)
}

/// On a machine that is there to test, what cannot be tested is a failure.
fn skipped(tier: &Tier, reason: &str, ci: bool) -> Tally {
    let name = tier.name;
    if ci {
        println!("== {name}: FAILED, this machine cannot run it and CI is set: {reason}");
        Tally::FAILED
    } else {
        println!("== {name}: skipped: {reason}");
        Tally::SKIPPED
    }
}

/// Test targets of one package do not build another package's programs.
fn build_bins() -> Result<bool> {
    let built = succeeds(cargo().args([
        "build",
        "--package",
        "nobypass",
        "--package",
        "nobypass-testkit",
        "--bins",
    ]))?;
    if !built {
        println!("== the programs that the tests use do not build, see above");
    }
    Ok(built)
}

fn run_tier(tier: &Tier, runs: &[Vec<String>], filter: &[String]) -> Result<Tally> {
    let mut total = Tally::default();
    for run in runs {
        let mut args = vec!["test".to_owned(), "--no-fail-fast".to_owned()];
        args.extend_from_slice(run);
        args.push("--".into());
        args.extend(tier.threads.map(|threads| format!("--test-threads={threads}")));
        args.extend_from_slice(filter);
        total += cargo_test(&args)?;
    }
    Ok(total)
}

/// Passes the output through as it comes, counting on the way.
fn cargo_test(args: &[String]) -> Result<Tally> {
    let mut command = cargo();
    command.args(args).stdout(Stdio::piped());
    let line = shown(&command);
    println!("   {line}");
    let mut child = command.spawn().with_context(|| format!("cannot run `{line}`"))?;
    let mut counter = Libtest::default();
    if let Some(stdout) = child.stdout.take() {
        let mut reader = BufReader::new(stdout);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).context("cannot read what the tests print")? > 0 {
            io::stdout().write_all(&line).context("cannot write to stdout")?;
            counter.line(&String::from_utf8_lossy(&line));
            line.clear();
        }
    }
    let status = child.wait().with_context(|| format!("cannot wait for `{line}`"))?;
    Ok(counter.finish(status.success()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier_that_cannot_run_is_skipped_but_fails_in_ci() {
        assert_eq!(skipped(&TIERS[1], "not root", false), Tally::SKIPPED);
        assert_eq!(skipped(&TIERS[1], "not root", true), Tally::FAILED);
    }
}
