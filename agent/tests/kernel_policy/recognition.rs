//! Pods that must not be judged, or not yet, and ids that are used again.

use std::sync::Arc;

use nobypass::cgroup::model::{CgroupEvent, CgroupEventKind};
use nobypass::explain::{Explanation, Kernel, Known, explain};
use nobypass::mesh::Unsupported;
use nobypass::pods::PodUid;
use nobypass::pods::model::{Container, KeyValues, PodFacts, State};
use nobypass::policy::PodView;
use nobypass::policy::mode::Downgrade;
use nobypass_common::ids::{Counter, Mode, PodKind};

use crate::pods::{Rig, mode_of};
use crate::scene::Expected;

/// What `nobypass explain` says of the rig's pod.
fn explained(rig: &Rig, view: &Arc<PodView>) -> Explanation {
    let policy = rig.loader.state();
    let known = Known {
        view,
        state: None,
        policy: &policy.effective,
        profiles: &policy.profiles,
        events: Vec::new(),
        packet_sockets: vec![],
        lost_hooks: Vec::new(),
    };
    explain(&known, &Kernel::read(&rig.node.maps, rig.scene.id).unwrap())
}

fn not_judged(rig: &Rig, name: &str) {
    let expected = Expected::passes(Counter::NotJudged);
    rig.node.check(name, &rig.scene, &expected, || rig.scene.out("tcp4", 8080));
}

/// A pod of Istio's with an init container that has this variable.
fn istio(facts: &mut PodFacts, variable: &str, value: &str) {
    facts.labels = KeyValues::default();
    facts.annotations = [("sidecar.istio.io/status", "{}")].into_iter().collect();
    facts.containers.retain(|container| &*container.name == "app");
    let init = Container {
        state: State::Exited,
        exit_code: Some(0),
        env: [(variable, value)].into_iter().collect(),
        ..Container::new("istio-init")
    };
    facts.containers.extend([init, Container { state: State::Running, ..Container::new("istio-proxy") }]);
}

/// No packet tells the group of who sent it: what the mesh lets out on purpose must neither be reported nor dropped.
#[test]
fn a_pod_whose_mesh_goes_by_groups_is_unsupported_and_says_so() {
    let mut rig = Rig::new("");
    rig.facts.namespace_labels = Some(mode_of("enforce"));
    for (variable, value, by_group) in [
        ("ISTIO_OUTBOUND_OWNER_GROUPS", "java,202", true),
        ("ISTIO_OUTBOUND_OWNER_GROUPS", "*", false),
        ("ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE", "2000", true),
        ("ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE", "", false),
    ] {
        let name = format!("{variable}={value}");
        istio(&mut rig.facts, variable, value);
        rig.tell();
        let expected = by_group.then_some(Unsupported::GroupRules);
        let view = rig.until(|view, entry| {
            let kind = if by_group { PodKind::Exempt } else { PodKind::Meshed };
            &*view.mesh == "istio-sidecar" && view.unsupported == expected && entry.kind == kind.code()
        });
        if !by_group {
            rig.obeys(&name, Mode::Enforce);
            continue;
        }
        not_judged(&rig, &name);
        let choice = view.choice.as_ref().unwrap();
        assert_eq!((choice.downgrade, choice.mode), (Some(Downgrade::GroupRules), Mode::Audit), "{name}");
        let said = explained(&rig, &view);
        assert!(said.recognition.contains("goes by the group (GID)"), "{said:?}");
        assert!(said.next.iter().any(|next| next.contains("take the rules by group")), "{said:?}");
        assert_eq!(said.reason, "group_rules");
    }
    // A profile of the operator's own may name groups.
    rig.policy(
        "profiles: [{name: team, recognise: {any: [{label: {key: linkerd.io/control-plane-ns}}]}, \
         ports: {outbound: 1, inbound: 2}, exempt: {gids: {defaults: [2000]}}}]",
    );
    rig.facts.labels = [("linkerd.io/control-plane-ns", "linkerd")].into_iter().collect();
    rig.tell();
    rig.until(|view, entry| &*view.mesh == "team" && entry.kind == PodKind::Exempt.code());
    not_judged(&rig, "groups of a profile");
}

