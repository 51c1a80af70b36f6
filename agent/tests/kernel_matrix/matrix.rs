//! The matrix. What is expected follows from what a kind of traffic means, never from the program under test.

use std::net::IpAddr;

use nobypass_common::ids::{Counter, Mode};
use nobypass_testkit::netns::{FAR4, FAR6};
use nobypass_testkit::redirect::Variant;
use nobypass_testkit::traffic::Report;

use crate::scene::{BLOCKED, CLOSED, Expected, Node, OWN_PORT, Scene, exists};

/// Who makes the traffic.
#[derive(Clone, Copy, Debug)]
enum From {
    App,
    /// The application's container as root, for raw sockets.
    Root,
    /// The application's container under the proxy's UID.
    ProxyUid,
    Proxy,
    Outside,
}

/// Where to.
#[derive(Clone, Copy, Debug)]
enum To {
    Far4(u16),
    Far6(u16),
    /// 127.0.0.1 or ::1.
    Lo4,
    Lo6,
    /// The pod's own address.
    Own4,
    Own6,
}

/// What it is for the mesh.
#[derive(Clone, Copy, Debug)]
enum Meaning {
    /// A new connection of the application to the outside, where somebody listens or not.
    Outbound { open: bool },
    /// The proxy's UID makes the mesh's rules let it out.
    Impersonator,
    /// The proxy's own connection.
    Proxy,
    /// Never leaves the pod.
    Local,
    /// From outside to the application.
    Inbound,
    /// Connectionless, counted as this.
    Datagram(Counter),
    /// ICMP is not looked at.
    Ping,
    /// A raw socket's SYN to the outside.
    Raw,
    /// A raw socket's SYN to the pod itself, which answers or not.
    RawLocal { answered: bool },
    /// Below all hooks: nothing sees it.
    Unseen,
}

struct Class {
    name: &'static str,
    from: From,
    command: &'static str,
    to: To,
    meaning: Meaning,
}

const fn class(name: &'static str, from: From, command: &'static str, to: To, meaning: Meaning) -> Class {
    Class { name, from, command, to, meaning }
}

const OUT: Meaning = Meaning::Outbound { open: true };
const REFUSED: Meaning = Meaning::Outbound { open: false };

