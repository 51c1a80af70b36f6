//! What the script asks, section by section.

use kube::Client;
use serde_json::{Value, json};

use crate::script::{APPLY, JSON_PATCH, MERGE, STRATEGIC, Script};

/// What differs between two servers.
pub struct Given {
    pub client: Client,
    /// Exists, and is empty.
    pub namespace: String,
    /// Does not exist.
    pub node: String,
    /// Makes the server forget old resource versions.
    pub forget: Box<dyn Fn()>,
}

fn pod(name: &str, label: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "labels": { "app": label } },
        "spec": { "containers": [{ "name": "app", "image": "app:1" }] },
    })
}

fn version(object: &Value) -> &str {
    object["metadata"]["resourceVersion"].as_str().unwrap()
}

/// Runs the script; gives its transcript.
pub async fn run(given: Given) -> String {
    let names = vec![(given.namespace.clone(), "NAMESPACE"), (given.node.clone(), "NODE")];
    let pods = format!("/api/v1/namespaces/{}/pods", given.namespace);
    let mut script = Script::new(given.client.clone(), names);
    creates(&mut script, &given, &pods).await;
    lists(&mut script, &pods).await;
    watches(&mut script, &given, &pods).await;
    updates(&mut script, &pods).await;
    patches(&mut script, &pods).await;
    nodes(&mut script, &given).await;
    events(&mut script, &given).await;
    deletions(&mut script, &given, &pods).await;
    evictions(&mut script, &given, &pods).await;
    script.transcript()
}

async fn creates(s: &mut Script, given: &Given, pods: &str) {
    s.section("create and get");
    s.get("the namespace", &format!("/api/v1/namespaces/{}", given.namespace)).await;
    s.post("a pod in no namespace", "/api/v1/namespaces/none-such/pods", &pod("a", "x")).await;
    let mut unnamed = pod("", "x");
    s.post("a pod without a name", pods, &unnamed).await;
    unnamed["metadata"] = json!({ "generateName": "made-" });
    let made = s.post("a pod with half a name", pods, &unnamed).await;
    s.delete("and away", &format!("{pods}/{}", made["metadata"]["name"].as_str().unwrap()), &Value::Null)
        .await;
    s.post("a pod", pods, &pod("a", "x")).await;
    s.post("the same again", pods, &pod("a", "x")).await;
    s.post("only tried", &format!("{pods}?dryRun=All"), &pod("tried", "x")).await;
    s.get("so it is not there", &format!("{pods}/tried")).await;
    let mut wrong = pod("b", "x");
    wrong["metadata"]["namespace"] = json!("kube-system");
    s.post("another namespace in the body", pods, &wrong).await;
    wrong = pod("b", "x");
    wrong["metadata"]["resourceVersion"] = json!("1");
    s.post("a resource version in the body", pods, &wrong).await;
    wrong = pod("b", "x");
    wrong["spec"]["containers"] = json!([]);
    s.post("no containers", pods, &wrong).await;
    s.get("the pod", &format!("{pods}/a")).await;
    s.get("no such pod", &format!("{pods}/none")).await;
    s.get("no such resource", "/api/v1/widgets").await;
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "spec": { "resourceAttributes": { "verb": "list", "resource": "pods" } },
    });
    s.post("may I?", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", &review).await;
}

