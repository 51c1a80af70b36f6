//! Keeps the Node object as the gate wants it: on each change of either, and now and then.
//!
//! One watch of one object; no request while nothing is different, but the condition's heartbeat.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt as _};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use tokio::sync::watch;
use tokio::time::{sleep_until, timeout};

use super::desired::{Change, Output, Outputs, changes, is_tainted, next_heartbeat};
use super::gate::Verdict;
use super::metrics::Metrics;
use super::object::{Node, resource};

/// How long one write may take.
const WRITE: Duration = Duration::from_secs(5);
/// Before a write that failed is tried again; doubles.
const RETRY: Duration = Duration::from_millis(250);
/// The longest such pause.
const MAX_RETRY: Duration = Duration::from_secs(60);
/// A missing permission is tried again after this.
const FORBIDDEN: Duration = Duration::from_secs(300);
/// Writes of one output that may come at once: somebody who undoes them is followed, but not for ever.
const BURST: u32 = 10;
/// And one more in this time.
const REFILL: Duration = Duration::from_secs(15);

/// What may be written of one output, and when.
#[derive(Debug)]
struct Pace {
    tokens: u32,
    refilled: Instant,
    failures: u32,
    not_before: Option<Instant>,
}

impl Pace {
    fn new(now: Instant) -> Self {
        Self { tokens: BURST, refilled: now, failures: 0, not_before: None }
    }

    /// Whether to write now, else when.
    fn take(&mut self, now: Instant) -> Result<(), Instant> {
        if let Some(at) = self.not_before.filter(|at| *at > now) {
            return Err(at);
        }
        while self.tokens < BURST && now.duration_since(self.refilled) >= REFILL {
            self.tokens += 1;
            self.refilled += REFILL;
        }
        if self.tokens == BURST {
            self.refilled = now;
        }
        if self.tokens == 0 {
            return Err(self.refilled + REFILL);
        }
        self.tokens -= 1;
        Ok(())
    }

