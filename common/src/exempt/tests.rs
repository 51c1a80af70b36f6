extern crate std;
use std::collections::{BTreeMap, BTreeSet};
use std::vec;
use std::vec::Vec;

use super::*;
use crate::headers::{Addresses, Kind, Transport, address4};

const SET: u32 = 9;
const INSIDE: Address = address4([10, 1, 2, 3]);
const OUTSIDE: Address = address4([192, 0, 2, 1]);

/// Exact matches stand for prefixes here: the maps' own search is the kernel's.
#[derive(Clone, Default)]
struct Known {
    ports: BTreeSet<(u8, u16)>,
    networks: BTreeSet<(u8, Address)>,
    ids: BTreeMap<(u32, u32), u8>,
    uid: u32,
    asked: Vec<&'static str>,
}

impl Lookups for Known {
    fn port(&mut self, set: u32, list: u8, port: u16) -> bool {
        self.asked.push("port");
        set == SET && self.ports.contains(&(list, port))
    }
    fn network(&mut self, set: u32, list: u8, family: u8, address: &Address) -> bool {
        self.asked.push("network");
        set == SET && family == 4 && self.networks.contains(&(list, *address))
    }
    fn id(&mut self, key: &IdKey) -> Option<u8> {
        self.asked.push("id");
        (key.set == SET).then(|| self.ids.get(&(key.kind, key.value)).copied())?
    }
    fn uid(&mut self) -> u32 {
        self.asked.push("uid");
        self.uid
    }
}

fn syn(destination: Address, dport: u16) -> Packet {
    Packet {
        family: 4,
        addresses: Addresses { source: OUTSIDE, destination },
        transport: Transport { kind: Kind::Syn, sport: 40000, dport },
        ifindex: 3,
        mark: 0,
    }
}

fn policy(flags: u32) -> PodPolicy {
    PodPolicy { flags, exempt_set: SET, ..PodPolicy::default() }
}

/// Flags, entries, destination, port, UID, and whether it is exempt.
struct Case {
    name: &'static str,
    flags: u32,
    known: Known,
    to: (Address, u16),
    exempt: bool,
}

fn cases() -> Vec<Case> {
    let ports = |list: &[(u8, u16)]| Known { ports: list.iter().copied().collect(), ..Known::default() };
    let nets =
        |list: &[(u8, Address)]| Known { networks: list.iter().copied().collect(), ..Known::default() };
    let both = |p: &[(u8, u16)], n: &[(u8, Address)]| Known { networks: nets(n).networks, ..ports(p) };
    let case = |name, flags, known, to, exempt| Case { name, flags, known, to, exempt };
    let users = |uid| Known {
        ids: [((ID_UID, 5), ANY_PORT), ((ID_UID, 6), LIST_USER), ((ID_IFINDEX, 4), ANY_PORT)].into(),
        uid,
        ..ports(&[(LIST_USER, 22)])
    };
    let (all, listed) = (POD_EXEMPT_PORTS | POD_EXEMPT_CIDRS, POD_LISTED);
    vec![
        case("no flag, whatever the maps say", 0, ports(&[(LIST_EGRESS, 80)]), (OUTSIDE, 80), false),
        case("a port", all, ports(&[(LIST_EGRESS, 80)]), (OUTSIDE, 80), true),
        case("another port", all, ports(&[(LIST_EGRESS, 80)]), (OUTSIDE, 81), false),
        case("an inbound port", all, ports(&[(LIST_INGRESS, 80)]), (OUTSIDE, 80), false),
        case("a network", all, nets(&[(LIST_EGRESS, INSIDE)]), (INSIDE, 80), true),
        case("an inbound network", all, nets(&[(LIST_INGRESS, INSIDE)]), (INSIDE, 80), false),
        case(
            "a network without its flag",
            POD_EXEMPT_PORTS,
            nets(&[(LIST_EGRESS, INSIDE)]),
            (INSIDE, 80),
            false,
        ),
        // Only what is listed is redirected.
        case("nothing is listed", listed, Known::default(), (OUTSIDE, 80), true),
        case("a listed network", listed, nets(&[(LIST_ONLY, INSIDE)]), (INSIDE, 80), false),
        case("beside a listed network", listed, nets(&[(LIST_ONLY, INSIDE)]), (OUTSIDE, 80), true),
        case(
            "a listed port beside listed networks",
            listed,
            both(&[(LIST_ONLY, 80)], &[(LIST_ONLY, INSIDE)]),
            (OUTSIDE, 80),
            false,
        ),
        case(
            "neither port nor network is listed",
            listed,
            both(&[(LIST_ONLY, 80)], &[(LIST_ONLY, INSIDE)]),
            (OUTSIDE, 81),
            true,
        ),
        case("a list without its flag", all, nets(&[(LIST_ONLY, INSIDE)]), (OUTSIDE, 80), false),
        // Exclusions come first in every mesh's chain.
        case(
            "excluded port of a listed network",
            all | listed,
            both(&[(LIST_EGRESS, 80)], &[(LIST_ONLY, INSIDE)]),
            (INSIDE, 80),
            true,
        ),
        case(
            "listed port of an excluded network",
            all | listed,
            both(&[(LIST_ONLY, 80)], &[(LIST_EGRESS, INSIDE)]),
            (INSIDE, 80),
            true,
        ),
        case(
            "a port that is excluded and listed",
            all | listed,
            ports(&[(LIST_EGRESS, 80), (LIST_ONLY, 80)]),
            (OUTSIDE, 80),
            true,
        ),
        // Users and devices.
        case("a user", POD_EXEMPT_IDS, users(5), (OUTSIDE, 80), true),
        case("another user", POD_EXEMPT_IDS, users(7), (OUTSIDE, 80), false),
        case("a user on its port", POD_EXEMPT_IDS, users(6), (OUTSIDE, 22), true),
        case("a user on another port", POD_EXEMPT_IDS, users(6), (OUTSIDE, 23), false),
        case("another user on that port", POD_EXEMPT_IDS, users(7), (OUTSIDE, 22), false),
        case("users without their flag", all, users(5), (OUTSIDE, 80), false),
        case(
            "a listed port of an exempt user",
            POD_EXEMPT_IDS | listed,
            Known { ports: [(LIST_ONLY, 80)].into(), ..users(5) },
            (OUTSIDE, 80),
            true,
        ),
        case(
            "a listed port of another user",
            POD_EXEMPT_IDS | listed,
            Known { ports: [(LIST_ONLY, 80)].into(), ..users(7) },
            (OUTSIDE, 80),
            false,
        ),
    ]
}

