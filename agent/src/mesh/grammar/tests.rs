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
fn istio_ports() {
    for (value, want, bad) in [
        ("15020", "15020", 0),
        ("80, 443 ,8080", "80 443 8080", 0),
        ("", "", 0),
        ("  ", "", 0),
        ("*", "0-65535", 0),
        (" *", "", 1),
        ("80,*", "", 1),
        ("80,", "", 1),
        ("80-90", "", 1),
        ("65536", "", 1),
        ("-1", "", 1),
        ("http", "", 1),
    ] {
        assert_eq!(show(&PortGrammar::Istio.parse(value)), (want.to_owned(), bad), "{value:?}");
    }
}

#[test]
fn iptables_ports() {
    for (value, want, bad) in [
        ("8080", "8080", 0),
        ("8000:8100,22", "8000-8100 22", 0),
        (":1024", "0-1024", 0),
        ("1024:", "1024-65535", 0),
        (":", "0-65535", 0),
        ("90:80", "", 1),
        ("80:90:100", "", 1),
        ("8000-8100", "", 1),
        ("ssh", "", 1),
        ("", "", 1),
    ] {
        assert_eq!(show(&PortGrammar::Iptables.parse(value)), (want.to_owned(), bad), "{value:?}");
    }
}

#[test]
fn kuma_ports() {
    for (value, want, bad) in [
        ("80,443", "80 443", 0),
        (" 80 , ,443,", "80 443", 0),
        ("", "", 0),
        ("0", "", 1),
        ("+80", "", 1),
        ("80-90", "", 1),
        ("80;443", "", 1),
    ] {
        assert_eq!(show(&PortGrammar::Kuma.parse(value)), (want.to_owned(), bad), "{value:?}");
    }
}

/// The examples of Kuma's own documentation of the form, and what its parser refuses.
#[test]
fn kuma_users() {
    let rule = |text: &str| {
        let Parsed { values, bad } = user_ports(text.split(';'));
        let show = |rule: &UserPorts| {
            let ports: Vec<_> = rule.ports.iter().map(ToString::to_string).collect();
            format!("{}-{}:{}", rule.uids.0, rule.uids.1, ports.join(","))
        };
        (values.iter().map(show).collect::<Vec<_>>().join(" "), bad.len())
    };
    for (value, want, bad) in [
        ("tcp:22:1000-2000", "1000-2000:22", 0),
        ("udp:53:1001", "", 0),
        ("80:1002", "1002-1002:80", 0),
        ("1003", "1003-1003:", 0),
        ("tcp,udp:1900,3000-5000:203", "203-203:1900,3000-5000", 0),
        ("*:*:106", "106-106:", 0),
        (":22:106", "106-106:22", 0),
        ("TCP:22:106;1003", "106-106:22 1003-1003:", 0),
        ("tcp:22:*", "", 1),
        ("tcp:22:1,2", "", 1),
        ("sctp:22:1", "", 1),
        ("tcp,:22:1", "", 1),
        ("tcp:x:1", "", 1),
        ("1:2:3:4", "", 1),
        ("22:70000", "", 1),
        ("1003;", "", 1),
        ("", "", 1),
    ] {
        assert_eq!(rule(value), (want.to_owned(), bad), "{value:?}");
    }
}

#[test]
fn names_of_devices() {
    for (value, want) in [
        ("net1", Some("net1")),
        ("net1, eth1", Some("net1 eth1")),
        ("net+", Some("net+")),
        ("", None),
        ("a-name-of-16-chr", None),
        ("net1,", None),
        ("../etc", None),
    ] {
        let Parsed { values, bad } = devices(value);
        assert_eq!(bad.is_empty().then(|| values.join(" ")).as_deref(), want, "{value:?}");
    }
}

