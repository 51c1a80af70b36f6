//! One bounded stream of cgroup events, whoever sends them (the kernel's tracepoints, or inotify).
//!
//! Senders never wait. What does not fit is counted, and the receiver is told to scan again, so that a burst costs a
//! scan and never a pod.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use tokio::sync::{Notify, mpsc};

use super::model::CgroupEvent;

/// What the receiver gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// A cgroup came or went.
    Event(CgroupEvent),
    /// Events were lost: scan the pod parents again.
    Rescan,
}

#[derive(Debug, Default)]
struct Shared {
    dropped: AtomicU64,
    rescan: AtomicBool,
    wake: Notify,
}

/// The sending half; clones feed the same stream.
#[derive(Debug, Clone)]
pub struct CgroupSender {
    items: mpsc::Sender<CgroupEvent>,
    shared: Arc<Shared>,
}

/// The receiving half.
#[derive(Debug)]
pub struct CgroupReceiver {
    items: mpsc::Receiver<CgroupEvent>,
    shared: Arc<Shared>,
}

/// A stream that holds at most `capacity` events.
///
/// # Panics
/// When `capacity` is 0.
#[must_use]
pub fn channel(capacity: usize) -> (CgroupSender, CgroupReceiver) {
    let (sender, receiver) = mpsc::channel(capacity);
    let shared = Arc::new(Shared::default());
    (CgroupSender { items: sender, shared: Arc::clone(&shared) }, CgroupReceiver { items: receiver, shared })
}

impl CgroupSender {
    /// Sends an event, or counts it as dropped and asks for a scan when the stream is full. Returns whether anyone
    /// still listens.
    pub fn send(&self, event: CgroupEvent) -> bool {
        match self.items.try_send(event) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.shared.dropped.fetch_add(1, Ordering::Relaxed);
                self.rescan();
                true
            }
            Err(mpsc::error::TrySendError::Closed(_)) => false,
        }
    }

    /// Asks the receiver to scan again. Several requests before it does become one.
    pub fn rescan(&self) {
        self.shared.rescan.store(true, Ordering::Release);
        self.shared.wake.notify_one();
    }

    /// Events that did not fit, so far.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.shared.dropped.load(Ordering::Relaxed)
    }

    /// Waits until nobody listens any more.
    pub async fn closed(&self) {
        self.items.closed().await;
    }
}

impl CgroupReceiver {
    /// The next item; `None` once all senders are gone. Cancel-safe.
    pub async fn recv(&mut self) -> Option<Item> {
        loop {
            if self.shared.rescan.swap(false, Ordering::Acquire) {
                return Some(Item::Rescan);
            }
            tokio::select! {
                item = self.items.recv() => return item.map(Item::Event),
                () = self.shared.wake.notified() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::model::CgroupEventKind, *};

    fn event(id: u64) -> CgroupEvent {
        CgroupEvent { kind: CgroupEventKind::Made, id, level: 2, path: format!("/kubepods/{id}") }
    }

    #[tokio::test]
    async fn what_does_not_fit_is_counted_and_becomes_one_rescan() {
        let (sender, mut receiver) = channel(2);
        for id in 0..5 {
            assert!(sender.send(event(id)));
        }
        assert_eq!(sender.dropped(), 3);
        assert_eq!(receiver.recv().await, Some(Item::Rescan));
        assert_eq!(receiver.recv().await, Some(Item::Event(event(0))));
        assert_eq!(receiver.recv().await, Some(Item::Event(event(1))));
        sender.send(event(9));
        assert_eq!(receiver.recv().await, Some(Item::Event(event(9))), "no second rescan");
        drop(sender);
        assert_eq!(receiver.recv().await, None);
    }

    #[tokio::test]
    async fn a_rescan_wakes_a_waiting_receiver() {
        let (sender, mut receiver) = channel(1);
        let (item, ()) = tokio::join!(receiver.recv(), async {
            tokio::task::yield_now().await;
            sender.rescan();
        });
        assert_eq!(item, Some(Item::Rescan));
    }

    #[tokio::test]
    async fn a_sender_learns_that_nobody_listens() {
        let (sender, receiver) = channel(1);
        drop(receiver);
        assert!(!sender.send(event(1)));
        sender.closed().await;
    }
}
