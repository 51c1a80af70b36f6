//! The calls to the container runtime, each with a deadline.

use std::{
    error::Error,
    path::{Path, PathBuf},
    time::Duration,
};

use k8s_cri::v1::{
    Container, ContainerStatusRequest, ContainerStatusResponse, ListContainersRequest, ListPodSandboxRequest,
    PodSandbox, PodSandboxStatusRequest, PodSandboxStatusResponse, StatusRequest, StatusResponse,
    VersionRequest, runtime_service_client::RuntimeServiceClient,
};
use tonic::{
    Code, Response, Status,
    transport::{Channel, Endpoint},
};

use super::endpoint;
use crate::pods::ContainerId;

/// The same limit as the kubelet's for answers of the runtime.
const MAX_MESSAGE: usize = 16 << 20;

/// Why the runtime did not answer as it should.
#[derive(Debug, thiserror::Error)]
pub enum CriError {
    /// None of the usual sockets exists.
    #[error(
        "no container runtime socket found (looked for {tried}): name it with --cri-endpoint, and mount its directory into this \
         container"
    )]
    NoSocket {
        /// The places.
        tried: String,
    },
    /// The socket does not accept.
    #[error("cannot connect to the container runtime at {path}: {reason}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A call failed.
    #[error("the container runtime at {path} failed {call}: {reason}")]
    Call {
        /// The socket.
        path: PathBuf,
        /// The call.
        call: &'static str,
        /// What the runtime said.
        reason: String,
        /// It said that the thing does not exist (any more).
        not_found: bool,
    },
    /// A call was not answered in time.
    #[error("the container runtime at {path} did not answer {call} within {after:?}")]
    Timeout {
        /// The socket.
        path: PathBuf,
        /// The call.
        call: &'static str,
        /// The deadline.
        after: Duration,
    },
}

/// Deadlines of the calls.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadlines {
    /// Connecting, and lists.
    pub(crate) list: Duration,
    /// The status of one sandbox or container.
    pub(crate) detail: Duration,
}

/// A connected runtime.
#[derive(Debug, Clone)]
pub(crate) struct Runtime {
    client: RuntimeServiceClient<Channel>,
    path: PathBuf,
    deadlines: Deadlines,
    /// Name and version, as the runtime gives them.
    pub(crate) name: String,
}

impl Runtime {
    /// Connects to the runtime at `path`, or to the first usual one below `host_root` that speaks CRI.
    pub(crate) async fn connect(
        path: Option<&Path>,
        host_root: &Path,
        deadlines: Deadlines,
    ) -> Result<Self, CriError> {
        if let Some(path) = path {
            return Self::open(path, deadlines).await;
        }
        let mut first_error = None;
        for path in endpoint::detect(host_root) {
            match Self::open(&path, deadlines).await {
                Ok(runtime) => return Ok(runtime),
                // A containerd that only serves Docker has its CRI plugin switched off.
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        Err(first_error.unwrap_or_else(|| CriError::NoSocket { tried: endpoint::usual() }))
    }

    async fn open(path: &Path, deadlines: Deadlines) -> Result<Self, CriError> {
        let connect = |reason: String| CriError::Connect { path: path.to_owned(), reason };
        let uri = format!("unix://{}", path.display());
        let endpoint = Endpoint::try_from(uri).map_err(|error| connect(chain(&error)))?;
        let channel = tokio::time::timeout(deadlines.list, endpoint.connect())
            .await
            .map_err(|_| CriError::Timeout { path: path.to_owned(), call: "connect", after: deadlines.list })?
            .map_err(|error| connect(chain(&error)))?;
        let client = RuntimeServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
        let mut runtime = Self { client, path: path.to_owned(), deadlines, name: String::new() };
        let call = runtime.client.clone();
        let version = runtime.within("Version", deadlines.list, async move {
            let mut call = call;
            call.version(VersionRequest { version: "v1".to_owned() }).await
        });
        let version = version.await?;
        runtime.name = format!("{} {}", version.runtime_name, version.runtime_version);
        Ok(runtime)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The runtime's own state, with everything it tells.
    pub(crate) async fn status(&self) -> Result<StatusResponse, CriError> {
        let mut client = self.client.clone();
        self.within("Status", self.deadlines.detail, client.status(StatusRequest { verbose: true })).await
    }

    pub(super) async fn sandboxes(&self) -> Result<Vec<PodSandbox>, CriError> {
        let mut client = self.client.clone();
        let call = client.list_pod_sandbox(ListPodSandboxRequest { filter: None });
        Ok(self.within("ListPodSandbox", self.deadlines.list, call).await?.items)
    }

    pub(super) async fn containers(&self) -> Result<Vec<Container>, CriError> {
        let mut client = self.client.clone();
        let call = client.list_containers(ListContainersRequest { filter: None });
        Ok(self.within("ListContainers", self.deadlines.list, call).await?.containers)
    }

    pub(crate) async fn sandbox(&self, id: ContainerId) -> Result<PodSandboxStatusResponse, CriError> {
        let mut client = self.client.clone();
        let request = PodSandboxStatusRequest { pod_sandbox_id: id.to_string(), verbose: true };
        self.within("PodSandboxStatus", self.deadlines.detail, client.pod_sandbox_status(request)).await
    }

    pub(super) async fn container(
        &self,
        id: ContainerId,
        verbose: bool,
    ) -> Result<ContainerStatusResponse, CriError> {
        let mut client = self.client.clone();
        let request = ContainerStatusRequest { container_id: id.to_string(), verbose };
        self.within("ContainerStatus", self.deadlines.detail, client.container_status(request)).await
    }

    async fn within<T>(
        &self,
        call: &'static str,
        after: Duration,
        answer: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, CriError> {
        match tokio::time::timeout(after, answer).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => {
                let not_found = status.code() == Code::NotFound;
                Err(CriError::Call { path: self.path.clone(), call, reason: describe(&status), not_found })
            }
            Err(_) => Err(CriError::Timeout { path: self.path.clone(), call, after }),
        }
    }
}

fn describe(status: &Status) -> String {
    let code = status.code();
    let message = if status.message().is_empty() { "no message" } else { status.message() };
    match status.source() {
        Some(source) => format!("{code:?}: {message}: {}", chain(source)),
        None => format!("{code:?}: {message}"),
    }
}

/// An error with its causes; `tonic` says only "transport error" by itself.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}
