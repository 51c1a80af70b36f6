//! Whether a pod is meshed, and what follows from that. Pure.

use super::{
    exempt::{Exemptions, Problem, exemptions, identity},
    profile::{Families, Mark, Marker, Mode, Profile, matches},
};
use crate::pods::model::{Container, ContainerId, PodFacts, Sandbox, State};

/// Runtimes whose pods have a network stack of their own that no program of this kernel sees, by a part of their
/// handler's or runtime's name.
const FOREIGN_RUNTIMES: [(&str, Unsupported); 7] = [
    ("runsc", Unsupported::UserspaceKernel),
    ("gvisor", Unsupported::UserspaceKernel),
    ("quark", Unsupported::UserspaceKernel),
    ("kata", Unsupported::VirtualMachine),
    ("firecracker", Unsupported::VirtualMachine),
    ("urunc", Unsupported::VirtualMachine),
    ("runhcs", Unsupported::VirtualMachine),
];

/// What a pod is to the meshes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Membership {
    /// No mesh wants it redirected.
    NotMeshed {
        /// Why.
        reason: NotMeshed,
    },
    /// It must be redirected.
    Meshed(Box<Meshed>),
    /// It belongs to a mesh, or looks so, and is not judged.
    Exempt {
        /// Why.
        reason: Exempt,
    },
    /// It must be redirected, and nothing here can tell whether it is.
    Unsupported {
        /// The profile that claims it.
        profile: Box<str>,
        /// Why.
        reason: Unsupported,
    },
}

/// Why a pod is not meshed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotMeshed {
    /// No profile finds its marks on it.
    NoProfile,
    /// It carries the marks, but the proxy is not among its containers: injection went wrong.
    ProxyMissing {
        /// The profile whose marks it carries.
        profile: Box<str>,
    },
}

/// Why a pod is not judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exempt {
    /// It uses the node's network, where no mesh redirects.
    HostNetwork,
    /// It is part of the mesh itself.
    ControlPlane {
        /// The mesh.
        profile: Box<str>,
    },
}

/// Why a meshed pod cannot be judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unsupported {
    /// gVisor and its like: a network stack in user space.
    UserspaceKernel,
    /// Kata and its like: a kernel of its own.
    VirtualMachine,
}

/// All that the kernel half and the reports need to know of a meshed pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meshed {
    /// The profile's name.
    pub profile: Box<str>,
    /// The proxy's container: the running one, else the newest. `None` until it exists.
    pub proxy_container: Option<ContainerId>,
    /// The UID whose connections the mesh lets out as its proxy's.
    pub proxy_uid: Option<u32>,
    /// The GID likewise.
    pub proxy_gid: Option<u32>,
    /// Socket marks likewise.
    pub proxy_marks: Vec<Mark>,
    /// The port that outgoing connections are redirected to.
    pub outbound_port: u16,
    /// The port that incoming connections are redirected to.
    pub inbound_port: u16,
    /// Who sets up the redirection.
    pub mode: Mode,
    /// No container has shown the mode yet; it is the profile's assumption.
    pub mode_assumed: bool,
    /// From now on an un-redirected connection is a bypass. With an init container: once it has succeeded.
    pub redirect_due: bool,
    /// The IP families that the mesh redirects.
    pub families: Families,
    /// What the mesh lets pass.
    pub exemptions: Exemptions,
    /// Annotations that could not be taken as they are.
    pub problems: Vec<Problem>,
}

impl NotMeshed {
    /// For metrics and reports.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::NoProfile => "no_profile",
            Self::ProxyMissing { .. } => "proxy_missing",
        }
    }
}

impl Exempt {
    /// For metrics and reports.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::HostNetwork => "host_network",
            Self::ControlPlane { .. } => "control_plane",
        }
    }
}

impl Unsupported {
    /// For metrics and reports.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::UserspaceKernel => "userspace_kernel",
            Self::VirtualMachine => "virtual_machine",
        }
    }
}

