//! What a cgroup's path says about the pod it belongs to.
//!
//! The kubelet names a pod's cgroup `pod<uid>` (cgroupfs driver) or `…-pod<uid with _>.slice` (systemd driver); the
//! runtime adds one level for each container. This is a parser of path components: it looks at the end of a
//! component only, so it knows no prefix, no depth and no QoS class, which differ between drivers, kubelets and
//! nested nodes.

use crate::pods::{ContainerId, PodUid};

/// Prefixes that runtimes put before a container's id: containerd, CRI-O, cri-dockerd and podman. Others, such as
/// `crio-conmon-`, name helpers that are not containers of the pod.
const RUNTIME_PREFIXES: [&str; 4] = ["cri-containerd-", "crio-", "docker-", "libpod-"];

/// The pod that a cgroup path leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodCgroup {
    /// The UID in the path; for a static pod the hash of its manifest.
    pub uid: PodUid,
    /// The container, when the path reaches one. A pod's sandbox ("pause") counts as a container here.
    pub container: Option<ContainerId>,
    /// Index of the pod's component among the path's components (`..` counts as one). The pod's level is this + 1
    /// plus the level of the directory that the path starts from, unless the path contains `..`.
    pub pod_component: usize,
    /// The path goes deeper than a pod or one of its containers: crun's `container` group, systemd or an engine inside the
    /// container, CRI-O's `crio-conmon-<id>`.
    pub nested: bool,
    /// The runtime made this cgroup outside of the pod's: `…-pod<uid>.slice:cri-containerd:<id>` below its own
    /// service. Happens when the kubelet uses the systemd driver and containerd the cgroupfs driver; no program on
    /// the pods' parent sees such a container.
    pub misplaced: bool,
}

/// The pod of `path`: its deepest pod component counts.
///
/// Right for a path from an unknown starting point (`/proc/<pid>/cgroup`). Below a known pod parent use
/// [`parse_below`].
#[must_use]
pub fn parse(path: &str) -> Option<PodCgroup> {
    let parts = components(path);
    let at = parts.iter().rposition(|part| pod_of(part).is_some())?;
    resolve(&parts, at)
}

/// The pod of `path` that lives directly under the pod parent `parent`: the first pod component counts, so that a
/// nested kubelet inside a pod does not hide the pod of this node.
///
/// Both paths start at the same directory. `None` when `path` is not below `parent`.
#[must_use]
pub fn parse_below(parent: &str, path: &str) -> Option<PodCgroup> {
    let (parent, parts) = (components(parent), components(path));
    if !parts.starts_with(&parent) {
        return None;
    }
    let at = parts.iter().skip(parent.len()).position(|part| pod_of(part).is_some())?;
    resolve(&parts, parent.len() + at)
}

/// The container that a path names although it shows no pod, as a namespaced view does: `/../crio-<id>.scope`.
#[must_use]
pub fn container_only(path: &str) -> Option<ContainerId> {
    components(path).iter().rev().find_map(|part| container_of(part))
}

/// The cgroup v2 path in the text of `/proc/<pid>/cgroup`.
#[must_use]
pub fn from_proc(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::"))
}

/// The parts of a path that count: no empty ones, no `.`.
pub(crate) fn components(path: &str) -> Vec<&str> {
    path.split('/').filter(|part| !matches!(*part, "" | ".")).collect()
}

fn resolve(parts: &[&str], at: usize) -> Option<PodCgroup> {
    let (uid, inline) = pod_of(parts.get(at)?)?;
    let below = parts.get(at + 1..).unwrap_or_default();
    let container = inline.or_else(|| container_of(below.first()?));
    // Levels of the path that are accounted for: the pod's, and one for a container below it.
    let known = usize::from(inline.is_none() && container.is_some());
    Some(PodCgroup {
        uid,
        container,
        pod_component: at,
        nested: below.len() > known,
        misplaced: inline.is_some(),
    })
}

/// The UID in a pod's component, and the container in the `slice:prefix:id` form.
fn pod_of(part: &str) -> Option<(PodUid, Option<ContainerId>)> {
    let mut fields = part.split(':');
    let stem = fields.next()?;
    let inline = match (fields.next(), fields.next(), fields.next()) {
        (None, ..) => None,
        (Some(_prefix), Some(id), None) => Some(ContainerId::parse(id)?),
        _ => return None,
    };
    let stem = stem.strip_suffix(".slice").unwrap_or(stem);
    let uid = [36, 32].into_iter().find_map(|length| {
        let (head, uid) = stem.split_at_checked(stem.len().checked_sub(length)?)?;
        let before = head.strip_suffix("pod")?;
        (before.is_empty() || before.ends_with('-')).then_some(())?;
        PodUid::parse(uid)
    })?;
    Some((uid, inline))
}

