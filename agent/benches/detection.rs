//! How long after a bypassing SYN its counter on `/metrics` has moved and its line is in the log: `cargo bench -p nobypass
//! --features kernel-tests --bench detection`, as root. The kernel's own time of the SYN is what the clock starts at. After
//! `--`: `--bypasses <n>`.

#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a benchmark")]

#[path = "../tests/support"]
mod support {
    #![allow(dead_code, reason = "each target uses its part")]
    pub mod agent;
    pub mod machine;
    pub mod mounts;
}

use std::process::ExitCode;
use std::time::Instant;

use nobypass::sys::clock::monotonic_ns;
use nobypass_common::abi::PodPolicy;
use nobypass_common::ids::{PodKind, V4};
use nobypass_testkit::cgroup::Qos;
use nobypass_testkit::figures::{Figure, Samples, argument};
use nobypass_testkit::netns::{FAR4, world_with_pod};
use nobypass_testkit::traffic::Traffic;
use nobypass_testkit::wait;
use support::agent::Agent;
use support::machine::Machine;

const PORT: u16 = 8080;
/// The most that 99 of 100 may take, ms.
const PROMISE: f64 = 20.0;
/// Lines that a pod may log in a short time; then it is another pod's turn.
const LINES: u64 = 5;

fn lines(agent: &Agent) -> usize {
    agent.log().matches("a meshed pod's connection bypasses its proxy").count()
}

fn main() -> ExitCode {
    let bypasses: u64 = argument("--bypasses", 300).unwrap();
    let machine = Machine::new();
    let (world, net) = world_with_pod("detection").unwrap();
    let _server = Traffic::new().netns(world.far()).server(&[PORT]).unwrap();
    let agent = machine.launch().args(["--event-rate", "100000"]).start().attached();
    let mut maps = machine.maps();
    let (mut counted, mut logged) = (Vec::new(), Vec::new());
    for n in 0..bypasses.div_ceil(LINES) {
        let pod = machine.scratch.pod(Qos::Burstable, &format!("2c48913c-b29f-11e7-9350-{n:012}")).unwrap();
        let app = pod.container(&"a".repeat(64)).unwrap();
        let id = pod.id().unwrap();
        let known = wait::until("the pod's entry", wait::HANG, || maps.policy(id)).unwrap();
        maps.set_policy(id, &PodPolicy { kind: PodKind::Meshed.code(), ..known }).unwrap();
        let traffic = Traffic::new().netns(&net.ns).cgroup(&app);
        for _ in 0..LINES {
            // Of the node: no runtime has named the pod.
            let sum =
                |agent: &Agent| agent.metrics().sum("kernel_counts_total", &[("counter", "not_redirected")]);
            let (sum_before, lines_before) = (sum(&agent), lines(&agent));
            std::thread::scope(|scope| {
                scope.spawn(|| traffic.run(&[&"tcp4", &FAR4, &PORT]).unwrap());
                let (mut count_at, mut line_at) = (0, 0);
                let begin = Instant::now();
                // Without a pause, which would be measured too.
                while count_at == 0 || line_at == 0 {
                    if line_at == 0 && lines(&agent) > lines_before {
                        line_at = monotonic_ns();
                    }
                    if count_at == 0 && sum(&agent) > sum_before {
                        count_at = monotonic_ns();
                    }
                    assert!(begin.elapsed() < wait::HANG, "no sign of it: {}", agent.log());
                }
                let syn = maps.counters(id).unwrap().bypass_ns[V4];
                assert!(syn > 0, "the kernel has seen it");
                counted.push((count_at - syn) as f64 / 1e6);
                logged.push((line_at - syn) as f64 / 1e6);
            });
        }
    }
    agent.kill();
    let (counted, logged) = (Samples::new(counted), Samples::new(logged));
    let kept = counted.at(99) <= PROMISE && logged.at(99) <= PROMISE;
    let show = |samples: &Samples| format!("p50 {:.1} ms, p99 {:.1} ms", samples.median(), samples.at(99));
    let figure = format!("{} / {}", show(&counted), show(&logged));
    let kept = Figure::new("a bypassing SYN → its counter on `/metrics` / its line in the log", figure)
        .promised(format!("p99 ≤ {PROMISE} ms"), kept)
        .tell()
        .unwrap();
    if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
