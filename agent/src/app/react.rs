//! What a bypass sets in motion beside its report.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use nobypass_common::abi::Event;
use nobypass_common::headers::{Address, address_bytes};
use nobypass_common::ids::{Action, Hook, V4, V6, Verdict};
use tokio::sync::mpsc;

use crate::policy::Snapshot;
use crate::refuse::sockets::{Job, PodRef, Sockets, Target};

/// A connection of this pod's bypassed its proxy.
#[derive(Clone, Copy, Debug)]
pub(super) struct News {
    /// The pod's cgroup id.
    pub cgroup: u64,
    /// [`V4`] or [`V6`].
    pub family: usize,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Reactions {
    /// `None` where pods' networks cannot be entered.
    pub sockets: Option<Sockets>,
    /// Pods whose connections bypass.
    pub news: mpsc::Sender<News>,
}

impl Reactions {
    /// Lets a refused connection fail now instead of after minutes, and asks the pod's network what is wrong.
    pub(super) fn to(&self, event: &Event, snapshot: &Snapshot) {
        if let (Some(sockets), Some(target)) = (&self.sockets, refused(event)) {
            let netns = snapshot.pods.get(&event.pod).and_then(|view| view.netns()).map(Into::into);
            sockets.send(Job::Abort(PodRef { cgroup: event.pod, netns }, target));
        }
        if u32::from(event.verdict) == Verdict::Bypass.code() {
            // Full: there is news enough, and the next bypass tells again.
            let family = if event.family == 6 { V6 } else { V4 };
            let _ = self.news.try_send(News { cgroup: event.pod, family });
        }
    }
}

/// The socket whose SYN was dropped; a raw socket has been told by its send(2).
fn refused(event: &Event) -> Option<Target> {
    let stopped = u32::from(event.action) == Action::Drop.code()
        && u32::from(event.hook) == Hook::Egress.code()
        && u32::from(event.verdict) != Verdict::BypassRaw.code()
        && event.cookie != 0;
    stopped.then(|| Target {
        local: SocketAddr::new(ip(event.family, event.saddr), event.sport),
        remote: SocketAddr::new(ip(event.family, event.daddr), event.dport),
        device: event.ifindex,
        cookie: event.cookie,
    })
}

fn ip(family: u16, address: Address) -> IpAddr {
    let octets = address_bytes(address);
    let [a, b, c, d, ..] = octets;
    if family == 4 { Ipv4Addr::new(a, b, c, d).into() } else { Ipv6Addr::from(octets).into() }
}

#[cfg(test)]
mod tests {
    use nobypass_common::headers::address4;

    use super::*;

    #[test]
    fn only_a_dropped_syn_of_a_tcp_socket_is_aborted() {
        let event = Event {
            cookie: 7,
            saddr: address4([10, 0, 0, 5]),
            daddr: address4([192, 0, 2, 1]),
            ifindex: 2,
            sport: 50_000,
            dport: 80,
            family: 4,
            verdict: u16::try_from(Verdict::Bypass.code()).unwrap(),
            action: u16::try_from(Action::Drop.code()).unwrap(),
            hook: u16::try_from(Hook::Egress.code()).unwrap(),
            ..Event::default()
        };
        let target = Target {
            local: "10.0.0.5:50000".parse().unwrap(),
            remote: "192.0.2.1:80".parse().unwrap(),
            device: 2,
            cookie: 7,
        };
        assert_eq!(refused(&event), Some(target));
        let passed = u16::try_from(Action::Pass.code()).unwrap();
        let ingress = u16::try_from(Hook::Ingress.code()).unwrap();
        let raw = u16::try_from(Verdict::BypassRaw.code()).unwrap();
        for other in [
            Event { action: passed, ..event },
            Event { hook: ingress, ..event },
            Event { verdict: raw, ..event },
            Event { cookie: 0, ..event },
        ] {
            assert_eq!(refused(&other), None);
        }
    }
}
