//! The programs of the object on hand-made packets: a pod, this process in it, a network of its own, nothing attached.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::rc::Rc;

use aya::maps::{Array, HashMap, PerCpuArray, PerCpuHashMap, lpm_trie};
use aya::programs::CgroupSkb;
use aya::{Ebpf, EbpfLoader};
use nobypass_common::abi::{
    ABI_VERSION, CidrKey, Config, IdKey, POD_PROXY_UID, Parent, PodCounters, PodPolicy, PortKey,
};
use nobypass_common::headers::Address;
use nobypass_common::ids::{COUNTERS, Mode, PodKind};
use nobypass_testkit::bpf::{Skb, test_run};
use nobypass_testkit::cgroup::{Cgroup, Entered, Pod, Qos, Scratch, v2_root};
use nobypass_testkit::netns::Netns;

/// Pods that the maps have room for.
pub const MAX_PODS: u32 = 12_000;
/// The proxy's UID; the kernel's test socket has UID 0.
pub const PROXY_UID: u32 = 2102;

/// See the module.
pub struct Lab {
    ebpf: Ebpf,
    config: Config,
    place: Rc<Place>,
}

/// Where this process is.
struct Place {
    // In the order in which they have to go.
    _inside: Entered,
    level: u32,
    pod: Pod,
    app: Cgroup,
    scratch: Scratch,
}

/// Runs `f` with a lab, in a network namespace that has a device beside `lo`: its index is [`DEVICE`].
pub fn with_lab<T: Send>(object: &[u8], f: impl FnOnce(&mut Lab) -> T + Send) -> T {
    let netns = Netns::new("lab").unwrap();
    netns
        .ip(&format!(
            "link add eth0 index {DEVICE} type veth peer name far\nlink set eth0 up\nlink set far up"
        ))
        .unwrap();
    netns.run_in(|| f(&mut Lab::new(object, Rc::new(Place::new())))).unwrap()
}

/// Index of the device that leads out of the pod.
pub const DEVICE: u32 = 77;

impl Place {
    fn new() -> Self {
        let scratch = Scratch::new().unwrap();
        let pod = scratch.pod(Qos::Burstable, "2c48913c-b29f-11e7-9350-020968147796").unwrap();
        let app = pod.container(&"a".repeat(64)).unwrap();
        let level = pod.path().strip_prefix(v2_root().unwrap()).unwrap().components().count();
        let level = u32::try_from(level).unwrap();
        Self { _inside: app.enter().unwrap(), level, pod, app, scratch }
    }
}

impl Lab {
    fn new(object: &[u8], place: Rc<Place>) -> Self {
        let level = place.level;
        let mut config = Config {
            abi_version: ABI_VERSION,
            mode: Mode::Audit.code(),
            parent_count: 1,
            level_count: 2,
            ..Config::default()
        };
        // Burstable pods are two levels below the parent, guaranteed ones one.
        config.pod_levels[..2].copy_from_slice(&[level, level - 1]);
        let parent = place.scratch.kubepods();
        config.parents[0] = Parent { cgroup_id: inode(&parent), level: level - 2, ..Parent::default() };
        let mut lab = Self { ebpf: load(object), config, place };
        // A QoS class is an entry like any other.
        let qos = PodPolicy { kind: PodKind::Qos.code(), level: level - 1, ..PodPolicy::default() };
        lab.set_policy(inode(lab.place.pod.path().parent().unwrap()), &qos);
        lab.set_config(|_| ());
        lab
    }

    /// Another object in the same place.
    pub fn beside(&self, object: &[u8]) -> Self {
        Self::new(object, Rc::clone(&self.place))
    }

    /// The pod's cgroup id.
    pub fn pod(&self) -> u64 {
        self.place.pod.id().unwrap()
    }

    /// Cgroup id of the container that this process is in.
    pub fn app(&self) -> u64 {
        self.place.app.id().unwrap()
    }

    /// A meshed pod whose proxy has not started yet: its UID is all that is known of it.
    pub fn meshed(&self) -> PodPolicy {
        PodPolicy {
            kind: PodKind::Meshed.code(),
            level: self.place.level,
            flags: POD_PROXY_UID,
            proxy_uid: PROXY_UID,
            exempt_set: 5,
            ..PodPolicy::default()
        }
    }

    /// The node's settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Changes the node's settings.
    pub fn set_config(&mut self, change: impl FnOnce(&mut Config)) {
        change(&mut self.config);
        let mut map: Array<_, Config> = self.ebpf.map_mut("CONFIG").unwrap().try_into().unwrap();
        map.set(0, self.config, 0).unwrap();
    }

    /// Writes an entry of `POLICY`.
    pub fn set_policy(&mut self, id: u64, policy: &PodPolicy) {
        let mut map: HashMap<_, u64, PodPolicy> = self.ebpf.map_mut("POLICY").unwrap().try_into().unwrap();
        map.insert(id, policy, 0).unwrap();
    }

    /// An entry of `POLICY`.
    pub fn policy(&self, id: u64) -> Option<PodPolicy> {
        let map: HashMap<_, u64, PodPolicy> = self.ebpf.map("POLICY").unwrap().try_into().unwrap();
        map.get(&id, 0).ok()
    }

