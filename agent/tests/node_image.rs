//! The image, in a pod that has what deploy/manifests grants and nothing more.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the helpers of a test may panic as the test may"
)]

mod support {
    #![allow(dead_code, reason = "each test target uses its part")]
    pub mod agent;
    pub mod manifest;
    pub mod metrics;
    pub mod node;
    pub mod shape;
    pub mod yaml;
}

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use nobypass_testkit::node::{ExecOutput, Node, Pod};
use nobypass_testkit::{proc, wait};
use serde_json::Value;
use support::agent::{BIN, request};
use support::manifest::{CONTAINER, Manifest, build_image};
use support::metrics;
use support::node::{connect, node, unprotected};
use support::shape;
use support::yaml::repository;

fn nobypass(node: &Node, pod: &Pod, words: &[&str]) -> ExecOutput {
    node.exec(pod, CONTAINER, &[&["nobypass"], words].concat()).unwrap()
}

/// The node's state; null while the agent starts.
fn status(node: &Node, pod: &Pod) -> Value {
    let said = nobypass(node, pod, &["status", "-o", "json"]);
    if said.exit_code != 0 {
        return Value::Null;
    }
    serde_json::from_str(&said.stdout).unwrap_or_else(|error| panic!("{error}: {said:?}"))
}

fn until<T>(node: &Node, pod: &Pod, what: &str, poll: impl Fn(&Value) -> Option<T>) -> T {
    let found = wait::until(what, wait::HANG, || {
        assert_eq!(node.exit_code(pod, CONTAINER).unwrap(), None, "{}", log(node, pod));
        poll(&status(node, pod))
    });
    found.unwrap_or_else(|error| panic!("{error}: {}\n{}", status(node, pod), log(node, pod)))
}

fn log(node: &Node, pod: &Pod) -> String {
    node.logs(pod, CONTAINER).unwrap_or_default()
}

/// A pod's part of the status.
fn of<'a>(status: &'a Value, pod: &Pod) -> Option<&'a Value> {
    status["pods"].as_array()?.iter().find(|shown| shown["uid"] == pod.spec.uid.as_str())
}

#[test]
fn two_builds_of_the_image_are_the_same_to_the_byte() {
    let dir = tempfile::tempdir().unwrap();
    let first = build_image(&dir.path().join("1"));
    // Linked anew, not copied.
    let main = repository().join("agent/src/main.rs");
    fs::File::options().append(true).open(main).unwrap().set_modified(std::time::SystemTime::now()).unwrap();
    assert!(first == build_image(&dir.path().join("2")), "two images differ");
}

