//! What the programs cost a packet, over a program that does nothing: `cargo bench -p nobypass --features kernel-tests
//! --bench kernel_cost`, as root.
//!
//! Each round runs every case and, right before it, the empty program; the figures are the differences. After `--`:
//! `--against <object>` puts another build of the object into the same rounds, `--rounds <n>` and `--repeat <n>`.
//! A median above its promise is exit code 1.

#![expect(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a benchmark")]

#[path = "../tests/support"]
mod support {
    #![allow(dead_code, reason = "each target uses its part")]
    pub mod lab;
    pub mod packets;
}

use std::os::fd::{AsFd as _, OwnedFd};
use std::process::ExitCode;

use nobypass_common::abi::{CONFIG_JUDGE_NON_TCP, PodPolicy};
use nobypass_common::ids::{Counter, PodKind};
use nobypass_testkit::bpf::{Skb, empty_program, test_run};
use nobypass_testkit::figures::{Figure, argument};
use support::lab::{DEVICE, Lab, with_lab};
use support::packets::{ACK, SYN, tcp, udp, v4, v6};

/// How many pods the maps hold.
const PODS: [u32; 3] = [10, 1_000, 10_000];

/// One kind of packet, of one kind of pod.
struct Case {
    name: &'static str,
    packet: Vec<u8>,
    kind: PodKind,
    flags: u32,
    /// What is counted, to be sure that the right thing is measured.
    counts: Option<Counter>,
    /// The most that it may cost, ns.
    promise: Option<i64>,
}

fn cases() -> Vec<Case> {
    let case = |name, packet, kind, counts, promise| Case { name, packet, kind, flags: 0, counts, promise };
    let non_tcp = |case| Case { flags: CONFIG_JUDGE_NON_TCP, ..case };
    let (meshed, exempt) = (PodKind::Meshed, PodKind::Exempt);
    let (not_judged, raw) = (Some(Counter::NotJudged), Some(Counter::BypassRaw));
    // As long as a DNS question or a QUIC packet at least is.
    let datagram = [udp(5000), vec![0; 24]].concat();
    vec![
        case("established TCP, IPv4", v4(6, &tcp(ACK, 8080)), meshed, None, Some(15)),
        case("established TCP, IPv6", v6(6, &tcp(ACK, 8080)), meshed, None, Some(15)),
        case("new connection, IPv4", v4(6, &tcp(SYN, 8080)), meshed, raw, Some(150)),
        case("new connection, IPv6", v6(6, &tcp(SYN, 8080)), meshed, raw, Some(150)),
        case("new connection, pod not meshed", v4(6, &tcp(SYN, 8080)), exempt, not_judged, Some(50)),
        case(
            "new connection, unknown pod",
            v4(6, &tcp(SYN, 8080)),
            PodKind::Unknown,
            Some(Counter::Unknown),
            None,
        ),
        case("UDP, not judged", v4(17, &datagram), meshed, None, None),
        case("UDP, not judged, IPv6", v6(17, &datagram), meshed, None, None),
        non_tcp(case("UDP, judged", v4(17, &datagram), meshed, Some(Counter::Udp), None)),
        non_tcp(case("UDP, judged, pod not meshed", v4(17, &datagram), exempt, None, None)),
    ]
}

const OUT: Skb = Skb { ifindex: DEVICE, mark: 0 };

fn prepare(lab: &mut Lab, case: &Case) {
    // No tokens: events would measure the ring buffer, and nobody reads it here.
    lab.set_config(|config| (config.flags, config.event_burst) = (case.flags, 0));
    let policy = PodPolicy { kind: case.kind.code(), ..lab.meshed() };
    lab.set_policy(lab.pod(), &policy);
}

/// Runs the case once and looks whether it is what its name says.
fn check(lab: &mut Lab, case: &Case) {
    prepare(lab, case);
    lab.clear();
    lab.run("nb_egress", &case.packet, OUT, 1).unwrap();
    let counted = lab.counted();
    let found = Counter::ALL.iter().find(|counter| counted[counter.code() as usize] == 1).copied();
    assert_eq!(found, case.counts, "{}", case.name);
}

