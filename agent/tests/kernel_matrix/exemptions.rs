//! What a mesh itself lets out: ports, networks, users and devices.

use std::net::Ipv4Addr;

use nobypass::bpf::maps::Exemptions as Entries;
use nobypass::mesh::{Exemptions, Listed, PortRange, UserPorts};
use nobypass::policy::exempt::{KernelExemptions, entries, port_prefixes};
use nobypass_common::abi::{
    CidrKey, ID_IFINDEX, ID_UID, IdKey, POD_EXEMPT_CIDRS, POD_EXEMPT_IDS, POD_EXEMPT_PORTS, POD_FASTFAIL4,
    POD_INBOUND_DROP, POD_LISTED, POD_PROXY_UID, POD_TPROXY, PodPolicy, PortKey,
};
use nobypass_common::exempt::{ANY_PORT, LIST_EGRESS, LIST_INGRESS};
use nobypass_common::headers::{IPPROTO_TCP, address, address4};
use nobypass_common::ids::{Counter, Mode};
use nobypass_testkit::netns::{FAR4, FAR6};
use nobypass_testkit::redirect::Variant;
use nobypass_testkit::traffic::Report;

use crate::scene::{APP_UID, Expected, Node, OWN_PORT, Scene};

const SET: u32 = 77;
/// A set without entries.
const OTHER: u32 = 78;

/// A node in enforce with a pod that has these flags and uses [`SET`].
fn scene(flags: u32) -> (Node, Scene) {
    let mut node = Node::new();
    let mut scene = node.meshed(Variant::None);
    node.mode(Mode::Enforce);
    node.set(&mut scene, |policy| (policy.flags, policy.exempt_set) = (POD_PROXY_UID | flags, SET));
    (node, scene)
}

fn expected(exempt: bool) -> Expected {
    if exempt { Expected::passes(Counter::Exempt) } else { Expected::plain_bypass(Mode::Enforce) }
}

fn add_range(node: &mut Node, list: u8, first: u16, last: u16) {
    for (port, bits) in port_prefixes(first, last) {
        let key = PortKey::new(SET, IPPROTO_TCP, list, port);
        node.maps.add_exempt_port(bits, key).unwrap();
    }
}

#[test]
fn a_range_of_ports_is_exempt_to_its_edges() {
    let (mut node, mut scene) = scene(POD_EXEMPT_PORTS);
    add_range(&mut node, LIST_EGRESS, 443, 8083);
    for (port, exempt) in [(53, false), (443, true), (8079, true), (8080, true), (8083, true), (8084, false)]
    {
        for command in ["tcp4", "tcp6", "mapped"] {
            let name = format!("{command} to port {port}");
            node.check(&name, &scene, &expected(exempt), || scene.out(command, port));
        }
    }
    // A range for TCP says nothing of UDP, nor one for egress of ingress.
    let quic = Expected::new(&[(Counter::Quic, 1)], &["echo"], 0);
    node.check("UDP", &scene, &quic, || scene.out("udp", 443));
    // The program that refuses at once knows the range too.
    node.set(&mut scene, |policy| policy.flags |= POD_FASTFAIL4);
    node.check("an exempt port, fast fail", &scene, &expected(true), || scene.out("tcp4", 8080));
    let refused = Expected::new(&[(Counter::FastFail, 1)], &["EPERM"], 0);
    node.check("another port, fast fail", &scene, &refused, || scene.out("tcp4", 8084));
    node.set(&mut scene, |policy| policy.flags &= !POD_FASTFAIL4);
    for (mode, want) in
        [(Mode::Off, Expected::passes(Counter::NotJudged)), (Mode::Audit, Expected::passes(Counter::Exempt))]
    {
        node.mode(mode);
        node.check(mode.label(), &scene, &want, || scene.out("tcp4", 8080));
    }
    node.mode(Mode::Enforce);
    node.set(&mut scene, |policy| policy.exempt_set = OTHER);
    node.check("another set", &scene, &expected(false), || scene.out("tcp4", 8080));
    node.set(&mut scene, |policy| (policy.flags, policy.exempt_set) = (POD_PROXY_UID, SET));
    node.check("no flag", &scene, &expected(false), || scene.out("tcp4", 8080));
}

