//! How annotation values are read.

use std::{fmt, net::IpAddr, ops::RangeInclusive, str::FromStr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// A port, or a range of ports with both ends included. Written `80` or `80-90`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(try_from = "PortText", into = "String")]
pub struct PortRange {
    low: u16,
    high: u16,
}

impl PortRange {
    /// Every port.
    pub const ALL: Self = Self { low: 0, high: u16::MAX };

    /// From `low` to `high`; `None` when they are the wrong way round.
    #[must_use]
    pub fn new(low: u16, high: u16) -> Option<Self> {
        (low <= high).then_some(Self { low, high })
    }

    /// One port.
    #[must_use]
    pub fn one(port: u16) -> Self {
        Self { low: port, high: port }
    }

    /// Whether `port` is in it.
    #[must_use]
    pub fn contains(self, port: u16) -> bool {
        (self.low..=self.high).contains(&port)
    }
}

impl From<PortRange> for RangeInclusive<u16> {
    fn from(range: PortRange) -> Self {
        range.low..=range.high
    }
}

impl From<PortRange> for String {
    fn from(range: PortRange) -> Self {
        range.to_string()
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { low, high } = self;
        if low == high { write!(f, "{low}") } else { write!(f, "{low}-{high}") }
    }
}

/// A port in a file, where YAML makes a number of `80` and a text of `80-90`.
#[derive(Deserialize)]
#[serde(untagged)]
enum PortText {
    Number(u16),
    Text(String),
}

impl TryFrom<PortText> for PortRange {
    type Error = String;

    fn try_from(text: PortText) -> Result<Self, String> {
        match text {
            PortText::Number(port) => Ok(Self::one(port)),
            PortText::Text(text) => text.parse(),
        }
    }
}

impl FromStr for PortRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.trim().parse::<u16>().ok();
        let range = match text.split_once('-') {
            Some((low, high)) => number(low).zip(number(high)).and_then(|(low, high)| Self::new(low, high)),
            None => number(text).map(Self::one),
        };
        range.ok_or_else(|| format!("`{text}` is neither a port nor a range such as 8000-8100"))
    }
}

/// Sorts, and joins what overlaps or touches.
pub(crate) fn normalise(mut ranges: Vec<PortRange>) -> Vec<PortRange> {
    ranges.sort_unstable();
    let mut joined: Vec<PortRange> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.low <= last.high.saturating_add(1) => last.high = last.high.max(range.high),
            _ => joined.push(range),
        }
    }
    joined
}

/// The ports in none of these, which are normalised.
pub(super) fn complement(ranges: &[PortRange]) -> Vec<PortRange> {
    let mut gaps = Vec::with_capacity(ranges.len() + 1);
    let mut next = Some(0);
    for range in ranges {
        let before = next.zip(range.low.checked_sub(1)).and_then(|(low, high)| PortRange::new(low, high));
        gaps.extend(before);
        next = range.high.checked_add(1);
    }
    gaps.extend(next.and_then(|low| PortRange::new(low, u16::MAX)));
    gaps
}

/// How a list of ports is written in an annotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum PortGrammar {
    /// `80,8000-8100`, blanks allowed. One bad element voids the whole value.
    #[default]
    Strict,
    /// As Linkerd's plugin reads it: no blanks, Go's idea of a number, bad elements are skipped and the others hold
    /// (`makeMultiportDestinations` and `ParsePortRange` in linkerd/linkerd2-proxy-init).
    Linkerd,
    /// As Istio's plugin reads it: single ports, blanks allowed, or `*` for all of them. It refuses the pod for one bad
    /// element (`validatePortListWithWildcard` in istio/istio, `cni/pkg/plugin/sidecar_redirect.go`).
    Istio,
    /// As iptables reads it for Consul: `80`, or `8000:8100`.
    Iptables,
    /// As Kuma reads it: single ports from 1 on, blanks and empty elements allowed (`Ports.Set` in kumahq/kuma,
    /// `pkg/transparentproxy/config`).
    Kuma,
}

