//! What the chart lets its service account do: enough for each feature, and nothing that none uses.

use std::collections::{BTreeMap, BTreeSet};

use kube::api::{Patch, PatchParams};
use nobypass_testkit::control_plane::ControlPlane;
use nobypass_testkit::wait;
use serde_json::{Value, json};

use crate::features::{Feature, Scene};
use crate::{admin, api, apply, client, namespace, render};
use Feature::{Events, Evict, GateCondition, GateLabel, GatePods, GateTaint, Plugin, PodLabel, Pods};

/// Values, and the features that they switch on beside what is always on. One each, so that a rule that is bound to the wrong
/// switch is seen.
const CASES: [(&str, &[&str], &[Feature]); 9] = [
    ("usual", &[], &[]),
    ("pod-label", &["remedies.label=on"], &[PodLabel]),
    ("evict", &["remedies.evict=on"], &[Evict]),
    ("gate-condition", &["gate.condition=true"], &[GateCondition]),
    ("gate-label", &["gate.label=true"], &[GateLabel]),
    ("gate-taint", &["gate.startupTaints={nobypass.dev/not-ready}"], &[GateTaint]),
    ("gate-pods", &["gate.pods={x/app=y}"], &[GatePods]),
    ("repair", &["remedies.repair=on"], &[]),
    ("install", &["cni.mode=install", "cni.install.image=x", "cni.entry=\\{\\}"], &[Plugin]),
];

/// Each permission, and the features that fail without it.
const USED_BY: [(&str, &[Feature]); 15] = [
    ("list /pods", &[Pods, GatePods]),
    ("watch /pods", &[Pods, GatePods]),
    ("list /namespaces", &[Pods]),
    ("watch /namespaces", &[Pods]),
    ("create events.k8s.io/events", &[Events]),
    ("patch events.k8s.io/events", &[Events]),
    ("patch /pods/status", &[PodLabel]),
    ("get /pods", &[Evict, Plugin]),
    ("create /pods/eviction", &[Evict]),
    ("list /nodes", &[GateCondition, GateLabel, GateTaint]),
    ("watch /nodes", &[GateCondition, GateLabel, GateTaint]),
    ("patch /nodes/status", &[GateCondition]),
    ("patch /nodes", &[GateLabel, GateTaint]),
    ("get /namespaces", &[Plugin]),
    ("get /services", &[Plugin]),
];

/// A role's rules, one permission each.
fn split(rules: &Value) -> Vec<(String, Value)> {
    let words = |value: &Value| -> Vec<String> {
        value.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
    };
    let mut all = Vec::new();
    for rule in rules.as_array().unwrap() {
        assert_eq!(rule.as_object().unwrap().len(), 3, "{rule}");
        for group in words(&rule["apiGroups"]) {
            for resource in words(&rule["resources"]) {
                for verb in words(&rule["verbs"]) {
                    let one = json!({ "apiGroups": [group], "resources": [resource], "verbs": [verb] });
                    all.push((format!("{verb} {group}/{resource}"), one));
                }
            }
        }
    }
    all
}

/// Roles of one case, on the server.
struct Roles<'a> {
    scene: Scene<'a>,
    roles: BTreeMap<String, Vec<(String, Value)>>,
}

impl Roles<'_> {
    fn granted(&self) -> BTreeSet<String> {
        self.roles.values().flatten().map(|(name, _)| name.clone()).collect()
    }

    /// Takes one permission away from all roles, or none.
    async fn without(&self, permission: Option<&str>) {
        let roles = api(
            self.scene.admin,
            &json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole" }),
        );
        for (role, rules) in &self.roles {
            let rest: Vec<&Value> = rules
                .iter()
                .filter(|(name, _)| Some(name.as_str()) != permission)
                .map(|(_, rule)| rule)
                .collect();
            let patch = Patch::Merge(json!({ "rules": rest }));
            roles.patch(role, &PatchParams::default(), &patch).await.unwrap();
        }
        for name in self.granted() {
            self.until_allowed(&name, Some(name.as_str()) != permission).await;
        }
    }

    /// The authoriser hears of roles by a watch of its own.
    async fn until_allowed(&self, permission: &str, wanted: bool) {
        let (verb, rest) = permission.split_once(' ').unwrap();
        let (group, resource) = rest.split_once('/').unwrap();
        let (resource, sub) = resource.split_once('/').unwrap_or((resource, ""));
        let user = format!("system:serviceaccount:{}:{}", self.scene.namespace, self.scene.account);
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
            "spec": {
                "user": user,
                "resourceAttributes": { "verb": verb, "group": group, "resource": resource, "subresource": sub },
            },
        });
        let end = tokio::time::Instant::now() + wait::HANG;
        loop {
            let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
            let answer = self.scene.plane.create(path, &review).unwrap();
            if answer["status"]["allowed"] == wanted {
                return;
            }
            assert!(tokio::time::Instant::now() < end, "{user}: {permission}: {answer}");
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }

    /// Features of these that do not work.
    async fn broken(&self, features: &[Feature]) -> BTreeSet<Feature> {
        let mut broken = BTreeSet::new();
        for feature in features {
            if self.scene.works(*feature).await.is_err() {
                broken.insert(*feature);
            }
        }
        broken
    }
}

