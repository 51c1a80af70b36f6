//! `nobypass mode`: shows or changes the node's mode, with or without an agent.

use clap::ValueEnum as _;
use hyper::Method;
use nobypass_common::ids::Mode;

use crate::bpf::Maps;
use crate::bpf::pins::PinDir;
use crate::cli::client::{Place, read, runtime, send};
use crate::cli::exit::{Exit, fail, print};
use crate::config::ModeFlag;
use crate::detect::verdict::mode_label;

/// Arguments of `mode`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    place: Place,
    /// The new mode; without it, the present one is shown. An agent that starts sets its own --mode again
    #[arg(value_enum)]
    mode: Option<ModeFlag>,
}

/// Shows or changes the mode: the next packet obeys.
pub fn run(args: &Args) -> Exit {
    let Some(flag) = args.mode else { return show(&args.place) };
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(error) => return fail(Exit::Failed, &format!("cannot start: {error}")),
    };
    let name = flag.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    let asked = runtime
        .block_on(async { read(send(&args.place.socket, Method::PUT, "/v1/mode", name).await?).await });
    match asked {
        Ok(text) => print(&text),
        Err(error) if error.is_absent() => {
            let dir = PinDir::new(&args.place.bpf_dir);
            let mode = Mode::from(flag);
            match Maps::open(&dir).and_then(|mut maps| maps.set_mode(mode)) {
                Ok(()) => print(&format!("{} (no agent runs: the programs obey)\n", mode.label())),
                Err(error) => fail(error.exit(), &error.to_string()),
            }
        }
        Err(error) => fail(error.exit(), &error.to_string()),
    }
}

fn show(place: &Place) -> Exit {
    match Maps::open(&PinDir::new(&place.bpf_dir)).and_then(|maps| maps.config()) {
        Ok(config) => print(&format!("{}\n", mode_label(config.mode))),
        Err(error) => fail(error.exit(), &error.to_string()),
    }
}
