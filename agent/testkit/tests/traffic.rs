//! Each variant of rules really redirects, and each kind of traffic sees what it should.

#![expect(clippy::unwrap_used, reason = "the helpers of a test may panic as the test may")]

use std::net::IpAddr;

use nobypass_testkit::cgroup::{Qos, Scratch};
use nobypass_testkit::netns::{FAR4, FAR6, PodNet, World, world_with_pod};
use nobypass_testkit::redirect::{Variant, apply_redirect, clear_redirect};
use nobypass_testkit::traffic::{Running, Traffic};

const APP: u32 = 1000;

fn scene(name: &str) -> (World, PodNet, Running) {
    let (world, pod) = world_with_pod(name).unwrap();
    let server = Traffic::new().netns(world.far()).server(&[8080]).unwrap();
    (world, pod, server)
}

fn app(pod: &PodNet) -> Traffic {
    Traffic::new().netns(&pod.ns).uid(APP)
}

#[test]
fn every_variant_redirects_what_it_says() {
    for variant in Variant::ALL {
        let (_world, pod, mut server) = scene("variants");
        apply_redirect(&pod.ns, variant).unwrap();
        let mut proxy = Traffic::new().netns(&pod.ns).proxy(variant).unwrap();
        let (v4, v6) = match variant {
            Variant::None => ("plain", "plain"),
            Variant::V4Only => ("mesh", "plain"),
            _ => ("mesh", "mesh"),
        };
        let tries: [(&str, IpAddr, &str); 6] = [
            ("tcp4", FAR4.into(), v4),
            ("mapped", FAR4.into(), v4),
            ("tfo", FAR4.into(), v4),
            ("mptcp", FAR4.into(), v4),
            ("tcp6", FAR6.into(), v6),
            ("nonblocking", FAR6.into(), v6),
        ];
        for (command, to, want) in tries {
            let got = app(&pod).run(&[&command, &to, &8080]).unwrap();
            assert_eq!(got.saw(), want, "{variant:?} {command}: {got}");
        }
        let through_proxy = tries.iter().filter(|(_, _, want)| *want == "mesh").count() as u64;
        assert_eq!(proxy.stats().unwrap().count("accepted"), through_proxy, "{variant:?}");
        let outside = server.stats().unwrap();
        assert_eq!(outside.count("tcp_mesh"), through_proxy, "{variant:?}: {outside}");
        assert_eq!(outside.count("tcp_plain"), 6 - through_proxy, "{variant:?}: {outside}");
    }
}

#[test]
fn inbound_goes_through_the_proxy_too() {
    for variant in Variant::ALL {
        let (world, pod, _server) = scene("inbound");
        let _app = app(&pod).server(&[9000]).unwrap();
        apply_redirect(&pod.ns, variant).unwrap();
        let _proxy = Traffic::new().netns(&pod.ns).proxy(variant).unwrap();
        let want = if variant == Variant::None { "plain" } else { "mesh" };
        let from_far = Traffic::new().netns(world.far());
        let got = from_far.run(&[&"tcp4", &pod.ip4, &9000]).unwrap();
        assert_eq!(got.saw(), want, "{variant:?}: {got}");
        let want = if variant == Variant::V4Only { "plain" } else { want };
        let got = from_far.run(&[&"tcp6", &pod.ip6, &9000]).unwrap();
        assert_eq!(got.saw(), want, "{variant:?}: {got}");
    }
}

#[test]
fn clearing_the_rules_brings_plain_traffic_back() {
    for variant in Variant::ALL {
        let (_world, pod, _server) = scene("clear");
        for round in 0..2 {
            apply_redirect(&pod.ns, variant).unwrap();
            let refused = app(&pod).option("timeout-ms", 300).run(&[&"tcp4", &FAR4, &8080]).unwrap();
            // Rules without a proxy fail closed.
            let want = match variant {
                Variant::None => "plain",
                Variant::Tproxy => "TIMEOUT",
                _ => "ECONNREFUSED",
            };
            assert_eq!(refused.saw(), want, "{variant:?} round {round}: {refused}");
            clear_redirect(&pod.ns).unwrap();
            assert_eq!(app(&pod).run(&[&"tcp4", &FAR4, &8080]).unwrap().saw(), "plain", "{variant:?}");
        }
    }
}

