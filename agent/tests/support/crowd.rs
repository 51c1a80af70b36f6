//! A node's worth of meshed pods: cgroups without processes, and the objects by which an API server knows them.

use nobypass_testkit::apiserver::{ApiServer, Pod as Object};
use nobypass_testkit::cgroup::{Pod, Qos};

use super::agent::Agent;
use super::machine::Machine;

pub const NODE: &str = "n1";

pub fn uid(n: u64) -> String {
    format!("2c48913c-b29f-11e7-9350-{n:012}")
}

/// A meshed pod as large as they are in life: some 15 kB of JSON.
pub fn object(n: u64) -> serde_json::Value {
    let mut pod = Object::new("shop", &format!("web-{n}"))
        .node(NODE)
        .uid(&uid(n))
        .annotation("linkerd.io/proxy-version", "edge-26.8.1")
        .annotation("linkerd.io/trust-root-sha256", &"ab".repeat(32))
        .annotation("config.linkerd.io/skip-outbound-ports", "25,587,3306,4444,5432,6379,9300,11211")
        .annotation("kubectl.kubernetes.io/last-applied-configuration", &"{\"kind\":\"Pod\"}".repeat(200))
        .init_container("linkerd-network-validator", "l:1", false)
        .container("linkerd-proxy", "l:1")
        .running("linkerd-proxy", &format!("containerd://{n:064x}"));
    for k in 0..60 {
        pod = pod.annotation(&format!("example.com/noise-{k}"), &"x".repeat(100));
    }
    pod.build()
}

/// The pod's object and its cgroups, with a container of that name.
pub fn pod(server: &ApiServer, machine: &Machine, n: u64) -> Pod {
    server.create(object(n)).unwrap();
    let pod = machine.scratch.pod(Qos::Burstable, &uid(n)).unwrap();
    pod.container(&format!("{n:064x}")).unwrap();
    pod
}

/// How many pods the agent knows as meshed.
pub fn meshed(agent: &Agent) -> usize {
    let status = agent.status();
    status["pods"].as_array().map_or(0, |pods| pods.iter().filter(|pod| pod["kind"] == "meshed").count())
}
