//! One sandbox as the runtime knows it at this moment.

use k8s_cri::v1::PodSandboxState;

use super::client::Runtime;
use super::{CriError, info};
use crate::pods::ContainerId;
use crate::pods::model::Keys;

/// What is needed to act on a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Live {
    /// A process in it, in the runtime's PID namespace.
    pub(crate) pid: Option<u32>,
    /// Path of its network namespace, in the runtime's mount namespace; `None` for the node's own.
    pub(crate) netns: Option<String>,
}

/// Asks for a sandbox; `None` when it is not ready (any more).
pub(crate) async fn live(runtime: &Runtime, id: ContainerId) -> Result<Option<Live>, CriError> {
    let answer = match runtime.sandbox(id).await {
        Err(CriError::Call { not_found: true, .. }) => return Ok(None),
        other => other?,
    };
    let ready = answer.status.is_some_and(|status| status.state() == PodSandboxState::SandboxReady);
    let info = info::parse(&answer.info, &Keys::default()).unwrap_or_default();
    Ok(ready.then(|| Live { pid: info.pid, netns: info.netns.map(Into::into) }))
}
