//! `cgroup_skb/egress` of the cgroup in which the agent's probes run, and of no other: notes by which device a SYN would
//! leave and where to, and drops it. Nothing of that cgroup reaches a device.

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::helpers::generated::bpf_get_socket_cookie;
use aya_ebpf::programs::SkBuffContext;
use nobypass_common::abi::ProbeRecord;
use nobypass_common::headers::Kind;

use crate::maps::PROBES;
use crate::{DROP, packet};

/// Records one packet.
#[inline(always)]
pub fn run(ctx: &SkBuffContext) -> i32 {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    let Some(packet) = packet::read(skb) else { return DROP };
    if !matches!(packet.transport.kind, Kind::Syn) {
        return DROP;
    }
    // SAFETY: the context.
    let cookie = unsafe { bpf_get_socket_cookie(skb.cast()) };
    if let Some(record) = PROBES.get_ptr_mut(cookie) {
        // SAFETY: the map's value. Its socket is used by one thread, which reads it after connect(2) has returned.
        let record = unsafe { &mut *record };
        *record = ProbeRecord {
            seen: record.seen + 1,
            ifindex: packet.ifindex,
            mark: packet.mark,
            dport: u32::from(packet.transport.dport),
            daddr: packet.addresses.destination,
        };
    }
    DROP
}
