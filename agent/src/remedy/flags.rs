//! What the operator allows by flags.

use super::policy::{Remedies, Step};

/// Arguments of remedies.
#[derive(Clone, Debug, clap::Args)]
pub struct RemedyArgs {
    /// Events on bypassing pods and on the node
    #[arg(long, env = "NOBYPASS_REMEDY_EVENT", value_name = "STEP", value_enum, default_value = "on")]
    pub remedy_event: Step,
    /// The label nobypass.dev/bypassing on bypassing pods
    #[arg(long, env = "NOBYPASS_REMEDY_LABEL", value_name = "STEP", value_enum, default_value = "off")]
    pub remedy_label: Step,
    /// Run the mesh's CNI plugin again for bypassing pods
    #[arg(long, env = "NOBYPASS_REMEDY_REPAIR", value_name = "STEP", value_enum, default_value = "off")]
    pub remedy_repair: Step,
    /// Evict pods that bypass and could not be repaired, if a controller makes them anew
    #[arg(long, env = "NOBYPASS_REMEDY_EVICT", value_name = "STEP", value_enum, default_value = "off")]
    pub remedy_evict: Step,
    /// Between the Event and the first action, in seconds
    #[arg(long, env = "NOBYPASS_REMEDY_GRACE", value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(0..=3600))]
    pub remedy_grace: u32,
    /// How long the plugin may run for one pod, in seconds
    #[arg(long, env = "NOBYPASS_REPAIR_TIMEOUT", value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=300))]
    pub repair_timeout: u32,
}

impl RemedyArgs {
    /// With the usual budgets.
    pub fn remedies(&self) -> Remedies {
        Remedies {
            event: self.remedy_event,
            label: self.remedy_label,
            repair: self.remedy_repair,
            evict: self.remedy_evict,
            grace_seconds: self.remedy_grace,
            repair_timeout_seconds: self.repair_timeout,
            ..Remedies::default()
        }
    }
}
