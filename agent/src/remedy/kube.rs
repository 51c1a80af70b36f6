//! What remedies do through the API server: look at a pod, label it, evict it.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod as KubePod;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::subject::{Evicted, Inspected, Owner, Pod, Workload};

/// How long one request may take.
const REQUEST: Duration = Duration::from_secs(5);
/// Key of the label on a bypassing pod.
pub const LABEL: &str = "nobypass.dev/bypassing";
/// Annotation of a mirror pod (kubernetes/pkg/kubelet/types/pod_update.go).
const MIRROR: &str = "kubernetes.io/config.mirror";

/// How a label was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Labelled {
    /// It is.
    Done,
    /// There is no such pod any more.
    Gone,
    /// The permission is missing.
    Forbidden,
    /// It failed.
    Failed,
}

/// Who would replace a pod. Pure.
pub fn owner(pod: &KubePod) -> Owner {
    let meta = &pod.metadata;
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if meta.deletion_timestamp.is_some() {
        return Owner::Terminating;
    }
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return Owner::Finished;
    }
    let controller = meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true));
    let mirror = meta.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(MIRROR));
    match controller {
        _ if mirror => Owner::Mirror,
        Some(owner) if owner.kind == "Node" => Owner::Mirror,
        None => Owner::Bare,
        Some(owner) => Owner::Workload(Workload {
            kind: owner.kind.clone(),
            uid: owner.uid.clone(),
            name: format!("{}/{}", meta.namespace.as_deref().unwrap_or_default(), owner.name),
        }),
    }
}

/// Looks at a pod.
pub async fn inspect(client: &Client, pod: &Pod) -> Inspected {
    let api: Api<KubePod> = Api::namespaced(client.clone(), &pod.namespace);
    match timeout(REQUEST, api.get(&pod.name)).await {
        Ok(Ok(found)) if found.metadata.uid.as_deref() != Some(&pod.uid.to_string()) => {
            // A static pod's mirror has another UID than its sandbox.
            match owner(&found) {
                Owner::Mirror => Inspected::Owner(Owner::Mirror),
                _ => Inspected::Gone,
            }
        }
        Ok(Ok(found)) => Inspected::Owner(owner(&found)),
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => Inspected::Gone,
        Ok(Err(kube::Error::Api(status))) if status.code == 403 => Inspected::Forbidden,
        Ok(Err(_)) | Err(_) => Inspected::Unavailable,
    }
}

/// Sets or removes the label, of this pod and no other of its name.
pub async fn label(client: &Client, pod: &Pod, set: bool) -> Labelled {
    let api: Api<KubePod> = Api::namespaced(client.clone(), &pod.namespace);
    let value = set.then_some("true");
    let patch = json!({ "metadata": { "uid": pod.uid.to_string(), "labels": { LABEL: value } } });
    let params = PatchParams::default();
    match timeout(REQUEST, api.patch_status(&pod.name, &params, &Patch::Merge(&patch))).await {
        Ok(Ok(_)) => Labelled::Done,
        // 409 and 422: the UID is another one's.
        Ok(Err(kube::Error::Api(status))) if [404, 409, 422].contains(&status.code) => Labelled::Gone,
        Ok(Err(kube::Error::Api(status))) if status.code == 403 => Labelled::Forbidden,
        Ok(Err(_)) | Err(_) => Labelled::Failed,
    }
}

/// The body of an eviction: never a grace period of our own, and only this pod.
pub fn eviction(pod: &Pod) -> Value {
    json!({
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": { "namespace": &*pod.namespace, "name": &*pod.name },
        "deleteOptions": { "preconditions": { "uid": pod.uid.to_string() } },
    })
}

