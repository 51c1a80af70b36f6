//! From an object of the API to facts. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::object::{self, ContainerStatus, Map, Meta, SecurityContext, Spec, Status};
use crate::pods::model::{
    Container, Controller, KeyValues, Keys, KnownBy, MAX_ARGS, Phase, PodFacts, RestartPolicy, Role, State,
    Wanted,
};
use crate::pods::{ContainerId, PodUid};

/// On the mirror of a static pod, which only a kubelet makes: the UID that the pod has on the node. A pod without it
/// runs under its own UID, whatever `kubernetes.io/config.hash` claims.
const MIRROR: &str = "kubernetes.io/config.mirror";
/// Likewise; what the kubelet itself calls the UID.
const HASH: &str = "kubernetes.io/config.hash";

/// Why an object gives no facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Useless {
    /// It is on another node, or on none.
    Elsewhere,
    /// No cgroup can carry its UID.
    Uid,
}

/// The facts of a pod on `node`.
pub(super) fn facts(pod: object::Pod, node: &str, wanted: &Wanted) -> Result<PodFacts, Useless> {
    let object::Pod { metadata, spec, status } = pod;
    let Meta {
        name,
        namespace,
        uid,
        resource_version: _,
        labels,
        annotations,
        creation_timestamp,
        deletion_timestamp,
        owner_references,
    } = metadata;
    let Spec {
        node_name,
        host_network,
        runtime_class_name,
        restart_policy,
        security_context,
        init_containers,
        containers,
        ephemeral_containers,
    } = spec.unwrap_or_default();
    if node_name.as_deref() != Some(node) {
        return Err(Useless::Elsewhere);
    }
    let uid = uid.as_deref().and_then(PodUid::parse).ok_or(Useless::Uid)?;
    let Status {
        phase,
        pod_ips,
        start_time,
        conditions,
        init_container_statuses,
        container_statuses,
        ephemeral_container_statuses,
    } = status.unwrap_or_default();

    let security = security_context.unwrap_or_default();
    let of = |specs: Option<Vec<object::Container>>, statuses: Option<Vec<ContainerStatus>>, kind: Role| {
        let statuses = statuses.unwrap_or_default();
        specs.unwrap_or_default().into_iter().map(move |spec| {
            let status = statuses.iter().find(|status| status.name == spec.name);
            container(spec, status, kind, security, wanted)
        })
    };
    let containers = of(init_containers, init_container_statuses, Role::Init)
        .chain(of(containers, container_statuses, Role::App))
        .chain(of(ephemeral_containers, ephemeral_container_statuses, Role::Ephemeral))
        .collect();

    let annotation = |key: &str| annotations.as_ref().and_then(|all| all.get(key));
    let hash = annotation(MIRROR).and_then(|mirror| {
        PodUid::parse(mirror).or_else(|| annotation(HASH).and_then(|hash| PodUid::parse(hash)))
    });
    let ready = conditions.unwrap_or_default();
    let ready = ready.iter().find(|condition| &*condition.r#type == "PodReadyToStartContainers");
    let owner = owner_references.unwrap_or_default();
    let owner = owner.into_iter().find(|owner| owner.controller == Some(true));
    Ok(PodFacts {
        static_pod_hash: hash,
        labels: kept(labels.as_ref(), &wanted.keys),
        annotations: kept(annotations.as_ref(), &wanted.keys),
        containers,
        containers_complete: true,
        spec_host_network: Some(host_network.unwrap_or(false)),
        runtime_class_name: runtime_class_name.filter(|name| !name.is_empty()),
        restart_policy: restart_policy.as_deref().and_then(policy),
        controller: owner.map(|owner| Controller { kind: owner.kind, name: owner.name, uid: owner.uid }),
        phase: phase.as_deref().map_or(Phase::Unknown, self::phase),
        terminating: deletion_timestamp.is_some(),
        pod_ips: pod_ips.unwrap_or_default().iter().filter_map(|each| each.ip.parse().ok()).collect(),
        created_at: creation_timestamp.as_ref().map(nanoseconds),
        start_time: start_time.as_ref().map(nanoseconds),
        ready_to_start: ready.and_then(|condition| match &*condition.status {
            "True" => Some(true),
            "False" => Some(false),
            _ => None,
        }),
        known_by: KnownBy { runtime: false, api: true },
        ..PodFacts::new(uid, &namespace.unwrap_or_default(), &name.unwrap_or_default())
    })
}

/// Those of a map's pairs that are wanted.
pub(super) fn kept(map: Option<&Map>, keys: &Keys) -> KeyValues {
    let pairs = map.into_iter().flatten().map(|(key, value)| (&**key, &**value));
    KeyValues::filtered(pairs, keys)
}

fn container(
    spec: object::Container,
    status: Option<&ContainerStatus>,
    kind: Role,
    pod: SecurityContext,
    wanted: &Wanted,
) -> Container {
    let object::Container { name, args, env, restart_policy, security_context } = spec;
    let role = match (kind, restart_policy.as_deref()) {
        (Role::Init, Some("Always")) => Role::NativeSidecar,
        (kind, _) => kind,
    };
    let own = security_context.unwrap_or_default();
    let matters = wanted.containers.keeps(&name);
    let args = args.filter(|_| matters).unwrap_or_default().into_iter().take(MAX_ARGS).collect();
    let env = env.filter(|_| matters).unwrap_or_default();
    let env = env.iter().filter_map(|variable| Some((&*variable.name, variable.value.as_deref()?)));
    let mut container = Container {
        role,
        run_as_user: id(own.run_as_user.or(pod.run_as_user)),
        run_as_group: id(own.run_as_group.or(pod.run_as_group)),
        args,
        env: KeyValues::filtered(env, &wanted.env),
        ..Container::new(&name)
    };
    if let Some(status) = status {
        add_status(&mut container, status);
    }
    container
}

fn add_status(container: &mut Container, status: &ContainerStatus) {
    let ContainerStatus { name: _, container_id, restart_count, state, last_state } = status;
    let code = |code: i64| i32::try_from(code).ok();
    container.restart_count = u32::try_from(*restart_count).unwrap_or(0);
    container.last_exit_code =
        last_state.as_ref().and_then(|last| last.terminated.as_ref()).and_then(|last| code(last.exit_code));
    let (state, started) = match state {
        Some(object::ContainerState { running: Some(running), .. }) => (State::Running, &running.started_at),
        Some(object::ContainerState { terminated: Some(terminated), .. }) => {
            container.exit_code = code(terminated.exit_code);
            (State::Exited, &terminated.started_at)
        }
        // What it says of the id is about the run before: the next one has none yet.
        _ => return,
    };
    container.state = state;
    // `containerd://<id>`
    container.id = container_id.as_deref().and_then(|id| ContainerId::parse(id.rsplit('/').next()?));
    container.created_at = started.as_ref().map_or(0, nanoseconds);
}

fn id(id: Option<i64>) -> Option<u32> {
    id.and_then(|id| u32::try_from(id).ok())
}

fn policy(name: &str) -> Option<RestartPolicy> {
    match name {
        "Always" => Some(RestartPolicy::Always),
        "OnFailure" => Some(RestartPolicy::OnFailure),
        "Never" => Some(RestartPolicy::Never),
        _ => None,
    }
}

fn phase(name: &str) -> Phase {
    match name {
        "Pending" => Phase::Pending,
        "Running" => Phase::Running,
        "Succeeded" => Phase::Succeeded,
        "Failed" => Phase::Failed,
        _ => Phase::Unknown,
    }
}

fn nanoseconds(time: &Time) -> i64 {
    i64::try_from(time.0.as_nanosecond()).unwrap_or(0)
}

#[cfg(test)]
mod tests;
