//! `CLOCK_MONOTONIC` as `bpf_ktime_get_ns` reads it: the machine's, whatever a time namespace adds for us.

use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use rustix::time::{ClockId, clock_getres, clock_gettime};

/// Now, ns.
pub fn monotonic_ns() -> u64 {
    static OFFSET: OnceLock<i128> = OnceLock::new();
    let offset = OFFSET.get_or_init(|| {
        let offsets = std::fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
        monotonic_offset(&offsets).unwrap_or(0)
    });
    let now = clock_gettime(ClockId::Monotonic);
    let here = i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec);
    u64::try_from(here - offset).unwrap_or(0)
}

/// What a time namespace adds to `CLOCK_MONOTONIC`, ns, from `/proc/self/timens_offsets` (time_namespaces(7)); programs in
/// the kernel are in none. Without the file there are no such namespaces.
fn monotonic_offset(offsets: &str) -> Option<i128> {
    let line = offsets.lines().find_map(|line| line.strip_prefix("monotonic"))?;
    let mut numbers = line.split_whitespace().map(str::parse::<i64>);
    let (seconds, rest) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    Some(i128::from(seconds) * 1_000_000_000 + i128::from(rest))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_namespaces_offset_is_read() {
        for (offsets, ns) in [
            ("monotonic           0         0\nboottime            0         0\n", Some(0)),
            ("monotonic      864000       500\nboottime      1728000         0\n", Some(864_000_000_000_500)),
            ("monotonic         -10 999999999\nboottime            0         0\n", Some(-9_000_000_001)),
            ("", None),
            ("monotonic soon\n", None),
        ] {
            assert_eq!(monotonic_offset(offsets), ns, "{offsets:?}");
        }
    }
}
