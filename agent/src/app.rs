//! Joins the modules: the only one that knows them all.
//!
//! Tasks end only when the process does; one that ends by itself takes the process down, so that nothing dies
//! silently. The pins stay: enforcement goes on without an agent.

mod follow;
mod keep;
mod probes;
mod probing;
mod react;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nobypass_common::abi::{CONFIG_INBOUND, CONFIG_JUDGE_NON_TCP, Config as KernelConfig};
use nobypass_common::ids::{Mode, UnknownPolicy};
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{broadcast, mpsc, watch};
use tokio::task::JoinSet;

use self::follow::{
    ProgramLog, follow_cgroups, follow_events, follow_inotify, follow_programs, watch_source,
};
use self::keep::{follow_parents, keep_alive, show_hooks};
use crate::bpf::events::Ring;
use crate::bpf::pins::PinDir;
use crate::bpf::{BpfError, Hook, Kernel, Maps, Options, Parent, selftest};
use crate::cgroup::parents::{ParentError, PodParent, wait_for_parents};
use crate::cgroup::root::{CgroupRoot, RootError, RootOptions, find};
use crate::cgroup::stream::channel;
use crate::cli::exit::Exit;
use crate::cni;
use crate::config::{Config, InboundFlag, NonTcpFlag};
use crate::mesh::{ProfileError, Profiles};
use crate::metrics;
use crate::pods::source::PodUpdate;
use crate::pods::source::cri::{CriOptions, CriSource, endpoint};
use crate::policy::Keeper;
use crate::policy::desired::Wishes;
use crate::server::{Context, Health, SetMode, SocketFile, bind_socket, serve};
use crate::sys::mount::{has_tracefs, private_tracefs};
use crate::telemetry::{self, BadFilter};

/// How often missing pod cgroups are looked for.
const WAIT: Duration = Duration::from_secs(1);
/// How often, and how long, a socket in use is waited for.
const SOCKET_TRIES: u32 = 10;
/// See [`SOCKET_TRIES`].
const SOCKET_PAUSE: Duration = Duration::from_millis(50);
/// How long the CNI half may take to finish what is under way; a pod gets 30 s to end.
const CNI_END: Duration = Duration::from_secs(20);
/// Cgroup events on their way to the keeper.
const CGROUP_QUEUE: usize = 4096;
/// Pod updates, hints and reports on their way.
const QUEUE: usize = 1024;

