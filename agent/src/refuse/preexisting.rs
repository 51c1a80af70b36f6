//! Which of a pod's connections go past its proxy although no program saw them begin. Pure.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

use super::diag::Socket;
use crate::mesh::{Exemptions, Listed};

/// What is known of the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// The proxy's cgroup; 0 while unknown.
    pub proxy_cgroup: u64,
    /// The proxy's user, if the mesh has one.
    pub proxy_uid: Option<u32>,
    /// Families that are known not to be redirected and should be: IPv4, IPv6.
    pub families: [bool; 2],
    /// What the mesh lets out.
    pub exemptions: Exemptions,
}

/// The established connections that the application of a pod has begun past its proxy. One whose other end is a socket of
/// the proxy is redirected: the application's socket keeps the destination that it asked for, NAT or not.
///
/// `listening` are the ports on which the pod accepts connections; an accepted connection has one of them, also after its
/// listener has gone most of the time, and one that was begun has a port of `ephemeral`.
pub fn past_the_proxy(
    established: Vec<Socket>,
    listening: &BTreeSet<u16>,
    ephemeral: &RangeInclusive<u16>,
    rules: &Rules,
) -> Vec<Socket> {
    let Rules { proxy_cgroup, proxy_uid, families: [v4, v6], exemptions } = rules;
    let of_proxy = |socket: &Socket| match socket.cgroup {
        Some(cgroup) if *proxy_cgroup != 0 => cgroup == *proxy_cgroup,
        _ => *proxy_uid == Some(socket.uid),
    };
    let at_the_proxy: BTreeSet<SocketAddr> =
        established.iter().filter(|socket| of_proxy(socket)).map(|socket| socket.remote).collect();
    let bypasses = |socket: &Socket| {
        let (local, remote) = (socket.local, socket.remote);
        let judged = if remote.is_ipv4() { *v4 } else { *v6 };
        let leaves = !remote.ip().is_loopback() && remote.ip() != local.ip();
        let begun = !listening.contains(&local.port()) && ephemeral.contains(&local.port());
        let exempt = exemptions.out_ports.iter().any(|range| range.contains(remote.port()))
            || exemptions.out_cidrs.iter().any(|cidr| cidr.contains(&remote.ip()))
            || exemptions.uids.contains(&socket.uid)
            || exemptions.listed.as_ref().is_some_and(|Listed { ports, cidrs }| {
                !ports.iter().any(|range| range.contains(remote.port()))
                    && !cidrs.iter().any(|cidr| cidr.contains(&remote.ip()))
            });
        judged && leaves && begun && !exempt && !of_proxy(socket) && !at_the_proxy.contains(&local)
    };
    established.into_iter().filter(bypasses).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::PortRange;

    const EPHEMERAL: RangeInclusive<u16> = 32_768..=60_999;

    fn socket(local: &str, remote: &str, cgroup: u64, uid: u32) -> Socket {
        let (local, remote) = (local.parse().unwrap(), remote.parse().unwrap());
        Socket { family: 2, local, remote, device: 0, cookie: 1, uid, cgroup: Some(cgroup) }
    }

    #[test]
    fn only_what_the_application_began_towards_others_counts() {
        let rules = Rules {
            proxy_cgroup: 9,
            proxy_uid: Some(2102),
            families: [true, false],
            exemptions: Exemptions {
                out_ports: vec![PortRange::one(5432)],
                out_cidrs: vec!["192.0.2.0/24".parse().unwrap()],
                uids: vec![77],
                ..Exemptions::default()
            },
        };
        let listening = BTreeSet::from([8080, 40_000]);
        let keeps = |socket: Socket| !past_the_proxy(vec![socket], &listening, &EPHEMERAL, &rules).is_empty();
        assert!(keeps(socket("10.0.0.5:50000", "10.0.0.1:80", 8, 1000)));
        // The proxy's user in another container is no proxy.
        assert!(keeps(socket("10.0.0.5:50000", "10.0.0.1:80", 8, 2102)));
        for (name, other) in [
            ("the proxy's", socket("10.0.0.5:50000", "10.0.0.1:80", 9, 2102)),
            ("accepted", socket("10.0.0.5:8080", "10.0.0.1:50000", 8, 1000)),
            ("accepted, the listener gone", socket("10.0.0.5:9090", "10.0.0.1:50000", 8, 1000)),
            ("accepted on a port of the range", socket("10.0.0.5:40000", "10.0.0.1:50000", 8, 1000)),
            ("loopback", socket("127.0.0.1:50000", "127.0.0.1:80", 8, 1000)),
            ("own address", socket("10.0.0.5:50000", "10.0.0.5:80", 8, 1000)),
            ("exempt port", socket("10.0.0.5:50000", "10.0.0.1:5432", 8, 1000)),
            ("exempt network", socket("10.0.0.5:50000", "192.0.2.9:80", 8, 1000)),
            ("exempt user", socket("10.0.0.5:50000", "10.0.0.1:80", 8, 77)),
            ("a family that is not judged", socket("[fd00::5]:50000", "[fd00::1]:80", 8, 1000)),
        ] {
            assert!(!keeps(other), "{name}");
        }
        // What the proxy accepted is the other end, whatever address it was accepted on; nobody else's is.
        let app = socket("10.0.0.5:50000", "10.0.0.1:80", 8, 1000);
        for accepted in ["127.0.0.1:4140", "10.0.0.1:80"] {
            let of = |cgroup| vec![app.clone(), socket(accepted, "10.0.0.5:50000", cgroup, 2102)];
            assert_eq!(past_the_proxy(of(9), &listening, &EPHEMERAL, &rules), []);
            assert_eq!(past_the_proxy(of(8), &listening, &EPHEMERAL, &rules).first(), Some(&app));
        }
        // Kernels that do not tell the cgroup, and a proxy whose container is not known: its user has to do.
        let by_user = Rules { proxy_cgroup: 0, ..rules.clone() };
        let of = |uid| vec![socket("10.0.0.5:50000", "10.0.0.1:80", 9, uid)];
        assert!(past_the_proxy(of(2102), &listening, &EPHEMERAL, &by_user).is_empty());
        assert_eq!(past_the_proxy(of(1000), &listening, &EPHEMERAL, &by_user).len(), 1);
    }
}
