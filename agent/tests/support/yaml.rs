//! Files of this repository.

use std::path::Path;

use serde_json::Value;

/// The repository.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The documents of a YAML stream.
pub fn documents(text: &str) -> Vec<Value> {
    text.split("\n---\n").map(|text| serde_saphyr::from_str(text).unwrap()).collect()
}
