//! A node that comes up in any order: pods are queued, writers race for the CNI directory, the mesh's plugin is late, and
//! the agent starts, and dies, at any moment among them. Whatever the order, each pod ends redirected, and nothing gets
//! past a proxy while nobypass enforces.
//!
//! A run is made of its seed alone. `NOBYPASS_TEST_CHURN_RUNS` says how many, `NOBYPASS_TEST_CHURN_SEED` which is the first,
//! `NOBYPASS_TEST_CHURN_MS` within what time everything happens: 3000 is life, less is a test.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests stop at the first surprise, and a seed that failed is told"
)]

mod support {
    #![allow(dead_code, reason = "each test target uses its part")]
    pub mod agent;
    pub mod node;
}

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nobypass::sys::clock::monotonic_ns;
use nobypass_testkit::node::{ContainerSpec, EXT_PORT, EXT4, Node, Pod, PodSpec};
use nobypass_testkit::proc;
use nobypass_testkit::wait;
use serde_json::Value;
use support::agent::{Agent, BIN, Launch, without_settings};
use support::node::{launch, shown};

/// A run that takes longer shows its log: nothing here has a reason to.
const SLOW: Duration = Duration::from_secs(15);
const NAMES: [&str; 2] = ["10-node.conflist", "05-other.conflist"];

fn number(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// `SplitMix64` (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Something that happens to the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// A CNI agent writes its config: beside and renamed, as aws-node does.
    Renamed,
    /// Truncated and written in pieces.
    InPlace,
    /// As cilium when it is exclusive: others' files get another name, its own comes first.
    Exclusive,
    /// The mesh's plugin is installed.
    Plugin,
    /// The agent starts, the first time or after a kill.
    Start,
    /// It is killed.
    Kill,
}

#[derive(Debug)]
struct Plan {
    /// When, and what.
    events: Vec<(Duration, Event)>,
    /// When each pod is scheduled.
    pods: Vec<Duration>,
}

impl Plan {
    fn new(seed: u64, within: u64) -> Self {
        let mut chance = Chance(seed);
        let at = |chance: &mut Chance| Duration::from_millis(chance.below(within));
        let kinds = [Event::Renamed, Event::InPlace, Event::Exclusive];
        let mut events: Vec<(Duration, Event)> = (0..=chance.below(4))
            .map(|_| (at(&mut chance), kinds[usize::try_from(chance.below(3)).unwrap()]))
            .collect();
        events.push((at(&mut chance), Event::Plugin));
        let start = at(&mut chance);
        events.push((start, Event::Start));
        if chance.below(3) == 0 {
            let kill = start + at(&mut chance);
            events.extend([(kill, Event::Kill), (kill + at(&mut chance) / 4, Event::Start)]);
        }
        events.sort_by_key(|(at, _)| *at);
        let pods = (0..2 + chance.below(3)).map(|_| at(&mut chance)).collect();
        Self { events, pods }
    }
}

/// The node outside of its pods.
struct Outside {
    net_d: PathBuf,
    plain: String,
    bin: PathBuf,
    launches: Vec<Launch>,
}

impl Outside {
    /// Does what the plan says, and gives the agent that is left and when its programs were known to be attached.
    fn run(mut self, begin: Instant, events: &[(Duration, Event)], ready: &mpsc::Sender<u64>) -> Agent {
        let mut agent: Option<Agent> = None;
        for (at, event) in events {
            until(begin + *at);
            match event {
                Event::Renamed => renamed(&self.net_d, NAMES[0], &self.plain),
                Event::InPlace => in_place(&self.net_d.join(NAMES[0]), &self.plain),
                Event::Exclusive => {
                    let first = self.net_d.join(NAMES[0]);
                    let _ = fs::rename(&first, self.net_d.join(format!("{}.cilium_bak", NAMES[0])));
                    renamed(&self.net_d, NAMES[1], &self.plain);
                }
                Event::Plugin => fs::rename(self.bin.join("late"), self.bin.join("linkerd-cni")).unwrap(),
                Event::Kill => agent.take().unwrap().kill(),
                Event::Start => {
                    let started = self.launches.pop().unwrap().start().attached();
                    // Nobody cares for a second time.
                    let _ = ready.send(monotonic_ns());
                    agent = Some(started);
                }
            }
        }
        agent.unwrap()
    }
}