async fn lists(s: &mut Script, pods: &str) {
    s.section("list");
    s.post("a second pod", pods, &pod("b", "y")).await;
    s.post("a third pod", pods, &pod("c", "z")).await;
    for query in [
        "",
        "labelSelector=app%3Dx",
        "labelSelector=app%21%3Dx",
        "labelSelector=app+in+(x,y)",
        "labelSelector=app+notin+(x,y)",
        "labelSelector=app",
        "labelSelector=%21app",
        "labelSelector=a+b+c",
        "fieldSelector=metadata.name%3Da",
        "fieldSelector=metadata.name%3D%3Da",
        "fieldSelector=metadata.name%21%3Da,metadata.name%21%3Db",
        "fieldSelector=spec.nodeName%3D",
        "fieldSelector=spec.nodeName%3Dnowhere",
        "fieldSelector=status.phase%3DPending",
        "fieldSelector=spec.colour%3Dred",
        "resourceVersion=0",
        "resourceVersion=0&limit=1",
        "resourceVersion=0&resourceVersionMatch=NotOlderThan",
        "resourceVersion=0&resourceVersionMatch=Exact",
        "resourceVersionMatch=Exact",
        "resourceVersion=x",
        "resourceVersion=999999999",
        "sendInitialEvents=true",
        "continue=nonsense",
    ] {
        s.get(&format!("?{query}"), &format!("{pods}?{query}")).await;
    }
    let first = s.get("the first page", &format!("{pods}?limit=2")).await;
    let at = version(&first).to_owned();
    let token = first["metadata"]["continue"].as_str().unwrap().replace('=', "%3D");
    s.post("a pod in between", pods, &pod("d", "x")).await;
    s.get("the second page", &format!("{pods}?limit=2&continue={token}")).await;
    s.get("at least as new", &format!("{pods}?resourceVersion={at}")).await;
    s.get("exactly as it was", &format!("{pods}?resourceVersion={at}&resourceVersionMatch=Exact")).await;
    s.delete("away with it", &format!("{pods}/d"), &Value::Null).await;
}

async fn watches(s: &mut Script, given: &Given, pods: &str) {
    s.section("watch");
    let list = s.get("from here", pods).await;
    let query = format!("watch=1&labelSelector=app%3Dw&resourceVersion={}", version(&list));
    let mut events = s.watch(&format!("{pods}?{query}")).await;
    s.post("not selected", pods, &pod("e", "x")).await;
    let path = format!("{pods}/e");
    for (title, label) in [("enters", json!("w")), ("leaves", json!("x")), ("enters again", json!("w"))] {
        s.patch(title, &path, MERGE, &json!({ "metadata": { "labels": { "app": label } } })).await;
    }
    s.patch("changes", &path, MERGE, &json!({ "metadata": { "annotations": { "k": "v" } } })).await;
    s.patch("the same again", &path, MERGE, &json!({ "metadata": { "annotations": { "k": "v" } } })).await;
    s.delete("ends", &path, &Value::Null).await;
    s.events("the watch of app=w", &mut events, 6).await;
    let query = "watch=1&timeoutSeconds=1";
    let mut events = s.watch(&format!("{pods}?{query}&labelSelector=app%3Dx")).await;
    s.events("from no version, for a second", &mut events, 2).await;
    let mut events =
        s.watch(&format!("{pods}?{query}&resourceVersion=0&fieldSelector=metadata.name%3Da")).await;
    s.events("from version 0", &mut events, 2).await;
    let initial = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
    let mut events =
        s.watch(&format!("{pods}?{query}&{initial}&allowWatchBookmarks=true&labelSelector=app%3Dx")).await;
    s.events("with initial events", &mut events, 2).await;
    s.get("initial events without a match", &format!("{pods}?watch=1&sendInitialEvents=true")).await;
    s.get(
        "a match without initial events",
        &format!("{pods}?watch=1&resourceVersion=1&resourceVersionMatch=Exact"),
    )
    .await;
    s.get("by an unknown field", &format!("{pods}?watch=1&fieldSelector=spec.colour%3Dred")).await;
    (given.forget)();
    let mut events = s.watch(&format!("{pods}?watch=1&resourceVersion=1")).await;
    s.events("from a version that is too old", &mut events, 2).await;
    let list = s.get("from here", pods).await;
    let from = format!("allowWatchBookmarks=true&resourceVersion={}", version(&list));
    let mut events = s.watch(&format!("{pods}?watch=1&timeoutSeconds=6&labelSelector=none&{from}")).await;
    let newer = s.post("not selected", pods, &pod("f", "x")).await;
    let mut last = None;
    while let Some(event) = events.next().await {
        assert_eq!(event["type"], "BOOKMARK", "{event}");
        last = Some(version(&event["object"]).parse::<u64>().unwrap());
    }
    let passed = last.is_some_and(|last| last >= version(&newer).parse().unwrap());
    s.note(&format!("a bookmark before the end, past what was not selected: {passed}"));
    s.delete("away with it", &format!("{pods}/f"), &Value::Null).await;
}