    /// Removes the pod's entry.
    pub fn remove_policy(&mut self, id: u64) {
        let mut map: HashMap<_, u64, PodPolicy> = self.ebpf.map_mut("POLICY").unwrap().try_into().unwrap();
        // It may not be there.
        let _ = map.remove(&id);
    }

    /// Exempts a port of the set of [`Lab::meshed`].
    pub fn exempt_port(&mut self, key: PortKey) {
        let map = self.ebpf.map_mut("EXEMPT_PORTS").unwrap();
        let mut map: lpm_trie::LpmTrie<_, PortKey, u8> = map.try_into().unwrap();
        map.insert(&lpm_trie::Key::new(PortKey::FIXED_BITS + 16, key), 1, 0).unwrap();
    }

    /// Exempts a network of `bits`.
    pub fn exempt_cidr(&mut self, bits: u32, key: CidrKey) {
        let map = self.ebpf.map_mut("EXEMPT_CIDRS").unwrap();
        let mut map: lpm_trie::LpmTrie<_, CidrKey, u8> = map.try_into().unwrap();
        map.insert(&lpm_trie::Key::new(CidrKey::FIXED_BITS + bits, key), 1, 0).unwrap();
    }

    /// Exempts a UID or device.
    pub fn exempt_id(&mut self, key: IdKey) {
        let mut map: HashMap<_, IdKey, u8> = self.ebpf.map_mut("EXEMPT_IDS").unwrap().try_into().unwrap();
        map.insert(key, 1, 0).unwrap();
    }

    /// Makes an address one of the node's.
    pub fn node_address(&mut self, address: Address) {
        let mut map: HashMap<_, Address, u8> = self.ebpf.map_mut("NODE_ADDRS").unwrap().try_into().unwrap();
        map.insert(address, 1, 0).unwrap();
    }

    /// Fills the maps up to `pods` with pods that do nothing.
    pub fn fill(&mut self, pods: u32) {
        let exempt =
            PodPolicy { kind: PodKind::Exempt.code(), level: self.place.level, ..PodPolicy::default() };
        let cpus = aya::util::nr_cpus().unwrap();
        // Ids of cgroups that are not there.
        for id in (1..=u64::from(pods)).map(|n| u64::MAX - n) {
            self.set_policy(id, &exempt);
            let map = self.ebpf.map_mut("COUNTERS").unwrap();
            let mut map: PerCpuHashMap<_, u64, PodCounters> = map.try_into().unwrap();
            map.insert(id, vec![PodCounters::ZERO; cpus].try_into().unwrap(), 0).unwrap();
        }
    }

    /// Forgets what was counted.
    pub fn clear(&mut self) {
        let pod = self.pod();
        let map = self.ebpf.map_mut("COUNTERS").unwrap();
        let mut map: PerCpuHashMap<_, u64, PodCounters> = map.try_into().unwrap();
        // It may not be there.
        let _ = map.remove(&pod);
        let map = self.ebpf.map_mut("TOTALS").unwrap();
        let mut map: PerCpuArray<_, PodCounters> = map.try_into().unwrap();
        let zero = map.get(&0, 0).unwrap().iter().map(|_| PodCounters::ZERO).collect::<Vec<_>>();
        map.set(0, zero.try_into().unwrap(), 0).unwrap();
    }

    /// What was counted for the pod, by counter; all zero if nothing was.
    pub fn counted(&self) -> [u64; COUNTERS] {
        let map = self.ebpf.map("COUNTERS").unwrap();
        let map: PerCpuHashMap<_, u64, PodCounters> = map.try_into().unwrap();
        map.get(&self.pod(), 0).map_or([0; COUNTERS], |values| sum(values.iter()))
    }

    /// What was counted for the node, by counter.
    pub fn totals(&self) -> [u64; COUNTERS] {
        let map: PerCpuArray<_, PodCounters> = self.ebpf.map("TOTALS").unwrap().try_into().unwrap();
        sum(map.get(&0, 0).unwrap().iter())
    }

    /// Runs a program of the object: its return code and the mean time, ns.
    pub fn run(&self, program: &str, packet: &[u8], skb: Skb, repeat: u32) -> io::Result<(u32, u32)> {
        let program: &CgroupSkb = self.ebpf.program(program).unwrap().try_into().unwrap();
        let ran = test_run(program.fd().unwrap().as_fd(), packet, skb, repeat)?;
        Ok((ran.code, ran.ns))
    }
}

fn load(object: &[u8]) -> Ebpf {
    let mut loader = EbpfLoader::new();
    for map in ["POLICY", "COUNTERS", "NAMES"] {
        loader.map_max_entries(map, MAX_PODS);
    }
    let mut ebpf = loader.load(object).unwrap();
    for name in ["nb_egress", "nb_ingress"] {
        let program: &mut CgroupSkb = ebpf.program_mut(name).unwrap().try_into().unwrap();
        program.load().unwrap();
    }
    ebpf
}

fn inode(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().ino()
}

fn sum<'a>(values: impl Iterator<Item = &'a PodCounters>) -> [u64; COUNTERS] {
    let mut total = [0; COUNTERS];
    for value in values {
        for (sum, count) in total.iter_mut().zip(value.count) {
            *sum += count;
        }
    }
    total
}
