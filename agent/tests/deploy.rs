//! What is in deploy/ against the program that it deploys: no tool but this repository is needed.

#![expect(clippy::unwrap_used, clippy::panic, reason = "the helpers of a test may panic as the test may")]

mod support {
    #![allow(dead_code, reason = "each test target uses its part")]
    pub mod yaml;
}

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use nobypass::cluster::access::{Feature, Permission};
use serde_json::Value;
use support::yaml::{documents, repository};

fn read(path: &str) -> String {
    let path = repository().join("deploy").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn help(command: &str) -> String {
    let out = Command::new(env!("CARGO_BIN_EXE_nobypass")).args([command, "--help"]).output().unwrap();
    String::from_utf8(out.stdout).unwrap()
}

fn templates() -> String {
    let dir = repository().join("deploy/chart/templates");
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.iter().map(|file| fs::read_to_string(file).unwrap()).collect()
}

#[test]
fn every_variable_of_the_chart_is_one_of_the_agents() {
    let help = help("agent");
    let text = templates();
    let names: BTreeSet<&str> = text
        .split("- name: ")
        .skip(1)
        .filter_map(|rest| rest.split_whitespace().next())
        .filter(|name| name.starts_with("NOBYPASS_"))
        .collect();
    assert!(names.len() > 8, "{names:?}");
    for name in names {
        assert!(help.contains(&format!("[env: {name}=")), "{name} is no variable of `nobypass agent`");
    }
}

/// Variables of the agent that the chart leaves alone.
const NOT_VALUES: [&str; 15] = [
    // policy.yaml says it, while agents run.
    "NOBYPASS_EVENT_RATE",
    "NOBYPASS_HOLD_MS",
    "NOBYPASS_INBOUND",
    "NOBYPASS_MODE",
    "NOBYPASS_NON_TCP",
    "NOBYPASS_PROFILES",
    "NOBYPASS_QUIC",
    "NOBYPASS_UNKNOWN_PODS",
    // Given by the pod itself.
    "NOBYPASS_BPF_DIR",
    "NOBYPASS_KUBECONFIG",
    "NOBYPASS_POD_PARENT",
    "NOBYPASS_SOCKET",
    // DEST_CNI_NET_DIR and DEST_CNI_BIN_DIR say it.
    "NOBYPASS_CNI_BIN_DIR",
    "NOBYPASS_CNI_DIR",
    // The mesh's entry says which plugin it is.
    "NOBYPASS_CNI_PLUGIN",
];

#[test]
fn every_variable_of_the_agent_is_a_value_or_has_its_reason() {
    let (help, text) = (help("agent"), templates());
    let all: BTreeSet<&str> = help
        .split("[env: ")
        .skip(1)
        .filter_map(|rest| rest.split(['=', ']']).next())
        .filter(|name| name.starts_with("NOBYPASS_"))
        .collect();
    assert!(all.len() > 30, "{all:?}");
    for name in &all {
        let set = text.contains(&format!("- name: {name}\n"));
        assert!(set != NOT_VALUES.contains(name), "{name}: a value or in NOT_VALUES, one of both");
    }
    for name in NOT_VALUES {
        assert!(all.contains(name), "{name} is no variable of `nobypass agent`");
    }
}

#[test]
fn the_charts_permissions_are_those_that_the_agent_asks_for() {
    // All rules, whatever switches them on.
    let text = read("chart/templates/_rules.tpl");
    let rules: String =
        text.lines().filter(|line| !line.starts_with("{{")).map(|line| format!("{line}\n")).collect();
    let rules = &documents(&rules)[0];
    let mut granted = BTreeSet::new();
    for (feature, role) in rules.as_object().unwrap() {
        // The mesh's plugin uses the token for itself.
        if feature == "plugin" {
            continue;
        }
        for rule in role["rules"].as_array().unwrap() {
            let words = |key: &str| {
                let list = rule[key].as_array().unwrap();
                list.iter().map(|word| word.as_str().unwrap().to_owned()).collect::<Vec<_>>()
            };
            for group in words("apiGroups") {
                for resource in words("resources") {
                    granted.extend(words("verbs").iter().map(|verb| format!("{verb} {group}/{resource}")));
                }
            }
        }
    }
    let mut asked: BTreeSet<String> = Feature::ALL
        .iter()
        .flat_map(|feature| feature.needs())
        .map(|Permission(verb, group, resource, sub)| {
            let slash = if sub.is_empty() { "" } else { "/" };
            format!("{verb} {group}/{resource}{slash}{sub}")
        })
        .collect();
    // Which pods there are is no feature.
    for resource in ["pods", "namespaces"] {
        asked.extend(["list", "watch"].map(|verb| format!("{verb} /{resource}")));
    }
    assert_eq!(granted, asked);
}

#[test]
fn the_policies_of_the_manifests_are_accepted_and_say_their_mode() {
    for mode in ["audit", "enforce"] {
        let all = documents(&read(&format!("manifests/{mode}/nobypass.yaml")));
        let policy = all.iter().find_map(|document| document["data"]["policy.yaml"].as_str()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("policy.yaml");
        fs::write(&file, policy).unwrap();
        let out = Command::new(env!("CARGO_BIN_EXE_nobypass"))
            .args(["policy", "check"])
            .arg(&file)
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        assert!(policy.contains(&format!("mode: \"{mode}\"")), "{policy}");
    }
}

/// Paths of all values that are not maps, and of empty maps.
fn leaves(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (key, value) in map {
                leaves(value, &format!("{path}.{key}"), found);
            }
        }
        _ => {
            found.insert(path.to_owned());
        }
    }
}

