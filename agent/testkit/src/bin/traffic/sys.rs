//! Every system call that std has no function for.

use std::ffi::c_int;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn check_size(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn len_of<T>() -> libc::socklen_t {
    libc::socklen_t::try_from(size_of::<T>()).unwrap_or(libc::socklen_t::MAX)
}

/// A socket address as the kernel wants it.
pub struct Address {
    storage: libc::sockaddr_storage,
    len: libc::socklen_t,
}

impl Address {
    /// An all-zero address.
    fn empty() -> Self {
        // SAFETY: all zeroes is a valid sockaddr_storage (family AF_UNSPEC).
        Self { storage: unsafe { MaybeUninit::zeroed().assume_init() }, len: 0 }
    }

    fn put<T>(value: T) -> Self {
        let mut address = Self { len: len_of::<T>(), ..Self::empty() };
        // SAFETY: every sockaddr type fits into sockaddr_storage and needs no more alignment (socket.h).
        unsafe { (&raw mut address.storage).cast::<T>().write(value) };
        address
    }

    pub fn as_ptr(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }

    pub fn len(&self) -> libc::socklen_t {
        self.len
    }

    /// A link-layer address for packets of `protocol` (host byte order).
    pub fn link(index: c_int, protocol: u16, mac: [u8; 6]) -> Self {
        // SAFETY: all zeroes is a valid sockaddr_ll.
        let mut ll: libc::sockaddr_ll = unsafe { MaybeUninit::zeroed().assume_init() };
        ll.sll_family = u16::try_from(libc::AF_PACKET).unwrap_or(0);
        ll.sll_protocol = protocol.to_be();
        ll.sll_ifindex = index;
        ll.sll_halen = 6;
        ll.sll_addr[..6].copy_from_slice(&mac);
        Self::put(ll)
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        match address {
            SocketAddr::V4(v4) => Self::put(libc::sockaddr_in {
                sin_family: u16::try_from(libc::AF_INET).unwrap_or(0),
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            }),
            SocketAddr::V6(v6) => Self::put(libc::sockaddr_in6 {
                sin6_family: u16::try_from(libc::AF_INET6).unwrap_or(0),
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            }),
        }
    }
}

/// Family constant of an address.
pub fn family(address: IpAddr) -> c_int {
    if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 }
}

pub fn socket(family: c_int, kind: c_int, protocol: c_int) -> io::Result<OwnedFd> {
    // SAFETY: no pointers; a non-negative result is a new descriptor that nobody else owns.
    unsafe {
        let fd = check(libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

pub fn connect(fd: &impl AsRawFd, address: &Address) -> io::Result<()> {
    // SAFETY: the address lives through the call and `len` is its true length.
    check(unsafe { libc::connect(fd.as_raw_fd(), address.as_ptr(), address.len()) }).map(drop)
}

pub fn bind(fd: &impl AsRawFd, address: &Address) -> io::Result<()> {
    // SAFETY: as in connect.
    check(unsafe { libc::bind(fd.as_raw_fd(), address.as_ptr(), address.len()) }).map(drop)
}

pub fn listen(fd: &impl AsRawFd, backlog: c_int) -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::listen(fd.as_raw_fd(), backlog) }).map(drop)
}

/// accept4(2); the connection does not block.
pub fn accept(fd: &impl AsRawFd) -> io::Result<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: null address pointers are allowed (accept(2)); the result is a new descriptor.
    unsafe {
        let fd = check(libc::accept4(fd.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), flags))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Sets a socket option of any plain type.
pub fn set<T: Copy>(fd: &impl AsRawFd, level: c_int, name: c_int, value: T) -> io::Result<()> {
    let pointer = (&raw const value).cast();
    // SAFETY: the pointer is to a live T and the length is T's.
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, pointer, len_of::<T>()) }).map(drop)
}

/// Reads a socket option of any plain type; `T` may be the start of a longer one.
pub fn get<T: Copy>(fd: &impl AsRawFd, level: c_int, name: c_int, mut value: T) -> io::Result<T> {
    let mut len = len_of::<T>();
    let pointer = (&raw mut value).cast();
    // SAFETY: both pointers are to live variables, and the length is T's.
    check(unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, pointer, &raw mut len) })?;
    Ok(value)
}

