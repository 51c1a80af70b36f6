use super::*;
use crate::pods::model::{Phase, Role, Sandbox, User};

const SECOND: i64 = 1_000_000_000;
/// The kernel started here; all of the following times are later unless a test says otherwise.
const BOOT: i64 = 1000 * SECOND;
const HASH: &str = "0123456789abcdef0123456789abcdef";

fn uid(n: u32) -> PodUid {
    PodUid::parse(&format!("00000000-0000-4000-8000-{n:012x}")).unwrap()
}

fn hash() -> PodUid {
    PodUid::parse(HASH).unwrap()
}

fn id(n: u8) -> ContainerId {
    ContainerId::parse(&format!("{n:02x}").repeat(32)).unwrap()
}

fn values(pairs: &[(&str, &str)]) -> KeyValues {
    pairs.iter().copied().collect()
}

fn sandbox(n: u8, created_at: i64) -> Sandbox {
    Sandbox {
        id: id(n),
        ready: true,
        pid: Some(7),
        netns: None,
        runtime_handler: "".into(),
        runtime_type: None,
        created_at,
        host_network: Some(false),
        cgroup_parent: None,
    }
}

/// As the runtime knows a pod with sandbox `n`, made two seconds after the boot.
fn runtime(uid: PodUid, name: &str, n: u8) -> PodFacts {
    PodFacts {
        static_pod_hash: uid.is_static().then_some(uid),
        annotations: values(&[("skip", "25")]),
        sandbox: Some(sandbox(n, BOOT + 2 * SECOND)),
        known_by: KnownBy { runtime: true, api: false },
        ..PodFacts::new(uid, "ns", name)
    }
}

fn api(uid: PodUid, name: &str) -> PodFacts {
    PodFacts {
        annotations: values(&[("skip", "25")]),
        namespace_labels: Some(values(&[("mesh", "on")])),
        containers_complete: true,
        phase: Phase::Running,
        created_at: Some(BOOT),
        known_by: KnownBy { runtime: false, api: true },
        ..PodFacts::new(uid, "ns", name)
    }
}

fn running(name: &str, n: u8, created_at: i64) -> Container {
    Container { id: Some(id(n)), state: State::Running, created_at, ..Container::new(name) }
}

/// Joins, and remembers what a reader would know, by the UID in the cgroup.
struct Known {
    join: Join,
    pods: HashMap<PodUid, Arc<PodFacts>>,
    said: usize,
}

impl Known {
    fn new() -> Self {
        Self { join: Join::new(BOOT), pods: HashMap::new(), said: 0 }
    }

    fn hear(&mut self, origin: Origin, update: PodUpdate) -> &mut Self {
        for update in self.join.update(origin, update) {
            self.said += 1;
            match update {
                PodUpdate::Upsert(pod) => drop(self.pods.insert(pod.cgroup_uid(), pod)),
                PodUpdate::Gone(uid) => assert!(self.pods.remove(&uid).is_some(), "{uid} was never told"),
                PodUpdate::Rekeyed(_) | PodUpdate::Synced => {}
            }
        }
        assert_eq!(self.join.len(), self.pods.len(), "what is forgotten is told, and the reverse");
        self
    }

    fn runtime(&mut self, pod: PodFacts) -> &mut Self {
        self.hear(Origin::Runtime, PodUpdate::Upsert(Arc::new(pod)))
    }

    fn api(&mut self, pod: PodFacts) -> &mut Self {
        self.hear(Origin::Api, PodUpdate::Upsert(Arc::new(pod)))
    }

    fn runtime_gone(&mut self, uid: PodUid) -> &mut Self {
        self.hear(Origin::Runtime, PodUpdate::Gone(uid))
    }

    fn api_gone(&mut self, uid: PodUid) -> &mut Self {
        self.hear(Origin::Api, PodUpdate::Gone(uid))
    }

    fn pod(&self, uid: PodUid) -> &PodFacts {
        self.pods.get(&uid).unwrap_or_else(|| panic!("{uid} is not known"))
    }
}

