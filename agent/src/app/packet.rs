//! Looks for meshed pods that may send past everything (`probe::packet`), and tells.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::probing::Probing;
use crate::policy::{PodView, Snapshot};
use crate::probe::metrics::PodsLabel;
use crate::probe::packet::containers;
use crate::sys::caps::CAP_NET_RAW;

/// Looks at one pod's processes.
pub(super) async fn look(with: &Probing, view: &PodView) {
    let Some(finder) = with.finder.clone() else { return };
    let cgroup = view.cgroup;
    // Some files for each process: on a thread of its own, so that no event waits for it.
    let looked = tokio::task::spawn_blocking(move || finder.containers_with(cgroup, CAP_NET_RAW));
    let Ok(Ok(found)) = looked.await else { return };
    let names = containers(view, &found);
    if with.packet.borrow().get(&cgroup).map_or(&[][..], Vec::as_slice) == names {
        return;
    }
    if !names.is_empty() {
        tracing::warn!(
            namespace = %view.namespace, pod = %view.name, mesh = %view.mesh, containers = ?names, reason = "packet_socket",
            "a meshed pod may send by packet sockets, which nothing here sees: drop NET_RAW in its securityContext"
        );
    }
    with.packet.send_modify(|all| {
        let all = Arc::make_mut(all);
        if names.is_empty() { drop(all.remove(&cgroup)) } else { drop(all.insert(cgroup, names)) }
    });
    count(with, &with.snapshots.borrow());
}

/// Forgets pods that are gone.
pub(super) fn keep(with: &Probing, live: &BTreeSet<u64>, snapshot: &Snapshot) {
    let forget = |all: &mut crate::probe::PacketSockets| {
        let stale = all.keys().any(|cgroup| !live.contains(cgroup));
        if stale {
            Arc::make_mut(all).retain(|cgroup, _| live.contains(cgroup));
        }
        stale
    };
    if with.packet.send_if_modified(forget) {
        count(with, snapshot);
    }
}

fn count(with: &Probing, snapshot: &Snapshot) {
    let gauges = &with.metrics.packet;
    gauges.clear();
    for view in with.packet.borrow().keys().filter_map(|cgroup| snapshot.pods.get(cgroup)) {
        let label = PodsLabel { namespace: view.namespace.to_string(), mesh: view.mesh.to_string() };
        gauges.get_or_create(&label).inc();
    }
}
