//! `nobypass cleanup`: detaches the programs and removes the pins; on demand takes back what the gate said of nodes.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use crate::bpf::pins::{DEFAULT_DIR, PinDir};
use crate::bpf::{BpfError, Maps};
use crate::cgroup::root::{RootOptions, find};
use crate::cli::exit::{Exit, fail, print};
use crate::cluster;
use crate::node::desired::TAINT;
use crate::node::withdraw::{Withdrawn, withdraw};
use crate::probe::client::remove_left_cgroup;

/// Arguments of `cleanup`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Directory of the pins, on a BPF file system
    #[arg(long, env = "NOBYPASS_BPF_DIR", value_name = "DIR", default_value = DEFAULT_DIR)]
    bpf_dir: PathBuf,
    /// Remove condition and label of nobypass from this node's object in the cluster too; may be given several times, and
    /// on any machine. Its agent must be gone, or it says them again. Taints are left alone
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    node: Vec<String>,
    /// How --node reaches the API server [default: the pod's service account]
    #[arg(long, env = "NOBYPASS_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

/// Removes what the agent left. Refused while an agent runs here.
pub fn run(args: &Args) -> Exit {
    match kernel(args) {
        Exit::Ok if !args.node.is_empty() => nodes(args),
        exit => exit,
    }
}

/// All of them, also after one that failed.
fn nodes(args: &Args) -> Exit {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(Exit::Failed, &format!("cannot start the runtime: {error}")),
    };
    runtime.block_on(async {
        let client = match cluster::connect(args.kubeconfig.as_deref()).await {
            Ok(client) => client,
            Err(error) => return fail(error.exit(), &error.to_string()),
        };
        let mut exit = Exit::Ok;
        for name in &args.node {
            let ended = match withdraw(&client, name).await {
                Ok(done) => print(&shown(name, &done)),
                Err(error) => fail(Exit::Failed, &error.to_string()),
            };
            exit = if exit == Exit::Ok { ended } else { exit };
        }
        exit
    })
}

fn shown(name: &str, done: &Withdrawn) -> String {
    let Withdrawn { label, condition, taints } = done;
    let gone = match (label, condition) {
        (true, true) => "removed label and condition",
        (true, false) => "removed the label",
        (false, true) => "removed the condition",
        (false, false) => "nothing to do",
    };
    let mut text = format!("node {name}: {gone}\n");
    for key in taints.iter().filter(|key| *key == TAINT) {
        text.push_str(&format!(
            "node {name}: the taint {key} stays, and no agent will remove it: take it out of what makes nodes, then \
             `kubectl taint node {name} {key}-`\n"
        ));
    }
    text
}

fn kernel(args: &Args) -> Exit {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_of_a_node() {
        let foreign = "node.kubernetes.io/unreachable".to_owned();
        let done = Withdrawn { label: true, condition: true, taints: vec![foreign, TAINT.to_owned()] };
        let text = shown("n1", &done);
        assert!(text.starts_with("node n1: removed label and condition\n"), "{text}");
        assert!(text.contains(&format!("kubectl taint node n1 {TAINT}-")) && !text.contains("unreachable"));
        assert_eq!(shown("n1", &Withdrawn::default()), "node n1: nothing to do\n");
    }
}
