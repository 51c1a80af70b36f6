//! Pods that nobody has classified yet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use nobypass::detect::verdict::count;
use nobypass_common::ids::{Counter, Mode, PodKind};
use nobypass_testkit::cgroup::Qos;
use nobypass_testkit::netns::FAR4;
use nobypass_testkit::redirect::Variant;
use nobypass_testkit::traffic::Report;
use nobypass_testkit::wait;

use crate::scene::{BLOCKED, Expected, HANGING, Node, OWN_PORT, Scene, Seen, exists};
use crate::support::machine::{Machine, kernel_has};

const HELD: [(Counter, u64); 2] = [(Counter::Unknown, 1), (Counter::Held, 1)];

/// A node that holds new pods for so long.
fn holding(hold_ms: u32) -> Node {
    let hold_ms = hold_ms.to_string();
    Node::start(Machine::new(), &["--mode", "enforce", "--unknown-pods", "hold", "--hold-ms", &hold_ms])
}

fn unclassified(node: &Node) -> Scene {
    Scene::new(node, Qos::Burstable, Variant::None)
}

/// An application to the outside; it waits long enough for a retransmit if it is to be answered.
fn to_far(scene: &Scene, command: &str) -> Report {
    scene.app().run(&[&command, &FAR4, &8080]).unwrap()
}

#[test]
fn a_held_connection_goes_out_by_itself_after_the_hold() {
    let mut node = holding(3_000);
    for command in ["tcp4", "tfo"] {
        let scene = unclassified(&node);
        let released = Expected::new(&HELD, &["plain"], 1);
        node.check(command, &scene, &released, || to_far(&scene, command));
        // The hold is over for the next ones as well.
        let unknown = Expected::passes(Counter::Unknown);
        node.check("the next", &scene, &unknown, || to_far(&scene, command));
    }
    // The program's own clock releases, not the agent.
    let scene = unclassified(&node);
    node.agent.take().unwrap().kill();
    node.check("no agent", &scene, &Expected::new(&HELD, &["plain"], 1), || to_far(&scene, "tcp4"));
}

#[test]
fn only_what_can_leave_the_pod_is_held() {
    let mut node = holding(60_000);
    let scene = unclassified(&node);
    let blocked = Expected::new(&HELD, HANGING, 0);
    for command in ["tcp4", "tcp6", "mapped", "tfo", "mptcp", "nonblocking"]
        .into_iter()
        .filter(|command| exists(command))
    {
        node.check(command, &scene, &blocked, || scene.out(command, 8080));
    }
    let raw = || scene.app_as(0).run(&[&"rawsyn", &FAR4, &8080]).unwrap();
    node.check("a raw SYN", &scene, &Expected::new(&HELD, &["EPERM"], 0), raw);
    let local = Expected::new(&[(Counter::Unknown, 1)], &["plain"], 0);
    for to in [Ipv4Addr::LOCALHOST, scene.net.ip4] {
        node.check("on lo", &scene, &local, || scene.app().run(&[&"tcp4", &to, &OWN_PORT]).unwrap());
    }
    let nothing = Expected::new(&[], &["echo"], 0);
    node.check("UDP", &scene, &nothing, || scene.out("udp", 8080));
    node.check("DNS", &scene, &nothing, || scene.out("udp", 53));
    node.check("ping", &scene, &nothing, || scene.app_as(0).run(&[&"ping", &FAR4]).unwrap());
    // Off judges nothing, so it holds nothing; audit still promises that no first packet escapes.
    node.mode(Mode::Audit);
    node.check("audit", &scene, &blocked, || scene.out("tcp4", 8080));
    node.mode(Mode::Off);
    node.check("off", &scene, &Expected::passes(Counter::Unknown), || scene.out("tcp4", 8080));
}

#[test]
fn without_a_hold_unknown_pods_pass_and_are_counted() {
    let mut node = Node::new();
    let scene = unclassified(&node);
    for mode in Mode::ALL {
        node.mode(*mode);
        for command in ["tcp4", "tcp6", "tfo"] {
            node.check(command, &scene, &Expected::passes(Counter::Unknown), || scene.out(command, 8080));
        }
    }
}

