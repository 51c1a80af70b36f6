//! Keeps the wanted entry in every config of one directory, on a thread of its own: between the notice of a change and
//! the patched file lie no other tasks.

mod engine;
mod files;
mod inbox;
mod pass;
mod want;

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::Serialize;
use tokio::sync::{oneshot, watch};

use super::discover::Runtime;
use super::entry::WantedEntry;
use super::memory::Remember;
use super::metrics::Metrics;
use super::plan::Options;
use super::swap::{GRACE, Seam};
use super::watch::Change;
use super::window::Protection;
use engine::Engine;
use inbox::Inbox;

pub use files::FileReport;
pub use want::Want;

/// How a directory is guarded.
#[derive(Clone)]
pub struct Config {
    /// The CNI directory, as seen from here.
    pub dir: PathBuf,
    /// Its path on the host, for absolute links.
    pub host: PathBuf,
    /// What the plan may do.
    pub options: Options,
    /// How the container runtime chooses its file.
    pub runtime: Runtime,
    /// True when somebody will report what the runtime has loaded ([`Guard::runtime`]); only then and there is the node
    /// protected.
    pub verify: bool,
    /// Everything is looked at again this often, whatever was noticed; 30 s.
    pub resync: Duration,
    /// As [`resync`](Self::resync) while the directory cannot be watched; 1 s.
    pub poll: Duration,
    /// Whether the directory is still the same is looked at this often; 2 s.
    pub heartbeat: Duration,
    /// A writer that keeps its file open is taken to be finished after this much silence; 100 ms.
    pub quiet: Duration,
    /// How long displaced files are kept.
    pub grace: Duration,
    /// Writes that may come at once.
    pub burst: u32,
    /// Writes a second in the long run.
    pub rate: u32,
    /// What is still known after a restart.
    pub remember: Remember,
    /// For tests.
    pub seam: Option<Arc<dyn Seam>>,
}

impl Config {
    /// With the usual times, for containerd, unverified.
    pub fn new(dir: PathBuf) -> Self {
        Self {
            host: dir.clone(),
            dir,
            options: Options::default(),
            runtime: Runtime::default(),
            verify: false,
            resync: Duration::from_secs(30),
            poll: Duration::from_secs(1),
            heartbeat: Duration::from_secs(2),
            quiet: Duration::from_millis(100),
            grace: GRACE,
            burst: 500,
            rate: 50,
            remember: Remember::Nothing,
            seam: None,
        }
    }
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config")
            .field("dir", &self.dir)
            .field("runtime", &self.runtime)
            .finish_non_exhaustive()
    }
}

/// How changes of the directory are noticed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Watching {
    /// The directory is not there (yet).
    #[default]
    Missing,
    /// At once.
    Watched,
    /// Now and then, since there is no watch; not good enough to be ready.
    Polled {
        /// Why, and what to do.
        why: String,
    },
}

/// The state in short, after each change of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// What files say that new pods get.
    pub files: Protection,
    /// The same with what the runtime says.
    pub protection: Protection,
    /// How changes are noticed.
    pub watching: Watching,
    /// The file that the runtime takes.
    pub active: Option<OsString>,
    /// Its bytes.
    pub content: Option<Bytes>,
    /// Another number means that the runtime must load again.
    pub version: u64,
    /// The entry that is kept.
    pub wanted: Option<WantedEntry>,
}

impl Summary {
    /// Nothing is known yet.
    pub(super) fn new() -> Self {
        Self {
            files: Protection::NoNetwork,
            protection: Protection::NoNetwork,
            watching: Watching::Missing,
            active: None,
            content: None,
            version: 0,
            wanted: None,
        }
    }

    /// True when a pod that starts gets the plugin and a change of that would be noticed at once.
    pub fn ready(&self) -> bool {
        self.protection == Protection::Protected && self.watching == Watching::Watched
    }
}

