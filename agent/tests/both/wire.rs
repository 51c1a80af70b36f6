//! What goes over the wire to either API server: a client that notes each request and can hold one back, and an
//! administrator for what tests do themselves.

#![allow(dead_code, reason = "each test target uses its part")]

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::{Request, Response};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::client::Body;
use kube::core::{ApiResource, GroupVersionKind};
use nobypass::cluster::access::{Feature, Permission};
use nobypass_testkit::servers::Server;
use nobypass_testkit::wait;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tonic::codegen::Service;

/// A request that was sent.
#[derive(Clone, Debug)]
pub struct Sent {
    /// As in RBAC rules: `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`.
    pub verb: &'static str,
    /// As in RBAC rules: `pods`, `pods/eviction`.
    pub target: String,
    /// The body of a write.
    pub body: Value,
    /// Status of the answer; 0 if it never came, `None` while it may.
    pub status: Option<u16>,
}

impl Sent {
    fn of(method: &str, path: &str, query: &str) -> Self {
        let mut parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        parts.drain(..if parts[0] == "api" { 2 } else { 3 });
        if parts[0] == "namespaces" && parts.len() > 2 {
            parts.drain(..2);
        }
        let verb = match method {
            "POST" => "create",
            "PUT" => "update",
            "PATCH" => "patch",
            "DELETE" => "delete",
            _ if query.contains("watch=") => "watch",
            _ if parts.len() > 1 => "get",
            _ => "list",
        };
        let target = parts.get(2).map_or_else(|| parts[0].to_owned(), |sub| format!("{}/{sub}", parts[0]));
        Self { verb, target, body: Value::Null, status: None }
    }

    pub fn is_write(&self) -> bool {
        !["get", "list", "watch"].contains(&self.verb) && self.target != "selfsubjectaccessreviews"
    }
}

type Holds = Arc<Mutex<Vec<(&'static str, &'static str, oneshot::Sender<oneshot::Sender<()>>)>>>;

/// The client of the code under test.
#[derive(Clone)]
pub struct Wire {
    inner: kube::Client,
    sent: Arc<Mutex<Vec<Sent>>>,
    holds: Holds,
}

/// A request that will be held back.
pub struct Held(oneshot::Receiver<oneshot::Sender<()>>);

impl Held {
    /// Waits until the request is about to be sent; dropping what this gives sends it.
    pub async fn arrived(self) -> oneshot::Sender<()> {
        tokio::time::timeout(wait::HANG, self.0).await.expect("the request").unwrap()
    }
}

impl Wire {
    /// As who may do everything.
    pub async fn new(server: &Server) -> Self {
        Self::with(&server.kubeconfig().unwrap()).await
    }

    pub async fn with(kubeconfig: &str) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), kubeconfig).unwrap();
        let inner = nobypass::cluster::connect(Some(file.path())).await.unwrap();
        Self { inner, sent: Arc::default(), holds: Arc::default() }
    }

    /// As who may do what the chart grants for these features, and no more; on the test server, as everybody.
    pub async fn granted(server: &Server, admin: &Admin, features: &[Feature]) -> Self {
        let needs = features.iter().flat_map(|feature| feature.needs());
        let may: Vec<(&str, &str, String)> = needs
            .map(|Permission(verb, group, of, sub)| {
                (*verb, *group, if sub.is_empty() { (*of).to_owned() } else { format!("{of}/{sub}") })
            })
            .collect();
        let may: Vec<(&str, &str, &str)> =
            may.iter().map(|(verb, group, of)| (*verb, *group, of.as_str())).collect();
        Self::with(&allowed_only(server, admin, &may, &[]).await).await
    }

    /// Whatever was asked for was allowed.
    pub fn was_never_refused(&self) {
        let refused: Vec<Sent> =
            self.requests().into_iter().filter(|sent| sent.status == Some(403)).collect();
        assert!(refused.is_empty(), "{refused:#?}");
    }

    pub fn client(&self) -> kube::Client {
        kube::Client::new(self.clone(), "default")
    }

    pub fn requests(&self) -> Vec<Sent> {
        self.sent.lock().unwrap().clone()
    }

    pub fn clear(&self) {
        self.sent.lock().unwrap().clear();
    }

    pub fn writes(&self) -> Vec<Sent> {
        self.requests().into_iter().filter(Sent::is_write).collect()
    }

    pub fn matching(&self, verb: &str, target: &str) -> Vec<Sent> {
        self.requests().into_iter().filter(|sent| sent.verb == verb && sent.target == target).collect()
    }

    pub fn count(&self, verb: &str, target: &str) -> usize {
        self.matching(verb, target).len()
    }

    /// The next such request waits before it is sent.
    pub fn hold(&self, verb: &'static str, target: &'static str) -> Held {
        let (arrived, held) = oneshot::channel();
        self.holds.lock().unwrap().push((verb, target, arrived));
        Held(held)
    }

    /// Waits until nothing more is sent.
    pub async fn calm(&self) {
        loop {
            let before = self.requests();
            tokio::time::sleep(Duration::from_millis(400)).await;
            let now = self.requests();
            let open = |sent: &&Sent| sent.status.is_none() && sent.verb != "watch";
            if now.len() == before.len() && !now.iter().any(|sent| open(&sent)) {
                return;
            }
        }
    }
}

