//! The pods' cgroups: where they are, what their names mean, how they come and go.
//!
//! A cgroup's id is the inode number of its directory, which is also what the kernel's
//! `bpf_skb_ancestor_cgroup_id()` answers.

pub mod model;
pub mod netns;
pub mod parents;
pub mod path;
pub mod root;
pub mod scan;
pub mod stream;
pub mod watch;
