//! IPv4, IPv6, TCP and UDP headers: pure functions on fixed-size arrays.
//!
//! The programs read the common case (40 bytes of IPv4 without options and TCP, or 60 of IPv6) by direct packet
//! access and everything else through `bpf_skb_load_bytes`; both end here. Arrays of constant size keep the
//! verifier free of bounds to prove and the compiler free of panics to insert.

/// IP protocol numbers (IANA).
pub const IPPROTO_ICMP: u8 = 1;
/// TCP.
pub const IPPROTO_TCP: u8 = 6;
/// UDP.
pub const IPPROTO_UDP: u8 = 17;
/// ICMPv6.
pub const IPPROTO_ICMPV6: u8 = 58;

/// IPv6 extension headers that are skipped to find the transport header (RFC 8200, RFC 7045).
const EXT_HOP_BY_HOP: u8 = 0;
const EXT_ROUTING: u8 = 43;
const EXT_FRAGMENT: u8 = 44;
const EXT_AUTH: u8 = 51;
const EXT_DESTINATION: u8 = 60;
const EXT_MOBILITY: u8 = 135;
const EXT_HIP: u8 = 139;
const EXT_SHIM6: u8 = 140;

/// Extension headers that are followed; a packet with more is [`Transport::Opaque`].
pub const MAX_EXTENSIONS: usize = 6;

/// TCP flags in byte 13 of the header.
const FLAG_SYN: u8 = 0x02;
const FLAG_ACK: u8 = 0x10;

/// Addresses of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// Network order; IPv4 in the first four bytes.
    pub source: [u8; 16],
    /// See `source`.
    pub destination: [u8; 16],
}

/// Where the transport header is, or why there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The header of this protocol begins at this offset.
    At {
        /// IP protocol number.
        protocol: u8,
        /// Bytes from the start of the IP header.
        offset: u32,
    },
    /// A later fragment: no transport header in this packet.
    Fragment {
        /// IP protocol number.
        protocol: u8,
    },
    /// Not an IP header.
    Malformed,
}

/// What the transport header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP with SYN and without ACK: the first packet of a connection.
    Syn {
        /// Source port, host order.
        sport: u16,
        /// Destination port, host order.
        dport: u16,
    },
    /// Any other TCP packet.
    Tcp,
    /// A TCP packet too short to show its flags: only a raw socket sends these.
    TcpCut,
    /// UDP.
    Udp {
        /// Destination port, host order.
        dport: u16,
    },
    /// ICMP or ICMPv6.
    Icmp,
    /// Anything else: other protocols, later fragments, headers that cannot be followed.
    Opaque,
}

/// Reads the fixed part of an IPv4 header (RFC 791).
#[inline(always)]
pub const fn ipv4(h: &[u8; 20]) -> Next {
    let header = (h[0] & 0x0f) as u32 * 4;
    if h[0] >> 4 != 4 || header < 20 {
        return Next::Malformed;
    }
    let protocol = h[9];
    if h[6] & 0x1f != 0 || h[7] != 0 {
        return Next::Fragment { protocol };
    }
    Next::At { protocol, offset: header }
}

/// Addresses of an IPv4 header.
#[inline(always)]
pub const fn ipv4_addresses(h: &[u8; 20]) -> Addresses {
    let mut a = Addresses { source: [0; 16], destination: [0; 16] };
    a.source[0] = h[12];
    a.source[1] = h[13];
    a.source[2] = h[14];
    a.source[3] = h[15];
    a.destination[0] = h[16];
    a.destination[1] = h[17];
    a.destination[2] = h[18];
    a.destination[3] = h[19];
    a
}

/// Reads the fixed IPv6 header (RFC 8200).
#[inline(always)]
pub const fn ipv6(h: &[u8; 40]) -> Next {
    if h[0] >> 4 != 6 {
        return Next::Malformed;
    }
    Next::At { protocol: h[6], offset: 40 }
}

/// Addresses of an IPv6 header.
#[inline(always)]
pub fn ipv6_addresses(h: &[u8; 40]) -> Addresses {
    let mut a = Addresses { source: [0; 16], destination: [0; 16] };
    let mut at = 0;
    while at < 16 {
        a.source[at] = h[8 + at];
        a.destination[at] = h[24 + at];
        at += 1;
    }
    a
}

/// Whether this protocol number is an extension header that [`extension`] can follow.
#[inline(always)]
pub const fn is_extension(protocol: u8) -> bool {
    matches!(
        protocol,
        EXT_HOP_BY_HOP
            | EXT_ROUTING
            | EXT_FRAGMENT
            | EXT_AUTH
            | EXT_DESTINATION
            | EXT_MOBILITY
            | EXT_HIP
            | EXT_SHIM6
    )
}

