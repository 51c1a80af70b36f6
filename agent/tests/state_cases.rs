//! Public reports about what is known of pods over time: verdicts, identity, what is away and what comes back.

#![expect(clippy::unwrap_used, reason = "the helpers of a test may panic as the test may")]

use std::sync::Arc;

use nobypass::detect::verdict::PodVerdict;
use nobypass::detect::{Evidence, Family, PodState, Reason};
use nobypass::pods::PodUid;
use nobypass::pods::join::{Join, Origin};
use nobypass::pods::model::{Container, ContainerId, KnownBy, PodFacts, State};
use nobypass::pods::source::PodUpdate;
use nobypass::policy::PodView;
use nobypass::policy::registry::Registry;
use nobypass::probe::Answer;
use nobypass_common::abi::PodCounters;
use nobypass_common::ids::PodKind;

const S: u64 = 1_000_000_000;
const REDIRECTED: Answer = Answer::Redirected { port: 15001 };
const NOT_REDIRECTED: Answer = Answer::NotRedirected { ifindex: 2 };

fn uid(n: u32) -> PodUid {
    PodUid::parse(&format!("2c48913c-b29f-11e7-9350-{n:012x}")).unwrap()
}

fn id(digit: &str) -> ContainerId {
    ContainerId::parse(&digit.repeat(64)).unwrap()
}

/// A meshed pod in the sandbox of this id, and what is known of it.
fn pod(n: u32, sandbox: &str) -> Arc<PodView> {
    Arc::new(PodView {
        kind: PodKind::Meshed,
        mesh: "istio-ambient".into(),
        families: [true, true],
        sandbox: Some(id(sandbox)),
        ..PodView::unknown(uid(n), n.into())
    })
}

fn state(n: u32) -> PodState {
    PodState::new(pod(n, "a"), 0, 0)
}

fn probe(answer: Answer, at: u64) -> Evidence {
    Evidence::Probe { family: Family::V4, answer, at }
}

fn v4(state: &PodState) -> (PodVerdict, Option<Reason>) {
    (state.families[0].verdict, state.families[0].reason)
}

/// istio/istio#14327: after a restart of the cluster it depends on the order of starts whether a pod is redirected. What was
/// proved in one sandbox, or before the boot, says nothing of the next.
#[test]
fn istio_14327_another_sandbox_or_boot_is_unknown_until_it_is_seen() {
    let mut state = state(1);
    state.add(&probe(REDIRECTED, 5 * S));
    state.count(&PodCounters { redirect_ns: [6 * S, 0], ..PodCounters::ZERO });
    state.evaluate(7 * S);
    assert_eq!(v4(&state).0, PodVerdict::Redirected);
    state.renew(pod(1, "b"), 8 * S, 9 * S);
    state.evaluate(9 * S);
    assert_eq!(v4(&state), (PodVerdict::Unknown, None), "no proof of the new sandbox");
    state.add(&probe(NOT_REDIRECTED, 10 * S));
    state.evaluate(10 * S);
    assert_eq!(v4(&state), (PodVerdict::Bypassing, Some(Reason::NotRedirected)));

    // A container that the API still shows as running was started before this boot: it is not running.
    let mut facts = PodFacts::new(uid(1), "shop", "cart");
    let run =
        |at| Container { id: Some(id("c")), state: State::Running, created_at: at, ..Container::new("app") };
    facts.containers = vec![run(1_000_000_000)];
    let booted_at = 5_000_000_000;
    let told = Join::new(booted_at).update(Origin::Api, PodUpdate::Upsert(Arc::new(facts)));
    let [PodUpdate::Upsert(known)] = &told[..] else { panic!("{told:?}") };
    assert_eq!((known.containers[0].state, known.containers[0].id), (State::Waiting, None));
}

/// istio/istio#55968 (and #56652): after a reboot the rules of some pods are missing, and only of some.
#[test]
fn istio_55968_of_two_pods_the_one_without_rules_is_named() {
    let (mut with, mut without) = (state(1), state(2));
    for (state, answer) in [(&mut with, REDIRECTED), (&mut without, NOT_REDIRECTED)] {
        state.add(&probe(answer, 5 * S));
        state.evaluate(6 * S);
    }
    assert_eq!((with.is_bypassing(), without.is_bypassing()), (false, true));
    // "No network namespace found" is no proof of anything.
    let failed = Answer::Failed { reason: "no_process" };
    let mut unseen = state(3);
    unseen.add(&probe(failed, 5 * S));
    unseen.evaluate(6 * S);
    assert_eq!(v4(&unseen), (PodVerdict::Unknown, Some(Reason::ProbeFailed)));
}

/// istio/istio#53843: a pod that hangs in Pending without a sandbox is no bypass, and nobody's to repair.
#[test]
fn istio_53843_a_pod_without_a_cgroup_is_not_judged() {
    let mut registry = Registry::default();
    registry.facts(Arc::new(PodFacts::new(uid(1), "shop", "pending")));
    assert_eq!(registry.with_cgroup().count(), 0);
    registry.facts_gone(uid(1));
    assert!(registry.get(uid(1)).is_none(), "and it leaves nothing");
}

/// istio/istio#55913, kumahq/kuma#13572: the control plane is away while the node comes back. What the runtime says is enough,
/// and the API's word comes later.
#[test]
fn istio_55913_kuma_13572_without_the_api_the_runtimes_word_is_enough() {
    let mut join = Join::new(0);
    let mut runtime = PodFacts::new(uid(1), "shop", "cart");
    runtime.known_by = KnownBy { runtime: true, api: false };
    runtime.annotations = [("kuma.io/sidecar-injected", "true")].into_iter().collect();
    let told = join.update(Origin::Runtime, PodUpdate::Upsert(Arc::new(runtime.clone())));
    let [PodUpdate::Upsert(known)] = &told[..] else { panic!("{told:?}") };
    assert!(known.known_by.runtime && !known.known_by.api && known.annotations == runtime.annotations);
    let told = join.update(Origin::Api, PodUpdate::Upsert(Arc::new(PodFacts::new(uid(1), "shop", "cart"))));
    let [PodUpdate::Upsert(known)] = &told[..] else { panic!("{told:?}") };
    assert!(known.known_by.runtime && known.known_by.api);
    assert_eq!(known.annotations, runtime.annotations, "as the sandbox was made");
}

/// istio/istio#48876, #49106: connections from before a pod was taken up go on around the proxy, and nobody says so.
#[test]
fn istio_48876_connections_from_before_are_a_reason_of_their_own() {
    let mut state = state(1);
    let older = |connections, at| Evidence::Preexisting { family: Family::V4, connections, at };
    state.add(&older(2, 5 * S));
    state.add(&probe(REDIRECTED, 5 * S));
    state.evaluate(6 * S);
    assert_eq!(v4(&state), (PodVerdict::Partial, Some(Reason::Preexisting)));
    state.add(&older(0, 7 * S));
    state.evaluate(8 * S);
    assert_eq!(v4(&state), (PodVerdict::Redirected, None));
}
