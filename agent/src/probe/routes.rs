//! A destination that a network namespace without a default route can reach: one of its other routes'. Pure.
//!
//! Formats: `fib_route_seq_show` and `rt6_seq_show`
//! (<https://github.com/torvalds/linux/blob/v6.12/net/ipv4/fib_trie.c#L2953>,
//! <https://github.com/torvalds/linux/blob/v6.12/net/ipv6/ip6_fib.c#L2513>).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// `RTF_UP`, `RTF_REJECT`, `RTF_LOCAL`, `RTF_ANYCAST` (`linux/route.h`, `linux/ipv6_route.h`).
const UP: u32 = 1;
const REJECT: u32 = 0x200;
const LOCAL: u32 = 0x8000_0000;
const ANYCAST: u32 = 0x0010_0000;

/// Destinations by the routes in `/proc/net/route` that leave by a device other than `lo`: two of each network, since
/// one may be the pod's own.
pub fn v4(table: &str) -> Vec<IpAddr> {
    let route = |line: &str| {
        let mut fields = line.split_whitespace();
        let device = fields.next()?;
        let network = u32::from_str_radix(fields.next()?, 16).ok()?.to_be();
        let flags = u32::from_str_radix(fields.nth(1)?, 16).ok()?;
        let mask = u32::from_str_radix(fields.nth(3)?, 16).ok()?.to_be();
        (device != "lo" && flags & UP != 0 && flags & REJECT == 0).then_some((network, !mask))
    };
    let hosts = |(network, hosts): (u32, u32)| {
        [1, 2].map(move |n: u32| IpAddr::V4(Ipv4Addr::from_bits(network | (n & hosts))))
    };
    table.lines().skip(1).filter_map(route).flat_map(hosts).collect()
}

/// As [`v4`], from `/proc/net/ipv6_route`. Link-local and multicast routes lead nowhere a mesh would redirect.
pub fn v6(table: &str) -> Vec<IpAddr> {
    let route = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let network = u128::from_str_radix(fields.first()?, 16).ok()?;
        let bits = u32::from_str_radix(fields.get(1)?, 16).ok()?;
        let flags = u32::from_str_radix(fields.get(8)?, 16).ok()?;
        let first = Ipv6Addr::from_bits(network);
        let usable = *fields.get(9)? != "lo"
            && flags & UP != 0
            && flags & (REJECT | LOCAL | ANYCAST) == 0
            && !first.is_unicast_link_local()
            && !first.is_multicast();
        let hosts = u128::MAX.checked_shr(bits).unwrap_or(0);
        usable.then_some((network, hosts))
    };
    let hosts = |(network, hosts): (u128, u128)| {
        [1, 2].map(move |n: u128| IpAddr::V6(Ipv6Addr::from_bits(network | (n & hosts))))
    };
    table.lines().filter_map(route).flat_map(hosts).collect()
}

/// Whether any device but `lo` has an address, from `/proc/net/if_inet6`.
pub fn has_address6(table: &str) -> bool {
    table.lines().filter_map(|line| line.split_whitespace().last()).any(|device| device != "lo")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_of_a_pod() {
        let table = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
                     eth0\t0000420A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n\
                     eth0\t0100FEA9\t00000000\t0005\t0\t0\t0\tFFFFFFFF\t0\t0\t0\n\
                     lo\t00000A0A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n\
                     *\t00000B0A\t00000000\t0201\t0\t0\t0\t0000FFFF\t0\t0\t0\n";
        let found: Vec<String> = v4(table).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["10.66.0.1", "10.66.0.2", "169.254.0.1", "169.254.0.1"]);
        assert!(v4("").is_empty() && v4("x\ny z").is_empty());
    }

    #[test]
    fn addresses() {
        let lo = "00000000000000000000000000000001 01 80 10 80       lo\n";
        let eth0 = "fd660000000000000000000000000002 02 40 00 82     eth0\n";
        assert!(!has_address6("") && !has_address6(lo) && has_address6(&format!("{lo}{eth0}")));
    }

    #[test]
    fn ipv6_routes_of_a_pod() {
        let line = |network: &str, bits: &str, flags: &str, device: &str| {
            let zero = "0".repeat(32);
            format!("{network:0<32} {bits} {zero} 00 {zero} 00000100 00000001 00000000 {flags} {device}\n")
        };
        let table = [
            line("fd66", "40", "00000001", "eth0"),
            line("fe80", "40", "00000001", "eth0"),
            line("ff00", "08", "00000001", "eth0"),
            line("fd66000000000000000000000000000", "80", "80200001", "eth0"),
            line("", "00", "00200200", "lo"),
        ]
        .concat();
        let found: Vec<String> = v6(&table).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["fd66::1", "fd66::2"]);
    }
}
