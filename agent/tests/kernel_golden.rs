//! Hand-made packets through the programs as the kernel runs them: what they return and what they count, exactly.
//!
//! The socket of these runs is no TCP socket (see `nobypass_testkit::bpf`), so that every SYN is a raw one.

#![expect(clippy::unwrap_used, clippy::panic, reason = "the helpers of a test may panic as the test may")]

mod support {
    #![allow(dead_code, reason = "each test target uses its part")]
    pub mod lab;
    pub mod model;
    pub mod packets;
}

use std::sync::Mutex;

use nobypass_common::abi::{
    CONFIG_INBOUND, CONFIG_JUDGE_NON_TCP, CidrKey, ID_UID, IdKey, POD_EXEMPT_CIDRS, POD_EXEMPT_IDS,
    POD_EXEMPT_PORTS, POD_GAP_DROP, POD_GAP4, POD_GAP6, POD_INBOUND_DROP, POD_NON_TCP_DROP, POD_PROXY_MARK,
    POD_PROXY_UID, POD_QUIC_DROP, POD_TPROXY, PodPolicy, PortKey,
};
use nobypass_common::exempt::{LIST_EGRESS, LIST_INGRESS};
use nobypass_common::headers::{address, address4};
use nobypass_common::ids::{COUNTERS, Counter, Mode, PodKind, UnknownPolicy};
use nobypass_common::verdict::Settings;
use nobypass_testkit::bpf::{ETHERNET, Skb};
use support::lab::{DEVICE, Lab};
use support::model::on_the_host;
use support::packets::{
    ACK, FROM4, FROM6, Noise, SYN, TO4, TO6, ethernet, extension, tcp, udp, v4, v4_to, v6, v6_to,
};

const OUT: Skb = Skb { ifindex: DEVICE, mark: 0 };
/// ff02::fb
const MULTICAST6: [u8; 16] = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xfb];
const LO: Skb = Skb { ifindex: 1, mark: 0 };

/// One at a time: the process has one cgroup.
fn with_lab(f: impl FnOnce(&mut Lab) + Send) {
    static TURN: Mutex<()> = Mutex::new(());
    // A failed test has cleaned up after itself.
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    support::lab::with_lab(nobypass::bpf::OBJECT, f);
}

/// Counters that are to be one, all others zero.
fn ones(counters: &[Counter]) -> [u64; COUNTERS] {
    let mut expected = [0; COUNTERS];
    for counter in counters {
        expected[counter.code() as usize] += 1;
    }
    expected
}

/// What is not zero, by label.
fn shown(counts: &[u64; COUNTERS]) -> Vec<(&'static str, u64)> {
    let of = |counter: &Counter| (counter.label(), counts[counter.code() as usize]);
    Counter::ALL.iter().map(of).filter(|(_, count)| *count > 0).collect()
}

/// Runs one packet and compares the return code and all counters, of the pod and of the node.
fn assert_run(lab: &mut Lab, what: &str, run: (&str, &[u8], Skb), drop: bool, counters: &[Counter]) {
    lab.clear();
    let (program, packet, skb) = run;
    let (code, _) = lab.run(program, packet, skb, 1).unwrap_or_else(|error| panic!("{what}: {error}"));
    let expected = shown(&ones(counters));
    assert_eq!(shown(&lab.counted()), expected, "{what}: the pod's counters");
    assert_eq!(shown(&lab.totals()), expected, "{what}: the node's counters");
    assert_eq!(code, u32::from(!drop), "{what}: the return code");
}

/// What becomes of a packet.
enum Fate {
    /// Passes uncounted in every mode.
    Unseen,
    /// Passes in every mode; counted so where other protocols than TCP are judged.
    Passes(Counter),
    /// A raw socket's new connection: the only bypass that needs no TCP socket.
    Raw,
}

use Counter::{
    BypassRaw, BypassRawDropped, Dns, EventsEmitted, EventsSuppressed, Local, NonTcpDropped, NotJudged,
    Other, Quic, Unknown, WouldDrop,
};
use Fate::{Passes, Raw, Unseen};

