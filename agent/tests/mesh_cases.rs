//! Public reports about who must be redirected and what is exempt, from a pod's facts to the verdict on a packet: the
//! profiles, the pod's entry and its exemptions as the kernel gets them, and the decision table, all on the host.

#![expect(clippy::unwrap_used, clippy::panic, reason = "the helpers of a test may panic as the test may")]

use std::net::{IpAddr, SocketAddr};

use nobypass::bpf::maps::Exemptions as Entries;
use nobypass::mesh::recognise::{Membership, Meshed, Unsupported};
use nobypass::mesh::{Profiles, recognise};
use nobypass::pods::PodUid;
use nobypass::pods::model::{Container, ContainerId, Controller, KeyValues, PodFacts, Role, State, User};
use nobypass::policy::desired::{self, Wishes};
use nobypass::policy::exempt::{KernelExemptions, entries, kernel_address};
use nobypass_common::abi::{IdKey, PodPolicy};
use nobypass_common::exempt::{self, Lookups};
use nobypass_common::headers::{Address, Addresses, Kind, Transport};
use nobypass_common::ids::{Mode, UnknownPolicy, Verdict};
use nobypass_common::verdict::{self, Facts, Packet, Pod, Settings, SynOrigin};

const SET: u32 = 4;
const LEVEL: u32 = 3;
const PROXY: u64 = 77;
const APP: u64 = 88;
const ETH0: u32 = 2;

/// A pod of a mesh, as the kernel half has it.
struct Scene {
    meshed: Meshed,
    policy: PodPolicy,
    entries: Entries,
}

fn uid() -> PodUid {
    PodUid::parse("72f9a42e-50d3-47ee-8ec7-0bccfb6ea7ae").unwrap()
}

fn pairs(pairs: &[(&str, &str)]) -> KeyValues {
    pairs.iter().copied().collect()
}

fn pod(annotations: &[(&str, &str)], containers: &[Container]) -> PodFacts {
    PodFacts {
        annotations: pairs(annotations),
        containers: containers.to_vec(),
        ..PodFacts::new(uid(), "shop", "web")
    }
}

fn container(name: &str, role: Role) -> Container {
    let id = ContainerId::parse(&"a".repeat(64));
    Container { id, role, state: State::Running, ..Container::new(name) }
}

fn sidecar(name: &str) -> Vec<Container> {
    vec![container(name, Role::App), container("app", Role::App)]
}

fn membership(pod: &PodFacts) -> Membership {
    recognise(pod, Profiles::built_in().as_slice())
}

/// `proxy_cgroup`: 0 while the proxy's container is not known.
fn scene(pod: &PodFacts, proxy_cgroup: u64) -> Scene {
    let membership = membership(pod);
    let exemptions = KernelExemptions { of_mesh: desired::exemptions(&membership), devices: Vec::new() };
    let policy = desired::policy(&membership, LEVEL, 0, proxy_cgroup, (SET, &exemptions), Wishes::default());
    let Membership::Meshed(meshed) = membership else { panic!("{membership:?}") };
    Scene { meshed: *meshed, policy, entries: entries(SET, &exemptions) }
}

/// A connection that leaves the pod.
#[derive(Clone, Copy)]
struct Out<'a> {
    uid: u32,
    container: u64,
    to: &'a str,
    mark: u32,
}

fn eg(uid: u32, to: &str) -> Out<'_> {
    Out { uid, container: APP, to, mark: 0 }
}

impl Scene {
    fn verdict(&self, out: Out<'_>) -> Verdict {
        self.verdict_on(out, ETH0)
    }

