//! Child processes that cannot outlive the test.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio};
use std::sync::{OnceLock, mpsc};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};

use crate::wait;

/// A running child. Dropping it kills and reaps it; if this process dies first, the kernel kills it.
#[derive(Debug)]
pub struct Proc {
    child: Child,
    what: String,
    lines: Option<mpsc::Receiver<String>>,
}

type Order = (Command, mpsc::Sender<std::io::Result<Child>>);

/// Starts `command` from a thread that lives as long as this process.
///
/// `PR_SET_PDEATHSIG` is about the death of the parent *thread* (prctl(2)): a child started from a test's own thread, or
/// from a runtime's worker, would be killed when that thread ends.
fn start(command: Command) -> Result<Child> {
    start_with(command, true)
}

fn start_with(mut command: Command, die_with_us: bool) -> Result<Child> {
    static SPAWNER: OnceLock<mpsc::Sender<Order>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (orders, inbox) = mpsc::channel::<Order>();
        std::thread::spawn(move || {
            for (mut command, reply) in inbox {
                // A requester that has gone away drops the child unreaped, as std does.
                let _ = reply.send(command.spawn());
            }
        });
        orders
    });
    let what = describe(&command);
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            if !die_with_us {
                return Ok(());
            }
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
            Ok(())
        });
    }
    let (reply, answer) = mpsc::channel();
    spawner.send((command, reply)).map_err(|_| anyhow!("the spawning thread is gone"))?;
    answer.recv().context("the spawning thread is gone")?.with_context(|| format!("cannot start {what}"))
}

/// Starts `command`; its standard output can be read line by line, its standard input written.
pub fn spawn(command: Command) -> Result<Proc> {
    spawn_with(command, true)
}

/// As [`spawn`], but the death of this process is left for the child to notice, by the end of its standard input.
pub(crate) fn spawn_orphan(command: Command) -> Result<Proc> {
    spawn_with(command, false)
}

fn spawn_with(mut command: Command, die_with_us: bool) -> Result<Proc> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let what = describe(&command);
    let mut child = start_with(command, die_with_us)?;
    let lines = child.stdout.take().map(|out| {
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        lines
    });
    Ok(Proc { child, what, lines })
}

impl Proc {
    /// Process id in this process's PID namespace.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line of standard output; an error after `limit` or at end of file.
    pub fn line(&self, limit: Duration) -> Result<String> {
        let lines =
            self.lines.as_ref().with_context(|| format!("the output of {} is not read", self.what))?;
        lines.recv_timeout(limit).with_context(|| format!("no line from {} within {limit:?}", self.what))
    }

    /// Writes `line` and a newline to standard input.
    pub fn write_line(&mut self, line: &str) -> Result<()> {
        let stdin =
            self.child.stdin.as_mut().with_context(|| format!("the input of {} is closed", self.what))?;
        writeln!(stdin, "{line}").with_context(|| format!("cannot write to {}", self.what))
    }

    /// Takes standard input; dropping it is end of file for the child.
    pub fn take_stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) -> Result<()> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)
            .with_context(|| format!("cannot signal {}", self.what))
    }

    /// Kills and reaps it now.
    pub fn kill(&mut self) {
        // Both fail only if the child has already been reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for the child to end by itself.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        wait::until(&format!("the end of {}", self.what), limit, || self.child.try_wait().transpose())?
            .with_context(|| format!("cannot wait for {}", self.what))
    }

    /// Whether the child has not ended yet.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs `command` to its end, at most for `limit`, feeding it `input`.
pub fn output(mut command: Command, input: &str, limit: Duration) -> Result<Output> {
    let what = describe(&command);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = start(command)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A child that does not read its input is its own business.
        let _ = stdin.write_all(input.as_bytes());
    }
    let out = child.stdout.take().map(drain);
    let err = child.stderr.take().map(drain);
    let mut child = Proc { child, what, lines: None };
    let status = child.wait(limit)?;
    let text = |drain: Option<mpsc::Receiver<Vec<u8>>>| drain.and_then(|d| d.recv().ok()).unwrap_or_default();
    Ok(Output { status, stdout: text(out), stderr: text(err) })
}

/// Runs `command` and gives its standard output; anything but exit code 0 is an error with its standard error in it.
pub fn check(command: Command, input: &str) -> Result<String> {
    let what = describe(&command);
    let out = output(command, input, wait::HANG)?;
    if !out.status.success() {
        bail!(
            "{what}: {}: {}{}",
            out.status,
            String::from_utf8_lossy(&out.stderr),
            if input.is_empty() { String::new() } else { format!("\ninput was:\n{input}") }
        );
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

fn drain(mut from: impl Read + Send + 'static) -> mpsc::Receiver<Vec<u8>> {
    let (send, all) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        let _ = send.send(bytes);
    });
    all
}

fn describe(command: &Command) -> String {
    let mut text = Path::new(command.get_program()).display().to_string();
    for arg in command.get_args() {
        text.push(' ');
        text.push_str(&arg.to_string_lossy());
    }
    format!("`{text}`")
}

/// Where a child is to run. Applied between fork and exec, so that its first instruction is already there.
pub trait Place {
    /// Makes the child enter the network namespace behind `fd`.
    fn in_netns_fd(&mut self, fd: OwnedFd) -> &mut Self;
    /// Makes the child enter the mount namespace behind `fd`, before its program is looked up.
    fn in_mount_ns_fd(&mut self, fd: OwnedFd) -> &mut Self;
    /// Makes the child move itself into the cgroup whose `cgroup.procs` is open for writing as `procs`.
    fn in_cgroup_fd(&mut self, procs: OwnedFd) -> &mut Self;
}

impl Place for Command {
    fn in_netns_fd(&mut self, fd: OwnedFd) -> &mut Self {
        // SAFETY: one setns(2) of the still single-threaded child; nothing is allocated.
        unsafe { self.pre_exec(move || Ok(crate::netns::enter(&fd)?)) }
    }

    fn in_mount_ns_fd(&mut self, fd: OwnedFd) -> &mut Self {
        let kind = Some(rustix::thread::LinkNameSpaceType::Mount);
        // SAFETY: as above. A child of fork shares its file system information with nobody, which setns wants.
        unsafe { self.pre_exec(move || Ok(rustix::thread::move_into_link_name_space(fd.as_fd(), kind)?)) }
    }

    fn in_cgroup_fd(&mut self, procs: OwnedFd) -> &mut Self {
        // SAFETY: one write(2); nothing is allocated. "0" means the writer itself (cgroups(7)).
        unsafe {
            self.pre_exec(move || {
                rustix::io::write(&procs, b"0")?;
                Ok(())
            })
        }
    }
}
