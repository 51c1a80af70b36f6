//! Typed access to the maps. The only place that touches aya's map types; each map has one writing task.

use std::borrow::BorrowMut;
use std::collections::BTreeSet;
use std::path::Path;

use aya::maps::lpm_trie::Key;
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, MapError, PerCpuArray, PerCpuHashMap};
use nobypass_common::abi::{
    ABI_VERSION, CARRIED_NODE, CidrKey, Config, IdKey, LedgerKey, LedgerSums, PodCounters, PodName,
    PodPolicy, PortKey, ProbeRecord, Refusal,
};
use nobypass_common::headers::Address;
use nobypass_common::ids::Mode;

use super::error::BpfError;
use super::pins::PinDir;
use crate::sys::clock::monotonic_ns;

/// Bytes of a key or value.
#[expect(clippy::cast_possible_truncation, reason = "a few hundred bytes at most")]
const fn size<T>() -> u32 {
    size_of::<T>() as u32
}

/// Maps that are pinned: name, key size, value size (0: none of one's own).
pub const PINNED: [(&str, u32, u32); 18] = [
    ("CONFIG", 4, size::<Config>()),
    ("HEARTBEAT", 4, 8),
    ("POLICY", 8, size::<PodPolicy>()),
    ("COUNTERS", 8, size::<PodCounters>()),
    ("TOTALS", 4, size::<PodCounters>()),
    ("CARRIED", 8, size::<PodCounters>()),
    ("EXEMPT_PORTS", 4 + size::<PortKey>(), 1),
    ("EXEMPT_CIDRS", 4 + size::<CidrKey>(), 1),
    ("EXEMPT_IDS", size::<IdKey>(), 1),
    ("NODE_ADDRS", 16, 1),
    ("NAMES", 8, size::<PodName>()),
    ("LEDGER", size::<LedgerKey>(), size::<LedgerSums>()),
    ("PROBES", 8, size::<ProbeRecord>()),
    ("REFUSALS", 8, size::<Refusal>()),
    ("EVENTS", 0, 0),
    ("CGROUPS", 0, 0),
    ("SCRATCH", 4, size::<nobypass_common::abi::CgroupRecord>()),
    ("SYN_MARKS", 4, 4),
];

/// Maps with an entry for each pod.
pub const PER_POD: [&str; 5] = ["POLICY", "COUNTERS", "CARRIED", "NAMES", "REFUSALS"];

/// Whether a map of this name has the layout of [`PINNED`].
///
/// # Errors
/// As bpf(2) says.
pub fn has_our_layout(name: &str, map: &MapData) -> Result<bool, MapError> {
    let info = map.info()?;
    let found = (info.key_size(), info.value_size());
    Ok(PINNED.iter().any(|(known, key, value)| *known == name && (*key, *value) == found))
}

/// The maps, opened from their pins: the agent and, while no agent runs, the command line.
pub struct Maps {
    config: Array<MapData, Config>,
    heartbeat: Array<MapData, u64>,
    policy: HashMap<MapData, u64, PodPolicy>,
    counters: PerCpuHashMap<MapData, u64, PodCounters>,
    totals: PerCpuArray<MapData, PodCounters>,
    carried: HashMap<MapData, u64, PodCounters>,
    exempt_ports: LpmTrie<MapData, PortKey, u8>,
    exempt_cidrs: LpmTrie<MapData, CidrKey, u8>,
    exempt_ids: HashMap<MapData, IdKey, u8>,
    node_addrs: HashMap<MapData, Address, u8>,
    names: HashMap<MapData, u64, PodName>,
    ledger: HashMap<MapData, LedgerKey, LedgerSums>,
    refusals: HashMap<MapData, u64, Refusal>,
    capacity: u32,
}

impl std::fmt::Debug for Maps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Maps").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

