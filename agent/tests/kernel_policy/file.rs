//! The policy file as operators and the kubelet change it, and an agent that follows.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nobypass_common::ids::{Counter, Mode};
use nobypass_testkit::netns::FAR4;
use nobypass_testkit::redirect::Variant;

use crate::scene::{Expected, HANGING, Node, Scene};
use crate::support::agent::Agent;
use crate::support::machine::{Machine, says};

const AUDIT: &str = "apiVersion: nobypass.dev/v1alpha1\nmode: audit\n";
const ENFORCE: &str = "apiVersion: nobypass.dev/v1alpha1\nmode: enforce\n";
const BAD: &str = "apiVersion: nobypass.dev/v1alpha1\nmode: strict\nholdMs: 0\n";

/// A ConfigMap's volume: `policy.yaml` is a link to `..data/policy.yaml`, and `..data` one to a directory.
struct Volume {
    dir: tempfile::TempDir,
    versions: u32,
}

impl Volume {
    fn new(text: &str) -> Self {
        let mut volume = Self { dir: tempfile::tempdir().unwrap(), versions: 0 };
        volume.set(text);
        symlink("..data/policy.yaml", volume.path()).unwrap();
        volume
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("policy.yaml")
    }

    /// As the kubelet does it.
    fn set(&mut self, text: &str) {
        let at = |name: &str| self.dir.path().join(name);
        let (old, new) = (format!("..{}", self.versions), format!("..{}", self.versions + 1));
        fs::create_dir(at(&new)).unwrap();
        fs::write(at(&new).join("policy.yaml"), text).unwrap();
        symlink(&new, at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
        let _ = fs::remove_dir_all(at(&old));
        self.versions += 1;
    }
}

fn start(policy: &Path) -> Node {
    Node::start(Machine::new(), &["--policy", &policy.display().to_string()])
}

fn agent(node: &Node) -> &Agent {
    node.agent.as_ref().unwrap()
}

fn until_mode(node: &Node, mode: Mode) {
    agent(node).until(mode.label(), |_| (node.maps.config().unwrap().mode == mode.code()).then_some(()));
}

fn reloads(node: &Node, result: &str) -> u64 {
    agent(node).metrics().sum("policy_reload_total", &[("result", result)])
}

fn obeys(node: &Node, scene: &Scene, mode: Mode) {
    let mut expected = Expected::plain_bypass(mode);
    // Without an agent nobody ends a socket whose SYN was dropped.
    if mode == Mode::Enforce && node.agent.is_none() {
        expected.saw = HANGING;
    }
    node.check(mode.label(), scene, &expected, || scene.out("tcp4", 8080));
}

#[test]
fn a_config_map_that_changes_reaches_the_next_connection_and_a_bad_one_changes_nothing() {
    let mut volume = Volume::new(AUDIT);
    let mut node = start(&volume.path());
    let scene = node.meshed(Variant::None);
    obeys(&node, &scene, Mode::Audit);
    volume.set(ENFORCE);
    until_mode(&node, Mode::Enforce);
    obeys(&node, &scene, Mode::Enforce);
    assert_eq!((reloads(&node, "success"), reloads(&node, "failure")), (2, 0));

    volume.set(BAD);
    let line = agent(&node).line(&["ERROR", "the policy is not taken", "holdMs"]);
    assert!(
        line.contains("\"strict\" is not one of off, audit, enforce"),
        "both problems in one line: {line}"
    );
    let (code, ready) = agent(&node).get("/readyz").unwrap();
    assert!(ready.contains("note: policy: ") && ready.contains("last good one holds"), "{code} {ready}");
    assert_eq!((reloads(&node, "failure"), agent(&node).metrics().sum("policy_valid", &[])), (1, 0));
    obeys(&node, &scene, Mode::Enforce);
    let status = agent(&node).status();
    assert!(status["agent"]["notes"][0].as_str().unwrap().contains("mode"), "{status}");

    // Gone, as a volume that is unmounted: the last good one holds.
    fs::remove_file(volume.path()).unwrap();
    agent(&node).line(&["ERROR", "the policy is not taken", "No such file"]);
    obeys(&node, &scene, Mode::Enforce);
    symlink("..data/policy.yaml", volume.path()).unwrap();
    volume.set(AUDIT);
    until_mode(&node, Mode::Audit);
    obeys(&node, &scene, Mode::Audit);
    agent(&node)
        .until("the end of the note", |agent| (!agent.get("/readyz")?.1.contains("note:")).then_some(()));
    assert_eq!(agent(&node).metrics().sum("policy_valid", &[]), 1);
}

/// Where nothing is held, the program that hastens held connections does not cost any connection anything.
#[test]
fn the_sock_ops_program_is_attached_only_while_unknown_pods_are_held() {
    let mut volume = Volume::new(AUDIT);
    let node = start(&volume.path());
    let is_attached = || node.machine.programs().contains(&"nb_sock_ops".to_owned());
    let shown = |agent: &Agent| {
        let status = agent.status();
        let hooks = status["hooks"].as_array().unwrap();
        hooks.iter().find(|hook| hook["hook"] == "sock_ops").map(|hook| hook["effective"] == true)
    };
    assert!(!is_attached() && shown(agent(&node)).is_none());
    for round in 0..2 {
        volume.set(&format!("{AUDIT}unknownPods: hold\n"));
        agent(&node).until("the hook", |agent| (shown(agent)? && is_attached()).then_some(()));
        assert_eq!(agent(&node).metrics().sum("hook_effective", &[("hook", "sock_ops")]), 1, "round {round}");
        volume.set(AUDIT);
        agent(&node).until("its end", |agent| (shown(agent).is_none() && !is_attached()).then_some(()));
    }
    // What somebody detaches comes again.
    volume.set(&format!("{AUDIT}unknownPods: hold\n"));
    agent(&node).until("the hook", |_| is_attached().then_some(()));
    node.machine.mounts.sh("rm /sys/fs/bpf/nobypass/v*/link_sock_ops_*");
    agent(&node).line(&["ERROR", "somebody detached programs of ours", "sock_ops"]);
    agent(&node).until("the hook", |agent| (shown(agent)? && is_attached()).then_some(()));
}

#[test]
fn a_file_that_is_written_in_place_is_read_when_it_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.yaml");
    fs::write(&path, AUDIT).unwrap();
    let node = start(&path);
    fs::write(&path, ENFORCE).unwrap();
    until_mode(&node, Mode::Enforce);
}

