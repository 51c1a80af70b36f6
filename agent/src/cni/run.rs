//! Runs the CNI half by itself: the guard, and in install mode what the entry needs.

use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;

use super::binaries::{Installed, VERSION_TIMEOUT};
use super::desk::Desk;
use super::guard::{self, Guard, Want};
use super::install::{Contract, ContractError, Part, Prepared, Verdict, prepare};
use super::kubeconfig::KubeconfigState;
use super::memory::Remember;
use super::metrics::Metrics;
use super::plan;
use super::runtime::{self, follow};
use super::uninstall::{self, Removal, Which, uninstall};

/// The binaries are looked at this often; nothing is read as long as their inodes are the same.
const CHECK: Duration = Duration::from_secs(1);
/// The first pause before what went wrong is tried again; doubles up to [`MAX_RETRY`].
const RETRY: Duration = Duration::from_millis(500);
/// The longest.
const MAX_RETRY: Duration = Duration::from_secs(10);

/// How to run.
#[derive(Clone, Debug)]
pub enum Mode {
    /// Beside the mesh's installer: keep this entry.
    Guard(Want),
    /// Instead of it.
    Install {
        /// What the environment says.
        contract: Box<Contract>,
        /// Take everything away at the end. Off, an upgrade leaves no gap.
        cleanup: bool,
    },
}

/// All that the half is told.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The directory and how it is guarded.
    pub guard: guard::Config,
    /// nobypass's part in it.
    pub mode: Mode,
    /// How to learn what the container runtime has loaded.
    pub runtime: runtime::Options,
    /// Where the half shows its state.
    pub desk: Desk,
}

/// Why it ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The environment is wrong.
    #[error(transparent)]
    Contract(#[from] ContractError),
    /// The guard's thread could not be started.
    #[error("cannot start the CNI guard: {0}")]
    Start(io::Error),
    /// The guard's thread ended by itself, which is a defect.
    #[error("the CNI guard ended unexpectedly; its last log line says why")]
    Ended,
}

/// Runs until `stop` turns true or its sender is gone. Configs stay as they are unless cleaning up was asked for.
pub async fn run(
    settings: Settings,
    metrics: Metrics,
    mut stop: watch::Receiver<bool>,
) -> Result<(), RunError> {
    let Settings { guard: config, mode, runtime, desk } = settings;
    match mode {
        Mode::Guard(want) => {
            let remember = match &want {
                Want::Learn { .. } => Remember::Learned(runtime.places.clone()),
                Want::Entry(_) | Want::Withdraw(_) => Remember::Nothing,
            };
            let config = guard::Config { remember, ..config };
            let (guard, verifier) = start(config, want, runtime, metrics, &desk)?;
            let ended = until_end(&guard, &desk, &mut stop).await;
            drop(verifier);
            end(guard).await;
            ended
        }
        Mode::Install { contract, cleanup } => {
            let prepared = prepare(&contract, VERSION_TIMEOUT).await?;
            let removal = cleanup.then(|| removal(&config, &contract, &prepared));
            let installed = Installation { contract: *contract, prepared };
            install(config, runtime, installed, metrics, &desk, stop).await?;
            if let Some(removal) = removal {
                clean_up(&removal).await;
            }
            Ok(())
        }
    }
}

/// Starts a guard that counts as protected only what the runtime has loaded, and who asks it; dropped, nobody does.
fn start(
    config: guard::Config,
    want: Want,
    runtime: runtime::Options,
    metrics: Metrics,
    desk: &Desk,
) -> Result<(Guard, JoinSet<()>), RunError> {
    let config = guard::Config { verify: true, ..config };
    let guard = Guard::start(config, want, metrics).map_err(RunError::Start)?;
    let mut verifier = JoinSet::new();
    verifier.spawn(follow(runtime, guard.summary(), guard.runtime(), desk.word().clone()));
    desk.open(&guard);
    Ok((guard, verifier))
}

/// Waits for the stop, or for a guard that ends by itself.
async fn until_end(guard: &Guard, desk: &Desk, stop: &mut watch::Receiver<bool>) -> Result<(), RunError> {
    let mut summary = guard.summary();
    let mut ready = false;
    loop {
        let shown = summary.borrow_and_update().clone();
        let now = shown.ready();
        desk.show(shown);
        if now != ready {
            tracing::info!(ready = now, "CNI protection changed");
            ready = now;
        }
        tokio::select! {
            // An error means that nobody is left to say stop.
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
            changed = summary.changed() => changed.map_err(|_| RunError::Ended)?,
        }
    }
}

/// What install mode starts from.
struct Installation {
    contract: Contract,
    prepared: Prepared,
}

/// Install mode: keeps binary, kubeconfig and entry, in this order.
async fn install(
    config: guard::Config,
    runtime: runtime::Options,
    Installation { contract, prepared }: Installation,
    metrics: Metrics,
    desk: &Desk,
    mut stop: watch::Receiver<bool>,
) -> Result<(), RunError> {
    let (config, runtime) = with_drop_in(config, runtime).await;
    tell(&prepared);
    let spec = contract.spec(prepared.wanted.plugin())?;
    let path = spec.path();
    let (state, mut fresh) = watch::channel(match &prepared.kubeconfig {
        Part::Current => KubeconfigState::Fresh,
        Part::Old(why) | Part::Missing(why) => KubeconfigState::Stale(why.clone()),
    });
    let follower = tokio::spawn(spec.follow(state, stop.clone()));
    let config = guard::Config { remember: Remember::Replaced, ..config };
    let (guard, verifier) = start(config, want(&prepared), runtime, metrics, desk)?;
    let ended = tokio::select! {
        ended = until_end(&guard, desk, &mut stop) => ended,
        () = keep(&contract, prepared, &path, &guard, &mut fresh) => Ok(()),
    };
    drop(verifier);
    end(guard).await;
    follower.abort();
    ended
}

