//! TCP SYNs that no TCP socket has sent.

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::options::Options;
use crate::report::{At, Failed, Try, timed_out};
use crate::sys::{self, Address};

const ETH_P_IP: u16 = 0x0800;
const ETH_P_ARP: u16 = 0x0806;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

/// A SYN by a raw socket; the answer is `synack` or `rst`.
pub fn syn(target: SocketAddr, o: &Options) -> Result<String, String> {
    let limit = o.timeout(1000)?;
    let mut seen = Try::new("rawsyn");
    let result = (|| {
        let from = own_address(target.ip(), None).at("address")?.0;
        let segment = tcp_syn(from, target);
        let fd = sys::socket(sys::family(target.ip()), libc::SOCK_RAW, libc::IPPROTO_TCP).at("socket")?;
        // The port of a raw IPv6 address must be zero (raw(7)).
        let to = Address::from(SocketAddr::new(target.ip(), 0));
        match (o.flag("hdrincl"), from, target.ip()) {
            (true, IpAddr::V4(a), IpAddr::V4(b)) => {
                sys::set(&fd, libc::IPPROTO_IP, libc::IP_HDRINCL, 1_i32).at("socket")?;
                sys::send_to(&fd, &ipv4_packet(a, b, &segment), 0, &to).at("send")?;
            }
            _ => drop(sys::send_to(&fd, &segment, 0, &to).at("send")?),
        }
        await_answer(&mut seen, &fd, target, if target.is_ipv4() { None } else { Some(0) }, limit)
    })();
    Ok(seen.report(&result))
}

/// A SYN by a packet socket, below everything that netfilter and cgroup programs see.
pub fn packet(target: SocketAddr, o: &Options) -> Result<String, String> {
    let SocketAddr::V4(v4) = target else { return Err("afpacket speaks IPv4 only".to_owned()) };
    let limit = o.timeout(1000)?;
    let device = o.text("dev").unwrap_or("eth0");
    let via: Ipv4Addr = o.number("via")?.unwrap_or_else(|| *v4.ip());
    let mut seen = Try::new("afpacket");
    let result = (|| {
        let (from, link) = own_address(target.ip(), Some(device)).at("address")?;
        let IpAddr::V4(from4) = from else { return Err(io::ErrorKind::NotFound.into()).at("address") };
        let peer = resolve(link, from4, via, limit).at("resolve")?;
        let fd = sys::socket(libc::AF_PACKET, libc::SOCK_DGRAM, 0).at("socket")?;
        let to = Address::link(link.index, ETH_P_IP, peer);
        sys::bind(&fd, &to).at("socket")?;
        let packet = ipv4_packet(from4, *v4.ip(), &tcp_syn(from, target));
        sys::send_to(&fd, &packet, 0, &to).at("send")?;
        await_answer(&mut seen, &fd, target, None, limit)
    })();
    Ok(seen.report(&result))
}

/// Source port of the SYN: outside the ephemeral range, different for processes that run together.
fn source_port() -> u16 {
    let [a, b, ..] = std::process::id().to_le_bytes();
    20_000 + u16::from_le_bytes([a, b]) % 10_000
}

fn tcp_syn(from: IpAddr, to: SocketAddr) -> [u8; 20] {
    let mut tcp = [0_u8; 20];
    tcp[0..2].copy_from_slice(&source_port().to_be_bytes());
    tcp[2..4].copy_from_slice(&to.port().to_be_bytes());
    tcp[4..8].copy_from_slice(&std::process::id().to_be_bytes());
    tcp[12] = 5 << 4;
    tcp[13] = SYN;
    tcp[14..16].copy_from_slice(&1024_u16.to_be_bytes());
    let pseudo = [octets(from), octets(to.ip())].concat();
    let head = sum(&pseudo) + u32::from(6_u16) + 20;
    let check = checksum(&tcp, head);
    tcp[16..18].copy_from_slice(&check.to_be_bytes());
    tcp
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn ipv4_packet(from: Ipv4Addr, to: Ipv4Addr, segment: &[u8; 20]) -> [u8; 40] {
    let mut ip = [0_u8; 40];
    ip[0] = 0x45;
    ip[3] = 40;
    ip[8] = 64;
    ip[9] = 6;
    ip[12..16].copy_from_slice(&from.octets());
    ip[16..20].copy_from_slice(&to.octets());
    let check = checksum(&ip[..20], 0);
    ip[10..12].copy_from_slice(&check.to_be_bytes());
    ip[20..].copy_from_slice(segment);
    ip
}

fn sum(data: &[u8]) -> u32 {
    data.chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)])))
        .sum()
}

