//! How other tasks ask for a probe, and read what was answered.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

use super::{Answer, Failure, PacketSockets};

/// What a pod's network answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probed {
    /// IPv4 and IPv6.
    pub answers: [Answer; 2],
    /// When, ns of `CLOCK_MONOTONIC`.
    pub at_ns: u64,
    /// How long it took, from the question's turn.
    pub took: Duration,
}

/// The last answers by cgroup id.
pub type Answers = Arc<BTreeMap<u64, Probed>>;

/// What the probing task is asked for.
#[derive(Debug)]
pub enum Request {
    /// Ask this pod now.
    Ask(u64, oneshot::Sender<Probed>),
    /// Do not refuse this pod's connections at once until it was asked again: its rules are about to change.
    Lift(u64, oneshot::Sender<()>),
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Handle {
    requests: mpsc::Sender<Request>,
    answers: watch::Receiver<Answers>,
    packet: watch::Receiver<PacketSockets>,
}

impl Handle {
    /// Of the task that reads `requests` and writes the others.
    pub fn new(
        requests: mpsc::Sender<Request>,
        answers: watch::Receiver<Answers>,
        packet: watch::Receiver<PacketSockets>,
    ) -> Self {
        Self { requests, answers, packet }
    }

    /// Names of the pod's containers that may open packet sockets, as far as is known.
    pub fn packet_sockets(&self, cgroup: u64) -> Vec<String> {
        let of = self.packet.borrow();
        of.get(&cgroup).into_iter().flatten().map(ToString::to_string).collect()
    }

    /// Asks a pod now, given its cgroup id: after a repair, say. Takes some hundred microseconds.
    pub async fn ask(&self, cgroup: u64) -> Probed {
        let (done, answer) = oneshot::channel();
        let sent = self.requests.send(Request::Ask(cgroup, done)).await;
        let failed = Probed { answers: [Failure::Helper.into(); 2], at_ns: 0, took: Duration::ZERO };
        if sent.is_err() { failed } else { answer.await.unwrap_or(failed) }
    }

    /// To be called before a pod is repaired: when this returns no connect(2) is refused at once any more, and each
    /// connection is judged by what really becomes of it. Ask the pod afterwards.
    pub async fn lift(&self, cgroup: u64) {
        let (done, lifted) = oneshot::channel();
        if self.requests.send(Request::Lift(cgroup, done)).await.is_ok() {
            // The agent is ending otherwise.
            let _ = lifted.await;
        }
    }

    /// The last answers, to follow.
    pub fn answers(&self) -> watch::Receiver<Answers> {
        self.answers.clone()
    }
}
