//! Binding what the server listens on, with what to do when that fails.

use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::Duration;

use tokio::net::{TcpListener, UnixListener};

use super::{SocketFile, bind_socket};
use crate::cli::exit::Exit;
use crate::config::Address;

/// How often, and how long, a socket in use is waited for.
const TRIES: u32 = 10;
/// See [`TRIES`].
const PAUSE: Duration = Duration::from_millis(50);

/// Binding an address or socket failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {at}: {source}; {remedy}")]
pub struct ListenError {
    at: String,
    source: io::Error,
    remedy: &'static str,
}

impl ListenError {
    /// The exit code.
    pub fn exit(&self) -> Exit {
        match self.source.kind() {
            ErrorKind::PermissionDenied => Exit::NoPermission,
            _ => Exit::Failed,
        }
    }
}

/// What was bound; the socket's file goes when the last part is dropped.
pub type Listeners = (Option<TcpListener>, Option<UnixListener>, Option<SocketFile>);

/// Binds both, or what of them is wanted.
///
/// # Errors
/// [`ListenError`].
pub async fn listen(address: Address, socket: Option<&Path>) -> Result<Listeners, ListenError> {
    let (unix, file) = match socket {
        None => (None, None),
        Some(socket) => {
            let (unix, file) = bind_patiently(socket).await.map_err(|source| ListenError {
                at: socket.display().to_string(),
                remedy: match source.kind() {
                    ErrorKind::AddrInUse => {
                        "another agent answers on it: stop it, or give this one another --socket"
                    }
                    ErrorKind::AlreadyExists => "it is not a socket: remove it, or give another --socket",
                    ErrorKind::PermissionDenied => "run as root, or give another --socket",
                    _ => "give another --socket",
                },
                source,
            })?;
            (Some(unix), Some(file))
        }
    };
    let tcp = match address.0 {
        None => None,
        Some(address) => Some(TcpListener::bind(address).await.map_err(|source| ListenError {
            at: address.to_string(),
            remedy: match source.kind() {
                ErrorKind::AddrInUse => {
                    "another process has the port: stop it, or give another --metrics-addr (or none)"
                }
                _ => "give another --metrics-addr (or none)",
            },
            source,
        })?),
    };
    Ok((tcp, unix, file))
}

/// As [`bind_socket`], waiting a moment for a socket that answers: an agent that was just killed may have a child that
/// has not run its program yet and holds the socket until then.
async fn bind_patiently(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    for _ in 0..TRIES {
        match bind_socket(path) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => {}
            other => return other,
        }
        tokio::time::sleep(PAUSE).await;
    }
    bind_socket(path)
}
