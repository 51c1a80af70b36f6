//! Exemptions as the kernel's maps hold them: numbered sets of prefixes, shared by pods with the same ones.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;
use nobypass_common::abi::{CidrKey, ID_IFINDEX, ID_UID, IdKey, PortKey};
use nobypass_common::exempt::{ANY_PORT, LIST_EGRESS, LIST_INGRESS, LIST_ONLY, LIST_USER};
use nobypass_common::headers::{Address, IPPROTO_TCP, address, address4};

use crate::bpf::maps::Exemptions as Entries;
use crate::mesh::{Exemptions, Listed, PortRange, UserPorts};

/// Most networks, and most blocks of ports, that the exemptions of one pod can have: the maps are for all pods.
pub const MAX_ENTRIES: usize = 4096;
/// Most users that the exemptions of one pod can name, ranges counted in full: each is an entry of a map.
pub const MAX_USERS: usize = 1024;

/// Whether the exemptions of one pod are of a size that it may have.
pub fn is_fit(entries: &Entries) -> bool {
    let Entries { ports, cidrs, ids } = entries;
    ports.len() <= MAX_ENTRIES && cidrs.len() <= MAX_ENTRIES && ids.len() <= MAX_ENTRIES
}

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

/// The exemptions of a pod as the kernel can tell them: devices by their indices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct KernelExemptions {
    /// As the mesh has them.
    pub of_mesh: Exemptions,
    /// Indices of devices in the pod's network namespace, sorted.
    pub devices: Vec<u32>,
}

impl KernelExemptions {
    /// Whether any user or device is exempt.
    pub fn has_ids(&self) -> bool {
        let Exemptions { uids, user_ports, .. } = &self.of_mesh;
        !(self.devices.is_empty() && uids.is_empty() && user_ports.is_empty())
    }
}

/// The map entries of set number `set`. Users beyond [`MAX_USERS`] are left out, and so not exempt.
pub fn entries(set: u32, exemptions: &KernelExemptions) -> Entries {
    let KernelExemptions { of_mesh, devices } = exemptions;
    // A GID is not to be had from a packet.
    let Exemptions {
        out_ports,
        out_cidrs,
        listed,
        uids,
        user_ports,
        gids: _,
        devices: _,
        in_ports,
        in_sources,
    } = of_mesh;
    let mut all = Entries::default();
    let none = Listed::default();
    let Listed { ports, cidrs } = listed.as_ref().unwrap_or(&none);
    for (list, ports) in [(LIST_EGRESS, out_ports), (LIST_INGRESS, in_ports), (LIST_ONLY, ports)] {
        all.ports.extend(ports.iter().flat_map(|range| range_keys(set, list, *range)));
    }
    for (list, cidrs) in [(LIST_EGRESS, out_cidrs), (LIST_INGRESS, in_sources), (LIST_ONLY, cidrs)] {
        all.cidrs.extend(cidrs.iter().map(|net| cidr_key(set, list, net)));
    }
    all.ids.extend(devices.iter().map(|index| (IdKey { set, kind: ID_IFINDEX, value: *index }, ANY_PORT)));
    for (uid, ports) in users(uids, user_ports) {
        let list = match ports {
            None => ANY_PORT,
            Some(ports) => {
                let Some(list) = limit(&mut all, set, &ports) else { continue };
                list
            }
        };
        all.ids.push((IdKey { set, kind: ID_UID, value: uid }, list));
    }
    all
}

/// The list with exactly these ports, added if need be; `None` where there are too many lists.
fn limit(all: &mut Entries, set: u32, ports: &[PortRange]) -> Option<u8> {
    let keys = |list| -> Vec<_> { ports.iter().flat_map(|range| range_keys(set, list, *range)).collect() };
    let mut lists = LIST_USER..=u8::MAX;
    let list = lists.find(|list| {
        let have: Vec<_> = all.ports.iter().filter(|(_, key)| key.list == *list).copied().collect();
        have.is_empty() || have == keys(*list)
    })?;
    if !all.ports.iter().any(|(_, key)| key.list == list) {
        all.ports.extend(keys(list));
    }
    Some(list)
}

/// Each exempt user once, with the ports that it is exempt on: `None` means all.
fn users(uids: &[u32], user_ports: &[UserPorts]) -> BTreeMap<u32, Option<Vec<PortRange>>> {
    let mut users: BTreeMap<u32, Option<Vec<PortRange>>> =
        uids.iter().take(MAX_USERS).map(|uid| (*uid, None)).collect();
    for UserPorts { uids: (first, last), ports } in user_ports {
        for uid in *first..=*last {
            if users.len() >= MAX_USERS && !users.contains_key(&uid) {
                break;
            }
            let of_user = users.entry(uid).or_insert_with(|| Some(Vec::new()));
            match of_user {
                Some(_) if ports.is_empty() => *of_user = None,
                Some(have) => have.extend(ports),
                None => {}
            }
        }
    }
    users
}

fn range_keys(set: u32, list: u8, range: PortRange) -> impl Iterator<Item = (u32, PortKey)> {
    let range = RangeInclusive::from(range);
    let prefixes = port_prefixes(*range.start(), *range.end());
    prefixes.into_iter().map(move |(port, bits)| (bits, PortKey::new(set, IPPROTO_TCP, list, port)))
}

