//! HTTP: `/livez /readyz /metrics` on a port, and those with the command line's routes on a Unix socket.

pub mod listen;
mod policy;
pub mod probe;

use std::collections::BTreeMap;
use std::io;
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
use crate::cni::desk::Desk;
use crate::detect;
use crate::detect::report::Report;
use crate::policy::{PolicyState, Snapshot};
use crate::probe::Handle;
use crate::status::{self, HookStatus};
use crate::telemetry::LevelHandle;

/// Default of `--socket`.
pub const DEFAULT_SOCKET: &str = "/run/nobypass/agent.sock";

/// In place of a mode: what was set by hand ends.
pub const BY_POLICY: &str = "policy";

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
    notes: Mutex<BTreeMap<&'static str, String>>,
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

    /// Something is to be known that keeps nobody from working.
    pub fn note(&self, what: &'static str, text: impl Into<String>) {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).insert(what, text.into());
    }

    /// It is over.
    pub fn note_done(&self, what: &'static str) {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).remove(what);
    }

    /// What is to be known.
    pub fn notes(&self) -> Vec<String> {
        let notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        notes.iter().map(|(what, text)| format!("{what}: {text}")).collect()
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

/// The node's mode, set by hand.
#[derive(Debug)]
pub struct SetMode {
    /// The new mode; `None`: what the policy says.
    pub mode: Option<Mode>,
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
    /// Verdicts, and where to send what was found of pods.
    pub tracker: OnceLock<detect::tracker::Handle>,
    /// What holds.
    pub policy: OnceLock<watch::Receiver<PolicyState>>,
    /// To whoever decides on the settings.
    pub set_mode: mpsc::Sender<SetMode>,
    /// Asks pods' networks, once it can.
    pub probe: OnceLock<Handle>,
    /// The log's level.
    pub level: LevelHandle,
    /// The CNI half, if it runs.
    pub cni: Option<Desk>,
}

/// What is served of a CNI half that runs by itself: metrics, readiness and its state.
pub fn alone(level: LevelHandle, desk: Desk, metrics: &crate::cni::metrics::Metrics) -> Arc<Context> {
    let mut registry = Registry::with_prefix("nobypass");
    metrics.register(&mut registry);
    let (reports, _) = broadcast::channel(1);
    let (set_mode, _) = mpsc::channel(1);
    let context = Context {
        health: Arc::default(),
        registry: registry.into(),
        maps: OnceLock::new(),
        snapshots: OnceLock::new(),
        reports,
        tracker: OnceLock::new(),
        policy: OnceLock::new(),
        set_mode,
        probe: OnceLock::new(),
        level,
        cni: Some(desk),
    };
    Arc::new(context)
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
        .route("/v1/cni", get(cni))
        .route("/v1/events", get(events))
        .route("/v1/explain", get(policy::explain))
        .route("/v1/mode", put(policy::set_mode).get(policy::node_mode))
        .route("/v1/policy", get(policy::policy))
        .route("/v1/probe", put(probe::probe))
        .route("/v1/log-level", put(log_level))
        .with_state(Arc::clone(&context))
        .merge(public(context))
}

async fn readyz(State(context): State<Arc<Context>>) -> Response {
    let mut pending = context.health.pending();
    // Without maps the CNI half is all there is: what keeps it from protecting is what is pending. Beside the kernel
    // half it must not hold up the DaemonSet's update.
    if context.maps.get().is_none()
        && let Some(desk) = &context.cni
        && !desk.summary().borrow().ready()
    {
        pending.push("cni: new pods do not get the mesh's plugin yet, see `nobypass cni status`".to_owned());
    }
    let notes: String = context.health.notes().iter().map(|note| format!("note: {note}\n")).collect();
    if pending.is_empty() {
        return format!("ready\n{notes}").into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, format!("not ready\n{}\n{notes}", pending.join("\n"))).into_response()
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
    let (Some(tracker), Some(policy)) = (context.tracker.get(), context.policy.get()) else {
        return (StatusCode::SERVICE_UNAVAILABLE, "the agent is starting\n").into_response();
    };
    let known = status::Known {
        snapshot: snapshots.borrow().clone(),
        states: tracker.states.borrow().clone(),
        policy: Arc::clone(&policy.borrow().effective),
    };
    match status::read(maps, context.health.hooks(), Some(&known)) {
        Ok(mut status) => {
            status.agent.pending = context.health.pending();
            status.agent.notes = context.health.notes();
            if let Some(probe) = context.probe.get() {
                for pod in &mut status.pods {
                    pod.packet_sockets = probe.packet_sockets(pod.cgroup);
                }
            }
            Json(status).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

async fn cni(State(context): State<Arc<Context>>) -> Response {
    let Some(desk) = &context.cni else {
        return (StatusCode::NOT_FOUND, "this agent leaves the CNI configuration alone (--cni-mode=off)\n")
            .into_response();
    };
    match desk.report().await {
        Some(report) => Json(report).into_response(),
        None => (StatusCode::SERVICE_UNAVAILABLE, "the CNI half is starting or stopping\n").into_response(),
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

async fn log_level(State(context): State<Arc<Context>>, body: String) -> Response {
    match context.level.set(body.trim()) {
        Ok(()) => "ok\n".into_response(),
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    }
}

/// Serves until the process ends.
///
/// # Errors
/// As accept(2) says.
pub async fn serve(
    tcp: Option<TcpListener>,
    unix: Option<UnixListener>,
    context: Arc<Context>,
) -> io::Result<()> {
    let private = async {
        match unix {
            Some(unix) => axum::serve(unix, private(Arc::clone(&context))).await,
            None => std::future::pending().await,
        }
    };
    let public = async {
        match tcp {
            Some(tcp) => axum::serve(tcp, public(Arc::clone(&context))).await,
            None => std::future::pending().await,
        }
    };
    tokio::try_join!(private, public).map(|_| ())
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
            tracker: OnceLock::new(),
            policy: OnceLock::new(),
            set_mode,
            probe: OnceLock::new(),
            level,
            cni: None,
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
}
