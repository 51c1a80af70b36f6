//! What a pod's own policy changes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use nobypass_common::abi::{
    POD_FASTFAIL4, POD_FASTFAIL6, POD_GAP_DROP, POD_GAP4, POD_GAP6, POD_INBOUND_DROP, POD_NON_TCP_DROP,
    POD_PROXY_UID, POD_QUIC_DROP,
};
use nobypass_common::headers::address4;
use nobypass_common::ids::{Counter, MODE_INHERIT, Mode};
use nobypass_testkit::netns::{FAR4, FAR6};
use nobypass_testkit::redirect::Variant;
use nobypass_testkit::traffic::Report;

use crate::scene::{Expected, HANGING, Node, OWN_PORT, PATIENCE_MS, Scene, exists};
use crate::support::machine::Machine;

const PLAIN: &[&str] = &["plain"];
const LOCALHOST4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const LOCALHOST6: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

#[test]
fn a_family_gap_is_its_own_reason_and_dropped_only_when_asked() {
    let mut node = Node::new();
    let mut scene = node.meshed(Variant::None);
    for mode in [Mode::Off, Mode::Audit, Mode::Enforce] {
        node.mode(mode);
        for (gap, inside, other) in [(POD_GAP4, "tcp4", "tcp6"), (POD_GAP6, "tcp6", "tcp4")] {
            let passes = match mode {
                Mode::Off => Expected::passes(Counter::NotJudged),
                _ => Expected::new(&[(Counter::FamilyGap, 1), (Counter::EventsEmitted, 1)], PLAIN, 1),
            };
            let drops = Expected::bypass(Counter::FamilyGap, Counter::FamilyGapDropped, mode, PLAIN);
            for (flags, expected) in [(gap, passes), (gap | POD_GAP_DROP, drops)] {
                node.set(&mut scene, |policy| policy.flags = POD_PROXY_UID | flags);
                let name = format!("{inside}, flags {flags:#x}, {}", mode.label());
                node.check(&name, &scene, &expected, || scene.out(inside, 8080));
                let name = format!("{other}, flags {flags:#x}, {}", mode.label());
                node.check(&name, &scene, &Expected::plain_bypass(mode), || scene.out(other, 8080));
            }
        }
    }
}

#[test]
fn a_pods_mode_goes_before_the_nodes() {
    let mut node = Node::new();
    let mut scene = node.meshed(Variant::None);
    for of_node in Mode::ALL {
        node.mode(*of_node);
        let inherit = (MODE_INHERIT, *of_node);
        for (of_pod, effective) in Mode::ALL.iter().map(|mode| (mode.code(), *mode)).chain([inherit]) {
            node.set(&mut scene, |policy| policy.mode = of_pod);
            let name = format!("node {}, pod {of_pod}", of_node.label());
            node.check(&name, &scene, &Expected::plain_bypass(effective), || scene.out("tcp4", 8080));
        }
    }
}

/// Port, flags, counter, whether it is dropped.
const DATAGRAMS: [(u16, u32, Counter, bool); 9] = [
    (8080, 0, Counter::Udp, false),
    (8080, POD_QUIC_DROP, Counter::Udp, false),
    (8080, POD_NON_TCP_DROP, Counter::Udp, true),
    (443, 0, Counter::Quic, false),
    (443, POD_QUIC_DROP, Counter::Quic, true),
    (443, POD_NON_TCP_DROP, Counter::Quic, true),
    (53, POD_QUIC_DROP, Counter::Dns, false),
    (53, POD_NON_TCP_DROP, Counter::Dns, false),
    (53, POD_NON_TCP_DROP | POD_QUIC_DROP, Counter::Dns, false),
];

