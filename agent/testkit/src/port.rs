//! Ports of 127.0.0.1 that stay ours while nobody listens on them.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener};
use std::os::fd::OwnedFd;

use anyhow::{Context as _, Result, bail};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, listen, socket_with, sockopt};

/// A port of 127.0.0.1 that nobody else is given. While no server listens on it, connections are refused.
///
/// A server of ours, or a child that sets SO_REUSEADDR as Go's do, may listen on it: both sockets set that option and
/// this one does not listen (socket(7)).
#[derive(Debug)]
pub struct Port {
    address: SocketAddrV4,
    _held: OwnedFd,
}

impl Port {
    /// Takes a free port.
    pub fn reserve() -> Result<Self> {
        let held = bound(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
        let address = getsockname(&held).context("which port is it?")?;
        match SocketAddr::try_from(address)? {
            SocketAddr::V4(address) => Ok(Self { address, _held: held }),
            SocketAddr::V6(other) => bail!("bound to {other} instead of 127.0.0.1"),
        }
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> SocketAddrV4 {
        self.address
    }

    /// Listens on it, without blocking.
    pub fn listen(&self) -> Result<TcpListener> {
        let socket = bound(self.address)?;
        listen(&socket, 1024).with_context(|| format!("cannot listen on {}", self.address))?;
        Ok(TcpListener::from(socket))
    }
}

fn bound(address: SocketAddrV4) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &address).with_context(|| format!("cannot bind {address}"))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn a_port_stays_ours_between_two_listeners() {
        let port = Port::reserve().unwrap();
        for _ in 0..2 {
            assert!(TcpStream::connect(port.address()).is_err(), "refused while nobody listens");
            let listener = port.listen().unwrap();
            drop(TcpStream::connect(port.address()).unwrap());
            drop(listener);
        }
    }
}
