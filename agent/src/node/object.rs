//! What is read of a Node object. Taints are kept as the server sent them: a patch that tests the list must name each
//! byte of it, fields that this version does not know included.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::core::{ApiResource, Object};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A Node, as far as it matters here.
pub type Node = Object<Spec, Status>;

/// `v1/nodes`.
pub fn resource() -> ApiResource {
    ApiResource::erase::<k8s_openapi::api::core::v1::Node>(&())
}

/// `spec`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// The taints, unread; `None` where the object has no such field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taints: Option<Vec<Value>>,
}

/// `status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The conditions.
    #[serde(default)]
    pub conditions: Vec<Condition>,
}

/// One condition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Its type.
    pub r#type: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Why, in CamelCase.
    #[serde(default)]
    pub reason: String,
    /// Why, for people.
    #[serde(default)]
    pub message: String,
    /// When it was last said.
    #[serde(default)]
    pub last_heartbeat_time: Option<Time>,
    /// When the status last changed.
    #[serde(default)]
    pub last_transition_time: Option<Time>,
}