#[test]
fn inbound_ports_are_exempt_on_their_own() {
    let (mut node, scene) = scene(POD_EXEMPT_PORTS | POD_INBOUND_DROP);
    let from_outside = |scene: &Scene| scene.outside().run(&[&"tcp4", &scene.net.ip4, &OWN_PORT]).unwrap();
    add_range(&mut node, LIST_EGRESS, OWN_PORT, OWN_PORT);
    let dropped = [(Counter::InboundBypass, 1), (Counter::InboundDropped, 1), (Counter::EventsEmitted, 1)];
    let dropped = Expected::new(&dropped, &["TIMEOUT"], 0);
    node.check("exempt outbound only", &scene, &dropped, || from_outside(&scene));
    add_range(&mut node, LIST_INGRESS, OWN_PORT, OWN_PORT + 1);
    let fine = Expected::new(&[(Counter::InboundOk, 1)], &["plain"], 0);
    node.check("exempt inbound", &scene, &fine, || from_outside(&scene));
}

#[test]
fn networks_are_exempt_by_longest_prefix() {
    const NEIGHBOUR: Ipv4Addr = Ipv4Addr::new(10, 66, 1, 1);
    let (mut node, mut scene) = scene(POD_EXEMPT_CIDRS);
    scene.world.far().ip(&format!("addr add {NEIGHBOUR}/16 dev br0")).unwrap();
    node.maps.add_exempt_cidr(24, CidrKey::new(SET, LIST_EGRESS, 4, address4([10, 66, 0, 0]))).unwrap();
    let neighbour = || -> Report { scene.app().run(&[&"tcp4", &NEIGHBOUR, &8080]).unwrap() };
    node.check("inside", &scene, &expected(true), || scene.out("tcp4", 8080));
    node.check("inside, mapped", &scene, &expected(true), || scene.out("mapped", 8080));
    node.check("the network beside", &scene, &expected(false), neighbour);
    node.check("another family", &scene, &expected(false), || scene.out("tcp6", 8080));
    node.maps.add_exempt_cidr(128, CidrKey::new(SET, LIST_EGRESS, 6, address(FAR6.octets()))).unwrap();
    node.check("one address of IPv6", &scene, &expected(true), || scene.out("tcp6", 8080));
    node.set(&mut scene, |policy| policy.exempt_set = OTHER);
    node.check("another set", &scene, &expected(false), || scene.out("tcp4", 8080));
}

#[test]
fn users_and_devices_are_exempt() {
    let (mut node, scene) = scene(POD_EXEMPT_IDS | POD_FASTFAIL4);
    node.maps.add_exempt_id(IdKey { set: SET, kind: ID_UID, value: APP_UID + 1 }, ANY_PORT).unwrap();
    let tcp4 = |uid| scene.app_as(uid).run(&[&"tcp4", &FAR4, &8080]).unwrap();
    node.check("the user", &scene, &expected(true), || tcp4(APP_UID + 1));
    // Not refused at once: that hook does not know these exemptions.
    node.check("another user", &scene, &expected(false), || tcp4(APP_UID));
    // "2: eth0@if3: <...>"
    let link = scene.net.ns.check("ip", &["-o", "link", "show", "eth0"], "").unwrap();
    let index: u32 = link.split(':').next().unwrap().parse().unwrap();
    node.maps.add_exempt_id(IdKey { set: SET, kind: ID_IFINDEX, value: index + 1 }, ANY_PORT).unwrap();
    node.check("another device", &scene, &expected(false), || tcp4(APP_UID));
    node.maps.add_exempt_id(IdKey { set: SET, kind: ID_IFINDEX, value: index }, ANY_PORT).unwrap();
    node.check("the device", &scene, &expected(true), || tcp4(APP_UID));
}

/// Exemptions as a mesh has them, in the maps and for the pod.
fn apply(node: &mut Node, scene: &mut Scene, flags: u32, of_mesh: Exemptions) -> Entries {
    let all = entries(SET, &KernelExemptions { of_mesh, devices: Vec::new() });
    node.maps.add_exemptions(&all).unwrap();
    node.set(scene, |policy| policy.flags = POD_PROXY_UID | flags);
    all
}

