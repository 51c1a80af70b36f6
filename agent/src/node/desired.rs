//! What has to be changed on the Node object so that it says what the gate says. Pure.

use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::gate::Verdict;
use super::object::{Condition, Node};

/// Type of the Node condition.
pub const CONDITION: &str = "nobypass.dev/MeshCNIReady";
/// Key of the node label; there while the gate is open.
pub const LABEL: &str = "nobypass.dev/mesh-cni";
/// Its value.
pub const READY: &str = "ready";
/// Key of the startup taint, unless the operator names others.
pub const TAINT: &str = "nobypass.dev/not-ready";
/// The condition is said again this often although nothing changed.
pub const HEARTBEAT: Duration = Duration::from_secs(300);

/// Effect of a taint that is set when protection is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Effect {
    /// New pods stay away
    NoSchedule,
    /// New pods stay away if they can
    PreferNoSchedule,
    /// New pods stay away, and running ones are evicted unless they tolerate it
    NoExecute,
}

impl Effect {
    const fn label(self) -> &'static str {
        match self {
            Self::NoSchedule => "NoSchedule",
            Self::PreferNoSchedule => "PreferNoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }
}

/// What the cluster is told by. Nothing of what is off is read or written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outputs {
    /// The Node condition.
    pub condition: bool,
    /// The node label.
    pub label: bool,
    /// Keys of startup taints to remove.
    pub taints: Vec<String>,
    /// Set the first of them when the gate closes.
    pub retaint: Option<Effect>,
}

/// Something that the cluster is told by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Output {
    /// The Node condition.
    Condition,
    /// The node label.
    Label,
    /// The taints.
    Taint,
}

impl Output {
    /// All values.
    pub const ALL: [Self; 3] = [Self::Condition, Self::Label, Self::Taint];

    /// Label in metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Condition => "condition",
            Self::Label => "label",
            Self::Taint => "taint",
        }
    }
}

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Strategic merge patch of the status sub-resource.
    Condition(Value),
    /// Merge patch.
    Label(Value),
    /// JSON patch that tests what it was made from.
    Taint(Value),
}

impl Change {
    /// What it changes.
    pub fn output(&self) -> Output {
        match self {
            Self::Condition(_) => Output::Condition,
            Self::Label(_) => Output::Label,
            Self::Taint(_) => Output::Taint,
        }
    }
}

/// What is to be changed, in the order in which to do it: what keeps pods away comes first, what lets them in last.
pub fn changes(node: &Node, verdict: &Verdict, outputs: &Outputs, now: Timestamp) -> Vec<Change> {
    let condition = outputs.condition.then(|| condition(node, verdict, now)).flatten().map(Change::Condition);
    let label = outputs.label.then(|| label(node, verdict.open)).flatten().map(Change::Label);
    let taint = taint(node, verdict.open, outputs).map(Change::Taint);
    let all = if verdict.open { [condition, label, taint] } else { [taint, label, condition] };
    all.into_iter().flatten().collect()
}

/// When [`changes`] has to be asked again although nothing changed.
pub fn next_heartbeat(node: &Node, now: Timestamp) -> Duration {
    let last = ours(node).and_then(|condition| condition.last_heartbeat_time.clone());
    let Some(last) = last else { return HEARTBEAT };
    let age = now.duration_since(last.0).unsigned_abs();
    HEARTBEAT.saturating_sub(age).max(Duration::from_secs(1))
}

/// Whether one of the startup taints is there.
pub fn is_tainted(node: &Node, keys: &[String]) -> bool {
    node.spec.taints.iter().flatten().any(|taint| has_key(taint, keys))
}

/// What takes back all that was said by condition and label, for when no agent will say it again. Taints are left as they
/// are: without an agent nobody knows whether the node is safe.
pub fn withdrawal(node: &Node) -> Vec<Change> {
    let label = node.metadata.labels.as_ref().filter(|labels| labels.contains_key(LABEL));
    let label = label.map(|_| Change::Label(json!({ "metadata": { "labels": { LABEL: null } } })));
    // `$patch` of a strategic merge patch: of the list's items this one goes, whatever the others are by then.
    let gone = json!({ "status": { "conditions": [{ "type": CONDITION, "$patch": "delete" }] } });
    let condition = ours(node).map(|_| Change::Condition(gone));
    [label, condition].into_iter().flatten().collect()
}

