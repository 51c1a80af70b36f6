//! The handle: what a test does with the server.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, anyhow};
use serde_json::{Value, json};

use super::delete::Budget;
use super::faults::{Cut, Fault, Recorded};
use super::form::Form;
use super::kinds::{Kind, Route};
use super::objects;
use super::select::Selector;
use super::serve::Running;
use super::store::Key;
use super::watch::Command;
use super::{ApiError, Shared, write};
use crate::port::Port;

/// The server; see the module's documentation.
#[derive(Debug)]
pub struct ApiServer {
    shared: Arc<Shared>,
    port: Port,
    running: Mutex<Option<Running>>,
}

fn kind_of(resource: &str) -> Result<&'static Kind> {
    Kind::of_resource(resource).with_context(|| format!("the test server has no resource `{resource}`"))
}

#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
fn refused(error: ApiError) -> anyhow::Error {
    anyhow!("{} {}: {}", error.code, error.reason, error.message)
}

/// An object as its own group shows it.
fn shown(kind: &'static Kind, object: &Value) -> Value {
    let route = Route { kind, group: kind.group.into(), namespace: None, name: None, subresource: None };
    Form::of(&route, "").show(object)
}

/// The server itself: start, stop, what it is called.
impl ApiServer {
    /// Starts a server with the namespaces `default` and `kube-system`.
    pub fn start() -> Result<Self> {
        let (shared, port) = (Shared::new(), Port::reserve()?);
        let running = Running::start(&shared, &port)?;
        let server = Self { shared, port, running: Mutex::new(Some(running)) };
        for name in ["default", "kube-system"] {
            server.create(objects::namespace(name))?;
        }
        Ok(server)
    }

    /// `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.port.address())
    }

    /// A kubeconfig for this server, as JSON, which is YAML as well.
    #[must_use]
    pub fn kubeconfig(&self) -> String {
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{ "name": "test", "cluster": { "server": self.url() } }],
            "users": [{ "name": "test", "user": {} }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        })
        .to_string()
    }

    /// Writes [`ApiServer::kubeconfig`] to a file.
    pub fn write_kubeconfig(&self, path: &Path) -> Result<()> {
        std::fs::write(path, self.kubeconfig()).with_context(|| format!("cannot write {}", path.display()))
    }

    /// The whole server goes away: every connection breaks, new ones are refused. The objects stay.
    pub fn stop(&self) {
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Comes back on the same port.
    pub fn restart(&self) -> Result<()> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        *running = None;
        *running = Some(Running::start(&self.shared, &self.port)?);
        Ok(())
    }

    /// Stops answering: connections are taken, requests recorded, and nothing is said, in watches neither.
    pub fn freeze(&self) {
        self.shared.frozen.send_replace(true);
    }

    /// Ends [`ApiServer::freeze`]: what waited is answered.
    pub fn thaw(&self) {
        self.shared.frozen.send_replace(false);
    }
}

/// Objects, in-process: at once, past faults, permissions and the rules for clients.
impl ApiServer {
    /// Creates an object of a known `kind`; its namespace is made if it is missing. Status, UID and times that it
    /// brings are kept, others are made.
    pub fn create(&self, object: Value) -> Result<Value> {
        let name = object["kind"].as_str().unwrap_or_default().to_owned();
        let kind = Kind::of_kind(&name).with_context(|| format!("the test server has no kind `{name}`"))?;
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or("default").to_owned();
        self.shared.change(|state| {
            if kind.namespaced {
                let namespaces = kind_of("namespaces")?;
                if state.store.get(&Key::new(namespaces, "", &namespace)).is_none() {
                    let made = objects::namespace(&namespace);
                    write::insert(&mut state.store, namespaces, "", made, false).map_err(refused)?;
                }
            }
            let made = write::insert(&mut state.store, kind, &namespace, object, false).map_err(refused)?;
            Ok(shown(kind, &made))
        })
    }

    /// Changes an object in place. `namespace` is ignored where there is none.
    pub fn edit(
        &self,
        resource: &str,
        namespace: &str,
        name: &str,
        edit: impl FnOnce(&mut Value),
    ) -> Result<Value> {
        let kind = kind_of(resource)?;
        let key = Key::new(kind, namespace, name);
        self.shared.change(|state| {
            let old = state.store.get(&key).with_context(|| format!("no {resource} {namespace}/{name}"))?;
            let mut new = (*old).clone();
            edit(&mut new);
            Ok(shown(kind, &state.store.put(&key, new)))
        })
    }

    /// Removes an object at once, without grace; gives what it was.
    pub fn delete(&self, resource: &str, namespace: &str, name: &str) -> Result<Value> {
        let kind = kind_of(resource)?;
        let gone = self.shared.change(|state| state.store.remove(&Key::new(kind, namespace, name)));
        let gone = gone.with_context(|| format!("no {resource} {namespace}/{name}"))?;
        Ok(shown(kind, &gone))
    }

