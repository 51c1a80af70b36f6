use std::ops::Not;

use proptest::prelude::*;

use super::{
    super::{marker::Wish, profiles::Profiles},
    *,
};
use crate::pods::model::Sandbox;
use crate::pods::model::{PodUid, User};

const PROXY: &str = "linkerd-proxy";
const MARKED: [(&str, &str); 2] =
    [("linkerd.io/proxy-version", "edge-26.8.1"), ("linkerd.io/trust-root-sha256", "ab")];

/// Builds facts in the order in which a runtime would show them.
struct Pod(PodFacts);

impl Pod {
    fn new() -> Self {
        let sandbox = Sandbox {
            id: id(99),
            ready: true,
            pid: Some(1),
            netns: None,
            runtime_handler: "".into(),
            runtime_type: None,
            created_at: 1,
            host_network: Some(false),
            cgroup_parent: None,
        };
        Self(PodFacts {
            sandbox: Some(sandbox),
            ..PodFacts::new(
                PodUid::parse("72f9a42e-50d3-47ee-8ec7-0bccfb6ea7ae").expect("uid"),
                "default",
                "web",
            )
        })
    }

    fn marked() -> Self {
        Self::new().annotations(&MARKED)
    }

    fn labels(mut self, pairs: &[(&str, &str)]) -> Self {
        self.0.labels = pairs.iter().copied().collect();
        self
    }

    fn annotations(mut self, pairs: &[(&str, &str)]) -> Self {
        self.0.annotations = pairs.iter().copied().collect();
        self
    }

    fn with(self, name: &str, state: State) -> Self {
        self.with_exit(name, state, None)
    }

    fn with_exit(mut self, name: &str, state: State, exit_code: Option<i32>) -> Self {
        let n = u8::try_from(self.0.containers.len()).expect("few");
        self.0.containers.push(Container {
            id: Some(id(n)),
            state,
            exit_code,
            created_at: i64::from(n),
            ..Container::new(name)
        });
        self
    }

    fn sandbox(mut self, change: impl FnOnce(&mut Sandbox)) -> Self {
        change(self.0.sandbox.as_mut().expect("sandbox"));
        self
    }

    fn complete(mut self) -> Self {
        self.0.containers_complete = true;
        self
    }

    fn recognise(&self) -> Membership {
        recognise(&self.0, Profiles::built_in().as_slice())
    }

    fn meshed(&self) -> Meshed {
        match self.recognise() {
            Membership::Meshed(meshed) => *meshed,
            other => panic!("{other:?}"),
        }
    }
}

fn id(n: u8) -> ContainerId {
    ContainerId::parse(&format!("{n:064x}")).expect("id")
}

fn ports(text: &str) -> Vec<PortRange> {
    text.split(' ').filter(|part| part.is_empty().not()).map(|part| part.parse().expect("port")).collect()
}

#[test]
fn plain_pods_are_not_meshed() {
    for pod in [
        Pod::new(),
        Pod::new().with("app", State::Running),
        Pod::new().annotations(&[("linkerd.io/created-by", "linkerd/helm")]),
        Pod::new().annotations(&[("linkerd.io/inject", "disabled")]),
        Pod::new().annotations(&[("linkerd.io/inject", "enabled")]),
        Pod::new().annotations(&[("linkerd.io/proxy-version", "")]),
        Pod::new().with("not-linkerd-proxy", State::Running),
    ] {
        let want = Membership::NotMeshed { reason: NotMeshed::NoProfile };
        assert_eq!(pod.recognise(), want, "{:?}", pod.0);
    }
}

/// The sandbox is there before any container: its labels and annotations must do.
#[test]
fn marks_are_enough_before_the_proxy_exists() {
    for pod in [
        Pod::marked(),
        Pod::new().labels(&[("linkerd.io/control-plane-ns", "linkerd")]),
        Pod::new().labels(&[("linkerd.io/proxy-deployment", "web")]),
        Pod::marked().with("app-init", State::Running),
    ] {
        let meshed = pod.meshed();
        assert_eq!((meshed.proxy_container, meshed.proxy_uid), (None, Some(2102)));
        assert_eq!((meshed.mode, meshed.mode_assumed, meshed.redirect_due), (Mode::Cni, true, true));
    }
    let mut bare = Pod::marked();
    bare.0.sandbox = None;
    assert_eq!(bare.meshed().proxy_container, None);
}

