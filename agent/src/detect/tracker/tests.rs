use std::sync::Arc;

use super::*;
use crate::pods::model::{Container, PodFacts, State};

fn report(direction: &str, container: &str, dst: &str, reason: &str) -> Report {
    let json = serde_json::json!({
        "time_ms": 1, "namespace": "shop", "pod": "cart", "container": container, "mesh": "linkerd",
        "direction": direction, "src": "10.0.0.5:4", "dst": dst, "protocol": 6, "uid": 0,
        "reason": reason, "action": "passed", "mode": "audit", "cgroup": 1, "cookie": 2,
    });
    Report { at_ns: 7, ..serde_json::from_value(json).unwrap() }
}

/// A pod of Linkerd's whose validator exited so, each time it was tried, and has these arguments.
fn pod(codes: &[Option<i32>], args: &[&str]) -> PodView {
    let uid = PodUid::parse("2c48913c-b29f-11e7-9350-020968147796").unwrap();
    let mut facts = PodFacts::new(uid, "shop", "cart");
    facts.annotations = [("linkerd.io/proxy-version", "edge-26.8.1")].into_iter().collect();
    facts.containers = codes
        .iter()
        .enumerate()
        .map(|(n, code)| {
            let mut container = Container::new("linkerd-network-validator");
            (container.exit_code, container.state) = (*code, State::Exited);
            container.created_at = i64::try_from(n).unwrap() + 1;
            container.args = args.iter().map(|arg| (*arg).into()).collect();
            container
        })
        .collect();
    facts.containers.push(Container { exit_code: Some(95), ..Container::new("app") });
    PodView { families: [true, true], facts: Some(Arc::new(facts)), ..PodView::unknown(uid, 10) }
}

fn meshed(pod: &PodView) -> Box<Meshed> {
    meshed_of(pod, &Profiles::built_in()).unwrap()
}

#[test]
fn events_are_signs() {
    let meshed = meshed(&pod(&[None], &[]));
    let bypass = |family, reason| Evidence::Bypass { family, reason, at: 7 };
    let canary = |family| Evidence::Canary { family, at: 7 };
    let plain = vec![bypass(Family::V4, Reason::NotRedirected)];
    let both = vec![bypass(Family::V4, Reason::NotRedirected), canary(Family::V4)];
    for (direction, container, dst, reason, expected) in [
        ("outbound", "app", "192.0.2.1:443", "not_redirected", plain.clone()),
        ("outbound", "app", "[2001:db8::1]:443", "raw_socket", vec![bypass(Family::V6, Reason::RawSocket)]),
        ("outbound", "app", "192.0.2.1:443", "from_the_future", vec![]),
        ("inbound", "app", "10.0.0.5:80", "inbound", vec![]),
        ("outbound", "linkerd-network-validator", "1.1.1.1:20001", "not_redirected", both.clone()),
        // By its cgroup id, because nobody has named it yet.
        ("outbound", "4711", "1.1.1.1:20001", "not_redirected", both),
        ("outbound", "app", "1.1.1.1:20001", "not_redirected", plain.clone()),
        ("outbound", "linkerd-network-validator", "1.1.1.1:443", "not_redirected", plain),
    ] {
        let found = signs(&report(direction, container, dst, reason), Some(&meshed));
        assert_eq!(found, expected, "{direction} {container} {dst} {reason}");
    }
}

#[test]
fn the_validators_exit_code_is_a_sign_where_it_speaks_of_the_redirection() {
    for (codes, expected) in [
        (&[Some(0)][..], Some(0)),
        (&[Some(95)], Some(95)),
        (&[Some(1)], None),
        (&[None], None),
        (&[], None),
        // The latest try counts.
        (&[Some(95), Some(0)], Some(0)),
    ] {
        let view = pod(codes, &[]);
        let code = validator(&view, &meshed(&view)).map(|sign| match sign {
            Evidence::Validator { family: Family::V4, exit_code, .. } => exit_code,
            other => panic!("{other:?}"),
        });
        assert_eq!(code, expected, "{codes:?}");
    }
}

/// An operator may have it connect elsewhere, even to the real API server.
#[test]
fn a_validators_own_address_is_the_canary() {
    let canary = Evidence::Canary { family: Family::V4, at: 7 };
    let at = |args: &[&str], container: &str, dst: &str| {
        let report = report("outbound", container, dst, "not_redirected");
        signs(&report, Some(&meshed(&pod(&[None], args)))).contains(&canary)
    };
    let own = ["--connect-addr", "10.96.0.1:443"];
    assert!(at(&own, "linkerd-network-validator", "10.96.0.1:443"));
    assert!(!at(&own, "app", "10.96.0.1:443"), "the application's own business");
    assert!(!at(&own, "linkerd-network-validator", "1.1.1.1:20001"));
    assert!(at(&[], "linkerd-network-validator", "1.1.1.1:20001"));
}
