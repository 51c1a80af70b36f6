//! Numbers that cross the border between kernel and agent, with checked conversions.
//!
//! Shared structures hold plain integers (a `bool` or `enum` there would make an unexpected value undefined
//! behaviour); these enums are how both sides name them.

/// Defines a `u32` code: the enum, its number, the way back and its bounded label.
macro_rules! code {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $number:literal, $label:literal;)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum $name { $($(#[$vdoc])* $variant = $number,)+ }

        impl $name {
            /// All values, in order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The number in shared structures.
            #[inline(always)]
            pub const fn code(self) -> u32 {
                self as u32
            }

            /// The value with this number.
            #[inline(always)]
            pub const fn from_code(code: u32) -> Option<Self> {
                match code {
                    $($number => Some(Self::$variant),)+
                    _ => None,
                }
            }

            /// The label in metrics, logs and JSON.
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$variant => $label,)+
                }
            }
        }
    };
}

code! {
    /// What happens to a bypass.
    Mode {
        /// Judge nothing.
        Off = 1, "off";
        /// Count and report, let pass.
        Audit = 2, "audit";
        /// Count, report and drop.
        Enforce = 3, "enforce";
    }
}

/// In [`crate::abi::PodPolicy::mode`]: the node's mode applies.
pub const MODE_INHERIT: u32 = 0;

code! {
    /// What the agent knows of a cgroup at a pod's level.
    PodKind {
        /// A pod that nobody has classified yet.
        Unknown = 0, "unknown";
        /// A pod that needs no redirection (not meshed, host network, control plane …).
        Exempt = 1, "exempt";
        /// A pod whose mesh says that it must be redirected.
        Meshed = 2, "meshed";
        /// Not a pod but the directory of a QoS class above the pods (`burstable`, `besteffort`).
        Qos = 3, "qos";
    }
}

code! {
    /// What to do with connections of a pod that nobody has classified yet.
    UnknownPolicy {
        /// Count and let pass.
        Pass = 0, "pass";
        /// Drop the first SYNs, silently and for a bounded time.
        Hold = 1, "hold";
    }
}

code! {
    /// The verdict on one packet: the rows of the decision table.
    Verdict {
        /// Not the first packet of a TCP connection: nothing is looked up, nothing counted.
        NotNew = 0, "not_new";
        /// ICMP or ICMPv6, which must always pass (neighbour discovery, path MTU).
        Icmp = 1, "icmp";
        /// Stays in the pod: loopback, or the pod's own address.
        Local = 2, "local";
        /// The pod is not classified yet.
        Unknown = 3, "unknown";
        /// The pod is exempt, or the mode is off.
        NotJudged = 4, "not_judged";
        /// The connection goes to the proxy: redirection works for this family.
        RedirectProof = 5, "redirected";
        /// The proxy's own connection.
        Proxy = 6, "proxy";
        /// The mesh itself exempts this connection (port, CIDR, UID, interface, mark).
        Exempt = 7, "exempt";
        /// A family that the mesh does not redirect for this pod.
        FamilyGap = 8, "family_gap";
        /// The proxy's UID, but another container: the mesh's own rules let this out.
        ProxyUidImpersonation = 9, "proxy_uid_impersonation";
        /// A SYN from a raw socket.
        BypassRaw = 10, "raw_socket";
        /// A new connection of a meshed pod that is not redirected.
        Bypass = 11, "not_redirected";
        /// A retransmitted SYN of a connection that is counted already.
        Retry = 12, "retry";
        /// UDP to port 53.
        Dns = 13, "dns";
        /// UDP to port 443.
        Quic = 14, "quic";
        /// Other UDP.
        Udp = 15, "udp";
        /// Any other protocol, and fragments without a transport header.
        Other = 16, "other";
        /// An inbound connection that reaches the application past the proxy.
        InboundBypass = 17, "inbound";
        /// An inbound connection to the proxy, from the node itself, or to an exempt port.
        InboundOk = 18, "inbound_ok";
    }
}

impl Verdict {
    /// Whether this verdict is a bypass: counted, and reported by exactly one of emitted, suppressed, lost.
    #[inline(always)]
    pub const fn is_bypass(self) -> bool {
        matches!(
            self,
            Self::Bypass
                | Self::BypassRaw
                | Self::ProxyUidImpersonation
                | Self::FamilyGap
                | Self::InboundBypass
        )
    }
}

