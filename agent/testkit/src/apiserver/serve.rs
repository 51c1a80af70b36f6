//! The thread that serves, on a port that stays ours while it is away.

use std::net::TcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::Result;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::oneshot;

use super::{Shared, http};
use crate::port::Port;

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