/// The entries of one set of exemptions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exemptions {
    /// `EXEMPT_PORTS`: bits of the port, key.
    pub ports: Vec<(u32, PortKey)>,
    /// `EXEMPT_CIDRS`: bits of the address, key.
    pub cidrs: Vec<(u32, CidrKey)>,
    /// `EXEMPT_IDS`: key, and `ANY_PORT` or the list of ports that it is limited to.
    pub ids: Vec<(IdKey, u8)>,
}

macro_rules! open {
    ($dir:expr, $name:literal, $variant:ident) => {{
        let map = |source| BpfError::Map { map: $name, source };
        let data = MapData::from_pin($dir.map($name)).map_err(map)?;
        Map::$variant(data).try_into().map_err(map)?
    }};
}

impl Maps {
    /// Opens the pinned maps.
    ///
    /// # Errors
    /// [`BpfError::NoPins`], or [`BpfError::Map`] with EPERM without the capabilities.
    pub fn open(dir: &PinDir) -> Result<Self, BpfError> {
        if !Path::exists(&dir.map("CONFIG")) {
            return match std::fs::metadata(dir.map("CONFIG")) {
                Err(source) if source.kind() == std::io::ErrorKind::PermissionDenied => {
                    Err(BpfError::Pin { what: "read", path: dir.base().into(), source })
                }
                _ => Err(BpfError::NoPins { dir: dir.base().into() }),
            };
        }
        let policy = MapData::from_pin(dir.map("POLICY")).map_err(failed("POLICY"))?;
        let capacity = policy.info().map_err(failed("POLICY"))?.max_entries();
        Ok(Self {
            config: open!(dir, "CONFIG", Array),
            heartbeat: open!(dir, "HEARTBEAT", Array),
            policy: open!(dir, "POLICY", HashMap),
            counters: open!(dir, "COUNTERS", PerCpuHashMap),
            totals: open!(dir, "TOTALS", PerCpuArray),
            carried: open!(dir, "CARRIED", HashMap),
            exempt_ports: open!(dir, "EXEMPT_PORTS", LpmTrie),
            exempt_cidrs: open!(dir, "EXEMPT_CIDRS", LpmTrie),
            exempt_ids: open!(dir, "EXEMPT_IDS", HashMap),
            node_addrs: open!(dir, "NODE_ADDRS", HashMap),
            names: open!(dir, "NAMES", HashMap),
            ledger: open!(dir, "LEDGER", HashMap),
            refusals: open!(dir, "REFUSALS", HashMap),
            capacity,
        })
    }

