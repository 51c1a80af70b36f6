//! `cargo xtask bench`: what it costs, in figures.

use anyhow::Result;

use crate::exec::{cargo, succeeds};
use crate::machine;
use crate::setup::{self, BUILD, KERNEL, Need};
use crate::tally::Tally;

/// One benchmark. A new one is a new row.
struct Bench {
    /// On the command line; with `_` for `-` the name of the target.
    name: &'static str,
    about: &'static str,
    features: &'static str,
    needs: &'static [&'static [Need]],
    ruled_out: fn() -> Option<String>,
}

const BENCHES: [Bench; 5] = [
    Bench {
        name: "kernel-cost",
        about: "ns a packet that the eBPF programs cost over one that does nothing; needs root",
        features: "kernel-tests",
        needs: &[BUILD, KERNEL],
        ruled_out: machine::cannot_run_kernel_tests,
    },
    Bench {
        name: "enforce-latency",
        about: "how long a refused connect() and a question to a pod take, beside what is promised; needs root",
        features: "kernel-tests",
        needs: &[BUILD, KERNEL],
        ruled_out: machine::cannot_run_kernel_tests,
    },
    Bench {
        name: "agent-memory",
        about: "resident memory and CPU time of an agent with nothing to do; needs root",
        features: "kernel-tests",
        needs: &[BUILD, KERNEL],
        ruled_out: machine::cannot_run_kernel_tests,
    },
    Bench {
        name: "cni-plan",
        about: "ns to plan the change of a CNI config file",
        features: "",
        needs: &[BUILD],
        ruled_out: || None,
    },
    Bench {
        name: "cni-latency",
        about: "ms from another writer's change to the patched CNI config; beside another installer if one is named",
        features: "",
        needs: &[BUILD],
        ruled_out: || None,
    },
];

/// What the command line takes.
pub fn names() -> [&'static str; BENCHES.len()] {
    BENCHES.map(|bench| bench.name)
}

/// `name  about` of each, for `--help`.
pub fn help() -> String {
    let lines = BENCHES.iter().map(|bench| format!("\n  {:<15} {}", bench.name, bench.about));
    format!("Benchmarks:{}", lines.collect::<String>())
}

/// Runs the named ones, or all; `args` goes to them as it is.
pub fn run(names: &[String], args: &[String]) -> Result<Tally> {
    let mut total = Tally::default();
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
        let target = bench.name.replace('-', "_");
        let mut command = cargo();
        command.args(["bench", "--package", "nobypass", "--features", bench.features, "--bench", &target]);
        total += Tally::of(succeeds(command.arg("--").args(args))?);
    }
    Ok(total)
}
