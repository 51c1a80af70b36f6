//! Binding what the server listens on, with what to do when that fails.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::{TcpListener, UnixListener};

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

/// The socket's file. Dropping it removes the file, unless another agent has put its own there meanwhile.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = |meta: fs::Metadata| meta.dev() == self.device && meta.ino() == self.inode;
        if fs::symlink_metadata(&self.path).is_ok_and(ours) {
            // Whoever finds it finds that nobody answers.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Binds the socket that only root may use. One that a dead agent left is replaced.
///
/// # Errors
/// `AddrInUse` when another agent answers on it; `AlreadyExists` when the path is no socket; others as bind(2) says.
pub fn bind_socket(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    if let Some(dir) = path.parent()
        && !dir.exists()
    {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    }
    if fs::symlink_metadata(path).is_ok_and(|meta| !meta.file_type().is_socket()) {
        // connect(2) refuses it just like a dead agent's socket, but it is not ours to remove.
        return Err(ErrorKind::AlreadyExists.into());
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => return Err(ErrorKind::AddrInUse.into()),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path)?,
        Err(_) => {}
    }
    let listener = UnixListener::bind(path)?;
    let meta = fs::symlink_metadata(path)?;
    let file = SocketFile { path: path.into(), device: meta.dev(), inode: meta.ino() };
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok((listener, file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dead_agents_socket_is_replaced_and_a_living_ones_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/agent.sock");
        let first = bind_socket(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(bind_socket(&path).unwrap_err().kind(), ErrorKind::AddrInUse);
        let (listener, file) = first;
        // An agent that was killed removes nothing.
        std::mem::forget(file);
        drop(listener);
        let second = bind_socket(&path).unwrap();
        drop(second);
        assert!(!path.exists(), "an agent that ends takes its socket along");
    }

    #[tokio::test]
    async fn what_is_not_ours_stays() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "precious").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for path in [&file, &link, dir.path()] {
            assert_eq!(bind_socket(path).unwrap_err().kind(), ErrorKind::AlreadyExists, "{path:?}");
        }
        assert_eq!(fs::read_to_string(&link).unwrap(), "precious");

        let path = dir.path().join("agent.sock");
        let (_listener, first) = bind_socket(&path).unwrap();
        // A second agent that did not believe the first one to be alive.
        fs::remove_file(&path).unwrap();
        let _second = bind_socket(&path).unwrap();
        drop(first);
        assert!(path.exists(), "that is the second one's");
    }
}
