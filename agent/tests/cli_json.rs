//! What `-o json` prints is what deploy/json.md says: for commands that need no node. The others are in `node_image`.

#![expect(clippy::unwrap_used, clippy::panic, reason = "the helpers of a test may panic as the test may")]

mod support {
    #![allow(dead_code, reason = "each test target uses its part")]
    pub mod shape;
    pub mod yaml;
}

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use support::shape::{self, differences};

fn nobypass(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nobypass"));
    command.args(words).env_clear();
    command
}

fn json(command: &mut Command) -> Value {
    let out = command.args(["-o", "json"]).output().unwrap();
    serde_json::from_slice(&out.stdout).unwrap_or_else(|error| panic!("{command:?}: {error}: {out:?}"))
}

fn help(words: &[&str]) -> String {
    String::from_utf8(nobypass(words).arg("--help").output().unwrap().stdout).unwrap()
}

/// The sub-commands that a `--help` names.
fn below(help: &str) -> Vec<String> {
    let Some((_, commands)) = help.split_once("\nCommands:\n") else { return Vec::new() };
    let commands = commands.split("\n\n").next().unwrap().lines();
    let names = commands.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    names.filter(|name| !name.is_empty() && *name != "help").map(str::to_owned).collect()
}

/// Every command that does something, and its `--help`.
fn commands() -> Vec<(String, String)> {
    let mut all = Vec::new();
    for name in below(&help(&[])) {
        let text = help(&[&name]);
        let subs = below(&text);
        if subs.is_empty() {
            all.push((name, text));
        } else {
            all.extend(subs.iter().map(|sub| (format!("{name} {sub}"), help(&[&name, sub]))));
        }
    }
    assert!(all.len() > 15, "{all:?}");
    all
}

#[test]
fn each_command_that_prints_json_has_its_table() {
    let prints =
        commands().into_iter().filter(|(_, help)| help.contains("- json:") && help.contains("--output"));
    let of_pod = |help: &str| help.contains(" <NAMESPACE/POD>\n");
    let names = prints.map(|(name, help)| if of_pod(&help) { format!("{name} NAMESPACE/POD") } else { name });
    assert_eq!(names.collect::<BTreeSet<_>>(), shape::commands());
}

/// A directory with every kind of file that the CNI half tells apart.
fn net_d() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let entry = r#"{"type":"linkerd-cni"}"#;
    for (name, text) in [
        ("10-a.conflist", r#"{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"bridge"}]}"#.to_owned()),
        ("20-b.conf", r#"{"cniVersion":"1.0.0","name":"b","type":"bridge"}"#.to_owned()),
        ("30-c.conflist", "{".to_owned()),
        (
            "40-d.conflist",
            format!(r#"{{"cniVersion":"1.0.0","name":"d","plugins":[{{"type":"bridge"}},{entry}]}}"#),
        ),
    ] {
        fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn in_dir(words: &[&str], dir: &Path) -> Command {
    let mut command = nobypass(words);
    command.arg("--cni-dir").arg(dir).arg("--cni-bin-dir").arg(dir.join("bin"));
    command
}

#[test]
fn the_tables_say_what_commands_print() {
    let dir = net_d();
    let bad = dir.path().join("policy.yaml");
    fs::write(&bad, "apiVersion: nobypass.dev/v1alpha1\nmode: strict\n").unwrap();
    let plan = json(nobypass(&["cni", "plan", "--cni-dir"]).arg(dir.path()));
    let actions: BTreeSet<&str> =
        plan.as_array().unwrap().iter().map(|step| step["action"].as_str().unwrap()).collect();
    assert_eq!(actions, ["convert", "leave", "refuse", "write"].into(), "every kind");
    let all = ["cni", "uninstall", "--cni-mode", "install", "--all", "--cni-plugin", "linkerd-cni"];
    let mut found = differences("cni plan", &plan);
    for (name, said) in [
        ("cni uninstall", json(&mut in_dir(&all, dir.path()))),
        ("policy check", json(nobypass(&["policy", "check", "/nonexistent/policy.yaml"]).arg(&bad))),
        ("preflight", json(&mut nobypass(&["preflight"]))),
    ] {
        found.extend(differences(name, &said));
    }
    assert_eq!(found, [""; 0]);
}

#[test]
fn the_readme_has_the_exit_codes_that_each_help_has() {
    let readme = fs::read_to_string(support::yaml::repository().join("README.md")).unwrap();
    let table = readme.split("| command | what it does | exit codes beside 0 |").nth(1).unwrap();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let mut known = BTreeSet::new();
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").collect();
        let number = |text: &str| text.split([' ', ';']).filter_map(|word| word.parse().ok()).collect();
        let said: BTreeSet<u8> = number(cells.last().unwrap());
        let command = cells[0].split('`').nth(1).unwrap();
        let lower = |word: &&str| word.starts_with(|c: char| c.is_ascii_lowercase());
        let words: Vec<&str> = command.split([' ', '[']).take_while(lower).collect();
        known.insert(words.join(" "));
        let help = help(&words);
        let codes = help.split("\nExit codes:\n").nth(1).unwrap_or_default();
        let codes: BTreeSet<u8> = codes
            .lines()
            .map_while(|line| line.strip_prefix("  ")?.split(' ').next()?.parse().ok())
            .filter(|code| *code != 0)
            .collect();
        assert_eq!(codes, said, "{command}: its --help (left) and the README (right)");
    }
    let all: BTreeSet<String> = commands().into_iter().map(|(name, _)| name).collect();
    assert_eq!(known, all, "every command is in the table");
}
