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

/// Shown under the `--help` of single commands: what its codes mean. Wrong arguments are 64 everywhere.
pub const AGENT: &str = "\
Exit codes:
  0   told to stop
  1   something failed while it ran; the last line says what
  64  wrong arguments, environment, policy or profile
  69  no cgroup v2, BPF file system or kernel support; see `nobypass preflight`
  77  a capability is missing";
pub const STATUS: &str = "\
Exit codes:
  0   shown, also without an agent, from what it left in the kernel
  69  no agent runs, and none has left anything";
pub const EVENTS: &str = "\
Exit codes:
  0   an event was shown, or the reader of the output is gone
  1   the agent stopped
  69  no agent runs";
pub const EXPLAIN: &str = "\
Exit codes:
  0   explained, also without an agent, as far as the kernel knows
  1   there is no such pod on this node
  69  no agent runs, and none has left anything

Example:
  nobypass explain shop/cart-0";
pub const MODE: &str = "\
Exit codes:
  0   shown or changed, also without an agent
  1   the agent refused
  69  no agent runs, and none has left anything";
pub const PREFLIGHT: &str = "\
Exit codes:
  0   the agent can run here; what it would do without is a warning
  69  something vital is missing";
pub const PROBE: &str = "\
Exit codes:
  0   each family that the mesh redirects is redirected, or has no route
  1   one is not, or could not be asked
  69  no agent runs

Example:
  nobypass probe shop/cart-0";
pub const CLEANUP: &str = "\
Exit codes:
  0   nothing of nobypass is left in the kernel
  1   an agent runs: stop it first; or a node could not be written
  69  the directory is not on a BPF file system";
pub const VALIDATE: &str = "\
Exit codes:
  0   redirected
  1   the port is taken, so nothing could be tried
  95  not redirected

Example, of a Linkerd pod's init container:
  nobypass validate --port 4140 --families ipv4";
pub const MAN: &str = "\
Exit codes:
  0   written
  64  there is no such directory";
pub const CNI_STATUS: &str = "\
Exit codes:
  0   new pods start with the mesh's plugin
  1   they would start without it
  69  there is no such directory
  77  it may not be read";
pub const CNI_PLAN: &str = "\
Exit codes:
  0   shown
  64  the mesh's entry is not known
  69  there is no such directory
  77  it may not be read";
pub const CNI_RUN: &str = "\
Exit codes:
  0   told to stop
  1   something failed while it ran; the last line says what
  64  wrong arguments, environment or entry";
pub const CNI_UNINSTALL: &str = "\
Exit codes:
  0   everything is off this node
  1   something remains; it says what
  64  which entry is not known";
pub const CHECK: &str = "\
Exit codes:
  0   all files are valid
  1   one is not
  64  one cannot be read";
pub const SHOW: &str = "\
Exit codes:
  0   shown
  69  no agent runs";

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
