//! The maps' keys and values: `repr(C)`, no padding, no `bool` or `enum`.
//!
//! A change of any layout here, or of a number in [`crate::ids`], needs a new [`ABI_VERSION`]: it is part of the
//! pin directory's name, so that an agent never adopts maps of another layout.

use crate::headers::Address;
use crate::ids::COUNTERS;

/// The layout's number.
pub const ABI_VERSION: u32 = 4;

/// Parents of pod cgroups that one node can have.
pub const MAX_PARENTS: usize = 4;
/// Cgroup levels at which pods can be: two below each parent.
pub const MAX_LEVELS: usize = 2 * MAX_PARENTS;

/// [`Config::flags`]: judge UDP and other protocols (some 30 ns a packet), because some policy asks.
pub const CONFIG_JUDGE_NON_TCP: u32 = 1 << 0;
/// [`Config::flags`]: judge inbound connections.
pub const CONFIG_INBOUND: u32 = 1 << 1;

/// Map `CONFIG` (array of one): the node's settings. Written by the agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Config {
    /// [`ABI_VERSION`] of the writer.
    pub abi_version: u32,
    /// [`crate::ids::Mode`].
    pub mode: u32,
    /// [`crate::ids::UnknownPolicy`].
    pub unknown_policy: u32,
    /// `CONFIG_*`.
    pub flags: u32,
    /// How long an unknown pod is held, ns.
    pub hold_ns: u64,
    /// After so long without a heartbeat nothing is dropped or held any more, ns; 0: enforcement goes on without an
    /// agent.
    pub max_silence_ns: u64,
    /// Events per second, pod and CPU in the long run.
    pub event_rate: u32,
    /// Events at once, per pod and CPU.
    pub event_burst: u32,
    /// Used entries of `parents`.
    pub parent_count: u32,
    /// Used entries of `pod_levels`.
    pub level_count: u32,
    /// Levels at which pods can be, deepest first.
    pub pod_levels: [u32; MAX_LEVELS],
    /// Where the programs are attached.
    pub parents: [Parent; MAX_PARENTS],
}

/// Words of a parent's path, `/kubepods/`.
pub const PREFIX_WORDS: usize = 32;

/// One parent of pod cgroups. [`crate::cgroup_path`] makes and reads the last three fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Parent {
    /// Its cgroup id: the inode number of its directory.
    pub cgroup_id: u64,
    /// Its level; the cgroup root is 0.
    pub level: u32,
    /// Where `pod` stands in the path of a pod directly below.
    pub pod_at: u32,
    /// Its path below the cgroup root with a slash at the end.
    pub prefix: [u64; PREFIX_WORDS],
    /// Which bits of `prefix` count.
    pub mask: [u64; PREFIX_WORDS],
}

/// [`PodPolicy::flags`]: connect4 refuses at once.
pub const POD_FASTFAIL4: u32 = 1 << 0;
/// [`PodPolicy::flags`]: connect6 refuses at once.
pub const POD_FASTFAIL6: u32 = 1 << 1;
/// [`PodPolicy::flags`]: the mesh does not redirect IPv4 of this pod.
pub const POD_GAP4: u32 = 1 << 2;
/// [`PodPolicy::flags`]: the mesh does not redirect IPv6 of this pod.
pub const POD_GAP6: u32 = 1 << 3;
/// [`PodPolicy::flags`]: enforce also drops connections in a family gap.
pub const POD_GAP_DROP: u32 = 1 << 4;
/// [`PodPolicy::flags`]: enforce drops UDP (but DNS) and other protocols.
pub const POD_NON_TCP_DROP: u32 = 1 << 5;
/// [`PodPolicy::flags`]: enforce drops UDP to port 443, so that clients fall back to TCP.
pub const POD_QUIC_DROP: u32 = 1 << 6;
/// [`PodPolicy::flags`]: enforce drops inbound bypasses.
pub const POD_INBOUND_DROP: u32 = 1 << 7;
/// [`PodPolicy::flags`]: `EXEMPT_PORTS` has entries for `exempt_set`.
pub const POD_EXEMPT_PORTS: u32 = 1 << 8;
/// [`PodPolicy::flags`]: `EXEMPT_CIDRS` has entries for `exempt_set`.
pub const POD_EXEMPT_CIDRS: u32 = 1 << 9;
/// [`PodPolicy::flags`]: `EXEMPT_IDS` has entries for `exempt_set`.
pub const POD_EXEMPT_IDS: u32 = 1 << 10;
/// [`PodPolicy::flags`]: `proxy_uid` is known.
pub const POD_PROXY_UID: u32 = 1 << 11;
/// [`PodPolicy::flags`]: `mark` and `mark_mask` recognise the proxy.
pub const POD_PROXY_MARK: u32 = 1 << 12;

