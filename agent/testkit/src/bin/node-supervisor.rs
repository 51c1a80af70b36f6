//! Runs a private containerd and cleans up after it, whatever happens to the test that wanted it.
//!
//!   node-supervisor BASE CGROUP [bpf] -- containerd ...
//!
//! The test holds this process's standard input, by which it may `kill` and `start` containerd. At its end, also because the
//! test was killed, everything goes: containerd, its shims and every process of the pods (this process is their subreaper, so
//! they all are its descendants), the cgroups named CGROUP in every hierarchy, and BASE. All mounts are made in a mount
//! namespace of its own and vanish with it.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use nobypass_testkit::{cgroup, wait};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};
use rustix::process::{Pid, Signal, WaitOptions};

/// Begins the name of everything this program will ever remove.
const OURS: &str = "nobypass-node-";

struct Order {
    base: PathBuf,
    cgroup: String,
    bpf: bool,
    program: Vec<String>,
}

fn main() -> Result<()> {
    let order = read_order()?;
    // Out of the terminal's reach: Ctrl-C is for the test, whose end this process sees.
    let _ = rustix::process::setsid();
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .context("cannot become subreaper")?;
    let home = File::open("/proc/self/ns/mnt")?;
    let supervised = supervise(&order);
    let killed = kill_descendants();
    // In the first namespace BASE holds no mounts, so it can be removed while the other one still has some.
    rustix::thread::move_into_link_name_space(home.as_fd(), Some(rustix::thread::LinkNameSpaceType::Mount))?;
    let cgroups = remove_cgroups(&order.cgroup);
    fs::remove_dir_all(&order.base).with_context(|| format!("cannot remove {}", order.base.display()))?;
    supervised.and(killed).and(cgroups)?;
    say("clean");
    Ok(())
}

fn remove_cgroups(name: &str) -> Result<()> {
    cgroup::all_roots()?.iter().try_for_each(|root| cgroup::remove_tree(&root.join(name)))
}

/// For the test, which may have been killed.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn read_order() -> Result<Order> {
    let mut args = std::env::args().skip(1);
    let base: PathBuf = args.next().context("no base directory")?.into();
    let cgroup = args.next().context("no cgroup name")?;
    let mut bpf = false;
    for word in args.by_ref().take_while(|word| word != "--") {
        match word.as_str() {
            "bpf" => bpf = true,
            other => bail!("unknown word {other}"),
        }
    }
    let program: Vec<String> = args.collect();
    ensure!(!program.is_empty(), "nothing to run");
    // Both will be removed with everything below them.
    let ours = |name: &str| name.starts_with(OURS) && !name.contains('/');
    ensure!(ours(&cgroup), "the cgroup's name must begin with {OURS}");
    ensure!(
        base.file_name().is_some_and(|name| ours(&name.to_string_lossy())),
        "BASE must begin with {OURS}"
    );
    ensure!(
        base.is_absolute() && !base.starts_with("/run") && !base.starts_with("/var/lib"),
        "{} cannot be a base directory: /run and /var/lib are private to the node",
        base.display()
    );
    Ok(Order { base, cgroup, bpf, program })
}

fn supervise(order: &Order) -> Result<()> {
    private_mounts(order)?;
    let mut child = start(order)?;
    let mut stdin = std::io::stdin();
    let mut orders = String::new();
    loop {
        reap();
        let step = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
        match poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&step)) {
            Ok(0) | Err(Errno::INTR) => continue,
            other => other?,
        };
        let mut bytes = [0; 64];
        let read = stdin.read(&mut bytes)?;
        if read == 0 {
            return Ok(());
        }
        orders.extend(bytes.iter().take(read).map(|byte| char::from(*byte)));
        while let Some((line, rest)) = orders.split_once('\n') {
            match line {
                "kill" => {
                    kill(child)?;
                    say("killed");
                }
                "start" => child = start(order)?,
                other => bail!("unknown order {other:?}"),
            }
            orders = rest.to_owned();
        }
    }
}

