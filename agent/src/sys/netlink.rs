//! Netlink: messages as bytes, and a socket for requests.
//!
//! Layouts are those of `struct nlmsghdr` and `struct nlattr`
//! (<https://github.com/torvalds/linux/blob/v6.12/include/uapi/linux/netlink.h#L44>).

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};

pub use rustix::net::netlink::{NETFILTER, SOCK_DIAG};

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const HEADER: usize = 16;
/// The kernel answers at once; this bounds a surprise.
const PATIENCE: Duration = Duration::from_secs(2);

/// A netlink socket of the network namespace in which it was made.
#[derive(Debug)]
pub struct Netlink(OwnedFd);

impl Netlink {
    /// Opens one, of the calling thread's network namespace.
    ///
    /// # Errors
    /// As socket(2) says: `EPROTONOSUPPORT` where the kernel has no such protocol.
    pub fn open(protocol: Protocol) -> io::Result<Self> {
        let fd = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, Some(protocol))?;
        set_socket_timeout(&fd, Timeout::Recv, Some(PATIENCE))?;
        Ok(Self(fd))
    }

    /// Sends a request and waits for its acknowledgement.
    ///
    /// # Errors
    /// What the kernel says of the request.
    pub fn request(&self, kind: u16, body: &[u8]) -> io::Result<()> {
        send(&self.0, &message(kind, NLM_F_REQUEST | NLM_F_ACK, body), SendFlags::empty())?;
        let mut buffer = [0; 4096];
        let (_, len) = recv(&self.0, &mut buffer, RecvFlags::empty())?;
        match messages(buffer.get(..len).unwrap_or_default()).next() {
            Some((NLMSG_ERROR, answer)) => error(answer),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Asks for a list and hands each item to `take`.
    ///
    /// # Errors
    /// What the kernel says of the request.
    pub fn dump(&self, kind: u16, body: &[u8], mut take: impl FnMut(&[u8])) -> io::Result<()> {
        send(&self.0, &message(kind, NLM_F_REQUEST | NLM_F_DUMP, body), SendFlags::empty())?;
        let mut buffer = vec![0; 65_536];
        loop {
            let (_, len) = recv(&self.0, buffer.as_mut_slice(), RecvFlags::empty())?;
            for (kind, body) in messages(buffer.get(..len).unwrap_or_default()) {
                match kind {
                    NLMSG_DONE => return Ok(()),
                    NLMSG_ERROR => return error(body),
                    _ => take(body),
                }
            }
        }
    }
}

/// A message of one request.
fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(HEADER + body.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    bytes.extend(len.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    // Sequence number and port: one request at a time, and the kernel fills in the port.
    bytes.extend([0; 8]);
    bytes.extend(body);
    bytes
}

/// An attribute, padded to four bytes.
pub fn attribute(kind: u16, payload: &[u8]) -> Vec<u8> {
    let len = u16::try_from(4 + payload.len()).unwrap_or(u16::MAX);
    let mut bytes = Vec::with_capacity(4 + payload.len() + 3);
    bytes.extend(len.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(payload);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Types and payloads of what follows each other, each with a length in front and padded to four bytes.
fn split(
    mut rest: &[u8],
    header: usize,
    of: fn(&[u8]) -> Option<(usize, u16)>,
) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (len, kind) = of(rest)?;
        let body = rest.get(header..len)?;
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, body))
    })
}

fn messages(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    split(bytes, HEADER, |rest| {
        let len = u32::from_ne_bytes(*rest.first_chunk()?);
        let kind = u16::from_ne_bytes(*rest.get(4..)?.first_chunk()?);
        Some((usize::try_from(len).ok()?, kind))
    })
}

/// Types and payloads of attributes.
pub fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    split(bytes, 4, |rest| {
        let len = u16::from_ne_bytes(*rest.first_chunk()?);
        let kind = u16::from_ne_bytes(*rest.get(2..)?.first_chunk()?);
        Some((usize::from(len), kind))
    })
}

/// `struct nlmsgerr`: a negative errno, 0 for an acknowledgement.
fn error(body: &[u8]) -> io::Result<()> {
    match body.first_chunk().map(|code| i32::from_ne_bytes(*code)) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(code.saturating_neg())),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_can_be_read() {
        let body = [attribute(1, b"abcde"), attribute(2, b"")].concat();
        assert_eq!(body.len(), 12 + 4);
        let bytes = [message(20, 0, &body), message(NLMSG_DONE, 0, &[])].concat();
        let all: Vec<_> = messages(&bytes).collect();
        assert_eq!(all.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), [20, NLMSG_DONE]);
        assert_eq!(attributes(all[0].1).collect::<Vec<_>>(), [(1, &b"abcde"[..]), (2, &b""[..])]);
    }

    #[test]
    fn what_is_cut_ends_the_list() {
        for bytes in [&[][..], &[1, 2, 3], &[0; 16], &[255; 20]] {
            assert_eq!(messages(bytes).count(), 0, "{bytes:?}");
            assert!(attributes(bytes).count() <= 1, "{bytes:?}");
        }
    }

    #[test]
    fn errors_are_the_kernels() {
        assert!(error(&0i32.to_ne_bytes()).is_ok());
        assert_eq!(error(&(-2i32).to_ne_bytes()).unwrap_err().raw_os_error(), Some(2));
        assert!(error(&[1]).is_err());
    }
}
