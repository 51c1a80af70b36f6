//! Each feature that needs the API server, by the agent's own code, as whom the chart makes it.

use std::collections::BTreeSet;
use std::future::Future;
use std::time::Duration;

use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use nobypass::cluster::events::{Events, Metrics as EventMetrics, Note, PodRef, Reason};
use nobypass::node::apply::Applier;
use nobypass::node::desired::{CONDITION, LABEL, Outputs, TAINT};
use nobypass::node::gate::{Reason as Why, Verdict};
use nobypass::node::metrics::Metrics;
use nobypass::node::pods::{Selector, follow};
use nobypass::pods::PodUid;
use nobypass::pods::model::Wanted;
use nobypass::pods::source::PodUpdate;
use nobypass::pods::source::kube::{KubeOptions, KubeSource};
use nobypass::remedy::kube::{Labelled, evict, inspect, label};
use nobypass::remedy::subject::{self, Evicted, Inspected, Owner};
use nobypass_testkit::control_plane::ControlPlane;
use nobypass_testkit::servers::Server;
use nobypass_testkit::wait;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use crate::api;

/// What the chart's permissions are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Feature {
    /// This node's pods, and what their namespaces say.
    Pods,
    /// Events, repeated ones as a series.
    Events,
    /// The label on a bypassing pod.
    PodLabel,
    /// Eviction of one that a controller makes anew.
    Evict,
    /// The Node condition.
    GateCondition,
    /// The Node label.
    GateLabel,
    /// The startup taint.
    GateTaint,
    /// Other pods that have to be ready.
    GatePods,
    /// What Linkerd's plugin reads:
    /// <https://github.com/linkerd/linkerd2-proxy-init/blob/03a7172d39c655c906f8b34bb70d7e3c30768655/cni-plugin/main.go>.
    Plugin,
}

/// A cluster as one feature sees it.
pub struct Scene<'a> {
    pub plane: &'a ControlPlane,
    pub admin: &'a kube::Client,
    /// The agent's.
    pub client: kube::Client,
    /// Where the service account `account` lives.
    pub namespace: &'a str,
    pub account: &'a str,
}

