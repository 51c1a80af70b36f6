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
use crate::policy::PolicyState;
use crate::remedy::policy::{Remedies, Step};
use crate::server::Health;

/// What the service account must be allowed for these settings.
pub fn wanted(gate: &GateArgs, remedies: &Remedies) -> BTreeSet<Feature> {
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

/// Starts asking, where there is somebody to ask. What the policy switches on later is asked for then.
pub(super) fn spawn(
    tasks: &mut JoinSet<Ended>,
    client: Option<&Client>,
    gate: &GateArgs,
    mut policy: watch::Receiver<PolicyState>,
    health: &Arc<Health>,
) -> Permissions {
    let (permissions, off) = Permissions::unasked();
    let Some(client) = client.cloned() else { return permissions };
    let (asking, gate, health) = (permissions.clone(), gate.clone(), Arc::clone(health));
    let now = wanted(&gate, &policy.borrow_and_update().effective.remedies);
    let (sender, features) = watch::channel(now);
    tasks.spawn(async move {
        while policy.changed().await.is_ok() {
            let now = wanted(&gate, &policy.borrow_and_update().effective.remedies);
            replace(&sender, now);
        }
        std::future::pending().await
    });
    tasks.spawn(async move {
        let tell = move |feature: Feature, sentence: Option<String>| match sentence {
            Some(sentence) => health.note(feature.label(), sentence),
            None => health.note_done(feature.label()),
        };
        asking.follow(client, features, off, tell).await;
        ("permissions", Ok(()))
    });
    permissions
}

fn replace<T: PartialEq>(sender: &watch::Sender<T>, now: T) {
    sender.send_if_modified(|before| {
        let changed = *before != now;
        *before = now;
        changed
    });
}

/// The outputs of the gate that are allowed.
pub(super) fn outputs(
    tasks: &mut JoinSet<Ended>,
    permissions: &Permissions,
    wanted: Outputs,
) -> watch::Receiver<Outputs> {
    let (_, wanted) = watch::channel(wanted);
    mapped(tasks, (permissions.off(), wanted), |off, wanted| {
        let mut outputs = wanted.clone();
        outputs.condition &= !off.contains(&Feature::GateCondition);
        outputs.label &= !off.contains(&Feature::GateLabel);
        if off.contains(&Feature::GateTaint) {
            outputs.taints.clear();
        }
        outputs
    })
}

/// The remedies that the policy wants and that are allowed.
pub(super) fn remedies(
    tasks: &mut JoinSet<Ended>,
    permissions: &Permissions,
    policy: watch::Receiver<PolicyState>,
) -> watch::Receiver<Remedies> {
    mapped(tasks, (permissions.off(), policy), |off, policy| {
        let wanted = policy.effective.remedies;
        let allowed = |step: Step, feature| if off.contains(&feature) { Step::Off } else { step };
        Remedies {
            label: allowed(wanted.label, Feature::PodLabel),
            evict: allowed(wanted.evict, Feature::Evict),
            ..wanted
        }
    })
}

fn mapped<W: Send + Sync + 'static, T: PartialEq + Send + Sync + 'static>(
    tasks: &mut JoinSet<Ended>,
    (mut off, mut wanted): (watch::Receiver<BTreeSet<Feature>>, watch::Receiver<W>),
    map: impl Fn(&BTreeSet<Feature>, &W) -> T + Send + 'static,
) -> watch::Receiver<T> {
    let (sender, receiver) = watch::channel(map(&off.borrow_and_update(), &wanted.borrow_and_update()));
    tasks.spawn(async move {
        // Whoever will say nothing more is no end of the other.
        let (mut asks, mut wants) = (true, true);
        loop {
            tokio::select! {
                changed = off.changed(), if asks => asks = changed.is_ok(),
                changed = wanted.changed(), if wants => wants = changed.is_ok(),
                () = sender.closed() => return std::future::pending().await,
            }
            replace(&sender, map(&off.borrow_and_update(), &wanted.borrow_and_update()));
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::mesh::Profiles;
    use crate::policy::Effective;
    use crate::policy::reload::Loader;

    #[tokio::test]
    async fn what_is_not_allowed_is_off_and_the_rest_stays() {
        let mut tasks = JoinSet::new();
        let (permissions, off) = Permissions::unasked();
        let limits =
            Remedies { label: Step::On, evict: Step::DryRun, repair: Step::On, ..Remedies::default() };
        let (policy, following) = watch::channel(state(limits));
        let mut remedies = remedies(&mut tasks, &permissions, following);
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

        let other = Remedies { repair: Step::Off, ..limits };
        policy.send_replace(state(other));
        remedies.wait_for(|remedies| *remedies == other).await.unwrap();
        // Nobody is asked any more, and the policy still counts.
        drop(off);
        policy.send_replace(state(limits));
        remedies.wait_for(|remedies| *remedies == limits).await.unwrap();
    }

    fn state(remedies: Remedies) -> PolicyState {
        #[derive(clap::Parser)]
        struct Cli {
            #[command(flatten)]
            config: Config,
        }
        let config = <Cli as clap::Parser>::parse_from(["agent"]).config;
        let mut state = Loader::start(&config, Profiles::default()).unwrap().state().clone();
        state.effective = Arc::new(Effective { remedies, ..Effective::clone(&state.effective) });
        state
    }

    #[test]
    fn only_what_is_switched_on_needs_a_permission() {
        assert_eq!(wanted(&GateArgs::default(), &Remedies::default()), [Feature::Events].into());
        let gate = GateArgs { gate_label: true, startup_taint: vec!["a".into()], ..GateArgs::default() };
        let remedies = Remedies { event: Step::Off, evict: Step::DryRun, ..Remedies::default() };
        assert_eq!(wanted(&gate, &remedies), [Feature::GateLabel, Feature::GateTaint, Feature::Evict].into());
    }
}
