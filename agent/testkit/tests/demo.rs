//! The demo keeps its word, and leaves nothing behind, whatever happens to it.

#![expect(clippy::unwrap_used, reason = "the helpers of a test may panic as the test may")]

use std::path::{Path, PathBuf};
use std::process::Command;

use nobypass_testkit::proc::{self, Proc};
use nobypass_testkit::{bin, cgroup, wait};
use rustix::process::{Pid, Signal, kill_process};

/// In the environment of everything that a demo starts, but not in that of its containers.
const MARK: &str = "NOBYPASS_DEMO_TEST";

fn demo(mark: &str) -> Command {
    let mut command = Command::new(bin("demo").unwrap());
    command.env("NOBYPASS_BIN", bin("nobypass").unwrap()).env(MARK, mark);
    command
}

/// What the demo `pid` has left on the machine: cgroups in every hierarchy, its directory, processes.
fn leftovers(pid: u32, mark: &str) -> Vec<PathBuf> {
    let name = format!("nobypass-node-{pid}-");
    let mut dirs = cgroup::all_roots().unwrap();
    dirs.push(std::env::temp_dir());
    let entries = dirs.iter().flat_map(|dir| std::fs::read_dir(dir).unwrap().flatten());
    let mut left: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&name))
        .map(|entry| entry.path())
        .collect();
    let mark = format!("{MARK}={mark}");
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let marked = processes.filter(|process| {
        let read = |file| std::fs::read(process.join(file)).unwrap_or_default();
        let of_demo = read("environ").split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes());
        of_demo || String::from_utf8_lossy(&read("cgroup")).contains(&name)
    });
    // With its words, for whoever has to find out whose it is. One without any is dead, and waits for init to reap it: a
    // child of the agent that was killed, say.
    let words = |process: &Path| std::fs::read_to_string(process.join("cmdline")).unwrap_or_default();
    let living = marked.filter(|process| !words(process).is_empty());
    left.extend(living.map(|process| process.join(words(&process).replace(['\0', '/'], " "))));
    left
}

fn machine() -> (String, String) {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let devices = proc::check(
        {
            let mut ip = Command::new("ip");
            ip.args(["-o", "link"]);
            ip
        },
        "",
    );
    (mounts, devices.unwrap())
}

/// All lines up to the end, and how it ended.
fn finish(mut demo: Proc) -> (Vec<String>, std::process::ExitStatus) {
    let lines = std::iter::from_fn(|| demo.line(wait::LONG).ok()).collect();
    (lines, demo.wait(wait::LONG).unwrap())
}

#[test]
fn every_step_of_the_demo_is_observed_and_nothing_stays() {
    let before = machine();
    let demo = proc::spawn(demo("whole")).unwrap();
    let pid = demo.pid();
    let (lines, status) = finish(demo);
    let text = lines.join("\n");
    assert!(status.success(), "{status}\n{text}");
    assert_eq!(text.matches('✓').count(), 8, "{text}");
    assert!(!text.contains('✗') && !text.contains('\x1b'), "{text}");
    assert!(lines.len() <= 100, "{} lines are too many for a newcomer", lines.len());
    // It says so itself, so without waiting.
    assert_eq!(leftovers(pid, "whole"), [""; 0].map(PathBuf::from));
    assert_eq!(machine(), before);
}

#[test]
fn an_interrupted_demo_leaves_nothing() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let before = machine();
        let mark = format!("interrupted-{code}");
        let demo = proc::spawn(demo(&mark)).unwrap();
        let pid = demo.pid();
        // By then the agent runs, its programs are attached, and a pod exists.
        while !demo.line(wait::LONG).unwrap().contains("events -f") {}
        assert!(!leftovers(pid, &mark).is_empty());
        kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), signal).unwrap();
        let (lines, status) = finish(demo);
        assert_eq!(status.code(), Some(code), "{lines:?}");
        assert!(!lines.iter().any(|line| line.contains('✗')), "{lines:?}");
        assert_eq!(leftovers(pid, &mark), [""; 0].map(PathBuf::from));
        assert_eq!(machine(), before);
    }
}

#[test]
fn a_demo_that_fails_says_so_and_leaves_nothing() {
    let mut demo = demo("broken");
    demo.env("NOBYPASS_BIN", "/bin/false");
    let demo = proc::spawn(demo).unwrap();
    let pid = demo.pid();
    let (lines, status) = finish(demo);
    assert_eq!(status.code(), Some(1));
    assert!(lines.iter().any(|line| line.contains("✗ the agent ended")), "{lines:?}");
    assert_eq!(leftovers(pid, "broken"), [""; 0].map(PathBuf::from));
}
