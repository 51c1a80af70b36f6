//! What pod cgroups exist now.
//!
//! Watch first, then scan: a cgroup made meanwhile is then in the scan, in the events, or in both, never in neither.

use std::{
    collections::HashMap,
    fs, io,
    os::unix::fs::DirEntryExt,
    path::{Path, PathBuf},
};

use super::{
    model::CgroupDir,
    parents::PodParent,
    path::{self, components},
};
use crate::pods::{ContainerId, PodUid};

/// Levels between a parent and its pods: one for the QoS class, one to spare.
const QOS_DEPTH: usize = 2;

/// A container's cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerDir {
    /// Where and which.
    pub dir: CgroupDir,
    /// The container.
    pub id: ContainerId,
}

/// A pod's cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodDir {
    /// Where and which.
    pub dir: CgroupDir,
    /// The pod.
    pub uid: PodUid,
    /// Its containers, its sandbox among them.
    pub containers: Vec<ContainerDir>,
}

/// All pod cgroups below one parent at the time of the scan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scan {
    /// The directories between the parent and its pods (QoS classes).
    pub classes: Vec<CgroupDir>,
    /// The pods.
    pub pods: Vec<PodDir>,
    /// How many directories went away while they were being read.
    pub vanished: u32,
}

/// The parent could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot list the pod cgroups in {path}: {source}")]
pub struct ScanError {
    /// The parent.
    pub path: PathBuf,
    /// What the kernel said.
    pub source: io::Error,
}

/// Walks below `parent`: QoS classes, pods, containers, nothing deeper.
///
/// # Errors
/// [`ScanError`] when the parent itself cannot be read; what vanishes below it is only counted.
pub fn scan(parent: &PodParent) -> Result<Scan, ScanError> {
    let mut found = Scan::default();
    let top = CgroupDir { id: parent.id, level: parent.level, path: parent.rel.clone() };
    let children =
        children(&parent.path, &top).map_err(|source| ScanError { path: parent.path.clone(), source })?;
    let mut queue: Vec<(CgroupDir, usize)> = children.into_iter().map(|child| (child, 1)).collect();
    while let Some((dir, depth)) = queue.pop() {
        let on_disk = on_disk(parent, &dir);
        if let Some(pod) = path::parse_below(&parent.rel, &dir.path) {
            let containers = list(&mut found.vanished, &on_disk, &dir);
            let containers = containers.into_iter().filter_map(|dir| {
                path::parse_below(&parent.rel, &dir.path)?.container.map(|id| ContainerDir { dir, id })
            });
            found.pods.push(PodDir { uid: pod.uid, containers: containers.collect(), dir });
        } else if depth < QOS_DEPTH {
            queue.extend(
                list(&mut found.vanished, &on_disk, &dir).into_iter().map(|child| (child, depth + 1)),
            );
            found.classes.push(dir);
        }
    }
    Ok(found)
}

fn list(vanished: &mut u32, on_disk: &Path, dir: &CgroupDir) -> Vec<CgroupDir> {
    children(on_disk, dir).unwrap_or_else(|_| {
        *vanished = vanished.saturating_add(1);
        Vec::new()
    })
}

/// Where `dir`, which is below `parent`, lies in the file system.
pub(super) fn on_disk(parent: &PodParent, dir: &CgroupDir) -> PathBuf {
    let skip = components(&parent.rel).len();
    components(&dir.path).into_iter().skip(skip).fold(parent.path.clone(), |path, part| path.join(part))
}

/// The cgroups directly below `dir`, which lies at `on_disk`.
pub(super) fn children(on_disk: &Path, dir: &CgroupDir) -> io::Result<Vec<CgroupDir>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(on_disk)? {
        let entry = entry?;
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.push(child(dir, &entry.file_name().to_string_lossy(), entry.ino()));
        }
    }
    Ok(found)
}

/// A cgroup called `name` below `dir`.
pub(super) fn child(dir: &CgroupDir, name: &str, id: u64) -> CgroupDir {
    CgroupDir {
        id,
        level: dir.level.saturating_add(1),
        path: format!("{}/{name}", dir.path.trim_end_matches('/')),
    }
}

/// Who a cgroup id belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// The pod.
    pub uid: PodUid,
    /// The container; `None` for the pod's own cgroup.
    pub container: Option<ContainerId>,
    /// The cgroup's path below the hierarchy's root.
    pub path: String,
}

/// Answers "whose cgroup id is this?" from scans alone, for `status` without an agent.
#[derive(Debug, Clone, Default)]
pub struct IdIndex(HashMap<u64, Owner>);

