use serde_json::{Value, json};

use super::*;

const UID: &str = "2c48913c-b29f-11e7-9350-020968147796";
const SECOND: i64 = 1_000_000_000;

fn wanted() -> Wanted {
    Wanted {
        keys: ["istio.io/*", "skip"].into_iter().collect(),
        containers: ["istio-proxy"].into_iter().collect(),
        env: ["DISABLE_ENVOY"].into_iter().collect(),
    }
}

fn read(pod: &Value) -> Result<PodFacts, Useless> {
    facts(serde_json::from_value(pod.clone()).unwrap(), "n1", &wanted())
}

fn id(n: char) -> String {
    n.to_string().repeat(64)
}

/// A pod with everything.
fn full() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "web", "namespace": "shop", "uid": UID, "resourceVersion": "7",
            "creationTimestamp": "2026-01-02T03:04:05Z", "deletionTimestamp": "2026-01-02T04:00:00Z",
            "labels": {"istio.io/rev": "a", "app": "web"},
            "annotations": {"skip": "25", "noise": "x"},
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "ConfigMap", "name": "no", "uid": "1"},
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-1", "uid": "2", "controller": true},
            ],
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
        },
        "spec": {
            "nodeName": "n1", "hostNetwork": true, "runtimeClassName": "gvisor", "restartPolicy": "OnFailure",
            "securityContext": {"runAsUser": 1000, "runAsGroup": 2000, "fsGroup": 1},
            "initContainers": [
                {"name": "prepare", "args": ["not", "asked"]},
                {
                    "name": "istio-proxy", "restartPolicy": "Always", "args": ["proxy", "sidecar"],
                    "env": [
                        {"name": "DISABLE_ENVOY", "value": "true"},
                        {"name": "DISABLE_ENVOY_TOO", "value": "no"},
                        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                    ],
                    "securityContext": {"runAsUser": 0, "runAsGroup": 1337},
                },
            ],
            "containers": [
                {"name": "app", "env": [{"name": "DISABLE_ENVOY", "value": "true"}], "resources": {}},
                {"name": "second", "securityContext": {"runAsUser": -1}},
            ],
            "ephemeralContainers": [{"name": "debugger", "targetContainerName": "app"}],
        },
        "status": {
            "phase": "Running", "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}, {"ip": "odd"}],
            "startTime": "2026-01-02T03:04:06Z",
            "conditions": [
                {"type": "Ready", "status": "False"},
                {"type": "PodReadyToStartContainers", "status": "True", "lastTransitionTime": "2026-01-02T03:04:07Z"},
            ],
            "initContainerStatuses": [
                {
                    "name": "prepare", "restartCount": 2, "containerID": format!("containerd://{}", id('a')),
                    "state": {"terminated": {"exitCode": 0, "startedAt": "2026-01-02T03:04:08Z", "containerID": "x"}},
                    "lastState": {"terminated": {"exitCode": 95}},
                },
                {
                    "name": "istio-proxy", "restartCount": 0, "containerID": format!("cri-o://{}", id('b')),
                    "state": {"running": {"startedAt": "2026-01-02T03:04:09Z"}}, "lastState": {},
                },
            ],
            "containerStatuses": [{
                "name": "app", "restartCount": 4, "containerID": format!("containerd://{}", id('c')),
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": {"exitCode": 137, "containerID": "x"}},
            }],
        },
    })
}

#[test]
fn everything_that_a_pod_says() {
    let pod = read(&full()).unwrap();
    assert_eq!((&*pod.namespace, &*pod.name, pod.uid), ("shop", "web", PodUid::parse(UID).unwrap()));
    assert_eq!(pod.static_pod_hash, None);
    assert_eq!(pod.labels.iter().collect::<Vec<_>>(), [("istio.io/rev", "a")]);
    assert_eq!(pod.annotations.iter().collect::<Vec<_>>(), [("skip", "25")]);
    assert_eq!(pod.host_network(), Some(true));
    assert_eq!(pod.runtime_class_name.as_deref(), Some("gvisor"));
    assert_eq!(pod.restart_policy, Some(RestartPolicy::OnFailure));
    let controller = pod.controller.unwrap();
    assert_eq!((&*controller.kind, &*controller.name, &*controller.uid), ("ReplicaSet", "web-1", "2"));
    assert_eq!((pod.phase, pod.terminating, pod.ready_to_start), (Phase::Running, true, Some(true)));
    assert_eq!(&*pod.pod_ips, ["10.0.0.1".parse().unwrap(), "fd00::1".parse::<std::net::IpAddr>().unwrap()]);
    let created = pod.created_at.unwrap();
    assert_eq!((created, pod.start_time), (1_767_323_045 * SECOND, Some(created + SECOND)));
    assert!(pod.containers_complete && pod.sandbox.is_none());
    assert_eq!(pod.known_by, KnownBy { runtime: false, api: true });

    let [prepare, proxy, app, second, debugger] = &pod.containers[..] else { panic!("{:?}", pod.containers) };
    let roles = pod.containers.iter().map(|container| (&*container.name, container.role)).collect::<Vec<_>>();
    assert_eq!(
        roles,
        [
            ("prepare", Role::Init),
            ("istio-proxy", Role::NativeSidecar),
            ("app", Role::App),
            ("second", Role::App),
            ("debugger", Role::Ephemeral),
        ]
    );
    assert_eq!(
        (prepare.state, prepare.exit_code, prepare.last_exit_code),
        (State::Exited, Some(0), Some(95))
    );
    assert_eq!((prepare.id, prepare.restart_count), (ContainerId::parse(&id('a')), 2));
    assert_eq!((prepare.created_at, proxy.created_at), (created + 3 * SECOND, created + 4 * SECOND));
    assert_eq!((prepare.uid(), prepare.gid(), prepare.args.len()), (Some(1000), Some(2000), 0));
    assert_eq!((proxy.state, proxy.id), (State::Running, ContainerId::parse(&id('b'))));
    assert_eq!((proxy.uid(), proxy.gid()), (Some(0), Some(1337)), "root is an answer, not a gap");
    assert_eq!(&*proxy.args, ["proxy".into(), "sidecar".into()]);
    assert_eq!(proxy.env.iter().collect::<Vec<_>>(), [("DISABLE_ENVOY", "true")]);
    assert_eq!(
        (app.state, app.id, app.last_exit_code),
        (State::Waiting, None, Some(137)),
        "the id is the dead one's"
    );
    assert_eq!((app.restart_count, app.env.is_empty()), (4, true));
    assert_eq!((second.run_as_user, debugger.run_as_user), (None, Some(1000)));
}

