//! What the server sets, keeps and refuses in objects of each resource. Only what the agent's requests can meet.

use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::kinds::{EVENTS, Kind};
use super::store::{Key, Store};

/// Resources whose status is written by `/status` alone.
const WITH_STATUS: [&str; 9] = [
    "pods",
    "nodes",
    "namespaces",
    "services",
    "replicasets",
    "deployments",
    "daemonsets",
    "jobs",
    "poddisruptionbudgets",
];

/// What the server alone sets.
const OF_SERVER: [&str; 6] = [
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "namespace",
    "generation",
];

/// Now, as `metav1.Time` is written.
pub fn now() -> String {
    in_seconds(0)
}

/// The time `seconds` from now.
pub fn in_seconds(seconds: i64) -> String {
    let now = jiff::Timestamp::now();
    let then = now.checked_add(jiff::SignedDuration::from_secs(seconds)).unwrap_or(now);
    format!("{then:.0}")
}

/// A random UUID.
pub fn uuid() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default();
    text.trim().to_owned()
}

/// Five characters as the server appends to `generateName`.
fn suffix() -> String {
    const ALPHABET: &[u8; 16] = b"bcdfghjklmnpqrst";
    let of = |c: char| ALPHABET[usize::try_from(c.to_digit(16).unwrap_or(0)).unwrap_or(0) % 16];
    uuid().chars().filter(char::is_ascii_hexdigit).take(5).map(|c| char::from(of(c))).collect()
}

/// Refuses objects for namespaces that do not exist or are ending.
pub fn namespace_takes(store: &Store, kind: &Kind, namespace: &str, body: &Value) -> Result<(), ApiError> {
    let Some(namespaces) = Kind::of_resource("namespaces") else { return Ok(()) };
    let Some(found) = store.get(&Key::new(namespaces, "", namespace)) else {
        return Err(ApiError::not_found(namespaces, namespace));
    };
    if found["metadata"]["deletionTimestamp"].is_null() {
        return Ok(());
    }
    let why = format!("unable to create new content in namespace {namespace} because it is being terminated");
    Err(ApiError::forbidden(kind, body["metadata"]["name"].as_str().unwrap_or_default(), &why))
}

/// Makes the name of `generateName`; refuses an object without either.
pub fn name(kind: &Kind, body: &mut Value) -> Result<(), ApiError> {
    let metadata = &body["metadata"];
    if metadata["name"].as_str().is_some_and(|name| !name.is_empty()) {
        return Ok(());
    }
    let Some(prefix) = metadata["generateName"].as_str().filter(|prefix| !prefix.is_empty()) else {
        return Err(ApiError::invalid(
            kind,
            "",
            "metadata.name: Required value: name or generateName is required",
        ));
    };
    body["metadata"]["name"] = json!(format!("{prefix}{}", suffix()));
    Ok(())
}

/// Defaults and resets of an object that a client creates.
pub fn prepare_new(kind: &Kind, body: &mut Value) {
    for field in ["uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"] {
        if let Some(metadata) = body["metadata"].as_object_mut() {
            metadata.shift_remove(field);
        }
    }
    match kind.resource {
        "pods" => {
            body["status"] = json!({ "phase": "Pending" });
            default(&mut body["spec"], "terminationGracePeriodSeconds", json!(30));
            default(&mut body["spec"], "restartPolicy", json!("Always"));
        }
        "nodes" => {
            // The admission plugin TaintNodesByCondition.
            let taint = json!({ "key": "node.kubernetes.io/not-ready", "effect": "NoSchedule" });
            default(&mut body["spec"], "taints", json!([]));
            if let Some(taints) = body["spec"]["taints"].as_array_mut()
                && !taints.iter().any(|other| other["key"] == taint["key"])
            {
                taints.push(taint);
            }
        }
        "namespaces" => {
            body["spec"]["finalizers"] = json!(["kubernetes"]);
            body["status"] = json!({ "phase": "Active" });
        }
        "poddisruptionbudgets" => {
            body["metadata"]["generation"] = json!(1);
            body["status"] = json!({ "disruptionsAllowed": 0, "currentHealthy": 0, "desiredHealthy": 0, "expectedPods": 0 });
        }
        _ => {}
    }
}

