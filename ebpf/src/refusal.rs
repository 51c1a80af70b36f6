//! When a pod whose connections are refused at once may try again, also with no agent to notice its repair.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use nobypass_common::abi::{HALF_OPEN_NS, Refusal};
use nobypass_common::ids::{V4, V6};

use crate::maps::REFUSALS;

const fn index(family: u8) -> usize {
    if family == 6 { V6 } else { V4 }
}

/// Whether a connect of this family (4 or 6) is refused: not once a redirect proof was seen, and but for one a while, which
/// egress judges.
#[inline(always)]
pub fn holds(pod: u64, family: u8) -> bool {
    // SAFETY: no memory is touched.
    let now = unsafe { bpf_ktime_get_ns() };
    let Some(refusal) = REFUSALS.get_ptr_mut(pod) else { return false };
    // SAFETY: the map's value; its words are read and written whole, and a lost update lets one connect more through.
    let Refusal { tried_ns, healed_ns } = unsafe { &mut *refusal };
    let at = index(family);
    if healed_ns[at] != 0 {
        return false;
    }
    if now.saturating_sub(tried_ns[at]) >= HALF_OPEN_NS {
        tried_ns[at] = now;
        return false;
    }
    true
}

/// A connection of this family was redirected: the pod is not refused any more.
#[inline(always)]
pub fn heal(pod: u64, family: u8) {
    if let Some(refusal) = REFUSALS.get_ptr_mut(pod) {
        // SAFETY: as in `holds`.
        unsafe { (*refusal).healed_ns[index(family)] = bpf_ktime_get_ns() };
    }
}