/// SO_ERROR: how the connect ended.
pub fn socket_error(fd: &impl AsRawFd) -> io::Result<()> {
    match get(fd, libc::SOL_SOCKET, libc::SO_ERROR, 0)? {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// SO_ORIGINAL_DST: where the application wanted to go before netfilter redirected it.
pub fn original_destination(fd: &impl AsRawFd, v4: bool) -> io::Result<SocketAddr> {
    // IP6T_SO_ORIGINAL_DST has the same number (linux/netfilter_ipv6/ip6_tables.h).
    let level = if v4 { libc::SOL_IP } else { libc::SOL_IPV6 };
    let mut address = Address::empty();
    let mut len = len_of::<libc::sockaddr_storage>();
    let storage = (&raw mut address.storage).cast();
    // SAFETY: the kernel writes at most `len` bytes into a live sockaddr_storage.
    check(unsafe { libc::getsockopt(fd.as_raw_fd(), level, libc::SO_ORIGINAL_DST, storage, &raw mut len) })?;
    // SAFETY: the kernel has filled in the sockaddr type of the family asked for.
    unsafe {
        if v4 {
            let sin = address.as_ptr().cast::<libc::sockaddr_in>().read();
            Ok(SocketAddr::new(
                Ipv4Addr::from(sin.sin_addr.s_addr.to_ne_bytes()).into(),
                u16::from_be(sin.sin_port),
            ))
        } else {
            let sin6 = address.as_ptr().cast::<libc::sockaddr_in6>().read();
            Ok(SocketAddr::new(Ipv6Addr::from(sin6.sin6_addr.s6_addr).into(), u16::from_be(sin6.sin6_port)))
        }
    }
}

/// SO_RCVTIMEO or SO_SNDTIMEO, whose expiry is EAGAIN (EINPROGRESS from connect).
pub fn set_timeout(fd: &impl AsRawFd, name: c_int, limit: Duration) -> io::Result<()> {
    let tv_sec = libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX);
    set(fd, libc::SOL_SOCKET, name, libc::timeval { tv_sec, tv_usec: limit.subsec_micros().into() })
}

/// Closing will send RST: no TIME_WAIT, so that many connects do not run out of ports.
pub fn reset_on_close(fd: &impl AsRawFd) -> io::Result<()> {
    set(fd, libc::SOL_SOCKET, libc::SO_LINGER, libc::linger { l_onoff: 1, l_linger: 0 })
}

pub fn send_to(fd: &impl AsRawFd, data: &[u8], flags: c_int, to: &Address) -> io::Result<usize> {
    // SAFETY: data and address live through the call, with their true lengths.
    check_size(unsafe {
        libc::sendto(fd.as_raw_fd(), data.as_ptr().cast(), data.len(), flags, to.as_ptr(), to.len())
    })
}

pub fn send(fd: &impl AsRawFd, data: &[u8]) -> io::Result<usize> {
    // SAFETY: data lives through the call, with its true length.
    check_size(unsafe { libc::send(fd.as_raw_fd(), data.as_ptr().cast(), data.len(), libc::MSG_NOSIGNAL) })
}

pub fn receive(fd: &impl AsRawFd, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the buffer lives through the call, with its true length.
    check_size(unsafe { libc::recv(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) })
}

/// Receives a datagram and answers it from the address it was sent to, which a wildcard socket would not do by itself.
/// `Ok(false)`: nothing to read.
pub fn echo_datagram(fd: &impl AsRawFd) -> io::Result<bool> {
    let mut from = Address::empty();
    let mut data = [0_u8; 2048];
    let mut control = [0_u64; 16];
    let mut part = libc::iovec { iov_base: data.as_mut_ptr().cast(), iov_len: data.len() };
    // SAFETY: all zeroes is a valid msghdr; its pointers are to live buffers with their true lengths; a control message
    // is touched only after its level and type were compared.
    unsafe {
        let mut message: libc::msghdr = MaybeUninit::zeroed().assume_init();
        message.msg_name = (&raw mut from.storage).cast();
        message.msg_namelen = len_of::<libc::sockaddr_storage>();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        let got = match check_size(libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            other => other?,
        };
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if let Some(header) = header.as_ref()
            && (header.cmsg_level, header.cmsg_type) == (libc::SOL_IPV6, libc::IPV6_PKTINFO)
        {
            // Keep the source address, leave the device to routing.
            (*libc::CMSG_DATA(header).cast::<libc::in6_pktinfo>()).ipi6_ifindex = 0;
        }
        part.iov_len = got;
        message.msg_iov = &raw mut part;
        check_size(libc::sendmsg(fd.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT))?;
    }
    Ok(true)
}

/// Waits for one of `events`; 0 means `limit` has passed. EINTR counts as that, too.
pub fn poll(fd: RawFd, events: i16, limit: Duration) -> io::Result<i16> {
    let mut entry = [libc::pollfd { fd, events, revents: 0 }];
    poll_all(&mut entry, limit)?;
    Ok(entry[0].revents)
}

pub fn poll_all(entries: &mut [libc::pollfd], limit: Duration) -> io::Result<()> {
    // Round up: a wait of 0.5 ms is not a busy loop.
    let millis = limit.as_micros().div_ceil(1000).try_into().unwrap_or(c_int::MAX);
    let count = entries.len().try_into().unwrap_or(0);
    // SAFETY: the slice lives through the call, with its true length.
    match check(unsafe { libc::poll(entries.as_mut_ptr(), count, millis) }) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        other => other.map(drop),
    }
}

