//! Child processes: which cargo, with what environment, and where programs are.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result, bail};

/// Where administrators' programs live; an ordinary user's `PATH` lacks these on Debian.
const SBIN: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// What `cargo run` and `cargo test` put into our environment for one package only. A child cargo must not inherit it: build
/// scripts that look at such a variable would run anew, and so would all that depends on them.
const OURS: [&str; 6] =
    ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "OUT_DIR", "RUST_RECURSION_COUNT"];

/// Variables for the environment of everything that this run starts, see [`mark`].
static MARKS: Mutex<BTreeMap<&str, String>> = Mutex::new(BTreeMap::new());

fn marks() -> MutexGuard<'static, BTreeMap<&'static str, String>> {
    MARKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on, what is started carries `name=value` in its environment, and what that starts too.
pub fn mark(name: &'static str, value: String) {
    marks().insert(name, value);
}

/// Undoes [`mark`].
pub fn unmark(name: &str) {
    marks().remove(name);
}

/// The checkout this xtask was built from.
pub fn repo_root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here)
}

/// A command that sees the environment that `cargo xtask` itself was called with, in the checkout, without a
/// terminal's input. As root it finds the administrators' programs also after a plain `su`: tests and demo need them.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(repo_root()).stdin(Stdio::null());
    // For others a changed PATH would only make cargo build again what it has built without xtask.
    if is_root()
        && let Ok(path) = env::join_paths(search_path())
    {
        command.env("PATH", path);
    }
    command.envs(&*marks());
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(|name| OURS.iter().any(|ours| name.starts_with(ours))) {
            command.env_remove(&name);
        }
    }
    if let Some(path) = env::var_os("LD_LIBRARY_PATH") {
        match without_cargo_dirs(&path) {
            Some(path) => command.env("LD_LIBRARY_PATH", path),
            None => command.env_remove("LD_LIBRARY_PATH"),
        };
    }
    command
}

/// The cargo that runs us, or the one on `PATH`.
pub fn cargo() -> Command {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = command(cargo);
    command.env_remove("CARGO");
    command
}

/// `cargo run` prepends the target directory and the compiler's libraries; what is left is the caller's own.
fn without_cargo_dirs(path: &OsStr) -> Option<OsString> {
    let target = |dir: &Path| dir.ends_with("debug") || dir.ends_with("release") || dir.ends_with("deps");
    let rust = |dir: &Path| {
        let dir = dir.as_os_str().to_string_lossy();
        dir.contains("/rustlib/") || dir.contains("/toolchains/")
    };
    let kept: Vec<PathBuf> = env::split_paths(path).filter(|dir| !target(dir) && !rust(dir)).collect();
    if kept.is_empty() { None } else { env::join_paths(kept).ok() }
}

/// Finds a program on `PATH` or among the administrators' directories.
pub fn find_program(name: &str) -> Option<PathBuf> {
    search_path().into_iter().map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// `PATH`, and behind it what it lacks of the administrators' directories.
fn search_path() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = env::split_paths(&path).collect();
    for dir in SBIN.map(PathBuf::from) {
        if !dirs.contains(&dir) {
            dirs.push(dir);
        }
    }
    dirs
}

/// A program by name, found as [`find_program`] finds it.
pub fn tool(name: &str) -> Command {
    command(find_program(name).map_or_else(|| OsString::from(name), PathBuf::into_os_string))
}

/// Runs to the end and returns what it wrote to stdout; an error holds the end of what it wrote to stderr.
pub fn output(command: &mut Command) -> Result<String> {
    let name = shown(command);
    let output = command.output().with_context(|| format!("cannot run `{name}`"))?;
    if !output.status.success() {
        let text = [output.stderr.as_slice(), output.stdout.as_slice()].concat();
        bail!("`{name}` failed ({}): {}", output.status, last_lines(&String::from_utf8_lossy(&text), 6));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs with our stdout and stderr; false if it fails. An error means that it could not be started.
pub fn succeeds(command: &mut Command) -> Result<bool> {
    let name = shown(command);
    Ok(command.status().with_context(|| format!("cannot run `{name}`"))?.success())
}

/// The command line for a message: the program's name and its arguments.
pub fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut line = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
    for arg in command.get_args() {
        line.push(' ');
        line.push_str(&arg.to_string_lossy());
    }
    line
}

/// The last `count` non-empty lines, joined by ` | `.
pub fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.iter().skip(lines.len().saturating_sub(count)).copied().collect::<Vec<_>>().join(" | ")
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// `CI` set to anything but nothing, `0` or `false`.
pub fn in_ci() -> bool {
    env::var("CI").is_ok_and(|ci| !matches!(ci.as_str(), "" | "0" | "false"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_path_loses_only_what_cargo_put_there() {
        let path =
            OsStr::new("/r/target/debug:/r/target/debug/deps:/home/u/.rustup/toolchains/1.95.0/lib:/opt/own");
        assert_eq!(without_cargo_dirs(path), Some(OsString::from("/opt/own")));
        assert_eq!(without_cargo_dirs(OsStr::new("/r/target/debug/deps:/t/lib/rustlib/x86_64/lib")), None);
    }

    #[test]
    fn last_lines_are_the_end() {
        assert_eq!(last_lines("a\n\n b \nc\n", 2), "b | c");
        assert_eq!(last_lines("a", 5), "a");
    }

    #[test]
    fn finds_programs_and_says_no() {
        assert!(find_program("sh").is_some());
        assert_eq!(find_program("no-such-program-nobypass"), None);
    }
}
