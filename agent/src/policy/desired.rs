//! What holds for a pod: a pure function of its membership.

use nobypass_common::abi::{
    POD_EXEMPT_CIDRS, POD_EXEMPT_IDS, POD_EXEMPT_PORTS, POD_GAP_DROP, POD_GAP4, POD_GAP6, POD_INBOUND_DROP,
    POD_LISTED, POD_NON_TCP_DROP, POD_PROXY_ELSEWHERE, POD_PROXY_MARK, POD_PROXY_UID, POD_QUIC_DROP,
    POD_TPROXY, PodPolicy,
};
use nobypass_common::ids::PodKind;

use super::effective::Traffic;
use super::exempt::KernelExemptions;
use super::file::{FamilyGap, Inbound, NonTcp};
use super::mode::Choice;
use crate::mesh::{Exemptions, Membership, Meshed};

/// Why a pod is not judged that became meshed while it ran.
pub const ENROLLING: &str = "enrolling";

/// What the operator wants of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// [`nobypass_common::ids::Mode`], or [`nobypass_common::ids::MODE_INHERIT`].
    pub mode: u32,
    /// Enforce drops UDP (but DNS) and other protocols of meshed pods.
    pub drop_non_tcp: bool,
    /// Enforce drops QUIC of meshed pods.
    pub drop_quic: bool,
    /// Enforce drops connections of families that the mesh does not redirect.
    pub drop_family_gap: bool,
    /// Enforce drops connections that reach the application past its proxy.
    pub drop_inbound: bool,
}

impl Wishes {
    /// What the policy says of this pod.
    pub fn new(traffic: Traffic, choice: &Choice) -> Self {
        let Traffic { non_tcp, quic, family_gap, inbound } = traffic;
        Self {
            mode: choice.code(),
            drop_non_tcp: non_tcp == NonTcp::Drop,
            drop_quic: quic == NonTcp::Drop,
            drop_family_gap: family_gap == FamilyGap::Drop,
            drop_inbound: inbound == Inbound::Enforce,
        }
    }
}

/// The kind of entry that a membership asks for, and why, for people.
pub fn kind(membership: &Membership) -> (PodKind, &'static str) {
    match membership {
        Membership::NotMeshed { reason } => (PodKind::Exempt, reason.as_str()),
        Membership::Exempt { reason } => (PodKind::Exempt, reason.as_str()),
        Membership::Unsupported { reason, .. } => (PodKind::Exempt, reason.as_str()),
        // With an init container, what runs before it is not redirected by design.
        Membership::Meshed(meshed) if meshed.is_enrolling => (PodKind::Exempt, ENROLLING),
        Membership::Meshed(meshed) if !meshed.redirect_due => (PodKind::Exempt, "redirect_not_due"),
        Membership::Meshed(_) => (PodKind::Meshed, "meshed"),
    }
}

/// The exemptions that a pod's entry refers to.
pub fn exemptions(membership: &Membership) -> Exemptions {
    match membership {
        Membership::Meshed(meshed) => meshed.exemptions.clone(),
        Membership::NotMeshed { .. } | Membership::Exempt { .. } | Membership::Unsupported { .. } => {
            Exemptions::default()
        }
    }
}

/// The entry of a pod, but for its revision.
///
/// `proxy_cgroup` is the cgroup id of the proxy's container, 0 while unknown; `exempt` the number of the pod's
/// exemptions and what they are.
pub fn policy(
    membership: &Membership,
    level: u32,
    since_ns: u64,
    proxy_cgroup: u64,
    (exempt_set, exemptions): (u32, &KernelExemptions),
    wishes: Wishes,
) -> PodPolicy {
    let base = PodPolicy {
        kind: kind(membership).0.code(),
        mode: wishes.mode,
        level,
        since_ns,
        ..PodPolicy::default()
    };
    let Membership::Meshed(meshed) = membership else { return base };
    let Meshed { proxy_uid, proxy_marks, proxy_elsewhere, families, outbound_tproxy, .. } = &**meshed;
    let Exemptions { out_ports, out_cidrs, listed, in_ports, in_sources, .. } = &exemptions.of_mesh;
    // One mark is all that any mesh uses.
    let mark = proxy_marks.first();
    let mut flags = 0;
    for (on, flag) in [
        (proxy_uid.is_some(), POD_PROXY_UID),
        (mark.is_some(), POD_PROXY_MARK),
        (!families.ipv4, POD_GAP4),
        (!families.ipv6, POD_GAP6),
        (!out_ports.is_empty() || !in_ports.is_empty(), POD_EXEMPT_PORTS),
        (!out_cidrs.is_empty() || !in_sources.is_empty(), POD_EXEMPT_CIDRS),
        (exemptions.has_ids(), POD_EXEMPT_IDS),
        (listed.is_some(), POD_LISTED),
        (*outbound_tproxy, POD_TPROXY),
        (*proxy_elsewhere, POD_PROXY_ELSEWHERE),
        (wishes.drop_non_tcp, POD_NON_TCP_DROP),
        (wishes.drop_quic, POD_QUIC_DROP),
        (wishes.drop_family_gap, POD_GAP_DROP),
        (wishes.drop_inbound, POD_INBOUND_DROP),
    ] {
        if on {
            flags |= flag;
        }
    }
    PodPolicy {
        flags,
        proxy_cgroup,
        proxy_uid: proxy_uid.unwrap_or(0),
        exempt_set,
        mark: mark.map_or(0, |mark| mark.value),
        mark_mask: mark.map_or(0, |mark| mark.mask),
        ..base
    }
}
