//! Modes of namespaces and pods, from the facts that a source tells to the next connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser as _;
use nobypass::cgroup::parents::find_parents;
use nobypass::cgroup::root::{RootOptions, find};
use nobypass::cgroup::stream::{CgroupSender, channel};
use nobypass::config::Config;
use nobypass::mesh::Profiles;
use nobypass::pods::model::{Container, KeyValues, PodFacts, State};
use nobypass::pods::source::PodUpdate;
use nobypass::pods::{ContainerId, PodUid};
use nobypass::policy::mode::{Fate, KEY, Level};
use nobypass::policy::reload::{Loader, Look};
use nobypass::policy::{Keeper, PodView, PolicyState, Snapshot};
use nobypass_common::abi::PodPolicy;
use nobypass_common::ids::{Counter, Mode};
use nobypass_testkit::cgroup::Qos;
use nobypass_testkit::netns::FAR4;
use nobypass_testkit::redirect::Variant;
use nobypass_testkit::wait;
use tokio::sync::{mpsc, watch};

use crate::scene::{Expected, Node, Scene};

/// The agent's programs, and a keeper of this process that tells them who the pod is.
pub struct Rig {
    pub node: Node,
    pub scene: Scene,
    pub facts: PodFacts,
    updates: mpsc::Sender<PodUpdate>,
    pub snapshots: watch::Receiver<Snapshot>,
    pub loader: Loader,
    told: watch::Sender<PolicyState>,
    home: tempfile::TempDir,
    pub cgroups: CgroupSender,
}

#[derive(clap::Parser)]
struct Flags {
    #[command(flatten)]
    config: Config,
}

impl Rig {
    pub fn new(policy: &str) -> Self {
        let node = Node::new();
        let scene = Scene::new(&node, Qos::Burstable, Variant::None);
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("policy.yaml");
        std::fs::write(&path, yaml(policy)).unwrap();
        let flags = Flags::parse_from(["agent", "--policy", &path.display().to_string()]).config;
        let loader = Loader::start(&flags, Profiles::built_in()).unwrap();
        let root = find(&RootOptions { path: None, level: None }).unwrap();
        let parents = find_parents(&root, &[node.machine.scratch.kubepods()]).unwrap();
        let (told, policy) = watch::channel(loader.state().clone());
        let (mut keeper, snapshots) = Keeper::new(node.machine.maps(), parents, policy);
        keeper.rescan().unwrap();
        let (cgroups, events) = channel(16);
        let (updates, pods) = mpsc::channel(16);
        let (_, refusals) = mpsc::channel(1);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(keeper.run(events, pods, refusals)).unwrap();
        });
        let facts = meshed(&scene);
        let rig = Self { node, scene, facts, updates, snapshots, loader, told, home, cgroups };
        rig.tell();
        rig.until(|view, _| view.choice.is_some());
        rig
    }

    /// As a source does.
    pub fn tell(&self) {
        self.updates.blocking_send(PodUpdate::Upsert(Arc::new(self.facts.clone()))).unwrap();
    }

    /// As the policy's task does.
    pub fn policy(&mut self, text: &str) {
        std::fs::write(self.home.path().join("policy.yaml"), yaml(text)).unwrap();
        assert_eq!(self.loader.look(), Look::Changed, "{text}");
        self.told.send_replace(self.loader.state().clone());
    }

    pub fn entry(&self) -> PodPolicy {
        self.node.maps.policy(self.scene.id).unwrap()
    }

    /// Waits for what the keeper knows and wrote.
    pub fn until(&self, right: impl Fn(&PodView, &PodPolicy) -> bool) -> Arc<PodView> {
        wait::until("the keeper's decision", wait::HANG, || {
            let view = self.snapshots.borrow().pods.get(&self.scene.id).cloned()?;
            right(&view, &self.entry()).then_some(view)
        })
        .unwrap()
    }

    /// The next connection obeys; the node itself is in `audit`.
    pub fn obeys(&self, name: &str, mode: Mode) {
        self.until(|view, entry| {
            let choice = view.choice.as_ref().unwrap();
            choice.mode == mode && choice.code() == entry.mode
        });
        self.node.check(name, &self.scene, &Expected::plain_bypass(mode), || self.scene.out("tcp4", 8080));
    }
}

fn yaml(text: &str) -> String {
    format!("apiVersion: nobypass.dev/v1alpha1\nmode: audit\n{text}\n")
}

pub fn mode_of(value: &str) -> KeyValues {
    [(KEY, value)].into_iter().filter(|(_, value)| !value.is_empty()).collect()
}

/// The scene's pod as a source knows it.
fn meshed(scene: &Scene) -> PodFacts {
    let name = scene.pod.path().file_name().unwrap().to_string_lossy().into_owned();
    let uid = PodUid::parse(name.trim_start_matches("pod")).unwrap();
    let mut facts = PodFacts::new(uid, "shop", "cart-0");
    facts.labels = [("linkerd.io/control-plane-ns", "linkerd")].into_iter().collect();
    facts.namespace_labels = Some(KeyValues::default());
    let container = |name: &str, digit: &str| {
        let id = ContainerId::parse(&digit.repeat(64)).unwrap();
        Container { id: Some(id), state: State::Running, ..Container::new(name) }
    };
    facts.containers = vec![container("app", "a"), container("linkerd-proxy", "b")];
    facts
}