code! {
    /// A counter, kept per pod and per node. Counters of verdicts have the verdict's number.
    Counter {
        /// See [`Verdict::Icmp`]; never counted, the slot keeps the numbers aligned.
        Icmp = 1, "icmp";
        /// See [`Verdict::Local`].
        Local = 2, "local";
        /// See [`Verdict::Unknown`].
        Unknown = 3, "unknown";
        /// See [`Verdict::NotJudged`].
        NotJudged = 4, "not_judged";
        /// See [`Verdict::RedirectProof`].
        RedirectProof = 5, "redirected";
        /// See [`Verdict::Proxy`].
        Proxy = 6, "proxy";
        /// See [`Verdict::Exempt`].
        Exempt = 7, "exempt";
        /// See [`Verdict::FamilyGap`].
        FamilyGap = 8, "family_gap";
        /// See [`Verdict::ProxyUidImpersonation`].
        ProxyUidImpersonation = 9, "proxy_uid_impersonation";
        /// See [`Verdict::BypassRaw`].
        BypassRaw = 10, "raw_socket";
        /// See [`Verdict::Bypass`].
        Bypass = 11, "not_redirected";
        /// See [`Verdict::Retry`].
        Retry = 12, "retry";
        /// See [`Verdict::Dns`].
        Dns = 13, "dns";
        /// See [`Verdict::Quic`].
        Quic = 14, "quic";
        /// See [`Verdict::Udp`].
        Udp = 15, "udp";
        /// See [`Verdict::Other`].
        Other = 16, "other";
        /// See [`Verdict::InboundBypass`].
        InboundBypass = 17, "inbound";
        /// See [`Verdict::InboundOk`].
        InboundOk = 18, "inbound_ok";
        /// Of [`Verdict::FamilyGap`]: dropped.
        FamilyGapDropped = 19, "family_gap_dropped";
        /// Of [`Verdict::ProxyUidImpersonation`]: dropped.
        ImpersonationDropped = 20, "proxy_uid_impersonation_dropped";
        /// Of [`Verdict::BypassRaw`]: dropped.
        BypassRawDropped = 21, "raw_socket_dropped";
        /// Of [`Verdict::Bypass`]: dropped.
        BypassDropped = 22, "not_redirected_dropped";
        /// Of [`Verdict::InboundBypass`]: dropped.
        InboundDropped = 23, "inbound_dropped";
        /// Passed in audit, and would be dropped in enforce.
        WouldDrop = 24, "would_drop";
        /// Connections whose first SYN was held.
        Held = 25, "held";
        /// Packets dropped by a policy on UDP, QUIC or other protocols.
        NonTcpDropped = 26, "non_tcp_dropped";
        /// connect() calls refused at once.
        FastFail = 27, "fast_fail";
        /// Bypass events put into the ring buffer.
        EventsEmitted = 28, "events_emitted";
        /// Bypass events left out by the rate limit.
        EventsSuppressed = 29, "events_suppressed";
        /// Bypass events for which the ring buffer had no room.
        EventsRingFull = 30, "events_ring_full";
        /// Packets counted for the node only, because the pod's counters had no room.
        Unattributed = 31, "unattributed";
    }
}

/// Slots of a counter array. A power of two lets the programs mask an index.
pub const COUNTERS: usize = 32;

/// IP families as indices.
pub const V4: usize = 0;
/// See [`V4`].
pub const V6: usize = 1;

code! {
    /// What was done with the packet of an event.
    Action {
        /// Passed.
        Pass = 0, "passed";
        /// Dropped.
        Drop = 1, "dropped";
    }
}

code! {
    /// The hook that saw the packet of an event.
    Hook {
        /// `cgroup_skb/egress`.
        Egress = 0, "egress";
        /// `cgroup_skb/ingress`.
        Ingress = 1, "ingress";
    }
}

code! {
    /// What happened to a cgroup.
    CgroupChange {
        /// mkdir(2).
        Made = 0, "made";
        /// rmdir(2).
        Removed = 1, "removed";
    }
}

/// `AF_INET`'s protocol number in the Ethernet header, as `skb->protocol` holds it.
pub const ETH_P_IP: u16 = 0x0800;
/// See [`ETH_P_IP`].
pub const ETH_P_IPV6: u16 = 0x86dd;
/// The loopback device's index: 1 in every network namespace (`LOOPBACK_IFINDEX`,
/// <https://github.com/torvalds/linux/blob/v6.12/include/net/flow.h#L24>).
pub const LOOPBACK_IFINDEX: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_verdicts_have_the_verdicts_number_and_label() {
        for verdict in Verdict::ALL.iter().filter(|verdict| **verdict != Verdict::NotNew) {
            let counter = Counter::from_code(verdict.code()).unwrap();
            assert_eq!(counter.label(), verdict.label());
        }
        assert!(Counter::ALL.iter().all(|counter| (counter.code() as usize) < COUNTERS));
    }

    #[test]
    fn codes_round_trip_and_reject_the_rest() {
        for mode in Mode::ALL {
            assert_eq!(Mode::from_code(mode.code()), Some(*mode));
        }
        assert_eq!(Mode::from_code(MODE_INHERIT), None);
        assert_eq!(Verdict::from_code(19), None);
        assert_eq!(PodKind::from_code(4), None);
    }
}
