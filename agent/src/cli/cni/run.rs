//! `nobypass cni run`.

use std::path::PathBuf;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::{Failure, Mode, RuntimeName, Where, Which, contract};
use crate::cli::exit::{Exit, print};
use crate::cni::desk::Desk;
use crate::cni::discover::MESH_PLUGINS;
use crate::cni::entry::Place;
use crate::cni::guard::{Config, Want};
use crate::cni::install::{Contract, Template};
use crate::cni::metrics::Metrics;
use crate::cni::plan::Options;
use crate::cni::run::{self as half, RunError, Settings};
use crate::cni::runtime::{self, equipped::Places};
use crate::config::{self, Address};
use crate::pods::source::cri::endpoint;
use crate::server::{
    self,
    listen::{ListenError, listen},
};
use crate::sys;
use crate::telemetry::{self, LogFormat};

/// All configs have been looked at by then.
const STARTED: Duration = Duration::from_secs(3);

/// What the CNI half is told, alone and in the agent.
#[derive(Debug, clap::Args)]
pub struct HalfArgs {
    #[command(flatten)]
    place: Where,
    #[command(flatten)]
    which: Which,
    /// What is nobypass's part in this node's CNI configuration
    #[arg(long, value_name = "MODE", env = "NOBYPASS_CNI_MODE", default_value = "guard")]
    cni_mode: Mode,
    /// How the node's container runtime chooses its config
    #[arg(long, value_name = "RUNTIME", env = "NOBYPASS_CNI_RUNTIME", default_value = "containerd")]
    cni_runtime: RuntimeName,
    /// Leave single-plugin files (.conf, .json) as they are
    #[arg(long, env = "NOBYPASS_CNI_KEEP_CONF")]
    cni_keep_conf: bool,
    /// In install mode, put the entry into a file of its own beside the list, which no other writer can lose: libcni's
    /// drop-in directory. Only with containerd from 2.1 on, which is asked; otherwise the lists carry the entry
    #[arg(long, env = "NOBYPASS_CNI_DROP_IN")]
    cni_drop_in: bool,
    /// Directory of the plugin binaries, for install mode [default: /opt/cni/bin, or what CONTAINER_MOUNT_PREFIX and
    /// DEST_CNI_BIN_DIR say]
    #[arg(long, value_name = "DIR", env = "NOBYPASS_CNI_BIN_DIR")]
    cni_bin_dir: Option<PathBuf>,
    /// In install mode, take everything off the node again when told to stop. Not for upgrades: pods that start in
    /// between would bypass the mesh
    #[arg(long, env = "NOBYPASS_CNI_CLEANUP_ON_EXIT")]
    cni_cleanup_on_exit: bool,
}

/// `nobypass cni run`.
#[derive(Debug, clap::Args)]
pub struct Run {
    #[command(flatten)]
    half: HalfArgs,
    /// The container runtime's socket: the node counts as protected once the runtime has loaded the entry [default: the
    /// first usual one whose runtime reads this directory]
    #[arg(long, env = "NOBYPASS_CRI_ENDPOINT", value_name = "SOCKET")]
    cri_endpoint: Option<String>,
    /// Address for /metrics, /livez and /readyz, or `none`
    #[arg(long, env = "NOBYPASS_METRICS_ADDR", value_name = "ADDR", default_value = "none", value_parser = config::address)]
    metrics_addr: Address,
    /// Unix socket for `nobypass cni status` [default: none]
    #[arg(long, env = "NOBYPASS_SOCKET", value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Log filter: a level, or target=level terms
    #[arg(long, value_name = "FILTER", env = "NOBYPASS_LOG", default_value = "info")]
    log: String,
    /// Format of log lines
    #[arg(long, env = "NOBYPASS_LOG_FORMAT", value_enum, default_value_t)]
    log_format: LogFormat,
}

