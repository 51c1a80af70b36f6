//! A JSON text as spans of bytes.

use super::refusal::Refusal;

/// Checks that `text` is one JSON value as libcni reads it.
pub fn check(text: &str) -> Result<(), Refusal> {
    serde_json::from_str::<serde::de::IgnoredAny>(text).map(|_| ()).map_err(|_| Refusal::Incomplete)
}

/// The `type` of a plugin object.
pub fn plugin_type(object: &str) -> Option<String> {
    serde_json::from_str::<serde_json::Value>(object).ok()?.get("type")?.as_str().map(str::to_owned)
}

/// Whether two valid JSON texts mean the same.
pub fn same(a: &str, b: &str) -> bool {
    a == b
}