#[test]
fn either_source_alone_is_enough_and_the_order_does_not_matter() {
    let mut first = Known::new();
    first.runtime(runtime(uid(1), "web", 1));
    assert_eq!(*first.pod(uid(1)), runtime(uid(1), "web", 1));
    first.api(api(uid(1), "web"));

    let mut second = Known::new();
    second.api(api(uid(1), "web"));
    assert_eq!(*second.pod(uid(1)), api(uid(1), "web"));
    second.runtime(runtime(uid(1), "web", 1));

    assert_eq!(first.pods, second.pods);
    let both = first.pod(uid(1));
    assert_eq!(both.known_by, KnownBy { runtime: true, api: true });
    assert_eq!(both.sandbox.as_ref().map(|sandbox| sandbox.id), Some(id(1)));
    assert_eq!(both.namespace_labels, Some(values(&[("mesh", "on")])));
    assert!(both.containers_complete && both.generation == 0);
}

#[test]
fn nothing_is_said_twice_and_the_word_synced_passes() {
    let mut known = Known::new();
    known.runtime(runtime(uid(1), "web", 1)).runtime(runtime(uid(1), "web", 1));
    assert_eq!(known.said, 1);
    known.hear(Origin::Api, PodUpdate::Synced);
    assert_eq!(known.said, 2);
    known.api_gone(uid(9)).runtime_gone(uid(9));
    assert_eq!(known.said, 2, "of a pod that nobody knew");
}

#[test]
fn pod_object_late_never_or_gone_before_the_sandbox() {
    let mut known = Known::new();
    known.runtime(runtime(uid(1), "late", 1)).runtime(runtime(uid(2), "never", 2));
    known.api(api(uid(1), "late"));
    assert!(known.pod(uid(1)).known_by.api && !known.pod(uid(2)).known_by.api);

    known.api_gone(uid(1));
    let gone = known.pod(uid(1));
    assert!(gone.terminating && gone.known_by == KnownBy { runtime: true, api: false });
    assert_eq!(gone.namespace_labels, Some(values(&[("mesh", "on")])), "what was known of it holds");
    known.runtime_gone(uid(1)).runtime_gone(uid(2));
    assert!(known.pods.is_empty() && known.join.is_empty());
}

#[test]
fn sandbox_gone_before_the_object() {
    let mut known = Known::new();
    known.runtime(runtime(uid(1), "job", 1)).api(api(uid(1), "job")).runtime_gone(uid(1));
    let pod = known.pod(uid(1));
    assert!(pod.sandbox.is_none() && pod.known_by == KnownBy { runtime: false, api: true });
    known.api_gone(uid(1));
    assert!(known.pods.is_empty());
}

#[test]
fn a_pod_made_again_under_its_name_is_another_pod() {
    let mut known = Known::new();
    known.runtime(runtime(uid(1), "web-0", 1)).api(api(uid(1), "web-0"));
    // The API is ahead: the old sandbox still runs when the new object is there.
    known.api_gone(uid(1));
    known.api(PodFacts { labels: values(&[("injected", "no")]), ..api(uid(2), "web-0") });
    assert_eq!(known.pod(uid(1)).labels, KeyValues::default());
    assert!(known.pod(uid(1)).terminating && !known.pod(uid(2)).terminating);
    assert_eq!(known.pod(uid(2)).sandbox, None, "the old one's sandbox is not the new one's");
    // And the reverse: the new sandbox first, then the news of the old object's end.
    known.runtime(runtime(uid(2), "web-0", 2)).runtime_gone(uid(1));
    assert_eq!(known.pods.len(), 1);
    assert_eq!(known.pod(uid(2)).sandbox.as_ref().map(|sandbox| sandbox.id), Some(id(2)));
}

#[test]
fn static_pods_join_by_the_hash_of_their_manifest() {
    let mirror = PodFacts { static_pod_hash: Some(hash()), ..api(uid(1), "etcd-n1") };
    let mut known = Known::new();
    known.api(mirror).runtime(runtime(hash(), "etcd-n1", 1));
    let pod = known.pod(hash());
    assert_eq!((pod.uid, pod.static_pod_hash, pod.cgroup_uid()), (uid(1), Some(hash()), hash()));
    assert!(pod.known_by.api && pod.known_by.runtime);

    // The mirror is deleted and the kubelet makes another one; the pod itself runs on.
    known.api_gone(uid(1));
    assert!(known.pod(hash()).terminating);
    known.api(PodFacts { static_pod_hash: Some(hash()), ..api(uid(2), "etcd-n1") });
    assert_eq!((known.pod(hash()).uid, known.pod(hash()).terminating), (uid(2), false));
    assert_eq!(known.pods.len(), 1);

    // The other order of the same: the new one is heard of first.
    known.api(PodFacts { static_pod_hash: Some(hash()), ..api(uid(3), "etcd-n1") }).api_gone(uid(2));
    assert_eq!((known.pod(hash()).uid, known.pod(hash()).terminating), (uid(3), false));
    known.runtime_gone(hash()).api_gone(uid(3));
    assert!(known.pods.is_empty() && known.join.mirrors.is_empty());
}