/// Authentication header (RFC 4302) of 24 bytes in front of TCP.
fn auth() -> Vec<u8> {
    [vec![6, 4, 0, 0], vec![0; 20]].concat()
}

/// Hop-by-hop options, destination options and a first fragment in front of `payload`.
fn chain(payload: &[u8]) -> Vec<u8> {
    [&extension(60, [0; 3])[..], &extension(44, [0; 3]), &extension(6, [0, 1, 0]), payload].concat()
}

fn packets() -> Vec<(&'static str, Vec<u8>, Fate)> {
    let (syn, ack) = (tcp(SYN, 8080), tcp(ACK, 8080));
    vec![
        ("established", v4(6, &ack), Unseen),
        ("established with data", v4(6, &[&ack[..], &[7; 500]].concat()), Unseen),
        ("established, v6", v6(6, &ack), Unseen),
        ("established with IP options", v4_to(TO4, 6, 12, 0, &ack), Unseen),
        ("established behind extension headers, v6", v6(0, &chain(&ack)), Unseen),
        ("SYN-ACK", v4(6, &tcp(SYN | ACK, 8080)), Unseen),
        ("FIN", v4(6, &tcp(ACK | 1, 8080)), Unseen),
        ("RST", v4(6, &tcp(4, 8080)), Unseen),
        ("no flags", v4(6, &tcp(0, 8080)), Unseen),
        ("SYN", v4(6, &syn), Raw),
        ("SYN with ECN bits", v4(6, &tcp(SYN | 0xc0, 8080)), Raw),
        ("SYN and FIN", v4(6, &tcp(SYN | 1, 8080)), Raw),
        ("SYN with data", v4(6, &[&syn[..], &[7; 500]].concat()), Raw),
        ("SYN with 4 bytes of IP options", v4_to(TO4, 6, 4, 0, &syn), Raw),
        ("SYN with 40 bytes of IP options", v4_to(TO4, 6, 40, 0, &syn), Raw),
        ("SYN in a first fragment", v4_to(TO4, 6, 0, 0x2000, &syn), Raw),
        ("SYN, v6", v6(6, &syn), Raw),
        ("SYN behind hop-by-hop options, v6", v6(0, &[extension(6, [0; 3]), syn.clone()].concat()), Raw),
        ("SYN behind destination options, v6", v6(60, &[extension(6, [0; 3]), syn.clone()].concat()), Raw),
        ("SYN behind a routing header, v6", v6(43, &[extension(6, [0; 3]), syn.clone()].concat()), Raw),
        ("SYN in a first fragment, v6", v6(44, &[extension(6, [0, 1, 0]), syn.clone()].concat()), Raw),
        ("SYN behind an authentication header, v6", v6(51, &[auth(), syn.clone()].concat()), Raw),
        ("SYN behind three extension headers, v6", v6(0, &chain(&syn)), Raw),
        ("TCP cut after the ports", v4(6, &syn[..4]), Raw),
        ("TCP cut before the flags", v4(6, &syn[..13]), Raw),
        ("TCP cut in a first fragment", v4_to(TO4, 6, 0, 0x2000, &syn[..8]), Raw),
        ("TCP cut, v6", v6(6, &syn[..8]), Raw),
        ("no TCP at all", v4(6, &[]), Raw),
        ("ICMP echo", v4(1, &[8, 0, 0, 0, 0, 0, 0, 0]), Unseen),
        ("ICMP fragmentation needed", v4(1, &[3, 4, 0, 0, 0, 0, 5, 0]), Unseen),
        ("ICMP, later fragment", v4_to(TO4, 1, 0, 0x00b9, &[0; 64]), Unseen),
        ("ICMP without a header", v4(1, &[]), Unseen),
        ("router solicitation", v6(58, &[133, 0, 0, 0, 0, 0, 0, 0]), Unseen),
        ("neighbour solicitation", v6(58, &[&[135, 0, 0, 0, 0, 0, 0, 0][..], &TO6].concat()), Unseen),
        ("neighbour advertisement", v6(58, &[&[136, 0, 0, 0, 0x60, 0, 0, 0][..], &FROM6].concat()), Unseen),
        ("packet too big", v6(58, &[2, 0, 0, 0, 0, 0, 5, 0]), Unseen),
        ("multicast listener report", v6(0, &[58, 0, 5, 2, 0, 0, 0, 0, 143, 0, 0, 0]), Unseen),
        ("DNS", v4(17, &udp(53)), Passes(Dns)),
        ("DNS, v6", v6(17, &udp(53)), Passes(Dns)),
        ("QUIC", v4(17, &udp(443)), Passes(Quic)),
        ("QUIC with a payload", v4(17, &[&udp(443)[..], &[7; 1200]].concat()), Passes(Quic)),
        ("QUIC with a payload, v6", v6(17, &[&udp(443)[..], &[7; 1200]].concat()), Passes(Quic)),
        ("UDP", v4(17, &udp(5000)), Passes(Counter::Udp)),
        ("UDP with a payload", v4(17, &[&udp(5000)[..], &[7; 64]].concat()), Passes(Counter::Udp)),
        ("UDP with IP options", v4_to(TO4, 17, 8, 0, &udp(5000)), Passes(Counter::Udp)),
        ("UDP in a first fragment", v4_to(TO4, 17, 0, 0x2000, &[7; 64]), Passes(Counter::Udp)),
        ("UDP, v6", v6(17, &udp(5000)), Passes(Counter::Udp)),
        ("UDP, later fragment", v4_to(TO4, 17, 0, 1, &[7; 64]), Passes(Other)),
        ("UDP cut", v4(17, &[0x9c, 0x40]), Passes(Other)),
        ("TCP, later fragment", v4_to(TO4, 6, 0, 1, &syn), Passes(Other)),
        ("TCP, later fragment, v6", v6(44, &[extension(6, [0, 8, 0]), syn.clone()].concat()), {
            Passes(Other)
        }),
        ("IP in IP", v4(4, &v4(6, &syn)[ETHERNET..]), Passes(Other)),
        ("IPv6 in IP", v4(41, &v6(6, &syn)[ETHERNET..]), Passes(Other)),
        ("SCTP", v4(132, &[0; 32]), Passes(Other)),
        ("GRE", v4(47, &[0; 32]), Passes(Other)),
        ("ESP, v6", v6(50, &[0; 32]), Passes(Other)),
        ("no next header, v6", v6(59, &[]), Passes(Other)),
        ("extension header cut, v6", v6(0, &[6, 0, 0]), Passes(Other)),
    ]
}

