//! Completions and man pages, as packagers make them.

#![expect(clippy::unwrap_used, reason = "the helpers of a test may panic as the test may")]

use std::fs;
use std::process::{Command, Output};

fn nobypass(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_nobypass")).args(args).output().unwrap()
}

#[test]
fn every_shell_has_completions_that_know_commands_and_values() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let out = nobypass(&["completions", shell]);
        let text = String::from_utf8(out.stdout).unwrap();
        assert!(out.status.success(), "{shell}");
        for word in ["preflight", "policy", "--unknown-pods"] {
            // fish writes long options without their dashes.
            let word = if shell == "fish" { word.trim_start_matches('-') } else { word };
            assert!(text.contains(word), "{shell}: {word}");
        }
        assert!(!text.contains("canary"), "{shell} offers what is not for users");
    }
    assert_eq!(nobypass(&["completions", "csh"]).status.code(), Some(64));
}

#[test]
fn bash_accepts_its_script() {
    let script = nobypass(&["completions", "bash"]).stdout;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("nobypass.bash");
    fs::write(&file, script).unwrap();
    let out = Command::new("bash").arg("-n").arg(&file).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn every_command_has_a_man_page() {
    let dir = tempfile::tempdir().unwrap();
    let out = nobypass(&["man", dir.path().to_str().unwrap()]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    for (page, words) in [
        ("nobypass.1", &["status", "Exit codes"][..]),
        ("nobypass-agent.1", &["NOBYPASS_POLICY", "enforce"]),
        ("nobypass-cni-uninstall.1", &["kubeconfig"]),
        ("nobypass-policy-check.1", &["policy"]),
    ] {
        let text =
            fs::read_to_string(dir.path().join(page)).unwrap_or_else(|error| panic!("{page}: {error}"));
        for word in words {
            assert!(text.contains(word), "{page}: {word} is not in {text}");
        }
    }
    assert!(!dir.path().join("nobypass-canary.1").exists());

    let nowhere = nobypass(&["man", "/nonexistent/man"]);
    assert_eq!(nowhere.status.code(), Some(64));
    assert!(String::from_utf8_lossy(&nowhere.stderr).contains("/nonexistent/man"));
}
