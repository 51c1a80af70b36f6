//! The decision table: what a packet is, and what happens to it.
//!
//! Pure, and the same code in the kernel and in host tests. What costs time in the kernel (a helper call, a map
//! lookup) is behind [`Facts`] and asked for only by the row that needs it; a row is one line of the table in
//! ARCHITECTURE.md, in the same order.

use crate::abi::{
    CONFIG_JUDGE_NON_TCP, POD_GAP_DROP, POD_GAP4, POD_GAP6, POD_INBOUND_DROP, POD_NON_TCP_DROP,
    POD_PROXY_ELSEWHERE, POD_PROXY_MARK, POD_PROXY_UID, POD_QUIC_DROP, POD_TPROXY, PodPolicy,
};
use crate::headers::{Address, Addresses, Kind, Transport};
use crate::ids::{LOOPBACK_IFINDEX, MODE_INHERIT, Mode, PodKind, UnknownPolicy, Verdict};

/// What the program knows of a packet without asking anybody.
#[derive(Clone, Copy, Debug)]
pub struct Packet {
    /// 4 or 6.
    pub family: u8,
    /// Source and destination of the packet, after NAT.
    pub addresses: Addresses,
    /// The transport header.
    pub transport: Transport,
    /// The device the packet leaves by, or came in by.
    pub ifindex: u32,
    /// `skb->mark`.
    pub mark: u32,
}

/// The node's settings that the table needs.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// [`Mode`].
    pub mode: u32,
    /// [`UnknownPolicy`].
    pub unknown_policy: u32,
    /// `CONFIG_*`.
    pub flags: u32,
    /// How long an unknown pod is held, ns.
    pub hold_ns: u64,
    /// After so long without an agent nothing is dropped or held, ns; 0: never.
    pub max_silence_ns: u64,
}

/// The pod of a packet.
#[derive(Clone, Copy, Debug)]
pub enum Pod<'a> {
    /// In the map.
    Known(&'a PodPolicy),
    /// Not in the map, and the program could not add it.
    Missing {
        /// When it was first seen, ns of `CLOCK_MONOTONIC`; 0 if nothing could note it.
        since_ns: u64,
    },
    /// The socket belongs to no pod (a process in a parent's or QoS class's own cgroup).
    None,
}

/// A TCP socket's part in a SYN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SynOrigin {
    /// The first SYN of a connection.
    First,
    /// A retransmitted SYN whose connection is counted.
    Retry,
    /// A retransmitted SYN of a connection whose first SYN was held: not counted yet.
    RetryOfHeld,
    /// A retransmitted SYN of a connection that was counted as a bypass, and dropped.
    RetryOfDropped,
    /// Not from a TCP socket.
    Raw,
}

/// What costs time to know; each is asked at most once a packet.
pub trait Facts {
    /// Time, ns of `CLOCK_MONOTONIC`.
    fn now_ns(&mut self) -> u64;
    /// When an agent was last alive, ns of the same clock.
    fn agent_seen_ns(&mut self) -> u64;
    /// The destination that the socket asked for, `None` without a TCP socket: a raw one asks for none.
    fn socket_destination(&mut self) -> Option<Address>;
    /// The cgroup id of the socket's ancestor at `level`; 0 if its cgroup is above.
    fn ancestor(&mut self, level: u32) -> u64;
    /// The socket's UID in its user namespace.
    fn uid(&mut self) -> u32;
    /// Whether the SYN is the first of its connection.
    fn syn_origin(&mut self) -> SynOrigin;
    /// Whether the exemptions of this pod cover a connection to this port and address.
    fn exempt(&mut self, policy: &PodPolicy, packet: &Packet) -> bool;
    /// Whether an address is one of the node's.
    fn node_address(&mut self, address: &Address) -> bool;
}

/// The outcome for one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// The row.
    pub verdict: Verdict,
    /// Drop the packet.
    pub drop: bool,
    /// Add to the verdict's counter. False for what is counted already, or not at all.
    pub count: bool,
    /// Enforce would drop it, audit did not.
    pub would_drop: bool,
    /// Dropped only until the pod is classified.
    pub held: bool,
}

