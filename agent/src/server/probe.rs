//! `/v1/probe`: the question to a pod's network, for the command line.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::Context;
use crate::policy::PodView;
use crate::probe::{Answer, Probed};

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
pub(super) async fn probe(State(context): State<Arc<Context>>, body: String) -> Response {
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
