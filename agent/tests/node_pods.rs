//! The whole of it on a real container runtime with an API server: two pods of two meshes, intent from the one, identity from
//! the other, and what the programs say of each connection.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the helpers of a test may panic as the test may"
)]

mod support {
    #![allow(dead_code, reason = "each test target uses its part")]
    pub mod agent;
    pub mod node;
}

use nobypass_testkit::apiserver::{ApiServer, Pod as Object, namespace};
use nobypass_testkit::node::{ContainerSpec, EXT4, EXT6, Node, Pod, PodSpec};
use nobypass_testkit::redirect::clear_redirect;
use nobypass_testkit::traffic::{Report, Running, Traffic};
use serde_json::{Value, json};
use support::agent::{Agent, Launch};
use support::node::{every_bypass_is_accounted_for, inode, launch, node, shown};

const NODE: &str = "n1";
/// A network outside the node that Istio is told to leave alone.
const ELSEWHERE: &str = "203.0.113.7";

/// An address that nobody has: connections to it neither succeed nor fail.
const NOBODY: &str = "203.0.113.99";

/// A mesh as its pods show it.
#[derive(Clone, Copy)]
struct Mesh {
    profile: &'static str,
    namespace: &'static str,
    pod: &'static str,
    proxy: &'static str,
    proxy_uid: u32,
    command: &'static [&'static str],
    annotations: &'static [(&'static str, &'static str)],
}

const LINKERD: Mesh = Mesh {
    profile: "linkerd",
    namespace: "shop",
    pod: "cart",
    proxy: "linkerd-proxy",
    proxy_uid: 2102,
    command: &["/bin/traffic", "proxy", "4140", "4143"],
    annotations: &[
        ("linkerd.io/inject", "enabled"),
        ("linkerd.io/proxy-version", "edge-26.8.1"),
        ("config.linkerd.io/skip-outbound-ports", "8081,9000-9010"),
    ],
};

const ISTIO: Mesh = Mesh {
    profile: "istio-sidecar",
    namespace: "bank",
    pod: "vault",
    proxy: "istio-proxy",
    proxy_uid: 1337,
    command: &["/bin/traffic", "proxy", "15001", "15006", "--passthrough", "15006"],
    annotations: &[
        (
            "sidecar.istio.io/status",
            "{\"initContainers\":[\"istio-validation\"],\"containers\":[\"istio-proxy\"]}",
        ),
        ("traffic.sidecar.istio.io/excludeOutboundPorts", "8082"),
        ("traffic.sidecar.istio.io/excludeOutboundIPRanges", "203.0.113.0/28"),
    ],
};

impl Mesh {
    /// What the kubelet gives to the runtime.
    fn spec(self, name: &str) -> PodSpec {
        let proxy = ContainerSpec::new(self.proxy, self.proxy_uid, self.command);
        let mut spec = PodSpec::new(name, vec![proxy, ContainerSpec::idle_app()]).unwrap();
        self.namespace.clone_into(&mut spec.namespace);
        spec.annotations =
            self.annotations.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        spec
    }

    /// What the API server has of it before anything of it runs.
    fn object(self, spec: &PodSpec) -> Value {
        let object = Object::new(&spec.namespace, &spec.name).node(NODE).uid(&spec.uid);
        let annotated =
            self.annotations.iter().fold(object, |object, (key, value)| object.annotation(key, value));
        annotated.container(self.proxy, "p:1").phase("Pending").build()
    }
}

/// A node with an API server on its loopback device, and servers outside.
struct Cluster {
    // In the order in which they go.
    _servers: Vec<Running>,
    server: ApiServer,
    node: Node,
}

impl Cluster {
    /// `with_plugin`: pods are redirected.
    fn new(with_plugin: bool) -> Self {
        let node = node();
        if with_plugin {
            let mut entry = node.mesh_entry();
            entry["capabilities"] = json!({ "io.kubernetes.cri.pod-annotations": true });
            node.install_conflist(&node.conflist(&[entry])).unwrap();
        }
        node.ext().ip(&format!("addr add {ELSEWHERE}/32 dev eth0")).unwrap();
        node.netns().ip(&format!("route add 203.0.113.0/24 via {EXT4}")).unwrap();
        let outside = Traffic::new().netns(node.ext()).server(&[8081, 8082]).unwrap();
        let server = node.netns().run_in(ApiServer::start).unwrap().unwrap();
        for mesh in [LINKERD, ISTIO] {
            server.create(namespace(mesh.namespace)).unwrap();
        }
        server.write_kubeconfig(&node.base_dir().join("kubeconfig")).unwrap();
        Self { _servers: vec![outside], server, node }
    }

