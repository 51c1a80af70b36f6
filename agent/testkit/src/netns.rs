//! Network namespaces held by a file descriptor, and a small world of them: pods around an outside.
//!
//! No namespace gets a name: the kernel removes it, its devices and its rules when the last descriptor and the last
//! process are gone, so a crashed test leaves nothing.

use std::fs::File;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};

use anyhow::{Context, Result, anyhow, bail};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

use crate::proc::{self, Place};

/// One network namespace with `lo` up, IPv6 duplicate address detection and router solicitation off.
#[derive(Debug)]
pub struct Netns {
    name: String,
    fd: OwnedFd,
}

/// setns(2) of the calling thread.
pub(crate) fn enter(fd: impl AsFd) -> rustix::io::Result<()> {
    rustix::thread::move_into_link_name_space(fd.as_fd(), Some(LinkNameSpaceType::Network))
}

impl Netns {
    /// Makes a namespace; `name` appears in messages only.
    pub fn new(name: &str) -> Result<Self> {
        let made = std::thread::spawn(|| -> Result<OwnedFd> {
            // SAFETY: only the network namespace of this short-lived thread changes; file descriptors stay shared.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
                .context("unshare(CLONE_NEWNET): are you root?")?;
            Ok(File::open("/proc/thread-self/ns/net").context("cannot open the new namespace")?.into())
        });
        let fd = made.join().map_err(|_| anyhow!("the thread that makes a namespace panicked"))??;
        let ns = Self { name: name.to_owned(), fd };
        for key in ["all", "default"] {
            ns.sysctl(&format!("net/ipv6/conf/{key}/accept_dad"), "0")?;
            ns.sysctl(&format!("net/ipv6/conf/{key}/router_solicitations"), "0")?;
            ns.sysctl(&format!("net/ipv4/conf/{key}/rp_filter"), "0")?;
        }
        ns.ip("link set lo up")?;
        Ok(ns)
    }

    /// The namespace of a running process.
    pub fn of_pid(pid: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/ns/net");
        let fd = File::open(&path).with_context(|| format!("cannot open {path}"))?.into();
        Ok(Self { name: format!("of process {pid}"), fd })
    }

    /// A namespace opened by the caller, as by a name below `/run/netns`.
    #[must_use]
    pub fn from_file(name: &str, file: File) -> Self {
        Self { name: name.to_owned(), fd: file.into() }
    }

    /// Name given at creation.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A path that opens this namespace for as long as `self` lives, also from other processes.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.fd.as_raw_fd()))
    }

    /// Inode number of the namespace, as in `net:[4026531840]`.
    pub fn inode(&self) -> Result<u64> {
        Ok(std::fs::metadata(self.path())?.ino())
    }

    /// A descriptor of its own, for a child that is to enter the namespace.
    pub fn try_clone_fd(&self) -> Result<OwnedFd> {
        Ok(self.fd.try_clone()?)
    }

    /// Runs `f` on a thread of its own inside the namespace. Sockets made there stay there.
    pub fn run_in<T: Send>(&self, f: impl FnOnce() -> T + Send) -> Result<T> {
        let done = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                enter(&self.fd).with_context(|| format!("cannot enter network namespace {}", self.name))?;
                Ok(f())
            });
            thread.join()
        });
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// A command that starts inside the namespace.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Result<Command> {
        let mut command = Command::new(program);
        command.in_netns_fd(self.try_clone_fd()?);
        Ok(command)
    }

    /// Runs `ip -batch` inside, one command a line.
    pub fn ip(&self, batch: &str) -> Result<()> {
        self.check("ip", &["-batch", "-"], batch).map(drop)
    }

    /// As [`Netns::ip`] for the objects that take IPv6 only when told so, as rules.
    pub fn ip6(&self, batch: &str) -> Result<()> {
        self.check("ip", &["-6", "-batch", "-"], batch).map(drop)
    }

    /// Runs a program inside and gives its output; a failure is an error with its messages.
    pub fn check(&self, program: &str, args: &[&str], input: &str) -> Result<String> {
        let mut command = self.command(program)?;
        command.args(args);
        proc::check(command, input)
    }

    /// Sets `/proc/sys/<key>` as seen from inside.
    pub fn sysctl(&self, key: &str, value: &str) -> Result<()> {
        let path = format!("/proc/sys/{key}");
        self.run_in(|| std::fs::write(&path, value))?
            .with_context(|| format!("cannot set {path} in {}", self.name))
    }

    /// Starts counting the TCP SYNs (without ACK) that really arrive by `device`: a witness that asks no program under test.
    pub fn count_syns(&self, device: &str) -> Result<()> {
        let table = format!(
            "table inet witness {{\n counter syn {{ }}\n chain arrived {{\n \
             type filter hook prerouting priority -350; policy accept;\n \
             iifname \"{device}\" tcp flags & (syn|ack) == syn counter name syn\n }}\n}}\n"
        );
        self.check("nft", &["-f", "-"], &table).map(drop)
    }

    /// SYNs that arrived since [`Netns::count_syns`].
    pub fn syns(&self) -> Result<u64> {
        let text = self.check("nft", &["-j", "list", "counter", "inet", "witness", "syn"], "")?;
        let json: serde_json::Value = serde_json::from_str(&text)?;
        json["nftables"]
            .as_array()
            .and_then(|items| items.iter().find_map(|item| item["counter"]["packets"].as_u64()))
            .with_context(|| format!("no counter in {text}"))
    }

    /// Packets sent by `device` so far.
    pub fn tx_packets(&self, device: &str) -> Result<u64> {
        let text = self.run_in(|| std::fs::read_to_string("/proc/thread-self/net/dev"))??;
        for line in text.lines() {
            if let Some((name, counters)) = line.split_once(':')
                && name.trim() == device
            {
                // receive has 8 columns, then transmit begins: bytes, packets (proc_pid_net(5)).
                return Ok(counters.split_whitespace().nth(9).context("short line in net/dev")?.parse()?);
            }
        }
        bail!("no device {device} in {}", self.name)
    }
}

