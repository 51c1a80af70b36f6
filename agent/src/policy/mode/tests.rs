use clap::Parser as _;

use super::*;
use crate::config::Config;
use crate::pods::PodUid;
use crate::pods::model::KeyValues;
use crate::policy::check;

fn policy(text: &str, hand: Option<Mode>) -> Effective {
    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        config: Config,
    }
    let flags = Cli::parse_from(["agent", "--mode", "audit"]).config;
    let file = check::parse(&format!("apiVersion: nobypass.dev/v1alpha1\n{text}\n")).unwrap();
    Effective::new(&flags, &file, hand)
}

fn pod(namespace: &str, annotation: &str, label: &str) -> PodFacts {
    let uid = PodUid::parse("2c48913c-b29f-11e7-9350-020968147796").unwrap();
    let one =
        |value: &str| -> KeyValues { [(KEY, value)].into_iter().filter(|(_, v)| !v.is_empty()).collect() };
    let mut facts = PodFacts::new(uid, namespace, "cart-0");
    facts.annotations = one(annotation);
    facts.namespace_labels = Some(one(label));
    facts
}

#[test]
fn precedence() {
    use Level::{NamespaceLabel, NamespaceRule, Node, Pod};
    const RULE: &str = "namespaces: [{names: [shop], mode: enforce}, {names: ['*'], mode: off}]";
    // Policy, by hand, pod annotation, namespace label, namespace: mode and who says so.
    for (text, hand, annotation, label, namespace, expected) in [
        ("", None, "", "", "shop", ("audit", Node)),
        ("mode: enforce", None, "", "", "shop", ("enforce", Node)),
        ("mode: enforce", Some(Mode::Off), "", "", "shop", ("off", Node)),
        ("", Some(Mode::Enforce), "", "", "shop", ("enforce", Node)),
        (RULE, None, "", "", "shop", ("enforce", NamespaceRule)),
        (RULE, None, "", "", "other", ("off", NamespaceRule)),
        (RULE, Some(Mode::Audit), "", "", "shop", ("enforce", NamespaceRule)),
        (RULE, None, "", "audit", "shop", ("audit", NamespaceLabel)),
        (RULE, None, "", "enforce", "other", ("enforce", NamespaceLabel)),
        (RULE, None, "", "strict", "shop", ("enforce", NamespaceRule)),
        // A pod may be stricter,
        ("", None, "enforce", "", "shop", ("enforce", Pod)),
        ("", None, "enforce", "off", "shop", ("enforce", Pod)),
        (RULE, None, "audit", "", "other", ("audit", Pod)),
        ("", None, "audit", "", "shop", ("audit", Pod)),
        // and not laxer than whatever level holds without it.
        ("", None, "off", "", "shop", ("audit", Node)),
        ("mode: enforce", None, "audit", "", "shop", ("enforce", Node)),
        (RULE, None, "audit", "", "shop", ("enforce", NamespaceRule)),
        (RULE, None, "off", "audit", "shop", ("audit", NamespaceLabel)),
        ("", Some(Mode::Enforce), "audit", "", "shop", ("enforce", Node)),
        ("", None, "Enforce", "", "shop", ("audit", Node)),
        ("allowPodOverride: any", None, "off", "", "shop", ("off", Pod)),
        ("allowPodOverride: any\nmode: enforce", None, "audit", "", "shop", ("audit", Pod)),
        ("allowPodOverride: never", None, "enforce", "", "shop", ("audit", Node)),
        ("allowPodOverride: never", None, "off", "", "shop", ("audit", Node)),
        // Nothing is dropped in kube-system, unless the operator says that it may be.
        ("mode: enforce", None, "", "", "kube-system", ("audit", Node)),
        ("mode: enforce", None, "enforce", "", "kube-system", ("audit", Pod)),
        ("mode: off", None, "", "", "kube-system", ("off", Node)),
        ("mode: enforce\nfailOpenNamespaces: []", None, "", "", "kube-system", ("enforce", Node)),
        ("mode: enforce\nfailOpenNamespaces: ['sh*']", None, "", "", "shop", ("audit", Node)),
    ] {
        let choice = choose(&pod(namespace, annotation, label), &policy(text, hand), None);
        let name = format!("{text:?} {hand:?} {annotation:?} {label:?} {namespace}: {choice:?}");
        assert_eq!((choice.mode.label(), choice.level), expected, "{name}");
        assert!(choice.own.is_none() || choice.own == Some(choice.mode), "{name}");
        assert_eq!(
            choice.own.is_none(),
            choice.level == Node && !policy(text, hand).fails_open(namespace),
            "{name}"
        );
    }
}

#[test]
fn everybody_who_said_something_is_named() {
    let text = "mode: enforce\nnamespaces: [{names: [shop], mode: audit}]";
    let choice = choose(&pod("shop", "off", "enforce"), &policy(text, None), None);
    let said: Vec<(Level, &str, Fate)> =
        choice.said.iter().map(|said| (said.level, &*said.value, said.fate)).collect();
    assert_eq!(
        said,
        [
            (Level::Pod, "off", Fate::Refused),
            (Level::NamespaceLabel, "enforce", Fate::Holds),
            (Level::NamespaceRule, "audit", Fate::Overridden),
            (Level::Node, "enforce", Fate::Overridden),
        ]
    );
    assert_eq!(choice.refused().map(|said| &*said.value), Some("off"));
    let long = choose(&pod("shop", &"x".repeat(1000), ""), &policy("", None), None);
    assert_eq!((long.said[0].fate, long.said[0].value.len()), (Fate::Invalid, 32));
}

#[test]
fn an_edit_of_a_running_pod_counts() {
    let mut facts = pod("shop", "", "");
    facts.edited_annotations = Some([(KEY, "enforce")].into_iter().collect());
    assert_eq!(choose(&facts, &policy("", None), None).mode, Mode::Enforce);
    facts.annotations = [(KEY, "enforce")].into_iter().collect();
    facts.edited_annotations = Some(KeyValues::default());
    assert_eq!(choose(&facts, &policy("", None), None).mode, Mode::Audit);
}

#[test]
fn tetragon_4997_enforce_that_cannot_be_is_said_to_be_less() {
    let policy = policy("mode: enforce", None);
    for (namespace, unsupported, downgrade) in [
        ("shop", None, None),
        ("shop", Some(Unsupported::VirtualMachine), Some(Downgrade::UnsupportedRuntime)),
        ("shop", Some(Unsupported::GroupRules), Some(Downgrade::GroupRules)),
        ("kube-system", None, Some(Downgrade::FailOpenNamespace)),
    ] {
        let choice = choose(&pod(namespace, "", ""), &policy, unsupported);
        assert_eq!(choice.downgrade, downgrade, "{namespace}");
        let mode = if downgrade.is_none() { Mode::Enforce } else { Mode::Audit };
        assert_eq!(choice.mode, mode, "{namespace}");
    }
}

#[test]
fn without_the_api_server_a_rule_by_label_matches_nothing() {
    let policy = policy("namespaces: [{matchLabels: {team: a}, mode: enforce}]", None);
    let mut facts = pod("shop", "", "");
    facts.namespace_labels = None;
    assert_eq!(choose(&facts, &policy, None).mode, Mode::Audit);
    facts.namespace_labels = Some([("team", "a")].into_iter().collect());
    assert_eq!(choose(&facts, &policy, None).mode, Mode::Enforce);
    facts.namespace_labels = Some([("team", "b")].into_iter().collect());
    assert_eq!(choose(&facts, &policy, None).mode, Mode::Audit);
}
