//! The directories in which a kubelet puts all its pods.

use std::{
    collections::VecDeque,
    fs, io,
    os::unix::fs::{DirEntryExt, MetadataExt},
    path::{Path, PathBuf},
    time::Duration,
};

use super::{
    path::{components, from_proc, is_pod, is_pod_parent},
    root::CgroupRoot,
};

/// So many parents are watched at most: one program is attached to each.
pub const MAX_PARENTS: usize = 4;

/// How deep below the root a parent is looked for. A rootless kind node is at level 7:
/// `/user.slice/user-1000.slice/user@1000.service/user.slice/docker-<id>.scope/kubelet.slice/kubelet-kubepods.slice`.
const MAX_DEPTH: usize = 8;

/// How many directories are looked at, so that a node with endless cgroups costs milliseconds, not minutes.
const MAX_DIRS: usize = 20_000;

/// Who names the cgroups below a parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Driver {
    /// `kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice`.
    Systemd,
    /// `kubepods/burstable/pod<uid>`.
    Cgroupfs,
}

/// A directory whose pods are judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodParent {
    /// Where it is.
    pub path: PathBuf,
    /// Its path below the hierarchy's root, with a leading slash.
    pub rel: String,
    /// Its level in the kernel's count.
    pub level: u32,
    /// Its cgroup id (inode number).
    pub id: u64,
    /// Which cgroup driver made it, by its name.
    pub driver: Driver,
}

/// Why the pod parents are not known.
#[derive(Debug, thiserror::Error)]
pub enum ParentError {
    /// An explicit parent is elsewhere.
    #[error("--pod-parent {path} is not below the cgroup root {root}")]
    Outside {
        /// The path given.
        path: PathBuf,
        /// The root.
        root: PathBuf,
    },
    /// An explicit parent does not exist.
    #[error(
        "--pod-parent {path} does not exist below {root}: check the spelling and the kubelet's --cgroup-root, or leave the flag \
         out to wait for the kubelet to make its own"
    )]
    Missing {
        /// The path given.
        path: PathBuf,
        /// The root.
        root: PathBuf,
    },
    /// More parents than programs are attached to.
    #[error("{} pod parents found, at most {MAX_PARENTS} can be covered; name the right ones with --pod-parent: {}", found.len(), found.join(", "))]
    TooMany {
        /// All of them, as paths below the root.
        found: Vec<String>,
    },
    /// A directory could not be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// The pod parents below `root`: the `explicit` ones, or else all that a bounded walk finds. An empty list means that
/// no kubelet has started yet.
///
/// When the walk finds several nodes' parents (kind), only those of the node that this process itself runs on count.
///
/// # Errors
/// [`ParentError`]; an explicit parent must exist.
pub fn find_parents(root: &CgroupRoot, explicit: &[PathBuf]) -> Result<Vec<PodParent>, ParentError> {
    let mut parents = if explicit.is_empty() {
        let found = walk(root)?;
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        of_own_node(found, from_proc(&own).unwrap_or_default())
    } else {
        explicit.iter().map(|path| named(root, path)).collect::<Result<Vec<_>, _>>()?
    };
    parents.sort_by(|a, b| (a.level, &a.rel).cmp(&(b.level, &b.rel)));
    parents.dedup();
    if parents.len() > MAX_PARENTS {
        return Err(ParentError::TooMany { found: parents.into_iter().map(|parent| parent.rel).collect() });
    }
    Ok(parents)
}

/// As [`find_parents`], waiting until there is at least one; looks again `every` so often.
///
/// # Errors
/// [`ParentError`]
pub async fn wait_for_parents(
    root: &CgroupRoot,
    explicit: &[PathBuf],
    every: Duration,
) -> Result<Vec<PodParent>, ParentError> {
    let mut said = false;
    loop {
        let parents = find_parents(root, explicit)?;
        if !parents.is_empty() {
            return Ok(parents);
        }
        if !said {
            tracing::info!(root = %root.path.display(), "no pod cgroups yet, waiting for the kubelet");
            said = true;
        }
        tokio::time::sleep(every).await;
    }
}