#[test]
fn every_value_of_the_chart_is_used() {
    let values = serde_saphyr::from_str::<Value>(&read("chart/values.yaml")).unwrap();
    let mut all = BTreeSet::new();
    leaves(&values, "", &mut all);
    let templates = templates();
    for path in all {
        // The whole map may be what a template takes: `.Values.resources`.
        let mut names =
            std::iter::successors(Some(path.as_str()), |path| path.rsplit_once('.').map(|(head, _)| head));
        let used = names.any(|name| !name.is_empty() && has_word(&templates, &format!(".Values{name}")));
        assert!(used, "{path} is used by no template");
    }
    for (at, _) in templates.match_indices(".Values.") {
        let rest = &templates[at + ".Values.".len()..];
        let name: String = rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '.').collect();
        let known = name.trim_end_matches('.').split('.').try_fold(&values, |value, key| value.get(key));
        assert!(known.is_some(), ".Values.{name} is not in values.yaml");
    }
}

/// `word` that is not a part of a longer name.
fn has_word(text: &str, word: &str) -> bool {
    text.match_indices(word).any(|(at, _)| {
        let next = text[at + word.len()..].chars().next();
        !next.is_some_and(|c| c.is_ascii_alphanumeric() || c == '.')
    })
}

#[test]
fn every_value_of_the_chart_is_described() {
    let text = read("chart/values.yaml");
    let lines: Vec<&str> = text.lines().collect();
    for (number, line) in lines.iter().enumerate() {
        let trimmed = line.trim_start();
        let Some((key, value)) = trimmed.split_once(':') else { continue };
        let is_key = key.chars().all(|c| c.is_ascii_alphanumeric());
        // Keys of objects of Kubernetes are not ours to describe; maps that only group need no words.
        let depth = line.len() - trimmed.len();
        if !is_key || value.trim().is_empty() || foreign(&lines[..number], depth) {
            continue;
        }
        let above = lines[number - 1].trim_start();
        assert!(above.starts_with('#'), "line {}: `{key}` has no comment", number + 1);
    }
}

