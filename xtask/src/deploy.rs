//! What is in `deploy/`: renders the manifests from the chart, and checks chart, manifests and alerts with the programs
//! that their users have.

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::exec::{command, output, repo_root, tool};
use crate::setup::go::HELM;
use crate::setup::python::KUBERNETES_VALIDATE;
use crate::setup::{self, DEPLOY};
use crate::tally::Tally;
use crate::workspace::Workspace;

/// The namespace of the rendered manifests.
const NAMESPACE: &str = "nobypass-system";
/// Modes for which manifests are rendered.
const MODES: [&str; 2] = ["audit", "enforce"];
/// Kubernetes versions against which everything is checked: the oldest supported one to the newest.
const KUBERNETES: [&str; 3] = ["1.33", "1.35", "1.37"];
/// Writes the manifests.
pub fn render() -> Result<()> {
    setup::ensure(DEPLOY)?;
    for mode in MODES {
        let file = manifest(mode);
        fs::write(&file, of_mode(mode)?).with_context(|| format!("cannot write {}", file.display()))?;
        println!("{}", file.display());
    }
    Ok(())
}

/// Each check counts as one.
pub fn check() -> Result<Tally> {
    setup::ensure(DEPLOY)?;
    let mut total = Tally::default();
    for (name, check) in [
        ("chart", lint as fn() -> Result<()>),
        ("manifests are those of the chart", manifests),
        ("manifests are valid", valid),
        ("alerts", alerts),
    ] {
        let result = check();
        match &result {
            Ok(()) => println!("== lint: deploy: {name}: ok"),
            Err(error) => println!("== lint: deploy: {name}: FAILED: {error:#}"),
        }
        total += Tally::of(result.is_ok());
    }
    Ok(total)
}

fn deploy() -> PathBuf {
    repo_root().join("deploy")
}

fn manifest(mode: &str) -> PathBuf {
    deploy().join("manifests").join(mode).join("nobypass.yaml")
}

fn found(program: Result<PathBuf, String>) -> Result<Command> {
    program.map(command).map_err(anyhow::Error::msg)
}

/// Sets of values, each of which is rendered and checked: what a template does only then is seen too.
fn variants() -> Result<Vec<PathBuf>> {
    let dir = deploy().join("chart/ci");
    let entries = fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.sort();
    Ok(files)
}

fn of_mode(mode: &str) -> Result<String> {
    template(&["--set", &format!("mode={mode}")])
}

fn template<S: AsRef<OsStr>>(values: &[S]) -> Result<String> {
    let mut helm = found(HELM.find())?;
    helm.args(["template", "nobypass"]).arg(deploy().join("chart")).args(["--namespace", NAMESPACE]);
    Ok(output(helm.args(values))?.trim_start_matches("---\n").to_owned())
}

fn lint() -> Result<()> {
    output(found(HELM.find())?.args(["lint", "--strict", "--quiet"]).arg(deploy().join("chart"))).map(drop)
}

fn manifests() -> Result<()> {
    for mode in MODES {
        let file = manifest(mode);
        let there = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        anyhow::ensure!(
            there == of_mode(mode)?,
            "{} is not what the chart renders: run `cargo xtask render`",
            file.display()
        );
    }
    Ok(())
}

fn valid() -> Result<()> {
    let dir = Workspace::read()?.target_dir.join("deploy");
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let mut files: Vec<PathBuf> = MODES.map(manifest).into();
    for values in variants()? {
        let text = template(&[OsStr::new("--values"), values.as_os_str()])
            .with_context(|| format!("with {}", values.display()))?;
        let file = dir.join(values.file_name().unwrap_or_default());
        fs::write(&file, of_kubernetes(&text))?;
        files.push(file);
    }
    for version in KUBERNETES {
        let mut validate = found(KUBERNETES_VALIDATE.find())?;
        output(validate.args(["--strict", "--quiet", "--kubernetes-version", version]).args(&files))
            .with_context(|| format!("Kubernetes {version}"))?;
    }
    Ok(())
}

/// The documents whose schema Kubernetes itself has; the Prometheus Operator's are its own.
fn of_kubernetes(text: &str) -> String {
    let known = |document: &&str| !document.contains("\napiVersion: monitoring.coreos.com/");
    text.split("\n---\n").filter(known).collect::<Vec<_>>().join("\n---\n")
}

fn alerts() -> Result<()> {
    let dir = deploy().join("prometheus");
    for args in [["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]] {
        output(tool("promtool").current_dir(&dir).args(args))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_documents_with_a_known_schema_are_validated() {
        let text = "# a\napiVersion: v1\nkind: A\n---\n# b\napiVersion: monitoring.coreos.com/v1\nkind: B\n---\n# c\napiVersion: v1\n";
        assert_eq!(of_kubernetes(text), "# a\napiVersion: v1\nkind: A\n---\n# c\napiVersion: v1\n");
    }

    #[test]
    fn every_platform_of_the_chart_is_rendered() {
        let schema = fs::read_to_string(deploy().join("chart/values.schema.json")).unwrap();
        let schema: serde_json::Value = serde_json::from_str(&schema).unwrap();
        let platforms = schema["properties"]["platform"]["enum"].as_array().unwrap();
        let values: Vec<String> =
            variants().unwrap().iter().map(|file| fs::read_to_string(file).unwrap()).collect();
        for platform in platforms.iter().map(|platform| platform.as_str().unwrap()) {
            let found = values.iter().any(|text| text.starts_with(&format!("platform: {platform}\n")));
            assert!(found || platform == "generic", "{platform}");
        }
    }
}
