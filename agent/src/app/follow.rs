//! The tasks that follow a source: cgroups, bypass events, the pod source's state.

use std::sync::Arc;
use std::time::Instant;

use nobypass_common::ids::CgroupChange;
use tokio::sync::{broadcast, mpsc, watch};

use super::react::Reactions;
use super::{CGROUP_QUEUE, Ended};
use crate::bpf::events::{Ring, cgroup_notice, event};
use crate::bpf::{Maps, selftest};
use crate::cgroup::model::{CgroupEvent, CgroupEventKind};
use crate::cgroup::parents::PodParent;
use crate::cgroup::path::parse_below;
use crate::cgroup::stream::{CgroupSender, Item, channel};
use crate::cgroup::watch as inotify;
use crate::detect::report::{self, LogLimit, Report, report};
use crate::pods::source::Nudge;
use crate::policy::Snapshot;
use crate::policy::text;
use crate::server::{Channel, Health};
use crate::sys::clock::wall;
use crate::sys::poll::readable;

/// Cgroups that the tracepoints report: to the keeper, and as hints to the pod source.
pub(super) async fn follow_cgroups(
    mut ring: Ring,
    parents: Vec<PodParent>,
    cgroups: CgroupSender,
    nudge: mpsc::Sender<Nudge>,
    health: Arc<Health>,
) -> Ended {
    loop {
        let drained = ring
            .drain(|record| {
                let Some(notice) = cgroup_notice(record) else { return };
                let Some(path) = notice.path else {
                    cgroups.rescan();
                    return;
                };
                if selftest::is_canary(&path) {
                    return;
                }
                let kind = match notice.change {
                    CgroupChange::Made => CgroupEventKind::Made,
                    CgroupChange::Removed => CgroupEventKind::Removed,
                };
                hint(&parents, &nudge, kind, &path);
                cgroups.send(CgroupEvent { kind, id: notice.id, level: notice.level, path });
            })
            .await;
        health.set_dropped(Channel::Cgroups, cgroups.dropped());
        if let Err(error) = drained {
            return ("cgroups", Err(error.to_string()));
        }
    }
}

/// Tells the pod source that it may have news of this cgroup's pod.
fn hint(parents: &[PodParent], nudge: &mpsc::Sender<Nudge>, kind: CgroupEventKind, path: &str) {
    let pod = parents.iter().find_map(|parent| parse_below(&parent.rel, path));
    // A lost hint costs time only: the source also looks by itself.
    if let Some(hint) = pod.and_then(|pod| Nudge::new(kind, pod)) {
        let _ = nudge.try_send(hint);
    }
}

/// The way to see cgroups where the tracepoints do not work.
pub(super) async fn follow_inotify(
    parents: Vec<PodParent>,
    cgroups: CgroupSender,
    nudge: mpsc::Sender<Nudge>,
) -> Ended {
    let (seen, mut items) = channel(CGROUP_QUEUE);
    let forward = async {
        while let Some(item) = items.recv().await {
            match item {
                Item::Event(event) => {
                    hint(&parents, &nudge, event.kind, &event.path);
                    cgroups.send(event);
                }
                Item::Rescan => cgroups.rescan(),
            }
        }
    };
    let ended = tokio::select! {
        ended = inotify::run(&parents, &seen) => ended.map_err(|error| error.to_string()),
        () = forward => Ok(()),
    };
    ("inotify", ended)
}

/// What the programs themselves have to say, which is little: that a map is full.
pub(super) type ProgramLog = aya_log::EbpfLogger<&'static dyn log::Log>;

/// The programs' messages: into the log.
pub(super) async fn follow_programs(log: ProgramLog) -> Ended {
    let mut log = match readable(log) {
        Ok(log) => log,
        Err(error) => return ("programs' log", Err(error.to_string())),
    };
    loop {
        match log.readable_mut().await {
            Ok(mut ready) => {
                ready.get_inner_mut().flush();
                ready.clear_ready();
            }
            Err(error) => return ("programs' log", Err(error.to_string())),
        }
    }
}

/// Bypasses: into the log, and to whoever listens.
pub(super) async fn follow_events(
    mut ring: Ring,
    maps: Maps,
    snapshots: watch::Receiver<Snapshot>,
    reports: broadcast::Sender<Arc<Report>>,
    reactions: Reactions,
) -> Ended {
    let mut limit = LogLimit::default();
    loop {
        let mut events = Vec::new();
        if let Err(error) = ring.drain(|record| events.extend(event(record))).await {
            return ("events", Err(error.to_string()));
        }
        let snapshot = snapshots.borrow().clone();
        // First of all: an application waits.
        for event in &events {
            reactions.to(event, &snapshot);
        }
        for event in events {
            let mut report = report(&event, &snapshot, wall(event.ts_ns));
            if report.pod.is_empty()
                && let Some(name) = maps.name(event.pod)
            {
                // Written by an earlier agent; this one has not heard of the pod yet.
                report.namespace = text(&name.namespace);
                report.pod = text(&name.name);
                report.mesh = text(&name.mesh);
            }
            if let Some(left_out) = limit.admit(event.pod, Instant::now()) {
                report::log(&report, left_out);
            }
            // Nobody listening is no error.
            let _ = reports.send(Arc::new(report));
        }
    }
}
