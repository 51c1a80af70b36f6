//! Connections past the proxy that are older than the programs, or than the rules that a repair brought: listed once a pod,
//! and aborted where it enforces.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::mesh::Meshed;
use crate::policy::PodView;
use crate::refuse::diag::Socket;
use crate::refuse::preexisting::Rules;
use crate::refuse::sockets::{Job, PodRef, Sockets};

/// Lines in the log for older connections of one pod.
const LINES: usize = 10;
/// Between two looks at a pod that has some left, at least.
const PAUSE: Duration = Duration::from_secs(1);

/// Pods that were there before the programs or were repaired, by cgroup id, until nothing of that time is left.
#[derive(Debug)]
pub(super) struct Older {
    pods: HashMap<u64, Old>,
    grace: Duration,
}

#[derive(Debug, Default)]
struct Old {
    /// Cookies of those that were found, and when.
    listed: BTreeMap<u64, Instant>,
    /// Nobody has looked since the programs or the rules came: what is found is older than they.
    open: bool,
    repaired: bool,
}

/// What a look came to.
pub(super) struct Looked {
    /// Connections that are left, IPv4 and IPv6.
    pub left: [u32; 2],
    /// When to look again.
    pub again: Option<Instant>,
}

impl Older {
    pub(super) fn new(pods: &BTreeSet<u64>, grace: Duration) -> Self {
        let old = |cgroup: &u64| (*cgroup, Old { open: true, ..Old::default() });
        Self { pods: pods.iter().map(old).collect(), grace }
    }

    pub(super) fn retain(&mut self, keep: impl Fn(u64) -> bool) {
        self.pods.retain(|cgroup, _| keep(*cgroup));
    }

    /// The pod has new rules, or is about to get them.
    pub(super) fn repaired(&mut self, cgroup: u64) {
        let old = self.pods.entry(cgroup).or_default();
        (old.open, old.repaired) = (true, true);
    }

    pub(super) fn is_repaired(&self, cgroup: u64) -> bool {
        self.pods.get(&cgroup).is_some_and(|old| old.repaired)
    }

    /// All its connections are redirected: there is nothing to look for.
    pub(super) fn forget(&mut self, cgroup: u64) {
        self.pods.remove(&cgroup);
    }

    /// Lists what `families` have left; `None` for a pod without any, and for one that cannot be looked at.
    pub(super) async fn look(
        &mut self,
        view: &PodView,
        meshed: Option<&Meshed>,
        families: [bool; 2],
        enforce: bool,
        sockets: &Sockets,
    ) -> Option<Looked> {
        let old = self.pods.get_mut(&view.cgroup)?;
        let now = Instant::now();
        let due = |since: &Instant| enforce && now.duration_since(*since) >= self.grace;
        let abort: BTreeSet<u64> =
            old.listed.iter().filter(|(_, since)| due(since)).map(|(cookie, _)| *cookie).collect();
        let mut found = list(view, meshed, families, &abort, sockets).await?;
        let aborted = found.iter().filter(|socket| abort.contains(&socket.cookie)).count();
        if aborted > 0 {
            tracing::warn!(
                namespace = %view.namespace, pod = %view.name, connections = aborted, repaired = old.repaired,
                "aborted connections past the proxy that were older than the programs or the redirection"
            );
            sockets.count_old("aborted", aborted);
        }
        found.retain(|socket| !abort.contains(&socket.cookie));
        if old.open {
            old.open = false;
            let fresh: Vec<&Socket> =
                found.iter().filter(|socket| !old.listed.contains_key(&socket.cookie)).collect();
            say(view, &fresh, old.repaired);
            sockets.count_old("reported", fresh.len());
            old.listed.extend(fresh.iter().map(|socket| (socket.cookie, now)));
        }
        found.retain(|socket| old.listed.contains_key(&socket.cookie));
        old.listed.retain(|cookie, _| found.iter().any(|socket| socket.cookie == *cookie));
        let again = if found.is_empty() {
            self.pods.remove(&view.cgroup);
            None
        } else {
            Some(now + self.grace.max(PAUSE))
        };
        let of = |v4: bool| found.iter().filter(|socket| socket.remote.is_ipv4() == v4).count();
        let left = [true, false].map(|v4| u32::try_from(of(v4)).unwrap_or(u32::MAX));
        Some(Looked { left, again })
    }
}

async fn list(
    view: &PodView,
    meshed: Option<&Meshed>,
    families: [bool; 2],
    abort: &BTreeSet<u64>,
    sockets: &Sockets,
) -> Option<Vec<Socket>> {
    let rules = Box::new(Rules {
        proxy_cgroup: view.proxy_cgroup,
        proxy_uid: meshed.and_then(|meshed| meshed.proxy_uid),
        families,
        exemptions: meshed.map(|meshed| meshed.exemptions.clone()).unwrap_or_default(),
    });
    let (reply, found) = oneshot::channel();
    let pod = PodRef { cgroup: view.cgroup, netns: view.netns().map(Into::into) };
    sockets.send(Job::Preexisting { pod, rules, abort: abort.clone(), reply });
    match found.await {
        Ok(Ok(found)) => Some(found),
        Ok(Err(error)) => {
            let (namespace, pod) = (&view.namespace, &view.name);
            tracing::warn!(%namespace, %pod, %error, "cannot list connections older than the programs");
            None
        }
        // No room for the job; the next look asks again.
        Err(_) => None,
    }
}

fn say(view: &PodView, found: &[&Socket], repaired: bool) {
    for socket in found.iter().take(LINES) {
        tracing::warn!(
            namespace = %view.namespace, pod = %view.name, reason = "preexisting", dst = %socket.remote,
            uid = socket.uid, repaired, "a connection past the proxy is older than the programs or the redirection"
        );
    }
}
