//! Who may connect to a pod: the proxy takes what it should, the node's own addresses are the kubelet's, and all else that
//! reaches the application is a bypass, dropped only where a policy says so.

use std::net::IpAddr;

use nobypass_common::abi::POD_INBOUND_DROP;
use nobypass_common::ids::{Counter, Mode};
use nobypass_testkit::netns::PodNet;
use nobypass_testkit::proc::Place as _;
use nobypass_testkit::redirect::Variant;
use nobypass_testkit::traffic::Traffic;

use crate::scene::{Expected, HANGING, Node, OWN_PORT, Scene};
use crate::support::agent::{Agent, BIN};
use crate::support::machine::Machine;

const PLAIN: &[&str] = &["plain"];

/// Who connects.
#[derive(Clone, Copy, Debug)]
enum Source {
    /// The node: a bridge with the pods on it, as the kubelet sees them.
    Node,
    /// Another pod.
    Pod,
}

/// A node whose own network is the scene's outside, so that it finds its addresses there by itself.
fn agent_in(scene: &Scene, machine: &Machine, args: &[&str]) -> Agent {
    let mut command = machine.mounts.command(BIN);
    command.in_netns_fd(scene.world.far().try_clone_fd().unwrap());
    machine.launch_by(command).args(args).start().attached()
}

/// What an inbound connection of an un-redirected pod comes to.
fn direct(source: Source, inbound: Option<&str>, mode: &str) -> Expected {
    use Counter::{EventsEmitted, InboundBypass, InboundDropped, InboundOk, WouldDrop};
    // What another pod sends passes the witness outside.
    let seen = u64::from(matches!(source, Source::Pod));
    let bypass = |more: &[(Counter, u64)], saw| {
        Expected::new(&[&[(InboundBypass, 1), (EventsEmitted, 1)], more].concat(), saw, seen)
    };
    match (source, inbound, mode) {
        (_, Some("off"), _) => Expected::new(&[], PLAIN, seen),
        (Source::Node, ..) => Expected::new(&[(InboundOk, 1)], PLAIN, 0),
        (Source::Pod, Some("enforce"), "enforce") => bypass(&[(InboundDropped, 1)], HANGING),
        (Source::Pod, Some("enforce"), _) => bypass(&[(WouldDrop, 1)], PLAIN),
        // Reported, and passed, whatever the mode: enforce is for what leaves.
        (Source::Pod, ..) => bypass(&[], PLAIN),
    }
}

fn connect(
    scene: &Scene,
    source: Source,
    other: &PodNet,
    command: &str,
) -> nobypass_testkit::traffic::Report {
    let from = match source {
        Source::Node => scene.world.far(),
        Source::Pod => &other.ns,
    };
    let to: IpAddr = if command == "tcp6" { scene.net.ip6.into() } else { scene.net.ip4.into() };
    let patience = scene.patience();
    let traffic = Traffic::new().netns(from).option("timeout-ms", patience);
    traffic.run(&[&command, &to, &OWN_PORT]).unwrap()
}

#[test]
fn the_nodes_own_connections_pass_and_others_are_dropped_only_when_asked() {
    let mut node = Node::new();
    let mut scene = node.meshed(Variant::None);
    let other = scene.world.pod().unwrap();
    let flags = scene.policy.flags;
    node.agent.take().unwrap().kill();
    for mode in ["audit", "enforce"] {
        for inbound in [None, Some("off"), Some("audit"), Some("enforce")] {
            let mut args = vec!["--mode", mode, "--event-rate", "100000"];
            args.extend(inbound.iter().flat_map(|inbound| ["--inbound", inbound]));
            let agent = agent_in(&scene, &node.machine, &args);
            // Nobody tells this agent of the pod: what the keeper would write.
            let drops = inbound == Some("enforce");
            node.set(&mut scene, |policy| {
                policy.flags = if drops { flags | POD_INBOUND_DROP } else { flags };
            });
            for source in [Source::Node, Source::Pod] {
                for command in ["tcp4", "tcp6"] {
                    let name = format!("{source:?} {command}, mode {mode}, inbound {inbound:?}");
                    let expected = direct(source, inbound, mode);
                    node.check(&name, &scene, &expected, || connect(&scene, source, &other, command));
                }
            }
            agent.kill();
        }
    }
}

/// Where the mesh redirects what arrives, its proxy takes other pods' connections and the kubelet's alike.
#[test]
fn what_the_proxy_takes_is_no_bypass_whoever_connects() {
    for variant in [Variant::IptablesLinkerd, Variant::IptablesIstio] {
        let mut node = Node::new();
        node.mode(Mode::Enforce);
        let mut scene = node.meshed(variant);
        node.set(&mut scene, |policy| policy.flags |= POD_INBOUND_DROP);
        let other = scene.world.pod().unwrap();
        for source in [Source::Node, Source::Pod] {
            for command in ["tcp4", "tcp6"] {
                let name = format!("{source:?} {command}, {variant:?}");
                scene.expect(&Expected::new(&[], &["mesh"], 0));
                let seen = node.measure(&scene, || connect(&scene, source, &other, command));
                let of = |counter: Counter| seen.counted.get(counter.label()).copied().unwrap_or(0);
                assert_eq!(of(Counter::InboundBypass) + of(Counter::InboundDropped), 0, "{name}: {seen:?}");
                assert_eq!((of(Counter::InboundOk), seen.report.saw()), (1, "mesh"), "{name}: {seen:?}");
            }
        }
    }
}