fn default(object: &mut Value, field: &str, value: Value) {
    if object[field].is_null() {
        object[field] = value;
    }
}

/// Gives a new object what makes it one: UID, time, namespace.
pub fn identify(kind: &Kind, namespace: &str, body: &mut Value) {
    if kind.resource == "namespaces" {
        let name = body["metadata"]["name"].clone();
        body["metadata"]["labels"]["kubernetes.io/metadata.name"] = name;
    }
    let metadata = &mut body["metadata"];
    if kind.namespaced {
        metadata["namespace"] = json!(namespace);
    }
    default(metadata, "uid", json!(uuid()));
    default(metadata, "creationTimestamp", json!(now()));
}

/// Drops what Go's types do not keep: `null`, empty lists, empty label and annotation maps; and what is not stored:
/// `apiVersion`, `kind` and field managers.
pub fn tidy(object: &mut Value) {
    if let Value::Object(fields) = object {
        fields.shift_remove("apiVersion");
        fields.shift_remove("kind");
    }
    prune(object);
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.shift_remove("managedFields");
        metadata.shift_remove("selfLink");
        metadata.retain(|name, value| {
            !(matches!(name.as_str(), "labels" | "annotations")
                && value.as_object().is_some_and(Map::is_empty))
        });
    }
}

fn prune(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.values_mut().for_each(prune);
            fields.retain(|name, value| {
                let empty = value.as_array().is_some_and(Vec::is_empty) && name != "containers";
                !value.is_null() && !empty
            });
        }
        Value::Array(items) => items.iter_mut().for_each(prune),
        _ => {}
    }
}

/// Takes over from the old object what a write of this sub-resource does not change, and refuses what may not change.
pub fn keep(kind: &Kind, subresource: Option<&str>, old: &Value, new: &mut Value) -> Result<(), ApiError> {
    for field in OF_SERVER {
        take(&old["metadata"], &mut new["metadata"], field);
    }
    if !WITH_STATUS.contains(&kind.resource) {
        return Ok(());
    }
    match subresource {
        None => take(old, new, "status"),
        Some("status") => take(old, new, "spec"),
        Some("ephemeralcontainers") => {
            let added = new["spec"]["ephemeralContainers"].take();
            *new = old.clone();
            new["spec"]["ephemeralContainers"] = added;
            return Ok(());
        }
        Some(_) => {}
    }
    if kind.resource == "pods" && fixed(&old["spec"]) != fixed(&new["spec"]) {
        let name = old["metadata"]["name"].as_str().unwrap_or_default();
        let why = "spec: Forbidden: pod updates may not change fields other than `spec.containers[*].image`, \
                   `spec.initContainers[*].image`, `spec.activeDeadlineSeconds`, `spec.tolerations`";
        return Err(ApiError::invalid(kind, name, why));
    }
    Ok(())
}

fn take(old: &Value, new: &mut Value, field: &str) {
    let Value::Object(fields) = new else { return };
    match old.get(field) {
        Some(value) => drop(fields.insert(field.into(), value.clone())),
        None => drop(fields.shift_remove(field)),
    }
}

/// A pod's spec without what may change.
fn fixed(spec: &Value) -> Value {
    let mut spec = spec.clone();
    for list in ["containers", "initContainers"] {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            container["image"] = Value::Null;
        }
    }
    for field in ["activeDeadlineSeconds", "tolerations"] {
        spec[field] = Value::Null;
    }
    spec
}

/// Sets a condition of the status, by its type.
pub fn set_condition(object: &mut Value, mut condition: Value) {
    condition["lastTransitionTime"] = json!(now());
    if !object["status"]["conditions"].is_array() {
        object["status"]["conditions"] = json!([]);
    }
    let Some(conditions) = object["status"]["conditions"].as_array_mut() else { return };
    match conditions.iter_mut().find(|old| old["type"] == condition["type"]) {
        Some(old) => *old = condition,
        None => conditions.push(condition),
    }
}

