//! Whose packet it is.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use nobypass_common::abi::{Config, MAX_LEVELS, MAX_PARENTS, PodPolicy};
use nobypass_common::ids::PodKind;

use crate::maps::{CONFIG, HEARTBEAT, OVERFLOW, POLICY};

/// Update flag: only if there is no entry (`BPF_NOEXIST`).
const NO_EXIST: u64 = 1;

/// The pod of a socket or process.
pub struct Owner {
    /// The pod's cgroup id; 0 if it belongs to no pod.
    pub id: u64,
    /// Its entry in `POLICY`; `None` if there is none and none could be added.
    pub policy: Option<&'static PodPolicy>,
    /// When a pod that found no room was first seen, ns of `CLOCK_MONOTONIC`; 0 for others.
    pub since_ns: u64,
}

/// No pod at all.
const NOBODY: Owner = Owner { id: 0, policy: None, since_ns: 0 };

/// The node's settings, `None` before the agent has written them.
#[inline(always)]
pub fn config() -> Option<&'static Config> {
    let config = CONFIG.get(0)?;
    if config.mode == 0 { None } else { Some(config) }
}

/// When an agent was last alive, ns of `CLOCK_MONOTONIC`.
#[inline(always)]
pub fn agent_seen_ns() -> u64 {
    HEARTBEAT.get(0).map_or(0, |seen| *seen)
}

/// Whether there has been no agent for longer than the operator lets the programs drop without one.
#[inline(always)]
pub fn is_alone(config: &Config) -> bool {
    // SAFETY: no memory is touched.
    config.max_silence_ns != 0
        && unsafe { bpf_ktime_get_ns() }.saturating_sub(agent_seen_ns()) > config.max_silence_ns
}

/// Finds the pod, given the cgroup id of the ancestor at a level (0 above the cgroup's own level).
#[inline(always)]
pub fn owner(config: &Config, mut ancestor: impl FnMut(u32) -> u64) -> Owner {
    let mut turn = 0;
    while turn < MAX_LEVELS {
        if turn >= config.level_count as usize {
            break;
        }
        let id = ancestor(config.pod_levels[turn]);
        if id != 0
            && let Some(policy) = get(id)
            && policy.kind != PodKind::Qos.code()
        {
            return Owner { id, policy: Some(policy), since_ns: 0 };
        }
        turn += 1;
    }
    unlisted(config, ancestor)
}

/// A pod without an entry: made before the tracepoint was there, or the map was full. It is one level below its
/// parent, or two below a QoS class.
#[inline(always)]
fn unlisted(config: &Config, mut ancestor: impl FnMut(u32) -> u64) -> Owner {
    let mut turn = 0;
    while turn < MAX_PARENTS {
        if turn >= config.parent_count as usize {
            break;
        }
        let parent = &config.parents[turn];
        if ancestor(parent.level) == parent.cgroup_id {
            let mut level = parent.level + 1;
            let mut id = ancestor(level);
            if id != 0
                && let Some(entry) = get(id)
                && entry.kind == PodKind::Qos.code()
            {
                level += 1;
                id = ancestor(level);
            }
            if id == 0 {
                return NOBODY;
            }
            add(id, level, PodKind::Unknown);
            let policy = get(id);
            let since_ns = if policy.is_some() { 0 } else { without_room(id) };
            return Owner { id, policy, since_ns };
        }
        turn += 1;
    }
    NOBODY
}

/// When a pod was first seen that has no entry and finds no room for one; 0 if that could not be noted.
#[inline(always)]
fn without_room(id: u64) -> u64 {
    // SAFETY: one 8-byte word.
    if let Some(since_ns) = unsafe { OVERFLOW.get(id) } {
        return *since_ns;
    }
    // SAFETY: no memory is touched.
    let now = unsafe { bpf_ktime_get_ns() };
    // An attempt to insert what is there would drive another one out.
    if OVERFLOW.insert(id, now, NO_EXIST).is_ok() { now } else { 0 }
}

/// Adds an entry unless there is one.
#[inline(always)]
pub fn add(id: u64, level: u32, kind: PodKind) -> bool {
    // SAFETY: no memory is touched.
    let since_ns = unsafe { bpf_ktime_get_ns() };
    let entry = PodPolicy {
        kind: kind.code(),
        mode: 0,
        flags: 0,
        level,
        proxy_cgroup: 0,
        since_ns,
        revision: 0,
        proxy_uid: 0,
        exempt_set: 0,
        mark: 0,
        mark_mask: 0,
    };
    POLICY.insert(id, entry, NO_EXIST).is_ok() || get(id).is_some()
}

#[inline(always)]
fn get(id: u64) -> Option<&'static PodPolicy> {
    // SAFETY: entries of a preallocated hash stay mapped; a concurrent update is seen whole or not at all by
    // 8-byte words, and every word stands for itself.
    unsafe { POLICY.get(id) }
}
