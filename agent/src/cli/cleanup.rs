//! `nobypass cleanup`: detaches the programs and removes the pins.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use crate::bpf::pins::{DEFAULT_DIR, PinDir};
use crate::bpf::{BpfError, Maps};
use crate::cgroup::root::{RootOptions, find};
use crate::cli::exit::{Exit, fail, print};
use crate::probe::client::remove_left_cgroup;

/// Arguments of `cleanup`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Directory of the pins, on a BPF file system
    #[arg(long, env = "NOBYPASS_BPF_DIR", value_name = "DIR", default_value = DEFAULT_DIR)]
    bpf_dir: PathBuf,
}

/// Removes what the agent left in the kernel. Refused while an agent runs.
pub fn run(args: &Args) -> Exit {
    let dir = PinDir::new(&args.bpf_dir);
    match fs::metadata(dir.base()) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return print(&format!("nothing to do: {} does not exist\n", dir.base().display()));
        }
        Err(source) => {
            let error = BpfError::Pin { what: "look at", path: dir.base().into(), source };
            return fail(error.exit(), &error.to_string());
        }
        Ok(_) => {}
    }
    // Elsewhere a directory that looks like ours is somebody else's.
    let lock = dir.check_on_bpffs().and_then(|()| dir.lock());
    match lock.and_then(|_lock| {
        remove_probes_cgroup(&dir);
        dir.remove_all()
    }) {
        Ok(pins) => print(&format!("removed {pins} pins: no program of nobypass is attached any more\n")),
        Err(error) => fail(error.exit(), &error.to_string()),
    }
}

/// An empty directory, which an agent that was killed left and which harms nobody: best effort.
fn remove_probes_cgroup(dir: &PinDir) {
    let parents =
        Maps::open(dir).and_then(|maps| maps.config()).map(|config| config.parents.map(|of| of.cgroup_id));
    if let (Ok(parents), Ok(root)) = (parents, find(&RootOptions::default())) {
        let parents: Vec<u64> = parents.into_iter().filter(|id| *id != 0).collect();
        let _ = remove_left_cgroup(&root.path, &parents);
    }
}
