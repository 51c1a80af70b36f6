//! What holds on this node: flags, `policy.yaml`, and what was set by hand. Pure.

use nobypass_common::abi::{CONFIG_INBOUND, CONFIG_JUDGE_NON_TCP, Config as KernelConfig};
use nobypass_common::ids::{Mode, UnknownPolicy};
use serde::Serialize;

use super::file::{
    FamilyGap, Inbound, ModeName, NamespaceRule, NonTcp, OnSilence, PodOverride, PolicyFile, Span, Unknown,
    names,
};
use crate::config::{Config, InboundFlag, NonTcpFlag, UnknownFlag};
use crate::pods::model::KeyValues;
use crate::remedy::policy::Remedies;

/// Where the node's mode comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// `--mode`.
    Flag,
    /// `mode` of the policy file.
    Policy,
    /// `nobypass mode`.
    Hand,
}

impl Source {
    /// In logs and reports.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Flag => "--mode",
            Self::Policy => "the policy file",
            Self::Hand => "`nobypass mode`",
        }
    }
}

/// What holds for meshed pods, beside the mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Traffic {
    /// UDP (but DNS) and other protocols.
    pub non_tcp: NonTcp,
    /// QUIC.
    pub quic: NonTcp,
    /// Families that the mesh does not redirect.
    pub family_gap: FamilyGap,
    /// Inbound connections.
    pub inbound: Inbound,
}

/// Everything, with nothing left open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Effective {
    /// The node's mode.
    pub mode: ModeName,
    /// Where it comes from.
    pub mode_source: Source,
    /// What it would be without `nobypass mode`.
    pub mode_without_hand: ModeName,
    /// Connections of unknown pods.
    pub unknown_pods: Unknown,
    /// How long they are held at most, ms.
    pub hold_ms: u32,
    /// What holds where no namespace says otherwise.
    pub traffic: Traffic,
    /// Events a pod may report in a second, per CPU.
    pub event_rate: u32,
    /// Whether pods may set their own mode.
    pub allow_pod_override: PodOverride,
    /// Namespaces where the mode is audit at most.
    pub fail_open_namespaces: Vec<Box<str>>,
    /// The first that matches counts.
    pub namespaces: Vec<NamespaceRule>,
    /// What is done about pods that bypass.
    pub remedies: Remedies,
    /// So long may the agent be silent.
    pub max_agent_silence: Option<Span>,
    /// What the programs do then.
    pub on_silence: OnSilence,
}

impl Effective {
    /// Joins the levels: `hand` goes before `file`, and that before `flags`.
    pub fn new(flags: &Config, file: &PolicyFile, hand: Option<Mode>) -> Self {
        let PolicyFile {
            api_version: _,
            mode,
            unknown_pods,
            hold_ms,
            non_tcp,
            quic,
            family_gap,
            inbound,
            events,
            allow_pod_override,
            fail_open_namespaces,
            namespaces,
            remedies,
            max_agent_silence,
            on_silence,
            profiles: _,
        } = file;
        let without_hand = mode.unwrap_or_else(|| Mode::from(flags.mode).into());
        let source = match (hand, mode) {
            (Some(_), _) => Source::Hand,
            (None, Some(_)) => Source::Policy,
            (None, None) => Source::Flag,
        };
        Self {
            mode: hand.map_or(without_hand, ModeName::from),
            mode_source: source,
            mode_without_hand: without_hand,
            unknown_pods: unknown_pods.unwrap_or(match flags.unknown_pods {
                UnknownFlag::Pass => Unknown::Pass,
                UnknownFlag::Hold => Unknown::Hold,
            }),
            hold_ms: hold_ms.unwrap_or(flags.hold_ms),
            traffic: Traffic {
                non_tcp: non_tcp.unwrap_or_else(|| flags.non_tcp.into()),
                quic: quic.unwrap_or_else(|| flags.quic.into()),
                family_gap: family_gap.unwrap_or(FamilyGap::Report),
                inbound: inbound.unwrap_or_else(|| flags.inbound.into()),
            },
            event_rate: events.and_then(|events| events.rate).unwrap_or(flags.event_rate),
            allow_pod_override: allow_pod_override.unwrap_or_default(),
            fail_open_namespaces: fail_open_namespaces.clone().unwrap_or_else(|| vec!["kube-system".into()]),
            namespaces: namespaces.clone(),
            remedies: remedies.unwrap_or_default().over(&flags.remedies.remedies()),
            max_agent_silence: *max_agent_silence,
            on_silence: on_silence.unwrap_or_default(),
        }
    }

