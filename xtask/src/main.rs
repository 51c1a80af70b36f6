//! Set-up, demo, tests and checks of nobypass: `cargo xtask --help`.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool talks to its user")]

mod bench;
mod bpf;
mod ci;
mod demo;
mod deploy;
mod exec;
mod fuzz;
mod image;
mod lint;
mod machine;
mod process;
mod rules;
mod setup;
mod snapshot;
mod tally;
mod test;
mod tier;
mod vm;
mod workspace;

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::{ExitCode, Stdio};

use anyhow::{Context as _, Result};
use clap::builder::PossibleValuesParser;
use clap::{Parser, Subcommand};

use tally::Tally;

/// Everything that is done with this repository: get it ready, try it, test it.
///
/// Start with `cargo xtask demo`; it installs what it needs.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask", arg_required_else_help = true)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Install what building, testing and the demo need; what is there is left alone
    ///
    /// Tools for the eBPF build go into NOBYPASS_TOOLCHAIN_DIR (default: nobypass/bpf-toolchain in the user's
    /// cache directory), programs from Go modules beside it where Go is. System packages are installed only as root and where apt-get exists; otherwise each
    /// missing one is named with what to do. Exit code 0: all there; 1: something is missing.
    Setup {
        /// Only these: tools, packages, or names as the command prints them
        #[arg(long, value_name = "NAME", value_delimiter = ',', hide_possible_values = true,
              value_parser = PossibleValuesParser::new(setup::only_names()))]
        only: Vec<String>,
        /// Only look, install nothing
        #[arg(long)]
        check: bool,
    },
    /// Show nobypass at work on a private node on this machine (as root, or by sudo)
    Demo {
        /// For the demo itself; `cargo xtask demo -- --help` shows what there is
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Run the tests that this machine can run
    ///
    /// Tiers that it cannot run are skipped with the reason; with CI=true that is a failure. The last line is
    /// `N passed, N failed`, with `, N skipped` if tiers were skipped or tests ignored. Exit code 1: something
    /// failed, or nothing ran.
    #[command(after_help = tier::help())]
    Test {
        /// Only these tiers [default: all]
        #[arg(long, value_name = "TIER", value_delimiter = ',', hide_possible_values = true,
              value_parser = PossibleValuesParser::new(tier::TIERS.iter().map(|tier| tier.name)))]
        tier: Vec<String>,
        /// For the test programs: part of a test's name, `--nocapture`, ...
        #[arg(last = true)]
        filter: Vec<String>,
    },
    /// Measure what nobypass costs on this machine
    #[command(after_help = bench::help())]
    Bench {
        /// Only these [default: all]
        #[arg(value_name = "NAME", hide_possible_values = true,
              value_parser = PossibleValuesParser::new(bench::names()))]
        names: Vec<String>,
        /// Write the figures into README.md; rows of benchmarks that do not run stay
        #[arg(long)]
        readme: bool,
        /// For the benchmark itself
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Build the agent's container image, an OCI archive around one static program; no container engine is needed
    ///
    /// The same commit and tool-chain give the same bytes. Fails if the image gets larger than 20 MB.
    Image(image::Args),
    /// Feed generated input to parsers and planners, guided by coverage
    #[command(after_help = fuzz::help())]
    Fuzz {
        /// Only these targets [default: all]
        #[arg(value_name = "TARGET", hide_possible_values = true,
              value_parser = PossibleValuesParser::new(fuzz::TARGETS.iter().map(|target| target.name)))]
        targets: Vec<String>,
        /// How long each target runs
        #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
        seconds: u32,
        /// For libFuzzer: files to try again, `-jobs=2`, ...
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Render deploy/manifests from deploy/chart
    Render {
        /// Write nothing; check chart, manifests and alerts, as `lint` does
        #[arg(long)]
        check: bool,
    },
    /// Run the kernel tests on other kernels, in small virtual machines with software emulation
    ///
    /// The kernels are Debian's for cloud machines, unpacked below NOBYPASS_TOOLCHAIN_DIR and never installed. One that
    /// cannot be had is skipped with its name; with CI=true that is a failure. It takes no root.
    Vm {
        /// Only these series, as 6.12, and `newest` [default: 5.10, 6.1, 6.12, newest]
        #[arg(long, value_name = "SERIES", value_delimiter = ',', value_parser = vm::series)]
        kernel: Vec<String>,
        /// How much runs there
        #[arg(long, value_enum, default_value_t = vm::Level::Object)]
        level: vm::Level,
        /// For the test programs: part of a test's name, `--nocapture`, ...
        #[arg(last = true)]
        filter: Vec<String>,
    },
    /// Check format, lints of both halves and this repository's own rules
    Lint,
    /// All that a change has to pass: setup, lint, test, demo, and nothing left behind on the machine
    Ci,
}

fn main() -> ExitCode {
    if fuzz::is_wrapper() {
        return fuzz::wrap();
    }
    match run(Args::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Setup { only, check } => {
            let ready = setup::run(&only, check)?;
            Ok(if ready { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Command::Demo { args } => {
            let error = demo::prepare(&args)?.stdin(Stdio::inherit()).exec();
            Err(error).context("cannot start the demo")
        }
        Command::Test { tier, filter } => Ok(end(counted(test::run(&tier, &filter)))),
        Command::Bench { names, readme, args } => Ok(end(counted(bench::run(&names, &args, readme)))),
        Command::Render { check: true } => Ok(end(counted(deploy::check()))),
        Command::Render { check: false } => deploy::render().map(|()| ExitCode::SUCCESS),
        Command::Image(args) => image::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Fuzz { targets, seconds, args } => Ok(end(counted(fuzz::run(&targets, seconds, &args)))),
        Command::Vm { kernel, level, filter } => Ok(end(counted(vm::run(&kernel, level, &filter, false)))),
        Command::Lint => Ok(end(counted(lint::run()))),
        Command::Ci => Ok(end(ci::run())),
    }
}

/// A run that could not even be made has failed.
fn counted(result: Result<Tally>) -> Tally {
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        Tally::FAILED
    })
}

/// The last line of every run that counts.
fn end(tally: Tally) -> ExitCode {
    println!("{tally}");
    tally.exit_code()
}
