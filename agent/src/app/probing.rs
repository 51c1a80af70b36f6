//! The task that asks pods' networks, and acts on what they say: refusals, and connections older than the programs.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nobypass_common::abi::PodCounters;
use nobypass_common::ids::{Mode, PodKind};
use nobypass_common::verdict::effective_mode;
use tokio::sync::{mpsc, oneshot, watch};

use super::Ended;
use super::older::{Looked, Older};
use super::packet;
use super::react::News;
use crate::bpf::Maps;
use crate::cgroup::netns::Finder;
use crate::detect::evidence::{Evidence, Family};
use crate::detect::tracker::Finding;
use crate::mesh::{Membership, Meshed, Profiles, recognise};
use crate::policy::refuse::Refuse;
use crate::policy::{PodView, Snapshot};
use crate::probe::client::Client;
use crate::probe::handle::Request;
use crate::probe::metrics::{Metrics, ResultLabel};
use crate::probe::schedule::Schedule;
use crate::probe::target::{Target, target};
use crate::probe::wire::Ask;
use crate::probe::{Answer, Answers, Failure, PacketSockets, Probed};
use crate::refuse::sockets::Sockets;
use crate::sys::clock::monotonic_ns;

/// How often the kernel's evidence about refused pods is read.
const LOOK: Duration = Duration::from_secs(1);

/// What the task works with.
pub(super) struct Probing {
    /// `None` where there can be no helper: each answer is a failure then.
    pub client: Option<Client>,
    /// `None` where pods' networks cannot be entered.
    pub sockets: Option<Sockets>,
    pub maps: Maps,
    pub snapshots: watch::Receiver<Snapshot>,
    pub refusals: mpsc::Sender<Refuse>,
    pub answers: watch::Sender<Answers>,
    pub packet: watch::Sender<PacketSockets>,
    /// `None` where pods' processes cannot be looked for.
    pub finder: Option<Arc<Finder>>,
    /// To the keeper of verdicts.
    pub findings: Option<mpsc::Sender<Finding>>,
    pub metrics: Metrics,
    pub interval: Duration,
    /// How long a connection that is older than the programs may go on where they enforce.
    pub grace: Duration,
    /// Pods older than the programs, by cgroup id.
    pub old: BTreeSet<u64>,
    /// Pods that are known to bypass are refused at connect(2).
    pub refuses: bool,
}

struct State {
    with: Probing,
    schedule: Schedule,
    probed: BTreeMap<u64, Probed>,
    refused: HashMap<u64, [bool; 2]>,
    older: Older,
    /// As they were followed last.
    pods: Arc<HashMap<u64, Arc<PodView>>>,
}

