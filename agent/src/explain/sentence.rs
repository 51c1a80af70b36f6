//! Facts in sentences.

use super::Explanation;
use crate::mesh::recognise::{Exempt, NotMeshed, Unsupported};
use crate::mesh::{Membership, Profile};
use crate::policy::PodView;
use crate::policy::desired::ENROLLING;
use crate::probe::Answer;

/// Why a pod is meshed, or not.
pub(super) fn recognition(
    view: &PodView,
    membership: Option<&Membership>,
    profile: Option<&Profile>,
) -> String {
    match membership {
        None if view.reason == "remembered" => {
            "an earlier agent classified it; neither the runtime nor the API server has spoken of it yet"
                .into()
        }
        None => "neither the runtime nor the API server has spoken of it yet".into(),
        Some(Membership::NotMeshed { reason: NotMeshed::NoProfile }) => {
            "no profile finds its marks on it: no mesh wants it redirected".into()
        }
        Some(Membership::NotMeshed { reason: NotMeshed::ProxyMissing { profile } }) => {
            format!(
                "it carries the marks of {profile}, but no proxy is among its containers: injection went wrong"
            )
        }
        Some(Membership::Exempt { reason: Exempt::HostNetwork }) => {
            "it uses the node's network, where no mesh redirects".into()
        }
        Some(Membership::Exempt { reason: Exempt::ControlPlane { profile } }) => {
            format!("it is part of {profile} itself, which is not judged")
        }
        Some(Membership::Exempt { reason: Exempt::Gateway { profile } }) => {
            format!("it is a gateway of {profile}: a proxy that redirects nothing, which is not judged")
        }
        Some(Membership::Exempt { reason: Exempt::Own }) => "it is nobypass, which is not judged".into(),
        Some(Membership::Unsupported { profile, reason }) => {
            let why = match reason {
                Unsupported::UserspaceKernel => "has a network stack in user space",
                Unsupported::VirtualMachine => "has a kernel of its own",
                Unsupported::GroupRules => {
                    return format!(
                        "it belongs to {profile}, which goes by the group (GID) of a connection's owner: no packet tells \
                         that, so it is not judged and nothing of it is dropped"
                    );
                }
            };
            format!("it belongs to {profile} and {why}: nothing on this node can see its connections")
        }
        Some(Membership::Meshed(meshed)) => {
            let marks = marks(view, profile);
            let due = if view.reason == ENROLLING {
                "; it ran before it was labelled, and the mesh is given time to take it up, until then nothing is a bypass"
            } else if meshed.redirect_due {
                ""
            } else {
                "; its mesh's init container has not succeeded yet, until then nothing is a bypass"
            };
            format!("it belongs to {}: {marks}{due}", meshed.profile)
        }
    }
}

/// Which of a profile's marks are on a pod.
fn marks(view: &PodView, profile: Option<&Profile>) -> String {
    let (Some(profile), Some(facts)) = (profile, view.facts.as_deref()) else { return "by its marks".into() };
    let mut found = Vec::new();
    if let Some(proxy) = view.proxy {
        let name = facts.containers.iter().find(|container| container.id == Some(proxy));
        found.push(format!("container {}", name.map_or("?", |container| &container.name)));
    }
    let on = profile.recognise.any.iter().filter(|marker| marker.is_on(facts));
    found.extend(on.map(ToString::to_string));
    found.join(", ")
}

/// A probe's answer.
pub(super) fn probe(answer: Answer) -> String {
    match answer {
        Answer::Redirected { port: 0 } => "the probe: a new connection would be redirected".into(),
        Answer::Redirected { port } => {
            format!("the probe: a new connection would be redirected to port {port}")
        }
        Answer::NotRedirected { ifindex } => {
            format!(
                "the probe: a new connection would leave by the device with index {ifindex}, not redirected"
            )
        }
        Answer::NoRoute => "the probe: this family has no route, nothing can leave".into(),
        Answer::Failed { reason } => format!("the probe could not be asked ({reason})"),
    }
}

/// What enforce does or would do.
pub(super) fn enforce(explained: &Explanation) -> String {
    let count = |name: &str| explained.counters.get(name).copied().unwrap_or(0);
    let dropped: u64 =
        explained.counters.iter().filter(|(name, _)| name.ends_with("_dropped")).map(|(_, n)| n).sum();
    let (would, fast) = (count("would_drop"), count("fast_fail"));
    if explained.kind != "meshed" {
        return "nothing: the pod is not judged".into();
    }
    let did = if dropped + fast > 0 {
        format!("; so far it dropped {dropped} and refused {fast} connections at once")
    } else {
        String::new()
    };
    match explained.mode.mode.as_str() {
        "enforce" => format!("bypasses of this pod are dropped{did}"),
        "audit" => {
            format!("nothing is dropped now; enforce would have dropped {would} connections and packets{did}")
        }
        _ => format!("the mode is {}: nothing is judged{did}", explained.mode.mode),
    }
}
