//! BPF objects that are not nobypass's: programs of others on the same cgroups, and maps where its pins should be.
//!
//! Commands and layouts are those of `union bpf_attr`
//! (<https://github.com/torvalds/linux/blob/v6.12/include/uapi/linux/bpf.h#L1450>).

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result};

use crate::bpf::{BPF_CGROUP_INET_EGRESS, bpf, constant_program, owned};
use crate::cgroup::report;

const MAP_CREATE: libc::c_int = 0;
const OBJ_PIN: libc::c_int = 6;
const PROG_ATTACH: libc::c_int = 8;
const PROG_DETACH: libc::c_int = 9;

/// `BPF_MAP_TYPE_HASH`.
const HASH: u32 = 1;

/// How a program tolerates others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Sharing {
    /// No program may be attached below: flags 0, what systemd's `IPAddressDeny=` used before version 238.
    Exclusive = 0,
    /// A program below takes its place (`BPF_F_ALLOW_OVERRIDE`).
    Override = 1,
    /// All run (`BPF_F_ALLOW_MULTI`).
    Multi = 2,
}

/// A `cgroup_skb/egress` program named `foreign`, attached the old way, without a link. Detached when dropped.
#[derive(Debug)]
pub struct Foreign {
    cgroup: File,
    program: OwnedFd,
}

#[repr(C)]
struct AttachAttr {
    target_fd: u32,
    attach_bpf_fd: u32,
    attach_type: u32,
    attach_flags: u32,
}

impl Foreign {
    /// Attaches a program to `cgroup` that lets every packet `pass`, or drops them all.
    pub fn attach(cgroup: &Path, sharing: Sharing, pass: bool) -> Result<Self> {
        let dir = File::open(cgroup).with_context(|| format!("cannot open {}", cgroup.display()))?;
        let program =
            constant_program(pass, *b"foreign\0\0\0\0\0\0\0\0\0").context("cannot load a program")?;
        let this = Self { cgroup: dir, program };
        let mut attr = this.attr(sharing as u32);
        bpf(PROG_ATTACH, &mut attr).with_context(|| format!("cannot attach to {}", cgroup.display()))?;
        Ok(this)
    }

    fn attr(&self, attach_flags: u32) -> AttachAttr {
        AttachAttr {
            target_fd: fd(&self.cgroup),
            attach_bpf_fd: fd(&self.program),
            attach_type: BPF_CGROUP_INET_EGRESS,
            attach_flags,
        }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Err(error) = bpf(PROG_DETACH, &mut self.attr(0)) {
            report(&anyhow::Error::from(error).context("cannot detach a foreign program"));
        }
    }
}

/// Pins a hash map with keys of 4 bytes and values of 4 bytes, which none of nobypass's has, at `pin`.
pub fn pin_map(pin: &Path) -> Result<()> {
    #[repr(C)]
    struct Create {
        map_type: u32,
        key_size: u32,
        value_size: u32,
        max_entries: u32,
    }
    let map =
        owned(bpf(MAP_CREATE, &mut Create { map_type: HASH, key_size: 4, value_size: 4, max_entries: 1 })?)?;
    #[repr(C)]
    struct Pin {
        pathname: u64,
        bpf_fd: u32,
        file_flags: u32,
    }
    let path = CString::new(pin.as_os_str().as_bytes())?;
    bpf(OBJ_PIN, &mut Pin { pathname: path.as_ptr() as u64, bpf_fd: fd(&map), file_flags: 0 })
        .with_context(|| format!("cannot pin a map at {}", pin.display()))
        .map(drop)
}

fn fd(file: &impl AsRawFd) -> u32 {
    file.as_raw_fd().unsigned_abs()
}
