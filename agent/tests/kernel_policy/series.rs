//! Series of a pod live as long as the pod bypasses, and what was counted stays.

use nobypass_common::abi::PodName;
use nobypass_common::ids::{Counter, Mode};
use nobypass_testkit::netns::FAR4;
use nobypass_testkit::redirect::Variant;

use crate::scene::Node;

fn field<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    bytes
}

#[test]
fn kube_state_metrics_694_series_vanish_with_their_pod_and_no_counter_goes_backwards() {
    let mut node = Node::new();
    let mut maps = node.machine.maps();
    let scene = node.meshed(Variant::None);
    maps.set_name(
        scene.id,
        &PodName { namespace: field("shop"), name: field("cart-0"), mesh: field("linkerd") },
    )
    .unwrap();
    // An agent that starts anew remembers who it is.
    node.agent.take().unwrap().kill();
    let agent = node.machine.launch().start().attached();
    node.mode(Mode::Audit);
    let pod = [("namespace", "shop"), ("pod", "cart-0"), ("mesh", "linkerd"), ("family", "ipv4")];
    let before = agent.until("the pod", |agent| {
        let metrics = agent.metrics();
        (metrics.sum("pods", &[("mesh", "linkerd"), ("verdict", "unknown")]) == 1).then_some(metrics)
    });
    assert_eq!(before.series("pod_bypass", &[]), 0, "nothing was seen");
    assert_eq!(scene.app().run(&[&"tcp4", &FAR4, &8080]).unwrap().saw(), "plain");

    let during = agent.metrics();
    assert_eq!(during.sum("pod_bypass", &pod), 1);
    assert_eq!(during.sum("pod_bypass", &[("family", "ipv4"), ("reason", "not_redirected")]), 1);
    assert_eq!(during.sum("pods", &[("mesh", "linkerd"), ("verdict", "bypassing")]), 1);
    let counted = [("namespace", "shop"), ("reason", "not_redirected"), ("action", "passed")];
    assert_eq!(during.sum("bypass_connections_total", &counted), 1);
    agent.line(&["WARN", "a pod's verdict changed", "cart-0", "bypassing", "not_redirected"]);

    // Explained by the agent, and by the pins when it is dead.
    let explained: serde_json::Value =
        serde_json::from_str(&agent.get("/v1/explain?pod=shop/cart-0").unwrap().1).unwrap();
    assert_eq!(
        (&explained["agent"], &explained["families"][0]["verdict"]),
        (&true.into(), &"bypassing".into()),
        "{explained}"
    );
    assert_eq!(explained["events"][0]["dst"], format!("{FAR4}:8080"), "{explained}");
    let (code, near) = agent.get("/v1/explain?pod=shop/card-0").unwrap();
    assert!(code == 404 && near.contains("did you mean shop/cart-0?"), "{near}");
    let socket = agent.socket().display().to_string();
    let explain = || node.machine.nobypass(&["explain", "shop/cart-0", "--socket", &socket]);
    let alive = explain();
    assert!(
        alive.code == Some(0) && alive.out.contains("ipv4       bypassing (not_redirected)"),
        "{alive:?}"
    );
    agent.kill();
    let dead = explain();
    assert!(dead.code == Some(0) && dead.out.starts_with("NO AGENT"), "{dead:?}");
    for words in
        ["shop/cart-0", "ipv4       bypassing (not_redirected)", "mode       audit", "start the agent"]
    {
        assert!(dead.out.contains(words), "{words} is not in {}", dead.out);
    }

    let agent = node.machine.launch().start().attached();
    agent.until("the pod", |agent| (agent.metrics().sum("pod_bypass", &pod) == 1).then_some(()));
    let during = agent.metrics();
    let crate::scene::Scene { pod: cgroup, app, proxy, .. } = &scene;
    for dir in [app.path(), proxy.path(), cgroup.path()] {
        // The processes inside end with the scene; they are moved out.
        for pid in std::fs::read_to_string(dir.join("cgroup.procs")).unwrap().lines() {
            std::fs::write(node.machine.scratch.top().join("cgroup.procs"), pid).unwrap();
        }
        std::fs::remove_dir(dir).unwrap();
    }
    let after = agent.until("the end of the series", |agent| {
        let metrics = agent.metrics();
        (metrics.series("pod_bypass", &[]) == 0).then_some(metrics)
    });
    assert_eq!(after.sum("bypass_connections_total", &counted), 1);
    assert_eq!(after.went_backwards_since(&during), [""; 0]);
    assert_eq!(after.series("pods", &[("mesh", "linkerd")]), 0);
    assert_eq!(nobypass::detect::verdict::count(&maps.totals().unwrap(), Counter::Bypass), 1);
}
