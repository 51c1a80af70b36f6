//! What the decision table asks of the kernel.

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{__sk_buff, bpf_sock, bpf_tcp_sock};
use aya_ebpf::helpers::generated::{bpf_sk_storage_get, bpf_skb_ancestor_cgroup_id};
use aya_ebpf::helpers::{bpf_get_socket_uid, bpf_ktime_get_ns, bpf_sk_fullsock, bpf_tcp_sock};
use aya_ebpf::maps::lpm_trie::Key;
use aya_ebpf::programs::SkBuffContext;
use nobypass_common::abi::{CidrKey, IdKey, PodPolicy, PortKey};
use nobypass_common::exempt::{self, Lookups};
use nobypass_common::headers::{Address, IPPROTO_TCP};
use nobypass_common::ids::Hook;
use nobypass_common::verdict::{Facts, Packet, SynOrigin};

use crate::maps::{EXEMPT_CIDRS, EXEMPT_IDS, EXEMPT_PORTS, NODE_ADDRS, SYN_MARKS};
use crate::pod;

/// Lower bits of a value of `SYN_MARKS`: what happened to the connection's earlier SYN. No mark: it passed and was
/// counted.
pub const MARK_HELD: u32 = 1;
pub const MARK_DROPPED: u32 = 2;
pub const MARK_COUNTED: u32 = 3;
/// The other bits are those of the SYN's sequence number: a socket can connect again, and is another connection then.
const MARK_SEQUENCE: u32 = !3;

/// `SOCK_STREAM`; 1 everywhere but on MIPS.
const SOCK_STREAM: u32 = 1;

/// `BPF_SK_STORAGE_GET_F_CREATE`.
const CREATE: u64 = 1;

/// The facts of one packet.
pub struct SkbFacts {
    skb: *mut __sk_buff,
    hook: Hook,
    family: u8,
    /// What [`Facts::syn_origin`] found, for [`SkbFacts::remember`].
    pub origin: Option<SynOrigin>,
}

impl SkbFacts {
    #[inline(always)]
    pub fn new(ctx: &SkBuffContext, hook: Hook, family: u8) -> Self {
        Self { skb: ctx.as_ptr().cast(), hook, family, origin: None }
    }

    /// The full socket, if the packet has one.
    #[inline(always)]
    fn socket(&self) -> Option<*mut bpf_sock> {
        // SAFETY: a field of the context; the verifier wants the null checks that follow.
        let sk = unsafe { (*self.skb).__bindgen_anon_2.sk };
        if sk.is_null() {
            return None;
        }
        // SAFETY: not null.
        let sk = unsafe { bpf_sk_fullsock(sk) };
        if sk.is_null() { None } else { Some(sk) }
    }

    /// The TCP socket, if the packet is of one.
    ///
    /// `bpf_tcp_sock` goes by the protocol alone, which a raw socket may have as well: what it would read there is no
    /// TCP state but other memory.
    #[inline(always)]
    fn tcp_socket(&self) -> Option<(*mut bpf_sock, *mut bpf_tcp_sock)> {
        let sk = self.socket()?;
        // SAFETY: a full socket.
        if unsafe { core::ptr::read_volatile(&raw const (*sk).type_) } != SOCK_STREAM {
            return None;
        }
        // SAFETY: a full socket.
        let tcp = unsafe { bpf_tcp_sock(sk) };
        if tcp.is_null() { None } else { Some((sk, tcp)) }
    }

    /// Marks the socket of a TCP SYN, so that its retransmits are judged but never counted twice.
    #[inline(always)]
    pub fn remember(&self, mark: u32) {
        let Some((sk, tcp)) = self.tcp_socket() else { return };
        let value = mark_of(sk, CREATE);
        if !value.is_null() {
            // SAFETY: neither is null, and the value is four bytes long.
            unsafe { *value = sequence(tcp) | mark };
        }
    }
}

impl Facts for SkbFacts {
    #[inline(always)]
    fn now_ns(&mut self) -> u64 {
        // SAFETY: no memory is touched.
        unsafe { bpf_ktime_get_ns() }
    }

    #[inline(always)]
    fn agent_seen_ns(&mut self) -> u64 {
        pod::agent_seen_ns()
    }

    #[inline(always)]
    fn socket_destination(&mut self) -> Option<Address> {
        let (sk, _) = self.tcp_socket()?;
        // The packet's family decides: an AF_INET6 socket has valid IPv4 fields only while it speaks IPv4.
        // `read_volatile` keeps each access a plain 4-byte one, which is all the verifier allows here.
        // SAFETY: a full socket.
        unsafe {
            if self.family == 4 {
                Some([core::ptr::read_volatile(&raw const (*sk).dst_ip4), 0, 0, 0])
            } else {
                Some([
                    core::ptr::read_volatile(&raw const (*sk).dst_ip6[0]),
                    core::ptr::read_volatile(&raw const (*sk).dst_ip6[1]),
                    core::ptr::read_volatile(&raw const (*sk).dst_ip6[2]),
                    core::ptr::read_volatile(&raw const (*sk).dst_ip6[3]),
                ])
            }
        }
    }

