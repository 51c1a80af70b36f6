//! As whom and to where a pod is probed: what its mesh would redirect. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::mesh::{Exemptions, Listed};

/// The question to ask of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Owner of the socket, user and group: neither the proxy's nor exempt.
    pub id: u32,
    /// Destinations, IPv4 and IPv6; `None` where the mesh exempts all of them.
    pub to: [Option<SocketAddr>; 2],
}

/// Addresses for documentation (RFC 5737, RFC 3849, RFC 9637): nobody's, should a packet ever leave.
const V4: [Ipv4Addr; 3] =
    [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(198, 51, 100, 1), Ipv4Addr::new(203, 0, 113, 1)];
/// See [`V4`].
const V6: [Ipv6Addr; 2] =
    [Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 1)];
/// Ports that applications use, tried first: a mesh that redirects only some ports redirects these.
const PORTS: [u16; 4] = [80, 443, 8080, 8443];
/// So many addresses of a network are tried.
const HOSTS: usize = 4;
/// The first of the user ids tried.
const FIRST_ID: u32 = 10_001;

/// The question to ask of a pod with these exemptions, whose proxy has these users and groups.
pub fn target(exemptions: &Exemptions, proxies: &[u32]) -> Target {
    let Exemptions { out_ports, out_cidrs, listed, uids, user_ports, gids, .. } = exemptions;
    let of_users = |id: u32| user_ports.iter().any(|of| (of.uids.0..=of.uids.1).contains(&id));
    let taken = |id: &u32| uids.contains(id) || gids.contains(id) || proxies.contains(id) || of_users(*id);
    let id = (FIRST_ID..).find(|id| !taken(id)).unwrap_or(FIRST_ID);
    let exempt = |port: u16| out_ports.iter().any(|range| range.contains(port));
    let is_exempt = |address: &IpAddr| out_cidrs.iter().any(|cidr| cidr.contains(address));
    let nobodys = |addresses: &[IpAddr]| addresses.iter().find(|address| !is_exempt(address)).copied();
    let any_port = || PORTS.into_iter().chain(1..=u16::MAX).find(|port| !exempt(*port));
    let to = |addresses: &[IpAddr]| match listed {
        None => Some(SocketAddr::new(nobodys(addresses)?, any_port()?)),
        // A listed port is redirected to wherever; otherwise the destination has to be a listed one.
        Some(Listed { ports, cidrs }) => {
            let listed = PORTS
                .into_iter()
                .chain(1..=u16::MAX)
                .find(|port| ports.iter().any(|range| range.contains(*port)) && !exempt(*port));
            if let (Some(address), Some(port)) = (nobodys(addresses), listed) {
                return Some(SocketAddr::new(address, port));
            }
            let v4 = addresses.iter().any(IpAddr::is_ipv4);
            let of_family = cidrs.iter().filter(|cidr| cidr.addr().is_ipv4() == v4);
            let address =
                of_family.flat_map(|cidr| cidr.hosts().take(HOSTS)).find(|address| !is_exempt(address));
            Some(SocketAddr::new(address?, any_port()?))
        }
    };
    Target { id, to: [to(&V4.map(IpAddr::V4)), to(&V6.map(IpAddr::V6))] }
}

impl Default for Target {
    fn default() -> Self {
        target(&Exemptions::default(), &[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::PortRange;

    #[test]
    fn what_the_mesh_lists_is_asked_where_it_lists() {
        let listed = |ports: Vec<PortRange>, cidrs: &[&str]| {
            let cidrs = cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect();
            let exemptions = Exemptions {
                out_ports: vec![PortRange::one(9000)],
                listed: Some(Listed { ports, cidrs }),
                ..Exemptions::default()
            };
            target(&exemptions, &[]).to.map(|to| to.map(|to| to.to_string()))
        };
        let ports = vec![PortRange::new(9000, 9001).unwrap()];
        assert_eq!(listed(ports, &[]), [Some("192.0.2.1:9001".into()), Some("[2001:db8::1]:9001".into())]);
        assert_eq!(listed(vec![], &["10.96.0.0/12"]), [Some("10.96.0.1:80".into()), None]);
        assert_eq!(listed(vec![], &[]), [None, None]);
    }

    #[test]
    fn what_the_mesh_exempts_is_not_asked() {
        let free = Target::default();
        assert_eq!(free.id, 10_001);
        assert_eq!(
            free.to,
            [Some("192.0.2.1:80".parse().unwrap()), Some("[2001:db8::1]:80".parse().unwrap())]
        );

        let exemptions = Exemptions {
            out_ports: vec![PortRange::new(80, 8080).unwrap(), PortRange::one(8443)],
            out_cidrs: vec!["192.0.2.0/24".parse().unwrap(), "::/0".parse().unwrap()],
            uids: vec![10_003],
            ..Exemptions::default()
        };
        let some = target(&exemptions, &[10_001, 10_002]);
        assert_eq!(some, Target { id: 10_004, to: [Some("198.51.100.1:1".parse().unwrap()), None] });

        let all = Exemptions { out_ports: vec![PortRange::new(0, 65_535).unwrap()], ..Exemptions::default() };
        assert_eq!(target(&all, &[]).to, [None, None]);
    }
}
