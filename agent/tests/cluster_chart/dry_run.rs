//! `kubectl apply --server-side --dry-run=server` of everything that the chart renders.

use std::fs;

use kube::api::{DynamicObject, PostParams};
use nobypass_testkit::control_plane::ControlPlane;
use serde_json::{Value, json};

use crate::{admin, api, apply, documents, render_variant, repository, variants};

/// The Prometheus Operator's kinds; what is in them is for it to judge.
fn definition(kind: &str) -> Value {
    let plural = format!("{}s", kind.to_lowercase());
    let anything = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{plural}.monitoring.coreos.com") },
        "spec": {
            "group": "monitoring.coreos.com", "scope": "Namespaced",
            "names": { "kind": kind, "plural": plural },
            "versions": [{
                "name": "v1", "served": true, "storage": true, "schema": { "openAPIV3Schema": anything },
            }],
        },
    })
}

async fn until_served(client: &kube::Client, kind: &str) {
    let object = json!({
        "apiVersion": "monitoring.coreos.com/v1", "kind": kind,
        "metadata": { "name": "x", "namespace": "nobypass-system" },
    });
    let end = tokio::time::Instant::now() + nobypass_testkit::wait::HANG;
    while let Err(error) = apply(client, &object, true).await {
        assert!(tokio::time::Instant::now() < end, "{kind}: {error}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

/// A pod of the DaemonSet, as its controller makes it.
fn pod(daemon_set: &Value) -> DynamicObject {
    let template = &daemon_set["spec"]["template"];
    let object = json!({
        "apiVersion": "v1", "kind": "Pod", "spec": template["spec"],
        "metadata": {
            "name": "nobypass-x", "namespace": "nobypass-system",
            "labels": template["metadata"]["labels"], "annotations": template["metadata"]["annotations"],
        },
    });
    serde_json::from_value(object).unwrap()
}

#[tokio::test]
async fn the_api_server_accepts_everything_that_the_chart_renders() {
    let plane = ControlPlane::shared().unwrap();
    let client = admin(plane).await;
    let read = |path: &str| documents(&fs::read_to_string(repository().join("deploy").join(path)).unwrap());
    // With the labels by which pods that are not confined are let in.
    let namespace = &read("manifests/namespace/namespace.yaml")[0];
    apply(&client, namespace, false).await.unwrap();
    for kind in ["PodMonitor", "PrometheusRule"] {
        apply(&client, &definition(kind), false).await.unwrap();
        until_served(&client, kind).await;
    }

    let mut all = vec![
        ("audit".to_owned(), read("manifests/audit/nobypass.yaml")),
        ("enforce".to_owned(), read("manifests/enforce/nobypass.yaml")),
    ];
    all.extend(variants().into_iter().map(|(name, values)| (name, render_variant(&values))));
    let mut kinds = std::collections::BTreeSet::new();
    for (name, objects) in &all {
        for object in objects {
            let kind = object["kind"].as_str().unwrap();
            let shown = format!("{name}: {kind} {}", object["metadata"]["name"]);
            kinds.insert(kind);
            let made = apply(&client, object, true).await.unwrap_or_else(|error| panic!("{shown}: {error}"));
            assert!(made.metadata.uid.is_some(), "{shown}: {made:?}");
            if kind == "DaemonSet" {
                let pod = pod(object);
                let of = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": pod.metadata });
                let dry = PostParams { dry_run: true, ..PostParams::default() };
                let made = api(&client, &of).create(&dry, &pod).await;
                made.unwrap_or_else(|error| panic!("{shown}: its pod: {error}"));
            }
        }
    }
    let expected = [
        "ClusterRole",
        "ClusterRoleBinding",
        "ConfigMap",
        "DaemonSet",
        "NetworkPolicy",
        "PodMonitor",
        "PrometheusRule",
        "ResourceQuota",
        "Service",
        "ServiceAccount",
    ];
    assert_eq!(kinds, expected.into(), "every kind that the chart has");

    // Each of these can fail.
    let daemon_set = all[0].1.iter().find(|object| object["kind"] == "DaemonSet").unwrap();
    let mut misspelt = daemon_set.clone();
    misspelt["spec"]["template"]["spec"]["hostPid"] = json!(true);
    let error = apply(&client, &misspelt, true).await.unwrap_err().to_string();
    assert!(error.contains("hostPid"), "{error}");
    let mut plain = namespace.clone();
    plain["metadata"] = json!({
        "name": "plain", "labels": { "pod-security.kubernetes.io/enforce": "baseline" },
    });
    apply(&client, &plain, false).await.unwrap();
    let mut pod = pod(daemon_set);
    pod.metadata.namespace = Some("plain".to_owned());
    let of = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": pod.metadata });
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let error = api(&client, &of).create(&dry, &pod).await.unwrap_err().to_string();
    assert!(error.contains("violates PodSecurity"), "without the namespace's labels: {error}");
}
