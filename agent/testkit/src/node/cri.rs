//! A blocking client of the container runtime interface that works inside and outside of async code.

use std::future::Future;
use std::path::Path;
use std::sync::mpsc;
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tonic::transport::{Channel, Endpoint};

/// Connection to one runtime. Its runtime of tokio has a thread of its own, so that callers may block.
#[derive(Debug)]
pub struct Cri {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    channel: Channel,
}

impl Cri {
    /// Prepares a connection; the socket need not exist yet.
    pub fn new(socket: &Path) -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            // Either a message or the sender's end.
            let _ = runtime.block_on(stopped);
        });
        let endpoint = Endpoint::try_from(format!("unix://{}", socket.display()))?;
        let channel = {
            let _inside = handle.enter();
            endpoint.connect_lazy()
        };
        Ok(Self { handle, stop: Some(stop), thread: Some(thread), channel })
    }

    /// Waits for a call made with [`Cri::runtime`] or [`Cri::images`]; `what` is for the message of a failure.
    pub fn call<T: Send + 'static>(
        &self,
        what: &str,
        call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>> + Send + 'static,
    ) -> Result<T> {
        let (send, answer) = mpsc::channel();
        self.handle.spawn(async move {
            // A caller that has gone away needs no answer.
            let _ = send.send(tokio::time::timeout(crate::wait::HANG, call).await);
        });
        let answer = answer.recv().with_context(|| format!("{what}: the client has stopped"))?;
        let response = answer.with_context(|| format!("{what}: no answer"))?;
        Ok(response.with_context(|| what.to_owned())?.into_inner())
    }

    /// Client of the runtime service.
    #[must_use]
    pub fn runtime(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.channel.clone())
    }

    /// Client of the image service.
    #[must_use]
    pub fn images(&self) -> ImageServiceClient<Channel> {
        ImageServiceClient::new(self.channel.clone())
    }
}

impl Drop for Cri {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It panics only if a call did, which its caller has seen.
            let _ = thread.join();
        }
    }
}
