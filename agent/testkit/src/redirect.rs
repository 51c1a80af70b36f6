//! The redirect rules of the meshes, as their plugins would set them in a pod's network namespace.

use std::fmt::Write as _;

use anyhow::{Result, bail};

use crate::netns::Netns;

/// Which way of redirecting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// No rules at all: the state of a pod that started before the plugin.
    None,
    /// Linkerd's nat rules by iptables, both families.
    IptablesLinkerd,
    /// Istio's nat rules by iptables, both families.
    IptablesIstio,
    /// A native nftables table, both families.
    Nft,
    /// Mark, local route and TPROXY on `lo`; the packet keeps its destination. Both families.
    Tproxy,
    /// Linkerd's rules for IPv4 alone, its chart's default: IPv6 goes around the proxy.
    V4Only,
}

impl Variant {
    /// Every variant, for tests that are tables.
    pub const ALL: [Self; 6] =
        [Self::None, Self::IptablesLinkerd, Self::IptablesIstio, Self::Nft, Self::Tproxy, Self::V4Only];
}

/// Who is the proxy and where it listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    /// UID whose traffic is left alone.
    pub uid: u32,
    /// Port for connections of the application.
    pub outbound: u16,
    /// Port for connections from outside.
    pub inbound: u16,
}

impl Ports {
    /// Linkerd's defaults.
    pub const LINKERD: Self = Self { uid: 2102, outbound: 4140, inbound: 4143 };
    /// Istio's defaults.
    pub const ISTIO: Self = Self { uid: 1337, outbound: 15001, inbound: 15006 };

    /// The defaults of the mesh that uses `variant`.
    #[must_use]
    pub fn of(variant: Variant) -> Self {
        if variant == Variant::IptablesIstio { Self::ISTIO } else { Self::LINKERD }
    }
}

/// Outgoing connections that a plugin leaves alone because a pod's annotations say so.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skips {
    /// Destination ports and ranges (`8000-8010`).
    pub ports: Vec<String>,
    /// IPv4 destinations.
    pub cidrs: Vec<String>,
}

/// Routing mark and table of the TPROXY variant. The table is the one Istio uses.
const MARK: u32 = 1;
const TABLE: u32 = 133;
/// Conntrack mark of the proxy's own connections.
const PROXY: u32 = 2;

/// Sets the rules of `variant` with its mesh's default ports.
pub fn apply_redirect(ns: &Netns, variant: Variant) -> Result<()> {
    apply_with(ns, variant, Ports::of(variant))
}

/// Sets the rules of `variant`, proxy UID and ports given.
pub fn apply_with(ns: &Netns, variant: Variant, ports: Ports) -> Result<()> {
    match variant {
        Variant::None => Ok(()),
        Variant::IptablesLinkerd => both(ns, &linkerd(ports), &linkerd(ports)),
        Variant::V4Only => iptables(ns, "iptables-restore", &linkerd(ports)),
        Variant::IptablesIstio => {
            let none = Skips::default();
            both(ns, &istio(ports, "127.0.0.1/32", &none), &istio(ports, "::1/128", &none))?;
            // The proxy reaches its own pod from 127.0.0.6 or ::6, which the first rule lets through. All of 127/8 is local
            // anyway; `replace` does not mind an address that is there.
            ns.ip("addr replace ::6/128 dev lo nodad")
        }
        Variant::Nft => ns.check("nft", &["-f", "-"], &nft(ports)).map(drop),
        Variant::Tproxy => {
            ns.check("nft", &["-f", "-"], &tproxy(ports))?;
            routes(ns, "add")
        }
    }
}

/// Sets the rules of a mesh that redirects IPv4 alone and leaves `skips` alone: the default of Linkerd and of Istio.
pub fn apply_skipping(ns: &Netns, variant: Variant, ports: Ports, skips: &Skips) -> Result<()> {
    let rules = match variant {
        Variant::V4Only => linkerd_skipping(ports, skips),
        Variant::IptablesIstio => istio(ports, "127.0.0.1/32", skips),
        other => bail!("{other:?} skips nothing"),
    };
    iptables(ns, "iptables-restore", &rules)
}

/// Removes whatever [`apply_redirect`] has set, and the conntrack entries that would keep old decisions alive.
pub fn clear_redirect(ns: &Netns) -> Result<()> {
    for (restore, ruleset) in
        [("iptables-restore", "*nat\nCOMMIT\n"), ("ip6tables-restore", "*nat\nCOMMIT\n")]
    {
        ns.check(restore, &["-w", "5"], ruleset)?;
    }
    ns.check("nft", &["flush", "ruleset"], "")?;
    // Fails where the TPROXY variant was not in use.
    let _ = routes(ns, "del");
    ns.check("conntrack", &["-F"], "").map(drop)
}

fn both(ns: &Netns, rules4: &str, rules6: &str) -> Result<()> {
    iptables(ns, "iptables-restore", rules4)?;
    iptables(ns, "ip6tables-restore", rules6)
}

fn iptables(ns: &Netns, restore: &str, rules: &str) -> Result<()> {
    ns.check(restore, &["-w", "5", "--noflush"], rules).map(drop)
}

/// The rules that linkerd's plugin writes, in its order.
#[must_use]
pub fn linkerd(ports: Ports) -> String {
    linkerd_skipping(ports, &Skips::default())
}

