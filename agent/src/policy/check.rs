//! Reads a policy and says all that is wrong with it, each with its place and what would be right.
//!
//! The schema comes first, because it finds every problem at once; then serde and what neither of them can say.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::LazyLock;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_saphyr::{Location, Spanned};

use super::file::{NamespaceRule, PolicyFile};
use crate::mesh::Profiles;

/// The schema, as editors have it.
pub const SCHEMA: &str = include_str!("../../../deploy/policy.schema.json");

static PARSED: LazyLock<Value> = LazyLock::new(|| serde_json::from_str(SCHEMA).unwrap_or_default());

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// From 1; 0 if it is nowhere in particular.
    pub line: u64,
    /// Likewise.
    pub column: u64,
    /// Such as `namespaces[2].mode`; empty for the whole file.
    pub path: String,
    /// What, and what would be right.
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { line, column, path, what } = self;
        write!(f, "line {line} column {column}: ")?;
        if !path.is_empty() {
            write!(f, "{path}: ")?;
        }
        f.write_str(what)
    }
}

/// Reads a policy.
///
/// # Errors
/// All problems, in the order of the file.
pub fn parse(text: &str) -> Result<PolicyFile, Vec<Problem>> {
    // `off` is a mode, and no boolean.
    let options = serde_saphyr::options! { strict_booleans: true };
    let tree: Spanned<Node> =
        serde_saphyr::from_str_with_options(text, options).map_err(|error| vec![of_serde(&error)])?;
    let mut problems = Vec::new();
    against(&tree, &PARSED, "", &mut problems);
    let file = if problems.is_empty() {
        serde_saphyr::from_str::<PolicyFile>(text).map_err(|error| vec![of_serde(&error)])?
    } else {
        problems.sort();
        return Err(problems);
    };
    for (path, what) in contradictions(&file) {
        let at = tree.value.at(&path).unwrap_or(tree.referenced);
        problems.push(problem(at, &path, what));
    }
    problems.sort();
    if problems.is_empty() { Ok(file) } else { Err(problems) }
}

/// What the form of the file does not show.
fn contradictions(file: &PolicyFile) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (n, rule) in file.namespaces.iter().enumerate() {
        let NamespaceRule { names, match_labels, mode, non_tcp, quic, family_gap, inbound } = rule;
        let path = format!("namespaces[{n}]");
        if names.is_empty() && match_labels.is_empty() {
            found.push((path, "matches no namespace: give names, or matchLabels".into()));
        } else if mode.is_none()
            && non_tcp.is_none()
            && quic.is_none()
            && family_gap.is_none()
            && inbound.is_none()
        {
            found.push((path, "says nothing: give mode, nonTcp, quic, familyGap or inbound".into()));
        } else if let Some(earlier) = file.namespaces.iter().take(n).position(|earlier| earlier.covers(rule))
        {
            let what = format!("is never reached: namespaces[{earlier}] comes first and matches the same");
            found.push((path, what));
        }
    }
    if file.on_silence.is_some() && file.max_agent_silence.is_none() {
        found.push(("onSilence".into(), "means nothing without maxAgentSilence".into()));
    }
    if let Some(super::file::Span(silence)) = file.max_agent_silence
        && silence < MIN_SILENCE
    {
        let what = "is shorter than the 30s that a new agent may need to take over".to_owned();
        found.push(("maxAgentSilence".into(), what));
    }
    if let Err((name, reason)) = Profiles::default().preceded_by(file.profiles.clone()) {
        let n = file.profiles.iter().rposition(|profile| profile.name == name).unwrap_or(0);
        found.push((format!("profiles[{n}]"), format!("profile {name:?}: {reason}")));
    }
    found
}

/// An agent shows a sign of life every five seconds, and an upgrade takes a while.
const MIN_SILENCE: std::time::Duration = std::time::Duration::from_secs(30);

fn problem(at: Location, path: &str, what: String) -> Problem {
    Problem { line: at.line(), column: at.column(), path: path.into(), what }
}

/// The parser's own words, without the picture of the place.
fn of_serde(error: &serde_saphyr::Error) -> Problem {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    let first = first.strip_prefix("error: ").unwrap_or(first);
    let what = match first.strip_prefix("line ").and_then(|rest| rest.split_once(": ")) {
        Some((_, what)) => what,
        None => first,
    };
    let (line, column) = error.location().map_or((0, 0), |at| (at.line(), at.column()));
    Problem { line, column, path: String::new(), what: what.to_owned() }
}

