//! Types and decisions shared by the eBPF programs and the agent.
//!
//! Everything here runs in the kernel and on the host, so that the host's tests cover what the kernel does.
#![no_std]
#![forbid(unsafe_op_in_unsafe_fn)]

pub mod abi;
pub mod cgroup_path;
pub mod exempt;
pub mod headers;
pub mod ids;
pub mod verdict;