fn linkerd_skipping(ports: Ports, skips: &Skips) -> String {
    let Ports { uid, outbound, inbound } = ports;
    let skipped = skipped("PROXY_INIT_OUTPUT", skips);
    format!(
        "*nat\n\
         :PROXY_INIT_OUTPUT - [0:0]\n\
         :PROXY_INIT_REDIRECT - [0:0]\n\
         -A PROXY_INIT_OUTPUT -m owner --uid-owner {uid} -j RETURN\n\
         -A PROXY_INIT_OUTPUT -o lo -j RETURN\n\
         {skipped}\
         -A PROXY_INIT_OUTPUT -p tcp -j REDIRECT --to-ports {outbound}\n\
         -A OUTPUT -j PROXY_INIT_OUTPUT\n\
         -A PROXY_INIT_REDIRECT -p tcp -m multiport --dports 4190,4191 -j RETURN\n\
         -A PROXY_INIT_REDIRECT -p tcp -j REDIRECT --to-ports {inbound}\n\
         -A PREROUTING -j PROXY_INIT_REDIRECT\n\
         COMMIT\n"
    )
}

/// The rules that leave `skips` alone.
fn skipped(chain: &str, skips: &Skips) -> String {
    let ports = skips.ports.iter().map(|port| {
        let port = port.replace('-', ":");
        format!("-A {chain} -p tcp -m multiport --dports {port} -j RETURN\n")
    });
    ports.chain(skips.cidrs.iter().map(|cidr| format!("-A {chain} -d {cidr} -j RETURN\n"))).collect()
}

/// Istio's chains; `local` is the loopback address of the family.
fn istio(ports: Ports, local: &str, skips: &Skips) -> String {
    let Ports { uid, outbound, inbound } = ports;
    let mut rules = format!(
        "*nat\n:ISTIO_OUTPUT - [0:0]\n:ISTIO_REDIRECT - [0:0]\n:ISTIO_INBOUND - [0:0]\n:ISTIO_IN_REDIRECT - [0:0]\n\
         -A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports {outbound}\n\
         -A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports {inbound}\n\
         -A OUTPUT -p tcp -j ISTIO_OUTPUT\n-A PREROUTING -p tcp -j ISTIO_INBOUND\n"
    );
    let passthrough = if local.contains(':') { "::6/128" } else { "127.0.0.6/32" };
    let _ = writeln!(rules, "-A ISTIO_OUTPUT -s {passthrough} -o lo -j RETURN");
    for owner in ["uid", "gid"] {
        let _ = write!(
            rules,
            "-A ISTIO_OUTPUT ! -d {local} -o lo -p tcp -m tcp ! --dport 15008 -m owner --{owner}-owner {uid} -j ISTIO_IN_REDIRECT\n\
             -A ISTIO_OUTPUT -o lo -m owner ! --{owner}-owner {uid} -j RETURN\n\
             -A ISTIO_OUTPUT -m owner --{owner}-owner {uid} -j RETURN\n"
        );
    }
    let skipped = skipped("ISTIO_OUTPUT", skips);
    let _ =
        write!(rules, "-A ISTIO_OUTPUT -d {local} -j RETURN\n{skipped}-A ISTIO_OUTPUT -j ISTIO_REDIRECT\n");
    for port in [15008, 15020, 15021, 15090] {
        let _ = writeln!(rules, "-A ISTIO_INBOUND -p tcp -m tcp --dport {port} -j RETURN");
    }
    rules.push_str("-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT\nCOMMIT\n");
    rules
}

fn nft(ports: Ports) -> String {
    let Ports { uid, outbound, inbound } = ports;
    format!(
        "table inet mesh {{\n\
           chain output {{\n\
             type nat hook output priority -100; policy accept;\n\
             meta skuid {uid} return\n\
             oifname \"lo\" return\n\
             meta l4proto tcp redirect to :{outbound}\n\
           }}\n\
           chain prerouting {{\n\
             type nat hook prerouting priority -100; policy accept;\n\
             iifname != \"lo\" meta l4proto tcp redirect to :{inbound}\n\
           }}\n\
         }}\n"
    )
}

fn tproxy(ports: Ports) -> String {
    let Ports { uid, outbound, inbound } = ports;
    // The owner of a packet is known only while its socket has a file: not before accept() and not after close(). So the
    // proxy's connections are remembered by conntrack, and answers are never marked.
    format!(
        "table inet mesh {{\n\
           chain output {{\n\
             type route hook output priority mangle; policy accept;\n\
             ct direction reply return\n\
             ct mark {PROXY} return\n\
             meta skuid {uid} ct mark set {PROXY} return\n\
             oifname \"lo\" return\n\
             meta l4proto tcp meta mark set {MARK}\n\
           }}\n\
           chain prerouting {{\n\
             type filter hook prerouting priority mangle; policy accept;\n\
             iifname \"lo\" meta mark {MARK} meta l4proto tcp meta nfproto ipv4 tproxy ip to :{outbound} accept\n\
             iifname \"lo\" meta mark {MARK} meta l4proto tcp meta nfproto ipv6 tproxy ip6 to :{outbound} accept\n\
             iifname != \"lo\" meta l4proto tcp meta nfproto ipv4 tproxy ip to :{inbound} meta mark set {MARK} accept\n\
             iifname != \"lo\" meta l4proto tcp meta nfproto ipv6 tproxy ip6 to :{inbound} meta mark set {MARK} accept\n\
           }}\n\
         }}\n"
    )
}

fn routes(ns: &Netns, verb: &str) -> Result<()> {
    let rule =
        format!("rule {verb} fwmark {MARK} lookup {TABLE}\nroute {verb} local default dev lo table {TABLE}");
    ns.ip(&rule)?;
    ns.ip6(&rule)
}