#[test]
fn little_is_needed_and_null_is_nothing() {
    let least = json!({"metadata": {"uid": UID}, "spec": {"nodeName": "n1"}});
    let pod = read(&least).unwrap();
    assert_eq!((pod.phase, pod.host_network(), pod.terminating), (Phase::Unknown, Some(false), false));
    let null = json!({
        "metadata": {
            "uid": UID, "name": null, "labels": null, "annotations": null, "creationTimestamp": null,
            "deletionTimestamp": null, "ownerReferences": null,
        },
        "spec": {
            "nodeName": "n1", "containers": null, "initContainers": null, "securityContext": null, "hostNetwork": null,
        },
        "status": {"conditions": null, "podIPs": null, "containerStatuses": null, "startTime": null},
    });
    assert_eq!(read(&null).unwrap(), pod);
}

#[test]
fn pods_of_other_nodes_and_without_a_usable_uid_give_nothing() {
    for (pod, why) in [
        (json!({"metadata": {"uid": UID}, "spec": {"nodeName": "n2"}}), Useless::Elsewhere),
        (json!({"metadata": {"uid": UID}, "spec": {}}), Useless::Elsewhere),
        (json!({"metadata": {"uid": UID}}), Useless::Elsewhere),
        (json!({"metadata": {"uid": "odd"}, "spec": {"nodeName": "n1"}}), Useless::Uid),
        (json!({"metadata": {}, "spec": {"nodeName": "n1"}}), Useless::Uid),
    ] {
        assert_eq!(read(&pod), Err(why), "{pod}");
    }
}

#[test]
fn only_a_mirror_has_another_uid_on_the_node() {
    let hash = "0123456789abcdef0123456789abcdef";
    let of = |annotations: Value| {
        read(&json!({"metadata": {"uid": UID, "annotations": annotations}, "spec": {"nodeName": "n1"}}))
            .unwrap()
            .static_pod_hash
    };
    let (mirror, config) = ("kubernetes.io/config.mirror", "kubernetes.io/config.hash");
    assert_eq!(of(json!({mirror: hash, config: hash})), PodUid::parse(hash));
    assert_eq!(of(json!({mirror: "x", config: hash})), PodUid::parse(hash));
    assert_eq!(of(json!({config: hash})), None, "anybody can write that");
    assert_eq!(of(json!({mirror: "x"})), None);
}

#[test]
fn conditions_phases_and_policies() {
    let of = |spec: Value, status: Value| {
        let mut pod = json!({"metadata": {"uid": UID}, "spec": spec, "status": status});
        pod["spec"]["nodeName"] = "n1".into();
        read(&pod).unwrap()
    };
    for (name, wanted) in [
        ("Pending", Phase::Pending),
        ("Running", Phase::Running),
        ("Succeeded", Phase::Succeeded),
        ("Failed", Phase::Failed),
        ("Unknown", Phase::Unknown),
        ("New", Phase::Unknown),
    ] {
        let pod = of(json!({}), json!({"phase": name}));
        assert_eq!(pod.phase, wanted);
        assert_eq!(pod.is_finished(), matches!(name, "Succeeded" | "Failed"));
    }
    for (status, wanted) in [("True", Some(true)), ("False", Some(false)), ("Unknown", None)] {
        let conditions = json!([{"type": "PodReadyToStartContainers", "status": status}]);
        assert_eq!(of(json!({}), json!({"conditions": conditions})).ready_to_start, wanted);
    }
    for (name, wanted) in [
        ("Always", Some(RestartPolicy::Always)),
        ("OnFailure", Some(RestartPolicy::OnFailure)),
        ("Never", Some(RestartPolicy::Never)),
        ("Sometimes", None),
    ] {
        assert_eq!(of(json!({"restartPolicy": name}), json!({})).restart_policy, wanted);
    }
}

#[test]
fn arguments_are_bounded() {
    let many: Vec<String> = (0..100).map(|n| n.to_string()).collect();
    let spec = json!({"nodeName": "n1", "containers": [{"name": "istio-proxy", "args": many}]});
    let pod = read(&json!({"metadata": {"uid": UID}, "spec": spec})).unwrap();
    assert_eq!(pod.containers[0].args.len(), MAX_ARGS);
}
