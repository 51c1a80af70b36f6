//! The decision table on the host, for the socket of a test run (see `nobypass_testkit::bpf`).

use nobypass_common::abi::PodPolicy;
use nobypass_common::headers::{Address, Kind, parse};
use nobypass_common::ids::Counter;
use nobypass_common::verdict::{self, Facts, Judgement, Packet, Pod, Settings, SynOrigin};
use nobypass_testkit::bpf::Skb;

/// What the table may ask about the socket of a test run.
struct RawSocket;

impl Facts for RawSocket {
    fn now_ns(&mut self) -> u64 {
        0
    }
    fn agent_seen_ns(&mut self) -> u64 {
        0
    }
    fn socket_destination(&mut self) -> Option<Address> {
        None
    }
    fn ancestor(&mut self, _: u32) -> u64 {
        0
    }
    fn uid(&mut self) -> u32 {
        0
    }
    fn syn_origin(&mut self) -> SynOrigin {
        SynOrigin::Raw
    }
    fn exempt(&mut self, _: &PodPolicy, _: &Packet) -> bool {
        false
    }
    fn node_address(&mut self, _: &Address) -> bool {
        false
    }
}

/// What is to become of an IP packet, by the same table on the host: whether it is dropped, and what is counted.
///
/// Without tokens for events, and without exemptions.
pub fn on_the_host(ip: &[u8], skb: Skb, config: Settings, policy: &PodPolicy) -> (bool, Vec<Counter>) {
    let Some((family, addresses, transport)) = parse(&mut &*ip) else { return (false, vec![]) };
    let packet = Packet { family, addresses, transport, ifindex: skb.ifindex, mark: skb.mark };
    let judgement = match verdict::without_pod(&packet, config.flags) {
        Some(judgement) => judgement,
        None => verdict::egress(&packet, &config, Pod::Known(policy), &mut RawSocket),
    };
    let Judgement { verdict, drop, count, would_drop, .. } = judgement;
    let mut counters = vec![];
    if count {
        counters.push(Counter::from_code(verdict.code()).unwrap());
        if would_drop {
            counters.push(Counter::WouldDrop);
        }
        if drop {
            counters.push(if verdict.is_bypass() {
                Counter::BypassRawDropped
            } else {
                Counter::NonTcpDropped
            });
        }
        if verdict.is_bypass() {
            counters.push(Counter::EventsSuppressed);
        }
    }
    if matches!(packet.transport.kind, Kind::Icmp | Kind::Tcp) {
        assert!(!drop && counters.is_empty(), "the host's table drops {:?}", packet.transport.kind);
    }
    (drop, counters)
}
