//! HTTP: `/livez /readyz /metrics` on a port, and those with the command line's routes on a Unix socket.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use axum::{Json, Router};
use nobypass_common::ids::Mode;
use prometheus_client::registry::Registry;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use crate::bpf::Maps;
use crate::detect::report::Report;
use crate::policy::{PodView, Snapshot};
use crate::probe::{Answer, Handle, Probed};
use crate::status::{self, HookStatus};
use crate::telemetry::LevelHandle;

/// Default of `--socket`.
pub const DEFAULT_SOCKET: &str = "/run/nobypass/agent.sock";

/// Labels of [`Channel`], in its order.
const CHANNELS: [&str; 2] = ["events", "cgroups"];

/// Channels whose full moments are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Reports to a reader of `nobypass events` that is too slow: one a report.
    Events,
    /// Cgroup events to the keeper, which scans then.
    Cgroups,
}

/// What tasks say about themselves. Locks are held for a copy, never across an await.
#[derive(Debug, Default)]
pub struct Health {
    pending: Mutex<BTreeMap<&'static str, String>>,
    hooks: Mutex<Vec<HookStatus>>,
    dropped: [AtomicU64; CHANNELS.len()],
}

impl Health {
    /// Something is not ready, and why.
    pub fn wait_for(&self, what: &'static str, why: impl Into<String>) {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).insert(what, why.into());
    }

    /// It is now.
    pub fn done(&self, what: &'static str) {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).remove(what);
    }

    /// What is not ready.
    pub fn pending(&self) -> Vec<String> {
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        pending.iter().map(|(what, why)| format!("{what}: {why}")).collect()
    }

    /// Sets the hooks' state.
    pub fn set_hooks(&self, hooks: Vec<HookStatus>) {
        *self.hooks.lock().unwrap_or_else(PoisonError::into_inner) = hooks;
    }