fn cidr_key(set: u32, list: u8, net: &IpNet) -> (u32, CidrKey) {
    let (family, address) = kernel_address(net.network());
    // An IPv4 network in IPv6 clothes, `::ffff:10.0.0.0/104`, is one of IPv4 to the programs.
    let bits = match (net, family) {
        (IpNet::V6(net), 4) => u32::from(net.prefix_len()).saturating_sub(96),
        _ => u32::from(net.prefix_len()),
    };
    (bits, CidrKey::new(set, list, family, address))
}

/// Numbers sets and counts their users. Number 0 is the empty set.
#[derive(Debug, Default)]
pub struct Sets {
    known: HashMap<KernelExemptions, (u32, usize)>,
    next: u32,
}

impl Sets {
    /// Starts above the numbers that an earlier agent used.
    pub fn starting_after(used: u32) -> Self {
        Self { known: HashMap::new(), next: used }
    }

    /// The number of a set, and whether its entries have yet to be written.
    pub fn acquire(&mut self, exemptions: &KernelExemptions) -> (u32, bool) {
        if *exemptions == KernelExemptions::default() {
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
    pub fn release(&mut self, exemptions: &KernelExemptions) -> Option<u32> {
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

    fn of_mesh(of_mesh: Exemptions) -> KernelExemptions {
        KernelExemptions { of_mesh, devices: Vec::new() }
    }

    #[test]
    fn sets_are_shared_and_released_with_their_last_user() {
        let ports =
            |port| of_mesh(Exemptions { out_ports: vec![PortRange::one(port)], ..Exemptions::default() });
        let none = KernelExemptions::default();
        let mut sets = Sets::starting_after(7);
        assert_eq!(sets.acquire(&none), (0, false));
        assert_eq!(sets.acquire(&ports(1)), (8, true));
        assert_eq!(sets.acquire(&ports(1)), (8, false));
        assert_eq!(sets.acquire(&ports(2)), (9, true));
        assert_eq!(sets.acquire(&KernelExemptions { devices: vec![4], ..none.clone() }), (10, true));
        assert_eq!(sets.release(&ports(1)), None);
        assert_eq!(sets.release(&ports(1)), Some(8));
        assert_eq!(sets.release(&ports(1)), None);
        assert_eq!(sets.release(&none), None);
    }

    #[test]
    fn entries_of_both_directions_and_families() {
        let exemptions = of_mesh(Exemptions {
            out_ports: vec![PortRange::new(80, 81).unwrap()],
            in_ports: vec![PortRange::one(4190)],
            out_cidrs: vec!["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()],
            in_sources: vec!["169.254.7.127/32".parse().unwrap()],
            listed: Some(Listed {
                ports: vec![PortRange::one(443)],
                cidrs: vec!["::ffff:10.0.0.0/104".parse().unwrap()],
            }),
            uids: vec![5996],
            ..Exemptions::default()
        });
        let Entries { ports, cidrs, ids } = entries(3, &exemptions);
        let port = |bits, list, port| (bits, PortKey::new(3, 6, list, port));
        assert_eq!(
            ports,
            [port(15, LIST_EGRESS, 80), port(16, LIST_INGRESS, 4190), port(16, LIST_ONLY, 443)]
        );
        assert_eq!(cidrs[0], (8, CidrKey::new(3, LIST_EGRESS, 4, address4([10, 0, 0, 0]))));
        assert_eq!((cidrs[1].0, cidrs[1].1.family), (8, [0, 0, LIST_EGRESS, 6]));
        assert_eq!(cidrs[2], (32, CidrKey::new(3, LIST_INGRESS, 4, address4([169, 254, 7, 127]))));
        assert_eq!(cidrs[3], (8, CidrKey::new(3, LIST_ONLY, 4, address4([10, 0, 0, 0]))));
        assert_eq!(ids, [(IdKey { set: 3, kind: ID_UID, value: 5996 }, ANY_PORT)]);
    }

    #[test]
    fn users_share_lists_of_ports() {
        let user = |uids, ports: &[u16]| UserPorts {
            uids,
            ports: ports.iter().copied().map(PortRange::one).collect(),
        };
        let exemptions = of_mesh(Exemptions {
            uids: vec![1],
            user_ports: vec![
                user((1, 3), &[22]),
                user((3, 3), &[80]),
                user((5, 5), &[]),
                user((5, 6), &[22]),
            ],
            ..Exemptions::default()
        });
        let Entries { ports, ids, cidrs: _ } = entries(3, &exemptions);
        let lists: Vec<_> = ids.iter().map(|(key, list)| (key.value, *list)).collect();
        let (first, second) = (LIST_USER, LIST_USER + 1);
        assert_eq!(lists, [(1, ANY_PORT), (2, first), (3, second), (5, ANY_PORT), (6, first)]);
        let ports: Vec<_> = ports.iter().map(|(_, key)| (key.list, u16::from_be_bytes(key.port))).collect();
        assert_eq!(ports, [(first, 22), (second, 22), (second, 80)]);
    }

    #[test]
    fn no_pod_has_more_users_than_the_map_can_take() {
        let all = vec![UserPorts { uids: (0, u32::MAX), ports: Vec::new() }];
        let exemptions = of_mesh(Exemptions { user_ports: all, ..Exemptions::default() });
        assert_eq!(entries(3, &exemptions).ids.len(), MAX_USERS);
    }
}
