//! The command line: one file a sub-command, each a thin shell around a module.

mod agent;
mod cleanup;
mod client;
mod cni;
mod events;
pub mod exit;
mod explain;
mod manual;
mod mode;
mod policy;
mod preflight;
mod probe;
mod status;
mod table;
mod validate;
mod variables;

use std::env::args_os;
use std::ffi::OsString;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use exit::Exit;

/// Keeps service-mesh pods from talking around their proxy.
#[derive(Debug, Parser)]
#[command(name = "nobypass", version, max_term_width = 110, after_help = exit::HELP)]
#[command(override_usage = "nobypass [COMMAND]")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// How a command prints its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// For people
    #[default]
    Table,
    /// For machines (see deploy/json.md)
    Json,
}

/// A value as indented JSON and a newline.
fn json<T: serde::Serialize>(value: &T) -> String {
    match serde_json::to_string_pretty(value) {
        Ok(text) => text + "\n",
        // Our own types have string keys only.
        Err(error) => format!("{{\"error\":\"{error}\"}}\n"),
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the agent of this node
    #[command(after_help = exit::AGENT)]
    Agent(Box<agent::Args>),
    /// Show this node's pods and what their connections do; this is what `nobypass` alone does too
    #[command(after_help = exit::STATUS)]
    Status(status::Args),
    /// Show bypasses as they happen
    #[command(after_help = exit::EVENTS)]
    Events(events::Args),
    /// Explain one pod: why its verdict is what it is, and what to do
    #[command(after_help = exit::EXPLAIN)]
    Explain(explain::Args),
    /// Show or change what happens to a bypass: off, audit or enforce
    #[command(after_help = exit::MODE)]
    Mode(mode::Args),
    /// Check a policy file, or show the policy of this node
    Policy(policy::Policy),
    /// Check what this node has and lacks, and say what to do
    #[command(after_help = exit::PREFLIGHT)]
    Preflight(preflight::Args),
    /// Ask a pod's network whether a new connection would be redirected
    #[command(after_help = exit::PROBE)]
    Probe(probe::Args),
    /// Ask pods' networks (run by the agent)
    #[command(name = crate::probe::helper::COMMAND, hide = true)]
    ProbeHelper(crate::probe::helper::Args),
    /// Detach the programs and remove the pins (an agent that ends leaves them in effect)
    #[command(after_help = exit::CLEANUP)]
    Cleanup(cleanup::Args),
    /// Prove that the hooks see a connection (run by the agent)
    #[command(name = crate::bpf::selftest::CHILD, hide = true)]
    Canary,
    /// Look at, patch and clean up the node's CNI configuration
    Cni(cni::Cni),
    /// Prove from inside a pod that its connections are redirected (an init container; no privileges)
    #[command(after_help = exit::VALIDATE)]
    Validate(validate::Args),
    /// Print a shell's completion script
    Completions(manual::Completions),
    /// Write the man pages into a directory
    #[command(after_help = exit::MAN)]
    Man(manual::Man),
    /// Print the version
    Version,
}

/// Parses the process's arguments and runs the sub-command.
pub fn main() -> Exit {
    let command = variables::without_empty(Cli::command());
    // Alone it is the question that is asked most.
    let status = [OsString::from("nobypass"), OsString::from("status")];
    let args: Vec<OsString> = if args_os().len() < 2 { status.into() } else { args_os().collect() };
    let parsed =
        command.clone().try_get_matches_from(args).and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            let exit = exit::usage(&error);
            if let Some(name) = variables::at_fault(command, &error) {
                exit::note(&format!("the value comes from the environment variable {name}"));
            }
            return exit;
        }
    };
    match cli.command {
        Command::Agent(args) => agent::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Events(args) => events::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Mode(args) => mode::run(&args),
        Command::Policy(args) => policy::run(&args),
        Command::Cleanup(args) => cleanup::run(&args),
        Command::Preflight(args) => preflight::run(&args),
        Command::Probe(args) => probe::run(&args),
        Command::ProbeHelper(args) => match crate::probe::helper::run(&args) {
            Ok(()) => Exit::Ok,
            Err(error) => exit::fail(Exit::Failed, &format!("probe-helper: {error}")),
        },
        Command::Canary => {
            crate::bpf::selftest::child();
            Exit::Ok
        }
        Command::Cni(command) => cni::main(&command),
        Command::Validate(args) => validate::run(&args),
        Command::Completions(args) => manual::completions(&args, &Cli::command()),
        Command::Man(args) => manual::man(&args, Cli::command()),
        Command::Version => exit::print(&format!("nobypass {}\n", env!("CARGO_PKG_VERSION"))),
    }
}