/// How a list of networks is written in an annotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum CidrGrammar {
    /// CIDRs and bare addresses, blanks allowed. One bad element voids the value: Linkerd's plugin fails on it, and for
    /// others letting nothing out is the safe reading.
    #[default]
    Strict,
    /// As Istio reads it: CIDRs alone, without blanks (`validateCIDRList`).
    Istio,
}

/// What a value says, and which of its elements say nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parsed<T> {
    pub(crate) values: Vec<T>,
    pub(crate) bad: Vec<String>,
}

impl<T> Parsed<T> {
    /// All elements or none.
    fn all(elements: impl Iterator<Item = Result<T, String>>) -> Self {
        let parsed = Self::each(elements);
        let values = if parsed.bad.is_empty() { parsed.values } else { Vec::new() };
        Self { values, ..parsed }
    }

    /// What can be read.
    fn each(elements: impl Iterator<Item = Result<T, String>>) -> Self {
        let (mut values, mut bad) = (Vec::new(), Vec::new());
        for element in elements {
            match element {
                Ok(value) => values.push(value),
                Err(text) => bad.push(text),
            }
        }
        Self { values, bad }
    }
}

impl PortGrammar {
    pub(crate) fn parse(self, value: &str) -> Parsed<PortRange> {
        match self {
            Self::Strict => {
                Parsed::all(elements(value).map(|text| text.parse().map_err(|_| text.to_owned())))
            }
            Self::Linkerd => Parsed::each(value.split(',').map(|text| some(linkerd_range(text), text))),
            Self::Istio if value == "*" => Parsed { values: vec![PortRange::ALL], bad: Vec::new() },
            Self::Istio if value.trim().is_empty() => Parsed { values: Vec::new(), bad: Vec::new() },
            Self::Istio => {
                Parsed::all(elements(value).map(|text| some(go_port(text).map(PortRange::one), text)))
            }
            Self::Iptables => Parsed::all(elements(value).map(|text| some(iptables_range(text), text))),
            Self::Kuma => {
                let ports = elements(value).filter(|text| !text.is_empty());
                Parsed::all(ports.map(|text| some(kuma_port(text).map(PortRange::one), text)))
            }
        }
    }
}

fn some<T>(value: Option<T>, text: &str) -> Result<T, String> {
    value.ok_or_else(|| text.to_owned())
}

fn linkerd_range(element: &str) -> Option<PortRange> {
    let mut bounds = element.split('-');
    let low = go_port(bounds.next()?)?;
    let high = bounds.next().map_or(Some(low), go_port)?;
    bounds.next().is_none().then(|| PortRange::new(low, high))?
}

/// A port, or `lo:hi` where either end may be left out.
fn iptables_range(element: &str) -> Option<PortRange> {
    let Some((low, high)) = element.split_once(':') else { return go_port(element).map(PortRange::one) };
    let end = |text: &str, open| if text.is_empty() { Some(open) } else { go_port(text) };
    PortRange::new(end(low, 0)?, end(high, u16::MAX)?)
}

fn kuma_port(element: &str) -> Option<u16> {
    go_port(element).filter(|port| *port != 0 && !element.starts_with('+'))
}

/// Go's `strconv.Atoi` for a port: an optional sign, then ASCII digits, leading zeros allowed. (Rust's own parser
/// agrees on all of that.)
fn go_port(text: &str) -> Option<u16> {
    text.parse::<u16>().ok()
}

impl CidrGrammar {
    pub(crate) fn parse(self, value: &str) -> Parsed<IpNet> {
        match self {
            Self::Strict => Parsed::all(elements(value).map(|text| some(cidr(text), text))),
            Self::Istio => {
                let net = |text: &str| text.parse::<IpNet>().ok().map(|net| net.trunc());
                Parsed::all(value.split(',').map(|text| some(net(text), text)))
            }
        }
    }
}

