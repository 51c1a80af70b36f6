//! The source of pods, against either API server: what a real one does with its watches, listings and selectors.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use nobypass::cluster::watch::Patience;
use nobypass::pods::model::{PodFacts, Wanted};
use nobypass::pods::source::PodUpdate;
use nobypass::pods::source::kube::{KubeOptions, KubeSource};
use nobypass_testkit::servers::Server;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

const BOUND: Duration = Duration::from_secs(60);

struct Reader {
    pods: Api<DynamicObject>,
    namespaces: Api<DynamicObject>,
    namespace: String,
    node: String,
    updates: mpsc::Receiver<PodUpdate>,
    known: BTreeMap<String, Arc<PodFacts>>,
    synced: bool,
}

fn resource(kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", kind))
}

impl Reader {
    /// A source with `count` pods on its node, and one on another.
    async fn start(server: &Server, count: usize, patience: Patience) -> Self {
        let kubeconfig = tempfile::NamedTempFile::new().unwrap();
        server.write_kubeconfig(kubeconfig.path()).unwrap();
        let client = nobypass::cluster::connect(Some(kubeconfig.path())).await.unwrap();
        let (namespace, node) = (server.namespace("pods").unwrap(), server.node("pods").unwrap());
        let pods = Api::namespaced_with(client.clone(), &namespace, &resource("Pod"));
        let namespaces = Api::all_with(client.clone(), &resource("Namespace"));
        let wanted = Wanted { keys: ["app", "mesh"].into_iter().collect(), ..Wanted::default() };
        let options = KubeOptions { patience, ..KubeOptions::new(&node, watch::channel(wanted).1) };
        let (source, _) = KubeSource::new(options);
        let (out, updates) = mpsc::channel(16);
        let reader =
            Self { pods, namespaces, namespace, node, updates, known: BTreeMap::new(), synced: false };
        for n in 0..count {
            reader.create(&format!("p{n}"), &reader.node).await;
        }
        let other = server.node("elsewhere").unwrap();
        reader.create("elsewhere", &other).await;
        // It ends with its reader.
        tokio::spawn(source.run(client, out));
        reader
    }

    async fn create(&self, name: &str, node: &str) -> String {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": "first"}},
            "spec": {
                "nodeName": node, "terminationGracePeriodSeconds": 0,
                "securityContext": {"runAsUser": 1000},
                "initContainers": [{"name": "proxy", "image": "p:1", "restartPolicy": "Always"}],
                "containers": [{"name": "app", "image": "a:1"}],
            },
        });
        let made = self.pods.create(&PostParams::default(), &object(pod)).await.unwrap();
        made.metadata.uid.unwrap()
    }

    async fn patch(&self, name: &str, patch: Value) {
        self.pods.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    async fn delete(&self, name: &str) {
        let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        self.pods.delete(name, &now).await.unwrap();
    }

    async fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let waited = timeout(BOUND, async {
            while !done(self) {
                match self.updates.recv().await.expect("the source runs") {
                    PodUpdate::Upsert(pod) => drop(self.known.insert(pod.uid.to_string(), pod)),
                    PodUpdate::Gone(uid) => assert!(self.known.remove(&uid.to_string()).is_some(), "{uid}"),
                    PodUpdate::Rekeyed(_) => {}
                    PodUpdate::Synced => self.synced = true,
                }
            }
        });
        assert!(waited.await.is_ok(), "no {what}: {:?}", self.known);
    }

    fn find(&self, name: &str) -> Option<&PodFacts> {
        self.known.values().map(|pod| &**pod).find(|pod| &*pod.name == name)
    }
}

fn object(value: Value) -> DynamicObject {
    serde_json::from_value(value).unwrap()
}

#[tokio::test]
async fn listed_changed_deleted_and_made_again() {
    let server = crate::server();
    let mut reader = Reader::start(&server, 12, Patience::default()).await;
    reader.until("sync", |reader| reader.synced).await;
    assert_eq!(reader.known.len(), 12, "those of its node alone");
    let pod = reader.find("p3").unwrap();
    assert_eq!((&*pod.namespace, pod.labels.get("app")), (&*reader.namespace, Some("first")));
    assert_eq!(
        (pod.host_network(), pod.containers_complete, pod.created_at.is_some()),
        (Some(false), true, true)
    );
    let roles: Vec<_> = pod.containers.iter().map(|c| (&*c.name, format!("{:?}", c.role), c.uid())).collect();
    assert_eq!(roles, [("proxy", "NativeSidecar".into(), Some(1000)), ("app", "App".into(), Some(1000))]);

    reader.patch("p3", json!({"metadata": {"labels": {"app": "second"}}})).await;
    reader
        .until("the label", |r| r.find("p3").is_some_and(|pod| pod.labels.get("app") == Some("second")))
        .await;
    let old = reader.find("p4").unwrap().uid.to_string();
    reader.delete("p4").await;
    let new = reader.create("p4", &reader.node).await;
    reader.until("the new one alone", |r| r.known.contains_key(&new) && !r.known.contains_key(&old)).await;
    assert_eq!(reader.known.len(), 12);
}

#[tokio::test]
async fn short_watches_go_on_where_the_last_one_ended() {
    let server = crate::server();
    // The server ends each watch after a second.
    let brief = Patience { watch: Duration::from_secs(1), ..Patience::default() };
    let mut reader = Reader::start(&server, 3, brief).await;
    reader.until("sync", |reader| reader.synced).await;
    for round in 0..6 {
        let value = format!("round-{round}");
        reader.patch("p1", json!({"metadata": {"labels": {"app": value}}})).await;
        reader
            .until("the label", |r| r.find("p1").is_some_and(|pod| pod.labels.get("app") == Some(&value)))
            .await;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert_eq!(reader.known.len(), 3);
}

#[tokio::test]
async fn the_namespaces_labels_reach_its_pods() {
    let server = crate::server();
    let mut reader = Reader::start(&server, 2, Patience::default()).await;
    reader.until("sync", |reader| reader.synced).await;
    for (value, wanted) in [(json!("on"), Some("on")), (json!("off"), Some("off")), (Value::Null, None)] {
        let patch = Patch::Merge(json!({"metadata": {"labels": {"mesh": value}}}));
        reader.namespaces.patch(&reader.namespace, &PatchParams::default(), &patch).await.unwrap();
        let is_told =
            |pod: &PodFacts| pod.namespace_labels.as_ref().is_some_and(|all| all.get("mesh") == wanted);
        reader.until("the namespace's label", |r| r.known.values().all(|pod| is_told(pod))).await;
    }
}
