use clap::Parser as _;

use super::*;
use crate::policy::check;
use crate::remedy::policy::Step;

fn flags(args: &[&str]) -> Config {
    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        config: Config,
    }
    Cli::parse_from(std::iter::once("agent").chain(args.iter().copied())).config
}

fn file(text: &str) -> PolicyFile {
    check::parse(&format!("apiVersion: nobypass.dev/v1alpha1\n{text}\n")).unwrap()
}

#[test]
fn where_the_file_says_nothing_the_flags_hold() {
    let flags = flags(&[
        "--mode",
        "enforce",
        "--unknown-pods",
        "hold",
        "--hold-ms",
        "7",
        "--non-tcp",
        "drop",
        "--quic",
        "count",
        "--inbound",
        "off",
        "--event-rate",
        "99",
        "--remedy-evict",
        "dry-run",
    ]);
    let plain = Effective::new(&flags, &file(""), None);
    assert_eq!((plain.mode, plain.mode_source), (ModeName::Enforce, Source::Flag));
    assert_eq!((plain.unknown_pods, plain.hold_ms, plain.event_rate), (Unknown::Hold, 7, 99));
    let traffic = Traffic {
        non_tcp: NonTcp::Drop,
        quic: NonTcp::Count,
        family_gap: FamilyGap::Report,
        inbound: Inbound::Off,
    };
    assert_eq!(plain.traffic, traffic);
    assert_eq!(plain.fail_open_namespaces, ["kube-system".into()]);
    assert_eq!((plain.remedies.repair, plain.remedies.evict), (Step::Off, Step::DryRun));

    let text = "mode: audit\nunknownPods: pass\nholdMs: 5\nnonTcp: ignore\nquic: drop\nfamilyGap: drop\n\
                inbound: enforce\nevents: {rate: 1}\nfailOpenNamespaces: []\nremedies: {repair: on}";
    let told = Effective::new(&flags, &file(text), None);
    assert_eq!((told.mode, told.mode_source), (ModeName::Audit, Source::Policy));
    assert_eq!((told.unknown_pods, told.hold_ms, told.event_rate), (Unknown::Pass, 5, 1));
    assert_eq!((told.traffic.quic, told.traffic.inbound), (NonTcp::Drop, Inbound::Enforce));
    assert_eq!((told.remedies.repair, told.remedies.evict), (Step::On, Step::DryRun));
    let hand = Effective::new(&flags, &file(text), Some(Mode::Off));
    assert_eq!((hand.mode, hand.mode_source), (ModeName::Off, Source::Hand));
    assert_eq!(hand.mode_without_hand, ModeName::Audit);
}

#[test]
fn a_namespace_changes_what_it_says_and_nothing_else() {
    let text = "quic: count\nnamespaces: [{names: [shop], quic: drop}, {names: [shop, x], inbound: enforce}]";
    let policy = Effective::new(&flags(&[]), &file(text), None);
    let shop = policy.traffic("shop", None);
    assert_eq!((shop.quic, shop.inbound, shop.non_tcp), (NonTcp::Drop, Inbound::Audit, NonTcp::Ignore));
    let x = policy.traffic("x", None);
    assert_eq!((x.quic, x.inbound), (NonTcp::Count, Inbound::Enforce));
    assert_eq!(policy.traffic("y", None), policy.traffic);
}

#[test]
fn the_programs_judge_what_any_namespace_asks_for() {
    for (text, non_tcp, inbound) in [
        ("inbound: off", false, false),
        ("", false, true),
        ("inbound: off\nquic: count", true, false),
        ("inbound: off\nnamespaces: [{names: [a], nonTcp: drop}]", true, false),
        ("inbound: off\nnamespaces: [{names: [a], inbound: audit}]", false, true),
    ] {
        let mut config = KernelConfig { flags: u32::MAX, ..KernelConfig::default() };
        Effective::new(&flags(&[]), &file(text), None).kernel(&mut config);
        assert_eq!(config.flags & CONFIG_JUDGE_NON_TCP != 0, non_tcp, "{text}");
        assert_eq!(config.flags & CONFIG_INBOUND != 0, inbound, "{text}");
    }
    let mut config = KernelConfig::default();
    let text = "mode: enforce\nunknownPods: hold\nholdMs: 2\nevents: {rate: 4}";
    Effective::new(&flags(&[]), &file(text), None).kernel(&mut config);
    let KernelConfig { mode, unknown_policy, hold_ns, event_rate, event_burst, .. } = config;
    assert_eq!((mode, unknown_policy, hold_ns, event_rate, event_burst), (3, 1, 2_000_000, 4, 12));
    for (text, silence) in [
        ("", 0),
        ("maxAgentSilence: 60s", 0),
        ("maxAgentSilence: 60s\nonSilence: keep", 0),
        ("maxAgentSilence: 60s\nonSilence: audit", 60_000_000_000),
    ] {
        Effective::new(&flags(&[]), &file(text), None).kernel(&mut config);
        assert_eq!(config.max_silence_ns, silence, "{text}");
    }
}
