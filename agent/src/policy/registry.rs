//! Joins cgroups with pods: pure bookkeeping, no I/O.
//!
//! Cgroups come from the kernel (made, removed, scanned), facts from the container runtime or the API, in any
//! order and either without the other. The join key is the UID in the cgroup's path.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::cgroup::path::parse_below;
use crate::cgroup::scan::Scan;
use crate::pods::model::PodFacts;
use crate::pods::{ContainerId, PodUid};

/// A pod's cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodCgroup {
    /// Its id.
    pub id: u64,
    /// Its level.
    pub level: u32,
}

/// All that is known of one pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Its cgroup, once it exists.
    pub cgroup: Option<PodCgroup>,
    /// Its containers' cgroups.
    pub containers: HashMap<ContainerId, u64>,
    /// Who it is.
    pub facts: Option<Arc<PodFacts>>,
    /// The source knows it no more; what was known lasts as long as its cgroup.
    pub gone: bool,
}

/// A change that somebody has to act upon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// This pod may need another entry.
    Pod(PodUid),
    /// This pod's cgroup is gone; its entry with it.
    Removed(u64),
    /// This cgroup is a QoS class at this level.
    Class(u64, u32),
}

/// The pods of this node.
#[derive(Debug, Default)]
pub struct Registry {
    pods: HashMap<PodUid, Entry>,
    /// Back from a pod's cgroup.
    by_cgroup: HashMap<u64, PodUid>,
}

impl Registry {
    /// What is known of a pod.
    pub fn get(&self, uid: PodUid) -> Option<&Entry> {
        self.pods.get(&uid)
    }

    /// Pods with a cgroup.
    pub fn with_cgroup(&self) -> impl Iterator<Item = (PodUid, &Entry, &PodCgroup)> {
        self.pods.iter().filter_map(|(uid, entry)| Some((*uid, entry, entry.cgroup.as_ref()?)))
    }

    /// Whether any pod has this cgroup.
    pub fn knows(&self, cgroup: u64) -> bool {
        self.by_cgroup.contains_key(&cgroup)
    }

    /// A cgroup was made below `parent` (both paths from the cgroup root).
    pub fn made(&mut self, parent: &str, path: &str, id: u64, level: u32) -> Vec<Change> {
        let Some(found) = parse_below(parent, path) else {
            // Directly below the parent and no pod: a QoS class.
            let below = path.strip_prefix(parent).map_or(0, |rest| rest.matches('/').count());
            return if below == 1 { vec![Change::Class(id, level)] } else { Vec::new() };
        };
        match found.container {
            _ if found.nested || found.misplaced => Vec::new(),
            None => self.pod_made(found.uid, id, level),
            Some(container) => {
                let entry = self.pods.entry(found.uid).or_default();
                // An id that is used again: the end of its former cgroup was not seen.
                entry.containers.retain(|_, have| *have != id);
                entry.containers.insert(container, id);
                vec![Change::Pod(found.uid)]
            }
        }
    }

    fn pod_made(&mut self, uid: PodUid, id: u64, level: u32) -> Vec<Change> {
        let mut changes = Vec::new();
        if let Some(other) = self.by_cgroup.get(&id).copied().filter(|other| *other != uid) {
            // The id is used again, and the end of the other pod's cgroup was not seen.
            changes.extend(self.lost(id, other));
        }
        let entry = self.pods.entry(uid).or_default();
        if let Some(old) = entry.cgroup.replace(PodCgroup { id, level })
            && old.id != id
        {
            // The cgroup was made anew and its removal not seen.
            self.by_cgroup.remove(&old.id);
            entry.containers.clear();
            changes.push(Change::Removed(old.id));
        }
        self.by_cgroup.insert(id, uid);
        changes.push(Change::Pod(uid));
        changes
    }

    /// A cgroup was removed.
    pub fn removed(&mut self, parent: &str, path: &str, id: u64) -> Vec<Change> {
        let found = parse_below(parent, path);
        if let Some(uid) = self.by_cgroup.get(&id).copied() {
            // Told late, and the id is another pod's by now.
            let stale = found.as_ref().is_some_and(|found| found.uid != uid);
            return if stale { Vec::new() } else { self.lost(id, uid).into_iter().collect() };
        }
        let Some(found) = found else { return vec![Change::Removed(id)] };
        let Some(entry) = self.pods.get_mut(&found.uid) else { return Vec::new() };
        match found.container {
            Some(container) if entry.containers.get(&container) == Some(&id) => {
                entry.containers.remove(&container);
                vec![Change::Pod(found.uid)]
            }
            _ => Vec::new(),
        }
    }

    /// The cgroup `id` of the pod `uid` is no more.
    fn lost(&mut self, id: u64, uid: PodUid) -> Option<Change> {
        self.by_cgroup.remove(&id)?;
        if let Some(entry) = self.pods.get_mut(&uid) {
            entry.cgroup = None;
            entry.containers.clear();
        }
        self.drop_if_empty(uid);
        Some(Change::Removed(id))
    }

