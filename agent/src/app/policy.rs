//! The policy's task: the file, `nobypass mode`, and who has to obey.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nobypass_common::ids::Mode;
use notify::event::{AccessKind, AccessMode};
use notify::{EventKind, INotifyWatcher, RecursiveMode, Watcher as _};
use tokio::sync::{mpsc, oneshot, watch};

use super::Ended;
use crate::pods::model::Wanted;
use crate::policy::Effective;
use crate::policy::mode;
use crate::policy::reload::{Loader, Look, PolicyState};
use crate::server::{Health, SetMode};

/// How often the file is looked at, whatever inotify said: its directory may be another one by now.
const LOOK: Duration = Duration::from_secs(10);
/// A writer is given so long to finish.
const SETTLE: Duration = Duration::from_millis(50);

/// Settings for the one writer of `CONFIG`.
#[derive(Debug)]
pub(super) struct Apply {
    /// What shall hold.
    pub effective: Arc<Effective>,
    /// Told when it holds, or why not.
    pub done: oneshot::Sender<Result<(), String>>,
}

/// Follows the file and the command line. The programs' settings change first, then everybody else is told.
pub(super) async fn follow_policy(
    mut loader: Loader,
    out: watch::Sender<PolicyState>,
    wanted: watch::Sender<Wanted>,
    mut requests: mpsc::Receiver<SetMode>,
    kernel: mpsc::Sender<Apply>,
    health: Arc<Health>,
) -> Ended {
    let path = loader.state().path.clone();
    let (nudge, mut nudges) = mpsc::channel(1);
    let mut watched = None;
    let mut look = tokio::time::interval(LOOK);
    loop {
        tokio::select! {
            _ = look.tick() => {
                // A watch ends with its directory, and says so to nobody.
                if let Some(directory) = path.as_deref().map(directory)
                    && watched.as_ref().map(|watched: &Watched| watched.identity) != identity(directory)
                {
                    watched = watch_directory(directory, nudge.clone());
                }
            }
            Some(()) = nudges.recv() => tokio::time::sleep(SETTLE).await,
            Some(SetMode { mode, done }) = requests.recv() => {
                loader.by_hand(mode);
                let result = apply(&loader, &kernel).await;
                if result.is_ok() {
                    tell_mode(loader.state(), mode);
                    out.send_replace(loader.state().clone());
                }
                let _ = done.send(result);
                continue;
            }
        }
        match loader.look() {
            Look::Same => {}
            Look::Changed => {
                health.note_done("policy");
                if let Err(error) = apply(&loader, &kernel).await {
                    return ("policy file", Err(error));
                }
                let effective = &loader.state().effective;
                tracing::info!(?effective, "the policy changed");
                let now = wanted_of(loader.state());
                wanted.send_if_modified(|wanted| {
                    *wanted != now && {
                        *wanted = now;
                        true
                    }
                });
                out.send_replace(loader.state().clone());
            }
            Look::Refused(error) => {
                tracing::error!(%error, "the policy is not taken, the last good one holds");
                health.note("policy", format!("{error}; the last good one holds"));
                out.send_replace(loader.state().clone());
            }
        }
    }
}

/// What profiles, policy and remedies read of pods, for the sources to keep.
pub(super) fn wanted_of(state: &PolicyState) -> Wanted {
    let mut wanted = state.profiles.wanted();
    let selectors = state.effective.namespaces.iter().flat_map(|rule| rule.match_labels.keys());
    wanted.keys.extend(selectors.map(|key| &**key));
    wanted.keys.extend([mode::KEY, crate::remedy::kube::LABEL]);
    wanted
}

fn tell_mode(state: &PolicyState, by_hand: Option<Mode>) {
    let mode = Mode::from(state.effective.mode).label();
    let source = state.effective.mode_source.label();
    tracing::info!(mode, source, by_hand = by_hand.is_some(), "mode changed");
}

async fn apply(loader: &Loader, kernel: &mpsc::Sender<Apply>) -> Result<(), String> {
    let (done, result) = oneshot::channel();
    let effective = Arc::clone(&loader.state().effective);
    let stopping = || "the agent is stopping".to_owned();
    kernel.send(Apply { effective, done }).await.map_err(|_| stopping())?;
    result.await.map_err(|_| stopping())?
}

/// A watch of a directory.
struct Watched {
    _watcher: INotifyWatcher,
    /// Device and inode of the directory.
    identity: (u64, u64),
}

/// The directory that a ConfigMap changes in: by a link beside the file.
fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

fn identity(directory: &Path) -> Option<(u64, u64)> {
    fs::metadata(directory).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// Reports any change in a directory. `None` where inotify does not work; the file is looked at now and then.
fn watch_directory(directory: &Path, nudge: mpsc::Sender<()>) -> Option<Watched> {
    let identity = identity(directory)?;
    let report = move |event: notify::Result<notify::Event>| {
        // Reading is no change; whoever wrote says so when he closes.
        let reads = |kind: EventKind| matches!(kind, EventKind::Access(access) if access != AccessKind::Close(AccessMode::Write));
        if event.is_ok_and(|event| !reads(event.kind)) {
            // One that waits stands for this one too.
            let _ = nudge.try_send(());
        }
    };
    let watched = INotifyWatcher::new(report, notify::Config::default()).and_then(|mut watcher| {
        watcher.watch(directory, RecursiveMode::NonRecursive)?;
        Ok(watcher)
    });
    watched
        .inspect_err(|error| {
            tracing::debug!(directory = %directory.display(), %error, "cannot watch; looked at now and then");
        })
        .ok()
        .map(|watcher| Watched { _watcher: watcher, identity })
}
