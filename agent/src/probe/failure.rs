//! Why a question was not answered.

use crate::cgroup::netns::NetnsError;

use super::Answer;

/// A bounded list, since it is a label in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// The pod's network namespace cannot be entered.
    Netns(NetnsError),
    /// No destination is left that the mesh does not exempt.
    NoTarget,
    /// No socket, no cookie, no map entry: the kernel's resources.
    Socket,
    /// No source address or port is left.
    NoSource,
    /// A rule or program of somebody else refused the connection before it could be seen.
    Refused,
    /// The SYN never came to the program: somebody else's rule dropped it.
    NotSeen,
    /// The destination is an address of the pod itself.
    LocalRoute,
    /// The process that asks is not there, or broke.
    Helper,
    /// It took too long.
    Timeout,
    /// The agent does not know the pod.
    Unknown,
}

impl Failure {
    /// Those that have no further reason.
    const OWN: [Self; 9] = [
        Self::NoTarget,
        Self::Socket,
        Self::NoSource,
        Self::Refused,
        Self::NotSeen,
        Self::LocalRoute,
        Self::Helper,
        Self::Timeout,
        Self::Unknown,
    ];

    /// The label.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Netns(reason) => reason.label(),
            Self::NoTarget => "no_target",
            Self::Socket => "socket",
            Self::NoSource => "no_source",
            Self::Refused => "refused",
            Self::NotSeen => "not_seen",
            Self::LocalRoute => "local_route",
            Self::Helper => "helper",
            Self::Timeout => "timeout",
            Self::Unknown => "unknown_pod",
        }
    }

    /// The failure with this label; [`Failure::Helper`] for none that is known.
    pub fn from_label(label: &str) -> Self {
        let all = Self::OWN.into_iter().chain(NetnsError::ALL.map(Self::Netns));
        all.into_iter().find(|failure| failure.label() == label).unwrap_or(Self::Helper)
    }

    /// Whether a moment later the answer may be another one: the pod is just starting.
    pub fn is_early(label: &str) -> bool {
        matches!(
            Self::from_label(label),
            Self::Netns(NetnsError::NoProcess | NetnsError::HostNetwork) | Self::Helper | Self::Timeout
        )
    }
}

impl From<Failure> for Answer {
    fn from(failure: Failure) -> Self {
        Self::Failed { reason: failure.label() }
    }
}

impl From<NetnsError> for Failure {
    fn from(error: NetnsError) -> Self {
        Self::Netns(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_lead_back() {
        for failure in Failure::OWN.into_iter().chain(NetnsError::ALL.map(Failure::Netns)) {
            assert_eq!(Failure::from_label(failure.label()), failure);
        }
        assert_eq!(Failure::from_label("redirected"), Failure::Helper);
    }
}