/// Starts the program and tells its process id.
fn start(order: &Order) -> Result<Pid> {
    let log = File::options().create(true).append(true).open(order.base.join("containerd.log"))?;
    let (program, args) = order.program.split_first().context("nothing to run")?;
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    // SAFETY: one system call, nothing allocated. This process has one thread, which the signal is about.
    unsafe {
        command.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?));
    }
    let child = command.spawn().with_context(|| format!("cannot start {program}"))?;
    say(&format!("started {}", child.id()));
    Ok(Pid::from_child(&child))
}

/// Kills the program and waits for its end.
fn kill(child: Pid) -> Result<()> {
    // It may have ended.
    let _ = rustix::process::kill_process(child, Signal::KILL);
    wait::until("the end of containerd", wait::HANG, || {
        reap();
        rustix::process::test_kill_process(child).is_err().then_some(())
    })
}

fn private_mounts(order: &Order) -> Result<()> {
    // SAFETY: this process has one thread.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }
        .context("unshare(CLONE_NEWNS)")?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    // Shim sockets, network namespace names and lock files of the runtime; libcni's cache and host-local's leases.
    for (dir, mode) in [("/run", c"mode=755"), ("/var/lib", c"mode=755")] {
        mount("tmpfs", dir, "tmpfs", MountFlags::empty(), mode).with_context(|| format!("tmpfs on {dir}"))?;
    }
    let (cache, seen) = (order.base.join("cni-cache"), Path::new("/var/lib/cni"));
    fs::create_dir_all(&cache)?;
    fs::create_dir(seen)?;
    mount_bind(&cache, seen).context("bind on /var/lib/cni")?;
    if order.bpf {
        mount("bpf", "/sys/fs/bpf", "bpf", MountFlags::empty(), c"mode=700")
            .context("bpffs on /sys/fs/bpf")?;
        // Where the machine has it already, the kernel refuses a second one in the same place: EBUSY.
        let tracing = mount("tracefs", "/sys/kernel/tracing", "tracefs", MountFlags::empty(), None);
        tracing.or_else(|error| if error == Errno::BUSY { Ok(()) } else { Err(error) }).context("tracefs")?;
    }
    // As on a node with systemd, where containers may see what is mounted after their start; nobody outside is told.
    mount_change("/", MountPropagationFlags::SHARED | MountPropagationFlags::REC)?;
    Ok(())
}

/// Collects what has ended; `false` when there is no child left.
fn reap() -> bool {
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some(_)) => {}
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}

/// Kills the whole tree below this process. Shims that lose their parent become children of this process.
fn kill_descendants() -> Result<()> {
    wait::until("the end of containerd, its shims and its pods", wait::HANG, || {
        for pid in descendants() {
            // It may just have ended.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        (!reap()).then_some(())
    })
}

fn descendants() -> Vec<Pid> {
    let me = rustix::process::getpid().as_raw_nonzero().get();
    let parents: HashMap<i32, i32> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            Some((pid, parent_of(&fs::read_to_string(entry.path().join("stat")).ok()?)?))
        })
        .collect();
    let below = |pid: &i32| {
        std::iter::successors(Some(*pid), |pid| parents.get(pid).copied())
            .skip(1)
            .any(|ancestor| ancestor == me)
    };
    parents.keys().filter(|pid| below(pid)).filter_map(|pid| Pid::from_raw(*pid)).collect()
}

/// The fourth field; the second is in parentheses and may contain anything (proc_pid_stat(5)).
fn parent_of(stat: &str) -> Option<i32> {
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::parent_of;

    #[test]
    fn reads_the_parent_of_a_process_with_an_odd_name() {
        assert_eq!(parent_of("12 (a) b (c) S 7 12 12 0"), Some(7));
        assert_eq!(parent_of("12"), None);
    }
}
