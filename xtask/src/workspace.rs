//! The workspace as `cargo metadata` describes it: which targets there are, and which features they require.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::exec::{cargo, output};

#[derive(Debug, PartialEq, Eq)]
pub struct Workspace {
    pub target_dir: PathBuf,
    pub packages: Vec<Package>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Package {
    pub name: String,
    pub version: String,
    pub description: String,
    pub license: String,
    pub repository: String,
    pub features: Vec<String>,
    pub targets: Vec<Target>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Target {
    pub name: String,
    /// `lib`, `bin`, `test`, `bench`, ...
    pub kind: String,
    pub required_features: Vec<String>,
}

impl Workspace {
    pub fn read() -> Result<Self> {
        let metadata = output(cargo().args(["metadata", "--format-version", "1", "--no-deps"]))?;
        Self::parse(&metadata).context("cannot read what `cargo metadata` says")
    }

    fn parse(metadata: &str) -> Result<Self> {
        let metadata: Value = serde_json::from_str(metadata)?;
        let target_dir = metadata.get("target_directory").and_then(Value::as_str);
        Ok(Self {
            target_dir: PathBuf::from(target_dir.context("no target_directory")?),
            packages: list(&metadata, "packages").iter().map(package).collect(),
        })
    }

    /// The package of this name.
    pub fn package(&self, name: &str) -> Option<&Package> {
        self.packages.iter().find(|package| package.name == name)
    }

    /// Is there a binary of this name in this package?
    pub fn has_bin(&self, package: &str, name: &str) -> bool {
        self.bins(package).any(|bin| bin == name)
    }

    /// The programs of a package.
    pub fn bins<'a>(&'a self, package: &str) -> impl Iterator<Item = &'a str> {
        let package = self.packages.iter().find(|candidate| candidate.name == package);
        let targets = package.map_or(&[][..], |package| &package.targets);
        targets.iter().filter(|target| target.kind == "bin").map(|target| target.name.as_str())
    }
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value.get(name).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn text(value: &Value, name: &str) -> String {
    value.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn texts(value: &Value, name: &str) -> Vec<String> {
    list(value, name).iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

fn package(value: &Value) -> Package {
    let features = value.get("features").and_then(Value::as_object);
    Package {
        name: text(value, "name"),
        version: text(value, "version"),
        description: text(value, "description"),
        license: text(value, "license"),
        repository: text(value, "repository"),
        features: features.map(|features| features.keys().cloned().collect()).unwrap_or_default(),
        targets: list(value, "targets").iter().map(target).collect(),
    }
}

fn target(value: &Value) -> Target {
    Target {
        name: text(value, "name"),
        kind: texts(value, "kind").into_iter().next().unwrap_or_default(),
        required_features: texts(value, "required-features"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_metadata() {
        let metadata = r#"{"target_directory": "/t", "packages": [{"name": "a", "features": {"x": []}, "targets": [
            {"name": "a", "kind": ["bin"]}, {"name": "t", "kind": ["test"], "required-features": ["x"]}]}]}"#;
        let workspace = Workspace::parse(metadata).expect("it is well-formed");
        assert_eq!(workspace.target_dir, PathBuf::from("/t"));
        assert_eq!(workspace.packages[0].features, ["x"]);
        assert_eq!(workspace.packages[0].targets[1].required_features, ["x"]);
        assert!(workspace.has_bin("a", "a"));
        assert!(!workspace.has_bin("a", "t"), "a test is no binary");
        assert!(!workspace.has_bin("b", "a"));
    }

    #[test]
    fn nonsense_is_an_error() {
        for text in ["", "{}", "[]", "{\"target_directory\": 3}"] {
            assert!(Workspace::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn reads_this_workspace() {
        let workspace = Workspace::read().expect("cargo built this test");
        assert!(workspace.has_bin("xtask", "xtask"));
        assert!(workspace.has_bin("nobypass", "nobypass"));
    }
}