    fn launch(&self) -> Launch {
        let kubeconfig = self.node.base_dir().join("kubeconfig");
        launch(&self.node)
            .args(["--pods", "both", "--node-name", NODE, "--kubeconfig"])
            .args([kubeconfig.as_os_str()])
    }

    /// A pod as scheduler, injector and kubelet make it: the object first, the sandbox then, its containers' ids at last.
    fn run(&self, mesh: Mesh) -> Pod {
        let spec = mesh.spec(mesh.pod);
        self.server.create(mesh.object(&spec)).unwrap();
        let pod = self.node.run_pod(spec).unwrap();
        self.node.wait_for_log(&pod, mesh.proxy, |line| line.contains("\"ready\":true")).unwrap();
        self.tell_containers(mesh, &pod);
        pod
    }

    /// As the kubelet does once they run.
    fn tell_containers(&self, mesh: Mesh, pod: &Pod) {
        let status = |name: &str| {
            json!({
                "name": name, "containerID": format!("containerd://{}", pod.container(name).unwrap()),
                "ready": true, "started": true, "restartCount": 0, "state": { "running": {} },
            })
        };
        let all = json!([status("app"), status(mesh.proxy)]);
        let edit = |object: &mut Value| {
            object["status"] = json!({ "phase": "Running", "containerStatuses": all });
        };
        self.server.edit("pods", mesh.namespace, &pod.spec.name, edit).unwrap();
    }

    fn edit(&self, resource: &str, namespace: &str, name: &str, field: &str, mode: Option<&str>) {
        let edit = |object: &mut Value| object["metadata"][field]["nobypass.dev/mode"] = json!(mode);
        self.server.edit(resource, namespace, name, edit).unwrap();
    }

    /// The label of the mesh's namespace.
    fn namespace_mode(&self, mesh: Mesh, mode: &str) {
        self.edit("namespaces", "", mesh.namespace, "labels", Some(mode));
    }

    /// The annotation of the mesh's pod.
    fn pod_mode(&self, mesh: Mesh, mode: &str) {
        self.edit("pods", mesh.namespace, mesh.pod, "annotations", Some(mode));
    }

    fn connect(&self, pod: &Pod, container: &str, command: &str, to: &str, port: u16) -> Report {
        let port = port.to_string();
        self.node.traffic(pod, container, &[command, to, &port, "--timeout-ms", "500"]).unwrap()
    }

    /// So many connections of the application, and what it saw of each.
    fn connects(&self, count: usize, pod: &Pod, command: &str, to: &str, port: u16, saw: &str) {
        for n in 0..count {
            let report = self.connect(pod, "app", command, to, port);
            assert_eq!(report.saw(), saw, "{} {command} {to}:{port}, number {n}: {report}", pod.spec.name);
        }
    }
}

/// Waits until the agent knows mesh and proxy of a pod.
fn known(agent: &Agent, mesh: Mesh, pod: &Pod) {
    let proxy = inode(&pod.container_cgroup(mesh.proxy).unwrap());
    let shown = agent.until(&format!("{} and its proxy", mesh.pod), |agent| {
        shown(agent, pod).filter(|shown| shown["proxy_cgroup"] == proxy && shown["kind"] == "meshed")
    });
    for (key, value) in [("namespace", mesh.namespace), ("name", &pod.spec.name), ("mesh", mesh.profile)] {
        assert_eq!(shown[key], value, "{shown}");
    }
    assert_eq!((&shown["cgroup"], &shown["problems"]), (&json!(inode(&pod.cgroup)), &json!([])), "{shown}");
}

/// One of a pod's counters, by the kernel's name of it.
fn counted(agent: &Agent, pod: &Pod, counter: &str) -> u64 {
    shown(agent, pod).unwrap()["counters"][counter].as_u64().unwrap_or(0)
}

