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
        let proxy = ContainerSpec::new(mesh.proxy, mesh.proxy_uid, mesh.command);
        let mut spec = PodSpec::new(mesh.pod, vec![proxy, ContainerSpec::idle_app()]).unwrap();
        mesh.namespace.clone_into(&mut spec.namespace);
        spec.annotations =
            mesh.annotations.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        let object =
            Object::new(mesh.namespace, mesh.pod).node(NODE).uid(&spec.uid).container(mesh.proxy, "p:1");
        let object =
            mesh.annotations.iter().fold(object, |object, (key, value)| object.annotation(key, value));
        self.server.create(object.phase("Pending").build()).unwrap();
        let pod = self.node.run_pod(spec).unwrap();
        self.node.wait_for_log(&pod, mesh.proxy, |line| line.contains("\"ready\":true")).unwrap();
        self.server
            .edit("pods", mesh.namespace, mesh.pod, |object| {
                let status = |name: &str| {
                    json!({
                        "name": name, "containerID": format!("containerd://{}", pod.container(name).unwrap()),
                        "ready": true, "started": true, "restartCount": 0, "state": { "running": {} },
                    })
                };
                let all = json!([status("app"), status(mesh.proxy)]);
                object["status"] = json!({ "phase": "Running", "containerStatuses": all });
            })
            .unwrap();
        pod
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
    for (key, value) in [("namespace", mesh.namespace), ("name", mesh.pod), ("mesh", mesh.profile)] {
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
