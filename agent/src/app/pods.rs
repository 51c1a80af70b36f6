//! Where facts about pods come from: one source or two, joined.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::{Ended, QUEUE};
use crate::cli::exit::Exit;
use crate::cluster::{self, ClusterError};
use crate::config::{Config, PodsFlag};
use crate::pods::join::{Join, Origin};
use crate::pods::model::Wanted;
use crate::pods::source::cri::{CriOptions, CriSource};
use crate::pods::source::kube::{KubeOptions, KubeSource};
use crate::pods::source::metrics::{Source, States};
use crate::pods::source::{Nudge, PodUpdate};
use crate::policy::Snapshot;
use crate::server::Health;
use crate::sys::clock::boot_time_ns;

/// Where every pod with a service account finds its token.
const TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

/// Why the sources cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum PodsError {
    /// The API has the pods of all nodes.
    #[error(
        "the pods of which node? Give --node-name (in a DaemonSet: the variable NOBYPASS_NODE_NAME from the field \
         spec.nodeName), or --pods=cri to ask the container runtime alone"
    )]
    NoNodeName,
    /// See the kind.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

impl PodsError {
    /// The exit code.
    pub fn exit(&self) -> Exit {
        match self {
            Self::NoNodeName => Exit::Usage,
            Self::Cluster(error) => error.exit(),
        }
    }
}

/// The sources to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The container runtime.
    runtime: bool,
    /// The API server, for the pods of this node.
    api: Option<Box<str>>,
}

impl Plan {
    /// This node's name, where there is a cluster.
    pub fn node(&self) -> Option<&str> {
        self.api.as_deref()
    }

    /// Whether the container runtime is asked.
    pub(super) fn runtime(&self) -> bool {
        self.runtime
    }
}

/// What the flags ask for on this machine.
///
/// # Errors
/// [`PodsError::NoNodeName`].
pub fn plan(config: &Config) -> Result<Plan, PodsError> {
    plan_of(config.pods, config.node_name.as_deref(), config.kubeconfig.is_some())
}

/// As [`plan`], of the flags that matter.
///
/// # Errors
/// As there.
pub fn plan_of(flag: PodsFlag, node: Option<&str>, kubeconfig: bool) -> Result<Plan, PodsError> {
    let in_cluster = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() && Path::new(TOKEN).exists();
    decide(flag, node, kubeconfig || in_cluster)
}

/// `cluster`: there is a way to reach one.
fn decide(flag: PodsFlag, node: Option<&str>, cluster: bool) -> Result<Plan, PodsError> {
    let (runtime, api) = match flag {
        PodsFlag::Auto => (true, cluster),
        PodsFlag::Cri => (true, false),
        PodsFlag::Kube => (false, true),
        PodsFlag::Both => (true, true),
    };
    let api = match (api, node) {
        (false, _) => None,
        (true, Some(node)) => Some(node.into()),
        (true, None) => return Err(PodsError::NoNodeName),
    };
    Ok(Plan { runtime, api })
}

/// The client that the plan needs.
///
/// # Errors
/// [`PodsError::Cluster`].
pub async fn connect(plan: &Plan, config: &Config) -> Result<Option<Client>, PodsError> {
    match plan.api {
        None => Ok(None),
        Some(_) => Ok(Some(cluster::connect(config.kubeconfig.as_deref()).await?)),
    }
}

/// Starts the sources and what joins them. Returns their states.
pub(super) fn spawn(
    tasks: &mut JoinSet<Ended>,
    plan: &Plan,
    client: Option<&Client>,
    endpoint: Option<&PathBuf>,
    wanted: &watch::Receiver<Wanted>,
    nudges: mpsc::Receiver<Nudge>,
    out: mpsc::Sender<PodUpdate>,
) -> States {
    let mut states = States::default();
    let (from_runtime, runtime) = mpsc::channel(QUEUE);
    let (from_api, api) = mpsc::channel(QUEUE);
    if plan.runtime {
        let options = CriOptions { endpoint: endpoint.cloned(), ..CriOptions::new(wanted.clone()) };
        let (source, state) = CriSource::new(options);
        states.cri = Some(state);
        tasks.spawn(async move {
            source.run(nudges, from_runtime).await;
            ("pods", Ok(()))
        });
    }
    if let (Some(node), Some(client)) = (&plan.api, client.cloned()) {
        let (source, state) = KubeSource::new(KubeOptions::new(node, wanted.clone()));
        states.kube = Some(state);
        tasks.spawn(async move {
            source.run(client, from_api).await;
            ("pods of the API", Ok(()))
        });
    }
    tasks.spawn(join(runtime, api, out));
    states
}

/// Passes on what follows from both sources' words. A source that does not exist has closed its channel.
async fn join(
    mut runtime: mpsc::Receiver<PodUpdate>,
    mut api: mpsc::Receiver<PodUpdate>,
    out: mpsc::Sender<PodUpdate>,
) -> Ended {
    let mut join = Join::new(boot_time_ns());
    loop {
        let (origin, update) = tokio::select! {
            Some(update) = runtime.recv() => (Origin::Runtime, update),
            Some(update) = api.recv() => (Origin::Api, update),
            else => return ("join", Ok(())),
        };
        for update in join.update(origin, update) {
            if out.send(update).await.is_err() {
                return ("join", Ok(()));
            }
        }
    }
}

/// Tells readiness what the sources do. One that is away while the other one speaks is only mentioned.
pub(super) async fn watch_sources(
    mut states: States,
    mut snapshots: watch::Receiver<Snapshot>,
    health: Arc<Health>,
) -> Ended {
    loop {
        let synced = snapshots.borrow_and_update().synced;
        let sources = states.read();
        let speaking = sources.iter().any(|source| source.connected);
        if speaking && synced {
            health.done("pods");
        } else {
            let reasons: Vec<String> = sources.iter().map(Source::pending).collect();
            health.wait_for("pods", reasons.join("; "));
        }
        for source in &sources {
            let key = if source.name == "kube" { "pods of the API" } else { "pods of the runtime" };
            if source.connected || !speaking {
                health.note_done(key);
            } else {
                health.note(key, source.pending());
            }
        }
        tokio::select! {
            changed = states.changed() => if !changed { return ("pods", Ok(())) },
            changed = snapshots.changed() => if changed.is_err() { return ("policy", Ok(())) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_and_machine_decide_on_the_sources() {
        use PodsFlag::{Auto, Both, Cri, Kube};
        let plan = |runtime, api: Option<&str>| Plan { runtime, api: api.map(Into::into) };
        for (flag, node, cluster, wanted) in [
            (Auto, None, false, Ok(plan(true, None))),
            (Auto, Some("n1"), false, Ok(plan(true, None))),
            (Auto, Some("n1"), true, Ok(plan(true, Some("n1")))),
            (Auto, None, true, Err(())),
            (Cri, Some("n1"), true, Ok(plan(true, None))),
            (Cri, None, true, Ok(plan(true, None))),
            (Kube, Some("n1"), true, Ok(plan(false, Some("n1")))),
            (Kube, None, true, Err(())),
            (Both, Some("n1"), false, Ok(plan(true, Some("n1")))),
            (Both, None, false, Err(())),
        ] {
            let decided = decide(flag, node, cluster);
            if let Err(error) = &decided {
                assert!(error.to_string().contains("NOBYPASS_NODE_NAME") && error.exit() == Exit::Usage);
            }
            assert_eq!(decided.map_err(|_| ()), wanted, "{flag:?} {node:?} {cluster}");
        }
    }
}