fn events(lab: &Lab) -> Counter {
    if lab.config().event_burst == 0 { EventsSuppressed } else { EventsEmitted }
}

#[test]
fn what_leaves_a_meshed_pod_is_returned_and_counted_exactly() {
    with_lab(|lab| {
        let policy = lab.meshed();
        lab.set_policy(lab.pod(), &policy);
        for (flags, burst) in [(0, 0), (0, 5), (CONFIG_JUDGE_NON_TCP, 5)] {
            for mode in Mode::ALL {
                lab.set_config(|config| {
                    (config.mode, config.flags, config.event_burst) = (mode.code(), flags, burst);
                });
                let event = events(lab);
                for (name, packet, fate) in packets() {
                    let judged = flags != 0 && *mode != Mode::Off;
                    let (drop, counters) = match (fate, mode) {
                        (Passes(counter), _) if judged => (false, vec![counter]),
                        (Unseen | Passes(..), _) => (false, vec![]),
                        (Raw, Mode::Off) => (false, vec![NotJudged]),
                        (Raw, Mode::Audit) => (false, vec![BypassRaw, WouldDrop, event]),
                        (Raw, Mode::Enforce) => (true, vec![BypassRaw, BypassRawDropped, event]),
                    };
                    let what = format!("{name}, {}, flags {flags}, burst {burst}", mode.label());
                    assert_run(lab, &what, ("nb_egress", &packet, OUT), drop, &counters);
                }
            }
        }
    });
}