#[test]
fn two_pods_of_two_meshes_and_each_connection_is_counted_as_what_it_was() {
    let cluster = Cluster::new(true);
    let agent = cluster.launch().start().ready();
    let (cart, vault) = (cluster.run(LINKERD), cluster.run(ISTIO));
    known(&agent, LINKERD, &cart);
    known(&agent, ISTIO, &vault);
    let network_of = |pod: &Pod, proxy: &str| {
        agent.until("what the pod's network says", |agent| {
            let shown = shown(agent, pod)?;
            (shown["v4"]["verdict"] == "redirected").then_some(())
        });
        assert_eq!(counted(&agent, pod, "redirected"), 0, "a probe is no connection of {proxy}'s pod");
    };
    network_of(&cart, LINKERD.proxy);
    network_of(&vault, ISTIO.proxy);

    // Redirected, exempt by port, exempt by network; what one mesh exempts the other one redirects.
    cluster.connects(3, &cart, "tcp4", EXT4, 8080, "mesh");
    cluster.connects(2, &cart, "tcp4", EXT4, 8081, "plain");
    cluster.connects(1, &cart, "tcp4", EXT4, 8082, "mesh");
    cluster.connects(1, &cart, "tcp4", ELSEWHERE, 8080, "mesh");
    cluster.connects(4, &vault, "tcp4", EXT4, 8080, "mesh");
    cluster.connects(1, &vault, "tcp4", EXT4, 8081, "mesh");
    cluster.connects(2, &vault, "tcp4", EXT4, 8082, "plain");
    cluster.connects(3, &vault, "tcp4", ELSEWHERE, 8080, "plain");
    // Neither mesh redirects IPv6 here.
    cluster.connects(2, &vault, "tcp6", EXT6, 8080, "plain");
    // Somebody flushes the rules of one pod.
    clear_redirect(&cart.enter().unwrap()).unwrap();
    cluster.connects(5, &cart, "tcp4", EXT4, 8080, "plain");
    cluster.connects(1, &cart, "tcp4", EXT4, 9010, "ECONNREFUSED");

    for (pod, counters) in [
        (&cart, [("redirected", 5), ("exempt", 3), ("not_redirected", 5), ("family_gap", 0), ("proxy", 5)]),
        (&vault, [("redirected", 5), ("exempt", 5), ("not_redirected", 0), ("family_gap", 2), ("proxy", 5)]),
    ] {
        let shown = shown(&agent, pod).unwrap();
        for (counter, count) in counters {
            assert_eq!(shown["counters"][counter].as_u64().unwrap_or(0), count, "{counter} of {shown}");
        }
    }
    let metrics = agent.metrics();
    for (mesh, redirected, passed) in [
        (LINKERD, 5, [("not_redirected", 5), ("family_gap", 0)]),
        (ISTIO, 5, [("not_redirected", 0), ("family_gap", 2)]),
    ] {
        let of = [("namespace", mesh.namespace), ("mesh", mesh.profile)];
        assert_eq!(metrics.sum("redirected_connections_total", &of), redirected, "{metrics:?}");
        for (reason, count) in passed {
            let labels = [of[0], of[1], ("reason", reason), ("direction", "outbound"), ("action", "passed")];
            assert_eq!(metrics.sum("bypass_connections_total", &labels), count, "{reason}: {metrics:?}");
        }
    }
    assert_eq!(metrics.sum("kernel_counts_total", &[("counter", "exempt")]), 8, "{metrics:?}");
    assert_eq!(metrics.sum("bypass_connections_total", &[("action", "dropped")]), 0);
    every_bypass_is_accounted_for(&metrics);
    assert!(agent.terminate().success());
    cluster.node.stop().unwrap();
}

/// A pod without rules whose application connects all the time.
struct Busy {
    mesh: Mesh,
    pod: Pod,
}

impl Busy {
    /// At most one each 3 ms, since nobody answers: enough for as long as the test takes.
    const ATTEMPTS: &'static str = "5000";

    fn start(cluster: &Cluster, agent: &Agent, mesh: Mesh) -> Self {
        let mut pod = cluster.run(mesh);
        known(agent, mesh, &pod);
        let flood = ["/bin/traffic", "flood", NOBODY, "8080", Self::ATTEMPTS, "--wait-ms", "3"];
        cluster.node.start_container(&mut pod, &ContainerSpec::new("client", 1000, &flood)).unwrap();
        agent.until("traffic", |agent| (counted(agent, &pod, "not_redirected") > 0).then_some(()));
        Self { mesh, pod }
    }

    /// Waits until the mode is this one, of this level; from then on, all connections are judged by it.
    fn obeys(&self, agent: &Agent, mode: &str, level: &str) {
        let of = |agent: &Agent| shown(agent, &self.pod).unwrap();
        agent.until(&format!("{mode} of {}", self.mesh.pod), |agent| {
            let shown = of(agent);
            (shown["mode"] == mode && shown["mode_level"] == level).then_some(())
        });
        let split = |shown: &Value| {
            let dropped = shown["dropped"].as_u64().unwrap();
            (shown["bypasses"].as_u64().unwrap() - dropped, dropped)
        };
        let (passed, dropped) = split(&of(agent));
        // The counters are read one after the other while traffic goes on; then only one of the two moves.
        let (more_passed, more_dropped) = agent.until("more traffic", |agent| {
            let now = split(&of(agent));
            (now.0 + now.1 >= passed + dropped + 20).then_some(now)
        });
        let moved = (more_passed > passed, more_dropped > dropped);
        assert_eq!(moved, (mode == "audit", mode == "enforce"), "{} in {mode}", self.mesh.pod);
    }

