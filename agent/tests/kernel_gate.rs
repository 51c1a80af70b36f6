//! The gate of a whole agent, with an API server and a CNI directory of its own: from the patched config to the Node object
//! and back.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the helpers of a test may panic as the test may"
)]

mod support {
    #![allow(dead_code, reason = "each test target uses its part")]
    pub mod agent;
    pub mod machine;
    pub mod mounts;
}

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nobypass::node::desired::{CONDITION, LABEL, TAINT};
use nobypass_testkit::apiserver::{ApiServer, Recorded, node};
use serde_json::{Value, json};
use support::agent::{Agent, Launch};
use support::machine::Machine;

const NODE: &str = "n1";
const BARE: &str = "{\n  \"cniVersion\": \"1.0.0\",\n  \"name\": \"x\",\n  \"plugins\": [\n    {\"type\": \"calico\"}\n  ]\n}\n";
const ENTRY: &str = r#"{"type":"linkerd-cni","name":"linkerd-cni"}"#;
const PLUGIN: &str =
    "#!/bin/sh\ncat >/dev/null\necho '{\"cniVersion\":\"1.0.0\",\"supportedVersions\":[\"1.0.0\"]}'\n";

/// A machine that is a node of a cluster, with no runtime that could be asked.
struct World {
    machine: Machine,
    server: ApiServer,
}

impl World {
    fn new() -> Self {
        let (machine, server) = (Machine::new(), ApiServer::start().unwrap());
        let mut object = node(NODE);
        object["spec"]["taints"] = json!([{ "key": TAINT, "effect": "NoExecute" }, foreign()]);
        server.create(object).unwrap();
        let world = Self { machine, server };
        write_files(&world);
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.machine.home.path().join(name)
    }

    fn launch(&self) -> Launch {
        let path = |name: &str| self.path(name).display().to_string();
        let parent = self.machine.scratch.kubepods().display().to_string();
        self.machine
            .launch_bare()
            .args(["--pods", "kube", "--node-name", NODE, "--kubeconfig", &path("kubeconfig")])
            .args(["--cni-mode", "guard", "--cni-dir", &path("net.d"), "--cni-bin-dir", &path("bin")])
            .args(["--cni-entry", &path("entry.json"), "--pod-parent", &parent, "--settle-ms", "200"])
            .args(["--gate-condition", "--gate-label", "--startup-taint", TAINT])
    }

    fn node(&self) -> Value {
        self.server.get("nodes", "", NODE).unwrap()
    }

    fn condition(&self) -> Value {
        let node = self.node();
        let all = node["status"]["conditions"].as_array().unwrap();
        all.iter().find(|condition| condition["type"] == CONDITION).cloned().unwrap_or_default()
    }

    fn says(&self, open: bool) -> bool {
        let label = self.node()["metadata"]["labels"][LABEL].clone();
        let wanted = if open { (json!("True"), json!("ready")) } else { (json!("False"), Value::Null) };
        (self.condition()["status"].clone(), label) == wanted
    }

    fn until_says(&self, agent: &Agent, open: bool) {
        agent.until(if open { "an open gate" } else { "a closed gate" }, |_| self.says(open).then_some(()));
    }

    /// Nothing but watches, which are asked for again when they end, and are open all the time.
    fn asked(&self) -> Vec<Recorded> {
        self.server.requests().into_iter().filter(|request| request.verb != "watch").collect()
    }
}

fn write_files(world: &World) {
    world.server.write_kubeconfig(&world.path("kubeconfig")).unwrap();
    for dir in ["net.d", "bin"] {
        fs::create_dir(world.path(dir)).unwrap();
    }
    fs::write(world.path("net.d/10-net.conflist"), BARE).unwrap();
    fs::write(world.path("entry.json"), ENTRY).unwrap();
    fs::write(world.path("bin/linkerd-cni"), PLUGIN).unwrap();
    fs::set_permissions(world.path("bin/linkerd-cni"), fs::Permissions::from_mode(0o755)).unwrap();
}

fn foreign() -> Value {
    json!({ "key": "example.dev/other", "effect": "NoSchedule" })
}

#[test]
fn a_patched_config_opens_the_gate_and_a_lost_plugin_closes_it() {
    let world = World::new();
    let agent = world.launch().start();
    world.until_says(&agent, true);
    agent.until("the taint's end", |_| (world.node()["spec"]["taints"] == json!([foreign()])).then_some(()));
    let text = fs::read_to_string(world.path("net.d/10-net.conflist")).unwrap();
    assert!(text.contains("linkerd-cni"), "{text}");
    let agent = agent.ready();
    let metrics = agent.metrics();
    assert_eq!((metrics.sum("node_ready", &[]), metrics.sum("startup_taint_present", &[])), (1, 0));
    for feature in ["events", "gate_condition", "gate_label", "gate_taint"] {
        assert_eq!(metrics.sum("permission", &[("feature", feature)]), 1, "{feature}");
    }

    // New pods would get no rules: at once, with the reason, and without a taint that nobody asked for.
    fs::rename(world.path("bin/linkerd-cni"), world.path("aside")).unwrap();
    world.until_says(&agent, false);
    let condition = world.condition();
    assert_eq!(condition["reason"], "CNIUnprotected", "{condition}");
    assert_eq!(world.node()["spec"]["taints"], json!([foreign()]));
    agent.until("the metric", |agent| (agent.metrics().sum("node_ready", &[]) == 0).then_some(()));
    agent.until("the sentence", |_| {
        let message = world.condition()["message"].as_str().unwrap().to_owned();
        (message.contains("bin/linkerd-cni") && message.contains("cannot work")).then_some(())
    });
    fs::rename(world.path("aside"), world.path("bin/linkerd-cni")).unwrap();
    world.until_says(&agent, true);
    assert!(agent.terminate().success());
    assert!(world.says(true), "an agent that ends says nothing: what it put in effect stays");
}

