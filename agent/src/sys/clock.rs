//! `CLOCK_MONOTONIC`, which `bpf_ktime_get_ns` reads too.

use std::time::{Duration, SystemTime};

use rustix::time::{ClockId, clock_gettime};

/// Now, ns.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

/// The wall-clock time of a moment of `CLOCK_MONOTONIC`.
pub fn wall(moment_ns: u64) -> SystemTime {
    let age = monotonic_ns().saturating_sub(moment_ns);
    SystemTime::now().checked_sub(Duration::from_nanos(age)).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// The wall-clock time at which this kernel started, in nanoseconds since 1970, by the clock as it is now.
pub fn boot_time_ns() -> i64 {
    let up = clock_gettime(ClockId::Boottime);
    let now = clock_gettime(ClockId::Realtime);
    let ns = |seconds: i64, rest: i64| seconds.saturating_mul(1_000_000_000).saturating_add(rest);
    ns(now.tv_sec, now.tv_nsec).saturating_sub(ns(up.tv_sec, up.tv_nsec))
}
