//! The outside world: says whether a connection came through the proxy. One thread, so that a flood is no problem.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use crate::options::Options;
use crate::report::{self, Line};
use crate::sys;

/// What is behind a descriptor.
enum Source {
    Control,
    Tcp(u16, TcpListener),
    Udp(OwnedFd),
    Connection(Connection),
}

struct Connection {
    stream: TcpStream,
    /// Bytes of the lines before the answer; `None` once answered.
    greeting: Option<Vec<u8>>,
}

#[derive(Default)]
struct Counts {
    accepted: BTreeMap<u16, u64>,
    plain: u64,
    mesh: u64,
    udp: u64,
}

impl Counts {
    fn line(&self) -> String {
        Line::new("server")
            .raw("tcp_accepted", self.accepted.values().sum::<u64>())
            .raw("tcp_plain", self.plain)
            .raw("tcp_mesh", self.mesh)
            .raw("udp", self.udp)
            .counts("accepted_by_port", &self.accepted)
            .end()
    }
}

/// Serves until told otherwise; the result is the last line of counts.
pub fn run(ports: &[u16], o: &Options) -> Result<String, String> {
    let mut server = Server::new(ports, o.flag("stdin")).map_err(|error| format!("server: {error}"))?;
    report::say(&Line::new("server").raw("ready", true).raw("ports", format!("{ports:?}")).end());
    server.serve().map_err(|error| format!("server: {error}"))?;
    Ok(server.counts.line())
}

struct Server {
    poller: sys::Poller,
    sources: BTreeMap<RawFd, Source>,
    counts: Counts,
}

/// What becomes of a source after it was served.
enum Then {
    Keep,
    Close,
    End,
}

impl Server {
    fn new(ports: &[u16], control: bool) -> io::Result<Self> {
        let mut server =
            Self { poller: sys::Poller::new()?, sources: BTreeMap::new(), counts: Counts::default() };
        if control {
            server.add(0, Source::Control)?;
        }
        for &port in ports {
            let tcp = listener(port)?;
            server.add(tcp.as_raw_fd(), Source::Tcp(port, tcp))?;
            let udp = udp_socket(port)?;
            server.add(udp.as_raw_fd(), Source::Udp(udp))?;
            server.counts.accepted.insert(port, 0);
        }
        Ok(server)
    }

    fn add(&mut self, fd: RawFd, source: Source) -> io::Result<()> {
        self.sources.insert(fd, source);
        self.poller.add(fd)
    }

    /// Returns at the end of standard input.
    fn serve(&mut self) -> io::Result<()> {
        loop {
            for fd in self.poller.wait()? {
                match self.advance(fd)? {
                    Then::Keep => {}
                    // Closing the descriptor takes it out of the poller.
                    Then::Close => drop(self.sources.remove(&fd)),
                    Then::End => return Ok(()),
                }
            }
        }
    }

    fn advance(&mut self, fd: RawFd) -> io::Result<Then> {
        let new = match self.sources.get_mut(&fd) {
            None => return Ok(Then::Keep),
            Some(Source::Control) => return self.answer_control(),
            Some(Source::Udp(udp)) => {
                // An error here is one that a peer caused, as a closed port.
                while let Ok(true) = sys::echo_datagram(udp) {
                    self.counts.udp += 1;
                }
                return Ok(Then::Keep);
            }
            Some(Source::Connection(connection)) => {
                // A reset is an ordinary end here.
                let open = connection.advance(&mut self.counts).unwrap_or(false);
                return Ok(if open { Then::Keep } else { Then::Close });
            }
            Some(Source::Tcp(port, tcp)) => {
                let new = accept_all(tcp);
                *self.counts.accepted.entry(*port).or_default() += u64::try_from(new.len()).unwrap_or(0);
                new
            }
        };
        for stream in new {
            self.add(
                stream.as_raw_fd(),
                Source::Connection(Connection { stream, greeting: Some(Vec::new()) }),
            )?;
        }
        Ok(Then::Keep)
    }

    fn answer_control(&self) -> io::Result<Then> {
        match sys::control_line()? {
            None => return Ok(Then::End),
            Some(true) => report::say(&self.counts.line()),
            Some(false) => {}
        }
        Ok(Then::Keep)
    }
}

fn accept_all(tcp: &TcpListener) -> Vec<TcpStream> {
    std::iter::from_fn(|| sys::accept(tcp).ok().map(TcpStream::from)).collect()
}

impl Connection {
    /// Reads what is there; `false` when the connection is over.
    fn advance(&mut self, counts: &mut Counts) -> io::Result<bool> {
        let mut buffer = [0_u8; 16_384];
        let got = match self.stream.read(&mut buffer) {
            Ok(0) => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
            other => other?,
        };
        let data = buffer.get(..got).unwrap_or_default();
        let Some(greeting) = &mut self.greeting else {
            self.stream.write_all(data)?;
            return Ok(true);
        };
        greeting.extend_from_slice(data);
        let Some((mesh, rest)) = judge(greeting) else { return Ok(true) };
        let (answer, count): (&[u8], _) =
            if mesh { (b"mesh\n", &mut counts.mesh) } else { (b"plain\n", &mut counts.plain) };
        *count += 1;
        self.stream.write_all(answer)?;
        self.stream.write_all(rest)?;
        self.greeting = None;
        Ok(true)
    }
}

/// After a whole line of the application: whether the proxy's line came before it, and what follows.
fn judge(greeting: &[u8]) -> Option<(bool, &[u8])> {
    let end = |bytes: &[u8]| bytes.iter().position(|&b| b == b'\n').map(|at| at + 1);
    let mesh = greeting.starts_with(b"MESH ");
    let rest = if mesh { greeting.get(end(greeting)?..)? } else { greeting };
    Some((mesh, rest.get(end(rest)?..)?))
}

/// Both families on one socket; IPv4 alone where IPv6 is off.
fn wildcard(port: u16, kind: i32) -> io::Result<OwnedFd> {
    let kind = kind | libc::SOCK_NONBLOCK;
    let (fd, address) = match sys::socket(libc::AF_INET6, kind, 0) {
        Ok(fd) => {
            sys::set(&fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 0_i32)?;
            (fd, SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port))
        }
        Err(_) => (sys::socket(libc::AF_INET, kind, 0)?, SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port)),
    };
    sys::set(&fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1_i32)?;
    sys::bind(&fd, &address.into())?;
    Ok(fd)
}

fn listener(port: u16) -> io::Result<TcpListener> {
    let fd = wildcard(port, libc::SOCK_STREAM)?;
    sys::listen(&fd, 4096)?;
    Ok(fd.into())
}

fn udp_socket(port: u16) -> io::Result<OwnedFd> {
    let fd = wildcard(port, libc::SOCK_DGRAM)?;
    // Fails on an IPv4 socket, which then answers from whatever address routing chooses.
    let _ = sys::set(&fd, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1_i32);
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::judge;

    #[test]
    fn waits_for_the_applications_line() {
        for (bytes, want) in [
            (&b"hel"[..], None),
            (b"hello\n", Some((false, &b""[..]))),
            (b"MESH 10.0.0.1\n", None),
            (b"MESH 10.0.0.1\nhello\nmore", Some((true, b"more"))),
            (b"MESHED\n", Some((false, b""))),
        ] {
            assert_eq!(judge(bytes), want);
        }
    }
}