    /// The object as it is now.
    #[must_use]
    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<Value> {
        let kind = Kind::of_resource(resource)?;
        Some(shown(kind, &*self.shared.state().store.get(&Key::new(kind, namespace, name))?))
    }

    /// All objects of a resource.
    #[must_use]
    pub fn list(&self, resource: &str) -> Vec<Value> {
        let Some(kind) = Kind::of_resource(resource) else { return Vec::new() };
        let state = self.shared.state();
        let list = state.store.list(kind, None, state.store.version()).unwrap_or_default();
        list.iter().map(|(_, object)| shown(kind, object)).collect()
    }

    /// The newest resource version.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.shared.state().store.version()
    }

    /// Counts resource versions on, as writes elsewhere in a cluster do.
    pub fn skip_versions(&self, count: u64) {
        self.shared.change(|state| state.store.skip(count));
    }
}

/// Faults and refusals.
impl ApiServer {
    /// Adds a fault for coming requests.
    pub fn inject(&self, fault: Fault) {
        self.shared.state().faults.push(fault);
    }

    /// Removes all faults that have not been used up. Watches that one has silenced stay so.
    pub fn clear_faults(&self) {
        self.shared.state().faults.clear();
    }

    /// Forgets the history: watches and lists of older resource versions get 410.
    pub fn compact(&self) {
        self.shared.state().store.compact();
    }

    /// Breaks off all open watches.
    pub fn cut_watches(&self, how: Cut) {
        self.command(Command::Cut(how));
    }

    /// Ends all open watches with an ERROR event that holds 410.
    pub fn expire_watches(&self) {
        self.command(Command::Expire);
    }

    /// Sends a bookmark to all open watches that allow it.
    pub fn send_bookmarks(&self) {
        self.command(Command::Bookmark);
    }

    /// All open watches stay open and say nothing any more.
    pub fn silence_watches(&self) {
        self.command(Command::Silence);
    }

    fn command(&self, command: Command) {
        {
            let mut state = self.shared.state();
            let version = state.store.version();
            state.commands.push((version, command));
        }
        self.shared.wake.send_replace(());
    }

    /// How many watches of a resource are open.
    #[must_use]
    pub fn watches(&self, resource: &str) -> usize {
        self.shared.state().watches.get(resource).copied().unwrap_or(0)
    }

    /// Refuses a verb on a resource (`pods`, `pods/eviction`; `*` is any) with 403, and in access reviews.
    pub fn deny(&self, verb: &str, target: &str) {
        self.shared.state().denied.push((verb.into(), target.into()));
    }

    /// Takes back every [`ApiServer::deny`].
    pub fn allow_all(&self) {
        self.shared.state().denied.clear();
    }

    /// Evictions of the namespace's running pods with these labels (a label selector) are answered with 429, as by a
    /// PodDisruptionBudget that allows none, with `retry_after` seconds to wait or without saying.
    pub fn block_evictions(&self, namespace: &str, labels: &str, retry_after: Option<u64>) -> Result<()> {
        let selector = Selector::parse(kind_of("pods")?, "", labels).map_err(refused)?;
        self.shared.state().budgets.push(Budget { namespace: namespace.into(), selector, retry_after });
        Ok(())
    }

    /// Takes back every [`ApiServer::block_evictions`] of a namespace.
    pub fn allow_evictions(&self, namespace: &str) {
        self.shared.state().budgets.retain(|budget| budget.namespace != namespace);
    }
}

/// What was asked over HTTP.
impl ApiServer {
    /// All requests, in the order of their arrival.
    #[must_use]
    pub fn requests(&self) -> Vec<Recorded> {
        self.shared.state().requests.clone()
    }

    /// Forgets the requests so far.
    pub fn clear_requests(&self) {
        self.shared.state().requests.clear();
    }

    /// How many requests with this verb and resource (`*` is any) have arrived.
    #[must_use]
    pub fn count(&self, verb: &str, target: &str) -> usize {
        self.matching(verb, target).len()
    }

    /// The bodies of the requests with this verb and resource.
    #[must_use]
    pub fn bodies(&self, verb: &str, target: &str) -> Vec<Value> {
        self.matching(verb, target).into_iter().map(|request| request.body).collect()
    }

    /// The requests with this verb and resource (`*` is any).
    #[must_use]
    pub fn matching(&self, verb: &str, target: &str) -> Vec<Recorded> {
        let fits = |pattern: &str, word: &str| pattern == "*" || pattern == word;
        let state = self.shared.state();
        state.requests.iter().filter(|r| fits(verb, r.verb) && fits(target, &r.target)).cloned().collect()
    }

    /// The requests that meant to change something.
    #[must_use]
    pub fn writes(&self) -> Vec<Recorded> {
        self.shared.state().requests.iter().filter(|request| request.is_write()).cloned().collect()
    }
}
