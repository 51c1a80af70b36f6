//! The test tiers, as a table. A new tier is a new row; a new test target needs nothing here: targets are
//! found by the feature that they require.

use crate::machine;
use crate::setup::{BUILD, CLUSTER, KERNEL, NODE, Need, RUNTIMES};
use crate::workspace::{Package, Workspace};

#[derive(Debug)]
pub struct Tier {
    pub name: &'static str,
    pub about: &'static str,
    pub targets: Targets,
    pub needs: &'static [&'static [Need]],
    /// What it can do without: tests that use it are skipped, except in CI.
    pub wishes: &'static [Need],
    /// Why this machine cannot run it, if it cannot.
    pub ruled_out: fn() -> Option<String>,
    /// `--test-threads`; privileged tests share the machine's namespaces, so they take turns.
    pub threads: Option<u32>,
}

/// Which test targets belong to a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Targets {
    /// All that require no feature.
    Ordinary,
    /// Those that require this feature (and no later tier's).
    Feature(&'static str),
}

/// From the least to the most demanding.
pub const TIERS: [Tier; 4] = [
    Tier {
        name: "unit",
        about: "pure logic and everything else that needs no privileges",
        targets: Targets::Ordinary,
        needs: &[BUILD],
        wishes: &[],
        ruled_out: || None,
        threads: None,
    },
    Tier {
        name: "cluster",
        about: "a real kube-apiserver with etcd; needs Go, or KUBEBUILDER_ASSETS",
        targets: Targets::Feature("cluster-tests"),
        needs: &[BUILD, CLUSTER],
        wishes: &[],
        ruled_out: || None,
        threads: None,
    },
    Tier {
        name: "kernel",
        about: "BPF programs, cgroups and network namespaces of this kernel; needs root",
        targets: Targets::Feature("kernel-tests"),
        needs: &[BUILD, KERNEL],
        wishes: &[],
        ruled_out: machine::cannot_run_kernel_tests,
        threads: Some(1),
    },
    Tier {
        name: "node",
        about: "a private node: containerd, runc, a CNI chain and pods; needs root",
        targets: Targets::Feature("node-tests"),
        needs: &[BUILD, KERNEL, NODE],
        wishes: RUNTIMES,
        ruled_out: machine::cannot_run_kernel_tests,
        threads: Some(1),
    },
];

/// `name  about` of each tier, for `--help`.
pub fn help() -> String {
    let line = |tier: &Tier| format!("\n  {:<8} {}", tier.name, tier.about);
    format!("Tiers:{}", TIERS.iter().map(line).collect::<String>())
}

/// Arguments of each `cargo test` that a tier takes: one for all ordinary tests, else one a package. Empty: the
/// tier has no tests.
pub fn invocations(tier: &Tier, workspace: &Workspace) -> Vec<Vec<String>> {
    match tier.targets {
        Targets::Ordinary => vec![Vec::new()],
        Targets::Feature(feature) => {
            workspace.packages.iter().filter_map(|package| invocation(feature, package)).collect()
        }
    }
}

fn invocation(feature: &str, package: &Package) -> Option<Vec<String>> {
    let targets = package
        .targets
        .iter()
        .filter(|target| target.kind == "test" && tier_feature(&target.required_features) == Some(feature));
    let mut features = Vec::new();
    let mut names = Vec::new();
    for target in targets {
        names.extend(["--test".to_owned(), target.name.clone()]);
        for required in &target.required_features {
            if !features.contains(required) {
                features.push(required.clone());
            }
        }
    }
    if names.is_empty() {
        return None;
    }
    let mut args = vec!["--package".into(), package.name.clone(), "--features".into(), features.join(",")];
    args.append(&mut names);
    Some(args)
}

/// The feature of the most demanding tier among those that a target requires.
fn tier_feature(required: &[String]) -> Option<&'static str> {
    let features = TIERS.iter().rev().filter_map(|tier| match tier.targets {
        Targets::Feature(feature) => Some(feature),
        Targets::Ordinary => None,
    });
    features.into_iter().find(|feature| required.iter().any(|name| name == feature))
}

/// `package/feature` for each tier's feature that a package has: what a check of all code switches on.
pub fn all_features(workspace: &Workspace) -> Vec<String> {
    let mut all = Vec::new();
    for tier in &TIERS {
        let Targets::Feature(feature) = tier.targets else { continue };
        let has = |package: &&Package| package.features.iter().any(|name| name == feature);
        all.extend(
            workspace.packages.iter().filter(has).map(|package| format!("{}/{feature}", package.name)),
        );
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Target;

    fn workspace(targets: &[(&str, &str, &[&str])]) -> Workspace {
        let target = |(name, kind, required): &(&str, &str, &[&str])| Target {
            name: (*name).into(),
            kind: (*kind).into(),
            required_features: required.iter().map(ToString::to_string).collect(),
        };
        let targets = targets.iter().map(target).collect();
        let features = vec!["kernel-tests".into(), "x".into()];
        let package = Package { name: "p".into(), features, targets, ..Package::default() };
        Workspace { target_dir: "/t".into(), packages: vec![package] }
    }

    fn tier(name: &str) -> &'static Tier {
        static ALL: [Tier; 4] = TIERS;
        ALL.iter().find(|tier| tier.name == name).expect("a tier of the table")
    }

    #[test]
    fn finds_targets_by_the_feature_they_require() {
        let workspace = workspace(&[
            ("plain", "test", &[]),
            ("kernel_a", "test", &["kernel-tests"]),
            ("bench", "bench", &["kernel-tests"]),
            ("kernel_b", "test", &["kernel-tests", "x"]),
            ("both", "test", &["kernel-tests", "node-tests"]),
        ]);
        let kernel = "--package p --features kernel-tests,x --test kernel_a --test kernel_b";
        let node = "--package p --features kernel-tests,node-tests --test both";
        for (name, want) in [("unit", ""), ("kernel", kernel), ("node", node)] {
            let lines: Vec<String> =
                invocations(tier(name), &workspace).iter().map(|args| args.join(" ")).collect();
            assert_eq!(lines, [want], "{name}");
        }
    }

    #[test]
    fn a_tier_without_targets_takes_no_cargo() {
        assert!(invocations(tier("node"), &workspace(&[("plain", "test", &[])])).is_empty());
    }

    #[test]
    fn features_are_those_that_exist() {
        assert_eq!(all_features(&workspace(&[])), ["p/kernel-tests"]);
    }
}
