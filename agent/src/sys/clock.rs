//! `CLOCK_MONOTONIC`, which `bpf_ktime_get_ns` reads too.

use std::time::{Duration, SystemTime};

use rustix::time::{ClockId, clock_getres, clock_gettime};

/// Now, ns.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

/// Ticks of the kernel's clock in a second (`CONFIG_HZ`): the coarse clock goes on with each (`posix_get_coarse_res`,
/// <https://github.com/torvalds/linux/blob/v6.12/kernel/time/posix-timers.c#L187>).
pub fn ticks_per_second() -> u32 {
    let tick = u32::try_from(clock_getres(ClockId::MonotonicCoarse).tv_nsec).unwrap_or(0);
    // A tick is rounded to whole nanoseconds: 3,333,333 of 300.
    (1_000_000_000 + tick / 2).checked_div(tick).unwrap_or(100)
}

/// The moment of a wall-clock time, given in ns since 1970; 0 for one that is not known or before the machine started.
pub fn monotonic_of(wall_ns: i64) -> u64 {
    let Ok(wall_ns) = u64::try_from(wall_ns) else { return 0 };
    if wall_ns == 0 {
        return 0;
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    // A clock that was set back meanwhile must not put anything into the future.
    let age = now.saturating_sub(u128::from(wall_ns));
    monotonic_ns().saturating_sub(u64::try_from(age).unwrap_or(u64::MAX))
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