impl HalfArgs {
    /// How to run it, `None` if it is off. The runtime's socket is still to be named.
    pub fn settings(&self) -> Result<Option<Settings>, Failure> {
        if self.cni_mode == Mode::Off {
            return Ok(None);
        }
        if self.cni_drop_in && self.cni_mode != Mode::Install {
            let message = "--cni-drop-in needs --cni-mode=install: beside a mesh's own installer, which writes its entry into \
                           the lists, the plugin would run twice";
            return Err((Exit::Usage, message.to_owned()));
        }
        let mut contract = contract()?;
        let (dir, host) = self.place.dirs(&contract);
        if let Some(bin_dir) = &self.cni_bin_dir {
            contract.mounted_bin = Some(bin_dir.clone());
        }
        contract.mounted_net = Some(dir.clone());
        if let Some(entry) = &self.which.cni_entry {
            contract.template = Some(Template::File(entry.clone()));
        }
        let places = Places { dir: dir.clone(), host: host.clone(), bin_dir: contract.mounted_bin_dir() };
        let runtime = runtime::Options { endpoint: None, host_root: "/".into(), drop_in: false, places };
        let mode = mode(self, contract)?;
        let guard = Config {
            host,
            options: Options {
                convert: !self.cni_keep_conf,
                clean_meta: self.cni_mode == Mode::Install,
                drop_in: self.cni_drop_in,
            },
            runtime: self.cni_runtime.into(),
            ..Config::new(dir)
        };
        Ok(Some(Settings { guard, mode, runtime, desk: Desk::default() }))
    }
}

/// Runs it.
pub fn run(args: &Run) -> Result<Exit, Failure> {
    let Some(mut settings) = args.half.settings()? else {
        return Ok(print("nothing to do: the CNI half is off\n"));
    };
    let endpoint = args.cri_endpoint.as_deref().map(endpoint::parse).transpose();
    settings.runtime.endpoint =
        endpoint.map_err(|error| (Exit::Usage, format!("--cri-endpoint: {error}")))?;
    let level = telemetry::init(&args.log, args.log_format)
        .map_err(|error| (Exit::Usage, format!("--log: {error}")))?;
    let failed = |error: std::io::Error| (Exit::Failed, format!("cannot start: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    tracing::info!(dir = %settings.guard.dir.display(), mode = ?args.half.cni_mode, runtime = ?args.half.cni_runtime, "keeping the CNI directory");
    runtime.block_on(async {
        let stop = stop().map_err(|error| (Exit::Failed, format!("cannot start: {error}")))?;
        let metrics = Metrics::default();
        let context = server::alone(level, settings.desk.clone(), &metrics);
        let refused = |error: ListenError| (error.exit(), error.to_string());
        tokio::spawn(settle_down());
        // The socket's file goes when this ends.
        let (tcp, unix, _file) = listen(args.metrics_addr, args.socket.as_deref()).await.map_err(refused)?;
        tokio::select! {
            ended = half::run(settings, metrics, stop) => match ended {
                Ok(()) => Ok(Exit::Ok),
                Err(error @ RunError::Contract(_)) => Err((Exit::Usage, error.to_string())),
                Err(error) => Err((Exit::Failed, error.to_string())),
            },
            ended = server::serve(tcp, unix, context) => {
                let why = ended.err().map_or_else(String::new, |error| format!(": {error}"));
                Err((Exit::Failed, format!("the server ended{why}")))
            }
        }
    })
}

/// Most of what is resident soon after the start are pages that nothing needs again: command line, set-up.
async fn settle_down() {
    tokio::time::sleep(STARTED).await;
    match sys::memory::release_program() {
        Ok(bytes) => tracing::debug!(bytes, "gave back the program's pages of the start"),
        Err(error) => tracing::debug!(%error, "cannot give back the program's pages of the start"),
    }
}

fn mode(args: &HalfArgs, contract: Contract) -> Result<half::Mode, Failure> {
    if args.cni_mode == Mode::Install {
        let cleanup = args.cni_cleanup_on_exit;
        return Ok(half::Mode::Install { contract: Box::new(contract), cleanup });
    }
    let want = match args.which.given(&contract)? {
        Some(wanted) => Want::Entry(wanted.entry),
        None => {
            let known = || MESH_PLUGINS.map(str::to_owned).to_vec();
            let plugins = args.which.cni_plugin.clone().map_or_else(known, |plugin| vec![plugin]);
            Want::Learn { plugins, place: Place::Last }
        }
    };
    Ok(half::Mode::Guard(want))
}

/// True from SIGTERM or SIGINT on; the second one ends the process at once.
fn stop() -> std::io::Result<watch::Receiver<bool>> {
    let (sender, stop) = watch::channel(false);
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if sender.send_replace(true) {
                tracing::warn!("told to stop again; ending at once");
                rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).ok();
            }
            tracing::info!("told to stop");
        }
    });
    Ok(stop)
}