/// Follows the extension header `protocol` whose first four bytes are `h` and that begins at `offset`.
#[inline(always)]
pub const fn extension(protocol: u8, offset: u32, h: &[u8; 4]) -> Next {
    let next = h[0];
    match protocol {
        EXT_FRAGMENT => {
            // Offset in the upper 13 bits; the length field is reserved, the header always 8 bytes.
            if h[2] != 0 || h[3] & 0xf8 != 0 {
                return Next::Fragment { protocol: next };
            }
            Next::At { protocol: next, offset: offset + 8 }
        }
        // RFC 4302: in units of four bytes, minus 2.
        EXT_AUTH => Next::At { protocol: next, offset: offset + (h[1] as u32 + 2) * 4 },
        _ => Next::At { protocol: next, offset: offset + (h[1] as u32 + 1) * 8 },
    }
}

/// Reads the first 14 bytes of a TCP header (RFC 9293).
#[inline(always)]
pub const fn tcp(h: &[u8; 14]) -> Transport {
    if h[13] & (FLAG_SYN | FLAG_ACK) == FLAG_SYN {
        Transport::Syn { sport: u16::from_be_bytes([h[0], h[1]]), dport: u16::from_be_bytes([h[2], h[3]]) }
    } else {
        Transport::Tcp
    }
}

/// Reads the ports of a UDP header.
#[inline(always)]
pub const fn udp(h: &[u8; 4]) -> Transport {
    Transport::Udp { dport: u16::from_be_bytes([h[2], h[3]]) }
}

/// Reads a whole packet, given a way to copy `N` bytes at an offset out of it.
///
/// The programs call this for what their fast path does not cover, host tests for everything.
#[inline(always)]
pub fn parse<L: Load>(load: &mut L) -> Option<(u8, Addresses, Transport)> {
    let first: [u8; 20] = load.load(0)?;
    let (family, addresses, mut next) = if first[0] >> 4 == 4 {
        (4, ipv4_addresses(&first), ipv4(&first))
    } else {
        let header: [u8; 40] = load.load(0)?;
        (6, ipv6_addresses(&header), ipv6(&header))
    };
    if family == 6 {
        let mut turn = 0;
        while turn < MAX_EXTENSIONS {
            match next {
                Next::At { protocol, offset } if is_extension(protocol) => {
                    let Some(h) = load.load::<4>(offset) else { return Some((6, addresses, Transport::Opaque)) };
                    next = extension(protocol, offset, &h);
                }
                _ => break,
            }
            turn += 1;
        }
    }
    let transport = match next {
        Next::At { protocol: IPPROTO_TCP, offset } => match load.load::<14>(offset) {
            Some(h) => tcp(&h),
            None => Transport::TcpCut,
        },
        Next::At { protocol: IPPROTO_UDP, offset } => match load.load::<4>(offset) {
            Some(h) => udp(&h),
            None => Transport::Opaque,
        },
        Next::At { protocol: IPPROTO_ICMP | IPPROTO_ICMPV6, .. }
        | Next::Fragment { protocol: IPPROTO_ICMP | IPPROTO_ICMPV6 } => Transport::Icmp,
        Next::At { .. } | Next::Fragment { .. } => Transport::Opaque,
        Next::Malformed => return None,
    };
    Some((family, addresses, transport))
}

/// Copies bytes out of a packet.
pub trait Load {
    /// `N` bytes from `offset`, `None` if the packet is shorter.
    fn load<const N: usize>(&mut self, offset: u32) -> Option<[u8; N]>;
}

