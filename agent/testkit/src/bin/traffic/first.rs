//! The hardest question: does the first packet of a brand-new pod get out?
//!
//! For each try a new pod cgroup and container cgroup are made, and a new process whose first action there is to connect.
//! This process has one thread, so that a child of fork may do what it likes.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::fs::{self, File, OpenOptions};
use std::io::{self, PipeReader, PipeWriter, Read as _, Write as _, pipe};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::options::Options;
use crate::report::{Line, errno_name};
use crate::sys::{self, Address};

/// Exit code of a child whose SYN was not answered in time; other codes are errnos, 0 is a connection.
const UNANSWERED: c_int = 250;

/// A pipe has room for so many times of eight bytes: 64 KiB (pipe(7)).
const TIMED: u64 = 8192;

static STOP: AtomicBool = AtomicBool::new(false);

extern "C" fn stop(_: c_int) {
    STOP.store(true, Ordering::Relaxed);
}

struct Plan {
    parent: PathBuf,
    target: SocketAddr,
    clone3: bool,
    uid: Option<u32>,
    limit: Duration,
    /// First part of the pod UIDs of this run.
    prefix: String,
    /// Where children tell how long they took, unless there are too many.
    time: Option<PipeWriter>,
}

#[derive(Default)]
struct Counts {
    tried: u64,
    established: u64,
    unanswered: u64,
    errors: BTreeMap<String, u64>,
}

pub fn run(target: SocketAddr, o: &Options) -> Result<String, String> {
    let clone3 = match o.text("enter").unwrap_or("procs") {
        "procs" => false,
        "clone3" => true,
        other => return Err(format!("--enter procs or clone3, not {other}")),
    };
    let random = fs::read_to_string("/proc/sys/kernel/random/uuid").map_err(|e| e.to_string())?;
    let prefix = o.text("prefix").or_else(|| random.get(..24)).ok_or("short UUID")?;
    let (times, time) = pipe().map_err(|error| error.to_string())?;
    let count = o.number("count")?.unwrap_or(1);
    let plan = Plan {
        parent: o.required("parent")?.into(),
        target,
        clone3,
        uid: o.number("uid")?,
        limit: o.timeout(250)?,
        prefix: prefix.to_owned(),
        time: (count <= TIMED).then_some(time),
    };
    let parallel = o.number("parallel")?.unwrap_or(128_usize).max(1);
    sys::on_signals(stop);
    let start = Instant::now();
    let counts = plan.carry_out(count, parallel).map_err(|error| format!("first-packet: {error}"))?;
    drop(plan);
    let took = established(times).map_err(|error| format!("first-packet: {error}"))?;
    let at =
        |part: usize| took.get((took.len() * part / 100).min(took.len().saturating_sub(1))).unwrap_or(&0);
    Ok(Line::new("first-packet")
        .raw("tried", counts.tried)
        .raw("established", counts.established)
        .raw("unanswered", counts.unanswered)
        .counts("errors", &counts.errors)
        .raw("p50_us", at(50))
        .raw("p99_us", at(99))
        .raw("max_us", at(100))
        .raw("total_us", start.elapsed().as_micros())
        .end())
}

/// How long the connections took that were established, µs, sorted.
fn established(mut times: PipeReader) -> io::Result<Vec<u64>> {
    let mut bytes = Vec::new();
    times.read_to_end(&mut bytes)?;
    let mut took: Vec<u64> = bytes.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect();
    took.sort_unstable();
    Ok(took)
}

impl Plan {
    fn carry_out(&self, count: u64, parallel: usize) -> io::Result<Counts> {
        let mut counts = Counts::default();
        let mut running: HashMap<c_int, PathBuf> = HashMap::new();
        let mut problem = None;
        for n in 0..count {
            if STOP.load(Ordering::Relaxed) {
                break;
            }
            if running.len() >= parallel {
                counts.reap(&mut running)?;
            }
            let pod = self.parent.join(format!("pod{}{n:012x}", self.prefix));
            match self.start(&pod) {
                Ok(pid) => {
                    running.insert(pid, pod);
                    counts.tried += 1;
                }
                Err(error) => {
                    let _ = remove(&pod);
                    problem = Some(error);
                    break;
                }
            }
        }
        while !running.is_empty() {
            counts.reap(&mut running)?;
        }
        problem.map_or(Ok(counts), Err)
    }

    /// Makes the pod and starts its process.
    fn start(&self, pod: &Path) -> io::Result<c_int> {
        let container = pod.join("c0");
        fs::create_dir_all(&container)?;
        let address = Address::from(self.target);
        if self.clone3 {
            let dir = File::open(&container)?;
            return sys::fork_into(Some(&dir), || self.child(&address));
        }
        let procs = OpenOptions::new().write(true).open(container.join("cgroup.procs"))?;
        sys::fork_into(None, || match sys::write(&procs, b"0") {
            Ok(_) => self.child(&address),
            Err(error) => error.raw_os_error().unwrap_or(UNANSWERED),
        })
    }

    /// The new process, already in its cgroup. The result is its exit code.
    fn child(&self, address: &Address) -> c_int {
        let start = Instant::now();
        let connected = || -> io::Result<bool> {
            if let Some(uid) = self.uid {
                sys::set_uid(uid, false)?;
            }
            let fd = sys::socket(sys::family(self.target.ip()), libc::SOCK_STREAM | libc::SOCK_NONBLOCK, 0)?;
            match sys::connect(&fd, address) {
                Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
                other => return other.map(|()| true),
            }
            // Thousands of these must not leave TIME_WAIT behind.
            sys::reset_on_close(&fd)?;
            if sys::poll(fd.as_raw_fd(), libc::POLLOUT, self.limit)? == 0 {
                return Ok(false);
            }
            sys::socket_error(&fd).map(|()| true)
        };
        match connected() {
            Ok(true) => {
                let took = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
                let _ = self.time.as_ref().map(|mut time| time.write_all(&took.to_ne_bytes()));
                0
            }
            Ok(false) => UNANSWERED,
            Err(error) => error.raw_os_error().unwrap_or(UNANSWERED),
        }
    }
}

impl Counts {
    /// Waits for one child, notes how it ended and removes its pod.
    fn reap(&mut self, running: &mut HashMap<c_int, PathBuf>) -> io::Result<()> {
        let (pid, code) = sys::wait_any()?;
        let Some(pod) = running.remove(&pid) else { return Ok(()) };
        match code {
            0 => self.established += 1,
            UNANSWERED => self.unanswered += 1,
            other => *self.errors.entry(errno_name(&io::Error::from_raw_os_error(other))).or_default() += 1,
        }
        remove(&pod)
    }
}

fn remove(pod: &Path) -> io::Result<()> {
    for dir in [&pod.join("c0"), pod] {
        match fs::remove_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
    }
    Ok(())
}
