//! Joins remedies: verdicts become subjects, and the kernel's word proves repairs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nobypass_common::ids::Mode;
use prometheus_client::registry::Registry;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::{Agent, Ended, gate, permissions};
use crate::bpf::pins::PinDir;
use crate::bpf::{BpfError, Maps};
use crate::cluster::access::Permissions;
use crate::detect::evidence::{Evidence, Family, Reason};
use crate::detect::state::{PodState, PodStates};
use crate::detect::tracker::{Finding, Handle};
use crate::detect::verdict::PodVerdict;
use crate::policy::Snapshot;
use crate::probe::Answer;
use crate::remedy::kube::LABEL;
use crate::remedy::metrics::Metrics;
use crate::remedy::proof::{Later, Proof};
use crate::remedy::repair::Repairer;
use crate::remedy::shell::{self, Hands, Inputs};
use crate::remedy::subject::{Pod, Seen, Subject};
use crate::sys::clock::monotonic_ns;

/// So long a repair waits for a connection that shows how it went.
const WATCH: Duration = Duration::from_secs(3);
/// How often counters are read meanwhile.
const LOOK: Duration = Duration::from_millis(20);

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
    dir: &PinDir,
    (tracker, metrics): (Handle, Metrics),
    (gate, permissions): (&gate::Parts, &Permissions),
    snapshots: watch::Receiver<Snapshot>,
) -> Result<(), BpfError> {
    let desk = agent.desk.as_ref();
    let repairer = desk.map(|desk| Repairer { endpoint: agent.endpoint.clone(), config: desk.summary() });
    let proof = KernelProof { maps: Maps::open(dir)?, findings: tracker.findings };
    let hands = Hands {
        client: agent.cluster.clone(),
        events: gate.events.clone(),
        repairer,
        proof: Arc::new(proof),
        aftermath: None,
        metrics,
    };
    let (sender, subjects) = watch::channel(Arc::from(Vec::new()));
    let limits = permissions::remedies(tasks, permissions, agent.config.remedies.remedies());
    let inputs = Inputs { subjects, gate: gate.open.clone(), limits };
    tasks.spawn(follow_states(tracker.states, agent.plan.runtime(), sender));
    tasks.spawn(async move {
        shell::run(hands, inputs).await;
        ("remedies", Ok(()))
    });
    if let (Some(desk), Some(cni)) = (desk, &agent.cni_metrics) {
        tasks.spawn(gate::follow_started(desk.summary(), snapshots, gate.started(), cni.writes.clone()));
    }
    Ok(())
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
    if state.pod.unsupported || host_network {
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

/// The kernel's word: how the pod's next connection goes.
#[derive(Debug)]
pub(super) struct KernelProof {
    /// The counters.
    pub maps: Maps,
    /// Where what was found is told.
    pub findings: mpsc::Sender<Finding>,
}

impl Proof for KernelProof {
    fn prepare<'a>(&'a self, _pod: &'a Pod) -> Later<'a, ()> {
        Box::pin(std::future::ready(()))
    }

    fn prove<'a>(&'a self, pod: &'a Pod) -> Later<'a, [Answer; 2]> {
        Box::pin(async move {
            let start = monotonic_ns();
            let end = Instant::now() + WATCH;
            let answers = loop {
                let answers = self.since(pod.cgroup, start);
                let known = answers.iter().any(|answer| !matches!(answer, Answer::Failed { .. }));
                if known || Instant::now() >= end {
                    break answers;
                }
                tokio::time::sleep(LOOK).await;
            };
            for (family, answer) in Family::ALL.into_iter().zip(answers) {
                if matches!(answer, Answer::Redirected { .. }) {
                    let evidence = Evidence::Probe { family, answer, at: monotonic_ns() };
                    // The tracker also looks by itself.
                    let _ = self.findings.try_send(Finding { uid: pod.uid, cgroup: pod.cgroup, evidence });
                }
            }
            // A family without a connection says nothing, which another one that has one makes up for.
            let seen = answers.iter().any(|answer| matches!(answer, Answer::Redirected { .. }));
            answers.map(|answer| match answer {
                Answer::Failed { .. } if seen => Answer::NoRoute,
                other => other,
            })
        })
    }
}

impl KernelProof {
    fn since(&self, cgroup: u64, start: u64) -> [Answer; 2] {
        let silent = Answer::Failed { reason: "no_connection_seen" };
        let Some(counters) = self.maps.counters(cgroup) else { return [silent; 2] };
        let mut answers = [silent; 2];
        let times = counters.redirect_ns.into_iter().zip(counters.bypass_ns);
        for (answer, (redirected, bypassed)) in answers.iter_mut().zip(times) {
            if redirected > start && redirected > bypassed {
                *answer = Answer::Redirected { port: 0 };
            } else if bypassed > start {
                *answer = Answer::NotRedirected { ifindex: 0 };
            }
        }
        answers
    }
}
