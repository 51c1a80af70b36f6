use super::*;

const S: u64 = 1_000_000_000;
const NOW: u64 = 10_000 * S;
const YES: Answer = Answer::Redirected { port: 4140 };
const NO: Answer = Answer::NotRedirected { ifindex: 2 };

/// Seconds before now.
const fn ago(seconds: u64) -> u64 {
    NOW - seconds * S
}

fn known(change: impl FnOnce(&mut FamilyEvidence)) -> FamilyEvidence {
    let mut evidence = FamilyEvidence::default();
    change(&mut evidence);
    evidence
}

fn proof_and_bypass(proof: u64, reason: Reason, bypass: u64) -> FamilyEvidence {
    known(|e| (e.proof, e.bypass) = (Some(ago(proof)), Some((reason, ago(bypass)))))
}

#[test]
fn one_family() {
    use PodVerdict::{Bypassing, Partial, Redirected, Unknown};
    use Reason::{
        FamilyGap, NoRoute, NotRedirected, Preexisting, ProbeFailed, ProxyUidImpersonation, RawSocket,
    };
    let failed = Answer::Failed { reason: "no_process" };
    let both = proof_and_bypass;
    let table: &[(&str, FamilyEvidence, PodVerdict, (PodVerdict, Option<Reason>))] = &[
        ("silence", known(|_| ()), Unknown, (Unknown, None)),
        ("silence after a verdict", known(|_| ()), Redirected, (Unknown, None)),
        ("a proof", known(|e| e.proof = Some(ago(1))), Unknown, (Redirected, None)),
        ("an old proof", known(|e| e.proof = Some(ago(9_000))), Unknown, (Redirected, None)),
        (
            "a bypass",
            known(|e| e.bypass = Some((NotRedirected, ago(1)))),
            Unknown,
            (Bypassing, Some(NotRedirected)),
        ),
        (
            "a raw socket",
            known(|e| e.bypass = Some((RawSocket, ago(1)))),
            Unknown,
            (Bypassing, Some(RawSocket)),
        ),
        ("the canary", known(|e| e.canary = Some(ago(1))), Unknown, (Bypassing, Some(NotRedirected))),
        (
            "the validator failed",
            known(|e| e.validator = Some((95, ago(1)))),
            Unknown,
            (Bypassing, Some(NotRedirected)),
        ),
        ("the validator is content", known(|e| e.validator = Some((0, ago(1)))), Unknown, (Redirected, None)),
        ("the probe: yes", known(|e| e.probe = Some((YES, ago(1)))), Unknown, (Redirected, None)),
        ("the probe: no", known(|e| e.probe = Some((NO, ago(1)))), Unknown, (Bypassing, Some(NotRedirected))),
        (
            "the probe: no route",
            known(|e| e.probe = Some((Answer::NoRoute, ago(1)))),
            Unknown,
            (Unknown, Some(NoRoute)),
        ),
        (
            "the probe failed",
            known(|e| e.probe = Some((failed, ago(1)))),
            Unknown,
            (Unknown, Some(ProbeFailed)),
        ),
        (
            "a failed probe says nothing against a proof",
            known(|e| (e.probe, e.proof) = (Some((failed, ago(1))), Some(ago(5)))),
            Unknown,
            (Redirected, None),
        ),
        ("a proof soon after a bypass", both(1, NotRedirected, 10), Unknown, (Partial, Some(NotRedirected))),
        (
            "a bypass soon after a proof",
            both(10, NotRedirected, 1),
            Redirected,
            (Partial, Some(NotRedirected)),
        ),
        ("a proof long after a bypass", both(1, NotRedirected, 61), Bypassing, (Redirected, None)),
        (
            "a bypass long after a proof",
            both(61, NotRedirected, 1),
            Redirected,
            (Bypassing, Some(NotRedirected)),
        ),
        ("once partial, it lasts", both(1, NotRedirected, 299), Partial, (Partial, Some(NotRedirected))),
        ("but not for ever", both(1, NotRedirected, 301), Partial, (Redirected, None)),
        ("nor the other way", both(301, NotRedirected, 1), Partial, (Bypassing, Some(NotRedirected))),
        (
            "a repair is believed at once",
            known(|e| (e.bypass, e.probe) = (Some((NotRedirected, ago(2))), Some((YES, ago(1))))),
            Bypassing,
            (Redirected, None),
        ),
        (
            "also of what the validator and the canary said",
            known(|e| {
                (e.validator, e.canary, e.probe) = (Some((95, ago(3))), Some(ago(2)), Some((YES, ago(1))));
            }),
            Bypassing,
            (Redirected, None),
        ),
        (
            "a bypass after the probe's yes contradicts it",
            known(|e| (e.bypass, e.probe) = (Some((NotRedirected, ago(1))), Some((YES, ago(2))))),
            Redirected,
            (Partial, Some(NotRedirected)),
        ),
        (
            "rules that are gone are believed at once",
            known(|e| (e.proof, e.probe) = (Some(ago(2)), Some((NO, ago(1))))),
            Redirected,
            (Bypassing, Some(NotRedirected)),
        ),
        (
            "a proof after the probe's no contradicts it",
            known(|e| (e.proof, e.probe) = (Some(ago(1)), Some((NO, ago(2))))),
            Bypassing,
            (Partial, Some(NotRedirected)),
        ),
        (
            "rules in place do not stop the proxy's UID",
            known(|e| (e.bypass, e.probe) = (Some((ProxyUidImpersonation, ago(2))), Some((YES, ago(1))))),
            Redirected,
            (Partial, Some(ProxyUidImpersonation)),
        ),
        (
            "old connections alone",
            known(|e| e.preexisting = Some((3, ago(900)))),
            Unknown,
            (Bypassing, Some(Preexisting)),
        ),
        (
            "old connections of a pod that is redirected now",
            known(|e| (e.preexisting, e.probe) = (Some((3, ago(900))), Some((YES, ago(1))))),
            Unknown,
            (Partial, Some(Preexisting)),
        ),
        (
            "none left",
            known(|e| (e.preexisting, e.probe) = (Some((0, ago(1))), Some((YES, ago(900))))),
            Partial,
            (Redirected, None),
        ),
        (
            "a family without a way out any more",
            known(|e| (e.bypass, e.probe) = (Some((NotRedirected, ago(2))), Some((Answer::NoRoute, ago(1))))),
            Bypassing,
            (Unknown, Some(NoRoute)),
        ),
    ];
    for (name, evidence, before, expected) in table {
        assert_eq!(judge(evidence, false, *before, NOW), *expected, "{name}");
    }
    let gap = |e: &FamilyEvidence| judge(e, true, Unknown, NOW);
    assert_eq!(gap(&known(|_| ())), (Unknown, Some(FamilyGap)), "a gap that nobody uses");
    assert_eq!(
        gap(&known(|e| e.probe = Some((NO, ago(1))))),
        (Unknown, Some(FamilyGap)),
        "as everybody knows"
    );
    assert_eq!(
        gap(&known(|e| e.bypass = Some((NotRedirected, ago(1))))),
        (Bypassing, Some(FamilyGap)),
        "somebody uses it"
    );
    assert_eq!(gap(&known(|e| e.bypass = Some((RawSocket, ago(1))))), (Bypassing, Some(RawSocket)));
}

