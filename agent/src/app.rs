//! Joins the modules: the only one that knows them all.
//!
//! Tasks end only when the process does; one that ends by itself takes the process down, so that nothing dies
//! silently. The pins stay: enforcement goes on without an agent.

mod follow;
mod gate;
mod keep;
mod older;
mod packet;
pub mod permissions;
pub mod pods;
mod policy;
mod probes;
mod probing;
mod react;
mod remedies;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nobypass_common::abi::Config as KernelConfig;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{broadcast, mpsc, watch};
use tokio::task::JoinSet;

use self::follow::{ProgramLog, follow_cgroups, follow_events, follow_inotify, follow_programs};
use self::keep::{follow_parents, keep_alive, show_hooks};
use self::policy::{follow_policy, wanted_of};
use crate::bpf::events::Ring;
use crate::bpf::pins::PinDir;
use crate::bpf::{BpfError, Hook, Kernel, Maps, Options, Parent, selftest};
use crate::cgroup::parents::{ParentError, PodParent, wait_for_parents};
use crate::cgroup::root::{CgroupRoot, RootError, RootOptions, find};
use crate::cgroup::stream::channel;
use crate::cli::exit::Exit;
use crate::cluster::access::Permissions;
use crate::cni;
use crate::config::Config;
use crate::detect;
use crate::mesh::{ProfileError, Profiles};
use crate::metrics;
use crate::pods::model::Wanted;
use crate::pods::source::PodUpdate;
use crate::pods::source::cri::endpoint;
use crate::policy::reload::{Loader, PolicyError};
use crate::policy::{Effective, Keeper, PolicyState};
use crate::server::listen::{ListenError, listen};
use crate::server::{Context, Health, serve};
use crate::sys::mount::{has_tracefs, private_tracefs};
use crate::telemetry::{self, BadFilter};

