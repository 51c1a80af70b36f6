//! The few bpf(2) commands that aya 0.14 does not offer for cgroup programs: updating a link in place, asking
//! what is attached and in effect.
//!
//! Layouts are those of `union bpf_attr` and `struct bpf_link_info`
//! (<https://github.com/torvalds/linux/blob/v6.12/include/uapi/linux/bpf.h#L1450>); the kernel takes a shorter
//! structure than its own and treats the rest as zero.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

const BPF_OBJ_GET: libc::c_int = 7;
const BPF_PROG_GET_FD_BY_ID: libc::c_int = 13;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_PROG_QUERY: libc::c_int = 16;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_LINK_UPDATE: libc::c_int = 29;
const BPF_LINK_DETACH: libc::c_int = 34;

/// `BPF_F_QUERY_EFFECTIVE`.
const QUERY_EFFECTIVE: u32 = 1;
/// `BPF_LINK_TYPE_CGROUP`.
const LINK_TYPE_CGROUP: u32 = 3;
/// Programs asked for in one query; the kernel allows 64 in one cgroup (`BPF_CGROUP_MAX_PROGS`).
const QUERY_MAX: usize = 256;

/// Attach types of cgroup programs (`enum bpf_attach_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum AttachType {
    /// `BPF_CGROUP_INET_INGRESS`.
    Ingress = 0,
    /// `BPF_CGROUP_INET_EGRESS`.
    Egress = 1,
    /// `BPF_CGROUP_SOCK_OPS`.
    SockOps = 3,
    /// `BPF_CGROUP_INET4_CONNECT`.
    Connect4 = 10,
    /// `BPF_CGROUP_INET6_CONNECT`.
    Connect6 = 11,
}

/// A cgroup link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupLink {
    /// The link's id.
    pub link_id: u32,
    /// The attached program's id.
    pub program_id: u32,
    /// Where it is attached; 0 once that cgroup is gone.
    pub cgroup_id: u64,
    /// Number of the attach type.
    pub attach_type: u32,
}

/// What is attached to a cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// Ids of programs, in the order in which they run.
    pub programs: Vec<u32>,
    /// Flags of the cgroup's own attachment: 0 means an exclusive one (`BPF_F_ALLOW_OVERRIDE` is 1,
    /// `BPF_F_ALLOW_MULTI` 2). Not filled by a query of what is in effect.
    pub flags: u32,
}

fn bpf<T>(command: libc::c_int, attr: &mut T) -> io::Result<libc::c_long> {
    // SAFETY: `attr` is a live structure of the size that is passed, laid out as the command wants it; the
    // pointers in it outlive the call.
    let ret = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret) }
}

fn owned(ret: libc::c_long) -> io::Result<OwnedFd> {
    let fd = i32::try_from(ret).map_err(io::Error::other)?;
    // SAFETY: the kernel just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Opens a pinned object.
///
/// # Errors
/// `NotFound` without a pin; `PermissionDenied`; others as bpf(2) says.
pub fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attr {
        pathname: u64,
        bpf_fd: u32,
        file_flags: u32,
    }
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = Attr { pathname: path.as_ptr() as u64, bpf_fd: 0, file_flags: 0 };
    owned(bpf(BPF_OBJ_GET, &mut attr)?)
}

/// Attaches a program to a cgroup for as long as the link is open; aya's links give out no descriptor to pass on.
///
/// # Errors
/// As bpf(2) says.
pub fn create_link(
    program: BorrowedFd<'_>,
    cgroup: BorrowedFd<'_>,
    attach_type: AttachType,
) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attr {
        prog_fd: u32,
        target_fd: u32,
        attach_type: u32,
        flags: u32,
    }
    let mut attr = Attr {
        prog_fd: program.as_raw_fd().unsigned_abs(),
        target_fd: cgroup.as_raw_fd().unsigned_abs(),
        attach_type: attach_type as u32,
        flags: 0,
    };
    owned(bpf(BPF_LINK_CREATE, &mut attr)?)
}

/// Replaces the program of a link: not one packet passes between the old and the new one.
///
/// # Errors
/// `ENOLINK` (67) when the link's cgroup is gone; others as bpf(2) says.
pub fn update_link(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    #[repr(C)]
    struct Attr {
        link_fd: u32,
        new_prog_fd: u32,
        flags: u32,
        old_prog_fd: u32,
    }
    let mut attr = Attr {
        link_fd: link.as_raw_fd().unsigned_abs(),
        new_prog_fd: program.as_raw_fd().unsigned_abs(),
        flags: 0,
        old_prog_fd: 0,
    };
    bpf(BPF_LINK_UPDATE, &mut attr).map(drop)
}