#[test]
fn cni_mode_in_order_of_appearance() {
    let pod = Pod::marked().with("linkerd-network-validator", State::Running);
    assert_eq!((pod.meshed().mode, pod.meshed().mode_assumed), (Mode::Cni, false));

    let pod = pod.with(PROXY, State::Running).with("app", State::Running);
    assert_eq!(pod.meshed().proxy_container, Some(id(1)));
    assert!(pod.meshed().redirect_due);

    let manual = Pod::new().with(PROXY, State::Created);
    assert_eq!(
        manual.meshed().proxy_container,
        Some(id(0)),
        "a container alone is enough, as for the plugin"
    );
    assert!(!manual.meshed().mode_assumed);
}

#[test]
fn the_running_proxy_counts_then_the_newest() {
    let pod = Pod::new().with(PROXY, State::Exited).with(PROXY, State::Running).with(PROXY, State::Created);
    assert_eq!(pod.meshed().proxy_container, Some(id(1)));
    let pod = Pod::new().with(PROXY, State::Exited).with(PROXY, State::Exited);
    assert_eq!(pod.meshed().proxy_container, Some(id(1)));
}

/// What leaves before the init container has succeeded is no bypass.
#[test]
fn init_mode_is_due_once_the_init_container_succeeded() {
    let init = "linkerd-init";
    for (pod, due) in [
        (Pod::marked().with(init, State::Created), false),
        (Pod::marked().with(init, State::Running), false),
        (Pod::marked().with(init, State::Exited), false),
        (Pod::marked().with_exit(init, State::Exited, Some(1)), false),
        (Pod::marked().with_exit(init, State::Exited, Some(0)), true),
        (Pod::marked().with(init, State::Exited).with(PROXY, State::Created), true),
        (Pod::marked().with_exit(init, State::Exited, Some(1)).with_exit(init, State::Exited, Some(0)), true),
        (Pod::marked().with_exit(init, State::Exited, Some(1)).with(init, State::Running), false),
    ] {
        let meshed = pod.meshed();
        assert_eq!(
            (meshed.mode, meshed.mode_assumed, meshed.redirect_due),
            (Mode::Init, false, due),
            "{:?}",
            pod.0
        );
    }
    assert_eq!(Pod::marked().with(init, State::Running).meshed().exemptions.out_ports, ports("4567-4568"));
}

#[test]
fn not_judged() {
    let control = Pod::marked().labels(&[("linkerd.io/control-plane-component", "destination")]);
    let control = control.with(PROXY, State::Running);
    let want = Exempt::ControlPlane { profile: "linkerd".into() };
    assert_eq!(control.recognise(), Membership::Exempt { reason: want });

    let host = Pod::marked().with(PROXY, State::Running).sandbox(|sandbox| sandbox.host_network = Some(true));
    assert_eq!(host.recognise(), Membership::Exempt { reason: Exempt::HostNetwork });
}

#[test]
fn runtimes_that_hide_their_network() {
    for (handler, runtime, want) in [
        ("gvisor", "", Some(Unsupported::UserspaceKernel)),
        ("sandboxed", "io.containerd.runsc.v1", Some(Unsupported::UserspaceKernel)),
        ("kata-qemu", "", Some(Unsupported::VirtualMachine)),
        ("vm", "io.containerd.kata.v2", Some(Unsupported::VirtualMachine)),
        ("Kata", "", Some(Unsupported::VirtualMachine)),
        ("", "io.containerd.runc.v2", None),
        ("crun", "", None),
        ("spin", "io.containerd.spin.v2", None),
    ] {
        let pod = Pod::marked().sandbox(|sandbox| {
            sandbox.runtime_handler = handler.into();
            sandbox.runtime_type = Some(runtime.into());
        });
        let got = match pod.recognise() {
            Membership::Unsupported { reason, .. } => Some(reason),
            Membership::Meshed(_) => None,
            other => panic!("{other:?}"),
        };
        assert_eq!(got, want, "{handler} {runtime}");
    }
    let unmeshed = Pod::new().sandbox(|sandbox| sandbox.runtime_handler = "kata".into());
    assert!(matches!(unmeshed.recognise(), Membership::NotMeshed { .. }));
}

