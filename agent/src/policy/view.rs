//! What is shown of a classified pod: pure.

use std::sync::Arc;

use nobypass_common::abi::{NAME_MAX, NAMESPACE_MAX, POD_GAP4, POD_GAP6, PodName, PodPolicy};
use nobypass_common::ids::PodKind;

use super::desired;
use super::mode::{self, Choice, Fate, Level, Said};
use super::registry::Entry;
use super::snapshot::PodView;
use crate::mesh::Membership;
use crate::pods::PodUid;
use crate::pods::model::PodFacts;

/// The view of a pod whose facts are known, but for its mode.
pub(super) fn view(
    uid: PodUid,
    cgroup: u64,
    facts: &Arc<PodFacts>,
    entry: &Entry,
    membership: &Membership,
) -> PodView {
    let (kind, reason) = desired::kind(membership);
    let meshed = match membership {
        Membership::Meshed(meshed) => Some(&**meshed),
        Membership::NotMeshed { .. } | Membership::Exempt { .. } | Membership::Unsupported { .. } => None,
    };
    let mesh = match membership {
        Membership::Unsupported { profile, .. } => profile.clone(),
        _ => meshed.map_or_else(|| "".into(), |meshed| meshed.profile.clone()),
    };
    let proxy = meshed.and_then(|meshed| meshed.proxy_container);
    let proxy_cgroup = proxy.and_then(|proxy| entry.containers.get(&proxy)).copied().unwrap_or(0);
    let mut containers: Vec<(u64, Box<str>)> = facts
        .containers
        .iter()
        .filter_map(|container| Some((*entry.containers.get(&container.id?)?, container.name.clone())))
        .collect();
    containers.sort();
    let problem = |problem: &crate::mesh::Problem| format!("{}: {:?}", problem.annotation, problem.element);
    PodView {
        uid,
        namespace: facts.namespace.clone(),
        name: facts.name.clone(),
        mesh,
        cgroup,
        kind,
        reason,
        unsupported: match membership {
            Membership::Unsupported { reason, .. } => Some(*reason),
            _ => None,
        },
        proxy,
        proxy_cgroup,
        families: meshed.map_or([false; 2], |meshed| [meshed.families.ipv4, meshed.families.ipv6]),
        problems: meshed.map_or_else(Vec::new, |meshed| meshed.problems.iter().map(problem).collect()),
        containers,
        sandbox: facts.sandbox.as_ref().map(|sandbox| sandbox.id),
        facts: Some(Arc::clone(facts)),
        choice: None,
        traffic: None,
    }
}

/// What of the levels that name a mode was not taken.
pub(super) fn mode_problems(choice: &Choice) -> impl Iterator<Item = String> {
    choice.said.iter().filter_map(|Said { level, value, fate }| {
        let of = if *level == Level::Pod { "" } else { " of the namespace" };
        match fate {
            Fate::Refused => {
                Some(format!("{}: {value:?} is refused: a pod may not choose that mode", mode::KEY))
            }
            Fate::Invalid => Some(format!("{}{of}: {value:?} is no mode: off, audit or enforce", mode::KEY)),
            Fate::Holds | Fate::Overridden | Fate::Downgraded => None,
        }
    })
}

/// The name that the programs' maps keep of a pod.
pub(super) fn name(view: &PodView) -> PodName {
    PodName {
        namespace: padded::<NAMESPACE_MAX>(&view.namespace),
        name: padded::<NAME_MAX>(&view.name),
        mesh: padded(&view.mesh),
    }
}

/// `text` with zeroes behind it; what is too long is cut.
pub(super) fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    for (byte, from) in bytes.iter_mut().zip(text.bytes()) {
        *byte = from;
    }
    bytes
}

/// The text of a zero-padded field.
pub fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).into_owned()
}

/// The view of a pod of which no source has spoken yet: what an earlier agent knew, or nothing.
pub(super) fn remembered(
    uid: PodUid,
    cgroup: u64,
    entry: Option<PodPolicy>,
    name: Option<PodName>,
) -> PodView {
    let view = PodView::unknown(uid, cgroup);
    let (Some(policy), Some(PodName { namespace, name, mesh })) = (entry, name) else { return view };
    PodView {
        namespace: text(&namespace).into(),
        name: text(&name).into(),
        mesh: text(&mesh).into(),
        kind: PodKind::from_code(policy.kind).unwrap_or(PodKind::Unknown),
        reason: "remembered",
        proxy_cgroup: policy.proxy_cgroup,
        families: [policy.flags & POD_GAP4 == 0, policy.flags & POD_GAP6 == 0],
        ..view
    }
}
