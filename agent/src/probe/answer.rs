//! What a probe can say of one IP family of a pod.

use serde::Serialize;

/// The answer of one probe for one IP family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
pub enum Answer {
    /// A new connection is redirected to this port of the pod; 0 where the packet does not tell (TPROXY).
    Redirected { port: u16 },
    /// A new connection leaves by the device with this index.
    NotRedirected { ifindex: u32 },
    /// The family has no route: nothing can leave.
    NoRoute,
    /// The question could not be asked, for a bounded reason; never to be taken for one of the others.
    Failed { reason: &'static str },
}

impl Answer {
    /// The labels of [`Answer::label`].
    pub const LABELS: [&'static str; 4] = ["redirected", "not_redirected", "no_route", "failed"];

    /// The label in metrics and tables.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Redirected { .. } => "redirected",
            Self::NotRedirected { .. } => "not_redirected",
            Self::NoRoute => "no_route",
            Self::Failed { .. } => "failed",
        }
    }
}