async fn updates(s: &mut Script, pods: &str) {
    s.section("update");
    let path = format!("{pods}/a");
    let first = s.get("as it is", &path).await;
    let mut new = first.clone();
    s.put("the same", &path, &new).await;
    new["metadata"]["labels"]["l"] = json!("1");
    new["status"]["phase"] = json!("Failed");
    s.put("a label, and a status that is ignored", &path, &new).await;
    s.put("an old version", &path, &new).await;
    new["metadata"].as_object_mut().unwrap().remove("resourceVersion");
    new["metadata"]["labels"]["l"] = json!("2");
    s.put("without a version", &path, &new).await;
    new["metadata"]["uid"] = json!("00000000-0000-0000-0000-000000000000");
    s.put("another uid", &path, &new).await;
    new["metadata"].as_object_mut().unwrap().remove("uid");
    new["spec"]["containers"][0]["image"] = json!("app:2");
    s.put("another image", &path, &new).await;
    new["spec"]["containers"][0]["name"] = json!("other");
    s.put("another container", &path, &new).await;
    s.put("under another name", &format!("{pods}/b"), &new).await;
    new["metadata"]["name"] = json!("none");
    s.put("what is not there", &format!("{pods}/none"), &new).await;
    let mut status = s.get("as it is", &path).await;
    status["status"]["phase"] = json!("Running");
    status["metadata"]["labels"]["by"] = json!("status");
    status["spec"]["containers"][0]["image"] = json!("app:3");
    s.put("the status, and a spec that is ignored", &format!("{path}/status"), &status).await;
}

async fn patches(s: &mut Script, pods: &str) {
    s.section("patch");
    let path = format!("{pods}/b");
    let status = format!("{path}/status");
    s.patch("merge: labels", &path, MERGE, &json!({ "metadata": { "labels": { "app": null, "m": "1" } } }))
        .await;
    s.patch("strategic: label", &path, STRATEGIC, &json!({ "metadata": { "labels": { "m": null } } })).await;
    let condition =
        |name: &str, value: &str| json!({ "status": { "conditions": [{ "type": name, "status": value }] } });
    s.patch("strategic: a condition", &status, STRATEGIC, &condition("example.dev/A", "True")).await;
    s.patch("strategic: another", &status, STRATEGIC, &condition("example.dev/B", "True")).await;
    s.patch("strategic: the first again", &status, STRATEGIC, &condition("example.dev/A", "False")).await;
    s.patch("merge: conditions are replaced", &status, MERGE, &condition("example.dev/C", "True")).await;
    s.patch("a status in the main resource is ignored", &path, MERGE, &condition("example.dev/D", "True"))
        .await;
    let image = json!({ "spec": { "containers": [{ "name": "app", "image": "app:9" }] } });
    s.patch("strategic: an image", &path, STRATEGIC, &image).await;
    s.patch(
        "json: add",
        &path,
        JSON_PATCH,
        &json!([{ "op": "add", "path": "/metadata/labels", "value": { "j": "1" } }]),
    )
    .await;
    let test = json!([
        { "op": "remove", "path": "/metadata/labels/j" },
        { "op": "test", "path": "/metadata/name", "value": "other" },
    ]);
    s.patch("json: a test that fails", &path, JSON_PATCH, &test).await;
    s.patch(
        "json: what is not there",
        &path,
        JSON_PATCH,
        &json!([{ "op": "remove", "path": "/metadata/labels/none" }]),
    )
    .await;
    s.patch("json: no list", &path, JSON_PATCH, &json!({ "op": "remove" })).await;
    s.patch(
        "an old version",
        &path,
        MERGE,
        &json!({ "metadata": { "resourceVersion": "1", "labels": { "v": "1" } } }),
    )
    .await;
    s.patch("another uid", &path, MERGE, &json!({ "metadata": { "uid": "other", "labels": { "v": "1" } } }))
        .await;
    let labelled = json!({ "metadata": { "uid": "other", "labels": { "v": "1" } } });
    s.patch("a label by the status, of another uid", &status, MERGE, &labelled).await;
    s.patch("an unknown type", &path, "application/json", &json!({})).await;
    s.patch(
        "only tried",
        &format!("{path}?dryRun=All"),
        MERGE,
        &json!({ "metadata": { "labels": { "t": "1" } } }),
    )
    .await;
    s.get("so it is as it was", &path).await;
    s.patch("what is not there", &format!("{pods}/none"), MERGE, &json!({})).await;
    let applied = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "b", "labels": { "applied": "1" } } });
    s.patch("apply without a manager", &path, APPLY, &applied).await;
    s.patch("apply", &format!("{path}?fieldManager=test"), APPLY, &applied).await;
    let mut made = pod("applied", "x");
    made["metadata"]["labels"] = Value::Null;
    s.patch("apply makes it", &format!("{pods}/applied?fieldManager=test"), APPLY, &made).await;
    s.delete("and away", &format!("{pods}/applied"), &Value::Null).await;
}