pub fn enter_netns(fd: &impl AsFd) -> io::Result<()> {
    // SAFETY: no pointers; this process has one thread.
    check(unsafe { libc::setns(fd.as_fd().as_raw_fd(), libc::CLONE_NEWNET) }).map(drop)
}

pub fn set_gid(gid: u32) -> io::Result<()> {
    // SAFETY: an empty list needs no pointer.
    unsafe {
        check(libc::setgroups(0, std::ptr::null()))?;
        check(libc::setresgid(gid, gid, gid)).map(drop)
    }
}

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: c_int,
}

/// Becomes `uid`; with `keep`, capabilities stay effective.
pub fn set_uid(uid: u32, keep: bool) -> io::Result<()> {
    /// _LINUX_CAPABILITY_VERSION_3 (linux/capability.h): two words each of effective, permitted, inheritable.
    const VERSION: u32 = 0x2008_0522;
    let header = CapHeader { version: VERSION, pid: 0 };
    let mut death_signal: c_int = 0;
    let mut sets = [0_u32; 6];
    // SAFETY: prctl's pointer is to a live int; capget and capset get a live header and the six words version 3 means.
    unsafe {
        // Changing credentials clears the signal (prctl(2)); a test's children must keep it.
        check(libc::prctl(libc::PR_GET_PDEATHSIG, &raw mut death_signal))?;
        if keep {
            check(libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0))?;
        }
        check(libc::setresuid(uid, uid, uid))?;
        if keep {
            check_size(
                libc::syscall(libc::SYS_capget, &raw const header, sets.as_mut_ptr())
                    .try_into()
                    .unwrap_or(-1),
            )?;
            (sets[0], sets[3]) = (sets[1], sets[4]);
            check_size(
                libc::syscall(libc::SYS_capset, &raw const header, sets.as_ptr()).try_into().unwrap_or(-1),
            )?;
        }
        check(libc::prctl(libc::PR_SET_PDEATHSIG, death_signal)).map(drop)
    }
}

/// SIGTERM and SIGINT end the process with 128 + number.
pub fn exit_on_signals() {
    extern "C" fn handler(signal: c_int) {
        // SAFETY: _exit is async-signal-safe (signal-safety(7)).
        unsafe { libc::_exit(128 + signal) }
    }
    on_signals(handler);
}

/// Installs `handler` for SIGTERM and SIGINT.
pub fn on_signals(handler: extern "C" fn(c_int)) {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: callers give handlers that only make async-signal-safe calls.
        unsafe { libc::signal(signal, handler as *const () as libc::sighandler_t) };
    }
}

/// What a sandbox's first process does: reap what is left to it.
pub fn pause() -> ! {
    loop {
        // SAFETY: a null status pointer is allowed (waitpid(2)); pause has no arguments.
        unsafe {
            if libc::waitpid(-1, std::ptr::null_mut(), 0) < 0 {
                // No children: an orphan's arrival is not announced, so look again after a while.
                libc::usleep(500_000);
            }
        }
    }
}

/// One line of getifaddrs(3).
pub enum Entry {
    Ip(IpAddr),
    /// Index and hardware address.
    Link(c_int, [u8; 6]),
}

/// Calls `f` with every address of every device.
pub fn each_address(mut f: impl FnMut(&std::ffi::CStr, Entry)) -> io::Result<()> {
    let mut list = std::ptr::null_mut();
    // SAFETY: on success the list is valid until freeifaddrs; each address is read as the type its family says.
    unsafe {
        check(libc::getifaddrs(&raw mut list))?;
        let mut next = list.as_ref();
        while let Some(item) = next {
            next = item.ifa_next.as_ref();
            let Some(family) = item.ifa_addr.as_ref().map(|address| c_int::from(address.sa_family)) else {
                continue;
            };
            let entry = match family {
                libc::AF_INET => {
                    let sin = item.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                    Entry::Ip(Ipv4Addr::from(sin.sin_addr.s_addr.to_ne_bytes()).into())
                }
                libc::AF_INET6 => {
                    let sin6 = item.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned();
                    Entry::Ip(Ipv6Addr::from(sin6.sin6_addr.s6_addr).into())
                }
                libc::AF_PACKET => {
                    let ll = item.ifa_addr.cast::<libc::sockaddr_ll>().read_unaligned();
                    let [a, b, c, d, e, f, ..] = ll.sll_addr;
                    Entry::Link(ll.sll_ifindex, [a, b, c, d, e, f])
                }
                _ => continue,
            };
            f(std::ffi::CStr::from_ptr(item.ifa_name), entry);
        }
        libc::freeifaddrs(list);
    }
    Ok(())
}

