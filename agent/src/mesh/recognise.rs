//! Whether a pod is meshed, and what follows from that. Pure.

use super::{
    exempt::{Exemptions, Problem, exemptions, identity},
    profile::{Families, Mark, Marker, Mode, Profile, matches},
};
use crate::pods::model::{Container, ContainerId, PodFacts, Sandbox, State};

/// Runtimes whose pods have a network stack of their own that no program of this kernel sees, by a part of their
/// handler's or runtime's name.
const FOREIGN_RUNTIMES: [(&str, Unsupported); 7] = [
    ("runsc", Unsupported::UserspaceKernel),
    ("gvisor", Unsupported::UserspaceKernel),
    ("quark", Unsupported::UserspaceKernel),
    ("kata", Unsupported::VirtualMachine),
    ("firecracker", Unsupported::VirtualMachine),
    ("urunc", Unsupported::VirtualMachine),
    ("runhcs", Unsupported::VirtualMachine),
];

/// What a pod is to the meshes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Membership {
    /// No mesh wants it redirected.
    NotMeshed {
        /// Why.
        reason: NotMeshed,
    },
    /// It must be redirected.
    Meshed(Box<Meshed>),
    /// It belongs to a mesh, or looks so, and is not judged.
    Exempt {
        /// Why.
        reason: Exempt,
    },
    /// It must be redirected, and nothing here can tell whether it is.
    Unsupported {
        /// The profile that claims it.
        profile: Box<str>,
        /// Why.
        reason: Unsupported,
    },
}

/// Why a pod is not meshed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotMeshed {
    /// No profile finds its marks on it.
    NoProfile,
    /// It carries the marks, but the proxy is not among its containers: injection went wrong.
    ProxyMissing {
        /// The profile whose marks it carries.
        profile: Box<str>,
    },
}

/// Why a pod is not judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exempt {
    /// It uses the node's network, where no mesh redirects.
    HostNetwork,
    /// It is part of the mesh itself.
    ControlPlane {
        /// The mesh.
        profile: Box<str>,
    },
}

/// Why a meshed pod cannot be judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unsupported {
    /// gVisor and its like: a network stack in user space.
    UserspaceKernel,
    /// Kata and its like: a kernel of its own.
    VirtualMachine,
}

/// All that the kernel half and the reports need to know of a meshed pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meshed {
    /// The profile's name.
    pub profile: Box<str>,
    /// The proxy's container: the running one, else the newest. `None` until it exists.
    pub proxy_container: Option<ContainerId>,
    /// The UID whose connections the mesh lets out as its proxy's.
    pub proxy_uid: Option<u32>,
    /// The GID likewise.
    pub proxy_gid: Option<u32>,
    /// Socket marks likewise.
    pub proxy_marks: Vec<Mark>,
    /// The port that outgoing connections are redirected to.
    pub outbound_port: u16,
    /// The port that incoming connections are redirected to.
    pub inbound_port: u16,
    /// Who sets up the redirection.
    pub mode: Mode,
    /// No container has shown the mode yet; it is the profile's assumption.
    pub mode_assumed: bool,
    /// From now on an un-redirected connection is a bypass. With an init container: once it has succeeded.
    pub redirect_due: bool,
    /// The IP families that the mesh redirects.
    pub families: Families,
    /// What the mesh lets pass.
    pub exemptions: Exemptions,
    /// Annotations that could not be taken as they are.
    pub problems: Vec<Problem>,
}

impl NotMeshed {
    /// For metrics and reports.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::NoProfile => "no_profile",
            Self::ProxyMissing { .. } => "proxy_missing",
        }
    }
}

impl Exempt {
    /// For metrics and reports.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::HostNetwork => "host_network",
            Self::ControlPlane { .. } => "control_plane",
        }
    }
}

impl Unsupported {
    /// For metrics and reports.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::UserspaceKernel => "userspace_kernel",
            Self::VirtualMachine => "virtual_machine",
        }
    }
}

/// Decides what `pod` is. The first of `profiles` that claims it counts.
///
/// Facts may arrive piece by piece, so the answer may change until the proxy's container exists; labels and
/// annotations alone are enough to call a pod meshed.
#[must_use]
pub fn recognise(pod: &PodFacts, profiles: &[Profile]) -> Membership {
    if pod.host_network() == Some(true) {
        return Membership::Exempt { reason: Exempt::HostNetwork };
    }
    let mut missing = None;
    for profile in profiles {
        let on_pod = |markers: &[_]| markers.iter().any(|marker| is_on(marker, pod));
        let rules = &profile.recognise;
        if on_pod(&rules.control_plane) {
            return Membership::Exempt { reason: Exempt::ControlPlane { profile: profile.name.clone() } };
        }
        let proxy = proxy(pod, profile);
        let claimed = (proxy.is_some() || on_pod(&rules.any))
            && rules.all.iter().all(|marker| is_on(marker, pod))
            && !on_pod(&rules.not);
        if !claimed {
            continue;
        }
        if proxy.is_none() && pod.containers_complete && !profile.containers.proxy.is_empty() {
            missing = missing.or_else(|| Some(profile.name.clone()));
            continue;
        }
        if let Some(reason) = pod.sandbox.as_ref().and_then(foreign_runtime) {
            return Membership::Unsupported { profile: profile.name.clone(), reason };
        }
        return Membership::Meshed(Box::new(meshed(pod, profile, proxy)));
    }
    let reason = match missing {
        Some(profile) => NotMeshed::ProxyMissing { profile },
        None => NotMeshed::NoProfile,
    };
    Membership::NotMeshed { reason }
}

