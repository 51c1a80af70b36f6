extern crate std;
use std::vec::Vec;
use std::{format, vec};

mod properties;

use super::*;
use crate::abi::{POD_EXEMPT_PORTS, POD_INBOUND_DROP};
use crate::headers::{address, address4};

const POD_LEVEL: u32 = 3;
const PROXY: u64 = 77;
const APP: u64 = 88;
const OUTSIDE: Address = v4(192, 0, 2, 1);
const OWN: Address = v4(10, 0, 0, 5);
const LOCALHOST: Address = v4(127, 0, 0, 1);
const ETH0: u32 = 2;

const fn v4(a: u8, b: u8, c: u8, d: u8) -> Address {
    address4([a, b, c, d])
}

const fn v6(last: u8) -> Address {
    address([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last])
}

/// Facts of a test, and which were asked for.
#[derive(Clone, Debug)]
struct Known {
    now_ns: u64,
    agent_seen_ns: u64,
    socket_destination: Option<Address>,
    container: u64,
    uid: u32,
    origin: SynOrigin,
    exempt: bool,
    node_source: bool,
    asked: Vec<&'static str>,
}

impl Default for Known {
    fn default() -> Self {
        Self {
            now_ns: 0,
            agent_seen_ns: 0,
            socket_destination: Some(OUTSIDE),
            container: APP,
            uid: 1000,
            origin: SynOrigin::First,
            exempt: false,
            node_source: false,
            asked: vec![],
        }
    }
}

impl Facts for Known {
    fn now_ns(&mut self) -> u64 {
        self.asked.push("now_ns");
        self.now_ns
    }
    fn agent_seen_ns(&mut self) -> u64 {
        self.asked.push("agent_seen_ns");
        self.agent_seen_ns
    }
    fn socket_destination(&mut self) -> Option<Address> {
        self.asked.push("socket_destination");
        self.socket_destination
    }
    fn ancestor(&mut self, level: u32) -> u64 {
        self.asked.push("ancestor");
        if level == POD_LEVEL + 1 { self.container } else { 0 }
    }
    fn uid(&mut self) -> u32 {
        self.asked.push("uid");
        self.uid
    }
    fn syn_origin(&mut self) -> SynOrigin {
        self.asked.push("syn_origin");
        self.origin
    }
    fn exempt(&mut self, policy: &PodPolicy, _: &Packet) -> bool {
        self.asked.push("exempt");
        policy.flags & POD_EXEMPT_PORTS != 0 && self.exempt
    }
    fn node_address(&mut self, _: &Address) -> bool {
        self.asked.push("node_address");
        self.node_source
    }
}

fn syn(ifindex: u32, destination: Address) -> Packet {
    Packet {
        family: 4,
        addresses: Addresses { source: OWN, destination },
        transport: Transport { kind: Kind::Syn, sport: 40000, dport: 8080 },
        ifindex,
        mark: 0,
    }
}

fn settings(mode: Mode) -> Settings {
    Settings {
        mode: mode.code(),
        unknown_policy: UnknownPolicy::Pass.code(),
        flags: CONFIG_JUDGE_NON_TCP,
        hold_ns: 1_000,
        max_silence_ns: 0,
    }
}

fn meshed() -> PodPolicy {
    PodPolicy {
        kind: PodKind::Meshed.code(),
        level: POD_LEVEL,
        proxy_cgroup: PROXY,
        proxy_uid: 2102,
        flags: POD_PROXY_UID | POD_EXEMPT_PORTS,
        ..PodPolicy::default()
    }
}

/// What is expected of one case in off, audit and enforce: (verdict, counted, dropped in enforce).
type Expected = (Verdict, bool, bool);

struct Case {
    name: &'static str,
    packet: Packet,
    policy: PodPolicy,
    facts: Known,
    expected: Expected,
}

fn case(name: &'static str, packet: Packet, expected: Expected) -> Case {
    Case { name, packet, policy: meshed(), facts: Known::default(), expected }
}

