//! The thread that looks at and aborts sockets in pods' network namespaces.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::diag::{DESTROY, LIST, Socket, State, destroy, list, socket};
use super::metrics::Metrics;
use super::preexisting::{Rules, past_the_proxy};
use crate::cgroup::netns::Finder;
use crate::probe::conntrack::forget;
use crate::sys::netlink::{Netlink, SOCK_DIAG};
use crate::sys::netns::enter;

/// Jobs on their way. A burst beyond leaves applications to time out by themselves, and is counted.
const QUEUE: usize = 4096;
/// How long the way into a pod's network is kept open without a use. It keeps the network alive, should the pod end.
const KEEP: Duration = Duration::from_secs(5);
/// Port range of connections that are begun, if the kernel does not say.
const EPHEMERAL: RangeInclusive<u16> = 32_768..=60_999;

/// A pod, and its network namespace if the runtime names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PodRef {
    /// Its cgroup id.
    pub cgroup: u64,
    /// See [`Finder::open`].
    pub netns: Option<Box<str>>,
}

/// One socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its own end.
    pub local: SocketAddr,
    /// The other end.
    pub remote: SocketAddr,
    /// The device by which its packets leave; 0 for any.
    pub device: u32,
    /// Its cookie: nothing else is ever touched.
    pub cookie: u64,
}

/// What the thread is asked for.
#[derive(Debug)]
pub enum Job {
    /// Let a connection fail whose SYN was dropped.
    Abort(PodRef, Target),
    /// List what goes past the proxy, and abort those whose cookie is in the set.
    Preexisting {
        /// In which pod.
        pod: PodRef,
        /// What counts.
        rules: Box<Rules>,
        /// Cookies of those to abort.
        abort: BTreeSet<u64>,
        /// What was found, aborted ones included.
        reply: oneshot::Sender<io::Result<Vec<Socket>>>,
    },
}

/// To the thread. It ends when all clones are gone.
#[derive(Clone, Debug)]
pub struct Sockets {
    jobs: SyncSender<Job>,
    metrics: Metrics,
}

impl Sockets {
    /// Starts the thread.
    ///
    /// # Errors
    /// As open(2) says for this process's own network namespace, or clone(2).
    pub fn start(finder: Finder, metrics: Metrics) -> io::Result<Self> {
        let home = File::open("/proc/self/ns/net")?;
        let (jobs, queue) = sync_channel(QUEUE);
        let worker = Worker { finder, home, open: HashMap::new(), metrics: metrics.clone() };
        std::thread::Builder::new().name("sockets".into()).spawn(move || worker.run(&queue))?;
        Ok(Self { jobs, metrics })
    }

    /// Counts connections older than the programs, see [`super::metrics::ACTIONS`].
    pub fn count_old(&self, action: &'static str, connections: usize) {
        self.metrics.old(action, connections);
    }

    /// Hands over a job; one that finds no room is counted.
    pub fn send(&self, job: Job) {
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = self.jobs.try_send(job) {
            self.metrics.abort("dropped");
        }
    }
}

struct Worker {
    finder: Finder,
    home: File,
    open: HashMap<u64, (Netlink, Instant)>,
    metrics: Metrics,
}

