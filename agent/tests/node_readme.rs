//! What README.md shows of the program's output. `NOBYPASS_RECORD=1 cargo xtask test --tier node -- readme_` writes it anew.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the helpers of a test may panic as the test may"
)]

mod support {
    #![allow(dead_code, reason = "each test target uses its part")]
    pub mod agent;
    pub mod capture;
    pub mod node;
    pub mod yaml;
}

use std::fs::{self, File};
use std::process::Command;

use nobypass_testkit::{proc, wait};
use support::agent::{Agent, BIN, run};
use support::capture;
use support::node::{connect, launch, node, recognised, unprotected};

/// What `nobypass` prints with these words.
fn said(agent: &Agent, words: &[&str]) -> String {
    let mut command = Command::new(BIN);
    command.args(words).arg("--socket").arg(agent.socket());
    run(command).out
}

#[test]
fn readme_shows_the_demo_as_it_is() {
    let mut demo = Command::new(nobypass_testkit::bin("demo").unwrap());
    demo.env("NOBYPASS_BIN", BIN);
    let out = proc::output(demo, "", wait::LONG).unwrap();
    let printed = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success(), "{printed}\n{}", String::from_utf8_lossy(&out.stderr));
    capture::check("demo", &printed);
}

#[test]
fn readme_shows_the_commands_as_they_are() {
    let node = node();
    let early = unprotected(&node, "early");
    let agent = launch(&node).args(["--mode", "enforce"]).start().ready();
    recognised(&agent, &early);

    let mut follow = Command::new(BIN);
    let told = node.base_dir().join("events.log");
    follow.args(["events", "-f", "--socket"]).arg(agent.socket()).stderr(File::create(&told).unwrap());
    let events = proc::spawn(follow).unwrap();
    // Those who follow hear only of what comes after they were heard.
    agent.until("the follower", |_| fs::read_to_string(&told).unwrap().contains("waiting").then_some(()));
    assert_eq!(connect(&node, &early, "app").answer(), None);
    let event = events.line(wait::HANG).unwrap();
    capture::check("log", &agent.line(&["WARN", "a meshed pod's connection bypasses its proxy"]));
    capture::check("events", &event);
    drop(events);
    node.write_conflist(true).unwrap();
    let late = unprotected(&node, "late");
    recognised(&agent, &late);
    agent.until("redirection", |_| (connect(&node, &late, "app").answer() == Some("mesh")).then_some(()));
    let status = agent.until("the verdicts", |agent| {
        let said = said(agent, &["status"]);
        (said.contains("bypassing") && said.contains("redirected")).then_some(said)
    });
    capture::check("status", &status);
    capture::check("probe", &said(&agent, &["probe", "default/late"]));
    capture::check("explain", &said(&agent, &["explain", "default/early"]));
}

#[test]
fn readme_shows_nothing_else() {
    assert_eq!(capture::names(), ["demo", "probe", "log", "events", "status", "explain"]);
}