/// The label comes when the pod runs, and the mesh's node agent takes it up later, or never.
#[test]
fn a_pod_that_is_labelled_while_it_runs_is_given_time_and_judged_afterwards() {
    let mut rig = Rig::new("");
    let label = |on: bool| -> Option<KeyValues> {
        Some([("istio.io/dataplane-mode", "ambient")].into_iter().filter(|_| on).collect())
    };
    rig.facts.labels = KeyValues::default();
    rig.facts.containers.retain(|container| &*container.name == "app");
    let steps = |rig: &mut Rig, redirection: Option<&str>| {
        rig.facts.namespace_labels = label(false);
        rig.facts.edited_annotations = None;
        rig.tell();
        rig.until(|view, _| view.reason == "no_profile");
        not_judged(rig, "before the label");
        rig.facts.namespace_labels = label(true);
        rig.tell();
        let view = rig.until(|view, _| view.reason == "enrolling");
        assert_eq!(&*view.mesh, "istio-ambient");
        not_judged(rig, "the label is there, the mesh is not");
        assert!(explained(rig, &view).recognition.contains("ran before it was labelled"));
        if let Some(said) = redirection {
            rig.facts.edited_annotations =
                Some([("ambient.istio.io/redirection", said)].into_iter().collect());
            rig.tell();
        }
        rig.until(|view, entry| view.reason == "meshed" && entry.kind == PodKind::Meshed.code());
    };
    // The mesh says that it is done, and is not: that is believed in nothing but the end of its time.
    steps(&mut rig, Some("enabled"));
    rig.obeys("the mesh says that it is done", Mode::Audit);
    // It never comes: the time that the profile gives it is over.
    rig.policy(
        "profiles: [{name: istio-ambient, enrolment: {graceSeconds: 2}, proxy: {elsewhere: true}, recognise: {any: \
         [{namespaceLabel: {key: istio.io/dataplane-mode, value: ambient}}]}, ports: {outbound: 1, inbound: 2}}]",
    );
    steps(&mut rig, None);
    rig.obeys("its time is over", Mode::Audit);
}

/// Ids of cgroups are numbers; what is known of the pod that had one before says nothing of the next.
#[test]
fn a_cgroup_id_that_is_used_again_brings_no_verdict_with_it() {
    let mut rig = Rig::new("");
    rig.obeys("the first pod bypasses", Mode::Audit);
    let id = rig.scene.id;
    let bypasses =
        |rig: &Rig| nobypass::detect::verdict::bypasses(&rig.node.maps.counters(id).unwrap_or_default());
    assert_eq!(bypasses(&rig), 1);

    // The end of the first one was not seen; the next has its number.
    let root = nobypass_testkit::cgroup::v2_root().unwrap();
    let path = rig.scene.pod.path().strip_prefix(root).unwrap().display().to_string();
    let first = rig.facts.uid;
    let second = PodUid::parse("aaaaaaaa-b29f-11e7-9350-020968147796").unwrap();
    let path = format!("/{}", path.replace(&first.to_string(), &second.to_string()));
    let level = rig.entry().level;
    assert!(rig.cgroups.send(CgroupEvent { kind: CgroupEventKind::Made, id, level, path }));
    let view = rig.until(|view, _| view.uid == second);
    assert_eq!((&*view.name, view.kind), ("", PodKind::Unknown), "nobody has spoken of it");
    assert_eq!(bypasses(&rig), 0, "the first one's counters went with it");
    assert_eq!(rig.entry().kind, PodKind::Unknown.code());

    // News of the first one changes nothing here.
    rig.facts.namespace_labels = Some(mode_of("enforce"));
    rig.tell();
    let mut facts = PodFacts::new(second, "bank", "vault-0");
    facts.namespace_labels = Some(KeyValues::default());
    rig.facts = facts;
    rig.tell();
    rig.until(|view, entry| &*view.name == "vault-0" && entry.kind == PodKind::Exempt.code());
    not_judged(&rig, "the second pod belongs to no mesh");
    let snapshot = rig.snapshots.borrow().clone();
    assert!(snapshot.pods.values().all(|view| view.uid != first), "{:?}", snapshot.pods);
    let sums: u64 = snapshot
        .ledger
        .iter()
        .filter(|((namespace, _), _)| &**namespace == "shop")
        .map(|(_, sums)| sums[Counter::Bypass.code() as usize])
        .sum();
    assert_eq!(sums, 1, "and are in the sums of its namespace");
}
