//! The patch types of the API: JSON, merge, strategic merge, and what of server-side apply needs no field owners.

use serde_json::{Map, Value};

use super::error::ApiError;

/// How a patch is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchType {
    Json,
    Merge,
    Strategic,
    /// Merges as a strategic patch; fields that an earlier apply owned and this one lacks are **not** removed.
    Apply,
}

impl PatchType {
    pub fn of_content_type(content_type: &str) -> Option<Self> {
        match content_type.split(';').next().unwrap_or_default().trim() {
            "application/json-patch+json" => Some(Self::Json),
            "application/merge-patch+json" => Some(Self::Merge),
            "application/strategic-merge-patch+json" => Some(Self::Strategic),
            "application/apply-patch+yaml" => Some(Self::Apply),
            _ => None,
        }
    }
}

/// Applies `patch` to `object`.
pub fn apply(how: PatchType, object: &mut Value, patch: &Value) -> Result<(), ApiError> {
    match how {
        PatchType::Json => {
            let operations: json_patch::Patch = serde_json::from_value(patch.clone())
                .map_err(|error| ApiError::bad_request(format!("error decoding patch: {error}")))?;
            json_patch::patch(object, &operations).map_err(|error| {
                let message =
                    format!("the server rejected our request due to an error in our request: {error}");
                ApiError::new(422, "Invalid", message)
            })
        }
        _ if !patch.is_object() => Err(ApiError::bad_request("a patch of this type is an object")),
        PatchType::Merge => {
            json_patch::merge(object, patch);
            Ok(())
        }
        PatchType::Strategic | PatchType::Apply => {
            strategic(object, patch, "");
            Ok(())
        }
    }
}

/// Lists that are merged, by the key of their items (`patchMergeKey` of the Go types); all others are atomic, as a
/// node's `taints` and a pod's `tolerations` are. `""`: a set of plain values.
fn merge_key(field: &str) -> Option<&'static str> {
    Some(match field {
        "conditions" | "addresses" => "type",
        "containers" | "initContainers" | "ephemeralContainers" | "volumes" | "env" | "imagePullSecrets" => {
            "name"
        }
        "ports" => "containerPort",
        "volumeMounts" => "mountPath",
        "volumeDevices" => "devicePath",
        "hostAliases" | "podIPs" | "hostIPs" => "ip",
        "topologySpreadConstraints" => "topologyKey",
        "ownerReferences" => "uid",
        "finalizers" | "podCIDRs" => "",
        _ => return None,
    })
}

fn strategic(target: &mut Value, patch: &Value, field: &str) {
    match patch {
        Value::Object(patch) => {
            if patch.get("$patch").and_then(Value::as_str) == Some("replace") {
                *target = Value::Object(without_directives(patch));
                return;
            }
            if !target.is_object() {
                *target = Value::Object(Map::new());
            }
            let Value::Object(target) = target else { return };
            merge_object(target, patch);
        }
        Value::Array(items) => match merge_key(field) {
            Some(key) => merge_list(target, items, key),
            None => *target = patch.clone(),
        },
        other => *target = other.clone(),
    }
}

fn merge_object(target: &mut Map<String, Value>, patch: &Map<String, Value>) {
    for (name, value) in patch {
        if let Some(list) = name.strip_prefix("$deleteFromPrimitiveList/") {
            if let (Some(Value::Array(old)), Value::Array(gone)) = (target.get_mut(list), value) {
                old.retain(|item| !gone.contains(item));
            }
        } else if name.starts_with('$') {
            // `$setElementOrder/...` only orders, `$retainKeys` only concerns unions.
        } else if value.is_null() {
            target.shift_remove(name);
        } else {
            let removed = value.get("$patch").and_then(Value::as_str) == Some("delete");
            if removed {
                target.shift_remove(name);
            } else {
                strategic(target.entry(name.clone()).or_insert(Value::Null), value, name);
            }
        }
    }
}

fn without_directives(patch: &Map<String, Value>) -> Map<String, Value> {
    patch.iter().filter(|(name, _)| !name.starts_with('$')).map(|(n, v)| (n.clone(), v.clone())).collect()
}

