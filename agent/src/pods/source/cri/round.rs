//! One round: lists, then details of what is new, then updates for what changed.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, SystemTime},
};

use k8s_cri::v1::{ContainerStatusResponse, PodSandboxStatusResponse};
use tokio::{sync::mpsc, task::JoinSet, time::Instant};

use super::{
    CriError, CriSource, PodUpdate,
    assemble::{Detail, add_container, add_sandbox, assemble, gone, open_details},
    client::Runtime,
    expect::Expected,
    info,
};
use crate::pods::{
    ContainerId, PodUid,
    model::{Keys, PodFacts, Wanted},
};

/// So many details are asked for at a time.
const PARALLEL: usize = 8;

/// A detail that could not be had is asked for again after this, then ever later, up to the second.
const RETRY: Duration = Duration::from_secs(5);
const LAST_RETRY: Duration = Duration::from_secs(300);

/// Why rounds end.
#[derive(Debug)]
pub(super) enum Ended {
    /// Nobody takes the updates.
    Closed,
    /// The runtime did not answer.
    Failed(CriError),
}

impl From<CriError> for Ended {
    fn from(error: CriError) -> Self {
        Self::Failed(error)
    }
}

/// Details that could not be had lately, so that one sick container does not slow down every round.
#[derive(Debug, Default)]
pub(super) struct Failed(HashMap<ContainerId, Retry>);

#[derive(Debug, Clone, Copy)]
struct Retry {
    next: Instant,
    pause: Duration,
}

impl Failed {
    fn is_due(&self, id: ContainerId, now: Instant) -> bool {
        self.0.get(&id).is_none_or(|retry| retry.next <= now)
    }

    fn add(&mut self, id: ContainerId, now: Instant) {
        let pause = self.0.get(&id).map_or(RETRY, |retry| retry.pause.saturating_mul(2).min(LAST_RETRY));
        self.0.insert(id, Retry { next: now + pause, pause });
    }

    /// Forgets what nobody asks for any more.
    fn keep(&mut self, wanted: &HashSet<ContainerId>) {
        self.0.retain(|id, _| wanted.contains(id));
    }

    /// When the next failed detail is worth another try.
    pub(super) fn next_try(&self) -> Option<Instant> {
        self.0.values().map(|retry| retry.next).min()
    }
}

/// An answer about one sandbox or container.
enum Answer {
    Sandbox(Box<PodSandboxStatusResponse>),
    Container(Box<ContainerStatusResponse>),
    /// It has gone meanwhile, which is no failure.
    Gone,
}

impl CriSource {
    /// Asks for the lists and sends what changed. Pods that need no details go first.
    pub(super) async fn round(
        &mut self,
        runtime: &Runtime,
        out: &mpsc::Sender<PodUpdate>,
    ) -> Result<(), Ended> {
        let started = Instant::now();
        let sandboxes = runtime.sandboxes().await?;
        let containers = runtime.containers().await?;
        let Wanted { keys, containers: names, env } = self.options.wanted.borrow().clone();
        let all = assemble(&sandboxes, &containers, &self.known, &keys);
        drop((sandboxes, containers));
        for id in &all.orphans {
            self.expected.add(Expected::Container(*id), started);
        }

        let skipped = all.skipped;
        for uid in gone(&self.known, &all.pods) {
            self.send(PodUpdate::Gone(uid), out).await?;
        }
        let mut open = HashMap::new();
        let mut details = Vec::new();
        let mut all_wanted = HashSet::new();
        for (uid, pod) in all.pods {
            let mut wanted = open_details(&pod, &names, &self.stale);
            all_wanted.extend(wanted.iter().map(|detail| detail.id()));
            wanted.retain(|detail| self.failed.is_due(detail.id(), started));
            if wanted.is_empty() {
                self.upsert(pod, out).await?;
            } else {
                details.extend(wanted.into_iter().map(|detail| (uid, detail)));
                open.insert(uid, pod);
            }
        }
        self.failed.keep(&all_wanted);
        self.stale.retain(|id| all_wanted.contains(id));
        self.add_details(runtime, &mut open, details, &env, started).await?;
        for pod in open.into_values() {
            self.upsert(pod, out).await?;
        }

        let pods = self.known.len();
        self.state.send_modify(|state| {
            state.pods = pods;
            state.skipped = skipped;
            state.rounds = state.rounds.saturating_add(1);
            state.last_round_at = Some(SystemTime::now());
            state.last_round = started.elapsed();
        });
        Ok(())
    }

