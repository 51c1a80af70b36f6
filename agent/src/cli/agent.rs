//! `nobypass agent`.

use crate::app;
use crate::cli::cni::run::HalfArgs;
use crate::cli::exit::{Exit, fail};
use crate::config::Config;

/// Arguments of `agent`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    config: Config,
    #[command(flatten, next_help_heading = "CNI configuration")]
    cni: HalfArgs,
}

/// Runs the agent until it is told to stop.
pub fn run(args: &Args) -> Exit {
    let cni = match args.cni.settings() {
        Ok(cni) => cni,
        Err((exit, message)) => return fail(exit, &message),
    };
    match app::run(&args.config, cni) {
        Ok(()) => Exit::Ok,
        Err(error) => fail(error.exit(), &error.to_string()),
    }
}
