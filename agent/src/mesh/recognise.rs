//! Whether a pod is meshed, and what follows from that. Pure.

use std::net::SocketAddr;
use std::time::Duration;

use super::{
    exempt::{Exemptions, Problem, exemptions, identity},
    grammar::{PortRange, normalise},
    marker::{Marker, matches},
    materialised::{self, Dns, Written},
    profile::{FamilyRules, Mark, Mode, OwnAddress, Profile},
    role::{self, Phase, Roles},
};
use crate::pods::model::{Container, ContainerId, PodFacts, Role, State};

/// What our own pods carry: the chart's `app.kubernetes.io/name`.
const OWN: (&str, &str) = ("app.kubernetes.io/name", "nobypass");
/// The keys that are read of every pod, whatever the profiles say.
pub(super) const OWN_KEYS: [&str; 1] = [OWN.0];

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
    /// It is a proxy that redirects nothing.
    Gateway {
        /// The mesh.
        profile: Box<str>,
    },
    /// It is nobypass.
    Own,
}

/// Why a meshed pod cannot be judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unsupported {
    /// gVisor and its like: a network stack in user space.
    UserspaceKernel,
    /// Kata and its like: a kernel of its own.
    VirtualMachine,
    /// The group of a connection's owner decides whether it is redirected, and no packet tells the group.
    GroupRules,
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
    /// The proxy runs in a pod of its own: nothing of this pod is the proxy's.
    pub proxy_elsewhere: bool,
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
    /// How long the mesh is given if the pod ran before it became meshed; `None` if it needs no time or says that it is
    /// done.
    pub enrolment_grace: Option<Duration>,
    /// It is given that time now. For whoever remembers what the pod was before; here it is never set.
    pub is_enrolling: bool,
    /// What each container is to the mesh.
    pub roles: Roles,
    /// Where the pod stands.
    pub phase: Phase,
    /// The IP families that the mesh redirects.
    pub families: Families,
    /// A marked packet on lo with an unchanged destination proves redirection.
    pub outbound_tproxy: bool,
    /// UDP to port 53 is redirected to the proxy.
    pub dns_captured: bool,
    /// What happens to a connection to the pod's own address.
    pub own_address: OwnAddress,
    /// How the mesh's validator exits when the pod is not redirected.
    pub validator_exit_code: Option<i32>,
    /// Addresses that the mesh's validator connects to, see [`Meshed::is_canary`].
    pub validator_addresses: Vec<SocketAddr>,
    /// What the mesh lets pass.
    pub exemptions: Exemptions,
    /// Annotations that could not be taken as they are.
    pub problems: Vec<Problem>,
}

/// IP families.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Families {
    /// IPv4.
    pub ipv4: bool,
    /// IPv6.
    pub ipv6: bool,
}

impl Meshed {
    /// Whether a connection that left the pod, of the container of this name and to this address, is the mesh's own
    /// check: a definite sign that the pod is not redirected, and none of the application's doing. A validator that
    /// nobody has named yet is known by the address alone.
    #[must_use]
    pub fn is_canary(&self, container: Option<&str>, destination: SocketAddr) -> bool {
        let by_validator =
            container.is_none_or(|name| self.roles.of(name) == Some(role::MeshRole::Validator));
        by_validator && self.validator_addresses.contains(&destination)
    }

