//! Pods as the container runtime knows them (CRI v1 over a Unix socket).
//!
//! The runtime is asked for its lists: at once when a cgroup event hints at a change, and slowly all the time. It is
//! not asked for its event stream, because in containerd 1.7 the stream has one queue for all its readers, so that the
//! kubelet would miss what we read.

mod assemble;
pub(crate) mod client;
pub mod endpoint;
mod expect;
#[cfg(test)]
mod fake;
mod info;
mod round;
pub(crate) mod sandbox;
#[cfg(test)]
mod tests;

use std::{
    collections::HashSet,
    path::PathBuf,
    time::{Duration, SystemTime},
};

use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

pub use self::client::CriError;
use self::{
    assemble::Known,
    client::{Deadlines, Runtime},
    expect::Expectations,
    round::Ended,
};
use super::{Nudge, PodUpdate, other_wanted};
use crate::backoff::Backoff;
use crate::pods::{ContainerId, model::Wanted};

/// The first pause between two tries to connect.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// How to reach the runtime, and what to keep of its answers.
#[derive(Debug, Clone)]
pub struct CriOptions {
    /// The socket; `None` tries the usual ones.
    pub endpoint: Option<PathBuf>,
    /// Where the host's file system is seen; the usual sockets are looked for below it.
    pub host_root: PathBuf,
    /// The facts to keep.
    pub wanted: watch::Receiver<Wanted>,
    /// Time between two regular rounds, give or take a fifth.
    pub resync: Duration,
    /// Least time from one round to the next one for a hint: a burst of hints is collected for so long.
    pub debounce: Duration,
    /// Deadline of a connection and of a list.
    pub list_deadline: Duration,
    /// Deadline of a single status.
    pub detail_deadline: Duration,
    /// Longest pause between two tries to connect.
    pub max_backoff: Duration,
}

impl CriOptions {
    /// The defaults, keeping `wanted`.
    #[must_use]
    pub fn new(wanted: watch::Receiver<Wanted>) -> Self {
        Self {
            endpoint: None,
            host_root: "/".into(),
            wanted,
            resync: Duration::from_secs(30),
            debounce: Duration::from_millis(10),
            list_deadline: Duration::from_secs(5),
            detail_deadline: Duration::from_secs(1),
            max_backoff: Duration::from_secs(5),
        }
    }
}

/// How the source fares, for `/readyz` and metrics.
#[derive(Debug, Clone)]
pub struct CriState {
    /// The runtime answers.
    pub connected: bool,
    /// Since when it does, or does not.
    pub since: Instant,
    /// The socket in use, or the last one.
    pub endpoint: Option<PathBuf>,
    /// Name and version of the runtime.
    pub runtime: Option<String>,
    /// Why it did not answer, last time.
    pub last_error: Option<String>,
    /// Everything that exists was sent at least once.
    pub synced: bool,
    /// Pods known now. While the runtime is away: the last ones known.
    pub pods: usize,
    /// Finished rounds.
    pub rounds: u64,
    /// When the last round ended.
    pub last_round_at: Option<SystemTime>,
    /// How long the last round took, sending included.
    pub last_round: Duration,
    /// Connections lost or not made.
    pub failures: u64,
    /// Details that could not be had, although the lists could.
    pub details_failed: u64,
    /// Sandboxes and containers in the last lists whose ids no cgroup can carry.
    pub skipped: usize,
}

impl CriState {
    fn new() -> Self {
        Self {
            connected: false,
            since: Instant::now(),
            endpoint: None,
            runtime: None,
            last_error: None,
            synced: false,
            pods: 0,
            rounds: 0,
            last_round_at: None,
            last_round: Duration::ZERO,
            failures: 0,
            details_failed: 0,
            skipped: 0,
        }
    }

    fn set_connected(&mut self, connected: bool) {
        if self.connected != connected {
            self.connected = connected;
            self.since = Instant::now();
        }
    }
}

/// The source. It remembers what it sent, also while the runtime is away.
#[derive(Debug)]
pub struct CriSource {
    options: CriOptions,
    state: watch::Sender<CriState>,
    known: Known,
    expected: Expectations,
    failed: round::Failed,
    /// Containers whose details were asked for when others were wanted.
    stale: HashSet<ContainerId>,
    backoff: Backoff,
}

/// What woke a waiting source.
enum Woken {
    Time,
    Closed,
}

