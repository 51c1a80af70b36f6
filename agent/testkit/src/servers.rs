//! One test, two API servers: the test one and a real one.
//!
//! Tests of the API lie in a file that is no target of its own and ask their target which server they get:
//!
//! ```ignore
//! // agent/tests/both/gate.rs
//! #[tokio::test]
//! async fn opens_the_gate() {
//!     let server = crate::server();
//!     let client = connect(&server.kubeconfig()?)...;
//!     let namespace = server.namespace("gate")?;   // of this test alone
//!     ...
//! }
//!
//! // agent/tests/api_gate.rs                          // agent/tests/cluster_gate.rs, tier `cluster`
//! #[path = "both/gate.rs"]                            #[path = "both/gate.rs"]
//! mod gate;                                           mod gate;
//! fn server() -> Server { Server::fake().unwrap() }   fn server() -> Server { Server::real().unwrap() }
//! ```
//!
//! and the second one is a target in `Cargo.toml` with `required-features = ["cluster-tests"]`. The real server is one
//! for the process: a test takes a namespace, and node names, of its own.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::apiserver::{self, ApiServer};
use crate::control_plane::ControlPlane;

/// An API server that a test can use without knowing which.
#[derive(Debug)]
pub enum Server {
    /// One of this test alone.
    Fake(ApiServer),
    /// The one of this process.
    Real(&'static ControlPlane),
}

impl Server {
    /// A test server.
    pub fn fake() -> Result<Self> {
        ApiServer::start().map(Self::Fake)
    }

    /// The real control plane of this process.
    pub fn real() -> Result<Self> {
        ControlPlane::shared().map(Self::Real)
    }

    /// The test server, for what only that can do (faults, counts); `None` for a real one.
    #[must_use]
    pub fn as_fake(&self) -> Option<&ApiServer> {
        match self {
            Self::Fake(server) => Some(server),
            Self::Real(_) => None,
        }
    }

    /// Kubeconfig of one who may do everything.
    pub fn kubeconfig(&self) -> Result<String> {
        match self {
            Self::Fake(server) => Ok(server.kubeconfig()),
            Self::Real(plane) => plane.admin_kubeconfig(),
        }
    }

    /// Writes [`Server::kubeconfig`] to a file.
    pub fn write_kubeconfig(&self, path: &Path) -> Result<()> {
        std::fs::write(path, self.kubeconfig()?).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Creates a namespace that no other test of this process uses; gives its name.
    pub fn namespace(&self, prefix: &str) -> Result<String> {
        let name = Self::unique(prefix);
        let namespace = apiserver::namespace(&name);
        match self {
            Self::Fake(server) => drop(server.create(namespace)?),
            Self::Real(plane) => drop(plane.create("/api/v1/namespaces", &namespace)?),
        }
        Ok(name)
    }

    /// Creates a node that no other test of this process uses, without conditions and taints; gives its name.
    pub fn node(&self, prefix: &str) -> Result<String> {
        let name = Self::unique(prefix);
        let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } });
        match self {
            Self::Fake(server) => drop(server.create(node)?),
            Self::Real(plane) => drop(plane.create("/api/v1/nodes", &node)?),
        }
        Ok(name)
    }

    /// A name that this process has not used.
    #[must_use]
    pub fn unique(prefix: &str) -> String {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        format!("{prefix}-{}", COUNT.fetch_add(1, Ordering::Relaxed))
    }
}
