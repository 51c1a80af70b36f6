//! Which mode holds for a pod, and who says so: pure.
//!
//! Pod annotation > namespace label > policy file (a namespace's entry, then the whole node's) > flag. The annotation
//! is the workload's own word, so it may only make the mode stricter unless the operator allows more.

use nobypass_common::ids::{MODE_INHERIT, Mode};
use serde::{Deserialize, Serialize};

use super::effective::Effective;
use super::file::{ModeName, PodOverride};
use crate::mesh::Unsupported;
use crate::pods::model::PodFacts;

/// The pod annotation and the namespace label that name a mode.
pub const KEY: &str = "nobypass.dev/mode";

/// A level that may say something about a pod's mode, the strongest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// The pod's annotation.
    Pod,
    /// Its namespace's label.
    NamespaceLabel,
    /// An entry of `namespaces` in the policy file.
    NamespaceRule,
    /// The node: the policy file, `--mode`, or `nobypass mode`.
    Node,
}

impl Level {
    /// In metrics, logs and JSON.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Pod => "pod",
            Self::NamespaceLabel => "namespace_label",
            Self::NamespaceRule => "namespace_rule",
            Self::Node => "node",
        }
    }
}

/// What became of what a level said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// It holds.
    Holds,
    /// A stronger level said something.
    Overridden,
    /// The operator does not allow pods to say that.
    Refused,
    /// It is no mode.
    Invalid,
    /// It asks for more than can be had.
    Downgraded,
}

/// What a level said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Said {
    /// Who.
    pub level: Level,
    /// What, as it was written; shortened.
    pub value: Box<str>,
    /// What became of it.
    pub fate: Fate,
}

/// Why enforce was asked for and is not in effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Downgrade {
    /// The namespace is one of `failOpenNamespaces`.
    FailOpenNamespace,
    /// The pod's connections cannot be seen, let alone dropped.
    UnsupportedRuntime,
    /// The group decides whether a connection of the pod is redirected, and no packet tells it.
    GroupRules,
}

impl Downgrade {
    /// All values.
    pub const ALL: [Self; 3] = [Self::FailOpenNamespace, Self::UnsupportedRuntime, Self::GroupRules];

    /// In metrics, logs and JSON.
    pub const fn label(self) -> &'static str {
        match self {
            Self::FailOpenNamespace => "fail_open_namespace",
            Self::UnsupportedRuntime => "unsupported_runtime",
            Self::GroupRules => "group_rules",
        }
    }
}

/// The mode of a pod, and how it came about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// A mode of its own; `None`: the node's holds.
    pub own: Option<Mode>,
    /// What is in effect.
    pub mode: Mode,
    /// Who says so.
    pub level: Level,
    /// All that was said, the strongest first.
    pub said: Vec<Said>,
    /// Why it is less than was asked for.
    pub downgrade: Option<Downgrade>,
}

impl Choice {
    /// As a pod's entry has it.
    pub fn code(&self) -> u32 {
        self.own.map_or(MODE_INHERIT, Mode::code)
    }

    /// What a pod asked for and did not get.
    pub fn refused(&self) -> Option<&Said> {
        self.said.iter().find(|said| said.fate == Fate::Refused)
    }
}

/// Chooses. `unsupported`: why nothing on this node can judge the pod's connections.
pub fn choose(facts: &PodFacts, policy: &Effective, unsupported: Option<Unsupported>) -> Choice {
    let node = Mode::from(policy.mode);
    let labels = facts.namespace_labels.as_ref();
    let mut said = Vec::new();
    let mut holds: Option<(Level, Mode)> = None;
    // From the weakest on, since a pod's word is measured by what holds without it.
    if let Some(mode) = policy.rule(&facts.namespace, labels).and_then(|(_, rule)| rule.mode) {
        holds = Some((Level::NamespaceRule, mode.into()));
        said.push(note(Level::NamespaceRule, Mode::from(mode).label(), Fate::Holds));
    }
    if let Some(value) = labels.and_then(|labels| labels.get(KEY)) {
        match parse(value) {
            Some(mode) => {
                holds = Some((Level::NamespaceLabel, mode));
                said.push(note(Level::NamespaceLabel, value, Fate::Holds));
            }
            None => said.push(note(Level::NamespaceLabel, value, Fate::Invalid)),
        }
    }
    if let Some(value) = facts.current_annotations().get(KEY) {
        let base = holds.map_or(node, |(_, mode)| mode);
        let fate = match parse(value) {
            None => Fate::Invalid,
            Some(mode) if allowed(policy.allow_pod_override, base, mode) => {
                holds = Some((Level::Pod, mode));
                Fate::Holds
            }
            Some(_) => Fate::Refused,
        };
        said.push(note(Level::Pod, value, fate));
    }
    let level = holds.map_or(Level::Node, |(level, _)| level);
    said.insert(0, note(Level::Node, node.label(), Fate::Holds));
    said.reverse();
    for one in said.iter_mut().filter(|one| one.level != level && one.fate == Fate::Holds) {
        one.fate = Fate::Overridden;
    }
    let asked = holds.map_or(node, |(_, mode)| mode);
    let downgrade = match (asked, unsupported) {
        (Mode::Enforce, Some(reason)) => Some(reason.into()),
        (Mode::Enforce, None) if policy.fails_open(&facts.namespace) => Some(Downgrade::FailOpenNamespace),
        _ => None,
    };
    if downgrade.is_some() {
        for one in said.iter_mut().filter(|one| one.fate == Fate::Holds) {
            one.fate = Fate::Downgraded;
        }
    }
    let mode = if downgrade.is_some() { Mode::Audit } else { asked };
    // Written out, so that a change of the node's mode to enforce does not reach it even for a moment.
    let pinned = downgrade.is_some() || policy.fails_open(&facts.namespace);
    let own = if pinned { Some(mode) } else { holds.map(|(_, mode)| mode) };
    Choice { own, mode, level, said, downgrade }
}

fn note(level: Level, value: &str, fate: Fate) -> Said {
    const QUOTE: usize = 32;
    Said { level, value: value.chars().take(QUOTE).collect::<String>().into(), fate }
}

/// A mode by its name.
pub fn parse(value: &str) -> Option<Mode> {
    Mode::ALL.iter().find(|mode| mode.label() == value).copied()
}

/// Whether a pod may choose `wanted` where `base` holds without its word.
fn allowed(allow: PodOverride, base: Mode, wanted: Mode) -> bool {
    match allow {
        // To say what holds anyway is no override.
        PodOverride::Never => wanted == base,
        PodOverride::Stricter => wanted >= base,
        PodOverride::Any => true,
    }
}

impl From<Unsupported> for Downgrade {
    fn from(reason: Unsupported) -> Self {
        match reason {
            Unsupported::UserspaceKernel | Unsupported::VirtualMachine => Self::UnsupportedRuntime,
            Unsupported::GroupRules => Self::GroupRules,
        }
    }
}

impl From<Choice> for ModeName {
    fn from(choice: Choice) -> Self {
        choice.mode.into()
    }
}

#[cfg(test)]
mod tests;