/// Nanoseconds over the empty program.
fn cost(lab: &mut Lab, empty: &OwnedFd, case: &Case, repeat: u32) -> i64 {
    prepare(lab, case);
    let nothing = test_run(empty.as_fd(), &case.packet, OUT, repeat).unwrap().ns;
    let (_, ns) = lab.run("nb_egress", &case.packet, OUT, repeat).unwrap();
    i64::from(ns) - i64::from(nothing)
}

/// `--name value` of the command line.
fn option(name: &str) -> Option<String> {
    std::env::args().skip_while(|arg| arg != name).nth(1)
}

/// Prints the figures, and says whether every promise is kept.
fn measure(lab: &mut Lab, mut other: Option<&mut Lab>, rounds: u32, repeat: u32) -> bool {
    let mut kept = true;
    let (empty, cases) = (empty_program().unwrap(), cases());
    let mut medians = vec![Vec::new(); cases.len()];
    for pods in PODS {
        lab.fill(pods - 1);
        if let Some(other) = other.as_deref_mut() {
            other.fill(pods - 1);
        }
        let mut samples = vec![(Vec::new(), Vec::new()); cases.len()];
        for case in &cases {
            check(lab, case);
        }
        for _ in 0..rounds {
            for (case, (ours, theirs)) in cases.iter().zip(&mut samples) {
                ours.push(cost(lab, &empty, case, repeat));
                if let Some(other) = other.as_deref_mut() {
                    theirs.push(cost(other, &empty, case, repeat));
                }
            }
        }
        println!("{pods} pods, ns a packet over an empty program, {rounds} rounds of {repeat} packets");
        for (n, (case, (ours, theirs))) in cases.iter().zip(samples).enumerate() {
            medians[n].push(median(&ours));
            kept &= show(case, ours, theirs);
        }
    }
    for (case, medians) in cases.iter().zip(medians).filter(|(case, _)| case.promise.is_some()) {
        tell(case, &medians);
    }
    kept
}

fn median(samples: &[i64]) -> i64 {
    Spread::of(samples.to_vec()).median
}

/// The figures of all numbers of pods.
fn tell(case: &Case, medians: &[i64]) {
    let list = medians.iter().map(ToString::to_string).collect::<Vec<_>>().join(" / ");
    let pods = PODS.map(|pods| pods.to_string()).join(" / ");
    let figure = Figure::new(
        format!("{}, over an empty program, with {pods} pods in the maps", case.name),
        format!("{list} ns (medians)"),
    );
    let figure = match case.promise {
        Some(most) => figure.promised(format!("≤ {most} ns"), medians.iter().all(|ns| *ns <= most)),
        None => figure,
    };
    figure.tell().unwrap();
}

/// Prints a case's figures, and says whether its promise is kept.
fn show(case: &Case, ours: Vec<i64>, theirs: Vec<i64>) -> bool {
    let (ours, theirs) = (Spread::of(ours), (!theirs.is_empty()).then(|| Spread::of(theirs)));
    let against = theirs.map_or_else(String::new, |theirs| format!("   against {theirs}"));
    let kept = case.promise.is_none_or(|most| ours.median <= most);
    let broken = if kept { "" } else { ": BROKEN" };
    let promise = case.promise.map_or_else(String::new, |most| format!("   promised ≤ {most}{broken}"));
    println!("  {:<32} {ours}{against}{promise}", case.name);
    kept
}

/// Samples in short.
struct Spread {
    median: i64,
    least: i64,
    most: i64,
}

impl Spread {
    fn of(mut samples: Vec<i64>) -> Self {
        samples.sort_unstable();
        Self { median: samples[samples.len() / 2], least: samples[0], most: samples[samples.len() - 1] }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:>4}  ({}..{})", self.median, self.least, self.most)
    }
}

fn main() -> ExitCode {
    let (rounds, repeat) = (argument("--rounds", 9).unwrap(), argument("--repeat", 1_000_000).unwrap());
    let against = option("--against").map(|path| {
        let bytes = std::fs::read(&path);
        bytes.unwrap_or_else(|error| panic!("{path}: {error}"))
    });
    let kept = with_lab(nobypass::bpf::OBJECT, |lab| {
        let mut other = against.map(|object| lab.beside(&object));
        measure(lab, other.as_mut(), rounds, repeat)
    });
    if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
