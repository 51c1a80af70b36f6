//! Whose connection it is, whatever the kubelet's cgroup driver and the pod's QoS class.

use nobypass_common::ids::{Counter, Mode};
use nobypass_testkit::cgroup::{Driver, Qos, Scratch};
use nobypass_testkit::netns::FAR4;
use nobypass_testkit::redirect::Variant;

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
        // Other pods go their own way.
        if let Some(other) = &earlier {
            let tcp4 = || scene.in_cgroup(&other.app).run(&[&"tcp4", &FAR4, &8080]).unwrap();
            let blocked = Expected { saw: crate::scene::BLOCKED, outside: 0, ..nothing.clone() };
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