/// Installs what the chart renders for one case.
async fn install<'a>(
    plane: &'a ControlPlane,
    admin: &'a kube::Client,
    case: &'a str,
    set: &[&str],
) -> Roles<'a> {
    let account = format!("nobypass-{case}");
    apply(admin, &namespace(case), false).await.unwrap();
    let args: Vec<&str> = set.iter().flat_map(|set| ["--set", set]).collect();
    let mut roles = BTreeMap::new();
    for object in render(&account, case, &args) {
        let kind = object["kind"].as_str().unwrap();
        if !["ServiceAccount", "ClusterRole", "ClusterRoleBinding"].contains(&kind) {
            continue;
        }
        apply(admin, &object, false).await.unwrap();
        if kind == "ClusterRole" {
            let name = object["metadata"]["name"].as_str().unwrap().to_owned();
            roles.insert(name, split(&object["rules"]));
        }
    }
    let account = account.leak();
    let kubeconfig = plane.service_account_kubeconfig(case, account).unwrap();
    let client = client(&kubeconfig).await;
    Roles { scene: Scene { plane, admin, client, namespace: case, account }, roles }
}

#[tokio::test]
async fn each_feature_works_with_its_permissions_and_fails_without_any_one_of_them() {
    // As servers before 1.32, which cannot stream a listing: there the agent lists.
    let plane = ControlPlane::start_with(&["--feature-gates=WatchList=false"]).unwrap();
    let admin = admin(&plane).await;
    let mut tried = BTreeSet::new();
    for (case, set, features) in CASES {
        let roles = install(&plane, &admin, case, set).await;
        let features = [&[Pods, Events][..], features].concat();
        roles.without(None).await;
        for feature in &features {
            let refused = roles.scene.works(*feature).await;
            assert_eq!(refused, Ok(()), "{case}: {feature:?}");
        }

        // Nothing was granted that was not used.
        let asked = plane.asked_by(case, roles.scene.account).unwrap();
        let used: BTreeSet<String> =
            asked.iter().map(|asked| format!("{} {}/{}", asked.verb, asked.group, asked.resource)).collect();
        assert_eq!(used, roles.granted(), "{case}");

        for permission in roles.granted() {
            let (_, users) = USED_BY.iter().find(|(name, _)| *name == permission).unwrap();
            let expected: BTreeSet<Feature> =
                users.iter().copied().filter(|feature| features.contains(feature)).collect();
            assert!(!expected.is_empty(), "{case}: {permission}");
            if case != "usual" && expected.iter().all(|feature| [Pods, Events].contains(feature)) {
                continue;
            }
            roles.without(Some(&permission)).await;
            assert_eq!(roles.broken(&features).await, expected, "{case}, without {permission}");
            tried.insert(permission);
        }
    }
    let known = USED_BY.iter().map(|(name, _)| (*name).to_owned());
    assert_eq!(tried, known.collect(), "each was taken away");
}

#[test]
fn an_agent_that_needs_no_api_server_may_ask_it_for_nothing() {
    let objects = render("nobypass", "nobypass-system", &["--set", "agent.pods=cri"]);
    for object in &objects {
        assert!(!object["kind"].as_str().unwrap().starts_with("ClusterRole"), "{object}");
    }
    let daemon_set = objects.iter().find(|object| object["kind"] == "DaemonSet").unwrap();
    assert_eq!(daemon_set["spec"]["template"]["spec"]["automountServiceAccountToken"], false);
}