fn merge_list(target: &mut Value, items: &[Value], key: &str) {
    let directive = |item: &Value| item.get("$patch").and_then(Value::as_str).map(str::to_owned);
    let replaces = items.iter().any(|item| directive(item).as_deref() == Some("replace"));
    if !target.is_array() || replaces {
        *target = Value::Array(Vec::new());
    }
    let Value::Array(list) = target else { return };
    let same = |a: &Value, b: &Value| if key.is_empty() { a == b } else { a.get(key) == b.get(key) };
    let place_in = |list: &[Value], item: &Value| list.iter().position(|old| same(old, item));
    let old = std::mem::take(list);
    // What the patch names, in its order, each with where it was; and the rest, in the old order.
    let mut patched = Vec::new();
    for item in items.iter().filter(|item| directive(item).is_none()) {
        let place = place_in(&old, item);
        let mut new = place.and_then(|at| old.get(at).cloned()).unwrap_or(Value::Null);
        strategic(&mut new, item, "");
        patched.push((place, new));
    }
    let rest = old.iter().enumerate().filter(|(_, old)| place_in(items, old).is_none());
    let mut rest = rest.map(|(at, old)| (at, old.clone())).peekable();
    // `normalizeElementOrder` of strategicpatch: the patch's order counts, new items come as early as they can.
    for (place, new) in patched {
        while let Some((_, old)) = rest.next_if(|(at, _)| place.is_some_and(|place| *at < place)) {
            list.push(old);
        }
        list.push(new);
    }
    list.extend(rest.map(|(_, old)| old));
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn patched(how: PatchType, mut object: Value, patch: &Value) -> Value {
        apply(how, &mut object, patch).expect("applies");
        object
    }

    #[test]
    fn the_same_patch_by_each_type() {
        let node = json!({
            "spec": { "taints": [{ "key": "a" }, { "key": "b" }] },
            "status": { "conditions": [{ "type": "Ready", "status": "True", "reason": "x" }, { "type": "Other" }] },
        });
        let patch = json!({
            "metadata": { "labels": { "l": "1" } },
            "spec": { "taints": [{ "key": "c" }] },
            "status": { "conditions": [{ "type": "Ready", "status": "False" }, { "type": "New" }] },
        });
        let merged = patched(PatchType::Merge, node.clone(), &patch);
        assert_eq!(merged["status"]["conditions"].as_array().map(Vec::len), Some(2), "lists are replaced");
        for how in [PatchType::Strategic, PatchType::Apply] {
            let merged = patched(how, node.clone(), &patch);
            assert_eq!(merged["spec"]["taints"], json!([{ "key": "c" }]), "atomic");
            assert_eq!(
                merged["status"]["conditions"],
                json!([{ "type": "Ready", "status": "False", "reason": "x" }, { "type": "New" }, { "type": "Other" }])
            );
            assert_eq!(merged["metadata"]["labels"], json!({ "l": "1" }));
        }
    }

    #[test]
    fn strategic_directives() {
        let pod = json!({
            "metadata": { "labels": { "a": "1", "b": "2" }, "finalizers": ["x", "y"] },
            "spec": { "containers": [{ "name": "app", "image": "i" }, { "name": "proxy" }] },
        });
        let patch = json!({
            "metadata": { "labels": { "a": null }, "$deleteFromPrimitiveList/finalizers": ["x"], "finalizers": ["z"] },
            "spec": { "$setElementOrder/containers": [{ "name": "app" }],
                      "containers": [{ "name": "proxy", "$patch": "delete" }, { "name": "app", "tty": true }] },
        });
        let got = patched(PatchType::Strategic, pod.clone(), &patch);
        assert_eq!(got["metadata"], json!({ "labels": { "b": "2" }, "finalizers": ["z", "y"] }));
        assert_eq!(got["spec"], json!({ "containers": [{ "name": "app", "image": "i", "tty": true }] }));
        let patch = json!({ "metadata": { "$patch": "replace", "labels": { "c": "3" } } });
        assert_eq!(patched(PatchType::Strategic, pod, &patch)["metadata"], json!({ "labels": { "c": "3" } }));
    }

    #[test]
    fn json_patches_test_and_fail_as_a_whole() {
        let mut object = json!({ "metadata": { "name": "n" }, "spec": { "taints": [1] } });
        let before = object.clone();
        let patch = json!([
            { "op": "remove", "path": "/spec/taints/0" },
            { "op": "test", "path": "/metadata/name", "value": "other" },
        ]);
        assert_eq!(apply(PatchType::Json, &mut object, &patch).expect_err("test fails").code, 422);
        assert_eq!(object, before);
    }
}