#[test]
fn a_change_of_the_namespaces_or_the_pods_mode_reaches_the_next_connection() {
    let mut rig = Rig::new("");
    rig.obeys("nobody says anything", Mode::Audit);
    for (namespace, pod, mode) in [
        ("enforce", "", Mode::Enforce),
        ("off", "", Mode::Off),
        ("off", "audit", Mode::Audit),
        ("off", "enforce", Mode::Enforce),
        ("", "enforce", Mode::Enforce),
        ("", "", Mode::Audit),
        ("enforce", "off", Mode::Enforce),
    ] {
        rig.facts.namespace_labels = Some(mode_of(namespace));
        rig.facts.edited_annotations = Some(mode_of(pod));
        rig.tell();
        rig.obeys(&format!("namespace {namespace:?}, pod {pod:?}"), mode);
    }
    rig.facts.namespace_labels = Some(KeyValues::default());
    rig.facts.edited_annotations = None;
    rig.tell();
    for (policy, mode) in [
        ("namespaces: [{names: [shop], mode: enforce}]", Mode::Enforce),
        ("namespaces: [{names: [other], mode: enforce}]", Mode::Audit),
        ("namespaces: [{names: ['sh*'], mode: off}]", Mode::Off),
        ("namespaces: [{names: [shop], mode: enforce}]\nfailOpenNamespaces: [shop]", Mode::Audit),
    ] {
        rig.policy(policy);
        rig.obeys(policy, mode);
    }
}

#[test]
fn a_pod_that_tries_to_lower_its_own_mode_is_refused_and_reported() {
    let mut rig = Rig::new("namespaces: [{names: [shop], mode: enforce}]");
    rig.obeys("before", Mode::Enforce);
    for (turn, value) in ["off", "audit"].into_iter().enumerate() {
        rig.facts.edited_annotations = Some(mode_of(value));
        rig.tell();
        let view = rig.until(|view, _| {
            view.choice.as_ref().unwrap().refused().is_some_and(|said| &*said.value == value)
        });
        let said = &view.choice.as_ref().unwrap().said[0];
        assert_eq!((said.level, said.fate), (Level::Pod, Fate::Refused));
        assert!(
            view.problems.iter().any(|problem| problem.contains(KEY) && problem.contains(value)),
            "{view:?}"
        );
        wait::until("the count", wait::HANG, || {
            (rig.snapshots.borrow().overrides_refused == u64::try_from(turn).unwrap() + 1).then_some(())
        })
        .unwrap();
        rig.obeys(value, Mode::Enforce);
    }
    // What the operator allows is another matter.
    rig.policy("namespaces: [{names: [shop], mode: enforce}]\nallowPodOverride: any");
    rig.obeys("allowed", Mode::Audit);
}

#[test]
fn while_modes_change_a_flood_is_counted_to_the_unit() {
    let mut rig = Rig::new("");
    let done = AtomicBool::new(false);
    let flood = rig.scene.app().option("parallel", 2);
    let before = rig.node.maps.counters(rig.scene.id).unwrap_or_default();
    let started = std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let started = flood.run(&[&"flood", &FAR4, &8080, &20_000]).unwrap().count("started");
            done.store(true, Ordering::Relaxed);
            started
        });
        for mode in ["enforce", "", "off", "audit"].into_iter().cycle() {
            rig.facts.namespace_labels = Some(mode_of(mode));
            rig.tell();
            let wanted = nobypass::policy::mode::parse(mode).unwrap_or(Mode::Audit);
            rig.until(|view, entry| {
                view.choice
                    .as_ref()
                    .is_some_and(|choice| choice.mode == wanted && choice.code() == entry.mode)
            });
            if done.load(Ordering::Relaxed) {
                break;
            }
        }
        flood.join().unwrap()
    });
    let after = rig.node.maps.counters(rig.scene.id).unwrap();
    let grown =
        |counter: Counter| after.count[counter.code() as usize] - before.count[counter.code() as usize];
    assert!(started > 1000, "{started}");
    assert_eq!(grown(Counter::Bypass) + grown(Counter::NotJudged), started, "{after:?}");
    assert_eq!(
        grown(Counter::EventsEmitted) + grown(Counter::EventsSuppressed) + grown(Counter::EventsRingFull),
        grown(Counter::Bypass)
    );
    assert_eq!(grown(Counter::WouldDrop) + grown(Counter::BypassDropped), grown(Counter::Bypass));
}

#[test]
fn kubearmor_2123_a_newer_word_of_another_writer_is_not_overwritten_by_a_stale_one() {
    let mut rig = Rig::new("");
    let mut maps = rig.node.machine.maps();
    let entry = rig.entry();
    let foreign = PodPolicy { revision: entry.revision + 1000, mode: Mode::Off.code(), ..entry };
    maps.set_policy(rig.scene.id, &foreign).unwrap();
    rig.facts.namespace_labels = Some(mode_of("enforce"));
    rig.tell();
    // Decided anew, beyond the other's revision.
    rig.obeys("decided anew", Mode::Enforce);
    assert!(rig.entry().revision > foreign.revision, "{:?}", rig.entry());
    assert_eq!(rig.snapshots.borrow().conflicts, 1);
    rig.facts.namespace_labels = Some(KeyValues::default());
    rig.tell();
    rig.obeys("as ever", Mode::Audit);
    assert_eq!(rig.snapshots.borrow().conflicts, 1);
}
