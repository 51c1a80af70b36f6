//! What a mesh profile is.

use std::net::SocketAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{
    enrolment::Enrolment,
    grammar::{CidrGrammar, PortGrammar, PortRange},
    marker::{Marker, Source, Unless, Wish},
};

/// Everything that is to be known about one mesh. In a file: YAML (or JSON), names in camelCase.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Profile {
    /// The name in metrics, logs and reports.
    pub name: Box<str>,
    /// Which pods are meshed.
    #[serde(default)]
    pub recognise: Recognise,
    /// The containers that the mesh adds to a pod.
    #[serde(default)]
    pub containers: Containers,
    /// Each of these says that a CNI plugin sets up the redirection, whatever init containers there are.
    #[serde(default)]
    pub cni_when: Vec<Marker>,
    /// The mesh takes up pods that run already.
    #[serde(default)]
    pub enrolment: Option<Enrolment>,
    /// Who sets up the redirection as long as the pod does not show it.
    #[serde(default)]
    pub assume_mode: Mode,
    /// How the proxy's own connections are told from the application's.
    #[serde(default)]
    pub proxy: ProxyIdentity,
    /// The ports that the proxy listens on.
    pub ports: ProxyPorts,
    /// A connection goes to the proxy with its destination unchanged (TPROXY and a mark). Only for such a mesh is a
    /// marked packet on lo taken for a proof: whoever has CAP_NET_RAW can mark one.
    #[serde(default)]
    pub outbound_tproxy: bool,
    /// Where the mesh writes down, on the pod, what it does with it. Takes the place of `exempt`, `families`, `dns` and
    /// the proxy's UID as far as it says something.
    #[serde(default)]
    pub materialised: Option<Materialised>,
    /// What the mesh lets out, or in, past the proxy.
    #[serde(default)]
    pub exempt: ExemptRules,
    /// The IP families that the mesh redirects.
    #[serde(default)]
    pub families: FamilyRules,
    /// What happens to DNS.
    #[serde(default)]
    pub dns: DnsRules,
    /// What happens to a connection of the application to the pod's own address.
    #[serde(default)]
    pub own_address: OwnAddress,
    /// The mesh's own check of what its CNI plugin did.
    #[serde(default)]
    pub validator: Validator,
}

/// Which pods are meshed: (a proxy container, or one of `any`) and all of `all` and none of `not`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Recognise {
    /// Each of these alone says that a proxy was injected, even before its container exists.
    pub any: Vec<Marker>,
    /// Without all of these nothing is redirected, whatever containers there are.
    pub all: Vec<Marker>,
    /// Each of these says that the pod is not meshed.
    pub not: Vec<Marker>,
    /// Each of these says that the pod belongs to the mesh itself and is not judged.
    pub control_plane: Vec<Marker>,
    /// Each of these says that the pod is a gateway: a proxy that redirects nothing. Looked at only in a pod that the
    /// rest claims.
    pub gateway: Vec<Marker>,
}

/// The names of containers that the mesh adds. A name that ends with `*` means all names that start so.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Containers {
    /// The proxy.
    pub proxy: Vec<Box<str>>,
    /// The init container that sets up the redirection when no CNI plugin does.
    pub init: Vec<Box<str>>,
    /// The init container that checks what the CNI plugin did.
    pub validator: Vec<Box<str>>,
}

/// Who sets up the redirection of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Mode {
    /// The mesh's CNI plugin, before any container starts: whatever leaves from then on is judged.
    #[default]
    Cni,
    /// An init container of the pod: what leaves before it has ended is none of the mesh's business.
    Init,
}

/// How the proxy's connections are told from others while its container's cgroup is not known.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ProxyIdentity {
    /// Its UID: the first source that says something.
    pub uid: Vec<IdSource>,
    /// Its GID: the first source that says something.
    pub gid: Vec<IdSource>,
    /// Socket marks that it sets; the first one counts.
    pub marks: Vec<Mark>,
    /// It runs in a pod of its own: no connection of this pod is the proxy's.
    pub elsewhere: bool,
}

/// Where a numeric id is to be read.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum IdSource {
    /// An annotation of the pod.
    Annotation(Box<str>),
    /// An annotation of the pod's namespace.
    NamespaceAnnotation(Box<str>),
    /// What the proxy's container runs as, once the runtime or the specification tells.
    Container,
    /// As `container`, but root says nothing.
    ContainerUnlessRoot,
    /// Always this.
    Fixed(u32),
}

/// A socket mark under a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mark {
    /// The bits.
    pub value: u32,
    /// Which bits count.
    pub mask: u32,
}

/// The ports that the proxy listens on in every pod.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ProxyPorts {
    /// Where outgoing connections are redirected to.
    pub outbound: u16,
    /// Where incoming connections are redirected to.
    pub inbound: u16,
    /// Others that it serves itself (admin, metrics, probes).
    #[serde(default)]
    pub own: Vec<u16>,
}