fn named(root: &CgroupRoot, path: &Path) -> Result<PodParent, ParentError> {
    let outside = || ParentError::Outside { path: path.into(), root: root.path.clone() };
    // `/kubepods` is as good as `/sys/fs/cgroup/kubepods`: the kubelet's own flag takes the short form.
    let rel = root.relative(path).or_else(|| path.to_str().map(ToOwned::to_owned)).ok_or_else(outside)?;
    let parts = components(&rel);
    if parts.is_empty() || parts.contains(&"..") {
        return Err(outside());
    }
    let rel = format!("/{}", parts.join("/"));
    let full = root.path.join(parts.join("/"));
    match fs::metadata(&full) {
        Ok(meta) if meta.is_dir() => Ok(parent(root, full, rel, meta.ino())),
        Ok(_) => Err(ParentError::Missing { path: path.into(), root: root.path.clone() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(ParentError::Missing { path: path.into(), root: root.path.clone() })
        }
        Err(source) => Err(ParentError::Io { path: full, source }),
    }
}

fn parent(root: &CgroupRoot, path: PathBuf, rel: String, id: u64) -> PodParent {
    let driver = if rel.ends_with(".slice") { Driver::Systemd } else { Driver::Cgroupfs };
    PodParent { level: root.level_of(&rel), path, rel, id, driver }
}

/// Breadth first, so that the nearest ones are found whatever the bounds cut off.
fn walk(root: &CgroupRoot) -> Result<Vec<PodParent>, ParentError> {
    let mut found = Vec::new();
    let mut seen = 0_usize;
    let mut queue = VecDeque::from([(root.path.clone(), 0_usize)]);
    while let Some((dir, depth)) = queue.pop_front() {
        let entries = match fs::read_dir(&dir) {
            Ok(entries) => entries,
            // A cgroup that went away during the walk is no loss.
            Err(_) if depth > 0 => continue,
            Err(source) => return Err(ParentError::Io { path: dir, source }),
        };
        for entry in entries.filter_map(Result::ok) {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            seen += 1;
            let (name, path) = (entry.file_name(), entry.path());
            let name = name.to_string_lossy();
            if is_pod_parent(&name) {
                if let Some(rel) = root.relative(&path) {
                    found.push(parent(root, path, rel, entry.ino()));
                }
            } else if depth + 1 < MAX_DEPTH && !is_pod(&name) {
                queue.push_back((path, depth + 1));
            }
        }
        if seen > MAX_DIRS {
            tracing::warn!(
                dirs = seen,
                found = found.len(),
                "too many cgroups to look at, name the pod parents"
            );
            break;
        }
    }
    Ok(found)
}

/// Drops the parents of other nodes that share the hierarchy, if `own` (this process's cgroup) tells which node is
/// ours.
fn of_own_node(found: Vec<PodParent>, own: &str) -> Vec<PodParent> {
    let own = components(own);
    let is_ours = |parent: &&PodParent| own.starts_with(&components(&parent.rel));
    let Some(node) = found.iter().find(is_ours).map(|parent| node_prefix(&parent.rel)) else {
        return found;
    };
    found.into_iter().filter(|parent| node_prefix(&parent.rel) == node).collect()
}

/// The cgroup that holds a whole node: a parent's path without `kubepods…` and the kubelet's own root before it.
fn node_prefix(rel: &str) -> Vec<String> {
    let mut parts: Vec<String> = components(rel).into_iter().map(ToOwned::to_owned).collect();
    parts.pop();
    if parts.last().is_some_and(|last| matches!(last.as_str(), "kubelet" | "kubelet.slice")) {
        parts.pop();
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::{super::root::RootKind, *};

    fn tree(dirs: &[&str]) -> (tempfile::TempDir, CgroupRoot) {
        let dir = tempfile::tempdir().expect("tempdir");
        for path in dirs {
            fs::create_dir_all(dir.path().join(path)).expect("mkdir");
        }
        let root = CgroupRoot { path: dir.path().into(), kind: RootKind::Given, level: 0 };
        (dir, root)
    }

    fn rels(parents: &[PodParent]) -> Vec<(&str, u32)> {
        parents.iter().map(|parent| (parent.rel.as_str(), parent.level)).collect()
    }

    #[test]
    fn usual_places() {
        for (dirs, want, driver) in [
            (["kubepods/burstable/pod1", "system.slice"], ("/kubepods", 1), Driver::Cgroupfs),
            (
                ["kubepods.slice/kubepods-burstable.slice", "init.scope"],
                ("/kubepods.slice", 1),
                Driver::Systemd,
            ),
            (["kubelet/kubepods/burstable", "x"], ("/kubelet/kubepods", 2), Driver::Cgroupfs),
            (
                ["kubelet.slice/kubelet-kubepods.slice", "x"],
                ("/kubelet.slice/kubelet-kubepods.slice", 2),
                Driver::Systemd,
            ),
        ] {
            let (_dir, root) = tree(&dirs);
            let parents = find_parents(&root, &[]).expect("parents");
            assert_eq!(rels(&parents), [want]);
            assert_eq!(parents[0].driver, driver);
            assert_eq!(parents[0].id, fs::metadata(&parents[0].path).expect("stat").ino());
        }
    }

    #[test]
    fn kind_nodes_below_their_scope() {
        let at = "system.slice/docker-0123.scope/kubelet.slice/kubelet-kubepods.slice";
        let (_dir, root) = tree(&[at]);
        let parents = find_parents(&root, &[]).expect("parents");
        assert_eq!(rels(&parents), [(format!("/{at}").as_str(), 4)]);
    }

    #[test]
    fn a_root_that_starts_deeper_adds_its_level() {
        let (_dir, mut root) = tree(&["kubelet/kubepods"]);
        root.level = 2;
        assert_eq!(rels(&find_parents(&root, &[]).expect("parents")), [("/kubelet/kubepods", 4)]);
    }

    #[test]
    fn two_drivers_after_a_migration() {
        let (_dir, root) = tree(&["kubepods", "kubepods.slice"]);
        let parents = find_parents(&root, &[]).expect("parents");
        assert_eq!(rels(&parents), [("/kubepods", 1), ("/kubepods.slice", 1)]);
    }

    #[test]
    fn nothing_inside_a_pod_is_a_parent() {
        let pod = "kubepods/pod72f9a42e-50d3-47ee-8ec7-0bccfb6ea7ae";
        let (_dir, root) = tree(&[&format!("{pod}/kubelet/kubepods")]);
        assert_eq!(rels(&find_parents(&root, &[]).expect("parents")), [("/kubepods", 1)]);
    }

    #[test]
    fn too_many_is_an_error_that_lists_them() {
        let dirs: Vec<String> = (0..5).map(|n| format!("docker/{n}/kubelet/kubepods")).collect();
        let (_dir, root) = tree(&dirs.iter().map(String::as_str).collect::<Vec<_>>());
        let error = find_parents(&root, &[]).expect_err("five").to_string();
        assert!(
            error.contains("5 pod parents found") && error.contains("/docker/4/kubelet/kubepods"),
            "{error}"
        );
        let one = find_parents(&root, &["/docker/3/kubelet/kubepods".into()]).expect("explicit");
        assert_eq!(rels(&one), [("/docker/3/kubelet/kubepods", 4)]);
    }

    #[test]
    fn only_the_own_node_counts() {
        let parents = |rels: &[&str]| -> Vec<PodParent> {
            let root = CgroupRoot { path: "/c".into(), kind: RootKind::Given, level: 0 };
            rels.iter().map(|rel| parent(&root, format!("/c{rel}").into(), (*rel).into(), 7)).collect()
        };
        let kind = ["/docker/a/kubelet/kubepods", "/docker/b/kubelet/kubepods", "/kubepods"];
        let own = |own: &str| -> Vec<String> {
            of_own_node(parents(&kind), own).into_iter().map(|parent| parent.rel).collect()
        };
        assert_eq!(own("/docker/b/kubelet/kubepods/besteffort/pod1/2"), [kind[1]]);
        assert_eq!(own("/kubepods/besteffort/pod1/2"), [kind[2]]);
        assert_eq!(own("/system.slice/nobypass.service"), kind);
        assert_eq!(own("/"), kind);

        let both =
            of_own_node(parents(&["/kubepods", "/kubepods.slice", "/kubelet/kubepods"]), "/kubepods/pod1");
        assert_eq!(both.len(), 3, "one node may have several");
    }

    #[test]
    fn explicit_parents() {
        let (_dir, root) = tree(&["a/b", "kubepods"]);
        fs::write(root.path.join("file"), "").expect("write");
        for form in ["/a/b", "a/b", "a//b/"] {
            let parents = find_parents(&root, &[form.into()]).expect(form);
            assert_eq!(rels(&parents), [("/a/b", 2)], "{form}");
        }
        let absolute = root.path.join("a/b");
        assert_eq!(rels(&find_parents(&root, &[absolute]).expect("absolute")), [("/a/b", 2)]);

        let error = |path: &str| find_parents(&root, &[path.into()]).expect_err(path);
        assert!(matches!(error("/a/missing"), ParentError::Missing { .. }));
        assert!(matches!(error("file"), ParentError::Missing { .. }));
        assert!(matches!(error("../x"), ParentError::Outside { .. }));
        assert!(matches!(error("/"), ParentError::Outside { .. }));
        assert!(error("/a/missing").to_string().contains("check the spelling"));
    }

    #[tokio::test]
    async fn waits_for_the_kubelet() {
        let (_dir, root) = tree(&["system.slice"]);
        assert_eq!(find_parents(&root, &[]).expect("none yet"), []);
        let path = root.path.join("kubepods");
        let (parents, ()) = tokio::join!(wait_for_parents(&root, &[], Duration::from_millis(1)), async {
            tokio::task::yield_now().await;
            fs::create_dir(path).expect("mkdir");
        });
        assert_eq!(rels(&parents.expect("parents")), [("/kubepods", 1)]);
    }
}