#[test]
fn other_protocols_and_raw_packets_reach_the_outside() {
    let (world, pod, mut server) = scene("raw");
    world.count_syns().unwrap();
    let root = Traffic::new().netns(&pod.ns);
    for to in [IpAddr::from(FAR4), FAR6.into()] {
        assert_eq!(root.run(&[&"ping", &to]).unwrap().saw(), "echo");
        assert_eq!(root.run(&[&"rawsyn", &to, &8080]).unwrap().saw(), "synack");
        assert_eq!(root.run(&[&"rawsyn", &to, &8081]).unwrap().saw(), "rst");
        for udp in [app(&pod), app(&pod).flag("connected")] {
            let report = udp.run(&[&"udp", &to, &8080, &3]).unwrap();
            assert_eq!((report.count("sent"), report.count("echoed")), (3, 3), "{report}");
        }
        assert_eq!(app(&pod).run(&[&"closed", &to, &8081]).unwrap().saw(), "refused");
    }
    assert_eq!(root.clone().flag("hdrincl").run(&[&"rawsyn", &FAR4, &8080]).unwrap().saw(), "synack");
    assert_eq!(root.run(&[&"afpacket", &FAR4, &8080]).unwrap().saw(), "synack");
    assert_eq!(server.stats().unwrap().count("udp"), 12);
    // Per family two raw SYNs and one to a closed port; one with its own header; one by a packet socket.
    assert_eq!(world.syns().unwrap(), 8);
}

#[test]
fn a_held_connection_tells_how_it_ended() {
    let (world, pod, server) = scene("hold");
    let held = app(&pod).spawn(&[&"hold", &FAR4, &8080]).unwrap();
    assert_eq!(held.ready.answer(), Some("plain"));
    let report = held.finish().unwrap();
    assert!(report.ok() && report.count("connect_us") > 0, "{report}");
    let mut held = app(&pod).spawn(&[&"hold", &FAR4, &8080]).unwrap();
    drop(server);
    let report = held.report().unwrap();
    assert!(matches!(report.errno(), Some("EOF" | "ECONNRESET" | "EPIPE")), "{report}");
    drop(world);
}

#[test]
fn a_flood_counts_what_it_started() {
    let (world, pod, mut server) = scene("flood");
    world.count_syns().unwrap();
    let report = app(&pod)
        .option("parallel", 2)
        .option("wait-ms", 5000)
        .run(&[&"flood", &FAR4, &8080, &2000])
        .unwrap();
    for name in ["attempts", "started", "established"] {
        assert_eq!(report.count(name), 2000, "{report}");
    }
    let refused = app(&pod).option("wait-ms", 5000).run(&[&"flood", &FAR6, &8081, &100]).unwrap();
    assert_eq!((refused.count("started"), refused.count("refused")), (100, 100), "{refused}");
    assert_eq!(world.syns().unwrap(), 2100);
    assert_eq!(server.stats().unwrap().count("tcp_accepted"), 2000);
}

#[test]
fn first_packets_of_new_pods_get_out_when_nothing_stops_them() {
    for enter in ["procs", "clone3"] {
        let (_world, pod, mut server) = scene("first");
        let scratch = Scratch::new().unwrap();
        // Makes the QoS level exist, as the kubelet does at its start.
        let burstable = scratch.pod(Qos::Burstable, "warm").unwrap().path().parent().unwrap().to_path_buf();
        let report = Traffic::new()
            .netns(&pod.ns)
            .option("parent", burstable.display())
            .option("count", 300)
            .option("enter", enter)
            .option("timeout-ms", 5000)
            .run(&[&"first-packet", &FAR4, &8080])
            .unwrap();
        assert_eq!((report.count("tried"), report.count("established")), (300, 300), "{report}");
        assert_eq!(server.stats().unwrap().count("tcp_accepted"), 300);
        let left = std::fs::read_dir(&burstable).unwrap().flatten().filter(|e| e.path().is_dir()).count();
        assert_eq!(left, 1, "only the directory made above");
    }
}
