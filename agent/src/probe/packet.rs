//! Who could send past everything that judges here: packet sockets (packet(7)) go below sockets' cgroups and below netfilter.
//!
//! Whether one is used, nothing of a cgroup sees; that it could be is known by a capability.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::policy::PodView;

/// Containers with a process that may open packet sockets, of each pod that has such, by the pod's cgroup id.
pub type PacketSockets = Arc<BTreeMap<u64, Vec<Box<str>>>>;

/// Names of these containers, given by their cgroup ids: without the proxy, which may go where it likes, and without
/// what is none of the pod's containers, as its sandbox.
pub fn containers(view: &PodView, found: &[u64]) -> Vec<Box<str>> {
    let known = view.containers.iter().filter(|(id, _)| found.contains(id) && *id != view.proxy_cgroup);
    let names: Vec<Box<str>> = known.map(|(_, name)| name.clone()).collect();
    // Of a pod that a source tells of, a cgroup without a name is its sandbox's, or of a container that is told of in a
    // moment.
    if view.facts.is_some() || !view.containers.is_empty() {
        return names;
    }
    found.iter().filter(|id| **id != view.proxy_cgroup).map(|id| format!("cgroup {id}").into()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::PodUid;
    use crate::pods::model::PodFacts;

    #[test]
    fn the_proxy_and_the_sandbox_are_not_named() {
        let uid = PodUid::parse("2c48913c-b29f-11e7-9350-020968147796").unwrap();
        let mut view = PodView { proxy_cgroup: 3, ..PodView::unknown(uid, 1) };
        assert_eq!(containers(&view, &[2, 3]), [Box::from("cgroup 2")], "remembered, and not told of yet");
        let facts = Arc::new(PodFacts::new(uid, "shop", "cart"));
        let told = PodView { facts: Some(facts), ..view.clone() };
        assert!(
            containers(&told, &[2, 3]).is_empty(),
            "the sandbox's pause container has NET_RAW everywhere"
        );
        view.containers = vec![(2, "app".into()), (3, "linkerd-proxy".into())];
        assert_eq!(containers(&view, &[2, 3, 4]), [Box::from("app")]);
        assert!(containers(&view, &[]).is_empty());
    }
}
