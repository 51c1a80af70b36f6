//! Running a `cgroup_skb` program on a packet without sending one (`BPF_PROG_TEST_RUN`), and a program that does nothing to
//! compare with.
//!
//! The kernel makes a socket for the run that belongs to the cgroup of the calling process, is no TCP socket and
//! has UID 0 (`bpf_prog_test_run_skb`,
//! <https://github.com/torvalds/linux/blob/v6.12/net/bpf/test_run.c#L986>).

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result};

const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_PROG_TEST_RUN: libc::c_int = 10;
const BPF_PROG_TYPE_CGROUP_SKB: u32 = 8;
pub(crate) const BPF_CGROUP_INET_EGRESS: u32 = 1;

/// Bytes of the Ethernet header that the packet of a run begins with; the program sees what is behind it.
pub const ETHERNET: usize = 14;

/// The fields of the packet's `struct __sk_buff` that can be given. All zero: on `lo`, not marked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skb {
    /// Index of a device of the calling thread's network namespace; 0 and 1 are `lo`.
    pub ifindex: u32,
    /// `skb->mark`.
    pub mark: u32,
}

/// What came of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ran {
    /// What the program returned, the last time.
    pub code: u32,
    /// Mean time of one run, ns, as the kernel gives it: rounded down.
    pub ns: u32,
}

/// `union bpf_attr` of `BPF_PROG_LOAD`, as far as it is used here.
#[repr(C)]
#[derive(Default)]
struct Load {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
}

/// `union bpf_attr` of `BPF_PROG_TEST_RUN`.
#[repr(C)]
#[derive(Default)]
struct TestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
}

pub(crate) fn bpf<T>(command: libc::c_int, attr: &mut T) -> io::Result<libc::c_long> {
    // SAFETY: `attr` is a live structure of the size that is passed, laid out as the command wants it; the
    // pointers in it outlive the call.
    let ret = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret) }
}

/// The address of something, for a structure that the kernel reads.
fn address<T: ?Sized>(of: &T) -> u64 {
    std::ptr::from_ref(of).cast::<u8>() as u64
}

/// The descriptor that a command gave.
pub(crate) fn owned(ret: libc::c_long) -> io::Result<OwnedFd> {
    let fd = i32::try_from(ret).map_err(io::Error::other)?;
    // SAFETY: the kernel just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Loads a `cgroup_skb/egress` program of two instructions, `r0 = 1; exit`: it lets everything pass.
pub fn empty_program() -> Result<OwnedFd> {
    constant_program(true, *b"nothing\0\0\0\0\0\0\0\0\0").context("cannot load a program: are you root?")
}

/// Loads a `cgroup_skb/egress` program that lets every packet pass, or drops them all.
pub(crate) fn constant_program(pass: bool, name: [u8; 16]) -> io::Result<OwnedFd> {
    // Opcode, registers, offset, immediate: BPF_ALU64|BPF_MOV|BPF_K, and BPF_JMP|BPF_EXIT.
    let mov: [u8; 8] = [0xb7, 0, 0, 0, u8::from(pass), 0, 0, 0];
    let exit: [u8; 8] = [0x95, 0, 0, 0, 0, 0, 0, 0];
    let program = [mov, exit];
    let mut attr = Load {
        prog_type: BPF_PROG_TYPE_CGROUP_SKB,
        insn_cnt: 2,
        insns: address(&program),
        license: address(c"GPL"),
        prog_name: name,
        expected_attach_type: BPF_CGROUP_INET_EGRESS,
        ..Load::default()
    };
    owned(bpf(BPF_PROG_LOAD, &mut attr)?)
}

/// Runs a program `repeat` times on one packet, which begins with an Ethernet header.
///
/// `EINVAL`: the kernel wants at least the Ethernet header, newer ones also the IP header that the EtherType announces.
pub fn test_run(program: impl AsFd, packet: &[u8], skb: Skb, repeat: u32) -> io::Result<Ran> {
    // struct __sk_buff: 192 bytes; `mark` is its third word, `ifindex` its eleventh.
    let mut context = [0u32; 48];
    context[2] = skb.mark;
    context[10] = skb.ifindex;
    let mut attr = TestRun {
        prog_fd: u32::try_from(program.as_fd().as_raw_fd()).map_err(io::Error::other)?,
        data_size_in: u32::try_from(packet.len()).map_err(io::Error::other)?,
        data_in: address(packet),
        repeat,
        ctx_size_in: u32::try_from(size_of_val(&context)).map_err(io::Error::other)?,
        ctx_in: address(&context),
        ..TestRun::default()
    };
    loop {
        match bpf(BPF_PROG_TEST_RUN, &mut attr) {
            Ok(_) => return Ok(Ran { code: attr.retval, ns: attr.duration }),
            // A signal in the middle of the repetitions.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