    fn verdict_on(&self, out: Out<'_>, ifindex: u32) -> Verdict {
        let to: SocketAddr = out.to.parse().unwrap();
        let (family, destination) = kernel_address(to.ip());
        let packet = Packet {
            family,
            addresses: Addresses { source: [1; 4], destination },
            transport: Transport { kind: Kind::Syn, sport: 40_000, dport: to.port() },
            ifindex,
            mark: out.mark,
        };
        let settings = Settings {
            mode: Mode::Audit.code(),
            unknown_policy: UnknownPolicy::Pass.code(),
            flags: 0,
            hold_ns: 0,
            max_silence_ns: 0,
        };
        let mut host = Host { entries: &self.entries, out };
        verdict::egress(&packet, &settings, Pod::Known(&self.policy), &mut host).verdict
    }
}

/// The maps and the socket on the host.
struct Host<'a> {
    entries: &'a Entries,
    out: Out<'a>,
}

impl Facts for Host<'_> {
    fn now_ns(&mut self) -> u64 {
        0
    }
    fn agent_seen_ns(&mut self) -> u64 {
        0
    }
    fn socket_destination(&mut self) -> Option<Address> {
        Some(kernel_address(IpAddr::from([203, 0, 113, 9])).1)
    }
    fn ancestor(&mut self, level: u32) -> u64 {
        if level == LEVEL + 1 { self.out.container } else { 0 }
    }
    fn uid(&mut self) -> u32 {
        self.out.uid
    }
    fn syn_origin(&mut self) -> SynOrigin {
        SynOrigin::First
    }
    fn exempt(&mut self, policy: &PodPolicy, packet: &Packet) -> bool {
        exempt::egress(policy, packet, self)
    }
    fn node_address(&mut self, _: &Address) -> bool {
        false
    }
}

/// Whether the first `bits` of two byte strings are the same.
fn same_prefix(a: &[u8], b: &[u8], bits: u32) -> bool {
    let bit = |bytes: &[u8], at: usize| bytes[at / 8] & (0x80 >> (at % 8));
    (0..bits as usize).all(|at| bit(a, at) == bit(b, at))
}

impl Lookups for Host<'_> {
    fn port(&mut self, set: u32, list: u8, port: u16) -> bool {
        self.entries.ports.iter().any(|(bits, key)| {
            key.set == set.to_be_bytes()
                && key.list == list
                && same_prefix(&key.port, &port.to_be_bytes(), *bits)
        })
    }
    fn network(&mut self, set: u32, list: u8, family: u8, address: &Address) -> bool {
        let bytes =
            |address: &Address| address.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
        self.entries.cidrs.iter().any(|(bits, key)| {
            key.set == set.to_be_bytes()
                && key.family == [0, 0, list, family]
                && same_prefix(&bytes(&key.addr), &bytes(address), *bits)
        })
    }
    fn id(&mut self, key: &IdKey) -> Option<u8> {
        self.entries.ids.iter().find(|(have, _)| have == key).map(|(_, list)| *list)
    }
    fn uid(&mut self) -> u32 {
        self.out.uid
    }
}

/// hashicorp/consul-k8s#3060: pods of a fresh node; the status stays `enabled`, DNS works, everything else leaks.
#[test]
fn consul_k8s_3060_a_pod_older_than_the_plugin_bypasses() {
    let config = r#"{"ProxyUserID":"5995","ExcludeUIDs":["5996"],"ProxyOutboundPort":15001}"#;
    let annotations = [
        ("consul.hashicorp.com/connect-inject-status", "injected"),
        ("consul.hashicorp.com/transparent-proxy-status", "enabled"),
        ("consul.hashicorp.com/redirect-traffic-config", config),
    ];
    let scene = scene(&pod(&annotations, &sidecar("consul-dataplane")), PROXY);
    assert!(scene.meshed.redirect_due);
    assert_eq!(scene.verdict(eg(1000, "93.184.216.34:443")), Verdict::Bypass);
    assert_eq!(scene.verdict(eg(5996, "10.0.0.9:8502")), Verdict::Exempt);
    assert_eq!(scene.verdict(Out { container: PROXY, ..eg(5995, "10.0.0.9:8502") }), Verdict::Proxy);
    assert_eq!(scene.verdict(eg(5995, "93.184.216.34:443")), Verdict::ProxyUidImpersonation);
    // A proof, too, if the pod is redirected after all.
    assert_eq!(scene.verdict_on(eg(1000, "127.0.0.1:15001"), 1), Verdict::RedirectProof);
}

