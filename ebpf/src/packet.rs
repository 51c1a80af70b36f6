//! Reading a packet: directly where its headers are linear and plain (1 ns), else by copying (60 ns).

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::helpers::bpf_skb_load_bytes;
use nobypass_common::headers::{self, Addresses, IPPROTO_TCP, Load, Transport};
use nobypass_common::verdict::Packet;

/// IPv4 without options, and TCP.
const V4_TCP: usize = 40;
/// IPv6 without extension headers, and TCP.
const V6_TCP: usize = 60;

/// Reads the headers of a packet; `None` for what is not IP.
#[inline(always)]
pub fn read(skb: *mut __sk_buff) -> Option<Packet> {
    // SAFETY: the context pointer is valid while the program runs; the verifier checks the field accesses.
    let (data, end, ifindex, mark) =
        unsafe { ((*skb).data as usize, (*skb).data_end as usize, (*skb).ifindex, (*skb).mark) };
    let packet = |family, addresses, transport| Some(Packet { family, addresses, transport, ifindex, mark });
    if data + V4_TCP <= end {
        // SAFETY: 40 bytes are there.
        let h = unsafe { &*(data as *const [u8; V4_TCP]) };
        // Version 4, five words; TCP; not a later fragment.
        if h[0] == 0x45 && h[9] == IPPROTO_TCP && h[6] & 0x1f == 0 && h[7] == 0 {
            let transport = tcp(h[20], h[21], h[22], h[23], h[33]);
            if matches!(transport, Transport::Tcp) {
                return packet(4, NO_ADDRESSES, transport);
            }
            let mut a = NO_ADDRESSES;
            a.source[..4].copy_from_slice(&[h[12], h[13], h[14], h[15]]);
            a.destination[..4].copy_from_slice(&[h[16], h[17], h[18], h[19]]);
            return packet(4, a, transport);
        }
        if h[0] >> 4 == 6 && h[6] == IPPROTO_TCP && data + V6_TCP <= end {
            // SAFETY: 60 bytes are there.
            let h = unsafe { &*(data as *const [u8; V6_TCP]) };
            let transport = tcp(h[40], h[41], h[42], h[43], h[53]);
            if matches!(transport, Transport::Tcp) {
                return packet(6, NO_ADDRESSES, transport);
            }
            // SAFETY: as above, the first 40 bytes of it.
            let header = unsafe { &*(data as *const [u8; 40]) };
            return packet(6, headers::ipv6_addresses(header), transport);
        }
    }
    let (family, addresses, transport) = headers::parse(&mut Skb(skb))?;
    packet(family, addresses, transport)
}

const NO_ADDRESSES: Addresses = Addresses { source: [0; 16], destination: [0; 16] };

#[inline(always)]
fn tcp(s0: u8, s1: u8, d0: u8, d1: u8, flags: u8) -> Transport {
    headers::tcp(&[s0, s1, d0, d1, 0, 0, 0, 0, 0, 0, 0, 0, 0, flags])
}

struct Skb(*mut __sk_buff);

impl Load for Skb {
    #[inline(always)]
    fn load<const N: usize>(&mut self, offset: u32) -> Option<[u8; N]> {
        let mut bytes = [0u8; N];
        // SAFETY: the helper checks the range and writes `N` bytes.
        let ret = unsafe { bpf_skb_load_bytes(self.0.cast(), offset, bytes.as_mut_ptr().cast(), N as u32) };
        if ret == 0 { Some(bytes) } else { None }
    }
}
