//! Pods and namespaces as the API writes them, trimmed to what facts are made of.
//!
//! <https://github.com/kubernetes/kubernetes/blob/v1.33.0/staging/src/k8s.io/api/core/v1/types.go>. Everything may be
//! absent or null here, so that one odd object never hides the others.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::Deserialize;

use crate::cluster::watch::Object;

/// Labels, annotations.
pub(super) type Map = BTreeMap<Box<str>, Box<str>>;

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Meta {
    pub(super) name: Option<Box<str>>,
    pub(super) namespace: Option<Box<str>>,
    pub(super) uid: Option<Box<str>>,
    pub(super) resource_version: Option<Box<str>>,
    pub(super) labels: Option<Map>,
    pub(super) annotations: Option<Map>,
    pub(super) creation_timestamp: Option<Time>,
    pub(super) deletion_timestamp: Option<Time>,
    pub(super) owner_references: Option<Vec<Owner>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Owner {
    pub(super) kind: Box<str>,
    pub(super) name: Box<str>,
    pub(super) uid: Box<str>,
    pub(super) controller: Option<bool>,
}

/// A namespace: its metadata is all that matters.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Namespace {
    #[serde(default)]
    pub(super) metadata: Meta,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Pod {
    pub(super) metadata: Meta,
    pub(super) spec: Option<Spec>,
    pub(super) status: Option<Status>,
}

impl Object for Namespace {
    fn resource_version(&self) -> &str {
        self.metadata.resource_version.as_deref().unwrap_or_default()
    }
}

impl Object for Pod {
    fn resource_version(&self) -> &str {
        self.metadata.resource_version.as_deref().unwrap_or_default()
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Spec {
    pub(super) node_name: Option<Box<str>>,
    pub(super) host_network: Option<bool>,
    pub(super) runtime_class_name: Option<Box<str>>,
    pub(super) restart_policy: Option<Box<str>>,
    pub(super) security_context: Option<SecurityContext>,
    pub(super) init_containers: Option<Vec<Container>>,
    pub(super) containers: Option<Vec<Container>>,
    pub(super) ephemeral_containers: Option<Vec<Container>>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct SecurityContext {
    pub(super) run_as_user: Option<i64>,
    pub(super) run_as_group: Option<i64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Container {
    pub(super) name: Box<str>,
    pub(super) args: Option<Vec<Box<str>>>,
    pub(super) env: Option<Vec<Variable>>,
    pub(super) restart_policy: Option<Box<str>>,
    pub(super) security_context: Option<SecurityContext>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Variable {
    pub(super) name: Box<str>,
    /// Absent where it comes from elsewhere (`valueFrom`).
    pub(super) value: Option<Box<str>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Status {
    pub(super) phase: Option<Box<str>>,
    #[serde(rename = "podIPs")]
    pub(super) pod_ips: Option<Vec<PodIp>>,
    pub(super) start_time: Option<Time>,
    pub(super) conditions: Option<Vec<Condition>>,
    pub(super) init_container_statuses: Option<Vec<ContainerStatus>>,
    pub(super) container_statuses: Option<Vec<ContainerStatus>>,
    pub(super) ephemeral_container_statuses: Option<Vec<ContainerStatus>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct PodIp {
    pub(super) ip: Box<str>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Condition {
    pub(super) r#type: Box<str>,
    pub(super) status: Box<str>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ContainerStatus {
    pub(super) name: Box<str>,
    #[serde(rename = "containerID")]
    pub(super) container_id: Option<Box<str>>,
    pub(super) restart_count: i64,
    pub(super) state: Option<ContainerState>,
    pub(super) last_state: Option<ContainerState>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ContainerState {
    pub(super) running: Option<Running>,
    pub(super) terminated: Option<Terminated>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Running {
    pub(super) started_at: Option<Time>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Terminated {
    pub(super) exit_code: i64,
    pub(super) started_at: Option<Time>,
}