    /// How the mesh's validator exited, and when it was made, in nanoseconds since 1970. Only success and the code by which
    /// it refuses say anything of the redirection.
    #[must_use]
    pub fn validator_said(&self, pod: &PodFacts) -> Option<(i32, i64)> {
        let is_validator =
            |container: &&Container| self.roles.of(&container.name) == Some(role::MeshRole::Validator);
        let last = pod.containers.iter().filter(is_validator).max_by_key(|container| container.created_at)?;
        let code = last.exit_code.or(last.last_exit_code)?;
        (code == 0 || self.validator_exit_code == Some(code)).then_some((code, last.created_at))
    }
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
            Self::Gateway { .. } => "gateway",
            Self::Own => "own",
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
            Self::GroupRules => "group_rules",
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
    if pod.labels.get(OWN.0) == Some(OWN.1) {
        return Membership::Exempt { reason: Exempt::Own };
    }
    let mut missing = None;
    for profile in profiles {
        let on_pod = |markers: &[Marker]| markers.iter().any(|marker| marker.is_on(pod));
        let rules = &profile.recognise;
        if on_pod(&rules.control_plane) {
            return Membership::Exempt { reason: Exempt::ControlPlane { profile: profile.name.clone() } };
        }
        let proxy = proxy(pod, profile);
        let claimed = (proxy.is_some() || on_pod(&rules.any))
            && rules.all.iter().all(|marker| marker.is_on(pod))
            && !on_pod(&rules.not);
        if !claimed {
            continue;
        }
        if on_pod(&rules.gateway) {
            return Membership::Exempt { reason: Exempt::Gateway { profile: profile.name.clone() } };
        }
        if proxy.is_none() && pod.containers_complete && !profile.containers.proxy.is_empty() {
            missing = missing.or_else(|| Some(profile.name.clone()));
            continue;
        }
        if let Some(reason) = foreign_runtime(pod) {
            return Membership::Unsupported { profile: profile.name.clone(), reason };
        }
        let meshed = meshed(pod, profile, proxy);
        let by_group = profile.exempt.by_group.iter().any(|rule| rule.is_on(pod));
        if by_group || !meshed.exemptions.gids.is_empty() {
            return Membership::Unsupported {
                profile: profile.name.clone(),
                reason: Unsupported::GroupRules,
            };
        }
        return Membership::Meshed(Box::new(meshed));
    }
    let reason = match missing {
        Some(profile) => NotMeshed::ProxyMissing { profile },
        None => NotMeshed::NoProfile,
    };
    Membership::NotMeshed { reason }
}

/// Containers of `pod` with one of these names; the one in the best state first, the newest of those. One that was added
/// for debugging is never the mesh's, whatever its name.
fn best<'a>(pod: &'a PodFacts, names: &[Box<str>]) -> Option<&'a Container> {
    pod.containers
        .iter()
        .filter(|container| container.role != Role::Ephemeral)
        .filter(|container| names.iter().any(|name| matches(name, &container.name)))
        .max_by_key(|container| (container.state, container.created_at))
}

fn proxy<'a>(pod: &'a PodFacts, profile: &Profile) -> Option<&'a Container> {
    best(pod, &profile.containers.proxy)
}

fn foreign_runtime(pod: &PodFacts) -> Option<Unsupported> {
    let sandbox = pod.sandbox.as_ref();
    let names = [
        sandbox.map(|sandbox| &*sandbox.runtime_handler),
        sandbox.and_then(|sandbox| sandbox.runtime_type.as_deref()),
        pod.runtime_class_name.as_deref(),
    ];
    let names = names.map(|name| name.unwrap_or_default().to_ascii_lowercase());
    let is_named = |part: &str| names.iter().any(|name| name.contains(part));
    FOREIGN_RUNTIMES.iter().find_map(|(part, reason)| is_named(part).then_some(*reason))
}

/// Who sets up the redirection, and whether that is assumed.
fn mode(
    pod: &PodFacts,
    profile: &Profile,
    init: Option<&Container>,
    proxy: Option<&Container>,
) -> (Mode, bool) {
    if profile.cni_when.iter().any(|marker| marker.is_on(pod)) {
        return (Mode::Cni, false);
    }
    if init.is_some() {
        return (Mode::Init, false);
    }
    let validator = best(pod, &profile.containers.validator);
    // Init containers run in order, and the mesh's come before the proxy: a proxy without them means a CNI plugin.
    if validator.is_some() || proxy.is_some() || pod.containers_complete {
        (Mode::Cni, false)
    } else {
        (profile.assume_mode, true)
    }
}