impl Load for &[u8] {
    fn load<const N: usize>(&mut self, offset: u32) -> Option<[u8; N]> {
        let from = usize::try_from(offset).ok()?;
        self.get(from..from.checked_add(N)?)?.try_into().ok()
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::vec;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    fn v4(protocol: u8, options: usize, fragment: u16, payload: &[u8]) -> Vec<u8> {
        let mut p = vec![0u8; 20 + options];
        p[0] = 0x40 | u8::try_from((20 + options) / 4).unwrap();
        p[6..8].copy_from_slice(&fragment.to_be_bytes());
        p[9] = protocol;
        p[12..16].copy_from_slice(&[10, 0, 0, 1]);
        p[16..20].copy_from_slice(&[192, 0, 2, 1]);
        p.extend_from_slice(payload);
        p
    }

    fn v6(first: u8, rest: &[u8]) -> Vec<u8> {
        let mut p = vec![0u8; 40];
        p[0] = 0x60;
        p[6] = first;
        p[23] = 1;
        p[39] = 2;
        p.extend_from_slice(rest);
        p
    }

    fn tcp_header(flags: u8) -> Vec<u8> {
        let mut h = vec![0u8; 20];
        h[0..4].copy_from_slice(&[0x9c, 0x40, 0x1f, 0x90]);
        h[12] = 0x50;
        h[13] = flags;
        h
    }

    fn transport(packet: &[u8]) -> Option<Transport> {
        parse(&mut &*packet).map(|(_, _, transport)| transport)
    }

    const SYN: Transport = Transport::Syn { sport: 40000, dport: 8080 };

    #[test]
    fn transports() {
        let syn = tcp_header(0x02);
        let udp = [0x9c, 0x40, 0, 53, 0, 8, 0, 0];
        let hop = |next: u8| [next, 0, 0, 0, 0, 0, 0, 0];
        let mut chain = hop(EXT_DESTINATION).to_vec();
        chain.extend_from_slice(&[EXT_FRAGMENT, 0, 0, 0, 0, 0, 0, 0]);
        chain.extend_from_slice(&[6, 0, 0, 1, 0, 0, 0, 9]); // first fragment, more to come
        chain.extend_from_slice(&syn);
        let mut auth = [6, 4, 0, 0].to_vec();
        auth.extend_from_slice(&[0; 20]);
        auth.extend_from_slice(&syn);
        let mut endless = Vec::new();
        for _ in 0..=MAX_EXTENSIONS {
            endless.extend_from_slice(&hop(EXT_DESTINATION));
        }
        let table: &[(&str, Vec<u8>, Option<Transport>)] = &[
            ("SYN", v4(6, 0, 0, &syn), Some(SYN)),
            ("SYN with ECN bits", v4(6, 0, 0, &tcp_header(0xc2)), Some(SYN)),
            ("SYN with FIN, RST, PSH", v4(6, 0, 0, &tcp_header(0x0f)), Some(SYN)),
            ("SYN-ACK", v4(6, 0, 0, &tcp_header(0x12)), Some(Transport::Tcp)),
            ("ACK", v4(6, 0, 0, &tcp_header(0x10)), Some(Transport::Tcp)),
            ("RST", v4(6, 0, 0, &tcp_header(0x04)), Some(Transport::Tcp)),
            ("no flags", v4(6, 0, 0, &tcp_header(0)), Some(Transport::Tcp)),
            ("IP options", v4(6, 40, 0, &syn), Some(SYN)),
            ("don't fragment", v4(6, 0, 0x4000, &syn), Some(SYN)),
            ("first fragment", v4(6, 0, 0x2000, &syn), Some(SYN)),
            ("first fragment, 8 bytes of TCP", v4(6, 0, 0x2000, &syn[..8]), Some(Transport::TcpCut)),
            ("later fragment", v4(6, 0, 0x0001, &syn), Some(Transport::Opaque)),
            ("later ICMP fragment", v4(1, 0, 0x00b9, &[]), Some(Transport::Icmp)),
            ("UDP", v4(17, 0, 0, &udp), Some(Transport::Udp { dport: 53 })),
            ("UDP cut", v4(17, 0, 0, &udp[..2]), Some(Transport::Opaque)),
            ("ICMP", v4(1, 0, 0, &[8, 0]), Some(Transport::Icmp)),
            ("SCTP", v4(132, 0, 0, &syn), Some(Transport::Opaque)),
            ("IP in IP", v4(4, 0, 0, &v4(6, 0, 0, &syn)), Some(Transport::Opaque)),
            ("header length below 20", { let mut p = v4(6, 0, 0, &syn); p[0] = 0x44; p }, None),
            ("short", vec![0x45; 19], None),
            ("empty", vec![], None),
            ("version 5", { let mut p = v6(6, &syn); p[0] = 0x50; p }, None),
            ("v6 SYN", v6(6, &syn), Some(SYN)),
            ("v6 cut", v6(6, &syn[..13]), Some(Transport::TcpCut)),
            ("v6 hop-by-hop, destination, first fragment", v6(EXT_HOP_BY_HOP, &chain), Some(SYN)),
            ("v6 authentication header", v6(EXT_AUTH, &auth), Some(SYN)),
            ("v6 later fragment", v6(EXT_FRAGMENT, &[6, 0, 0, 8, 0, 0, 0, 9]), Some(Transport::Opaque)),
            ("v6 neighbour solicitation", v6(58, &[135, 0]), Some(Transport::Icmp)),
            ("v6 MLD behind hop-by-hop", v6(EXT_HOP_BY_HOP, &[58, 0, 5, 2, 0, 0, 0, 0, 143, 0]), Some(Transport::Icmp)),
            ("v6 more extension headers than followed", v6(EXT_HOP_BY_HOP, &endless), Some(Transport::Opaque)),
            ("v6 extension header cut", v6(EXT_HOP_BY_HOP, &[6]), Some(Transport::Opaque)),
            ("v6 no next header", v6(59, &[]), Some(Transport::Opaque)),
        ];
        for (name, packet, expected) in table {
            assert_eq!(transport(packet), *expected, "{name}");
        }
    }

    #[test]
    fn addresses() {
        let (family, a, _) = parse(&mut &*v4(6, 0, 0, &tcp_header(2))).unwrap();
        assert_eq!((family, &a.source[..5], &a.destination[..5]), (4, &[10, 0, 0, 1, 0][..], &[192, 0, 2, 1, 0][..]));
        let (family, a, _) = parse(&mut &*v6(6, &tcp_header(2))).unwrap();
        assert_eq!((family, a.source[15], a.destination[15]), (6, 1, 2));
    }

    proptest! {
        #[test]
        fn any_bytes(packet in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = transport(&packet);
        }

        #[test]
        fn a_syn_is_found_behind_any_ipv4_options(words in 0usize..=10, ecn in 0u8..4, dont in any::<bool>()) {
            let p = v4(6, words * 4, if dont { 0x4000 } else { 0 }, &tcp_header(0x02 | (ecn << 6)));
            prop_assert_eq!(transport(&p), Some(SYN));
        }
    }
}
