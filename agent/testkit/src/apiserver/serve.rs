//! The thread that serves, on a port that stays ours while it is away.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Context as _, Result, bail};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, listen, socket_with, sockopt};
use tokio::sync::oneshot;

use super::{Shared, http};

/// A port of 127.0.0.1 that nobody else gets. While no server listens on it, connections are refused.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) address: SocketAddrV4,
    _held: OwnedFd,
}

impl Port {
    pub(super) fn reserve() -> Result<Self> {
        let held = bound(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
        let address = getsockname(&held).context("which port is it?")?;
        match SocketAddr::try_from(address)? {
            SocketAddr::V4(address) => Ok(Self { address, _held: held }),
            other => bail!("bound to {other} instead of 127.0.0.1"),
        }
    }

    /// A second socket may listen on the address: both set SO_REUSEADDR, and the first does not listen (socket(7)).
    fn listen(&self) -> Result<TcpListener> {
        let socket = bound(self.address)?;
        listen(&socket, 1024).with_context(|| format!("cannot listen on {}", self.address))?;
        Ok(TcpListener::from(socket))
    }
}

fn bound(address: SocketAddrV4) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &address).with_context(|| format!("cannot bind {address}"))?;
    Ok(socket)
}

/// A server at work. Dropping it ends its connections at once.
#[derive(Debug)]
pub(super) struct Running {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    pub(super) fn start(shared: &Arc<Shared>, port: &Port) -> Result<Self> {
        let listener = port.listen()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = oneshot::channel();
        let shared = Arc::clone(shared);
        let thread = std::thread::Builder::new().name("api-server".into()).spawn(move || {
            runtime.block_on(serve(shared, listener, stopped));
            // Dropping the runtime drops every connection.
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn serve(shared: Arc<Shared>, listener: TcpListener, mut stopped: oneshot::Receiver<()>) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    loop {
        let stream = tokio::select! {
            // Stopping is dropping the sender.
            _ = &mut stopped => return,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(_) => continue,
            },
        };
        let _ = stream.set_nodelay(true);
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let service = service_fn(move |request| http::handle(Arc::clone(&shared), request));
            // Fails where a fault says so, and when a client goes away.
            let _ = http1::Builder::new()
                .timer(TokioTimer::new())
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}