fn until(moment: Instant) {
    wait::until("the moment", wait::HANG, || (Instant::now() >= moment).then_some(())).unwrap();
}

fn renamed(dir: &Path, name: &str, text: &str) {
    let temporary = dir.join(format!("{name}.tmp.1"));
    fs::write(&temporary, text).unwrap();
    fs::rename(&temporary, dir.join(name)).unwrap();
}

fn in_place(path: &Path, text: &str) {
    use std::io::Write as _;
    let mut file = fs::File::create(path).unwrap();
    let (first, second) = text.split_at(text.len() / 2);
    file.write_all(first.as_bytes()).unwrap();
    until(Instant::now() + Duration::from_millis(5));
    file.write_all(second.as_bytes()).unwrap();
}

fn spec(n: usize) -> PodSpec {
    let chatter = ["/bin/traffic", "chatter", EXT4, EXT_PORT];
    let app = ContainerSpec::new("app", 1000, &chatter);
    PodSpec {
        containers: vec![ContainerSpec::linkerd_proxy(), app],
        ..PodSpec::meshed(&format!("pod-{n}")).unwrap()
    }
}

/// As a kubelet: a pod whose sandbox cannot be made is tried again. With each pod, whether the plugin was called for it.
fn run_pods(node: &Node, begin: Instant, due: &[Duration]) -> Vec<(Pod, bool)> {
    let mut waiting: BTreeMap<usize, Instant> =
        due.iter().enumerate().map(|(n, due)| (n, begin + *due)).collect();
    let mut pods = Vec::new();
    let deadline = Instant::now() + wait::HANG;
    while !waiting.is_empty() {
        let (n, due) = waiting.iter().min_by_key(|(_, due)| **due).map(|(n, due)| (*n, *due)).unwrap();
        until(due);
        match node.run_sandbox(spec(n)) {
            Ok(mut pod) => {
                let called = calls(node, &pod) > 0;
                for container in pod.spec.containers.clone() {
                    node.start_container(&mut pod, &container).unwrap();
                }
                pods.push((pod, called));
                waiting.remove(&n);
            }
            Err(error) => {
                assert!(Instant::now() < deadline, "pod {n} never starts: {error:#}");
                waiting.insert(n, Instant::now() + Duration::from_millis(50));
            }
        }
    }
    pods
}

/// How often the plugin was called to set up this pod.
fn calls(node: &Node, pod: &Pod) -> usize {
    let text = fs::read_to_string(node.mesh_log()).unwrap_or_default();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|call| call["command"] == "ADD" && call["container"] == *pod.sandbox).count()
}

/// What the application saw: its lines, oldest first.
fn saw(node: &Node, pod: &Pod) -> Vec<(u64, String)> {
    let text = node.logs(pod, "app").unwrap_or_default();
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter_map(|line| Some((line["at_ns"].as_u64()?, line["saw"].as_str()?.to_owned()))).collect()
}

fn launches(node: &Node, entry: &Path, n: usize) -> Vec<Launch> {
    let args = "--mode enforce --unknown-pods hold --hold-ms 60000 --cni-mode guard --remedy-repair on --remedy-grace 0 \
                --settle-ms 100 --pods cri";
    let launch = |_| {
        launch(node)
            .args(args.split_whitespace())
            .args(["--cni-dir".as_ref(), node.cni_net_dir().as_os_str()])
            .args(["--cni-entry".as_ref(), entry.as_os_str()])
    };
    (0..n).map(launch).collect()
}

/// Of all agents of this run.
fn log(node: &Node) -> String {
    fs::read_to_string(node.base_dir().join("agent.log")).unwrap_or_default()
}

/// How many pods the agents said to have started unprotected.
fn said_unprotected(node: &Node) -> usize {
    let log = log(node);
    let lines =
        log.lines().filter(|line| line.contains("meshed pods started while the CNI configuration had no"));
    let counts =
        lines.filter_map(|line| line.split_once("count=")?.1.split(' ').next()?.parse::<usize>().ok());
    counts.sum()
}

