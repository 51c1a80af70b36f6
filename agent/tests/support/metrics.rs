//! The metrics that alerts and dashboard name, against those that an agent exports.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use serde_json::Value;

use super::yaml::{documents, repository};

/// Names of the design that no agent exports yet: to become fewer. One that is exported must not stay here.
const NOT_YET: [&str; 0] = [];

/// Exported only where there is an API server, with these labels.
const OF_CLUSTER: [(&str, &str); 1] = [("nobypass_permission", "feature")];

/// Labels that a scrape adds: the chart's PodMonitor, and Prometheus's external labels.
const OF_TARGETS: [&str; 4] = ["cluster", "instance", "job", "node"];

/// What an agent exports.
pub struct Known {
    /// Series' names with the labels that were seen on them.
    series: BTreeMap<String, BTreeSet<String>>,
}

impl Known {
    /// From the text of a scrape.
    pub fn of(scrape: &str) -> Self {
        let mut series: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for line in scrape.lines() {
            if let Some(family) = line.strip_prefix("# TYPE ") {
                let (name, kind) = family.split_once(' ').unwrap();
                let endings: &[&str] = match kind {
                    "counter" => &["_total"],
                    "histogram" => &["_bucket", "_count", "_sum"],
                    _ => &[""],
                };
                for ending in endings {
                    series.entry(format!("{name}{ending}")).or_default();
                }
            } else if let Some((name, rest)) = line.split_once('{') {
                let labels =
                    rest.split_once('}').unwrap().0.split("\",").filter_map(|label| label.split_once('='));
                series.entry(name.into()).or_default().extend(labels.map(|(label, _)| label.to_owned()));
            }
        }
        for (name, label) in OF_CLUSTER {
            series.entry(name.into()).or_default().insert(label.into());
        }
        for name in NOT_YET {
            assert!(!series.contains_key(name), "{name} is exported: take it off NOT_YET");
        }
        Self { series }
    }

    /// What an expression names and the agent does not export.
    pub fn lacks(&self, place: &str, expression: &str) -> Vec<String> {
        let mut lacking = Vec::new();
        let mut all = BTreeSet::new();
        let mut unsure = false;
        for (name, labels) in selectors(expression) {
            if NOT_YET.contains(&name.as_str()) {
                unsure = true;
                continue;
            }
            let Some(seen) = self.series.get(&name) else {
                lacking.push(format!("{place}: {name}"));
                continue;
            };
            // A family that has no series in this scrape says nothing of its labels.
            unsure |= seen.is_empty();
            let known = |label: &String| seen.is_empty() || seen.contains(label) || of_target(label);
            lacking.extend(
                labels
                    .iter()
                    .filter(|label| !known(label))
                    .map(|label| format!("{place}: {name}{{{label}}}")),
            );
            all.extend(seen.iter().cloned());
        }
        if !unsure {
            let known = |label: &String| all.contains(label) || of_target(label);
            lacking.extend(
                groupings(expression)
                    .iter()
                    .filter(|label| !known(label))
                    .map(|label| format!("{place}: by ({label})")),
            );
        }
        lacking
    }
}

fn of_target(label: &str) -> bool {
    OF_TARGETS.contains(&label)
}

/// All expressions with where they are, without Grafana's variables.
pub fn expressions() -> Vec<(String, String)> {
    let read = |path: &str| fs::read_to_string(repository().join("deploy").join(path)).unwrap();
    let mut found = Vec::new();
    for rule in documents(&read("prometheus/rules.yaml"))[0]["groups"][0]["rules"].as_array().unwrap() {
        let text = |key: &str| rule[key].as_str().unwrap().to_owned();
        found.push((format!("alert {}", text("alert")), text("expr")));
    }
    let dashboard: Value = serde_json::from_str(&read("grafana/nobypass.json")).unwrap();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            found.push((format!("panel {}", panel["title"]), target["expr"].as_str().unwrap().to_owned()));
        }
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        if let Some(query) = variable["definition"].as_str() {
            let inner = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')')).unwrap();
            let (series, label) = inner.rsplit_once(", ").unwrap();
            found.push((format!("variable {}", variable["name"]), format!("sum by ({label}) ({series})")));
        }
    }
    for (_, expression) in &mut found {
        *expression = expression.replace("[$__rate_interval]", "[1m]");
        for variable in ["$cluster", "$namespace", "$node"] {
            *expression = expression.replace(variable, ".*");
        }
        assert!(!expression.contains('$'), "{expression}");
    }
    found
}

/// `name{label=...}` of each of our metrics.
fn selectors(expression: &str) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    let mut rest = expression;
    while let Some(start) = rest.find("nobypass_") {
        rest = &rest[start..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let name = rest[..end].to_owned();
        rest = &rest[end..];
        let mut labels = Vec::new();
        if let Some(inner) = rest.strip_prefix('{') {
            for matcher in inner.split_once('}').unwrap().0.split("\",") {
                labels.extend(matcher.split(['=', '!']).next().map(|label| label.trim().to_owned()));
            }
        }
        found.push((name, labels));
    }
    found
}

/// The labels of each `by (...)`.
fn groupings(expression: &str) -> Vec<String> {
    let inner = expression.split("by (").skip(1).filter_map(|rest| rest.split_once(')'));
    let labels = inner.flat_map(|(labels, _)| labels.split(',').map(|label| label.trim().to_owned()));
    labels.filter(|label| label != "le").collect()
}

#[test]
fn finds_what_is_missing() {
    let known = Known::of(
        "# TYPE nobypass_a counter\nnobypass_a_total{x=\"1\",y=\"a,b\"} 1\n# TYPE nobypass_b gauge\n# EOF\n",
    );
    for (expression, lacks) in [
        ("sum by (x, node) (rate(nobypass_a_total{y=\"1\", x!=\"2\"}[5m]))", &[][..]),
        ("nobypass_b{z=\"\"} > 0", &[]),
        ("nobypass_c", &["p: nobypass_c"]),
        ("nobypass_a_total{z=~\"\"}", &["p: nobypass_a_total{z}"]),
        ("sum by (z) (nobypass_a_total)", &["p: by (z)"]),
    ] {
        assert_eq!(known.lacks("p", expression), lacks, "{expression}");
    }
}
