//! Plain facts about pods, from whatever source.
//!
//! Sizes matter: a node has hundreds of pods and thousands of containers. Strings are boxed, ids are fixed-size, and
//! of the labels and annotations only those that someone asks for are kept.

use std::{collections::BTreeSet, fmt, net::IpAddr};

pub use super::{ContainerId, PodUid};

/// What is known of one pod.
///
/// A fact that its source cannot know is `None` or empty; so is one that nobody has told yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodFacts {
    /// The UID as the source gives it. With the API: `metadata.uid`.
    pub uid: PodUid,
    /// For a static pod, the hash of its manifest, which its cgroup carries instead of the UID that its mirror has
    /// in the API (annotation `kubernetes.io/config.hash`).
    pub static_pod_hash: Option<PodUid>,
    /// Namespace.
    pub namespace: Box<str>,
    /// Name.
    pub name: Box<str>,
    /// The labels that the source was asked to keep, as they are now.
    pub labels: KeyValues,
    /// The annotations that the source was asked to keep, as they were when the sandbox was made: what a CNI plugin
    /// read. A later edit changes no rule in the kernel, and must not exempt anybody.
    pub annotations: KeyValues,
    /// The annotations as they are now, where they differ from `annotations`. See [`Self::current_annotations`].
    pub edited_annotations: Option<KeyValues>,
    /// The namespace's labels, of the same keys. `None` while nobody has told (the container runtime knows none).
    pub namespace_labels: Option<KeyValues>,
    /// The namespace's annotations, likewise.
    pub namespace_annotations: Option<KeyValues>,
    /// The pod's sandbox; `None` when the source knows none yet.
    pub sandbox: Option<Sandbox>,
    /// Grows when the pod gets another sandbox: what was seen of its connections before says nothing any more.
    /// Counted by the agent, so it begins again with it.
    pub generation: u32,
    /// Its containers. From the runtime: those that exist by now. From the API: those of the specification.
    pub containers: Vec<Container>,
    /// No further container will appear, but ephemeral ones (the source knows the specification).
    pub containers_complete: bool,
    /// `spec.hostNetwork`, as the API has it. See [`Self::host_network`].
    pub spec_host_network: Option<bool>,
    /// `spec.runtimeClassName`.
    pub runtime_class_name: Option<Box<str>>,
    /// `spec.restartPolicy`.
    pub restart_policy: Option<RestartPolicy>,
    /// The owner that controls it.
    pub controller: Option<Controller>,
    /// `status.phase`.
    pub phase: Phase,
    /// It is being deleted (`metadata.deletionTimestamp`), or its object is gone while its sandbox still exists.
    pub terminating: bool,
    /// `status.podIPs`.
    pub pod_ips: Box<[IpAddr]>,
    /// `metadata.creationTimestamp`, in nanoseconds since 1970.
    pub created_at: Option<i64>,
    /// `status.startTime`, in nanoseconds since 1970: the kubelet saw it, no image was pulled yet.
    pub start_time: Option<i64>,
    /// The condition `PodReadyToStartContainers`: it has a sandbox with a network.
    pub ready_to_start: Option<bool>,
    /// The sources that know it.
    pub known_by: KnownBy,
}

impl PodFacts {
    /// A pod of which nothing else is known.
    #[must_use]
    pub fn new(uid: PodUid, namespace: &str, name: &str) -> Self {
        Self {
            uid,
            static_pod_hash: None,
            namespace: namespace.into(),
            name: name.into(),
            labels: KeyValues::default(),
            annotations: KeyValues::default(),
            edited_annotations: None,
            namespace_labels: None,
            namespace_annotations: None,
            sandbox: None,
            generation: 0,
            containers: Vec::new(),
            containers_complete: false,
            spec_host_network: None,
            runtime_class_name: None,
            restart_policy: None,
            controller: None,
            phase: Phase::Unknown,
            terminating: false,
            pod_ips: Box::default(),
            created_at: None,
            start_time: None,
            ready_to_start: None,
            known_by: KnownBy::default(),
        }
    }

    /// The UID that the pod's cgroup carries.
    #[must_use]
    pub fn cgroup_uid(&self) -> PodUid {
        self.static_pod_hash.unwrap_or(self.uid)
    }

    /// Whether the pod uses the node's network. `None` while that is not known.
    #[must_use]
    pub fn host_network(&self) -> Option<bool> {
        self.sandbox.as_ref().and_then(|sandbox| sandbox.host_network).or(self.spec_host_network)
    }