/// [`PodPolicy::flags`]: the mesh redirects by TPROXY: a marked packet on lo with an unchanged destination is a proof.
pub const POD_TPROXY: u32 = 1 << 13;
/// [`PodPolicy::flags`]: only what [`crate::exempt::LIST_ONLY`] of `exempt_set` has is redirected.
pub const POD_LISTED: u32 = 1 << 14;
/// [`PodPolicy::flags`]: the proxy runs in a pod of its own; `proxy_cgroup` stays 0 and nobody in this pod is it.
pub const POD_PROXY_ELSEWHERE: u32 = 1 << 15;

/// Map `POLICY` (hash by pod cgroup id): who a pod is and what holds for it.
///
/// Written by the agent; the programs only add entries of unknown pods (never over an existing one) and remove
/// those of cgroups that are gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PodPolicy {
    /// [`crate::ids::PodKind`].
    pub kind: u32,
    /// [`crate::ids::Mode`], or [`crate::ids::MODE_INHERIT`].
    pub mode: u32,
    /// `POD_*`.
    pub flags: u32,
    /// The pod's cgroup level; its containers are one deeper.
    pub level: u32,
    /// The proxy container's cgroup id; 0 while unknown.
    pub proxy_cgroup: u64,
    /// When the pod's cgroup was first seen, ns of `CLOCK_MONOTONIC`.
    pub since_ns: u64,
    /// Grows with each write by the agent.
    pub revision: u64,
    /// The proxy's UID, as the pod's user namespace shows it.
    pub proxy_uid: u32,
    /// Key part of the exemption maps.
    pub exempt_set: u32,
    /// Packets with `skb->mark & mark_mask == mark` are the proxy's.
    pub mark: u32,
    /// See `mark`.
    pub mark_mask: u32,
}

/// Map `COUNTERS` (per-CPU hash by pod cgroup id) and, as key 0 of array `TOTALS`, the node's sums.
///
/// Written by the programs only: this is the truth, the ring buffer is a sample of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PodCounters {
    /// By [`crate::ids::Counter`].
    pub count: [u64; COUNTERS],
    /// Last redirect proof by family, ns of `CLOCK_MONOTONIC`; 0 = never.
    pub redirect_ns: [u64; 2],
    /// Last bypass by family.
    pub bypass_ns: [u64; 2],
    /// Token bucket of the events: when it was last filled.
    pub bucket_ns: u64,
    /// Token bucket of the events: what is left.
    pub bucket_tokens: u64,
}

impl PodCounters {
    /// All zero.
    pub const ZERO: Self =
        Self { count: [0; COUNTERS], redirect_ns: [0; 2], bypass_ns: [0; 2], bucket_ns: 0, bucket_tokens: 0 };
}

impl Default for PodCounters {
    fn default() -> Self {
        Self::ZERO
    }
}

