//! Every direct system call and every `unsafe` of the agent.

pub mod bpf;
pub mod caps;
pub mod clock;
pub mod file;
pub mod memory;
pub mod mount;
pub mod netlink;
pub mod netns;
pub mod ns;
pub mod poll;
pub mod process;