    /// The hooks' state.
    pub fn hooks(&self) -> Vec<HookStatus> {
        self.hooks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A channel was full `times` times in all.
    pub fn set_dropped(&self, channel: Channel, times: u64) {
        if let Some(dropped) = self.dropped.get(channel as usize) {
            dropped.store(times, Ordering::Relaxed);
        }
    }

    /// A channel was full `times` times more.
    pub fn add_dropped(&self, channel: Channel, times: u64) {
        if let Some(dropped) = self.dropped.get(channel as usize) {
            dropped.fetch_add(times, Ordering::Relaxed);
        }
    }

    /// Full moments by channel.
    pub fn dropped(&self) -> [(&'static str, u64); CHANNELS.len()] {
        let mut counts = CHANNELS.map(|channel| (channel, 0));
        for ((_, count), dropped) in counts.iter_mut().zip(&self.dropped) {
            *count = dropped.load(Ordering::Relaxed);
        }
        counts
    }
}

/// A change that the one writer of the settings shall make.
#[derive(Debug)]
pub struct SetMode {
    /// The new mode.
    pub mode: Mode,
    /// Told when it holds, or why not.
    pub done: oneshot::Sender<Result<(), String>>,
}

/// What the routes need. Parts that come up later are empty until then.
#[derive(Debug)]
pub struct Context {
    /// Readiness, hooks.
    pub health: Arc<Health>,
    /// The metrics, once there are maps to read.
    pub registry: OnceLock<Registry>,
    /// The maps, once there are any.
    pub maps: OnceLock<Maps>,
    /// Pods.
    pub snapshots: OnceLock<watch::Receiver<Snapshot>>,
    /// Bypasses as they come.
    pub reports: broadcast::Sender<Arc<Report>>,
    /// To the writer of the settings.
    pub set_mode: mpsc::Sender<SetMode>,
    /// Asks pods' networks, once it can.
    pub probe: OnceLock<Handle>,
    /// The log's level.
    pub level: LevelHandle,
}

/// The routes of the port.
pub fn public(context: Arc<Context>) -> Router {
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(context)
}

/// The routes of the socket.
pub fn private(context: Arc<Context>) -> Router {
    Router::new()
        .route("/v1/status", get(node_status))
        .route("/v1/events", get(events))
        .route("/v1/mode", put(set_mode))
        .route("/v1/probe", put(probe))
        .route("/v1/log-level", put(log_level))
        .with_state(Arc::clone(&context))
        .merge(public(context))
}

async fn readyz(State(context): State<Arc<Context>>) -> Response {
    let pending = context.health.pending();
    if pending.is_empty() {
        return "ready\n".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, format!("not ready\n{}\n", pending.join("\n"))).into_response()
}

async fn metrics(State(context): State<Arc<Context>>) -> Response {
    let Some(registry) = context.registry.get() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "the kernel half is not loaded yet, see /readyz\n")
            .into_response();
    };
    let mut text = String::new();
    if let Err(error) = prometheus_client::encoding::text::encode(&mut text, registry) {
        return (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response();
    }
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

async fn node_status(State(context): State<Arc<Context>>) -> Response {
    let (Some(maps), Some(snapshots)) = (context.maps.get(), context.snapshots.get()) else {
        let pending = context.health.pending().join("; ");
        return (StatusCode::SERVICE_UNAVAILABLE, format!("the agent is starting: {pending}\n"))
            .into_response();
    };
    let snapshot = snapshots.borrow().clone();
    match status::read(maps, context.health.hooks(), Some(&snapshot)) {
        Ok(mut status) => {
            status.agent.pending = context.health.pending();
            Json(status).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

/// Bypasses as they come, one JSON object a line; a reader that is too slow is told how many it missed.
async fn events(State(context): State<Arc<Context>>) -> Response {
    let start = (context.reports.subscribe(), Arc::clone(&context.health));
    let lines = futures_util::stream::unfold(start, |(mut reports, health)| async move {
        let line = match reports.recv().await {
            Ok(report) => serde_json::to_string(&*report).ok()?,
            Err(broadcast::error::RecvError::Lagged(missed)) => {
                health.add_dropped(Channel::Events, missed);
                format!("{{\"missed\":{missed}}}")
            }
            Err(broadcast::error::RecvError::Closed) => return None,
        };
        Some((Ok::<_, std::convert::Infallible>(line + "\n"), (reports, health)))
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

async fn set_mode(State(context): State<Arc<Context>>, body: String) -> Response {
    let wanted = body.trim();
    let Some(mode) = Mode::ALL.iter().find(|mode| mode.label() == wanted) else {
        return (StatusCode::BAD_REQUEST, format!("{wanted:?} is no mode: off, audit or enforce\n"))
            .into_response();
    };
    let (done, result) = oneshot::channel();
    let sent = context.set_mode.send(SetMode { mode: *mode, done }).await;
    match (sent, result.await) {
        (Ok(()), Ok(Ok(()))) => format!("{}\n", mode.label()).into_response(),
        (Ok(()), Ok(Err(why))) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{why}\n")).into_response(),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "the agent is stopping\n").into_response(),
    }
}

/// The answer to a probe.
#[derive(Clone, Debug, serde::Serialize)]
pub struct PodProbe {
    /// The pod's namespace and name, empty where only its cgroup is known.
    pub namespace: Box<str>,
    /// See `namespace`.
    pub pod: Box<str>,
    /// Its mesh, empty for none.
    pub mesh: Box<str>,
    /// Its cgroup id.
    pub cgroup: u64,
    /// IPv4 and IPv6.
    pub families: [FamilyProbe; 2],
    /// How long it took, microseconds.
    pub took_us: u64,
}

/// The answer to a probe for one family.
#[derive(Clone, Debug, serde::Serialize)]
pub struct FamilyProbe {
    /// `ipv4` or `ipv6`.
    pub family: &'static str,
    /// The mesh redirects this family.
    pub due: bool,
    /// The answer.
    #[serde(flatten)]
    pub answer: Answer,
}

/// Asks the network of a pod, `namespace/name` or `cgroup:id`.
async fn probe(State(context): State<Arc<Context>>, body: String) -> Response {
    let (Some(handle), Some(snapshots)) = (context.probe.get(), context.snapshots.get()) else {
        return (StatusCode::SERVICE_UNAVAILABLE, "the agent is starting\n").into_response();
    };
    let wanted = body.trim();
    let is_wanted = |view: &&Arc<PodView>| match wanted.strip_prefix("cgroup:") {
        Some(id) => id.parse() == Ok(view.cgroup),
        None => wanted.split_once('/') == Some((&*view.namespace, &*view.name)),
    };
    let Some(view) = snapshots.borrow().pods.values().find(is_wanted).cloned() else {
        return (StatusCode::NOT_FOUND, format!("no pod {wanted:?} on this node\n")).into_response();
    };
    let Probed { answers: [v4, v6], took, .. } = handle.ask(view.cgroup).await;
    let [v4_due, v6_due] = view.families;
    Json(PodProbe {
        namespace: view.namespace.clone(),
        pod: view.name.clone(),
        mesh: view.mesh.clone(),
        cgroup: view.cgroup,
        families: [
            FamilyProbe { family: "ipv4", due: v4_due, answer: v4 },
            FamilyProbe { family: "ipv6", due: v6_due, answer: v6 },
        ],
        took_us: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
    })
    .into_response()
}

async fn log_level(State(context): State<Arc<Context>>, body: String) -> Response {
    match context.level.set(body.trim()) {
        Ok(()) => "ok\n".into_response(),
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    }
}

/// The socket's file. Dropping it removes the file, unless another agent has put its own there meanwhile.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = |meta: fs::Metadata| meta.dev() == self.device && meta.ino() == self.inode;
        if fs::symlink_metadata(&self.path).is_ok_and(ours) {
            // Whoever finds it finds that nobody answers.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Binds the socket that only root may use. One that a dead agent left is replaced.
///
/// # Errors
/// `AddrInUse` when another agent answers on it; `AlreadyExists` when the path is no socket; others as bind(2) says.
pub fn bind_socket(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    if let Some(dir) = path.parent()
        && !dir.exists()
    {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    }
    if fs::symlink_metadata(path).is_ok_and(|meta| !meta.file_type().is_socket()) {
        // connect(2) refuses it just like a dead agent's socket, but it is not ours to remove.
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => return Err(io::ErrorKind::AddrInUse.into()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path)?,
        Err(_) => {}
    }
    let listener = UnixListener::bind(path)?;
    let meta = fs::symlink_metadata(path)?;
    let file = SocketFile { path: path.into(), device: meta.dev(), inode: meta.ino() };
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok((listener, file))
}

/// Serves until the process ends.
///
/// # Errors
/// As accept(2) says.
pub async fn serve(tcp: Option<TcpListener>, unix: UnixListener, context: Arc<Context>) -> io::Result<()> {
    let private = axum::serve(unix, private(Arc::clone(&context)));
    match tcp {
        None => private.await,
        Some(tcp) => {
            let public = axum::serve(tcp, public(context));
            tokio::try_join!(private.into_future(), public.into_future()).map(|_| ())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_lists_what_is_pending() {
        let health = Health::default();
        assert!(health.pending().is_empty());
        health.wait_for("pods", "not listed yet");
        health.wait_for("hooks", "not attached");
        assert_eq!(health.pending(), ["hooks: not attached", "pods: not listed yet"]);
        health.done("pods");
        assert_eq!(health.pending(), ["hooks: not attached"]);
    }

    #[test]
    fn full_channels_are_counted_by_their_label() {
        let health = Health::default();
        health.set_dropped(Channel::Cgroups, 5);
        health.set_dropped(Channel::Cgroups, 7);
        health.add_dropped(Channel::Events, 2);
        health.add_dropped(Channel::Events, 1);
        assert_eq!(health.dropped(), [("events", 3), ("cgroups", 7)]);
    }

    #[tokio::test]
    async fn a_slow_reader_is_told_what_it_missed_and_so_is_everybody() {
        let (reports, _) = broadcast::channel(2);
        let health = Arc::new(Health::default());
        let (set_mode, _mode_changes) = mpsc::channel(1);
        let level = crate::telemetry::init("off", crate::telemetry::LogFormat::Text).unwrap();
        let context = Context {
            health: Arc::clone(&health),
            registry: OnceLock::new(),
            maps: OnceLock::new(),
            snapshots: OnceLock::new(),
            reports: reports.clone(),
            set_mode,
            probe: OnceLock::new(),
            level,
        };
        let mut body = events(State(Arc::new(context))).await.into_body().into_data_stream();
        let report: Arc<Report> = Arc::new(serde_json::from_value(a_report()).unwrap());
        for _ in 0..5 {
            reports.send(Arc::clone(&report)).unwrap();
        }
        let first = futures_util::StreamExt::next(&mut body).await.unwrap().unwrap();
        assert_eq!(first, "{\"missed\":3}\n");
        assert_eq!(health.dropped(), [("events", 3), ("cgroups", 0)]);
    }

    fn a_report() -> serde_json::Value {
        serde_json::json!({
            "time_ms": 1, "namespace": "shop", "pod": "cart", "container": "app", "mesh": "linkerd",
            "direction": "outbound", "src": "10.0.0.5:4", "dst": "192.0.2.1:443", "protocol": 6, "uid": 0,
            "reason": "not_redirected", "action": "passed", "mode": "audit", "cgroup": 1, "cookie": 2,
        })
    }

    #[tokio::test]
    async fn a_dead_agents_socket_is_replaced_and_a_living_ones_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/agent.sock");
        let first = bind_socket(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(bind_socket(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        let (listener, file) = first;
        // An agent that was killed removes nothing.
        std::mem::forget(file);
        drop(listener);
        let second = bind_socket(&path).unwrap();
        drop(second);
        assert!(!path.exists(), "an agent that ends takes its socket along");
    }

    #[tokio::test]
    async fn what_is_not_ours_stays() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "precious").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for path in [&file, &link, dir.path()] {
            assert_eq!(bind_socket(path).unwrap_err().kind(), io::ErrorKind::AlreadyExists, "{path:?}");
        }
        assert_eq!(fs::read_to_string(&link).unwrap(), "precious");

        let path = dir.path().join("agent.sock");
        let (_listener, first) = bind_socket(&path).unwrap();
        // A second agent that did not believe the first one to be alive.
        fs::remove_file(&path).unwrap();
        let _second = bind_socket(&path).unwrap();
        drop(first);
        assert!(path.exists(), "that is the second one's");
    }
}