/// The Internet checksum (RFC 1071) of `data` on top of the unfolded sum `start`.
pub fn checksum(data: &[u8], start: u32) -> u16 {
    let mut total = start + sum(data);
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    !u16::try_from(total).unwrap_or(0)
}

/// Reads packets until one is the answer. `header`: bytes before TCP, `None` for an IPv4 header that says it itself.
fn await_answer(
    seen: &mut Try,
    fd: &OwnedFd,
    target: SocketAddr,
    header: Option<usize>,
    limit: Duration,
) -> Result<(), Failed> {
    sys::set_timeout(fd, libc::SO_RCVTIMEO, limit).at("answer")?;
    let start = Instant::now();
    let mut buffer = [0_u8; 2048];
    while start.elapsed() < limit {
        let got = match sys::receive(fd, &mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            other => other.at("answer")?,
        };
        let skip = header.unwrap_or_else(|| usize::from(buffer[0] & 0x0f) * 4);
        let Some(&[a, b, c, d, .., flags]) = buffer.get(skip..skip + 14).filter(|_| got >= skip + 14) else {
            continue;
        };
        let ports = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        if ports != (target.port(), source_port()) {
            continue;
        }
        let answer = if flags & RST != 0 {
            "rst"
        } else if flags & (SYN | ACK) == SYN | ACK {
            "synack"
        } else {
            continue;
        };
        seen.answer = Some(answer.to_owned());
        seen.bytes = got;
        return Ok(());
    }
    Err(timed_out()).at("answer")
}

#[derive(Clone, Copy)]
struct Link {
    index: i32,
    mac: [u8; 6],
}

/// The first global address of `like`'s family that is not on lo (or is on `device`), and its device.
fn own_address(like: IpAddr, device: Option<&str>) -> io::Result<(IpAddr, Link)> {
    let (mut found, mut links) = (None, Vec::new());
    sys::each_address(|name, entry| match entry {
        sys::Entry::Ip(ip) if ip.is_ipv4() == like.is_ipv4() && is_global(ip) => {
            let fits = device.map_or(name != c"lo", |device| name.to_bytes() == device.as_bytes());
            if fits && found.is_none() {
                found = Some((name.to_owned(), ip));
            }
        }
        sys::Entry::Ip(_) => {}
        sys::Entry::Link(index, mac) => links.push((name.to_owned(), Link { index, mac })),
    })?;
    let missing = || io::Error::from_raw_os_error(libc::EADDRNOTAVAIL);
    let (name, ip) = found.ok_or_else(missing)?;
    let link = links.into_iter().find(|(other, _)| CStr::eq(other, &name)).ok_or_else(missing)?.1;
    Ok((ip, link))
}

fn is_global(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => !v4.is_loopback(),
        IpAddr::V6(v6) => !v6.is_loopback() && !Ipv6Addr::is_unicast_link_local(&v6),
    }
}

/// ARP (RFC 826) by a packet socket: asking the kernel for the address would send a packet of an ordinary socket.
fn resolve(link: Link, from: Ipv4Addr, to: Ipv4Addr, limit: Duration) -> io::Result<[u8; 6]> {
    let fd = sys::socket(libc::AF_PACKET, libc::SOCK_DGRAM, i32::from(ETH_P_ARP.to_be()))?;
    sys::bind(&fd, &Address::link(link.index, ETH_P_ARP, [0; 6]))?;
    sys::set_timeout(&fd, libc::SO_RCVTIMEO, limit)?;
    let mut request = vec![0, 1, 8, 0, 6, 4, 0, 1];
    request.extend(link.mac);
    request.extend(from.octets());
    request.extend([0; 6]);
    request.extend(to.octets());
    sys::send_to(&fd, &request, 0, &Address::link(link.index, ETH_P_ARP, [0xff; 6]))?;
    let start = Instant::now();
    let mut reply = [0_u8; 64];
    while start.elapsed() < limit {
        let got = match sys::receive(&fd, &mut reply) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            other => other?,
        };
        if got >= 28 && reply[7] == 2 && reply[14..18] == to.octets() {
            let mut mac = [0; 6];
            mac.copy_from_slice(&reply[8..14]);
            return Ok(mac);
        }
    }
    Err(timed_out())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_of_the_rfc() {
        // RFC 1071, section 3: the sum of these bytes is ddf2.
        assert_eq!(checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7], 0), !0xddf2);
    }

    #[test]
    fn a_header_with_its_checksum_sums_to_zero() {
        let packet = ipv4_packet([10, 66, 0, 2].into(), [10, 66, 0, 1].into(), &[0; 20]);
        assert_eq!(checksum(&packet[..20], 0), 0);
    }
}
