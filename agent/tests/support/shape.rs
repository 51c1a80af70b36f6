//! Fields of JSON outputs against the tables of deploy/json.md.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use super::yaml::repository;

/// The commands that have a table.
pub fn commands() -> BTreeSet<String> {
    let text = fs::read_to_string(repository().join("deploy/json.md")).unwrap();
    let names = text.lines().filter_map(|line| line.strip_prefix("## `nobypass ")?.strip_suffix(" -o json`"));
    names.map(str::to_owned).collect()
}

/// The fields of one command's table, as they are written.
fn table(command: &str) -> Vec<String> {
    let text = fs::read_to_string(repository().join("deploy/json.md")).unwrap();
    let heading = format!("\n## `nobypass {command} -o json`\n");
    let (_, section) = text.split_once(&heading).unwrap_or_else(|| panic!("no section of {command}"));
    let section = section.split("\n## ").next().unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` |"));
    rows.map(|(field, _)| field.to_owned()).collect()
}

/// Paths of all values that hold no others, and whether they are empty.
fn leaves(value: &Value, path: &str, found: &mut BTreeSet<(String, bool)>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (key, value) in map {
                let dot = if path.is_empty() { "" } else { "." };
                leaves(value, &format!("{path}{dot}{key}"), found);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for item in items {
                leaves(item, &format!("{path}[]"), found);
            }
        }
        _ => {
            let empty = matches!(value, Value::Null | Value::Object(_) | Value::Array(_));
            found.insert((path.to_owned(), empty));
        }
    }
}

/// Whether a path is a field of the table, or (`whole`) what an empty value hides of one.
fn is(field: &str, path: &str, whole: bool) -> bool {
    let split = |text: &str| text.replace("[]", ".[]").split('.').map(str::to_owned).collect::<Vec<_>>();
    let (field, path) = (split(field.trim_end_matches('?')), split(path));
    let same = field.len() == path.len() || (!whole && field.len() > path.len());
    same && field.iter().zip(&path).all(|(field, path)| field == path || (field == "*" && path != "[]"))
}

/// What differs between the table and a command's output.
pub fn differences(command: &str, output: &Value) -> Vec<String> {
    let table = table(command);
    let mut paths = BTreeSet::new();
    leaves(output, "", &mut paths);
    let unknown = paths
        .iter()
        .filter(|(path, empty)| !table.iter().any(|field| is(field, path, !empty)))
        .map(|(path, _)| format!("{command}: {path} is not described"));
    let absent = table
        .iter()
        .filter(|field| !field.ends_with('?') && !paths.iter().any(|(path, empty)| is(field, path, !empty)))
        .map(|field| format!("{command}: there is no {field}"));
    unknown.chain(absent).collect()
}

#[test]
fn a_table_describes_an_output_or_does_not() {
    for (field, path, whole, same) in [
        ("a[].b", "a[].b", true, true),
        ("a[].b?", "a[].b", true, true),
        ("a[].b", "a", false, true),
        ("a[].b", "a", true, false),
        ("a.*", "a.x", true, true),
        ("a.*", "a.x[]", true, false),
        ("a.*[]", "a.x[]", true, true),
        ("a.b", "a.c", false, false),
        ("a", "a.b", false, false),
    ] {
        assert_eq!(is(field, path, whole), same, "{field} {path} {whole}");
    }
    let odd = serde_json::json!({ "namespace": "a", "pods": "b", "families": [] });
    assert_eq!(
        differences("probe NAMESPACE/POD", &odd),
        [
            "pods is not described",
            "there is no pod",
            "there is no mesh",
            "there is no cgroup",
            "there is no took_us"
        ]
        .map(|text| format!("probe NAMESPACE/POD: {text}"))
    );
}
