//! `cargo xtask test`: runs the tiers that this machine can run and counts what happened.

use std::io::{self, BufRead as _, BufReader, Read, Write as _};
use std::process::Stdio;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::exec::{cargo, in_ci, shown, succeeds};
use crate::setup;
use crate::tally::{Libtest, Tally};
use crate::tier::{TIERS, Tier, invocations};
use crate::workspace::Workspace;

/// How long to wait for more output when cargo itself has ended.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

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
        if let Err(lacking) = setup::ensure(tier.wishes) {
            println!("== {}: some of its tests cannot run:\n{lacking}", tier.name);
            total += if in_ci() { Tally::FAILED } else { Tally::SKIPPED };
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
pub fn build_bins() -> Result<bool> {
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
    command.args(args).envs(setup::test_assets()).stdout(Stdio::piped());
    let name = shown(&command);
    println!("   {name}");
    let mut child = command.spawn().with_context(|| format!("cannot run `{name}`"))?;
    let lines = read_lines(child.stdout.take().context("the child has no stdout")?);
    let mut counter = Libtest::default();
    let mut ended = true;
    let mut status = None;
    loop {
        match lines.recv_timeout(LAST_OUTPUT) {
            Ok(line) => {
                io::stdout().write_all(&line).context("cannot write to stdout")?;
                counter.line(&String::from_utf8_lossy(&line));
                ended = line.ends_with(b"\n");
            }
            Err(RecvTimeoutError::Disconnected) => break,
            // The end of the output would not come while a process that a test forgot holds it open.
            Err(RecvTimeoutError::Timeout) if status.is_some() => {
                println!("== the tests have ended, but something that they started still runs");
                break;
            }
            Err(RecvTimeoutError::Timeout) => status = child.try_wait().context("cannot wait for cargo")?,
        }
    }
    // A test program that died stopped in the middle of a line.
    if !ended {
        println!();
    }
    let status = child.wait().with_context(|| format!("cannot wait for `{name}`"))?;
    Ok(counter.finish(status.success()))
}

/// Reads in a thread of its own, which ends with the output.
pub fn read_lines(output: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut reader = BufReader::new(output);
        loop {
            let mut line = Vec::new();
            match reader.read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) if sender.send(line).is_err() => return,
                Ok(_) => {}
            }
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_as_they_are() {
        let lines: Vec<_> = read_lines(&b"a\n\xff\nend"[..]).iter().collect();
        assert_eq!(lines, [&b"a\n"[..], b"\xff\n", b"end"]);
    }

    #[test]
    fn a_tier_that_cannot_run_is_skipped_but_fails_in_ci() {
        assert_eq!(skipped(&TIERS[2], "not root", false), Tally::SKIPPED);
        assert_eq!(skipped(&TIERS[2], "not root", true), Tally::FAILED);
    }
}