/// Whatever leaves by lo stays in the pod.
#[test]
fn nothing_is_dropped_on_loopback_and_no_icmp_anywhere() {
    with_lab(|lab| {
        let flags = POD_NON_TCP_DROP | POD_QUIC_DROP | POD_GAP4 | POD_GAP6 | POD_GAP_DROP;
        let strict = PodPolicy { flags: lab.meshed().flags | flags, ..lab.meshed() };
        lab.set_config(|config| {
            (config.mode, config.flags, config.hold_ns) =
                (Mode::Enforce.code(), CONFIG_JUDGE_NON_TCP | CONFIG_INBOUND, u64::MAX);
            config.unknown_policy = UnknownPolicy::Hold.code();
        });
        for kind in [PodKind::Meshed, PodKind::Unknown] {
            lab.set_policy(lab.pod(), &PodPolicy { kind: kind.code(), ..strict });
            let mut dropped = 0;
            for (name, packet, fate) in packets() {
                let new = if kind == PodKind::Meshed { Local } else { Unknown };
                let counters: &[Counter] = match &fate {
                    // A cut header on lo passes before anybody is asked.
                    Raw if name.contains("cut") || name == "no TCP at all" => &[],
                    Raw => &[new],
                    Unseen | Passes(_) => &[],
                };
                assert_run(lab, &format!("{name} on lo"), ("nb_egress", &packet, LO), false, counters);
                assert_run(lab, &format!("{name} in by lo"), ("nb_ingress", &packet, LO), false, &[]);
                let (code, _) = lab.run("nb_egress", &packet, OUT, 1).unwrap();
                match fate {
                    Unseen => assert_eq!(code, 1, "{name} is never dropped"),
                    Raw | Passes(_) => dropped += u32::from(code == 0),
                }
            }
            assert!(dropped > 10, "the policy is as strict as this test needs: {dropped}");
        }
    });
}

/// A row: name, the pod's policy, packet, where it is, whether it is dropped in enforce, what is counted then.
type Case<'a, Where = ()> = (&'a str, PodPolicy, &'a [u8], Where, bool, &'a [Counter]);

