//! From the runtime's lists to facts about pods. Pure.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use k8s_cri::v1::{
    Container as CriContainer, ContainerState, ContainerStatus, NamespaceMode, PodSandbox, PodSandboxState,
    PodSandboxStatus,
};

use super::info::Info;
use crate::pods::{
    ContainerId, PodUid,
    model::{Container, KeyValues, Keys, KnownBy, PodFacts, Sandbox, State},
};

/// What the source knows, by the pod's UID.
pub(super) type Known = HashMap<PodUid, Arc<PodFacts>>;

/// What the lists say.
#[derive(Debug, Default)]
pub(super) struct Assembled {
    pub(super) pods: HashMap<PodUid, PodFacts>,
    /// Containers whose sandbox is not in the list: it was made between the two calls.
    pub(super) orphans: Vec<ContainerId>,
    /// Sandboxes and containers with ids that no cgroup can carry.
    pub(super) skipped: usize,
}

/// A question about one pod that the lists leave open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Detail {
    /// Everything about the sandbox.
    Sandbox(ContainerId),
    /// User and cgroup of a container that matters.
    Container(ContainerId),
    /// Only how a container ended.
    Exit(ContainerId),
}

impl Detail {
    pub(super) fn id(self) -> ContainerId {
        match self {
            Self::Sandbox(id) | Self::Container(id) | Self::Exit(id) => id,
        }
    }
}

/// Joins sandboxes and containers. Details that are known already are taken over.
pub(super) fn assemble(
    sandboxes: &[PodSandbox],
    containers: &[CriContainer],
    known: &Known,
    keys: &Keys,
) -> Assembled {
    let mut all = Assembled::default();
    let mut listed = HashSet::new();
    let mut newest: HashMap<PodUid, (&PodSandbox, ContainerId)> = HashMap::new();
    for sandbox in sandboxes {
        let uid = sandbox.metadata.as_ref().and_then(|metadata| PodUid::parse(&metadata.uid));
        let (Some(uid), Some(id)) = (uid, ContainerId::parse(&sandbox.id)) else {
            all.skipped += 1;
            continue;
        };
        listed.insert(id);
        // A pod's sandbox may have been made anew: the newest ready one is the pod's.
        let rank = |(sandbox, id): (&PodSandbox, ContainerId)| (is_ready(sandbox), sandbox.created_at, id);
        let best = newest.entry(uid).or_insert((sandbox, id));
        if rank((sandbox, id)) > rank(*best) {
            *best = (sandbox, id);
        }
    }

    let mut by_sandbox: HashMap<ContainerId, Vec<(&CriContainer, ContainerId)>> = HashMap::new();
    for container in containers {
        let ids = (ContainerId::parse(&container.id), ContainerId::parse(&container.pod_sandbox_id));
        match ids {
            (Some(id), Some(sandbox)) if listed.contains(&sandbox) => {
                by_sandbox.entry(sandbox).or_default().push((container, id));
            }
            (Some(id), Some(_)) => all.orphans.push(id),
            _ => all.skipped += 1,
        }
    }

    for (uid, (sandbox, id)) in newest {
        let before = known.get(&uid).map(Arc::as_ref);
        let containers = by_sandbox.remove(&id).unwrap_or_default();
        all.pods.insert(uid, facts(uid, (sandbox, id), &containers, before, keys));
    }
    all
}

fn is_ready(sandbox: &PodSandbox) -> bool {
    sandbox.state == PodSandboxState::SandboxReady as i32
}

fn facts(
    uid: PodUid,
    (listed, id): (&PodSandbox, ContainerId),
    containers: &[(&CriContainer, ContainerId)],
    before: Option<&PodFacts>,
    keys: &Keys,
) -> PodFacts {
    let (namespace, name) =
        listed.metadata.as_ref().map(|m| (m.namespace.as_str(), m.name.as_str())).unwrap_or_default();
    let pairs = |map: &HashMap<String, String>| {
        KeyValues::filtered(map.iter().map(|(key, value)| (key.as_str(), value.as_str())), keys)
    };
    let mut sandbox = Sandbox {
        id,
        ready: is_ready(listed),
        pid: None,
        netns: None,
        runtime_handler: listed.runtime_handler.as_str().into(),
        runtime_type: None,
        created_at: listed.created_at,
        host_network: None,
        cgroup_parent: None,
    };
    // Details of a sandbox that was not ready may have been incomplete.
    let known = before.and_then(|before| before.sandbox.as_ref());
    if let Some(known) = known.filter(|known| known.id == id && (known.ready || !sandbox.ready)) {
        let Sandbox { pid, netns, runtime_type, host_network, cgroup_parent, .. } = known.clone();
        // The number of a process that has ended may be another's by now.
        let pid = pid.filter(|_| sandbox.ready);
        sandbox = Sandbox { pid, netns, runtime_type, host_network, cgroup_parent, ..sandbox };
    }
    let mut containers: Vec<_> =
        containers.iter().map(|(listed, id)| container(listed, *id, before)).collect();
    containers.sort_by_key(|container| (container.created_at, container.id));
    PodFacts {
        // The runtime knows a static pod by the same UID as its cgroup.
        static_pod_hash: uid.is_static().then_some(uid),
        labels: pairs(&listed.labels),
        annotations: pairs(&listed.annotations),
        sandbox: Some(sandbox),
        containers,
        known_by: KnownBy { runtime: true, api: false },
        ..PodFacts::new(uid, namespace, name)
    }
}