fn ours(node: &Node) -> Option<&Condition> {
    node.status.as_ref()?.conditions.iter().find(|condition| condition.r#type == CONDITION)
}

fn condition(node: &Node, verdict: &Verdict, now: Timestamp) -> Option<Value> {
    let status = if verdict.open { "True" } else { "False" };
    let have = ours(node);
    let same = have.is_some_and(|have| {
        have.status == status && have.reason == verdict.reason.label() && have.message == verdict.message
    });
    let heartbeat = have.and_then(|have| have.last_heartbeat_time.as_ref());
    let fresh = heartbeat.is_some_and(|at| {
        let limit = SignedDuration::try_from(HEARTBEAT).unwrap_or(SignedDuration::MAX);
        now.duration_since(at.0).abs() < limit
    });
    if same && fresh {
        return None;
    }
    let now = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let mut wanted = json!({
        "type": CONDITION,
        "status": status,
        "reason": verdict.reason.label(),
        "message": verdict.message,
        "lastHeartbeatTime": now,
    });
    if have.is_none_or(|have| have.status != status)
        && let Some(fields) = wanted.as_object_mut()
    {
        fields.insert("lastTransitionTime".to_owned(), now.into());
    }
    Some(json!({ "status": { "conditions": [wanted] } }))
}

fn label(node: &Node, open: bool) -> Option<Value> {
    let have = node.metadata.labels.as_ref().and_then(|labels| labels.get(LABEL)).map(String::as_str);
    let wanted = open.then_some(READY);
    (have != wanted).then(|| json!({ "metadata": { "labels": { LABEL: wanted } } }))
}

fn has_key(taint: &Value, keys: &[String]) -> bool {
    let key = taint.get("key").and_then(Value::as_str);
    key.is_some_and(|key| keys.iter().any(|ours| ours == key))
}

/// Tests the whole list, so that of two writers one has to look again: none of them loses or brings back a taint of the
/// other. Where there is no list to test, the object's version is.
fn taint(node: &Node, open: bool, outputs: &Outputs) -> Option<Value> {
    let key = outputs.taints.first()?;
    let have = node.spec.taints.as_ref();
    let present = is_tainted(node, &outputs.taints);
    if open {
        let have = have.filter(|_| present)?;
        let rest: Vec<&Value> = have.iter().filter(|taint| !has_key(taint, &outputs.taints)).collect();
        return Some(json!([
            { "op": "test", "path": "/spec/taints", "value": have },
            { "op": "replace", "path": "/spec/taints", "value": rest },
        ]));
    }
    let effect = outputs.retaint.filter(|_| !present)?;
    let taint = json!({ "key": key, "effect": effect.label() });
    Some(match have {
        Some(have) => json!([
            { "op": "test", "path": "/spec/taints", "value": have },
            { "op": "add", "path": "/spec/taints/-", "value": taint },
        ]),
        None => json!([
            { "op": "test", "path": "/metadata/resourceVersion", "value": node.metadata.resource_version },
            { "op": "add", "path": "/spec/taints", "value": [taint] },
        ]),
    })
}

#[cfg(test)]
mod tests {
    use super::super::gate::Reason;
    use super::*;

    fn node(value: &Value) -> Node {
        let mut base =
            json!({ "metadata": { "name": "n1", "resourceVersion": "7" }, "spec": {}, "status": {} });
        for (key, value) in value.as_object().unwrap() {
            base[key] = value.clone();
        }
        serde_json::from_value(base).unwrap()
    }

    fn verdict(open: bool) -> Verdict {
        let reason = if open { Reason::Protected } else { Reason::CniUnprotected };
        Verdict { open, reason, message: "why".into() }
    }

    fn now() -> Timestamp {
        "2026-01-02T03:04:05Z".parse().unwrap()
    }

    fn taints(keys: &[&str], retaint: Option<Effect>) -> Outputs {
        Outputs { taints: keys.iter().map(ToString::to_string).collect(), retaint, ..Outputs::default() }
    }

    fn condition_of(status: &str, heartbeat: &str) -> Value {
        let reason = if status == "True" { "Protected" } else { "CNIUnprotected" };
        json!({ "conditions": [
            { "type": "Ready", "status": "True" },
            { "type": CONDITION, "status": status, "reason": reason, "message": "why",
              "lastHeartbeatTime": heartbeat, "lastTransitionTime": "2026-01-01T00:00:00Z" },
        ] })
    }

    #[test]
    fn the_condition_is_said_on_change_and_now_and_then() {
        let outputs = Outputs { condition: true, ..Outputs::default() };
        let ours = |changes: Vec<Change>| match &changes[..] {
            [] => None,
            [Change::Condition(patch)] => Some(patch["status"]["conditions"][0].clone()),
            other => panic!("{other:?}"),
        };
        let fresh = "2026-01-02T03:00:00Z";
        let none = ours(changes(&node(&json!({})), &verdict(true), &outputs, now())).unwrap();
        let expected = json!({
            "type": CONDITION, "status": "True", "reason": "Protected", "message": "why",
            "lastHeartbeatTime": "2026-01-02T03:04:05Z", "lastTransitionTime": "2026-01-02T03:04:05Z",
        });
        assert_eq!(none, expected);
        let same = node(&json!({ "status": condition_of("True", fresh) }));
        assert_eq!(ours(changes(&same, &verdict(true), &outputs, now())), None);
        assert_eq!(next_heartbeat(&same, now()), Duration::from_secs(55));
        let stale = node(&json!({ "status": condition_of("True", "2026-01-02T02:59:05Z") }));
        let beat = ours(changes(&stale, &verdict(true), &outputs, now())).unwrap();
        assert_eq!(beat.get("lastTransitionTime"), None, "a heartbeat is no transition");
        let future = node(&json!({ "status": condition_of("True", "2026-01-03T00:00:00Z") }));
        assert!(ours(changes(&future, &verdict(true), &outputs, now())).is_some(), "a clock that went back");
        let lost = ours(changes(&same, &verdict(false), &outputs, now())).unwrap();
        assert_eq!(
            (&lost["status"], &lost["lastTransitionTime"]),
            (&"False".into(), &"2026-01-02T03:04:05Z".into())
        );
    }

    #[test]
    fn the_label_is_removed_and_not_set_to_false() {
        let outputs = Outputs { label: true, ..Outputs::default() };
        let with = |value: &str| {
            node(&json!({ "metadata": { "name": "n1", "labels": { LABEL: value, "a": "b" } } }))
        };
        let set = Change::Label(json!({ "metadata": { "labels": { LABEL: "ready" } } }));
        let unset = Change::Label(json!({ "metadata": { "labels": { LABEL: null } } }));
        assert_eq!(changes(&node(&json!({})), &verdict(true), &outputs, now()), std::slice::from_ref(&set));
        assert_eq!(changes(&with("ready"), &verdict(true), &outputs, now()), []);
        assert_eq!(changes(&with("other"), &verdict(true), &outputs, now()), [set]);
        assert_eq!(changes(&with("ready"), &verdict(false), &outputs, now()), [unset]);
        assert_eq!(changes(&node(&json!({})), &verdict(false), &outputs, now()), []);
    }

    #[test]
    fn startup_taints_of_any_effect_go_and_no_other() {
        let foreign = json!({ "key": "other", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z", "future": 1 });
        let list = json!([
            { "key": TAINT, "effect": "NoSchedule" },
            foreign,
            { "key": TAINT, "value": "x", "effect": "NoExecute" },
            { "key": "cni.istio.io/not-ready", "effect": "PreferNoSchedule" },
        ]);
        let tainted = node(&json!({ "spec": { "taints": list } }));
        let patch = Change::Taint(json!([
            { "op": "test", "path": "/spec/taints", "value": list },
            { "op": "replace", "path": "/spec/taints", "value": [foreign] },
        ]));
        let outputs = taints(&[TAINT, "cni.istio.io/not-ready"], None);
        assert_eq!(changes(&tainted, &verdict(true), &outputs, now()), [patch]);
        assert_eq!(changes(&tainted, &verdict(false), &outputs, now()), [], "remove-only");
        assert_eq!(changes(&tainted, &verdict(true), &taints(&["none"], None), now()), []);
        assert_eq!(changes(&tainted, &verdict(true), &taints(&[], None), now()), []);
        assert_eq!(changes(&node(&json!({})), &verdict(true), &outputs, now()), []);
    }

    #[test]
    fn a_taint_comes_back_only_where_asked_for() {
        let outputs = taints(&[TAINT], Some(Effect::NoSchedule));
        let ours = json!({ "key": TAINT, "effect": "NoSchedule" });
        let bare = Change::Taint(json!([
            { "op": "test", "path": "/metadata/resourceVersion", "value": "7" },
            { "op": "add", "path": "/spec/taints", "value": [ours] },
        ]));
        assert_eq!(changes(&node(&json!({})), &verdict(false), &outputs, now()), [bare]);
        let list = json!([{ "key": "other", "effect": "NoSchedule" }]);
        let beside = Change::Taint(json!([
            { "op": "test", "path": "/spec/taints", "value": list },
            { "op": "add", "path": "/spec/taints/-", "value": ours },
        ]));
        assert_eq!(
            changes(&node(&json!({ "spec": { "taints": list } })), &verdict(false), &outputs, now()),
            [beside]
        );
        let there = node(&json!({ "spec": { "taints": [{ "key": TAINT, "effect": "NoExecute" }] } }));
        assert_eq!(changes(&there, &verdict(false), &outputs, now()), [], "any effect will do");
    }

    #[test]
    fn what_is_withdrawn_is_ours_alone() {
        assert_eq!(withdrawal(&node(&json!({}))), []);
        let foreign = json!({
            "metadata": { "name": "n1", "labels": { "nobypass.dev/other": "ready" } },
            "spec": { "taints": [{ "key": TAINT, "effect": "NoSchedule" }] },
            "status": { "conditions": [{ "type": "Ready", "status": "True" }] },
        });
        assert_eq!(withdrawal(&node(&foreign)), []);
        let said = node(&json!({
            "metadata": { "name": "n1", "labels": { LABEL: "ready" } }, "status": condition_of("True", "2026-01-01T00:00:00Z"),
        }));
        let [Change::Label(label), Change::Condition(condition)] = &withdrawal(&said)[..] else { panic!() };
        assert_eq!(label, &json!({ "metadata": { "labels": { LABEL: null } } }));
        let conditions = condition["status"]["conditions"].as_array().unwrap();
        assert_eq!((conditions.len(), &conditions[0]["type"]), (1, &json!(CONDITION)));
    }

    #[test]
    fn what_keeps_pods_away_comes_first_and_what_lets_them_in_last() {
        let outputs = Outputs { condition: true, label: true, ..taints(&[TAINT], Some(Effect::NoSchedule)) };
        let order = |node: &Node, open| {
            let changes = changes(node, &verdict(open), &outputs, now());
            changes.iter().map(Change::output).collect::<Vec<_>>()
        };
        let tainted = node(&json!({ "spec": { "taints": [{ "key": TAINT, "effect": "NoSchedule" }] } }));
        assert_eq!(order(&tainted, true), [Output::Condition, Output::Label, Output::Taint]);
        let open = node(&json!({ "metadata": { "labels": { LABEL: "ready" } } }));
        assert_eq!(order(&open, false), [Output::Taint, Output::Label, Output::Condition]);
    }
}
