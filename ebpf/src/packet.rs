//! Reading a packet: directly where its headers are linear and plain (1 ns), else by copying (60 ns).

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::helpers::bpf_skb_load_bytes;
use nobypass_common::headers::{self, Addresses, IPPROTO_TCP, IPPROTO_UDP, Kind, Load};
use nobypass_common::verdict::Packet;

/// IPv4 without options, and TCP; or UDP with 12 bytes, the shortest DNS message.
const V4_PLAIN: usize = 40;
/// IPv6 without extension headers, and as above.
const V6_PLAIN: usize = 60;

/// Reads the headers of a packet; `None` for what passes unseen: later packets of a TCP connection, and what is
/// not IP.
#[inline(always)]
pub fn read(skb: *mut __sk_buff) -> Option<Packet> {
    // SAFETY: the context pointer is valid while the program runs; the verifier checks the field accesses.
    let (data, end, ifindex, mark) =
        unsafe { ((*skb).data as usize, (*skb).data_end as usize, (*skb).ifindex, (*skb).mark) };
    let packet = |family, addresses, transport| Some(Packet { family, addresses, transport, ifindex, mark });
    if data + V4_PLAIN <= end {
        // Words, not bytes: the stack builds headers at multiples of four, and x86 and arm64 take any other too.
        // SAFETY: 40 bytes are there.
        let h = unsafe { &*(data as *const [u32; V4_PLAIN / 4]) };
        let [version, ..] = h[0].to_ne_bytes();
        let [.., frag_hi, frag_lo] = h[1].to_ne_bytes();
        let [_, protocol, ..] = h[2].to_ne_bytes();
        // Version 4, five words; not a later fragment.
        if version == 0x45 && frag_hi & 0x1f == 0 && frag_lo == 0 {
            if protocol == IPPROTO_TCP {
                if !headers::is_syn(h[8].to_ne_bytes()[1]) {
                    return None;
                }
                return packet(4, v4_addresses(h), headers::tcp(&[h[5], h[6], h[7], h[8]]));
            }
            if protocol == IPPROTO_UDP {
                return packet(4, v4_addresses(h), headers::udp(h[5]));
            }
        }
        if version >> 4 == 6 && data + V6_PLAIN <= end {
            // SAFETY: 60 bytes are there.
            let h = unsafe { &*(data as *const [u32; V6_PLAIN / 4]) };
            let [.., next, _] = h[1].to_ne_bytes();
            if next == IPPROTO_TCP {
                if !headers::is_syn(h[13].to_ne_bytes()[1]) {
                    return None;
                }
                return packet(6, v6_addresses(h), headers::tcp(&[h[10], h[11], h[12], h[13]]));
            }
            if next == IPPROTO_UDP {
                return packet(6, v6_addresses(h), headers::udp(h[10]));
            }
        }
    }
    let (family, addresses, transport) = headers::parse(&mut Skb(skb))?;
    if matches!(transport.kind, Kind::Tcp) {
        return None;
    }
    packet(family, addresses, transport)
}

#[inline(always)]
fn v4_addresses(h: &[u32; V4_PLAIN / 4]) -> Addresses {
    headers::ipv4_addresses(&[h[0], h[1], h[2], h[3], h[4]])
}

#[inline(always)]
fn v6_addresses(h: &[u32; V6_PLAIN / 4]) -> Addresses {
    Addresses { source: [h[2], h[3], h[4], h[5]], destination: [h[6], h[7], h[8], h[9]] }
}

struct Skb(*mut __sk_buff);

impl Load for Skb {
    #[inline(always)]
    fn load<const N: usize>(&mut self, offset: u32) -> Option<[u32; N]> {
        let mut words = [0u32; N];
        let len = 4 * N as u32;
        // SAFETY: the helper checks the range and writes that many bytes.
        let ret = unsafe { bpf_skb_load_bytes(self.0.cast(), offset, words.as_mut_ptr().cast(), len) };
        if ret == 0 { Some(words) } else { None }
    }
}