impl Scene<'_> {
    async fn create(&self, object: Value) -> DynamicObject {
        let made: DynamicObject = serde_json::from_value(object.clone()).unwrap();
        let made = api(self.admin, &object).create(&PostParams::default(), &made).await;
        made.unwrap_or_else(|error| panic!("{object}: {error}"))
    }

    async fn node(&self) -> String {
        let name = Server::unique("node");
        let taint = json!([{ "key": TAINT, "effect": "NoSchedule" }]);
        let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name }, "spec": { "taints": taint } });
        self.create(node).await;
        name
    }

    fn pods(&self) -> Api<DynamicObject> {
        let of = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "namespace": self.namespace } });
        api(self.admin, &of)
    }

    async fn pod(&self, node: &str, name: &str) -> subject::Pod {
        let owner = json!([{
            "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "cart", "controller": true,
            "uid": "2c48913c-b29f-11e7-9350-000000000001",
        }]);
        let made = self.create(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": name, "namespace": self.namespace, "labels": { "app": node }, "ownerReferences": owner,
            },
            "spec": {
                "nodeName": node, "terminationGracePeriodSeconds": 0,
                "containers": [{ "name": "app", "image": "a:1" }],
            },
        }));
        let uid = made.await.metadata.uid.unwrap();
        subject::Pod {
            uid: PodUid::parse(&uid).unwrap(),
            namespace: self.namespace.into(),
            name: name.into(),
            mesh: "linkerd".into(),
            cgroup: 1,
            sandbox: None,
            families: [true, true],
            blocked: false,
        }
    }

    /// What the API server refused, by what a Role would have to say.
    fn refused(&self, since: usize) -> BTreeSet<String> {
        let asked = self.plane.asked_by(self.namespace, self.account).unwrap();
        let refused = asked.iter().skip(since).filter(|asked| !asked.allowed);
        refused.map(|asked| format!("{} {}/{}", asked.verb, asked.group, asked.resource)).collect()
    }

    /// Whether the feature does all that it is for; else what was refused.
    pub async fn works(&self, feature: Feature) -> Result<(), BTreeSet<String>> {
        let since = self.plane.asked_by(self.namespace, self.account).unwrap().len();
        let refused = async {
            loop {
                let refused = self.refused(since);
                if !refused.is_empty() {
                    return refused;
                }
                // Each look reads the whole log.
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        let works = tokio::time::timeout(wait::LONG, self.use_it(feature));
        tokio::select! {
            refused = refused => return Err(refused),
            done = works => assert!(done.is_ok(), "{feature:?}: neither done nor refused"),
        }
        let refused = self.refused(since);
        if refused.is_empty() { Ok(()) } else { Err(refused) }
    }

    /// Comes to an end when everything worked.
    async fn use_it(&self, feature: Feature) {
        match feature {
            Feature::Pods => self.follows_pods().await,
            Feature::Events => self.says_events().await,
            Feature::PodLabel => {
                let pod = self.pod(&self.node().await, &Server::unique("pod")).await;
                until(async || label(&self.client, &pod, true).await == Labelled::Done).await;
            }
            Feature::Evict => {
                let pod = self.pod(&self.node().await, &Server::unique("pod")).await;
                until(async || {
                    matches!(inspect(&self.client, &pod).await, Inspected::Owner(Owner::Workload(_)))
                })
                .await;
                until(async || evict(&self.client, &pod).await == Evicted::Done).await;
            }
            Feature::GateCondition => {
                self.keeps_node(Outputs { condition: true, ..Outputs::default() }).await;
            }
            Feature::GateLabel => self.keeps_node(Outputs { label: true, ..Outputs::default() }).await,
            Feature::GateTaint => {
                self.keeps_node(Outputs { taints: vec![TAINT.into()], ..Outputs::default() }).await;
            }
            Feature::GatePods => self.follows_other_pods().await,
            Feature::Plugin => {
                let pod = self.pod(&self.node().await, &Server::unique("pod")).await;
                let meta = |name: &str, namespace: &str| json!({ "name": name, "namespace": namespace });
                for (kind, name, namespace) in [
                    ("Pod", &*pod.name, self.namespace),
                    ("Namespace", self.namespace, ""),
                    ("Service", "kubernetes", "default"),
                ] {
                    let of = json!({ "apiVersion": "v1", "kind": kind, "metadata": meta(name, namespace) });
                    until(async || api(&self.client, &of).get(name).await.is_ok()).await;
                }
            }
        }
    }

    async fn follows_pods(&self) {
        let namespaces = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": {} });
        let label = async |mode: Option<&str>| {
            let patch = Patch::Merge(json!({ "metadata": { "labels": { "nobypass.dev/mode": mode } } }));
            let namespaces = api(self.admin, &namespaces);
            namespaces.patch(self.namespace, &PatchParams::default(), &patch).await.unwrap();
        };
        // One that was refused in the middle left it.
        label(None).await;
        let node = self.node().await;
        let first = self.pod(&node, &Server::unique("pod")).await;
        let key = "nobypass.dev/mode";
        let wanted = Wanted { keys: [key].into_iter().collect(), ..Wanted::default() };
        let (source, _) = KubeSource::new(KubeOptions::new(&node, watch::channel(wanted).1));
        let (out, mut updates) = mpsc::channel(16);
        let _task = Aborted(tokio::spawn(source.run(self.client.clone(), out)));
        let mut updates = async |name: &str, mode: Option<&str>| loop {
            if let PodUpdate::Upsert(pod) = updates.recv().await.unwrap() {
                let said = pod.namespace_labels.as_ref().and_then(|labels| labels.get(key));
                if &*pod.name == name && said == mode {
                    return;
                }
            }
        };
        updates(&first.name, None).await;
        let second = self.pod(&node, &Server::unique("pod")).await;
        updates(&second.name, None).await;
        for mode in [Some("enforce"), None] {
            label(mode).await;
            updates(&second.name, mode).await;
        }
    }

    async fn says_events(&self) {
        let node = self.node().await;
        let pod = self.pod(&node, &Server::unique("pod")).await;
        let (events, task) = Events::new(self.client.clone(), &node, EventMetrics::default());
        let _task = Aborted(tokio::spawn(task.run()));
        let about =
            PodRef { namespace: self.namespace.into(), name: pod.name.to_string(), uid: pod.uid.to_string() };
        let reason = Reason::MeshBypassDetected;
        for _ in 0..2 {
            let pod = Some(about.clone());
            events.say(Note { reason, action: "Detecting", text: "test".into(), pod }).await;
        }
        let of = json!({ "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": { "namespace": self.namespace } });
        until(async || {
            let all = api(self.admin, &of).list(&kube::api::ListParams::default()).await.unwrap();
            all.items.iter().any(|event| {
                event.data["regarding"]["name"] == about.name.as_str() && event.data["series"]["count"] == 2
            })
        })
        .await;
    }

    async fn keeps_node(&self, outputs: Outputs) {
        let name = self.node().await;
        let verdict = Verdict { open: true, reason: Why::Protected, message: "well".into() };
        let (_verdict, verdicts) = watch::channel(verdict);
        let (_outputs, wanted) = watch::channel(outputs.clone());
        let applier = Applier::new(self.client.clone(), &name, verdicts, wanted, Metrics::default());
        let _task = Aborted(tokio::spawn(applier.run()));
        let nodes = api(self.admin, &json!({ "apiVersion": "v1", "kind": "Node" }));
        let told = async || {
            let node = nodes.get(&name).await.unwrap();
            let condition = node.data["status"]["conditions"]
                .as_array()
                .into_iter()
                .flatten()
                .any(|condition| condition["type"] == CONDITION && condition["status"] == "True");
            let labels = node.metadata.labels.unwrap_or_default();
            let taint = node.data["spec"]["taints"]
                .as_array()
                .is_some_and(|taints| taints.iter().any(|taint| taint["key"] == TAINT));
            (!outputs.condition || condition)
                && (!outputs.label || labels.contains_key(LABEL))
                && (outputs.taints.is_empty() || !taint)
        };
        until(told).await;
        // Somebody undoes it all, which only a watch tells.
        let taint = json!([{ "key": TAINT, "effect": "NoSchedule" }]);
        let undo = json!({ "metadata": { "labels": { LABEL: null } }, "spec": { "taints": taint } });
        nodes.patch(&name, &PatchParams::default(), &Patch::Merge(undo)).await.unwrap();
        let undo = Patch::Merge(json!({ "status": { "conditions": [] } }));
        nodes.patch_status(&name, &PatchParams::default(), &undo).await.unwrap();
        until(told).await;
    }

    async fn follows_other_pods(&self) {
        let node = self.node().await;
        let first = self.pod(&node, &Server::unique("pod")).await;
        let selector = Selector::parse(&format!("{}/app={node}", self.namespace)).unwrap();
        let (seen, mut pods) = watch::channel(None);
        let _task = Aborted(tokio::spawn(follow(self.client.clone(), node.clone(), selector, seen)));
        let mut knows = async |count: usize| {
            let known = pods.wait_for(|pods| pods.as_ref().is_some_and(|pods| pods.len() == count)).await;
            drop(known.unwrap());
        };
        knows(1).await;
        self.pod(&node, &Server::unique("pod")).await;
        knows(2).await;
        let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        self.pods().delete(&first.name, &now).await.unwrap();
        knows(1).await;
    }
}

/// A task that ends with its owner.
struct Aborted(tokio::task::JoinHandle<()>);

impl Drop for Aborted {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Whoever waits has a deadline.
async fn until<F: Future<Output = bool>>(poll: impl Fn() -> F) {
    while !poll().await {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