    async fn upsert(&mut self, pod: PodFacts, out: &mpsc::Sender<PodUpdate>) -> Result<(), Ended> {
        if self.known.get(&pod.uid).is_some_and(|known| **known == pod) {
            return Ok(());
        }
        self.send(PodUpdate::Upsert(Arc::new(pod)), out).await
    }

    /// Sends an update and remembers it. It is remembered only when it was taken.
    async fn send(&mut self, update: PodUpdate, out: &mpsc::Sender<PodUpdate>) -> Result<(), Ended> {
        out.send(update.clone()).await.map_err(|_| Ended::Closed)?;
        match update {
            PodUpdate::Upsert(pod) => drop(self.known.insert(pod.uid, pod)),
            PodUpdate::Gone(uid) => drop(self.known.remove(&uid)),
            PodUpdate::Rekeyed(_) | PodUpdate::Synced => {}
        }
        Ok(())
    }

    /// Asks for `details`, a few at a time, and adds the answers to `pods`.
    async fn add_details(
        &mut self,
        runtime: &Runtime,
        pods: &mut HashMap<PodUid, PodFacts>,
        details: Vec<(PodUid, Detail)>,
        env: &Keys,
        now: Instant,
    ) -> Result<(), CriError> {
        let mut asked = JoinSet::new();
        let mut details = details.into_iter();
        loop {
            while asked.len() < PARALLEL
                && let Some((uid, detail)) = details.next()
            {
                let runtime = runtime.clone();
                asked.spawn(async move { (uid, detail, ask(&runtime, detail).await) });
            }
            let Some(answer) = asked.join_next().await else { return Ok(()) };
            // A panic in there is a bug that must not be swallowed; being cancelled cannot happen while we wait.
            let (uid, detail, answer) = match answer {
                Ok(answer) => answer,
                Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                Err(_) => continue,
            };
            match answer {
                Ok(answer) => {
                    self.failed.0.remove(&detail.id());
                    self.stale.remove(&detail.id());
                    if let Some(pod) = pods.get_mut(&uid)
                        && !add(pod, detail, &answer, env)
                    {
                        self.details_failed(detail, now);
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, pod_uid = %uid, id = %detail.id(), "no details from the container runtime");
                    self.details_failed(detail, now);
                }
            }
        }
    }

    fn details_failed(&mut self, detail: Detail, now: Instant) {
        self.failed.add(detail.id(), now);
        self.state.send_modify(|state| state.details_failed = state.details_failed.saturating_add(1));
    }
}

async fn ask(runtime: &Runtime, detail: Detail) -> Result<Answer, CriError> {
    let container = |answer: ContainerStatusResponse| Answer::Container(Box::new(answer));
    let answer = match detail {
        Detail::Sandbox(id) => runtime.sandbox(id).await.map(|answer| Answer::Sandbox(Box::new(answer))),
        Detail::Container(id) => runtime.container(id, true).await.map(container),
        Detail::Exit(id) => runtime.container(id, false).await.map(container),
    };
    match answer {
        Err(CriError::Call { not_found: true, .. }) => Ok(Answer::Gone),
        other => other,
    }
}

/// Adds an answer to its pod. Returns whether it said all that was asked.
fn add(pod: &mut PodFacts, detail: Detail, answer: &Answer, env: &Keys) -> bool {
    let read = |info: &HashMap<String, String>| {
        info::parse(info, env)
            .inspect_err(
                |error| tracing::debug!(%error, "details from the container runtime are not understood"),
            )
            .unwrap_or_default()
    };
    match answer {
        Answer::Sandbox(answer) => {
            add_sandbox(pod, answer.status.as_ref(), read(&answer.info));
            pod.host_network().is_some()
        }
        Answer::Container(answer) => {
            let verbose = matches!(detail, Detail::Container(_));
            let info = verbose.then(|| read(&answer.info));
            let complete = info.as_ref().is_none_or(|info| info.user.is_some());
            add_container(pod, detail.id(), answer.status.as_ref(), info);
            complete
        }
        Answer::Gone => true,
    }
}
