//! Waiting until a file descriptor can be read.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use tokio::io::{
    Interest,
    unix::{AsyncFd, AsyncFdReadyGuard},
};

/// A non-blocking file descriptor that the runtime watches for input.
#[derive(Debug)]
pub struct ReadableFd(AsyncFd<OwnedFd>);

impl ReadableFd {
    /// Registers `fd`, which must be in non-blocking mode, with the current runtime.
    ///
    /// # Errors
    /// When the runtime cannot watch this kind of file.
    ///
    /// # Panics
    /// Outside of a tokio runtime with I/O enabled.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: an `OwnedFd` is open and stays the same descriptor until it is dropped, and this type never hands
        // out the `&mut` by which it could be replaced while it is registered.
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
        Ok(Self(fd))
    }

    /// Waits for input. Call `clear_ready()` on the guard once a read finds nothing more.
    ///
    /// # Errors
    /// When the runtime is shutting down.
    pub async fn readable(&self) -> io::Result<AsyncFdReadyGuard<'_, OwnedFd>> {
        self.0.readable().await
    }
}

impl AsFd for ReadableFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}
