//! What an agent with nothing to do takes, with and without pods: `cargo bench -p nobypass --features kernel-tests --bench
//! agent_memory`, as root. The pods are cgroups without processes, unknown to any runtime; an API server knows them, and
//! 5,000 on other nodes. After `--`: `--pods <n>`, `--seconds <n>`.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a benchmark"
)]

#[path = "../tests/support"]
mod support {
    #![allow(dead_code, reason = "each target uses its part")]
    pub mod agent;
    pub mod machine;
    pub mod mounts;
}

use std::fs;
use std::process::ExitCode;
use std::time::Duration;

use nobypass_testkit::apiserver::{ApiServer, Pod as Object};
use nobypass_testkit::cgroup::{Pod, Qos};
use nobypass_testkit::wait;
use support::agent::Agent;
use support::machine::Machine;

/// The most that may be resident, kB, and the most CPU time of a second, ms.
const PROMISE: (u64, f64) = (25_000, 2.0);
/// `USER_HZ`, 100 on every architecture: the unit of times in proc_pid_stat(5).
const TICK_MS: u64 = 10;
/// Pods of other nodes.
const ELSEWHERE: u64 = 5_000;
const NODE: &str = "n1";

/// A line of `/proc/<pid>/status`, kB.
fn status(pid: u32, key: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.unwrap().trim().trim_end_matches(" kB").parse().unwrap()
}

/// User and system time so far, ms.
fn cpu_ms(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, after_name) = text.rsplit_once(')').unwrap();
    let ticks = |nth: usize| after_name.split_whitespace().nth(nth).unwrap().parse::<u64>().unwrap();
    (ticks(11) + ticks(12)) * TICK_MS
}

/// Prints a line, and says whether the promise is kept.
fn report(agent: &Agent, pods: usize, seconds: u64) -> bool {
    let before = cpu_ms(agent.pid());
    #[expect(clippy::disallowed_methods, reason = "an agent is idle while nobody asks it anything")]
    std::thread::sleep(Duration::from_secs(seconds));
    let cpu = (cpu_ms(agent.pid()) - before) as f64 / seconds as f64;
    let [resident, own, peak] = ["VmRSS", "RssAnon", "VmHWM"].map(|key| status(agent.pid(), key));
    println!(
        "{pods:>5} pods: resident {resident} kB (own {own} kB, peak {peak} kB), CPU {cpu:.1} ms a second of {seconds}"
    );
    resident <= PROMISE.0 && cpu <= PROMISE.1
}

fn number(name: &str, default: u64) -> u64 {
    let text = std::env::args().skip_while(|arg| arg != name).nth(1);
    text.map_or(default, |text| text.parse().unwrap())
}

fn main() -> ExitCode {
    let (pods, seconds) = (number("--pods", 250), number("--seconds", 20));
    let machine = Machine::new();
    let server = ApiServer::start().unwrap();
    let kubeconfig = machine.home.path().join("kubeconfig");
    server.write_kubeconfig(&kubeconfig).unwrap();
    for n in 0..ELSEWHERE {
        server.create(Object::new("elsewhere", &format!("p{n}")).node("another").build()).unwrap();
    }
    let kubeconfig = kubeconfig.display().to_string();
    let api = ["--pods", "both", "--node-name", NODE, "--kubeconfig", &kubeconfig];
    let agent = machine.launch().args(api).start().attached();
    let maps = machine.maps();
    let mut kept = report(&agent, 0, seconds);
    let made: Vec<Pod> = (0..pods)
        .map(|n| {
            server.create(object(n)).unwrap();
            pod(&machine, n)
        })
        .collect();
    wait::until("all pods' entries", wait::HANG, || {
        made.iter().all(|pod| maps.policy(pod.id().unwrap()).is_some()).then_some(())
    })
    .unwrap();
    agent.until("all pods in its list", |agent| {
        let status = agent.status();
        let known = status["pods"].as_array()?.iter().filter(|pod| pod["kind"] == "meshed").count();
        (known >= made.len()).then_some(())
    });
    kept &= report(&agent, made.len(), seconds);
    println!("promised: resident ≤ {} kB, CPU ≤ {} ms a second", PROMISE.0, PROMISE.1);
    if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn uid(n: u64) -> String {
    format!("2c48913c-b29f-11e7-9350-{n:012}")
}

/// A meshed pod as large as they are in life: some 15 kB of JSON.
fn object(n: u64) -> serde_json::Value {
    let mut pod = Object::new("shop", &format!("web-{n}"))
        .node(NODE)
        .uid(&uid(n))
        .annotation("linkerd.io/proxy-version", "edge-26.8.1")
        .annotation("linkerd.io/trust-root-sha256", &"ab".repeat(32))
        .annotation("config.linkerd.io/skip-outbound-ports", "25,587,3306,4444,5432,6379,9300,11211")
        .annotation("kubectl.kubernetes.io/last-applied-configuration", &"{\"kind\":\"Pod\"}".repeat(200))
        .init_container("linkerd-network-validator", "l:1", false)
        .container("linkerd-proxy", "l:1")
        .running("linkerd-proxy", &format!("containerd://{n:064x}"));
    for k in 0..60 {
        pod = pod.annotation(&format!("example.com/noise-{k}"), &"x".repeat(100));
    }
    pod.build()
}

fn pod(machine: &Machine, n: u64) -> Pod {
    let pod = machine.scratch.pod(Qos::Burstable, &uid(n)).unwrap();
    pod.container(&format!("{n:064x}")).unwrap();
    pod
}
