//! Bypass events in words: joined with their pod, limited in the log, offered to whoever listens.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant, SystemTime};

use nobypass_common::abi::Event;
use nobypass_common::headers::{Address, address_bytes};
use nobypass_common::ids::{Action, Hook, Mode, Verdict};
use serde::{Deserialize, Serialize};

use crate::policy::Snapshot;

/// Lines that a pod may log in one [`WINDOW`].
const LINES: u32 = 5;
/// See [`LINES`].
const WINDOW: Duration = Duration::from_secs(10);
/// Pods whose windows are remembered; beyond that the oldest idea of a pod is dropped with all others.
const MAX_WINDOWS: usize = 4096;

/// One bypass, as `nobypass events` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// When, in milliseconds since 1970.
    pub time_ms: u64,
    /// Likewise, in ns of `CLOCK_MONOTONIC`; for this process only.
    #[serde(skip)]
    pub at_ns: u64,
    /// The pod's namespace; empty if nobody knows the pod.
    pub namespace: String,
    /// The pod's name; likewise.
    pub pod: String,
    /// The container's name, or its cgroup id where the name is not known.
    pub container: String,
    /// The mesh profile.
    pub mesh: String,
    /// `outbound` or `inbound`.
    pub direction: String,
    /// Source address and port.
    pub src: String,
    /// Destination address and port.
    pub dst: String,
    /// IP protocol number.
    pub protocol: u16,
    /// The socket's UID.
    pub uid: u32,
    /// Why it is a bypass.
    pub reason: String,
    /// `passed` or `dropped`.
    pub action: String,
    /// The mode in effect.
    pub mode: String,
    /// The pod's cgroup id.
    pub cgroup: u64,
    /// The socket's cookie; 0 for inbound.
    pub cookie: u64,
}

/// Joins an event with its pod. `time` is the event's.
pub fn report(event: &Event, snapshot: &Snapshot, time: SystemTime) -> Report {
    let pod = snapshot.pods.get(&event.pod);
    let container = pod
        .and_then(|pod| pod.containers.iter().find(|(id, _)| *id == event.container))
        .map_or_else(|| event.container.to_string(), |(_, name)| name.to_string());
    let field = |text: Option<&str>| text.unwrap_or_default().to_owned();
    let millis = time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_millis());
    let direction = match Hook::from_code(event.hook.into()) {
        Some(Hook::Ingress) => "inbound",
        Some(Hook::Egress) | None => "outbound",
    };
    Report {
        time_ms: u64::try_from(millis).unwrap_or(u64::MAX),
        at_ns: event.ts_ns,
        namespace: field(pod.map(|pod| &*pod.namespace)),
        pod: field(pod.map(|pod| &*pod.name)),
        container,
        mesh: field(pod.map(|pod| &*pod.mesh)),
        direction: direction.into(),
        src: socket(event.family, event.saddr, event.sport),
        dst: socket(event.family, event.daddr, event.dport),
        protocol: event.protocol,
        uid: event.uid,
        reason: Verdict::from_code(event.verdict.into()).map_or("unknown", Verdict::label).into(),
        action: Action::from_code(event.action.into()).map_or("unknown", Action::label).into(),
        mode: Mode::from_code(event.mode.into()).map_or("unknown", Mode::label).into(),
        cgroup: event.pod,
        cookie: event.cookie,
    }
}

fn socket(family: u16, address: Address, port: u16) -> String {
    let bytes = address_bytes(address);
    let ip = match (family, bytes) {
        (4, [a, b, c, d, ..]) => IpAddr::V4(Ipv4Addr::new(a, b, c, d)),
        _ => IpAddr::V6(Ipv6Addr::from(bytes)),
    };
    SocketAddr::new(ip, port).to_string()
}

/// Decides which reports are logged: a flood makes a bounded number of lines, and the next line says how many were
/// left out. Counters are not touched by this.
#[derive(Debug, Default)]
pub struct LogLimit {
    windows: HashMap<u64, Window>,
}

#[derive(Debug)]
struct Window {
    since: Instant,
    lines: u32,
    left_out: u64,
}

