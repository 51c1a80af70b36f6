//! The source against a runtime that fails on demand.

use std::{collections::BTreeMap, time::Duration};

use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};

use super::{
    fake::{Fake, id, uid},
    *,
};
use crate::{
    cgroup::model::CgroupEventKind,
    pods::{
        ContainerId, PodUid,
        model::{PodFacts, State, User},
        source::PodUpdate,
    },
};

/// No test waits longer for anything.
const BOUND: Duration = Duration::from_secs(30);

struct Harness {
    fake: Fake,
    nudges: mpsc::Sender<Nudge>,
    updates: mpsc::Receiver<PodUpdate>,
    state: watch::Receiver<CriState>,
    wants: watch::Sender<Wanted>,
    task: JoinHandle<()>,
    _dir: tempfile::TempDir,
}

impl Harness {
    fn start(prepare: impl FnOnce(&mut Fake), change: impl FnOnce(&mut CriOptions)) -> Self {
        let dir = tempfile::tempdir().expect("tempdir");
        let socket = dir.path().join("cri.sock");
        let mut fake = Fake::start(&socket);
        prepare(&mut fake);
        let wants = watch::Sender::new(Wanted {
            keys: ["linkerd.io/*"].into_iter().collect(),
            containers: ["linkerd-proxy", "linkerd-init"].into_iter().collect(),
            ..Wanted::default()
        });
        let mut options = CriOptions::new(wants.subscribe());
        options.endpoint = Some(socket);
        // No regular round helps a test by chance.
        options.resync = Duration::from_secs(3600);
        options.max_backoff = Duration::from_millis(100);
        change(&mut options);
        let (source, state) = CriSource::new(options);
        let (nudges, nudged) = mpsc::channel(64);
        let (out, updates) = mpsc::channel(1024);
        let task = tokio::spawn(source.run(nudged, out));
        Self { fake, nudges, updates, state, wants, task, _dir: dir }
    }

    fn plain() -> Self {
        Self::start(|_| {}, |_| {})
    }

    async fn next(&mut self) -> PodUpdate {
        tokio::time::timeout(BOUND, self.updates.recv()).await.expect("an update in time").expect("open")
    }

    async fn upsert(&mut self) -> PodFacts {
        match self.next().await {
            PodUpdate::Upsert(pod) => (*pod).clone(),
            other => panic!("expected a pod, got {other:?}"),
        }
    }

    /// Everything up to `Synced`, by name.
    async fn synced(&mut self) -> BTreeMap<String, PodFacts> {
        let mut pods = BTreeMap::new();
        loop {
            match self.next().await {
                PodUpdate::Upsert(pod) => drop(pods.insert(pod.name.to_string(), (*pod).clone())),
                PodUpdate::Gone(uid) => panic!("unexpected end of {uid}"),
                PodUpdate::Rekeyed(_) => panic!("the runtime keeps annotations as they were"),
                PodUpdate::Synced => return pods,
            }
        }
    }

    async fn nudge(&self, kind: CgroupEventKind, pod: usize, container: Option<usize>) {
        let container = container.map(|n| ContainerId::parse(&id(n)).expect("id"));
        let uid = PodUid::parse(&uid(pod)).expect("uid");
        self.nudges.send(Nudge { kind, uid, container }).await.expect("running");
    }

    /// Waits until the source's state is so.
    async fn state(&mut self, is_so: impl FnMut(&CriState) -> bool) -> CriState {
        tokio::time::timeout(BOUND, self.state.wait_for(is_so))
            .await
            .expect("in time")
            .expect("running")
            .clone()
    }

    /// Waits for another round that says nothing.
    async fn silent_round(&mut self) {
        let rounds = self.state.borrow().rounds;
        self.nudge(CgroupEventKind::Removed, 99_999, None).await;
        self.state(|state| state.rounds > rounds).await;
        assert!(self.updates.try_recv().is_err(), "an unchanged pod was sent again");
    }
}

fn pod_uid(n: usize) -> PodUid {
    PodUid::parse(&uid(n)).expect("uid")
}

