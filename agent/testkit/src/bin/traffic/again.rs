//! The same connect again and again, one after the other: how long each took and how it ended.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crate::options::Options;
use crate::report::{Line, errno_name, timed_out};
use crate::sys::{self, Address};

pub fn run(target: SocketAddr, o: &Options) -> Result<String, String> {
    let total: usize = o.nth(3)?.ok_or("how many?")?;
    let limit = o.timeout(2000)?;
    let pause = Duration::from_millis(o.number("interval-ms")?.unwrap_or(0));
    let mapped = o.flag("mapped");
    let target = match target.ip() {
        IpAddr::V4(v4) if mapped => SocketAddr::new(v4.to_ipv6_mapped().into(), target.port()),
        _ => target,
    };
    let mut ends: BTreeMap<String, u64> = BTreeMap::new();
    let mut took = Vec::with_capacity(total);
    let cpu = sys::cpu_time();
    let (mut succeeded, mut failed_again) = (false, 0_u64);
    for _ in 0..total {
        sys::sleep(pause);
        let start = Instant::now();
        let end = match connect(target, o.flag("nonblock"), limit) {
            Ok(()) => "ok".to_owned(),
            Err(error) => errno_name(&error),
        };
        succeeded |= end == "ok";
        failed_again += u64::from(succeeded && end != "ok");
        took.push(start.elapsed().as_micros());
        *ends.entry(end).or_default() += 1;
    }
    let cpu = sys::cpu_time().saturating_sub(cpu);
    let first = took.first().copied().unwrap_or(0);
    took.sort_unstable();
    let at = |part: usize| {
        took.get((took.len() * part / 100).min(took.len().saturating_sub(1))).copied().unwrap_or(0)
    };
    Ok(Line::new("again")
        .counts("ends", &ends)
        // After the first that did not fail.
        .raw("failed_again", failed_again)
        .raw("first_us", first)
        .raw("p50_us", at(50))
        .raw("p99_us", at(99))
        .raw("max_us", at(100))
        .raw("cpu_us", cpu.as_micros())
        .end())
}

fn connect(target: SocketAddr, nonblock: bool, limit: Duration) -> io::Result<()> {
    let kind = if nonblock { libc::SOCK_STREAM | libc::SOCK_NONBLOCK } else { libc::SOCK_STREAM };
    let fd = sys::socket(sys::family(target.ip()), kind, 0)?;
    sys::set_timeout(&fd, libc::SO_SNDTIMEO, limit)?;
    sys::reset_on_close(&fd)?;
    match sys::connect(&fd, &Address::from(target)) {
        Err(error) if nonblock && error.raw_os_error() == Some(libc::EINPROGRESS) => {
            if sys::poll(fd.as_raw_fd(), libc::POLLOUT, limit)? == 0 {
                return Err(timed_out());
            }
            sys::socket_error(&fd)
        }
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINPROGRESS)) => {
            Err(timed_out())
        }
        other => other,
    }
}