fn container(listed: &CriContainer, id: ContainerId, before: Option<&PodFacts>) -> Container {
    let known = before.and_then(|before| before.containers.iter().find(|known| known.id == Some(id)));
    let state = state(listed.state);
    let name = listed.metadata.as_ref().map(|metadata| metadata.name.as_str()).unwrap_or_default();
    Container {
        id: Some(id),
        state,
        exit_code: known.and_then(|known| known.exit_code),
        restart_count: listed.metadata.as_ref().map_or(0, |metadata| metadata.attempt),
        // A process that has ended is nobody's.
        pid: known.and_then(|known| known.pid).filter(|_| state == State::Running),
        user: known.and_then(|known| known.user),
        cgroup: known.and_then(|known| known.cgroup.clone()),
        args: known.map(|known| known.args.clone()).unwrap_or_default(),
        env: known.map(|known| known.env.clone()).unwrap_or_default(),
        created_at: listed.created_at,
        ..Container::new(name)
    }
}

fn state(state: i32) -> State {
    match ContainerState::try_from(state) {
        Ok(ContainerState::ContainerCreated) => State::Created,
        Ok(ContainerState::ContainerRunning) => State::Running,
        Ok(ContainerState::ContainerExited) => State::Exited,
        Ok(ContainerState::ContainerUnknown) | Err(_) => State::Unknown,
    }
}

/// What is still to be asked about `pod`: its sandbox, and those containers whose names are among `names`; of those in
/// `stale` everything anew.
pub(super) fn open_details(pod: &PodFacts, names: &Keys, stale: &HashSet<ContainerId>) -> Vec<Detail> {
    let sandbox = pod.sandbox.as_ref().filter(|sandbox| sandbox.host_network.is_none());
    let sandbox = sandbox.map(|sandbox| Detail::Sandbox(sandbox.id));
    let containers = pod.containers.iter().filter_map(|container| {
        let id = container.id?;
        names.keeps(&container.name).then_some(())?;
        let exited = container.state == State::Exited && container.exit_code.is_none();
        match (container.user.filter(|_| !stale.contains(&id)), exited) {
            (None, _) => Some(Detail::Container(id)),
            (Some(_), true) => Some(Detail::Exit(id)),
            (Some(_), false) => None,
        }
    });
    sandbox.into_iter().chain(containers).collect()
}

/// Adds a sandbox's details to its pod.
pub(super) fn add_sandbox(pod: &mut PodFacts, status: Option<&PodSandboxStatus>, info: Info) {
    let Some(sandbox) = &mut pod.sandbox else { return };
    let Info { pid, netns, cgroup_parent, runtime_type, user: _, cgroup: _, args: _, env: _ } = info;
    let network = status
        .and_then(|status| status.linux.as_ref()?.namespaces.as_ref()?.options.as_ref())
        .map(|options| options.network == NamespaceMode::Node as i32);
    // An answer without the options still says something by having a namespace of its own.
    sandbox.host_network = network.or_else(|| netns.is_some().then_some(false));
    sandbox.pid = pid.filter(|_| sandbox.ready);
    sandbox.netns = netns;
    sandbox.runtime_type = runtime_type;
    sandbox.cgroup_parent = cgroup_parent;
    if let Some(status) = status.filter(|status| !status.runtime_handler.is_empty()) {
        sandbox.runtime_handler = status.runtime_handler.as_str().into();
    }
}

/// Adds a container's details to its pod.
pub(super) fn add_container(
    pod: &mut PodFacts,
    id: ContainerId,
    status: Option<&ContainerStatus>,
    info: Option<Info>,
) {
    let Some(container) = pod.containers.iter_mut().find(|container| container.id == Some(id)) else {
        return;
    };
    if let Some(status) = status {
        // The status is newer than the list.
        container.state = state(status.state);
        container.exit_code = (container.state == State::Exited).then_some(status.exit_code);
    }
    if let Some(Info { pid, user, cgroup, args, env, netns: _, cgroup_parent: _, runtime_type: _ }) = info {
        container.args = args;
        container.env = env;
        container.pid = pid.filter(|_| container.state == State::Running);
        container.user = user;
        container.cgroup = cgroup;
    }
}

/// The pods of `known` that are not in `now`.
pub(super) fn gone(known: &Known, now: &HashMap<PodUid, PodFacts>) -> Vec<PodUid> {
    known.keys().filter(|uid| !now.contains_key(uid)).copied().collect()
}