async fn nodes(s: &mut Script, given: &Given) {
    s.section("nodes");
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": given.node } });
    s.post("a node", "/api/v1/nodes", &node).await;
    let path = format!("/api/v1/nodes/{}", given.node);
    let taints = |keys: &[&str]| -> Value {
        let taint = |key: &&str| json!({ "key": key, "effect": "NoSchedule" });
        json!({ "spec": { "taints": keys.iter().map(taint).collect::<Vec<_>>() } })
    };
    s.patch("strategic: taints are one value", &path, STRATEGIC, &taints(&["a", "b"])).await;
    s.patch("merge: so they are here", &path, MERGE, &taints(&["c"])).await;
    s.patch("twice the same", &path, MERGE, &taints(&["c", "c"])).await;
    let effect = json!({ "spec": { "taints": [{ "key": "d", "effect": "Never" }] } });
    s.patch("an effect that there is not", &path, MERGE, &effect).await;
    let remove = json!([{ "op": "test", "path": "/spec/taints/0/key", "value": "c" }, { "op": "remove", "path": "/spec/taints/0" }]);
    s.patch("json: the last one away", &path, JSON_PATCH, &remove).await;
    s.patch(
        "a label that is none",
        &path,
        MERGE,
        &json!({ "metadata": { "labels": { "l": "not a value" } } }),
    )
    .await;
    s.patch(
        "a label",
        &path,
        MERGE,
        &json!({ "metadata": { "labels": { "nobypass.dev/mesh-cni": "ready" } } }),
    )
    .await;
    let condition = |value: &str| {
        json!({ "status": { "conditions": [{
        "type": "nobypass.dev/MeshCNIReady", "status": value, "reason": "Test",
        "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z",
    }] } })
    };
    let status = format!("{path}/status");
    s.patch("a condition", &status, STRATEGIC, &condition("False")).await;
    let ready = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True" }] } });
    s.patch("another", &status, STRATEGIC, &ready).await;
    s.patch("the first again", &status, STRATEGIC, &condition("True")).await;
    s.patch("a taint by the status is ignored", &status, STRATEGIC, &taints(&["z"])).await;
    let gone =
        json!({ "status": { "conditions": [{ "type": "nobypass.dev/MeshCNIReady", "$patch": "delete" }] } });
    s.patch("one condition away, and no other", &status, STRATEGIC, &gone).await;
    s.patch("it is away already", &status, STRATEGIC, &gone).await;
    s.patch(
        "the label away",
        &path,
        MERGE,
        &json!({ "metadata": { "labels": { "nobypass.dev/mesh-cni": null } } }),
    )
    .await;
    s.patch("merge: two taints", &path, MERGE, &taints(&["a", "b"])).await;
    let whole = |tested: &[&str], left: &[&str]| {
        json!([
            { "op": "test", "path": "/spec/taints", "value": taints(tested)["spec"]["taints"] },
            { "op": "replace", "path": "/spec/taints", "value": taints(left)["spec"]["taints"] },
        ])
    };
    s.patch("json: the list was another one", &path, JSON_PATCH, &whole(&["a"], &[])).await;
    s.patch("json: one of two away", &path, JSON_PATCH, &whole(&["a", "b"], &["b"])).await;
    s.patch("json: the last one away, as a list", &path, JSON_PATCH, &whole(&["b"], &[])).await;
    let versioned = json!([
        { "op": "test", "path": "/metadata/resourceVersion", "value": "1" },
        { "op": "add", "path": "/spec/taints", "value": taints(&["z"])["spec"]["taints"] },
    ]);
    s.patch("json: the version was another one", &path, JSON_PATCH, &versioned).await;
    s.get("by name", &format!("/api/v1/nodes?fieldSelector=metadata.name%3D{}", given.node)).await;
    s.get("by a field that it does not have", "/api/v1/nodes?fieldSelector=spec.nodeName%3Dx").await;
}