/// The decision table, one case a line or more.
fn cases() -> Vec<Case> {
    use Verdict::{
        Bypass, BypassRaw, Dns, Exempt, FamilyGap, Local, Other, Proxy, ProxyUidImpersonation, Quic,
        RedirectProof, Retry, Udp,
    };
    let out = syn(ETH0, OUTSIDE);
    let lo = |destination| syn(LOOPBACK_IFINDEX, destination);
    let with = |transport, ifindex| Packet { transport, ifindex, ..out };
    let udp = |dport| with(Transport { kind: Kind::Udp, sport: 40000, dport }, ETH0);
    let asked = |socket_destination| Known { socket_destination, ..Known::default() };
    let from = |container| Known { container, ..Known::default() };
    let origin = |origin| Known { origin, ..Known::default() };
    let flags = |flags| PodPolicy { flags: meshed().flags | flags, ..meshed() };
    let no_container = PodPolicy { proxy_cgroup: 0, ..meshed() };
    let marked = PodPolicy { mark: 0x539, mark_mask: 0xfff, ..flags(POD_PROXY_MARK) };
    let v6_out = Packet { family: 6, addresses: Addresses { source: v6(5), destination: v6(9) }, ..out };

    vec![
        // 6: proofs
        Case {
            facts: asked(Some(OUTSIDE)),
            ..case("redirected by NAT", lo(LOCALHOST), (RedirectProof, true, false))
        },
        Case {
            facts: asked(Some(v6(9))),
            ..case(
                "redirected by NAT, v6",
                Packet {
                    ifindex: LOOPBACK_IFINDEX,
                    addresses: Addresses { source: v6(5), destination: v6(1) },
                    ..v6_out
                },
                (RedirectProof, true, false),
            )
        },
        Case {
            policy: flags(POD_TPROXY),
            ..case("TPROXY", Packet { mark: 1, ..lo(OUTSIDE) }, (RedirectProof, true, false))
        },
        case("a mark of a mesh without TPROXY", Packet { mark: 1, ..lo(OUTSIDE) }, (Local, true, false)),
        Case {
            facts: origin(SynOrigin::Retry),
            ..case("a proof's retry", lo(LOCALHOST), (RedirectProof, false, false))
        },
        Case {
            facts: origin(SynOrigin::RetryOfHeld),
            ..case("a held connection that is redirected", lo(LOCALHOST), (RedirectProof, true, false))
        },
        Case {
            facts: origin(SynOrigin::RetryOfDropped),
            ..case("a dropped connection that healed", lo(LOCALHOST), (RedirectProof, true, false))
        },
        Case {
            facts: origin(SynOrigin::Raw),
            ..case("a raw SYN proves nothing", lo(LOCALHOST), (Local, true, false))
        },
        // 7: local, never a proof
        Case { facts: asked(Some(LOCALHOST)), ..case("to localhost", lo(LOCALHOST), (Local, true, false)) },
        Case { facts: asked(Some(OWN)), ..case("to the pod's own address", lo(OWN), (Local, true, false)) },
        Case {
            policy: flags(POD_TPROXY),
            facts: asked(Some(OWN)),
            ..case("to the own address, marked", Packet { mark: 1, ..lo(OWN) }, (Local, true, false))
        },
        Case {
            policy: flags(POD_TPROXY),
            ..case("not marked, so not TPROXY", lo(OUTSIDE), (Local, true, false))
        },
        Case {
            facts: asked(Some(v4(127, 0, 0, 53))),
            ..case("a local service moved by NAT", lo(LOCALHOST), (Local, true, false))
        },
        Case {
            facts: asked(None),
            ..case("on lo without a full socket", lo(LOCALHOST), (Local, true, false))
        },
        Case {
            facts: from(PROXY),
            ..case("the proxy, redirected on lo", lo(LOCALHOST), (Local, true, false))
        },
        // 8: the proxy
        Case { facts: from(PROXY), ..case("the proxy's upstream", out, (Proxy, true, false)) },
        Case {
            policy: no_container,
            facts: Known { uid: 2102, ..Known::default() },
            ..case("by UID while the container is unknown", out, (Proxy, true, false))
        },
        Case {
            policy: PodPolicy { flags: 0, ..no_container },
            facts: Known { uid: 0, ..Known::default() },
            ..case("UID 0 is not the proxy of a pod without a known UID", out, (Bypass, true, true))
        },
        Case { policy: marked, ..case("by mark", Packet { mark: 0x1539, ..out }, (Proxy, true, false)) },
        Case { policy: marked, ..case("another mark", Packet { mark: 0x538, ..out }, (Bypass, true, true)) },
        // 9: exempt
        Case {
            facts: Known { exempt: true, ..Known::default() },
            ..case("an exempt port", out, (Exempt, true, false))
        },
        Case {
            facts: Known { exempt: true, uid: 2102, ..Known::default() },
            ..case("an exempt port with the proxy's UID", out, (Exempt, true, false))
        },
        // 10: the proxy's UID elsewhere
        Case {
            facts: Known { uid: 2102, ..Known::default() },
            ..case("the proxy's UID in the app", out, (ProxyUidImpersonation, true, true))
        },
        // 11: raw sockets, retries
        Case { facts: origin(SynOrigin::Raw), ..case("a raw SYN", out, (BypassRaw, true, true)) },
        Case {
            facts: Known { uid: 2102, origin: SynOrigin::Raw, ..Known::default() },
            ..case("a raw SYN with the proxy's UID", out, (BypassRaw, true, true))
        },
        Case {
            facts: origin(SynOrigin::Raw),
            ..case(
                "a fragment too short for flags",
                with(Transport::of(Kind::TcpCut), ETH0),
                (BypassRaw, true, true),
            )
        },
        Case { facts: origin(SynOrigin::Retry), ..case("a retry", out, (Retry, true, true)) },
        Case {
            facts: origin(SynOrigin::RetryOfDropped),
            ..case("a retry of a dropped SYN", out, (Retry, true, true))
        },
        Case {
            facts: origin(SynOrigin::RetryOfHeld),
            ..case("the first judged SYN after a hold", out, (Bypass, true, true))
        },
        // 12
        case("app out", out, (Bypass, true, true)),
        case("app out, v6", v6_out, (Bypass, true, true)),
        Case { facts: from(0), ..case("a socket of the pod's own cgroup", out, (Bypass, true, true)) },
        Case { facts: asked(None), ..case("app out, no full socket", out, (Bypass, true, true)) },
        Case { policy: flags(POD_GAP6), ..case("v6 of a mesh without v6", v6_out, (FamilyGap, true, false)) },
        Case { policy: flags(POD_GAP6), ..case("v4 of a mesh without v6", out, (Bypass, true, true)) },
        Case {
            policy: flags(POD_GAP6 | POD_GAP_DROP),
            ..case("v6 of a mesh without v6, gap dropped", v6_out, (FamilyGap, true, true))
        },
        // 13
        case("DNS", udp(53), (Dns, true, false)),
        case("UDP", udp(4789), (Udp, true, false)),
        case("QUIC", udp(443), (Quic, true, false)),
        case("other protocols", with(Transport::of(Kind::Opaque), ETH0), (Other, true, false)),
        Case { policy: flags(POD_NON_TCP_DROP), ..case("DNS, UDP denied", udp(53), (Dns, true, false)) },
        Case { policy: flags(POD_NON_TCP_DROP), ..case("UDP, denied", udp(4789), (Udp, true, true)) },
        Case { policy: flags(POD_NON_TCP_DROP), ..case("QUIC, UDP denied", udp(443), (Quic, true, true)) },
        Case { policy: flags(POD_QUIC_DROP), ..case("QUIC, denied", udp(443), (Quic, true, true)) },
        Case { policy: flags(POD_QUIC_DROP), ..case("UDP, QUIC denied", udp(4789), (Udp, true, false)) },
        Case {
            policy: flags(POD_NON_TCP_DROP),
            ..case("other protocols, denied", with(Transport::of(Kind::Opaque), ETH0), (Other, true, true))
        },
        Case {
            policy: flags(POD_NON_TCP_DROP),
            ..case(
                "multicast, UDP denied",
                Packet { addresses: Addresses { source: OWN, destination: v4(224, 0, 0, 251) }, ..udp(5353) },
                (Udp, true, false),
            )
        },
        Case {
            policy: flags(POD_NON_TCP_DROP),
            facts: from(PROXY),
            ..case("the proxy's UDP, denied", udp(4789), (Udp, true, false))
        },
    ]
}

