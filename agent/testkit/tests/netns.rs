//! Namespaces are separate, reachable, and gone afterwards.

use std::io::Read;
use std::net::{IpAddr, TcpListener, TcpStream};

use nobypass_testkit::netns::{FAR4, FAR6, Netns, world_with_pod};

#[test]
fn a_pod_reaches_the_outside_over_both_families() {
    let (world, pod) = world_with_pod("reach").unwrap();
    world.count_syns().unwrap();
    for (far, near) in [(IpAddr::from(FAR4), IpAddr::from(pod.ip4)), (FAR6.into(), pod.ip6.into())] {
        let listener = world.far().run_in(|| TcpListener::bind((far, 8080))).unwrap().unwrap();
        let sent_before = pod.ns.tx_packets("eth0").unwrap();
        let client = pod.ns.run_in(|| TcpStream::connect((far, 8080))).unwrap().unwrap();
        let (mut served, peer) = listener.accept().unwrap();
        assert_eq!(peer.ip(), near);
        drop(client);
        assert_eq!(served.read(&mut [0]).unwrap(), 0);
        assert!(pod.ns.tx_packets("eth0").unwrap() > sent_before);
    }
    assert_eq!(world.syns().unwrap(), 2);
}

#[test]
fn a_namespace_ends_with_its_guard() {
    let ns = Netns::new("gone").unwrap();
    let inode = ns.inode().unwrap();
    assert_ne!(inode, Netns::of_pid(std::process::id()).unwrap().inode().unwrap());
    let path = ns.path();
    drop(ns);
    // The descriptor's number may have been taken by something else meanwhile, but not by this namespace.
    assert!(
        std::fs::metadata(path).map_or(true, |found| std::os::unix::fs::MetadataExt::ino(&found) != inode)
    );
}

#[test]
fn a_panic_inside_comes_out() {
    let ns = Netns::new("panic").unwrap();
    let caught = std::panic::catch_unwind(|| ns.run_in(|| panic!("inside")));
    assert!(caught.is_err());
}