/// hashicorp/consul-k8s#1604: an annotation that says that all is done is no evidence.
#[test]
fn consul_k8s_1604_a_status_annotation_is_no_evidence() {
    let annotations = |status| {
        [
            ("consul.hashicorp.com/connect-inject-status", "injected"),
            ("consul.hashicorp.com/transparent-proxy-status", status),
            ("consul.hashicorp.com/redirect-traffic-config", r#"{"ProxyUserID":"5995"}"#),
        ]
    };
    for status in ["enabled", "waiting", "complete", "anything"] {
        let scene = scene(&pod(&annotations(status), &sidecar("consul-dataplane")), PROXY);
        assert_eq!(scene.verdict(eg(1000, "93.184.216.34:443")), Verdict::Bypass, "{status}");
    }
}

/// istio/istio#60882: after a reboot the annotation still says `enabled` and traffic goes out as it is.
#[test]
fn istio_60882_a_stale_ambient_annotation_is_not_believed() {
    let facts = PodFacts {
        namespace_labels: Some(pairs(&[("istio.io/dataplane-mode", "ambient")])),
        ..pod(&[("ambient.istio.io/redirection", "enabled")], &[container("app", Role::App)])
    };
    // The proxy is in another pod; no mark, UID or container of this one is exempt.
    let scene = scene(&facts, 0);
    assert_eq!(scene.verdict(eg(1000, "10.1.2.3:8428")), Verdict::Bypass);
    assert_eq!(scene.verdict(eg(0, "10.1.2.3:15008")), Verdict::Bypass);
    assert_eq!(
        scene.verdict(Out { mark: 0x539, ..eg(0, "10.1.2.3:15008") }),
        Verdict::Bypass,
        "a mark can be forged"
    );
    assert_eq!(scene.verdict(eg(1000, "[2001:db8::1]:443")), Verdict::Bypass, "both families");
    // ztunnel itself is a pod of its own, which is not judged.
    let ztunnel = PodFacts {
        labels: pairs(&[("app", "ztunnel")]),
        ..PodFacts::new(uid(), "istio-system", "ztunnel-x")
    };
    assert!(matches!(membership(&ztunnel), Membership::Exempt { .. }));
}

/// linkerd/linkerd2#15611 and istio/istio#58573: under gVisor the validator fails for ever although all is well.
#[test]
fn linkerd_15611_gvisor_is_unsupported_however_its_validator_exits() {
    let validator = Container { exit_code: Some(95), ..container("linkerd-network-validator", Role::Init) };
    let containers = [vec![validator], sidecar("linkerd-proxy")].concat();
    let facts = PodFacts {
        runtime_class_name: Some("gvisor".into()),
        ..pod(&[("linkerd.io/proxy-version", "x")], &containers)
    };
    let Membership::Unsupported { reason, .. } = membership(&facts) else { panic!("{facts:?}") };
    assert_eq!(reason, Unsupported::UserspaceKernel);
}

/// kata-containers/kata-containers#13208.
#[test]
fn kata_13208_a_kernel_of_its_own_is_unsupported() {
    let facts = PodFacts {
        runtime_class_name: Some("kata-qemu".into()),
        ..pod(&[("kuma.io/sidecar-injected", "true")], &sidecar("kuma-sidecar"))
    };
    let Membership::Unsupported { reason, .. } = membership(&facts) else { panic!("{facts:?}") };
    assert_eq!(reason, Unsupported::VirtualMachine);
}

const ISTIO: (&str, &str) = ("sidecar.istio.io/status", "{}");

/// istio/istio#46625 (and #30868): with two families in the cluster the plugin redirects one of them.
#[test]
fn istio_46625_ipv6_that_is_not_redirected_is_a_family_gap() {
    let gap = scene(&pod(&[ISTIO], &sidecar("istio-proxy")), PROXY);
    assert_eq!(gap.verdict(eg(1000, "[2001:db8::1]:443")), Verdict::FamilyGap);
    assert_eq!(gap.verdict(eg(1000, "192.0.2.1:443")), Verdict::Bypass);
    let first =
        PodFacts { pod_ips: ["fd00::7".parse().unwrap()].into(), ..pod(&[ISTIO], &sidecar("istio-proxy")) };
    assert_eq!(scene(&first, PROXY).verdict(eg(1000, "[2001:db8::1]:443")), Verdict::Bypass);
}

/// istio/istio#36575: excluded ports are one thing, DNS that is captured another.
#[test]
fn istio_36575_dns_has_its_own_rule() {
    let proxy = |capture: &str| Container {
        env: pairs(&[("ISTIO_META_DNS_CAPTURE", capture)]),
        ..container("istio-proxy", Role::App)
    };
    let captured = scene(&pod(&[ISTIO], &[proxy("true")]), PROXY);
    assert!(captured.meshed.dns_captured);
    assert!(!scene(&pod(&[ISTIO], &[proxy("false")]), PROXY).meshed.dns_captured);
    assert_eq!(captured.verdict(eg(1000, "10.96.0.10:53")), Verdict::Bypass, "DNS over TCP is redirected");
    let kuma = |dns: &str| {
        let config = format!("redirect: {{dns: {{enabled: {dns}}}}}");
        let annotations = [
            ("kuma.io/sidecar-injected", "true"),
            ("traffic.kuma.io/transparent-proxy-config", config.as_str()),
        ];
        scene(&pod(&annotations, &sidecar("kuma-sidecar")), PROXY).verdict(eg(1000, "10.96.0.10:53"))
    };
    assert_eq!((kuma("true"), kuma("false")), (Verdict::Exempt, Verdict::Bypass));
}

/// istio/istio#4286: an application that becomes the proxy's user gets out by the mesh's own rules.
#[test]
fn istio_4286_the_proxys_uid_in_another_container_is_named() {
    let facts = pod(&[ISTIO], &sidecar("istio-proxy"));
    let known = scene(&facts, PROXY);
    assert_eq!(known.verdict(eg(1337, "192.0.2.1:443")), Verdict::ProxyUidImpersonation);
    assert_eq!(known.verdict(Out { container: PROXY, ..eg(1337, "192.0.2.1:443") }), Verdict::Proxy);
    // With TPROXY the proxy is root: its container tells, and root elsewhere is nobody in particular.
    let mut root = container("istio-proxy", Role::App);
    root.user = Some(User { uid: 0, gid: 1337 });
    let tproxy = scene(&pod(&[ISTIO], &[root]), PROXY);
    assert_eq!(tproxy.meshed.proxy_uid, Some(1337));
    assert_eq!(tproxy.verdict(Out { container: PROXY, ..eg(0, "192.0.2.1:443") }), Verdict::Proxy);
    assert_eq!(tproxy.verdict(eg(0, "192.0.2.1:443")), Verdict::Bypass);
}

/// kumahq/kuma#4560: the same detection for any mesh.
#[test]
fn kuma_4560_a_pod_older_than_the_plugin_bypasses() {
    let scene = scene(&pod(&[("kuma.io/sidecar-injected", "true")], &sidecar("kuma-sidecar")), PROXY);
    assert_eq!(scene.verdict(eg(1000, "192.0.2.1:443")), Verdict::Bypass);
    assert_eq!(scene.verdict(eg(1000, "[2001:db8::1]:443")), Verdict::Bypass, "both families by default");
}

/// linkerd/linkerd2#8120, #2219, #11073 and #11325: the validator's own connection is a sign, not a leak.
#[test]
fn linkerd_8120_the_validators_connection_is_a_canary() {
    let validator = Container {
        state: State::Exited,
        exit_code: Some(95),
        ..container("linkerd-network-validator", Role::Init)
    };
    let facts = pod(&[("linkerd.io/proxy-version", "x")], &[validator, container("app", Role::App)]);
    let Scene { meshed, .. } = scene(&facts, 0);
    assert!(meshed.validator_said(&facts).is_some_and(|(code, _)| code != 0));
    for (name, to, canary) in [
        (Some("linkerd-network-validator"), "1.1.1.1:20001", true),
        (Some("linkerd-network-validator"), "[fd00::1]:20001", true),
        (None, "192.0.2.2:1404", true),
        (Some("app"), "1.1.1.1:20001", false),
        (Some("linkerd-network-validator"), "1.1.1.1:443", false),
    ] {
        assert_eq!(meshed.is_canary(name, to.parse().unwrap()), canary, "{name:?} {to}");
    }
}

/// linkerd/linkerd2#11597: the address may be the real API server; then only the validator's connection is a canary.
#[test]
fn linkerd_11597_a_validator_may_connect_to_a_real_server() {
    let args = ["--connect-addr", "10.96.0.1:443"].map(Into::into).into();
    let validator = Container { args, ..container("linkerd-network-validator", Role::Init) };
    let facts = pod(&[("linkerd.io/proxy-version", "x")], &[validator, container("app", Role::App)]);
    let Scene { meshed, .. } = scene(&facts, 0);
    let api = "10.96.0.1:443".parse().unwrap();
    assert!(meshed.is_canary(Some("linkerd-network-validator"), api) && !meshed.is_canary(Some("app"), api));
}

/// linkerd/linkerd2#4788 (and istio/istio#23802): what runs before the mesh's init container is not redirected by design.
#[test]
fn linkerd_4788_before_the_init_container_nothing_is_due() {
    let init = |state, exit_code| Container { state, exit_code, ..container("linkerd-init", Role::Init) };
    let due = |init| {
        let facts = pod(&[("linkerd.io/proxy-version", "x")], &[container("migrate", Role::Init), init]);
        scene(&facts, 0).meshed.redirect_due
    };
    assert!(!due(init(State::Waiting, None)) && !due(init(State::Running, None)));
    assert!(!due(init(State::Exited, Some(1))) && due(init(State::Exited, Some(0))));
}

/// istio/istio#38415: ports and networks that the mesh itself excludes look like bypasses, unless read as it reads them.
#[test]
fn istio_38415_what_the_mesh_excludes_is_no_bypass() {
    let ports = "traffic.sidecar.istio.io/excludeOutboundPorts";
    let networks = "traffic.sidecar.istio.io/excludeOutboundIPRanges";
    let only = "traffic.sidecar.istio.io/includeOutboundIPRanges";
    let more = "traffic.sidecar.istio.io/includeOutboundPorts";
    type Row<'a> = (&'a [(&'a str, &'a str)], &'a str, Verdict);
    #[rustfmt::skip]
    let table: [Row<'_>; 16] = [
        (&[], "192.0.2.1:443", Verdict::Bypass),
        (&[(ports, "443")], "192.0.2.1:443", Verdict::Exempt),
        (&[(ports, " 443 , 80")], "192.0.2.1:80", Verdict::Exempt),
        (&[(ports, "443")], "192.0.2.1:444", Verdict::Bypass),
        (&[(ports, "*")], "192.0.2.1:1", Verdict::Exempt),
        (&[(ports, "443,x")], "192.0.2.1:443", Verdict::Bypass),
        (&[(ports, "400-500")], "192.0.2.1:443", Verdict::Bypass),
        (&[(networks, "192.0.2.0/24")], "192.0.2.255:1", Verdict::Exempt),
        (&[(networks, "192.0.2.0/24")], "192.0.3.0:1", Verdict::Bypass),
        (&[(networks, "192.0.2.0/24,oops")], "192.0.2.1:1", Verdict::Bypass),
        (&[(networks, "0.0.0.0/0")], "192.0.2.1:1", Verdict::Exempt),
        (&[(only, "10.0.0.0/8")], "192.0.2.1:1", Verdict::Exempt),
        (&[(only, "10.0.0.0/8")], "10.9.9.9:1", Verdict::Bypass),
        (&[(only, "10.0.0.0/8"), (more, "9090")], "192.0.2.1:9090", Verdict::Bypass),
        (&[(only, "10.0.0.0/8"), (networks, "10.1.0.0/16")], "10.1.0.1:1", Verdict::Exempt),
        (&[(only, "")], "192.0.2.1:443", Verdict::Exempt),
    ];
    for (annotations, to, want) in table {
        let annotations = [&[ISTIO], annotations].concat();
        let scene = scene(&pod(&annotations, &sidecar("istio-proxy")), PROXY);
        assert_eq!(scene.verdict(eg(1000, to)), want, "{annotations:?} {to}");
        let proxy = Out { container: PROXY, ..eg(1337, to) };
        assert_eq!(scene.verdict(proxy), Verdict::Proxy, "the proxy is free to go: {annotations:?} {to}");
    }
}

/// cilium/cilium#16583: a load balancer at the socket puts an endpoint's address in place of the service's, before any rule
/// of the mesh. What proves the redirection is that the packet goes elsewhere than the socket was told.
#[test]
fn cilium_16583_a_service_address_that_was_rewritten_changes_no_verdict() {
    let scene = scene(&pod(&[ISTIO], &sidecar("istio-proxy")), PROXY);
    for to in ["127.0.0.1:15001", "127.0.0.6:15001"] {
        assert_eq!(scene.verdict_on(eg(1000, to), 1), Verdict::RedirectProof, "{to}");
    }
    for to in ["10.96.0.5:80", "10.244.3.9:8080", "203.0.113.9:80"] {
        assert_eq!(scene.verdict(eg(1000, to)), Verdict::Bypass, "{to}, an address as good as any other");
    }
    // An excluded network is compared with where the packet goes.
    let excluded = ("traffic.sidecar.istio.io/excludeOutboundIPRanges", "10.244.0.0/16");
    let scene = self::scene(&pod(&[ISTIO, excluded], &sidecar("istio-proxy")), PROXY);
    assert_eq!(scene.verdict(eg(1000, "10.244.3.9:8080")), Verdict::Exempt);
    assert_eq!(scene.verdict(eg(1000, "10.96.0.5:80")), Verdict::Bypass);
}

/// cilium/cilium#23394: pods of a DaemonSet tolerate the taint and start before the node is ready. They are judged as any.
#[test]
fn cilium_23394_a_daemon_sets_pod_is_judged_as_any_other() {
    let controller = Controller { kind: "DaemonSet".into(), name: "logs".into(), uid: "1".into() };
    let facts = PodFacts { controller: Some(controller), ..pod(&[ISTIO], &sidecar("istio-proxy")) };
    assert_eq!(scene(&facts, PROXY).verdict(eg(1000, "192.0.2.1:443")), Verdict::Bypass);
}

/// Kuma's users on some ports, from the annotation to the packet.
#[test]
fn kuma_users_are_exempt_on_their_ports_alone() {
    let config = "redirect: {outbound: {excludePortsForUIDs: [\"tcp:22,8000-8100:1000-1001\", \"7\"]}}";
    let annotations =
        [("kuma.io/sidecar-injected", "true"), ("traffic.kuma.io/transparent-proxy-config", config)];
    let scene = scene(&pod(&annotations, &sidecar("kuma-sidecar")), PROXY);
    for (uid, port, want) in [
        (1000, 22, Verdict::Exempt),
        (1001, 8099, Verdict::Exempt),
        (1001, 8101, Verdict::Bypass),
        (1002, 22, Verdict::Bypass),
        (7, 443, Verdict::Exempt),
    ] {
        assert_eq!(scene.verdict(eg(uid, &format!("192.0.2.1:{port}"))), want, "{uid} {port}");
    }
}