/// A configuration that the mesh's injector wrote down on the pod.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Materialised {
    /// How it is written.
    pub kind: MaterialisedKind,
    /// Where: the first place that says something.
    pub from: Vec<Source>,
}

/// How a materialised configuration is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum MaterialisedKind {
    /// Consul's `iptables.Config`, JSON.
    Consul,
    /// Kuma's transparent proxy configuration, YAML.
    Kuma,
}

/// What the mesh lets pass un-redirected.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ExemptRules {
    /// Destination ports of outgoing connections.
    pub out_ports: PortRule,
    /// Destinations of outgoing connections.
    pub out_cidrs: ListRule<IpNet>,
    /// Only what this lists is redirected.
    pub only: OnlyRules,
    /// Users whose connections are not redirected, beside the proxy's.
    pub uids: ListRule<u32>,
    /// Annotation with users whose connections to some ports are not redirected, as Kuma writes them:
    /// `<protocol:>?<ports:>?<uids>;…`.
    pub user_ports: Option<Box<str>>,
    /// Groups whose connections are not redirected, beside the proxy's. A packet does not tell its group: a pod with any
    /// is not judged.
    pub gids: ListRule<u32>,
    /// Each of these says that the group decides whether a connection is redirected, with the same effect.
    pub by_group: Vec<Unless>,
    /// Annotation with names of network devices whose connections are not redirected.
    pub devices: Option<Box<str>>,
    /// Ports of incoming connections.
    pub in_ports: PortRule,
    /// Annotation with the only ports of incoming connections that are redirected, in the grammar of `inPorts`. Absent
    /// or `*`: all but `inPorts`. A list makes `inPorts` void.
    pub in_only: Option<Box<str>>,
    /// Sources of incoming connections.
    pub in_sources: ListRule<IpNet>,
    /// Each of these says that no incoming connection is redirected.
    pub in_off: Vec<Marker>,
}

/// Exempt ports: the mesh's defaults, and an annotation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PortRule {
    /// The mesh's defaults with a CNI plugin.
    pub cni: Vec<PortRange>,
    /// The mesh's defaults with an init container.
    pub init: Vec<PortRange>,
    /// The annotation.
    pub annotation: Option<Box<str>>,
    /// The same annotation on the namespace counts where the pod has none.
    pub namespace: bool,
    /// How the annotation is written.
    pub grammar: PortGrammar,
    /// What the annotation does to the defaults.
    pub merge: Merge,
    /// What an empty annotation says.
    pub empty: Empty,
}

/// Exempt things of another kind: the mesh's defaults, and an annotation with a list separated by commas.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ListRule<T> {
    /// The mesh's defaults.
    pub defaults: Vec<T>,
    /// The annotation; an empty value counts as absent.
    pub annotation: Option<Box<str>>,
    /// The same annotation on the namespace counts where the pod has none.
    pub namespace: bool,
    /// How networks are written in the annotation.
    pub grammar: CidrGrammar,
    /// What the annotation does to the defaults.
    pub merge: Merge,
}

impl<T> Default for ListRule<T> {
    fn default() -> Self {
        Self {
            defaults: Vec::new(),
            annotation: None,
            namespace: false,
            grammar: CidrGrammar::default(),
            merge: Merge::default(),
        }
    }
}

/// Annotations by which only some outgoing connections are redirected. What is exempt stays so.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct OnlyRules {
    /// The annotation with the networks. `*` means all.
    pub cidrs: Option<Box<str>>,
    /// How networks are written.
    pub cidr_grammar: CidrGrammar,
    /// What an empty list of networks says: that there is none, or that none is redirected.
    pub empty: Empty,
    /// The annotation with the ports.
    pub ports: Option<Box<str>>,
    /// How ports are written.
    pub port_grammar: PortGrammar,
    /// What a list of ports alone does.
    pub ports_alone: PortsAlone,
}

/// What a list of ports says where there is none of networks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum PortsAlone {
    /// Nothing: all networks are redirected, on all ports.
    #[default]
    SayNothing,
    /// Only these ports are redirected, and `outPorts` is void.
    Limit,
}

/// What an empty annotation says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Empty {
    /// As much as an absent one.
    #[default]
    Absent,
    /// An empty list.
    List,
}

/// What an annotation does to the defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Merge {
    /// It takes their place.
    #[default]
    Replace,
    /// It adds to them.
    Append,
}

/// The IP families that the mesh redirects, by default and in a pod.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct FamilyRules {
    /// IPv4.
    pub ipv4: bool,
    /// IPv6, by default.
    pub ipv6: bool,
    /// Each of these says that IPv6 is redirected after all.
    pub ipv6_when: Vec<Marker>,
    /// Each of these says that it is not.
    pub ipv6_unless: Vec<Marker>,
    /// IPv6 is redirected in a pod whose first address is one.
    pub ipv6_when_first: bool,
}