#[test]
fn outgoing_connections_in_the_order_of_the_chains() {
    for Case { name, flags, mut known, to: (address, port), exempt } in cases() {
        assert_eq!(egress(&policy(flags), &syn(address, port), &mut known), exempt, "{name}");
    }
}

#[test]
fn a_device_and_another_set() {
    let known = Known { ids: [((ID_IFINDEX, 3), ANY_PORT)].into(), ..Known::default() };
    let packet = syn(OUTSIDE, 80);
    assert!(egress(&policy(POD_EXEMPT_IDS), &packet, &mut known.clone()));
    assert!(!egress(&policy(POD_EXEMPT_IDS), &Packet { ifindex: 2, ..packet }, &mut known.clone()));
    let other = PodPolicy { exempt_set: SET + 1, ..policy(POD_EXEMPT_IDS) };
    assert!(!egress(&other, &packet, &mut { known }));
}

#[test]
fn incoming_connections_by_port_and_source() {
    let known = Known {
        ports: [(LIST_INGRESS, 80), (LIST_EGRESS, 81)].into(),
        networks: [(LIST_INGRESS, OUTSIDE), (LIST_EGRESS, INSIDE)].into(),
        ..Known::default()
    };
    let from =
        |source, dport| Packet { addresses: Addresses { source, destination: INSIDE }, ..syn(INSIDE, dport) };
    for (source, port, flags, exempt) in [
        (INSIDE, 80, POD_EXEMPT_PORTS, true),
        (INSIDE, 81, POD_EXEMPT_PORTS, false),
        (OUTSIDE, 82, POD_EXEMPT_PORTS, false),
        (OUTSIDE, 82, POD_EXEMPT_CIDRS, true),
        (INSIDE, 82, POD_EXEMPT_CIDRS, false),
        (OUTSIDE, 80, POD_LISTED, false),
    ] {
        let got = ingress(&policy(flags), &from(source, port), &mut known.clone());
        assert_eq!(got, exempt, "{source:?} {port} {flags:#x}");
    }
}

#[test]
fn a_pod_without_exemptions_asks_nothing() {
    let mut known = Known::default();
    assert!(!egress(&policy(0), &syn(OUTSIDE, 80), &mut known));
    assert_eq!(known.asked, Vec::<&str>::new());
    assert!(!egress(&policy(POD_EXEMPT_PORTS), &syn(OUTSIDE, 80), &mut known));
    assert_eq!(known.asked, ["port"]);
}
