//! Joins the gate: what the halves say, what the cluster is told.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kube::Client;
use nobypass_common::ids::PodKind;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep_until;

use super::{Ended, permissions};
use crate::cluster::access::Permissions;
use crate::cluster::events::{self, Events, Note, Reason as EventReason};
use crate::cni::desk::Desk;
use crate::cni::guard::{Summary, Watching};
use crate::cni::runtime::Word;
use crate::cni::window::Protection;
use crate::node::apply::Applier;
use crate::node::boot;
use crate::node::flags::GateArgs;
use crate::node::gate::{Before, Gate, Inputs, PATIENCE, Part, Reason};
use crate::node::metrics::Metrics;
use crate::node::pods::{self, Seen, Selector};
use crate::node::started::{self, Pod, Started};
use crate::pods::PodUid;
use crate::policy::Snapshot;
use crate::remedy::subject::{self, Subject};
use crate::server::Health;

/// How often the hooks' state is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Pods that started unprotected are collected for so long, so that one Event names them all.
const COLLECT: Duration = Duration::from_secs(3);

/// Why there is no gate.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// Outputs without the half that knows.
    #[error(
        "{0} needs the CNI half: without it nobody knows whether this node is safe; leave --cni-mode at guard"
    )]
    NoCni(&'static str),
    /// Outputs without an API server.
    #[error(
        "{0} needs the API server: run in a pod with a service account and --node-name, or give --kubeconfig and --node-name"
    )]
    NoCluster(&'static str),
}

/// What others need of the gate.
#[derive(Debug)]
pub(super) struct Parts {
    /// Whether it is open.
    pub open: watch::Receiver<bool>,
    /// Where Events are given up, if there is an API server.
    pub events: Option<Events>,
    metrics: Metrics,
    event_metrics: events::Metrics,
}

impl Parts {
    /// Adds the metrics of gate and Events.
    pub(super) fn register(&self, registry: &mut Registry) {
        self.metrics.register(registry);
        self.event_metrics.register(registry);
    }
}

/// Where the gate finds things.
pub(super) struct Place<'a> {
    pub args: &'a GateArgs,
    pub desk: Option<&'a Desk>,
    /// The API server, and this node's name in it.
    pub cluster: Option<(Client, &'a str)>,
    pub permissions: &'a Permissions,
    /// The agent's socket: the gate's state is kept beside it.
    pub socket: &'a Path,
    pub health: &'a Arc<Health>,
}

/// Whether the flags can be followed here.
pub(super) fn check(args: &GateArgs, desk: bool, cluster: bool) -> Result<(), GateError> {
    let wants = [
        (args.gate_condition, "--gate-condition"),
        (args.gate_label, "--gate-label"),
        (!args.startup_taint.is_empty(), "--startup-taint"),
        (!args.gate_pods.is_empty(), "--gate-pods"),
    ];
    match wants.into_iter().find(|(wanted, _)| *wanted) {
        Some((_, flag)) if !cluster => Err(GateError::NoCluster(flag)),
        Some((_, flag)) if !desk => Err(GateError::NoCni(flag)),
        _ => Ok(()),
    }
}

/// Starts the gate. With the CNI half off it stays closed, and nobody is told.
pub(super) fn spawn(tasks: &mut JoinSet<Ended>, place: Place<'_>) -> Parts {
    let Place { args, desk, cluster, permissions, socket, health } = place;
    let (metrics, event_metrics) = (Metrics::default(), events::Metrics::default());
    let events = cluster.as_ref().map(|(client, node)| {
        let (events, task) = Events::new(client.clone(), node, event_metrics.clone());
        tasks.spawn(async move {
            task.run().await;
            ("Kubernetes Events", Ok(()))
        });
        events
    });
    let (opened, open) = watch::channel(false);
    let mut selectors = Vec::new();
    if let Some((client, node)) = &cluster {
        for selector in &args.gate_pods {
            let (sender, seen) = watch::channel(None);
            let (client, node, of) = (client.clone(), (*node).to_owned(), selector.clone());
            tasks.spawn(async move {
                pods::follow(client, node, of, sender).await;
                ("gate pods", Ok(()))
            });
            selectors.push((selector.clone(), seen));
        }
    }
    let record = socket.with_file_name("gate");
    let boot_id = boot::boot_id().unwrap_or_default();
    let before = boot::before(&record, &boot_id);
    let gate = Gate::new(args.settle(), before, Instant::now());
    metrics.show(gate.verdict().open, gate.verdict().reason);
    let (verdicts, verdict) = watch::channel(gate.verdict().clone());
    if args.tells()
        && let Some((client, node)) = cluster
    {
        let outputs = permissions::outputs(tasks, permissions, args.outputs());
        let applier = Applier::new(client, node, verdict, outputs, metrics.clone());
        tasks.spawn(async move {
            applier.run().await;
            ("gate outputs", Ok(()))
        });
    }
    if let Some(desk) = desk {
        opened.send_replace(gate.verdict().open);
        let keeper = Keeper {
            gate,
            summary: desk.summary(),
            word: desk.runtime(),
            selectors,
            health: Arc::clone(health),
            verdicts,
            opened,
            metrics: metrics.clone(),
            record,
            boot_id,
            started: Instant::now(),
            before,
        };
        tasks.spawn(keeper.run());
    } else {
        // Kept, so that nobody takes its end for an error.
        tasks.spawn(async move {
            let _kept = (opened, verdicts);
            std::future::pending().await
        });
    }
    Parts { open, events, metrics, event_metrics }
}

