//! As many connects as asked for, each closed at once.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

use crate::options::Options;
use crate::report::{Line, errno_name};
use crate::sys::{self, Address};

#[derive(Default)]
struct Counts {
    attempts: u64,
    /// Attempts whose SYN was handed to the network layer.
    started: u64,
    established: u64,
    refused: u64,
    /// Neither yet when the socket was closed.
    pending: u64,
    errors: BTreeMap<String, u64>,
}

pub fn run(target: SocketAddr, o: &Options) -> Result<String, String> {
    let total: u64 = o.nth(3)?.ok_or("how many?")?;
    let parallel = o.number("parallel")?.unwrap_or(1_u64).max(1);
    let wait = Duration::from_millis(o.number("wait-ms")?.unwrap_or(0));
    let start = Instant::now();
    let workers: Vec<_> = (0..parallel)
        .map(|n| {
            let share = total / parallel + u64::from(n < total % parallel);
            thread::spawn(move || {
                (0..share).fold(Counts::default(), |counts, _| attempt(counts, target, wait))
            })
        })
        .collect();
    let mut all = Counts::default();
    for worker in workers {
        let part = worker.join().map_err(|_| "a worker panicked".to_owned())?;
        all.attempts += part.attempts;
        all.started += part.started;
        all.established += part.established;
        all.refused += part.refused;
        all.pending += part.pending;
        for (name, count) in part.errors {
            *all.errors.entry(name).or_default() += count;
        }
    }
    Ok(Line::new("flood")
        .raw("attempts", all.attempts)
        .raw("started", all.started)
        .raw("established", all.established)
        .raw("refused", all.refused)
        .raw("pending", all.pending)
        .counts("errors", &all.errors)
        .raw("total_us", start.elapsed().as_micros())
        .end())
}

fn attempt(mut counts: Counts, target: SocketAddr, wait: Duration) -> Counts {
    counts.attempts += 1;
    let result = connect(target, wait);
    match &result {
        Ok(true) => counts.established += 1,
        Ok(false) => counts.pending += 1,
        Err(error) if error.raw_os_error() == Some(libc::ECONNREFUSED) => counts.refused += 1,
        Err(error) => *counts.errors.entry(errno_name(error)).or_default() += 1,
    }
    let on_its_way = match result.map_err(|error| error.raw_os_error()) {
        Ok(_) => true,
        Err(number) => matches!(
            number,
            Some(
                libc::ECONNREFUSED
                    | libc::ECONNRESET
                    | libc::ECONNABORTED
                    | libc::ETIMEDOUT
                    | libc::EHOSTUNREACH
            )
        ),
    };
    counts.started += u64::from(on_its_way);
    counts
}

/// `Ok(false)`: still on its way after `wait`.
fn connect(target: SocketAddr, wait: Duration) -> io::Result<bool> {
    let fd = sys::socket(sys::family(target.ip()), libc::SOCK_STREAM | libc::SOCK_NONBLOCK, 0)?;
    sys::reset_on_close(&fd)?;
    match sys::connect(&fd, &Address::from(target)) {
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        other => return other.map(|()| true),
    }
    if sys::poll(fd.as_raw_fd(), libc::POLLOUT, wait)? == 0 {
        return Ok(false);
    }
    sys::socket_error(&fd).map(|()| true)
}