/// Detaches a cgroup link at once; it lives on, attached to nothing. Without this, a link whose last reference goes is
/// detached by a kernel worker, some time later.
///
/// # Errors
/// `EOPNOTSUPP` for a link that cannot be detached; others as bpf(2) says.
pub fn detach_link(link: BorrowedFd<'_>) -> io::Result<()> {
    #[repr(C)]
    struct Attr {
        link_fd: u32,
    }
    bpf(BPF_LINK_DETACH, &mut Attr { link_fd: link.as_raw_fd().unsigned_abs() }).map(drop)
}

/// Reads a cgroup link; `None` if it is of another kind.
///
/// # Errors
/// As bpf(2) says.
pub fn cgroup_link(link: BorrowedFd<'_>) -> io::Result<Option<CgroupLink>> {
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        kind: u32,
        id: u32,
        program_id: u32,
        padding: u32,
        cgroup_id: u64,
        attach_type: u32,
        reserved: u32,
    }
    let mut info = Info::default();
    info_by_fd(link, &mut info)?;
    Ok((info.kind == LINK_TYPE_CGROUP).then_some(CgroupLink {
        link_id: info.id,
        program_id: info.program_id,
        cgroup_id: info.cgroup_id,
        attach_type: info.attach_type,
    }))
}

fn info_by_fd<T>(fd: BorrowedFd<'_>, info: &mut T) -> io::Result<()> {
    #[repr(C)]
    struct Attr {
        bpf_fd: u32,
        info_len: u32,
        info: u64,
    }
    let info_len = u32::try_from(size_of::<T>()).map_err(io::Error::other)?;
    let mut attr =
        Attr { bpf_fd: fd.as_raw_fd().unsigned_abs(), info_len, info: std::ptr::from_mut(info) as u64 };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr).map(drop)
}

/// What is attached to a cgroup itself, or (`effective`) what runs for its sockets, ancestors' programs included.
///
/// # Errors
/// As bpf(2) says.
pub fn attached(cgroup: BorrowedFd<'_>, attach_type: AttachType, effective: bool) -> io::Result<Attached> {
    #[repr(C)]
    struct Attr {
        target_fd: u32,
        attach_type: u32,
        query_flags: u32,
        attach_flags: u32,
        prog_ids: u64,
        prog_cnt: u32,
        padding: u32,
        prog_attach_flags: u64,
    }
    let mut ids = vec![0u32; QUERY_MAX];
    let mut attr = Attr {
        target_fd: cgroup.as_raw_fd().unsigned_abs(),
        attach_type: attach_type as u32,
        query_flags: if effective { QUERY_EFFECTIVE } else { 0 },
        attach_flags: 0,
        prog_ids: ids.as_mut_ptr() as u64,
        prog_cnt: u32::try_from(QUERY_MAX).map_err(io::Error::other)?,
        padding: 0,
        prog_attach_flags: 0,
    };
    bpf(BPF_PROG_QUERY, &mut attr)?;
    ids.truncate(attr.prog_cnt as usize);
    Ok(Attached { programs: ids, flags: attr.attach_flags })
}

/// Opens a loaded program.
///
/// # Errors
/// `NotFound` for a program that is gone; others as bpf(2) says.
pub fn program(id: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attr {
        id: u32,
        next_id: u32,
        open_flags: u32,
    }
    owned(bpf(BPF_PROG_GET_FD_BY_ID, &mut Attr { id, next_id: 0, open_flags: 0 })?)
}

/// The name of a loaded program, as its loader gave it (at most 15 bytes).
///
/// # Errors
/// `NotFound` for a program that is gone; others as bpf(2) says.
pub fn program_name(id: u32) -> io::Result<String> {
    /// The start of `struct bpf_prog_info`, up to and with the name.
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        kind: u32,
        id: u32,
        tag: [u8; 8],
        jited_len: u32,
        xlated_len: u32,
        jited_insns: u64,
        xlated_insns: u64,
        load_time: u64,
        created_by_uid: u32,
        nr_map_ids: u32,
        map_ids: u64,
        name: [u8; 16],
    }
    let fd = program(id)?;
    let mut info = Info::default();
    info_by_fd(std::os::fd::AsFd::as_fd(&fd), &mut info)?;
    let end = info.name.iter().position(|byte| *byte == 0).unwrap_or(info.name.len());
    Ok(String::from_utf8_lossy(info.name.get(..end).unwrap_or_default()).into_owned())
}