#[test]
fn nobody_takes_a_static_pods_identity_by_claiming_its_hash() {
    let claim = |n, name: &str, at| PodFacts {
        static_pod_hash: Some(hash()),
        labels: values(&[("name", name)]),
        created_at: Some(at),
        ..api(uid(n), name)
    };
    let label = |known: &Known| known.pod(hash()).labels.get("name").map(str::to_owned);
    let mut known = Known::new();
    known.runtime(runtime(hash(), "etcd-n1", 1)).api(claim(2, "impostor", BOOT));
    assert!(!known.pod(hash()).known_by.api, "another name: not its mirror");
    known.api(claim(1, "etcd-n1", BOOT + SECOND));
    assert_eq!(label(&known).as_deref(), Some("etcd-n1"));
    known.api_gone(uid(2));
    assert_eq!(label(&known).as_deref(), Some("etcd-n1"));

    // Without the runtime's word: the older one.
    let mut known = Known::new();
    known.api(claim(1, "etcd-n1", BOOT)).api(claim(2, "impostor", BOOT + SECOND));
    assert_eq!(label(&known).as_deref(), Some("etcd-n1"));
    known.api_gone(uid(1));
    assert_eq!(label(&known).as_deref(), Some("impostor"));
}

#[test]
fn an_object_that_changes_its_claim_leaves_the_other_cgroup() {
    let mut known = Known::new();
    known.api(PodFacts { static_pod_hash: Some(hash()), ..api(uid(1), "x") });
    known.api(api(uid(1), "x"));
    assert_eq!(known.pods.keys().copied().collect::<Vec<_>>(), [uid(1)]);
    known.api_gone(uid(1));
    assert!(known.join.is_empty() && known.join.mirrors.is_empty());
}

#[test]
fn another_sandbox_is_another_generation() {
    let mut known = Known::new();
    known.runtime(runtime(uid(1), "web", 1)).api(api(uid(1), "web"));
    assert_eq!(known.pod(uid(1)).generation, 0);
    known.runtime(runtime(uid(1), "web", 2));
    assert_eq!(known.pod(uid(1)).generation, 1);
    // The same one, not ready any more: nothing new was seen.
    let mut stopped = runtime(uid(1), "web", 2);
    stopped.sandbox.as_mut().unwrap().ready = false;
    known.runtime(stopped);
    assert_eq!(known.pod(uid(1)).generation, 1);
    // Removed, and later there is a third one.
    known.runtime_gone(uid(1));
    assert_eq!(known.pod(uid(1)).generation, 1);
    known.runtime(runtime(uid(1), "web", 3));
    assert_eq!(known.pod(uid(1)).generation, 2);
    // The runtime alone counts as well.
    let mut alone = Known::new();
    alone.runtime(runtime(uid(2), "db", 1)).runtime(runtime(uid(2), "db", 2));
    assert_eq!(alone.pod(uid(2)).generation, 1);
}

#[test]
fn the_api_alone_shows_another_sandbox_by_its_condition() {
    let ready = |ready| PodFacts { ready_to_start: Some(ready), ..api(uid(1), "web") };
    let mut known = Known::new();
    known.api(ready(false)).api(ready(true));
    assert_eq!(known.pod(uid(1)).generation, 0, "its first sandbox");
    known.api(ready(false)).api(ready(true));
    assert_eq!(known.pod(uid(1)).generation, 1);
}

