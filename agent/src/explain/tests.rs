use clap::Parser as _;
use nobypass_common::abi::Config as KernelConfig;

use super::*;
use crate::config::Config;
use crate::detect::{Evidence, Reason};
use crate::pods::PodUid;
use crate::pods::model::PodFacts;
use crate::policy::check;
use crate::policy::mode;
use crate::probe::Answer;

const S: u64 = 1_000_000_000;

fn policy(text: &str) -> Effective {
    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        config: Config,
    }
    let file = check::parse(&format!("apiVersion: nobypass.dev/v1alpha1\n{text}\n")).unwrap();
    Effective::new(&Cli::parse_from(["agent"]).config, &file, None)
}

/// A meshed pod of the first built-in profile.
fn view(policy: &Effective, annotations: &[(&str, &str)]) -> PodView {
    let uid = PodUid::parse("2c48913c-b29f-11e7-9350-020968147796").unwrap();
    let mut facts = PodFacts::new(uid, "shop", "cart-0");
    facts.annotations = annotations.iter().copied().collect();
    facts.labels = [("linkerd.io/control-plane-ns", "linkerd")].into_iter().collect();
    let mut proxy = Container::new("linkerd-proxy");
    proxy.state = State::Running;
    let mut validator = Container::new("linkerd-network-validator");
    (validator.state, validator.exit_code) = (State::Exited, Some(95));
    facts.containers = vec![proxy, validator, Container::new("app")];
    let choice = mode::choose(&facts, policy, None);
    PodView {
        namespace: "shop".into(),
        name: "cart-0".into(),
        mesh: "linkerd".into(),
        kind: PodKind::Meshed,
        reason: "meshed",
        families: [true, false],
        choice: Some(choice),
        traffic: Some(policy.traffic("shop", None)),
        facts: Some(Arc::new(facts)),
        ..PodView::unknown(uid, 10)
    }
}

fn explained(
    policy: &Effective,
    view: PodView,
    sign: Option<Evidence>,
    counted: &[(Counter, u64)],
) -> Explanation {
    let view = Arc::new(view);
    let now = 1000 * S;
    let mut state = PodState::new(Arc::clone(&view), 0, 100 * S);
    if let Some(sign) = &sign {
        state.add(sign);
    }
    state.evaluate(900 * S);
    let mut counters = PodCounters::ZERO;
    for (counter, n) in counted {
        counters.count[counter.code() as usize] = *n;
    }
    let profiles = Profiles::built_in();
    let known = Known {
        view: &view,
        state: Some(&state),
        policy,
        profiles: &profiles,
        events: Vec::new(),
        packet_sockets: Vec::new(),
        lost_hooks: Vec::new(),
    };
    let mut config = KernelConfig::default();
    policy.kernel(&mut config);
    let entry = PodPolicy { mode: view.choice.as_ref().unwrap().code(), ..PodPolicy::default() };
    explain(&known, &Kernel { config, entry: Some(entry), counters, now })
}

#[test]
fn a_bypassing_pod_says_why_and_what_to_do() {
    let policy = policy("mode: enforce");
    let sign =
        Evidence::Probe { family: Family::V4, answer: Answer::NotRedirected { ifindex: 2 }, at: 990 * S };
    let view =
        view(&policy, &[("config.linkerd.io/skip-outbound-ports", "3306,8000-8010"), (mode::KEY, "off")]);
    let counted = [(Counter::Bypass, 3), (Counter::BypassDropped, 3), (Counter::WouldDrop, 0)];
    let explained = explained(&policy, view, Some(sign), &counted);
    let v4 = &explained.families[0];
    assert_eq!((&*v4.verdict, &*v4.reason, v4.since_seconds), ("bypassing", "not_redirected", Some(100.0)));
    assert_eq!(v4.evidence[0].seconds_ago, 10.0);
    assert!(v4.evidence[0].what.contains("index 2"), "{v4:?}");
    assert_eq!((&*explained.families[1].verdict, &*explained.families[1].reason), ("unknown", "family_gap"));
    assert!(
        explained.recognition.contains("linkerd.io/control-plane-ns")
            || explained.recognition.contains("linkerd")
    );
    assert!(explained.exemptions["ports out"].contains(&"3306".to_owned()), "{:?}", explained.exemptions);
    let roles: Vec<&str> = explained.containers.iter().map(|container| &*container.role).collect();
    assert_eq!(roles, ["proxy", "validator", "app"]);
    assert_eq!(explained.mode.mode, "enforce");
    assert_eq!(explained.mode.node, "enforce by the policy file");
    assert!(explained.enforce.contains("dropped 3"), "{}", explained.enforce);
    assert!(explained.next[0].contains("kubectl delete pod -n shop cart-0"), "{:?}", explained.next);
    assert!(explained.next.iter().any(|step| step.contains("not allowed")), "{:?}", explained.next);
    let json = serde_json::to_string(&explained).unwrap();
    assert_eq!(
        serde_json::from_str::<Explanation>(&json).unwrap(),
        explained,
        "the command line reads it back"
    );
}

#[test]
fn audit_says_what_enforce_would_have_dropped() {
    let policy = policy("");
    let explained = explained(&policy, view(&policy, &[]), None, &[(Counter::WouldDrop, 7)]);
    assert!(explained.enforce.contains("would have dropped 7"), "{}", explained.enforce);
    assert_eq!(explained.next, ["nothing"]);
}

#[test]
fn each_reason_has_its_advice() {
    let policy = policy("failOpenNamespaces: [shop]\nmode: enforce");
    for (reason, says) in [
        (Reason::NotRedirected, "nobypass cni status"),
        (Reason::ProxyUidImpersonation, "runAsUser"),
        (Reason::RawSocket, "CAP_NET_RAW"),
    ] {
        let sign = Evidence::Bypass { family: Family::V4, reason, at: 990 * S };
        let next = explained(&policy, view(&policy, &[]), Some(sign), &[]).next;
        assert!(next[0].contains(says), "{reason:?}: {next:?}");
        assert!(next.iter().any(|step| step.contains("failOpenNamespaces")), "{next:?}");
    }
    let gap = Evidence::Bypass { family: Family::V6, reason: Reason::NotRedirected, at: 990 * S };
    assert!(explained(&policy, view(&policy, &[]), Some(gap), &[]).next[0].contains("familyGap"));
    let old = Evidence::Preexisting { family: Family::V4, connections: 2, at: 990 * S };
    assert!(explained(&policy, view(&policy, &[]), Some(old), &[]).next[0].contains("before the agent"));
}
