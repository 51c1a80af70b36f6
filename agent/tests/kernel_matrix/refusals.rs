//! A connect(2) that is refused at once never was one that egress would let pass.

use nobypass_common::abi::{POD_FASTFAIL4, POD_FASTFAIL6, POD_PROXY_UID};
use nobypass_common::ids::{Counter, Mode};
use nobypass_testkit::netns::{FAR4, FAR6};
use nobypass_testkit::redirect::Variant;

use crate::scene::{Expected, Node, OWN_PORT, exists};

#[test]
fn connections_within_the_pod_are_not_refused() {
    let mut node = Node::new();
    let mut scene = node.meshed(Variant::None);
    node.mode(Mode::Enforce);
    node.set(&mut scene, |policy| policy.flags = POD_PROXY_UID | POD_FASTFAIL4 | POD_FASTFAIL6);
    let (own4, own6) = (scene.net.ip4.to_string(), scene.net.ip6.to_string());
    let local = Expected::new(&[(Counter::Local, 1)], &["plain"], 0);
    for (command, to) in [
        ("tcp4", "127.0.0.1"),
        ("tcp4", "127.1.2.3"),
        ("tcp6", "::1"),
        // connect(2) takes the unspecified address for loopback.
        ("tcp4", "0.0.0.0"),
        ("tcp6", "::"),
        ("tcp4", own4.as_str()),
        ("mapped", own4.as_str()),
        ("mptcp", own4.as_str()),
        ("nonblocking", own4.as_str()),
        ("tcp6", own6.as_str()),
        ("mptcp", own6.as_str()),
    ]
    .into_iter()
    .filter(|(command, _)| exists(command))
    {
        let name = format!("{command} to {to}");
        node.check(&name, &scene, &local, || scene.app().run(&[&command, &to, &OWN_PORT]).unwrap());
    }
    // An address outside stays refused, whatever the port.
    let refused = Expected::new(&[(Counter::FastFail, 1)], &["EPERM"], 0);
    for port in [OWN_PORT, 8080] {
        for (command, to) in
            [("tcp4", FAR4.to_string()), ("mapped", FAR4.to_string()), ("tcp6", FAR6.to_string())]
        {
            let name = format!("{command} to {to}, port {port}");
            node.check(&name, &scene, &refused, || scene.app().run(&[&command, &to, &port]).unwrap());
        }
    }
}