#[rustfmt::skip]
const CLASSES: [Class; 35] = [
    class("tcp4",               From::App,      "tcp4",        To::Far4(8080),   OUT),
    class("tcp6",               From::App,      "tcp6",        To::Far6(8080),   OUT),
    class("v4-mapped",          From::App,      "mapped",      To::Far4(8080),   OUT),
    class("fast open v4",       From::App,      "tfo",         To::Far4(8080),   OUT),
    class("fast open v6",       From::App,      "tfo",         To::Far6(8080),   OUT),
    class("multipath v4",       From::App,      "mptcp",       To::Far4(8080),   OUT),
    class("multipath v6",       From::App,      "mptcp",       To::Far6(8080),   OUT),
    class("non-blocking v4",    From::App,      "nonblocking", To::Far4(8080),   OUT),
    class("non-blocking v6",    From::App,      "nonblocking", To::Far6(8080),   OUT),
    class("closed port v4",     From::App,      "closed",      To::Far4(CLOSED), REFUSED),
    class("closed port v6",     From::App,      "closed",      To::Far6(CLOSED), REFUSED),
    class("proxy's uid v4",     From::ProxyUid, "tcp4",        To::Far4(8080),   Meaning::Impersonator),
    class("proxy's uid v6",     From::ProxyUid, "tcp6",        To::Far6(8080),   Meaning::Impersonator),
    class("proxy upstream v4",  From::Proxy,    "tcp4",        To::Far4(8080),   Meaning::Proxy),
    class("proxy upstream v6",  From::Proxy,    "tcp6",        To::Far6(8080),   Meaning::Proxy),
    class("127.0.0.1",          From::App,      "tcp4",        To::Lo4,          Meaning::Local),
    class("mapped 127.0.0.1",   From::App,      "mapped",      To::Lo4,          Meaning::Local),
    class("::1",                From::App,      "tcp6",        To::Lo6,          Meaning::Local),
    class("own address v4",     From::App,      "tcp4",        To::Own4,         Meaning::Local),
    class("own address v6",     From::App,      "tcp6",        To::Own6,         Meaning::Local),
    class("inbound v4",         From::Outside,  "tcp4",        To::Own4,         Meaning::Inbound),
    class("inbound v6",         From::Outside,  "tcp6",        To::Own6,         Meaning::Inbound),
    class("udp 53 v4",          From::App,      "udp",         To::Far4(53),     Meaning::Datagram(Counter::Dns)),
    class("udp 53 v6",          From::App,      "udp",         To::Far6(53),     Meaning::Datagram(Counter::Dns)),
    class("udp other v4",       From::App,      "udp",         To::Far4(8080),   Meaning::Datagram(Counter::Udp)),
    class("udp other v6",       From::App,      "udp",         To::Far6(8080),   Meaning::Datagram(Counter::Udp)),
    class("udp 443 v4",         From::App,      "udp",         To::Far4(443),    Meaning::Datagram(Counter::Quic)),
    class("udp 443 v6",         From::App,      "udp",         To::Far6(443),    Meaning::Datagram(Counter::Quic)),
    class("ping v4",            From::Root,     "ping",        To::Far4(0),      Meaning::Ping),
    class("ping v6",            From::Root,     "ping",        To::Far6(0),      Meaning::Ping),
    class("raw SYN v4",         From::Root,     "rawsyn",      To::Far4(8080),   Meaning::Raw),
    class("raw SYN v6",         From::Root,     "rawsyn",      To::Far6(8080),   Meaning::Raw),
    // With a checksum for another source than the kernel chooses.
    class("raw SYN 127.0.0.1",  From::Root,     "rawsyn",      To::Lo4,          Meaning::RawLocal { answered: false }),
    class("raw SYN own v4",     From::Root,     "rawsyn",      To::Own4,         Meaning::RawLocal { answered: true }),
    class("packet socket",      From::Root,     "afpacket",    To::Far4(8080),   Meaning::Unseen),
];

impl Class {
    fn is_v4(&self) -> bool {
        matches!(self.to, To::Far4(_) | To::Lo4 | To::Own4)
    }

    fn run(&self, scene: &Scene) -> Report {
        let traffic = match self.from {
            From::App => scene.app(),
            From::Root => scene.app_as(0),
            From::ProxyUid => scene.app_as(scene.proxy_uid),
            From::Proxy => scene.sidecar(),
            From::Outside => scene.outside(),
        };
        let (to, port): (IpAddr, u16) = match self.to {
            To::Far4(port) => (FAR4.into(), port),
            To::Far6(port) => (FAR6.into(), port),
            To::Lo4 => ([127, 0, 0, 1].into(), OWN_PORT),
            To::Lo6 => ([0, 0, 0, 0, 0, 0, 0, 1].into(), OWN_PORT),
            To::Own4 => (scene.net.ip4.into(), OWN_PORT),
            To::Own6 => (scene.net.ip6.into(), OWN_PORT),
        };
        traffic.run(&[&self.command, &to, &port]).unwrap()
    }
}

/// Whether new connections of this family go to the proxy.
const fn redirects(variant: Variant, v4: bool) -> bool {
    match variant {
        Variant::None => false,
        Variant::V4Only => v4,
        Variant::IptablesLinkerd | Variant::IptablesIstio | Variant::Nft | Variant::Tproxy => true,
    }
}