fn families(rules: &FamilyRules, pod: &PodFacts, written: Option<bool>) -> Families {
    let FamilyRules { ipv4, ipv6, ipv6_when, ipv6_unless, ipv6_when_first } = rules;
    let on_pod = |markers: &[Marker]| markers.iter().any(|marker| marker.is_on(pod));
    let first = *ipv6_when_first && pod.pod_ips.first().is_some_and(std::net::IpAddr::is_ipv6);
    let by_rules = (*ipv6 || first || on_pod(ipv6_when)) && !on_pod(ipv6_unless);
    Families { ipv4: *ipv4, ipv6: written.unwrap_or(by_rules) }
}

fn meshed(pod: &PodFacts, profile: &Profile, proxy: Option<&Container>) -> Meshed {
    let init = best(pod, &profile.containers.init);
    let (mode, mode_assumed) = mode(pod, profile, init, proxy);
    let redirect_due = match mode {
        Mode::Cni => true,
        Mode::Init => init.is_some_and(|init| has_succeeded(init, proxy.is_some_and(has_begun))),
    };
    let mut problems = Vec::new();
    let written = profile.materialised.as_ref().and_then(|rule| materialised::read(rule, pod, &mut problems));
    let exempt = match &written {
        Some(written) => written.exemptions.clone(),
        None => exemptions(&profile.exempt, pod, mode, &mut problems),
    };
    let written = written.unwrap_or_default();
    let Written { proxy_uid, outbound_port, inbound_port, ipv6, dns, exemptions: _ } = written;
    let dns = dns.unwrap_or_else(|| dns_rules(pod, profile));
    let uid = match proxy_uid {
        None => identity(&profile.proxy.uid, pod, proxy, Container::uid, &mut problems),
        uid => uid,
    };
    Meshed {
        profile: profile.name.clone(),
        proxy_container: proxy.and_then(|proxy| proxy.id),
        proxy_uid: uid,
        proxy_gid: identity(&profile.proxy.gid, pod, proxy, Container::gid, &mut problems),
        proxy_marks: profile.proxy.marks.clone(),
        proxy_elsewhere: profile.proxy.elsewhere,
        outbound_port: outbound_port.unwrap_or(profile.ports.outbound),
        inbound_port: inbound_port.unwrap_or(profile.ports.inbound),
        mode,
        mode_assumed,
        redirect_due,
        is_enrolling: false,
        enrolment_grace: profile.enrolment.as_ref().and_then(|enrolment| enrolment.grace(pod)),
        roles: role::roles(pod, profile),
        phase: role::phase(pod, redirect_due),
        families: families(&profile.families, pod, ipv6),
        outbound_tproxy: profile.outbound_tproxy,
        dns_captured: dns.udp_captured,
        own_address: profile.own_address,
        validator_exit_code: profile.validator.exit_code,
        validator_addresses: role::validator_addresses(pod, profile, &mut problems),
        exemptions: with_dns(exempt, dns),
        problems,
    }
}

fn dns_rules(pod: &PodFacts, profile: &Profile) -> Dns {
    let rules = &profile.dns;
    let holds = (rules.when.is_empty() || rules.when.iter().any(|marker| marker.is_on(pod)))
        && !rules.unless.iter().any(|marker| marker.is_on(pod));
    Dns { tcp_exempt: holds && rules.tcp_exempt, udp_captured: holds && rules.udp_captured }
}

fn with_dns(mut exemptions: Exemptions, dns: Dns) -> Exemptions {
    if dns.tcp_exempt {
        exemptions.out_ports.push(PortRange::one(53));
        exemptions.out_ports = normalise(exemptions.out_ports);
    }
    exemptions
}

fn has_begun(container: &Container) -> bool {
    matches!(container.state, State::Created | State::Running | State::Exited)
}

/// Whether an init container is done. While its exit code is unknown, a later container that exists proves it.
fn has_succeeded(init: &Container, later_exists: bool) -> bool {
    init.state == State::Exited && init.exit_code.map_or(later_exists, |code| code == 0)
}

#[cfg(test)]
mod tests;
