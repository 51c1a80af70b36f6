//! The agent on a private node with a real container runtime: pods come, bypass, restart, go and come again, and the agent,
//! the runtime and the pods fail independently of each other.

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

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use nobypass_testkit::cgroup::Qos;
use nobypass_testkit::node::{ContainerSpec, EXT_PORT, EXT4, PodSpec};
use nobypass_testkit::traffic::Report;
use nobypass_testkit::{proc, wait};
use serde_json::Value;
use support::agent::{Agent, BIN, Launch, Metrics, run, without_settings};
use support::node::{
    arrived_outside, bypasses, connect, every_bypass_is_accounted_for, flood, inode, launch, launch_with,
    node, recognised, shown, unprotected, watch_outside,
};

#[test]
fn pods_are_known_whoever_comes_first() {
    let node = node();
    node.write_conflist(true).unwrap();
    let start = || launch(&node).start();
    let meshed = |name: &str, qos| PodSpec { qos, ..PodSpec::meshed(name).unwrap() };

    let agent = start().ready();
    let mut pods = Vec::new();
    for (name, qos) in
        [("burstable", Qos::Burstable), ("guaranteed", Qos::Guaranteed), ("besteffort", Qos::BestEffort)]
    {
        let pod = node.run_pod(meshed(name, qos)).unwrap();
        recognised(&agent, &pod);
        node.wait_for_log(&pod, "linkerd-proxy", |line| line.contains("\"ready\":true")).unwrap();
        assert_eq!(connect(&node, &pod, "app").saw(), "mesh", "{name}");
        let shown = shown(&agent, &pod).unwrap();
        let got = (&shown["v4"]["verdict"], &shown["counters"]["redirected"], &shown["bypasses"]);
        assert_eq!(got, (&"redirected".into(), &1.into(), &0.into()), "{shown}");
        pods.push(pod);
    }
    let plain = node.run_pod(PodSpec::new("plain", vec![ContainerSpec::idle_app()]).unwrap()).unwrap();
    let host = PodSpec { host_network: true, ..PodSpec::meshed("host").unwrap() };
    let host = node.run_sandbox(host).unwrap();
    let others = [(&plain, "no_mesh"), (&host, "host_network")];
    let check_others = |agent: &Agent| {
        for (pod, name) in others {
            let shown =
                agent.until(name, |agent| shown(agent, pod).filter(|shown| shown["kind"] == "exempt"));
            assert_ne!(shown["reason"], "", "{shown}");
            assert_eq!(shown["proxy_cgroup"], 0, "{shown}");
        }
    };
    check_others(&agent);
    let metrics = agent.metrics();
    assert_eq!(metrics.sum("pods", &[("mesh", "linkerd"), ("verdict", "redirected")]), 3, "{metrics:?}");
    assert_eq!(metrics.sum("redirected_connections_total", &[("namespace", "default")]), 3);
    assert_eq!(metrics.series("pod_bypass", &[]), 0);
    assert_eq!(bypasses(&metrics), 0, "{metrics:?}");

    // Last: everything is there already, and nothing of it in the maps.
    assert!(agent.terminate().success());
    let mut cleanup = node.command(BIN).unwrap();
    cleanup.arg("cleanup");
    assert_eq!(run(cleanup).code, Some(0));
    let agent = start().ready();
    agent.line(&["attached", "adopted=false"]);
    for pod in &pods {
        recognised(&agent, pod);
    }
    check_others(&agent);
    node.stop().unwrap();
}

#[test]
fn without_tracepoints_a_new_pod_is_known_as_soon() {
    let node = node();
    // As on a kind node: the hierarchy seems to start at the node's own cgroup.
    let agent = Launch::new(node.command(BIN).unwrap(), node.base_dir())
        .args(["--metrics-addr", "none", "--cgroup-root-level", "1", "--cgroup-root"])
        .args([node.cgroup_top().as_path(), Path::new("--cri-endpoint"), &node.cri_socket()])
        .start()
        .ready();
    assert_eq!(agent.metrics().sum("hook_effective", &[("hook", "cgroup_mkdir")]), 0);
    let start = Instant::now();
    for name in ["first", "second"] {
        let pod = unprotected(&node, name);
        recognised(&agent, &pod);
        assert_eq!(connect(&node, &pod, "app").saw(), "plain");
        assert_eq!(shown(&agent, &pod).unwrap()["bypasses"], 1);
    }
    // Nobody waits for the regular round, which comes each half minute.
    assert!(start.elapsed().as_secs() < 15, "{:?}", start.elapsed());
    node.stop().unwrap();
}

