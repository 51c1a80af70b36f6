//! `nobypass agent`.

use crate::app;
use crate::cli::exit::{Exit, fail};
use crate::config::Config;

/// Runs the agent until it is told to stop.
pub fn run(config: &Config) -> Exit {
    match app::run(config) {
        Ok(()) => Exit::Ok,
        Err(error) => fail(error.exit(), &error.to_string()),
    }
}