#[tokio::test]
async fn existing_pods_then_synced() {
    let mut h = Harness::start(
        |fake| {
            let mut node = fake.node();
            node.add_sandbox(1, 1);
            node.add_container(11, 1, "linkerd-proxy");
            node.add_container(12, 1, "app");
            node.add_sandbox(2, 2);
            node.host_network.insert(id(2));
        },
        |_| {},
    );
    let pods = h.synced().await;
    assert_eq!(pods.keys().collect::<Vec<_>>(), ["pod-1", "pod-2"]);
    let pod = &pods["pod-1"];
    assert_eq!((pod.uid, &*pod.namespace), (pod_uid(1), "ns"));
    assert_eq!(pod.labels.iter().collect::<Vec<_>>(), [("linkerd.io/control-plane-ns", "linkerd")]);
    assert_eq!(pod.annotations.iter().collect::<Vec<_>>(), [("linkerd.io/proxy-version", "v1")]);
    let sandbox = pod.sandbox.as_ref().expect("sandbox");
    assert_eq!((sandbox.pid, sandbox.netns.as_deref()), (Some(7), Some("/var/run/netns/x")));
    assert_eq!(sandbox.runtime_type.as_deref(), Some("io.containerd.runc.v2"));
    assert_eq!((sandbox.host_network, sandbox.ready), (Some(false), true));
    let [proxy, app] = &pod.containers[..] else { panic!("{pod:?}") };
    assert_eq!(
        (&*proxy.name, proxy.user, proxy.pid),
        ("linkerd-proxy", Some(User { uid: 2102, gid: 2102 }), Some(8))
    );
    assert_eq!((&*app.name, app.user, app.state), ("app", None, State::Running), "not asked about");
    assert_eq!(pods["pod-2"].host_network(), Some(true));
    assert_eq!(h.fake.node().calls["ContainerStatus"], 1);

    let state = h.state(|state| state.synced).await;
    assert!(state.connected && state.last_error.is_none());
    assert_eq!((state.pods, state.runtime.as_deref()), (2, Some("fake 1.0")));
    h.silent_round().await;
}

#[tokio::test]
async fn details_in_crios_form() {
    let prepare = |fake: &mut Fake| {
        fake.node().crio = true;
        fake.node().add_sandbox(1, 1);
    };
    let mut h = Harness::start(prepare, |_| {});
    let sandbox = h.upsert().await.sandbox.expect("sandbox");
    assert_eq!((sandbox.pid, sandbox.netns.as_deref()), (None, Some("/var/run/netns/x")));
    assert_eq!(sandbox.cgroup_parent.as_deref(), Some("kubepods.slice"));
}

/// The cgroup is there first, the runtime lists the pod a while later: one hint is enough.
#[tokio::test]
async fn a_hint_holds_until_the_runtime_lists_the_pod() {
    let mut h = Harness::plain();
    assert!(h.synced().await.is_empty());
    h.nudge(CgroupEventKind::Made, 1, None).await;
    let rounds = h.state.borrow().rounds;
    h.state(|state| state.rounds >= rounds + 3).await;
    assert!(h.updates.try_recv().is_err());
    h.fake.node().add_sandbox(1, 1);
    assert_eq!(h.upsert().await.uid, pod_uid(1));

    h.nudge(CgroupEventKind::Made, 1, Some(11)).await;
    h.fake.node().add_container(11, 1, "linkerd-proxy");
    let proxy = h.upsert().await.containers.remove(0);
    assert_eq!(proxy.user.map(|user| user.uid), Some(2102));
}

#[tokio::test]
async fn an_ended_init_container_is_noticed_with_its_exit_code() {
    let prepare = |fake: &mut Fake| {
        fake.node().add_sandbox(1, 1);
        fake.node().add_container(11, 1, "linkerd-init");
    };
    let mut h = Harness::start(prepare, |_| {});
    assert_eq!(h.upsert().await.containers[0].exit_code, None);
    assert_eq!(h.next().await, PodUpdate::Synced);
    h.nudge(CgroupEventKind::Removed, 1, Some(11)).await;
    h.fake.node().end_container(11, 3);
    let init = h.upsert().await.containers.remove(0);
    assert_eq!((init.state, init.exit_code, init.pid), (State::Exited, Some(3), None));
}

/// The answers that are there may lack what is wanted now.
#[tokio::test]
async fn what_is_wanted_from_now_on_is_asked_about_again() {
    let prepare = |fake: &mut Fake| {
        fake.node().add_sandbox(1, 1);
        fake.node().add_container(11, 1, "linkerd-proxy");
        fake.node().add_container(12, 1, "app");
    };
    let mut h = Harness::start(prepare, |_| {});
    let before = h.synced().await.remove("pod-1").expect("the pod");
    assert_eq!((before.labels.get("app"), before.containers[1].user), (None, None), "not asked about");
    h.wants.send_modify(|wanted| {
        wanted.keys.extend(["app"]);
        wanted.containers.extend(["app"]);
    });
    let after = h.upsert().await;
    assert_eq!((after.labels.get("app"), after.containers[1].user), (Some("web"), before.containers[0].user));
    assert_eq!(after.containers[0], before.containers[0], "what is known stays");
    assert_eq!(h.fake.node().calls["ContainerStatus"], 3, "one at first, then both");
    h.silent_round().await;
    assert_eq!(h.fake.node().calls["ContainerStatus"], 3, "and not again");
}