/// Evicts a pod.
pub async fn evict(client: &Client, pod: &Pod) -> Evicted {
    let failed = |detail: String| Evicted::Failed { detail };
    let path = format!("/api/v1/namespaces/{}/pods/{}/eviction", pod.namespace, pod.name);
    let request = axum::http::Request::post(path)
        .header("content-type", "application/json")
        .body(Body::from(eviction(pod).to_string().into_bytes()));
    let request = match request {
        Ok(request) => request,
        Err(error) => return failed(error.to_string()),
    };
    // The raw answer, for its Retry-After.
    let response = match timeout(REQUEST, client.send(request)).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => return failed(error.to_string()),
        Err(_) => return failed("the API server does not answer".to_owned()),
    };
    let status = response.status();
    let header = response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
    let body = timeout(REQUEST, response.into_body().collect_bytes()).await;
    let body = body.ok().and_then(Result::ok).unwrap_or_default();
    answer(status.as_u16(), header, &body)
}

/// What an answer to an eviction means. Pure.
pub fn answer(status: u16, retry_after: Option<u64>, body: &[u8]) -> Evicted {
    let said: Value = serde_json::from_slice(body).unwrap_or_default();
    match status {
        200..300 => Evicted::Done,
        404 => Evicted::Gone,
        409 => Evicted::Conflict,
        403 => Evicted::Forbidden,
        429 => {
            let told = said.pointer("/details/retryAfterSeconds").and_then(Value::as_u64);
            Evicted::Blocked { retry_after: retry_after.or(told).map(Duration::from_secs) }
        }
        _ => {
            let message = said.get("message").and_then(Value::as_str).unwrap_or_default();
            Evicted::Failed { detail: format!("{status} {message}").trim().to_owned() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(value: Value) -> KubePod {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn owners() {
        let owned = |kind: &str, controller: bool| json!([{ "apiVersion": "x/v1", "kind": kind, "name": "o", "uid": "u", "controller": controller }]);
        let workload = |kind: &str| {
            Owner::Workload(Workload { kind: kind.into(), uid: "u".into(), name: "shop/o".into() })
        };
        for (name, meta, status, expected) in [
            ("bare", json!({}), json!({}), Owner::Bare),
            (
                "owned, not controlled",
                json!({ "ownerReferences": owned("X", false) }),
                json!({}),
                Owner::Bare,
            ),
            (
                "mirror",
                json!({ "annotations": { MIRROR: "h" }, "ownerReferences": owned("Node", true) }),
                json!({}),
                Owner::Mirror,
            ),
            ("static", json!({ "ownerReferences": owned("Node", true) }), json!({}), Owner::Mirror),
            (
                "DaemonSet",
                json!({ "ownerReferences": owned("DaemonSet", true) }),
                json!({}),
                workload("DaemonSet"),
            ),
            (
                "Job",
                json!({ "ownerReferences": owned("Job", true) }),
                json!({ "phase": "Running" }),
                workload("Job"),
            ),
            (
                "Job, done",
                json!({ "ownerReferences": owned("Job", true) }),
                json!({ "phase": "Succeeded" }),
                Owner::Finished,
            ),
            (
                "terminating",
                json!({ "deletionTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": owned("Job", true) }),
                json!({}),
                Owner::Terminating,
            ),
        ] {
            let mut metadata = json!({ "name": "web", "namespace": "shop" });
            metadata.as_object_mut().unwrap().extend(meta.as_object().unwrap().clone());
            assert_eq!(owner(&pod(json!({ "metadata": metadata, "status": status }))), expected, "{name}");
        }
    }

    #[test]
    fn answers() {
        let seconds = |seconds| Evicted::Blocked { retry_after: Some(Duration::from_secs(seconds)) };
        let pdb = br#"{"message": "Cannot evict", "details": {"retryAfterSeconds": 10}}"#;
        for (status, header, body, expected) in [
            (201, None, &b"{}"[..], Evicted::Done),
            (200, None, b"", Evicted::Done),
            (404, None, b"{}", Evicted::Gone),
            (409, None, b"{}", Evicted::Conflict),
            (403, None, b"{}", Evicted::Forbidden),
            (429, None, b"too many", Evicted::Blocked { retry_after: None }),
            (429, Some(1), b"", seconds(1)),
            (429, None, pdb, seconds(10)),
            (500, None, br#"{"message": "oops"}"#, Evicted::Failed { detail: "500 oops".into() }),
            (503, None, b"<html>", Evicted::Failed { detail: "503".into() }),
        ] {
            assert_eq!(answer(status, header, body), expected, "{status}");
        }
    }
}