impl Default for FamilyRules {
    fn default() -> Self {
        Self {
            ipv4: true,
            ipv6: true,
            ipv6_when: Vec::new(),
            ipv6_unless: Vec::new(),
            ipv6_when_first: false,
        }
    }
}

/// What happens to DNS of a pod, where the conditions hold; otherwise DNS over TCP is redirected as anything else and
/// DNS over UDP goes straight out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct DnsRules {
    /// One of these must hold, if there is any.
    pub when: Vec<Marker>,
    /// None of these may hold.
    pub unless: Vec<Marker>,
    /// TCP to port 53 goes straight out.
    pub tcp_exempt: bool,
    /// UDP to port 53 is redirected to the proxy.
    pub udp_captured: bool,
}

/// What happens to a connection to the pod's own address. It stays on lo either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum OwnAddress {
    /// It is not redirected.
    #[default]
    Direct,
    /// It is redirected like any other, and so proves that redirection works.
    Redirected,
}

/// The mesh's own check, an init container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Validator {
    /// How it exits when the pod is not redirected.
    pub exit_code: Option<i32>,
    /// Addresses that it connects to: a connection of it that leaves the pod for one of them proves that the pod is
    /// not redirected, and is not the application's.
    pub addresses: Vec<SocketAddr>,
    /// The argument that names another address, as `--name value` or `--name=value`.
    pub address_argument: Option<Box<str>>,
}

impl Profile {
    /// What of a pod this profile reads.
    pub(super) fn wishes(&self) -> Vec<Wish<'_>> {
        let Recognise { any, all, not, control_plane, gateway } = &self.recognise;
        let ExemptRules {
            out_ports,
            out_cidrs,
            only,
            uids,
            user_ports,
            gids,
            by_group,
            devices,
            in_ports,
            in_only,
            in_sources,
            in_off,
        } = &self.exempt;
        let FamilyRules { ipv6_when, ipv6_unless, .. } = &self.families;
        let DnsRules { when, unless, .. } = &self.dns;
        let Containers { proxy, init, validator } = &self.containers;
        let markers = [
            any,
            all,
            not,
            control_plane,
            gateway,
            in_off,
            ipv6_when,
            ipv6_unless,
            when,
            unless,
            &self.cni_when,
        ];
        let keys = [
            &out_ports.annotation,
            &out_cidrs.annotation,
            &only.cidrs,
            &only.ports,
            &uids.annotation,
            user_ports,
            &gids.annotation,
            devices,
            &in_ports.annotation,
            in_only,
            &in_sources.annotation,
        ];
        let ids = self.proxy.uid.iter().chain(&self.proxy.gid).filter_map(|source| match source {
            IdSource::Annotation(key) | IdSource::NamespaceAnnotation(key) => Some(&**key),
            IdSource::Container | IdSource::ContainerUnlessRoot | IdSource::Fixed(_) => None,
        });
        let done = self.enrolment.iter().filter_map(|enrolment| Some(&*enrolment.done.as_ref()?.key));
        let keys = keys.into_iter().filter_map(Option::as_deref).chain(ids).chain(done).map(Wish::Key);
        let by_group = by_group.iter().flat_map(Unless::wishes);
        let names = proxy.iter().chain(init).chain(validator).map(|name| Wish::Container(name));
        let markers = markers.into_iter().flatten().flat_map(Marker::wishes);
        let written =
            self.materialised.iter().flat_map(|written| written.from.iter().flat_map(Source::wishes));
        markers.chain(by_group).chain(keys).chain(names).chain(written).collect()
    }

    /// Whether it makes sense.
    ///
    /// # Errors
    /// What does not, in a sentence.
    pub fn check(&self) -> Result<(), String> {
        let Containers { proxy, init: _, validator: _ } = &self.containers;
        let Recognise { any, .. } = &self.recognise;
        if self.name.is_empty()
            || !self.name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
        {
            return Err("the name must be made of letters, digits, `-` and `_`".to_owned());
        }
        if proxy.is_empty() && any.is_empty() {
            return Err("neither containers.proxy nor recognise.any says which pods are meshed".to_owned());
        }
        if proxy.iter().any(|name| name.trim_end_matches('*').is_empty()) {
            return Err("containers.proxy would match every container".to_owned());
        }
        if self.proxy.elsewhere && !proxy.is_empty() {
            return Err(
                "proxy.elsewhere: the proxy is no container of the pod, but containers.proxy names one"
                    .to_owned(),
            );
        }
        if self.proxy.marks.len() > 1 {
            return Err("proxy.marks: the kernel half compares with one mark".to_owned());
        }
        let empty = |wish: &Wish<'_>| match wish {
            Wish::Key(key) => key.trim_end_matches('*').is_empty(),
            Wish::Container(_) | Wish::Env(_) => false,
        };
        if self.wishes().iter().any(empty) {
            return Err("an empty label or annotation key would match every pod".to_owned());
        }
        Ok(())
    }
}
