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
        let (mut values, mut bad) = (Vec::new(), Vec::new());
        for element in elements {
            match element {
                Ok(value) => values.push(value),
                Err(text) => bad.push(text),
            }
        }
        if !bad.is_empty() {
            values.clear();
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
            Self::Linkerd => {
                let (mut values, mut bad) = (Vec::new(), Vec::new());
                for element in value.split(',') {
                    match linkerd_range(element) {
                        Some(range) => values.push(range),
                        None => bad.push(element.to_owned()),
                    }
                }
                Parsed { values, bad }
            }
        }
    }
}

fn linkerd_range(element: &str) -> Option<PortRange> {
    let mut bounds = element.split('-');
    let low = go_port(bounds.next()?)?;
    let high = bounds.next().map_or(Some(low), go_port)?;
    bounds.next().is_none().then(|| PortRange::new(low, high))?
}

/// Go's `strconv.Atoi` for a port: an optional sign, then ASCII digits, leading zeros allowed. (Rust's own parser
/// agrees on all of that.)
fn go_port(text: &str) -> Option<u16> {
    text.parse::<u16>().ok()
}

/// CIDRs (a bare address is a host), separated by commas. One bad element voids the value: Linkerd's plugin fails on
/// it, and for others letting nothing out is the safe reading.
pub(crate) fn cidrs(value: &str) -> Parsed<IpNet> {
    Parsed::all(elements(value).map(|text| cidr(text).ok_or_else(|| text.to_owned())))
}

fn cidr(text: &str) -> Option<IpNet> {
    let net = text.parse::<IpNet>().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))?;
    Some(net.trunc())
}

/// Numeric ids, separated by commas. One bad element voids the value.
pub(crate) fn ids(value: &str) -> Parsed<u32> {
    Parsed::all(elements(value).map(|text| text.parse().map_err(|_| text.to_owned())))
}

fn elements(value: &str) -> impl Iterator<Item = &str> {
    value.split(',').map(str::trim)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn show(parsed: &Parsed<PortRange>) -> (String, usize) {
        (parsed.values.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "), parsed.bad.len())
    }

    /// The values of Linkerd's own tests, and what its parser makes of others.
    #[test]
    fn linkerd_ports() {
        for (value, want, bad) in [
            ("22,25-27,33", "22 25-27 33", 0),
            ("22-22", "22", 0),
            ("0-65535", "0-65535", 0),
            ("22,25-27,not-a-number,33", "22 25-27 33", 1),
            ("22,25-27,notanumber,33", "22 25-27 33", 1),
            ("-1", "", 1),
            ("65536", "", 1),
            ("23-65536", "", 1),
            ("27-25", "", 1),
            ("1-2-3", "", 1),
            ("80, 443", "80", 1),
            ("80,", "80", 1),
            ("", "", 1),
            (",", "", 2),
            ("+80,0080", "80 80", 0),
            ("*", "", 1),
            ("80\u{a0}", "", 1),
        ] {
            assert_eq!(show(&PortGrammar::Linkerd.parse(value)), (want.to_owned(), bad), "{value:?}");
        }
    }

    #[test]
    fn strict_ports() {
        for (value, want, bad) in [
            ("80, 8000-8100", "80 8000-8100", 0),
            ("80,x", "", 1),
            ("80,90-80", "", 1),
            ("", "", 1),
            ("*", "", 1),
        ] {
            assert_eq!(show(&PortGrammar::Strict.parse(value)), (want.to_owned(), bad), "{value:?}");
        }
    }

    #[test]
    fn cidr_lists() {
        let text =
            |value: &str| cidrs(value).values.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        assert_eq!(text("10.1.2.3/8, fd00::1/64 ,192.0.2.7"), "10.0.0.0/8 fd00::/64 192.0.2.7/32");
        assert_eq!(text("10.0.0.0/8,nonsense"), "", "one bad element voids the value");
        assert_eq!(cidrs("10.0.0.0/33").bad, ["10.0.0.0/33"]);
        assert_eq!(ids("1337, 0").values, [1337, 0]);
        assert_eq!(ids("1337,-1").values, [0_u32; 0]);
    }

    #[test]
    fn ports_in_files() {
        let ports: Vec<PortRange> = serde_json::from_str(r#"[80, "8000-8100"]"#).expect("ports");
        assert_eq!(serde_json::to_string(&ports).expect("text"), r#"["80","8000-8100"]"#);
        assert!(serde_json::from_str::<PortRange>(r#""8100-8000""#).is_err());
        assert!(serde_json::from_str::<PortRange>("70000").is_err());
    }

    proptest! {
        #[test]
        fn never_panics(value in "\\PC{0,60}") {
            let _ = (PortGrammar::Linkerd.parse(&value), PortGrammar::Strict.parse(&value), cidrs(&value), ids(&value));
        }

        #[test]
        fn likely_values_never_panic(value in "[0-9,+ -]{0,30}") {
            let _ = (PortGrammar::Linkerd.parse(&value), PortGrammar::Strict.parse(&value));
        }

        /// Joining ranges changes no port's membership and leaves gaps between all ranges.
        #[test]
        fn normalise_keeps_the_set(pairs in proptest::collection::vec((0..200_u16, 0..20_u16), 0..12), port in 0..230_u16) {
            let ranges: Vec<_> = pairs.iter().filter_map(|(low, more)| PortRange::new(*low, low + more)).collect();
            let joined = normalise(ranges.clone());
            let has = |ranges: &[PortRange]| ranges.iter().any(|range| range.contains(port));
            prop_assert_eq!(has(&ranges), has(&joined));
            prop_assert!(joined.windows(2).all(|pair| pair[0].high + 1 < pair[1].low));
        }
    }
}
