//! One question, in the network namespace that the calling thread is in.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use nobypass_common::abi::ProbeRecord;
use nobypass_common::headers::{Address, address, address4};
use nobypass_common::ids::LOOPBACK_IFINDEX;
use rustix::io::Errno;
use rustix::net::sockopt::socket_cookie;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, getsockname, socket_with};

use super::conntrack;
use super::failure::Failure;
use super::{Answer, routes};
use crate::bpf::probe::Records;
use crate::sys::netns::as_owner;

/// Other routes that are tried where the destination has none.
const ROUTES: usize = 8;

/// Asks whether a new connection to `to` would be redirected, by a socket of user and group `id`.
pub fn ask(records: &mut Records, to: SocketAddr, id: u32) -> Answer {
    let answer = ask_once(records, to, id);
    if answer != Answer::NoRoute {
        return answer;
    }
    // No default route, but perhaps others.
    let (file, list): (_, fn(&str) -> Vec<IpAddr>) = if to.is_ipv4() {
        ("/proc/thread-self/net/route", routes::v4)
    } else {
        ("/proc/thread-self/net/ipv6_route", routes::v6)
    };
    let table = fs::read_to_string(file).unwrap_or_default();
    let others = list(&table).into_iter().take(ROUTES);
    let mut answers = others.map(|ip| ask_once(records, SocketAddr::new(ip, to.port()), id));
    let is_one = |answer: &Answer| !matches!(answer, Answer::NoRoute | Answer::Failed { .. });
    answers.find(is_one).unwrap_or(Answer::NoRoute)
}

fn ask_once(records: &mut Records, to: SocketAddr, id: u32) -> Answer {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = match as_owner(id, id, || socket_with(family, SocketType::STREAM, flags, None)) {
        Ok(Ok(socket)) => socket,
        Ok(Err(Errno::AFNOSUPPORT)) => return Answer::NoRoute,
        Ok(Err(_)) | Err(_) => return Failure::Socket.into(),
    };
    let Ok(cookie) = socket_cookie(&socket) else { return Failure::Socket.into() };
    if records.begin(cookie).is_err() {
        return Failure::Socket.into();
    }
    // The SYN has come to the program, or was stopped before, when this returns: nothing queues it in between.
    let connected = connect(&socket, &to);
    let record = records.end(cookie);
    forget(&socket, to);
    judge(to, connected, record, || {
        routes::has_address6(&fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap_or_default())
    })
}

/// Closes the socket, which sends nothing and repeats nothing, and removes its trace.
fn forget(socket: &OwnedFd, to: SocketAddr) {
    let from = getsockname(socket).ok().and_then(|from| SocketAddr::try_from(from).ok());
    if let Some(from) = from
        && let Err(error) = conntrack::forget(from, to)
    {
        tracing::debug!(%error, "cannot remove a probe's connection tracking entry");
    }
}

/// What a SYN's way means, given where the socket wanted to go.
///
/// `has_address6`: whether the network has an IPv6 address that leads out.
fn judge(
    to: SocketAddr,
    connected: Result<(), Errno>,
    record: Option<ProbeRecord>,
    has_address6: impl FnOnce() -> bool,
) -> Answer {
    let record = record.unwrap_or_default();
    if record.seen == 0 {
        return match connected {
            Err(Errno::NETUNREACH | Errno::HOSTUNREACH) => Answer::NoRoute,
            // IPv6 is switched off where no device but lo has an address; otherwise the ports are used up.
            Err(Errno::ADDRNOTAVAIL) if to.is_ipv6() && !has_address6() => Answer::NoRoute,
            Err(Errno::ADDRNOTAVAIL) => Failure::NoSource.into(),
            Ok(()) | Err(Errno::INPROGRESS) => Failure::NotSeen.into(),
            Err(_) => Failure::Refused.into(),
        };
    }
    let ProbeRecord { ifindex, mark, dport, daddr, .. } = record;
    if ifindex != LOOPBACK_IFINDEX {
        return Answer::NotRedirected { ifindex };
    }
    let port = u16::try_from(dport).unwrap_or_default();
    if daddr != address_of(to.ip()) || port != to.port() {
        return Answer::Redirected { port };
    }
    // A local route that only marked packets take: TPROXY, whose port is chosen behind lo.
    if mark != 0 {
        return Answer::Redirected { port: 0 };
    }
    Failure::LocalRoute.into()
}

fn address_of(ip: IpAddr) -> Address {
    match ip {
        IpAddr::V4(ip) => address4(ip.octets()),
        IpAddr::V6(ip) => address(ip.octets()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_syns_way_means() {
        let to: SocketAddr = "192.0.2.1:80".parse().unwrap();
        let seen = |ifindex, mark, daddr: [u8; 4], dport| {
            Some(ProbeRecord { seen: 1, ifindex, mark, dport, daddr: address4(daddr) })
        };
        let going = Err(Errno::INPROGRESS);
        for (connected, record, expected) in [
            (going, seen(2, 0, [192, 0, 2, 1], 80), Answer::NotRedirected { ifindex: 2 }),
            (going, seen(1, 0, [127, 0, 0, 1], 4140), Answer::Redirected { port: 4140 }),
            (going, seen(1, 0, [192, 0, 2, 1], 15001), Answer::Redirected { port: 15001 }),
            (going, seen(1, 1, [192, 0, 2, 1], 80), Answer::Redirected { port: 0 }),
            (going, seen(1, 0, [192, 0, 2, 1], 80), Failure::LocalRoute.into()),
            // To another host, and be it the mesh's: it leaves the pod.
            (going, seen(2, 0, [10, 0, 0, 1], 4140), Answer::NotRedirected { ifindex: 2 }),
            (going, Some(ProbeRecord::default()), Failure::NotSeen.into()),
            (going, None, Failure::NotSeen.into()),
            (Err(Errno::NETUNREACH), None, Answer::NoRoute),
            (Err(Errno::PERM), Some(ProbeRecord::default()), Failure::Refused.into()),
            (Err(Errno::ADDRNOTAVAIL), None, Failure::NoSource.into()),
        ] {
            assert_eq!(judge(to, connected, record, || true), expected, "{connected:?} {record:?}");
        }
        let to6 = "[2001:db8::1]:80".parse().unwrap();
        assert_eq!(judge(to6, Err(Errno::ADDRNOTAVAIL), None, || false), Answer::NoRoute);
        assert_eq!(judge(to6, Err(Errno::ADDRNOTAVAIL), None, || true), Failure::NoSource.into());
    }
}
