//! Every map in one place. Sizes marked "set by the loader" depend on the node's pod limit.

use aya_ebpf::btf_maps::SkStorage;
use aya_ebpf::macros::{btf_map, map};
use aya_ebpf::maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, PerCpuHashMap, RingBuf};
use nobypass_common::abi::{
    CgroupRecord, CidrKey, Config, IdKey, LedgerKey, LedgerSums, PodCounters, PodName, PodPolicy, PortKey,
    ProbeRecord, Refusal,
};
use nobypass_common::headers::Address;

/// The node's settings. Written by the agent only.
#[map]
pub static CONFIG: Array<Config> = Array::with_max_entries(1, 0);

/// When the agent last showed a sign of life, ns of `CLOCK_MONOTONIC`. Written by the agent only.
#[map]
pub static HEARTBEAT: Array<u64> = Array::with_max_entries(1, 0);

/// Who each pod is. Entries set by the loader.
#[map]
pub static POLICY: HashMap<u64, PodPolicy> = HashMap::with_max_entries(1024, 0);

/// When pods that found no room in `POLICY` were first seen, ns of `CLOCK_MONOTONIC`: what their hold is counted from. It
/// never fills up: where even more pods come, the one idle for longest is forgotten, and held once more. Not pinned.
#[map]
pub static OVERFLOW: LruHashMap<u64, u64> = LruHashMap::with_max_entries(4096, 0);

/// What each pod did. Written by the programs only, apart from `POLICY` so that an update of one never loses one
/// of the other. Entries set by the loader: a per-CPU map costs entries × CPUs.
#[map]
pub static COUNTERS: PerCpuHashMap<u64, PodCounters> = PerCpuHashMap::with_max_entries(1024, 0);

/// The node's sums: exact even where a pod's own counters are gone or had no room.
#[map]
pub static TOTALS: PerCpuArray<PodCounters> = PerCpuArray::with_max_entries(1, 0);

/// Ports that a mesh exempts.
#[map]
pub static EXEMPT_PORTS: LpmTrie<PortKey, u8> = LpmTrie::with_max_entries(65_536, 0);

/// Networks that a mesh exempts.
#[map]
pub static EXEMPT_CIDRS: LpmTrie<CidrKey, u8> = LpmTrie::with_max_entries(65_536, 0);

/// UIDs and devices that a mesh exempts.
#[map]
pub static EXEMPT_IDS: HashMap<IdKey, u8> = HashMap::with_max_entries(4096, 0);

/// The node's own addresses: the source of kubelet's probes.
#[map]
pub static NODE_ADDRS: HashMap<Address, u8> = HashMap::with_max_entries(256, 0);

/// Names of pods for `nobypass status` without an agent; the programs never read it.
#[map]
pub static NAMES: HashMap<u64, PodName> = HashMap::with_max_entries(1024, 1 /* BPF_F_NO_PREALLOC */);

/// Sums of pods that are gone, by namespace and mesh; the programs never read it.
#[map]
pub static LEDGER: HashMap<LedgerKey, LedgerSums> =
    HashMap::with_max_entries(4096, 1 /* BPF_F_NO_PREALLOC */);

/// What programs of another layout counted, by pod and for the node (`CARRIED_NODE`). Apart from `COUNTERS`, which only the
/// programs write; they never read this. Entries set by the loader.
#[map]
pub static CARRIED: HashMap<u64, PodCounters> =
    HashMap::with_max_entries(1024, 1 /* BPF_F_NO_PREALLOC */);

/// Probes under way: one at a time is usual.
#[map]
pub static PROBES: HashMap<u64, ProbeRecord> = HashMap::with_max_entries(64, 0);

/// Pods whose connections are refused at once. Entries set by the loader.
#[map]
pub static REFUSALS: HashMap<u64, Refusal> = HashMap::with_max_entries(1024, 0);

/// A rate-limited sample of bypasses, see `emit`.
#[map]
pub static EVENTS: RingBuf = RingBuf::with_byte_size(256 * 1024, 0);

/// Cgroups made and removed below the parents. Apart from `EVENTS`, so that a flood there hides no pod here.
#[map]
pub static CGROUPS: RingBuf = RingBuf::with_byte_size(256 * 1024, 0);

/// Room to read a path into: more than the stack has. The tracepoints run under `cgroup_mutex`, one at a time.
#[map]
pub static SCRATCH: PerCpuArray<CgroupRecord> = PerCpuArray::with_max_entries(1, 0);

/// Marks of sockets whose SYN was dropped, see `facts`: exact, and gone with the socket.
#[btf_map]
pub static SYN_MARKS: SkStorage<u32> = SkStorage::new();