#[test]
fn a_proxy_that_is_restarted_is_the_proxy_again() {
    let node = node();
    node.write_conflist(true).unwrap();
    let agent = launch(&node).args(["--mode", "enforce"]).start().ready();
    let mut pod = unprotected(&node, "restart");
    recognised(&agent, &pod);
    let first = inode(&pod.container_cgroup("linkerd-proxy").unwrap());
    for _ in 0..2 {
        node.remove_container(&mut pod, "linkerd-proxy").unwrap();
        node.start_container(&mut pod, &ContainerSpec::linkerd_proxy()).unwrap();
        recognised(&agent, &pod);
        node.wait_for_log(&pod, "linkerd-proxy", |line| line.contains("\"ready\":true")).unwrap();
        assert_eq!(connect(&node, &pod, "app").saw(), "mesh");
    }
    assert_ne!(inode(&pod.container_cgroup("linkerd-proxy").unwrap()), first);
    let shown = shown(&agent, &pod).unwrap();
    assert_eq!((&shown["bypasses"], &shown["counters"]["proxy"]), (&0.into(), &2.into()), "{shown}");
    // The application with the proxy's UID is not the proxy.
    node.remove_container(&mut pod, "app").unwrap();
    node.start_container(&mut pod, &ContainerSpec::new("app", 2102, &["/bin/traffic", "pause"])).unwrap();
    assert_eq!(connect(&node, &pod, "app").saw(), "ECONNABORTED");
    let metrics = agent.metrics();
    let labels = [("reason", "proxy_uid_impersonation"), ("action", "dropped"), ("direction", "outbound")];
    assert_eq!(metrics.sum("bypass_connections_total", &labels), 1, "{metrics:?}");
    every_bypass_is_accounted_for(&metrics);
    node.stop().unwrap();
}

#[test]
fn counters_outlive_pods_and_series_of_a_pod_do_not() {
    let node = node();
    let agent = launch(&node).start().ready();
    let spec = PodSpec::meshed("cart").unwrap();
    let first = node.run_pod(spec.clone()).unwrap();
    recognised(&agent, &first);
    for _ in 0..3 {
        assert_eq!(connect(&node, &first, "app").saw(), "plain");
    }
    let bypass = |metrics: &Metrics| metrics.series("pod_bypass", &[("pod", "cart")]);
    let passed = |metrics: &Metrics| {
        let labels = [
            ("namespace", "default"),
            ("mesh", "linkerd"),
            ("reason", "not_redirected"),
            ("direction", "outbound"),
            ("action", "passed"),
        ];
        metrics.sum("bypass_connections_total", &labels)
    };
    let mut before = agent.metrics();
    assert_eq!((passed(&before), bypass(&before)), (3, 1), "{before:?}");
    assert_eq!(before.sum("pods", &[("verdict", "bypassing")]), 1);
    assert_eq!(before.sum("would_drop_connections_total", &[]), 3);

    let next = |before: &mut Metrics, connections: u64| {
        let now = agent.metrics();
        assert_eq!(now.went_backwards_since(before), [""; 0]);
        assert_eq!(passed(&now), connections, "{now:?}");
        every_bypass_is_accounted_for(&now);
        *before = now;
    };
    node.remove_pod(&first).unwrap();
    // Whatever a scrape meets on the way, no counter is smaller than before.
    wait::until("the end of the pod's series", wait::HANG, || {
        next(&mut before, 3);
        (bypass(&before) == 0 && shown(&agent, &first).is_none()).then_some(())
    })
    .unwrap();
    assert_eq!(before.sum("map_entries", &[("map", "policy")]), 2, "the two QoS classes");

    // The same name, as a StatefulSet makes it, is another pod.
    let second = node.run_pod(PodSpec { uid: PodSpec::meshed("x").unwrap().uid, ..spec }).unwrap();
    recognised(&agent, &second);
    next(&mut before, 3);
    // What its network says of it counts before its first connection does, and is no connection.
    agent.until("the probe's word", |agent| (bypass(&agent.metrics()) == 1).then_some(()));
    next(&mut before, 3);
    assert_eq!(shown(&agent, &second).unwrap()["bypasses"], 0);
    for _ in 0..2 {
        assert_eq!(connect(&node, &second, "app").saw(), "plain");
    }
    next(&mut before, 5);
    assert_eq!((bypass(&before), shown(&agent, &second).unwrap()["bypasses"].as_u64()), (1, Some(2)));
    node.stop().unwrap();
}

