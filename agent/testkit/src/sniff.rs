//! A witness of TCP packets on all devices of a network namespace, by a packet socket: it asks no program under test.

use std::num::NonZeroU32;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socket_with};

use crate::netns::Netns;

/// `ETH_P_ALL` in network order, as packet(7) wants it.
const ALL: u32 = 0x0003_u16.to_be() as u32;

/// See the module. Counts from when it was made.
#[derive(Debug)]
pub struct Sniffer {
    socket: OwnedFd,
    seen: u64,
}

impl Sniffer {
    /// Listens on every device of `netns`, in both directions.
    pub fn new(netns: &Netns) -> Result<Self> {
        let protocol = NonZeroU32::new(ALL).map(rustix::net::Protocol::from_raw);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            netns.run_in(|| socket_with(AddressFamily::PACKET, SocketType::DGRAM, flags, protocol))?;
        Ok(Self { socket: socket.context("cannot make a packet socket: are you root?")?, seen: 0 })
    }

    /// TCP SYNs (without ACK) so far; one that passes two devices counts twice.
    pub fn syns(&mut self) -> u64 {
        let mut packet = [0; 256];
        while let Ok((_, len)) = recv(&self.socket, &mut packet, RecvFlags::empty()) {
            self.seen += u64::from(is_syn(packet.get(..len).unwrap_or_default()));
        }
        self.seen
    }
}

/// Whether an IP packet without options or extension headers is a SYN.
fn is_syn(packet: &[u8]) -> bool {
    let byte = |at: usize| packet.get(at).copied().unwrap_or(0);
    let tcp = match byte(0) >> 4 {
        4 if byte(9) == 6 => usize::from(byte(0) & 0xf) * 4,
        6 if byte(6) == 6 => 40,
        _ => return false,
    };
    byte(tcp + 13) & 0x12 == 0x02
}
