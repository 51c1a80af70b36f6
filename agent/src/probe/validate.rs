//! The same question from inside a pod, by what any process can do: listen where the mesh redirects to, connect to an
//! address that is nobody's, and see whether one's own listener answers.
//!
//! As the meshes' own validators do it. It needs no eBPF and no privileges, and cannot see redirection by TPROXY, whose
//! listener would need `CAP_NET_ADMIN`.

use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long one try waits; the kernel repeats a SYN after a second.
const TRY: Duration = Duration::from_millis(900);
/// Between two tries of a connection that was refused.
const PAUSE: Duration = Duration::from_millis(200);

/// One IP family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Family {
    /// IPv4
    Ipv4,
    /// IPv6
    Ipv6,
}

impl Family {
    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
        }
    }

    /// An address for documentation: nobody's.
    pub const fn nobody(self) -> IpAddr {
        match self {
            Self::Ipv4 => IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
            Self::Ipv6 => IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
        }
    }
}

/// What was found for one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// The listener answered: new connections go to the proxy's port.
    Redirected,
    /// No connection of this family can leave the pod.
    NoRoute,
    /// It did not, for this reason, within the time.
    NotRedirected(String),
}

/// A listener that says a word that nobody else knows.
#[derive(Debug)]
pub struct Answerer {
    word: [u8; 8],
}

impl Answerer {
    /// Listens on `port` of all addresses until the process ends.
    ///
    /// # Errors
    /// As bind(2) says: `AddrInUse` where the proxy runs already.
    pub fn start(port: u16) -> io::Result<Self> {
        // Where there is IPv6, that socket takes IPv4 as well.
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))?;
        let word = RandomState::new().hash_one(Instant::now()).to_ne_bytes();
        std::thread::Builder::new().name("answerer".into()).spawn(move || {
            for mut client in listener.incoming().flatten() {
                // Who does not read it gets no other.
                let _ = client.set_write_timeout(Some(TRY)).and_then(|()| client.write_all(&word));
            }
        })?;
        Ok(Self { word })
    }

    /// Whether connections to `to` come to this listener; asks again until `deadline`, since rules may come late.
    pub fn hears(&self, to: SocketAddr, deadline: Instant) -> Found {
        loop {
            let why = match self.connect(to, deadline) {
                Ok(true) => return Found::Redirected,
                Ok(false) => format!("{to} was reached, and was not this process"),
                Err(error) if has_no_route(&error) => return Found::NoRoute,
                Err(error) if error.kind() == io::ErrorKind::TimedOut => format!("{to} does not answer"),
                Err(error) => format!("{to}: {error}"),
            };
            if Instant::now() + PAUSE >= deadline {
                return Found::NotRedirected(why);
            }
            #[expect(clippy::disallowed_methods, reason = "a process that has nothing else to do")]
            std::thread::sleep(PAUSE);
        }
    }

    fn connect(&self, to: SocketAddr, deadline: Instant) -> io::Result<bool> {
        let left = deadline.saturating_duration_since(Instant::now()).clamp(Duration::from_millis(1), TRY);
        let mut stream = TcpStream::connect_timeout(&to, left)?;
        stream.set_read_timeout(Some(left))?;
        let mut said = [0; 8];
        // Another one's silence is an answer, too.
        Ok(stream.read_exact(&mut said).is_ok() && said == self.word)
    }
}

fn has_no_route(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENETUNREACH | libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_its_own_word_counts() {
        let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let port = free();
        let answerer = Answerer::start(port).unwrap();
        let soon = || Instant::now() + Duration::from_secs(20);
        assert_eq!(answerer.hears(([127, 0, 0, 1], port).into(), soon()), Found::Redirected);
        let other = free();
        let _other = Answerer::start(other).unwrap();
        let past = Instant::now();
        assert!(matches!(answerer.hears(([127, 0, 0, 1], other).into(), past), Found::NotRedirected(_)));
        assert!(matches!(answerer.hears(([127, 0, 0, 1], 9).into(), past), Found::NotRedirected(_)));
        assert!(Answerer::start(port).is_err(), "the port is taken");
    }
}