#[test]
fn only_what_is_listed_is_redirected() {
    let (mut node, mut scene) = scene(0);
    let far4: ipnet::IpNet = format!("{FAR4}/32").parse().unwrap();
    let listed = |ports: &[u16], cidrs: &[ipnet::IpNet]| Exemptions {
        listed: Some(Listed {
            ports: ports.iter().copied().map(PortRange::one).collect(),
            cidrs: cidrs.to_vec(),
        }),
        ..Exemptions::default()
    };
    // What is listed, command, port, whether it is exempt.
    type Row = (&'static str, Exemptions, u32, [(&'static str, u16, bool); 3]);
    let excluded = Exemptions { out_ports: vec![PortRange::one(8083)], ..listed(&[], &[far4]) };
    let table: [Row; 4] = [
        (
            "nothing",
            listed(&[], &[]),
            0,
            [("tcp4", 8080, true), ("tcp6", 8080, true), ("mapped", 8080, true)],
        ),
        (
            "a network",
            listed(&[], &[far4]),
            0,
            [("tcp4", 8080, false), ("mapped", 8080, false), ("tcp6", 8080, true)],
        ),
        (
            "a port",
            listed(&[8083], &[]),
            0,
            [("tcp4", 8083, false), ("tcp6", 8083, false), ("tcp4", 8080, true)],
        ),
        (
            "a network but for a port",
            excluded,
            POD_EXEMPT_PORTS,
            [("tcp4", 8080, false), ("tcp4", 8083, true), ("tcp6", 8083, true)],
        ),
    ];
    for (name, of_mesh, flags, tries) in table {
        for fast in [0, POD_FASTFAIL4] {
            let all = apply(&mut node, &mut scene, POD_LISTED | flags | fast, of_mesh.clone());
            for (command, port, exempt) in tries {
                let mut want = expected(exempt);
                // IPv6 has no fast refusal here.
                if !exempt && fast != 0 && command != "tcp6" {
                    want = Expected::new(&[(Counter::FastFail, 1)], &["EPERM"], 0);
                }
                node.check(&format!("{name}: {command} {port} {fast}"), &scene, &want, || {
                    scene.out(command, port)
                });
            }
            node.maps.remove_exemptions(&all).unwrap();
        }
    }
    node.set(&mut scene, |policy| policy.flags = POD_PROXY_UID);
    node.check("no flag", &scene, &expected(false), || scene.out("tcp4", 8080));
}

#[test]
fn a_user_is_exempt_on_some_ports() {
    let (mut node, mut scene) = scene(0);
    let user =
        |uids, ports: &[u16]| UserPorts { uids, ports: ports.iter().copied().map(PortRange::one).collect() };
    let of_mesh = Exemptions {
        uids: vec![3000],
        user_ports: vec![user((2000, 2001), &[8080]), user((2001, 2001), &[8083]), user((4000, 4000), &[])],
        ..Exemptions::default()
    };
    apply(&mut node, &mut scene, POD_EXEMPT_IDS, of_mesh);
    for (uid, port, exempt) in [
        (2000, 8080, true),
        (2000, 8083, false),
        (2001, 8080, true),
        (2001, 8083, true),
        (2001, 8084, false),
        (2002, 8080, false),
        (3000, 8084, true),
        (4000, 8084, true),
    ] {
        let run = || scene.app_as(uid).run(&[&"tcp4", &FAR4, &port]).unwrap();
        node.check(&format!("user {uid}, port {port}"), &scene, &expected(exempt), run);
    }
}

