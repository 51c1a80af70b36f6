//! Which BPF objects the kernel holds. No library: the answer is needed before anything of the agent is built.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

/// A kind of object with ids; the numbers are `enum bpf_cmd` in the kernel's include/uapi/linux/bpf.h.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub name: &'static str,
    next_id: libc::c_int,
    fd_by_id: libc::c_int,
}

pub const KINDS: [Kind; 3] = [
    Kind { name: "program", next_id: 11, fd_by_id: 13 },
    Kind { name: "map", next_id: 12, fd_by_id: 14 },
    Kind { name: "link", next_id: 31, fd_by_id: 30 },
];

/// The part of `union bpf_attr` that both commands use: id in, next id out, flags.
#[repr(C)]
#[derive(Default)]
struct IdAttr {
    id: u32,
    next_id: u32,
    open_flags: u32,
    padding: u32,
}

fn bpf(command: libc::c_int, attr: &mut IdAttr) -> io::Result<libc::c_long> {
    // SAFETY: `attr` is writable and of the size given; both commands read and write nothing beyond it.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<IdAttr>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The ids of all loaded objects of a kind. Needs CAP_SYS_ADMIN.
pub fn ids(kind: Kind) -> io::Result<Vec<u32>> {
    let mut ids = Vec::new();
    let mut attr = IdAttr::default();
    loop {
        match bpf(kind.next_id, &mut attr) {
            Ok(_) => ids.push(attr.next_id),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(ids),
            Err(error) => return Err(error),
        }
        attr.id = attr.next_id;
    }
}

/// What the kernel says about one object (`link_type:tracing prog_id:7`), if it is still there.
pub fn describe(kind: Kind, id: u32) -> Option<String> {
    let mut attr = IdAttr { id, ..IdAttr::default() };
    let fd = i32::try_from(bpf(kind.fd_by_id, &mut attr).ok()?).ok()?;
    // SAFETY: the kernel has just returned this descriptor to us and nobody else knows it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).ok()?;
    Some(telling_fields(&info))
}

/// The lines of fdinfo that help to find out whose it is.
fn telling_fields(info: &str) -> String {
    let telling = |line: &&str| {
        ["prog_type:", "prog_tag:", "map_type:", "link_type:", "prog_id:", "cgroup_id:", "attach_type:"]
            .iter()
            .any(|field| line.starts_with(field))
    };
    let compact = |line: &str| line.split_whitespace().collect::<String>();
    info.lines().filter(telling).map(compact).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picks_the_telling_fields() {
        let info = "pos:\t0\nflags:\t02\nlink_type:\tcgroup\nlink_id:\t9\nprog_id:\t7\ncgroup_id:\t41\n";
        assert_eq!(telling_fields(info), "link_type:cgroup prog_id:7 cgroup_id:41");
    }

    #[test]
    fn lists_ids_in_order_or_is_refused() {
        for kind in KINDS {
            match ids(kind) {
                Ok(ids) => assert!(ids.is_sorted(), "{}: {ids:?}", kind.name),
                Err(error) => assert!(
                    matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS | libc::EINVAL)),
                    "{}: {error}",
                    kind.name
                ),
            }
        }
    }
}
