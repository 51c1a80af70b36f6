//! The words of Events. Pure.

use super::kube::LABEL;
use super::machine::Saying;
use super::subject::Pod;
use crate::cluster::events::{Note, PodRef, Reason};

/// The Event that says this of a pod.
pub fn note(pod: &Pod, saying: &Saying) -> Note {
    let seen = if pod.blocked { Reason::MeshBypassBlocked } else { Reason::MeshBypassDetected };
    let fate = if pod.blocked { "and are dropped" } else { "and are let through" };
    let mesh = &pod.mesh;
    let (reason, action, text) = match saying {
        Saying::Detected { gate_open: true } => (
            seen,
            "Detecting",
            format!(
                "new connections bypass the {mesh} proxy {fate}: the pod started without the mesh's CNI rules. \
                 Deleting the pod makes it anew with them; the label {LABEL} marks it where labels are on"
            ),
        ),
        Saying::Detected { gate_open: false } => (
            seen,
            "Detecting",
            format!(
                "new connections bypass the {mesh} proxy {fate}, and this node is not ready for meshed pods: deleting \
                 the pod now would not help. See the condition nobypass.dev/MeshCNIReady of the node"
            ),
        ),
        Saying::Repairing => (
            seen,
            "Repairing",
            format!("running the {mesh} CNI plugin for this pod, to put its rules in place"),
        ),
        Saying::WouldRepair => {
            (seen, "WouldRepair", format!("dry run: would run the {mesh} CNI plugin for this pod"))
        }
        Saying::RepairFailed { detail, last: false } => {
            (seen, "RepairFailed", format!("repair in place failed and is tried again: {detail}"))
        }
        Saying::RepairFailed { detail, last: true } => {
            (seen, "RepairFailed", format!("repair in place failed: {detail}"))
        }
        Saying::Repaired { took } => (
            Reason::MeshRedirectRepaired,
            "Repaired",
            format!("new connections go to the {mesh} proxy again, after {} ms", took.as_millis()),
        ),
        Saying::Unconfirmed { detail } => (
            seen,
            "RepairUnconfirmed",
            format!("the {mesh} CNI plugin ran for this pod, and whether that helped is not known: {detail}"),
        ),
        Saying::Evicting { workload } => (
            Reason::MeshPodEvicted,
            "Evicting",
            format!(
                "evicting the pod, which bypasses the {mesh} proxy; {} {} makes it anew",
                workload.kind, workload.name
            ),
        ),
        Saying::WouldEvict { workload } => (
            seen,
            "WouldEvict",
            format!("dry run: would evict the pod, for {} {} to make it anew", workload.kind, workload.name),
        ),
        Saying::Helpless { why } => {
            (seen, "GivingUp", format!("the pod goes on bypassing the {mesh} proxy: {why}"))
        }
    };
    let uid = pod.uid.to_string();
    let pod = PodRef { namespace: pod.namespace.to_string(), name: pod.name.to_string(), uid };
    Note { reason, action, text, pod: Some(pod) }
}
