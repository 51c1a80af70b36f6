//! Waiting for descriptors on the runtime.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers something that owns its descriptor, to wait until it is readable. Needs a tokio runtime.
///
/// # Errors
/// As epoll_ctl(2) says.
pub fn readable<T: AsFd + AsRawFd>(inner: T) -> io::Result<AsyncFd<T>> {
    // SAFETY: `T` owns the descriptor (`AsFd`), gives the same one each time, and lives inside the result, which
    // deregisters it before it is closed.
    unsafe { AsyncFd::register_with_interest(inner, Interest::READABLE) }.map_err(Into::into)
}
