//! Takes back what the gate said of a node, once there is no agent that would say it again.

use std::time::Duration;

use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use tokio::time::timeout;

use super::desired::{Change, withdrawal};
use super::object::{Node, resource};

/// How long one request may take.
const REQUEST: Duration = Duration::from_secs(10);

/// Why it was not, or not all of it.
#[derive(Debug, thiserror::Error)]
pub enum WithdrawError {
    /// There is no such node.
    #[error("there is no node {0} in this cluster: see `kubectl get nodes`")]
    NoNode(String),
    /// RBAC.
    #[error(
        "not allowed to {what} of node {node} ({message}): use a kubeconfig of one who may get nodes and patch nodes and nodes/status"
    )]
    Forbidden { what: &'static str, node: String, message: String },
    /// Anything else.
    #[error("cannot {what} of node {node}: {source}; what is left can be taken back by the same command")]
    Failed { what: &'static str, node: String, source: Box<kube::Error> },
    /// It says nothing.
    #[error(
        "cannot {what} of node {node}: the API server did not answer within {REQUEST:?}; try the same command again"
    )]
    Silent { what: &'static str, node: String },
}

/// What was found and done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Withdrawn {
    /// The label is gone.
    pub label: bool,
    /// The condition is gone.
    pub condition: bool,
    /// Keys of all taints that the node still has.
    pub taints: Vec<String>,
}

/// Removes condition and label of the node `name`, and nothing else.
///
/// # Errors
/// [`WithdrawError`]; what was done until then stays done.
pub async fn withdraw(client: &Client, name: &str) -> Result<Withdrawn, WithdrawError> {
    let api: Api<Node> = Api::all_with(client.clone(), &resource());
    let node = answer("look at the object", name, api.get(name)).await?;
    let taints = node.spec.taints.iter().flatten().filter_map(|taint| taint.get("key")?.as_str());
    let mut done = Withdrawn { taints: taints.map(str::to_owned).collect(), ..Withdrawn::default() };
    let params = PatchParams::default();
    for change in withdrawal(&node) {
        match change {
            Change::Label(patch) => {
                answer("remove the label", name, api.patch(name, &params, &Patch::Merge(patch))).await?;
                done.label = true;
            }
            Change::Condition(patch) => {
                let patch = Patch::Strategic(patch);
                answer("remove the condition", name, api.patch_status(name, &params, &patch)).await?;
                done.condition = true;
            }
            Change::Taint(_) => {}
        }
    }
    Ok(done)
}

async fn answer<T>(
    what: &'static str,
    name: &str,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, WithdrawError> {
    let node = name.to_owned();
    match timeout(REQUEST, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => Err(WithdrawError::NoNode(node)),
        Ok(Err(kube::Error::Api(status))) if status.code == 403 => {
            Err(WithdrawError::Forbidden { what, node, message: status.message.clone() })
        }
        Ok(Err(source)) => Err(WithdrawError::Failed { what, node, source: Box::new(source) }),
        Err(_) => Err(WithdrawError::Silent { what, node }),
    }
}