#[test]
fn an_edited_annotation_is_shown_and_does_not_exempt() {
    let edited = PodFacts { annotations: values(&[("skip", "1-65535")]), ..api(uid(1), "web") };
    let mut known = Known::new();
    known.runtime(runtime(uid(1), "web", 1)).api(edited.clone());
    let pod = known.pod(uid(1));
    assert_eq!(pod.annotations.get("skip"), Some("25"), "what the sandbox was made with");
    assert_eq!(pod.current_annotations().get("skip"), Some("1-65535"));

    // The API alone: what was there when the sandbox came.
    let ip = |pod: PodFacts| PodFacts { pod_ips: [[10, 0, 0, 1].into()].into(), ..pod };
    let mut known = Known::new();
    known.api(PodFacts { annotations: values(&[("skip", "22")]), ..api(uid(1), "web") });
    known.api(ip(api(uid(1), "web")));
    assert_eq!(
        (known.pod(uid(1)).annotations.get("skip"), &known.pod(uid(1)).edited_annotations),
        (Some("25"), &None)
    );
    known.api(ip(edited.clone()));
    assert_eq!(known.pod(uid(1)).annotations.get("skip"), Some("25"));
    assert_eq!(known.pod(uid(1)).current_annotations().get("skip"), Some("1-65535"));
    known.api(ip(api(uid(1), "web")));
    assert_eq!(known.pod(uid(1)).edited_annotations, None, "edited back");
    // A new sandbox reads them anew.
    let ready = |ready, pod: PodFacts| ip(PodFacts { ready_to_start: Some(ready), ..pod });
    known.api(ready(true, edited.clone())).api(ready(false, edited.clone())).api(ready(true, edited));
    assert_eq!(known.pod(uid(1)).annotations.get("skip"), Some("1-65535"));
}

/// A policy may ask for annotations that nobody kept. What they say then is what they said at the start, as far as
/// anybody knows; what was known and edited stays edited.
#[test]
fn annotations_that_are_kept_from_now_on_are_no_edits() {
    let mut known = Known::new();
    let with = |pairs: &[(&str, &str)]| {
        let mut pod = api(uid(1), "cart");
        (pod.annotations, pod.ready_to_start) = (values(pairs), Some(true));
        pod
    };
    known.api(with(&[("old", "1")])).api(with(&[("old", "2")]));
    assert_eq!(known.pod(uid(1)).annotations, values(&[("old", "1")]));
    let kept: Arc<Keys> = Arc::new(["old"].into_iter().collect());
    known.hear(Origin::Api, PodUpdate::Rekeyed(kept));
    known.api(with(&[("old", "2"), ("new", "a")]));
    assert_eq!(known.pod(uid(1)).annotations, values(&[("new", "a"), ("old", "1")]));
    known.api(with(&[("old", "2"), ("new", "b")]));
    let pod = known.pod(uid(1));
    assert_eq!(pod.annotations, values(&[("new", "a"), ("old", "1")]), "from now on it is an edit");
    assert_eq!(pod.current_annotations(), &values(&[("new", "b"), ("old", "2")]));
}

#[test]
fn containers_have_their_role_from_the_api_and_their_life_from_the_runtime() {
    let mut spec = api(uid(1), "web");
    spec.containers = vec![
        Container {
            role: Role::Init,
            exit_code: Some(0),
            state: State::Exited,
            ..running("init", 1, BOOT + 3 * SECOND)
        },
        Container {
            role: Role::NativeSidecar,
            run_as_user: Some(2102),
            args: ["sidecar".into()].into(),
            env: values(&[("A", "1")]),
            ..running("proxy", 3, BOOT + 4 * SECOND)
        },
        Container { role: Role::App, ..Container::new("app") },
    ];
    let mut seen = runtime(uid(1), "web", 9);
    let user = Some(User { uid: 2102, gid: 2102 });
    seen.containers = vec![
        Container { state: State::Exited, ..running("init", 1, BOOT + 3 * SECOND) },
        Container {
            state: State::Exited,
            exit_code: Some(1),
            user,
            ..running("proxy", 2, BOOT + 3 * SECOND)
        },
        Container {
            pid: Some(5),
            user,
            env: values(&[("A", "1"), ("B", "2")]),
            ..running("proxy", 3, BOOT + 4 * SECOND)
        },
        running("debug", 4, BOOT + 5 * SECOND),
    ];
    let mut known = Known::new();
    known.api(spec).runtime(seen);
    let rows: Vec<_> =
        known.pod(uid(1)).containers.iter().map(|c| (&*c.name, c.role, c.id, c.state, c.exit_code)).collect();
    assert_eq!(
        rows,
        [
            ("init", Role::Init, Some(id(1)), State::Exited, Some(0)),
            ("proxy", Role::NativeSidecar, Some(id(2)), State::Exited, Some(1)),
            ("proxy", Role::NativeSidecar, Some(id(3)), State::Running, None),
            ("app", Role::App, None, State::Waiting, None),
            ("debug", Role::Unknown, Some(id(4)), State::Running, None),
        ]
    );
    let proxy = &known.pod(uid(1)).containers[2];
    assert_eq!((proxy.pid, proxy.uid(), proxy.run_as_user), (Some(5), Some(2102), Some(2102)));
    assert_eq!(
        (&*proxy.args, proxy.env.get("B")),
        (&["sidecar".into()][..], Some("2")),
        "with what it refers to"
    );
}