/// Record of ring buffer `EVENTS`: one bypass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Event {
    /// ns of `CLOCK_MONOTONIC`.
    pub ts_ns: u64,
    /// The pod's cgroup id.
    pub pod: u64,
    /// The container's cgroup id; 0 if the socket belongs to the pod's own cgroup.
    pub container: u64,
    /// The socket's cookie.
    pub cookie: u64,
    /// Source.
    pub saddr: Address,
    /// Destination of the packet.
    pub daddr: Address,
    /// The socket's UID in the pod's user namespace.
    pub uid: u32,
    /// Index of the device in the pod's network namespace.
    pub ifindex: u32,
    /// Source port, host order.
    pub sport: u16,
    /// Destination port, host order.
    pub dport: u16,
    /// 4 or 6.
    pub family: u16,
    /// IP protocol number.
    pub protocol: u16,
    /// [`crate::ids::Verdict`].
    pub verdict: u16,
    /// [`crate::ids::Action`].
    pub action: u16,
    /// [`crate::ids::Hook`].
    pub hook: u16,
    /// [`crate::ids::Mode`] in effect.
    pub mode: u16,
}

/// Map `PROBES` (hash by socket cookie): what became of the SYN of one of the agent's probes.
///
/// The agent adds an entry before it connects and removes it afterwards; program `nb_probe` fills it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ProbeRecord {
    /// SYNs seen: 0 until the first.
    pub seen: u32,
    /// Index of the device in the probed network namespace.
    pub ifindex: u32,
    /// `skb->mark`.
    pub mark: u32,
    /// Destination port of the packet, host order.
    pub dport: u32,
    /// Destination of the packet.
    pub daddr: Address,
}

/// Between two connections of a refused pod that are let through to be judged, ns: so long may a pod that was repaired
/// unnoticed still be refused.
pub const HALF_OPEN_NS: u64 = 1_000_000_000;

/// Map `REFUSALS` (hash by pod cgroup id): what `POD_FASTFAIL4`/`6` came to, per family.
///
/// The agent writes an entry before it sets the flags; from then on the programs do, until it is written anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Refusal {
    /// When a connect was last let through to be judged, ns of `CLOCK_MONOTONIC`.
    pub tried_ns: [u64; 2],
    /// When a redirect proof was seen since: nothing is refused any more. 0 = never.
    pub healed_ns: [u64; 2],
}

/// Longest path that a [`CgroupRecord`] carries, bytes; more than a parent's prefix and a pod's name.
pub const CGROUP_PATH_MAX: usize = 384;

/// Record of ring buffer `CGROUPS`: a cgroup below a parent was made or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct CgroupRecord {
    /// Cgroup id.
    pub id: u64,
    /// Level; the root is 0.
    pub level: u32,
    /// [`crate::ids::CgroupChange`].
    pub change: u32,
    /// Used bytes of `path`; `CGROUP_PATH_MAX` means that it may be cut.
    pub path_len: u32,
    /// Zero.
    pub reserved: u32,
    /// Path below the cgroup root, from `/`.
    pub path: [u8; CGROUP_PATH_MAX],
}

/// Data part of the key of LPM trie `EXEMPT_PORTS`: a range of ports is a few prefixes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PortKey {
    /// [`PodPolicy::exempt_set`], big-endian.
    pub set: [u8; 4],
    /// IP protocol number.
    pub protocol: u8,
    /// `LIST_*` of [`crate::exempt`].
    pub list: u8,
    /// Big-endian.
    pub port: [u8; 2],
}

impl PortKey {
    /// Bits before the port.
    pub const FIXED_BITS: u32 = 48;

    /// The key of one port.
    #[inline(always)]
    pub const fn new(set: u32, protocol: u8, list: u8, port: u16) -> Self {
        Self { set: set.to_be_bytes(), protocol, list, port: port.to_be_bytes() }
    }
}

/// Data part of the key of LPM trie `EXEMPT_CIDRS`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CidrKey {
    /// [`PodPolicy::exempt_set`], big-endian.
    pub set: [u8; 4],
    /// Zero, zero, `LIST_*` of [`crate::exempt`], 4 or 6.
    pub family: [u8; 4],
    /// The address.
    pub addr: Address,
}

impl CidrKey {
    /// Bits before the address.
    pub const FIXED_BITS: u32 = 64;

    /// The key of one address; `family` is 4 or 6.
    #[inline(always)]
    pub const fn new(set: u32, list: u8, family: u8, addr: Address) -> Self {
        Self { set: set.to_be_bytes(), family: [0, 0, list, family], addr }
    }
}