#[test]
fn a_killed_agent_lets_nothing_out_and_the_next_one_goes_on_counting() {
    let node = node();
    watch_outside(&node);
    let mut agent = launch(&node).args(["--mode", "enforce", "--refusal", "hang"]).start().ready();
    let mut pod = unprotected(&node, "killed");
    recognised(&agent, &pod);
    assert_eq!(connect(&node, &pod, "app").saw(), "TIMEOUT");
    // That connection was counted once, and its SYNs sent again are not new ones.
    let first = bypasses(&agent.metrics());
    assert_eq!(first, 1);

    let flood = ["/bin/traffic", "flood", EXT4, EXT_PORT, "6000", "--wait-ms", "1"];
    node.start_container(&mut pod, &ContainerSpec::new("client", 1000, &flood)).unwrap();
    for _ in 0..3 {
        let before = bypasses(&agent.metrics());
        agent.until("traffic", |agent| (bypasses(&agent.metrics()) > before).then_some(()));
        agent.kill();
        agent = launch(&node).args(["--mode", "enforce", "--refusal", "hang"]).start().ready();
        agent.line(&["attached", "adopted=true"]);
    }
    let still = bypasses(&agent.metrics());
    agent.until("traffic", |agent| (bypasses(&agent.metrics()) > still).then_some(()));
    let report =
        Report::parse(&node.wait_for_log(&pod, "client", |line| line.contains("attempts")).unwrap()).unwrap();
    assert_eq!((report.count("established"), report.count("refused")), (0, 0), "{report}");
    let attempts = report.count("attempts");
    assert_eq!((attempts, report.count("started")), (6000, 6000), "{report}");
    let metrics = agent.metrics();
    assert_eq!(bypasses(&metrics), first + attempts, "every attempt once: {metrics:?}");
    assert_eq!(metrics.sum("bypass_connections_total", &[("action", "passed")]), 0, "{metrics:?}");
    every_bypass_is_accounted_for(&metrics);
    recognised(&agent, &pod);
    assert_eq!(arrived_outside(&node), 0);
    node.stop().unwrap();
}

#[test]
fn the_runtime_may_come_late_die_and_come_back() {
    let mut node = node();
    let before = unprotected(&node, "before");
    let late = node.base_dir().join("late.sock");
    let agent = launch_with(&node, &late).start().attached();
    agent.line(&["WARN", "container runtime does not answer", "late.sock"]);
    let (code, body) = agent.get("/readyz").unwrap();
    assert!(code == 503 && body.contains("pods: ") && body.contains("late.sock"), "{body}");
    assert_eq!(agent.get("/livez"), Some((200, "ok\n".into())));
    assert_eq!(agent.status()["agent"]["pending"].as_array().unwrap().len(), 1);
    // The pod is seen, but nobody has said what it is.
    agent.until("the pod", |agent| {
        agent.status()["pods"].as_array().unwrap().iter().find(|pod| pod["kind"] == "unknown").cloned()
    });

    symlink(node.cri_socket(), &late).unwrap();
    let agent = agent.ready();
    recognised(&agent, &before);
    assert_eq!(agent.metrics().sum("ready", &[]), 1);

    node.kill_runtime().unwrap();
    // The kubelet makes a pod's cgroup first: the agent asks who that is, and learns that nobody answers.
    let hint = node.kubepods().join("burstable/pod2c48913c-b29f-11e7-9350-020968147796");
    fs::create_dir(&hint).unwrap();
    agent.until("being not ready", |agent| agent.get("/readyz").filter(|(code, _)| *code == 503));
    assert_eq!(
        agent.get("/livez"),
        Some((200, "ok\n".into())),
        "a dead runtime is no reason to kill the agent"
    );
    recognised(&agent, &before);
    fs::remove_dir(&hint).unwrap();
    node.start_runtime().unwrap();
    let agent = agent.ready();
    let after = unprotected(&node, "after");
    recognised(&agent, &after);
    recognised(&agent, &before);
    assert_eq!(connect(&node, &before, "app").saw(), "plain");
    assert_eq!(shown(&agent, &before).unwrap()["bypasses"], 1);
    node.stop().unwrap();
}