#[tokio::test]
async fn a_removed_pod_is_gone() {
    let mut h = Harness::start(|fake| fake.node().add_sandbox(1, 1), |_| {});
    h.synced().await;
    h.fake.node().stop_sandbox(1);
    h.nudge(CgroupEventKind::Removed, 1, None).await;
    let sandbox = h.upsert().await.sandbox.expect("kept while listed");
    assert_eq!((sandbox.ready, sandbox.pid), (false, None));
    h.fake.node().remove_sandbox(1);
    h.nudge(CgroupEventKind::Removed, 1, None).await;
    assert_eq!(h.next().await, PodUpdate::Gone(pod_uid(1)));
}

/// One pod, several sandboxes (re-created after a reboot or a failure): the newest ready one counts.
#[tokio::test]
async fn the_newest_ready_sandbox_wins() {
    let prepare = |fake: &mut Fake| {
        let mut node = fake.node();
        for sandbox in [3, 1, 2, 4] {
            node.add_sandbox(sandbox, 1);
            node.add_container(10 + sandbox, sandbox, "app");
        }
        node.stop_sandbox(4);
        node.stop_sandbox(1);
    };
    let mut h = Harness::start(prepare, |_| {});
    let pod = h.upsert().await;
    assert_eq!(pod.sandbox.as_ref().map(|sandbox| sandbox.id.to_string()), Some(id(3)));
    assert_eq!(pod.containers.len(), 1, "containers of other sandboxes are not the pod's");
    assert_eq!(pod.containers[0].id.map(|id| id.to_string()), Some(id(13)));
    h.synced().await;

    h.fake.node().stop_sandbox(3);
    h.fake.node().add_sandbox(5, 1);
    h.nudge(CgroupEventKind::Made, 1, Some(5)).await;
    let pod = h.upsert().await;
    assert_eq!(pod.sandbox.as_ref().map(|sandbox| sandbox.id.to_string()), Some(id(5)));
    assert!(pod.containers.is_empty());
}

#[tokio::test]
async fn ids_that_no_cgroup_can_carry_are_counted_not_fatal() {
    let prepare = |fake: &mut Fake| {
        fake.node().add_sandbox(1, 1);
        fake.node().add_sandbox(2, 2);
        fake.node().set_uid(2, "not-a-uid");
    };
    let mut h = Harness::start(prepare, |_| {});
    assert_eq!(h.synced().await.len(), 1);
    assert_eq!(h.state(|state| state.synced).await.skipped, 1);
}

#[tokio::test]
async fn static_pods_keep_their_hash() {
    let hash = "0123456789abcdef0123456789abcdef";
    let prepare = |fake: &mut Fake| {
        fake.node().add_sandbox(1, 1);
        fake.node().set_uid(1, hash);
    };
    let mut h = Harness::start(prepare, |_| {});
    let pod = h.upsert().await;
    assert_eq!((pod.static_pod_hash, pod.cgroup_uid()), (PodUid::parse(hash), pod.uid));
}

/// While the runtime is away nothing is forgotten; when it is back only differences are sent.
#[tokio::test]
async fn a_restarted_runtime() {
    let prepare = |fake: &mut Fake| {
        fake.node().add_sandbox(1, 1);
        fake.node().add_sandbox(2, 2);
    };
    let mut h = Harness::start(prepare, |_| {});
    assert_eq!(h.synced().await.len(), 2);

    h.fake.crash();
    h.nudge(CgroupEventKind::Made, 3, None).await;
    let state = h.state(|state| !state.connected).await;
    assert_eq!((state.pods, state.synced), (2, true));
    assert!(state.last_error.is_some_and(|error| error.contains("cri.sock")));
    assert!(h.updates.try_recv().is_err(), "no pod is gone because the runtime is");

    h.fake.node().remove_sandbox(1);
    h.fake.node().add_sandbox(3, 3);
    h.fake.restart();
    let (mut gone, mut new) = (Vec::new(), Vec::new());
    loop {
        match h.next().await {
            PodUpdate::Gone(uid) => gone.push(uid),
            PodUpdate::Upsert(pod) => new.push(pod.uid),
            PodUpdate::Rekeyed(_) => panic!("the runtime keeps annotations as they were"),
            PodUpdate::Synced => break,
        }
    }
    assert_eq!((gone, new), (vec![pod_uid(1)], vec![pod_uid(3)]));
    assert!(h.state(|state| state.connected).await.failures > 0);
}

#[tokio::test]
async fn a_runtime_that_starts_later() {
    let mut h = Harness::start(Fake::crash, |_| {});
    let state = h.state(|state| state.failures >= 2).await;
    assert!(!state.connected && !state.synced);
    h.fake.node().add_sandbox(1, 1);
    h.fake.restart();
    assert_eq!(h.synced().await.len(), 1);
}

