//! Remedies, against either API server: what is asked, in which order, what is said and what is counted.

use std::sync::Arc;
use std::time::Instant;

use nobypass::cluster::access::Feature;
use nobypass::cluster::events::{self, Events};
use nobypass::pods::PodUid;
use nobypass::probe::Answer;
use nobypass::remedy::kube::{LABEL, Labelled, evict, inspect, label};
use nobypass::remedy::metrics::{End, Kind, Metrics};
use nobypass::remedy::policy::{Remedies, Step};
use nobypass::remedy::proof::{Later, Proof};
use nobypass::remedy::shell::{Hands, Inputs, run};
use nobypass::remedy::subject::{self, Evicted, Inspected, Owner, Seen, Subject};
use nobypass_testkit::servers::Server;
use nobypass_testkit::wait;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::wire::{Admin, Wire, allowed_only};

/// A UID that no pod has.
const OTHER: &str = "2c48913c-b29f-11e7-9350-000000000002";
const EVICTION: (&str, &str) = ("create", "pods/eviction");

/// Nobody can say anything.
#[derive(Debug)]
pub struct Silent;

impl Proof for Silent {
    fn prepare<'a>(&'a self, _: &'a subject::Pod) -> Later<'a, ()> {
        Box::pin(std::future::ready(()))
    }

    fn prove<'a>(&'a self, _: &'a subject::Pod) -> Later<'a, [Answer; 2]> {
        Box::pin(std::future::ready([Answer::Failed { reason: "test" }; 2]))
    }
}

/// A namespace and a node of one test, and who looks after them.
pub struct World {
    pub server: Server,
    pub admin: Admin,
    pub wire: Wire,
    pub namespace: String,
    node: String,
}

impl World {
    pub async fn new() -> Self {
        let server = crate::server();
        let (admin, wire) = (Admin::new(&server).await, Wire::new(&server).await);
        let (namespace, node) = (server.namespace("shop").unwrap(), server.node("remedy").unwrap());
        Self { server, admin, wire, namespace, node }
    }

