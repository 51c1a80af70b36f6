//! IPv4, IPv6, TCP and UDP headers: pure functions on fixed-size arrays.
//!
//! The programs read the common case (40 bytes of IPv4 without options and TCP or UDP, or 60 of IPv6) by direct packet
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

/// An address, in network order as it lies in memory; IPv4 in the first word, zeros behind it.
pub type Address = [u32; 4];

/// The address of these bytes.
pub const fn address(bytes: [u8; 16]) -> Address {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = bytes;
    [
        u32::from_ne_bytes([a, b, c, d]),
        u32::from_ne_bytes([e, f, g, h]),
        u32::from_ne_bytes([i, j, k, l]),
        u32::from_ne_bytes([m, n, o, p]),
    ]
}

/// The address of an IPv4 address's bytes.
pub const fn address4(bytes: [u8; 4]) -> Address {
    [u32::from_ne_bytes(bytes), 0, 0, 0]
}

/// The bytes of an address.
pub const fn address_bytes(address: Address) -> [u8; 16] {
    let ([a, b, c, d], [e, f, g, h]) = (address[0].to_ne_bytes(), address[1].to_ne_bytes());
    let ([i, j, k, l], [m, n, o, p]) = (address[2].to_ne_bytes(), address[3].to_ne_bytes());
    [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
}

/// Addresses of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// Where it comes from.
    pub source: Address,
    /// Where it goes.
    pub destination: Address,
}

/// Where the transport header is.
///
/// A structure whose fields always have a value, here and in [`Transport`]: moving an enum around copies payload
/// that a variant does not have, and the verifier takes that for the read of an uninitialised register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    /// IP protocol number.
    pub protocol: u8,
    /// Whether the header is in this packet: it is not in a later fragment.
    pub here: bool,
    /// Bytes from the start of the IP header.
    pub offset: u32,
}

/// What a transport header is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// TCP with SYN and without ACK: the first packet of a connection.
    Syn,
    /// Any other TCP packet.
    Tcp,
    /// A TCP packet too short to show its flags: only a raw socket sends these.
    TcpCut,
    /// UDP.
    Udp,
    /// ICMP or ICMPv6.
    Icmp,
    /// Anything else: other protocols, later fragments, headers that cannot be followed.
    Opaque,
}

/// What the transport header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transport {
    /// Its kind.
    pub kind: Kind,
    /// Source port of a SYN or UDP packet, host order.
    pub sport: u16,
    /// Destination port of a SYN or UDP packet, host order.
    pub dport: u16,
}

impl Transport {
    /// A header whose ports do not matter.
    pub const fn of(kind: Kind) -> Self {
        Self { kind, sport: 0, dport: 0 }
    }
}

/// Byte `at` of a header.
#[inline(always)]
const fn byte<const N: usize>(h: &[u32; N], at: usize) -> u8 {
    h[at / 4].to_ne_bytes()[at % 4]
}

/// Reads the fixed part of an IPv4 header (RFC 791); `None` if it is none.
#[inline(always)]
pub const fn ipv4(h: &[u32; 5]) -> Option<Next> {
    let header = (byte(h, 0) & 0x0f) as u32 * 4;
    if byte(h, 0) >> 4 != 4 || header < 20 {
        return None;
    }
    let here = byte(h, 6) & 0x1f == 0 && byte(h, 7) == 0;
    Some(Next { protocol: byte(h, 9), here, offset: header })
}

/// Addresses of an IPv4 header.
#[inline(always)]
pub const fn ipv4_addresses(h: &[u32; 5]) -> Addresses {
    Addresses { source: [h[3], 0, 0, 0], destination: [h[4], 0, 0, 0] }
}

/// Reads the fixed IPv6 header (RFC 8200); `None` if it is none.
#[inline(always)]
pub const fn ipv6(h: &[u32; 10]) -> Option<Next> {
    if byte(h, 0) >> 4 != 6 {
        return None;
    }
    Some(Next { protocol: byte(h, 6), here: true, offset: 40 })
}

