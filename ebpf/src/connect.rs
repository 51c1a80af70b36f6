//! `cgroup/connect4` and `connect6`: refuse at once what egress would drop anyway.
//!
//! These hooks run before routing and cannot see whether this connection would be redirected. They refuse only
//! where the agent has confirmed that the pod's connections of that family are not (`POD_FASTFAIL4`/`6`), and let one
//! through now and then, so that egress can see a repair that nobody told of.
//!
//! And, since only here the caller's cgroup is known before the first SYN: `hold` is told of connections that will be held.

use aya_ebpf::bindings::bpf_sock_addr;
use aya_ebpf::helpers::generated::{bpf_bind, bpf_get_current_ancestor_cgroup_id};
use aya_ebpf::programs::SockAddrContext;
use nobypass_common::abi::{
    IdKey, POD_EXEMPT_IDS, POD_FASTFAIL4, POD_FASTFAIL6, POD_PROXY_ELSEWHERE, PodPolicy,
};
use nobypass_common::exempt::{self, Lookups};
use nobypass_common::headers::{Address, Addresses, IPPROTO_TCP, Kind, Transport};
use nobypass_common::ids::{Counter, Mode, PodKind};
use nobypass_common::verdict::{self, Packet};

use crate::count::Tally;
use crate::facts::{has_network, has_port};
use crate::{hold, pod, refusal};

/// Return codes: 0 makes connect(2) fail with EPERM.
const REFUSE: i32 = 0;
const ALLOW: i32 = 1;

/// Address families (<https://github.com/torvalds/linux/blob/v6.12/include/linux/socket.h>).
const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;

/// Judges a connect(2) of an IPv4 socket.
#[inline(always)]
pub fn v4(ctx: &SockAddrContext) -> i32 {
    // SAFETY: a field of the context, a 4-byte read.
    let word = unsafe { core::ptr::read_volatile(&raw const (*ctx.sock_addr).user_ip4) };
    let own = sockaddr(AF_INET, [word, 0, 0, 0, 0, 0]);
    judge(ctx.sock_addr, 4, [word, 0, 0, 0], POD_FASTFAIL4, own)
}

/// Judges a connect(2) of an IPv6 socket, which may be to an IPv4-mapped address.
#[inline(always)]
pub fn v6(ctx: &SockAddrContext) -> i32 {
    // SAFETY: fields of the context, 4-byte reads.
    let words = unsafe {
        [
            core::ptr::read_volatile(&raw const (*ctx.sock_addr).user_ip6[0]),
            core::ptr::read_volatile(&raw const (*ctx.sock_addr).user_ip6[1]),
            core::ptr::read_volatile(&raw const (*ctx.sock_addr).user_ip6[2]),
            core::ptr::read_volatile(&raw const (*ctx.sock_addr).user_ip6[3]),
        ]
    };
    let own = sockaddr(AF_INET6, [0, words[0], words[1], words[2], words[3], 0]);
    if words[0] == 0 && words[1] == 0 && words[2] == 0xffff_u32.to_be() {
        return judge(ctx.sock_addr, 4, [words[3], 0, 0, 0], POD_FASTFAIL4, own);
    }
    judge(ctx.sock_addr, 6, words, POD_FASTFAIL6, own)
}

/// `struct sockaddr_in` or, longer, `sockaddr_in6`, with port 0.
type SockAddr = [u32; 7];
/// Its size, bytes.
const SOCKADDR_LEN: i32 = 28;

#[inline(always)]
const fn sockaddr(family: u16, rest: [u32; 6]) -> SockAddr {
    let [a, b] = family.to_ne_bytes();
    let [r0, r1, r2, r3, r4, r5] = rest;
    [u32::from_ne_bytes([a, b, 0, 0]), r0, r1, r2, r3, r4, r5]
}

/// Whether the destination is an address of the pod itself, so that the connection stays in it.
///
/// Nothing tells it at this place but an attempt to bind to it. That it succeeds changes nothing: the source of a
/// connection to an own address is that address anyway. It fails for a socket that is bound to a port already.
#[inline(always)]
fn is_own(addr: *mut bpf_sock_addr, mut own: SockAddr) -> bool {
    // SAFETY: the context; the helper reads that many bytes.
    unsafe { bpf_bind(addr, own.as_mut_ptr().cast(), SOCKADDR_LEN) == 0 }
}

/// 0.0.0.0 or ::, which connect(2) takes for loopback.
#[inline(always)]
const fn is_unspecified(address: &Address) -> bool {
    address[0] | address[1] | address[2] | address[3] == 0
}

/// Whether the caller is the proxy, or nobody knows yet which container that is.
#[inline(always)]
fn may_be_proxy(policy: &PodPolicy) -> bool {
    if policy.proxy_cgroup == 0 {
        return policy.flags & POD_PROXY_ELSEWHERE == 0;
    }
    // SAFETY: no memory is touched.
    unsafe { bpf_get_current_ancestor_cgroup_id(policy.level as i32 + 1) == policy.proxy_cgroup }
}

/// The exemption maps as far as this hook knows them: it is not asked about pods with exempt users and devices.
struct Exemptions;

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
    fn id(&mut self, _: &IdKey) -> Option<u8> {
        None
    }

    #[inline(always)]
    fn uid(&mut self) -> u32 {
        0
    }
}

#[inline(always)]
fn judge(addr: *mut bpf_sock_addr, family: u8, destination: Address, fastfail: u32, own: SockAddr) -> i32 {
    let Some(config) = pod::config() else { return ALLOW };
    // SAFETY: fields of the context, 4-byte reads.
    let (protocol, port) = unsafe {
        (
            core::ptr::read_volatile(&raw const (*addr).protocol),
            core::ptr::read_volatile(&raw const (*addr).user_port),
        )
    };
    if protocol != u32::from(IPPROTO_TCP)
        || verdict::is_loopback(family, &destination)
        || is_unspecified(&destination)
    {
        return ALLOW;
    }
    // SAFETY: no memory is touched.
    let owner = pod::owner(config, |level| unsafe { bpf_get_current_ancestor_cgroup_id(level as i32) });
    if hold::ahead(config, &owner) {
        hold::announce(addr);
        return ALLOW;
    }
    let Some(policy) = owner.policy else { return ALLOW };
    if policy.kind != PodKind::Meshed.code()
        || policy.flags & fastfail == 0
        || verdict::effective_mode(config.mode, policy.mode) != Mode::Enforce.code()
        || pod::is_alone(config)
        // Egress knows these exemptions, this hook does not.
        || policy.flags & POD_EXEMPT_IDS != 0
        || may_be_proxy(policy)
    {
        return ALLOW;
    }
    // `user_port` is in network order in the lower half.
    let dport = u16::from_be(port as u16);
    let packet = Packet {
        family,
        addresses: Addresses { source: [0; 4], destination },
        transport: Transport { kind: Kind::Syn, sport: 0, dport },
        ifindex: 0,
        mark: 0,
    };
    if exempt::egress(policy, &packet, &mut Exemptions)
        || is_own(addr, own)
        || !refusal::holds(owner.id, family)
    {
        return ALLOW;
    }
    Tally::of(owner.id).add(Counter::FastFail);
    REFUSE
}