    #[inline(always)]
    fn ancestor(&mut self, level: u32) -> u64 {
        ancestor(self.skb, level)
    }

    #[inline(always)]
    fn uid(&mut self) -> u32 {
        // SAFETY: the context.
        unsafe { bpf_get_socket_uid(self.skb) }
    }

    #[inline(always)]
    fn syn_origin(&mut self) -> SynOrigin {
        let origin = self.find_origin();
        self.origin = Some(origin);
        origin
    }

    #[inline(always)]
    fn exempt(&mut self, policy: &PodPolicy, packet: &Packet) -> bool {
        match self.hook {
            Hook::Egress => exempt::egress(policy, packet, &mut Exemptions(self.skb)),
            Hook::Ingress => exempt::ingress(policy, packet, &mut Exemptions(self.skb)),
        }
    }

    #[inline(always)]
    fn node_address(&mut self, address: &Address) -> bool {
        // SAFETY: only presence matters.
        unsafe { NODE_ADDRS.get(address).is_some() }
    }
}

impl SkbFacts {
    #[inline(always)]
    fn find_origin(&self) -> SynOrigin {
        let Some((sk, tcp)) = self.tcp_socket() else { return SynOrigin::Raw };
        // Counted before a segment is sent, and reset with the connection (`__tcp_transmit_skb` and `tcp_disconnect` in the
        // kernel's net/ipv4/tcp_output.c and tcp.c). Not `total_retrans`: when a fast-open SYN is dropped, by whomever, the
        // kernel repeats it at once without its data, which is no retransmit to it (`tcp_send_syn_data`).
        // SAFETY: not null.
        if unsafe { core::ptr::read_volatile(&raw const (*tcp).segs_out) } <= 1 {
            return SynOrigin::First;
        }
        let mark = mark_of(sk, 0);
        // SAFETY: not null, and four bytes long.
        let mark = if mark.is_null() { 0 } else { unsafe { *mark } };
        if mark & MARK_SEQUENCE != sequence(tcp) {
            return SynOrigin::Retry;
        }
        match mark & !MARK_SEQUENCE {
            MARK_HELD => SynOrigin::RetryOfHeld,
            MARK_DROPPED => SynOrigin::RetryOfDropped,
            _ => SynOrigin::Retry,
        }
    }
}

/// The sequence number of a socket's SYN as marks have it.
#[inline(always)]
fn sequence(tcp: *mut bpf_tcp_sock) -> u32 {
    // SAFETY: not null, by the callers. Until the SYN is answered, it is what is not acknowledged.
    unsafe { core::ptr::read_volatile(&raw const (*tcp).snd_una) & MARK_SEQUENCE }
}

/// A socket's mark, null where it has none. aya's wrapper takes only `connect` contexts.
#[inline(always)]
fn mark_of(sk: *mut bpf_sock, flags: u64) -> *mut u32 {
    let map = (&raw const SYN_MARKS).cast_mut().cast();
    // SAFETY: the map's address is what the loader relocates; a full socket; null or the socket's own value.
    unsafe { bpf_sk_storage_get(map, sk.cast(), core::ptr::null_mut(), flags).cast() }
}

/// The cgroup id of the packet's socket at a level; 0 if its cgroup is above it.
#[inline(always)]
pub fn ancestor(skb: *mut __sk_buff, level: u32) -> u64 {
    // SAFETY: the context.
    unsafe { bpf_skb_ancestor_cgroup_id(skb, level as i32) }
}

/// The exemption maps; the packet is asked for its socket's UID.
pub struct Exemptions(pub *mut __sk_buff);

impl Lookups for Exemptions {
    #[inline(always)]
    fn port(&mut self, set: u32, list: u8, port: u16) -> bool {
        has_port(set, list, port)
    }

    #[inline(always)]
    fn network(&mut self, set: u32, list: u8, family: u8, address: &Address) -> bool {
        has_network(set, list, family, address)
    }

    #[inline(always)]
    fn id(&mut self, key: &IdKey) -> Option<u8> {
        // SAFETY: one byte, read whole.
        unsafe { EXEMPT_IDS.get(key).copied() }
    }

    #[inline(always)]
    fn uid(&mut self) -> u32 {
        // SAFETY: the context.
        unsafe { bpf_get_socket_uid(self.0) }
    }
}

/// Whether a list of a set has a TCP port.
#[inline(always)]
pub fn has_port(set: u32, list: u8, port: u16) -> bool {
    let key = PortKey::new(set, IPPROTO_TCP, list, port);
    EXEMPT_PORTS.get(Key::new(PortKey::FIXED_BITS + 16, key)).is_some()
}

/// Whether a list of a set has an address.
#[inline(always)]
pub fn has_network(set: u32, list: u8, family: u8, address: &Address) -> bool {
    let key = CidrKey::new(set, list, family, *address);
    EXEMPT_CIDRS.get(Key::new(CidrKey::FIXED_BITS + 128, key)).is_some()
}