    fn ended(&mut self, written: Written, now: Instant) {
        let pause = match written {
            Written::Done => {
                self.failures = 0;
                self.not_before = None;
                return;
            }
            Written::Forbidden => FORBIDDEN,
            Written::Conflict | Written::Failed => {
                RETRY.saturating_mul(2_u32.saturating_pow(self.failures)).min(MAX_RETRY)
            }
        };
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(now + pause);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Written {
    Done,
    Conflict,
    Forbidden,
    Failed,
}

/// Keeps one Node object.
#[derive(Debug)]
pub struct Applier {
    api: Api<Node>,
    name: String,
    verdict: watch::Receiver<Verdict>,
    outputs: watch::Receiver<Outputs>,
    metrics: Metrics,
    node: Option<Node>,
    paces: BTreeMap<Output, Pace>,
    opened: Option<Instant>,
}

impl Applier {
    /// For the node `name`. `outputs` may change, when a permission comes or goes.
    pub fn new(
        client: Client,
        name: &str,
        verdict: watch::Receiver<Verdict>,
        outputs: watch::Receiver<Outputs>,
        metrics: Metrics,
    ) -> Self {
        Self {
            api: Api::all_with(client, &resource()),
            name: name.to_owned(),
            verdict,
            outputs,
            metrics,
            node: None,
            paces: BTreeMap::new(),
            opened: None,
        }
    }

    /// Works until nobody decides any more.
    pub async fn run(mut self) {
        let config = watcher::Config::default().fields(&format!("metadata.name={}", self.name));
        let events = watcher(self.api.clone(), config).default_backoff();
        tokio::pin!(events);
        loop {
            let next = self.apply().await;
            tokio::select! {
                () = sleep_until(next.into()) => {}
                changed = self.verdict.changed() => if changed.is_err() { return },
                changed = self.outputs.changed() => if changed.is_err() { return },
                () = Self::news(&mut events, &mut self.node) => {}
            }
        }
    }

    /// Takes what the watch says.
    async fn news(
        events: &mut (impl Stream<Item = watcher::Result<Event<Node>>> + Unpin),
        known: &mut Option<Node>,
    ) {
        match events.next().await {
            Some(Ok(Event::Apply(node) | Event::InitApply(node))) => {
                // The answer to a write of ours may be newer than what the watch has got to.
                if known.as_ref().is_none_or(|known| !is_older(&node, known)) {
                    *known = Some(node);
                }
            }
            Some(Ok(Event::Delete(_))) => *known = None,
            Some(Ok(Event::Init | Event::InitDone)) => {}
            Some(Err(error)) => {
                tracing::debug!(%error, "the watch of the own Node object failed, trying again");
            }
            // It has no end of its own.
            None => std::future::pending().await,
        }
    }

    /// Writes what is different, and says when to look again.
    async fn apply(&mut self) -> Instant {
        let verdict = self.verdict.borrow_and_update().clone();
        let outputs = self.outputs.borrow_and_update().clone();
        if verdict.open {
            self.opened.get_or_insert_with(Instant::now);
        } else {
            self.opened = None;
        }
        let now = Instant::now();
        let far = now + MAX_RETRY;
        let Some(node) = &self.node else { return far };
        let mut next = if outputs.condition { now + next_heartbeat(node, Timestamp::now()) } else { far };
        for change in changes(node, &verdict, &outputs, Timestamp::now()) {
            let now = Instant::now();
            let output = change.output();
            let pace = self.paces.entry(output).or_insert_with(|| Pace::new(now));
            if let Err(at) = pace.take(now) {
                next = next.min(at);
                continue;
            }
            let written = self.write(&change).await;
            let now = Instant::now();
            let pace = self.paces.entry(output).or_insert_with(|| Pace::new(now));
            pace.ended(written, now);
            if let Some(at) = pace.not_before {
                next = next.min(at);
            }
        }
        self.show_taint(&outputs);
        next
    }

    fn show_taint(&mut self, outputs: &Outputs) {
        let tainted = self.node.as_ref().is_some_and(|node| is_tainted(node, &outputs.taints));
        let was = self.metrics.tainted.set(i64::from(tainted)) != 0;
        if let Some(opened) = self.opened.filter(|_| was && !tainted) {
            self.metrics.untaint.observe(opened.elapsed().as_secs_f64());
        }
    }

    async fn write(&mut self, change: &Change) -> Written {
        let params = PatchParams::default();
        let (api, name) = (&self.api, &self.name);
        let sent = async {
            match change {
                Change::Condition(patch) => api.patch_status(name, &params, &Patch::Strategic(patch)).await,
                Change::Label(patch) => api.patch(name, &params, &Patch::Merge(patch)).await,
                Change::Taint(patch) => {
                    let patch = serde_json::from_value(patch.clone()).map_err(kube::Error::SerdeError)?;
                    api.patch(name, &params, &Patch::<()>::Json(patch)).await
                }
            }
        };
        let output = change.output();
        let (written, label) = match timeout(WRITE, sent).await {
            Ok(Ok(node)) => {
                self.node = Some(node);
                tracing::info!(output = output.label(), "told the cluster");
                (Written::Done, "success")
            }
            // 422: the test of a JSON patch failed. What the watch brings next is what to look at.
            Ok(Err(kube::Error::Api(status))) if [409, 422].contains(&status.code) => {
                self.refresh().await;
                (Written::Conflict, "conflict")
            }
            Ok(Err(kube::Error::Api(status))) if status.code == 403 => {
                tracing::warn!(output = output.label(), error = %status.message, "not allowed to tell the cluster");
                (Written::Forbidden, "forbidden")
            }
            Ok(Err(error)) => {
                tracing::warn!(output = output.label(), %error, "cannot tell the cluster, trying again");
                (Written::Failed, "failed")
            }
            Err(_) => {
                tracing::warn!(output = output.label(), "the API server does not answer, trying again");
                (Written::Failed, "failed")
            }
        };
        self.metrics.wrote(output, label);
        written
    }

    /// Somebody else was faster: what there is now is asked for, not waited for. By a list, which the watch needs too: to get
    /// is another permission.
    async fn refresh(&mut self) {
        let one = ListParams::default().fields(&format!("metadata.name={}", self.name));
        if let Ok(Ok(found)) = timeout(WRITE, self.api.list(&one)).await
            && let Some(node) = found.items.into_iter().next()
        {
            self.node = Some(node);
        }
    }
}

/// Resource versions are to be compared as numbers, where they are numbers
/// (<https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions>).
fn is_older(node: &Node, than: &Node) -> bool {
    let version = |node: &Node| node.metadata.resource_version.as_ref()?.parse::<u64>().ok();
    let same = node.metadata.uid == than.metadata.uid;
    same && matches!((version(node), version(than)), (Some(a), Some(b)) if a < b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_undoes_our_writes_is_not_followed_for_ever() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let mut now = start;
        let mut writes = 0;
        while now < start + Duration::from_secs(3600) {
            match pace.take(now) {
                Ok(()) => {
                    writes += 1;
                    pace.ended(Written::Done, now);
                    now += Duration::from_millis(1);
                }
                Err(at) => now = at,
            }
        }
        assert!((240..=255).contains(&writes), "{writes} in an hour: four a minute");
    }

    #[test]
    fn failures_are_spaced() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let mut now = start;
        for (written, pause) in [
            (Written::Conflict, 250),
            (Written::Failed, 500),
            (Written::Failed, 1000),
            (Written::Forbidden, 300_000),
        ] {
            assert_eq!(pace.take(now), Ok(()));
            pace.ended(written, now);
            let at = pace.take(now).unwrap_err();
            assert_eq!(at - now, Duration::from_millis(pause));
            now = at;
        }
        assert_eq!(pace.take(now), Ok(()));
        pace.ended(Written::Done, now);
        assert_eq!(pace.take(now), Ok(()));
    }
}