    /// The annotations as they are now: for what may change while a pod runs, never for what a mesh exempts.
    #[must_use]
    pub fn current_annotations(&self) -> &KeyValues {
        self.edited_annotations.as_ref().unwrap_or(&self.annotations)
    }

    /// All its containers have ended for good.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        matches!(self.phase, Phase::Succeeded | Phase::Failed)
    }
}

/// Which sources know a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KnownBy {
    /// The container runtime.
    pub runtime: bool,
    /// The API server.
    pub api: bool,
}

/// The owner that controls a pod (`metadata.ownerReferences`, the one with `controller: true`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Controller {
    /// Its kind, such as `ReplicaSet`; `Node` for a static pod.
    pub kind: Box<str>,
    /// Its name.
    pub name: Box<str>,
    /// Its UID.
    pub uid: Box<str>,
}

/// `spec.restartPolicy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RestartPolicy {
    /// Containers are started again, however they end.
    Always,
    /// Containers are started again when they fail.
    OnFailure,
    /// Containers run once.
    Never,
}

/// `status.phase`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Phase {
    /// Nobody has told, or the node's kubelet was lost.
    #[default]
    Unknown,
    /// Not all containers have been started.
    Pending,
    /// It runs.
    Running,
    /// All containers have ended well and will not be started again.
    Succeeded,
    /// All containers have ended, at least one badly.
    Failed,
}

/// The sandbox ("pause" container and namespaces) in which a pod's containers run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    /// The runtime's id of it.
    pub id: ContainerId,
    /// The runtime says that it is ready; a sandbox that was stopped is not.
    pub ready: bool,
    /// A process in it, in the runtime's PID namespace. CRI-O often runs none.
    pub pid: Option<u32>,
    /// Path of its network namespace, in the runtime's mount namespace.
    pub netns: Option<Box<str>>,
    /// The runtime class handler; empty for the default one.
    pub runtime_handler: Box<str>,
    /// containerd's name of the runtime, such as `io.containerd.runc.v2`.
    pub runtime_type: Option<Box<str>>,
    /// When it was made, in nanoseconds since 1970.
    pub created_at: i64,
    /// It shares the node's network namespace. `None` until the runtime was asked for the details.
    pub host_network: Option<bool>,
    /// The cgroup that the kubelet gave it: a path (cgroupfs driver) or a slice's name (systemd driver).
    pub cgroup_parent: Option<Box<str>>,
}

/// One container of a pod, init containers included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// The runtime's id; `None` when it does not exist yet and only the specification names it.
    pub id: Option<ContainerId>,
    /// Its name in the pod's specification.
    pub name: Box<str>,
    /// Its role, if the source knows.
    pub role: Role,
    /// Its state.
    pub state: State,
    /// Exit code, once it has exited and the source was asked.
    pub exit_code: Option<i32>,
    /// Exit code of the run before this one (`lastState.terminated`): how a container that waits to be started again
    /// has ended.
    pub last_exit_code: Option<i32>,
    /// How often it was started again.
    pub restart_count: u32,
    /// Its first process, in the runtime's PID namespace.
    pub pid: Option<u32>,
    /// The user it runs as, inside the pod's user namespace.
    pub user: Option<User>,
    /// Where the runtime put its cgroup: a path, or `slice:prefix:id` with the systemd driver.
    pub cgroup: Option<Box<str>>,
    /// `securityContext.runAsUser`, the container's, else the pod's. See [`Self::uid`].
    pub run_as_user: Option<u32>,
    /// `securityContext.runAsGroup`, likewise.
    pub run_as_group: Option<u32>,
    /// The specification's `args`, of the containers that the source was asked about; at most [`MAX_ARGS`].
    pub args: Box<[Box<str>]>,
    /// The literal values of those environment variables that the source was asked for, likewise.
    pub env: KeyValues,
    /// When it was made (from the API alone: started), in nanoseconds since 1970; 0 if that is not known.
    pub created_at: i64,
}

/// Most arguments of a container that are kept.
pub const MAX_ARGS: usize = 32;

impl Container {
    /// A container of which nothing else is known.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            id: None,
            name: name.into(),
            role: Role::Unknown,
            state: State::Waiting,
            exit_code: None,
            last_exit_code: None,
            restart_count: 0,
            pid: None,
            user: None,
            cgroup: None,
            run_as_user: None,
            run_as_group: None,
            args: Box::default(),
            env: KeyValues::default(),
            created_at: 0,
        }
    }

    /// The user it runs as: what the runtime says, else what the specification asks for.
    #[must_use]
    pub fn uid(&self) -> Option<u32> {
        self.user.map(|user| user.uid).or(self.run_as_user)
    }

    /// The primary group it runs as, likewise.
    #[must_use]
    pub fn gid(&self) -> Option<u32> {
        self.user.map(|user| user.gid).or(self.run_as_group)
    }
}

