//! The command line: one file a sub-command, each a thin shell around a module.

mod cni;
pub mod exit;

use clap::{Parser, Subcommand};
use exit::Exit;

/// Keeps service-mesh pods from talking around their proxy.
#[derive(Debug, Parser)]
#[command(name = "nobypass", version, max_term_width = 110, after_help = exit::HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Look at, patch and clean up the node's CNI configuration
    Cni(cni::Cni),
    /// Print the version
    Version,
}

/// Parses the process's arguments and runs the sub-command.
pub fn main() -> Exit {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return exit::usage(&error),
    };
    match cli.command {
        Command::Cni(command) => cni::main(&command),
        Command::Version => exit::print(&format!("nobypass {}\n", env!("CARGO_PKG_VERSION"))),
    }
}