/// Every key of a JSON value, as `pods[].v4.verdict`; maps with counters' names are not looked into.
fn keys(value: &Value, at: &str, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) if !["counters", "totals"].contains(&at.rsplit('.').next().unwrap()) => {
            for (key, value) in map {
                let at = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
                keys(value, &at, into);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            items.iter().for_each(|item| keys(item, &format!("{at}[]"), into));
        }
        _ => {
            into.insert(at.to_owned());
        }
    }
}

#[test]
fn status_is_a_contract() {
    const KEYS: &str = "agent.last_seen_seconds agent.notes agent.pending agent.running agent.version hooks[].effective hooks[].hook \
        hooks[].reason mode mode_source pods[].bypasses pods[].cgroup pods[].counters pods[].dropped pods[].kind pods[].mesh pods[].mode pods[].mode_level \
        pods[].name pods[].namespace pods[].packet_sockets pods[].problems pods[].proxy_cgroup pods[].reason pods[].uid pods[].v4.last_bypass_seconds \
        pods[].v4.last_redirect_seconds pods[].v4.reason pods[].v4.since_seconds pods[].v4.verdict pods[].v6.last_bypass_seconds \
        pods[].v6.last_redirect_seconds pods[].v6.reason pods[].v6.since_seconds pods[].v6.verdict pods[].verdict totals unknown_pods";
    let node = node();
    let agent = launch(&node).start().ready();
    let pod = unprotected(&node, "contract");
    recognised(&agent, &pod);
    assert_eq!(connect(&node, &pod, "app").saw(), "plain");
    let status = |args: &[&str]| {
        let mut command = node.command(BIN).unwrap();
        command.args(["status", "--socket"]).arg(agent.socket()).args(args);
        let ended = run(command);
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
        ended.out
    };
    let json: Value = serde_json::from_str(&status(&["-o", "json"])).unwrap();
    let mut found = BTreeSet::new();
    keys(&json, "", &mut found);
    let expected: BTreeSet<String> = KEYS.split_whitespace().map(str::to_owned).collect();
    assert_eq!(found, expected);
    assert_eq!((&json["agent"]["running"], &json["mode"]), (&true.into(), &"audit".into()));
    let shown = &json["pods"][0];
    assert_eq!(
        (&shown["v4"]["verdict"], &shown["v4"]["reason"], &shown["v6"]["verdict"]),
        (&"bypassing".into(), &"not_redirected".into(), &"unknown".into()),
        "{shown}"
    );
    assert!(
        shown["v4"]["last_bypass_seconds"].as_f64().is_some()
            && shown["v4"]["last_redirect_seconds"].is_null()
    );
    for (map, key) in [(&shown["counters"], "not_redirected"), (&json["totals"], "events_emitted")] {
        assert_eq!(map[key], 1, "{map}");
    }

    let table = status(&[]);
    assert!(table.contains("running, mode audit"), "{table}");
    let row = table.lines().find(|line| line.contains("contract")).unwrap();
    for word in ["default", "linkerd", "audit", "bypassing"] {
        assert!(row.contains(word), "{row}");
    }
    let wide = status(&["-o", "wide"]);
    assert!(wide.lines().any(|line| line.contains("PROXY-CGROUP")), "{wide}");

    // Without an agent: the same shape, from the pins.
    let socket = agent.socket().display().to_string();
    agent.kill();
    let mut command = node.command(BIN).unwrap();
    command.args(["status", "-o", "json", "--socket", &socket]);
    let ended = run(command);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let pins: Value = serde_json::from_str(&ended.out).unwrap();
    let mut found = BTreeSet::new();
    keys(&pins, "", &mut found);
    assert_eq!(found, expected);
    assert_eq!(pins["pods"][0]["bypasses"], 1);
    assert_eq!(pins["pods"][0]["name"], "contract");
    assert!(pins["hooks"].as_array().unwrap().iter().all(|hook| hook["effective"] == true), "{pins}");
    node.stop().unwrap();
}

