//! Which connections a mesh itself lets out, or in: the order of its rules, the same for kernel and host tests.
//!
//! The order is that of the meshes' own chains (Istio's `ISTIO_OUTPUT`, the longest): what is excluded is exempt
//! whatever else is said of it; of the rest, where there are lists of what is redirected, only that is.

use crate::abi::{
    ID_IFINDEX, ID_UID, IdKey, POD_EXEMPT_CIDRS, POD_EXEMPT_IDS, POD_EXEMPT_PORTS, POD_LISTED, PodPolicy,
};
use crate::headers::Address;
use crate::verdict::Packet;

/// Destinations of outgoing connections that are exempt.
pub const LIST_EGRESS: u8 = 0;
/// Ports, and sources, of incoming connections that are exempt.
pub const LIST_INGRESS: u8 = 1;
/// Destinations of outgoing connections that alone are redirected (`POD_LISTED`).
pub const LIST_ONLY: u8 = 2;
/// The first of the lists of ports to which the exemption of a user is limited.
pub const LIST_USER: u8 = 16;
/// Value of `EXEMPT_IDS` without such a list.
pub const ANY_PORT: u8 = 1;

/// Pods without any of these have no exemptions.
const ANY: u32 = POD_EXEMPT_PORTS | POD_EXEMPT_CIDRS | POD_EXEMPT_IDS | POD_LISTED;

/// The maps, as the rules ask them.
pub trait Lookups {
    /// Whether a list of a set has a TCP port.
    fn port(&mut self, set: u32, list: u8, port: u16) -> bool;
    /// Whether a list of a set has an address.
    fn network(&mut self, set: u32, list: u8, family: u8, address: &Address) -> bool;
    /// The value of an entry of `EXEMPT_IDS`.
    fn id(&mut self, key: &IdKey) -> Option<u8>;
    /// The socket's UID in its user namespace.
    fn uid(&mut self) -> u32;
}

/// Whether an outgoing connection is exempt.
#[inline(always)]
pub fn egress<L: Lookups>(policy: &PodPolicy, packet: &Packet, maps: &mut L) -> bool {
    let PodPolicy { flags, exempt_set: set, .. } = *policy;
    if flags & ANY == 0 {
        return false;
    }
    let (port, to) = (packet.transport.dport, &packet.addresses.destination);
    if flags & POD_EXEMPT_PORTS != 0 && maps.port(set, LIST_EGRESS, port) {
        return true;
    }
    if flags & POD_EXEMPT_CIDRS != 0 && maps.network(set, LIST_EGRESS, packet.family, to) {
        return true;
    }
    if flags & POD_EXEMPT_IDS != 0 {
        let device = IdKey { set, kind: ID_IFINDEX, value: packet.ifindex };
        if maps.id(&device).is_some() {
            return true;
        }
        let user = IdKey { set, kind: ID_UID, value: maps.uid() };
        if let Some(list) = maps.id(&user)
            && (list == ANY_PORT || maps.port(set, list, port))
        {
            return true;
        }
    }
    flags & POD_LISTED != 0
        && !maps.port(set, LIST_ONLY, port)
        && !maps.network(set, LIST_ONLY, packet.family, to)
}

/// Whether an incoming connection is exempt.
#[inline(always)]
pub fn ingress<L: Lookups>(policy: &PodPolicy, packet: &Packet, maps: &mut L) -> bool {
    let PodPolicy { flags, exempt_set: set, .. } = *policy;
    (flags & POD_EXEMPT_PORTS != 0 && maps.port(set, LIST_INGRESS, packet.transport.dport))
        || (flags & POD_EXEMPT_CIDRS != 0
            && maps.network(set, LIST_INGRESS, packet.family, &packet.addresses.source))
}

#[cfg(test)]
mod tests;
