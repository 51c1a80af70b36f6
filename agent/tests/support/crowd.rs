//! A node's worth of meshed pods: cgroups with a process each, and the objects by which an API server knows them.

use nobypass_testkit::apiserver::{ApiServer, Pod as Object};
use nobypass_testkit::cgroup::{Pod, Qos};
use nobypass_testkit::netns::{PodNet, World, world_with_pod};
use nobypass_testkit::proc::{self, Proc};
use nobypass_testkit::redirect::{Variant, apply_redirect};

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

/// The network that all of them are in: redirected, as it should be.
pub fn network() -> (World, PodNet) {
    let (world, net) = world_with_pod("crowd").unwrap();
    apply_redirect(&net.ns, Variant::IptablesLinkerd).unwrap();
    (world, net)
}

/// A pod of the crowd, and its process.
pub struct Member {
    pub pod: Pod,
    _process: Proc,
}

/// The pod's object, its cgroups, and a process in its container.
pub fn member(server: &ApiServer, machine: &Machine, net: &PodNet, n: u64) -> Member {
    let pod = machine.scratch.pod(Qos::Burstable, &uid(n)).unwrap();
    let container = pod.container(&format!("{n:064x}")).unwrap();
    let mut command = net.ns.command("sleep").unwrap();
    command.arg("3600");
    container.start(&mut command).unwrap();
    let process = proc::spawn(command).unwrap();
    server.create(object(n)).unwrap();
    Member { pod, _process: process }
}

/// How many pods the agent knows as meshed.
pub fn meshed(agent: &Agent) -> usize {
    let status = agent.status();
    status["pods"].as_array().map_or(0, |pods| pods.iter().filter(|pod| pod["kind"] == "meshed").count())
}

/// How many it knows to be redirected.
pub fn redirected(agent: &Agent) -> usize {
    let status = agent.status();
    let pods = status["pods"].as_array();
    pods.map_or(0, |pods| pods.iter().filter(|pod| pod["v4"]["verdict"] == "redirected").count())
}