fn is_on(marker: &Marker, pod: &PodFacts) -> bool {
    marker.is_on(&pod.labels, &pod.annotations)
}

/// Containers of `pod` with one of these names; the one in the best state first, the newest of those.
fn best<'a>(pod: &'a PodFacts, names: &[Box<str>]) -> Option<&'a Container> {
    pod.containers
        .iter()
        .filter(|container| names.iter().any(|name| matches(name, &container.name)))
        .max_by_key(|container| (container.state, container.created_at))
}

fn proxy<'a>(pod: &'a PodFacts, profile: &Profile) -> Option<&'a Container> {
    best(pod, &profile.containers.proxy)
}

fn foreign_runtime(sandbox: &Sandbox) -> Option<Unsupported> {
    let names = [&*sandbox.runtime_handler, sandbox.runtime_type.as_deref().unwrap_or_default()];
    let names = names.map(str::to_ascii_lowercase);
    let is_named = |part: &str| names.iter().any(|name| name.contains(part));
    FOREIGN_RUNTIMES.iter().find_map(|(part, reason)| is_named(part).then_some(*reason))
}

fn meshed(pod: &PodFacts, profile: &Profile, proxy: Option<&Container>) -> Meshed {
    let init = best(pod, &profile.containers.init);
    let validator = best(pod, &profile.containers.validator);
    // Init containers run in order, and the mesh's come before the proxy: a proxy without them means a CNI plugin.
    let (mode, mode_assumed) = if init.is_some() {
        (Mode::Init, false)
    } else if validator.is_some() || proxy.is_some() || pod.containers_complete {
        (Mode::Cni, false)
    } else {
        (profile.assume_mode, true)
    };
    let redirect_due = match mode {
        Mode::Cni => true,
        Mode::Init => init.is_some_and(|init| has_succeeded(init, proxy.is_some())),
    };
    let mut problems = Vec::new();
    let user = proxy.and_then(|proxy| proxy.user);
    let id =
        |sources: &[_], pick, problems: &mut _| identity(sources, &pod.annotations, user, pick, problems);
    Meshed {
        profile: profile.name.clone(),
        proxy_container: proxy.and_then(|proxy| proxy.id),
        proxy_uid: id(&profile.proxy.uid, |user| user.uid, &mut problems),
        proxy_gid: id(&profile.proxy.gid, |user| user.gid, &mut problems),
        proxy_marks: profile.proxy.marks.clone(),
        outbound_port: profile.ports.outbound,
        inbound_port: profile.ports.inbound,
        mode,
        mode_assumed,
        redirect_due,
        families: profile.families,
        exemptions: exemptions(&profile.exempt, &pod.annotations, mode, &mut problems),
        problems,
    }
}

/// Whether an init container is done. While its exit code is unknown, a later container proves it.
fn has_succeeded(init: &Container, later_exists: bool) -> bool {
    init.state == State::Exited && init.exit_code.map_or(later_exists, |code| code == 0)
}

#[cfg(test)]
mod tests {
    use std::ops::Not;

    use super::{super::profile::Profiles, *};
    use crate::pods::model::{PodUid, Role, User};

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
                uid: PodUid::parse("72f9a42e-50d3-47ee-8ec7-0bccfb6ea7ae").expect("uid"),
                static_pod_hash: None,
                namespace: "default".into(),
                name: "web".into(),
                labels: [].into_iter().collect(),
                annotations: [].into_iter().collect(),
                sandbox: Some(sandbox),
                containers: Vec::new(),
                containers_complete: false,
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
                name: name.into(),
                role: Role::Unknown,
                state,
                exit_code,
                pid: None,
                user: None,
                cgroup: None,
                created_at: i64::from(n),
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

    fn ports(text: &str) -> Vec<super::super::PortRange> {
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
            Pod::new().labels(&[("linkerd.io/cni-resource", "true"), ("k8s-app", "linkerd-cni")]),
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
        let pod =
            Pod::new().with(PROXY, State::Exited).with(PROXY, State::Running).with(PROXY, State::Created);
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
            (
                Pod::marked().with_exit(init, State::Exited, Some(1)).with_exit(init, State::Exited, Some(0)),
                true,
            ),
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
        assert_eq!(
            Pod::marked().with(init, State::Running).meshed().exemptions.out_ports,
            ports("4567-4568")
        );
    }

    #[test]
    fn not_judged() {
        let control = Pod::marked().labels(&[("linkerd.io/control-plane-component", "destination")]);
        let control = control.with(PROXY, State::Running);
        let want = Exempt::ControlPlane { profile: "linkerd".into() };
        assert_eq!(control.recognise(), Membership::Exempt { reason: want });

        let host =
            Pod::marked().with(PROXY, State::Running).sandbox(|sandbox| sandbox.host_network = Some(true));
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
        #[rustfmt::skip]
        let table: [(&[(&str, &str)], &str, &str, &[&str]); 8] = [
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
}
