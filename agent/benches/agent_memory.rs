//! What an agent with nothing to do takes, with and without pods: `cargo bench -p nobypass --features kernel-tests --bench
//! agent_memory`, as root. The pods are redirected and unknown to any runtime; an API server knows them, and 5,000 on other
//! nodes. After `--`: `--pods <n>`, `--seconds <n>`.

#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a benchmark")]

#[path = "../tests/support"]
mod support {
    #![allow(dead_code, reason = "each target uses its part")]
    pub mod agent;
    pub mod crowd;
    pub mod machine;
    pub mod mounts;
}

use std::fs;
use std::process::ExitCode;
use std::time::Duration;

use nobypass_testkit::apiserver::{ApiServer, Pod as Object};
use nobypass_testkit::figures::{Figure, argument};
use nobypass_testkit::wait;
use support::agent::Agent;
use support::crowd::{self, Member, NODE};
use support::machine::Machine;

/// The most that may be resident, kB, and the most CPU time of a second, ms.
const PROMISE: (u64, f64) = (25_000, 2.0);
/// `USER_HZ`, 100 on every architecture: the unit of times in proc_pid_stat(5).
const TICK_MS: u64 = 10;
/// Pods of other nodes.
const ELSEWHERE: u64 = 5_000;

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

/// Tells the figures, and says whether the promises are kept.
fn report(agent: &Agent, pods: usize, seconds: u64) -> bool {
    let before = cpu_ms(agent.pid());
    #[expect(clippy::disallowed_methods, reason = "an agent is idle while nobody asks it anything")]
    std::thread::sleep(Duration::from_secs(seconds));
    let cpu = (cpu_ms(agent.pid()) - before) as f64 / seconds as f64;
    let [resident, own, peak] = ["VmRSS", "RssAnon", "VmHWM"].map(|key| status(agent.pid(), key));
    let (memory, time) = PROMISE;
    let mb = |kb: u64| kb as f64 / 1000.0;
    let figure = format!(
        "{:.1} MB, of which {:.1} MB its own; {:.0} MB at most since its start",
        mb(resident),
        mb(own),
        mb(peak)
    );
    let memory_kept = Figure::new(format!("resident memory of an idle agent, {pods} pods"), figure)
        .promised(format!("≤ {} MB", memory / 1000), resident <= memory)
        .tell()
        .unwrap();
    let time_kept =
        Figure::new(format!("CPU time of an idle agent, {pods} pods"), format!("{cpu:.1} ms a second"))
            .promised(format!("≤ {time} ms a second"), cpu <= time)
            .tell()
            .unwrap();
    memory_kept && time_kept
}

fn main() -> ExitCode {
    let (pods, seconds) = (argument("--pods", 250).unwrap(), argument("--seconds", 20).unwrap());
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
    let (_world, net) = crowd::network();
    let made: Vec<Member> = (0..pods).map(|n| crowd::member(&server, &machine, &net, n)).collect();
    wait::until("all pods' entries", wait::HANG, || {
        made.iter().all(|member| maps.policy(member.pod.id().unwrap()).is_some()).then_some(())
    })
    .unwrap();
    agent.until("all pods asked", |agent| (crowd::redirected(agent) >= made.len()).then_some(()));
    kept &= report(&agent, made.len(), seconds);
    if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
