//! `policy.yaml`: what may change while the agent runs. Everything is optional; where it says nothing, flags hold.
//!
//! `deploy/policy.schema.json` describes the same for editors and for [`super::check`]; a test compares the two.

use std::collections::BTreeMap;
use std::time::Duration;

use nobypass_common::ids::Mode;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::mesh::Profile;
use crate::pods::model::KeyValues;
use crate::remedy::policy::Section;

/// The whole file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PolicyFile {
    /// The form of the file.
    pub api_version: ApiVersion,
    /// What happens to a bypass.
    pub mode: Option<ModeName>,
    /// Connections of pods that nobody has classified yet.
    pub unknown_pods: Option<Unknown>,
    /// How long such a pod is held at most, ms.
    pub hold_ms: Option<u32>,
    /// UDP (but DNS) and other protocols of meshed pods.
    pub non_tcp: Option<NonTcp>,
    /// QUIC of meshed pods.
    pub quic: Option<NonTcp>,
    /// Connections of a family that the mesh does not redirect.
    pub family_gap: Option<FamilyGap>,
    /// Connections that reach an application past its proxy.
    pub inbound: Option<Inbound>,
    /// Bypass events.
    pub events: Option<Events>,
    /// Whether pods may set their own mode by annotation.
    pub allow_pod_override: Option<PodOverride>,
    /// Namespaces where nothing is ever dropped. A name that ends with `*` means all that start so.
    pub fail_open_namespaces: Option<Vec<Box<str>>>,
    /// What holds for some namespaces: the first that matches counts.
    pub namespaces: Vec<NamespaceRule>,
    /// What is done about pods that bypass.
    pub remedies: Option<Section>,
    /// So long may the agent be silent before `onSilence` holds; without it, for ever.
    pub max_agent_silence: Option<Span>,
    /// What the programs do then.
    pub on_silence: Option<OnSilence>,
    /// Mesh profiles, tried before `--profiles` and the built-in ones.
    pub profiles: Vec<Profile>,
}

/// The form of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub enum ApiVersion {
    /// The first one.
    #[default]
    #[serde(rename = "nobypass.dev/v1alpha1")]
    V1Alpha1,
}

/// A mode by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum ModeName {
    /// Judge nothing.
    Off,
    /// Count and report, let pass.
    Audit,
    /// Count, report and drop.
    Enforce,
}

impl From<ModeName> for Mode {
    fn from(name: ModeName) -> Self {
        match name {
            ModeName::Off => Self::Off,
            ModeName::Audit => Self::Audit,
            ModeName::Enforce => Self::Enforce,
        }
    }
}

impl From<Mode> for ModeName {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Off => Self::Off,
            Mode::Audit => Self::Audit,
            Mode::Enforce => Self::Enforce,
        }
    }
}

/// See [`nobypass_common::ids::UnknownPolicy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Unknown {
    /// Count and let pass.
    Pass,
    /// Hold the first SYNs.
    Hold,
}

/// What happens to traffic that no mesh redirects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum NonTcp {
    /// Not judged.
    Ignore,
    /// Counted.
    Count,
    /// Counted, and dropped where the mode is enforce.
    Drop,
}

/// What happens to connections of a family that the mesh does not redirect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum FamilyGap {
    /// Reported.
    Report,
    /// Reported, and dropped where the mode is enforce.
    Drop,
}

/// Whether inbound connections are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Inbound {
    /// Not judged.
    Off,
    /// Counted and reported.
    Audit,
    /// Dropped where the mode is enforce.
    Enforce,
}

/// Bypass events; counters are not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Events {
    /// How many a pod may report in a second, per CPU.
    pub rate: Option<u32>,
}

/// Whether pods may set their own mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum PodOverride {
    /// No.
    Never,
    /// Only to what stops more: a workload cannot exempt itself.
    #[default]
    Stricter,
    /// To anything.
    Any,
}

/// What the programs do without an agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum OnSilence {
    /// Go on as they were.
    #[default]
    Keep,
    /// Let pass what they would drop.
    Audit,
}

/// What holds for some namespaces.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct NamespaceRule {
    /// Names; one that ends with `*` means all that start so.
    pub names: Vec<Box<str>>,
    /// Labels that the namespace must have. They are known only with the API server as a source.
    pub match_labels: BTreeMap<Box<str>, Box<str>>,
    /// As in the whole file.
    pub mode: Option<ModeName>,
    /// As in the whole file.
    pub non_tcp: Option<NonTcp>,
    /// As in the whole file.
    pub quic: Option<NonTcp>,
    /// As in the whole file.
    pub family_gap: Option<FamilyGap>,
    /// As in the whole file.
    pub inbound: Option<Inbound>,
}

/// A time, written as `90s`, `10m` or `2h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub Duration);

impl Span {
    fn parse(text: &str) -> Result<Self, String> {
        let say = || format!("{text:?} is no time: write a number and ms, s, m or h, such as 90s or 10m");
        let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(say)?;
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| say())?;
        let millis = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return Err(say()),
        };
        number.checked_mul(millis).map(|millis| Self(Duration::from_millis(millis))).ok_or_else(say)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let millis = self.0.as_millis();
        let text = match millis {
            _ if millis.is_multiple_of(3_600_000) => format!("{}h", millis / 3_600_000),
            _ if millis.is_multiple_of(60_000) => format!("{}m", millis / 60_000),
            _ if millis.is_multiple_of(1_000) => format!("{}s", millis / 1_000),
            _ => format!("{millis}ms"),
        };
        serializer.serialize_str(&text)
    }
}

impl NamespaceRule {
    /// Whether a namespace is meant. One whose labels nobody knows has none.
    pub fn matches(&self, name: &str, labels: Option<&KeyValues>) -> bool {
        let by_name = self.names.is_empty() || names(&self.names, name);
        let by_label = self.match_labels.iter().all(|(key, value)| {
            labels.and_then(|labels| labels.get(key)).is_some_and(|have| *have == **value)
        });
        by_name && by_label && !(self.names.is_empty() && self.match_labels.is_empty())
    }

    /// Whether whatever `other` matches is matched by this one as well.
    pub(super) fn covers(&self, other: &Self) -> bool {
        let names = self.names.is_empty()
            || (!other.names.is_empty() && other.names.iter().all(|name| names(&self.names, name)));
        let labels = self.match_labels.iter().all(|(key, value)| other.match_labels.get(key) == Some(value));
        names && labels && !(self.names.is_empty() && self.match_labels.is_empty())
    }
}

/// Whether a name is one of these; a pattern that ends with `*` means all that start so.
pub fn names(patterns: &[Box<str>], name: &str) -> bool {
    patterns.iter().any(|pattern| match pattern.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => **pattern == *name,
    })
}
