//! `cargo xtask bench`: what it costs and what it holds, in figures.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::exec::{cargo, mark, repo_root, succeeds, unmark};
use crate::machine;
use crate::setup::{self, BUILD, KERNEL, Need};
use crate::tally::Tally;
use crate::test;

mod table;

/// One benchmark. A new one is a new row.
struct Bench {
    /// On the command line.
    name: &'static str,
    about: &'static str,
    run: Run,
    needs: &'static [&'static [Need]],
    ruled_out: fn() -> Option<String>,
}

/// What is run.
#[derive(Clone, Copy)]
enum Run {
    /// The target with `_` for `-` in its name, with this feature.
    Target(&'static str),
    /// Tests of the kernel tier that tell figures: their names contain this; with these variables.
    Tests(&'static str, Variables),
}

type Variables = &'static [(&'static str, &'static str)];

const BENCHES: [Bench; 11] = [
    kernel(
        "first-packet",
        "connections out of brand-new pods, of 40,000",
        Run::Tests("no_first_packet_of", &[]),
    ),
    // 200 kills, 500 upgrades in place, 20 of the maps' layout.
    kernel(
        "upgrade",
        "packets out while agents are killed and upgraded under load",
        Run::Tests("under_load", &[("NOBYPASS_TEST_CYCLES", "10")]),
    ),
    // Three floods by two processes.
    kernel(
        "flood",
        "bypasses counted in a flood of a million, to the unit",
        Run::Tests("a_flood", &[("NOBYPASS_TEST_FLOOD", "166667")]),
    ),
    kernel(
        "kernel-cost",
        "ns a packet that the eBPF programs cost over one that does nothing",
        Run::Target("kernel-tests"),
    ),
    kernel(
        "connect-cost",
        "CPU time of connect and close, beside firewall rules in the same run",
        Run::Target("kernel-tests"),
    ),
    kernel("detection", "from a bypass to its counter and its line in the log", Run::Target("kernel-tests")),
    kernel(
        "agent-memory",
        "resident memory and CPU time of an agent with nothing to do",
        Run::Target("kernel-tests"),
    ),
    kernel(
        "start-up",
        "from the agent's start with 250 pods to all of them judged",
        Run::Target("kernel-tests"),
    ),
    kernel(
        "enforce-latency",
        "how long a refused connect() and a question to a pod take, beside what is promised",
        Run::Target("kernel-tests"),
    ),
    Bench {
        name: "cni-plan",
        about: "ns to plan the change of a CNI config file",
        run: Run::Target(""),
        needs: &[BUILD],
        ruled_out: || None,
    },
    Bench {
        name: "cni-latency",
        about: "ms from another writer's change to the patched CNI config; beside another installer if one is named",
        run: Run::Target(""),
        needs: &[BUILD],
        ruled_out: || None,
    },
];

/// One that needs root and what kernel tests need.
const fn kernel(name: &'static str, about: &'static str, run: Run) -> Bench {
    Bench { name, about, run, needs: &[BUILD, KERNEL], ruled_out: machine::cannot_run_kernel_tests }
}

/// What the command line takes.
pub fn names() -> [&'static str; BENCHES.len()] {
    BENCHES.map(|bench| bench.name)
}

/// `name  about` of each, for `--help`.
pub fn help() -> String {
    let lines = BENCHES.iter().map(|bench| format!("\n  {:<15} {}", bench.name, bench.about));
    format!("Benchmarks:{}", lines.collect::<String>())
}

/// Runs the named ones, or all; `args` goes to them as it is. With `readme`, the table there gets the new figures.
pub fn run(names: &[String], args: &[String], readme: bool) -> Result<Tally> {
    let figures = std::env::temp_dir().join(format!("nobypass-figures-{}", std::process::id()));
    mark("NOBYPASS_FIGURES", figures.display().to_string());
    let mut total = Tally::default();
    let mut told = Vec::new();
    for bench in
        BENCHES.iter().filter(|bench| names.is_empty() || names.iter().any(|name| name == bench.name))
    {
        println!("== {}: {}", bench.name, bench.about);
        let reason = (bench.ruled_out)()
            .or_else(|| setup::ensure(&bench.needs.concat()).err().map(|lacking| lacking.reason()));
        if let Some(reason) = reason {
            println!("== {}: skipped: {reason}", bench.name);
            total += Tally::SKIPPED;
            continue;
        }
        let ended = one(bench, args);
        let rows = table::rows(&figures).with_context(|| format!("the figures of {}", bench.name));
        // Nobody else reads it.
        let _ = fs::remove_file(&figures);
        total += ended?;
        told.push((bench.name, rows?));
    }
    if readme {
        write(&repo_root().join("README.md"), &told)?;
    }
    Ok(total)
}

fn one(bench: &Bench, args: &[String]) -> Result<Tally> {
    match bench.run {
        Run::Tests(filter, variables) => {
            let filter = [&[filter.to_owned(), "--nocapture".to_owned()], args].concat();
            for (name, value) in variables {
                mark(name, (*value).to_owned());
            }
            let ended = test::run(&["kernel".to_owned()], &filter);
            variables.iter().for_each(|(name, _)| unmark(name));
            ended
        }
        Run::Target(feature) => {
            // Traffic of its own profile.
            let built =
                succeeds(cargo().args(["build", "--release", "--package", "nobypass-testkit", "--bins"]))?;
            let target = bench.name.replace('-', "_");
            let mut command = cargo();
            command.args(["bench", "--package", "nobypass", "--features", feature, "--bench", &target]);
            Ok(Tally::of(built && succeeds(command.arg("--").args(args))?))
        }
    }
}

fn write(path: &Path, told: &[(&'static str, Vec<table::Row>)]) -> Result<()> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let new = table::replaced(&text, &names(), told).with_context(|| {
        format!("{} has no table between {} and {}", path.display(), table::BEGIN, table::END)
    })?;
    fs::write(path, new).with_context(|| format!("cannot write {}", path.display()))
}
