//! Field and label selectors.

use serde_json::Value;

use super::error::ApiError;
use super::kinds::{EVENTS, Kind};

/// What a list or watch asks for.
#[derive(Clone, Debug, Default)]
pub struct Selector {
    fields: Vec<(String, bool, String)>,
    labels: Vec<Label>,
}

#[derive(Clone, Debug)]
enum Label {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    Missing(String),
}

impl Selector {
    /// `fields` as in `fieldSelector`: terms with `=`, `==`, `!=`, joined by commas; `labels` as in `labelSelector`.
    pub fn parse(kind: &Kind, fields: &str, labels: &str) -> Result<Self, ApiError> {
        let mut selector = Self::default();
        for term in fields.split(',').filter(|term| !term.is_empty()) {
            let (name, equal, value) = comparison(term).ok_or_else(|| {
                ApiError::bad_request(format!("invalid selector: '{fields}'; can't understand '{term}'"))
            })?;
            if !field_is_known(kind, name) {
                return Err(ApiError::bad_request(format!(
                    "Unable to find \"{}\" that match field selector: field label not supported: {name}",
                    kind.qualified()
                )));
            }
            selector.fields.push((name.into(), equal, value.into()));
        }
        for term in split_outside_brackets(labels) {
            let label = label(&term)
                .ok_or_else(|| ApiError::bad_request(format!("unable to parse requirement: {term}")))?;
            selector.labels.push(label);
        }
        Ok(selector)
    }

    pub fn is_empty(&self) -> bool {
        self.fields.is_empty() && self.labels.is_empty()
    }

    pub fn matches(&self, object: &Value) -> bool {
        let field =
            |(name, equal, value): &(String, bool, String)| (&field_of(object, name) == value) == *equal;
        self.fields.iter().all(field) && self.labels.iter().all(|label| label.matches(object))
    }
}

fn comparison(term: &str) -> Option<(&str, bool, &str)> {
    let (name, equal, value) = if let Some((name, value)) = term.split_once("!=") {
        (name, false, value)
    } else if let Some((name, value)) = term.split_once("==") {
        (name, true, value)
    } else {
        let (name, value) = term.split_once('=')?;
        (name, true, value)
    };
    Some((name.trim(), equal, value.trim()))
}

/// Which fields a server can select by depends on the resource.
fn field_is_known(kind: &Kind, name: &str) -> bool {
    let of_kind = match kind.resource {
        "pods" => matches!(
            name,
            "spec.nodeName"
                | "spec.restartPolicy"
                | "spec.schedulerName"
                | "spec.serviceAccountName"
                | "spec.hostNetwork"
                | "status.phase"
                | "status.podIP"
                | "status.nominatedNodeName"
        ),
        "nodes" => name == "spec.unschedulable",
        "namespaces" => name == "status.phase",
        EVENTS => {
            name.starts_with("involvedObject.")
                || name.starts_with("regarding.")
                || matches!(name, "reason" | "type")
        }
        _ => false,
    };
    of_kind || name == "metadata.name" || (name == "metadata.namespace" && kind.namespaced)
}

/// The text of a field; an absent one is empty, as in Go, where it has its type's zero value.
fn field_of(object: &Value, name: &str) -> String {
    let name = name.replacen("involvedObject.", "regarding.", 1);
    let value = name.split('.').try_fold(object, |value, part| value.get(part));
    match value {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Null) | None if matches!(name.as_str(), "spec.hostNetwork" | "spec.unschedulable") => {
            "false".into()
        }
        Some(Value::Null) | None => String::new(),
        Some(other) => other.to_string(),
    }
}

fn split_outside_brackets(text: &str) -> Vec<String> {
    let mut depth = 0;
    let mut terms = vec![String::new()];
    for c in text.chars() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if c == ',' && depth == 0 {
            terms.push(String::new());
        } else if let Some(term) = terms.last_mut() {
            term.push(c);
        }
    }
    terms.into_iter().map(|term| term.trim().to_owned()).filter(|term| !term.is_empty()).collect()
}

fn label(term: &str) -> Option<Label> {
    if let Some((key, equal, value)) = comparison(term) {
        let values = vec![value.to_owned()];
        return Some(if equal { Label::In(key.into(), values) } else { Label::NotIn(key.into(), values) });
    }
    if let Some(key) = term.strip_prefix('!') {
        return Some(Label::Missing(key.trim().into()));
    }
    let Some((head, set)) = term.split_once('(') else {
        return (!term.contains(' ')).then(|| Label::Exists(term.into()));
    };
    let values = set.strip_suffix(')')?.split(',').map(|value| value.trim().to_owned()).collect();
    let (key, operator) = head.trim().rsplit_once(' ')?;
    match operator {
        "in" => Some(Label::In(key.trim().into(), values)),
        "notin" => Some(Label::NotIn(key.trim().into(), values)),
        _ => None,
    }
}

impl Label {
    fn matches(&self, object: &Value) -> bool {
        let get = |key: &str| object["metadata"]["labels"].get(key).and_then(Value::as_str);
        match self {
            Self::In(key, values) => get(key).is_some_and(|value| values.iter().any(|v| v == value)),
            Self::NotIn(key, values) => get(key).is_none_or(|value| values.iter().all(|v| v != value)),
            Self::Exists(key) => get(key).is_some(),
            Self::Missing(key) => get(key).is_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn selectors_select() {
        let pod = json!({
            "metadata": { "name": "p", "namespace": "a", "labels": { "app": "web", "tier": "x" } },
            "spec": { "nodeName": "n1" },
        });
        for (fields, labels, want) in [
            ("", "", true),
            ("spec.nodeName=n1", "", true),
            ("spec.nodeName==n1,metadata.name!=q", "", true),
            ("spec.nodeName!=n1", "", false),
            ("spec.nodeName=", "", false),
            ("metadata.namespace=b", "", false),
            ("status.phase=", "", true),
            ("spec.hostNetwork=false", "", true),
            ("", "app=web", true),
            ("", "app==web,tier!=y", true),
            ("", "app in (web,db), tier", true),
            ("", "app notin (web)", false),
            ("", "none notin (web)", true),
            ("", "!app", false),
            ("", "!none", true),
            ("", "none", false),
        ] {
            let kind = Kind::of_resource("pods").expect("pods");
            let selector = Selector::parse(kind, fields, labels).expect("valid");
            assert_eq!(selector.matches(&pod), want, "{fields} {labels}");
        }
    }

    #[test]
    fn what_a_server_does_not_know_is_refused() {
        let node = Kind::of_resource("nodes").expect("nodes");
        for fields in ["spec.nodeName=x", "metadata.namespace=a", "nonsense"] {
            assert_eq!(Selector::parse(node, fields, "").expect_err(fields).code, 400);
        }
        assert_eq!(Selector::parse(node, "", "a b c").expect_err("labels").code, 400);
    }
}
