//! `nobypass completions` and `nobypass man`: both are made from the command line's own definition.

use std::io;
use std::path::PathBuf;

use clap::Command;
use clap_complete::Shell;

use crate::cli::exit::{Exit, fail, print};

/// Arguments of `completions`.
#[derive(Debug, clap::Args)]
pub struct Completions {
    /// Which shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Arguments of `man`.
#[derive(Debug, clap::Args)]
pub struct Man {
    /// Directory for the pages, one for each command; it must exist
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Prints a shell's completion script.
pub fn completions(args: &Completions, command: &Command) -> Exit {
    // What is hidden from the help is offered by no shell either.
    let shown = command.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let mut command = Command::new("nobypass").args(command.get_arguments().cloned()).subcommands(shown);
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "nobypass", &mut script);
    print(&String::from_utf8_lossy(&script))
}

/// Writes the man pages.
pub fn man(args: &Man, command: Command) -> Exit {
    match write_pages(&args.dir, command) {
        Ok(()) => Exit::Ok,
        Err(error) => {
            let exit = match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Exit::Usage,
                io::ErrorKind::PermissionDenied => Exit::NoPermission,
                _ => Exit::Failed,
            };
            fail(exit, &format!("cannot write man pages into {}: {error}", args.dir.display()))
        }
    }
}

fn write_pages(dir: &std::path::Path, command: Command) -> io::Result<()> {
    // Sub-commands get their full names: nobypass-cni-status.
    clap_mangen::generate_to(command.disable_help_subcommand(true), dir)
}