/// Policies that decide about packets which pass by default.
#[test]
fn switches_and_exemptions_of_a_pod() {
    with_lab(|lab| {
        let meshed = lab.meshed();
        let app = lab.app();
        let out = OUT;
        let marked = Skb { mark: 0x1337, ..OUT };
        lab.set_config(|config| (config.flags, config.event_burst) = (CONFIG_JUDGE_NON_TCP, 0));
        lab.exempt_port(PortKey::new(5, 6, LIST_EGRESS, 9000));
        lab.exempt_cidr(24, CidrKey::new(5, LIST_EGRESS, 4, address4([198, 51, 100, 0])));
        lab.exempt_id(IdKey { set: 5, kind: ID_UID, value: 0 });
        let (syn, quic, plain) = (v4(6, &tcp(SYN, 8080)), v4(17, &udp(443)), v4(17, &udp(5000)));
        let gap = [BypassRaw, BypassRawDropped, EventsSuppressed];
        let with = |flags| PodPolicy { flags: meshed.flags | flags, ..meshed };
        let mark = PodPolicy { mark: 0x1337, mark_mask: 0xffff, ..with(POD_PROXY_MARK) };
        let proxy = PodPolicy { proxy_cgroup: app, ..meshed };
        let uid = PodPolicy { proxy_uid: 0, ..meshed };
        let cases: [Case<'_, Skb>; 19] = [
            ("proxy by mark", mark, &syn, marked, false, &[Counter::Proxy]),
            ("another mark", mark, &syn, Skb { mark: 0x1338, ..OUT }, true, &gap),
            ("a mark that means nothing", meshed, &syn, marked, true, &gap),
            ("proxy by container", proxy, &syn, out, false, &[Counter::Proxy]),
            ("proxy by UID", uid, &syn, out, false, &[Counter::Proxy]),
            ("exempt port", with(POD_EXEMPT_PORTS), &v4(6, &tcp(SYN, 9000)), out, false, &[Counter::Exempt]),
            (
                "exempt port, v6",
                with(POD_EXEMPT_PORTS),
                &v6(6, &tcp(SYN, 9000)),
                out,
                false,
                &[Counter::Exempt],
            ),
            ("port beside it", with(POD_EXEMPT_PORTS), &v4(6, &tcp(SYN, 9001)), out, true, &gap),
            (
                "exempt network",
                with(POD_EXEMPT_CIDRS),
                &v4_to([198, 51, 100, 9], 6, 0, 0, &tcp(SYN, 8080)),
                out,
                false,
                &[Counter::Exempt],
            ),
            ("network beside it", with(POD_EXEMPT_CIDRS), &syn, out, true, &gap),
            ("exempt UID", with(POD_EXEMPT_IDS), &syn, out, false, &[Counter::Exempt]),
            ("QUIC switch", with(POD_QUIC_DROP), &quic, out, true, &[Quic, NonTcpDropped]),
            ("QUIC switch, other UDP", with(POD_QUIC_DROP), &plain, out, false, &[Counter::Udp]),
            ("UDP switch", with(POD_NON_TCP_DROP), &plain, out, true, &[Counter::Udp, NonTcpDropped]),
            ("UDP switch, DNS", with(POD_NON_TCP_DROP), &v4(17, &udp(53)), out, false, &[Dns]),
            (
                "UDP switch, multicast",
                with(POD_NON_TCP_DROP),
                &v4_to([224, 0, 0, 251], 17, 0, 0, &udp(5353)),
                out,
                false,
                &[Counter::Udp],
            ),
            (
                "UDP switch, v6 multicast",
                with(POD_NON_TCP_DROP),
                &v6_to(MULTICAST6, 17, &udp(5353)),
                out,
                false,
                &[Counter::Udp],
            ),
            (
                "UDP switch, IP in IP",
                with(POD_NON_TCP_DROP),
                &v4(4, &syn),
                out,
                true,
                &[Other, NonTcpDropped],
            ),
            ("family gap", with(POD_GAP4), &syn, out, false, &[BypassRaw, EventsSuppressed]),
        ];
        for mode in [Mode::Enforce, Mode::Audit] {
            lab.set_config(|config| config.mode = mode.code());
            for (name, policy, packet, skb, drop, counters) in cases {
                lab.set_policy(lab.pod(), &policy);
                let enforced = mode == Mode::Enforce;
                let audited = |counter: &Counter| match counter {
                    NonTcpDropped | BypassRawDropped if !enforced => WouldDrop,
                    counter => *counter,
                };
                let counters: Vec<Counter> = counters.iter().map(audited).collect();
                let what = format!("{name}, {}", mode.label());
                assert_run(lab, &what, ("nb_egress", packet, skb), drop && enforced, &counters);
            }
        }
    });
}

/// A marked packet on lo for an address that is not local is TPROXY's, if a TCP socket sent it: anybody can mark and
/// send a raw one.
#[test]
fn a_raw_socket_proves_no_redirection() {
    with_lab(|lab| {
        let policy = PodPolicy { flags: POD_PROXY_UID | POD_TPROXY, ..lab.meshed() };
        lab.set_policy(lab.pod(), &policy);
        let marked = Skb { ifindex: 1, mark: 0x539 };
        for (name, packet, skb) in [
            ("v4", v4(6, &tcp(SYN, 8080)), marked),
            ("v6", v6(6, &tcp(SYN, 8080)), marked),
            ("not marked", v4(6, &tcp(SYN, 8080)), LO),
            ("to itself", v4_to(FROM4, 6, 0, 0, &tcp(SYN, 8080)), marked),
            ("to 127.0.0.1", v4_to([127, 0, 0, 1], 6, 0, 0, &tcp(SYN, 8080)), marked),
        ] {
            assert_run(lab, name, ("nb_egress", &packet, skb), false, &[Local]);
        }
    });
}