#[test]
fn decision_table() {
    for Case { name, packet, policy, facts, expected: (verdict, counted, dropped) } in cases() {
        for mode in [Mode::Audit, Mode::Enforce] {
            let got = judge(&packet, &settings(mode), &policy, &mut facts.clone());
            let drop = dropped && mode == Mode::Enforce;
            // A retry never counts as another `would_drop`.
            let would_drop = dropped && mode == Mode::Audit && verdict != Verdict::Retry;
            let expected = Judgement { verdict, drop, count: counted, would_drop, held: false };
            assert_eq!(got, expected, "{name} in {mode:?}");
        }
        let off = judge(&packet, &settings(Mode::Off), &policy, &mut facts.clone());
        assert_eq!((off.verdict, off.drop), (Verdict::NotJudged, false), "{name} in off");
    }
}

fn judge(packet: &Packet, settings: &Settings, policy: &PodPolicy, facts: &mut Known) -> Judgement {
    without_pod(packet, settings.flags).unwrap_or_else(|| egress(packet, settings, Pod::Known(policy), facts))
}

#[test]
fn rows_that_need_no_pod() {
    let at = |transport, ifindex| Packet { transport, ..syn(ifindex, OUTSIDE) };
    let udp = Transport::of(Kind::Udp);
    let table = [
        ("established TCP", at(Transport::of(Kind::Tcp), ETH0), Some(Verdict::NotNew)),
        ("established TCP on lo", at(Transport::of(Kind::Tcp), 1), Some(Verdict::NotNew)),
        ("ICMP", at(Transport::of(Kind::Icmp), ETH0), Some(Verdict::Icmp)),
        ("UDP on lo", at(udp, 1), Some(Verdict::Local)),
        ("other on lo", at(Transport::of(Kind::Opaque), 1), Some(Verdict::Local)),
        ("SYN", at(Transport::of(Kind::Syn), ETH0), None),
        ("SYN on lo", at(Transport::of(Kind::Syn), 1), None),
        ("UDP", at(udp, ETH0), None),
    ];
    for (name, packet, expected) in table {
        let got = without_pod(&packet, CONFIG_JUDGE_NON_TCP);
        assert_eq!(got.map(|judgement| judgement.verdict), expected, "{name}");
        assert!(got.is_none_or(|judgement| !judgement.drop && !judgement.count), "{name}");
    }
    assert!(without_pod(&at(udp, ETH0), 0).is_some(), "UDP costs nothing unless a policy asks");
}

