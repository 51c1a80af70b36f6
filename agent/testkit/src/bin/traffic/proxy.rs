//! Stand-in for a sidecar: finds where a redirected connection wanted to go, says `MESH` there first, and relays.

use std::io::{self, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::options::Options;
use crate::report::{self, Line};
use crate::sys;

static ACCEPTED: AtomicU64 = AtomicU64::new(0);
static FAILED: AtomicU64 = AtomicU64::new(0);

#[derive(Clone, Copy)]
struct How {
    tproxy: bool,
    mark: Option<u32>,
    /// Go on from Istio's pass-through address.
    passthrough: bool,
}

fn counts() -> String {
    let count = |n: &AtomicU64| n.load(Ordering::Relaxed);
    Line::new("proxy").raw("accepted", count(&ACCEPTED)).raw("failed", count(&FAILED)).end()
}

/// Serves until told otherwise; the result is the last line of counts.
pub fn run(ports: &[u16], o: &Options) -> Result<String, String> {
    let passthrough: Option<u16> = o.number("passthrough")?;
    for &port in ports {
        let how =
            How { tproxy: o.flag("tproxy"), mark: o.number("mark")?, passthrough: passthrough == Some(port) };
        for address in [
            SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port),
            SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port),
        ] {
            let listener =
                listen(address, how).map_err(|error| format!("cannot listen on {address}: {error}"))?;
            thread::spawn(move || accept_loop(&listener, how));
        }
    }
    report::say(&Line::new("proxy").raw("ready", true).raw("ports", format!("{ports:?}")).end());
    if !o.flag("stdin") {
        loop {
            thread::park();
        }
    }
    while let Some(asked) = sys::control_line().map_err(|error| error.to_string())? {
        if asked {
            report::say(&counts());
        }
    }
    Ok(counts())
}

fn listen(address: SocketAddr, how: How) -> io::Result<TcpListener> {
    let fd = sys::socket(sys::family(address.ip()), libc::SOCK_STREAM, 0)?;
    sys::set(&fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1_i32)?;
    let v4 = address.is_ipv4();
    if !v4 {
        sys::set(&fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1_i32)?;
    }
    if how.tproxy {
        let (level, name) =
            if v4 { (libc::SOL_IP, libc::IP_TRANSPARENT) } else { (libc::SOL_IPV6, libc::IPV6_TRANSPARENT) };
        sys::set(&fd, level, name, 1_i32)?;
    }
    sys::bind(&fd, &address.into())?;
    sys::listen(&fd, 4096)?;
    Ok(fd.into())
}

fn accept_loop(listener: &TcpListener, how: How) {
    for stream in listener.incoming().flatten() {
        ACCEPTED.fetch_add(1, Ordering::Relaxed);
        thread::spawn(move || {
            if let Err(error) = relay(&stream, how) {
                // Where nothing listens is the application's business, and it is told.
                if error.kind() != io::ErrorKind::ConnectionRefused {
                    eprintln!(
                        "traffic proxy: {:?} -> {:?}: {error}",
                        stream.peer_addr().ok(),
                        stream.local_addr().ok()
                    );
                }
                FAILED.fetch_add(1, Ordering::Relaxed);
                // The application sees a reset, not a silent end.
                let _ = sys::reset_on_close(&stream);
            }
        });
    }
}

fn relay(stream: &TcpStream, how: How) -> io::Result<()> {
    let local = stream.local_addr()?;
    let target = if how.tproxy { local } else { sys::original_destination(stream, local.is_ipv4())? };
    if !how.tproxy && target == local {
        return Err(io::Error::other("not redirected: somebody called the proxy itself"));
    }
    let mut upstream = connect(target, how)?;
    // One write: in pieces, Nagle's algorithm would wait for the peer's delayed ACK.
    upstream.write_all(format!("MESH {}\n", stream.peer_addr()?).as_bytes())?;
    let (from, to) = (stream.try_clone()?, upstream.try_clone()?);
    let there = thread::spawn(move || pump(&from, &to));
    pump(&upstream, stream);
    let _ = there.join();
    Ok(())
}

fn connect(target: SocketAddr, how: How) -> io::Result<TcpStream> {
    let fd = sys::socket(sys::family(target.ip()), libc::SOCK_STREAM, 0)?;
    if let Some(mark) = how.mark {
        sys::set(&fd, libc::SOL_SOCKET, libc::SO_MARK, mark)?;
    }
    if how.passthrough {
        let source =
            if target.is_ipv4() { Ipv4Addr::new(127, 0, 0, 6).into() } else { Ipv6Addr::from(6).into() };
        sys::bind(&fd, &SocketAddr::new(source, 0).into())?;
    }
    sys::set_timeout(&fd, libc::SO_SNDTIMEO, Duration::from_secs(3))?;
    sys::connect(&fd, &target.into())?;
    sys::set_timeout(&fd, libc::SO_SNDTIMEO, Duration::ZERO)?;
    Ok(fd.into())
}

fn pump(mut from: &TcpStream, mut to: &TcpStream) {
    if io::copy(&mut from, &mut to).is_err() {
        // Pass a reset on as one.
        let _ = sys::reset_on_close(&to.as_raw_fd());
        let _ = to.shutdown(Shutdown::Both);
    }
    let _ = to.shutdown(Shutdown::Write);
}
