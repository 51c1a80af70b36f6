//! Datagrams and pings.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use crate::options::Options;
use crate::report::{At, Failed, Line, Try, timed_out};
use crate::sys::{self, Address};

/// Sends datagrams and waits for each echo; `sent` and `echoed` say how far it came.
pub fn exchange(target: SocketAddr, o: &Options) -> Result<String, String> {
    let limit = o.timeout(1000)?;
    let (count, connected) = (o.nth(3)?.unwrap_or(1_u32), o.flag("connected"));
    let mut seen = Try::new("udp");
    let (mut sent, mut echoed) = (0, 0);
    let result = (|| {
        let fd = sys::socket(sys::family(target.ip()), libc::SOCK_DGRAM, 0).at("socket")?;
        sys::set_timeout(&fd, libc::SO_RCVTIMEO, limit).at("socket")?;
        let address = Address::from(target);
        if connected {
            sys::connect(&fd, &address).at("connect")?;
            seen.connected();
        }
        for n in 0..count {
            let data = n.to_string();
            let out = if connected {
                sys::send(&fd, data.as_bytes())
            } else {
                sys::send_to(&fd, data.as_bytes(), 0, &address)
            };
            out.at("send")?;
            sent += 1;
            seen.bytes += receive(&fd, &mut [0; 2048]).at("answer")?;
            echoed += 1;
        }
        Ok(())
    })();
    Ok(seen.line(&result).raw("sent", sent).raw("echoed", echoed).end())
}

/// Sends datagrams and waits for nothing; `refused` are those for which the system call failed.
pub fn datagrams(target: SocketAddr, o: &Options) -> Result<String, String> {
    let count: u64 = o.nth(3)?.ok_or("how many?")?;
    let fd = sys::socket(sys::family(target.ip()), libc::SOCK_DGRAM, 0).map_err(|error| error.to_string())?;
    let address = Address::from(target);
    let refused = (0..count).filter(|_| sys::send_to(&fd, b"datagram", 0, &address).is_err()).count();
    Ok(Line::new("datagrams").raw("tried", count).raw("refused", refused).end())
}

/// As recv, a timeout being ours.
fn receive(fd: &std::os::fd::OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    sys::receive(fd, buffer).map_err(|e| if e.kind() == io::ErrorKind::WouldBlock { timed_out() } else { e })
}

/// ICMP echo request by a raw socket.
pub fn ping(to: IpAddr, o: &Options) -> Result<String, String> {
    let limit = o.timeout(1000)?;
    let mut seen = Try::new("ping");
    let result = echo(&mut seen, to, limit);
    Ok(seen.report(&result))
}

fn echo(seen: &mut Try, to: IpAddr, limit: Duration) -> Result<(), Failed> {
    // Type numbers: RFC 792 and RFC 4443.
    let (protocol, request, reply) =
        if to.is_ipv4() { (libc::IPPROTO_ICMP, 8, 0) } else { (libc::IPPROTO_ICMPV6, 128, 129) };
    let fd = sys::socket(sys::family(to), libc::SOCK_RAW, protocol).at("socket")?;
    sys::set_timeout(&fd, libc::SO_RCVTIMEO, limit).at("socket")?;
    let [a, b, ..] = std::process::id().to_le_bytes();
    let mut packet = [request, 0, 0, 0, a, b, 0, 1];
    if to.is_ipv4() {
        // For ICMPv6 the kernel fills it in.
        let sum = crate::raw::checksum(&packet, 0);
        packet[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    sys::send_to(&fd, &packet, 0, &SocketAddr::new(to, 0).into()).at("send")?;
    let start = Instant::now();
    let mut buffer = [0_u8; 512];
    while start.elapsed() < limit {
        let got = receive(&fd, &mut buffer).at("answer")?;
        // Raw IPv4 sockets give the IP header, raw IPv6 sockets do not (raw(7), ipv6(7)).
        let skip = if to.is_ipv4() { usize::from(buffer[0] & 0x0f) * 4 } else { 0 };
        let icmp = buffer.get(skip..got).unwrap_or_default();
        if icmp.first() == Some(&reply) && icmp.get(4..6) == Some(&[a, b]) {
            seen.answer = Some("echo".to_owned());
            seen.bytes = got;
            return Ok(());
        }
    }
    Err(timed_out()).at("answer")
}
