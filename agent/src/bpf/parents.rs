//! Where pods are: the parents of their cgroups, as the programs' settings have them. Pure.

use std::path::PathBuf;

use nobypass_common::abi::{Config, MAX_LEVELS, MAX_PARENTS};
use nobypass_common::cgroup_path;

/// A cgroup whose descendants are pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// Its directory.
    pub path: PathBuf,
    /// Its path below the cgroup root: `/kubepods`.
    pub below_root: String,
    /// Its level; the root is 0.
    pub level: u32,
    /// Its cgroup id.
    pub cgroup_id: u64,
}

/// Whether a parent's path is the one that the tracepoints show: from the hierarchy's real root.
pub fn starts_at_the_root(parent: &Parent) -> bool {
    let parts = parent.below_root.split('/').filter(|part| !part.is_empty()).count();
    u32::try_from(parts).is_ok_and(|parts| parts == parent.level)
}

/// Settings with parents and levels filled in.
pub fn with_parents(mut config: Config, parents: &[Parent]) -> Config {
    config.parents = Default::default();
    config.parent_count = 0;
    let mut levels = Vec::with_capacity(MAX_LEVELS);
    let mut slots = config.parents.iter_mut();
    for parent in parents.iter().take(MAX_PARENTS) {
        let Some((prefix, mask, pod_at)) = cgroup_path::prefix(&parent.below_root) else { continue };
        let Some(slot) = slots.next() else { break };
        *slot = nobypass_common::abi::Parent {
            cgroup_id: parent.cgroup_id,
            level: parent.level,
            pod_at,
            prefix,
            mask,
        };
        config.parent_count += 1;
        levels.extend([parent.level + 1, parent.level + 2]);
    }
    // Deepest first: a container's id at a guaranteed pod's container level is in no map, a pod's is.
    levels.sort_unstable_by(|a, b| b.cmp(a));
    levels.dedup();
    config.pod_levels = Default::default();
    config.level_count = 0;
    for (slot, level) in config.pod_levels.iter_mut().zip(levels) {
        *slot = level;
        config.level_count += 1;
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parent(below_root: &str, level: u32, cgroup_id: u64) -> Parent {
        Parent {
            path: PathBuf::from("/sys/fs/cgroup").join(&below_root[1..]),
            below_root: below_root.into(),
            level,
            cgroup_id,
        }
    }

    #[test]
    fn settings_name_the_levels_of_pods_deepest_first() {
        let config = with_parents(Config::default(), &[parent("/kubepods", 1, 10)]);
        assert_eq!((config.level_count, &config.pod_levels[..3]), (2, &[3, 2, 0][..]));
        assert_eq!((config.parent_count, config.parents[0].cgroup_id), (1, 10));
        assert_eq!(config.parents[0].pod_at, 10);

        let two = with_parents(config, &[parent("/kubepods", 1, 10), parent("/kubelet/kubepods", 2, 11)]);
        assert_eq!((two.level_count, &two.pod_levels[..4]), (3, &[4, 3, 2, 0][..]));
        let none = with_parents(two, &[]);
        assert_eq!((none.parent_count, none.level_count, none.pod_levels), (0, 0, [0; MAX_LEVELS]));
    }

    #[test]
    fn a_root_that_starts_deeper_hides_the_paths_of_the_tracepoints() {
        assert!(starts_at_the_root(&parent("/kubepods", 1, 10)));
        assert!(starts_at_the_root(&parent("/kubelet/kubepods", 2, 10)));
        assert!(!starts_at_the_root(&parent("/kubelet/kubepods", 4, 10)), "kind");
    }
}
