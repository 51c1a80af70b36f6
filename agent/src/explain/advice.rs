//! What to do next: a table of situations, each with a sentence.

use super::Explanation;
use crate::policy::mode::{Downgrade, Fate, Level};

/// What to do, the most urgent first.
pub(super) fn next(explained: &Explanation, lost_hooks: &[String]) -> Vec<String> {
    let mut next = Vec::new();
    if !explained.agent {
        next.push(
            "start the agent: without one nobody reads events, classifies new pods or repairs".to_owned(),
        );
    }
    for hook in lost_hooks {
        next.push(format!(
            "the hook {hook} is not in effect, see `nobypass preflight`: what is said here may be incomplete"
        ));
    }
    for family in &explained.families {
        next.extend(for_family(explained, &family.family, &family.verdict, &family.reason));
    }
    match explained.mode.downgrade {
        Some(Downgrade::FailOpenNamespace) => next.push(format!(
            "enforce is asked for and not in effect: namespace {} is one of failOpenNamespaces",
            explained.namespace
        )),
        Some(Downgrade::UnsupportedRuntime) => {
            next.push(
                "enforce is asked for and cannot be had: nothing on this node sees this pod's packets"
                    .to_owned(),
            );
        }
        Some(Downgrade::GroupRules) => next.push(
            "enforce is asked for and cannot be had: take the rules by group from the pod's mesh, exempt users (UID) or ports \
             instead"
                .to_owned(),
        ),
        None => {}
    }
    for said in
        explained.mode.said.iter().filter(|said| said.fate == Fate::Refused && said.level == Level::Pod)
    {
        next.push(format!(
            "the pod asks for mode {:?} and is not allowed to: set the label on its namespace, or allowPodOverride",
            said.value
        ));
    }
    if !explained.packet_sockets.is_empty() {
        next.push(format!(
            "container {} has CAP_NET_RAW: what it sends by packet sockets nothing here sees. Unless it needs them, drop \
             NET_RAW in its securityContext",
            explained.packet_sockets.join(", ")
        ));
    }
    if !explained.problems.is_empty() {
        next.push("correct the annotations named under problems".to_owned());
    }
    if next.is_empty() {
        next.push(match explained.kind.as_str() {
            "unknown" => {
                "wait until the runtime or the API server has spoken of it; `nobypass status` says whether \
                they answer"
                    .to_owned()
            }
            _ => "nothing".to_owned(),
        });
    }
    next
}

fn for_family(explained: &Explanation, family: &str, verdict: &str, reason: &str) -> Option<String> {
    let Explanation { namespace, name, .. } = explained;
    let bad = matches!(verdict, "bypassing" | "partial");
    Some(match reason {
        "not_redirected" if bad => format!(
            "{family}: this pod has no working redirect rules. See that the node's CNI configuration calls the mesh \
             (`nobypass cni status`), then repair the pod or start it anew: kubectl delete pod -n {namespace} {name}"
        ),
        "family_gap" if bad => format!(
            "{family}: the mesh does not redirect this family. Switch it on in the mesh, keep the application from using \
             it, or drop it with familyGap: drop"
        ),
        "preexisting" if bad => format!(
            "{family}: connections from before the agent or the repair go on around the proxy: start the application \
             anew, or let enforce end them"
        ),
        "proxy_uid_impersonation" if bad => format!(
            "{family}: a container other than the proxy runs with the proxy's UID, which the mesh's rules let out: give \
             it another runAsUser"
        ),
        "raw_socket" if bad => format!(
            "{family}: the application sends by a raw socket, which no rule redirects: take CAP_NET_RAW from it"
        ),
        "probe_failed" if !explained.families.iter().any(|family| family.verdict != "unknown") => {
            format!("{family}: nothing is known yet and the probe failed; a connection of the pod would tell")
        }
        _ => return None,
    })
}
