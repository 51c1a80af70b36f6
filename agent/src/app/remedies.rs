//! Joins remedies: verdicts become subjects, and the probe proves repairs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nobypass_common::ids::Mode;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::{Agent, Ended, gate};
use crate::detect::evidence::{Family, Reason};
use crate::detect::state::{PodState, PodStates};
use crate::detect::verdict::PodVerdict;
use crate::policy::Snapshot;
use crate::probe::{self, Answer};
use crate::remedy::kube::LABEL;
use crate::remedy::metrics::Metrics;
use crate::remedy::policy::Remedies;
use crate::remedy::proof::{Later, Proof};
use crate::remedy::repair::Repairer;
use crate::remedy::shell::{self, Hands, Inputs};
use crate::remedy::subject::{Pod, Seen, Subject};
use crate::sys::clock::monotonic_ns;

/// Metrics of remedies, in the registry.
pub(super) fn metrics(registry: &mut Registry) -> Metrics {
    let metrics = Metrics::default();
    metrics.register(registry);
    metrics
}

/// Starts the remedies, and the count of pods that started unprotected.
pub(super) fn join(
    tasks: &mut JoinSet<Ended>,
    agent: &Agent<'_>,
    (states, probe): (watch::Receiver<PodStates>, probe::Handle),
    metrics: Metrics,
    (gate, limits): (&gate::Parts, watch::Receiver<Remedies>),
    snapshots: watch::Receiver<Snapshot>,
) {
    let desk = agent.desk.as_ref();
    let repairer = desk.map(|desk| Repairer { endpoint: agent.endpoint.clone(), config: desk.summary() });
    let hands = Hands {
        client: agent.cluster.clone(),
        events: gate.events.clone(),
        repairer,
        proof: Arc::new(Probe(probe)),
        metrics,
    };
    let (sender, subjects) = watch::channel(Arc::from(Vec::new()));
    let inputs = Inputs { subjects: subjects.clone(), gate: gate.open.clone(), limits };
    tasks.spawn(follow_states(states, agent.plan.runtime(), sender));
    tasks.spawn(async move {
        shell::run(hands, inputs).await;
        ("remedies", Ok(()))
    });
    if let (Some(desk), Some(cni)) = (desk, &agent.cni_metrics) {
        let pods = (snapshots, subjects);
        tasks.spawn(gate::follow_started(desk.summary(), pods, gate.started(), cni.writes.clone()));
    }
}

/// `runtime`: there is a container runtime that will tell each pod's sandbox.
async fn follow_states(
    mut states: watch::Receiver<PodStates>,
    runtime: bool,
    out: watch::Sender<Arc<[Subject]>>,
) -> Ended {
    loop {
        let pods = Arc::clone(&states.borrow_and_update().pods);
        let now = (Instant::now(), monotonic_ns());
        let mut all: Vec<Subject> = pods.values().map(|state| subject(state, runtime, now)).collect();
        all.sort_by_key(|subject| subject.pod.cgroup);
        // Instants are made of ages and never quite the same.
        out.send_replace(all.into());
        if states.changed().await.is_err() {
            return ("remedies", Ok(()));
        }
    }
}

fn subject(state: &PodState, runtime: bool, (now, now_ns): (Instant, u64)) -> Subject {
    let view = &state.pod;
    let facts = view.facts.as_deref();
    let pod = Pod {
        uid: view.uid,
        namespace: view.namespace.clone(),
        name: view.name.clone(),
        mesh: view.mesh.clone(),
        cgroup: view.cgroup,
        sandbox: view.sandbox,
        families: view.families,
        blocked: view.choice.as_ref().is_some_and(|choice| choice.mode == Mode::Enforce),
    };
    Subject {
        pod: Arc::new(pod),
        // What pins remember of a pod comes before anybody has said who that is.
        seen: if facts.is_none() || (runtime && view.sandbox.is_none()) {
            Seen::Unknown
        } else {
            seen(state, now, now_ns)
        },
        terminating: facts.is_some_and(|facts| facts.terminating || facts.is_finished()),
        labelled: facts.is_some_and(|facts| facts.labels.get(LABEL).is_some()),
    }
}

/// Rules that are missing are what remedies mend. What goes around rules that are there, they do not.
fn seen(state: &PodState, now: Instant, now_ns: u64) -> Seen {
    let host_network = state.pod.facts.as_ref().and_then(|facts| facts.host_network()) == Some(true);
    if state.pod.unsupported.is_some() || host_network {
        return Seen::Unsupported;
    }
    let last = Family::ALL.into_iter().filter_map(|family| {
        let of = &state.families[family.index()];
        let bypasses = matches!(of.verdict, PodVerdict::Bypassing | PodVerdict::Partial);
        let rules_are_missing =
            of.reason == Some(Reason::NotRedirected) && state.pod.families[family.index()];
        let signs = [
            of.evidence.bypass.filter(|(reason, _)| *reason == Reason::NotRedirected).map(|(_, at)| at),
            of.evidence.probe.map(|(_, at)| at),
            of.evidence.validator.map(|(_, at)| at),
            of.evidence.canary,
        ];
        (bypasses && rules_are_missing).then(|| signs.into_iter().flatten().max().unwrap_or(of.since))
    });
    match last.max() {
        Some(at) => {
            let age = Duration::from_nanos(now_ns.saturating_sub(at));
            Seen::Bypassing { last: now.checked_sub(age).unwrap_or(now) }
        }
        None if state.verdict() == PodVerdict::Redirected => Seen::Redirected,
        None => Seen::Unknown,
    }
}

/// The pod's own network is asked, without a packet on any wire.
#[derive(Debug)]
struct Probe(probe::Handle);

impl Proof for Probe {
    fn prepare<'a>(&'a self, pod: &'a Pod) -> Later<'a, ()> {
        // From then on the probing task also looks for connections that are older than the new rules.
        Box::pin(self.0.lift(pod.cgroup))
    }

    fn prove<'a>(&'a self, pod: &'a Pod) -> Later<'a, [Answer; 2]> {
        // The tracker is told of the answer by who asks.
        Box::pin(async { self.0.ask(pod.cgroup).await.answers })
    }
}