#[test]
fn pods_that_are_not_meshed_or_not_known() {
    with_lab(|lab| {
        let (pod, meshed) = (lab.pod(), lab.meshed());
        let syn = v4(6, &tcp(SYN, 8080));
        let egress = ("nb_egress", &syn[..], OUT);
        lab.set_config(|config| (config.mode, config.hold_ns) = (Mode::Enforce.code(), u64::MAX));
        lab.set_policy(pod, &PodPolicy { kind: PodKind::Exempt.code(), ..meshed });
        assert_run(lab, "exempt", egress, false, &[NotJudged]);
        lab.set_policy(pod, &PodPolicy { mode: Mode::Off.code(), ..meshed });
        assert_run(lab, "switched off for this pod", egress, false, &[NotJudged]);
        lab.set_policy(pod, &PodPolicy { mode: Mode::Audit.code(), ..meshed });
        assert_run(lab, "audit for this pod", egress, false, &[BypassRaw, WouldDrop, EventsSuppressed]);
        lab.remove_policy(pod);
        assert_run(lab, "not listed", egress, false, &[Unknown]);
        let added = lab.policy(pod).expect("the program adds an entry");
        assert_eq!((added.kind, added.level), (PodKind::Unknown.code(), meshed.level));
        assert!(added.since_ns > 0);
        lab.set_config(|config| config.unknown_policy = UnknownPolicy::Hold.code());
        assert_run(lab, "unknown and held", egress, true, &[Unknown, Counter::Held]);
        lab.set_config(|config| config.hold_ns = 0);
        assert_run(lab, "held long enough", egress, false, &[Unknown]);
        lab.set_config(|config| config.mode = 0);
        assert_run(lab, "before the agent has written its settings", egress, false, &[]);
    });
}

#[test]
fn what_arrives_at_a_meshed_pod() {
    with_lab(|lab| {
        let (pod, app) = (lab.pod(), lab.app());
        // Another container is the proxy.
        let meshed = PodPolicy { proxy_cgroup: 1, ..lab.meshed() };
        let proxy = PodPolicy { proxy_cgroup: app, ..meshed };
        let strict = PodPolicy { flags: meshed.flags | POD_INBOUND_DROP, ..meshed };
        let ports = PodPolicy { flags: strict.flags | POD_EXEMPT_PORTS, ..strict };
        let (inbound, ok) = ([Counter::InboundBypass, EventsSuppressed], [Counter::InboundOk]);
        let dropped = [Counter::InboundBypass, Counter::InboundDropped, EventsSuppressed];
        let (syn, syn6) = (v4(6, &tcp(SYN, 8080)), v6(6, &tcp(SYN, 8080)));
        lab.exempt_port(PortKey::new(5, 6, LIST_INGRESS, 9090));
        lab.exempt_port(PortKey::new(5, 6, LIST_EGRESS, 9000));
        lab.set_config(|config| config.mode = Mode::Enforce.code());
        lab.set_policy(pod, &strict);
        assert_run(lab, "inbound not judged", ("nb_ingress", &syn, OUT), false, &[]);
        lab.set_config(|config| config.flags = CONFIG_INBOUND);
        let cases: [Case<'_>; 11] = [
            ("to the application", meshed, &syn, (), false, &inbound),
            ("to the application, v6", meshed, &syn6, (), false, &inbound),
            ("to the application, dropped", strict, &syn, (), true, &dropped),
            (
                "to the application behind extension headers",
                strict,
                &v6(0, &chain(&tcp(SYN, 80))),
                (),
                true,
                &dropped,
            ),
            ("to the proxy", proxy, &syn, (), false, &ok),
            ("proxy not known yet", lab.meshed(), &syn, (), false, &ok),
            ("exempt port", ports, &v4(6, &tcp(SYN, 9090)), (), false, &ok),
            ("port exempt for the other direction", ports, &v4(6, &tcp(SYN, 9000)), (), true, &dropped),
            ("established", strict, &v4(6, &tcp(ACK, 8080)), (), false, &[]),
            ("UDP", strict, &v4(17, &udp(8080)), (), false, &[]),
            ("neighbour solicitation", strict, &v6(58, &[135, 0, 0, 0, 0, 0, 0, 0]), (), false, &[]),
        ];
        for (name, policy, packet, (), drop, counters) in cases {
            lab.set_policy(pod, &policy);
            assert_run(lab, name, ("nb_ingress", packet, OUT), drop, counters);
        }
        lab.set_policy(pod, &strict);
        lab.node_address(address4(FROM4));
        lab.node_address(address(FROM6));
        assert_run(lab, "kubelet's probe", ("nb_ingress", &syn, OUT), false, &ok);
        assert_run(lab, "kubelet's probe, v6", ("nb_ingress", &syn6, OUT), false, &ok);
    });
}

