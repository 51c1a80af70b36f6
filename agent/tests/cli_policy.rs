//! `nobypass policy` and `nobypass explain` as pipelines and people meet them, without any privilege.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the helpers of a test may panic as the test may"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const BIN: &str = env!("CARGO_BIN_EXE_nobypass");
const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/policy.example.yaml");
const SCHEMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/policy.schema.json");

/// Exit code, standard output and standard error.
fn run(args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(BIN);
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("NOBYPASS_")) {
        command.env_remove(name);
    }
    let output = command.args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn file(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn the_example_is_valid() {
    assert_eq!(run(&["policy", "check", EXAMPLE]), (Some(0), format!("{EXAMPLE}: valid\n"), String::new()));
}

#[test]
fn every_problem_is_a_line_with_its_place_and_the_exit_code_says_that_there_is_one() {
    let dir = tempfile::tempdir().unwrap();
    let bad = file(dir.path(), "bad.yaml", "apiVersion: nobypass.dev/v1alpha1\nmod: audit\nholdMs: 0\n");
    let bad = bad.display().to_string();
    let (code, out, err) = run(&["policy", "check", EXAMPLE, &bad]);
    assert_eq!((code, err.as_str()), (Some(1), ""), "{out}");
    let expected = format!(
        "{EXAMPLE}: valid\n{bad}:2:1: \"mod\" is not known; did you mean mode?\n{bad}:3:9: holdMs: 0 is not within 1 to 60000\n"
    );
    assert_eq!(out, expected);
    let (code, out, _) = run(&["policy", "check", "-o", "json", &bad]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (code, &json[0]["valid"], &json[0]["problems"][1]["line"]),
        (Some(1), &false.into(), &3.into())
    );
    assert_eq!(json[0]["problems"][1]["path"], "holdMs");
}

#[test]
fn what_cannot_be_read_is_a_wrong_argument() {
    let dir = tempfile::tempdir().unwrap();
    for (path, says) in [(dir.path().join("none"), "No such file"), (dir.path().to_owned(), "no file")] {
        let path = path.display().to_string();
        let (code, out, _) = run(&["policy", "check", &path]);
        assert!(code == Some(64) && out.contains(says) && out.contains(&path), "{code:?} {out}");
    }
    assert_eq!(run(&["policy", "check"]).0, Some(64));
}

#[test]
fn the_schema_is_the_one_that_editors_have() {
    assert_eq!(run(&["policy", "schema"]), (Some(0), fs::read_to_string(SCHEMA).unwrap(), String::new()));
}

#[test]
fn an_agent_that_starts_with_a_bad_policy_exits_64_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let bad = file(dir.path(), "bad.yaml", "mode: audit\n");
    let (code, _, err) = run(&["agent", "--policy", &bad.display().to_string()]);
    assert_eq!(code, Some(64), "{err}");
    let last = err.lines().last().unwrap();
    assert!(
        last.contains("--policy") && last.contains("apiVersion is missing") && last.contains("line 1"),
        "{err}"
    );
}

#[test]
fn without_agent_and_pins_explain_and_show_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let [socket, bpf] = ["agent.sock", "bpf"].map(|name| dir.path().join(name).display().to_string());
    let (code, out, err) = run(&["explain", "shop/cart-0", "--socket", &socket, "--bpf-dir", &bpf]);
    assert!(code == Some(69) && out.is_empty() && err.contains("no agent runs"), "{code:?} {err}");
    let (code, _, err) = run(&["policy", "show", "--socket", &socket]);
    assert!(code == Some(69) && err.contains("is it running"), "{code:?} {err}");
    let (code, _, err) = run(&["explain", "shop/cart 0", "--socket", &socket]);
    assert!(code == Some(64) && err.contains("NAMESPACE/NAME"), "{code:?} {err}");
}
