use super::*;
use crate::mesh::profile::{IdSource, Merge, Mode};

const FILE: &str = r#"
profiles:
- name: osm
  recognise:
    any:
    - label: {key: osm-proxy-uuid}
    not:
    - annotation: {key: openservicemesh.io/sidecar-injection, value: disabled}
  containers: {proxy: [envoy], init: [osm-init]}
  assumeMode: init
  proxy:
    uid: [container, {fixed: 1500}]
    marks: [{value: 1337, mask: 4095}]
  ports: {outbound: 15001, inbound: 15003, own: [15000, 15010]}
  exempt:
    outPorts: {annotation: openservicemesh.io/outbound-port-exclusion-list, merge: append, init: [53, 8000-8100]}
    outCidrs: {annotation: openservicemesh.io/outbound-ip-range-exclusion-list, defaults: [10.0.0.0/8]}
  validator: {exitCode: 95, addresses: ["192.0.2.2:1404", "[fd00::1]:20001"]}
"#;

fn parse(text: &str) -> Result<Profiles, ProfileError> {
    Profiles::parse(Path::new("/etc/nobypass/profiles.yaml"), text)
}

#[test]
fn a_generic_profile_from_yaml() {
    let profiles = parse(FILE).expect("valid");
    let names: Vec<_> = profiles.as_slice().iter().map(|profile| &*profile.name).collect();
    assert_eq!(names, ["osm", "linkerd", "istio-sidecar", "istio-ambient", "consul", "kuma"]);
    let osm = profiles.named("osm").expect("there");
    assert_eq!(osm.proxy.uid, [IdSource::Container, IdSource::Fixed(1500)]);
    assert_eq!(osm.exempt.out_ports.init, ["53".parse().expect("port"), "8000-8100".parse().expect("range")]);
    assert_eq!(osm.exempt.out_ports.merge, Merge::Append);
    assert_eq!((osm.assume_mode, osm.families.ipv4, osm.families.ipv6), (Mode::Init, true, true));

    let Wanted { keys, containers, env } = profiles.wanted();
    for key in
        ["osm-proxy-uuid", "openservicemesh.io/outbound-port-exclusion-list", "linkerd.io/proxy-version"]
    {
        assert!(keys.keeps(key), "{key}");
    }
    assert!(!keys.keeps("unrelated"));
    assert!(containers.keeps("osm-init") && env.keeps("DISABLE_ENVOY") && !env.keeps("PATH"));
}

#[test]
fn the_example_in_the_readme_is_valid() {
    let readme = include_str!("../../../../README.md");
    let example = readme.split("```yaml").nth(1).and_then(|rest| rest.split("```").next());
    let profiles = parse(example.expect("an example")).expect("valid");
    let osm = profiles.as_slice().first().expect("one");
    assert_eq!((&*osm.name, osm.families.ipv4, osm.families.ipv6), ("osm", true, false));
}

#[test]
fn json_is_yaml_too_and_a_profile_round_trips() {
    let built_in = Profiles::built_in();
    assert_eq!(built_in.as_slice().len(), BUILT_IN.len(), "every built-in profile can be read");
    for (profile, (name, _)) in built_in.as_slice().iter().zip(BUILT_IN) {
        assert_eq!((&*profile.name, profile.check()), (name, Ok(())));
    }
    let json = serde_json::json!({ "profiles": built_in.as_slice() }).to_string();
    assert_eq!(parse(&json).expect("valid"), built_in, "a profile of a built-in's name takes its place");
}

#[test]
fn errors_name_the_file_and_the_place() {
    let minimal = "profiles:\n- name: x\n  containers: {proxy: [p]}\n  ports: {outbound: 1, inbound: 2}\n";
    assert!(parse(minimal).is_ok());
    for (text, want) in [
        (minimal.replace("inbound: 2", "inbound: 2, inbuond: 3"), "inbuond"),
        (minimal.replace("name: x", "name: 'a b'"), "letters, digits"),
        (minimal.replace("[p]", "['*']"), "every container"),
        (minimal.replace("[p]", "[]"), "which pods are meshed"),
        (minimal.replace("outbound: 1", "outbound: 70000"), "line 4"),
        (format!("{minimal}  recognise: {{any: [{{label: {{key: ''}}}}]}}\n"), "every pod"),
        (format!("{minimal}{}", minimal.replace("profiles:\n", "")), "two of this name"),
        (format!("{minimal}  proxy: {{elsewhere: true}}\n"), "no container of the pod"),
        (
            format!("{minimal}  proxy: {{marks: [{{value: 1, mask: 1}}, {{value: 2, mask: 2}}]}}\n"),
            "one mark",
        ),
        (format!("{minimal}  materialised: {{kind: hcl, from: []}}\n"), "hcl"),
        ("profiles: 3".to_owned(), "line 1"),
        (String::new(), "profiles"),
    ] {
        let error = parse(&text).expect_err(&text).to_string();
        assert!(error.contains(want) && error.contains("/etc/nobypass/profiles.yaml"), "{text}\n→ {error}");
    }
    assert!(matches!(Profiles::load(Path::new("/nonexistent")), Err(ProfileError::Read { .. })));
}

proptest::proptest! {
    #[test]
    fn no_file_makes_it_panic(text in "(profiles:\n- name: [a-z]{1,3}\n  [a-z]{4,10}: )?\\PC{0,80}") {
        let _ = parse(&text);
    }
}