/// YAML with the places of everything.
#[derive(Debug)]
enum Node {
    Null,
    Bool(bool),
    Integer(i128),
    Fraction,
    Text(String),
    List(Vec<Spanned<Self>>),
    Map(Vec<(Spanned<String>, Spanned<Self>)>),
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Node;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("YAML")
            }

            fn visit_unit<E>(self) -> Result<Node, E> {
                Ok(Node::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
                Ok(Node::Bool(value))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
                Ok(Node::Integer(value.into()))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
                Ok(Node::Integer(value.into()))
            }

            fn visit_f64<E>(self, _: f64) -> Result<Node, E> {
                Ok(Node::Fraction)
            }

            fn visit_str<E>(self, value: &str) -> Result<Node, E> {
                Ok(Node::Text(value.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Node, A::Error> {
                let mut list = Vec::new();
                while let Some(item) = seq.next_element()? {
                    list.push(item);
                }
                Ok(Node::List(list))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Node::Map(entries))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

impl Node {
    /// In a problem's words.
    fn kind(&self) -> &'static str {
        match self {
            Self::Null => "nothing",
            Self::Bool(_) => "a boolean",
            Self::Integer(_) => "an integer",
            Self::Fraction => "a number with a fraction",
            Self::Text(_) => "a text",
            Self::List(_) => "a list",
            Self::Map(_) => "a mapping",
        }
    }

    /// The place of something inside: `namespaces[2].mode`.
    fn at(&self, path: &str) -> Option<Location> {
        let (mut node, mut at) = (self, None);
        for step in path.split(['.', '[']) {
            let next = match (node, step.strip_suffix(']')) {
                (Self::List(items), Some(n)) => items.get(n.parse::<usize>().ok()?)?,
                (Self::Map(entries), None) => &entries.iter().find(|(key, _)| key.value == step)?.1,
                _ => return None,
            };
            (node, at) = (&next.value, Some(next.referenced));
        }
        at
    }
}

/// Compares a part of the file with its part of the schema. Understands what the schema uses.
fn against(node: &Spanned<Node>, schema: &Value, path: &str, problems: &mut Vec<Problem>) {
    let schema = match schema["$ref"].as_str().and_then(|to| to.strip_prefix("#/$defs/")) {
        Some(name) => &PARSED["$defs"][name],
        None => schema,
    };
    let mut say = |what: String| problems.push(problem(node.referenced, path, what));
    if let Some(allowed) = schema["enum"].as_array() {
        let allowed: Vec<&str> = allowed.iter().filter_map(Value::as_str).collect();
        match &node.value {
            Node::Text(text) if allowed.contains(&text.as_str()) => {}
            Node::Text(text) => say(format!("{text:?} is not one of {}", allowed.join(", "))),
            Node::Bool(value) => {
                say(format!("{value} is a boolean: write one of \"{}\" in quotes", allowed.join("\", \"")))
            }
            other => say(format!("{} is not one of {}", other.kind(), allowed.join(", "))),
        }
        return;
    }
    match (schema["type"].as_str(), &node.value) {
        (Some("object"), Node::Map(entries)) => object(node, entries, schema, path, problems),
        (Some("object"), other) => say(format!("must be a mapping, not {}", other.kind())),
        (Some("array"), Node::List(items)) => {
            for (n, item) in items.iter().enumerate() {
                against(item, &schema["items"], &format!("{path}[{n}]"), problems);
            }
        }
        (Some("array"), other) => say(format!("must be a list, not {}", other.kind())),
        (Some("integer"), Node::Integer(number)) => {
            let bound = |name: &str| schema[name].as_i64().map(i128::from);
            let (least, most) =
                (bound("minimum").unwrap_or(i128::MIN), bound("maximum").unwrap_or(i128::MAX));
            if !(least..=most).contains(number) {
                say(format!("{number} is not within {least} to {most}"));
            }
        }
        (Some("integer"), other) => say(format!("must be a whole number, not {}", other.kind())),
        (Some("string"), Node::Text(text)) => {
            if text.is_empty() && schema["minLength"].as_u64().is_some_and(|least| least > 0) {
                say("must not be empty".into());
            }
        }
        (Some("string"), other) => say(format!("must be a text, not {}; write it in quotes", other.kind())),
        _ => {}
    }
}

fn object(
    node: &Spanned<Node>,
    entries: &[(Spanned<String>, Spanned<Node>)],
    schema: &Value,
    path: &str,
    problems: &mut Vec<Problem>,
) {
    let within = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    let known = schema["properties"].as_object();
    for (key, value) in entries {
        match known.and_then(|known| known.get(&key.value)) {
            Some(part) => against(value, part, &within(&key.value), problems),
            None if schema["additionalProperties"] == Value::Bool(false) => {
                let known: Vec<&str> = known.into_iter().flatten().map(|(name, _)| name.as_str()).collect();
                let what = match nearest(&key.value, &known) {
                    Some(near) => format!("{:?} is not known; did you mean {near}?", key.value),
                    None => format!("{:?} is not known: {}", key.value, known.join(", ")),
                };
                problems.push(problem(key.referenced, path, what));
            }
            None => against(value, &schema["additionalProperties"], &within(&key.value), problems),
        }
    }
    let given: BTreeSet<&str> = entries.iter().map(|(key, _)| key.value.as_str()).collect();
    for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if !given.contains(name) {
            let allowed: Vec<&str> = schema["properties"][name]["enum"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .collect();
            let example =
                if allowed.is_empty() { String::new() } else { format!(": {}", allowed.join(", ")) };
            problems.push(problem(node.referenced, path, format!("{name} is missing{example}")));
        }
    }
}

/// The one of `names` that was probably meant.
pub fn nearest<'a>(given: &str, names: &[&'a str]) -> Option<&'a str> {
    let given = given.to_lowercase();
    let distance = |name: &str| {
        let similar = similar::TextDiff::from_chars(given.as_str(), &name.to_lowercase()).ratio();
        // In thousandths.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 1000")]
        let thousandths = (similar * 1000.0) as u32;
        thousandths
    };
    let by_similarity: BTreeMap<u32, &'a str> = names.iter().map(|name| (distance(name), *name)).collect();
    by_similarity.last_key_value().filter(|(similar, _)| **similar >= 650).map(|(_, name)| *name)
}

#[cfg(test)]
mod tests;