fn expected(class: &Class, variant: Variant, mode: Mode) -> Expected {
    use Counter::{
        Bypass, BypassDropped, BypassRaw, BypassRawDropped, EventsEmitted, ImpersonationDropped,
        InboundBypass, InboundOk, Local, NotJudged, Proxy, ProxyUidImpersonation, RedirectProof,
    };
    let redirected = redirects(variant, class.is_v4());
    let off = mode == Mode::Off;
    match class.meaning {
        // Two connections, the application's and the proxy's.
        Meaning::Outbound { open } if redirected => {
            let saw: &[&str] = if open { &["mesh"] } else { &["ECONNRESET", "EPIPE"] };
            let counted: &[_] = if off { &[(NotJudged, 2)] } else { &[(RedirectProof, 1), (Proxy, 1)] };
            Expected::new(counted, saw, 1)
        }
        // The kernel repeats a dropped fast-open SYN at once, without its data.
        Meaning::Outbound { .. } if class.command == "tfo" && mode == Mode::Enforce => Expected::new(
            &[(Bypass, 1), (BypassDropped, 1), (EventsEmitted, 1), (Counter::Retry, 1)],
            BLOCKED,
            0,
        ),
        Meaning::Outbound { open } => {
            Expected::bypass(Bypass, BypassDropped, mode, if open { &["plain"] } else { &["refused"] })
        }
        Meaning::Impersonator => {
            Expected::bypass(ProxyUidImpersonation, ImpersonationDropped, mode, &["plain"])
        }
        Meaning::Proxy => Expected::passes(if off { NotJudged } else { Proxy }),
        Meaning::Local => Expected::new(&[(if off { NotJudged } else { Local }, 1)], &["plain"], 0),
        // The proxy accepts it and goes on to the application on lo.
        Meaning::Inbound if redirected => {
            let counted: &[_] = if off { &[(NotJudged, 1)] } else { &[(InboundOk, 1), (Local, 1)] };
            Expected::new(counted, &["mesh"], 0)
        }
        Meaning::Inbound => {
            let counted: &[_] = if off { &[] } else { &[(InboundBypass, 1), (EventsEmitted, 1)] };
            Expected::new(counted, &["plain"], 0)
        }
        Meaning::Datagram(counter) => {
            Expected::new(if off { vec![] } else { vec![(counter, 1)] }.as_slice(), &["echo"], 0)
        }
        Meaning::Ping => Expected::new(&[], &["echo"], 0),
        // The proxy's kernel answers it, nobody accepts it: no proof that an application is redirected.
        Meaning::Raw if redirected => {
            Expected::new(&[(if off { NotJudged } else { Local }, 1)], &["synack"], 0)
        }
        Meaning::Raw => Expected::stopped(BypassRaw, BypassRawDropped, mode, &["synack"], &["EPERM"]),
        Meaning::RawLocal { answered } => {
            let saw: &[&str] = if answered { &["synack"] } else { &["TIMEOUT"] };
            Expected::new(&[(if off { NotJudged } else { Local }, 1)], saw, 0)
        }
        Meaning::Unseen => Expected::new(&[], &["synack"], 1),
    }
}

/// The cells of one variant.
fn column(variant: Variant) {
    let mut node = Node::new();
    let scene = node.meshed(variant);
    let (mut cells, mut wrong) = (0, Vec::new());
    for mode in [Mode::Off, Mode::Audit, Mode::Enforce] {
        node.mode(mode);
        for class in CLASSES.iter().filter(|class| exists(class.command)) {
            cells += 1;
            let name = format!("{} × {variant:?} × {}", class.name, mode.label());
            let expected = expected(class, variant, mode);
            scene.expect(&expected);
            let seen = node.measure(&scene, || class.run(&scene));
            wrong.extend(expected.differs(&name, &seen));
        }
    }
    assert!(wrong.is_empty(), "{} of {cells} cells are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn without_rules() {
    column(Variant::None);
}

#[test]
fn with_linkerds_rules() {
    column(Variant::IptablesLinkerd);
}

#[test]
fn with_istios_rules() {
    column(Variant::IptablesIstio);
}

#[test]
fn with_native_nftables() {
    column(Variant::Nft);
}

#[test]
fn with_tproxy() {
    column(Variant::Tproxy);
}

#[test]
fn with_rules_for_ipv4_alone() {
    column(Variant::V4Only);
}