#[test]
fn a_container_that_only_one_source_has_seen_yet() {
    // The API's word of a run that the runtime was not asked about yet.
    let mut spec = api(uid(1), "web");
    spec.containers = vec![Container { role: Role::App, ..running("app", 5, BOOT + 6 * SECOND) }];
    let mut known = Known::new();
    known.runtime(runtime(uid(1), "web", 9)).api(spec.clone());
    assert_eq!(known.pod(uid(1)).containers, spec.containers);
    // The same container once both have it.
    let mut seen = runtime(uid(1), "web", 9);
    seen.containers = vec![running("app", 5, BOOT + 6 * SECOND + 7)];
    known.runtime(seen);
    let containers = &known.pod(uid(1)).containers;
    assert_eq!(
        (containers.len(), containers[0].role, containers[0].created_at),
        (1, Role::App, BOOT + 6 * SECOND + 7)
    );
}

#[test]
fn what_ran_in_an_earlier_sandbox_or_before_the_boot_did_not_run_in_this_one() {
    let mut spec = api(uid(1), "web");
    let ended = |at| Container {
        role: Role::Init,
        state: State::Exited,
        exit_code: Some(0),
        ..running("linkerd-init", 1, at)
    };
    let waiting = Container { role: Role::Init, ..Container::new("linkerd-init") };
    // The kubelet has not told yet that the init container runs again in the sandbox made at BOOT + 2 s.
    for (started, with_runtime, kept) in [
        (BOOT + SECOND, true, false),
        (BOOT + SECOND, false, true),
        (BOOT + 2 * SECOND, true, true),
        (BOOT - SECOND, true, false),
        (BOOT - SECOND, false, false),
        (BOOT, false, true),
        // Nobody says when it began.
        (0, true, true),
    ] {
        spec.containers = vec![ended(started)];
        let mut known = Known::new();
        known.api(spec.clone());
        if with_runtime {
            known.runtime(runtime(uid(1), "web", 9));
        }
        let wanted = if kept { ended(started) } else { waiting.clone() };
        assert_eq!(known.pod(uid(1)).containers, [wanted], "{started} {with_runtime}");
    }
}

#[test]
fn fifty_pods_in_any_order_of_two_sources() {
    // The same words in three orders: by source, by pod, and interleaved from both ends.
    let words: Vec<(Origin, PodFacts)> = (0..50)
        .flat_map(|n| {
            let seen = runtime(uid(n), &format!("p{n}"), u8::try_from(n).unwrap());
            [(Origin::Runtime, seen), (Origin::Api, api(uid(n), &format!("p{n}")))]
        })
        .collect();
    let mut by_source = words.clone();
    by_source.sort_by_key(|(origin, _)| *origin == Origin::Api);
    let (mut front, mut back) = (words.clone(), words.clone());
    back.reverse();
    front.truncate(50);
    back.truncate(50);
    let ends: Vec<_> = front.into_iter().zip(back).flat_map(|(a, b)| [a, b]).collect();
    let told = |words: Vec<(Origin, PodFacts)>| {
        let mut known = Known::new();
        for (origin, pod) in words {
            known.hear(origin, PodUpdate::Upsert(Arc::new(pod)));
        }
        known.pods
    };
    let wanted = told(words);
    assert!(
        wanted.len() == 50 && wanted.values().all(|pod| pod.known_by == KnownBy { runtime: true, api: true })
    );
    assert_eq!(told(by_source), wanted);
    assert_eq!(told(ends), wanted);
}