    /// The rule for a namespace, and its number.
    pub fn rule(&self, namespace: &str, labels: Option<&KeyValues>) -> Option<(usize, &NamespaceRule)> {
        self.namespaces.iter().enumerate().find(|(_, rule)| rule.matches(namespace, labels))
    }

    /// What holds for meshed pods of a namespace.
    pub fn traffic(&self, namespace: &str, labels: Option<&KeyValues>) -> Traffic {
        let Some((_, rule)) = self.rule(namespace, labels) else { return self.traffic };
        Traffic {
            non_tcp: rule.non_tcp.unwrap_or(self.traffic.non_tcp),
            quic: rule.quic.unwrap_or(self.traffic.quic),
            family_gap: rule.family_gap.unwrap_or(self.traffic.family_gap),
            inbound: rule.inbound.unwrap_or(self.traffic.inbound),
        }
    }

    /// Whether nothing is ever dropped in a namespace.
    pub fn fails_open(&self, namespace: &str) -> bool {
        names(&self.fail_open_namespaces, namespace)
    }

    /// The programs' settings; parents and levels are another's.
    pub fn kernel(&self, config: &mut KernelConfig) {
        let rules = || self.namespaces.iter();
        // What any namespace asks for is judged everywhere: the switch is the node's.
        let most_non_tcp = rules().flat_map(|rule| [rule.non_tcp, rule.quic]).flatten();
        let most_non_tcp = most_non_tcp.chain([self.traffic.non_tcp, self.traffic.quic]).max();
        let most_inbound = rules().filter_map(|rule| rule.inbound).chain([self.traffic.inbound]).max();
        let mut flags = config.flags & !(CONFIG_JUDGE_NON_TCP | CONFIG_INBOUND);
        if most_non_tcp > Some(NonTcp::Ignore) {
            flags |= CONFIG_JUDGE_NON_TCP;
        }
        if most_inbound > Some(Inbound::Off) {
            flags |= CONFIG_INBOUND;
        }
        config.mode = Mode::from(self.mode).code();
        config.unknown_policy = match self.unknown_pods {
            Unknown::Pass => UnknownPolicy::Pass.code(),
            Unknown::Hold => UnknownPolicy::Hold.code(),
        };
        config.flags = flags;
        config.hold_ns = u64::from(self.hold_ms) * 1_000_000;
        config.max_silence_ns = match (self.on_silence, self.max_agent_silence) {
            (OnSilence::Audit, Some(Span(silence))) => u64::try_from(silence.as_nanos()).unwrap_or(u64::MAX),
            _ => 0,
        };
        config.event_rate = self.event_rate;
        config.event_burst = self.event_rate.saturating_mul(3);
    }
}

impl From<NonTcpFlag> for NonTcp {
    fn from(flag: NonTcpFlag) -> Self {
        match flag {
            NonTcpFlag::Ignore => Self::Ignore,
            NonTcpFlag::Count => Self::Count,
            NonTcpFlag::Drop => Self::Drop,
        }
    }
}

impl From<InboundFlag> for Inbound {
    fn from(flag: InboundFlag) -> Self {
        match flag {
            InboundFlag::Off => Self::Off,
            InboundFlag::Audit => Self::Audit,
            InboundFlag::Enforce => Self::Enforce,
        }
    }
}

#[cfg(test)]
mod tests;