async fn events(s: &mut Script, given: &Given) {
    s.section("events");
    let new = format!("/apis/events.k8s.io/v1/namespaces/{}/events", given.namespace);
    let core = format!("/api/v1/namespaces/{}/events", given.namespace);
    let event = |name: &str| {
        json!({
            "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": { "name": name },
            "eventTime": "2026-01-01T00:00:00.000000Z", "reportingController": "nobypass.dev/agent",
            "reportingInstance": "node", "action": "Report", "reason": "MeshBypassDetected", "type": "Warning",
            "note": "what happened",
            "regarding": { "apiVersion": "v1", "kind": "Pod", "namespace": given.namespace, "name": "a" },
        })
    };
    s.post("an event", &new, &event("e1")).await;
    s.get("as a core event", &format!("{core}/e1")).await;
    for field in ["reportingController", "reportingInstance", "action", "reason", "type", "eventTime"] {
        let mut event = event("e2");
        event.as_object_mut().unwrap().remove(field);
        s.post(&format!("without {field}"), &new, &event).await;
    }
    let mut long = event("e2");
    long["note"] = json!("x".repeat(1025));
    s.post("with a long note", &new, &long).await;
    let mut elsewhere = event("e2");
    elsewhere["regarding"]["namespace"] = json!("kube-system");
    s.post("regarding another namespace", &new, &elsewhere).await;
    let mut about_node = event("e2");
    about_node["regarding"] = json!({ "kind": "Node", "name": given.node });
    s.post("regarding a node, here", &new, &about_node).await;
    about_node["metadata"]["name"] = json!(format!("{}-event", given.namespace));
    s.post("regarding a node, in default", "/apis/events.k8s.io/v1/namespaces/default/events", &about_node)
        .await;
    let series = json!({ "series": { "count": 2, "lastObservedTime": "2026-01-01T00:01:00.000000Z" } });
    s.patch("a series", &format!("{new}/e1"), MERGE, &series).await;
    let old = json!({
        "apiVersion": "v1", "kind": "Event", "metadata": { "name": "old" }, "type": "Normal", "reason": "R", "message": "m",
        "involvedObject": { "kind": "Pod", "namespace": given.namespace, "name": "b" },
    });
    s.post("a core event", &core, &old).await;
    s.get("by the object", &format!("{core}?fieldSelector=involvedObject.name%3Da")).await;
}

async fn deletions(s: &mut Script, given: &Given, pods: &str) {
    s.section("delete");
    let node = format!("/api/v1/nodes/{}", given.node);
    let list = s.get("from here", pods).await;
    let mut events =
        s.watch(&format!("{pods}?watch=1&labelSelector=app%3Dgone&resourceVersion={}", version(&list))).await;
    let mut scheduled = pod("scheduled", "gone");
    scheduled["spec"]["nodeName"] = json!(given.node);
    let made = s.post("a pod with a node", pods, &scheduled).await;
    let path = format!("{pods}/scheduled");
    let uid = json!({ "preconditions": { "uid": "other" } });
    s.delete("of another uid", &path, &uid).await;
    s.delete("of an old version", &path, &json!({ "preconditions": { "resourceVersion": "1" } })).await;
    let right = json!({ "preconditions": { "uid": made["metadata"]["uid"] }, "dryRun": ["All"] });
    s.delete("only tried", &path, &right).await;
    s.delete("with grace", &path, &json!({ "preconditions": { "uid": made["metadata"]["uid"] } })).await;
    s.delete("again", &path, &Value::Null).await;
    s.delete("with less grace", &path, &json!({ "gracePeriodSeconds": 5 })).await;
    s.delete("with more grace", &path, &json!({ "gracePeriodSeconds": 50 })).await;
    s.delete("by a query, without grace", &format!("{path}?gracePeriodSeconds=0"), &Value::Null).await;
    s.delete("what is not there", &path, &Value::Null).await;
    let mut held = pod("held", "gone");
    held["metadata"]["finalizers"] = json!(["example.dev/hold"]);
    s.post("a pod with a finalizer", pods, &held).await;
    let path = format!("{pods}/held");
    s.delete("is held", &path, &Value::Null).await;
    s.patch("let go", &path, MERGE, &json!({ "metadata": { "finalizers": null } })).await;
    s.get("is gone", &path).await;
    let mut bound = pod("bound", "gone");
    bound["spec"]["schedulerName"] = json!("nobody");
    s.post("a pod without a node", pods, &bound).await;
    let binding = json!({ "apiVersion": "v1", "kind": "Binding", "metadata": { "name": "bound" }, "target": { "kind": "Node", "name": given.node } });
    s.post("is bound", &format!("{pods}/bound/binding"), &binding).await;
    s.get("by its node", &format!("{pods}?fieldSelector=spec.nodeName%3D{}", given.node)).await;
    s.post("is bound again", &format!("{pods}/bound/binding"), &binding).await;
    s.patch(
        "has ended",
        &format!("{pods}/bound/status"),
        MERGE,
        &json!({ "status": { "phase": "Succeeded" } }),
    )
    .await;
    s.delete("needs no grace", &format!("{pods}/bound"), &Value::Null).await;
    s.events("the watch of app=gone", &mut events, 13).await;
    s.delete("the node", &node, &Value::Null).await;
}