impl Judgement {
    const fn pass(verdict: Verdict, count: bool) -> Self {
        Self { verdict, drop: false, count, would_drop: false, held: false }
    }
}

/// The mode in effect for a pod.
#[inline(always)]
pub const fn effective_mode(node: u32, pod: u32) -> u32 {
    if pod == MODE_INHERIT { node } else { pod }
}

/// Whether new connections of a pod that nobody has classified, first seen at `since_ns`, are held at `now_ns`.
#[inline(always)]
pub const fn holds(settings: &Settings, since_ns: u64, now_ns: u64, agent_seen_ns: u64) -> bool {
    let alone =
        settings.max_silence_ns != 0 && now_ns.saturating_sub(agent_seen_ns) > settings.max_silence_ns;
    settings.unknown_policy == UnknownPolicy::Hold.code()
        && settings.mode != Mode::Off.code()
        && now_ns.saturating_sub(since_ns) < settings.hold_ns
        && !alone
}

/// Whether there has been no agent for longer than the operator lets the programs drop without one.
#[inline(always)]
fn is_alone<F: Facts>(settings: &Settings, facts: &mut F) -> bool {
    settings.max_silence_ns != 0
        && facts.now_ns().saturating_sub(facts.agent_seen_ns()) > settings.max_silence_ns
}

/// Rows 1 to 3: what needs no pod. `None` when the pod has to be looked up.
#[inline(always)]
pub const fn without_pod(packet: &Packet, flags: u32) -> Option<Judgement> {
    match packet.transport.kind {
        Kind::Tcp => Some(Judgement::pass(Verdict::NotNew, false)),
        Kind::Icmp => Some(Judgement::pass(Verdict::Icmp, false)),
        Kind::Syn => None,
        // A cut header on lo cannot leave the pod.
        Kind::TcpCut | Kind::Udp | Kind::Opaque if packet.ifindex == LOOPBACK_IFINDEX => {
            Some(Judgement::pass(Verdict::Local, false))
        }
        Kind::TcpCut => None,
        Kind::Udp | Kind::Opaque => {
            if flags & CONFIG_JUDGE_NON_TCP == 0 {
                Some(Judgement::pass(Verdict::Other, false))
            } else {
                None
            }
        }
    }
}

/// The egress table, from row 4 on: call it when [`without_pod`] has no answer.
#[inline(always)]
pub fn egress<F: Facts>(packet: &Packet, settings: &Settings, pod: Pod<'_>, facts: &mut F) -> Judgement {
    let new = matches!(packet.transport.kind, Kind::Syn | Kind::TcpCut);
    let policy = match pod {
        Pod::None => return Judgement::pass(Verdict::NotJudged, false),
        Pod::Missing { since_ns } => return unknown(packet, settings, since_ns, new, facts),
        Pod::Known(policy) => policy,
    };
    // 4: a pod that nobody has classified.
    if policy.kind == PodKind::Unknown.code() {
        return unknown(packet, settings, policy.since_ns, new, facts);
    }
    // 5: nothing to judge.
    let mode = effective_mode(settings.mode, policy.mode);
    if policy.kind != PodKind::Meshed.code() || mode == Mode::Off.code() {
        return Judgement::pass(Verdict::NotJudged, new);
    }
    let enforce = mode == Mode::Enforce.code() && !is_alone(settings, facts);
    match packet.transport.kind {
        Kind::Syn => {}
        Kind::TcpCut => return bypass(Verdict::BypassRaw, enforce, true, facts),
        Kind::Tcp | Kind::Udp | Kind::Icmp | Kind::Opaque => return non_tcp(packet, policy, enforce, facts),
    }
    if packet.ifindex == LOOPBACK_IFINDEX {
        return on_loopback(packet, policy, facts);
    }
    // 8: the proxy itself.
    if from_proxy(packet, policy, facts) {
        return Judgement::pass(Verdict::Proxy, true);
    }
    // 9: what the mesh itself lets out.
    if facts.exempt(policy, packet) {
        return Judgement::pass(Verdict::Exempt, true);
    }
    // 12, of a family that this mesh does not redirect.
    let gap = if packet.family == 6 { POD_GAP6 } else { POD_GAP4 };
    if policy.flags & gap != 0 {
        return bypass(Verdict::FamilyGap, enforce, policy.flags & POD_GAP_DROP != 0, facts);
    }
    // 10: the proxy's UID in another container.
    if policy.flags & POD_PROXY_UID != 0 && policy.proxy_cgroup != 0 && facts.uid() == policy.proxy_uid {
        return bypass(Verdict::ProxyUidImpersonation, enforce, true, facts);
    }
    // 11, 12.
    bypass(Verdict::Bypass, enforce, true, facts)
}