#[tokio::test]
async fn a_hung_runtime_is_left_after_the_deadline_and_comes_back() {
    let prepare = |fake: &mut Fake| fake.node().add_sandbox(1, 1);
    let mut h = Harness::start(prepare, |options| options.list_deadline = Duration::from_millis(50));
    h.synced().await;
    h.fake.node().hanging.insert("ListContainers".into());
    h.nudge(CgroupEventKind::Made, 2, None).await;
    let state = h.state(|state| !state.connected).await;
    let error = state.last_error.expect("a reason");
    assert!(error.contains("did not answer ListContainers within 50ms"), "{error}");
    assert!(h.updates.try_recv().is_err());

    h.fake.node().hanging.clear();
    h.fake.node().add_sandbox(2, 2);
    assert_eq!(h.synced().await.keys().collect::<Vec<_>>(), ["pod-2"]);
}

/// One sick sandbox holds up neither the others nor itself.
#[tokio::test]
async fn a_hung_status_costs_only_its_own_details() {
    let prepare = |fake: &mut Fake| {
        let mut node = fake.node();
        node.add_sandbox(1, 1);
        node.add_sandbox(2, 2);
        node.add_sandbox(3, 3);
        node.hanging.insert(format!("PodSandboxStatus {}", id(1)));
        node.failing.insert(format!("PodSandboxStatus {}", id(2)));
    };
    let mut h = Harness::start(prepare, |options| options.detail_deadline = Duration::from_millis(50));
    let pods = h.synced().await;
    let host_network: Vec<_> = pods.values().map(PodFacts::host_network).collect();
    assert_eq!(host_network, [None, None, Some(false)]);
    let state = h.state(|state| state.synced).await;
    assert!(state.connected);
    assert_eq!(state.details_failed, 2);

    // Not asked again in the very next round.
    let asked = h.fake.node().calls["PodSandboxStatus"];
    h.silent_round().await;
    assert_eq!(h.fake.node().calls["PodSandboxStatus"], asked);
}

#[tokio::test]
async fn a_runtime_without_cri_is_an_error_that_says_so() {
    let mut h = Harness::start(|fake| fake.node().failing.extend(["Version".to_owned()]), |_| {});
    let error = h.state(|state| state.failures > 0).await.last_error.expect("a reason");
    assert!(error.contains("failed Version") && error.contains("told to fail"), "{error}");
}

#[tokio::test]
async fn without_any_socket_the_error_names_the_places_and_the_flag() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (source, mut state) = CriSource::new(CriOptions {
        host_root: dir.path().into(),
        ..CriOptions::new(watch::channel(Wanted::default()).1)
    });
    let (_nudges, nudged) = mpsc::channel(1);
    let (out, updates) = mpsc::channel(1);
    let task = tokio::spawn(source.run(nudged, out));
    let state =
        tokio::time::timeout(BOUND, state.wait_for(|state| state.failures > 0)).await.expect("in time");
    let error = state.expect("running").last_error.clone().expect("a reason");
    assert!(error.contains("/run/crio/crio.sock") && error.contains("--cri-endpoint"), "{error}");
    drop(updates);
    tokio::time::timeout(BOUND, task).await.expect("ends when nobody listens").expect("no panic");
}

#[tokio::test]
async fn ends_when_nobody_listens_and_goes_on_without_hints() {
    let mut h = Harness::start(|_| {}, |options| options.resync = Duration::from_millis(5));
    h.synced().await;
    let (closed, _) = mpsc::channel(1);
    drop(std::mem::replace(&mut h.nudges, closed));
    let rounds = h.state.borrow().rounds;
    h.state(|state| state.rounds > rounds + 2).await;
    drop(h.updates);
    tokio::time::timeout(BOUND, h.task).await.expect("ends").expect("no panic");
}

/// Pods made in the middle of rounds are all sent, each once.
#[tokio::test]
async fn a_storm_of_pods_loses_none_and_repeats_none() {
    const PODS: usize = 200;
    let mut h = Harness::plain();
    h.synced().await;
    let nudges = h.nudges.clone();
    for n in 1..=PODS {
        h.fake.node().add_sandbox(n, n);
        nudges
            .send(Nudge { kind: CgroupEventKind::Made, uid: pod_uid(n), container: None })
            .await
            .expect("running");
        tokio::task::yield_now().await;
    }
    let mut seen = std::collections::BTreeSet::new();
    while seen.len() < PODS {
        assert!(seen.insert(h.upsert().await.uid), "sent twice");
    }
    h.silent_round().await;
    assert!(h.fake.node().calls["PodSandboxStatus"] == PODS, "details are asked for once");
}