    /// All cgroups as they are now: what the registry has beyond that is gone.
    pub fn scanned(&mut self, scans: &[Scan]) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut seen = HashSet::new();
        for scan in scans {
            changes.extend(scan.classes.iter().map(|class| Change::Class(class.id, class.level)));
            for pod in &scan.pods {
                seen.insert(pod.dir.id);
                let known = self.pods.get(&pod.uid).and_then(|entry| entry.cgroup.as_ref());
                let new = known.is_none_or(|cgroup| cgroup.id != pod.dir.id);
                if new {
                    changes.extend(self.pod_made(pod.uid, pod.dir.id, pod.dir.level));
                }
                let entry = self.pods.entry(pod.uid).or_default();
                let containers: HashMap<ContainerId, u64> =
                    pod.containers.iter().map(|container| (container.id, container.dir.id)).collect();
                if entry.containers != containers {
                    entry.containers = containers;
                    changes.push(Change::Pod(pod.uid));
                }
            }
        }
        let gone: Vec<u64> = self.by_cgroup.keys().filter(|id| !seen.contains(*id)).copied().collect();
        for id in gone {
            changes.extend(self.removed("", "", id));
        }
        changes
    }

    /// A pod's facts changed.
    pub fn facts(&mut self, facts: Arc<PodFacts>) -> Vec<Change> {
        let uid = facts.cgroup_uid();
        let entry = self.pods.entry(uid).or_default();
        entry.facts = Some(facts);
        entry.gone = false;
        vec![Change::Pod(uid)]
    }

    /// The source knows this pod no more. While its cgroup lives, what was known of it holds.
    pub fn facts_gone(&mut self, uid: PodUid) {
        if let Some(entry) = self.pods.get_mut(&uid) {
            entry.gone = true;
        }
        self.drop_if_empty(uid);
    }

    fn drop_if_empty(&mut self, uid: PodUid) {
        let empty = |entry: &Entry| entry.cgroup.is_none() && (entry.facts.is_none() || entry.gone);
        if self.pods.get(&uid).is_some_and(empty) {
            self.pods.remove(&uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::model::CgroupDir;
    use crate::cgroup::scan::{ContainerDir, PodDir};

    const POD: &str = "/kubepods/burstable/pod2c48913c-b29f-11e7-9350-020968147796";

    fn uid() -> PodUid {
        PodUid::parse("2c48913c-b29f-11e7-9350-020968147796").unwrap()
    }

    fn container_path() -> String {
        format!("{POD}/{}", "ab".repeat(32))
    }

    fn container() -> ContainerId {
        ContainerId::parse(&"ab".repeat(32)).unwrap()
    }

    fn facts() -> Arc<PodFacts> {
        Arc::new(PodFacts::new(uid(), "ns", "a"))
    }

    #[test]
    fn cgroups_and_facts_join_in_any_order() {
        let mut registry = Registry::default();
        assert_eq!(registry.made("/kubepods", "/kubepods/burstable", 5, 2), [Change::Class(5, 2)]);
        assert_eq!(registry.made("/kubepods", POD, 10, 3), [Change::Pod(uid())]);
        assert_eq!(registry.made("/kubepods", &container_path(), 11, 4), [Change::Pod(uid())]);
        assert_eq!(registry.facts(facts()), [Change::Pod(uid())]);
        let entry = registry.get(uid()).unwrap();
        assert_eq!(entry.cgroup, Some(PodCgroup { id: 10, level: 3 }));
        assert_eq!(entry.containers[&container()], 11);

        let mut late = Registry::default();
        late.facts(facts());
        late.made("/kubepods", POD, 10, 3);
        assert_eq!(late.get(uid()).unwrap().cgroup, entry.cgroup);
    }

    #[test]
    fn deeper_cgroups_and_other_trees_change_nothing() {
        let mut registry = Registry::default();
        let nested = format!("{}/init.scope", container_path());
        assert_eq!(registry.made("/kubepods", &nested, 12, 5), []);
        assert_eq!(registry.made("/kubepods", "/other/podx", 13, 2), []);
        assert_eq!(registry.removed("/kubepods", &nested, 12), []);
        // What is directly in a pod's cgroup and no container is not the pod either: it would take its place.
        registry.made("/kubepods", POD, 10, 3);
        registry.made("/kubepods", &container_path(), 11, 4);
        let before = registry.get(uid()).cloned();
        for other in [format!("crio-conmon-{}", "cd".repeat(32)), "c0".into(), "init".into()] {
            assert_eq!(registry.made("/kubepods", &format!("{POD}/{other}"), 14, 4), [], "{other}");
            assert_eq!(registry.removed("/kubepods", &format!("{POD}/{other}"), 14), [], "{other}");
        }
        assert_eq!(registry.get(uid()).cloned(), before);
    }

    #[test]
    fn a_pod_is_forgotten_when_both_its_cgroup_and_its_facts_are_gone() {
        for facts_first in [true, false] {
            let mut registry = Registry::default();
            registry.made("/kubepods", POD, 10, 3);
            registry.facts(facts());
            if facts_first {
                registry.facts_gone(uid());
                assert!(registry.get(uid()).unwrap().facts.is_some(), "known as long as its cgroup lives");
            }
            assert_eq!(registry.removed("/kubepods", POD, 10), [Change::Removed(10)]);
            if !facts_first {
                assert!(registry.get(uid()).is_some());
                registry.facts_gone(uid());
            }
            assert_eq!(registry.get(uid()), None, "facts first: {facts_first}");
            assert!(!registry.knows(10));
        }
    }

    #[test]
    fn a_cgroup_made_anew_replaces_the_old_one() {
        let mut registry = Registry::default();
        registry.made("/kubepods", POD, 10, 3);
        registry.made("/kubepods", &container_path(), 11, 4);
        assert_eq!(registry.made("/kubepods", POD, 20, 3), [Change::Removed(10), Change::Pod(uid())]);
        assert!(
            registry.get(uid()).unwrap().containers.is_empty(),
            "the old sandbox's containers are not its"
        );
        // The removal of the old one, told late, must not take the new one away.
        assert_eq!(registry.removed("/kubepods", POD, 10), []);
        assert!(registry.knows(20) && !registry.knows(10));
    }

    /// No verdict is ever given to the wrong pod: an id that is used again is the new pod's alone.
    #[test]
    fn a_cgroup_id_that_is_used_again_is_the_new_pods_alone() {
        const NEXT: &str = "/kubepods/podaaaaaaaa-b29f-11e7-9350-020968147796";
        let next = PodUid::parse("aaaaaaaa-b29f-11e7-9350-020968147796").unwrap();
        let scan = Scan {
            classes: Vec::new(),
            pods: vec![PodDir {
                dir: CgroupDir { id: 10, level: 2, path: NEXT.into() },
                uid: next,
                containers: Vec::new(),
            }],
            vanished: 0,
        };
        for scanned in [false, true] {
            let mut registry = Registry::default();
            registry.facts(facts());
            registry.made("/kubepods", POD, 10, 3);
            registry.made("/kubepods", &container_path(), 11, 4);
            // The end of the first pod's cgroup is not told.
            let changes = if scanned {
                registry.scanned(std::slice::from_ref(&scan))
            } else {
                registry.made("/kubepods", NEXT, 10, 2)
            };
            assert_eq!(changes, [Change::Removed(10), Change::Pod(next)], "first the old entry goes");
            let old = registry.get(uid()).unwrap();
            assert_eq!((&old.cgroup, old.containers.len()), (&None, 0), "facts about it write nothing");
            assert_eq!(registry.facts(facts()), [Change::Pod(uid())]);
            assert_eq!(registry.get(uid()).unwrap().cgroup, None);
            // Told late: it is not the new pod's end.
            assert_eq!(registry.removed("/kubepods", POD, 10), []);
            assert_eq!(registry.get(next).unwrap().cgroup.as_ref().map(|cgroup| cgroup.id), Some(10));
            assert_eq!(registry.removed("/kubepods", NEXT, 10), [Change::Removed(10)]);
        }
    }

    #[test]
    fn a_containers_cgroup_id_that_is_used_again_is_the_new_containers_alone() {
        let mut registry = Registry::default();
        registry.made("/kubepods", POD, 10, 3);
        registry.made("/kubepods", &container_path(), 11, 4);
        let other = ContainerId::parse(&"cd".repeat(32)).unwrap();
        registry.made("/kubepods", &format!("{POD}/{other}"), 11, 4);
        let containers = &registry.get(uid()).unwrap().containers;
        assert_eq!(containers.iter().collect::<Vec<_>>(), [(&other, &11)], "not the proxy's any more");
    }

    #[test]
    fn a_scan_finds_what_events_did_not_tell() {
        let mut registry = Registry::default();
        registry.made("/kubepods", "/kubepods/podaaaaaaaa-b29f-11e7-9350-020968147796", 30, 2);
        let dir = |id, level, path: &str| CgroupDir { id, level, path: path.into() };
        let scan = Scan {
            classes: vec![dir(5, 2, "/kubepods/burstable")],
            pods: vec![PodDir {
                dir: dir(10, 3, POD),
                uid: uid(),
                containers: vec![ContainerDir { dir: dir(11, 4, &container_path()), id: container() }],
            }],
            vanished: 0,
        };
        let changes = registry.scanned(std::slice::from_ref(&scan));
        assert!(changes.contains(&Change::Class(5, 2)));
        assert!(changes.contains(&Change::Pod(uid())));
        assert!(changes.contains(&Change::Removed(30)), "a pod that is not there any more");
        assert_eq!(registry.scanned(&[scan]), [Change::Class(5, 2)], "nothing new the second time");
    }
}
