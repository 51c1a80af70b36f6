//! What the sources of pods are to keep for the profiles.

use super::Profiles;
use crate::pods::model::Wanted;

/// What the meshes' own plugins read of their proxy's and init container's environment.
const ENV: [&str; 5] = [
    "CONSUL_REDIRECT_TRAFFIC_CONFIG",
    "DISABLE_ENVOY",
    "ISTIO_DUAL_STACK",
    "ISTIO_META_DNS_CAPTURE",
    "ISTIO_OUTBOUND_OWNER_GROUPS*",
];

impl Profiles {
    /// The facts that matter to any of them.
    #[must_use]
    pub fn wanted(&self) -> Wanted {
        Wanted { keys: self.keys(), containers: self.container_names(), env: ENV.into_iter().collect() }
    }
}