/// Decides what `pod` is. The first of `profiles` that claims it counts.
///
/// Facts may arrive piece by piece, so the answer may change until the proxy's container exists; labels and
/// annotations alone are enough to call a pod meshed.
#[must_use]
pub fn recognise(pod: &PodFacts, profiles: &[Profile]) -> Membership {
    if pod.host_network() == Some(true) {
        return Membership::Exempt { reason: Exempt::HostNetwork };
    }
    let mut missing = None;
    for profile in profiles {
        let on_pod = |markers: &[_]| markers.iter().any(|marker| is_on(marker, pod));
        let rules = &profile.recognise;
        if on_pod(&rules.control_plane) {
            return Membership::Exempt { reason: Exempt::ControlPlane { profile: profile.name.clone() } };
        }
        let proxy = proxy(pod, profile);
        let claimed = (proxy.is_some() || on_pod(&rules.any))
            && rules.all.iter().all(|marker| is_on(marker, pod))
            && !on_pod(&rules.not);
        if !claimed {
            continue;
        }
        if proxy.is_none() && pod.containers_complete && !profile.containers.proxy.is_empty() {
            missing = missing.or_else(|| Some(profile.name.clone()));
            continue;
        }
        if let Some(reason) = pod.sandbox.as_ref().and_then(foreign_runtime) {
            return Membership::Unsupported { profile: profile.name.clone(), reason };
        }
        return Membership::Meshed(Box::new(meshed(pod, profile, proxy)));
    }
    let reason = match missing {
        Some(profile) => NotMeshed::ProxyMissing { profile },
        None => NotMeshed::NoProfile,
    };
    Membership::NotMeshed { reason }
}

fn is_on(marker: &Marker, pod: &PodFacts) -> bool {
    marker.is_on(&pod.labels, &pod.annotations)
}

/// Containers of `pod` with one of these names; the one in the best state first, the newest of those.
fn best<'a>(pod: &'a PodFacts, names: &[Box<str>]) -> Option<&'a Container> {
    pod.containers
        .iter()
        .filter(|container| names.iter().any(|name| matches(name, &container.name)))
        .max_by_key(|container| (container.state, container.created_at))
}

fn proxy<'a>(pod: &'a PodFacts, profile: &Profile) -> Option<&'a Container> {
    best(pod, &profile.containers.proxy)
}

fn foreign_runtime(sandbox: &Sandbox) -> Option<Unsupported> {
    let names = [&*sandbox.runtime_handler, sandbox.runtime_type.as_deref().unwrap_or_default()];
    let names = names.map(str::to_ascii_lowercase);
    let is_named = |part: &str| names.iter().any(|name| name.contains(part));
    FOREIGN_RUNTIMES.iter().find_map(|(part, reason)| is_named(part).then_some(*reason))
}

fn meshed(pod: &PodFacts, profile: &Profile, proxy: Option<&Container>) -> Meshed {
    let init = best(pod, &profile.containers.init);
    let validator = best(pod, &profile.containers.validator);
    // Init containers run in order, and the mesh's come before the proxy: a proxy without them means a CNI plugin.
    let (mode, mode_assumed) = if init.is_some() {
        (Mode::Init, false)
    } else if validator.is_some() || proxy.is_some() || pod.containers_complete {
        (Mode::Cni, false)
    } else {
        (profile.assume_mode, true)
    };
    let redirect_due = match mode {
        Mode::Cni => true,
        Mode::Init => init.is_some_and(|init| has_succeeded(init, proxy.is_some())),
    };
    let mut problems = Vec::new();
    let user = proxy.and_then(|proxy| proxy.user);
    let id =
        |sources: &[_], pick, problems: &mut _| identity(sources, &pod.annotations, user, pick, problems);
    Meshed {
        profile: profile.name.clone(),
        proxy_container: proxy.and_then(|proxy| proxy.id),
        proxy_uid: id(&profile.proxy.uid, |user| user.uid, &mut problems),
        proxy_gid: id(&profile.proxy.gid, |user| user.gid, &mut problems),
        proxy_marks: profile.proxy.marks.clone(),
        outbound_port: profile.ports.outbound,
        inbound_port: profile.ports.inbound,
        mode,
        mode_assumed,
        redirect_due,
        families: profile.families,
        exemptions: exemptions(&profile.exempt, &pod.annotations, mode, &mut problems),
        problems,
    }
}

/// Whether an init container is done. While its exit code is unknown, a later container proves it.
fn has_succeeded(init: &Container, later_exists: bool) -> bool {
    init.state == State::Exited && init.exit_code.map_or(later_exists, |code| code == 0)
}

#[cfg(test)]
mod tests;