impl Worker {
    fn run(mut self, queue: &Receiver<Job>) {
        loop {
            let job = if self.open.is_empty() {
                queue.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                queue.recv_timeout(KEEP)
            };
            match job {
                Ok(job) => self.work(job),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.open.retain(|_, (_, used)| used.elapsed() < KEEP);
        }
    }

    fn work(&mut self, job: Job) {
        match job {
            Job::Abort(pod, target) => {
                let result = match self.abort(&pod, &target) {
                    Ok(()) => "aborted",
                    Err(error) if error.raw_os_error() == Some(libc::ENOENT) => "gone",
                    Err(error) => {
                        tracing::debug!(%error, cgroup = pod.cgroup, "cannot abort a refused connection");
                        "failed"
                    }
                };
                self.metrics.abort(result);
            }
            Job::Preexisting { pod, rules, abort, reply } => {
                // Nobody waiting is no error.
                let _ = reply.send(self.preexisting(&pod, &rules, &abort));
            }
        }
    }

    fn abort(&mut self, pod: &PodRef, target: &Target) -> io::Result<()> {
        let Target { local, remote, device, cookie } = target;
        let body = destroy(*local, *remote, *device, *cookie);
        let known = self.open.contains_key(&pod.cgroup);
        match self.netlink(pod)?.request(DESTROY, &body) {
            // A pod's sandbox may have been made anew, with another network.
            Err(error) if known && error.raw_os_error() == Some(libc::ENOENT) => {
                self.open.remove(&pod.cgroup);
                self.netlink(pod)?.request(DESTROY, &body)
            }
            done => done,
        }
    }

    /// A socket for requests to the pod's network, made there.
    fn netlink(&mut self, pod: &PodRef) -> io::Result<&Netlink> {
        if !self.open.contains_key(&pod.cgroup) {
            let netlink = self.inside(pod, || Netlink::open(SOCK_DIAG))??;
            self.open.insert(pod.cgroup, (netlink, Instant::now()));
        }
        match self.open.get_mut(&pod.cgroup) {
            Some((netlink, used)) => {
                *used = Instant::now();
                Ok(netlink)
            }
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn inside<T>(&self, pod: &PodRef, f: impl FnOnce() -> T) -> io::Result<T> {
        let netns =
            self.finder.open(pod.cgroup, pod.netns.as_deref().map(Path::new)).map_err(io::Error::other)?;
        enter(netns)?;
        let result = f();
        enter(&self.home)?;
        Ok(result)
    }

    fn preexisting(&mut self, pod: &PodRef, rules: &Rules, abort: &BTreeSet<u64>) -> io::Result<Vec<Socket>> {
        let range = self.inside(pod, ephemeral)?;
        let netlink = self.netlink(pod)?;
        let mut found = past(netlink, rules, &range)?;
        if !found.is_empty() {
            // The kernel lists one socket after the other: of a connection that begins meanwhile it may have passed where the
            // proxy's end is, and then tell the application's.
            let again: BTreeSet<u64> =
                past(netlink, rules, &range)?.iter().map(|socket| socket.cookie).collect();
            found.retain(|socket| again.contains(&socket.cookie));
        }
        let aborted = || found.iter().filter(|old| abort.contains(&old.cookie));
        for old in aborted() {
            match netlink.request(DESTROY, &destroy(old.local, old.remote, old.device, old.cookie)) {
                Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return Err(error),
                _ => {}
            }
        }
        if aborted().next().is_some() {
            // Or the next connection with the same ports would go their way.
            let forgotten = self.inside(pod, || aborted().try_for_each(|old| forget(old.local, old.remote)));
            if let Err(error) = forgotten.and_then(|done| done) {
                tracing::debug!(%error, cgroup = pod.cgroup, "what is tracked of aborted connections stays a while");
            }
        }
        Ok(found)
    }
}

/// The port range of the calling thread's network namespace.
fn ephemeral() -> RangeInclusive<u16> {
    let text = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let mut ports = text.split_whitespace().filter_map(|port| port.parse().ok());
    match (ports.next(), ports.next()) {
        (Some(first), Some(last)) => first..=last,
        _ => EPHEMERAL,
    }
}

/// What goes past the proxy at this moment.
fn past(netlink: &Netlink, rules: &Rules, ephemeral: &RangeInclusive<u16>) -> io::Result<Vec<Socket>> {
    let (mut established, mut listening) = (Vec::new(), BTreeSet::new());
    for family in [libc::AF_INET, libc::AF_INET6] {
        let family = u8::try_from(family).unwrap_or_default();
        netlink.dump(LIST, &list(family, State::Established), |item| established.extend(socket(item)))?;
        netlink.dump(LIST, &list(family, State::Listen), |item| {
            listening.extend(socket(item).map(|socket| socket.local.port()));
        })?;
    }
    Ok(past_the_proxy(established, &listening, ephemeral, rules))
}