#[test]
fn without_an_agent_for_too_long_nothing_is_dropped_or_held_where_the_operator_wants_that() {
    let out = syn(ETH0, OUTSIDE);
    let enforce = |max_silence_ns| Settings { max_silence_ns, ..settings(Mode::Enforce) };
    let seen = |ago: u64| Known { now_ns: 10_000, agent_seen_ns: 10_000 - ago, ..Known::default() };
    for (max_silence_ns, ago, drops) in
        [(0, 9_999, true), (100, 0, true), (100, 100, true), (100, 101, false), (100, 9_999, false)]
    {
        let got = judge(&out, &enforce(max_silence_ns), &meshed(), &mut seen(ago));
        let name = format!("{max_silence_ns} {ago}");
        assert_eq!((got.verdict, got.drop, got.would_drop), (Verdict::Bypass, drops, !drops), "{name}");
        let hold = Settings { unknown_policy: UnknownPolicy::Hold.code(), ..enforce(max_silence_ns) };
        let unknown = PodPolicy { since_ns: 9_999, ..PodPolicy::default() };
        assert_eq!(judge(&out, &hold, &unknown, &mut seen(ago)).held, drops, "{name}");
    }
    let mut facts = seen(0);
    judge(&out, &enforce(0), &meshed(), &mut facts);
    assert!(!facts.asked.contains(&"agent_seen_ns"), "it costs nothing unless somebody asks for it");
}

#[test]
fn unknown_pods_pass_or_are_held_for_a_bounded_time() {
    let policy = PodPolicy { since_ns: 5_000, ..PodPolicy::default() };
    let hold = Settings { unknown_policy: UnknownPolicy::Hold.code(), ..settings(Mode::Audit) };
    let out = syn(ETH0, OUTSIDE);
    let at = |now_ns| Known { now_ns, ..Known::default() };
    let held =
        Judgement { verdict: Verdict::Unknown, drop: true, count: true, would_drop: false, held: true };
    let passed = Judgement::pass(Verdict::Unknown, true);
    assert_eq!(judge(&out, &settings(Mode::Enforce), &policy, &mut at(5_001)), passed, "pass is the default");
    assert_eq!(judge(&out, &hold, &policy, &mut at(5_999)), held);
    assert_eq!(judge(&out, &hold, &policy, &mut at(4_000)), held, "a clock before the cgroup's birth");
    assert_eq!(judge(&out, &hold, &policy, &mut at(6_000)), passed, "the hold ends by itself");
    let mut retry = Known { origin: SynOrigin::RetryOfHeld, ..at(5_500) };
    assert_eq!(judge(&out, &hold, &policy, &mut retry), Judgement { count: false, ..held });
    assert_eq!(judge(&syn(1, LOCALHOST), &hold, &policy, &mut at(5_500)), passed, "lo is never held");
    let off = Settings { mode: Mode::Off.code(), ..hold };
    assert_eq!(judge(&out, &off, &policy, &mut at(5_500)), passed, "nothing is held while off");
    let missing = |since_ns| egress(&out, &hold, Pod::Missing { since_ns }, &mut at(5_500));
    assert_eq!(missing(5_000), held, "a pod that finds no room is held as any other");
    assert_eq!(missing(4_500), passed, "and let go as any other");
    assert_eq!(missing(0), passed, "without a time a hold could not end");
    let none = egress(&out, &hold, Pod::None, &mut at(5_500));
    assert_eq!(none, Judgement::pass(Verdict::NotJudged, false));
}