/// Why the agent does not run, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// See the kind.
    #[error(transparent)]
    Bpf(#[from] BpfError),
    /// See the kind.
    #[error(transparent)]
    Root(#[from] RootError),
    /// See the kind.
    #[error(transparent)]
    Parent(#[from] ParentError),
    /// See the kind.
    #[error(transparent)]
    Profiles(#[from] ProfileError),
    /// See the kind.
    #[error("--log: {0}")]
    Log(#[from] BadFilter),
    /// See the kind.
    #[error("--cri-endpoint: {0}")]
    Endpoint(#[from] endpoint::EndpointError),
    /// See the kind.
    #[error(transparent)]
    Cni(cni::install::ContractError),
    /// Binding an address or socket failed.
    #[error("cannot listen on {at}: {source}; {remedy}")]
    Listen { at: String, source: std::io::Error, remedy: &'static str },
    /// The runtime or a signal handler could not be set up.
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: std::io::Error },
    /// A task ended although it should run for ever.
    #[error("the task {task} ended{why}; stopping, so that it is started again")]
    Task { task: &'static str, why: String },
}

impl AppError {
    /// The exit code.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Bpf(error) => error.exit(),
            Self::Root(_) => Exit::Unavailable,
            Self::Cni(_) | Self::Parent(_) | Self::Profiles(_) | Self::Log(_) | Self::Endpoint(_) => {
                Exit::Usage
            }
            Self::Listen { source, .. } if source.kind() == ErrorKind::PermissionDenied => Exit::NoPermission,
            Self::Listen { .. } | Self::System { .. } | Self::Task { .. } => Exit::Failed,
        }
    }
}

/// Runs the agent until it is told to stop; without `cni`, the CNI configuration is left alone.
///
/// # Errors
/// [`AppError`], each with what to do.
pub fn run(config: &Config, cni: Option<cni::run::Settings>) -> Result<(), AppError> {
    let level = telemetry::init(&config.log, config.log_format)?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), ?config, "nobypass agent starts");
    let profiles = match &config.profiles {
        Some(path) => Profiles::load(path)?,
        None => Profiles::built_in(),
    };
    let endpoint = config.cri_endpoint.as_deref().map(endpoint::parse).transpose()?;
    let root = find(&RootOptions { path: config.cgroup_root.clone(), level: config.cgroup_root_level })?;
    tracing::info!(path = %root.path.display(), kind = ?root.kind, "cgroup2 found");
    // Before the kubelet is waited for: what is missing is to be known now.
    PinDir::new(&config.bpf_dir).check()?;
    // Before there are threads: a mount namespace of one's own cannot be taken with them.
    if !has_tracefs()
        && let Err(error) = private_tracefs()
    {
        tracing::warn!(%error, "tracefs is not mounted and cannot be: new pods are known at their first packet; \
            mount it with: mount -t tracefs tracefs /sys/kernel/tracing");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| AppError::System { what: "start the runtime", source })?;
    let cni_metrics = cni.is_some().then(cni::metrics::Metrics::default);
    let agent = Agent { config, profiles: Arc::new(profiles), endpoint, root, level, cni_metrics };
    runtime.block_on(agent.run(cni))
}

struct Agent<'a> {
    config: &'a Config,
    profiles: Arc<Profiles>,
    endpoint: Option<PathBuf>,
    root: CgroupRoot,
    level: telemetry::LevelHandle,
    /// What the CNI half counts, if it runs.
    cni_metrics: Option<cni::metrics::Metrics>,
}

/// How a task ended: its name, and its error if it was one.
type Ended = (&'static str, Result<(), String>);

impl Agent<'_> {
    /// The CNI half starts first, since it needs nothing else, and ends last: what is under way is finished.
    async fn run(self, cni: Option<cni::run::Settings>) -> Result<(), AppError> {
        let (stop, stopping) = watch::channel(false);
        let metrics = self.cni_metrics.clone().unwrap_or_default();
        let mut half = cni.map(|mut settings| {
            settings.runtime.endpoint.clone_from(&self.endpoint);
            tokio::spawn(cni::run::run(settings, metrics, stopping))
        });
        let half_ends = async {
            match &mut half {
                Some(half) => half.await,
                None => std::future::pending().await,
            }
        };
        let ended = tokio::select! {
            ended = self.work() => ended,
            ended = half_ends => return Err(match ended {
                Ok(Err(cni::run::RunError::Contract(error))) => AppError::Cni(error),
                Ok(Err(error)) => AppError::Task { task: "cni", why: format!(": {error}") },
                Ok(Ok(())) => AppError::Task { task: "cni", why: String::new() },
                Err(error) => AppError::Task { task: "cni", why: format!(": {error}") },
            }),
        };
        stop.send_replace(true);
        if let Some(half) = half
            && tokio::time::timeout(CNI_END, half).await.is_err()
        {
            tracing::warn!("the CNI half did not end in time; the next start takes up what it left");
        }
        ended
    }

    async fn work(&self) -> Result<(), AppError> {
        let stop = stop_signal()?;
        tokio::pin!(stop);
        let mut tasks: JoinSet<Ended> = JoinSet::new();
        let health = Arc::new(Health::default());
        health.wait_for("pod-cgroups", "no pod cgroups yet, waiting for the kubelet");
        health.wait_for("hooks", "not attached yet");
        health.wait_for("pods", "not listed yet");
        let (reports, _) = broadcast::channel(QUEUE);
        let (set_mode, mode_changes) = mpsc::channel(1);
        let context = Arc::new(Context {
            health: Arc::clone(&health),
            registry: OnceLock::new(),
            maps: OnceLock::new(),
            snapshots: OnceLock::new(),
            reports,
            set_mode,
            probe: OnceLock::new(),
            level: self.level.clone(),
        });
        // Goes when this function ends, however it ends.
        let _socket = self.listen(&mut tasks, &context).await?;
        let parents = tokio::select! {
            parents = wait_for_parents(&self.root, &self.config.pod_parent, WAIT) => parents?,
            () = &mut stop => return Ok(()),
        };
        health.done("pod-cgroups");
        let parts = self.start(&parents, &context).await?;
        self.spawn(&mut tasks, parts, parents, mode_changes, &context)?;
        tokio::select! {
            () = &mut stop => {
                tracing::info!("stopping; what is pinned stays in effect (`nobypass cleanup` removes it)");
                Ok(())
            }
            Some(ended) = tasks.join_next() => Err(match ended {
                Ok((task, Ok(()))) => AppError::Task { task, why: String::new() },
                Ok((task, Err(why))) => AppError::Task { task, why: format!(": {why}") },
                Err(error) => AppError::Task { task: "?", why: format!(": {error}") },
            }),
        }
    }

    async fn listen(
        &self,
        tasks: &mut JoinSet<Ended>,
        context: &Arc<Context>,
    ) -> Result<SocketFile, AppError> {
        let socket = &self.config.socket;
        let (unix, file) = bind_patiently(socket).await.map_err(|source| AppError::Listen {
            at: socket.display().to_string(),
            remedy: match source.kind() {
                ErrorKind::AddrInUse => {
                    "another agent answers on it: stop it, or give this one another --socket"
                }
                ErrorKind::AlreadyExists => "it is not a socket: remove it, or give another --socket",
                ErrorKind::PermissionDenied => "run as root, or give another --socket",
                _ => "give another --socket",
            },
            source,
        })?;
        let tcp = match self.config.metrics_addr.0 {
            None => None,
            Some(address) => Some(TcpListener::bind(address).await.map_err(|source| AppError::Listen {
                at: address.to_string(),
                remedy: match source.kind() {
                    ErrorKind::AddrInUse => {
                        "another process has the port: stop it, or give another --metrics-addr (or none)"
                    }
                    _ => "give another --metrics-addr (or none)",
                },
                source,
            })?),
        };
        let context = Arc::clone(context);
        tasks.spawn(
            async move { ("server", serve(tcp, unix, context).await.map_err(|error| error.to_string())) },
        );
        Ok(file)
    }

    /// Loads and attaches, proves the effect, opens what the server reads.
    async fn start(
        &self,
        parents: &[PodParent],
        context: &Context,
    ) -> Result<(Kernel, Keeper, Option<ProgramLog>), AppError> {
        let options = Options {
            dir: self.config.bpf_dir.clone(),
            max_pods: self.config.max_pods,
            config: kernel_config(self.config),
        };
        let places = parents.to_vec();
        let parents: Vec<Parent> = parents.iter().map(parent).collect();
        let mut kernel = Kernel::start(&options, &parents)?;
        let log = aya_log::EbpfLogger::init(kernel.object())
            .inspect_err(|error| tracing::debug!(%error, "the programs' own log is not available"))
            .ok();
        let dir = kernel.dir().clone();
        tracing::info!(
            parents = ?parents.iter().map(|parent| &parent.below_root).collect::<Vec<_>>(),
            adopted = kernel.adopted(), mode = ?self.config.mode, "attached"
        );
        // Entries of pods that died while no agent ran must not leave the canary without room.
        let (mut keeper, snapshots) =
            Keeper::new(Maps::open(&dir)?, places, Arc::clone(&self.profiles), wishes(self.config));
        keeper.rescan()?;
        let _ = context.snapshots.set(snapshots);
        let mut maps = Maps::open(&dir)?;
        let proven = tokio::task::spawn_blocking(move || {
            parents.iter().try_for_each(|parent| selftest::run(&mut maps, parent))
        });
        match proven.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                kernel.withdraw();
                return Err(error.into());
            }
            Err(error) => return Err(AppError::Task { task: "selftest", why: format!(": {error}") }),
        }
        kernel.replace_others()?;
        show_hooks(&kernel, &context.health);
        let _ = context.maps.set(Maps::open(&dir)?);
        Ok((kernel, keeper, log))
    }

    fn spawn(
        &self,
        tasks: &mut JoinSet<Ended>,
        (mut kernel, keeper, log): (Kernel, Keeper, Option<ProgramLog>),
        parents: Vec<PodParent>,
        mode_changes: mpsc::Receiver<SetMode>,
        context: &Arc<Context>,
    ) -> Result<(), AppError> {
        let dir = kernel.dir().clone();
        let health = Arc::clone(&context.health);
        let Some(snapshots) = context.snapshots.get().cloned() else { return Ok(()) };
        let mut registry =
            metrics::registry(&dir, snapshots.clone(), Arc::clone(&health), self.cni_metrics.as_ref())?;
        let probes = self.probes(&mut kernel, &snapshots, &mut registry, context)?;
        let _ = context.registry.set(registry);

        let (cgroups, cgroup_events) = channel(CGROUP_QUEUE);
        let (nudge, nudges) = mpsc::channel(QUEUE);
        let (updates, pod_updates) = mpsc::channel::<PodUpdate>(QUEUE);
        let ring = Ring::open(&dir, "CGROUPS")?;
        let traced = kernel.effective().iter().all(|(hook, on)| *on || !Hook::TRACEPOINT.contains(hook));
        if !traced {
            tasks.spawn(follow_inotify(parents.clone(), cgroups.clone(), nudge.clone()));
        }
        tasks.spawn(follow_cgroups(ring, parents.clone(), cgroups, nudge, Arc::clone(&health)));
        let mut options = CriOptions::new(self.profiles.keys(), self.profiles.container_names());
        options.endpoint.clone_from(&self.endpoint);
        let (source, state) = CriSource::new(options);
        tasks.spawn(async move {
            source.run(nudges, updates).await;
            ("pods", Ok(()))
        });
        tasks.spawn(async move {
            let ended = keeper.run(cgroup_events, pod_updates, probes.refusals).await;
            ("policy", ended.map_err(|error| error.to_string()))
        });
        tasks.spawn(watch_source(state, snapshots.clone(), Arc::clone(&health)));
        if let Some(log) = log {
            tasks.spawn(follow_programs(log));
        }
        let events = Ring::open(&dir, "EVENTS")?;
        tasks.spawn(follow_events(
            events,
            Maps::open(&dir)?,
            snapshots,
            context.reports.clone(),
            probes.reactions,
        ));
        tasks.spawn(probing::run(probes.probing, probes.requests, probes.news));
        tasks.spawn(keep_alive(kernel, parents.clone(), mode_changes, health));
        tasks.spawn(follow_parents(self.root.clone(), self.config.pod_parent.clone(), parents));
        Ok(())
    }
}