    /// Each attempt was counted, and once.
    fn finish(&self, cluster: &Cluster, agent: &Agent) {
        let line = cluster.node.wait_for_log(&self.pod, "client", |line| line.contains("attempts")).unwrap();
        let report = Report::parse(&line).unwrap();
        assert_eq!(report.count("attempts").to_string(), Self::ATTEMPTS);
        assert_eq!(shown(agent, &self.pod).unwrap()["bypasses"], report.count("started"), "{report}");
    }
}

#[test]
fn modes_of_namespace_and_pod_change_while_traffic_runs_and_no_pod_lowers_its_own() {
    let cluster = Cluster::new(false);
    let agent = cluster.launch().args(["--refusal", "abort"]).start().ready();
    let cart = Busy::start(&cluster, &agent, LINKERD);
    let vault = Busy::start(&cluster, &agent, ISTIO);
    cart.obeys(&agent, "audit", "node");

    cluster.namespace_mode(LINKERD, "enforce");
    cart.obeys(&agent, "enforce", "namespace_label");
    vault.obeys(&agent, "audit", "node");
    cluster.namespace_mode(LINKERD, "audit");
    cart.obeys(&agent, "audit", "namespace_label");
    // A pod may be stricter than its namespace.
    cluster.pod_mode(ISTIO, "enforce");
    vault.obeys(&agent, "enforce", "pod");
    cart.obeys(&agent, "audit", "namespace_label");

    // It may not be less strict.
    let refused = || agent.metrics().sum("mode_overrides_refused_total", &[]);
    assert_eq!(refused(), 0);
    cluster.namespace_mode(LINKERD, "enforce");
    cart.obeys(&agent, "enforce", "namespace_label");
    cluster.pod_mode(LINKERD, "off");
    agent.line(&["WARN", "pod=cart", "nobypass.dev/mode", "is refused: a pod may not choose that mode"]);
    agent.until("the metric", |_| (refused() == 1).then_some(()));
    cart.obeys(&agent, "enforce", "namespace_label");
    let problems = shown(&agent, &cart.pod).unwrap()["problems"].to_string();
    assert!(problems.contains("nobypass.dev/mode") && problems.contains("is refused"), "{problems}");
    let (code, explained) = agent.get("/v1/explain?pod=shop/cart").unwrap();
    assert_eq!(code, 200, "{explained}");
    let explained: Value = serde_json::from_str(&explained).unwrap();
    let said = explained["mode"]["said"].as_array().unwrap();
    let of_pod = said.iter().find(|said| said["level"] == "pod").unwrap();
    assert_eq!((&of_pod["value"], &of_pod["fate"]), (&json!("off"), &json!("refused")), "{explained}");

    let attempts = |pod: &Busy| pod.finish(&cluster, &agent);
    attempts(&cart);
    attempts(&vault);
    every_bypass_is_accounted_for(&agent.metrics());
    assert!(agent.terminate().success());
    cluster.node.stop().unwrap();
}