/// Garbage of every length: the program in the kernel does what the table does on the host, to the counter.
#[test]
fn kernel_and_host_agree_on_garbage() {
    with_lab(|lab| {
        let policy = PodPolicy { flags: lab.meshed().flags | POD_NON_TCP_DROP, ..lab.meshed() };
        lab.set_policy(lab.pod(), &policy);
        let mut noise = Noise(0x6e6f_6279_7061_7373);
        let (mut ran, mut refused, mut dropped, mut counted) = (0u32, 0u32, 0u32, [0; COUNTERS]);
        for mode in [Mode::Off, Mode::Audit, Mode::Enforce] {
            lab.set_config(|config| {
                (config.mode, config.flags) = (mode.code(), CONFIG_JUDGE_NON_TCP);
            });
            let settings = Settings {
                mode: mode.code(),
                unknown_policy: UnknownPolicy::Pass.code(),
                flags: CONFIG_JUDGE_NON_TCP,
                hold_ns: 0,
                max_silence_ns: 0,
            };
            for len in 0..=160 - ETHERNET {
                for turn in 0..60 {
                    let skb = if turn % 6 == 0 { LO } else { OUT };
                    let ip = noise.packet(len);
                    lab.clear();
                    let Ok((code, _)) = lab.run("nb_egress", &ethernet(&ip), skb, 1) else {
                        // Newer kernels refuse what is shorter than the header that the EtherType announces.
                        assert!(len < 40, "the kernel refused {len} bytes");
                        refused += 1;
                        continue;
                    };
                    let (drop, counters) = on_the_host(&ip, skb, settings, &policy);
                    let what = format!("{}, {skb:?}, {ip:02x?}", mode.label());
                    assert_eq!(shown(&lab.counted()), shown(&ones(&counters)), "{what}");
                    assert_eq!(shown(&lab.totals()), shown(&ones(&counters)), "{what}");
                    assert_eq!(code, u32::from(!drop), "{what}");
                    assert!(!drop || (mode == Mode::Enforce && skb == OUT), "{what}");
                    ran += 1;
                    dropped += u32::from(drop);
                    for (sum, count) in counted.iter_mut().zip(lab.counted()) {
                        *sum += count;
                    }
                }
            }
        }
        // The noise reaches what it is to reach.
        assert!(ran > 20_000 && dropped > 1_000, "ran {ran}, refused {refused}, dropped {dropped}");
        for counter in [BypassRaw, Counter::Udp, Other, NotJudged, Local, WouldDrop, NonTcpDropped] {
            assert!(counted[counter.code() as usize] > 50, "{counter:?}: {:?}", shown(&counted));
        }
    });
}
