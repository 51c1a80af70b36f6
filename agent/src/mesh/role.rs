//! What each container of a meshed pod is to its mesh, and where the pod stands. Pure.

use std::net::SocketAddr;

use super::{
    exempt::Problem,
    marker::matches,
    profile::{Containers, Profile},
};
use crate::pods::model::{Container, PodFacts, RestartPolicy, Role, State};

/// What a container is to the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MeshRole {
    /// The proxy, as an ordinary container or as a native sidecar.
    Proxy,
    /// The init container that sets up the redirection.
    MeshInit,
    /// The init container that checks the redirection.
    Validator,
    /// An init container of the application.
    Init,
    /// A native sidecar of the application.
    NativeSidecar,
    /// The application.
    App,
    /// Added for debugging; never the mesh's, whatever its name.
    Ephemeral,
}

impl MeshRole {
    /// For reports.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Proxy => "proxy",
            Self::MeshInit => "mesh_init",
            Self::Validator => "validator",
            Self::Init => "init",
            Self::NativeSidecar => "native_sidecar",
            Self::App => "app",
            Self::Ephemeral => "ephemeral",
        }
    }
}

/// Roles by container name, in the order of the pod's facts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Roles(Box<[(Box<str>, MeshRole)]>);

impl Roles {
    /// The role of the container of this name.
    #[must_use]
    pub fn of(&self, name: &str) -> Option<MeshRole> {
        self.iter().find_map(|(have, role)| (have == name).then_some(role))
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&str, MeshRole)> {
        self.0.iter().map(|(name, role)| (&**name, *role))
    }
}

/// Where a pod stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The mesh's init container has yet to end: nothing is redirected, and by design.
    BeforeRedirect,
    /// Init containers run, no other one does.
    Starting,
    /// Its ordinary containers run, or have run.
    Running,
    /// It is being deleted: what it does is still judged, but nothing is done about it.
    Draining,
    /// Nothing will run in it any more.
    Finished,
}

impl Phase {
    /// For reports.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BeforeRedirect => "before_redirect",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Draining => "draining",
            Self::Finished => "finished",
        }
    }
}

/// What `container` is to the mesh of `profile`.
///
/// The container runtime does not tell init containers from others; there a container without a name of the mesh is
/// taken for the application's.
#[must_use]
pub fn role(container: &Container, profile: &Profile) -> MeshRole {
    let Containers { proxy, init, validator } = &profile.containers;
    let is = |names: &[Box<str>]| names.iter().any(|name| matches(name, &container.name));
    match container.role {
        Role::Ephemeral => MeshRole::Ephemeral,
        _ if is(proxy) => MeshRole::Proxy,
        _ if is(init) => MeshRole::MeshInit,
        _ if is(validator) => MeshRole::Validator,
        Role::Init => MeshRole::Init,
        Role::NativeSidecar => MeshRole::NativeSidecar,
        Role::App | Role::Unknown => MeshRole::App,
    }
}

/// The roles of all containers of a pod.
#[must_use]
pub fn roles(pod: &PodFacts, profile: &Profile) -> Roles {
    let roles = pod.containers.iter().map(|container| (container.name.clone(), role(container, profile)));
    Roles(roles.collect())
}

/// Where a pod stands.
#[must_use]
pub fn phase(pod: &PodFacts, redirect_due: bool) -> Phase {
    let begun = |container: &Container| matches!(container.state, State::Running | State::Exited);
    let app = |container: &&Container| matches!(container.role, Role::App | Role::Unknown);
    if pod.is_finished() {
        Phase::Finished
    } else if pod.terminating {
        Phase::Draining
    } else if !redirect_due {
        Phase::BeforeRedirect
    } else if pod.containers.iter().filter(app).any(begun) {
        Phase::Running
    } else {
        Phase::Starting
    }
}

/// Whether a pod is meant to end by itself. `None` while only the container runtime has told of it.
#[must_use]
pub fn runs_to_completion(pod: &PodFacts) -> Option<bool> {
    let policy = pod.restart_policy?;
    let job = pod.controller.as_ref().is_some_and(|owner| &*owner.kind == "Job");
    Some(job || policy != RestartPolicy::Always)
}

/// Where the validator of a pod connects to: what an argument of it says, else the profile's addresses.
pub(super) fn validator_addresses(
    pod: &PodFacts,
    profile: &Profile,
    problems: &mut Vec<Problem>,
) -> Vec<SocketAddr> {
    let validator = &profile.validator;
    let mine = pod.containers.iter().filter(|container| role(container, profile) == MeshRole::Validator);
    let said = validator
        .address_argument
        .as_deref()
        .and_then(|name| mine.map(|c| argument(&c.args, name)).next()?);
    match said {
        None => validator.addresses.clone(),
        Some(text) => match text.parse() {
            Ok(address) => vec![address],
            Err(_) => {
                problems.push(Problem::new(validator.address_argument.as_deref().unwrap_or_default(), text));
                validator.addresses.clone()
            }
        },
    }
}

/// The value of `--name value` or `--name=value`; the last one counts.
fn argument<'a>(args: &'a [Box<str>], name: &str) -> Option<&'a str> {
    let joined = args.iter().filter_map(|arg| arg.strip_prefix(name)?.strip_prefix('='));
    let split = args.windows(2).filter_map(|pair| match pair {
        [key, value] if **key == *name => Some(&**value),
        _ => None,
    });
    split.chain(joined).next_back()
}
