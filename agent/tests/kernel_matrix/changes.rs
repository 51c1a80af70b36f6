//! A connection that hangs while its pod, its rules or the mode change: what its next SYN comes to.

use nobypass_common::abi::POD_PROXY_MARK;
use nobypass_common::ids::{Counter, Mode, PodKind};
use nobypass_testkit::cgroup::Qos;
use nobypass_testkit::netns::FAR4;
use nobypass_testkit::redirect::{Variant, apply_redirect};
use nobypass_testkit::traffic::Traffic;
use nobypass_testkit::wait;

use crate::scene::{Expected, Node, Scene, Seen};
use crate::support::machine::{Machine, kernel_has};

/// A node whose agent tells no application that its SYN was dropped.
fn left_hanging() -> Node {
    Node::start(Machine::new(), &["--refusal", "hang"])
}

/// Starts a connection, waits until its SYN is counted as this, changes something, and measures the whole.
fn while_it_hangs(node: &Node, scene: &Scene, counter: Counter, change: impl FnOnce()) -> Seen {
    let app = scene.app().option("timeout-ms", 20_000);
    let count = || node.maps.counters(scene.id).map_or(0, |all| all.count[counter.code() as usize]);
    node.measure_all(scene, || {
        std::thread::scope(|scope| {
            let connection = scope.spawn(|| app.run(&[&"tcp4", &FAR4, &8080]).unwrap());
            wait::until("the first SYN", wait::HANG, || (count() > 0).then_some(())).unwrap();
            change();
            connection.join().unwrap()
        })
    })
}

/// The rules and the proxy that should have been there.
fn repair(scene: &Scene, variant: Variant) -> nobypass_testkit::traffic::Running {
    let proxy = Traffic::new().netns(&scene.net.ns).cgroup(&scene.proxy).proxy(variant).unwrap();
    apply_redirect(&scene.net.ns, variant).unwrap();
    proxy
}

#[test]
fn a_dropped_connection_goes_through_the_proxy_once_the_pod_is_repaired() {
    use Counter::{Bypass, BypassDropped, EventsEmitted, Proxy, RedirectProof};
    for variant in [Variant::IptablesLinkerd, Variant::Nft] {
        let mut node = left_hanging();
        let scene = node.meshed(Variant::None);
        node.mode(Mode::Enforce);
        let mut proxy = None;
        let seen = while_it_hangs(&node, &scene, BypassDropped, || proxy = Some(repair(&scene, variant)));
        let counted = [(Bypass, 1), (BypassDropped, 1), (EventsEmitted, 1), (RedirectProof, 1), (Proxy, 1)];
        Expected::new(&counted, &["mesh"], 1).check(&format!("{variant:?}"), &seen);
    }
}

#[test]
fn a_dropped_connection_passes_once_the_mode_is_audit_and_counts_as_a_retry() {
    use Counter::{Bypass, BypassDropped, EventsEmitted, Retry};
    let mut node = left_hanging();
    let scene = node.meshed(Variant::None);
    node.mode(Mode::Enforce);
    let mut maps = node.machine.maps();
    let seen = while_it_hangs(&node, &scene, BypassDropped, || maps.set_mode(Mode::Audit).unwrap());
    let counted = [(Bypass, 1), (BypassDropped, 1), (EventsEmitted, 1), (Retry, 1)];
    Expected::new(&counted, &["plain"], 1).check("audit", &seen);
}

#[test]
fn a_held_connection_goes_through_the_proxy_once_the_rules_are_there() {
    use Counter::{Held, Proxy, RedirectProof, Unknown};
    let args = ["--mode", "enforce", "--unknown-pods", "hold", "--hold-ms", "60000"];
    let node = Node::start(Machine::new(), &args);
    let mut scene = Scene::new(&node, Qos::Burstable, Variant::None);
    scene.policy.kind = PodKind::Meshed.code();
    let mut maps = node.machine.maps();
    let mut proxy = None;
    let seen = while_it_hangs(&node, &scene, Held, || {
        proxy = Some(repair(&scene, Variant::IptablesLinkerd));
        maps.set_policy(scene.id, &scene.policy).unwrap();
    });
    let counted = [(Unknown, 1), (Held, 1), (RedirectProof, 1), (Proxy, 1)];
    Expected::new(&counted, &["mesh"], 1).check("repaired while held", &seen);
}

/// Whoever drops the SYN behind the programs (another program, a queue, a rule of the device), the kernel then sends a
/// plain one at once: the connection is still one.
#[test]
fn a_fast_open_that_somebody_else_drops_is_counted_once() {
    use Counter::{Bypass, EventsEmitted, Retry, WouldDrop};
    // The rule below takes a hook that came with 5.16.
    if !kernel_has(5, 16) {
        return;
    }
    let mut node = Node::new();
    let scene = node.meshed(Variant::None);
    node.mode(Mode::Audit);
    let rules = "table netdev lossy {\n chain out {\n type filter hook egress device eth0 priority 0;\n \
                 ip protocol tcp drop\n }\n}\n";
    scene.net.ns.check("nft", &["-f", "-"], rules).unwrap();
    // The outside's link address is known then: a packet that waits for it counts as sent.
    assert!(scene.out("udp", 8080).ok());
    let seen = node.measure_all(&scene, || scene.out("tfo", 8080));
    let retries = seen.counted.get(Retry.label()).copied().unwrap_or(0);
    assert!(retries > 0, "the plain SYN: {seen:?}");
    let counted = [(Bypass, 1), (WouldDrop, 1), (EventsEmitted, 1), (Retry, retries)];
    Expected::new(&counted, &["TIMEOUT"], 0).check("dropped by the device", &seen);
}

#[test]
fn a_mark_tells_the_proxy_as_soon_as_a_rule_sets_it() {
    const MARK: u32 = 0x539;
    let mut node = Node::new();
    let mut scene = node.meshed(Variant::None);
    node.mode(Mode::Enforce);
    node.set(&mut scene, |policy| {
        (policy.flags, policy.proxy_cgroup) = (POD_PROXY_MARK, 0);
        (policy.mark, policy.mark_mask) = (MARK, 0xfff);
    });
    let bypass = Expected::plain_bypass(Mode::Enforce);
    node.check("no mark", &scene, &bypass, || scene.out("tcp4", 8080));
    let rules = format!(
        "table inet marked {{\n chain out {{\n type route hook output priority mangle;\n \
         tcp dport 8080 meta mark set {MARK:#x}\n }}\n}}\n"
    );
    scene.net.ns.check("nft", &["-f", "-"], &rules).unwrap();
    for command in ["tcp4", "tcp6"] {
        node.check("marked", &scene, &Expected::passes(Counter::Proxy), || scene.out(command, 8080));
        node.check("another port", &scene, &bypass, || scene.out(command, 443));
    }
}
