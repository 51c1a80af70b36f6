//! What the keeper tells people.

use nobypass_common::ids::PodKind;

use super::{Choice, Keeper, PodView};
use crate::bpf::BpfError;

impl Keeper {
    /// Says each problem once.
    pub(super) fn tell_problems(&mut self, before: Option<&PodView>, view: &PodView) {
        let known = before.map_or(&[][..], |before| &before.problems);
        for problem in view.problems.iter().filter(|problem| !known.contains(problem)) {
            tracing::warn!(namespace = %view.namespace, pod = %view.name, problem, "an annotation is not taken as it is");
        }
        let refused = |view: &PodView| view.choice.as_ref().and_then(Choice::refused).cloned();
        let news = refused(view);
        if view.kind == PodKind::Meshed && news.is_some() && news != before.and_then(refused) {
            self.state.overrides_refused += 1;
            self.publish();
        }
    }

    pub(super) fn count_without_entry(&mut self, error: &BpfError) {
        self.state.without_entry += 1;
        // Once at 1, 2, 4 …: a full map meets every new pod.
        if self.state.without_entry.is_power_of_two() {
            tracing::error!(%error, pods = self.state.without_entry, capacity = self.maps.capacity(),
                "no room for a pod's entry: it is judged as unknown; raise --max-pods and run `nobypass cleanup`");
        }
    }
}