/// Works until its channels close.
pub(super) async fn run(
    with: Probing,
    mut requests: mpsc::Receiver<Request>,
    mut news: mpsc::Receiver<News>,
) -> Ended {
    let mut snapshots = with.snapshots.clone();
    let older = Older::new(&with.old, with.grace);
    let schedule = Schedule::new(with.interval);
    let (probed, refused, pods) = Default::default();
    let mut state = State { with, schedule, probed, refused, older, pods };
    state.follow(&snapshots.borrow_and_update().clone());
    let mut look = tokio::time::interval(LOOK);
    loop {
        let due = async {
            match state.schedule.wake() {
                Some(wake) => tokio::time::sleep_until(wake.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            request = requests.recv() => match request {
                Some(Request::Ask(cgroup, done)) => {
                    let probed = state.ask(cgroup).await;
                    // Nobody waiting is no error.
                    let _ = done.send(probed);
                }
                Some(Request::Lift(cgroup, done)) => state.lift(cgroup, done).await,
                None => return ("probe", Ok(())),
            },
            changed = snapshots.changed() => {
                if changed.is_err() {
                    return ("policy", Ok(()));
                }
                state.follow(&snapshots.borrow_and_update().clone());
            }
            told = news.recv() => match told {
                Some(told) => state.news(told),
                None => return ("events", Ok(())),
            },
            _ = look.tick() => state.look(),
            () = due => {
                if let Some(cgroup) = state.schedule.next(Instant::now()) {
                    state.ask(cgroup).await;
                }
            }
        }
    }
}

impl State {
    /// Meshed pods are asked, from the moment they are known.
    fn follow(&mut self, snapshot: &Snapshot) {
        // The plugins have run when a sandbox is ready. Who knows of no sandbox knows it by the first process.
        let ready = |view: &PodView| {
            let sandbox = view.facts.as_ref().and_then(|facts| facts.sandbox.as_ref());
            sandbox.is_none_or(|sandbox| sandbox.ready)
        };
        let asked =
            |view: &&Arc<PodView>| view.kind == PodKind::Meshed && view.unsupported.is_none() && ready(view);
        let live: BTreeSet<u64> = snapshot.pods.values().filter(asked).map(|view| view.cgroup).collect();
        let now = Instant::now();
        self.schedule.keep(&live, now);
        for cgroup in &live {
            let [Some(before), Some(view)] = [&self.pods, &snapshot.pods].map(|pods| pods.get(cgroup)) else {
                continue;
            };
            if before.containers != view.containers {
                // What they may do is looked at with the question.
                self.schedule.soon(*cgroup, now);
            } else if !Arc::ptr_eq(before, view) {
                self.schedule.changed(*cgroup, now);
            }
        }
        self.pods = Arc::clone(&snapshot.pods);
        packet::keep(&self.with, &live, snapshot);
        let before = self.probed.len();
        self.probed.retain(|cgroup, _| snapshot.pods.contains_key(cgroup));
        self.refused.retain(|cgroup, _| live.contains(cgroup));
        self.older.retain(|cgroup| snapshot.pods.contains_key(&cgroup));
        if self.probed.len() != before {
            self.publish();
        }
    }

    /// A bypass: is that what the pod's network says?
    fn news(&mut self, News { cgroup, family }: News) {
        let known = self.refused.get(&cgroup).and_then(|families| families.get(family));
        if known != Some(&true) {
            self.schedule.soon(cgroup, Instant::now());
        }
    }

    /// A redirected connection of a refused pod: somebody repaired it.
    fn look(&mut self) {
        let now = Instant::now();
        for cgroup in self.refused.keys() {
            let asked_ns = self.probed.get(cgroup).map_or(0, |probed| probed.at_ns);
            let counters = self.with.maps.counters(*cgroup);
            if counters.is_some_and(|counters| counters.redirect_ns.iter().any(|at| *at > asked_ns)) {
                self.schedule.soon(*cgroup, now);
            }
        }
    }

    async fn ask(&mut self, cgroup: u64) -> Probed {
        let (view, profiles) = {
            let snapshot = self.with.snapshots.borrow();
            (snapshot.pods.get(&cgroup).cloned(), Arc::clone(&snapshot.profiles))
        };
        let at_ns = monotonic_ns();
        let start = Instant::now();
        let meshed = view.as_ref().and_then(|view| meshed(view, &profiles));
        let answers = match (&view, &mut self.with.client) {
            (None, _) => [Failure::Unknown.into(); 2],
            (Some(_), None) => [Failure::Helper.into(); 2],
            (Some(view), Some(client)) => client.ask(&question(view, meshed.as_ref())).await,
        };
        let probed = Probed { answers, at_ns, took: start.elapsed() };
        for answer in answers {
            self.with.metrics.answers.get_or_create(&ResultLabel { result: answer.label() }).inc();
        }
        self.with.metrics.duration.observe(probed.took.as_secs_f64());
        let Some(view) = view else { return probed };
        let early = answers
            .iter()
            .any(|answer| matches!(answer, Answer::Failed { reason } if Failure::is_early(reason)));
        self.schedule.done(cgroup, early, Instant::now());
        let before = self.probed.get(&cgroup).copied();
        if before.is_some_and(|before| mended(&before, &probed)) {
            self.older.repaired(cgroup);
        }
        if before.is_none_or(|before| before.answers != answers) {
            tracing::info!(
                namespace = %view.namespace, pod = %view.name, cgroup, ipv4 = ?answers[0], ipv6 = ?answers[1],
                took_us = probed.took.as_micros(), "pod probed"
            );
        }
        self.probed.insert(cgroup, probed);
        self.publish();
        for (family, answer) in Family::ALL.into_iter().zip(answers) {
            self.find(&view, Evidence::Probe { family, answer, at: at_ns });
        }
        self.refuse(&view, &probed).await;
        self.preexisting(&view, &probed, meshed.as_ref()).await;
        packet::look(&self.with, &view).await;
        probed
    }

    /// Tells the keeper of verdicts; what is lost is found again by the next question.
    fn find(&self, view: &PodView, evidence: Evidence) {
        if let Some(findings) = &self.with.findings {
            let _ = findings.try_send(Finding { uid: view.uid, cgroup: view.cgroup, evidence });
        }
    }

    fn publish(&self) {
        self.with.answers.send_replace(Arc::new(self.probed.clone()));
    }

    async fn refuse(&mut self, view: &PodView, probed: &Probed) {
        let counters = self.with.maps.counters(view.cgroup).unwrap_or(PodCounters::ZERO);
        let wanted = refused(view, probed, &counters);
        let held = self.refused.get(&view.cgroup).copied().unwrap_or_default();
        if wanted == held || !self.with.refuses {
            return;
        }
        if wanted == [false; 2] {
            self.refused.remove(&view.cgroup);
        } else {
            self.refused.insert(view.cgroup, wanted);
        }
        // The keeper ends with the agent only.
        let _ = self.with.refusals.send(Refuse { cgroup: view.cgroup, families: wanted, done: None }).await;
    }

    async fn lift(&mut self, cgroup: u64, done: oneshot::Sender<()>) {
        self.refused.remove(&cgroup);
        self.older.repaired(cgroup);
        let lift = Refuse { cgroup, families: [false; 2], done: Some(done) };
        // As above.
        let _ = self.with.refusals.send(lift).await;
    }

    /// Connections that began before there were programs to see it, or rules to redirect them.
    async fn preexisting(&mut self, view: &PodView, probed: &Probed, meshed: Option<&Meshed>) {
        let Some(sockets) = &self.with.sockets else { return };
        let families = looked_at(view, probed, self.older.is_repaired(view.cgroup));
        if families == [false; 2] {
            // A pod that could not be asked is asked again.
            if !probed.answers.iter().any(|answer| matches!(answer, Answer::Failed { .. })) {
                self.older.forget(view.cgroup);
            }
            return;
        }
        let mode = self.with.maps.config().map_or(0, |config| config.mode);
        let pod_mode = self.with.maps.policy(view.cgroup).map_or(0, |policy| policy.mode);
        let enforce = effective_mode(mode, pod_mode) == Mode::Enforce.code();
        let Some(Looked { left, again }) = self.older.look(view, meshed, families, enforce, sockets).await
        else {
            return;
        };
        if let Some(again) = again {
            self.schedule.by(view.cgroup, again);
        }
        for (family, connections) in Family::ALL.into_iter().zip(left) {
            self.find(view, Evidence::Preexisting { family, connections, at: probed.at_ns });
        }
    }
}

/// What the mesh wants of a pod; `None` while only an earlier agent's word of it is known.
fn meshed(view: &PodView, profiles: &Profiles) -> Option<Meshed> {
    match recognise(view.facts.as_ref()?, profiles.as_slice()) {
        Membership::Meshed(meshed) => Some(*meshed),
        Membership::NotMeshed { .. } | Membership::Exempt { .. } | Membership::Unsupported { .. } => None,
    }
}

fn question(view: &PodView, meshed: Option<&Meshed>) -> Ask {
    let Target { id, to } = meshed.map_or_else(Target::default, |meshed| {
        let proxies: Vec<u32> = meshed.proxy_uid.into_iter().chain(meshed.proxy_gid).collect();
        target(&meshed.exemptions, &proxies)
    });
    Ask { cgroup: view.cgroup, netns: view.netns().map(Into::into), id, to }
}

/// Families that should be redirected and are not.
fn not_redirected(view: &PodView, probed: &Probed) -> [bool; 2] {
    let [v4, v6] = probed.answers.map(|answer| matches!(answer, Answer::NotRedirected { .. }));
    let [v4_due, v6_due] = view.families;
    [v4 && v4_due, v6 && v6_due]
}

/// Whether a family that was not redirected is now: whoever did that.
fn mended(before: &Probed, now: &Probed) -> bool {
    before.answers.iter().zip(&now.answers).any(|(before, now)| {
        matches!((before, now), (Answer::NotRedirected { .. }, Answer::Redirected { .. }))
    })
}

/// Families with connections that may go past the proxy. In those that are redirected they are told apart by their other
/// end, so the proxy has to be known.
fn looked_at(view: &PodView, probed: &Probed, repaired: bool) -> [bool; 2] {
    let [v4_not, v6_not] = not_redirected(view, probed);
    let tells = repaired && view.proxy_cgroup != 0;
    let [v4, v6] = probed.answers.map(|answer| tells && matches!(answer, Answer::Redirected { .. }));
    let [v4_due, v6_due] = view.families;
    [v4_not || (v4 && v4_due), v6_not || (v6 && v6_due)]
}

/// Families whose connections are refused at once: the network says that they are not redirected, and one was seen
/// since the last that was. A network that is still being set up so is not taken for a bypassing one.
fn refused(view: &PodView, probed: &Probed, counters: &PodCounters) -> [bool; 2] {
    let [v4, v6] = not_redirected(view, probed);
    let [v4_seen, v6_seen] = [0, 1].map(|family: usize| {
        match (counters.bypass_ns.get(family), counters.redirect_ns.get(family)) {
            (Some(bypass), Some(proof)) => bypass > proof,
            _ => false,
        }
    });
    [v4 && v4_seen, v6 && v6_seen]
}
