//! The kernel half: entry points only. The decisions are in `nobypass_common::verdict`.

#![no_std]
#![no_main]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "widths are those of helpers and contexts, values are known to fit; a checked conversion would be one more branch for the verifier"
)]
#![allow(
    clippy::needless_borrows_for_generic_args,
    reason = "by value would copy a map's value to the 512-byte stack"
)]
#![allow(clippy::needless_pass_by_value, reason = "the macros of aya-ebpf hand the context over by value")]

mod connect;
mod count;
mod egress;
mod facts;
mod hold;
mod ingress;
mod lifecycle;
mod maps;
mod packet;
mod pod;
mod probe;
mod refusal;

use aya_ebpf::macros::{cgroup_skb, cgroup_sock_addr, sock_ops, tracepoint};
use aya_ebpf::programs::{SkBuffContext, SockAddrContext, SockOpsContext, TracePointContext};

/// `cgroup_skb` return codes (`bpf_prog_run_array_cg_flags`,
/// <https://github.com/torvalds/linux/blob/v6.12/include/linux/bpf-cgroup.h#L176>).
const DROP: i32 = 0;
const PASS: i32 = 1;

/// Judges what leaves a pod.
#[cgroup_skb(egress)]
pub fn nb_egress(ctx: SkBuffContext) -> i32 {
    egress::run(&ctx)
}

/// Answers the agent's probes.
#[cgroup_skb(egress)]
pub fn nb_probe(ctx: SkBuffContext) -> i32 {
    probe::run(&ctx)
}

/// Judges connections that arrive at a pod.
#[cgroup_skb(ingress)]
pub fn nb_ingress(ctx: SkBuffContext) -> i32 {
    ingress::run(&ctx)
}

/// Refuses connect(2) of pods that are known to bypass.
#[cgroup_sock_addr(connect4)]
pub fn nb_connect4(ctx: SockAddrContext) -> i32 {
    connect::v4(&ctx)
}

/// See [`nb_connect4`].
#[cgroup_sock_addr(connect6)]
pub fn nb_connect6(ctx: SockAddrContext) -> i32 {
    connect::v6(&ctx)
}

/// Makes the kernel repeat a held SYN soon.
#[sock_ops]
pub fn nb_sock_ops(ctx: SockOpsContext) -> u32 {
    hold::run(&ctx)
}

/// Knows a pod before its first process.
#[tracepoint]
pub fn nb_mkdir(ctx: TracePointContext) -> u32 {
    lifecycle::mkdir(&ctx)
}

/// Forgets a pod.
#[tracepoint]
pub fn nb_rmdir(ctx: TracePointContext) -> u32 {
    lifecycle::rmdir(&ctx)
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