struct Keeper {
    gate: Gate,
    summary: watch::Receiver<Summary>,
    word: watch::Receiver<Word>,
    selectors: Vec<(Selector, watch::Receiver<Seen>)>,
    health: Arc<Health>,
    verdicts: watch::Sender<crate::node::gate::Verdict>,
    opened: watch::Sender<bool>,
    metrics: Metrics,
    record: PathBuf,
    boot_id: String,
    started: Instant,
    before: Before,
}

impl Keeper {
    async fn run(mut self) -> Ended {
        let mut look = tokio::time::interval(LOOK);
        loop {
            let now = Instant::now();
            let inputs = self.inputs(now);
            let wake = self.gate.update(&inputs, now);
            self.publish();
            let wake = wake.unwrap_or(now + Duration::from_secs(60));
            tokio::select! {
                changed = self.summary.changed() => if changed.is_err() { return ("gate", Ok(())) },
                _ = look.tick() => {}
                () = sleep_until(wake.into()) => {}
            }
        }
    }

    fn inputs(&mut self, now: Instant) -> Inputs {
        // An agent that takes over an open gate has to ask the runtime first.
        let starting = self.before == Before::Open && now.duration_since(self.started) < PATIENCE / 2;
        let cni = cni_part(&self.summary.borrow_and_update(), &self.word.borrow(), starting);
        let hooks = hooks_part(&self.health);
        let seen: Vec<(Selector, Seen)> =
            self.selectors.iter().map(|(selector, seen)| (selector.clone(), seen.borrow().clone())).collect();
        Inputs { cni, hooks, pods: pods::part(&seen) }
    }

    fn publish(&self) {
        let verdict = self.gate.verdict();
        let changed = self.verdicts.send_if_modified(|published| {
            let changed = published != verdict;
            if changed {
                published.clone_from(verdict);
            }
            changed
        });
        if !changed {
            return;
        }
        self.metrics.show(verdict.open, verdict.reason);
        if self.opened.send_if_modified(|open| std::mem::replace(open, verdict.open) != verdict.open) {
            tracing::info!(open = verdict.open, reason = verdict.reason.label(), message = %verdict.message,
                "the node's gate changed");
            if let Err(error) = boot::note(&self.record, &self.boot_id, verdict.open) {
                tracing::debug!(%error, path = %self.record.display(), "cannot note the gate's state");
            }
        }
    }
}

/// What the CNI half says. A runtime that was not asked yet is none that lacks something; while the agent `is_starting`, neither
/// is one that does not answer yet.
fn cni_part(summary: &Summary, word: &Word, is_starting: bool) -> Part {
    let file = summary.active.as_ref().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    match (&summary.watching, summary.files, summary.protection) {
        (Watching::Missing, Protection::NoNetwork, _) if summary.version == 0 => {
            Part::Pending("the CNI directory has not been read yet")
        }
        (Watching::Polled { why }, _, Protection::Protected) => {
            Part::Bad(Reason::CniNotWatched, format!("the CNI directory is not watched: {why}"))
        }
        (_, _, Protection::Protected) => Part::Good,
        (_, Protection::Protected, _) if is_starting || word.state.is_empty() => {
            Part::Pending("the container runtime has not been asked yet")
        }
        (_, Protection::Protected, _) => not_loaded(&file, word),
        (_, Protection::NoNetwork, _) => {
            Part::Bad(Reason::NoNetwork, "there is no CNI configuration: no pod can start".into())
        }
        (_, Protection::Unprotected, _) if summary.wanted.is_none() => {
            Part::Bad(Reason::CniUnprotected, "the mesh's CNI plugin is not known yet".into())
        }
        (_, Protection::Unprotected, _) => Part::Bad(
            Reason::CniUnprotected,
            format!("{file} does not call the mesh's CNI plugin as it should"),
        ),
    }
}

