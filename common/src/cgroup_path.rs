//! What a new cgroup is, told by its path: the tracepoint programs ask this on every mkdir(2).
//!
//! The agent's full parser (`cgroup::path`) also reads UIDs and container ids; this one only tells a pod from a
//! QoS class and a container, which is all that must be known before a pod's first process runs. It compares
//! words under a mask instead of walking over bytes, so that the verifier meets no branch on a path's content.

use crate::abi::{CGROUP_PATH_MAX, PREFIX_WORDS, Parent};

/// What a directory below a parent is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Above the pods: a QoS class.
    Qos,
    /// A pod.
    Pod,
    /// In a pod: a container.
    Container,
}

/// Deepest directory below a parent that matters: QoS class, pod, container.
const MAX_DEPTH: u32 = 3;

/// A path as the tracepoint gives it, in words.
pub type Words = [u64; CGROUP_PATH_MAX / 8];

/// What a directory is, `None` if it does not lie at a depth that matters below this parent.
///
/// `byte` reads the path at an offset below [`CGROUP_PATH_MAX`]; `level` is the directory's.
///
/// Pods lie one (guaranteed) or two levels (other classes) below the parent. Directly below it a pod's name
/// begins with `pod` at an offset that depends on the driver: 0 with cgroupfs, behind `kubepods-` with systemd.
#[inline(always)]
pub fn place(parent: &Parent, words: &Words, level: u32, byte: impl Fn(u32) -> u8) -> Option<Place> {
    let mut differs = 0;
    let mut at = 0;
    while at < PREFIX_WORDS {
        differs |= (words[at] ^ parent.prefix[at]) & parent.mask[at];
        at += 1;
    }
    if differs != 0 {
        return None;
    }
    let depth = level.wrapping_sub(parent.level);
    if depth == 0 || depth > MAX_DEPTH {
        return None;
    }
    let in_pod =
        byte(parent.pod_at) == b'p' && byte(parent.pod_at + 1) == b'o' && byte(parent.pod_at + 2) == b'd';
    match (depth, in_pod) {
        (1, true) | (2, false) => Some(Place::Pod),
        (1, false) => Some(Place::Qos),
        (2, true) | (3, false) => Some(Place::Container),
        // Inside a guaranteed pod's container.
        _ => None,
    }
}

/// Prefix, mask and `pod` offset of a parent's path, `/kubepods` or `/kubepods.slice`; `None` if it is too long.
pub fn prefix(path: &str) -> Option<([u64; PREFIX_WORDS], [u64; PREFIX_WORDS], u32)> {
    let name = path.rsplit('/').next()?;
    let skip = name.strip_suffix(".slice").map_or(0, |stem| stem.len() + 1);
    let len = path.len() + 1;
    let (mut prefix, mut mask) = ([[0u8; 8]; PREFIX_WORDS], [[0u8; 8]; PREFIX_WORDS]);
    for (at, byte) in path.bytes().chain([b'/']).enumerate() {
        *prefix.get_mut(at / 8)?.get_mut(at % 8)? = byte;
        *mask.get_mut(at / 8)?.get_mut(at % 8)? = 0xff;
    }
    let pod_at = u32::try_from(len + skip).ok()?;
    Some((prefix.map(u64::from_ne_bytes), mask.map(u64::from_ne_bytes), pod_at))
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::format;
    use std::string::String;

    use super::*;

    /// Asks as the tracepoint program does.
    fn classify(path: &str, parent: &str) -> Option<Place> {
        let (prefix, mask, pod_at) = prefix(parent).unwrap();
        let level = |path: &str| u32::try_from(path.matches('/').count()).unwrap();
        let parent = Parent { level: level(parent), pod_at, prefix, mask, ..Parent::default() };
        // What an earlier, longer path left behind must not matter.
        let mut bytes = [b'x'; CGROUP_PATH_MAX];
        bytes[..path.len()].copy_from_slice(path.as_bytes());
        bytes[path.len()] = 0;
        let mut words = [0; CGROUP_PATH_MAX / 8];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_ne_bytes(chunk.try_into().unwrap());
        }
        place(&parent, &words, level(path), |at| bytes[at as usize])
    }

    #[test]
    fn directories_below_a_parent() {
        let pod = "pod2c48913c-b29f-11e7-9350-020968147796";
        let id = "0123456789abcdef";
        let under = "pod2c48913c_b29f_11e7_9350_020968147796.slice";
        let kind = "/system.slice/docker-x.scope/kubelet.slice/kubelet-kubepods.slice";
        let table: &[(&str, String, Option<Place>)] = &[
            ("/kubepods", "/kubepods".into(), None),
            ("/kubepods", "/kubepods/burstable".into(), Some(Place::Qos)),
            ("/kubepods", format!("/kubepods/{pod}"), Some(Place::Pod)),
            ("/kubepods", format!("/kubepods/burstable/{pod}"), Some(Place::Pod)),
            ("/kubepods", format!("/kubepods/burstable/{pod}/{id}"), Some(Place::Container)),
            ("/kubepods", format!("/kubepods/{pod}/{id}"), Some(Place::Container)),
            ("/kubepods", format!("/kubepods/{pod}/{id}/nested"), None),
            ("/kubepods", format!("/kubepods/burstable/{pod}/{id}/podlike"), None),
            ("/kubepods", format!("/kubepods2/{pod}"), None),
            ("/kubepods", format!("/other/kubepods/{pod}"), None),
            ("/kubepods.slice", "/kubepods.slice/kubepods-besteffort.slice".into(), Some(Place::Qos)),
            ("/kubepods.slice", format!("/kubepods.slice/kubepods-{under}"), Some(Place::Pod)),
            (
                "/kubepods.slice",
                format!("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-{under}"),
                Some(Place::Pod),
            ),
            (
                "/kubepods.slice",
                format!(
                    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-{under}/cri-containerd-{id}.scope"
                ),
                Some(Place::Container),
            ),
            (
                "/kubepods.slice",
                format!("/kubepods.slice/kubepods-{under}/crio-{id}.scope"),
                Some(Place::Container),
            ),
            (kind, format!("{kind}/kubelet-kubepods-burstable.slice"), Some(Place::Qos)),
            (kind, format!("{kind}/kubelet-kubepods-{under}"), Some(Place::Pod)),
            (
                kind,
                format!("{kind}/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-{under}"),
                Some(Place::Pod),
            ),
        ];
        for (parent, path, expected) in table {
            assert_eq!(classify(path, parent), *expected, "{path} below {parent}");
        }
    }

    #[test]
    fn a_parent_path_that_does_not_fit_is_refused() {
        let fits = format!("/{}", "x".repeat(8 * PREFIX_WORDS - 2));
        assert!(prefix(&fits).is_some());
        assert!(prefix(&format!("{fits}x")).is_none());
    }
}
