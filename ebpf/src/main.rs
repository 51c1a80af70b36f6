#![no_std]
#![no_main]
use aya_ebpf::{macros::cgroup_skb, programs::SkBuffContext};

#[cgroup_skb(egress)]
fn nobypass_egress(_ctx: SkBuffContext) -> i32 {
    1
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
