//! Tracepoints `cgroup:cgroup_mkdir` and `cgroup:cgroup_rmdir`: inside mkdir(2) and rmdir(2), so that a pod is
//! known before any process can be in it.

use aya_ebpf::EbpfContext as _;
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::helpers::generated::bpf_probe_read_kernel_str;
use aya_ebpf::programs::TracePointContext;
use aya_log_ebpf::warn;
use nobypass_common::abi::{CGROUP_PATH_MAX, CgroupRecord, Config, MAX_PARENTS};
use nobypass_common::cgroup_path::{self, Place, Words};
use nobypass_common::ids::{CgroupChange, PodKind};

use crate::maps::{CGROUPS, COUNTERS, HEARTBEAT, POLICY, REFUSALS, SCRATCH};
use crate::pod;

/// Offsets of the tracepoints' fields after the common ones
/// (<https://github.com/torvalds/linux/blob/v6.12/include/trace/events/cgroup.h#L52>, the same since 4.17).
const ROOT: usize = 8;
const LEVEL: usize = 12;
const ID: usize = 16;
const PATH: usize = 24;

/// A power of two, below the length of a path and above that of a prefix with a pod's name: lets an offset be masked.
const MAX_OFFSET: usize = 256;

/// An agent silent for longer does not read a dead pod's counters any more. It beats every five seconds.
const SILENCE_NS: u64 = 15_000_000_000;

/// A directory was made.
#[inline(always)]
pub fn mkdir(ctx: &TracePointContext) -> u32 {
    let Some((record, place)) = read(ctx) else { return 0 };
    let kind = match place {
        Place::Pod => Some(PodKind::Unknown),
        Place::Qos => Some(PodKind::Qos),
        Place::Container => None,
    };
    if let Some(kind) = kind
        && !pod::add(record.id, record.level, kind)
    {
        warn!(ctx, "POLICY is full: pod cgroup {} is judged as unknown", record.id);
    }
    report(record, CgroupChange::Made);
    0
}

/// A directory was removed.
#[inline(always)]
pub fn rmdir(ctx: &TracePointContext) -> u32 {
    let Some((record, place)) = read(ctx) else { return 0 };
    if !matches!(place, Place::Container) {
        let _ = POLICY.remove(record.id);
        let _ = REFUSALS.remove(record.id);
        // The agent folds a dead pod's counters into its sums; without one they would fill the map.
        // SAFETY: no memory is touched.
        let now = unsafe { bpf_ktime_get_ns() };
        let seen = HEARTBEAT.get(0).map_or(0, |seen| *seen);
        if now.wrapping_sub(seen) > SILENCE_NS {
            let _ = COUNTERS.remove(record.id);
        }
    }
    report(record, CgroupChange::Removed);
    0
}

/// Reads the tracepoint's fields; `None` for what is not near below one of our parents.
#[inline(always)]
fn read(ctx: &TracePointContext) -> Option<(&'static mut CgroupRecord, Place)> {
    let config = pod::config()?;
    // SAFETY: fields of the tracepoint's record.
    let (root, level, id, path) = unsafe {
        (
            ctx.read_at::<i32>(ROOT).ok()?,
            ctx.read_at::<i32>(LEVEL).ok()?,
            ctx.read_at::<u64>(ID).ok()?,
            ctx.read_at::<u32>(PATH).ok()?,
        )
    };
    // Hierarchy 0 is cgroup2; v1 hierarchies fire the same tracepoint.
    if root != 0 {
        return None;
    }
    let record = SCRATCH.get_ptr_mut(0)?;
    // SAFETY: this CPU's only user of the slot, see `SCRATCH`.
    let record = unsafe { &mut *record };
    // `__data_loc`: the lower half is the offset of the string from the record's start.
    // SAFETY: reads at most `CGROUP_PATH_MAX` bytes into the array.
    let len = unsafe {
        bpf_probe_read_kernel_str(
            record.path.as_mut_ptr().cast(),
            CGROUP_PATH_MAX as u32,
            ctx.as_ptr().add((path & 0xffff) as usize).cast(),
        )
    };
    if len <= 1 {
        return None;
    }
    record.id = id;
    record.level = level as u32;
    record.path_len = (len - 1) as u32;
    record.reserved = 0;
    let place = place_of(config, record)?;
    Some((record, place))
}

/// What the directory is below whichever of our parents it is.
#[inline(always)]
fn place_of(config: &Config, record: &CgroupRecord) -> Option<Place> {
    let path = &raw const record.path;
    // SAFETY: the path lies at a multiple of eight bytes in its record (asserted in `abi`).
    let words = unsafe { &*path.cast::<Words>() };
    let mut turn = 0;
    while turn < MAX_PARENTS {
        if turn >= config.parent_count as usize {
            break;
        }
        // SAFETY: an offset below the path's length.
        let byte = |at: u32| unsafe { *path.cast::<u8>().add(at as usize & (MAX_OFFSET - 1)) };
        let found = cgroup_path::place(&config.parents[turn], words, record.level, byte);
        if found.is_some() {
            return found;
        }
        turn += 1;
    }
    None
}

#[inline(always)]
fn report(record: &mut CgroupRecord, change: CgroupChange) {
    record.change = change.code();
    // Full: the agent's slow rescan finds it.
    let _ = CGROUPS.output::<CgroupRecord>(&*record, 0);
}
