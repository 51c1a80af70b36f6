//! What the operator allows: the `remedies` section of the policy file.

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
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
    /// What is wrong with the values, if anything.
    ///
    /// # Errors
    /// A sentence that names the field.
    pub fn check(&self) -> Result<(), String> {
        for (name, value, least, most) in [
            ("graceSeconds", self.grace_seconds, 0, 3600),
            ("repairTimeoutSeconds", self.repair_timeout_seconds, 1, 300),
            ("repairAttempts", self.repair_attempts, 1, 10),
            ("repairsPerMinute", self.repairs_per_minute, 1, 6000),
            ("evictionsPerMinute", self.evictions_per_minute, 1, 600),
            ("evictionPauseSeconds", self.eviction_pause_seconds, 1, 3600),
        ] {
            if !(least..=most).contains(&value) {
                return Err(format!("remedies.{name} is {value}; it must be {least} to {most}"));
            }
        }
        Ok(())
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_default_only_events() {
        let none: Remedies = serde_json::from_str("{}").unwrap();
        assert_eq!(none, Remedies::default());
        assert_eq!(
            (none.event, none.label, none.repair, none.evict),
            (Step::On, Step::Off, Step::Off, Step::Off)
        );
        assert_eq!(none.check(), Ok(()));
    }

    #[test]
    fn as_written_in_a_file() {
        let text = r#"{"repair": "on", "evict": "dry-run", "graceSeconds": 0}"#;
        let read: Remedies = serde_json::from_str(text).unwrap();
        assert_eq!((read.repair, read.evict, read.grace()), (Step::On, Step::DryRun, Duration::ZERO));
        assert!(serde_json::from_str::<Remedies>(r#"{"evicts": "on"}"#).is_err());
        let wrong = Remedies { evictions_per_minute: 0, ..read };
        assert_eq!(wrong.check().unwrap_err(), "remedies.evictionsPerMinute is 0; it must be 1 to 600");
    }
}
