//! The connection tracking entry that a probe leaves: it would stay for two minutes, and the next connection with its
//! ports would get the decision that was right then.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};

use crate::sys::netlink::{NETFILTER, Netlink, attribute};

/// `NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_DELETE`
/// (<https://github.com/torvalds/linux/blob/v6.12/include/uapi/linux/netfilter/nfnetlink_conntrack.h#L7>).
const DELETE: u16 = (1 << 8) | 2;
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_SRC_PORT: u16 = 2;
const CTA_PROTO_DST_PORT: u16 = 3;
const NESTED: u16 = 1 << 15;
const IPPROTO_TCP: u8 = 6;
/// Entries of the calling thread's network namespace.
const COUNT: &str = "/proc/sys/net/netfilter/nf_conntrack_count";

/// Removes the entry of a TCP connection, as its socket knew it, in the calling thread's network namespace.
///
/// # Errors
/// As the kernel says; that there is no entry is none.
pub fn forget(from: SocketAddr, to: SocketAddr) -> io::Result<()> {
    // Where nothing is tracked there is nothing to do, and no module to load by asking.
    if fs::read_to_string(COUNT).map_or(true, |count| count.trim() == "0") {
        return Ok(());
    }
    match Netlink::open(NETFILTER)?.request(DELETE, &delete(from, to)) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        done => done,
    }
}

/// `struct nfgenmsg` and the tuple.
fn delete(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let (family, kinds) = if from.is_ipv4() { (libc::AF_INET, [1, 2]) } else { (libc::AF_INET6, [3, 4]) };
    let octets = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let [source, destination] = kinds;
    let addresses =
        [attribute(source, &octets(from.ip())), attribute(destination, &octets(to.ip()))].concat();
    let ports = [
        attribute(CTA_PROTO_NUM, &[IPPROTO_TCP]),
        attribute(CTA_PROTO_SRC_PORT, &from.port().to_be_bytes()),
        attribute(CTA_PROTO_DST_PORT, &to.port().to_be_bytes()),
    ]
    .concat();
    let tuple =
        [attribute(CTA_TUPLE_IP | NESTED, &addresses), attribute(CTA_TUPLE_PROTO | NESTED, &ports)].concat();
    let mut body = vec![u8::try_from(family).unwrap_or_default(), 0, 0, 0];
    body.extend(attribute(CTA_TUPLE_ORIG | NESTED, &tuple));
    body
}