/// Whether a line at this depth lies below a value that Kubernetes defines.
fn foreign(above: &[&str], depth: usize) -> bool {
    const THEIRS: [&str; 8] = [
        "appArmorProfile",
        "seccompProfile",
        "resources",
        "tolerations",
        "nodeSelector",
        "updateStrategy",
        "labels",
        "type",
    ];
    let mut depth = depth;
    for line in above.iter().rev() {
        let trimmed = line.trim_start();
        let this = line.len() - trimmed.len();
        if this < depth && !trimmed.starts_with('#') && !trimmed.is_empty() {
            if THEIRS.contains(&trimmed.trim_end_matches(':')) {
                return true;
            }
            depth = this;
        }
    }
    false
}

#[test]
fn the_schema_knows_every_value_and_no_other() {
    let values = serde_saphyr::from_str::<Value>(&read("chart/values.yaml")).unwrap();
    let schema: Value = serde_json::from_str(&read("chart/values.schema.json")).unwrap();
    compare(&values, &schema, "");
}

fn compare(values: &Value, schema: &Value, path: &str) {
    if schema["additionalProperties"] != false {
        return;
    }
    let names = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    let mut known = names(&schema["properties"]);
    // Helm's own.
    known.remove("global");
    assert_eq!(names(values), known, "values and schema differ below `{path}`");
    for (key, value) in values.as_object().unwrap() {
        compare(value, &schema["properties"][key], &format!("{path}.{key}"));
    }
}

#[test]
fn each_alert_has_its_words_and_a_section_of_the_runbook() {
    let runbook = read("runbook.md");
    let sections: Vec<&str> = runbook.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    let rules = documents(&read("prometheus/rules.yaml"));
    let rules = rules[0]["groups"][0]["rules"].as_array().unwrap();
    let mut names = Vec::new();
    for rule in rules {
        let name = rule["alert"].as_str().unwrap();
        names.push(name);
        let severity = rule["labels"]["severity"].as_str().unwrap();
        assert!(["critical", "warning", "info"].contains(&severity), "{name}: {severity}");
        let text =
            |key: &str| rule["annotations"][key].as_str().unwrap_or_else(|| panic!("{name} has no {key}"));
        assert!(text("summary").ends_with('.') && text("description").ends_with('.'), "{name}");
        let anchor = text("runbook_url").split_once("deploy/runbook.md#").unwrap().1;
        assert_eq!(anchor, name.to_lowercase(), "{name}");
    }
    assert_eq!(sections, names, "sections of the runbook, in the order of the alerts");
    for part in ["**Means:**", "**Likely:**", "**Look:**", "**Do:**"] {
        assert_eq!(runbook.matches(part).count(), names.len(), "{part} in each section");
    }
    // Links within the runbook.
    for link in runbook.split("](#").skip(1).filter_map(|rest| rest.split(')').next()) {
        assert!(sections.iter().any(|section| section.to_lowercase() == link), "#{link}");
    }
}

#[test]
fn commands_that_the_runbook_and_the_notes_name_exist() {
    let out = Command::new(env!("CARGO_BIN_EXE_nobypass")).arg("--help").output().unwrap();
    let help = String::from_utf8(out.stdout).unwrap();
    for file in ["runbook.md", "chart/templates/NOTES.txt"] {
        let text = read(file);
        for rest in text.split("nobypass ").skip(1) {
            let word: String = rest.chars().take_while(char::is_ascii_lowercase).collect();
            let quoted =
                text.contains(&format!("`nobypass {word}")) || text.contains(&format!("-- nobypass {word}"));
            if quoted && !word.is_empty() {
                let found =
                    help.lines().any(|line| line.trim_start().split(' ').next() == Some(word.as_str()));
                assert!(found || NOT_YET.contains(&word.as_str()), "{file}: nobypass {word}");
                assert!(!(found && NOT_YET.contains(&word.as_str())), "{word} exists: take it off NOT_YET");
            }
        }
    }
}

/// Commands of the design that do not exist yet: to become fewer.
const NOT_YET: [&str; 0] = [];