/// [`IdKey::kind`]: a UID.
pub const ID_UID: u32 = 0;
/// [`IdKey::kind`]: the index of a device in the pod's network namespace.
pub const ID_IFINDEX: u32 = 1;

/// Key of hash `EXEMPT_IDS`. The value is [`crate::exempt::ANY_PORT`] or the `LIST_USER…` of the only ports that are
/// exempt for this user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct IdKey {
    /// [`PodPolicy::exempt_set`].
    pub set: u32,
    /// `ID_*`.
    pub kind: u32,
    /// The UID or the index.
    pub value: u32,
}

/// Longest namespace and pod name in [`PodName`], bytes (Kubernetes: 63 and 253).
pub const NAMESPACE_MAX: usize = 64;
/// See [`NAMESPACE_MAX`].
pub const NAME_MAX: usize = 256;

/// Map `NAMES` (hash by pod cgroup id): what `nobypass status` shows when no agent runs. Only the agent uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PodName {
    /// Zero-padded.
    pub namespace: [u8; NAMESPACE_MAX],
    /// Zero-padded.
    pub name: [u8; NAME_MAX],
    /// Mesh profile, zero-padded.
    pub mesh: [u8; 32],
}

/// Key of map `CARRIED` that is no pod: the node's sums.
pub const CARRIED_NODE: u64 = 0;

/// Key of map `LEDGER` (hash): whose sums. Only the agent uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct LedgerKey {
    /// Zero-padded.
    pub namespace: [u8; NAMESPACE_MAX],
    /// Mesh profile, zero-padded.
    pub mesh: [u8; 32],
}

/// Value of map `LEDGER`: what pods that are gone had counted, so that sums go on when agents come and go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct LedgerSums {
    /// By [`crate::ids::Counter`].
    pub count: [u64; COUNTERS],
}

/// Sizes without padding, checked when anything that uses this crate is compiled.
const _: () = {
    assert!(size_of::<Parent>() == 16 + 16 * PREFIX_WORDS);
    assert!(size_of::<Config>() == 16 + 16 + 16 + 4 * MAX_LEVELS + size_of::<Parent>() * MAX_PARENTS);
    assert!(size_of::<PodPolicy>() == 56);
    assert!(size_of::<PodCounters>() == 8 * (COUNTERS + 6));
    assert!(size_of::<Event>() == 88);
    assert!(size_of::<ProbeRecord>() == 32);
    assert!(size_of::<Refusal>() == 32);
    assert!(size_of::<CgroupRecord>() == 24 + CGROUP_PATH_MAX);
    assert!(core::mem::offset_of!(CgroupRecord, path).is_multiple_of(8) && CGROUP_PATH_MAX.is_multiple_of(8));
    assert!(CGROUP_PATH_MAX >= 8 * PREFIX_WORDS);
    assert!(size_of::<PortKey>() == 8);
    assert!(size_of::<CidrKey>() == 24);
    assert!(size_of::<IdKey>() == 12);
    assert!(size_of::<PodName>() == NAMESPACE_MAX + NAME_MAX + 32);
    assert!(size_of::<LedgerKey>() == NAMESPACE_MAX + 32);
    assert!(size_of::<LedgerSums>() == 8 * COUNTERS);
};

#[cfg(feature = "user")]
mod user {
    use super::{
        CidrKey, Config, IdKey, LedgerKey, LedgerSums, PodCounters, PodName, PodPolicy, PortKey, ProbeRecord,
        Refusal,
    };

    /// Tells aya that a type is plain data.
    macro_rules! pod {
        ($($type:ty),+) => {
            $(
                // SAFETY: repr(C), integers only, and the size asserts above rule out padding.
                unsafe impl aya::Pod for $type {}
            )+
        };
    }
    pod!(
        CidrKey,
        Config,
        IdKey,
        LedgerKey,
        LedgerSums,
        PodCounters,
        PodName,
        PodPolicy,
        PortKey,
        ProbeRecord,
        Refusal
    );
}