#[test]
fn bypasses_are_told_at_once_and_the_log_level_is_obeyed() {
    let node = node();
    let agent = launch(&node).args(["--event-rate", "1000"]).start().ready();
    let pod = unprotected(&node, "loud");
    recognised(&agent, &pod);

    let mut command = node.command(BIN).unwrap();
    without_settings(&mut command)
        .stderr(Stdio::null())
        .args(["events", "-f", "-o", "json", "--socket"])
        .arg(agent.socket());
    let events = proc::spawn(command).unwrap();
    // Until it listens, nothing is told to it.
    let started = wait::until("an event", wait::HANG, || {
        let before = Instant::now();
        assert_eq!(connect(&node, &pod, "app").saw(), "plain");
        events.line(std::time::Duration::from_secs(1)).ok().map(|line| (line, before))
    });
    let (line, before) = started.unwrap();
    println!("event after {:?}, the exec of the connecting program included", before.elapsed());
    let event: Value = serde_json::from_str(&line).unwrap();
    let expected = serde_json::json!({
        "namespace": "default", "pod": "loud", "container": "app", "mesh": "linkerd", "direction": "outbound",
        "dst": format!("{EXT4}:{EXT_PORT}"), "uid": 1000, "protocol": 6, "reason": "not_redirected", "action": "passed",
        "mode": "audit", "cgroup": inode(&pod.cgroup),
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&event[key], value, "{key} of {event}");
    }
    assert!(event["src"].as_str().unwrap().starts_with(&format!("{}:", pod.ip)), "{event}");

    let lines = |agent: &Agent| agent.log().matches("connection bypasses its proxy").count();
    let event = || {
        assert_eq!(connect(&node, &pod, "app").saw(), "plain");
        events.line(wait::HANG).unwrap();
    };
    agent.line(&[
        "WARN",
        "namespace=default",
        "pod=loud",
        "container=app",
        "reason=not_redirected",
        "action=passed",
    ]);
    assert_eq!(agent.put("/v1/log-level", "error"), (200, "ok\n".into()));
    let before = lines(&agent);
    event();
    assert_eq!(lines(&agent), before, "quiet, though told to the reader: {}", agent.log());
    assert_eq!(agent.put("/v1/log-level", "warn,nobypass=debug"), (200, "ok\n".into()));
    let second = unprotected(&node, "second");
    assert_eq!(connect(&node, &second, "app").saw(), "plain");
    agent.line(&["WARN", "pod=second", "connection bypasses its proxy"]);
    let (code, body) = agent.put("/v1/log-level", "nobypass=loud");
    assert!(code == 400 && body.contains("nobypass=loud") && body.contains("trace"), "{body}");
    let (code, body) = agent.put("/v1/mode", "strict");
    assert!(code == 400 && body.contains("strict") && body.contains("enforce"), "{body}");

    let mut command = node.command(BIN).unwrap();
    command.args(["mode", "enforce", "--socket"]).arg(agent.socket());
    let ended = run(command);
    assert_eq!((ended.code, ended.out.as_str()), (Some(0), "enforce\n"), "{}", ended.err);
    let report = connect(&node, &pod, "app");
    assert!(["EPERM", "ECONNABORTED"].contains(&report.saw()), "{report}");
    assert_eq!(agent.metrics().sum("mode", &[("mode", "enforce")]), 1);

    // An agent that ends tells its readers.
    assert!(agent.terminate().success());
    wait::until("the end of the reader", wait::HANG, || events.line(wait::HANG).is_err().then_some(()))
        .unwrap();
    node.stop().unwrap();
}

#[test]
fn a_flood_is_counted_to_the_last_one_and_logged_in_a_few_lines() {
    let node = node();
    let agent = launch(&node).start().ready();
    let pod = unprotected(&node, "flood");
    recognised(&agent, &pod);
    let mut started = 0;
    let before = Instant::now();
    for _ in 0..4 {
        let report = flood(&node, &pod, "25000");
        assert_eq!(report.count("attempts"), 25_000, "{report}");
        started += report.count("started");
    }
    let seconds = before.elapsed().as_secs();
    assert!(started > 90_000, "{started}");
    let metrics = agent.metrics();
    assert_eq!(bypasses(&metrics), started, "{metrics:?}");
    assert_eq!(metrics.sum("would_drop_connections_total", &[]), started);
    every_bypass_is_accounted_for(&metrics);
    assert!(metrics.sum("events_suppressed_total", &[]) > 0, "{metrics:?}");
    // Five lines a pod in ten seconds.
    let lines = agent.log().matches("connection bypasses its proxy").count();
    let allowed = usize::try_from(5 * (seconds / 10 + 2)).unwrap();
    assert!((1..=allowed).contains(&lines), "{lines} lines in {seconds} s");
    assert_eq!(shown(&agent, &pod).unwrap()["bypasses"], started);
    node.stop().unwrap();
}
