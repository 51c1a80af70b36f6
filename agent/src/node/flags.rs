//! What the operator wants of the gate.

use std::time::Duration;

use super::desired::{Effect, Outputs};
use super::pods::Selector;

/// Arguments of the gate.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct GateArgs {
    /// Say by the Node condition nobypass.dev/MeshCNIReady whether this node is safe for meshed pods
    #[arg(long, env = "NOBYPASS_GATE_CONDITION")]
    pub gate_condition: bool,
    /// Say so by the node label nobypass.dev/mesh-cni=ready, which is there only while the node is safe
    #[arg(long, env = "NOBYPASS_GATE_LABEL")]
    pub gate_label: bool,
    /// Remove taints with this key, whatever their effect, while the node is safe; may be given several times. The usual
    /// key is nobypass.dev/not-ready
    #[arg(long, env = "NOBYPASS_STARTUP_TAINT", value_name = "KEY", value_delimiter = ',')]
    pub startup_taint: Vec<String>,
    /// Set the first of these taints with this effect when the node is no longer safe
    #[arg(long, env = "NOBYPASS_RETAINT", value_name = "EFFECT", value_enum, requires = "startup_taint")]
    pub retaint: Option<Effect>,
    /// How long all must be well before the node counts as safe, in milliseconds
    #[arg(long, env = "NOBYPASS_SETTLE_MS", value_name = "MS", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(0..=600_000))]
    pub settle_ms: u32,
    /// Pods of this node that must be ready too, as NAMESPACE/SELECTOR; may be given several times
    #[arg(long, env = "NOBYPASS_GATE_PODS", value_name = "NAMESPACE/SELECTOR", value_delimiter = ';', value_parser = Selector::parse)]
    pub gate_pods: Vec<Selector>,
}

impl GateArgs {
    /// Whether the cluster is told anything.
    pub fn tells(&self) -> bool {
        self.gate_condition || self.gate_label || !self.startup_taint.is_empty()
    }

    /// By what the cluster is told.
    pub fn outputs(&self) -> Outputs {
        Outputs {
            condition: self.gate_condition,
            label: self.gate_label,
            taints: self.startup_taint.clone(),
            retaint: self.retaint,
        }
    }

    /// See [`Self::settle_ms`].
    pub fn settle(&self) -> Duration {
        Duration::from_millis(self.settle_ms.into())
    }
}
