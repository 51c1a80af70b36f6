//! Exemptions as the kernel's maps hold them: numbered sets of prefixes, shared by pods with the same ones.

use std::collections::HashMap;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;
use nobypass_common::abi::{CidrKey, ID_UID, IdKey, PortKey};
use nobypass_common::headers::{Address, IPPROTO_TCP, address, address4};
use nobypass_common::ids::Hook;

use crate::mesh::Exemptions;

/// Prefixes `(first port, bits)` that cover a range of ports exactly.
pub fn port_prefixes(first: u16, last: u16) -> Vec<(u16, u32)> {
    let mut prefixes = Vec::new();
    let (mut at, end) = (u32::from(first), u32::from(last) + 1);
    while at < end {
        // The largest block that begins here and does not go beyond the end.
        let aligned = if at == 0 { 16 } else { at.trailing_zeros() };
        let fits = (end - at).ilog2();
        let size = aligned.min(fits);
        if let Ok(port) = u16::try_from(at) {
            prefixes.push((port, 16 - size));
        }
        at += 1 << size;
    }
    prefixes
}

/// An address as the programs see it, and its family.
pub fn kernel_address(ip: IpAddr) -> (u8, Address) {
    match ip {
        IpAddr::V4(ip) => (4, address4(ip.octets())),
        IpAddr::V6(ip) => match ip.to_ipv4_mapped() {
            Some(ip) => (4, address4(ip.octets())),
            None => (6, address(ip.octets())),
        },
    }
}

/// What a set puts into the maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entries {
    /// `EXEMPT_PORTS`: bits of the port, key.
    pub ports: Vec<(u32, PortKey)>,
    /// `EXEMPT_CIDRS`: bits of the address, key.
    pub cidrs: Vec<(u32, CidrKey)>,
    /// `EXEMPT_IDS`.
    pub ids: Vec<IdKey>,
}

/// The map entries of set number `set`.
pub fn entries(set: u32, exemptions: &Exemptions) -> Entries {
    let Exemptions { out_ports, out_cidrs, uids, in_ports, in_sources: _ } = exemptions;
    let port = |hook: Hook| {
        move |range: &crate::mesh::PortRange| {
            let range = RangeInclusive::from(*range);
            port_prefixes(*range.start(), *range.end()).into_iter().map(move |(port, bits)| {
                (bits, PortKey::new(set, IPPROTO_TCP, u8::try_from(hook.code()).unwrap_or(0), port))
            })
        }
    };
    let ports =
        out_ports.iter().flat_map(port(Hook::Egress)).chain(in_ports.iter().flat_map(port(Hook::Ingress)));
    let cidr = |net: &IpNet| {
        let (family, address) = kernel_address(net.network());
        (u32::from(net.prefix_len()), CidrKey::new(set, family, address))
    };
    Entries {
        ports: ports.collect(),
        cidrs: out_cidrs.iter().map(cidr).collect(),
        ids: uids.iter().map(|uid| IdKey { set, kind: ID_UID, value: *uid }).collect(),
    }
}

/// Numbers sets and counts their users. Number 0 is the empty set.
#[derive(Debug, Default)]
pub struct Sets {
    known: HashMap<Exemptions, (u32, usize)>,
    next: u32,
}

impl Sets {
    /// Starts above the numbers that an earlier agent used.
    pub fn starting_after(used: u32) -> Self {
        Self { known: HashMap::new(), next: used }
    }

    /// The number of a set, and whether its entries have yet to be written.
    pub fn acquire(&mut self, exemptions: &Exemptions) -> (u32, bool) {
        if *exemptions == Exemptions::default() {
            return (0, false);
        }
        if let Some((set, users)) = self.known.get_mut(exemptions) {
            *users += 1;
            return (*set, false);
        }
        self.next = self.next.wrapping_add(1).max(1);
        self.known.insert(exemptions.clone(), (self.next, 1));
        (self.next, true)
    }

    /// Gives a set back; its number when nobody uses it any more and its entries can go.
    pub fn release(&mut self, exemptions: &Exemptions) -> Option<u32> {
        let (set, users) = self.known.get_mut(exemptions)?;
        *users -= 1;
        if *users > 0 {
            return None;
        }
        let set = *set;
        self.known.remove(exemptions);
        Some(set)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::mesh::PortRange;

    #[test]
    fn ranges_as_prefixes() {
        assert_eq!(port_prefixes(443, 443), [(443, 16)]);
        assert_eq!(port_prefixes(0, u16::MAX), [(0, 0)]);
        assert_eq!(port_prefixes(4567, 4568), [(4567, 16), (4568, 16)]);
        assert_eq!(port_prefixes(8000, 8015), [(8000, 12)]);
        assert_eq!(port_prefixes(1, 65535).len(), 16);
    }

    proptest! {
        #[test]
        fn prefixes_cover_exactly_the_range(a: u16, b: u16) {
            let (first, last) = (a.min(b), a.max(b));
            let mut covered = Vec::new();
            for (port, bits) in port_prefixes(first, last) {
                let size = 1u32 << (16 - bits);
                prop_assert_eq!(u32::from(port) % size, 0, "a prefix begins at a multiple of its size");
                covered.push((u32::from(port), u32::from(port) + size));
            }
            prop_assert!(covered.windows(2).all(|pair| pair[0].1 == pair[1].0), "without gaps or overlaps");
            prop_assert_eq!(covered.first().map(|block| block.0), Some(u32::from(first)));
            prop_assert_eq!(covered.last().map(|block| block.1), Some(u32::from(last) + 1));
            prop_assert!(covered.len() <= 30);
        }
    }

    #[test]
    fn sets_are_shared_and_released_with_their_last_user() {
        let ports = |port| Exemptions { out_ports: vec![PortRange::one(port)], ..Exemptions::default() };
        let mut sets = Sets::starting_after(7);
        assert_eq!(sets.acquire(&Exemptions::default()), (0, false));
        assert_eq!(sets.acquire(&ports(1)), (8, true));
        assert_eq!(sets.acquire(&ports(1)), (8, false));
        assert_eq!(sets.acquire(&ports(2)), (9, true));
        assert_eq!(sets.release(&ports(1)), None);
        assert_eq!(sets.release(&ports(1)), Some(8));
        assert_eq!(sets.release(&ports(1)), None);
        assert_eq!(sets.release(&Exemptions::default()), None);
    }

    #[test]
    fn entries_of_both_directions_and_families() {
        let exemptions = Exemptions {
            out_ports: vec![PortRange::new(80, 81).unwrap()],
            in_ports: vec![PortRange::one(4190)],
            out_cidrs: vec!["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()],
            uids: vec![5996],
            ..Exemptions::default()
        };
        let Entries { ports, cidrs, ids } = entries(3, &exemptions);
        assert_eq!(ports, [(15, PortKey::new(3, 6, 0, 80)), (16, PortKey::new(3, 6, 1, 4190))]);
        assert_eq!(cidrs[0], (8, CidrKey::new(3, 4, address4([10, 0, 0, 0]))));
        assert_eq!((cidrs[1].0, cidrs[1].1.family[3]), (8, 6));
        assert_eq!(ids, [IdKey { set: 3, kind: ID_UID, value: 5996 }]);
    }
}