/// The node as it was before anything happened.
fn reset(node: &Node) {
    let _ = fs::remove_file(node.base_dir().join("agent.log"));
    for entry in fs::read_dir(node.cni_net_dir()).unwrap().flatten() {
        fs::remove_file(entry.path()).unwrap();
    }
    let plugin = node.cni_bin_dir().join("linkerd-cni");
    if plugin.exists() {
        fs::rename(plugin, node.cni_bin_dir().join("late")).unwrap();
    }
    let mut cleanup = node.command(BIN).unwrap();
    without_settings(cleanup.arg("cleanup"));
    proc::check(cleanup, "").unwrap();
}

fn one(node: &Node, entry: &Path, seed: u64, within: u64) {
    reset(node);
    let plan = Plan::new(seed, within);
    let starts = plan.events.iter().filter(|(_, event)| *event == Event::Start).count();
    let outside = Outside {
        net_d: node.cni_net_dir(),
        plain: node.conflist(&[]),
        bin: node.cni_bin_dir(),
        launches: launches(node, entry, starts),
    };
    let begin = Instant::now();
    let (ready, attached) = mpsc::channel();
    let (agent, pods) = std::thread::scope(|scope| {
        let outside = scope.spawn(|| outside.run(begin, &plan.events, &ready));
        let pods = run_pods(node, begin, &plan.pods);
        (outside.join().unwrap(), pods)
    });
    let attached = attached.recv().unwrap();
    for (pod, called) in &pods {
        let name = &pod.spec.name;
        agent.until(&format!("{name}, redirected"), |agent| {
            let seen = saw(node, pod);
            let last = seen.last().is_some_and(|(_, saw)| saw == "mesh");
            (last && shown(agent, pod)?["v4"]["verdict"] == "redirected").then_some(())
        });
        let past: Vec<_> =
            saw(node, pod).into_iter().filter(|(at, saw)| *at > attached && saw == "plain").collect();
        assert!(past.is_empty(), "{name} got past its proxy although enforced: {past:?}; {}", agent.log());
        let calls = calls(node, pod);
        match called {
            true => assert_eq!(calls, 1, "{name} was well, and repaired nevertheless: {}", agent.log()),
            false => assert!(calls >= 1, "{name} is redirected, and nobody has called the plugin"),
        }
    }
    let metrics = agent.metrics();
    assert_eq!(metrics.sum("cni_protected", &[]), 1, "{metrics:?}");
    assert_eq!(metrics.sum("node_ready", &[]), 1, "{metrics:?}");
    let said = said_unprotected(node);
    let without = pods.iter().filter(|(_, called)| !called).count();
    println!(
        "seed {seed}: {} pods, {without} without the plugin at their start, {said} said to be; {:?}",
        pods.len(),
        begin.elapsed()
    );
    if begin.elapsed() > SLOW {
        println!("why so slow?\n{}", log(node));
    }
    // More may be: a sandbox that was begun in such a window, and set up right after it.
    assert!(said >= without, "{}", log(node));
    assert!(agent.terminate().success());
    for (pod, _) in &pods {
        node.remove_pod(pod).unwrap();
    }
}

#[test]
fn whatever_comes_first_each_pod_ends_redirected_and_nothing_gets_past() {
    let (runs, first) = (number("NOBYPASS_TEST_CHURN_RUNS", 100), number("NOBYPASS_TEST_CHURN_SEED", 1));
    let within = number("NOBYPASS_TEST_CHURN_MS", 600);
    let node = Node::new().unwrap();
    let entry = node.base_dir().join("entry.json");
    fs::write(&entry, node.mesh_entry().to_string()).unwrap();
    for seed in first..first + runs {
        let run = std::panic::AssertUnwindSafe(|| one(&node, &entry, seed, within));
        if let Err(panic) = std::panic::catch_unwind(run) {
            println!(
                "seed {seed} failed: {:?}\nagain: NOBYPASS_TEST_CHURN_SEED={seed} NOBYPASS_TEST_CHURN_RUNS=1 \
                 NOBYPASS_TEST_CHURN_MS={within}",
                Plan::new(seed, within)
            );
            std::panic::resume_unwind(panic);
        }
    }
    node.stop().unwrap();
}
