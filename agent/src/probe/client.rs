//! The agent's side of the helper: starts it in its cgroup, and starts it anew when it broke.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::helper::{COMMAND, READY};
use super::wire::{Ask, Said};
use super::{Answer, Failure};
use crate::sys::netns::open_cgroup;
use crate::sys::process::{bind_life, start_in_cgroup};

/// The helper's cgroup, beside the pods'.
pub const CGROUP: &str = "nobypass-probe";
/// How long a question may take; it takes some hundred microseconds.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long the helper may take to start.
const START: Duration = Duration::from_secs(10);
/// Between two starts.
const PAUSE: Duration = Duration::from_secs(1);
/// How long a helper that was killed is waited for, to remove its cgroup.
const END: Duration = Duration::from_millis(200);

/// Where the helper's cgroup is, given one of the pods' parents.
pub fn cgroup_beside(parent: &Path) -> PathBuf {
    parent.parent().unwrap_or(parent).join(CGROUP)
}

/// Makes the helper's cgroup, unless an agent that was killed left it.
///
/// # Errors
/// As mkdir(2) says.
pub fn make_cgroup(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Removes the helper's cgroup that an agent which was killed left, given cgroup ids of pods' parents.
pub fn remove_left_cgroup(root: &Path, parents: &[u64]) -> io::Result<()> {
    let mount = File::open(root)?;
    for id in parents {
        let parent = open_cgroup(mount.as_fd(), *id)?;
        let path = fs::read_link(format!("/proc/self/fd/{}", parent.as_raw_fd()))?;
        match fs::remove_dir(cgroup_beside(&path)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// What the helper needs.
#[derive(Debug)]
pub struct Place {
    /// Its cgroup.
    pub cgroup: PathBuf,
    /// The program's link to that cgroup.
    pub link: OwnedFd,
    /// `--bpf-dir`.
    pub bpf_dir: PathBuf,
    /// Any directory of the cgroup v2 file system.
    pub cgroup_root: PathBuf,
}

/// See the module. Dropping it ends the helper and removes its cgroup.
#[derive(Debug)]
pub struct Client {
    place: Place,
    helper: Option<Helper>,
    not_before: Instant,
}

#[derive(Debug)]
struct Helper {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Client {
    /// The helper starts with the first question.
    pub fn new(place: Place) -> Self {
        Self { place, helper: None, not_before: Instant::now() }
    }

    /// The helper's process id, while there is one.
    pub fn helper(&self) -> Option<u32> {
        self.helper.as_ref().and_then(|helper| helper.child.id())
    }

    /// Asks one question; what goes wrong is an answer too.
    pub async fn ask(&mut self, question: &Ask) -> [Answer; 2] {
        match self.try_ask(question).await {
            Ok(Said(words)) => words.map(Answer::from),
            Err(error) => {
                // Not one that broke in the middle of a question: its next answer may be to this one.
                self.helper = None;
                let late = error.kind() == ErrorKind::TimedOut;
                tracing::warn!(%error, "the probe's helper failed, starting it anew");
                [Answer::from(if late { Failure::Timeout } else { Failure::Helper }); 2]
            }
        }
    }

    async fn try_ask(&mut self, question: &Ask) -> io::Result<Said> {
        if self.helper.is_none() {
            if Instant::now() < self.not_before {
                return Err(io::Error::other("it failed a moment ago"));
            }
            self.not_before = Instant::now() + PAUSE;
            self.helper = Some(Helper::start(&self.place).await?);
        }
        let Some(helper) = &mut self.helper else { return Err(ErrorKind::NotConnected.into()) };
        let line = serde_json::to_string(question)? + "\n";
        let exchange = async {
            helper.input.write_all(line.as_bytes()).await?;
            helper.output.next_line().await?.ok_or_else(|| io::Error::from(ErrorKind::UnexpectedEof))
        };
        let answer = tokio::time::timeout(PATIENCE, exchange).await??;
        Ok(serde_json::from_str(&answer)?)
    }
}

impl Helper {
    async fn start(place: &Place) -> io::Result<Self> {
        let mut command = std::process::Command::new("/proc/self/exe");
        command
            .arg(COMMAND)
            .arg("--bpf-dir")
            .arg(&place.bpf_dir)
            .arg("--cgroup-root")
            .arg(&place.cgroup_root);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // As long as it lives, what it sends is dropped: the program's link is open in it too.
        bind_life(&mut command, place.link.try_clone()?);
        start_in_cgroup(&mut command, &place.cgroup)?;
        let mut command = Command::from(command);
        let mut child = command.kill_on_drop(true).spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(ErrorKind::NotConnected.into());
        };
        let mut helper = Self { child, input, output: BufReader::new(output).lines() };
        match tokio::time::timeout(START, helper.output.next_line()).await?? {
            Some(line) if line == READY => Ok(helper),
            _ => Err(io::Error::other("it ended before it was ready, see its message above")),
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Killed with this.
        self.helper = None;
        let start = Instant::now();
        while fs::remove_dir(&self.place.cgroup).is_err_and(|error| error.kind() != ErrorKind::NotFound)
            && start.elapsed() < END
        {
            #[expect(
                clippy::disallowed_methods,
                reason = "the agent is ending, and the helper takes a moment to"
            )]
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
