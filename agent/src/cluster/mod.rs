//! The connection to the Kubernetes API server, shared by everything that talks to it. Knows nothing of eBPF or CNI.

pub mod access;
pub mod error;
pub mod events;
pub mod watch;

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::cli::exit::Exit;

/// How long connecting may take.
const CONNECT: Duration = Duration::from_secs(5);
/// How long the server may say nothing. A watch is asked to end before (`timeoutSeconds`), so only a dead connection
/// meets it.
const SILENCE: Duration = Duration::from_secs(305);

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// Neither a service account nor a kubeconfig.
    #[error(
        "this is not a pod with a service account ({0}); give --kubeconfig FILE, or --pods=cri to do without a cluster"
    )]
    NoServiceAccount(Box<kube::config::InClusterError>),
    /// The kubeconfig cannot be used.
    #[error("cannot use the kubeconfig {path}: {source}")]
    Kubeconfig { path: PathBuf, source: Box<kube::config::KubeconfigError> },
    /// The TLS set-up is not valid.
    #[error("cannot set up a client for the API server: {0}")]
    Client(Box<kube::Error>),
}

impl ClusterError {
    /// The exit code.
    #[must_use]
    pub fn exit(&self) -> Exit {
        match self {
            Self::NoServiceAccount(_) | Self::Kubeconfig { .. } | Self::Client(_) => Exit::Usage,
        }
    }
}

/// A client for the API server: of the pod's service account, or what `kubeconfig` says. Sends nothing yet, and so
/// succeeds while the server is away.
///
/// # Errors
/// [`ClusterError`], each with what to do.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Client, ClusterError> {
    let mut config = match kubeconfig {
        None => Config::incluster().map_err(|error| ClusterError::NoServiceAccount(Box::new(error)))?,
        Some(path) => {
            let unusable = |source| ClusterError::Kubeconfig { path: path.into(), source: Box::new(source) };
            let file = Kubeconfig::read_from(path).map_err(unusable)?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(unusable)?
        }
    };
    config.connect_timeout = Some(CONNECT);
    config.read_timeout = Some(SILENCE);
    // It would try 429, 503 and 504 again up to 15 times by itself: nobody would hear of an eviction that a
    // disruption budget refuses, nor of a watch that does not start.
    config.default_retry = false;
    Client::try_from(config).map_err(|error| ClusterError::Client(Box::new(error)))
}