impl Service<Request<Body>> for Wire {
    type Response = Response<Body>;
    type Error = kube::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, kube::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), kube::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let this = self.clone();
        Box::pin(async move {
            let (head, body) = request.into_parts();
            let bytes = body.collect_bytes().await.unwrap();
            let uri = &head.uri;
            let mut sent = Sent::of(head.method.as_str(), uri.path(), uri.query().unwrap_or_default());
            sent.body = serde_json::from_slice(&bytes).unwrap_or_default();
            let hold = {
                let mut holds = this.holds.lock().unwrap();
                let fits = |(verb, target, _): &(&str, &str, _)| *verb == sent.verb && *target == sent.target;
                holds.iter().position(fits).map(|at| holds.remove(at).2)
            };
            let index = {
                let mut all = this.sent.lock().unwrap();
                all.push(sent);
                all.len() - 1
            };
            if let Some(arrived) = hold {
                let (go, going) = oneshot::channel();
                if arrived.send(go).is_ok() {
                    drop(going.await);
                }
            }
            let answer = this.inner.send(Request::from_parts(head, Body::from(bytes))).await;
            if let Some(sent) = this.sent.lock().unwrap().get_mut(index) {
                sent.status = Some(answer.as_ref().map_or(0, |answer| answer.status().as_u16()));
            }
            answer
        })
    }
}

/// What tests do to objects, as others in a cluster would: over the API, on either server.
#[derive(Clone)]
pub struct Admin(pub kube::Client);

fn resource(group: &str, kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind))
}

impl Admin {
    pub async fn new(server: &Server) -> Self {
        Self(Wire::new(server).await.inner)
    }

    pub fn api(&self, kind: &str, namespace: &str) -> Api<DynamicObject> {
        let group = match kind {
            "PodDisruptionBudget" => "policy",
            "Event" => "events.k8s.io",
            "ClusterRole" | "ClusterRoleBinding" => "rbac.authorization.k8s.io",
            "SubjectAccessReview" => "authorization.k8s.io",
            _ => "",
        };
        let resource = resource(group, kind);
        if namespace.is_empty() {
            Api::all_with(self.0.clone(), &resource)
        } else {
            Api::namespaced_with(self.0.clone(), namespace, &resource)
        }
    }

    pub async fn create(&self, object: Value) -> Value {
        let kind = object["kind"].as_str().unwrap().to_owned();
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or_default().to_owned();
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        let made = self.api(&kind, &namespace).create(&PostParams::default(), &object).await.unwrap();
        serde_json::to_value(made).unwrap()
    }

    pub async fn get(&self, kind: &str, namespace: &str, name: &str) -> Option<Value> {
        let found = self.api(kind, namespace).get_opt(name).await.unwrap();
        found.map(|found| serde_json::to_value(found).unwrap())
    }

    pub async fn list(&self, kind: &str, namespace: &str) -> Vec<Value> {
        let all = self.api(kind, namespace).list(&ListParams::default()).await.unwrap();
        all.items.iter().map(|item| serde_json::to_value(item).unwrap()).collect()
    }

    pub async fn merge(&self, kind: &str, namespace: &str, name: &str, patch: Value) {
        let api = self.api(kind, namespace);
        api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    pub async fn merge_status(&self, kind: &str, namespace: &str, name: &str, patch: Value) {
        let api = self.api(kind, namespace);
        api.patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    /// At once, without grace.
    pub async fn delete(&self, kind: &str, namespace: &str, name: &str) {
        let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        self.api(kind, namespace).delete(name, &now).await.unwrap();
    }

    /// Reads, changes and writes, again until nobody else wrote in between.
    pub async fn edit(&self, kind: &str, namespace: &str, name: &str, change: impl Fn(&mut Value)) {
        let api = self.api(kind, namespace);
        loop {
            let mut object = serde_json::to_value(api.get(name).await.unwrap()).unwrap();
            change(&mut object);
            let object: DynamicObject = serde_json::from_value(object).unwrap();
            match api.replace(name, &PostParams::default(), &object).await {
                Ok(_) => return,
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// Kubeconfig of a user who may do no more than `may` (verb, group, resource). The test server knows no users: there, what
/// is `denied` (verb, target) is so for everybody.
pub async fn allowed_only(
    server: &Server,
    admin: &Admin,
    may: &[(&str, &str, &str)],
    denied: &[(&str, &str)],
) -> String {
    let plane = match server {
        Server::Fake(fake) => {
            denied.iter().for_each(|(verb, target)| fake.deny(verb, target));
            return fake.kubeconfig();
        }
        Server::Real(plane) => plane,
    };
    let name = Server::unique("limited");
    let rules: Vec<Value> = may
        .iter()
        .map(|(verb, group, of)| json!({ "apiGroups": [group], "resources": [of], "verbs": [verb] }))
        .collect();
    let of = |kind: &str| json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": { "name": name } });
    let (mut role, mut binding) = (of("ClusterRole"), of("ClusterRoleBinding"));
    role["rules"] = json!(rules);
    binding["roleRef"] =
        json!({ "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name });
    binding["subjects"] = json!([{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": name }]);
    admin.create(role).await;
    admin.create(binding).await;
    // The authorizer learns of it by a watch.
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "spec": { "user": name, "resourceAttributes": { "verb": may[0].0, "group": may[0].1, "resource": may[0].2 } },
    });
    loop {
        let answer = admin.create(review.clone()).await;
        if answer["status"]["allowed"] == true {
            return plane.user_kubeconfig(&name, None).unwrap();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
