//! The routes about the mode, the policy and single pods.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use nobypass_common::ids::{Mode, PodKind};
use tokio::sync::oneshot;

use super::{BY_POLICY, Context, SetMode};
use crate::explain;
use crate::policy::PodView;
use crate::policy::effective::Source;

pub(super) async fn set_mode(State(context): State<Arc<Context>>, body: String) -> Response {
    let wanted = body.trim();
    let mode = Mode::ALL.iter().find(|mode| mode.label() == wanted).copied();
    if mode.is_none() && wanted != BY_POLICY {
        let says =
            format!("{wanted:?} is no mode: off, audit, enforce, or {BY_POLICY} for what the policy says\n");
        return (StatusCode::BAD_REQUEST, says).into_response();
    }
    let (done, result) = oneshot::channel();
    let sent = context.set_mode.send(SetMode { mode, done }).await;
    match (sent, result.await) {
        (Ok(()), Ok(Ok(()))) => mode_now(&context).into_response(),
        (Ok(()), Ok(Err(why))) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{why}\n")).into_response(),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "the agent is stopping\n").into_response(),
    }
}

/// The node's mode and where it comes from, in a line; and who has another one.
fn mode_now(context: &Context) -> String {
    let Some(policy) = context.policy.get() else { return String::new() };
    let effective = Arc::clone(&policy.borrow().effective);
    let mode = Mode::from(effective.mode).label();
    let own = context.snapshots.get().map_or(0, |snapshots| {
        let pods = Arc::clone(&snapshots.borrow().pods);
        let own = |view: &&Arc<PodView>| {
            view.kind == PodKind::Meshed && view.choice.as_ref().is_some_and(|choice| choice.own.is_some())
        };
        pods.values().filter(own).count()
    });
    let mut text = format!("{mode}\n");
    if effective.mode_source == Source::Hand {
        let without = Mode::from(effective.mode_without_hand).label();
        text.push_str(&format!(
            "set by hand: holds until the policy file changes, the agent starts anew, or `nobypass mode {BY_POLICY}`, \
             which makes it {without}\n"
        ));
    }
    if own > 0 {
        text.push_str(&format!(
            "{own} meshed pods have a mode of their own and keep it, see `nobypass status`\n"
        ));
    }
    text
}

pub(super) async fn node_mode(State(context): State<Arc<Context>>) -> Response {
    mode_now(&context).into_response()
}

/// What [`explain`] is asked.
#[derive(Debug, serde::Deserialize)]
pub(super) struct Asked {
    pod: String,
}

pub(super) async fn explain(State(context): State<Arc<Context>>, Query(asked): Query<Asked>) -> Response {
    let parts = (context.maps.get(), context.snapshots.get(), context.policy.get(), context.tracker.get());
    let (Some(maps), Some(snapshots), Some(policy), Some(tracker)) = parts else {
        return (StatusCode::SERVICE_UNAVAILABLE, "the agent is starting\n").into_response();
    };
    let snapshot = snapshots.borrow().clone();
    let named = |view: &Arc<PodView>| (view.namespace.to_string(), view.name.to_string(), view.cgroup);
    let pods: Vec<explain::find::Named> = snapshot.pods.values().map(named).collect();
    let view = match explain::find::find(&asked.pod, &pods) {
        Ok(cgroup) => snapshot.pods.get(&cgroup),
        Err(error) => return (StatusCode::NOT_FOUND, format!("{error}\n")).into_response(),
    };
    let Some(view) = view else { return StatusCode::NOT_FOUND.into_response() };
    let kernel = match explain::Kernel::read(maps, view.cgroup) {
        Ok(kernel) => kernel,
        Err(error) => return (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    };
    let states = tracker.states.borrow().clone();
    let policy = Arc::clone(&policy.borrow().effective);
    let lost = context.health.hooks().into_iter().filter(|hook| !hook.effective).map(|hook| hook.hook);
    let known = explain::Known {
        view,
        state: states.pods.get(&view.cgroup).map(|state| &**state).filter(|state| state.is(view)),
        policy: &policy,
        profiles: &snapshot.profiles,
        events: tracker.recent.of(view.cgroup),
        lost_hooks: lost.collect(),
        packet_sockets: context.probe.get().map_or_else(Vec::new, |probe| probe.packet_sockets(view.cgroup)),
    };
    Json(explain::explain(&known, &kernel)).into_response()
}

pub(super) async fn policy(State(context): State<Arc<Context>>) -> Response {
    match context.policy.get() {
        Some(policy) => Json(policy.borrow().shown()).into_response(),
        None => (StatusCode::SERVICE_UNAVAILABLE, "the agent is starting\n").into_response(),
    }
}