/// Drop-in files are used only where the runtime says that it reads them. Otherwise the lists carry the entry.
async fn with_drop_in(config: guard::Config, runtime: runtime::Options) -> (guard::Config, runtime::Options) {
    if !config.options.drop_in {
        return (config, runtime);
    }
    let answer = runtime::reads_drop_ins(&runtime).await;
    if let Err(why) = &answer {
        tracing::error!(why, "no drop-in files: the entry goes into the lists");
    }
    let drop_in = answer.is_ok();
    let options = plan::Options { drop_in, ..config.options };
    (guard::Config { options, ..config }, runtime::Options { drop_in, ..runtime })
}

/// Lets the guard finish what is under way, while signals are still heard.
async fn end(guard: Guard) {
    if tokio::task::spawn_blocking(move || guard.stop()).await.is_err() {
        tracing::error!("the end of the CNI guard was cut short");
    }
}

/// Follows binaries and kubeconfig for ever, and tells the guard what may be in configs.
async fn keep(
    contract: &Contract,
    mut prepared: Prepared,
    kubeconfig: &Path,
    guard: &Guard,
    fresh: &mut watch::Receiver<KubeconfigState>,
) {
    let bin_dir = contract.mounted_bin_dir();
    let mut stamps = Stamps::of(&bin_dir, &prepared.installed);
    let mut pause = RETRY;
    loop {
        let good = prepared.binary == Part::Current && prepared.unasked.is_none();
        pause = if good { CHECK } else { (pause * 2).min(MAX_RETRY) };
        let before = (prepared.verdict(), prepared.wanted.clone());
        tokio::select! {
            changed = fresh.changed() => {
                if changed.is_err() {
                    return; // the follower ends with the process
                }
                prepared.kubeconfig = part(&fresh.borrow_and_update(), kubeconfig);
            }
            () = tokio::time::sleep(pause) => {
                let same_entry = contract.wanted().is_ok_and(|now| now.text() == prepared.wanted.text());
                if good && same_entry && stamps.hold(&bin_dir, &prepared.installed) {
                    continue;
                }
                match prepare(contract, VERSION_TIMEOUT).await {
                    Ok(now) => prepared = now,
                    // The template's file: what is known of it goes on counting.
                    Err(error) => tracing::warn!(%error, "cannot look at the CNI entry again"),
                }
                tell(&prepared);
                stamps = Stamps::of(&bin_dir, &prepared.installed);
            }
        }
        if before != (prepared.verdict(), prepared.wanted.clone()) {
            tracing::warn!(verdict = ?prepared.verdict(), "what configs may carry changed");
            guard.want(want(&prepared));
        }
    }
}

fn want(prepared: &Prepared) -> Want {
    match prepared.verdict() {
        Verdict::Keep => Want::Entry(prepared.wanted.clone()),
        Verdict::Withdraw => Want::Withdraw(prepared.wanted.clone()),
    }
}

fn part(state: &KubeconfigState, path: &Path) -> Part {
    match state {
        KubeconfigState::Fresh => Part::Current,
        KubeconfigState::Stale(why) if path.is_file() => Part::Old(why.clone()),
        KubeconfigState::Stale(why) => Part::Missing(why.clone()),
    }
}

fn tell(prepared: &Prepared) {
    let Prepared { wanted, installed, binary, kubeconfig, unasked } = prepared;
    for Installed { name, bytes, written } in installed {
        if *written {
            tracing::info!(name = %name.to_string_lossy(), bytes, "CNI plugin installed");
        }
    }
    for (what, part) in [("binary", binary), ("kubeconfig", kubeconfig)] {
        if let Some(reason) = part.problem() {
            tracing::error!(what, reason, plugin = wanted.plugin(), "the CNI plugin lacks something");
        }
    }
    if let Some(reason) = unasked {
        tracing::warn!(reason, "the CNI plugin's versions are not known");
    }
}

/// The binaries' inodes: as long as they are the same, nobody has replaced or changed one.
#[derive(Debug)]
struct Stamps(Vec<Option<(u64, u64, i64, i64)>>);

impl Stamps {
    fn of(dir: &Path, installed: &[Installed]) -> Self {
        let stamp = |name: &OsStr| {
            let found = std::fs::symlink_metadata(dir.join(name)).ok()?;
            Some((found.ino(), found.len(), found.ctime(), found.ctime_nsec()))
        };
        Self(installed.iter().map(|one| stamp(&one.name)).collect())
    }

    /// Whether every binary is there, and the same as before.
    fn hold(&self, dir: &Path, installed: &[Installed]) -> bool {
        let Self(now) = Self::of(dir, installed);
        now.iter().all(Option::is_some) && now == self.0
    }
}

fn removal(config: &guard::Config, contract: &Contract, prepared: &Prepared) -> Removal {
    Removal {
        dir: config.dir.clone(),
        host: config.host.clone(),
        which: Which::Exactly(prepared.wanted.clone()),
        kubeconfig: Some(contract.kubeconfig.clone()),
        bin_dir: Some(contract.mounted_bin_dir()),
        grace: uninstall::GRACE,
    }
}

async fn clean_up(removal: &Removal) {
    match uninstall(removal).await {
        Ok(report) if report.complete() => tracing::info!("CNI entry, kubeconfig and plugin removed"),
        Ok(report) => {
            tracing::warn!(?report, "CNI cleanup is incomplete; `nobypass cni uninstall` can finish it");
        }
        Err(error) => tracing::warn!(%error, "no CNI cleanup; `nobypass cni uninstall` can do it later"),
    }
}
