//! Where the cgroup v2 hierarchy really starts.
//!
//! Programs attach to cgroup v2 only, and the kernel counts levels from the hierarchy's real root, so a view that a
//! cgroup namespace cut short is refused unless the operator says how deep it starts.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use super::path::components;

/// `f_type` of cgroup v2, `CGROUP2_SUPER_MAGIC`:
/// <https://github.com/torvalds/linux/blob/v6.12/include/uapi/linux/magic.h#L66>.
const CGROUP2_MAGIC: u64 = 0x6367_7270;

/// Inode number of the root directory of every kernfs file system, and so id of the root cgroup:
/// <https://github.com/torvalds/linux/blob/v6.12/fs/kernfs/dir.c#L971>.
const ROOT_INODE: u64 = 1;

/// Why there is no usable cgroup hierarchy.
#[derive(Debug, thiserror::Error)]
pub enum RootError {
    /// Only cgroup v1, or nothing, is mounted.
    #[error(
        "no cgroup v2 hierarchy is mounted ({v1_mounts} cgroup v1 mounts seen): eBPF programs cannot see pods here; boot \
         the node with systemd.unified_cgroup_hierarchy=1, or mount the host's /sys/fs/cgroup into this container"
    )]
    NoCgroup2 {
        /// How many cgroup v1 controllers are mounted.
        v1_mounts: usize,
    },
    /// The view does not start at the hierarchy's root.
    #[error(
        "{path} is not the root of the cgroup v2 hierarchy ({why}): mount the host's /sys/fs/cgroup as a hostPath volume and \
         run in the host's cgroup namespace, or name the host's mount with --cgroup-root; on a node that is itself a \
         container (kind), give --cgroup-root together with --cgroup-root-level"
    )]
    Namespaced {
        /// The mount that was looked at.
        path: PathBuf,
        /// What gave it away.
        why: String,
    },
    /// `--cgroup-root` names something else.
    #[error(
        "--cgroup-root {path} is not on a cgroup v2 file system (type {found:#x}); name the host's cgroup v2 mount"
    )]
    NotCgroup2 {
        /// The path given.
        path: PathBuf,
        /// The file system's magic number.
        found: u64,
    },
    /// `--cgroup-root-level` contradicts what is there.
    #[error(
        "{path} is the root of the cgroup v2 hierarchy, so its level is 0, not {level}: drop --cgroup-root-level"
    )]
    LevelOfRoot {
        /// The root.
        path: PathBuf,
        /// The level given.
        level: u32,
    },
    /// A file could not be read.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// How the hierarchy was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RootKind {
    /// cgroup v2 alone.
    Unified,
    /// cgroup v2 beside v1 controllers: the runtime may or may not put pods into the v2 tree.
    Hybrid,
    /// Named by the operator.
    Given,
}

/// The directory from which all cgroup paths of this process start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupRoot {
    /// Where it is mounted.
    pub path: PathBuf,
    /// How it was found.
    pub kind: RootKind,
    /// Its level in the kernel's count: 0 for the real root.
    pub level: u32,
}

/// What the operator says about the root.
#[derive(Debug, Clone, Default)]
pub struct RootOptions {
    /// `--cgroup-root`: this directory, instead of what is mounted.
    pub path: Option<PathBuf>,
    /// `--cgroup-root-level`: its level, for a directory that is not the hierarchy's root.
    pub level: Option<u32>,
}

/// One cgroup mount of this mount namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mount {
    point: PathBuf,
    /// The directory of the hierarchy that is mounted, seen from this process's cgroup namespace.
    root: String,
    v2: bool,
}

/// What a directory shows about itself.
#[derive(Debug, Clone, Copy)]
struct Inspection {
    magic: u64,
    inode: u64,
    /// `cgroup.type` exists in every cgroup but the root:
    /// <https://docs.kernel.org/admin-guide/cgroup-v2.html#core-interface-files>.
    has_type_file: bool,
}