/// Addresses of an IPv6 header.
#[inline(always)]
pub const fn ipv6_addresses(h: &[u32; 10]) -> Addresses {
    Addresses { source: [h[2], h[3], h[4], h[5]], destination: [h[6], h[7], h[8], h[9]] }
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

/// Follows an extension header; `h` is its first eight bytes.
#[inline(always)]
pub const fn extension(next: Next, h: &[u32; 2]) -> Next {
    let (protocol, len) = (byte(h, 0), byte(h, 1) as u32);
    match next.protocol {
        // The length field is reserved; the fragment's offset is the upper 13 bits of the third and fourth byte.
        EXT_FRAGMENT => {
            Next { protocol, here: byte(h, 2) == 0 && byte(h, 3) & 0xf8 == 0, offset: next.offset + 8 }
        }
        // RFC 4302: in units of four bytes, minus 2.
        EXT_AUTH => Next { protocol, here: true, offset: next.offset + (len + 2) * 4 },
        _ => Next { protocol, here: true, offset: next.offset + (len + 1) * 8 },
    }
}

/// Reads the first 16 bytes of a TCP header (RFC 9293).
#[inline(always)]
pub const fn tcp(h: &[u32; 4]) -> Transport {
    if !is_syn(byte(h, 13)) {
        return Transport::of(Kind::Tcp);
    }
    ports(Kind::Syn, h[0])
}

/// Whether TCP flags say SYN and not ACK.
#[inline(always)]
pub const fn is_syn(flags: u8) -> bool {
    flags & (FLAG_SYN | FLAG_ACK) == FLAG_SYN
}

/// Reads the first word of a UDP header (RFC 768).
#[inline(always)]
pub const fn udp(word: u32) -> Transport {
    ports(Kind::Udp, word)
}

/// TCP and UDP begin with their ports.
#[inline(always)]
const fn ports(kind: Kind, word: u32) -> Transport {
    let [s0, s1, d0, d1] = word.to_ne_bytes();
    Transport { kind, sport: u16::from_be_bytes([s0, s1]), dport: u16::from_be_bytes([d0, d1]) }
}

/// Reads a whole packet, given a way to copy words at an offset out of it: family (4 or 6), addresses, transport.
///
/// The programs call this for what their fast path does not cover, host tests for everything.
#[inline(always)]
pub fn parse<L: Load>(load: &mut L) -> Option<(u8, Addresses, Transport)> {
    let first: [u32; 5] = load.load(0)?;
    let (family, addresses, mut next) = if byte(&first, 0) >> 4 == 4 {
        (4, ipv4_addresses(&first), ipv4(&first)?)
    } else {
        let header: [u32; 10] = load.load(0)?;
        (6, ipv6_addresses(&header), ipv6(&header)?)
    };
    let mut turn = 0;
    while family == 6 && turn < MAX_EXTENSIONS && next.here && is_extension(next.protocol) {
        let Some(h) = load.load::<2>(next.offset) else {
            return Some((6, addresses, Transport::of(Kind::Opaque)));
        };
        next = extension(next, &h);
        turn += 1;
    }
    let transport = match next.protocol {
        IPPROTO_ICMP | IPPROTO_ICMPV6 => Transport::of(Kind::Icmp),
        IPPROTO_TCP if next.here => match load.load::<4>(next.offset) {
            Some(h) => tcp(&h),
            None => Transport::of(Kind::TcpCut),
        },
        IPPROTO_UDP if next.here => match load.load::<2>(next.offset) {
            Some(h) => udp(h[0]),
            None => Transport::of(Kind::Opaque),
        },
        _ => Transport::of(Kind::Opaque),
    };
    Some((family, addresses, transport))
}

/// Copies words out of a packet.
pub trait Load {
    /// `N` words from `offset`, `None` if the packet is shorter.
    fn load<const N: usize>(&mut self, offset: u32) -> Option<[u32; N]>;
}

impl Load for &[u8] {
    fn load<const N: usize>(&mut self, offset: u32) -> Option<[u32; N]> {
        let from = usize::try_from(offset).ok()?;
        let bytes = self.get(from..from.checked_add(4 * N)?)?;
        let mut words = [0; N];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_ne_bytes(chunk.try_into().ok()?);
        }
        Some(words)
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

    const SYN: Transport = Transport { kind: Kind::Syn, sport: 40000, dport: 8080 };

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
            ("SYN-ACK", v4(6, 0, 0, &tcp_header(0x12)), Some(Transport::of(Kind::Tcp))),
            ("ACK", v4(6, 0, 0, &tcp_header(0x10)), Some(Transport::of(Kind::Tcp))),
            ("RST", v4(6, 0, 0, &tcp_header(0x04)), Some(Transport::of(Kind::Tcp))),
            ("no flags", v4(6, 0, 0, &tcp_header(0)), Some(Transport::of(Kind::Tcp))),
            ("IP options", v4(6, 40, 0, &syn), Some(SYN)),
            ("don't fragment", v4(6, 0, 0x4000, &syn), Some(SYN)),
            ("first fragment", v4(6, 0, 0x2000, &syn), Some(SYN)),
            (
                "first fragment, 8 bytes of TCP",
                v4(6, 0, 0x2000, &syn[..8]),
                Some(Transport::of(Kind::TcpCut)),
            ),
            ("later fragment", v4(6, 0, 0x0001, &syn), Some(Transport::of(Kind::Opaque))),
            ("later ICMP fragment", v4(1, 0, 0x00b9, &[]), Some(Transport::of(Kind::Icmp))),
            ("UDP", v4(17, 0, 0, &udp), Some(Transport { kind: Kind::Udp, sport: 40000, dport: 53 })),
            ("UDP cut", v4(17, 0, 0, &udp[..2]), Some(Transport::of(Kind::Opaque))),
            ("ICMP", v4(1, 0, 0, &[8, 0]), Some(Transport::of(Kind::Icmp))),
            ("SCTP", v4(132, 0, 0, &syn), Some(Transport::of(Kind::Opaque))),
            ("IP in IP", v4(4, 0, 0, &v4(6, 0, 0, &syn)), Some(Transport::of(Kind::Opaque))),
            (
                "header length below 20",
                {
                    let mut p = v4(6, 0, 0, &syn);
                    p[0] = 0x44;
                    p
                },
                None,
            ),
            ("short", vec![0x45; 19], None),
            ("empty", vec![], None),
            (
                "version 5",
                {
                    let mut p = v6(6, &syn);
                    p[0] = 0x50;
                    p
                },
                None,
            ),
            ("v6 SYN", v6(6, &syn), Some(SYN)),
            ("v6 cut", v6(6, &syn[..13]), Some(Transport::of(Kind::TcpCut))),
            ("v6 hop-by-hop, destination, first fragment", v6(EXT_HOP_BY_HOP, &chain), Some(SYN)),
            ("v6 authentication header", v6(EXT_AUTH, &auth), Some(SYN)),
            (
                "v6 later fragment",
                v6(EXT_FRAGMENT, &[6, 0, 0, 8, 0, 0, 0, 9]),
                Some(Transport::of(Kind::Opaque)),
            ),
            ("v6 neighbour solicitation", v6(58, &[135, 0]), Some(Transport::of(Kind::Icmp))),
            (
                "v6 MLD behind hop-by-hop",
                v6(EXT_HOP_BY_HOP, &[58, 0, 5, 2, 0, 0, 0, 0, 143, 0]),
                Some(Transport::of(Kind::Icmp)),
            ),
            (
                "v6 more extension headers than followed",
                v6(EXT_HOP_BY_HOP, &endless),
                Some(Transport::of(Kind::Opaque)),
            ),
            ("v6 extension header cut", v6(EXT_HOP_BY_HOP, &[6, 0, 0, 0]), Some(Transport::of(Kind::Opaque))),
            ("v6 no next header", v6(59, &[]), Some(Transport::of(Kind::Opaque))),
        ];
        for (name, packet, expected) in table {
            assert_eq!(transport(packet), *expected, "{name}");
        }
    }

    #[test]
    fn addresses() {
        let (family, a, _) = parse(&mut &*v4(6, 0, 0, &tcp_header(2))).unwrap();
        assert_eq!((family, a.source, a.destination), (4, address4([10, 0, 0, 1]), address4([192, 0, 2, 1])));
        let (family, a, _) = parse(&mut &*v6(6, &tcp_header(2))).unwrap();
        assert_eq!((family, address_bytes(a.source)[15], address_bytes(a.destination)[15]), (6, 1, 2));
        assert_eq!(address(address_bytes(a.source)), a.source);
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