#[test]
fn datagrams_are_dropped_by_their_own_switches() {
    let mut node = Node::new();
    let mut scene = node.meshed(Variant::None);
    for (port, flags, counter, drops) in DATAGRAMS {
        node.set(&mut scene, |policy| policy.flags = POD_PROXY_UID | flags);
        for mode in [Mode::Off, Mode::Audit, Mode::Enforce] {
            node.mode(mode);
            let expected = match mode {
                Mode::Off => Expected::new(&[], &["echo"], 0),
                Mode::Audit if drops => Expected::new(&[(counter, 1), (Counter::WouldDrop, 1)], &["echo"], 0),
                Mode::Enforce if drops => {
                    Expected::new(&[(counter, 1), (Counter::NonTcpDropped, 1)], &["EPERM"], 0)
                }
                _ => Expected::new(&[(counter, 1)], &["echo"], 0),
            };
            let name = |how| format!("{how} port {port}, flags {flags:#x}, {}", mode.label());
            let udp = |traffic: nobypass_testkit::traffic::Traffic, to: IpAddr| {
                traffic.run(&[&"udp", &to, &port]).unwrap()
            };
            node.check(&name("v4"), &scene, &expected, || udp(scene.app(), FAR4.into()));
            node.check(&name("v6"), &scene, &expected, || udp(scene.app(), FAR6.into()));
            let connected = || udp(scene.app().flag("connected"), FAR4.into());
            node.check(&name("connected"), &scene, &expected, connected);
            let counted: &[_] = if mode == Mode::Off { &[] } else { &[(counter, 1)] };
            let passes = Expected::new(counted, &["echo"], 0);
            node.check(&name("the proxy's"), &scene, &passes, || udp(scene.sidecar(), FAR4.into()));
        }
    }
    // Neither ICMP nor what stays in the pod is any of their business.
    for to in [IpAddr::from(FAR4), FAR6.into()] {
        let ping = || scene.app_as(0).run(&[&"ping", &to]).unwrap();
        node.check("ping", &scene, &Expected::new(&[], &["echo"], 0), ping);
    }
    for to in [LOCALHOST4, LOCALHOST6, scene.net.ip4.into()] {
        let udp = || scene.app().run(&[&"udp", &to, &OWN_PORT]).unwrap();
        node.check("on lo", &scene, &Expected::new(&[], &["echo"], 0), udp);
    }
}

/// Command, and whether `POD_FASTFAIL4` and `POD_FASTFAIL6` refuse it.
const CONNECTS: [(&str, bool, bool); 7] = [
    ("tcp4", true, false),
    ("mapped", true, false),
    ("nonblocking", true, false),
    ("tfo", true, false),
    ("closed", true, false),
    ("tcp6", false, true),
    ("mptcp", true, false),
];

#[test]
fn fast_fail_refuses_the_confirmed_family_at_once() {
    let mut node = Node::new();
    let mut scene = node.meshed(Variant::None);
    let refused = Expected::new(&[(Counter::FastFail, 1)], &["EPERM"], 0);
    for (flag, v4) in [(POD_FASTFAIL4, true), (POD_FASTFAIL6, false)] {
        node.set(&mut scene, |policy| policy.flags = POD_PROXY_UID | flag);
        for mode in [Mode::Off, Mode::Audit, Mode::Enforce] {
            node.mode(mode);
            for (command, by4, by6) in CONNECTS.into_iter().filter(|(command, ..)| exists(command)) {
                let saw: &[&str] = if command == "closed" { &["refused"] } else { PLAIN };
                let mut expected = Expected::bypass(Counter::Bypass, Counter::BypassDropped, mode, saw);
                let fails = if v4 { by4 } else { by6 };
                if mode == Mode::Enforce && fails {
                    expected = refused.clone();
                } else if mode == Mode::Enforce && command == "tfo" {
                    expected.counted.insert(Counter::Retry.label(), 1);
                }
                let port = if command == "closed" { crate::scene::CLOSED } else { 8080 };
                let name = format!("{command}, flag {flag}, {}", mode.label());
                node.check(&name, &scene, &expected, || scene.out(command, port));
            }
        }
    }
    node.set(&mut scene, |policy| policy.flags = POD_PROXY_UID | POD_FASTFAIL4 | POD_FASTFAIL6);
    for (command, to) in [("tcp4", LOCALHOST4), ("mapped", LOCALHOST4), ("tcp6", LOCALHOST6)] {
        let local = || scene.app().run(&[&command, &to, &OWN_PORT]).unwrap();
        node.check("loopback", &scene, &Expected::new(&[(Counter::Local, 1)], PLAIN, 0), local);
    }
    for to in [IpAddr::from(FAR4), FAR6.into()] {
        let command = if to.is_ipv4() { "tcp4" } else { "tcp6" };
        let upstream = || scene.sidecar().run(&[&command, &to, &8080]).unwrap();
        node.check("the proxy", &scene, &Expected::passes(Counter::Proxy), upstream);
        let own_uid = || scene.app_as(scene.proxy_uid).run(&[&command, &to, &8080]).unwrap();
        node.check("the proxy's UID in the app", &scene, &refused, own_uid);
        let udp = || scene.app().flag("connected").run(&[&"udp", &to, &8080]).unwrap();
        node.check("UDP", &scene, &Expected::new(&[(Counter::Udp, 1)], &["echo"], 0), udp);
    }
    // Nothing is refused before the agent knows which container the proxy is.
    node.set(&mut scene, |policy| policy.proxy_cgroup = 0);
    node.check("no proxy known", &scene, &Expected::plain_bypass(Mode::Enforce), || scene.out("tcp4", 8080));
}

