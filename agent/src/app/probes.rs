//! Sets up what enters pods' networks: the probe's helper and the thread that looks at sockets.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::registry::Registry;
use tokio::sync::{mpsc, watch};

use super::probing::Probing;
use super::react::{News, Reactions};
use super::{Agent, QUEUE};
use crate::bpf::{self, BpfError, Kernel, Maps};
use crate::cgroup::netns::Finder;
use crate::config::RefusalFlag;
use crate::policy::Snapshot;
use crate::policy::refuse::Refuse;
use crate::probe::client::{Client, Place, cgroup_beside, make_cgroup};
use crate::probe::handle::Request;
use crate::probe::{Answers, Handle, PacketSockets, metrics};
use crate::refuse;
use crate::refuse::sockets::Sockets;
use crate::server::Context;

/// Ends of the channels and what works at them.
pub(super) struct Probes {
    pub probing: Probing,
    pub requests: mpsc::Receiver<Request>,
    pub news: mpsc::Receiver<News>,
    pub refusals: mpsc::Receiver<Refuse>,
    pub reactions: Reactions,
}

impl Agent<'_> {
    /// What cannot be set up is missing, and said: seeing and dropping go on without.
    pub(super) fn probes(
        &self,
        kernel: &mut Kernel,
        snapshots: &watch::Receiver<Snapshot>,
        registry: &mut Registry,
        context: &Context,
    ) -> Result<Probes, BpfError> {
        let client = match self.place(kernel) {
            Ok(place) => Some(Client::new(place)),
            Err(error) => {
                tracing::warn!(error, "pods cannot be probed: verdicts rest on their connections alone");
                None
            }
        };
        let counters = refuse::metrics::Metrics::default();
        counters.register(registry);
        let sockets = Finder::new(&self.root.path)
            .and_then(|finder| Sockets::start(finder, counters))
            .inspect_err(|error| {
                tracing::warn!(%error, "refused connections cannot be aborted: they fail when they time out");
            })
            .ok();
        let probes = metrics::Metrics::default();
        probes.register(registry);
        let (answers, last) = watch::channel(Answers::default());
        let (ask, requests) = mpsc::channel(QUEUE);
        let (tell, news) = mpsc::channel(QUEUE);
        let (refuse, refusals) = mpsc::channel(QUEUE);
        let (packet, may_send) = watch::channel(PacketSockets::default());
        let _ = context.probe.set(Handle::new(ask, last, may_send));
        // Adopted programs have seen every connection that began since.
        let old: BTreeSet<u64> = if kernel.adopted() {
            BTreeSet::new()
        } else {
            snapshots.borrow().pods.keys().copied().collect()
        };
        let probing = Probing {
            client,
            sockets: sockets.clone(),
            maps: Maps::open(kernel.dir())?,
            snapshots: snapshots.clone(),
            refusals: refuse,
            answers,
            packet,
            finder: Finder::new(&self.root.path).map(Arc::new).ok(),
            findings: None,
            metrics: probes,
            interval: Duration::from_secs(self.config.probe_interval.into()),
            grace: Duration::from_secs(self.config.preexisting_grace.into()),
            old,
            refuses: self.config.refusal == RefusalFlag::Fast,
        };
        let sockets = sockets.filter(|_| self.config.refusal != RefusalFlag::Hang);
        Ok(Probes { probing, requests, news, refusals, reactions: Reactions { sockets, news: tell } })
    }

    fn place(&self, kernel: &mut Kernel) -> Result<Place, String> {
        let parent = kernel.parents().first().ok_or("no pods' cgroup")?;
        let cgroup = cgroup_beside(&parent.path);
        make_cgroup(&cgroup).map_err(|error| format!("cannot make cgroup {}: {error}", cgroup.display()))?;
        let link = bpf::probe::attach(kernel.object(), &cgroup).map_err(|error| error.to_string())?;
        let (bpf_dir, cgroup_root) = (self.config.bpf_dir.clone(), self.root.path.clone());
        Ok(Place { cgroup, link, bpf_dir, cgroup_root })
    }
}