#[test]
fn injected_without_its_proxy() {
    let pod = Pod::marked().with("app", State::Waiting).complete();
    let want = NotMeshed::ProxyMissing { profile: "linkerd".into() };
    assert_eq!(pod.recognise(), Membership::NotMeshed { reason: want });
    assert!(matches!(
        Pod::marked().with(PROXY, State::Waiting).complete().recognise(),
        Membership::Meshed(_)
    ));
}

#[test]
fn linkerd_exemptions() {
    let out = "config.linkerd.io/skip-outbound-ports";
    let inward = "config.linkerd.io/skip-inbound-ports";
    type Row<'a> = (&'a [(&'a str, &'a str)], &'a str, &'a str, &'a [&'a str]);
    #[rustfmt::skip]
    let table: [Row; 8] = [
        (&[], "", "4190-4191", &[]),
        (&[(out, "3306,8000-8100,8050-8200")], "3306 8000-8200", "4190-4191", &[]),
        (&[(out, "")], "", "4190-4191", &[]),
        (&[(inward, "25,587")], "", "25 587 4190-4191", &[]),
        // The mesh's own reading: skip what is no port, keep the rest.
        (&[(out, "443, 3306,x-y")], "443", "4190-4191", &[out]),
        (&[(out, "all")], "", "4190-4191", &[out]),
        (&[(inward, "80,none")], "", "80 4190-4191", &[inward]),
        (&[("config.linkerd.io/skip-subnets", "10.0.0.0/8,oops")], "", "4190-4191", &["config.linkerd.io/skip-subnets"]),
    ];
    for (annotations, want_out, want_in, bad) in table {
        let meshed = Pod::new().annotations(annotations).with(PROXY, State::Running).meshed();
        assert_eq!(meshed.exemptions.out_ports, ports(want_out), "{annotations:?}");
        assert_eq!(meshed.exemptions.in_ports, ports(want_in), "{annotations:?}");
        assert!(meshed.exemptions.in_sources.is_empty() && meshed.exemptions.out_cidrs.is_empty());
        let problems: Vec<_> = meshed.problems.iter().map(|problem| &*problem.annotation).collect();
        assert_eq!(problems, bad, "{annotations:?}");
    }
    let subnets = [("config.linkerd.io/skip-subnets", "10.1.0.0/16, 192.0.2.0/24")];
    let meshed = Pod::new().annotations(&subnets).with(PROXY, State::Running).meshed();
    assert_eq!(meshed.exemptions.in_sources.len(), 2);
    assert_eq!(meshed.exemptions.out_cidrs, [], "the mesh matches them as sources only");
}

#[test]
fn proxy_identity() {
    let uid = |value: &str| {
        let pod =
            Pod::new().annotations(&[("config.linkerd.io/proxy-uid", value)]).with(PROXY, State::Running);
        (pod.meshed().proxy_uid, pod.meshed().problems.len())
    };
    assert_eq!(uid("3000"), (Some(3000), 0));
    assert_eq!(uid(""), (Some(2102), 0));
    assert_eq!(uid("root"), (None, 1), "the strict reading: exempt nobody");
    assert_eq!(uid("-1"), (None, 1));
    assert_eq!(Pod::marked().meshed().proxy_gid, None);
}