#[test]
fn it_does_the_demos_job_with_what_the_manifest_grants() {
    let node = node();
    let early = unprotected(&node, "early");
    let manifest = Manifest::read(&node, "audit");
    let agent = manifest.start(&node, &manifest.capabilities());

    until(&node, &agent, "the pod", |status| {
        of(status, &early).filter(|pod| pod["proxy_cgroup"] != 0).map(drop)
    });
    let shown = status(&node, &agent);
    for hook in shown["hooks"].as_array().unwrap() {
        assert_eq!(hook["effective"], true, "{hook}\n{}", log(&node, &agent));
    }
    assert_eq!(connect(&node, &early, "app").answer(), Some("plain"));
    until(&node, &agent, "the bypass", |status| {
        of(status, &early).filter(|pod| pod["verdict"] == "bypassing").map(drop)
    });

    // `helm upgrade --set mode=enforce`: nothing is restarted.
    let rule = "namespaces: [{names: [shop], matchLabels: {a: b}, mode: audit}]";
    manifest.change_policy("mode: \"audit\"", &format!("mode: \"enforce\"\n{rule}"));
    until(&node, &agent, "enforce", |status| (status["mode"] == "enforce").then_some(()));
    assert_eq!(connect(&node, &early, "app").answer(), None);
    until(&node, &agent, "the drop", |status| of(status, &early).filter(|pod| pod["dropped"] != 0).map(drop));

    // The CNI half sees the node's files and keeps the mesh's entry in them.
    assert_eq!(nobypass(&node, &agent, &["cni", "status"]).exit_code, 1, "nothing is protected yet");
    node.write_conflist(true).unwrap();
    let path = node.cni_net_dir().join("10-node.conflist");
    wait::until("the protection", wait::HANG, || {
        (nobypass(&node, &agent, &["cni", "status"]).exit_code == 0).then_some(())
    })
    .unwrap();
    fs::write(&path, node.conflist(&[])).unwrap();
    wait::until("the mesh's entry to be put back", wait::HANG, || {
        fs::read_to_string(&path).unwrap().contains("linkerd-cni").then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}: {}", log(&node, &agent)));
    assert!(!log(&node, &agent).contains("panicked"));

    // What the commands print is what deploy/json.md says.
    let mut differences = Vec::new();
    for (command, words) in [
        ("status", &["status"][..]),
        ("explain NAMESPACE/POD", &["explain", "default/early"]),
        ("probe NAMESPACE/POD", &["probe", "default/early"]),
        ("cni status", &["cni", "status"]),
        ("policy show", &["policy", "show"]),
    ] {
        let said = nobypass(&node, &agent, &[words, &["-o", "json"]].concat());
        let json = serde_json::from_str(&said.stdout).unwrap_or_else(|error| panic!("{error}: {said:?}"));
        differences.extend(shape::differences(command, &json));
    }
    let mut events = std::process::Command::new(BIN);
    events.args(["events", "-o", "json", "--socket"]).arg(manifest.socket());
    let events = proc::spawn(events).unwrap();
    let event = until(&node, &agent, "an event", |_| {
        connect(&node, &early, "app");
        events.line(std::time::Duration::from_millis(200)).ok()
    });
    differences.extend(shape::differences("events", &serde_json::from_str(&event).unwrap()));
    assert_eq!(differences, [""; 0], "fields");

    // Confined as the manifest says, and with room for more.
    let process = process(&agent);
    let said = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    assert!(said.contains("\nSeccomp:\t2\n") && said.contains("\nNoNewPrivs:\t1\n"), "{said}");
    let (limit, peak) = memory(process);
    let wanted = u64::try_from(manifest.memory("limits")).unwrap();
    println!("memory of the container, kernel's maps included: {peak} bytes at most, {limit} allowed");
    assert_eq!(limit, wanted);
    assert!(peak < wanted / 2, "{peak} of {wanted}");
    node.remove_pod(&agent).unwrap();
}

/// The agent's process.
fn process(agent: &Pod) -> u32 {
    let processes = agent.container_cgroup(CONTAINER).unwrap().join("cgroup.procs");
    let text = fs::read_to_string(&processes).unwrap();
    text.lines().next().unwrap_or_else(|| panic!("{}", processes.display())).parse().unwrap()
}

/// Limit and peak of a process's memory cgroup, of either version.
fn memory(process: u32) -> (u64, u64) {
    let cgroups = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap();
    let old = cgroups.lines().find_map(|line| line.split_once(":memory:").map(|(_, path)| path));
    let (dir, files) = match old {
        Some(path) => (format!("/sys/fs/cgroup/memory{path}"), ["limit_in_bytes", "max_usage_in_bytes"]),
        None => {
            let path = cgroups.lines().find_map(|line| line.strip_prefix("0::")).unwrap();
            (format!("/sys/fs/cgroup{path}"), ["max", "peak"])
        }
    };
    let [limit, peak] = files.map(|file| {
        let text = fs::read_to_string(format!("{dir}/memory.{file}")).unwrap();
        text.trim().parse().unwrap_or_else(|error| panic!("{dir}: memory.{file}: {error}: {text}"))
    });
    (limit, peak)
}

/// What the chart adds for repairs.
fn capabilities_of_repairs() -> Vec<String> {
    let text = fs::read_to_string(repository().join("deploy/chart/values.yaml")).unwrap();
    let values: Value = serde_saphyr::from_str(&text).unwrap();
    let list = values["capabilities"]["repair"].as_array().unwrap();
    list.iter().map(|name| name.as_str().unwrap().to_owned()).collect()
}

/// Lets the mesh's plugin find iptables' older variant, as on nodes that have no other.
fn with_legacy_iptables(node: &Node) {
    let tools = node.base_dir().join("legacy");
    fs::create_dir(&tools).unwrap();
    for name in ["iptables-restore", "ip6tables-restore"] {
        std::os::unix::fs::symlink("/usr/sbin/xtables-legacy-multi", tools.join(name)).unwrap();
    }
    let (plugin, real) = (node.cni_bin_dir().join("linkerd-cni"), node.cni_bin_dir().join("real"));
    fs::rename(&plugin, &real).unwrap();
    let script = format!("#!/bin/sh\nPATH={}:$PATH exec {}\n", tools.display(), real.display());
    fs::write(&plugin, script).unwrap();
    fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn it_repairs_in_place_and_says_what_it_lacks_for_that() {
    let node = node();
    let early = unprotected(&node, "early");
    with_legacy_iptables(&node);
    node.write_conflist(true).unwrap();
    let mut manifest = Manifest::read(&node, "audit");
    for (name, value) in [("REMEDY_REPAIR", "on"), ("REMEDY_GRACE", "0"), ("SETTLE_MS", "100")] {
        manifest.set(&format!("NOBYPASS_{name}"), value);
    }
    let more = capabilities_of_repairs();
    let all = [manifest.capabilities(), more.clone()].concat();
    // The rest is needed for asking pods already, and tried there.
    let lacks = [("NET_RAW", "unable to initialize table 'nat'"), ("SYS_CHROOT", "SYS_CHROOT")];
    assert_eq!(more, lacks.map(|(name, _)| name), "capabilities of the chart and of this test");
    for (capability, says) in lacks {
        let set: Vec<String> = all.iter().filter(|name| *name != capability).cloned().collect();
        let agent = manifest.start(&node, &set);
        let said = wait::until("the failure", wait::HANG, || {
            log(&node, &agent).lines().find(|line| line.contains("RepairFailed")).map(str::to_owned)
        });
        let said = said.unwrap_or_else(|error| panic!("{error}: {}", log(&node, &agent)));
        assert!(said.contains(says), "without {capability}: {said}");
        assert_eq!(connect(&node, &early, "app").answer(), Some("plain"), "without {capability}");
        node.remove_pod(&agent).unwrap();
    }
    let agent = manifest.start(&node, &all);
    let saw = wait::until("the repair", wait::HANG, || {
        (connect(&node, &early, "app").answer() == Some("mesh")).then_some(())
    });
    saw.unwrap_or_else(|error| panic!("{error}: {}", log(&node, &agent)));
    let (limit, peak) = memory(process(&agent));
    println!("memory of the container, the plugin's included: {peak} bytes at most, {limit} allowed");
    assert!(peak < limit / 2, "{peak} of {limit}");
    node.remove_pod(&agent).unwrap();
}

#[test]
fn without_any_one_of_its_capabilities_something_with_a_name_fails() {
    let node = node();
    let early = unprotected(&node, "early");
    let manifest = Manifest::read(&node, "audit");
    let all = manifest.capabilities();
    let but = |set: &[String], capability: &str| -> Vec<String> {
        let rest: Vec<String> = set.iter().filter(|name| *name != capability).cloned().collect();
        assert_eq!(rest.len() + 1, set.len(), "{capability} is not in {set:?}");
        rest
    };

    // What entering pods' networks takes.
    let probing = [
        ("DAC_READ_SEARCH", "denied"),
        ("SETGID", "socket"),
        ("SETUID", "socket"),
        ("SYS_ADMIN", "denied"),
        ("SYS_PTRACE", "denied"),
    ];

    // The rest, of which SYS_ADMIN includes two; and before programs are pinned, which take less to adopt.
    let base: Vec<String> =
        all.iter().filter(|name| probing.iter().all(|(of, _)| of != name)).cloned().collect();
    for capability in ["BPF", "NET_ADMIN", "PERFMON"] {
        let agent = manifest.start(&node, &but(&base, capability));
        let ended = wait::until(&format!("the agent's end without {capability}"), wait::HANG, || {
            node.exit_code(&agent, CONTAINER).unwrap()
        });
        let log = log(&node, &agent);
        assert_eq!(ended.unwrap(), 77, "without {capability}: {log}");
        let words = format!("CAP_{capability}");
        assert!(log.lines().last().unwrap_or_default().contains(&words), "without {capability}: {log}");
        node.remove_pod(&agent).unwrap();
    }
    assert_eq!(base.len(), 3, "a capability of the manifest is not in this test: {all:?}");

    // With nothing but these, as without probes, all programs are in effect.
    let agent = manifest.start(&node, &base);
    until(&node, &agent, "the programs", |status| {
        let hooks = status["hooks"].as_array().filter(|hooks| hooks.len() >= 6)?;
        hooks.iter().all(|hook| hook["effective"] == true).then_some(())
    });
    node.remove_pod(&agent).unwrap();

    let complete = [("", "not_redirected")];
    for (capability, says) in complete.iter().chain(&probing) {
        let set = if capability.is_empty() { all.clone() } else { but(&all, capability) };
        let agent = manifest.start(&node, &set);
        until(&node, &agent, "the pod", |status| {
            of(status, &early).filter(|pod| pod["proxy_cgroup"] != 0).map(drop)
        });
        let said = nobypass(&node, &agent, &["probe", "default/early", "-o", "json"]);
        let said: Value =
            serde_json::from_str(&said.stdout).unwrap_or_else(|error| panic!("{error}: {said:?}"));
        let ipv4 = &said["families"][0];
        let answer = ipv4["reason"].as_str().or_else(|| ipv4["answer"].as_str());
        assert_eq!(answer, Some(*says), "without {capability:?}: {said}\n{}", log(&node, &agent));
        node.remove_pod(&agent).unwrap();
    }
}

/// Starts Prometheus in the node's network with the rules of deploy/prometheus, without their waiting times.
fn prometheus(node: &Node) -> proc::Proc {
    let dir = node.base_dir().join("prometheus");
    fs::create_dir(&dir).unwrap();
    let rules = fs::read_to_string(repository().join("deploy/prometheus/rules.yaml")).unwrap();
    let at_once = rules.lines().filter(|line| !line.trim_start().starts_with("for: "));
    fs::write(dir.join("rules.yaml"), at_once.map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    // As the chart's PodMonitor has it: the metrics' own labels count, and the node's name is added.
    let config = "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [rules.yaml]\n\
        scrape_configs:\n- job_name: nobypass\n  honor_labels: true\n  static_configs:\n\
        \x20 - targets: ['127.0.0.1:9910']\n    labels: {node: n1, namespace: nobypass-system, pod: nobypass-x}\n";
    fs::write(dir.join("prometheus.yml"), config).unwrap();
    let mut command = node.command("prometheus").unwrap();
    // Absolute: entering the node's mount namespace changes the working directory.
    command.arg(format!("--config.file={}", dir.join("prometheus.yml").display()));
    command.arg(format!("--storage.tsdb.path={}", dir.join("data").display()));
    command.arg("--web.listen-address=127.0.0.1:9090");
    command.stderr(fs::File::create(dir.join("log")).unwrap());
    proc::spawn(command).unwrap()
}

/// The answer of an instant query.
fn query(node: &Node, query: &str) -> Result<Value, String> {
    let mut command = node.command("promtool").unwrap();
    command.args(["query", "instant", "--format=json", "http://127.0.0.1:9090", query]);
    let out = proc::output(command, "", wait::HANG).unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if !out.status.success() {
        return Err(text(&out.stderr));
    }
    serde_json::from_str(&text(&out.stdout)).map_err(|error| format!("{error}: {}", text(&out.stdout)))
}

fn expect_alert(node: &Node, name: &str, labels: &[(&str, &str)]) {
    let mut matchers = format!("alertname=\"{name}\",alertstate=\"firing\"");
    for (label, value) in labels {
        matchers.push_str(&format!(",{label}=\"{value}\""));
    }
    let fired = wait::until(&format!("the alert {matchers}"), wait::HANG, || {
        let found = query(node, &format!("ALERTS{{{matchers}}}")).ok()?;
        (!found.as_array()?.is_empty()).then_some(())
    });
    fired.unwrap_or_else(|error| {
        let log = fs::read_to_string(node.base_dir().join("prometheus/log")).unwrap();
        panic!("{error}: {:?}\n{log}", query(node, "ALERTS"))
    });
}

#[test]
fn a_real_prometheus_scrapes_the_agent_fires_and_answers_every_query_of_alerts_and_dashboard() {
    let node = node();
    let early = unprotected(&node, "early");
    let manifest = Manifest::read(&node, "audit");
    let agent = manifest.start(&node, &manifest.capabilities());
    until(&node, &agent, "the pod", |status| {
        of(status, &early).filter(|pod| pod["proxy_cgroup"] != 0).map(drop)
    });
    let prometheus = prometheus(&node);
    assert_eq!(connect(&node, &early, "app").answer(), Some("plain"));
    let pod = [("namespace", "default"), ("pod", "early"), ("mesh", "linkerd"), ("node", "n1")];
    expect_alert(&node, "NobypassPodBypassing", &pod);
    expect_alert(&node, "NobypassNodeUnprotected", &[("node", "n1")]);

    let absent = query(&node, "ALERTS{alertname=\"NobypassAgentAbsent\"}").unwrap();
    assert_eq!(absent, serde_json::json!([]), "the agent is there");

    let scrape = request(&manifest.socket(), "GET", "/metrics", "").unwrap().1;
    let known = metrics::Known::of(&scrape);
    let expressions = metrics::expressions();
    assert!(expressions.len() > 40, "{}", expressions.len());
    for (place, expression) in &expressions {
        if let Err(error) = query(&node, expression) {
            panic!("{place}: {expression}: {error}");
        }
    }
    let mut missing: Vec<String> =
        expressions.iter().flat_map(|(place, text)| known.lacks(place, text)).collect();
    missing.sort();
    missing.dedup();
    assert_eq!(missing, [""; 0], "names that no agent exports");
    drop(prometheus);
}