/// Address of the outside, where servers listen.
pub const FAR4: Ipv4Addr = Ipv4Addr::new(10, 66, 0, 1);
/// As [`FAR4`], `fd66::1`.
pub const FAR6: Ipv6Addr = Ipv6Addr::new(0xfd66, 0, 0, 0, 0, 0, 0, 1);

/// The outside, a namespace with a bridge, and as many pods on it as wanted.
#[derive(Debug)]
pub struct World {
    far: Netns,
    pods: AtomicU16,
}

/// A pod's namespace with `eth0` on the outside's bridge and default routes through it.
#[derive(Debug)]
pub struct PodNet {
    /// The namespace itself.
    pub ns: Netns,
    /// 10.66.x.y
    pub ip4: Ipv4Addr,
    /// fd66::n
    pub ip6: Ipv6Addr,
}

/// Makes a world with one pod, 10.66.0.2 and fd66::2.
pub fn world_with_pod(name: &str) -> Result<(World, PodNet)> {
    let world = World::new(name)?;
    let pod = world.pod()?;
    Ok((world, pod))
}

impl World {
    /// Makes the outside: 10.66.0.1/16 and fd66::1/64 on a bridge.
    pub fn new(name: &str) -> Result<Self> {
        let far = Netns::new(&format!("{name}-far"))?;
        far.ip(&format!(
            "link add br0 type bridge mcast_snooping 0\n\
             addr add {FAR4}/16 dev br0\n\
             addr add {FAR6}/64 dev br0 nodad\n\
             link set br0 up"
        ))?;
        Ok(Self { far, pods: AtomicU16::new(2) })
    }

    /// The outside's namespace.
    #[must_use]
    pub fn far(&self) -> &Netns {
        &self.far
    }

    /// Adds a pod; the first is 10.66.0.2 and fd66::2.
    pub fn pod(&self) -> Result<PodNet> {
        let n = self.pods.fetch_add(1, Ordering::Relaxed);
        let [high, low] = n.to_be_bytes();
        let (ip4, ip6) = (Ipv4Addr::new(10, 66, high, low), Ipv6Addr::new(0xfd66, 0, 0, 0, 0, 0, 0, n));
        let ns = Netns::new(&format!("{}-pod{n}", self.far.name))?;
        ns.ip(&format!("link add eth0 type veth peer name p{n} netns {}", self.far.path().display()))?;
        self.far.ip(&format!("link set p{n} master br0 up"))?;
        ns.ip(&format!(
            "link set eth0 up\n\
             addr add {ip4}/16 dev eth0\n\
             addr add {ip6}/64 dev eth0 nodad\n\
             route add default via {FAR4}\n\
             route add default via {FAR6}"
        ))?;
        Ok(PodNet { ns, ip4, ip6 })
    }

    /// See [`Netns::count_syns`]; here for what the pods send.
    pub fn count_syns(&self) -> Result<()> {
        self.far.count_syns("br0")
    }

    /// SYNs that arrived since [`World::count_syns`].
    pub fn syns(&self) -> Result<u64> {
        self.far.syns()
    }
}
