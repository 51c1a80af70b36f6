use proptest::prelude::*;

use super::*;
use crate::mesh::grammar::PortRange;
use crate::pods::{PodUid, model::Container};

fn ports(ranges: &[PortRange]) -> String {
    ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// In short: UID, ports, IPv6, DNS over TCP exempt, exemptions.
fn show(written: &Written) -> String {
    let Written { proxy_uid, outbound_port, inbound_port, ipv6, dns, exemptions } = written;
    let mut parts = Vec::new();
    parts.extend(proxy_uid.map(|uid| format!("uid={uid}")));
    parts.extend(outbound_port.map(|port| format!("to={port}")));
    parts.extend(inbound_port.map(|port| format!("in={port}")));
    parts.extend(ipv6.map(|on| format!("v6={on}")));
    parts.extend(dns.filter(|dns| dns.tcp_exempt).map(|_| "dns-tcp".to_owned()));
    parts.extend(dns.filter(|dns| dns.udp_captured).map(|_| "dns-udp".to_owned()));
    let Exemptions { out_ports, out_cidrs, listed, uids, user_ports, in_ports, in_sources, gids, devices } =
        exemptions;
    assert!(gids.is_empty() && devices.is_empty());
    let debug = |name: &str, value: String| (!value.is_empty()).then(|| format!("{name}={value}"));
    let nets = |nets: &[ipnet::IpNet]| nets.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let uids: Vec<_> = uids.iter().map(ToString::to_string).collect();
    let users: Vec<_> = user_ports
        .iter()
        .map(|user| format!("{}-{}:{}", user.uids.0, user.uids.1, ports(&user.ports)))
        .collect();
    parts.extend(debug("ports", ports(out_ports)));
    parts.extend(debug("nets", nets(out_cidrs)));
    parts.extend(listed.as_ref().map(|listed| format!("only=[{}]", ports(&listed.ports))));
    parts.extend(debug("uids", uids.join(" ")));
    parts.extend(debug("users", users.join(" ")));
    parts.extend(debug("in-ports", ports(in_ports)));
    parts.extend(debug("in-nets", nets(in_sources)));
    parts.join(", ")
}

fn table(read: fn(&str, &mut Vec<String>) -> Result<Written, String>, rows: &[(&str, &str, &[&str])]) {
    for (text, want, want_bad) in rows {
        let mut bad = Vec::new();
        match read(text, &mut bad) {
            Ok(written) => assert_eq!(
                (show(&written).as_str(), bad),
                (*want, want_bad.iter().map(|b| (*b).to_owned()).collect()),
                "{text}"
            ),
            Err(reason) => assert!(*want == "refused" && !reason.is_empty(), "{text}: {reason}"),
        }
    }
}

#[test]
fn consul_configurations() {
    table(
        consul::read,
        &[
            ("{}", "", &[]),
            (
                r#"{"ProxyUserID":"5995","ProxyInboundPort":20000,"ProxyOutboundPort":15001,"ExcludeUIDs":["5996"]}"#,
                "uid=5995, to=15001, in=20000, uids=5996",
                &[],
            ),
            (
                r#"{"ExcludeOutboundPorts":["9090","8000:8100"],"ExcludeInboundPorts":["21000"],"ExcludeOutboundCIDRs":["10.0.0.1","192.0.2.0/24"]}"#,
                "ports=8000-8100 9090, nets=10.0.0.1/32 192.0.2.0/24, in-ports=21000",
                &[],
            ),
            (r#"{"ConsulDNSIP":"127.0.0.1","ConsulDNSPort":8600}"#, "dns-udp", &[]),
            (
                r#"{"ConsulDNSIP":"","ConsulDNSPort":0,"NetNS":"/var/run/netns/x","IptablesProvider":null}"#,
                "",
                &[],
            ),
            (r#"{"ExcludeUIDs":null,"ExcludeOutboundPorts":null,"ProxyOutboundPort":0}"#, "", &[]),
            // One bad element voids its list alone: iptables refuses the rule.
            (r#"{"ExcludeOutboundPorts":["80","http"],"ExcludeUIDs":["1"]}"#, "uids=1", &["http"]),
            (r#"{"ExcludeUIDs":["root"],"ProxyUserID":"envoy"}"#, "", &["envoy", "root"]),
            (r#"{"ExcludeOutboundCIDRs":["10.0.0.0/33"]}"#, "", &["10.0.0.0/33"]),
            (r#"{"ProxyUserID":5995}"#, "refused", &[]),
            (r#"{"ProxyOutboundPort":70000}"#, "refused", &[]),
            (r#"{"ExcludeUIDs":"5996"}"#, "refused", &[]),
            (r#"{"ProxyUserID":"5995""#, "refused", &[]),
            ("[]", "refused", &[]),
            ("enabled", "refused", &[]),
        ],
    );
}

#[test]
fn kuma_configurations() {
    table(
        kuma::read,
        &[
            ("{}", "", &[]),
            ("kumaDPUser: \"5678\"\nredirect: {dns: {enabled: true}}", "uid=5678, dns-tcp, dns-udp", &[]),
            ("kumaDPUser: 5678\nipFamilyMode: ipv4", "uid=5678, v6=false", &[]),
            ("ipFamilyMode: DualStack", "v6=true", &[]),
            ("ipFamilyMode: \"\"", "", &[]),
            ("ipFamilyMode: ipv6", "", &["ipv6"]),
            (
                "redirect:\n  inbound: {port: 15106, excludePorts: [9901, \"8080\"]}\n  outbound: {port: 15101, excludePorts: \"22, 25\"}",
                "to=15101, in=15106, ports=22 25, in-ports=8080 9901",
                &[],
            ),
            // A list of what is redirected voids the list of what is not.
            ("redirect: {outbound: {includePorts: [80, 443], excludePorts: [22]}}", "only=[80 443]", &[]),
            ("redirect: {outbound: {enabled: false, includePorts: [80]}}", "only=[]", &[]),
            ("redirect: {inbound: {includePorts: 80, excludePorts: [22]}}", "in-ports=0-79 81-65535", &[]),
            ("redirect: {inbound: {enabled: false}}", "in-ports=0-65535", &[]),
            (
                "redirect: {outbound: {excludePortsForIPs: [\"10.0.0.1,192.0.2.0/24\", \"fd00::/8\"]}}",
                "nets=10.0.0.1/32 192.0.2.0/24 fd00::/8",
                &[],
            ),
            ("redirect: {inbound: {excludePortsForIPs: [10.0.0.1]}}", "in-nets=10.0.0.1/32", &[]),
            (
                "redirect: {outbound: {excludePortsForUIDs: [\"tcp:22:1000-2000\", \"106\"]}}",
                "users=1000-2000:22 106-106:",
                &[],
            ),
            ("redirect: {outbound: {excludePortsForUIDs: [\"udp:53:1001\"]}}", "", &[]),
            (
                "redirect: {outbound: {excludePortsForUIDs: [\"tcp:22:*\"], excludePorts: [22]}}",
                "ports=22",
                &["tcp:22:*"],
            ),
            ("redirect: {outbound: {excludePorts: [0, 22]}}", "", &["0"]),
            ("redirect: {outbound: {excludePorts: [http]}}", "", &["http"]),
            ("kumaDPUser: envoy", "", &["envoy"]),
            ("redirect: {outbound: {port: 70000}}", "refused", &[]),
            ("redirect: [1]", "refused", &[]),
            ("{", "refused", &[]),
            ("# as by default", "", &[]),
        ],
    );
}

fn pod(key: &str, value: &str) -> PodFacts {
    let uid = PodUid::parse("72f9a42e-50d3-47ee-8ec7-0bccfb6ea7ae").expect("uid");
    PodFacts { annotations: [(key, value)].into_iter().collect(), ..PodFacts::new(uid, "n", "p") }
}

fn rule(kind: MaterialisedKind) -> profile::Materialised {
    let env = super::super::marker::Variable { container: "init".into(), key: "CONFIG".into() };
    profile::Materialised { kind, from: vec![Source::Annotation("a".into()), Source::Env(env)] }
}

#[test]
fn where_a_configuration_is_looked_for() {
    let rule = rule(MaterialisedKind::Consul);
    let uid = |pod: &PodFacts| {
        let mut problems = Vec::new();
        let written = read(&rule, pod, &mut problems);
        (written.map(|written| written.proxy_uid), problems.len())
    };
    let json = |uid: u32| format!(r#"{{"ProxyUserID":"{uid}"}}"#);
    assert_eq!(uid(&pod("b", &json(1))), (None, 0));
    assert_eq!(uid(&pod("a", "")), (None, 0));
    assert_eq!(uid(&pod("a", &json(1))), (Some(Some(1)), 0));
    assert_eq!(uid(&pod("a", "{")), (Some(None), 1), "a configuration that cannot be read exempts nothing");
    assert_eq!(uid(&pod("a", &" ".repeat(MAX_BYTES + 1))), (Some(None), 1));
    let init =
        Container { env: [("CONFIG", json(2).as_str())].into_iter().collect(), ..Container::new("init") };
    assert_eq!(uid(&PodFacts { containers: vec![init.clone()], ..pod("b", "") }), (Some(Some(2)), 0));
    assert_eq!(uid(&PodFacts { containers: vec![init], ..pod("a", &json(1)) }), (Some(Some(1)), 0));
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text in "\\PC{0,200}") {
        for kind in [MaterialisedKind::Consul, MaterialisedKind::Kuma] {
            let _ = read(&rule(kind), &pod("a", &text), &mut Vec::new());
        }
    }

    #[test]
    fn no_likely_text_makes_it_panic(text in r#"[\{\}\[\]:,"&*| \n0-9a-z.-]{0,120}"#) {
        for kind in [MaterialisedKind::Consul, MaterialisedKind::Kuma] {
            let _ = read(&rule(kind), &pod("a", &text), &mut Vec::new());
        }
    }

    /// What cannot be read never exempts.
    #[test]
    fn a_cut_configuration_exempts_nothing(at in 0_usize..120) {
        let whole = r#"{"ProxyUserID":"5995","ExcludeOutboundPorts":["1:65535"],"ExcludeOutboundCIDRs":["0.0.0.0/0"],"ExcludeUIDs":["0"]}"#;
        prop_assume!(at < whole.len());
        let written = read(&rule(MaterialisedKind::Consul), &pod("a", &whole[..at]), &mut Vec::new());
        prop_assert_eq!(written.unwrap_or_default().exemptions, Exemptions::default());
    }
}
