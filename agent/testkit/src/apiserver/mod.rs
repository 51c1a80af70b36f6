//! A test API server: real semantics for what the agent asks of Kubernetes, in this process, with faults on demand.
//!
//! ```ignore
//! let server = ApiServer::start()?;                       // 127.0.0.1, plain HTTP, namespaces `default`, `kube-system`
//! server.create(Pod::new("shop", "web-1").node("n1").label("app", "web").build())?;
//! let config = kube::Config::new(server.url().parse()?);  // or `server.write_kubeconfig(path)`
//!
//! // A watch sees what the test does; `edit` changes an object, `delete` removes it at once.
//! server.edit("pods", "shop", "web-1", |pod| pod["status"]["phase"] = json!("Running"))?;
//!
//! // Faults: for the next request of a verb and a resource, or `times(n)`, or `always()` until `clear_faults()`.
//! server.inject(Fault::answer(429).retry_after(1).on("patch", "nodes/status").times(3));
//! server.inject(Fault::cut_after(2, Cut::Abrupt).on("watch", "pods"));
//! // To the watches that are open, and to the whole server.
//! server.expire_watches();
//! server.compact();
//! server.stop();
//! server.restart()?; // same port, same objects
//!
//! // What was asked.
//! assert_eq!(server.count("list", "pods"), 1);
//! assert!(server.writes().is_empty(), "nothing was patched");
//! ```
//!
//! It runs on a thread and a runtime of its own, so the handle works in any test, blocking or async; dropping it ends
//! everything. What it does is checked against a real kube-apiserver by the conformance tests. It differs in this:
//! * no authentication; what [`ApiServer::deny`] names is 403, and an access review says so, all else is allowed;
//! * objects are JSON of no type: only what `rules.rs` lists is defaulted or validated, unknown fields are kept;
//! * server-side apply merges, and does not remove what an earlier apply owned;
//! * an expired watch answers 200 with an ERROR event, as the real one does; for 410 as HTTP status inject
//!   `Fault::answer(410)`;
//! * a list of a resource version from the future answers 504 at once, the real one after 3 seconds;
//! * bookmarks come on demand and at the end of `timeoutSeconds`, not every minute.

mod delete;
mod error;
mod faults;
mod form;
mod handle;
mod http;
mod kinds;
mod objects;
mod patch;
mod rules;
mod select;
mod serve;
mod store;
mod watch;
mod write;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch as latest;

pub use error::ApiError;
pub use faults::{Cut, Fault, Recorded};
pub use handle::ApiServer;
pub use objects::{Pod, namespace, node};

use delete::Budget;
use faults::Faults;
use store::Store;
use watch::Command;

/// What the handle and the requests share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Tells the watches that there is something new in the state.
    wake: latest::Sender<()>,
    frozen: latest::Sender<bool>,
}

#[derive(Debug, Default)]
struct State {
    store: Store,
    faults: Faults,
    requests: Vec<Recorded>,
    budgets: Vec<Budget>,
    denied: Vec<(String, String)>,
    watches: HashMap<&'static str, usize>,
    /// To the watches that were open then, each with the resource version after which it was given.
    commands: Vec<(u64, Command)>,
}

impl State {
    fn is_denied(&self, verb: &str, target: &str) -> bool {
        let covers = |pattern: &str, word: &str| pattern == "*" || pattern == word;
        self.denied.iter().any(|(v, t)| covers(v, verb) && covers(t, target))
    }
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            wake: latest::Sender::new(()),
            frozen: latest::Sender::new(false),
        })
    }

    /// A test that panicked elsewhere must not hide its message behind another panic.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `change` and wakes the watches if it wrote something.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state();
        let before = state.store.version();
        let result = change(&mut state);
        if state.store.version() != before {
            self.wake.send_replace(());
        }
        result
    }

    /// Waits while the server is frozen.
    async fn thawed(&self) {
        let mut frozen = self.frozen.subscribe();
        // The sender lives as long as we do.
        let _ = frozen.wait_for(|frozen| !frozen).await;
    }

    /// Counts a watch as open; says how many of the commands are not for it.
    fn count_watch(self: &Arc<Self>, resource: &'static str) -> (OpenWatch, usize) {
        let mut state = self.state();
        *state.watches.entry(resource).or_default() += 1;
        let before = state.commands.len();
        (OpenWatch { shared: Arc::clone(self), resource }, before)
    }
}

/// Counts a watch as open while it lives.
struct OpenWatch {
    shared: Arc<Shared>,
    resource: &'static str,
}

impl Drop for OpenWatch {
    fn drop(&mut self) {
        if let Some(count) = self.shared.state().watches.get_mut(self.resource) {
            *count = count.saturating_sub(1);
        }
    }
}
