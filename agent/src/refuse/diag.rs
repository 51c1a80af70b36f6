//! Messages of sock_diag(7) for TCP sockets. Pure.
//!
//! Layouts are those of `struct inet_diag_req_v2`, `inet_diag_sockid` and `inet_diag_msg`
//! (<https://github.com/torvalds/linux/blob/v6.12/include/uapi/linux/inet_diag.h#L14>).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::sys::netlink::attributes;

/// `SOCK_DIAG_BY_FAMILY` and `SOCK_DESTROY` (`linux/sock_diag.h`).
pub const LIST: u16 = 20;
/// See [`LIST`].
pub const DESTROY: u16 = 21;

/// `INET_DIAG_CGROUP_ID`, since 5.8; extensions are asked for by the bit below, those above 8 come unasked.
const CGROUP_ID: u16 = 21;
const ESTABLISHED: u8 = 1;
const IPPROTO_TCP: u8 = 6;
/// `struct inet_diag_msg` up to its attributes.
const MESSAGE: usize = 72;

/// A TCP socket as the kernel tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Socket {
    /// 2 (`AF_INET`) or 10 (`AF_INET6`).
    pub family: u8,
    /// Its own end.
    pub local: SocketAddr,
    /// The other end.
    pub remote: SocketAddr,
    /// The device it is bound to, 0 for none.
    pub device: u32,
    /// Its cookie.
    pub cookie: u64,
    /// Its owner, in the network namespace's user namespace.
    pub uid: u32,
    /// Its cgroup's id; `None` from kernels that do not tell.
    pub cgroup: Option<u64>,
}

/// The request to list all established sockets of a family, or those that listen.
pub fn list(family: u8, state: State) -> Vec<u8> {
    let mut body = vec![family, IPPROTO_TCP, 0, 0];
    body.extend((1u32 << state as u8).to_ne_bytes());
    // No address is set: all of them; the cookie says "any".
    body.resize(body.len() + 40, 0);
    body.extend([0xff; 8]);
    body
}

/// A state that is listed (`TCP_ESTABLISHED`, `TCP_LISTEN` in `net/tcp_states.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Data may flow.
    Established = ESTABLISHED,
    /// Waits for connections.
    Listen = 10,
}

/// The request to abort one socket: found by its ends, and only if its cookie is this one.
pub fn destroy(local: SocketAddr, remote: SocketAddr, device: u32, cookie: u64) -> Vec<u8> {
    let family = if local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut body = vec![u8::try_from(family).unwrap_or_default(), IPPROTO_TCP, 0, 0];
    // In any state.
    body.extend(u32::MAX.to_ne_bytes());
    body.extend(local.port().to_be_bytes());
    body.extend(remote.port().to_be_bytes());
    body.extend(octets(local.ip()));
    body.extend(octets(remote.ip()));
    body.extend(device.to_ne_bytes());
    // The lower half first, whatever the byte order.
    let [low, high] =
        [cookie & 0xffff_ffff, cookie >> 32].map(|half| u32::try_from(half).unwrap_or_default());
    body.extend(low.to_ne_bytes());
    body.extend(high.to_ne_bytes());
    body
}

fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => {
            let mut octets = [0; 16];
            octets[..4].copy_from_slice(&ip.octets());
            octets
        }
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// Reads an item of a list; `None` if it is not one.
pub fn socket(body: &[u8]) -> Option<Socket> {
    let family = *body.first()?;
    let ip = |at: usize| -> Option<IpAddr> {
        let octets: [u8; 16] = *body.get(at..)?.first_chunk()?;
        let [a, b, c, d, ..] = octets;
        Some(if i32::from(family) == libc::AF_INET {
            Ipv4Addr::new(a, b, c, d).into()
        } else {
            // A socket of IPv6 that speaks IPv4.
            Ipv6Addr::from(octets).to_canonical()
        })
    };
    let port = |at: usize| Some(u16::from_be_bytes(*body.get(at..)?.first_chunk()?));
    let word = |at: usize| Some(u32::from_ne_bytes(*body.get(at..)?.first_chunk()?));
    let cgroup = attributes(body.get(MESSAGE..)?)
        .find(|(kind, _)| *kind == CGROUP_ID)
        .and_then(|(_, value)| Some(u64::from_ne_bytes(*value.first_chunk()?)));
    Some(Socket {
        family,
        local: SocketAddr::new(ip(8)?, port(4)?),
        remote: SocketAddr::new(ip(24)?, port(6)?),
        device: word(40)?,
        cookie: u64::from(word(44)?) | u64::from(word(48)?) << 32,
        uid: word(64)?,
        cgroup,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::netlink::attribute;

    #[test]
    fn what_is_destroyed_is_named_by_ends_and_cookie() {
        let body = destroy(
            "10.0.0.5:4000".parse().unwrap(),
            "192.0.2.1:80".parse().unwrap(),
            7,
            0x0102_0304_0506_0708,
        );
        assert_eq!(body.len(), 56);
        assert_eq!(body[..8], [2, 6, 0, 0, 255, 255, 255, 255]);
        assert_eq!(body[8..16], [0x0f, 0xa0, 0, 80, 10, 0, 0, 5]);
        assert_eq!(body[28..32], [192, 0, 2, 1]);
        assert_eq!(body[44..48], 7u32.to_ne_bytes());
        assert_eq!(body[48..52], 0x0506_0708u32.to_ne_bytes());
        assert_eq!(body[52..], 0x0102_0304u32.to_ne_bytes());
        assert_eq!(list(10, State::Listen).len(), 56);
    }

    #[test]
    fn items_of_a_list() {
        let mut body = vec![10, 1, 0, 0];
        body.extend([0x0f, 0xa0, 0, 80]);
        body.extend(Ipv4Addr::new(10, 0, 0, 5).to_ipv6_mapped().octets());
        body.extend(Ipv4Addr::new(192, 0, 2, 1).to_ipv6_mapped().octets());
        for word in [3u32, 8, 9, 0, 0, 0, 1000, 55] {
            body.extend(word.to_ne_bytes());
        }
        assert_eq!(body.len(), MESSAGE);
        let without = socket(&body).unwrap();
        assert_eq!(without.cgroup, None);
        body.extend(attribute(CGROUP_ID, &77u64.to_ne_bytes()));
        let expected = Socket {
            family: 10,
            local: "10.0.0.5:4000".parse().unwrap(),
            remote: "192.0.2.1:80".parse().unwrap(),
            device: 3,
            cookie: 9 << 32 | 8,
            uid: 1000,
            cgroup: Some(77),
        };
        assert_eq!(socket(&body), Some(expected));
        assert_eq!(socket(&body[..MESSAGE - 1]), None);
    }
}
