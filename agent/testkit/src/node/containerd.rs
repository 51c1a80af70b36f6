//! Other versions of containerd than the machine's.

use std::env;
use std::path::PathBuf;

use anyhow::{Result, ensure};

use super::{Node, Options};

/// Whose containerd a node runs. The newer ones are unpacked by `cargo xtask setup` and never installed; runc and the CNI
/// plugins are the machine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Containerd {
    /// The one in the search path.
    Machine,
    /// The last of the first generation.
    V1_7,
    /// The second generation, from 2.1 on, whose libcni reads drop-in files.
    V2,
}

impl Containerd {
    /// Names the directory that holds `containerd`, its shim and `ctr`; set by `cargo xtask test`.
    #[must_use]
    pub fn variable(self) -> Option<&'static str> {
        match self {
            Self::Machine => None,
            Self::V1_7 => Some("NOBYPASS_TEST_CONTAINERD_1_7"),
            Self::V2 => Some("NOBYPASS_TEST_CONTAINERD_2"),
        }
    }

    /// A node that runs it; `None`, said on stderr, where this machine has none. In CI that is an error.
    #[expect(clippy::print_stderr, reason = "a skipped test says so")]
    pub fn node(self) -> Result<Option<Node>> {
        let Some(variable) = self.variable() else { return Node::new().map(Some) };
        let Some(dir) = env::var_os(variable).map(PathBuf::from) else {
            ensure!(env::var_os("CI").is_none(), "{variable} is not set: `cargo xtask test` sets it");
            eprintln!(
                "skipped: no containerd for {self:?}, {variable} is not set (`cargo xtask test` sets it)"
            );
            return Ok(None);
        };
        let containerd = dir.join("containerd");
        ensure!(containerd.is_file(), "{variable}: there is no {}", containerd.display());
        Node::start(Options { containerd, ..Options::default() }).map(Some)
    }
}
