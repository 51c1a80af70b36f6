//! Refusing a pod's connections at once: what the keeper is asked for.

use std::collections::HashMap;

use nobypass_common::abi::{POD_FASTFAIL4, POD_FASTFAIL6, PodPolicy, Refusal};
use nobypass_common::ids::PodKind;
use tokio::sync::oneshot;

use crate::bpf::Maps;
use crate::sys::clock::monotonic_ns;

/// All flags of a refusal.
pub const FLAGS: u32 = POD_FASTFAIL4 | POD_FASTFAIL6;

/// A change for one pod.
#[derive(Debug)]
pub struct Refuse {
    /// Its cgroup id.
    pub cgroup: u64,
    /// Families that are refused from now on, and no others: IPv4, IPv6.
    pub families: [bool; 2],
    /// Told when it holds.
    pub done: Option<oneshot::Sender<()>>,
}

/// The flags that a pod's entry carries. Only a meshed pod's connections are refused.
pub fn flags(refused: &HashMap<u64, [bool; 2]>, cgroup: u64, policy: &PodPolicy) -> u32 {
    let [v4, v6] = refused.get(&cgroup).copied().unwrap_or_default();
    if policy.kind != PodKind::Meshed.code() {
        return 0;
    }
    (if v4 { POD_FASTFAIL4 } else { 0 }) | (if v6 { POD_FASTFAIL6 } else { 0 })
}

/// Notes what is wanted, and gives the pod's entry as it has to be written; `None` if it is right.
pub fn change(
    refused: &mut HashMap<u64, [bool; 2]>,
    maps: &mut Maps,
    Refuse { cgroup, families, done: _ }: &Refuse,
) -> Option<PodPolicy> {
    if families.contains(&true) {
        refused.insert(*cgroup, *families);
    } else {
        refused.remove(cgroup);
    }
    let old = maps.policy(*cgroup)?;
    let new = old.flags & !FLAGS | flags(refused, *cgroup, &old);
    if new & !old.flags != 0 {
        // As if one had been let through just now; nothing is healed yet.
        let refusal = Refusal { tried_ns: [monotonic_ns(); 2], healed_ns: [0; 2] };
        if let Err(error) = maps.set_refusal(*cgroup, &refusal) {
            tracing::warn!(%error, cgroup, "connections of this pod will fail a little later, at the SYN");
        }
    }
    (new != old.flags).then_some(PodPolicy { flags: new, ..old })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_meshed_pods_are_refused() {
        let refused = HashMap::from([(1, [true, false]), (2, [true, true])]);
        let meshed = PodPolicy { kind: PodKind::Meshed.code(), ..PodPolicy::default() };
        assert_eq!(flags(&refused, 1, &meshed), POD_FASTFAIL4);
        assert_eq!(flags(&refused, 2, &meshed), FLAGS);
        assert_eq!(flags(&refused, 3, &meshed), 0);
        let exempt = PodPolicy { kind: PodKind::Exempt.code(), ..meshed };
        assert_eq!(flags(&refused, 2, &exempt), 0);
    }
}
