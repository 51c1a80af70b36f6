//! Plain data about cgroups.

/// What happened to a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CgroupEventKind {
    /// The directory was made.
    Made,
    /// The directory was removed.
    Removed,
}

/// A cgroup below a pod parent came or went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupEvent {
    /// What happened.
    pub kind: CgroupEventKind,
    /// The cgroup's id (inode number).
    pub id: u64,
    /// Its depth below the hierarchy's root, which is level 0.
    pub level: u32,
    /// Its path below the hierarchy's root, with a leading slash.
    pub path: String,
}

/// One cgroup directory as found on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupDir {
    /// The cgroup's id (inode number).
    pub id: u64,
    /// Its depth below the hierarchy's root, which is level 0.
    pub level: u32,
    /// Its path below the hierarchy's root, with a leading slash.
    pub path: String,
}
