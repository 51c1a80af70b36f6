//! Talking to the agent over its socket.

use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

use crate::cli::exit::Exit;

/// Where the agent listens and where its pins are, for commands that work with and without it.
#[derive(Clone, Debug, clap::Args)]
pub struct Place {
    /// The agent's socket
    #[arg(long, env = "NOBYPASS_SOCKET", value_name = "PATH", default_value = crate::server::DEFAULT_SOCKET)]
    pub socket: PathBuf,
    /// Directory of the pins, on a BPF file system
    #[arg(long, env = "NOBYPASS_BPF_DIR", value_name = "DIR", default_value = crate::bpf::pins::DEFAULT_DIR)]
    pub bpf_dir: PathBuf,
}

/// Why a request got no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error("no agent answers on {socket}: {source}; is it running, and with this --socket?")]
    Unreachable { socket: PathBuf, source: io::Error },
    /// The connection broke.
    #[error("the agent's answer broke off: {0}")]
    Broken(String),
    /// The agent said no.
    #[error("{0}")]
    Refused(String),
}

impl ClientError {
    /// The exit code.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Unreachable { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Exit::NoPermission
            }
            Self::Unreachable { .. } => Exit::Unavailable,
            Self::Broken(_) | Self::Refused(_) => Exit::Failed,
        }
    }

    /// Whether there is simply no agent.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Unreachable { source, .. } if matches!(
            source.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused))
    }
}

/// A runtime for one command.
///
/// # Errors
/// As epoll_create(2) says.
pub fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

/// Sends a request; the answer's body is still to be read.
///
/// # Errors
/// [`ClientError`]; an answer that is not a success is [`ClientError::Refused`] with its text.
pub async fn send(
    socket: &Path,
    method: Method,
    path: &str,
    body: String,
) -> Result<Response<Incoming>, ClientError> {
    let broken = |error: hyper::Error| ClientError::Broken(error.to_string());
    let stream = UnixStream::connect(socket)
        .await
        .map_err(|source| ClientError::Unreachable { socket: socket.into(), source })?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake::<_, Full<Bytes>>(TokioIo::new(stream))
            .await
            .map_err(broken)?;
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "nobypass")
        .body(Full::new(Bytes::from(body)))
        .map_err(|error| ClientError::Broken(error.to_string()))?;
    let response = sender.send_request(request).await.map_err(broken)?;
    if response.status().is_success() {
        return Ok(response);
    }
    Err(ClientError::Refused(read(response).await?.trim().to_owned()))
}

/// Reads a whole answer.
///
/// # Errors
/// [`ClientError::Broken`].
pub async fn read(response: Response<Incoming>) -> Result<String, ClientError> {
    let body =
        response.into_body().collect().await.map_err(|error| ClientError::Broken(error.to_string()))?;
    Ok(String::from_utf8_lossy(&body.to_bytes()).into_owned())
}
