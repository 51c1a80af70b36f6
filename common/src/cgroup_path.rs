//! Recognising a pod's cgroup by its path, byte by byte: the tracepoint programs run this on every mkdir(2).
//!
//! The agent's full parser (`cgroup::path`) also reads UIDs and container ids; this one only tells what a
//! directory below a parent is, which is all that must be known before a pod's first process runs.

/// FNV-1a, 64 bits: offset basis and prime (<http://www.isthe.com/chongo/tech/comp/fnv/>).
const FNV_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0100_0000_01b3;

/// The hash of a parent's path, `/kubepods`, as [`Walk`] computes it.
pub const fn hash(path: &[u8]) -> u64 {
    let mut hash = FNV_BASIS;
    let mut at = 0;
    while at < path.len() {
        hash = (hash ^ path[at] as u64).wrapping_mul(FNV_PRIME);
        at += 1;
    }
    hash
}

/// A walk over a path: feed the bytes in order, then ask.
#[derive(Clone, Copy, Debug)]
pub struct Walk {
    hash: u64,
    /// The last four bytes.
    window: u32,
    /// Components begun so far: the level of the directory that ends here.
    level: u32,
    /// Whether the current component looks like a pod's.
    pod: u32,
}

impl Walk {
    /// At the start of a path.
    #[inline(always)]
    pub const fn new() -> Self {
        Self { hash: FNV_BASIS, window: 0, level: 0, pod: 0 }
    }

    /// The hash and the level of the directory whose path ends before the byte fed next.
    #[inline(always)]
    pub const fn here(&self) -> (u64, u32) {
        (self.hash, self.level)
    }

    /// Takes the next byte.
    #[inline(always)]
    pub const fn feed(&mut self, byte: u8) {
        self.hash = (self.hash ^ byte as u64).wrapping_mul(FNV_PRIME);
        self.window = (self.window << 8) | byte as u32;
        if byte == b'/' {
            self.level += 1;
            self.pod = 0;
        }
        // `pod<uid>` with the cgroupfs driver; `kubepods-burstable-pod<uid>.slice` with systemd's.
        if self.window == u32::from_be_bytes(*b"/pod") || self.window == u32::from_be_bytes(*b"-pod") {
            self.pod = 1;
        }
    }

    /// Whether the last component looks like a pod's.
    #[inline(always)]
    pub const fn at_pod(&self) -> bool {
        self.pod != 0
    }
}

impl Default for Walk {
    fn default() -> Self {
        Self::new()
    }
}

/// What a directory below a parent is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Above the pods: a QoS class.
    Qos,
    /// A pod.
    Pod,
    /// Below a pod: a container, or deeper.
    Below,
}

/// What a directory is that lies `depth` levels below a parent; `named_pod` as [`Walk::at_pod`] says.
///
/// Pods lie one (guaranteed) or two levels (other classes) below the parent.
#[inline(always)]
pub const fn place(depth: u32, named_pod: bool) -> Place {
    match (depth, named_pod) {
        (1 | 2, true) => Place::Pod,
        (1, false) => Place::Qos,
        _ => Place::Below,
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::format;
    use std::string::String;

    use super::*;

    /// Runs the walk as the tracepoint program does.
    fn classify(path: &str, parent: &str) -> Option<(u32, Place)> {
        let wanted = hash(parent.as_bytes());
        let mut walk = Walk::new();
        let mut parent_level = None;
        for byte in path.bytes() {
            let (hash, level) = walk.here();
            if byte == b'/' && hash == wanted && parent_level.is_none() {
                parent_level = Some(level);
            }
            walk.feed(byte);
        }
        let depth = walk.here().1 - parent_level?;
        Some((walk.here().1, place(depth, walk.at_pod())))
    }

    #[test]
    fn directories_below_a_parent() {
        let pod = "pod2c48913c-b29f-11e7-9350-020968147796";
        let id = "0123456789abcdef";
        let slice = "kubepods-burstable-pod2c48913c_b29f_11e7_9350_020968147796.slice";
        let table: &[(&str, String, Option<(u32, Place)>)] = &[
            ("/kubepods", "/kubepods".into(), None),
            ("/kubepods", "/kubepods/burstable".into(), Some((2, Place::Qos))),
            ("/kubepods", format!("/kubepods/{pod}"), Some((2, Place::Pod))),
            ("/kubepods", format!("/kubepods/burstable/{pod}"), Some((3, Place::Pod))),
            ("/kubepods", format!("/kubepods/burstable/{pod}/{id}"), Some((4, Place::Below))),
            ("/kubepods", format!("/kubepods/{pod}/{id}"), Some((3, Place::Below))),
            ("/kubepods", format!("/kubepods/{pod}/{id}/nested/podlike"), Some((5, Place::Below))),
            ("/kubepods", format!("/kubepods2/{pod}"), None),
            ("/kubepods", format!("/other/kubepods/{pod}"), None),
            ("/kubepods.slice", "/kubepods.slice/kubepods-besteffort.slice".into(), Some((2, Place::Qos))),
            ("/kubepods.slice", format!("/kubepods.slice/kubepods-burstable.slice/{slice}"), Some((3, Place::Pod))),
            (
                "/kubepods.slice",
                format!("/kubepods.slice/kubepods-burstable.slice/{slice}/cri-containerd-{id}.scope"),
                Some((4, Place::Below)),
            ),
            (
                "/kubepods.slice",
                "/kubepods.slice/kubepods-pod2c48913c_b29f_11e7_9350_020968147796.slice".into(),
                Some((2, Place::Pod)),
            ),
            (
                "/system.slice/docker-x.scope/kubelet.slice/kubelet-kubepods.slice",
                format!("/system.slice/docker-x.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-{slice}"),
                Some((6, Place::Pod)),
            ),
        ];
        for (parent, path, expected) in table {
            assert_eq!(classify(path, parent), *expected, "{path} below {parent}");
        }
    }
}
