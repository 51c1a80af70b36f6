//! The chart against a real API server: what it accepts, what the service account may do there, and where on a node the
//! agent looks.

#![expect(clippy::unwrap_used, clippy::panic, reason = "the helpers of a test may panic as the test may")]

mod access;
mod dry_run;
mod features;
mod paths;
#[path = "../support/yaml.rs"]
mod yaml;

use std::path::PathBuf;
use std::process::Command;

use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use nobypass_testkit::control_plane::ControlPlane;
use serde_json::{Value, json};
use yaml::{documents, repository};

/// What the chart renders with these arguments for Helm.
fn render(release: &str, namespace: &str, args: &[&str]) -> Vec<Value> {
    let helm = std::env::var_os("NOBYPASS_HELM")
        .unwrap_or_else(|| panic!("NOBYPASS_HELM is not set: run `cargo xtask test --tier cluster`"));
    let mut helm = Command::new(helm);
    helm.args(["template", release, "deploy/chart", "--namespace", namespace]).args(args);
    let out = helm.current_dir(repository()).output().unwrap();
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    documents(String::from_utf8(out.stdout).unwrap().trim_start_matches("---\n"))
}

/// The sets of values in `deploy/chart/ci`, by name.
fn variants() -> Vec<(String, PathBuf)> {
    let entries = std::fs::read_dir(repository().join("deploy/chart/ci")).unwrap();
    let mut all: Vec<_> = entries
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            (name.strip_suffix("-values.yaml").unwrap().to_owned(), path.clone())
        })
        .collect();
    all.sort();
    assert!(all.len() > 10, "{all:?}");
    all
}

/// What the chart renders for one of them.
fn render_variant(values: &std::path::Path) -> Vec<Value> {
    render("nobypass", "nobypass-system", &["--values", values.to_str().unwrap()])
}

/// A client of one who may do everything.
async fn admin(plane: &ControlPlane) -> kube::Client {
    client(&plane.admin_kubeconfig().unwrap()).await
}

async fn client(kubeconfig: &str) -> kube::Client {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), kubeconfig).unwrap();
    nobypass::cluster::connect(Some(file.path())).await.unwrap()
}

/// Kinds that belong to no namespace.
const OF_THE_CLUSTER: [&str; 5] =
    ["ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "Namespace", "Node"];

fn api(client: &kube::Client, object: &Value) -> Api<DynamicObject> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let (version, kind) = (text(&object["apiVersion"]), text(&object["kind"]));
    let (group, version) = version.split_once('/').unwrap_or(("", version.as_str()));
    let mut resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &kind));
    if kind == "NetworkPolicy" {
        "networkpolicies".clone_into(&mut resource.plural);
    }
    if OF_THE_CLUSTER.contains(&kind.as_str()) {
        return Api::all_with(client.clone(), &resource);
    }
    Api::namespaced_with(client.clone(), object["metadata"]["namespace"].as_str().unwrap(), &resource)
}

/// `kubectl apply --server-side`; `dry` for `--dry-run=server`. Unknown fields are an error.
async fn apply(client: &kube::Client, object: &Value, dry: bool) -> Result<DynamicObject, kube::Error> {
    let params = PatchParams {
        dry_run: dry,
        field_manager: Some("test".to_owned()),
        field_validation: Some(kube::api::ValidationDirective::Strict),
        ..PatchParams::default()
    };
    let name = object["metadata"]["name"].as_str().unwrap();
    api(client, object).patch(name, &params, &Patch::Apply(object)).await
}

fn namespace(name: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } })
}