impl IdIndex {
    /// Indexes the pods and containers of `scans`.
    #[must_use]
    pub fn new(scans: &[Scan]) -> Self {
        let mut index = HashMap::new();
        for pod in scans.iter().flat_map(|scan| &scan.pods) {
            index.insert(pod.dir.id, Owner { uid: pod.uid, container: None, path: pod.dir.path.clone() });
            for container in &pod.containers {
                let owner =
                    Owner { uid: pod.uid, container: Some(container.id), path: container.dir.path.clone() };
                index.insert(container.dir.id, owner);
            }
        }
        Self(index)
    }

    /// The owner of cgroup `id`, if it existed when the scans were made.
    #[must_use]
    pub fn get(&self, id: u64) -> Option<&Owner> {
        self.0.get(&id)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::MetadataExt,
        sync::atomic::{AtomicBool, Ordering},
    };

    use super::{super::parents::Driver, *};

    pub(crate) const UID_A: &str = "72f9a42e-50d3-47ee-8ec7-0bccfb6ea7ae";
    const UID_B: &str = "2c48913c-b29f-11e7-9350-020968147796";

    fn id(n: u64) -> String {
        format!("{n:064x}")
    }

    fn parent(root: &Path, name: &str) -> PodParent {
        let path = root.join(name);
        fs::create_dir_all(&path).expect("mkdir");
        let id = fs::metadata(&path).expect("stat").ino();
        PodParent { path, rel: format!("/{name}"), level: 1, id, driver: Driver::Cgroupfs }
    }

    #[test]
    fn guaranteed_and_burstable_pods_with_their_containers() {
        let dir = tempfile::tempdir().expect("tempdir");
        let parent = parent(dir.path(), "kubepods");
        let guaranteed = parent.path.join(format!("pod{UID_A}"));
        let burstable = parent.path.join(format!("burstable/pod{UID_B}"));
        for path in [
            guaranteed.join(id(1)),
            guaranteed.join(format!("crio-conmon-{}", id(1))),
            burstable.join(format!("crio-{}/container", id(2))),
            parent.path.join("besteffort"),
        ] {
            fs::create_dir_all(path).expect("mkdir");
        }
        fs::write(guaranteed.join("cgroup.procs"), "").expect("write");

        let mut scan = scan(&parent).expect("scan");
        scan.pods.sort_by_key(|pod| pod.dir.level);
        let [a, b] = &scan.pods[..] else { panic!("{scan:?}") };
        assert_eq!((a.uid.to_string().as_str(), a.dir.level, a.containers.len()), (UID_A, 2, 1));
        assert_eq!((b.uid.to_string().as_str(), b.dir.level, b.containers.len()), (UID_B, 3, 1));
        assert_eq!(b.dir.path, format!("/kubepods/burstable/pod{UID_B}"));
        assert_eq!(b.dir.id, fs::metadata(&burstable).expect("stat").ino());
        assert_eq!((b.containers[0].dir.level, b.containers[0].id.to_string()), (4, id(2)));
        assert_eq!((scan.classes.len(), scan.vanished), (2, 0));

        let index = IdIndex::new(std::slice::from_ref(&scan));
        let owner = index.get(b.containers[0].dir.id).expect("indexed");
        assert_eq!((owner.uid, owner.container), (b.uid, Some(b.containers[0].id)));
        assert_eq!(index.get(a.dir.id).expect("pod").container, None);
        assert_eq!(index.get(u64::MAX), None);
    }

    #[test]
    fn a_missing_parent_is_an_error_with_its_path() {
        let dir = tempfile::tempdir().expect("tempdir");
        let parent = parent(dir.path(), "kubepods");
        fs::remove_dir(&parent.path).expect("rmdir");
        let error = scan(&parent).expect_err("gone").to_string();
        assert!(error.contains("kubepods"), "{error}");
    }

    /// Pods that exist throughout are found by every scan, however many others come and go.
    #[test]
    fn directories_that_vanish_during_the_walk_hide_no_others() {
        let dir = tempfile::tempdir().expect("tempdir");
        let parent = parent(dir.path(), "kubepods");
        let stable: Vec<_> = (0..50).map(|n| format!("pod00000000-0000-0000-0000-{n:012x}")).collect();
        for name in &stable {
            fs::create_dir_all(parent.path.join("burstable").join(name).join(id(7))).expect("mkdir");
        }
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0_u64.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let pod =
                        parent.path.join(format!("burstable/podffffffff-0000-0000-0000-{:012x}", n % 16));
                    let _ = fs::create_dir_all(pod.join(id(n)));
                    let _ = fs::remove_dir_all(pod);
                }
            });
            for _ in 0..200 {
                let scan = scan(&parent).expect("scan");
                let found = scan.pods.iter().filter(|pod| pod.dir.path.contains("/pod00000000")).count();
                assert_eq!(found, stable.len());
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
