//! What must hold for every packet, pod and setting.

use proptest::prelude::*;

use super::*;

prop_compose! {
    fn any_policy()(kind in 0u32..5, mode in 0u32..5, flags in 0u32..0x10000, proxy in prop_oneof![Just(0), Just(PROXY)],
                    since_ns in 0u64..2000, mark in 0u32..4, mark_mask in 0u32..4) -> PodPolicy {
        PodPolicy { kind, mode, flags, level: POD_LEVEL, proxy_cgroup: proxy, since_ns, proxy_uid: 2102, mark,
                    mark_mask, ..PodPolicy::default() }
    }
}

fn any_origin() -> impl Strategy<Value = SynOrigin> {
    prop_oneof![
        Just(SynOrigin::First),
        Just(SynOrigin::Retry),
        Just(SynOrigin::RetryOfHeld),
        Just(SynOrigin::RetryOfDropped),
        Just(SynOrigin::Raw)
    ]
}

fn any_packet() -> impl Strategy<Value = Packet> {
    let transport = prop_oneof![
        Just(Transport { kind: Kind::Syn, sport: 1, dport: 8080 }),
        Just(Transport::of(Kind::Tcp)),
        Just(Transport::of(Kind::TcpCut)),
        (0u16..500).prop_map(|dport| Transport { kind: Kind::Udp, sport: 1, dport }),
        Just(Transport::of(Kind::Icmp)),
        Just(Transport::of(Kind::Opaque)),
    ];
    let address = || prop_oneof![Just(OUTSIDE), Just(OWN), Just(LOCALHOST), Just(v4(224, 0, 0, 1))];
    (transport, prop_oneof![Just(4u8), Just(6u8)], 1u32..3, 0u32..4, address(), address()).prop_map(
        |(transport, family, ifindex, mark, source, destination)| Packet {
            family,
            addresses: Addresses { source, destination },
            transport,
            ifindex,
            mark,
        },
    )
}

proptest! {
    /// What must hold for every packet, pod and setting.
    #[test]
    fn invariants(packet in any_packet(), policy in any_policy(), mode in 1u32..4, unknown in 0u32..2,
                  now_ns in 0u64..4000, uid in prop_oneof![Just(0u32), Just(2102)], origin in any_origin(),
                  container in prop_oneof![Just(APP), Just(PROXY)], exempt in any::<bool>()) {
        let settings = Settings { mode, unknown_policy: unknown, flags: CONFIG_JUDGE_NON_TCP, hold_ns: 1_000, max_silence_ns: 0 };
        let mut facts = Known { now_ns, uid, origin, container, exempt, ..Known::default() };
        let got = judge(&packet, &settings, &policy, &mut facts.clone());
        let described = format!("{packet:?} {policy:?} {got:?}");
        let effective = effective_mode(mode, policy.mode);
        if got.drop {
            prop_assert!(got.held || effective == Mode::Enforce.code(), "only enforce and hold drop: {}", described);
            prop_assert!(packet.ifindex != LOOPBACK_IFINDEX, "nothing on lo is dropped: {}", described);
            prop_assert!(!matches!(packet.transport.kind, Kind::Tcp | Kind::Icmp), "{}", described);
            prop_assert!(!got.would_drop);
        }
        if got.verdict.is_bypass() {
            prop_assert_eq!(policy.kind, PodKind::Meshed.code(), "{}", &described);
        }
        // Audit predicts enforce: same verdict, same count, and would_drop where enforce drops.
        if policy.kind == PodKind::Meshed.code() && effective == Mode::Audit.code() {
            let pod = PodPolicy { mode: Mode::Enforce.code(), ..policy };
            let enforced = judge(&packet, &settings, &pod, &mut facts);
            prop_assert_eq!(enforced.verdict, got.verdict);
            prop_assert_eq!(enforced.count, got.count);
            prop_assert_eq!(enforced.drop, got.would_drop || (got.verdict == Verdict::Retry && enforced.drop));
        }
    }
}