/// The config is right and new pods do not get what it says: the runtime's word is why.
fn not_loaded(file: &str, word: &Word) -> Part {
    match (word.state, &word.why) {
        // There is no runtime to ask, and the plugin's own files are not as they should be.
        ("files", Some(why)) => Part::Bad(
            Reason::CniUnprotected,
            format!("{file} calls the mesh's plugin, which cannot work: {why}"),
        ),
        ("silent", Some(why)) => Part::Bad(
            Reason::RuntimeNotReloaded,
            format!("{file} has the mesh's plugin, and the container runtime cannot be asked: {why}"),
        ),
        _ => Part::Bad(
            Reason::RuntimeNotReloaded,
            format!("{file} has the mesh's plugin, and the container runtime has not loaded it"),
        ),
    }
}

fn hooks_part(health: &Health) -> Part {
    let hooks = health.hooks();
    match hooks.iter().find(|hook| hook.hook == "egress") {
        None => Part::Pending("the programs are not attached yet"),
        Some(hook) if hook.effective => Part::Good,
        Some(hook) => Part::Bad(
            Reason::HooksNotEffective,
            format!("the egress program is not in effect: {}", hook.reason),
        ),
    }
}

/// Counts pods that started while the node was not protected, and names them.
pub(super) async fn follow_started(
    mut summary: watch::Receiver<Summary>,
    (mut snapshots, mut subjects): (watch::Receiver<Snapshot>, watch::Receiver<Arc<[Subject]>>),
    (metrics, events): (Metrics, Option<Events>),
    writes: Counter,
) -> Ended {
    let mut started = Started::default();
    let mut asked = false;
    let (mut names, mut due) = (Vec::new(), None);
    loop {
        {
            let summary = summary.borrow_and_update();
            let protected = summary.protection != Protection::Unprotected;
            // At first the runtime has not been asked about what files say.
            asked |= protected || summary.files != Protection::Protected;
            // Before the first look nothing is known. Without a network no pod starts at all.
            if asked && (summary.version > 0 || summary.files != Protection::NoNetwork) {
                if writes.get() > 0 && !started.is_known() {
                    // The guard had to patch what it found.
                    started.protected(false, now_ns());
                }
                started.protected(protected, now_ns());
            }
        }
        let snapshot = snapshots.borrow_and_update().clone();
        let subjects_now = Arc::clone(&subjects.borrow_and_update());
        let new = count(&mut started, &snapshot, &subjects_now);
        metrics.started_unprotected.inc_by(started.total() - metrics.started_unprotected.get());
        if !new.is_empty() {
            tracing::warn!(
                count = new.len(),
                "meshed pods started while the CNI configuration had no mesh plugin"
            );
            names.extend(new);
            due.get_or_insert_with(|| Instant::now() + COLLECT);
        }
        let wait = async {
            match due {
                Some(due) => sleep_until(Instant::into(due)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = summary.changed() => if changed.is_err() { return ("started pods", Ok(())) },
            changed = snapshots.changed() => if changed.is_err() { return ("started pods", Ok(())) },
            changed = subjects.changed() => if changed.is_err() { return ("started pods", Ok(())) },
            () = wait => {
                due = None;
                let all = std::mem::take(&mut names);
                let shown: Vec<&str> = all.iter().map(String::as_str).collect();
                let text = started::note(&shown);
                let reason = EventReason::MeshPodsStartedUnprotected;
                if let Some(events) = &events {
                    events.say(Note { reason, action: "Starting", text, pod: None }).await;
                }
            }
        }
    }
}

impl Parts {
    /// For [`follow_started`].
    pub(super) fn started(&self) -> (Metrics, Option<Events>) {
        (self.metrics.clone(), self.events.clone())
    }
}

fn count(started: &mut Started, snapshot: &Snapshot, subjects: &[Subject]) -> Vec<String> {
    let bypassing = subjects.iter().filter(|subject| matches!(subject.seen, subject::Seen::Bypassing { .. }));
    let bypassing: HashSet<PodUid> = bypassing.map(|subject| subject.pod.uid).collect();
    let meshed =
        snapshot.pods.values().filter(|pod| pod.kind == PodKind::Meshed && pod.unsupported.is_none());
    let pods: Vec<(String, String, i64, bool)> = meshed
        .filter_map(|pod| {
            let created = pod.facts.as_ref()?.sandbox.as_ref()?.created_at;
            let name = format!("{}/{}", pod.namespace, pod.name);
            Some((pod.uid.to_string(), name, created, bypassing.contains(&pod.uid)))
        })
        .filter(|(_, _, created, _)| *created > 0)
        .collect();
    let pods = pods.iter().map(|(uid, name, created, bypassing)| Pod {
        uid,
        name,
        created: *created,
        bypassing: *bypassing,
    });
    started.pods(pods).into_iter().map(str::to_owned).collect()
}

fn now_ns() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_cni_half_says() {
        use Protection::{NoNetwork, Protected, Unprotected};
        let watched = Watching::Watched;
        let summary = |watching: &Watching, files, protection, version| Summary {
            files,
            protection,
            watching: watching.clone(),
            active: Some("10-net.conflist".into()),
            content: None,
            version,
            wanted: None,
        };
        let polled = Watching::Polled { why: "no inotify".into() };
        let asked = Word { state: "lags", ..Word::default() };
        let unasked = cni_part(&summary(&watched, Protected, Unprotected, 1), &Word::default(), false);
        assert!(matches!(unasked, Part::Pending(_)), "{unasked:?}");
        for (summary, starting, expected) in [
            (summary(&Watching::Missing, NoNetwork, NoNetwork, 0), false, "pending"),
            (summary(&Watching::Missing, NoNetwork, NoNetwork, 2), false, "NoNetwork"),
            (summary(&watched, NoNetwork, NoNetwork, 0), false, "NoNetwork"),
            (summary(&watched, Protected, Protected, 1), false, "good"),
            (summary(&polled, Protected, Protected, 1), false, "CNINotWatched"),
            (summary(&watched, Protected, Unprotected, 1), false, "RuntimeNotReloaded"),
            (summary(&watched, Protected, Unprotected, 1), true, "pending"),
            (summary(&watched, Unprotected, Unprotected, 1), true, "CNIUnprotected"),
        ] {
            let got = match cni_part(&summary, &asked, starting) {
                Part::Off => "off",
                Part::Good => "good",
                Part::Pending(_) => "pending",
                Part::Bad(reason, text) => {
                    assert!(!text.is_empty());
                    reason.label()
                }
            };
            assert_eq!(got, expected, "{summary:?}");
        }
    }

    #[test]
    fn why_a_right_config_is_not_enough() {
        let word = |state, why: Option<&str>| Word { state, why: why.map(str::to_owned), ..Word::default() };
        for (word, reason, says) in [
            (word("files", Some("the binary is missing")), Reason::CniUnprotected, "the binary is missing"),
            (word("silent", Some("connection refused")), Reason::RuntimeNotReloaded, "connection refused"),
            (word("lags", Some("x")), Reason::RuntimeNotReloaded, "has not loaded it"),
            (word("outdated", None), Reason::RuntimeNotReloaded, "has not loaded it"),
        ] {
            let Part::Bad(why, text) = not_loaded("10-net.conflist", &word) else { panic!("{word:?}") };
            assert!(why == reason && text.contains(says) && text.starts_with("10-net.conflist"), "{text}");
        }
    }

    #[test]
    fn flags_that_cannot_be_followed() {
        let args = GateArgs { gate_label: true, ..GateArgs::default() };
        assert!(check(&args, true, true).is_ok());
        assert!(
            check(&args, true, false).unwrap_err().to_string().contains("--gate-label needs the API server")
        );
        assert!(
            check(&args, false, true).unwrap_err().to_string().contains("--gate-label needs the CNI half")
        );
        assert!(check(&GateArgs::default(), false, false).is_ok());
    }
}
