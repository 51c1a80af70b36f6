//! Meshes that take up pods which run already.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::marker::KeyMatch;
use crate::pods::model::PodFacts;

/// A label that comes when a pod runs makes it meshed, and its redirection comes later still.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Enrolment {
    /// How long the mesh is given, in seconds. Until then nothing is a bypass.
    pub grace_seconds: u32,
    /// The annotation by which the mesh says that it is done. It ends the grace, and is believed in nothing else.
    #[serde(default)]
    pub done: Option<KeyMatch>,
}

impl Enrolment {
    /// What is left to wait for: `None` if the mesh says that it is done.
    pub(super) fn grace(&self, pod: &PodFacts) -> Option<Duration> {
        let Self { grace_seconds, done } = self;
        let is_done = done.as_ref().is_some_and(|done| done.is_in(pod.current_annotations()));
        (!is_done).then(|| Duration::from_secs((*grace_seconds).into()))
    }
}
