use super::*;
use crate::policy::file::{FamilyGap, Inbound, ModeName, NonTcp, Span};

const HEAD: &str = "apiVersion: nobypass.dev/v1alpha1\n";

fn problems(text: &str) -> Vec<String> {
    match parse(text) {
        Ok(file) => panic!("accepted {text}: {file:?}"),
        Err(problems) => problems.iter().map(ToString::to_string).collect(),
    }
}

#[test]
fn the_example_is_valid_and_says_what_it_says() {
    let file = parse(include_str!("../../../../deploy/policy.example.yaml")).unwrap();
    assert_eq!(file.mode, Some(ModeName::Audit));
    assert_eq!(file.namespaces.len(), 3);
    assert_eq!(file.namespaces[2].mode, Some(ModeName::Off));
    assert_eq!(file.max_agent_silence, Some(Span(std::time::Duration::from_secs(600))));
    assert_eq!(&*file.profiles[0].name, "osm");
}

#[test]
fn the_smallest_policy_says_nothing() {
    assert_eq!(parse(HEAD).unwrap(), PolicyFile::default());
    let off = parse(&format!("{HEAD}mode: off\ninbound: off\n")).unwrap();
    assert_eq!((off.mode, off.inbound), (Some(ModeName::Off), Some(Inbound::Off)), "no boolean");
    assert_eq!(parse(r#"{"apiVersion": "nobypass.dev/v1alpha1"}"#).unwrap(), PolicyFile::default());
}

#[test]
fn wrong_files_are_refused_with_the_place_and_what_is_right() {
    for (text, expected) in [
        ("", &["line 1 column 1: must be a mapping, not nothing"][..]),
        ("mode: audit\n", &["line 1 column 1: apiVersion is missing: nobypass.dev/v1alpha1"]),
        ("apiVersion: v1\n", &["line 1 column 13: apiVersion: \"v1\" is not one of nobypass.dev/v1alpha1"]),
        ("a: [b\n", &["line 1"]),
        ("- a\n", &["line 1 column 1: must be a mapping, not a list"]),
        ("mode: audit\nmode: off\n", &["duplicate"]),
    ] {
        let found = problems(text);
        assert_eq!(found.len(), expected.len(), "{text}: {found:?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.contains(expected), "{text}\n  says {found}\n  not  {expected}");
        }
    }
    for (text, expected) in [
        ("mode: strict", "line 2 column 7: mode: \"strict\" is not one of off, audit, enforce"),
        (
            "mode: false",
            "line 2 column 7: mode: false is a boolean: write one of \"off\", \"audit\", \"enforce\" in quotes",
        ),
        ("mode: 3", "mode: an integer is not one of off, audit, enforce"),
        ("mode: [audit]", "mode: a list is not one of"),
        ("modes: audit", "line 2 column 1: \"modes\" is not known; did you mean mode?"),
        ("familygap: drop", "\"familygap\" is not known; did you mean familyGap?"),
        ("colour: red", "\"colour\" is not known: apiVersion, mode, unknownPods"),
        ("holdMs: 0", "line 2 column 9: holdMs: 0 is not within 1 to 60000"),
        ("holdMs: 60001", "is not within 1 to 60000"),
        ("holdMs: 3s", "holdMs: must be a whole number, not a text"),
        ("holdMs: 1.5", "holdMs: must be a whole number, not a number with a fraction"),
        ("events: 10", "events: must be a mapping, not an integer"),
        ("events: {rate: 0}", "line 2 column 16: events.rate: 0 is not within 1 to 100000"),
        ("events: {burst: 1}", "events: \"burst\" is not known: rate"),
        ("unknownPods: {action: hold}", "unknownPods: a mapping is not one of pass, hold"),
        ("allowPodOverride: always", "\"always\" is not one of never, stricter, any"),
        ("failOpenNamespaces: kube-system", "failOpenNamespaces: must be a list, not a text"),
        ("failOpenNamespaces: [1]", "failOpenNamespaces[0]: must be a text, not an integer"),
        ("failOpenNamespaces: ['']", "failOpenNamespaces[0]: must not be empty"),
        ("namespaces: {shop: enforce}", "namespaces: must be a list, not a mapping"),
        (
            "namespaces:\n- mode: enforce",
            "line 3 column 3: namespaces[0]: matches no namespace: give names, or matchLabels",
        ),
        ("namespaces:\n- names: [shop]", "namespaces[0]: says nothing: give mode"),
        ("namespaces:\n- {names: [shop], mode: on}", "namespaces[0].mode: \"on\" is not one of"),
        (
            "namespaces:\n- {name: shop, mode: off}",
            "namespaces[0]: \"name\" is not known; did you mean names?",
        ),
        (
            "namespaces:\n- {names: ['s*'], mode: off}\n- {names: [shop], mode: enforce}",
            "line 4 column 3: namespaces[1]: is never reached: namespaces[0] comes first and matches the same",
        ),
        (
            "namespaces:\n- {matchLabels: {a: 1}, mode: off}",
            "namespaces[0].matchLabels.a: must be a text, not an integer",
        ),
        ("onSilence: audit", "onSilence: means nothing without maxAgentSilence"),
        ("maxAgentSilence: 10", "maxAgentSilence: must be a text, not an integer"),
        ("maxAgentSilence: soon", "\"soon\" is no time"),
        ("maxAgentSilence: 1d", "\"1d\" is no time"),
        ("maxAgentSilence: 5s", "line 2 column 18: maxAgentSilence: is shorter than the 30s"),
        ("remedies: {evict: maybe}", "remedies.evict: \"maybe\" is not one of off, dry-run, on"),
        ("remedies: {evictionsPerMinute: 0}", "remedies.evictionsPerMinute: 0 is not within 1 to 600"),
        ("remedies: {evicts: on}", "remedies: \"evicts\" is not known; did you mean evict?"),
        ("profiles: [{containers: {}}]", "profiles[0]: name is missing"),
        ("profiles:\n- {name: x, containers: {proxy: [p]}, ports: {outbound: 1, inbound: 70000}}", "line 3"),
        (
            "profiles:\n- {name: x, containers: {proxy: ['*']}, ports: {outbound: 1, inbound: 2}}",
            "line 3 column 3: profiles[0]: profile \"x\": containers.proxy would match every container",
        ),
    ] {
        let found = problems(&format!("{HEAD}{text}\n"));
        assert_eq!(found.len(), 1, "{text}: {found:?}");
        assert!(found[0].contains(expected), "{text}\n  says {}\n  not  {expected}", found[0]);
    }
}

#[test]
fn all_problems_are_told_at_once_in_the_order_of_the_file() {
    let found = problems(&format!("{HEAD}mod: audit\nholdMs: 0\nquic: no\nnamespaces:\n- {{mode: x}}\n"));
    let lines: Vec<&str> = found.iter().filter_map(|line| line.split(" column").next()).collect();
    assert_eq!(lines, ["line 2", "line 3", "line 4", "line 6"], "{found:?}");
}

/// The schema and the types are written by hand, so they are compared.
#[test]
fn schema_and_types_have_the_same_fields_and_values() {
    let keys = |value: &Value| -> BTreeSet<String> {
        value.as_object().into_iter().flatten().map(|(key, _)| key.clone()).collect()
    };
    let full = serde_json::to_value(PolicyFile {
        max_agent_silence: Some(Span(std::time::Duration::from_secs(90))),
        namespaces: vec![NamespaceRule::default()],
        events: Some(super::super::file::Events::default()),
        remedies: Some(crate::remedy::policy::Section::default()),
        ..PolicyFile::default()
    })
    .unwrap();
    let schema = &PARSED["properties"];
    assert_eq!(keys(&full), keys(schema));
    assert_eq!(keys(&full["events"]), keys(&schema["events"]["properties"]));
    assert_eq!(keys(&full["remedies"]), keys(&schema["remedies"]["properties"]));
    assert_eq!(keys(&full["namespaces"][0]), keys(&schema["namespaces"]["items"]["properties"]));
    assert_eq!(full["maxAgentSilence"], "90s");
    let values = |schema: &Value| -> Vec<String> {
        schema["enum"].as_array().unwrap().iter().map(|value| value.as_str().unwrap().to_owned()).collect()
    };
    // Each value of the schema is one of the type, and the other way round.
    for (property, name) in [
        ("mode", "mode"),
        ("nonTcp", "nonTcp"),
        ("quic", "nonTcp"),
        ("familyGap", "familyGap"),
        ("inbound", "inbound"),
    ] {
        for value in values(&PARSED["$defs"][name]) {
            assert!(parse(&format!("{HEAD}{property}: \"{value}\"\n")).is_ok(), "{property}: {value}");
        }
    }
    for value in values(&PARSED["$defs"]["step"]) {
        assert!(parse(&format!("{HEAD}remedies: {{evict: \"{value}\"}}\n")).is_ok(), "{value}");
    }
    for property in ["unknownPods", "allowPodOverride"] {
        for value in values(&schema[property]) {
            assert!(parse(&format!("{HEAD}{property}: {value}\n")).is_ok(), "{property}: {value}");
        }
    }
    let sizes = ["mode", "nonTcp", "familyGap", "inbound"].map(|name| values(&PARSED["$defs"][name]).len());
    let label = |value: Value| value.as_str().unwrap().to_owned();
    let of_types = [
        [ModeName::Off, ModeName::Audit, ModeName::Enforce]
            .map(|v| label(serde_json::to_value(v).unwrap()))
            .len(),
        [NonTcp::Ignore, NonTcp::Count, NonTcp::Drop].len(),
        [FamilyGap::Report, FamilyGap::Drop].len(),
        [Inbound::Off, Inbound::Audit, Inbound::Enforce].len(),
    ];
    assert_eq!(sizes, of_types);
}

#[test]
fn every_property_says_what_it_is_for() {
    for (name, property) in PARSED["properties"].as_object().unwrap() {
        assert!(property["description"].as_str().is_some_and(|text| text.len() > 15), "{name}");
    }
}

#[test]
fn the_nearest_name_is_near() {
    let names = ["mode", "unknownPods", "holdMs"];
    assert_eq!(nearest("Mode", &names), Some("mode"));
    assert_eq!(nearest("unknown_pods", &names), Some("unknownPods"));
    assert_eq!(nearest("colour", &names), None);
}