#[test]
fn reloads_in_the_middle_of_a_burst_lose_no_count() {
    let mut volume = Volume::new(AUDIT);
    let mut node = start(&volume.path());
    let scene = node.meshed(Variant::None);
    let done = AtomicBool::new(false);
    let mut scrapes = Vec::new();
    let flood = scene.app().option("parallel", 2);
    let started = std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let started = flood.run(&[&"flood", &FAR4, &8080, &30_000]).unwrap().count("started");
            done.store(true, Ordering::Relaxed);
            started
        });
        for (text, mode) in
            [(ENFORCE, Some(Mode::Enforce)), (BAD, None), (AUDIT, Some(Mode::Audit))].iter().cycle()
        {
            let failures = reloads(&node, "failure");
            volume.set(text);
            match mode {
                Some(mode) => until_mode(&node, *mode),
                None => agent(&node)
                    .until("the refusal", |_| (reloads(&node, "failure") > failures).then_some(())),
            }
            scrapes.push(agent(&node).metrics());
            if done.load(Ordering::Relaxed) && scrapes.len() > 3 {
                break;
            }
        }
        flood.join().unwrap()
    });
    let counters = node.maps.counters(scene.id).unwrap();
    let n = |counter: Counter| counters.count[counter.code() as usize];
    assert_eq!(n(Counter::Bypass), started);
    assert_eq!(
        n(Counter::EventsEmitted) + n(Counter::EventsSuppressed) + n(Counter::EventsRingFull),
        started
    );
    assert_eq!(n(Counter::WouldDrop) + n(Counter::BypassDropped), started);
    assert!(n(Counter::WouldDrop) > 0, "{counters:?}");
    for pair in scrapes.windows(2) {
        assert_eq!(pair[1].went_backwards_since(&pair[0]), [""; 0]);
    }
}

#[test]
fn what_is_set_by_hand_holds_until_the_policy_changes() {
    let mut volume = Volume::new(ENFORCE);
    let mut node = start(&volume.path());
    let scene = node.meshed(Variant::None);
    obeys(&node, &scene, Mode::Enforce);
    let (code, body) = agent(&node).put("/v1/mode", "off");
    assert!(
        code == 200 && body.starts_with("off\nset by hand") && body.contains("makes it enforce"),
        "{body}"
    );
    obeys(&node, &scene, Mode::Off);
    let status = agent(&node).status();
    assert_eq!((&status["mode"], &status["mode_source"]), (&"off".into(), &"`nobypass mode`".into()));
    assert_eq!(agent(&node).metrics().sum("mode_by_hand", &[]), 1);
    let (_, shown) = agent(&node).get("/v1/policy").unwrap();
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(
        (&shown["policy"]["mode"], &shown["policy"]["modeWithoutHand"]),
        (&"off".into(), &"enforce".into())
    );
    assert_eq!(agent(&node).put("/v1/mode", "policy"), (200, "enforce\n".into()));
    obeys(&node, &scene, Mode::Enforce);

    agent(&node).put("/v1/mode", "off");
    volume.set(&format!("{ENFORCE}events: {{rate: 7}}\n"));
    until_mode(&node, Mode::Enforce);
    assert_eq!(node.maps.config().unwrap().event_rate, 7);
    assert_eq!(agent(&node).metrics().sum("mode_by_hand", &[]), 0);
}

#[test]
fn an_agent_does_not_start_with_a_bad_policy() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.yaml");
    let machine = Machine::new();
    let start = || machine.launch().args(["--policy", &path.display().to_string()]).fail();
    says(&start(), 64, &["--policy", "No such file"]);
    fs::write(&path, BAD).unwrap();
    says(&start(), 64, &["--policy", "line 2 column 7", "holdMs: 0 is not within 1 to 60000"]);
    machine.nothing_is_left();
}

/// What a dead agent's heartbeat looks like, without the wait: the operator's limit is in the past already.
#[test]
fn without_an_agent_for_too_long_the_programs_let_pass_what_the_operator_wants_to_pass() {
    let volume = Volume::new(&format!("{ENFORCE}maxAgentSilence: 30s\nonSilence: audit\n"));
    let mut node = start(&volume.path());
    let scene = node.meshed(Variant::None);
    assert_eq!(node.maps.config().unwrap().max_silence_ns, 30_000_000_000);
    obeys(&node, &scene, Mode::Enforce);
    node.agent.take().unwrap().kill();
    obeys(&node, &scene, Mode::Enforce);
    let config = node.maps.config().unwrap();
    node.maps.set_config(&nobypass_common::abi::Config { max_silence_ns: 1, ..config }).unwrap();
    obeys(&node, &scene, Mode::Audit);
    node.maps.set_config(&nobypass_common::abi::Config { max_silence_ns: 0, ..config }).unwrap();
    obeys(&node, &scene, Mode::Enforce);
}