#[test]
fn an_agent_that_is_started_again_writes_nothing_and_another_boot_closes_first() {
    let world = World::new();
    let agent = world.launch().start().ready();
    world.until_says(&agent, true);
    agent.until("the taint's end", |_| (world.node()["spec"]["taints"] == json!([foreign()])).then_some(()));
    // Noted after it is published.
    agent.until("the note", |_| {
        fs::read_to_string(world.path("gate")).ok().filter(|note| note.contains("\"open\":true"))
    });
    assert!(agent.terminate().success());

    world.server.clear_requests();
    let agent = world.launch().start().ready();
    agent.until("the gate", |agent| (agent.metrics().sum("node_ready", &[]) == 1).then_some(()));
    assert_eq!(world.server.writes().len(), 0, "{:?}", world.server.writes());
    assert!(agent.terminate().success());

    // The note of another boot; and none, where /run does not outlive the boot.
    let note = json!({ "boot_id": "00000000-0000-0000-0000-000000000000", "open": true });
    for (note, reason) in [(Some(note), "Rebooted"), (None, "Starting")] {
        match note {
            Some(note) => fs::write(world.path("gate"), note.to_string()).unwrap(),
            None => fs::remove_file(world.path("gate")).unwrap(),
        }
        world.server.clear_requests();
        let agent = world.launch().start();
        agent.until("four writes", |_| (world.server.writes().len() >= 4).then_some(()));
        world.until_says(&agent, true);
        let writes = world.server.writes();
        let [first, second, ..] = &writes[..] else { panic!("{writes:?}") };
        assert_eq!(first.target, "nodes", "the label goes before anything else: {writes:?}");
        assert_eq!(first.body, json!({ "metadata": { "labels": { LABEL: null } } }));
        let told = &second.body["status"]["conditions"][0];
        assert_eq!(told["status"], "False", "{writes:?}");
        // A machine that is slow to tell may be well by then.
        assert!([reason, "Settling"].map(|reason| json!(reason)).contains(&told["reason"]), "{writes:?}");
        let agent = agent.ready();
        agent.until("the note", |_| world.path("gate").exists().then_some(()));
        assert!(agent.terminate().success());
    }
}

#[test]
fn an_idle_agent_asks_next_to_nothing() {
    const IDLE: Duration = Duration::from_secs(61);
    let world = World::new();
    let agent = world.launch().args(["--remedy-label", "on", "--remedy-evict", "on"]).start().ready();
    world.until_says(&agent, true);
    agent.until("every watch", |_| {
        let open = ["pods", "namespaces", "nodes"].map(|of| world.server.watches(of));
        (open == [1, 1, 1]).then_some(())
    });
    let quiet = Cell::new(Instant::now());
    agent.until("its start to be over", |_| {
        if !world.asked().is_empty() {
            world.server.clear_requests();
            quiet.set(Instant::now());
        }
        (quiet.get().elapsed() > Duration::from_secs(2)).then_some(())
    });
    // What is promised is a rate: the time is what is measured.
    let start = Instant::now();
    agent.until("a minute", |_| (start.elapsed() >= IDLE).then_some(()));
    let asked = world.asked();
    println!("{} requests in {IDLE:?}", asked.len());
    assert!(asked.len() <= 1, "{asked:#?}");
    assert_eq!(world.server.writes().len(), 0);
    assert!(agent.terminate().success());
}

#[test]
fn a_feature_without_its_permission_is_off_and_says_so() {
    let world = World::new();
    world.server.deny("patch", "nodes/status");
    world.server.deny("create", "pods/eviction");
    let agent = world.launch().args(["--remedy-evict", "on"]).start().ready();
    agent.until("the label", |_| (world.node()["metadata"]["labels"][LABEL] == "ready").then_some(()));
    let (code, text) = agent.until("what is off", |agent| {
        let (code, text) = agent.get("/readyz")?;
        (text.contains("evict is off") && text.contains("gate_condition is off")).then_some((code, text))
    });
    assert_eq!(code, 200, "the rest works");
    assert!(text.contains("may not patch nodes/status; grant it in the ClusterRole"), "{text}");
    assert!(text.contains("may not create pods/eviction"), "{text}");
    let metrics = agent.metrics();
    for (feature, allowed) in [("gate_condition", 0), ("evict", 0), ("gate_label", 1), ("gate_taint", 1)] {
        assert_eq!(metrics.sum("permission", &[("feature", feature)]), allowed, "{feature}");
        assert_eq!(metrics.series("permission", &[("feature", feature)]), 1, "{feature}");
    }
    let notes = agent.status()["agent"]["notes"].to_string();
    assert!(notes.contains("evict is off"), "{notes}");
    assert!(world.condition().is_null(), "{}", world.condition());
    assert!(agent.terminate().success());
}