/// epoll(7), level-triggered, for reading.
pub struct Poller(OwnedFd);

impl Poller {
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers; the result is a new descriptor.
        unsafe { Ok(Self(OwnedFd::from_raw_fd(check(libc::epoll_create1(libc::EPOLL_CLOEXEC))?))) }
    }

    pub fn add(&self, fd: RawFd) -> io::Result<()> {
        let mut event =
            libc::epoll_event { events: libc::EPOLLIN.cast_unsigned(), u64: fd.try_into().unwrap_or(0) };
        // SAFETY: the event lives through the call.
        check(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) })
            .map(drop)
    }

    /// Descriptors with something to read.
    pub fn wait(&self) -> io::Result<Vec<RawFd>> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 256];
        // SAFETY: the array lives through the call, with its true length.
        let count = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), 256, -1) };
        match check(count) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Vec::new()),
            other => {
                let count = usize::try_from(other?).unwrap_or(0);
                Ok(events.iter().take(count).map(|event| RawFd::try_from(event.u64).unwrap_or(-1)).collect())
            }
        }
    }
}

/// Reads standard input once: `Some(true)` for a request of counts, `None` at its end.
pub fn control_line() -> io::Result<Option<bool>> {
    let mut buffer = [0_u8; 256];
    // SAFETY: the buffer lives through the call, with its true length.
    let got = check_size(unsafe { libc::read(0, buffer.as_mut_ptr().cast(), buffer.len()) })?;
    Ok((got > 0).then(|| buffer.starts_with(b"stats")))
}

/// Does not fit into the c_int of the libc crate (linux/sched.h).
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Makes a child, directly in the cgroup whose directory is given, and runs `f` in it; its value is the exit code.
///
/// Only for a process with one thread.
pub fn fork_into(cgroup: Option<&std::fs::File>, f: impl FnOnce() -> c_int) -> io::Result<c_int> {
    // SAFETY: all zeroes is valid clone_args; SIGCHLD and a cgroup descriptor make it a fork (clone(2)). With one thread,
    // no lock is held by anyone else, so the child may run ordinary code; it leaves by _exit.
    unsafe {
        let mut args: libc::clone_args = MaybeUninit::zeroed().assume_init();
        args.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
        if let Some(cgroup) = cgroup {
            args.flags = CLONE_INTO_CGROUP;
            args.cgroup = u64::from(cgroup.as_raw_fd().cast_unsigned());
        }
        let pid = libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>());
        match c_int::try_from(pid) {
            Ok(0) => libc::_exit(f()),
            Ok(pid) if pid > 0 => Ok(pid),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

pub fn write(fd: &impl AsRawFd, data: &[u8]) -> io::Result<usize> {
    // SAFETY: data lives through the call, with its true length.
    check_size(unsafe { libc::write(fd.as_raw_fd(), data.as_ptr().cast(), data.len()) })
}

/// Waits for any child: its id and exit code (128 + signal if one killed it).
pub fn wait_any() -> io::Result<(c_int, c_int)> {
    loop {
        let mut status = 0;
        // SAFETY: the pointer is to a live int.
        match check(unsafe { libc::waitpid(-1, &raw mut status, 0) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
            Ok(pid) if libc::WIFEXITED(status) => return Ok((pid, libc::WEXITSTATUS(status))),
            Ok(pid) => return Ok((pid, 128 + libc::WTERMSIG(status))),
        }
    }
}

/// CPU time of this process so far, also in the kernel on its behalf.
pub fn cpu_time() -> Duration {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Time since the machine started.
pub fn monotonic() -> Duration {
    clock(libc::CLOCK_MONOTONIC)
}

fn clock(id: libc::clockid_t) -> Duration {
    // SAFETY: all zeroes is a valid timespec, and the pointer is to a live one.
    let now = unsafe {
        let mut now: libc::timespec = MaybeUninit::zeroed().assume_init();
        libc::clock_gettime(id, &raw mut now);
        now
    };
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0))
}

#[expect(clippy::disallowed_methods, reason = "an application's own pause")]
pub fn sleep(time: Duration) {
    std::thread::sleep(time);
}
