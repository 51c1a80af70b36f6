//! Exit codes, in one place because scripts depend on them.

use std::io::Write as _;
use std::process::{ExitCode, Termination};

/// Shown under every `--help`.
pub const HELP: &str = "\
Exit codes:
  0   done
  1   the command ran and the answer is no, or it failed
  64  wrong arguments, environment or configuration file
  69  something needed is not there (agent, container runtime, cgroup2, bpffs, kernel feature)
  77  missing permission
  95  validate: connections of this pod are not redirected";

/// How a sub-command ended. The numbers follow sysexits.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done.
    Ok = 0,
    /// The command ran and the answer is no, or it failed.
    Failed = 1,
    /// Wrong arguments, environment or configuration file (`EX_USAGE`).
    Usage = 64,
    /// Something needed is not there (`EX_UNAVAILABLE`).
    Unavailable = 69,
    /// Missing permission (`EX_NOPERM`).
    NoPermission = 77,
    /// Connections of this pod are not redirected, as Linkerd's validator says it.
    NotRedirected = 95,
}

impl Termination for Exit {
    fn report(self) -> ExitCode {
        ExitCode::from(self as u8)
    }
}

/// Prints a clap error (or `--help`, `--version`) and gives its code.
pub fn usage(error: &clap::Error) -> Exit {
    // Nothing is left to do when the terminal is gone.
    let _ = error.print();
    if error.use_stderr() { Exit::Usage } else { Exit::Ok }
}

/// Adds a line to an error that was printed.
pub fn note(message: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{message}");
}

/// Writes `text` to standard output; a closed pipe (`nobypass status | head`) is not an error.
pub fn print(text: &str) -> Exit {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Exit::Ok,
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Exit::Ok,
        Err(error) => fail(Exit::Failed, &format!("cannot write to standard output: {error}")),
    }
}

/// Reports an error on standard error, one line, and gives its code.
pub fn fail(exit: Exit, message: &str) -> Exit {
    let _ = writeln!(std::io::stderr().lock(), "nobypass: {message}");
    exit
}