    /// A running pod, `change`d before it is made.
    pub async fn pod(&self, name: &str, change: impl FnOnce(&mut Value)) -> subject::Pod {
        let metadata = json!({ "name": name, "namespace": self.namespace, "labels": { "app": "cart" } });
        let spec = json!({ "nodeName": self.node, "containers": [{ "name": "app", "image": "app:1" }] });
        let mut object = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec });
        change(&mut object);
        let made = self.admin.create(object).await;
        self.set_phase(name, "Running").await;
        self.named(name, made["metadata"]["uid"].as_str().unwrap())
    }

    async fn set_phase(&self, name: &str, phase: &str) {
        let ready = json!([{ "type": "Ready", "status": "True" }]);
        let status = json!({ "status": { "phase": phase, "conditions": ready } });
        self.admin.merge_status("Pod", &self.namespace, name, status).await;
    }

    pub async fn owned(&self, name: &str, kind: &str) -> subject::Pod {
        self.pod(name, |pod| own(pod, kind, "owner-uid")).await
    }

    pub fn named(&self, name: &str, uid: &str) -> subject::Pod {
        subject::Pod {
            uid: PodUid::parse(uid).unwrap(),
            namespace: self.namespace.as_str().into(),
            name: name.into(),
            mesh: "linkerd".into(),
            cgroup: 1,
            sandbox: None,
            families: [true, true],
            blocked: false,
        }
    }

    /// The pod as it is now.
    async fn object(&self, name: &str) -> Option<Value> {
        self.admin.get("Pod", &self.namespace, name).await
    }

    async fn is_leaving(&self, name: &str) -> bool {
        let found = self.object(name).await;
        found.is_none_or(|pod| pod["metadata"]["deletionTimestamp"].is_string())
    }

    /// A disruption budget over all pods here: what it allows, or `None` if no controller has counted it yet.
    async fn guard(&self, allows: Option<u32>) {
        let metadata = json!({ "name": "guard", "namespace": self.namespace });
        let selector = json!({ "matchLabels": { "app": "cart" } });
        let spec = json!({ "minAvailable": 1, "selector": selector });
        let budget = json!({ "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec });
        self.admin.create(budget).await;
        if let Some(allowed) = allows {
            let status = json!({ "status": {
                "observedGeneration": 1, "disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 1,
                "expectedPods": 1,
            } });
            self.admin.merge_status("PodDisruptionBudget", &self.namespace, "guard", status).await;
        }
    }

    /// What Events say of the pods here, sorted: action and how often.
    async fn said(&self) -> Vec<String> {
        let events = self.admin.list("Event", &self.namespace).await;
        let of_pods = events.iter().filter(|event| event["regarding"]["kind"] == "Pod");
        let mut all: Vec<String> =
            of_pods.map(|event| event["action"].as_str().unwrap().to_owned()).collect();
        all.sort();
        all
    }
}

/// Makes `kind` the pod's controller.
pub fn own(pod: &mut Value, kind: &str, uid: &str) {
    let group = match kind {
        "Node" => "v1",
        "Job" => "batch/v1",
        _ => "apps/v1",
    };
    let owner = json!({ "apiVersion": group, "kind": kind, "name": "cart", "uid": uid, "controller": true });
    pod["metadata"]["ownerReferences"] = json!([owner]);
}

/// Remedies at work on subjects that the test sets.
pub struct Running {
    pub metrics: Metrics,
    wire: Wire,
    subjects: watch::Sender<Arc<[Subject]>>,
    gate: watch::Sender<bool>,
    limits: watch::Sender<Remedies>,
    pub tasks: tokio::task::JoinSet<()>,
}

impl Running {
    pub fn start(world: &World, limits: Remedies) -> Self {
        Self::with(world, &world.wire, limits, true)
    }

    fn with(world: &World, wire: &Wire, limits: Remedies, gate: bool) -> Self {
        let metrics = Metrics::default();
        let (events, task) = Events::new(wire.client(), &world.node, events::Metrics::default());
        let (subjects, following) = watch::channel(Arc::from(Vec::new()));
        let (gate, open) = watch::channel(gate);
        let (limits, allowed) = watch::channel(limits);
        let hands = Hands {
            client: Some(wire.client()),
            events: Some(events),
            repairer: None,
            proof: Arc::new(Silent),
            metrics: metrics.clone(),
        };
        let inputs = Inputs { subjects: following, gate: open, limits: allowed };
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(task.run());
        tasks.spawn(run(hands, inputs));
        Self { metrics, wire: wire.clone(), subjects, gate, limits, tasks }
    }

    pub fn bypassing(&self, pods: &[&subject::Pod]) {
        self.see(pods, Seen::Bypassing { last: Instant::now() }, false);
    }

    fn see(&self, pods: &[&subject::Pod], seen: Seen, terminating: bool) {
        let subject = |pod: &&subject::Pod| Subject {
            pod: Arc::new((*pod).clone()),
            seen,
            terminating,
            labelled: false,
        };
        self.subjects.send_replace(pods.iter().map(subject).collect());
    }

    pub async fn counted(&self, kind: Kind, end: End, times: u64) {
        let counted = || (self.metrics.counted(kind, end) >= times).then_some(());
        let counted = wait::until_async(&format!("{kind:?} {end:?}"), wait::HANG, counted).await;
        counted.unwrap_or_else(|error| panic!("{error}: {:#?}", self.wire.requests()));
    }

    /// What was done about pods, in this order.
    fn did(&self) -> Vec<String> {
        let requests = self.wire.requests();
        let of_pods = requests.iter().filter(|sent| sent.body["regarding"]["kind"] != "Node");
        let shown = of_pods.map(|sent| match sent.target.as_str() {
            "events" => format!("say {}", sent.body["action"].as_str().unwrap_or("again")),
            other => format!("{} {other}", sent.verb),
        });
        shown.collect()
    }

    /// Counters of evictions, as `success=1`.
    fn evictions(&self) -> String {
        let ends = [
            End::Success,
            End::DryRun,
            End::Failed,
            End::GateClosed,
            End::RateLimited,
            End::BlockedPdb,
            End::Unowned,
            End::Mirror,
            End::Ending,
            End::Gone,
            End::Conflict,
            End::Forbidden,
            End::Unavailable,
        ];
        let counts = ends.iter().map(|end| (end.label(), self.metrics.counted(Kind::Evict, *end)));
        let shown: Vec<String> =
            counts.filter(|(_, n)| *n > 0).map(|(end, n)| format!("{end}={n}")).collect();
        shown.join(" ")
    }
}

pub fn all_on() -> Remedies {
    Remedies { label: Step::On, repair: Step::On, evict: Step::On, grace_seconds: 0, ..Remedies::default() }
}

fn evicting() -> Remedies {
    Remedies { label: Step::Off, repair: Step::Off, ..all_on() }
}

#[tokio::test]
async fn evictions_name_the_pod_and_no_grace_period() {
    let world = World::new().await;
    let client = world.wire.client();
    let cart = world.owned("cart", "ReplicaSet").await;
    let of = format!("{}/cart", world.namespace);
    assert!(
        matches!(inspect(&client, &cart).await, Inspected::Owner(Owner::Workload(found)) if found.name == of)
    );
    let another = world.named("cart", OTHER);
    assert_eq!(inspect(&client, &another).await, Inspected::Gone);
    assert_eq!(evict(&client, &another).await, Evicted::Conflict, "another pod has this name");
    assert!(!world.is_leaving("cart").await);
    assert_eq!(evict(&client, &cart).await, Evicted::Done);
    let condition = &world.object("cart").await.unwrap()["status"]["conditions"];
    assert!(condition.to_string().contains("DisruptionTarget"), "{condition}");
    assert!(world.is_leaving("cart").await);
    for sent in world.wire.matching(EVICTION.0, EVICTION.1) {
        let options = &sent.body["deleteOptions"];
        assert!(options["preconditions"]["uid"].is_string(), "{options}");
        assert!(options["gracePeriodSeconds"].is_null(), "{options}");
    }
    assert_eq!(world.wire.count("delete", "pods"), 0);
    assert_eq!(evict(&client, &world.named("never", OTHER)).await, Evicted::Gone);
}

#[tokio::test]
async fn only_the_pod_itself_is_labelled() {
    let world = World::new().await;
    let client = world.wire.client();
    let cart = world.owned("cart", "ReplicaSet").await;
    let shown = async || world.object("cart").await.unwrap()["metadata"]["labels"][LABEL].clone();
    assert_eq!(label(&client, &world.named("cart", OTHER), true).await, Labelled::Gone, "another pod");
    assert_eq!(shown().await, Value::Null);
    assert_eq!(label(&client, &cart, true).await, Labelled::Done);
    assert_eq!(shown().await, "true");
    assert_eq!(label(&client, &cart, false).await, Labelled::Done);
    assert_eq!(shown().await, Value::Null);
    assert_eq!(label(&client, &world.named("never", OTHER), true).await, Labelled::Gone);
    let denied = [("patch", "pods/status")];
    let config = allowed_only(&world.server, &world.admin, &[("get", "", "pods")], &denied).await;
    assert_eq!(label(&Wire::with(&config).await.client(), &cart, true).await, Labelled::Forbidden);
}

#[tokio::test]
async fn an_event_comes_before_each_step() {
    let mut world = World::new().await;
    let features = [Feature::Events, Feature::PodLabel, Feature::Evict];
    world.wire = Wire::granted(&world.server, &world.admin, &features).await;
    let mut running = Running::start(&world, all_on());
    let cart = world.owned("cart", "ReplicaSet").await;
    running.bypassing(&[&cart]);
    running.counted(Kind::Evict, End::Success, 1).await;
    world.wire.was_never_refused();
    let expected = [
        "say Detecting",
        "patch pods/status",
        "say Repairing",
        "say RepairFailed",
        "get pods",
        "say Evicting",
        "create pods/eviction",
    ];
    assert_eq!(running.did(), expected);
    assert_eq!(running.metrics.counted(Kind::Repair, End::Impossible), 1, "the CNI half is off");
    assert_eq!(world.said().await, ["Detecting", "Evicting", "RepairFailed", "Repairing"]);
    let events = world.admin.list("Event", "default").await;
    let of_node = events.iter().filter(|event| event["regarding"]["name"] == json!(world.node));
    assert!(of_node.count() >= 1, "the node is told too");
    running.tasks.shutdown().await;
}

/// Who is evicted: what is asked, said and counted for each kind of pod.
#[tokio::test]
async fn the_owner_decides() {
    const ASKED: &str = "say Detecting, get pods";
    const DONE: &str = "say Detecting, get pods, say Evicting, create pods/eviction";
    const LEFT: &str = "say Detecting, get pods, say GivingUp";
    let mirror = |pod: &mut Value| {
        own(pod, "Node", "node-uid");
        pod["metadata"]["annotations"] = json!({ "kubernetes.io/config.mirror": "hash" });
    };
    let never = |pod: &mut Value| {
        own(pod, "Job", "job-uid");
        pod["spec"]["restartPolicy"] = json!("Never");
    };
    type Change<'a> = &'a dyn Fn(&mut Value);
    let rows: [(&str, Change<'_>, &str, &str); 8] = [
        ("bare", &|_| {}, LEFT, "unowned=1"),
        ("mirror", &mirror, LEFT, "mirror=1"),
        ("static", &|pod| own(pod, "Node", "node-uid"), LEFT, "mirror=1"),
        ("daemonset", &|pod| own(pod, "DaemonSet", "u"), DONE, "success=1"),
        ("deployment", &|pod| own(pod, "ReplicaSet", "u"), DONE, "success=1"),
        ("statefulset", &|pod| own(pod, "StatefulSet", "u"), DONE, "success=1"),
        ("job-never", &never, DONE, "success=1"),
        ("job-finished", &never, ASKED, "ending=1"),
    ];
    for (name, change, did, counted) in rows {
        let world = World::new().await;
        let pod = world.pod(name, change).await;
        if name == "job-finished" {
            world.set_phase(name, "Succeeded").await;
        }
        let mut running = Running::start(&world, evicting());
        running.bypassing(&[&pod]);
        wait::until_async(name, wait::HANG, || (!running.evictions().is_empty()).then_some(()))
            .await
            .unwrap();
        world.wire.calm().await;
        assert_eq!(
            (running.did().join(", ").as_str(), running.evictions().as_str()),
            (did, counted),
            "{name}"
        );
        assert_eq!(world.is_leaving(name).await, counted == "success=1", "{name}");
        let expected = did.split(", ").filter_map(|did| did.strip_prefix("say "));
        assert_eq!(world.said().await, expected.map(str::to_owned).collect::<Vec<_>>(), "{name}");
        running.tasks.shutdown().await;
    }
}

/// Whom nothing is done to, though a controller would make it anew.
#[tokio::test]
async fn what_ends_or_cannot_be_seen_is_left_alone() {
    let world = World::new().await;
    let pod = world.owned("pod", "ReplicaSet").await;
    let mut running = Running::start(&world, all_on());
    // gVisor and the node's network; a pod that ends; one of which nothing is known.
    for (seen, terminating) in [
        (Seen::Unsupported, false),
        (Seen::Bypassing { last: Instant::now() }, true),
        (Seen::Unknown, false),
        (Seen::Redirected, false),
    ] {
        running.see(&[&pod], seen, terminating);
        world.wire.calm().await;
        assert_eq!(running.did(), [""; 0], "{seen:?}");
    }
    // It ends, and the agent has not heard of that.
    let api = world.admin.api("Pod", &world.namespace);
    api.delete("pod", &Default::default()).await.unwrap();
    running.limits.send_replace(evicting());
    running.bypassing(&[&pod]);
    running.counted(Kind::Evict, End::Ending, 1).await;
    world.wire.calm().await;
    assert_eq!(running.did(), ["say Detecting", "get pods"]);
    running.tasks.shutdown().await;
}

#[tokio::test]
async fn a_disruption_budget_is_respected() {
    for allows in [Some(0), None, Some(1)] {
        let world = World::new().await;
        let pod = world.owned("cart", "ReplicaSet").await;
        world.guard(allows).await;
        // What the server says: with a time to wait only where the budget is not counted yet.
        if allows != Some(1) {
            let Evicted::Blocked { retry_after } = evict(&world.wire.client(), &pod).await else {
                panic!("{allows:?}")
            };
            assert_eq!(retry_after.is_some(), allows.is_none(), "{allows:?}: {retry_after:?}");
            world.wire.clear();
        }
        let mut running = Running::start(&world, evicting());
        running.bypassing(&[&pod]);
        let end = if allows == Some(1) { End::Success } else { End::BlockedPdb };
        running.counted(Kind::Evict, end, 1).await;
        world.wire.calm().await;
        assert_eq!(world.wire.count(EVICTION.0, EVICTION.1), 1, "{allows:?}: tried again much later");
        assert_eq!(world.is_leaving("cart").await, allows == Some(1), "{allows:?}");
        assert_eq!(running.evictions(), format!("{}=1", end.label()), "{allows:?}");
        running.tasks.shutdown().await;
    }
}

/// Between the look at the pod and its eviction: it goes, or another one takes its name.
#[tokio::test]
async fn a_pod_that_goes_or_is_made_anew_meanwhile() {
    for (again, end) in [(false, End::Gone), (true, End::Conflict)] {
        let world = World::new().await;
        let pod = world.owned("db-0", "StatefulSet").await;
        let mut running = Running::start(&world, evicting());
        let held = world.wire.hold(EVICTION.0, EVICTION.1);
        running.bypassing(&[&pod]);
        let go = held.arrived().await;
        world.admin.delete("Pod", &world.namespace, "db-0").await;
        if again {
            world.owned("db-0", "StatefulSet").await;
        }
        drop(go);
        running.counted(Kind::Evict, end, 1).await;
        world.wire.calm().await;
        assert_eq!(running.evictions(), format!("{}=1", end.label()));
        assert_eq!(world.wire.count(EVICTION.0, EVICTION.1), 1);
        let status = if again { 409 } else { 404 };
        assert_eq!(world.wire.matching(EVICTION.0, EVICTION.1)[0].status, Some(status));
        assert_eq!(world.is_leaving("db-0").await, !again, "the new one stays");
        running.tasks.shutdown().await;
    }
}

#[tokio::test]
async fn without_the_permission_nothing_is_evicted() {
    let world = World::new().await;
    let pod = world.owned("cart", "ReplicaSet").await;
    let may =
        [("get", "", "pods"), ("create", "events.k8s.io", "events"), ("patch", "events.k8s.io", "events")];
    let config = allowed_only(&world.server, &world.admin, &may, &[EVICTION]).await;
    let wire = Wire::with(&config).await;
    let mut running = Running::with(&world, &wire, evicting(), true);
    running.bypassing(&[&pod]);
    running.counted(Kind::Evict, End::Forbidden, 1).await;
    wire.calm().await;
    assert_eq!((wire.count(EVICTION.0, EVICTION.1), running.evictions()), (1, "forbidden=1".to_owned()));
    assert!(!world.is_leaving("cart").await);
    running.tasks.shutdown().await;
}

#[tokio::test]
async fn the_gate_and_both_budgets_are_respected() {
    let world = World::new().await;
    let mut carts = Vec::new();
    for n in 0..6 {
        carts.push(world.owned(&format!("cart-{n}"), "StatefulSet").await);
    }
    let mut running = Running::with(&world, &world.wire, evicting(), false);
    let pods: Vec<&subject::Pod> = carts.iter().collect();
    running.bypassing(&pods);
    running.counted(Kind::Evict, End::GateClosed, 6).await;
    world.wire.calm().await;
    assert!(running.did().iter().all(|did| did == "say Detecting"), "{:?}", running.did());
    running.gate.send_replace(true);
    running.counted(Kind::Evict, End::RateLimited, 5).await;
    running.counted(Kind::Evict, End::Success, 1).await;
    world.wire.calm().await;
    assert_eq!(world.wire.count(EVICTION.0, EVICTION.1), 1, "one pod of a workload");
    running.tasks.shutdown().await;

    // Each of a workload of its own: two a minute.
    let world = World::new().await;
    let mut pods = Vec::new();
    for n in 0..4 {
        pods.push(world.pod(&format!("p{n}"), |pod| own(pod, "ReplicaSet", &format!("owner-{n}"))).await);
    }
    let mut running = Running::start(&world, evicting());
    running.bypassing(&pods.iter().collect::<Vec<_>>());
    running.counted(Kind::Evict, End::Success, 2).await;
    running.counted(Kind::Evict, End::RateLimited, 2).await;
    world.wire.calm().await;
    assert_eq!(world.wire.count(EVICTION.0, EVICTION.1), 2, "the node's budget");
    running.tasks.shutdown().await;
}

#[tokio::test]
async fn a_dry_run_asks_and_says_and_does_nothing() {
    let world = World::new().await;
    let dry = Remedies { label: Step::DryRun, repair: Step::Off, evict: Step::DryRun, ..all_on() };
    let mut running = Running::start(&world, dry);
    let pod = world.owned("cart", "Job").await;
    running.bypassing(&[&pod]);
    running.counted(Kind::Evict, End::DryRun, 1).await;
    running.counted(Kind::Event, End::Success, 2).await;
    let writes: Vec<String> = world.wire.writes().iter().map(|write| write.target.clone()).collect();
    assert!(writes.iter().all(|target| target == "events"), "{writes:?}");
    assert_eq!(running.metrics.counted(Kind::Label, End::DryRun), 1);
    assert!(!world.is_leaving("cart").await);
    // And when it is allowed while the agent runs, it is done.
    running.limits.send_replace(Remedies { repair: Step::Off, ..all_on() });
    running.counted(Kind::Evict, End::Success, 1).await;
    assert!(world.is_leaving("cart").await);
    running.tasks.shutdown().await;
}

/// A gate that flaps while the plugin cannot be had and evictions are refused: what goes over the wire stays bounded.
#[tokio::test]
async fn a_storm_sends_a_bounded_number_of_requests() {
    const PODS: usize = 10;
    let world = World::new().await;
    let mut pods = Vec::new();
    for n in 0..PODS {
        pods.push(world.owned(&format!("cart-{n}"), "ReplicaSet").await);
    }
    world.guard(Some(0)).await;
    let mut running = Running::start(&world, all_on());
    let pods: Vec<&subject::Pod> = pods.iter().collect();
    for n in 0..400 {
        running.bypassing(&pods);
        running.gate.send_replace(n % 2 == 0);
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    world.wire.calm().await;
    let evictions = world.wire.count(EVICTION.0, EVICTION.1);
    assert!((1..=2 * PODS).contains(&evictions), "{evictions} tries");
    assert_eq!(world.wire.count("patch", "pods/status"), PODS, "each is labelled once");
    let all = world.wire.requests().len();
    assert!(all <= 16 * PODS, "{all} requests");
    running.tasks.shutdown().await;
}