/// What a container is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Role {
    /// The source cannot tell: the container runtime does not know.
    #[default]
    Unknown,
    /// An init container that ends before the next one starts.
    Init,
    /// An init container with restart policy `Always`.
    NativeSidecar,
    /// An ordinary container.
    App,
    /// Added to a running pod for debugging.
    Ephemeral,
}

/// A container's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// It does not exist yet.
    Waiting,
    /// The runtime cannot tell.
    Unknown,
    /// It has ended.
    Exited,
    /// It exists, nothing runs yet.
    Created,
    /// It runs.
    Running,
}

/// A numeric user and group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct User {
    /// UID.
    pub uid: u32,
    /// Primary GID.
    pub gid: u32,
}

/// Labels or annotations: sorted, exactly as long as needed.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct KeyValues(Box<[(Box<str>, Box<str>)]>);

impl KeyValues {
    /// Keeps those pairs whose key passes `filter`.
    pub fn filtered<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>, filter: &Keys) -> Self {
        pairs.into_iter().filter(|(key, _)| filter.keeps(key)).collect()
    }

    /// The value of `key`.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        let at = self.0.binary_search_by(|(have, _)| (**have).cmp(key)).ok()?;
        self.0.get(at).map(|(_, value)| &**value)
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All pairs, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (&**key, &**value))
    }
}

impl<'a> FromIterator<(&'a str, &'a str)> for KeyValues {
    fn from_iter<T: IntoIterator<Item = (&'a str, &'a str)>>(pairs: T) -> Self {
        let mut pairs: Vec<(Box<str>, Box<str>)> =
            pairs.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
        pairs.sort();
        pairs.dedup_by(|a, b| a.0 == b.0);
        Self(pairs.into())
    }
}

impl fmt::Debug for KeyValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

/// Which facts a source keeps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Labels and annotations, of pods and namespaces.
    pub keys: Keys,
    /// Containers whose user, exit code, arguments and environment matter.
    pub containers: Keys,
    /// Environment variables of those containers.
    pub env: Keys,
}

/// A set of names: which labels, annotations or containers are of interest. One that ends with `*` means all that start so.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keys {
    exact: BTreeSet<Box<str>>,
    prefixes: BTreeSet<Box<str>>,
}

impl Keys {
    /// Whether `key` is wanted.
    #[must_use]
    pub fn keeps(&self, key: &str) -> bool {
        self.exact.contains(key) || self.prefixes.iter().any(|prefix| key.starts_with(&**prefix))
    }
}

impl Keys {
    /// The names, and the beginnings of names.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.exact.iter().chain(&self.prefixes).map(|key| &**key)
    }
}

impl<'a> Extend<&'a str> for Keys {
    fn extend<T: IntoIterator<Item = &'a str>>(&mut self, keys: T) {
        for key in keys {
            match key.strip_suffix('*') {
                Some(prefix) => self.prefixes.insert(prefix.into()),
                None => self.exact.insert(key.into()),
            };
        }
    }
}

impl<'a> FromIterator<&'a str> for Keys {
    fn from_iter<T: IntoIterator<Item = &'a str>>(keys: T) -> Self {
        let mut all = Self::default();
        all.extend(keys);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_wanted_keys_are_kept() {
        let keys: Keys = ["a.io/x", "b.io/*"].into_iter().collect();
        let pairs = [("b.io/2", "two"), ("a.io/xy", "no"), ("a.io/x", "yes"), ("b.io/1", "one"), ("c", "no")];
        let kept = KeyValues::filtered(pairs, &keys);
        assert_eq!(
            kept.iter().collect::<Vec<_>>(),
            [("a.io/x", "yes"), ("b.io/1", "one"), ("b.io/2", "two")]
        );
        assert_eq!((kept.get("b.io/2"), kept.get("c"), kept.get("")), (Some("two"), None, None));
    }

    #[test]
    fn order_of_the_source_does_not_matter() {
        let a: KeyValues = [("x", "1"), ("y", "2")].into_iter().collect();
        let b: KeyValues = [("y", "2"), ("x", "1")].into_iter().collect();
        assert_eq!(a, b);
    }
}