impl LogLimit {
    /// Whether to log a report of this pod; `Some(n)`: yes, and `n` were left out before it.
    pub fn admit(&mut self, cgroup: u64, now: Instant) -> Option<u64> {
        if self.windows.len() >= MAX_WINDOWS && !self.windows.contains_key(&cgroup) {
            self.windows.clear();
        }
        let window = self.windows.entry(cgroup).or_insert(Window { since: now, lines: 0, left_out: 0 });
        if now.duration_since(window.since) >= WINDOW {
            window.since = now;
            window.lines = 0;
        }
        if window.lines >= LINES {
            window.left_out += 1;
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.left_out))
    }
}

/// Writes a report as one log line.
pub fn log(report: &Report, left_out: u64) {
    let Report { namespace, pod, container, mesh, direction, dst, src, uid, reason, action, .. } = report;
    let peer = if direction == "inbound" { src } else { dst };
    tracing::warn!(
        %namespace, %pod, %container, %mesh, %direction, %peer, uid, %reason, %action, left_out,
        "a meshed pod's connection bypasses its proxy"
    );
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nobypass_common::headers::{address, address4};
    use nobypass_common::ids::PodKind;

    use super::*;
    use crate::pods::PodUid;
    use crate::policy::PodView;

    fn snapshot() -> Snapshot {
        let uid = PodUid::parse("2c48913c-b29f-11e7-9350-020968147796").unwrap();
        let view = PodView {
            namespace: "shop".into(),
            name: "cart-0".into(),
            mesh: "linkerd".into(),
            kind: PodKind::Meshed,
            reason: "meshed",
            families: [true, false],
            containers: vec![(11, "app".into())],
            ..PodView::unknown(uid, 10)
        };
        Snapshot { pods: Arc::new([(10, Arc::new(view))].into()), ..Snapshot::default() }
    }

    fn event() -> Event {
        Event {
            pod: 10,
            container: 11,
            saddr: address4([10, 0, 0, 5]),
            daddr: address4([192, 0, 2, 1]),
            sport: 40000,
            dport: 443,
            family: 4,
            protocol: 6,
            verdict: 11,
            action: 1,
            mode: 3,
            ..Event::default()
        }
    }

    #[test]
    fn an_event_finds_its_pod_and_container() {
        let time = SystemTime::UNIX_EPOCH + Duration::from_millis(1500);
        let report = report(&event(), &snapshot(), time);
        let got =
            (&*report.namespace, &*report.pod, &*report.container, &*report.mesh, &*report.dst, &*report.src);
        assert_eq!(got, ("shop", "cart-0", "app", "linkerd", "192.0.2.1:443", "10.0.0.5:40000"));
        let got = (&*report.reason, &*report.action, &*report.mode, &*report.direction, report.time_ms);
        assert_eq!(got, ("not_redirected", "dropped", "enforce", "outbound", 1500));
    }

    #[test]
    fn an_event_of_an_unknown_pod_is_reported_all_the_same() {
        let mut event = Event { pod: 99, family: 6, verdict: 77, hook: 1, ..event() };
        event.daddr = address([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        let report = report(&event, &snapshot(), SystemTime::UNIX_EPOCH);
        let got = (&*report.pod, &*report.container, &*report.dst, &*report.reason, &*report.direction);
        assert_eq!(got, ("", "11", "[fd00::1]:443", "unknown", "inbound"));
    }

    #[test]
    fn a_flood_makes_few_lines_and_says_what_it_left_out() {
        let mut limit = LogLimit::default();
        let start = Instant::now();
        let admitted = (0..1_000_000).filter(|_| limit.admit(1, start).is_some()).count();
        assert_eq!(admitted, 5);
        assert_eq!(limit.admit(2, start), Some(0), "another pod is not silenced");
        assert_eq!(limit.admit(1, start + WINDOW), Some(999_995));
        for pod in 0..100_000 {
            limit.admit(pod, start);
        }
        assert!(limit.windows.len() <= MAX_WINDOWS, "memory stays flat");
    }
}
