//! Carries out what the machine decides: tasks of different pods side by side, those of one pod in their order.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::Client;
use tokio::sync::{Mutex, watch};
use tokio::task::JoinSet;
use tokio::time::sleep_until;

use super::kube::{self as api, Labelled};
use super::machine::{Action, Machine, Task};
use super::metrics::{End, Kind, Metrics};
use super::policy::Remedies;
use super::proof::{Proof, Said, sum_up};
use super::repair::{Patient, RepairError, Repairer};
use super::say;
use super::subject::{Evicted, Inspected, Outcome, Pod, Repaired, Subject};
use crate::cluster::events::Events;
use crate::pods::PodUid;
use crate::probe::Answer;

/// Looked at again this often, whatever was noticed.
const RESYNC: Duration = Duration::from_secs(60);
/// A probe that failed is asked once more after this.
const AGAIN: Duration = Duration::from_millis(200);

/// What acts. Parts that are missing make their actions fail, and nothing else.
#[derive(Clone)]
pub struct Hands {
    /// The API server.
    pub client: Option<Client>,
    /// Events.
    pub events: Option<Events>,
    /// Who runs the mesh's plugin.
    pub repairer: Option<Repairer>,
    /// Who says whether that helped.
    pub proof: Arc<dyn Proof>,
    /// Counters.
    pub metrics: Metrics,
}

impl std::fmt::Debug for Hands {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hands").field("proof", &self.proof).finish_non_exhaustive()
    }
}

/// What the shell follows.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// All meshed pods.
    pub subjects: watch::Receiver<Arc<[Subject]>>,
    /// Whether the node's gate is open.
    pub gate: watch::Receiver<bool>,
    /// What the operator allows.
    pub limits: watch::Receiver<Remedies>,
}

/// Works until nobody says anything any more.
pub async fn run(hands: Hands, mut inputs: Inputs) {
    let hands = Arc::new(hands);
    let limits = *inputs.limits.borrow_and_update();
    let mut machine = Machine::new(limits, hands.metrics.clone(), Instant::now());
    let mut running: JoinSet<Option<(PodUid, Outcome)>> = JoinSet::new();
    let mut turns: HashMap<PodUid, Arc<Mutex<()>>> = HashMap::new();
    loop {
        let now = Instant::now();
        machine.set_limits(*inputs.limits.borrow_and_update(), now);
        let subjects = Arc::clone(&inputs.subjects.borrow_and_update());
        let (tasks, wake) = machine.tick(subjects.iter(), *inputs.gate.borrow_and_update(), now);
        turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        let limit = inputs.limits.borrow().repair_timeout();
        for task in tasks {
            let turn = Arc::clone(turns.entry(task.pod.uid).or_default());
            let hands = Arc::clone(&hands);
            // First come, first served: tokio's lock is fair, and a task's place is taken before it runs.
            let mut place = Box::pin(turn.lock_owned());
            let held = futures_util::FutureExt::now_or_never(&mut place);
            running.spawn(async move {
                let _turn = match held {
                    Some(held) => held,
                    None => place.await,
                };
                perform(&hands, &task, limit).await
            });
        }
        let wake = wake.unwrap_or(now + RESYNC).min(now + RESYNC);
        tokio::select! {
            () = sleep_until(wake.into()) => {}
            changed = inputs.subjects.changed() => if changed.is_err() { return },
            changed = inputs.gate.changed() => if changed.is_err() { return },
            changed = inputs.limits.changed() => if changed.is_err() { return },
            Some(ended) = running.join_next() => match ended {
                Ok(Some((uid, outcome))) => machine.done(uid, outcome, Instant::now()),
                Ok(None) => {}
                Err(error) => tracing::error!(%error, "a remedy's task was cut short"),
            },
        }
    }
}

