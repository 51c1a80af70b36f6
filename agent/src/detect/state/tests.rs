use super::*;
use crate::detect::evidence::Evidence;
use crate::mesh::Unsupported;
use crate::pods::{ContainerId, PodUid};
use crate::probe::Answer;

const S: u64 = 1_000_000_000;
const UID: &str = "2c48913c-b29f-11e7-9350-020968147796";

fn pod(uid: &str, sandbox: &str) -> Arc<PodView> {
    Arc::new(PodView {
        mesh: "linkerd".into(),
        kind: PodKind::Meshed,
        families: [true, true],
        sandbox: ContainerId::parse(&sandbox.repeat(64)),
        ..PodView::unknown(PodUid::parse(uid).unwrap(), 10)
    })
}

fn counted(redirect: u64, bypass: u64) -> PodCounters {
    PodCounters { redirect_ns: [redirect, 0], bypass_ns: [bypass, 0], ..PodCounters::ZERO }
}

fn probe(answer: Answer, at: u64) -> Evidence {
    Evidence::Probe { family: Family::V4, answer, at }
}

#[test]
fn each_change_is_told_once() {
    let mut state = PodState::new(pod(UID, "a"), 0, 0);
    assert_eq!(state.evaluate(S), [], "nothing was seen");
    state.count(&counted(0, 5 * S));
    let [change] = state.evaluate(6 * S)[..] else { panic!("one family changed") };
    assert_eq!(change.family, Family::V4);
    assert_eq!((change.before.0, change.after.0), (PodVerdict::Unknown, PodVerdict::Bypassing));
    assert_eq!(state.families[0].since, 6 * S);
    state.count(&counted(0, 7 * S));
    assert_eq!(state.evaluate(8 * S), [], "more of the same");
    assert_eq!(state.families[0].since, 6 * S);
    assert_eq!((state.verdict(), state.is_bypassing()), (PodVerdict::Bypassing, true));
    state.add(&probe(Answer::Redirected { port: 4140 }, 9 * S));
    assert_eq!(state.evaluate(10 * S).len(), 1);
    assert_eq!(state.verdicts(), [PodVerdict::Redirected, PodVerdict::Unknown]);
}

#[test]
fn a_new_sandbox_knows_nothing_of_the_old_one() {
    for created in [20 * S, 0] {
        let mut state = PodState::new(pod(UID, "a"), S, S);
        state.count(&counted(0, 5 * S));
        state.add(&probe(Answer::NotRedirected { ifindex: 2 }, 6 * S));
        state.evaluate(7 * S);
        assert_eq!(state.verdict(), PodVerdict::Bypassing);
        // Made at `created`; heard of at 21 s.
        state.renew(pod(UID, "b"), created, 21 * S);
        // The kernel still has the old connection's time.
        state.count(&counted(0, 5 * S));
        state.add(&probe(Answer::NotRedirected { ifindex: 2 }, 6 * S));
        state.evaluate(22 * S);
        assert_eq!(state.verdict(), PodVerdict::Unknown, "made at {created}");
        state.count(&counted(0, 23 * S));
        state.evaluate(24 * S);
        assert_eq!(state.verdict(), PodVerdict::Bypassing);
    }
}

#[test]
fn a_sandbox_that_becomes_known_keeps_what_is_its_own() {
    let mut state = PodState::new(pod(UID, ""), 0, 0);
    state.count(&counted(0, 5 * S));
    state.renew(pod(UID, "a"), 4 * S, 6 * S);
    state.evaluate(7 * S);
    assert_eq!(state.verdict(), PodVerdict::Bypassing, "younger than the sandbox");
    let mut state = PodState::new(pod(UID, ""), 0, 0);
    state.count(&counted(0, 3 * S));
    state.renew(pod(UID, "a"), 4 * S, 6 * S);
    state.evaluate(7 * S);
    assert_eq!(state.verdict(), PodVerdict::Unknown, "older than the sandbox");
}

#[test]
fn what_cannot_be_seen_is_unsupported_and_what_is_not_judged_unknown() {
    let mut view = PodView::clone(&pod(UID, "a"));
    view.unsupported = Some(Unsupported::VirtualMachine);
    let mut state = PodState::new(Arc::new(view.clone()), 0, 0);
    state.count(&counted(5 * S, 5 * S));
    state.evaluate(6 * S);
    assert_eq!(state.verdicts(), [PodVerdict::Unsupported; 2], "never redirected");
    assert_eq!(state.families[0].reason, Some(Reason::ForeignKernel));
    view.unsupported = Some(Unsupported::GroupRules);
    state.renew(Arc::new(view.clone()), 0, 6 * S);
    state.evaluate(6 * S);
    assert_eq!(
        (state.families[0].verdict, state.families[0].reason),
        (PodVerdict::Unsupported, Some(Reason::GroupRules))
    );
    (view.unsupported, view.kind) = (None, PodKind::Exempt);
    state.renew(Arc::new(view), 0, 7 * S);
    state.evaluate(8 * S);
    assert_eq!(state.verdicts(), [PodVerdict::Unknown; 2]);
}

#[test]
fn a_cgroup_id_that_is_used_again_is_another_pod() {
    let state = PodState::new(pod(UID, "a"), 0, 0);
    assert!(state.is(&pod(UID, "b")));
    assert!(!state.is(&pod("aaaaaaaa-b29f-11e7-9350-020968147796", "a")));
}

#[test]
fn looking_changes_nothing() {
    let state = PodState::new(pod(UID, "a"), 0, 0);
    let shown = state.with(&counted(0, 5 * S), 6 * S);
    assert_eq!((shown.verdict(), state.verdict()), (PodVerdict::Bypassing, PodVerdict::Unknown));
}