    /// Pods that the maps have room for.
    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The node's settings.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn config(&self) -> Result<Config, BpfError> {
        self.config.get(&0, 0).map_err(failed("CONFIG"))
    }

    /// Replaces the node's settings: the next packet obeys.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn set_config(&mut self, config: &Config) -> Result<(), BpfError> {
        self.config.set(0, Config { abi_version: ABI_VERSION, ..*config }, 0).map_err(failed("CONFIG"))
    }

    /// Changes the node's mode and nothing else.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn set_mode(&mut self, mode: Mode) -> Result<(), BpfError> {
        let config = self.config()?;
        self.set_config(&Config { mode: mode.code(), ..config })
    }

    /// Tells the programs that an agent is alive.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn beat(&mut self) -> Result<(), BpfError> {
        self.heartbeat.set(0, monotonic_ns(), 0).map_err(failed("HEARTBEAT"))
    }

    /// When an agent was last alive, ns of `CLOCK_MONOTONIC`.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn heartbeat(&self) -> Result<u64, BpfError> {
        self.heartbeat.get(&0, 0).map_err(failed("HEARTBEAT"))
    }

    /// All entries of `POLICY`.
    pub fn policies(&self) -> Vec<(u64, PodPolicy)> {
        self.policy.iter().filter_map(Result::ok).collect()
    }

    /// One entry of `POLICY`.
    pub fn policy(&self, pod: u64) -> Option<PodPolicy> {
        self.policy.get(&pod, 0).ok()
    }

    /// Writes an entry of `POLICY`.
    ///
    /// # Errors
    /// [`BpfError::Map`], `E2BIG` when it is full.
    pub fn set_policy(&mut self, pod: u64, policy: &PodPolicy) -> Result<(), BpfError> {
        self.policy.insert(pod, policy, 0).map_err(failed("POLICY"))
    }

    /// Adds an entry of `POLICY` for a cgroup that has none; the kernel may have been first.
    ///
    /// # Errors
    /// [`BpfError::Map`], `E2BIG` when it is full.
    pub fn add_policy(&mut self, pod: u64, policy: &PodPolicy) -> Result<(), BpfError> {
        const NO_EXIST: u64 = 1;
        match self.policy.insert(pod, policy, NO_EXIST) {
            Err(source) if !is_errno(&source, libc::EEXIST) => Err(BpfError::Map { map: "POLICY", source }),
            _ => Ok(()),
        }
    }

    /// Starts a refusal: to be called before `POD_FASTFAIL4`/`6` are set.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn set_refusal(&mut self, pod: u64, refusal: &Refusal) -> Result<(), BpfError> {
        self.refusals.insert(pod, refusal, 0).map_err(failed("REFUSALS"))
    }

    /// What a refusal came to.
    pub fn refusal(&self, pod: u64) -> Option<Refusal> {
        self.refusals.get(&pod, 0).ok()
    }

    /// Removes what is kept for a pod that is gone.
    ///
    /// # Errors
    /// [`BpfError::Map`]; an absent entry is none.
    pub fn forget(&mut self, pod: u64) -> Result<(), BpfError> {
        absent_is_fine("POLICY", self.policy.remove(&pod))?;
        absent_is_fine("COUNTERS", self.counters.remove(&pod))?;
        absent_is_fine("CARRIED", self.carried.remove(&pod))?;
        absent_is_fine("REFUSALS", self.refusals.remove(&pod))?;
        absent_is_fine("NAMES", self.names.remove(&pod))
    }

    /// A pod's counters, summed over the CPUs and with what was carried over from another layout.
    pub fn counters(&self, pod: u64) -> Option<PodCounters> {
        let counted = self.counters.get(&pod, 0).ok().map(|values| sum(values.iter()));
        match (counted, self.carried.get(&pod, 0).ok()) {
            (Some(counted), Some(carried)) => Some(sum([counted, carried].iter())),
            (counted, carried) => counted.or(carried),
        }
    }

    /// The pods that have counters.
    pub fn counted(&self) -> BTreeSet<u64> {
        let carried = self.carried.keys().filter_map(Result::ok).filter(|pod| *pod != CARRIED_NODE);
        self.counters.keys().filter_map(Result::ok).chain(carried).collect()
    }

    /// The node's counters.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn totals(&self) -> Result<PodCounters, BpfError> {
        let counted = sum(self.totals.get(&0, 0).map_err(failed("TOTALS"))?.iter());
        Ok(match self.carried.get(&CARRIED_NODE, 0) {
            Ok(carried) => sum([counted, carried].iter()),
            Err(_) => counted,
        })
    }

    /// Sets what the programs of another layout counted, of a pod or of the node (`CARRIED_NODE`).
    ///
    /// # Errors
    /// [`BpfError::Map`], `E2BIG` when it is full.
    pub fn set_carried(&mut self, of: u64, counters: &PodCounters) -> Result<(), BpfError> {
        self.carried.insert(of, counters, 0).map_err(failed("CARRIED"))
    }

    /// Sets a pod's name for `nobypass status`.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn set_name(&mut self, pod: u64, name: &PodName) -> Result<(), BpfError> {
        self.names.insert(pod, name, 0).map_err(failed("NAMES"))
    }

    /// A pod's name.
    pub fn name(&self, pod: u64) -> Option<PodName> {
        self.names.get(&pod, 0).ok()
    }

    /// Pods that have a name.
    pub fn named(&self) -> Vec<u64> {
        self.names.keys().filter_map(Result::ok).collect()
    }

    /// Sums of pods that are gone.
    pub fn ledger(&self) -> Vec<(LedgerKey, LedgerSums)> {
        self.ledger.iter().filter_map(Result::ok).collect()
    }

    /// Sets the sums of pods that are gone of one namespace and mesh.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn set_ledger(&mut self, key: &LedgerKey, sums: &LedgerSums) -> Result<(), BpfError> {
        self.ledger.insert(key, sums, 0).map_err(failed("LEDGER"))
    }

    /// Makes the node's addresses exactly these.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn set_node_addresses(&mut self, addresses: &[Address]) -> Result<(), BpfError> {
        replace(&mut self.node_addrs, addresses).map_err(failed("NODE_ADDRS"))
    }

    /// Adds an exempt port or block of ports: `(prefix length of the port, key)`.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn add_exempt_port(&mut self, port_bits: u32, key: PortKey) -> Result<(), BpfError> {
        let key = Key::new(PortKey::FIXED_BITS + port_bits, key);
        self.exempt_ports.insert(&key, 1, 0).map_err(failed("EXEMPT_PORTS"))
    }

    /// Adds an exempt network: `(prefix length of the address, key)`.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn add_exempt_cidr(&mut self, address_bits: u32, key: CidrKey) -> Result<(), BpfError> {
        let key = Key::new(CidrKey::FIXED_BITS + address_bits, key);
        self.exempt_cidrs.insert(&key, 1, 0).map_err(failed("EXEMPT_CIDRS"))
    }

    /// Adds an exempt device, or UID with the list of ports that its exemption is limited to (`ANY_PORT`: none).
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn add_exempt_id(&mut self, key: IdKey, ports: u8) -> Result<(), BpfError> {
        self.exempt_ids.insert(key, ports, 0).map_err(failed("EXEMPT_IDS"))
    }

    /// Adds all entries of a set.
    ///
    /// # Errors
    /// [`BpfError::Map`], `ENOSPC` or `E2BIG` when a map is full; what was added by then stays.
    pub fn add_exemptions(&mut self, entries: &Exemptions) -> Result<(), BpfError> {
        let Exemptions { ports, cidrs, ids } = entries;
        ports.iter().try_for_each(|(bits, key)| self.add_exempt_port(*bits, *key))?;
        cidrs.iter().try_for_each(|(bits, key)| self.add_exempt_cidr(*bits, *key))?;
        ids.iter().try_for_each(|(key, ports)| self.add_exempt_id(*key, *ports))
    }

    /// Removes all entries of a set.
    ///
    /// # Errors
    /// [`BpfError::Map`]; an absent entry is none.
    pub fn remove_exemptions(&mut self, entries: &Exemptions) -> Result<(), BpfError> {
        let Exemptions { ports, cidrs, ids } = entries;
        for (bits, key) in ports {
            let key = Key::new(PortKey::FIXED_BITS + bits, *key);
            absent_is_fine("EXEMPT_PORTS", self.exempt_ports.remove(&key))?;
        }
        for (bits, key) in cidrs {
            let key = Key::new(CidrKey::FIXED_BITS + bits, *key);
            absent_is_fine("EXEMPT_CIDRS", self.exempt_cidrs.remove(&key))?;
        }
        ids.iter().try_for_each(|(key, _)| absent_is_fine("EXEMPT_IDS", self.exempt_ids.remove(key)))
    }

    /// Numbers of the sets that have exemptions.
    pub fn exempt_sets(&self) -> BTreeSet<u32> {
        let ports =
            self.exempt_ports.keys().filter_map(Result::ok).map(|key| u32::from_be_bytes(key.data().set));
        let cidrs =
            self.exempt_cidrs.keys().filter_map(Result::ok).map(|key| u32::from_be_bytes(key.data().set));
        ports.chain(cidrs).chain(self.exempt_ids.keys().filter_map(Result::ok).map(|key| key.set)).collect()
    }

    /// Removes the sets that no entry of `POLICY` refers to: an earlier agent's.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn drop_unused_exempt_sets(&mut self) -> Result<(), BpfError> {
        let used: BTreeSet<u32> = self.policies().iter().map(|(_, policy)| policy.exempt_set).collect();
        self.exempt_sets().difference(&used).try_for_each(|set| self.remove_exempt_set(*set))
    }

    /// Removes all exemptions of a set, whatever they are: for what an earlier agent left.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn remove_exempt_set(&mut self, set: u32) -> Result<(), BpfError> {
        let ports: Vec<Key<PortKey>> = self.exempt_ports.keys().filter_map(Result::ok).collect();
        for key in ports.iter().filter(|key| u32::from_be_bytes(key.data().set) == set) {
            absent_is_fine("EXEMPT_PORTS", self.exempt_ports.remove(key))?;
        }
        let cidrs: Vec<Key<CidrKey>> = self.exempt_cidrs.keys().filter_map(Result::ok).collect();
        for key in cidrs.iter().filter(|key| u32::from_be_bytes(key.data().set) == set) {
            absent_is_fine("EXEMPT_CIDRS", self.exempt_cidrs.remove(key))?;
        }
        let ids: Vec<IdKey> = self.exempt_ids.keys().filter_map(Result::ok).collect();
        for key in ids.iter().filter(|key| key.set == set) {
            absent_is_fine("EXEMPT_IDS", self.exempt_ids.remove(key))?;
        }
        Ok(())
    }
}