async fn perform(hands: &Hands, task: &Task, limit: Duration) -> Option<(PodUid, Outcome)> {
    let Task { pod, actions } = task;
    for action in actions {
        let outcome = match action {
            Action::Say(saying) => {
                tell(hands, pod, saying).await;
                continue;
            }
            Action::Label | Action::Unlabel => {
                let end = match &hands.client {
                    None => End::Unavailable,
                    Some(client) => match api::label(client, pod, *action == Action::Label).await {
                        Labelled::Done => End::Success,
                        Labelled::Gone => End::Gone,
                        Labelled::Forbidden => End::Forbidden,
                        Labelled::Failed => End::Failed,
                    },
                };
                hands.metrics.count(Kind::Label, end);
                continue;
            }
            Action::Repair => Outcome::Repair(repair(hands, pod, limit).await),
            Action::Inspect => Outcome::Inspect(match &hands.client {
                None => Inspected::Unavailable,
                Some(client) => api::inspect(client, pod).await,
            }),
            Action::Evict => {
                let evicted = match &hands.client {
                    None => Evicted::Failed { detail: "there is no API server".to_owned() },
                    Some(client) => api::evict(client, pod).await,
                };
                tracing::info!(namespace = %pod.namespace, pod = %pod.name, ?evicted, "eviction");
                Outcome::Evict(evicted)
            }
        };
        // What is answered ends a task.
        return Some((pod.uid, outcome));
    }
    None
}

async fn tell(hands: &Hands, pod: &Pod, saying: &super::machine::Saying) {
    let note = say::note(pod, saying);
    tracing::info!(namespace = %pod.namespace, pod = %pod.name, mesh = %pod.mesh, reason = note.reason.label(),
        action = note.action, text = note.text, "remedy");
    let end = match &hands.events {
        None => End::Unavailable,
        Some(events) => {
            events.say(note).await;
            End::Success
        }
    };
    hands.metrics.count(Kind::Event, end);
}

async fn repair(hands: &Hands, pod: &Pod, limit: Duration) -> Repaired {
    let impossible = |detail: &str| Repaired::Impossible { detail: detail.to_owned() };
    let Some(repairer) = &hands.repairer else {
        return impossible("the CNI half is off, so that the mesh's plugin is not known");
    };
    let Some(sandbox) = pod.sandbox else {
        return impossible("the container runtime has not told the pod's sandbox");
    };
    let patient = Patient {
        sandbox,
        namespace: pod.namespace.to_string(),
        name: pod.name.to_string(),
        uid: pod.uid.to_string(),
    };
    let start = Instant::now();
    hands.proof.prepare(pod).await;
    let repaired = repairer.repair(&patient, limit).await;
    // Also after a failure: what the plugin did before it failed is to be known.
    let said = prove(hands, pod).await;
    match (repaired, said) {
        (Ok(()), Said::Redirected) => Repaired::Proven { took: start.elapsed() },
        (Ok(()), Said::NotRedirected(detail)) => Repaired::Unproven { detail },
        (Ok(()), Said::Unknown(detail)) => Repaired::Unconfirmed { detail },
        (Err(RepairError::Gone), _) => Repaired::Gone,
        (Err(error @ (RepairError::NotInstalled { .. } | RepairError::NotProtected)), _) => {
            Repaired::NotYet { detail: error.detail() }
        }
        (Err(error @ (RepairError::Impossible(_) | RepairError::Hidden(_) | RepairError::Enter(_))), _) => {
            Repaired::Impossible { detail: error.detail() }
        }
        (Err(error @ RepairError::TimedOut { .. }), _) => Repaired::TimedOut { detail: error.detail() },
        (Err(error), _) => Repaired::Failed { detail: error.detail() },
    }
}

async fn prove(hands: &Hands, pod: &Pod) -> Said {
    let mut answers = hands.proof.prove(pod).await;
    if answers.iter().any(|answer| matches!(answer, Answer::Failed { .. })) {
        tokio::time::sleep(AGAIN).await;
        answers = hands.proof.prove(pod).await;
    }
    sum_up(answers, pod.families)
}