impl CriSource {
    /// A source that has not connected yet, and its state.
    #[must_use]
    pub fn new(options: CriOptions) -> (Self, watch::Receiver<CriState>) {
        let (state, receiver) = watch::channel(CriState::new());
        let backoff = Backoff::new(FIRST_PAUSE, options.max_backoff);
        let source = Self {
            options,
            state,
            known: Known::new(),
            expected: Expectations::default(),
            failed: round::Failed::default(),
            stale: HashSet::new(),
            backoff,
        };
        (source, receiver)
    }

    /// Sends what the runtime knows to `out` and keeps it up to date, whatever happens to the runtime. Ends only when
    /// nobody takes the updates any more. Without hints (`nudges` closed) it goes on at its own pace.
    pub async fn run(mut self, mut nudges: mpsc::Receiver<Nudge>, out: mpsc::Sender<PodUpdate>) {
        loop {
            let error = match self.connect().await {
                Ok(runtime) => match self.serve(&runtime, &mut nudges, &out).await {
                    Ended::Closed => return,
                    Ended::Failed(error) => error,
                },
                Err(error) => error,
            };
            self.lost(&error, self.backoff.tries());
            let pause = self.backoff.pause();
            if let Woken::Closed = self.wait(Instant::now() + pause, None, &mut nudges, &out).await {
                return;
            }
        }
    }

    async fn connect(&self) -> Result<Runtime, CriError> {
        let CriOptions { endpoint, host_root, list_deadline, detail_deadline, .. } = &self.options;
        let deadlines = Deadlines { list: *list_deadline, detail: *detail_deadline };
        Runtime::connect(endpoint.as_deref(), host_root, deadlines).await
    }

    /// Rounds until the runtime fails.
    async fn serve(
        &mut self,
        runtime: &Runtime,
        nudges: &mut mpsc::Receiver<Nudge>,
        out: &mpsc::Sender<PodUpdate>,
    ) -> Ended {
        self.failed = round::Failed::default();
        let mut synced = false;
        loop {
            if let Err(ended) = self.round(runtime, out).await {
                return ended;
            }
            self.connected(runtime);
            self.backoff.reset();
            if !synced {
                if out.send(PodUpdate::Synced).await.is_err() {
                    return Ended::Closed;
                }
                self.state.send_modify(|state| state.synced = true);
                synced = true;
            }
            let now = Instant::now();
            let regular = now + self.backoff.about(self.options.resync);
            let next = [self.expected.settle(&self.known, now), self.failed.next_try()];
            let next = next.into_iter().flatten().fold(regular, Instant::min);
            if let Woken::Closed = self.wait(next, Some(now + self.options.debounce), nudges, out).await {
                return Ended::Closed;
            }
        }
    }

    /// Waits until `next`, taking hints. A hint ends the wait, but not before `hinted`.
    async fn wait(
        &mut self,
        mut next: Instant,
        hinted: Option<Instant>,
        nudges: &mut mpsc::Receiver<Nudge>,
        out: &mpsc::Sender<PodUpdate>,
    ) -> Woken {
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(next) => return Woken::Time,
                () = out.closed() => return Woken::Closed,
                () = other_wanted(&mut self.options.wanted) => {
                    let of_known = self.known.values().flat_map(|pod| &pod.containers);
                    self.stale = of_known.filter_map(|container| container.id).collect();
                    next = next.min(hinted.unwrap_or(next));
                }
                Some(nudge) = nudges.recv() => {
                    self.expected.hint(nudge, Instant::now());
                    next = next.min(hinted.unwrap_or(next));
                }
            }
        }
    }

    fn connected(&self, runtime: &Runtime) {
        if !self.state.borrow().connected {
            tracing::info!(endpoint = %runtime.path().display(), runtime = runtime.name, "container runtime answers");
        }
        self.state.send_modify(|state| {
            state.set_connected(true);
            state.endpoint = Some(runtime.path().to_owned());
            state.runtime = Some(runtime.name.clone());
        });
    }

    fn lost(&self, error: &CriError, tries: u32) {
        // Once for an outage, not once for every try.
        if tries == 0 {
            tracing::warn!(%error, pods = self.known.len(), "container runtime does not answer, keeping what is known");
        } else {
            tracing::debug!(%error, tries, "container runtime still does not answer");
        }
        self.state.send_modify(|state| {
            state.set_connected(false);
            state.failures = state.failures.saturating_add(1);
            state.last_error = Some(error.to_string());
        });
    }
}
