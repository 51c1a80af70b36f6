//! Kuma: `Config` of kumahq/kuma, pkg/transparentproxy/config, as YAML. The injector leaves out what is as by default.

use serde::Deserialize;

use super::{Dns, Written};
use crate::mesh::{
    exempt::{Exemptions, Listed},
    grammar::{self, CidrGrammar, PortGrammar, PortRange, complement, normalise},
    profiles::one_line,
};

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Config {
    #[serde(rename = "kumaDPUser")]
    kuma_dp_user: Option<Scalar>,
    ip_family_mode: Option<String>,
    redirect: Redirect,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Redirect {
    inbound: Flow,
    outbound: Flow,
    dns: DnsConfig,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Flow {
    enabled: Option<bool>,
    port: Option<u16>,
    include_ports: Option<Ports>,
    exclude_ports: Option<Ports>,
    #[serde(rename = "excludePortsForUIDs")]
    exclude_ports_for_uids: Option<Vec<String>>,
    #[serde(rename = "excludePortsForIPs")]
    exclude_ports_for_ips: Option<Vec<String>>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct DnsConfig {
    enabled: bool,
}

/// YAML makes a number of `5678`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Scalar {
    Number(u64),
    Text(String),
}

/// A list, or a text with commas, or a single port.
#[derive(Deserialize)]
#[serde(untagged)]
enum Ports {
    Many(Vec<Scalar>),
    One(Scalar),
}

impl Scalar {
    fn text(self) -> String {
        match self {
            Self::Number(number) => number.to_string(),
            Self::Text(text) => text,
        }
    }
}

/// Reads the YAML; one bad element voids its list, as Kuma refuses the whole configuration.
pub(super) fn read(text: &str, bad: &mut Vec<String>) -> Result<Written, String> {
    let Config { kuma_dp_user, ip_family_mode, redirect } =
        serde_saphyr::from_str(text).map_err(|error| one_line(&error.to_string()))?;
    let Redirect { inbound, outbound, dns } = redirect;
    let (outbound_port, inbound_port) = (outbound.port, inbound.port);
    let user = kuma_dp_user.map(Scalar::text).filter(|text| !text.is_empty());
    let proxy_uid = user.as_deref().and_then(|text| text.parse().ok());
    bad.extend(user.filter(|_| proxy_uid.is_none()));
    let ipv6 = ip_family_mode.map(|mode| mode.to_ascii_lowercase());
    let ipv6 = match ipv6.as_deref() {
        None | Some("") => None,
        Some("ipv4") => Some(false),
        Some("dualstack") => Some(true),
        Some(other) => {
            bad.push(other.to_owned());
            None
        }
    };
    let rules = outbound.exclude_ports_for_uids.iter().flatten().map(String::as_str);
    let users = grammar::user_ports(rules);
    bad.extend(users.bad);
    let out = flow(&outbound, bad);
    let (enabled, only) = (outbound.enabled.unwrap_or(true), ports(outbound.include_ports, bad));
    // Nothing is redirected, or only what is listed.
    let listed = (!enabled || !only.is_empty())
        .then(|| Listed { ports: if enabled { only } else { Vec::new() }, cidrs: Vec::new() });
    let out_ports = ports(outbound.exclude_ports, bad);
    let inward = flow(&inbound, bad);
    let in_only = ports(inbound.include_ports, bad);
    let in_excluded = ports(inbound.exclude_ports, bad);
    let in_ports = match (inbound.enabled, in_only.as_slice()) {
        (Some(false), _) => vec![PortRange::ALL],
        (_, []) => in_excluded,
        (_, only) => complement(only),
    };
    Ok(Written {
        proxy_uid,
        outbound_port,
        inbound_port,
        ipv6,
        dns: Some(Dns { tcp_exempt: dns.enabled, udp_captured: dns.enabled }),
        exemptions: Exemptions {
            // A list of ports to redirect voids that of ports not to.
            out_ports: if listed.is_some() { Vec::new() } else { out_ports },
            out_cidrs: out,
            listed,
            user_ports: users.values,
            in_ports,
            in_sources: inward,
            ..Exemptions::default()
        },
    })
}

/// The addresses that a flow excludes.
fn flow(flow: &Flow, bad: &mut Vec<String>) -> Vec<ipnet::IpNet> {
    let (mut nets, before) = (Vec::new(), bad.len());
    for rule in flow.exclude_ports_for_ips.iter().flatten() {
        let parsed = CidrGrammar::Strict.parse(rule);
        nets.extend(parsed.values);
        bad.extend(parsed.bad);
    }
    if bad.len() > before { Vec::new() } else { nets }
}

fn ports(list: Option<Ports>, bad: &mut Vec<String>) -> Vec<PortRange> {
    let elements = match list {
        None => return Vec::new(),
        Some(Ports::One(one)) => one.text(),
        Some(Ports::Many(many)) => many.into_iter().map(Scalar::text).collect::<Vec<_>>().join(","),
    };
    let parsed = PortGrammar::Kuma.parse(&elements);
    bad.extend(parsed.bad);
    normalise(parsed.values)
}
