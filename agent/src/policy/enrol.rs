//! Pods that become meshed while they run: the mesh is given time to take them up. Pure; times are ns of
//! `CLOCK_MONOTONIC`.

use std::collections::HashMap;

use super::snapshot::PodView;
use crate::mesh::Meshed;
use crate::mesh::recognise::NotMeshed;
use crate::pods::ContainerId;
use crate::pods::model::PodFacts;

/// The pods that are being waited for, by cgroup id.
#[derive(Debug, Default)]
pub struct Enrolling(HashMap<u64, Wait>);

#[derive(Debug)]
struct Wait {
    until: u64,
    sandbox: Option<ContainerId>,
}

impl Enrolling {
    /// Whether the mesh of the pod with this cgroup is still to be waited for. `before`: what the pod was so far.
    ///
    /// A pod that nobody had asked about, or whose namespace was not known, may have been meshed all the time.
    pub fn waits(
        &mut self,
        cgroup: u64,
        before: Option<&PodView>,
        facts: &PodFacts,
        meshed: Option<&Meshed>,
        now: u64,
    ) -> bool {
        let Some(grace) = meshed.and_then(|meshed| meshed.enrolment_grace) else {
            self.forget(cgroup);
            return false;
        };
        let sandbox = facts.sandbox.as_ref().map(|sandbox| sandbox.id);
        let was_outside = |before: &PodView| {
            let known = before.facts.as_ref().is_some_and(|facts| facts.namespace_labels.is_some());
            known && before.reason == NotMeshed::NoProfile.as_str() && before.sandbox == sandbox
        };
        if !self.0.contains_key(&cgroup) && before.is_some_and(was_outside) {
            let until = now.saturating_add(u64::try_from(grace.as_nanos()).unwrap_or(u64::MAX));
            self.0.insert(cgroup, Wait { until, sandbox });
        }
        // A new sandbox is set up by the plugin, which knows that the pod is meshed.
        let waits = self.0.get(&cgroup).is_some_and(|wait| now < wait.until && wait.sandbox == sandbox);
        if !waits {
            self.forget(cgroup);
        }
        waits
    }

    /// When somebody has been waited for long enough.
    pub fn next(&self) -> Option<u64> {
        self.0.values().map(|wait| wait.until).min()
    }

    /// The pods that have been waited for long enough at `now`.
    pub fn over(&self, now: u64) -> impl Iterator<Item = u64> {
        self.0.iter().filter(move |(_, wait)| wait.until <= now).map(|(cgroup, _)| *cgroup)
    }

    /// The pod is gone, or nobody waits for it.
    pub fn forget(&mut self, cgroup: u64) {
        self.0.remove(&cgroup);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::mesh::{Membership, Profiles, recognise};
    use crate::pods::PodUid;
    use crate::pods::model::{KeyValues, Sandbox};

    const S: u64 = 1_000_000_000;

    fn sandbox(digit: &str) -> Sandbox {
        Sandbox {
            id: ContainerId::parse(&digit.repeat(64)).unwrap(),
            ready: true,
            pid: None,
            netns: None,
            runtime_handler: "".into(),
            runtime_type: None,
            created_at: 1,
            host_network: Some(false),
            cgroup_parent: None,
        }
    }

    /// A pod of which this is known; its namespace has this label, or nobody has told.
    fn facts(label: Option<&[(&str, &str)]>, redirection: &str, digit: &str) -> PodFacts {
        let uid = PodUid::parse("2c48913c-b29f-11e7-9350-020968147796").unwrap();
        let mut facts = PodFacts::new(uid, "shop", "cart");
        facts.namespace_labels = label.map(|label| label.iter().copied().collect());
        facts.sandbox = Some(sandbox(digit));
        if !redirection.is_empty() {
            let now: KeyValues = [("ambient.istio.io/redirection", redirection)].into_iter().collect();
            facts.edited_annotations = Some(now);
        }
        facts
    }

    /// What the keeper does, without a kernel.
    fn see(enrolling: &mut Enrolling, view: &mut Option<PodView>, facts: PodFacts, now: u64) -> &'static str {
        let membership = recognise(&facts, Profiles::built_in().as_slice());
        let meshed = match &membership {
            Membership::Meshed(meshed) => Some(&**meshed),
            _ => None,
        };
        let waits = enrolling.waits(7, view.as_ref(), &facts, meshed, now);
        let reason = match membership {
            Membership::Meshed(_) if waits => "enrolling",
            Membership::Meshed(_) => "meshed",
            Membership::NotMeshed { reason } => reason.as_str(),
            other => panic!("{other:?}"),
        };
        let mut after = PodView { reason, ..PodView::unknown(facts.uid, 7) };
        after.sandbox = facts.sandbox.as_ref().map(|sandbox| sandbox.id);
        after.facts = Some(Arc::new(facts));
        *view = Some(after);
        reason
    }

    const NONE: Option<&[(&str, &str)]> = Some(&[]);
    const AMBIENT: Option<&[(&str, &str)]> = Some(&[("istio.io/dataplane-mode", "ambient")]);

    #[test]
    fn a_label_that_comes_late_gives_the_mesh_time_and_no_more() {
        for (name, steps) in [
            (
                "the mesh never comes",
                &[
                    (0, facts(NONE, "", "a"), "no_profile"),
                    (10, facts(AMBIENT, "", "a"), "enrolling"),
                    (69, facts(AMBIENT, "pending", "a"), "enrolling"),
                    (70, facts(AMBIENT, "pending", "a"), "meshed"),
                    (71, facts(AMBIENT, "", "a"), "meshed"),
                ][..],
            ),
            (
                "the mesh says that it is done",
                &[
                    (0, facts(NONE, "", "a"), "no_profile"),
                    (10, facts(AMBIENT, "", "a"), "enrolling"),
                    (12, facts(AMBIENT, "enabled", "a"), "meshed"),
                    (13, facts(AMBIENT, "", "a"), "meshed"),
                ],
            ),
            ("an agent that starts last", &[(0, facts(AMBIENT, "", "a"), "meshed")]),
            (
                "the runtime speaks first, which knows no namespaces",
                &[(0, facts(None, "", "a"), "no_profile"), (1, facts(AMBIENT, "", "a"), "meshed")],
            ),
            (
                "the sandbox is made anew meanwhile",
                &[
                    (0, facts(NONE, "", "a"), "no_profile"),
                    (10, facts(AMBIENT, "", "a"), "enrolling"),
                    (11, facts(AMBIENT, "", "b"), "meshed"),
                ],
            ),
            (
                "the label goes and comes again",
                &[
                    (0, facts(NONE, "", "a"), "no_profile"),
                    (10, facts(AMBIENT, "", "a"), "enrolling"),
                    (20, facts(NONE, "", "a"), "no_profile"),
                    (30, facts(AMBIENT, "", "a"), "enrolling"),
                    (89, facts(AMBIENT, "", "a"), "enrolling"),
                    (90, facts(AMBIENT, "", "a"), "meshed"),
                ],
            ),
        ] {
            let (mut enrolling, mut view) = (Enrolling::default(), None);
            for (at, facts, expected) in steps {
                let reason = see(&mut enrolling, &mut view, facts.clone(), at * S);
                assert_eq!(reason, *expected, "{name} at {at} s");
                let waits = *expected == "enrolling";
                assert_eq!(enrolling.next().is_some(), waits, "{name} at {at} s");
                assert_eq!(enrolling.over(1000 * S).count(), usize::from(waits));
                assert_eq!(enrolling.over(at * S).count(), 0);
            }
        }
    }
}
