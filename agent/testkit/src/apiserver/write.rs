//! Create, update and patch: what the server changes, keeps and refuses. No I/O.

use std::sync::Arc;

use serde_json::{Value, json};

use super::error::ApiError;
use super::kinds::{Kind, Route};
use super::patch::{self, PatchType};
use super::rules;
use super::store::{Key, Store};

/// What a write returns.
pub type Written = Result<Arc<Value>, ApiError>;

/// The key of a request that names an object.
pub fn key_of(route: &Route) -> Result<Key, ApiError> {
    let name = route.name.as_deref().ok_or_else(|| ApiError::bad_request("name is required"))?;
    Ok(Key::new(route.kind, route.namespace.as_deref().unwrap_or_default(), name))
}

/// The object of a request, or 404.
pub fn existing(store: &Store, kind: &Kind, key: &Key) -> Written {
    store.get(key).ok_or_else(|| ApiError::not_found(kind, &key.name))
}

/// POST of an object.
pub fn create(store: &mut Store, route: &Route, mut body: Value, dry_run: bool) -> Written {
    let kind = route.kind;
    if !body.is_object() {
        return Err(ApiError::bad_request("the object provided is unrecognized"));
    }
    let namespace = route.namespace.clone().unwrap_or_default();
    let sent = body["metadata"]["namespace"].as_str().unwrap_or_default();
    if !sent.is_empty() && sent != namespace {
        return Err(ApiError::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        ));
    }
    if kind.namespaced {
        rules::namespace_takes(store, kind, &namespace, &body)?;
    }
    if !body["metadata"]["resourceVersion"].is_null() {
        return Err(ApiError::new(500, "", "resourceVersion should not be set on objects to be created"));
    }
    rules::name(kind, &mut body)?;
    rules::prepare_new(kind, &mut body);
    insert(store, kind, &namespace, body, dry_run)
}

/// Creates an object as it is, with an identity: in-process, so with status, and in whatever namespace.
pub fn insert(store: &mut Store, kind: &Kind, namespace: &str, mut body: Value, dry_run: bool) -> Written {
    let name = body["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let key = Key::new(kind, namespace, &name);
    rules::tidy(&mut body);
    rules::identify(kind, namespace, &mut body);
    rules::validate(kind, &body)?;
    if store.get(&key).is_some() {
        return Err(ApiError::already_exists(kind, &name));
    }
    Ok(if dry_run { Arc::new(body) } else { store.put(&key, body) })
}

/// PUT of an object or of its status.
pub fn update(store: &mut Store, route: &Route, mut body: Value, dry_run: bool) -> Written {
    let key = key_of(route)?;
    let old = existing(store, route.kind, &key)?;
    let sent = body["metadata"]["name"].as_str().unwrap_or_default();
    if sent != key.name {
        return Err(ApiError::bad_request(format!(
            "the name of the object ({sent}) does not match the name on the URL ({})",
            key.name
        )));
    }
    rules::tidy(&mut body);
    replace(store, route, &key, &old, (body, false), dry_run)
}

/// PATCH of an object or of its status. A server-side apply creates what is not there.
pub fn patch(store: &mut Store, route: &Route, how: PatchType, sent: &Value, dry_run: bool) -> Written {
    let key = key_of(route)?;
    let Some(old) = store.get(&key) else {
        if how == PatchType::Apply && route.subresource.is_none() {
            let mut body = sent.clone();
            body["metadata"]["name"] = json!(key.name);
            return create(store, route, body, dry_run);
        }
        return Err(ApiError::not_found(route.kind, &key.name));
    };
    let mut new = (*old).clone();
    patch::apply(how, &mut new, sent)?;
    rules::tidy(&mut new);
    if new["metadata"]["name"].as_str() != Some(&key.name) {
        return Err(ApiError::bad_request("the name of the object does not match the name on the URL"));
    }
    replace(store, route, &key, &old, (new, true), dry_run)
}

fn replace(
    store: &mut Store,
    route: &Route,
    key: &Key,
    old: &Arc<Value>,
    (mut new, patched): (Value, bool),
    dry_run: bool,
) -> Written {
    let kind = route.kind;
    let (was, sent) = (&old["metadata"], &new["metadata"]);
    if sent["uid"].is_string() && sent["uid"] != was["uid"] {
        if patched {
            return Err(ApiError::invalid(
                kind,
                &key.name,
                "metadata.uid: Invalid value: field is immutable",
            ));
        }
        let text = |uid: &Value| uid.as_str().unwrap_or_default().to_owned();
        let why = format!(
            "Precondition failed: UID in precondition: {}, UID in object meta: {}",
            text(&sent["uid"]),
            text(&was["uid"])
        );
        return Err(ApiError::conflict_because(kind, &key.name, kind.resource, &why));
    }
    let version = sent["resourceVersion"].as_str().unwrap_or_default();
    if !matches!(version, "" | "0") && sent["resourceVersion"] != was["resourceVersion"] {
        return Err(ApiError::conflict(kind, &key.name));
    }
    rules::keep(kind, route.subresource.as_deref(), old, &mut new)?;
    rules::validate(kind, &new)?;
    if dry_run {
        return Ok(Arc::new(new));
    }
    if rules::may_go(&new) {
        // The write that takes the last finalizer away is the deletion.
        store.remove(key);
        return Ok(Arc::new(new));
    }
    Ok(store.put(key, new))
}

/// `pods/binding`: how a scheduler sets `spec.nodeName`.
pub fn bind(store: &mut Store, route: &Route, body: &Value) -> Result<(), ApiError> {
    let key = key_of(route)?;
    let old = existing(store, route.kind, &key)?;
    if old["spec"]["nodeName"].as_str().is_some_and(|node| !node.is_empty()) {
        let why = format!("pod {} is already assigned to node {}", key.name, old["spec"]["nodeName"]);
        return Err(ApiError::conflict_because(route.kind, &key.name, "pods/binding", &why));
    }
    let mut pod = (*old).clone();
    pod["spec"]["nodeName"] = body["target"]["name"].clone();
    rules::set_condition(&mut pod, json!({ "type": "PodScheduled", "status": "True" }));
    store.put(&key, pod);
    Ok(())
}
