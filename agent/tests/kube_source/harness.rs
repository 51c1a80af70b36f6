//! A server, a source, and a reader that believes what the source says.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use nobypass::cluster::watch::Patience;
use nobypass::pods::model::{PodFacts, Wanted};
use nobypass::pods::source::PodUpdate;
use nobypass::pods::source::kube::{KubeOptions, KubeSource, KubeState};
use nobypass_testkit::apiserver::{ApiServer, Pod};
use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// No test waits longer for anything.
pub const BOUND: Duration = Duration::from_secs(60);
pub const NODE: &str = "n1";

pub fn pod(namespace: &str, name: &str) -> Value {
    Pod::new(namespace, name).node(NODE).label("app", name).build()
}

/// Short pauses, and patience that tests can afford to lose.
pub fn patience() -> Patience {
    Patience {
        answer: Duration::from_secs(20),
        silence: Duration::from_secs(20),
        watch: Duration::from_secs(300),
        pauses: (Duration::from_millis(5), Duration::from_millis(100)),
        page: 100,
    }
}

pub struct Harness {
    pub server: ApiServer,
    pub state: watch::Receiver<KubeState>,
    updates: mpsc::Receiver<PodUpdate>,
    /// What a reader knows, by UID.
    pub known: BTreeMap<String, Arc<PodFacts>>,
    pub upserts: usize,
    pub gone: usize,
    pub synced: usize,
    pub rekeyed: usize,
    /// What is wanted of pods.
    pub wants: watch::Sender<Wanted>,
    task: JoinHandle<()>,
}

impl Harness {
    /// Starts a source for [`NODE`] at `server`.
    pub async fn start(server: ApiServer, patience: Patience) -> Self {
        let kubeconfig = tempfile::NamedTempFile::new().unwrap();
        server.write_kubeconfig(kubeconfig.path()).unwrap();
        let client = nobypass::cluster::connect(Some(kubeconfig.path())).await.unwrap();
        let keys = ["app", "mesh", "mode"].into_iter().collect();
        let wants = watch::Sender::new(Wanted { keys, ..Wanted::default() });
        let options = KubeOptions { patience, ..KubeOptions::new(NODE, wants.subscribe()) };
        let (source, state) = KubeSource::new(options);
        let (out, updates) = mpsc::channel(16);
        let task = tokio::spawn(source.run(client, out));
        let known = BTreeMap::new();
        Self { server, state, updates, known, upserts: 0, gone: 0, synced: 0, rekeyed: 0, wants, task }
    }

    /// With these pods in the cluster.
    pub async fn with(pods: impl IntoIterator<Item = Value>) -> Self {
        let server = ApiServer::start().unwrap();
        for pod in pods {
            server.create(pod).unwrap();
        }
        Self::start(server, patience()).await
    }

    fn take(&mut self, update: PodUpdate) {
        match update {
            PodUpdate::Upsert(pod) => {
                self.upserts += 1;
                let before = self.known.insert(pod.uid.to_string(), Arc::clone(&pod));
                assert_ne!(before, Some(pod), "told although nothing changed");
            }
            PodUpdate::Gone(uid) => {
                self.gone += 1;
                assert!(self.known.remove(&uid.to_string()).is_some(), "{uid} goes and was never there");
            }
            PodUpdate::Synced => self.synced += 1,
            PodUpdate::Rekeyed(_) => self.rekeyed += 1,
        }
    }

    /// Takes updates until `done`.
    pub async fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let waited = timeout(BOUND, async {
            while !done(self) {
                tokio::select! {
                    update = self.updates.recv() => self.take(update.expect("the source runs")),
                    changed = self.state.changed() => changed.expect("the source runs"),
                    // What the server alone knows.
                    () = tokio::time::sleep(Duration::from_millis(10)) => {}
                }
            }
        });
        if waited.await.is_err() {
            panic!("no {what}: {:?}, known {:?}", self.state.borrow(), self.names());
        }
    }

    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            self.known.values().map(|pod| format!("{}/{}", pod.namespace, pod.name)).collect();
        names.sort();
        names
    }

    pub fn find(&self, name: &str) -> Option<&PodFacts> {
        self.known.values().find(|pod| *pod.name == *name).map(|pod| &**pod)
    }

    /// Until the reader knows exactly what the server has of this node: UIDs and the label that tests change.
    pub async fn agree(&mut self) {
        self.until("agreement", |h| {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let there: BTreeMap<String, String> = h
                .server
                .list("pods")
                .iter()
                .filter(|pod| pod["spec"]["nodeName"] == NODE)
                .map(|pod| (text(&pod["metadata"]["uid"]), text(&pod["metadata"]["labels"]["mode"])))
                .collect();
            let here = h.known.iter();
            let here =
                here.map(|(uid, pod)| (uid.clone(), pod.labels.get("mode").unwrap_or_default().to_owned()));
            here.collect::<BTreeMap<_, _>>() == there
        })
        .await;
    }

    pub async fn synced(&mut self) {
        self.until("sync", |h| h.synced > 0).await;
        self.agree().await;
    }

    /// The watches of both collections are open.
    pub async fn watching(&mut self) {
        self.until("watches", |h| h.server.watches("pods") == 1 && h.server.watches("namespaces") == 1).await;
    }

    pub fn edit(&self, namespace: &str, name: &str, mode: &str) {
        self.server
            .edit("pods", namespace, name, |pod| pod["metadata"]["labels"]["mode"] = mode.into())
            .unwrap();
    }

    /// Nobody reads any more.
    pub fn end(mut self) {
        self.updates.close();
        // Not aborted: it has to end by itself.
        self.task = tokio::spawn(async {});
    }

    /// Failed requests with this reason.
    pub fn errors(&self, reason: &str) -> u64 {
        self.state.borrow().errors().find(|(name, _)| *name == reason).expect("a reason").1
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A value of a query string, decoded as far as these tests need it.
pub fn parameter(query: &str, name: &str) -> Option<String> {
    let value = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))?;
    Some(value.replace("%3D", "="))
}
