//! The resources that the server knows, as a table, and what of a URL path names them.

/// One resource.
#[derive(Debug, PartialEq, Eq)]
pub struct Kind {
    /// Empty for the core group.
    pub group: &'static str,
    pub version: &'static str,
    /// Plural, as in paths; unique here.
    pub resource: &'static str,
    pub kind: &'static str,
    pub namespaced: bool,
}

const fn kind(group: &'static str, resource: &'static str, kind: &'static str, namespaced: bool) -> Kind {
    Kind { group, version: "v1", resource, kind, namespaced }
}

pub const EVENTS: &str = "events";

/// `events` of the core group is the same storage, see `form.rs`.
pub static KINDS: [Kind; 21] = [
    kind("", "pods", "Pod", true),
    kind("", "nodes", "Node", false),
    kind("", "namespaces", "Namespace", false),
    kind("", "configmaps", "ConfigMap", true),
    kind("", "secrets", "Secret", true),
    kind("", "serviceaccounts", "ServiceAccount", true),
    kind("", "services", "Service", true),
    kind("", "replicationcontrollers", "ReplicationController", true),
    kind("events.k8s.io", "events", "Event", true),
    kind("apps", "replicasets", "ReplicaSet", true),
    kind("apps", "deployments", "Deployment", true),
    kind("apps", "daemonsets", "DaemonSet", true),
    kind("apps", "statefulsets", "StatefulSet", true),
    kind("apps", "controllerrevisions", "ControllerRevision", true),
    kind("batch", "jobs", "Job", true),
    kind("batch", "cronjobs", "CronJob", true),
    kind("policy", "poddisruptionbudgets", "PodDisruptionBudget", true),
    kind("coordination.k8s.io", "leases", "Lease", true),
    kind("node.k8s.io", "runtimeclasses", "RuntimeClass", false),
    kind("authorization.k8s.io", "selfsubjectaccessreviews", "SelfSubjectAccessReview", false),
    kind("apiextensions.k8s.io", "customresourcedefinitions", "CustomResourceDefinition", false),
];

impl Kind {
    pub fn of_resource(resource: &str) -> Option<&'static Self> {
        KINDS.iter().find(|kind| kind.resource == resource)
    }

    pub fn of_kind(name: &str) -> Option<&'static Self> {
        KINDS.iter().find(|kind| kind.kind == name)
    }

    /// As in messages: `pods`, `replicasets.apps`.
    pub fn qualified(&self) -> String {
        if self.group.is_empty() { self.resource.into() } else { format!("{}.{}", self.resource, self.group) }
    }

    pub fn api_version(&self) -> String {
        api_version(self.group, self.version)
    }
}

fn api_version(group: &str, version: &str) -> String {
    if group.is_empty() { version.into() } else { format!("{group}/{version}") }
}

/// What a path names.
#[derive(Clone, Debug)]
pub struct Route {
    pub kind: &'static Kind,
    /// The group of the path: for events it may differ from the kind's.
    pub group: String,
    pub namespace: Option<String>,
    pub name: Option<String>,
    pub subresource: Option<String>,
}

impl Route {
    /// Parses `/api/v1/...` and `/apis/GROUP/VERSION/...`; `None` for what the server does not know.
    pub fn parse(path: &str) -> Option<Self> {
        let mut parts = path.split('/').filter(|part| !part.is_empty());
        let (group, version) = match parts.next()? {
            "api" => ("", parts.next()?),
            "apis" => (parts.next()?, parts.next()?),
            _ => return None,
        };
        let rest: Vec<&str> = parts.collect();
        let (namespace, rest) = match rest.as_slice() {
            // A namespace's own sub-resources.
            ["namespaces", _, "status" | "finalize"] => (None, rest.as_slice()),
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (Some((*namespace).to_owned()), rest),
            rest => (None, rest),
        };
        let (resource, name, subresource) = match rest {
            [resource] => (*resource, None, None),
            [resource, name] => (*resource, Some(*name), None),
            [resource, name, sub] => (*resource, Some(*name), Some(*sub)),
            _ => return None,
        };
        let kind = Kind::of_resource(resource)?;
        let served = kind.group == group || (kind.resource == EVENTS && group.is_empty());
        (served && kind.version == version).then(|| Self {
            kind,
            group: group.into(),
            namespace,
            name: name.map(Into::into),
            subresource: subresource.map(Into::into),
        })
    }

    pub fn api_version(&self) -> String {
        api_version(&self.group, self.kind.version)
    }

    /// As in RBAC rules: `pods`, `pods/eviction`.
    pub fn target(&self) -> String {
        match &self.subresource {
            Some(sub) => format!("{}/{sub}", self.kind.resource),
            None => self.kind.resource.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_resources() {
        for (path, target, namespace, name) in [
            ("/api/v1/pods", "pods", None, None),
            ("/api/v1/namespaces/a/pods", "pods", Some("a"), None),
            ("/api/v1/namespaces/a/pods/p/eviction", "pods/eviction", Some("a"), Some("p")),
            ("/api/v1/namespaces", "namespaces", None, None),
            ("/api/v1/namespaces/a", "namespaces", None, Some("a")),
            ("/api/v1/namespaces/a/status", "namespaces/status", None, Some("a")),
            ("/api/v1/nodes/n/status", "nodes/status", None, Some("n")),
            ("/apis/events.k8s.io/v1/namespaces/a/events", "events", Some("a"), None),
            ("/api/v1/namespaces/a/events/e", "events", Some("a"), Some("e")),
            ("/apis/apps/v1/namespaces/a/replicasets/r", "replicasets", Some("a"), Some("r")),
        ] {
            let route = Route::parse(path).expect(path);
            assert_eq!(
                (route.target().as_str(), route.namespace.as_deref(), route.name.as_deref()),
                (target, namespace, name),
                "{path}"
            );
        }
        for path in
            ["/", "/api", "/api/v1", "/api/v2/pods", "/apis/apps/v1/pods", "/api/v1/widgets", "/x/y/z"]
        {
            assert!(Route::parse(path).is_none(), "{path}");
        }
    }
}