/// The id in a container's component: `<id>`, `<prefix>-<id>`, either with `.scope`.
fn container_of(part: &str) -> Option<ContainerId> {
    let stem = part.strip_suffix(".scope").unwrap_or(part);
    let id = RUNTIME_PREFIXES.iter().find_map(|prefix| stem.strip_prefix(prefix)).unwrap_or(stem);
    ContainerId::parse(id)
}

/// Whether a directory with this name is where a kubelet puts all its pods: `kubepods` or `kubepods.slice`, or below
/// a cgroup root of its own `<root>/kubepods` or `<root>-kubepods.slice`.
pub(crate) fn is_pod_parent(name: &str) -> bool {
    name == "kubepods"
        || name.strip_suffix(".slice").is_some_and(|stem| stem == "kubepods" || stem.ends_with("-kubepods"))
}

/// Whether a directory with this name is a pod's.
pub(crate) fn is_pod(name: &str) -> bool {
    pod_of(name).is_some()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const UID: &str = "2c48913c-b29f-11e7-9350-020968147796";
    const STATIC: &str = "0123456789abcdef0123456789abcdef";

    /// `$ID`, `$UID` and `$U_` (UID with underscores) stand for the constants.
    fn fill(path: &str) -> String {
        path.replace("$ID", ID).replace("$UID", UID).replace("$U_", &UID.replace('-', "_"))
    }

    fn check(path: &str, uid: &str, container: bool, pod_component: usize, nested: bool) {
        let got = parse(&fill(path)).unwrap_or_else(|| panic!("{path}: no pod found"));
        let want = PodCgroup {
            uid: PodUid::parse(uid).expect("uid"),
            container: container.then(|| ContainerId::parse(ID).expect("id")),
            pod_component,
            nested,
            misplaced: path.contains(':'),
        };
        assert_eq!(got, want, "{path}");
    }

    #[test]
    fn pods_and_containers() {
        #[rustfmt::skip]
        let table: [(&str, bool, usize, bool); 26] = [
            // systemd driver with containerd, CRI-O, cri-dockerd, podman
            ("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod$U_.slice/cri-containerd-$ID.scope", true, 2, false),
            ("/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod$U_.slice/crio-$ID.scope", true, 2, false),
            ("/kubepods.slice/kubepods-pod$U_.slice/docker-$ID.scope", true, 1, false),
            ("/kubepods.slice/kubepods-pod$U_.slice/libpod-$ID.scope", true, 1, false),
            ("/kubepods.slice/kubepods-pod$U_.slice/$ID.scope", true, 1, false),
            // crun's extra level; systemd and an engine inside the container
            ("/kubepods.slice/kubepods-pod$U_.slice/crio-$ID.scope/container", true, 1, true),
            ("/kubepods.slice/kubepods-pod$U_.slice/cri-containerd-$ID.scope/init.scope", true, 1, true),
            ("/kubepods/pod$UID/$ID/docker/$ID", true, 1, true),
            // CRI-O's monitor is not a container
            ("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod$U_.slice/crio-conmon-$ID.scope", false, 2, true),
            ("/kubepods/burstable/pod$UID/crio-conmon-$ID", false, 2, true),
            // pod level, container unknown
            ("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod$U_.slice", false, 2, false),
            ("/kubepods/besteffort/pod$UID", false, 2, false),
            ("/kubepods/besteffort/pod$UID/", false, 2, false),
            ("/kubepods/pod$UID/something-else", false, 1, true),
            // cgroupfs driver
            ("/kubepods/besteffort/pod$UID/$ID", true, 2, false),
            ("/kubepods/burstable/pod$UID/crio-$ID", true, 2, false),
            ("/kubepods/pod$UID/$ID", true, 1, false),
            ("kubepods/pod$UID/$ID", true, 1, false),
            ("//kubepods/./pod$UID//$ID", true, 1, false),
            // systemd kubelet, cgroupfs containerd
            ("/system.slice/containerd.service/kubepods-burstable-pod$U_.slice:cri-containerd:$ID", true, 2, false),
            // kind: old, new
            ("/docker/$ID/kubepods/besteffort/pod$UID/$ID", true, 4, false),
            ("/system.slice/docker-$ID.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod$U_.slice/cri-containerd-$ID.scope", true, 5, false),
            ("/docker/$ID/kubelet/kubepods/burstable/pod$UID/$ID", true, 5, false),
            // seen from inside a cgroup namespace
            ("/../../pod$UID/$ID", true, 2, false),
            ("/../kubepods-burstable-pod$U_.slice/cri-containerd-$ID.scope", true, 1, false),
            // a UID with underscores under the cgroupfs driver
            ("/kubepods/pod$U_/$ID", true, 1, false),
        ];
        for (path, container, at, nested) in table {
            check(path, UID, container, at, nested);
        }
    }

    #[test]
    fn static_pods_carry_their_config_hash() {
        let slice = format!("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice");
        check(&format!("{slice}/cri-containerd-$ID.scope"), STATIC, true, 2, false);
        check(&slice, STATIC, false, 2, false);
        check(&format!("/kubepods/pod{STATIC}/$ID"), STATIC, true, 1, false);
    }

    #[test]
    fn uppercase_is_the_same_pod() {
        let lower = parse(&fill("/kubepods/pod$UID/$ID"));
        assert!(lower.is_some());
        let upper = format!("/kubepods/pod{}/{}", UID.to_uppercase(), ID.to_uppercase());
        assert_eq!(parse(&upper), lower);
    }

    #[test]
    fn not_a_pod() {
        for path in [
            "",
            "/",
            "..",
            "/kubepods",
            "/kubepods.slice/kubepods-burstable.slice",
            "/../crio-$ID.scope",
            "/system.slice/docker-$ID.scope",
            "/kubepods/pod",
            "/kubepods/pod-$UID",
            "/kubepods/tripod$UID",
            "/kubepods/podman-$UID",
            "/kubepods/pod$UID.scope",
            "/kubepods/pod$UIDx",
            "/kubepods/podé$UID€",
            "/kubepods-pod$U_.slice:cri-containerd",
            "/kubepods-pod$U_.slice:cri-containerd:short",
            "/kubepods-pod$U_.slice:a:$ID:b",
            "/user.slice/user-1000.slice/user@1000.service/app.slice",
        ] {
            assert_eq!(parse(&fill(path)), None, "{path}");
        }
    }

    #[test]
    fn container_without_a_pod() {
        let id = ContainerId::parse(ID);
        assert_eq!(container_only(&fill("/../crio-$ID.scope")), id);
        assert_eq!(container_only(&fill("/../$ID/container")), id);
        assert_eq!(container_only("/../.."), None);
        assert_eq!(container_only(&fill("/../crio-conmon-$ID.scope")), None);
    }

    #[test]
    fn proc_text() {
        let hybrid = "9:name=systemd:/a\n4:memory:/b\n0::/kubepods/podX\n";
        assert_eq!(from_proc(hybrid), Some("/kubepods/podX"));
        assert_eq!(from_proc("0::/\n"), Some("/"));
        assert_eq!(from_proc("4:memory:/b\n"), None);
    }

    /// A node inside a pod (kind in CI, virtual clusters): the outer agent means the outer pod.
    #[test]
    fn nested_kubelet_below_a_known_parent() {
        let inner = "99999999-b29f-11e7-9350-020968147796";
        let path =
            fill(&format!("/kubepods/burstable/pod$UID/$ID/docker/$ID/kubelet/kubepods/pod{inner}/$ID"));
        let outer = parse_below("/kubepods", &path).expect("outer pod");
        assert_eq!(outer.uid, PodUid::parse(UID).expect("uid"));
        assert_eq!((outer.pod_component, outer.nested), (2, true));

        let deep = fill("/kubepods/burstable/pod$UID/$ID/docker/$ID/kubelet/kubepods");
        assert_eq!(parse_below(&deep, &path).map(|pod| pod.uid), PodUid::parse(inner));
        assert_eq!(parse(&path).map(|pod| pod.uid), PodUid::parse(inner));
        assert_eq!(parse_below("/kubepods.slice", &path), None);
        assert_eq!(parse_below("/kube", &path), None);
    }

    #[test]
    fn pod_parents() {
        for name in ["kubepods", "kubepods.slice", "kubelet-kubepods.slice", "a-b-kubepods.slice"] {
            assert!(is_pod_parent(name), "{name}");
        }
        for name in ["kubepods-burstable.slice", "xkubepods", "-kubepods", "kubelet.slice", "kubelet", ""] {
            assert!(!is_pod_parent(name), "{name}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(path in "\\PC{0,200}") {
            let _ = (parse(&path), parse_below("/kubepods", &path), container_only(&path), from_proc(&path));
        }

        #[test]
        fn never_panics_on_likely_shapes(
            parts in proptest::collection::vec("(kubepods|-pod|pod|\\.slice|:|crio-|[0-9a-f]{32}|[0-9a-f]{64}|é|-){0,5}", 0..6)
        ) {
            let path = parts.join("/");
            if let Some(pod) = parse(&path) {
                prop_assert!(pod.pod_component < components(&path).len());
                prop_assert!(!pod.nested || pod.pod_component + 1 < components(&path).len());
            }
        }

        /// Whatever comes before the pod, the pod is found, and always the same.
        #[test]
        fn prefix_does_not_matter(prefix in "(/[a-z.@-]{1,12}){0,8}", systemd: bool) {
            let tail = fill(if systemd { "/x-pod$U_.slice/crio-$ID.scope" } else { "/pod$UID/$ID" });
            let pod = parse(&format!("{prefix}{tail}")).expect("pod");
            prop_assert_eq!(pod.uid, PodUid::parse(UID).expect("uid"));
            prop_assert_eq!(pod.container, ContainerId::parse(ID));
            prop_assert_eq!(pod.pod_component, components(&prefix).len());
        }
    }
}