/// The whole state, for `cni status`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Snapshot {
    /// The directory.
    pub dir: String,
    /// How changes are noticed.
    pub watching: Watching,
    /// This agent's number in this directory; 0 without one.
    pub generation: u64,
    /// The number of a newer agent that this one leaves the directory to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub superseded_by: Option<u64>,
    /// Type of the plugin whose entry is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plugin: Option<String>,
    /// `protected`, `unprotected` or `no_network`.
    pub protection: &'static str,
    /// Since how many seconds.
    pub seconds: u64,
    /// The file that the runtime takes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active: Option<String>,
    /// All unprotected time so far, in seconds.
    pub unprotected_seconds: f64,
    /// Each config file.
    pub files: Vec<FileReport>,
    /// False where the file system cannot exchange files.
    pub exchange: bool,
    /// Displaced files kept for writers that may still have them open.
    pub displaced: usize,
}

/// What the thread is told.
#[derive(Debug)]
enum Signal {
    Change(Change, Instant),
    Want(Want),
    /// What the runtime has loaded: the version it was asked about, and what a pod gets from it.
    Runtime(u64, Protection),
    Poke,
    Snapshot(oneshot::Sender<Snapshot>),
    Stop,
}

/// A running guard. Dropping it stops the thread and waits for it.
#[derive(Debug)]
pub struct Guard {
    signals: Inbox<Signal>,
    summary: watch::Receiver<Summary>,
    thread: Option<JoinHandle<()>>,
}

impl Guard {
    /// Starts the thread.
    pub fn start(config: Config, want: Want, metrics: Metrics) -> io::Result<Self> {
        let signals = Inbox::new()?;
        let (publish, summary) = watch::channel(Summary::new());
        let (changes, inbox) = (signals.clone(), Open(signals.clone()));
        let dir = std::path::absolute(&config.dir)?;
        let config = Config { dir, ..config };
        let thread = std::thread::Builder::new().name("cni-guard".to_owned()).spawn(move || {
            let report = move |change, at| changes.send(Signal::Change(change, at));
            Engine::new(config, want, metrics, publish, report).run(&inbox.0);
        })?;
        Ok(Self { signals, summary, thread: Some(thread) })
    }

    /// The state in short; changes can be waited for. The channel closes when the thread ends.
    pub fn summary(&self) -> watch::Receiver<Summary> {
        self.summary.clone()
    }

    /// From now on this entry is wanted.
    pub fn want(&self, want: Want) {
        self.send(Signal::Want(want));
    }

    /// For [`Config::verify`]: whether the runtime has loaded what [`Summary::version`] stands for.
    pub fn runtime(&self) -> RuntimeReport {
        RuntimeReport(self.signals.clone())
    }

    /// For those who want to know more than the summary.
    pub fn questions(&self) -> Questions {
        Questions(self.signals.clone())
    }

    /// See [`Questions::snapshot`].
    pub async fn snapshot(&self) -> Option<Snapshot> {
        self.questions().snapshot().await
    }

    /// Finishes what is under way, and ends. Configs stay as they are.
    pub fn stop(mut self) {
        self.end();
    }

    fn send(&self, signal: Signal) {
        self.signals.send(signal);
    }

    fn end(&mut self) {
        self.send(Signal::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the CNI guard's thread had panicked");
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.end();
        }
    }
}

/// Closes the inbox when the thread ends, however it does.
struct Open(Inbox<Signal>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Asks a guard, also from other tasks.
#[derive(Clone, Debug)]
pub struct Questions(Inbox<Signal>);

impl Questions {
    /// The whole state; `None` when the thread has ended.
    pub async fn snapshot(&self) -> Option<Snapshot> {
        let (answer, snapshot) = oneshot::channel();
        self.0.send(Signal::Snapshot(answer));
        snapshot.await.ok()
    }
}

/// Tells a guard what the runtime has loaded.
#[derive(Clone, Debug)]
pub struct RuntimeReport(Inbox<Signal>);

impl RuntimeReport {
    /// What a pod gets from the runtime while `version` of a [`Summary`] is in place.
    pub fn says(&self, version: u64, protection: Protection) {
        self.0.send(Signal::Runtime(version, protection));
    }

    /// The runtime has not noticed a change: create and remove a hidden file.
    pub fn poke(&self) {
        self.0.send(Signal::Poke);
    }
}