#[test]
fn pod_modes_override_the_nodes_both_ways() {
    let out = syn(ETH0, OUTSIDE);
    for (node, pod, dropped) in [
        (Mode::Audit, Mode::Enforce.code(), true),
        (Mode::Off, Mode::Enforce.code(), true),
        (Mode::Enforce, Mode::Audit.code(), false),
        (Mode::Enforce, Mode::Off.code(), false),
        (Mode::Enforce, MODE_INHERIT, true),
    ] {
        let policy = PodPolicy { mode: pod, ..meshed() };
        let got = judge(&out, &settings(node), &policy, &mut Known::default());
        assert_eq!(got.drop, dropped, "node {node:?}, pod {pod}");
    }
}

#[test]
fn exempt_pods_are_never_judged() {
    for kind in [PodKind::Exempt, PodKind::Qos] {
        let policy = PodPolicy { kind: kind.code(), mode: Mode::Enforce.code(), ..meshed() };
        let got = judge(&syn(ETH0, OUTSIDE), &settings(Mode::Enforce), &policy, &mut Known::default());
        assert_eq!(got, Judgement::pass(Verdict::NotJudged, true));
    }
}

#[test]
fn inbound() {
    let arriving = Packet { addresses: Addresses { source: OUTSIDE, destination: OWN }, ..syn(ETH0, OWN) };
    let drop = PodPolicy { flags: meshed().flags | POD_INBOUND_DROP, ..meshed() };
    let no_container = PodPolicy { proxy_cgroup: 0, ..drop };
    let elsewhere = PodPolicy { flags: POD_INBOUND_DROP | POD_PROXY_ELSEWHERE, ..no_container };
    let app = Known::default();
    let table = [
        ("to the proxy", drop, Known { container: PROXY, ..app.clone() }, Verdict::InboundOk, false),
        ("past the proxy", meshed(), app.clone(), Verdict::InboundBypass, false),
        ("past the proxy, dropped by policy", drop, app.clone(), Verdict::InboundBypass, true),
        ("a kubelet probe", drop, Known { node_source: true, ..app.clone() }, Verdict::InboundOk, false),
        ("an exempt port", drop, Known { exempt: true, ..app.clone() }, Verdict::InboundOk, false),
        ("the proxy's container unknown", no_container, app.clone(), Verdict::InboundOk, false),
        ("no proxy in this pod", elsewhere, app.clone(), Verdict::InboundBypass, true),
        (
            "no proxy in this pod, a socket of the pod's own cgroup",
            elsewhere,
            Known { container: 0, ..app },
            Verdict::InboundBypass,
            true,
        ),
    ];
    for (name, policy, facts, verdict, dropped) in table {
        let got = ingress(&arriving, &settings(Mode::Enforce), Pod::Known(&policy), &mut facts.clone());
        assert_eq!((got.verdict, got.drop), (verdict, dropped), "{name}");
        let audit = ingress(&arriving, &settings(Mode::Audit), Pod::Known(&policy), &mut facts.clone());
        assert_eq!((audit.verdict, audit.drop, audit.would_drop), (verdict, false, dropped), "{name}, audit");
    }
}

#[test]
fn cheap_rows_ask_for_nothing_dear() {
    let mut facts = Known::default();
    let exempt = PodPolicy { kind: PodKind::Exempt.code(), ..PodPolicy::default() };
    judge(&syn(ETH0, OUTSIDE), &settings(Mode::Enforce), &exempt, &mut facts);
    assert_eq!(facts.asked, Vec::<&str>::new(), "a pod that is not meshed costs the lookup alone");
    judge(&syn(1, LOCALHOST), &settings(Mode::Enforce), &meshed(), &mut facts);
    assert_eq!(facts.asked, ["socket_destination", "ancestor", "syn_origin"]);
}