/// Starts a connection, classifies its pod once it is held, and measures the whole.
fn classified_while_held(node: &Node, kind: PodKind, command: &str, timeout_ms: u32) -> Seen {
    let mut scene = unclassified(node);
    scene.policy.kind = kind.code();
    let traffic = scene.app().option("timeout-ms", timeout_ms);
    let mut maps = node.machine.maps();
    node.measure(&scene, || {
        std::thread::scope(|scope| {
            let app = scope.spawn(|| traffic.run(&[&command, &FAR4, &8080]).unwrap());
            let held = || maps.counters(scene.id).filter(|counters| count(counters, Counter::Held) > 0);
            wait::until("the hold", wait::HANG, held).unwrap();
            maps.set_policy(scene.id, &scene.policy).unwrap();
            app.join().unwrap()
        })
    })
}

#[test]
fn a_held_connection_is_judged_once_when_its_pod_is_classified() {
    use Counter::{Bypass, BypassDropped, EventsEmitted, NotJudged, WouldDrop};
    let mut node = holding(60_000);
    let with = |more: &[(Counter, u64)]| [&HELD[..], more].concat();
    for command in ["tcp4", "tfo"] {
        node.mode(Mode::Enforce);
        // Two retransmits: the first is the bypass, the second its retry.
        let seen = classified_while_held(&node, PodKind::Meshed, command, 2_500);
        let counted = with(&[(Bypass, 1), (BypassDropped, 1), (EventsEmitted, 1)]);
        Expected::new(&counted, BLOCKED, 0).check("meshed, enforce", &seen);
        node.mode(Mode::Audit);
        let seen = classified_while_held(&node, PodKind::Meshed, command, 20_000);
        let counted = with(&[(Bypass, 1), (WouldDrop, 1), (EventsEmitted, 1)]);
        Expected::new(&counted, &["plain"], 1).check("meshed, audit", &seen);
    }
    let seen = classified_while_held(&node, PodKind::Exempt, "tcp4", 20_000);
    Expected::new(&with(&[(NotJudged, 1)]), &["plain"], 1).check("exempt", &seen);
}

/// Read off the sockets, so that no machine is too slow for it: a tenth of the second that it takes otherwise, and no shorter
/// until it is given up.
#[test]
fn a_held_syn_is_repeated_soon_and_others_as_ever() {
    let mut node = holding(60_000);
    let (held, known) = (unclassified(&node), unclassified(&node));
    let mut policy = known.policy;
    let ask = |scene: &Scene, to: IpAddr, mapped: bool, own: Option<u32>| {
        let mut traffic = scene.app();
        if mapped {
            traffic = traffic.flag("mapped");
        }
        if let Some(own) = own {
            traffic = traffic.option("syn-retries", own);
        }
        let report = traffic.run(&[&"retries", &to, &8080]).unwrap();
        (report.count("rto_us"), report.count("retries"))
    };
    // Nobody is there: an answer would give the socket another time-out.
    let (nobody4, nobody6) =
        (Ipv4Addr::new(10, 66, 250, 250), Ipv6Addr::new(0xfd66, 0, 0, 0, 0, 0, 0, 0xfafa));
    let everywhere = [(IpAddr::from(nobody4), false), (nobody6.into(), false), (nobody4.into(), true)];
    for (to, mapped) in everywhere {
        assert_eq!(ask(&held, to, mapped, None), (100_000, 10), "{to}, mapped: {mapped}");
    }
    // What the application set is what it starts from, where a program can ask for it.
    let own = if kernel_has(6, 1) { 7 } else { 10 };
    assert_eq!(ask(&held, nobody4.into(), false, Some(3)), (100_000, own));
    // A connection within the pod is never held.
    assert_eq!(ask(&held, Ipv4Addr::LOCALHOST.into(), false, None).1, 6);
    for kind in [PodKind::Exempt, PodKind::Meshed] {
        policy.kind = kind.code();
        node.maps.set_policy(known.id, &policy).unwrap();
        for (to, mapped) in everywhere {
            let (rto_us, retries) = ask(&known, to, mapped, None);
            // Enforce aborts the meshed pod's connection, and the time-out with it.
            assert!(rto_us == 1_000_000 || kind == PodKind::Meshed, "{kind:?} {to}: {rto_us}");
            assert_eq!(retries, 6, "{kind:?} {to}, mapped: {mapped}");
        }
    }
    node.mode(Mode::Off);
    assert_eq!(ask(&held, nobody4.into(), false, None).1, 6, "off holds nothing");
}
