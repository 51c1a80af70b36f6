//! What the operator allows: flags, and the `remedies` section of the policy file.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How far a step goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Not at all
    #[default]
    Off,
    /// Only say what would be done
    DryRun,
    /// Do it
    On,
}

/// The steps and their limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Remedies {
    /// Events on pod and node.
    pub event: Step,
    /// The label on the pod.
    pub label: Step,
    /// The mesh's own plugin, run again for the pod.
    pub repair: Step,
    /// The Eviction API.
    pub evict: Step,
    /// Between the Event and the first action, in seconds.
    pub grace_seconds: u32,
    /// How long the plugin may run, in seconds.
    pub repair_timeout_seconds: u32,
    /// How often a pod's repair is tried before the next step.
    pub repair_attempts: u32,
    /// Repairs in a minute on this node; as many may come at once.
    pub repairs_per_minute: u32,
    /// Evictions in a minute on this node; as many may come at once.
    pub evictions_per_minute: u32,
    /// Between two evictions of one workload on this node, in seconds. Doubles each time, up to an hour.
    pub eviction_pause_seconds: u32,
}

impl Default for Remedies {
    fn default() -> Self {
        Self {
            event: Step::On,
            label: Step::Off,
            repair: Step::Off,
            evict: Step::Off,
            grace_seconds: 5,
            repair_timeout_seconds: 30,
            repair_attempts: 3,
            repairs_per_minute: 300,
            evictions_per_minute: 2,
            eviction_pause_seconds: 60,
        }
    }
}

impl Remedies {
    /// See [`Self::grace_seconds`].
    pub fn grace(&self) -> Duration {
        Duration::from_secs(self.grace_seconds.into())
    }

    /// See [`Self::repair_timeout_seconds`].
    pub fn repair_timeout(&self) -> Duration {
        Duration::from_secs(self.repair_timeout_seconds.into())
    }

    /// See [`Self::eviction_pause_seconds`].
    pub fn eviction_pause(&self) -> Duration {
        Duration::from_secs(self.eviction_pause_seconds.into())
    }
}

/// The section of the policy file: what it does not say holds as by flags. The file's schema has the bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Section {
    /// See [`Remedies::event`].
    pub event: Option<Step>,
    /// See [`Remedies::label`].
    pub label: Option<Step>,
    /// See [`Remedies::repair`].
    pub repair: Option<Step>,
    /// See [`Remedies::evict`].
    pub evict: Option<Step>,
    /// See [`Remedies::grace_seconds`].
    pub grace_seconds: Option<u32>,
    /// See [`Remedies::repair_timeout_seconds`].
    pub repair_timeout_seconds: Option<u32>,
    /// See [`Remedies::repair_attempts`].
    pub repair_attempts: Option<u32>,
    /// See [`Remedies::repairs_per_minute`].
    pub repairs_per_minute: Option<u32>,
    /// See [`Remedies::evictions_per_minute`].
    pub evictions_per_minute: Option<u32>,
    /// See [`Remedies::eviction_pause_seconds`].
    pub eviction_pause_seconds: Option<u32>,
}

impl Section {
    /// What holds, given the flags.
    pub fn over(&self, flags: &Remedies) -> Remedies {
        Remedies {
            event: self.event.unwrap_or(flags.event),
            label: self.label.unwrap_or(flags.label),
            repair: self.repair.unwrap_or(flags.repair),
            evict: self.evict.unwrap_or(flags.evict),
            grace_seconds: self.grace_seconds.unwrap_or(flags.grace_seconds),
            repair_timeout_seconds: self.repair_timeout_seconds.unwrap_or(flags.repair_timeout_seconds),
            repair_attempts: self.repair_attempts.unwrap_or(flags.repair_attempts),
            repairs_per_minute: self.repairs_per_minute.unwrap_or(flags.repairs_per_minute),
            evictions_per_minute: self.evictions_per_minute.unwrap_or(flags.evictions_per_minute),
            eviction_pause_seconds: self.eviction_pause_seconds.unwrap_or(flags.eviction_pause_seconds),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_default_only_events() {
        let none = Remedies::default();
        assert_eq!(
            (none.event, none.label, none.repair, none.evict),
            (Step::On, Step::Off, Step::Off, Step::Off)
        );
    }

    #[test]
    fn as_written_in_a_file_over_the_flags() {
        let flags = Remedies { label: Step::On, evict: Step::On, grace_seconds: 7, ..Remedies::default() };
        let none: Section = serde_json::from_str("{}").unwrap();
        assert_eq!(none.over(&flags), flags);
        let text = r#"{"repair": "on", "evict": "dry-run", "graceSeconds": 0}"#;
        let read = serde_json::from_str::<Section>(text).unwrap().over(&flags);
        assert_eq!((read.repair, read.evict, read.grace()), (Step::On, Step::DryRun, Duration::ZERO));
        assert_eq!((read.event, read.label), (Step::On, Step::On));
        assert!(serde_json::from_str::<Section>(r#"{"evicts": "on"}"#).is_err());
    }
}