/// Row 4. A SYN on lo cannot leave the pod and is never held. Each connection counts once.
#[inline(always)]
fn unknown<F: Facts>(
    packet: &Packet,
    settings: &Settings,
    since_ns: u64,
    new: bool,
    facts: &mut F,
) -> Judgement {
    if !new {
        return Judgement::pass(Verdict::Unknown, false);
    }
    let first = matches!(facts.syn_origin(), SynOrigin::First | SynOrigin::Raw);
    if packet.ifindex != LOOPBACK_IFINDEX
        // Asked first: where nothing is held, the time is not either.
        && settings.unknown_policy == UnknownPolicy::Hold.code()
        && holds(settings, since_ns, facts.now_ns(), facts.agent_seen_ns())
    {
        return Judgement {
            verdict: Verdict::Unknown,
            drop: true,
            count: first,
            would_drop: false,
            held: true,
        };
    }
    Judgement::pass(Verdict::Unknown, first)
}

/// Rows 6 and 7.
#[inline(always)]
fn on_loopback<F: Facts>(packet: &Packet, policy: &PodPolicy, facts: &mut F) -> Judgement {
    if !is_redirected(packet, policy, facts) || from_proxy(packet, policy, facts) {
        return Judgement::pass(Verdict::Local, true);
    }
    match facts.syn_origin() {
        SynOrigin::Retry => Judgement::pass(Verdict::RedirectProof, false),
        SynOrigin::First | SynOrigin::RetryOfHeld | SynOrigin::RetryOfDropped => {
            Judgement::pass(Verdict::RedirectProof, true)
        }
        // Nobody knows what a raw socket asked for, and applications do not connect by one.
        SynOrigin::Raw => Judgement::pass(Verdict::Local, true),
    }
}

/// Whether a SYN on lo was sent there by a redirection rather than addressed to the pod itself.
///
/// NAT changes the packet's destination and leaves the socket's. TPROXY changes neither: a marked packet is
/// routed to lo although its destination is not local, and a local destination is always loopback or the
/// packet's own source. Whoever has CAP_NET_RAW can mark a packet and route it to lo, so that counts only where the
/// mesh redirects by TPROXY.
#[inline(always)]
fn is_redirected<F: Facts>(packet: &Packet, policy: &PodPolicy, facts: &mut F) -> bool {
    let Some(asked) = facts.socket_destination() else { return false };
    if is_loopback(packet.family, &asked) {
        return false;
    }
    let Addresses { source, destination } = &packet.addresses;
    if !same(&asked, destination) {
        return true;
    }
    policy.flags & POD_TPROXY != 0
        && packet.mark != 0
        && !same(destination, source)
        && !is_loopback(packet.family, source)
}

/// 127.0.0.0/8 or ::1.
#[inline(always)]
pub const fn is_loopback(family: u8, address: &Address) -> bool {
    if family == 4 {
        address[0].to_ne_bytes()[0] == 127
    } else {
        address[0] | address[1] | address[2] == 0 && address[3] == 1u32.to_be()
    }
}

/// Whether two addresses are the same.
#[inline(always)]
const fn same(a: &Address, b: &Address) -> bool {
    (a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]) == 0
}

/// Row 8: by container; by UID only until the container is known; by mark where the mesh marks its packets.
#[inline(always)]
fn from_proxy<F: Facts>(packet: &Packet, policy: &PodPolicy, facts: &mut F) -> bool {
    if policy.flags & POD_PROXY_MARK != 0 && packet.mark & policy.mark_mask == policy.mark {
        return true;
    }
    if policy.proxy_cgroup != 0 {
        return facts.ancestor(policy.level + 1) == policy.proxy_cgroup;
    }
    policy.flags & POD_PROXY_UID != 0 && facts.uid() == policy.proxy_uid
}