/// Finds the root of the cgroup v2 hierarchy.
///
/// # Errors
/// [`RootError`]; the message says what to mount or which flag to give.
pub fn find(options: &RootOptions) -> Result<CgroupRoot, RootError> {
    if let Some(path) = &options.path {
        return given(path, inspect(path)?, options.level);
    }
    let file = Path::new("/proc/self/mountinfo");
    let text = fs::read_to_string(file).map_err(|source| RootError::Io {
        action: "read",
        path: file.into(),
        source,
    })?;
    let mounts = parse_mountinfo(&text);
    let v1_mounts = mounts.iter().filter(|mount| !mount.v2).count();
    let kind = if v1_mounts == 0 { RootKind::Unified } else { RootKind::Hybrid };

    let mut first_error = None;
    for mount in candidates(&mounts) {
        match inspect(&mount.point).and_then(|found| whole(mount, found)) {
            Ok(()) => return Ok(CgroupRoot { path: mount.point.clone(), kind, level: 0 }),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    Err(first_error.unwrap_or(RootError::NoCgroup2 { v1_mounts }))
}

/// The v2 mounts, the usual places first, so that errors speak of those.
fn candidates(mounts: &[Mount]) -> Vec<&Mount> {
    const USUAL: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
    let mut found: Vec<_> = mounts.iter().filter(|mount| mount.v2).collect();
    found.sort_by_key(|mount| {
        USUAL.iter().position(|usual| mount.point == Path::new(usual)).unwrap_or(USUAL.len())
    });
    found
}

fn whole(mount: &Mount, found: Inspection) -> Result<(), RootError> {
    let namespaced = |why| Err(RootError::Namespaced { path: mount.point.clone(), why });
    if mount.root != "/" {
        return namespaced(format!("the mount shows `{}` of it", mount.root));
    }
    match not_root(found) {
        Some(why) => namespaced(why),
        None => Ok(()),
    }
}

fn not_root(found: Inspection) -> Option<String> {
    if found.has_type_file {
        Some("it has a cgroup.type file, which the root has not".to_owned())
    } else if found.inode != ROOT_INODE {
        Some(format!("its inode is {}, the root's is {ROOT_INODE}", found.inode))
    } else {
        None
    }
}

fn given(path: &Path, found: Inspection, level: Option<u32>) -> Result<CgroupRoot, RootError> {
    if found.magic != CGROUP2_MAGIC {
        return Err(RootError::NotCgroup2 { path: path.into(), found: found.magic });
    }
    let level = match (not_root(found), level) {
        (None, None | Some(0)) => 0,
        (None, Some(level)) => return Err(RootError::LevelOfRoot { path: path.into(), level }),
        (Some(why), None | Some(0)) => return Err(RootError::Namespaced { path: path.into(), why }),
        (Some(_), Some(level)) => level,
    };
    Ok(CgroupRoot { path: path.into(), kind: RootKind::Given, level })
}

fn inspect(path: &Path) -> Result<Inspection, RootError> {
    let io = |action| move |source: io::Error| RootError::Io { action, path: path.into(), source };
    let magic = rustix::fs::statfs(path).map_err(|errno| io("find the file system of")(errno.into()))?.f_type;
    let inode = fs::metadata(path).map_err(io("look at"))?.ino();
    let has_type_file = path.join("cgroup.type").exists();
    Ok(Inspection { magic: u64::try_from(magic).unwrap_or_default(), inode, has_type_file })
}

/// The cgroup mounts in the text of `/proc/<pid>/mountinfo` (proc_pid_mountinfo(5)); other lines are passed over.
fn parse_mountinfo(text: &str) -> Vec<Mount> {
    text.lines()
        .filter_map(|line| {
            let (mount, fs) = line.split_once(" - ")?;
            let v2 = match fs.split(' ').next()? {
                "cgroup2" => true,
                "cgroup" => false,
                _ => return None,
            };
            let mut fields = mount.split(' ').skip(3);
            let (root, point) = (fields.next()?, fields.next()?);
            Some(Mount { point: unescape(point).into(), root: unescape(root), v2 })
        })
        .collect()
}

/// Undoes the octal escapes of mountinfo (`\040` for a space).
fn unescape(field: &str) -> String {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let escaped =
            (byte == b'\\').then(|| tail.split_at_checked(3)).flatten().and_then(|(digits, after)| {
                Some((u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok()?, after))
            });
        let (byte, next) = escaped.unwrap_or((byte, tail));
        out.push(byte);
        rest = next;
    }
    String::from_utf8_lossy(&out).into_owned()
}

impl CgroupRoot {
    /// A directory below the root, as a path below it with a leading slash; `None` when it is not below.
    #[must_use]
    pub fn relative(&self, path: &Path) -> Option<String> {
        let rel = path.strip_prefix(&self.path).ok()?.to_str()?;
        Some(format!("/{}", components(rel).join("/")))
    }

    /// The level of a path below this root.
    #[must_use]
    pub fn level_of(&self, rel: &str) -> u32 {
        self.level.saturating_add(u32::try_from(components(rel).len()).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
    const UNIFIED: &str = "\
22 28 0:20 / /sys rw - sysfs sysfs rw
35 22 0:29 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate
";
    const V1: &str = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n";
    /// A container with its own view, and the host's mounted beside it.
    const BOTH: &str = "\
700 22 0:29 /../../.. /sys/fs/cgroup ro - cgroup2 cgroup rw
701 22 0:29 / /host/sys/fs\\040cgroup rw master:9 - cgroup2 cgroup2 rw
";

    const ROOT: Inspection = Inspection { magic: CGROUP2_MAGIC, inode: 1, has_type_file: false };

    fn points(text: &str) -> Vec<String> {
        let mounts = parse_mountinfo(text);
        candidates(&mounts).iter().map(|mount| mount.point.display().to_string()).collect()
    }

    #[test]
    fn finds_the_v2_mounts() {
        assert_eq!(points(HYBRID), ["/sys/fs/cgroup/unified"]);
        assert_eq!(points(UNIFIED), ["/sys/fs/cgroup"]);
        assert_eq!(points(BOTH), ["/sys/fs/cgroup", "/host/sys/fs cgroup"]);
        assert_eq!(points(V1), [""; 0]);
        assert_eq!(points("garbage\n1 2 3 - cgroup2\n - cgroup2 x y\n"), [""; 0]);
    }

    #[test]
    fn a_namespaced_view_is_refused() {
        let mount = |root: &str| Mount { point: "/sys/fs/cgroup".into(), root: root.into(), v2: true };
        assert!(whole(&mount("/"), ROOT).is_ok());
        for (mount, found) in [
            (mount("/../.."), ROOT),
            (mount("/system.slice/docker-1.scope"), ROOT),
            (mount("/"), Inspection { inode: 4711, ..ROOT }),
            (mount("/"), Inspection { has_type_file: true, ..ROOT }),
        ] {
            let error = whole(&mount, found).expect_err("refused").to_string();
            assert!(error.contains("mount the host's /sys/fs/cgroup"), "{error}");
        }
    }

    #[test]
    fn the_operators_root() {
        let path = Path::new("/host");
        let sub = Inspection { inode: 99, has_type_file: true, ..ROOT };
        let level = |found, level| given(path, found, level).map(|root| root.level);

        assert_eq!(level(ROOT, None).expect("root"), 0);
        assert_eq!(level(sub, Some(2)).expect("kind node"), 2);
        assert!(matches!(level(sub, None), Err(RootError::Namespaced { .. })));
        assert!(matches!(level(ROOT, Some(2)), Err(RootError::LevelOfRoot { .. })));
        let tmpfs = Inspection { magic: 0x0102_1994, ..ROOT };
        assert!(matches!(level(tmpfs, None), Err(RootError::NotCgroup2 { found: 0x0102_1994, .. })));
    }

    #[test]
    fn a_root_that_is_no_cgroup_is_an_error_with_its_path() {
        let dir = tempfile::tempdir().expect("tempdir");
        let options = RootOptions { path: Some(dir.path().into()), level: None };
        let error = find(&options).expect_err("not a cgroup").to_string();
        assert!(error.contains(&dir.path().display().to_string()), "{error}");

        let missing = RootOptions { path: Some(dir.path().join("missing")), level: None };
        assert!(matches!(find(&missing), Err(RootError::Io { .. })));
    }

    #[test]
    fn relative_paths_and_levels() {
        let root = CgroupRoot { path: "/sys/fs/cgroup".into(), kind: RootKind::Given, level: 2 };
        assert_eq!(
            root.relative(Path::new("/sys/fs/cgroup/kubepods/burstable")).as_deref(),
            Some("/kubepods/burstable")
        );
        assert_eq!(root.relative(Path::new("/sys/fs/cgroup")).as_deref(), Some("/"));
        assert_eq!(root.relative(Path::new("/sys/fs")), None);
        assert_eq!((root.level_of("/"), root.level_of("/kubepods/burstable")), (2, 4));
    }

    #[test]
    fn escapes() {
        assert_eq!(unescape(r"/a\040b\134c"), r"/a b\c");
        assert_eq!(unescape(r"/a\04"), r"/a\04");
        assert_eq!(unescape(r"\999"), r"\999");
    }

    proptest! {
        #[test]
        fn mountinfo_never_panics(text in "\\PC{0,200}") {
            let _ = (parse_mountinfo(&text), unescape(&text));
        }
    }
}
