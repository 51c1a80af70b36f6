use std::fs;
use std::os::unix::fs::symlink;

use clap::Parser as _;

use super::*;
use crate::policy::effective::Source;
use crate::policy::file::ModeName;

const AUDIT: &str = "apiVersion: nobypass.dev/v1alpha1\nmode: audit\n";
const ENFORCE: &str = "apiVersion: nobypass.dev/v1alpha1\nmode: enforce\n";

fn flags(policy: Option<&Path>) -> Config {
    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        config: Config,
    }
    let policy = policy.map(|path| format!("--policy={}", path.display()));
    Cli::parse_from(std::iter::once("agent".to_owned()).chain(policy)).config
}

fn loader(path: &Path) -> Loader {
    Loader::start(&flags(Some(path)), Profiles::built_in()).unwrap()
}

fn mode(loader: &Loader) -> (ModeName, Source) {
    let effective = &loader.state().effective;
    (effective.mode, effective.mode_source)
}

#[test]
fn without_a_file_the_flags_hold() {
    let mut loader = Loader::start(&flags(None), Profiles::built_in()).unwrap();
    assert_eq!((loader.look(), mode(&loader)), (Look::Same, (ModeName::Audit, Source::Flag)));
    assert_eq!((loader.state().taken, loader.state().refused), (0, 0));
}

#[test]
fn a_bad_or_missing_file_at_the_start_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.yaml");
    let start =
        || Loader::start(&flags(Some(&path)), Profiles::built_in()).map(|_| ()).unwrap_err().to_string();
    assert!(start().contains("No such file"), "{}", start());
    fs::write(&path, "mode: strict\n").unwrap();
    assert!(start().contains("line 1 column 1: apiVersion is missing"), "{}", start());
    fs::write(&path, b"\xff\xfe").unwrap();
    assert!(start().contains("UTF-8"), "{}", start());
    fs::write(&path, " ".repeat(2 << 20)).unwrap();
    assert!(start().contains("1 MiB"), "{}", start());
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(start().contains("no file"), "{}", start());
}

#[test]
fn the_last_good_one_holds_until_a_better_one_comes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.yaml");
    fs::write(&path, ENFORCE).unwrap();
    let mut loader = loader(&path);
    let enforce = (ModeName::Enforce, Source::Policy);
    assert_eq!((loader.look(), mode(&loader)), (Look::Same, enforce));
    let revision = loader.state().revision;

    fs::write(&path, "mode: audit\nmod: x\n").unwrap();
    let Look::Refused(PolicyError::Invalid { problems, .. }) = loader.look() else { panic!("taken") };
    assert_eq!(problems.len(), 2);
    assert_eq!((loader.look(), mode(&loader)), (Look::Same, enforce), "told once");
    assert!(loader.state().problem.is_some());
    assert_eq!(loader.state().revision, revision, "nothing changed");

    fs::remove_file(&path).unwrap();
    assert!(matches!(loader.look(), Look::Refused(PolicyError::Read { .. })));
    assert_eq!((loader.look(), mode(&loader)), (Look::Same, enforce));
    assert_eq!((loader.state().taken, loader.state().refused), (1, 2));

    fs::write(&path, AUDIT).unwrap();
    assert_eq!((loader.look(), mode(&loader)), (Look::Changed, (ModeName::Audit, Source::Policy)));
    assert_eq!(loader.state().problem, None);
    assert_eq!((loader.state().taken, loader.state().refused), (2, 2));
    assert!(loader.state().revision > revision);
}

#[test]
fn what_was_set_by_hand_holds_until_the_next_policy() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.yaml");
    fs::write(&path, AUDIT).unwrap();
    let mut loader = loader(&path);
    loader.by_hand(Some(Mode::Off));
    assert_eq!((loader.look(), mode(&loader)), (Look::Same, (ModeName::Off, Source::Hand)));
    fs::write(&path, "nonsense").unwrap();
    loader.look();
    assert_eq!(mode(&loader), (ModeName::Off, Source::Hand), "a bad one ends nothing");
    fs::write(&path, ENFORCE).unwrap();
    loader.look();
    assert_eq!(mode(&loader), (ModeName::Enforce, Source::Policy));
    loader.by_hand(Some(Mode::Off));
    loader.by_hand(None);
    assert_eq!(mode(&loader), (ModeName::Enforce, Source::Policy));
}

/// As the kubelet does it: `policy.yaml` → `..data/policy.yaml`, and `..data` is renamed over.
#[test]
fn a_config_map_that_is_swapped_is_another_file() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let version = |name: &str, text: &str| {
        fs::create_dir(at(name)).unwrap();
        fs::write(at(name).join("policy.yaml"), text).unwrap();
        symlink(name, at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
    };
    version("..1", AUDIT);
    symlink("..data/policy.yaml", at("policy.yaml")).unwrap();
    let mut loader = loader(&at("policy.yaml"));
    version("..2", ENFORCE);
    fs::remove_dir_all(at("..1")).unwrap();
    assert_eq!((loader.look(), mode(&loader).0), (Look::Changed, ModeName::Enforce));
    version("..3", ENFORCE);
    assert_eq!(loader.look(), Look::Same, "the same words");
}

#[test]
fn profiles_of_the_policy_come_first() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.yaml");
    let profile = |name: &str| {
        format!(
            "{AUDIT}profiles:\n- {{name: {name}, containers: {{proxy: [p]}}, ports: {{outbound: 1, inbound: 2}}}}\n"
        )
    };
    fs::write(&path, profile("osm")).unwrap();
    let mut loader = loader(&path);
    let names = |loader: &Loader| -> Vec<String> {
        loader.state().profiles.as_slice().iter().map(|profile| profile.name.to_string()).collect()
    };
    let built_in = Profiles::built_in().as_slice().len();
    assert_eq!((names(&loader).len(), &*names(&loader)[0]), (built_in + 1, "osm"));
    fs::write(&path, profile("linkerd")).unwrap();
    assert_eq!(loader.look(), Look::Changed);
    assert_eq!((names(&loader).len(), &*names(&loader)[0]), (built_in, "linkerd"));
}