async fn evictions(s: &mut Script, given: &Given, pods: &str) {
    s.section("evict");
    let path = format!("{pods}/victim");
    let mut victim = pod("victim", "guarded");
    victim["spec"]["nodeName"] = json!(given.node);
    let made = s.post("a pod", pods, &victim).await;
    let status =
        json!({ "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] } });
    s.patch("runs", &format!("{path}/status"), STRATEGIC, &status).await;
    let eviction = |name: &str, uid: &Value| {
        json!({
            "apiVersion": "policy/v1", "kind": "Eviction", "metadata": { "name": name, "namespace": given.namespace },
            "deleteOptions": { "preconditions": { "uid": uid } },
        })
    };
    let uid = &made["metadata"]["uid"];
    s.post("what is not there", &format!("{pods}/none/eviction"), &eviction("none", uid)).await;
    s.post("another name", &format!("{path}/eviction"), &eviction("other", uid)).await;
    s.post("of another uid", &format!("{path}/eviction"), &eviction("victim", &json!("other"))).await;
    let budgets = format!("/apis/policy/v1/namespaces/{}/poddisruptionbudgets", given.namespace);
    let budget = json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": { "name": "guard" },
        "spec": { "minAvailable": 1, "selector": { "matchLabels": { "app": "guarded" } } },
    });
    s.post("a budget", &budgets, &budget).await;
    s.post("before it is counted", &format!("{path}/eviction"), &eviction("victim", uid)).await;
    let counted = |allowed: u32| {
        json!({ "status": {
        "observedGeneration": 1, "disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1,
    } })
    };
    s.patch("it allows none", &format!("{budgets}/guard/status"), MERGE, &counted(0)).await;
    s.post("is refused", &format!("{path}/eviction"), &eviction("victim", uid)).await;
    s.patch("it allows one", &format!("{budgets}/guard/status"), MERGE, &counted(1)).await;
    s.post("is done", &format!("{path}/eviction"), &eviction("victim", uid)).await;
    s.get("is on its way", &path).await;
    s.get("and counted", &format!("{budgets}/guard")).await;
    s.post("once more", &format!("{path}/eviction"), &eviction("victim", uid)).await;
    s.delete("away", &path, &json!({ "gracePeriodSeconds": 0 })).await;
}

/// Compares with the kept transcript, or with `NOBYPASS_RECORD` set keeps this one instead: only a real server's.
pub fn compare(transcript: &str) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/both/transcript.txt");
    if std::env::var_os("NOBYPASS_RECORD").is_some() {
        std::fs::write(path, transcript).unwrap();
        return;
    }
    let kept = std::fs::read_to_string(path).unwrap();
    let mut differences = String::new();
    let (mut was, mut is) = (kept.lines(), transcript.lines());
    loop {
        let (was, is) = match (was.next(), is.next()) {
            (None, None) => break,
            pair => (pair.0.unwrap_or("(nothing)"), pair.1.unwrap_or("(nothing)")),
        };
        if was != is {
            differences.push_str(&format!("kept: {was}\nnow:  {is}\n"));
        }
    }
    assert!(differences.is_empty(), "the answers differ:\n{differences}");
}
