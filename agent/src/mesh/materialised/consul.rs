//! Consul: `iptables.Config` of hashicorp/consul, sdk/iptables, as JSON.

use serde::Deserialize;

use super::Written;
use crate::mesh::{
    exempt::Exemptions,
    grammar::{self, Parsed, PortGrammar, normalise},
};

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct Config {
    #[serde(rename = "ConsulDNSIP")]
    consul_dns_ip: Option<String>,
    #[serde(rename = "ConsulDNSPort")]
    consul_dns_port: Option<u16>,
    #[serde(rename = "ProxyUserID")]
    proxy_user_id: Option<String>,
    proxy_inbound_port: Option<u16>,
    proxy_outbound_port: Option<u16>,
    exclude_inbound_ports: Option<Vec<String>>,
    exclude_outbound_ports: Option<Vec<String>>,
    #[serde(rename = "ExcludeOutboundCIDRs")]
    exclude_outbound_cidrs: Option<Vec<String>>,
    #[serde(rename = "ExcludeUIDs")]
    exclude_uids: Option<Vec<String>>,
}

/// Reads the JSON; one bad element voids its list, as iptables refuses its rule.
pub(super) fn read(text: &str, bad: &mut Vec<String>) -> Result<Written, String> {
    // A list would be taken for the fields in their order.
    if !text.trim_start().starts_with('{') {
        return Err("not a JSON object".to_owned());
    }
    let Config {
        consul_dns_ip,
        consul_dns_port,
        proxy_user_id,
        proxy_inbound_port,
        proxy_outbound_port,
        exclude_inbound_ports,
        exclude_outbound_ports,
        exclude_outbound_cidrs,
        exclude_uids,
    } = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let ports = |list: Option<Vec<String>>, bad: &mut Vec<String>| {
        normalise(elements(list, |text| PortGrammar::Iptables.parse(text), bad))
    };
    let user = proxy_user_id.filter(|text| !text.is_empty());
    let proxy_uid = user.as_deref().and_then(|text| text.parse().ok());
    bad.extend(user.filter(|_| proxy_uid.is_none()));
    let in_ports = ports(exclude_inbound_ports, bad);
    let out_ports = ports(exclude_outbound_ports, bad);
    let captured = consul_dns_port.is_some_and(|port| port != 0)
        || consul_dns_ip.is_some_and(|address| !address.is_empty());
    Ok(Written {
        proxy_uid,
        outbound_port: proxy_outbound_port.filter(|port| *port != 0),
        inbound_port: proxy_inbound_port.filter(|port| *port != 0),
        ipv6: None,
        dns: Some(super::Dns { tcp_exempt: false, udp_captured: captured }),
        exemptions: Exemptions {
            out_ports,
            out_cidrs: elements(exclude_outbound_cidrs, |text| grammar::CidrGrammar::Strict.parse(text), bad),
            uids: elements(exclude_uids, grammar::ids, bad),
            in_ports,
            ..Exemptions::default()
        },
    })
}

fn elements<T>(
    list: Option<Vec<String>>,
    parse: impl Fn(&str) -> Parsed<T>,
    bad: &mut Vec<String>,
) -> Vec<T> {
    let (mut values, before) = (Vec::new(), bad.len());
    for text in list.into_iter().flatten() {
        let parsed = parse(&text);
        values.extend(parsed.values);
        bad.extend(parsed.bad);
    }
    if bad.len() > before { Vec::new() } else { values }
}