/// Rows 10 to 12. `droppable`: whether enforce drops this kind of bypass.
#[inline(always)]
fn bypass<F: Facts>(verdict: Verdict, enforce: bool, droppable: bool, facts: &mut F) -> Judgement {
    let drop = enforce && droppable;
    let would_drop = !enforce && droppable;
    match facts.syn_origin() {
        SynOrigin::Retry | SynOrigin::RetryOfDropped => {
            Judgement { verdict: Verdict::Retry, drop, count: true, would_drop: false, held: false }
        }
        SynOrigin::First | SynOrigin::RetryOfHeld => {
            Judgement { verdict, drop, count: true, would_drop, held: false }
        }
        // The more telling reason: the kernel's own stack did not send this.
        SynOrigin::Raw => {
            Judgement { verdict: Verdict::BypassRaw, drop, count: true, would_drop, held: false }
        }
    }
}

/// Row 13.
#[inline(always)]
fn non_tcp<F: Facts>(packet: &Packet, policy: &PodPolicy, enforce: bool, facts: &mut F) -> Judgement {
    let (verdict, flag) = match (packet.transport.kind, packet.transport.dport) {
        (Kind::Udp, 53) => return Judgement::pass(Verdict::Dns, true),
        (Kind::Udp, 443) => (Verdict::Quic, POD_QUIC_DROP),
        (Kind::Udp, _) => (Verdict::Udp, POD_NON_TCP_DROP),
        _ => (Verdict::Other, POD_NON_TCP_DROP),
    };
    // QUIC is UDP as well: either switch drops it.
    let wanted = policy.flags & (flag | POD_NON_TCP_DROP) != 0 && !is_multicast_or_link_local(packet);
    if !wanted || from_proxy(packet, policy, facts) {
        return Judgement::pass(verdict, true);
    }
    Judgement { verdict, drop: enforce, count: true, would_drop: !enforce, held: false }
}

/// Destinations that no proxy could take: multicast, broadcast, IPv6 link-local.
#[inline(always)]
fn is_multicast_or_link_local(packet: &Packet) -> bool {
    let word = packet.addresses.destination[0];
    let [first, second, ..] = word.to_ne_bytes();
    if packet.family == 4 {
        first & 0xf0 == 0xe0 || word == u32::MAX
    } else {
        first == 0xff || (first == 0xfe && second & 0xc0 == 0x80)
    }
}

/// The ingress table: a new connection from outside the pod, seen with the socket that will accept it.
#[inline(always)]
pub fn ingress<F: Facts>(packet: &Packet, settings: &Settings, pod: Pod<'_>, facts: &mut F) -> Judgement {
    if !matches!(packet.transport.kind, Kind::Syn) {
        return Judgement::pass(Verdict::NotNew, false);
    }
    let Pod::Known(policy) = pod else { return Judgement::pass(Verdict::NotJudged, false) };
    let mode = effective_mode(settings.mode, policy.mode);
    if policy.kind != PodKind::Meshed.code() || mode == Mode::Off.code() {
        return Judgement::pass(Verdict::NotJudged, false);
    }
    // Kubelet's probes come from the node; an unknown proxy container would make every connection look wrong.
    let accepted_by_proxy = if policy.proxy_cgroup == 0 {
        policy.flags & POD_PROXY_ELSEWHERE == 0
    } else {
        facts.ancestor(policy.level + 1) == policy.proxy_cgroup
    };
    if accepted_by_proxy || facts.node_address(&packet.addresses.source) || facts.exempt(policy, packet) {
        return Judgement::pass(Verdict::InboundOk, true);
    }
    let enforce = mode == Mode::Enforce.code() && !is_alone(settings, facts);
    let droppable = policy.flags & POD_INBOUND_DROP != 0;
    Judgement {
        verdict: Verdict::InboundBypass,
        drop: enforce && droppable,
        count: true,
        would_drop: !enforce && droppable,
        held: false,
    }
}

#[cfg(test)]
mod tests;