#[test]
fn an_inbound_source_is_exempt() {
    let (mut node, mut scene) = scene(0);
    let from_outside = |scene: &Scene| scene.outside().run(&[&"tcp4", &scene.net.ip4, &OWN_PORT]).unwrap();
    let source =
        |text: String| Exemptions { in_sources: vec![text.parse().unwrap()], ..Exemptions::default() };
    let all =
        apply(&mut node, &mut scene, POD_EXEMPT_CIDRS | POD_INBOUND_DROP, source("203.0.113.0/24".into()));
    let dropped = [(Counter::InboundBypass, 1), (Counter::InboundDropped, 1), (Counter::EventsEmitted, 1)];
    let dropped = Expected::new(&dropped, &["TIMEOUT"], 0);
    node.check("another source", &scene, &dropped, || from_outside(&scene));
    node.maps.remove_exemptions(&all).unwrap();
    apply(&mut node, &mut scene, POD_EXEMPT_CIDRS | POD_INBOUND_DROP, source(format!("{FAR4}/32")));
    let fine = Expected::new(&[(Counter::InboundOk, 1)], &["plain"], 0);
    node.check("the source", &scene, &fine, || from_outside(&scene));
    // A source says nothing of destinations.
    node.check("outbound", &scene, &expected(false), || scene.out("tcp4", 8080));
}

/// A pod that can mark packets and set routes sends a marked SYN to lo: a proof only where the mesh redirects so.
#[test]
fn a_mark_proves_nothing_to_a_mesh_without_tproxy() {
    let mut node = Node::new();
    let mut scene = node.meshed(Variant::Tproxy);
    let as_tproxy = scene.policy.flags;
    for (flags, counter) in [(as_tproxy, Counter::RedirectProof), (as_tproxy & !POD_TPROXY, Counter::Local)] {
        node.set(&mut scene, |policy| policy.flags = flags);
        let expected = Expected::new(&[(counter, 1), (Counter::Proxy, 1)], &["mesh"], 1);
        node.check(&format!("flags {flags:#x}"), &scene, &expected, || scene.out("tcp4", 8080));
    }
}

/// A thousand networks, shared by all pods that have the same ones; and a map that is full says so.
#[test]
fn thousands_of_networks() {
    const NETWORKS: u32 = 1000;
    const SETS: u32 = 20;
    let (mut node, mut scene) = scene(0);
    let nets = |salt: u32| -> Vec<ipnet::IpNet> {
        let host = |n: u32| Ipv4Addr::from(0x0b00_0000 + salt * 65_536 + n * 32);
        (0..NETWORKS).map(|n| format!("{}/27", host(n)).parse().unwrap()).collect()
    };
    let of_set = |salt, more: &[&str]| {
        let mut out_cidrs = nets(salt);
        out_cidrs.extend(more.iter().map(|net| net.parse::<ipnet::IpNet>().unwrap()));
        KernelExemptions { of_mesh: Exemptions { out_cidrs, ..Exemptions::default() }, devices: Vec::new() }
    };
    for salt in 1..SETS {
        node.maps.add_exemptions(&entries(SET + salt, &of_set(salt, &[]))).unwrap();
    }
    let far = format!("{FAR4}/32");
    let ours = of_set(0, &[]);
    node.maps.add_exemptions(&entries(SET, &ours)).unwrap();
    let policy = |policy: &mut PodPolicy| policy.flags = POD_PROXY_UID | POD_EXEMPT_CIDRS;
    node.set(&mut scene, policy);
    node.check("none of a thousand", &scene, &expected(false), || scene.out("tcp4", 8080));
    let with_far = entries(SET, &of_set(0, &[&far]));
    node.maps.add_exemptions(&with_far).unwrap();
    node.check("one of a thousand and one", &scene, &expected(true), || scene.out("tcp4", 8080));
    node.maps.remove_exemptions(&with_far).unwrap();
    node.check("removed", &scene, &expected(false), || scene.out("tcp4", 8080));
    let sets = node.maps.exempt_sets();
    assert!(!sets.contains(&SET) && sets.contains(&(SET + 1)), "{sets:?}");
    let mut salt = SETS;
    let error = loop {
        match node.maps.add_exemptions(&entries(SET + salt, &of_set(salt, &[]))) {
            Ok(()) => salt += 1,
            Err(error) => break error,
        }
        assert!(salt < 200, "the map never gets full");
    };
    assert!(error.to_string().contains("EXEMPT_CIDRS"), "{error}");
}