#[test]
fn what_comes_now_and_then_does_not_make_the_verdict_flap() {
    for (proofs, bypasses) in [(7, 100), (100, 7), (61, 120), (250, 5), (5, 250)] {
        let (mut verdict, mut changes) = (PodVerdict::Unknown, 0);
        let mut evidence = FamilyEvidence::default();
        for second in 1..20_000 {
            if second % proofs == 0 {
                evidence.proof = Some(second * S);
            }
            if second % bypasses == 0 {
                evidence.bypass = Some((Reason::NotRedirected, second * S));
            }
            let (now, _) = judge(&evidence, false, verdict, second * S);
            changes += u32::from(now != verdict);
            verdict = now;
        }
        assert!(changes <= 4, "every {proofs} s a proof, every {bypasses} s a bypass: {changes} changes");
    }
}

#[test]
fn older_signs_change_nothing_and_counters_tell_times_and_kinds() {
    let mut evidence = PodEvidence::default();
    let (family, newer, older) = (Family::V6, ago(1), ago(9));
    for (at, answer) in [(newer, YES), (older, NO)] {
        add(&mut evidence, &Evidence::Probe { family, answer, at });
    }
    add(&mut evidence, &Evidence::Canary { family, at: newer });
    add(&mut evidence, &Evidence::Canary { family, at: older });
    assert_eq!((evidence[V6].probe, evidence[V6].canary), (Some((YES, newer)), Some(newer)));
    assert_eq!(evidence[V4], FamilyEvidence::default(), "the other family is another matter");

    let mut counters = PodCounters { redirect_ns: [ago(5), 0], bypass_ns: [ago(4), 0], ..PodCounters::ZERO };
    counters.count[Counter::Bypass.code() as usize] = 1;
    let mut evidence = PodEvidence::default();
    add_counters(&mut evidence, &counters, None, 0);
    assert_eq!(evidence[V4].proof, Some(ago(5)));
    assert_eq!(evidence[V4].bypass, Some((Reason::NotRedirected, ago(4))));
    let before = counters;
    counters.count[Counter::BypassRaw.code() as usize] = 1;
    counters.bypass_ns[V4] = ago(3);
    add_counters(&mut evidence, &counters, Some(&before), 0);
    assert_eq!(evidence[V4].bypass, Some((Reason::RawSocket, ago(3))), "what grew since");
    add(
        &mut evidence,
        &Evidence::Bypass { family: Family::V4, reason: Reason::ProxyUidImpersonation, at: ago(3) },
    );
    add_counters(&mut evidence, &counters, Some(&counters), 0);
    assert_eq!(evidence[V4].bypass, Some((Reason::ProxyUidImpersonation, ago(3))), "the event knows better");

    let mut evidence = PodEvidence::default();
    add_counters(&mut evidence, &counters, None, ago(2));
    assert_eq!(evidence, PodEvidence::default(), "of an earlier sandbox");
}

#[test]
fn labels_are_the_ones_of_events() {
    for verdict in [
        nobypass_common::ids::Verdict::Bypass,
        nobypass_common::ids::Verdict::BypassRaw,
        nobypass_common::ids::Verdict::FamilyGap,
        nobypass_common::ids::Verdict::ProxyUidImpersonation,
    ] {
        assert!(Reason::from_label(verdict.label()).is_some(), "{verdict:?}");
    }
    assert!(Reason::ALL.iter().all(|reason| Reason::from_label(reason.label()) == Some(*reason)));
}
