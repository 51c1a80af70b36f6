//! `nobypass preflight`: what this machine has and lacks, and what to do.

use std::path::PathBuf;

use crate::bpf::features::{Check, Level, checks};
use crate::bpf::pins::DEFAULT_DIR;
use crate::cli::exit::{Exit, print};
use crate::cli::table::Table;
use crate::cli::{Format, json};

/// Arguments of `preflight`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Directory of the pins, on a BPF file system
    #[arg(long, env = "NOBYPASS_BPF_DIR", default_value = DEFAULT_DIR)]
    bpf_dir: PathBuf,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// Runs all checks; exits 69 if nobypass cannot run here.
pub fn run(args: &Args) -> Exit {
    let checks = checks(&args.bpf_dir, None);
    let text = match args.output {
        Format::Json => json(&checks),
        Format::Table | Format::Wide => table(&checks),
    };
    match print(&text) {
        Exit::Ok if checks.iter().any(|check| check.level == Level::Fail) => Exit::Unavailable,
        exit => exit,
    }
}

fn table(checks: &[Check]) -> String {
    let mut table = Table::new(&["CHECK", "", "FOUND"]);
    let mut remedies = String::new();
    for Check { name, level, found, remedy } in checks {
        let level = match level {
            Level::Pass => "pass",
            Level::Warn => "warn",
            Level::Fail => "FAIL",
        };
        table.row([name.as_str(), level, found.as_str()]);
        if !remedy.is_empty() {
            remedies.push_str(&format!("{level} {name}: {remedy}\n"));
        }
    }
    let text = table.to_string();
    if remedies.is_empty() { text } else { format!("{text}\n{remedies}") }
}
