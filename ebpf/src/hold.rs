//! `sock_ops`: a SYN that will be held is repeated after a tenth of a second instead of a whole one, and as many times more as
//! keep the kernel trying for no shorter than it would have.
//!
//! Whose connection it is, the hook cannot know: kernels before 6.16 give it no cgroup. The connect hooks do, and leave a
//! mark on the socket.

use aya_ebpf::bindings::{BPF_SOCK_OPS_TIMEOUT_INIT, bpf_sock_addr};
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::helpers::generated::{
    bpf_getsockopt, bpf_setsockopt, bpf_sk_storage_delete, bpf_sk_storage_get,
};
use aya_ebpf::programs::SockOpsContext;
use nobypass_common::abi::Config;
use nobypass_common::ids::{PodKind, UnknownPolicy};
use nobypass_common::verdict;

use crate::egress::settings;
use crate::maps::SYN_MARKS;
use crate::pod::{self, Owner};

/// The time to the first retransmit of a held SYN in ticks of this kernel's clock (`CONFIG_HZ`), which only the loader
/// knows; 0: leave it alone.
#[unsafe(no_mangle)]
static SYN_RETRY_TICKS: u32 = 0;

/// A mark of `SYN_MARKS`: the next SYN of this socket will be held. Marks of egress are never 0.
const ANNOUNCED: u32 = 0;

/// `BPF_SK_STORAGE_GET_F_CREATE`.
const CREATE: u64 = 1;

/// `IPPROTO_TCP`, `TCP_SYNCNT` (`linux/tcp.h`), and the most that it takes (`MAX_TCP_SYNCNT`).
const SOL_TCP: i32 = 6;
const TCP_SYNCNT: i32 = 7;
const MAX_SYN_RETRIES: i32 = 127;
/// What `net.ipv4.tcp_syn_retries` is unless somebody changed it: before 6.1 programs cannot ask.
const SYN_RETRIES: i32 = 6;
/// The timeout doubles each time: four retries more make up for starting at a tenth.
const MORE_RETRIES: i32 = 4;

/// The return code that leaves the reply as it is.
const DONE: u32 = 1;

/// Whether a SYN that this pod sends now will be held.
#[inline(always)]
pub fn ahead(config: &Config, owner: &Owner) -> bool {
    if config.unknown_policy != UnknownPolicy::Hold.code() {
        return false;
    }
    let since_ns = match owner.policy {
        Some(policy) if policy.kind == PodKind::Unknown.code() => policy.since_ns,
        None if owner.id != 0 => owner.since_ns,
        _ => return false,
    };
    // SAFETY: no memory is touched.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    verdict::holds(&settings(config), since_ns, now_ns, pod::agent_seen_ns())
}

/// Marks the socket of a connect(2).
#[inline(always)]
pub fn announce(addr: *mut bpf_sock_addr) {
    let map = (&raw const SYN_MARKS).cast_mut().cast();
    // SAFETY: a field of the context; the map's address is what the loader relocates; null or the socket's own four bytes.
    unsafe {
        let sk = (*addr).__bindgen_anon_1.sk;
        if sk.is_null() {
            return;
        }
        let mark: *mut u32 = bpf_sk_storage_get(map, sk.cast(), core::ptr::null_mut(), CREATE).cast();
        if !mark.is_null() {
            *mark = ANNOUNCED;
        }
    }
}

/// Answers the kernel's question for the time to the first retransmit (`tcp_timeout_init`,
/// <https://github.com/torvalds/linux/blob/v6.12/include/net/tcp.h#L2602>); says nothing to any other, so that other
/// programs' replies stay.
#[inline(always)]
pub fn run(ctx: &SockOpsContext) -> u32 {
    let ops = ctx.ops;
    // SAFETY: fields of the context, each read whole.
    let (op, full, sk) = unsafe {
        (
            core::ptr::read_volatile(&raw const (*ops).op),
            core::ptr::read_volatile(&raw const (*ops).is_fullsock),
            (*ops).__bindgen_anon_2.sk,
        )
    };
    // A request that a listener answers has no socket of its own yet.
    if op != BPF_SOCK_OPS_TIMEOUT_INIT || full == 0 || sk.is_null() {
        return DONE;
    }
    // SAFETY: the loader may have changed it.
    let ticks = unsafe { core::ptr::read_volatile(&raw const SYN_RETRY_TICKS) };
    let map = (&raw const SYN_MARKS).cast_mut().cast();
    // SAFETY: as in `announce`.
    let mark: *mut u32 = unsafe { bpf_sk_storage_get(map, sk.cast(), core::ptr::null_mut(), 0).cast() };
    // SAFETY: not null, and four bytes long.
    if ticks == 0 || mark.is_null() || unsafe { *mark } != ANNOUNCED {
        return DONE;
    }
    // Used up: a socket can connect again.
    // SAFETY: as above.
    unsafe { bpf_sk_storage_delete(map, sk.cast()) };
    repeat_as_long(ctx);
    ctx.set_reply(ticks);
    DONE
}

/// More retries, so that the connection is not given up any sooner.
#[inline(always)]
fn repeat_as_long(ctx: &SockOpsContext) {
    let mut retries: i32 = 0;
    // SAFETY: the context, and four bytes of the stack.
    let asked =
        unsafe { bpf_getsockopt(ctx.ops.cast(), SOL_TCP, TCP_SYNCNT, (&raw mut retries).cast(), 4) } == 0;
    let retries = if asked && retries > 0 { retries } else { SYN_RETRIES };
    let mut more =
        if retries < MAX_SYN_RETRIES - MORE_RETRIES { retries + MORE_RETRIES } else { MAX_SYN_RETRIES };
    // SAFETY: as above. Refused: it is given up sooner, and was held.
    let _ = unsafe { bpf_setsockopt(ctx.ops.cast(), SOL_TCP, TCP_SYNCNT, (&raw mut more).cast(), 4) };
}
