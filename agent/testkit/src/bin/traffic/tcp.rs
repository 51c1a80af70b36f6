//! Ordinary applications.

use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::options::Options;
use crate::report::{self, At, Failed, Try, timed_out};
use crate::sys::{self, Address};

const HELLO: &[u8] = b"hello\n";
/// Neither constant is in the libc crate for every target (linux/tcp.h, linux/in.h).
const TCP_FASTOPEN_NO_COOKIE: i32 = 34;
const IPPROTO_MPTCP: i32 = 262;

/// Blocking connect, hello, answer.
pub fn once(command: &str, target: SocketAddr, o: &Options) -> Result<String, String> {
    check_family(command, target)?;
    let limit = o.timeout(2000)?;
    let mut seen = Try::new(command);
    let result = talk(&mut seen, command, target, limit);
    if command != "closed" {
        return Ok(seen.report(&result));
    }
    // Refusal is what a closed port should give.
    Ok(match result {
        Err(Failed { error, .. }) if error.raw_os_error() == Some(libc::ECONNREFUSED) => {
            seen.answer = Some("refused".to_owned());
            seen.report(&Ok(()))
        }
        Ok(()) => {
            seen.report(&Err(Failed { stage: "connect", error: io::Error::other("something listens there") }))
        }
        other => seen.report(&other),
    })
}

fn check_family(command: &str, target: SocketAddr) -> Result<(), String> {
    let wrong = match command {
        "tcp4" | "mapped" => !target.is_ipv4(),
        "tcp6" => !target.is_ipv6(),
        _ => false,
    };
    if wrong { Err(format!("{command} does not go with {target}")) } else { Ok(()) }
}

fn talk(seen: &mut Try, command: &str, target: SocketAddr, limit: Duration) -> Result<(), Failed> {
    let destination = match (command, target.ip()) {
        ("mapped", IpAddr::V4(v4)) => SocketAddr::new(v4.to_ipv6_mapped().into(), target.port()),
        _ => target,
    };
    let protocol = if command == "mptcp" { IPPROTO_MPTCP } else { 0 };
    let fd = sys::socket(sys::family(destination.ip()), libc::SOCK_STREAM, protocol).at("socket")?;
    sys::set_timeout(&fd, libc::SO_SNDTIMEO, limit).at("socket")?;
    sys::set_timeout(&fd, libc::SO_RCVTIMEO, limit).at("socket")?;
    if command == "tfo" {
        sys::set(&fd, libc::IPPROTO_TCP, TCP_FASTOPEN_NO_COOKIE, 1_i32).at("socket")?;
        patient(sys::send_to(&fd, HELLO, libc::MSG_FASTOPEN | libc::MSG_NOSIGNAL, &destination.into()))
            .at("connect")?;
        seen.connected();
    } else {
        patient(sys::connect(&fd, &destination.into())).at("connect")?;
        seen.connected();
        patient(sys::send(&fd, HELLO)).at("send")?;
    }
    finish(seen, fd)
}

/// Turns the expiry of a socket timeout into our own word for it.
fn patient<T>(result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EINPROGRESS) => timed_out(),
        _ => error,
    })
}

/// Reads one line of answer from a socket that has a receive timeout.
fn finish(seen: &mut Try, fd: OwnedFd) -> Result<(), Failed> {
    let mut stream = std::net::TcpStream::from(fd);
    seen.local = stream.local_addr().ok().map(|a| a.to_string());
    let answer = read_line(&mut stream).at("answer")?;
    seen.bytes = answer.len();
    seen.answer = Some(answer.trim_end().to_owned());
    Ok(())
}

fn read_line(stream: &mut impl Read) -> io::Result<String> {
    let mut line = Vec::new();
    let mut byte = [0];
    while !line.ends_with(b"\n") {
        if patient(stream.read(&mut byte))? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        line.extend(byte);
    }
    Ok(String::from_utf8_lossy(&line).into_owned())
}

/// Sends a SYN and reads off the socket when it will be repeated first, and how often.
pub fn retries(target: SocketAddr, o: &Options) -> Result<String, String> {
    let target = match target.ip() {
        IpAddr::V4(v4) if o.flag("mapped") => SocketAddr::new(v4.to_ipv6_mapped().into(), target.port()),
        _ => target,
    };
    let wanted: Option<i32> = o.number("syn-retries")?;
    let read = || -> io::Result<(u32, i32)> {
        let fd = sys::socket(sys::family(target.ip()), libc::SOCK_STREAM | libc::SOCK_NONBLOCK, 0)?;
        if let Some(wanted) = wanted {
            sys::set(&fd, libc::IPPROTO_TCP, libc::TCP_SYNCNT, wanted)?;
        }
        match sys::connect(&fd, &target.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
            _ => {}
        }
        // `tcpi_rto` comes after eight bytes of `struct tcp_info`.
        let [_, _, rto_us] = sys::get(&fd, libc::IPPROTO_TCP, libc::TCP_INFO, [0_u32; 3])?;
        Ok((rto_us, sys::get(&fd, libc::IPPROTO_TCP, libc::TCP_SYNCNT, 0)?))
    };
    let (rto_us, retries) = read().map_err(|error| error.to_string())?;
    Ok(report::Line::new("retries").raw("rto_us", rto_us).raw("retries", retries).end())
}

