//! Whose connection it is, whatever the kubelet's cgroup driver and the pod's QoS class.

use nobypass_common::ids::{Counter, Mode, PodKind};
use nobypass_testkit::cgroup::{Driver, Qos, Scratch};
use nobypass_testkit::netns::FAR4;
use nobypass_testkit::redirect::Variant;
use nobypass_testkit::traffic::Traffic;

use crate::scene::{Expected, Node, Scene};
use crate::support::machine::Machine;

fn every_depth(driver: Driver) {
    let mut machine = Machine::new();
    machine.scratch = Scratch::with(driver).unwrap();
    let mut node = Node::start(machine, &["--mode", "enforce"]);
    let bypass = Expected::plain_bypass(Mode::Enforce);
    let nothing = Expected::new(&[], &["plain"], 1);
    let mut earlier: Option<Scene> = None;
    for qos in [Qos::Guaranteed, Qos::Burstable, Qos::BestEffort] {
        let mut scene = Scene::new(&node, qos, Variant::None);
        node.set(&mut scene, |_| {});
        let nested = scene.app.child("init").unwrap().child("below").unwrap();
        let nested_proxy = scene.proxy.child("init").unwrap();
        let sibling = scene.pod.container(&"c".repeat(64)).unwrap();
        for (name, cgroup, expected) in [
            ("the app's container", &scene.app, &bypass),
            ("a cgroup two below it", &nested, &bypass),
            ("another container", &sibling, &bypass),
            ("the pod's own cgroup", &*scene.pod, &bypass),
            ("the proxy's container", &scene.proxy, &Expected::passes(Counter::Proxy)),
            ("a cgroup below it", &nested_proxy, &Expected::passes(Counter::Proxy)),
        ] {
            let name = format!("{driver:?}, {qos:?}: {name}");
            let tcp4 = || scene.in_cgroup(cgroup).run(&[&"tcp4", &FAR4, &8080]).unwrap();
            node.check(&name, &scene, expected, tcp4);
        }
        // Other pods go their own way. The agent looks for a pod's socket in the pod's network, where this one is not.
        if let Some(other) = &earlier {
            let tcp4 = || scene.in_cgroup(&other.app).run(&[&"tcp4", &FAR4, &8080]).unwrap();
            let blocked = Expected { saw: crate::scene::HANGING, outside: 0, ..nothing.clone() };
            node.check("another pod's connection", &scene, &blocked, tcp4);
        }
        earlier = Some(scene);
    }
}

#[test]
fn pods_of_the_cgroupfs_driver_are_found_at_every_depth() {
    every_depth(Driver::Cgroupfs);
}

#[test]
fn pods_of_the_systemd_driver_are_found_at_every_depth() {
    every_depth(Driver::Systemd);
}

/// As after a packet that came before the tracepoints, or with a full map.
#[test]
fn a_pod_without_an_entry_gets_one_by_its_first_packet() {
    for driver in [Driver::Cgroupfs, Driver::Systemd] {
        let mut machine = Machine::new();
        machine.scratch = Scratch::with(driver).unwrap();
        let mut node = Node::start(machine, &["--mode", "enforce"]);
        let scenes = [Qos::Guaranteed, Qos::Burstable].map(|qos| Scene::new(&node, qos, Variant::None));
        // It would put the entry back before the packet can.
        node.agent.take().unwrap().kill();
        for scene in scenes {
            node.maps.forget(scene.id).unwrap();
            let unknown = Expected::passes(Counter::Unknown);
            let tcp4 = || scene.in_cgroup(&scene.app).run(&[&"tcp4", &FAR4, &8080]).unwrap();
            node.check(&format!("{driver:?}"), &scene, &unknown, tcp4);
            let entry = node.maps.policy(scene.id).unwrap();
            assert_eq!((entry.kind, entry.level), (PodKind::Unknown.code(), scene.policy.level));
        }
    }
}

#[test]
fn what_is_no_pod_is_neither_counted_nor_dropped() {
    let mut node = Node::new();
    let scene = node.meshed(Variant::None);
    node.mode(Mode::Enforce);
    let before = node.maps.totals().unwrap().count;
    let burstable = scene.pod.path().parent().unwrap();
    let scratch = &node.machine.scratch;
    for dir in [burstable, &scratch.kubepods(), scratch.top()] {
        let traffic = Traffic::new().netns(&scene.net.ns).option("cgroup", dir.display());
        let expected = Expected::new(&[], &["plain"], 1);
        let tcp4 = || traffic.run(&[&"tcp4", &FAR4, &8080]).unwrap();
        node.check(&dir.display().to_string(), &scene, &expected, tcp4);
    }
    assert_eq!(node.maps.totals().unwrap().count, before);
}