/// How often missing pod cgroups are looked for.
const WAIT: Duration = Duration::from_secs(1);
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
    #[error("--policy: {0}")]
    Policy(#[from] PolicyError),
    /// See the kind.
    #[error("--log: {0}")]
    Log(#[from] BadFilter),
    /// See the kind.
    #[error("--cri-endpoint: {0}")]
    Endpoint(#[from] endpoint::EndpointError),
    /// See the kind.
    #[error(transparent)]
    Gate(#[from] gate::GateError),
    /// See the kind.
    #[error(transparent)]
    Cni(cni::install::ContractError),
    /// See the kind.
    #[error(transparent)]
    Pods(#[from] pods::PodsError),
    /// Binding an address or socket failed.
    #[error(transparent)]
    Listen(#[from] ListenError),
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
            Self::Pods(error) => error.exit(),
            Self::Root(_) => Exit::Unavailable,
            Self::Cni(_)
            | Self::Gate(_)
            | Self::Parent(_)
            | Self::Profiles(_)
            | Self::Policy(_)
            | Self::Log(_)
            | Self::Endpoint(_) => Exit::Usage,
            Self::Listen(error) => error.exit(),
            Self::System { .. } | Self::Task { .. } => Exit::Failed,
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
    let loader = Loader::start(config, profiles)?;
    tracing::info!(policy = ?loader.state().effective, file = ?config.policy, "policy");
    let endpoint = config.cri_endpoint.as_deref().map(endpoint::parse).transpose()?;
    let plan = pods::plan(config)?;
    gate::check(&config.gate, cni.is_some(), plan.node().is_some())?;
    // It has no threads but this one, and what is wrong with flags is told before what is wrong with the machine.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| AppError::System { what: "start the runtime", source })?;
    let cluster = runtime.block_on(pods::connect(&plan, config))?;
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
    let cni_metrics = cni.is_some().then(cni::metrics::Metrics::default);
    let desk = cni.as_ref().map(|settings| settings.desk.clone());
    let agent = Agent { config, endpoint, plan, cluster, root, level, cni_metrics, desk };
    runtime.block_on(agent.run(cni, loader))
}

struct Agent<'a> {
    config: &'a Config,
    endpoint: Option<PathBuf>,
    plan: pods::Plan,
    /// The API server, where there is one.
    cluster: Option<kube::Client>,
    root: CgroupRoot,
    level: telemetry::LevelHandle,
    /// What the CNI half counts, if it runs.
    cni_metrics: Option<cni::metrics::Metrics>,
    /// Where it shows its state.
    desk: Option<cni::desk::Desk>,
}

/// How a task ended: its name, and its error if it was one.
type Ended = (&'static str, Result<(), String>);

impl Agent<'_> {
    /// The CNI half starts first, since it needs nothing else, and ends last: what is under way is finished.
    async fn run(self, cni: Option<cni::run::Settings>, loader: Loader) -> Result<(), AppError> {
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
            ended = self.work(loader) => ended,
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

    async fn work(&self, loader: Loader) -> Result<(), AppError> {
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
            tracker: OnceLock::new(),
            policy: OnceLock::new(),
            set_mode,
            probe: OnceLock::new(),
            level: self.level.clone(),
            cni: self.desk.clone(),
        });
        // Goes when this function ends, however it ends.
        let config = self.config;
        let (tcp, unix, _socket) = listen(config.metrics_addr, Some(&config.socket)).await?;
        let serving = Arc::clone(&context);
        tasks.spawn(
            async move { ("server", serve(tcp, unix, serving).await.map_err(|error| error.to_string())) },
        );
        let (told, policy) = watch::channel(loader.state().clone());
        let _ = context.policy.set(policy.clone());
        let permissions =
            permissions::spawn(&mut tasks, self.cluster.as_ref(), &config.gate, policy.clone(), &health);
        let place = gate::Place {
            args: &config.gate,
            desk: self.desk.as_ref(),
            cluster: self.cluster.clone().zip(self.plan.node()),
            permissions: &permissions,
            socket: &config.socket,
            health: &health,
        };
        // Before anything is waited for: what another boot left open is to be closed first.
        let gate = gate::spawn(&mut tasks, place);
        let parents = tokio::select! {
            parents = wait_for_parents(&self.root, &self.config.pod_parent, WAIT) => parents?,
            () = &mut stop => return Ok(()),
        };
        health.done("pod-cgroups");
        let parts = self.start(&parents, &context, policy).await?;
        let (wants, wanted) = watch::channel(wanted_of(loader.state()));
        let (apply, changes) = mpsc::channel(1);
        let health = Arc::clone(&context.health);
        tasks.spawn(follow_policy(loader, told, wants, mode_changes, apply, health));
        self.spawn(&mut tasks, parts, parents, (wanted, changes), &context, (gate, permissions))?;
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

    /// Loads and attaches, proves the effect, opens what the server reads.
    async fn start(
        &self,
        parents: &[PodParent],
        context: &Context,
        policy: watch::Receiver<PolicyState>,
    ) -> Result<(Kernel, Keeper, Option<ProgramLog>), AppError> {
        let options = Options {
            dir: self.config.bpf_dir.clone(),
            max_pods: self.config.max_pods,
            config: kernel_config(&policy.borrow().effective),
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
            adopted = kernel.adopted(), mode = ?policy.borrow().effective.mode, "attached"
        );
        // Entries of pods that died while no agent ran must not leave the canary without room.
        let (mut keeper, snapshots) = Keeper::new(Maps::open(&dir)?, places, policy);
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
        (wanted, changes): (watch::Receiver<Wanted>, mpsc::Receiver<policy::Apply>),
        context: &Arc<Context>,
        (gate, permissions): (gate::Parts, Permissions),
    ) -> Result<(), AppError> {
        let dir = kernel.dir().clone();
        let health = Arc::clone(&context.health);
        let Some(snapshots) = context.snapshots.get().cloned() else { return Ok(()) };
        let (tracker, handle) = detect::Tracker::new(Maps::open(&dir)?);
        let (states_of_pods, Some(policy)) = (handle.states.clone(), context.policy.get().cloned()) else {
            return Ok(());
        };
        let findings = handle.findings.clone();
        let _ = context.tracker.set(handle);
        let sources = metrics::Sources {
            snapshots: snapshots.clone(),
            states: states_of_pods.clone(),
            policy: policy.clone(),
            health: Arc::clone(&health),
        };
        let mut registry = metrics::registry(&dir, sources, self.cni_metrics.as_ref())?;
        let mut probes = self.probes(&mut kernel, &snapshots, &mut registry, context)?;
        probes.probing.findings = Some(findings);

        let (cgroups, cgroup_events) = channel(CGROUP_QUEUE);
        let (nudge, nudges) = mpsc::channel(QUEUE);
        let (updates, pod_updates) = mpsc::channel::<PodUpdate>(QUEUE);
        let ring = Ring::open(&dir, "CGROUPS")?;
        let traced = kernel.effective().iter().all(|(hook, on)| *on || !Hook::TRACEPOINT.contains(hook));
        if !traced {
            tasks.spawn(follow_inotify(parents.clone(), cgroups.clone(), nudge.clone()));
        }
        tasks.spawn(follow_cgroups(ring, parents.clone(), cgroups, nudge, Arc::clone(&health)));
        let (client, endpoint) = (self.cluster.as_ref(), self.endpoint.as_ref());
        let states = pods::spawn(tasks, &self.plan, client, endpoint, &wanted, nudges, updates);
        registry.register_collector(Box::new(states.clone()));
        gate.register(&mut registry);
        permissions.register(&mut registry);
        let remedy_metrics = remedies::metrics(&mut registry);
        let _ = context.registry.set(registry);
        tasks.spawn(async move {
            let ended = keeper.run(cgroup_events, pod_updates, probes.refusals).await;
            ("policy", ended.map_err(|error| error.to_string()))
        });
        tasks.spawn(pods::watch_sources(states, snapshots.clone(), Arc::clone(&health)));
        if let Some(log) = log {
            tasks.spawn(follow_programs(log));
        }
        if let Some(probe) = context.probe.get().cloned() {
            let limits = permissions::remedies(tasks, &permissions, policy);
            let known = (states_of_pods, probe);
            remedies::join(tasks, self, known, remedy_metrics, (&gate, limits), snapshots.clone());
        }
        let (pods, reports) = (snapshots.clone(), context.reports.subscribe());
        tasks.spawn(async move {
            tracker.run(pods, reports).await;
            ("verdicts", Ok(()))
        });
        let events = Ring::open(&dir, "EVENTS")?;
        tasks.spawn(follow_events(
            events,
            Maps::open(&dir)?,
            snapshots,
            context.reports.clone(),
            probes.reactions,
        ));
        tasks.spawn(probing::run(probes.probing, probes.requests, probes.news));
        tasks.spawn(keep_alive(kernel, parents.clone(), changes, health));
        tasks.spawn(follow_parents(self.root.clone(), self.config.pod_parent.clone(), parents));
        Ok(())
    }
}

/// The programs' settings, but for the parents.
fn kernel_config(policy: &Effective) -> KernelConfig {
    let mut config = KernelConfig::default();
    policy.kernel(&mut config);
    config
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
