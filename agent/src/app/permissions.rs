//! Joins permissions: a feature without its own is off, and says so.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::Ended;
use crate::cluster::access::{Feature, Permissions};
use crate::node::desired::Outputs;
use crate::node::flags::GateArgs;
use crate::remedy::policy::{Remedies, Step};
use crate::server::Health;

/// What the service account must be allowed for these settings.
fn wanted(gate: &GateArgs, remedies: &Remedies) -> Vec<Feature> {
    let all = [
        (remedies.event == Step::On, Feature::Events),
        (gate.gate_condition, Feature::GateCondition),
        (gate.gate_label, Feature::GateLabel),
        (!gate.startup_taint.is_empty(), Feature::GateTaint),
        (!gate.gate_pods.is_empty(), Feature::GatePods),
        (remedies.label == Step::On, Feature::PodLabel),
        (remedies.evict != Step::Off, Feature::Evict),
    ];
    all.into_iter().filter_map(|(wanted, feature)| wanted.then_some(feature)).collect()
}

/// Starts asking, where there is somebody to ask.
pub(super) fn spawn(
    tasks: &mut JoinSet<Ended>,
    client: Option<&Client>,
    (gate, remedies): (&GateArgs, &Remedies),
    health: &Arc<Health>,
) -> Permissions {
    let (permissions, off) = Permissions::unasked();
    let Some(client) = client.cloned() else { return permissions };
    let (asking, wanted, health) = (permissions.clone(), wanted(gate, remedies), Arc::clone(health));
    tasks.spawn(async move {
        let tell = move |feature: Feature, sentence: Option<String>| match sentence {
            Some(sentence) => health.note(feature.label(), sentence),
            None => health.note_done(feature.label()),
        };
        asking.follow(client, wanted, off, tell).await;
        ("permissions", Ok(()))
    });
    permissions
}

/// The outputs of the gate that are allowed.
pub(super) fn outputs(
    tasks: &mut JoinSet<Ended>,
    permissions: &Permissions,
    wanted: Outputs,
) -> watch::Receiver<Outputs> {
    mapped(tasks, permissions.off(), move |off| {
        let mut outputs = wanted.clone();
        outputs.condition &= !off.contains(&Feature::GateCondition);
        outputs.label &= !off.contains(&Feature::GateLabel);
        if off.contains(&Feature::GateTaint) {
            outputs.taints.clear();
        }
        outputs
    })
}

/// The remedies that are allowed.
pub(super) fn remedies(
    tasks: &mut JoinSet<Ended>,
    permissions: &Permissions,
    wanted: Remedies,
) -> watch::Receiver<Remedies> {
    mapped(tasks, permissions.off(), move |off| {
        let allowed = |step: Step, feature| if off.contains(&feature) { Step::Off } else { step };
        Remedies {
            label: allowed(wanted.label, Feature::PodLabel),
            evict: allowed(wanted.evict, Feature::Evict),
            ..wanted
        }
    })
}

fn mapped<T: PartialEq + Clone + Send + Sync + 'static>(
    tasks: &mut JoinSet<Ended>,
    mut off: watch::Receiver<BTreeSet<Feature>>,
    map: impl Fn(&BTreeSet<Feature>) -> T + Send + 'static,
) -> watch::Receiver<T> {
    let (sender, receiver) = watch::channel(map(&off.borrow_and_update()));
    tasks.spawn(async move {
        while off.changed().await.is_ok() {
            let now = map(&off.borrow_and_update());
            sender.send_if_modified(|before| {
                let changed = *before != now;
                *before = now.clone();
                changed
            });
        }
        // Nobody is asked, and nothing changes any more.
        sender.closed().await;
        std::future::pending().await
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_not_allowed_is_off_and_the_rest_stays() {
        let mut tasks = JoinSet::new();
        let (permissions, off) = Permissions::unasked();
        let limits =
            Remedies { label: Step::On, evict: Step::DryRun, repair: Step::On, ..Remedies::default() };
        let mut remedies = remedies(&mut tasks, &permissions, limits);
        let all = Outputs { condition: true, label: true, taints: vec!["a".into()], retaint: None };
        let mut outputs = outputs(&mut tasks, &permissions, all.clone());
        assert_eq!((*remedies.borrow(), outputs.borrow().clone()), (limits, all.clone()));

        off.send_replace([Feature::Evict, Feature::GateTaint].into());
        remedies.changed().await.unwrap();
        outputs.changed().await.unwrap();
        assert_eq!(*remedies.borrow(), Remedies { evict: Step::Off, ..limits });
        assert_eq!(*outputs.borrow(), Outputs { taints: Vec::new(), ..all.clone() });

        off.send_replace(BTreeSet::new());
        outputs.changed().await.unwrap();
        assert_eq!(*outputs.borrow(), all);
    }

    #[test]
    fn only_what_is_switched_on_needs_a_permission() {
        assert_eq!(wanted(&GateArgs::default(), &Remedies::default()), [Feature::Events]);
        let gate = GateArgs { gate_label: true, startup_taint: vec!["a".into()], ..GateArgs::default() };
        let remedies = Remedies { event: Step::Off, evict: Step::DryRun, ..Remedies::default() };
        assert_eq!(wanted(&gate, &remedies), [Feature::GateLabel, Feature::GateTaint, Feature::Evict]);
    }
}
