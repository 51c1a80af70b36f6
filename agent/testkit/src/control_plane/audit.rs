//! The API server's audit log: what service accounts asked for and what it decided.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

/// One request, in the words of a Role.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Asked {
    /// As `list`.
    pub verb: String,
    /// Empty for the core.
    pub group: String,
    /// With its sub-resource, as `pods/status`.
    pub resource: String,
    /// Whether it was allowed.
    pub allowed: bool,
}

/// Service accounts alone; a watch when it begins.
pub(super) fn policy() -> String {
    json!({
        "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
        "rules": [
            { "level": "Metadata", "userGroups": ["system:serviceaccounts"] },
            { "level": "None" },
        ],
    })
    .to_string()
}

/// The requests of `user` for resources.
pub(super) fn read(log: &Path, user: &str) -> Result<Vec<Asked>> {
    let text = fs::read_to_string(log).with_context(|| format!("cannot read {}", log.display()))?;
    // The last line may still be written.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let mut asked = Vec::new();
    // Most lines are of others, and reading JSON takes its time.
    for line in whole.lines().filter(|line| line.contains(user)) {
        let event: Value = serde_json::from_str(line).with_context(|| format!("an audit event: {line}"))?;
        let about = &event["objectRef"];
        if event["user"]["username"] != user || about.is_null() {
            continue;
        }
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let slash = if about["subresource"].is_null() { "" } else { "/" };
        asked.push(Asked {
            verb: text(&event["verb"]),
            group: text(&about["apiGroup"]),
            resource: format!("{}{slash}{}", text(&about["resource"]), text(&about["subresource"])),
            allowed: event["annotations"]["authorization.k8s.io/decision"] == "allow",
        });
    }
    Ok(asked)
}
