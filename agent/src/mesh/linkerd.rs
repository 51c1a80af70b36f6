//! Linkerd, as its CNI plugin and its injector behave.
//!
//! Sources: `cni-plugin/main.go`, `pkg/iptables/iptables.go` and `pkg/util/portrange.go` of
//! linkerd/linkerd2-proxy-init, the control plane and CNI charts of linkerd/linkerd2. A namespace's annotations count
//! too, but the injector copies them to the pod.

use super::{
    grammar::{PortGrammar, PortRange},
    profile::{
        Containers, ExemptRules, Families, IdSource, KeyMatch, ListRule, Marker, Merge, Mode, PortRule,
        Profile, ProxyIdentity, ProxyPorts, Recognise,
    },
};

pub(super) fn profile() -> Profile {
    Profile {
        name: "linkerd".into(),
        recognise: Recognise {
            // What only the injector writes. `linkerd.io/created-by` and `linkerd.io/workload-ns` are also on pods
            // that it leaves alone.
            any: vec![
                annotation("linkerd.io/proxy-version"),
                annotation("linkerd.io/trust-root-sha256"),
                label("linkerd.io/control-plane-ns"),
                label("linkerd.io/proxy-*"),
            ],
            all: Vec::new(),
            not: Vec::new(),
            control_plane: vec![label("linkerd.io/control-plane-component")],
        },
        containers: Containers {
            proxy: vec!["linkerd-proxy".into()],
            init: vec!["linkerd-init".into()],
            validator: vec!["linkerd-network-validator".into()],
        },
        assume_mode: Mode::Cni,
        proxy: ProxyIdentity {
            uid: vec![IdSource::Annotation("config.linkerd.io/proxy-uid".into()), IdSource::Fixed(2102)],
            gid: vec![IdSource::Annotation("config.linkerd.io/proxy-gid".into())],
            marks: Vec::new(),
        },
        ports: ProxyPorts { outbound: 4140, inbound: 4143, own: vec![4190, 4191] },
        exempt: exempt(),
        // `disableIPv6: true` in both charts.
        families: Families { ipv4: true, ipv6: false },
        validator_addresses: vec![
            ([1, 1, 1, 1], 20001).into(),
            ([192, 0, 2, 2], 1404).into(),
            ([0xfd00, 0, 0, 0, 0, 0, 0, 1], 20001).into(),
        ],
    }
}

fn exempt() -> ExemptRules {
    // MySQL and Galera, the only defaults of the control plane's chart; the CNI chart has none for outgoing ones.
    let galera = || vec![PortRange::one(4567), PortRange::one(4568)];
    let proxy = || vec![PortRange::one(4190), PortRange::one(4191)];
    ExemptRules {
        out_ports: PortRule {
            cni: Vec::new(),
            init: galera(),
            annotation: Some("config.linkerd.io/skip-outbound-ports".into()),
            grammar: PortGrammar::Linkerd,
            merge: Merge::Replace,
        },
        in_ports: PortRule {
            cni: proxy(),
            init: [proxy(), galera()].concat(),
            annotation: Some("config.linkerd.io/skip-inbound-ports".into()),
            grammar: PortGrammar::Linkerd,
            merge: Merge::Append,
        },
        // Despite its name matched as source, and only for incoming connections.
        in_sources: ListRule {
            defaults: Vec::new(),
            annotation: Some("config.linkerd.io/skip-subnets".into()),
            merge: Merge::Replace,
        },
        out_cidrs: ListRule::default(),
        uids: ListRule::default(),
    }
}

fn label(key: &str) -> Marker {
    Marker::Label(KeyMatch { key: key.into(), value: None })
}

fn annotation(key: &str) -> Marker {
    Marker::Annotation(KeyMatch { key: key.into(), value: None })
}