/// Adds up the CPUs' values; times are the latest.
pub fn sum<'a>(values: impl Iterator<Item = &'a PodCounters>) -> PodCounters {
    let mut total = PodCounters::ZERO;
    for PodCounters { count, redirect_ns, bypass_ns, bucket_ns: _, bucket_tokens: _ } in values {
        for (sum, count) in total.count.iter_mut().zip(count) {
            *sum = sum.wrapping_add(*count);
        }
        for (latest, seen) in total.redirect_ns.iter_mut().zip(redirect_ns) {
            *latest = (*latest).max(*seen);
        }
        for (latest, seen) in total.bypass_ns.iter_mut().zip(bypass_ns) {
            *latest = (*latest).max(*seen);
        }
    }
    total
}

fn replace<T: BorrowMut<MapData>>(
    map: &mut HashMap<T, Address, u8>,
    wanted: &[Address],
) -> Result<(), MapError> {
    let old: Vec<Address> = map.keys().filter_map(Result::ok).collect();
    for key in wanted {
        map.insert(key, 1, 0)?;
    }
    for key in old.iter().filter(|key| !wanted.contains(key)) {
        match map.remove(key) {
            Err(error) if !is_errno(&error, libc::ENOENT) => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn failed(map: &'static str) -> impl Fn(MapError) -> BpfError {
    move |source| BpfError::Map { map, source }
}

fn absent_is_fine(map: &'static str, result: Result<(), MapError>) -> Result<(), BpfError> {
    match result {
        Ok(()) | Err(MapError::KeyNotFound) => Ok(()),
        Err(error) if is_errno(&error, libc::ENOENT) => Ok(()),
        Err(source) => Err(BpfError::Map { map, source }),
    }
}

/// Whether a map operation failed with this errno.
pub fn is_errno(error: &MapError, errno: i32) -> bool {
    matches!(error, MapError::SyscallError(error) if error.io_error.raw_os_error() == Some(errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_added_and_the_latest_time_wins() {
        let mut a = PodCounters::ZERO;
        a.count[3] = 2;
        a.redirect_ns = [5, 0];
        let mut b = PodCounters::ZERO;
        b.count[3] = 40;
        b.redirect_ns = [4, 9];
        let total = sum([a, b].iter());
        assert_eq!((total.count[3], total.redirect_ns), (42, [5, 9]));
    }
}