/// Whose word counts, and for which pod.
#[test]
fn an_object_that_is_late_or_never_comes_or_is_another_pods_by_its_uid() {
    let cluster = Cluster::new(false);
    let agent = cluster.launch().start().ready();
    let bypasses = |pod: &Pod, count: usize| {
        cluster.connects(count, pod, "tcp4", EXT4, 8080, "plain");
        assert_eq!(counted(&agent, pod, "not_redirected"), u64::try_from(count).unwrap());
    };
    let level = |pod: &Pod, level: &str| {
        agent.until(level, |agent| (shown(agent, pod)?["mode_level"] == level).then_some(()));
    };
    cluster.namespace_mode(LINKERD, "audit");

    // Never: the runtime's word is enough, but it knows no namespaces.
    let never = cluster.node.run_pod(LINKERD.spec("never")).unwrap();
    known(&agent, LINKERD, &never);
    bypasses(&never, 2);
    level(&never, "node");

    // An object of its name and another UID is another pod's, which has no cgroup here: it changes neither mesh nor mode.
    let mut other = LINKERD.object(&LINKERD.spec("never"));
    other["metadata"]["annotations"] = json!({ "nobypass.dev/mode": "enforce" });
    cluster.server.create(other).unwrap();
    let known_by_api = |count: u64| {
        let of = [("source", "kube")];
        agent.until("the object", |agent| {
            (agent.metrics().sum("pod_source_pods", &of) == count).then_some(())
        });
    };
    known_by_api(1);

    // Late: until then as the runtime says, then as its namespace wants.
    let late = cluster.node.run_pod(LINKERD.spec("late")).unwrap();
    known(&agent, LINKERD, &late);
    bypasses(&late, 1);
    level(&late, "node");
    cluster.server.create(LINKERD.object(&late.spec)).unwrap();
    cluster.tell_containers(LINKERD, &late);
    level(&late, "namespace_label");
    known(&agent, LINKERD, &late);
    level(&never, "node");
    assert_eq!(counted(&agent, &never, "not_redirected"), 2);

    // Deleted and made again under its name, as by a StatefulSet, in no mesh: the old one still runs.
    cluster.server.delete("pods", LINKERD.namespace, "late").unwrap();
    let mut spec = PodSpec::new("late", vec![ContainerSpec::idle_app()]).unwrap();
    LINKERD.namespace.clone_into(&mut spec.namespace);
    cluster
        .server
        .create(Object::new(&spec.namespace, &spec.name).node(NODE).uid(&spec.uid).build())
        .unwrap();
    let again = cluster.node.run_pod(spec).unwrap();
    agent.until("the new one", |agent| (shown(agent, &again)?["reason"] == "no_profile").then_some(()));
    cluster.connects(3, &again, "tcp4", EXT4, 8080, "plain");
    let new = shown(&agent, &again).unwrap();
    assert_eq!((&new["kind"], &new["bypasses"], &new["mesh"]), (&json!("exempt"), &json!(0), &json!("")));
    assert_eq!(counted(&agent, &late, "not_redirected"), 1, "the old one is what it was");
    cluster.connects(1, &late, "tcp4", EXT4, 8080, "plain");
    assert_eq!(counted(&agent, &late, "not_redirected"), 2);
    cluster.node.remove_pod(&late).unwrap();
    agent.until("the end of the old one", |agent| shown(agent, &late).is_none().then_some(()));
    assert_eq!(shown(&agent, &again).unwrap()["bypasses"], 0);
    let metrics = agent.metrics();
    let of = [("namespace", "shop"), ("mesh", "linkerd"), ("reason", "not_redirected")];
    assert_eq!(metrics.sum("bypass_connections_total", &of), 2 + counted(&agent, &never, "not_redirected"));
    every_bypass_is_accounted_for(&metrics);
    assert!(agent.terminate().success());
    cluster.node.stop().unwrap();
}

#[test]
fn kubearmor_163_an_agent_that_starts_last_knows_fifty_pods_of_a_real_runtime() {
    let cluster = Cluster::new(false);
    let mut pods = Vec::new();
    for n in 0..50 {
        let mesh = [Some(LINKERD), Some(ISTIO), None][n % 3];
        let name = format!("p{n}");
        let mut spec = mesh.map_or_else(|| PodSpec::new(&name, Vec::new()).unwrap(), |mesh| mesh.spec(&name));
        let object = match mesh {
            Some(mesh) => mesh.object(&spec),
            None => Object::new(&spec.namespace, &name).node(NODE).uid(&spec.uid).build(),
        };
        // Each third object is not there yet, and comes when the agent has seen the sandbox.
        if n % 3 != 1 {
            cluster.server.create(object.clone()).unwrap();
        }
        spec.containers.clear();
        pods.push((mesh, object, cluster.node.run_sandbox(spec).unwrap()));
    }
    let agent = cluster.launch().start().ready();
    for (n, (_, object, _)) in pods.iter().enumerate() {
        if n % 3 == 1 {
            cluster.server.create(object.clone()).unwrap();
        }
    }
    for (mesh, _, pod) in &pods {
        let shown = agent.until(&pod.spec.name, |agent| {
            shown(agent, pod)
                .filter(|shown| shown["kind"] != "unknown" && shown["name"] == pod.spec.name.as_str())
        });
        let (kind, profile) = mesh.map_or(("exempt", ""), |mesh| ("meshed", mesh.profile));
        let got = (&shown["kind"], &shown["mesh"], &shown["namespace"], &shown["cgroup"]);
        let expected =
            (&json!(kind), &json!(profile), &json!(pod.spec.namespace), &json!(inode(&pod.cgroup)));
        assert_eq!(got, expected, "{shown}");
    }
    let of = |source| agent.metrics().sum("pod_source_pods", &[("source", source)]);
    agent.until("both sources", |_| ((of("kube"), of("cri")) == (50, 50)).then_some(()));
    assert!(agent.terminate().success());
    cluster.node.stop().unwrap();
}
