//! `nobypass mode`: shows or changes the node's mode, with or without an agent.

use hyper::Method;
use nobypass_common::ids::Mode;

use crate::bpf::Maps;
use crate::bpf::pins::PinDir;
use crate::cli::client::{Place, read, runtime, send};
use crate::cli::exit::{Exit, fail, note, print};
use crate::detect::verdict::mode_label;
use crate::server::BY_POLICY;

/// Arguments of `mode`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    place: Place,
    /// The new mode of the node, or `policy` for what the policy says; without it, the present one is shown. It goes
    /// before the policy file's `mode` and --mode until the policy file changes or the agent starts anew; namespaces
    /// and pods with a mode of their own keep it
    #[arg(value_enum)]
    mode: Option<Wanted>,
}

/// A mode, or what the policy says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Wanted {
    /// Judge nothing
    Off,
    /// Count and report bypasses, let them pass
    Audit,
    /// Count, report and drop bypasses
    Enforce,
    /// What the policy file or --mode says
    Policy,
}

impl Wanted {
    const fn mode(self) -> Option<Mode> {
        match self {
            Self::Off => Some(Mode::Off),
            Self::Audit => Some(Mode::Audit),
            Self::Enforce => Some(Mode::Enforce),
            Self::Policy => None,
        }
    }
}

/// Shows or changes the mode: the next packet obeys.
pub fn run(args: &Args) -> Exit {
    let method = if args.mode.is_some() { Method::PUT } else { Method::GET };
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(error) => return fail(Exit::Failed, &format!("cannot start: {error}")),
    };
    let name = args.mode.map_or("", |wanted| wanted.mode().map_or(BY_POLICY, Mode::label));
    let asked = runtime
        .block_on(async { read(send(&args.place.socket, method, "/v1/mode", name.to_owned()).await?).await });
    match asked {
        Ok(text) => {
            // The mode alone, for scripts; what else is to be known, for people.
            let (mode, more) = text.split_once('\n').unwrap_or((&text, ""));
            more.lines().for_each(note);
            print(&format!("{mode}\n"))
        }
        Err(error) if error.is_absent() => {
            let Some(wanted) = args.mode else { return show(&args.place) };
            let dir = PinDir::new(&args.place.bpf_dir);
            let Some(mode) = wanted.mode() else {
                return fail(Exit::Unavailable, "no agent runs: nobody knows what the policy says");
            };
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
