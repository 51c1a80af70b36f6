//! What a mesh itself lets out: ports, networks, users and devices.

use std::net::Ipv4Addr;

use nobypass::policy::exempt::port_prefixes;
use nobypass_common::abi::{
    CidrKey, ID_IFINDEX, ID_UID, IdKey, POD_EXEMPT_CIDRS, POD_EXEMPT_IDS, POD_EXEMPT_PORTS, POD_FASTFAIL4,
    POD_INBOUND_DROP, POD_PROXY_UID, PortKey,
};
use nobypass_common::headers::{IPPROTO_TCP, address, address4};
use nobypass_common::ids::{Counter, Hook, Mode};
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

fn add_range(node: &mut Node, hook: Hook, first: u16, last: u16) {
    for (port, bits) in port_prefixes(first, last) {
        let key = PortKey::new(SET, IPPROTO_TCP, u8::try_from(hook.code()).unwrap(), port);
        node.maps.add_exempt_port(bits, key).unwrap();
    }
}

#[test]
fn a_range_of_ports_is_exempt_to_its_edges() {
    let (mut node, mut scene) = scene(POD_EXEMPT_PORTS);
    add_range(&mut node, Hook::Egress, 443, 8083);
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
    add_range(&mut node, Hook::Egress, OWN_PORT, OWN_PORT);
    let dropped = [(Counter::InboundBypass, 1), (Counter::InboundDropped, 1), (Counter::EventsEmitted, 1)];
    let dropped = Expected::new(&dropped, &["TIMEOUT"], 0);
    node.check("exempt outbound only", &scene, &dropped, || from_outside(&scene));
    add_range(&mut node, Hook::Ingress, OWN_PORT, OWN_PORT + 1);
    let fine = Expected::new(&[(Counter::InboundOk, 1)], &["plain"], 0);
    node.check("exempt inbound", &scene, &fine, || from_outside(&scene));
}

#[test]
fn networks_are_exempt_by_longest_prefix() {
    const NEIGHBOUR: Ipv4Addr = Ipv4Addr::new(10, 66, 1, 1);
    let (mut node, mut scene) = scene(POD_EXEMPT_CIDRS);
    scene.world.far().ip(&format!("addr add {NEIGHBOUR}/16 dev br0")).unwrap();
    node.maps.add_exempt_cidr(24, CidrKey::new(SET, 4, address4([10, 66, 0, 0]))).unwrap();
    let neighbour = || -> Report { scene.app().run(&[&"tcp4", &NEIGHBOUR, &8080]).unwrap() };
    node.check("inside", &scene, &expected(true), || scene.out("tcp4", 8080));
    node.check("inside, mapped", &scene, &expected(true), || scene.out("mapped", 8080));
    node.check("the network beside", &scene, &expected(false), neighbour);
    node.check("another family", &scene, &expected(false), || scene.out("tcp6", 8080));
    node.maps.add_exempt_cidr(128, CidrKey::new(SET, 6, address(FAR6.octets()))).unwrap();
    node.check("one address of IPv6", &scene, &expected(true), || scene.out("tcp6", 8080));
    node.set(&mut scene, |policy| policy.exempt_set = OTHER);
    node.check("another set", &scene, &expected(false), || scene.out("tcp4", 8080));
}

#[test]
fn users_and_devices_are_exempt() {
    let (mut node, scene) = scene(POD_EXEMPT_IDS | POD_FASTFAIL4);
    node.maps.add_exempt_id(IdKey { set: SET, kind: ID_UID, value: APP_UID + 1 }).unwrap();
    let tcp4 = |uid| scene.app_as(uid).run(&[&"tcp4", &FAR4, &8080]).unwrap();
    node.check("the user", &scene, &expected(true), || tcp4(APP_UID + 1));
    // Not refused at once: that hook does not know these exemptions.
    node.check("another user", &scene, &expected(false), || tcp4(APP_UID));
    // "2: eth0@if3: <...>"
    let link = scene.net.ns.check("ip", &["-o", "link", "show", "eth0"], "").unwrap();
    let index: u32 = link.split(':').next().unwrap().parse().unwrap();
    node.maps.add_exempt_id(IdKey { set: SET, kind: ID_IFINDEX, value: index + 1 }).unwrap();
    node.check("another device", &scene, &expected(false), || tcp4(APP_UID));
    node.maps.add_exempt_id(IdKey { set: SET, kind: ID_IFINDEX, value: index }).unwrap();
    node.check("the device", &scene, &expected(true), || tcp4(APP_UID));
}