/// A CIDR, or a bare address as a host.
pub(super) fn cidr(text: &str) -> Option<IpNet> {
    let net = text.parse::<IpNet>().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))?;
    Some(net.trunc())
}

/// Numeric ids, separated by commas. One bad element voids the value.
pub(crate) fn ids(value: &str) -> Parsed<u32> {
    Parsed::all(elements(value).map(|text| text.parse().map_err(|_| text.to_owned())))
}

/// Names of network devices, separated by commas; `net+` means all that start with `net`, as for iptables.
pub(crate) fn devices(value: &str) -> Parsed<Box<str>> {
    // `IFNAMSIZ` is 16 with the final zero.
    let is_name = |text: &str| {
        (1..16).contains(&text.len()) && !text.contains(|c: char| c == '/' || c == ':' || c.is_whitespace())
    };
    Parsed::all(elements(value).map(|text| some(is_name(text).then(|| text.into()), text)))
}

/// Go's idea of a truth value (`strconv.ParseBool`), and Kuma's `enabled` and `disabled`.
pub(super) fn truth(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" | "enabled" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" | "disabled" => Some(false),
        _ => None,
    }
}

/// Users whose connections to some ports are exempt; to all ports where there are no ports.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct UserPorts {
    /// First and last UID.
    pub uids: (u32, u32),
    /// The ports.
    #[serde(default)]
    pub ports: Vec<PortRange>,
}

impl fmt::Display for UserPorts {
    /// For people: `1000-1010 to 53, 8000-8100`, or `… to any port`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { uids: (first, last), ports } = self;
        if first == last {
            write!(f, "{first} to ")?;
        } else {
            write!(f, "{first}-{last} to ")?;
        }
        if ports.is_empty() {
            return f.write_str("any port");
        }
        for (nth, range) in ports.iter().enumerate() {
            write!(f, "{}{range}", if nth == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// Kuma's `<protocol:>?<ports:>?<uids>`, separated by semicolons; what is said of UDP alone is left out, and no bad
/// element holds (`parseExcludePortsForUIDs` in kumahq/kuma, `pkg/transparentproxy/config/utils.go`).
pub(super) fn user_ports<'a>(rules: impl Iterator<Item = &'a str>) -> Parsed<UserPorts> {
    let all = Parsed::all(rules.map(|rule| some(user_ports_of(rule.trim()), rule)));
    Parsed { values: all.values.into_iter().flatten().collect(), bad: all.bad }
}

/// `None`: not a rule; `Some(None)`: not about TCP.
#[expect(clippy::option_option, reason = "a rule that says nothing of TCP is no bad rule")]
fn user_ports_of(rule: &str) -> Option<Option<UserPorts>> {
    let parts: Vec<&str> = rule.split(':').collect();
    let (protocols, ports, uids) = match parts.as_slice() {
        [uids] => ("", "", *uids),
        [ports, uids] => ("", *ports, *uids),
        [protocols, ports, uids] => (*protocols, *ports, *uids),
        _ => return None,
    };
    let mut tcp = true;
    if !matches!(protocols, "" | "*") {
        tcp = false;
        for protocol in protocols.split(',') {
            match protocol.to_ascii_lowercase().as_str() {
                "tcp" => tcp = true,
                "udp" => {}
                _ => return None,
            }
        }
    }
    let ports = match ports {
        "" | "*" => Vec::new(),
        list => list.split(',').map(linkerd_range).collect::<Option<Vec<_>>>()?,
    };
    // Kuma reads UIDs as 16-bit numbers.
    let range = linkerd_range(uids)?;
    let uids = (u32::from(range.low), u32::from(range.high));
    Some(tcp.then(|| UserPorts { uids, ports: normalise(ports) }))
}

pub(super) fn elements(value: &str) -> impl Iterator<Item = &str> {
    value.split(',').map(str::trim)
}

#[cfg(test)]
mod tests;
