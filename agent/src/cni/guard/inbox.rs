//! What the guard's thread is told by others. It waits for this and for its inotify descriptor at once, so the queue has
//! a descriptor too.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::time::Timespec;

/// A queue of signals; clones are the same queue.
#[derive(Debug)]
pub(super) struct Inbox<T>(Arc<Shared<T>>);

#[derive(Debug)]
struct Shared<T> {
    /// `None` once nobody reads any more.
    queue: Mutex<Option<VecDeque<T>>>,
    /// An eventfd.
    wake: OwnedFd,
}

impl<T> Clone for Inbox<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Inbox<T> {
    pub fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Self(Arc::new(Shared { queue: Mutex::new(Some(VecDeque::new())), wake })))
    }

    /// Dropped when nobody reads any more.
    pub fn send(&self, signal: T) {
        {
            let mut queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(queue) = queue.as_mut() else { return };
            queue.push_back(signal);
        }
        // Fails only when the counter is full, and then the reader is awake.
        let _ = rustix::io::write(&self.0.wake, &1_u64.to_ne_bytes());
    }

    /// Everything that was sent since the last call.
    pub fn take(&self) -> VecDeque<T> {
        // Fails when nothing was sent.
        let _ = rustix::io::read(&self.0.wake, &mut [0; 8]);
        let mut queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Waits until something was sent, `other` is readable, or the time is over. True when it had to wait.
    pub fn wait(&self, other: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let mut fds = vec![PollFd::from_borrowed_fd(self.0.wake.as_fd(), PollFlags::IN)];
        fds.extend(other.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        if matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..)) {
            return false;
        }
        // A day is as good as for ever.
        let timeout = Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 86_400, tv_nsec: 0 });
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => tracing::error!(%error, "cannot wait for changes of the CNI directory"),
        }
        true
    }

    /// Nobody reads any more; what is still in the queue is dropped.
    pub fn close(&self) {
        *self.0.queue.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn what_is_sent_wakes_the_reader_in_order() {
        let inbox = Inbox::new().unwrap();
        let sender = inbox.clone();
        let thread = std::thread::spawn(move || (0..100).for_each(|n| sender.send(n)));
        let (mut got, start) = (Vec::new(), Instant::now());
        while got.len() < 100 && start.elapsed() < Duration::from_secs(10) {
            inbox.wait(None, Duration::from_secs(10));
            got.extend(inbox.take());
        }
        thread.join().unwrap();
        assert_eq!(got, (0..100).collect::<Vec<_>>());
        // The last signal may have been taken before its own call for attention came.
        assert!(inbox.take().is_empty(), "nothing is left");
        assert!(inbox.wait(None, Duration::from_millis(1)), "and nothing calls");
    }

    #[test]
    fn after_the_end_signals_are_dropped() {
        let inbox = Inbox::new().unwrap();
        let (answer, mut waiting) = tokio::sync::oneshot::channel::<()>();
        inbox.send(answer);
        inbox.close();
        assert!(
            waiting.try_recv().is_err_and(|error| error == tokio::sync::oneshot::error::TryRecvError::Closed)
        );
        let (answer, mut waiting) = tokio::sync::oneshot::channel::<()>();
        inbox.send(answer);
        assert!(
            waiting.try_recv().is_err_and(|error| error == tokio::sync::oneshot::error::TryRecvError::Closed)
        );
    }
}