#[test]
fn truth_values() {
    let table = [("true", Some(true)), ("1", Some(true)), ("T", Some(true)), ("enabled", Some(true))];
    let more =
        [("false", Some(false)), ("0", Some(false)), ("disabled", Some(false)), ("yes", None), ("", None)];
    for (text, want) in table.into_iter().chain(more) {
        assert_eq!(truth(text), want, "{text:?}");
    }
}

#[test]
fn complements() {
    for (ports, want) in [
        ("", "0-65535"),
        ("0-65535", ""),
        ("80", "0-79 81-65535"),
        ("0 65535", "1-65534"),
        ("80 90-100", "0-79 81-89 101-65535"),
    ] {
        let ranges: Vec<PortRange> =
            ports.split_whitespace().map(|port| port.parse().expect("port")).collect();
        let got: Vec<_> = complement(&ranges).iter().map(ToString::to_string).collect();
        assert_eq!(got.join(" "), want, "{ports}");
    }
}

#[test]
fn istio_cidrs() {
    for (value, want, bad) in [
        ("10.0.0.0/8", "10.0.0.0/8", 0),
        ("10.0.0.1/8,fd00::/8", "10.0.0.0/8 fd00::/8", 0),
        ("10.0.0.0/8, 192.0.2.0/24", "", 1),
        ("10.0.0.1", "", 1),
        ("10.0.0.0/8,", "", 1),
        ("*", "", 1),
    ] {
        let Parsed { values, bad: not } = CidrGrammar::Istio.parse(value);
        let text: Vec<_> = values.iter().map(ToString::to_string).collect();
        assert_eq!((text.join(" "), not.len()), (want.to_owned(), bad), "{value:?}");
    }
}

#[test]
fn cidr_lists() {
    let text = |value: &str| {
        CidrGrammar::Strict.parse(value).values.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(text("10.1.2.3/8, fd00::1/64 ,192.0.2.7"), "10.0.0.0/8 fd00::/64 192.0.2.7/32");
    assert_eq!(text("10.0.0.0/8,nonsense"), "", "one bad element voids the value");
    assert_eq!(CidrGrammar::Strict.parse("10.0.0.0/33").bad, ["10.0.0.0/33"]);
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

const GRAMMARS: [PortGrammar; 5] =
    [PortGrammar::Strict, PortGrammar::Linkerd, PortGrammar::Istio, PortGrammar::Iptables, PortGrammar::Kuma];

/// Every parser of an annotation.
fn all_of(value: &str) {
    for grammar in GRAMMARS {
        let _ = normalise(grammar.parse(value).values);
    }
    let _ = (CidrGrammar::Strict.parse(value), CidrGrammar::Istio.parse(value), ids(value), devices(value));
    let _ = (user_ports(value.split(';')), truth(value));
}

proptest! {
    #[test]
    fn never_panics(value in "\\PC{0,60}") {
        all_of(&value);
    }

    #[test]
    fn likely_values_never_panic(value in "[0-9a-f,+:;/.* -]{0,30}") {
        all_of(&value);
    }

    /// A value is taken whole or not at all, but by Linkerd.
    #[test]
    fn one_bad_element_voids_a_value(value in "[0-9,:x -]{0,20}") {
        for grammar in [PortGrammar::Strict, PortGrammar::Istio, PortGrammar::Iptables, PortGrammar::Kuma] {
            let parsed = grammar.parse(&value);
            prop_assert!(parsed.bad.is_empty() || parsed.values.is_empty(), "{:?} {:?}", grammar, parsed);
        }
    }

    /// Every port is in a set or in its complement, and in one of them alone.
    #[test]
    fn a_complement_is_the_rest(pairs in proptest::collection::vec((any::<u16>(), 0..2000_u16), 0..8), port: u16) {
        let ranges = pairs.iter().filter_map(|(low, more)| PortRange::new(*low, low.saturating_add(*more)));
        let set = normalise(ranges.collect());
        let has = |ranges: &[PortRange]| ranges.iter().any(|range| range.contains(port));
        prop_assert_ne!(has(&set), has(&complement(&set)));
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