/// Was it only kept by finalizers, and are they gone?
pub fn may_go(object: &Value) -> bool {
    let metadata = &object["metadata"];
    let grace = metadata["deletionGracePeriodSeconds"].as_i64().unwrap_or(0);
    metadata["deletionTimestamp"].is_string()
        && grace == 0
        && metadata["finalizers"].as_array().is_none_or(Vec::is_empty)
        && object["spec"]["finalizers"].as_array().is_none_or(Vec::is_empty)
}

/// What a real server refuses of what the agent writes.
pub fn validate(kind: &Kind, object: &Value) -> Result<(), ApiError> {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let wrong = match kind.resource {
        "pods" if object["spec"]["containers"].as_array().is_none_or(Vec::is_empty) => {
            Some("spec.containers: Required value".to_owned())
        }
        EVENTS => wrong_event(object),
        "nodes" => wrong_taint(object),
        _ => None,
    };
    wrong.or_else(|| wrong_label(object)).map_or(Ok(()), |wrong| Err(ApiError::invalid(kind, name, &wrong)))
}

/// `ValidateEventCreate` for events.k8s.io/v1. Core events have no `eventTime` and little else that is checked.
fn wrong_event(event: &Value) -> Option<String> {
    // Only events about what has no namespace are bound to one.
    let namespace = event["metadata"]["namespace"].as_str().unwrap_or_default();
    let regards_namespaced = event["regarding"]["namespace"].as_str().is_some_and(|ns| !ns.is_empty());
    if !regards_namespaced && !matches!(namespace, "default" | "kube-system") {
        return Some("involvedObject.namespace: Invalid value: does not match event.namespace".into());
    }
    if event["eventTime"].is_null() {
        // Stored, both kinds look alike; whoever reports by the new one names its controller.
        return (!event["reportingController"].is_null()).then(|| "eventTime: Required value".into());
    }
    let text = |field: &str| event[field].as_str().unwrap_or_default().to_owned();
    for (field, most) in
        [("reportingController", 128), ("reportingInstance", 128), ("action", 128), ("reason", 128)]
    {
        if text(field).is_empty() {
            return Some(format!("{field}: Required value"));
        }
        if text(field).len() > most {
            return Some(format!("{field}: Invalid value: can have at most {most} characters"));
        }
    }
    if !matches!(text("type").as_str(), "Normal" | "Warning") {
        return Some(format!("type: Invalid value: \"{}\"", text("type")));
    }
    (text("note").len() > 1024).then(|| "message: Invalid value: can have at most 1024 characters".into())
}

fn wrong_taint(node: &Value) -> Option<String> {
    let taints = node["spec"]["taints"].as_array()?;
    let of = |taint: &Value| (taint["key"].clone(), taint["effect"].clone());
    for (at, taint) in taints.iter().enumerate() {
        let effect = taint["effect"].as_str().unwrap_or_default();
        if !matches!(effect, "NoSchedule" | "PreferNoSchedule" | "NoExecute") {
            return Some(format!("spec.taints[{at}].effect: Unsupported value: \"{effect}\""));
        }
        if taints.iter().take(at).any(|earlier| of(earlier) == of(taint)) {
            return Some(format!("spec.taints[{at}]: Duplicate value"));
        }
    }
    None
}

fn wrong_label(object: &Value) -> Option<String> {
    let labels = object["metadata"]["labels"].as_object()?;
    labels.iter().find_map(|(key, value)| {
        let value = value.as_str().unwrap_or("\u{0}");
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let outer = |c: char| c.is_ascii_alphanumeric();
        let valid = value.len() <= 63
            && value.chars().all(allowed)
            && (value.is_empty() || (value.starts_with(outer) && value.ends_with(outer)));
        (!valid).then(|| format!("metadata.labels: Invalid value: \"{value}\" of {key}"))
    })
}
