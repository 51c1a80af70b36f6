//! Objects for tests.

use serde_json::{Value, json};

/// A running pod with one container `app`, to be changed and built.
///
/// ```ignore
/// Pod::new("shop", "web-1").node("n1").annotation("linkerd.io/inject", "enabled").container("linkerd-proxy", "p:1").build()
/// ```
#[derive(Clone, Debug)]
pub struct Pod(Value);

impl Pod {
    #[must_use]
    pub fn new(namespace: &str, name: &str) -> Self {
        Self(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "namespace": namespace, "name": name },
            "spec": {
                "containers": [{ "name": "app", "image": "app:1" }],
                "restartPolicy": "Always", "terminationGracePeriodSeconds": 30,
            },
            "status": { "phase": "Running" },
        }))
    }

    #[must_use]
    pub fn build(self) -> Value {
        self.0
    }

    /// Anything else.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Value)) -> Self {
        change(&mut self.0);
        self
    }

    #[must_use]
    pub fn node(self, node: &str) -> Self {
        self.with(|pod| pod["spec"]["nodeName"] = json!(node))
    }

    #[must_use]
    pub fn uid(self, uid: &str) -> Self {
        self.with(|pod| pod["metadata"]["uid"] = json!(uid))
    }

    #[must_use]
    pub fn label(self, key: &str, value: &str) -> Self {
        self.with(|pod| pod["metadata"]["labels"][key] = json!(value))
    }

    #[must_use]
    pub fn annotation(self, key: &str, value: &str) -> Self {
        self.with(|pod| pod["metadata"]["annotations"][key] = json!(value))
    }

    #[must_use]
    pub fn phase(self, phase: &str) -> Self {
        self.with(|pod| pod["status"]["phase"] = json!(phase))
    }

    #[must_use]
    pub fn host_network(self) -> Self {
        self.with(|pod| pod["spec"]["hostNetwork"] = json!(true))
    }

    /// Adds a container.
    #[must_use]
    pub fn container(self, name: &str, image: &str) -> Self {
        self.push("containers", json!({ "name": name, "image": image }))
    }

    /// Adds an init container; a native sidecar is one with `restartPolicy: Always`.
    #[must_use]
    pub fn init_container(self, name: &str, image: &str, sidecar: bool) -> Self {
        let mut container = json!({ "name": name, "image": image });
        if sidecar {
            container["restartPolicy"] = json!("Always");
        }
        self.push("initContainers", container)
    }

    fn push(self, list: &str, item: Value) -> Self {
        self.with(|pod| match pod["spec"][list].as_array_mut() {
            Some(items) => items.push(item),
            None => pod["spec"][list] = json!([item]),
        })
    }

    /// Says that a container runs, with its id (`containerd://...`).
    #[must_use]
    pub fn running(self, container: &str, id: &str) -> Self {
        let status = json!({
            "name": container, "containerID": id, "ready": true, "started": true, "restartCount": 0,
            "state": { "running": {} },
        });
        self.with(|pod| match pod["status"]["containerStatuses"].as_array_mut() {
            Some(statuses) => statuses.push(status),
            None => pod["status"]["containerStatuses"] = json!([status]),
        })
    }

    /// Adds the controller that owns the pod.
    #[must_use]
    pub fn owner(self, api_version: &str, kind: &str, name: &str, uid: &str) -> Self {
        self.with(|pod| {
            pod["metadata"]["ownerReferences"] = json!([{
                "apiVersion": api_version, "kind": kind, "name": name, "uid": uid,
                "controller": true, "blockOwnerDeletion": true,
            }]);
        })
    }
}

/// A node that is ready.
#[must_use]
pub fn node(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": name, "labels": { "kubernetes.io/hostname": name } },
        "spec": {},
        "status": { "conditions": [{ "type": "Ready", "status": "True", "reason": "KubeletReady" }] },
    })
}

/// An active namespace.
#[must_use]
pub fn namespace(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": { "name": name },
        "spec": { "finalizers": ["kubernetes"] },
        "status": { "phase": "Active" },
    })
}
