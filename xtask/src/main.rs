//! Set-up, demo, tests and checks of nobypass: `cargo xtask --help`.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool talks to its user")]

mod exec;
mod setup;

use std::process::ExitCode;

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{Parser, Subcommand};

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
    /// cache directory). System packages are installed only as root and where apt-get exists; otherwise each
    /// missing one is named with what to do. Exit code 0: all there; 1: something is missing.
    Setup {
        /// Only these: tools, packages, or names as the command prints them
        #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(setup::only_names()))]
        only: Vec<String>,
        /// Only look, install nothing
        #[arg(long)]
        check: bool,
    },
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<ExitCode> {
    match &args.command {
        Command::Setup { only, check } => {
            let ready = setup::run(only, *check)?;
            Ok(if ready { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}
