//! Runs a plugin to its end, or to its time limit; nothing of it is left running.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::call::Call;

/// Room for a plugin's output, in bytes; writing more fails.
const OUTPUT: u64 = 64 * 1024;
/// The search path when the runtime's is not known.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How a plugin ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ran {
    /// With exit code 0.
    Ok,
    /// With another one, or by a signal; and what it said.
    Failed { how: String, stdout: String, stderr: String },
    /// It was killed, with all its children, after this time.
    TimedOut { after: Duration, stderr: String },
}

/// The first of the directories that has the plugin.
pub fn find(plugin: &str, dirs: &[PathBuf]) -> Option<PathBuf> {
    dirs.iter().map(|dir| dir.join(plugin)).find(|path| path.is_file())
}

/// Runs `program` for the call, in the caller's namespaces. Blocks.
///
/// # Errors
/// The program could not be started.
pub fn run(
    program: &Path,
    call: &Call,
    command: &str,
    path: Option<&OsString>,
    limit: Duration,
) -> io::Result<Ran> {
    let mut stdin: File = memfd_create("stdin", MemfdFlags::CLOEXEC)?.into();
    stdin.write_all(call.stdin.as_bytes())?;
    stdin.seek(SeekFrom::Start(0))?;
    let (stdout, stderr) = (output("stdout")?, output("stderr")?);
    let mut process = Command::new(program);
    process
        .env_clear()
        .env("PATH", path.cloned().unwrap_or_else(|| PATH.into()))
        .env("CNI_COMMAND", command)
        .envs(call.env.iter().map(|(name, value)| (*name, value)))
        .current_dir("/")
        .stdin(Stdio::from(stdin))
        .stdout(Stdio::from(stdout.try_clone()?))
        .stderr(Stdio::from(stderr.try_clone()?))
        // Its children are found by it.
        .process_group(0);
    let mut child = process.spawn()?;
    let ended = wait(&child, limit);
    // Before it is reaped, so that the group cannot be another one's by now.
    if let Err(error) = kill_process_group(Pid::from_child(&child), Signal::KILL)
        && error != rustix::io::Errno::SRCH
    {
        tracing::warn!(%error, "cannot kill what a CNI plugin left running");
    }
    let status = child.wait()?;
    let (stdout, stderr) = (text(stdout), text(stderr));
    match ended {
        Ok(true) if status.success() => Ok(Ran::Ok),
        Ok(true) => Ok(Ran::Failed { how: how(status), stdout, stderr }),
        Ok(false) => Ok(Ran::TimedOut { after: limit, stderr }),
        Err(error) => {
            Ok(Ran::Failed { how: format!("was killed: it cannot be waited for: {error}"), stdout, stderr })
        }
    }
}

/// Whether it ended within the limit.
fn wait(child: &Child, limit: Duration) -> io::Result<bool> {
    let fd = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let end = Instant::now() + limit;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A file without a name and of a fixed size: unlike a pipe it never makes the plugin wait for us, nor us for its children.
fn output(name: &str) -> io::Result<File> {
    let file: File = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?.into();
    file.set_len(OUTPUT)?;
    fcntl_add_seals(&file, SealFlags::GROW)?;
    Ok(file)
}

fn text(mut file: File) -> String {
    let mut bytes = Vec::new();
    // What cannot be read cannot be told.
    let _ = file.seek(SeekFrom::Start(0)).and_then(|_| file.read_to_end(&mut bytes));
    let used = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    bytes.truncate(used);
    String::from_utf8_lossy(&bytes).into_owned()
}

fn how(status: ExitStatus) -> String {
    match status.code() {
        Some(code) => format!("ended with code {code}"),
        None => format!("ended by {status}"),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn script(body: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("plugin");
        std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        (dir, path)
    }

    fn call() -> Call {
        Call { plugin: "plugin".into(), stdin: r#"{"a":1}"#.into(), env: vec![("CNI_IFNAME", "eth0".into())] }
    }

    fn go(body: &str, limit: Duration) -> Ran {
        let (_dir, path) = script(body);
        run(&path, &call(), "ADD", None, limit).unwrap()
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_it_gets() {
        let body = r#"test "$(cat)" = '{"a":1}' && test $CNI_COMMAND = ADD && test $CNI_IFNAME = eth0 && test -z "$HOME" && test $(pwd) = /"#;
        assert_eq!(go(body, LONG), Ran::Ok);
    }

    #[test]
    fn how_it_ends() {
        let failed = |how: &str, stdout: &str, stderr: &str| Ran::Failed {
            how: how.into(),
            stdout: stdout.into(),
            stderr: stderr.into(),
        };
        assert_eq!(go("echo out; echo err >&2; exit 3", LONG), failed("ended with code 3", "out\n", "err\n"));
        assert!(matches!(go("kill -9 $$", LONG), Ran::Failed { how, .. } if how.contains("SIGKILL")));
        let flood = go("yes >&2; exit 4", LONG);
        assert!(matches!(flood, Ran::Failed { stderr, .. } if stderr.len() == 64 * 1024));
        let limit = Duration::from_millis(300);
        assert_eq!(
            go("echo started >&2; exec sleep 600", limit),
            Ran::TimedOut { after: limit, stderr: "started\n".into() }
        );
    }

    #[test]
    fn its_children_end_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        for (rest, limit) in [("exit 0", LONG), ("wait", Duration::from_millis(300))] {
            go(&format!("sleep 600 & echo $! > {}; {rest}", pid.display()), limit);
            let child: i32 = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
            let child = Pid::from_raw(child).unwrap();
            // It stays a zombie until init, or whoever adopts it, reaps it.
            let gone = || {
                let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.as_raw_nonzero()));
                stat.map_or(true, |stat| stat.contains(") Z "))
            };
            nobypass_testkit::wait::until("the child's end", LONG, || gone().then_some(())).unwrap();
        }
    }

    #[test]
    fn what_cannot_be_started_is_an_error() {
        assert!(run(Path::new("/nonexistent"), &call(), "ADD", None, LONG).is_err());
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(find("plugin", &[dir.path().into()]), None);
    }
}