fn inbound(scene: &Scene, command: &str) -> Report {
    let to: IpAddr = if command == "tcp6" { scene.net.ip6.into() } else { scene.net.ip4.into() };
    scene.outside().run(&[&command, &to, &OWN_PORT]).unwrap()
}

#[test]
fn inbound_bypasses_are_dropped_only_when_asked() {
    use Counter::{EventsEmitted, InboundBypass, InboundDropped, InboundOk, WouldDrop};
    let mut node = Node::new();
    let mut scene = node.meshed(Variant::None);
    node.set(&mut scene, |policy| policy.flags |= POD_INBOUND_DROP);
    for (mode, counted, saw) in [
        (Mode::Off, vec![], PLAIN),
        (Mode::Audit, vec![(InboundBypass, 1), (WouldDrop, 1), (EventsEmitted, 1)], PLAIN),
        (Mode::Enforce, vec![(InboundBypass, 1), (InboundDropped, 1), (EventsEmitted, 1)], HANGING),
    ] {
        node.mode(mode);
        for command in ["tcp4", "tcp6"] {
            let name = format!("inbound {command}, {}", mode.label());
            node.check(&name, &scene, &Expected::new(&counted, saw, 0), || inbound(&scene, command));
        }
    }
    // The agent refreshes the node's addresses; without it, the outside is the node.
    node.agent.take().unwrap().kill();
    node.maps.set_node_addresses(&[address4(FAR4.octets())]).unwrap();
    let fine = Expected::new(&[(InboundOk, 1)], PLAIN, 0);
    node.check("from the node", &scene, &fine, || inbound(&scene, "tcp4"));
    let dropped = [(InboundBypass, 1), (InboundDropped, 1), (EventsEmitted, 1)];
    node.check("not from the node", &scene, &Expected::new(&dropped, HANGING, 0), || inbound(&scene, "tcp6"));
    node.set(&mut scene, |policy| policy.proxy_cgroup = 0);
    node.check("the proxy is not known", &scene, &fine, || inbound(&scene, "tcp6"));
}

#[test]
fn until_its_container_is_known_the_proxys_uid_is_the_proxy() {
    let mut node = Node::new();
    let mut scene = node.meshed(Variant::None);
    node.mode(Mode::Enforce);
    node.set(&mut scene, |policy| policy.proxy_cgroup = 0);
    let tcp4 = |uid| scene.app_as(uid).run(&[&"tcp4", &FAR4, &8080]).unwrap();
    node.check("its UID", &scene, &Expected::passes(Counter::Proxy), || tcp4(scene.proxy_uid));
    node.check("another", &scene, &Expected::plain_bypass(Mode::Enforce), || tcp4(scene.proxy_uid + 1));
}

#[test]
fn a_retransmit_is_no_second_bypass() {
    let mut node = Node::start(Machine::new(), &["--refusal", "hang"]);
    let scene = node.meshed(Variant::None);
    node.mode(Mode::Enforce);
    for command in ["tcp4", "tcp6", "tfo", "mptcp"].into_iter().filter(|command| exists(command)) {
        let patient = || scene.app().option("timeout-ms", 1300 + PATIENCE_MS);
        let seen = node
            .measure_all(&scene, || patient().run(&[&command, &crate::scene::far(command), &8080]).unwrap());
        let mut counted = seen.counted.clone();
        let retries = counted.remove(Counter::Retry.label()).unwrap_or(0);
        assert!(retries > 0, "{command}: {seen:?}");
        let seen = crate::scene::Seen { counted, ..seen };
        let hanging = Expected { saw: HANGING, ..Expected::plain_bypass(Mode::Enforce) };
        hanging.check(command, &seen);
    }
}