/// Non-blocking connect; `immediate` is what connect() itself said.
pub fn nonblocking(target: SocketAddr, o: &Options) -> Result<String, String> {
    let limit = o.timeout(2000)?;
    let mut seen = Try::new("nonblocking");
    let mut immediate = None;
    let result = (|| {
        let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK;
        let fd = sys::socket(sys::family(target.ip()), kind, 0).at("socket")?;
        let first = sys::connect(&fd, &target.into());
        immediate = first.as_ref().err().map(report::errno_name);
        match first {
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {
                wait_connected(&fd, limit).at("connect")?;
            }
            other => other.at("connect")?,
        }
        seen.connected();
        sys::send(&fd, HELLO).at("send")?;
        let stream = std::net::TcpStream::from(fd);
        stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(limit))).at("answer")?;
        finish(&mut seen, stream.into())
    })();
    Ok(seen.line(&result).maybe("immediate", immediate.as_deref()).end())
}

fn wait_connected(fd: &OwnedFd, limit: Duration) -> io::Result<()> {
    if sys::poll(fd.as_raw_fd(), libc::POLLOUT, limit)? == 0 {
        return Err(timed_out());
    }
    sys::socket_error(fd)
}

/// An application that connects all the time: a line for each answer that did not come through the mesh, and for each
/// change. `at_ns`, of `CLOCK_MONOTONIC`, is from before the connect.
pub fn chatter(target: SocketAddr, o: &Options) -> Result<String, String> {
    let limit = o.timeout(300)?;
    let pause = Duration::from_millis(o.number("interval-ms")?.unwrap_or(20));
    let mut last = String::new();
    loop {
        let at_ns = sys::monotonic().as_nanos();
        let mut seen = Try::new("chatter");
        let saw = match talk(&mut seen, "tcp4", target, limit) {
            Ok(()) => seen.answer.unwrap_or_default(),
            Err(Failed { error, .. }) => report::errno_name(&error),
        };
        if saw == "plain" || saw != last {
            report::say(&report::Line::new("chatter").text("saw", &saw).raw("at_ns", at_ns).end());
        }
        last = saw;
        sys::sleep(pause);
    }
}

/// Keeps a connection alive until it breaks (reported with its errno) or standard input ends (reported as ok).
pub fn hold(target: SocketAddr, o: &Options) -> Result<String, String> {
    let limit = o.timeout(2000)?;
    // 0: stay silent and only wait for the end.
    let interval = Duration::from_millis(o.number("interval-ms")?.unwrap_or(20));
    let mut seen = Try::new("hold");
    let result = (|| {
        let fd = sys::socket(sys::family(target.ip()), libc::SOCK_STREAM, 0).at("socket")?;
        sys::set_timeout(&fd, libc::SO_SNDTIMEO, limit).at("socket")?;
        sys::set_timeout(&fd, libc::SO_RCVTIMEO, limit).at("socket")?;
        patient(sys::connect(&fd, &Address::from(target))).at("connect")?;
        seen.connected();
        patient(sys::send(&fd, HELLO)).at("send")?;
        let mut stream = std::net::TcpStream::from(fd);
        seen.local = stream.local_addr().ok().map(|a| a.to_string());
        seen.answer = Some(read_line(&mut stream).at("answer")?.trim_end().to_owned());
        report::say(
            &report::Line::new("hold").raw("ready", true).maybe("answer", seen.answer.as_deref()).end(),
        );
        keep_alive(&mut stream, &mut seen.bytes, interval, limit).at("held")
    })();
    Ok(seen.report(&result))
}

fn keep_alive(
    stream: &mut std::net::TcpStream,
    bytes: &mut usize,
    interval: Duration,
    limit: Duration,
) -> io::Result<()> {
    let mut heard = Instant::now();
    let step = if interval.is_zero() { Duration::from_millis(100) } else { interval };
    loop {
        let entry = |fd, events| libc::pollfd { fd, events, revents: 0 };
        let mut entries = [entry(0, libc::POLLIN), entry(stream.as_raw_fd(), libc::POLLIN)];
        sys::poll_all(&mut entries, step)?;
        if entries[0].revents != 0 && io::stdin().read(&mut [0; 64])? == 0 {
            return Ok(());
        }
        if entries[1].revents != 0 {
            let got = stream.read(&mut [0; 4096])?;
            if got == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            *bytes += got;
            heard = Instant::now();
        }
        if !interval.is_zero() {
            sys::send(stream, b"x\n")?;
            if heard.elapsed() > limit {
                return Err(timed_out());
            }
        }
    }
}