/// As [`bind_socket`], waiting a moment for a socket that answers: an agent that was just killed may have a child that
/// has not run its program yet and holds the socket until then.
async fn bind_patiently(path: &Path) -> std::io::Result<(UnixListener, SocketFile)> {
    for _ in 0..SOCKET_TRIES {
        match bind_socket(path) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => {}
            other => return other,
        }
        tokio::time::sleep(SOCKET_PAUSE).await;
    }
    bind_socket(path)
}

/// The programs' settings, but for the parents.
fn kernel_config(config: &Config) -> KernelConfig {
    let mut flags = 0;
    if config.non_tcp != NonTcpFlag::Ignore || config.quic != NonTcpFlag::Ignore {
        flags |= CONFIG_JUDGE_NON_TCP;
    }
    if config.inbound == InboundFlag::Audit {
        flags |= CONFIG_INBOUND;
    }
    KernelConfig {
        mode: Mode::from(config.mode).code(),
        unknown_policy: UnknownPolicy::from(config.unknown_pods).code(),
        flags,
        hold_ns: u64::from(config.hold_ms) * 1_000_000,
        event_rate: config.event_rate,
        event_burst: config.event_rate.saturating_mul(3),
        ..KernelConfig::default()
    }
}

fn wishes(config: &Config) -> Wishes {
    Wishes { drop_non_tcp: config.non_tcp == NonTcpFlag::Drop, drop_quic: config.quic == NonTcpFlag::Drop }
}

/// What the kernel half needs to know of a parent.
pub fn parent(parent: &PodParent) -> Parent {
    let PodParent { path, rel, level, id, driver: _ } = parent;
    Parent { path: path.clone(), below_root: rel.clone(), level: *level, cgroup_id: *id }
}

/// Resolves at SIGTERM or SIGINT.
fn stop_signal() -> Result<impl Future<Output = ()>, AppError> {
    let system = |source| AppError::System { what: "handle signals", source };
    let mut term = signal(SignalKind::terminate()).map_err(system)?;
    let mut int = signal(SignalKind::interrupt()).map_err(system)?;
    Ok(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
    })
}
