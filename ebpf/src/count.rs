//! Counting and reporting: counters are the truth, events a sample of it.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use nobypass_common::abi::{Config, Event, PodCounters};
use nobypass_common::headers::{IPPROTO_TCP, IPPROTO_UDP, Kind, Transport};
use nobypass_common::ids::{Action, COUNTERS as SLOTS, Counter, Hook, V4, V6, Verdict};
use nobypass_common::verdict::{Judgement, Packet};

use crate::maps::{COUNTERS, EVENTS, TOTALS};

const NS_PER_SECOND: u64 = 1_000_000_000;

static ZERO: PodCounters = PodCounters::ZERO;

/// This CPU's counters of a pod and of the node.
pub struct Tally {
    pod: Option<*mut PodCounters>,
    node: Option<*mut PodCounters>,
}

impl Tally {
    /// Finds the counters, adding the pod's when it has none.
    #[inline(always)]
    pub fn of(pod: u64) -> Self {
        let node = TOTALS.get_ptr_mut(0);
        let mut counters = COUNTERS.get_ptr_mut(pod);
        if counters.is_none() {
            let _ = COUNTERS.insert(pod, &ZERO, 1 /* BPF_NOEXIST: another CPU may be first */);
            counters = COUNTERS.get_ptr_mut(pod);
        }
        let tally = Self { pod: counters, node };
        if counters.is_none() {
            tally.add(Counter::Unattributed);
        }
        tally
    }

    /// Adds one.
    #[inline(always)]
    pub fn add(&self, counter: Counter) {
        self.add_slot(counter.code());
    }

    #[inline(always)]
    fn add_slot(&self, slot: u32) {
        let slot = slot as usize & (SLOTS - 1);
        if let Some(pod) = self.pod {
            // SAFETY: this CPU's value of a map entry.
            unsafe { (*pod).count[slot] += 1 };
        }
        if let Some(node) = self.node {
            // SAFETY: as above.
            unsafe { (*node).count[slot] += 1 };
        }
    }
}

/// What an event says beyond its packet.
pub struct Seen {
    pub pod: u64,
    pub container: u64,
    pub cookie: u64,
    pub uid: u32,
    pub hook: Hook,
    pub mode: u32,
}

/// Counts a judgement, remembers evidence, and emits an event for a counted bypass.
#[inline(always)]
pub fn record(
    config: &Config,
    packet: &Packet,
    judgement: &Judgement,
    pod: u64,
    seen: impl FnOnce() -> Seen,
) {
    if !judgement.count && !judgement.drop {
        return;
    }
    let tally = Tally::of(pod);
    if judgement.count {
        tally.add_slot(judgement.verdict.code());
        if judgement.held {
            tally.add(Counter::Held);
        }
        if judgement.would_drop {
            tally.add(Counter::WouldDrop);
        }
        if judgement.drop {
            match judgement.verdict {
                Verdict::FamilyGap => tally.add(Counter::FamilyGapDropped),
                Verdict::ProxyUidImpersonation => tally.add(Counter::ImpersonationDropped),
                Verdict::BypassRaw => tally.add(Counter::BypassRawDropped),
                Verdict::Bypass => tally.add(Counter::BypassDropped),
                Verdict::InboundBypass => tally.add(Counter::InboundDropped),
                Verdict::Quic | Verdict::Udp | Verdict::Other => tally.add(Counter::NonTcpDropped),
                _ => {}
            }
        }
    }
    let family = if packet.family == 6 { V6 } else { V4 };
    if matches!(judgement.verdict, Verdict::RedirectProof) {
        if let Some(counters) = tally.pod {
            // SAFETY: this CPU's value of a map entry.
            unsafe { (*counters).redirect_ns[family] = bpf_ktime_get_ns() };
        }
    } else if judgement.count && judgement.verdict.is_bypass() {
        // SAFETY: no memory is touched.
        let now = unsafe { bpf_ktime_get_ns() };
        if let Some(counters) = tally.pod {
            if !matches!(judgement.verdict, Verdict::InboundBypass) {
                // SAFETY: this CPU's value of a map entry.
                unsafe { (*counters).bypass_ns[family] = now };
            }
            // SAFETY: as above.
            if !unsafe { take_token(config, counters, now) } {
                tally.add(Counter::EventsSuppressed);
                return;
            }
        }
        emit(&tally, packet, judgement, now, seen());
    }
}

/// The token bucket of a pod on this CPU: no lock, no race, and a pod that floods leaves others their events.
///
/// # Safety
/// `counters` is this CPU's value of a map entry.
#[inline(always)]
unsafe fn take_token(config: &Config, counters: *mut PodCounters, now: u64) -> bool {
    // SAFETY: by the caller.
    let counters = unsafe { &mut *counters };
    let burst = u64::from(config.event_burst);
    let rate = u64::from(config.event_rate);
    let elapsed = now.wrapping_sub(counters.bucket_ns);
    if counters.bucket_ns == 0 || elapsed >= NS_PER_SECOND {
        let seconds = elapsed / NS_PER_SECOND;
        let tokens = if counters.bucket_ns == 0 || seconds > 60 {
            burst
        } else {
            counters.bucket_tokens + seconds * rate
        };
        counters.bucket_tokens = tokens;
        counters.bucket_ns = now;
    }
    // Here and not only when it is filled: the operator may have lowered the limit since.
    if counters.bucket_tokens > burst {
        counters.bucket_tokens = burst;
    }
    if counters.bucket_tokens == 0 {
        return false;
    }
    counters.bucket_tokens -= 1;
    true
}

#[inline(always)]
fn emit(tally: &Tally, packet: &Packet, judgement: &Judgement, now: u64, seen: Seen) {
    let Some(mut entry) = EVENTS.reserve::<Event>(0) else {
        tally.add(Counter::EventsRingFull);
        return;
    };
    let Transport { kind, sport, dport } = packet.transport;
    let protocol = match kind {
        Kind::Syn | Kind::Tcp | Kind::TcpCut => IPPROTO_TCP,
        Kind::Udp => IPPROTO_UDP,
        Kind::Icmp | Kind::Opaque => 0,
    };
    let action = if judgement.drop { Action::Drop } else { Action::Pass };
    entry.write(Event {
        ts_ns: now,
        pod: seen.pod,
        container: seen.container,
        cookie: seen.cookie,
        saddr: packet.addresses.source,
        daddr: packet.addresses.destination,
        uid: seen.uid,
        ifindex: packet.ifindex,
        sport,
        dport,
        family: packet.family as u16,
        protocol: protocol as u16,
        verdict: judgement.verdict.code() as u16,
        action: action.code() as u16,
        hook: seen.hook.code() as u16,
        mode: seen.mode as u16,
    });
    entry.submit(0);
    tally.add(Counter::EventsEmitted);
}