#[test]
fn generic_profiles() {
    let yaml = "profiles:\n- name: consul-like\n  recognise:\n    all: [{annotation: {key: c/status}}]\n    \
                not: [{label: {key: c/off, value: 'true'}}]\n  containers: {proxy: [consul-dataplane*]}\n  \
                proxy: {uid: [container, {fixed: 5995}]}\n  ports: {outbound: 15001, inbound: 20000}\n";
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("profiles.yaml");
    std::fs::write(&file, yaml).expect("write");
    let profiles = Profiles::load(&file).expect("valid");
    let name = |pod: &Pod| match recognise(&pod.0, profiles.as_slice()) {
        Membership::Meshed(meshed) => Some((meshed.profile.to_string(), meshed.proxy_uid)),
        _ => None,
    };
    let pod = || Pod::new().with("consul-dataplane-web", State::Running);
    let on = ("c/status", "injected");
    assert_eq!(name(&pod()), None, "without `all` nothing is redirected");
    assert_eq!(name(&pod().annotations(&[on])), Some(("consul-like".to_owned(), Some(5995))));
    assert_eq!(name(&pod().annotations(&[on]).labels(&[("c/off", "true")])), None);
    assert_eq!(name(&Pod::new().annotations(&[on])), None);
    let mut openshift = pod().annotations(&[on]);
    openshift.0.containers[0].user = Some(User { uid: 1_000_650_000, gid: 0 });
    assert_eq!(name(&openshift), Some(("consul-like".to_owned(), Some(1_000_650_000))));
    assert_eq!(name(&Pod::marked()), Some(("linkerd".to_owned(), Some(2102))));
}

#[test]
fn all_reasons_have_distinct_names() {
    let names = [
        NotMeshed::NoProfile.as_str(),
        NotMeshed::ProxyMissing { profile: "x".into() }.as_str(),
        Exempt::HostNetwork.as_str(),
        Exempt::ControlPlane { profile: "x".into() }.as_str(),
        Unsupported::UserspaceKernel.as_str(),
        Unsupported::VirtualMachine.as_str(),
    ];
    assert_eq!(names.iter().collect::<std::collections::BTreeSet<_>>().len(), names.len());
}

/// A value as somebody may write one: of the right kind, nearly so, or anything.
fn any_value() -> impl Strategy<Value = String> {
    prop_oneof![
        "[0-9,:; *-]{0,20}",
        "[0-9./,a-f:]{0,30}",
        Just("true".to_owned()),
        Just("*".to_owned()),
        r#"\{"[A-Z][A-Za-z]{3,20}":("[0-9]{1,5}"|[0-9]{1,6}|\["[0-9:]{1,8}"\])\}"#,
        "redirect: \\{outbound: \\{[a-zA-Z]{4,20}: [0-9\\[\\],]{1,10}\\}\\}",
        "\\PC{0,40}",
    ]
}

proptest! {
    /// Whatever stands in the labels and annotations of a pod and its namespace, of every mesh: an answer, at once. A pod
    /// that is meshed has exemptions that the kernel half can take.
    #[test]
    fn no_value_makes_recognition_panic(values in proptest::collection::vec(any_value(), 24), proxies in 0_usize..6) {
        let profiles = Profiles::built_in();
        let keys: std::collections::BTreeSet<&str> = profiles
            .as_slice()
            .iter()
            .flat_map(Profile::wishes)
            .filter_map(|wish| match wish {
                Wish::Key(key) => Some(key),
                Wish::Container(_) | Wish::Env(_) => None,
            })
            .collect();
        // Every key has its turn, each time with another value.
        let pairs: Vec<(&str, &str)> = keys.iter().copied().zip(values.iter().cycle().map(String::as_str)).collect();
        let map = || pairs.iter().copied().collect::<crate::pods::model::KeyValues>();
        let names = ["linkerd-proxy", "istio-proxy", "app", "consul-dataplane", "kuma-sidecar", "linkerd-init"];
        for profile in profiles.as_slice() {
            let mut pod = Pod::new().with(names[proxies % names.len()], State::Running).0;
            (pod.annotations, pod.namespace_annotations) = (map(), Some(map()));
            for membership in [recognise(&pod, std::slice::from_ref(profile)), recognise(&pod, profiles.as_slice())] {
                if let Membership::Meshed(meshed) = membership {
                    let ports = &meshed.exemptions.out_ports;
                    prop_assert_eq!(&normalise(ports.clone()), ports);
                    prop_assert!(meshed.problems.iter().all(|problem| problem.element.chars().count() <= 64));
                }
            }
        }
    }
}
