//! The hooks: their names in metrics, pins and the eBPF object.

use nobypass_common::abi::Config;
use nobypass_common::ids::UnknownPolicy;

use crate::sys::bpf::AttachType;

/// One place where a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hook {
    /// `cgroup_skb/egress`: the rule. Nothing works without it.
    Egress,
    /// `cgroup_skb/ingress`: inbound bypasses.
    Ingress,
    /// `cgroup/connect4`: fast refusal.
    Connect4,
    /// `cgroup/connect6`: fast refusal.
    Connect6,
    /// `sock_ops`: held SYNs are repeated soon. Attached only while unknown pods are held: it runs some six times in each
    /// connection's life.
    SockOps,
    /// `tracepoint/cgroup:cgroup_mkdir`: pods known before their first process.
    Mkdir,
    /// `tracepoint/cgroup:cgroup_rmdir`: pods forgotten.
    Rmdir,
}

impl Hook {
    /// Those that are attached to each parent of pod cgroups.
    pub const CGROUP: [Self; 5] =
        [Self::Egress, Self::Ingress, Self::Connect4, Self::Connect6, Self::SockOps];
    /// Those that are attached once.
    pub const TRACEPOINT: [Self; 2] = [Self::Mkdir, Self::Rmdir];
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Egress,
        Self::Ingress,
        Self::Connect4,
        Self::Connect6,
        Self::SockOps,
        Self::Mkdir,
        Self::Rmdir,
    ];

    /// Whether these settings call for it.
    pub const fn is_wanted(self, config: &Config) -> bool {
        !matches!(self, Self::SockOps) || config.unknown_policy == UnknownPolicy::Hold.code()
    }

    /// Label in metrics and part of the pin's name.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Egress => "egress",
            Self::Ingress => "ingress",
            Self::Connect4 => "connect4",
            Self::Connect6 => "connect6",
            Self::SockOps => "sock_ops",
            Self::Mkdir => "cgroup_mkdir",
            Self::Rmdir => "cgroup_rmdir",
        }
    }

    /// The program's name in the object, and in the kernel.
    pub const fn program(self) -> &'static str {
        match self {
            Self::Egress => "nb_egress",
            Self::Ingress => "nb_ingress",
            Self::Connect4 => "nb_connect4",
            Self::Connect6 => "nb_connect6",
            Self::SockOps => "nb_sock_ops",
            Self::Mkdir => "nb_mkdir",
            Self::Rmdir => "nb_rmdir",
        }
    }

    /// The attach type of a cgroup hook.
    pub const fn attach_type(self) -> Option<AttachType> {
        match self {
            Self::Egress => Some(AttachType::Egress),
            Self::Ingress => Some(AttachType::Ingress),
            Self::Connect4 => Some(AttachType::Connect4),
            Self::Connect6 => Some(AttachType::Connect6),
            Self::SockOps => Some(AttachType::SockOps),
            Self::Mkdir | Self::Rmdir => None,
        }
    }

    /// What is lost without it, for `preflight` and the log.
    pub const fn without(self) -> &'static str {
        match self {
            Self::Egress => "no bypass is seen or stopped",
            Self::Ingress => "inbound bypasses are not seen",
            Self::Connect4 | Self::Connect6 => "refused connections fail a little later, at the SYN",
            Self::SockOps => "a held connection goes on after one second or more instead of tenths of one",
            Self::Mkdir => "a new pod is first known at its first packet, and reported up to a resync later",
            Self::Rmdir => "entries of removed pods stay until a resync",
        }
    }
}
