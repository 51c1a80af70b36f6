//! The kernel half as the agent sees it: load, pin, attach, adopt, verify. Knows no Kubernetes.

pub mod attach;
pub mod carry;
pub mod error;
pub mod events;
pub mod features;
pub mod hooks;
pub mod kernel;
pub mod maps;
pub mod parents;
pub mod pins;
pub mod probe;
pub mod selftest;

pub use error::BpfError;
pub use hooks::Hook;
pub use kernel::{Kernel, Options};
pub use maps::Maps;
pub use parents::Parent;

/// The eBPF object that this binary was built with.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/nobypass-ebpf"));
