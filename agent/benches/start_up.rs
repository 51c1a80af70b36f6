//! How long an agent takes from its start until it knows the pods that are there: `cargo bench -p nobypass --features
//! kernel-tests --bench start_up`, as root. The first start attaches the programs; later ones adopt what a killed agent
//! left. After `--`: `--pods <n>`, `--starts <n>`.

#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a benchmark")]

#[path = "../tests/support"]
mod support {
    #![allow(dead_code, reason = "each target uses its part")]
    pub mod agent;
    pub mod crowd;
    pub mod machine;
    pub mod mounts;
}

use std::time::Instant;

use nobypass_testkit::apiserver::ApiServer;
use nobypass_testkit::figures::{Figure, Samples, argument};
use support::crowd::{self, Member, NODE};
use support::machine::Machine;

fn main() {
    let (pods, starts) = (argument("--pods", 250).unwrap(), argument("--starts", 10).unwrap());
    let machine = Machine::new();
    let server = ApiServer::start().unwrap();
    let kubeconfig = machine.home.path().join("kubeconfig");
    server.write_kubeconfig(&kubeconfig).unwrap();
    let kubeconfig = kubeconfig.display().to_string();
    let (_world, net) = crowd::network();
    let made: Vec<Member> = (0..pods).map(|n| crowd::member(&server, &machine, &net, n)).collect();
    let mut took: Vec<[f64; 3]> = (0..=starts)
        .map(|_| {
            let begin = Instant::now();
            let ms = || begin.elapsed().as_secs_f64() * 1000.0;
            let api = ["--pods", "both", "--node-name", NODE, "--kubeconfig", &kubeconfig];
            let agent = machine.launch().args(api).start().attached();
            let attached = ms();
            agent.until("all pods", |agent| (crowd::meshed(agent) >= made.len()).then_some(()));
            let known = ms();
            agent.until("all asked", |agent| (crowd::redirected(agent) >= made.len()).then_some(()));
            let asked = ms();
            agent.kill();
            [attached, known, asked]
        })
        .collect();
    let first = took.remove(0);
    let again = [0, 1, 2].map(|n| Samples::new(took.iter().map(|took| took[n]).collect()).median());
    let show = |[attached, known, asked]: [f64; 3]| format!("{attached:.0} / {known:.0} / {asked:.0} ms");
    let what = format!(
        "the agent's start with {pods} pods: programs in effect and proven / all pods recognised / all of them asked and \
         found redirected"
    );
    let figure = format!(
        "{}; after a kill, with its programs in effect all the time, p50 {}",
        show(first),
        show(again)
    );
    Figure::new(what, figure).tell().unwrap();
}
