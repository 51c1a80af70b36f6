//! The mesh's CNI plugin binaries on the host: copied before any config names them, removed when none does any more.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Command;

use super::put::put;

/// A plugin answers `VERSION` in milliseconds; a slow node gets this long.
pub const VERSION_TIMEOUT: Duration = Duration::from_secs(5);
/// More than any `VERSION` answer.
const MAX_ANSWER: u64 = 64 * 1024;
/// Tries while some process holds a descriptor of the just written file over its own fork and exec.
const BUSY_TRIES: u32 = 20;

/// Why a plugin is not (known to be) usable.
#[derive(Debug, thiserror::Error)]
pub enum BinaryError {
    /// The source directory cannot be read.
    #[error("cannot read the plugin directory {}: {source}", path.display())]
    Source {
        /// The directory or file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// There is nothing to install.
    #[error("{} holds no plugin binary", path.display())]
    Nothing {
        /// The directory.
        path: PathBuf,
    },
    /// The host's directory cannot be written.
    #[error("cannot write {}: {source}; is the host's CNI binary directory mounted and writable?", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// What was written is not what is there.
    #[error("{} is not what was written to it: another installer, or a failing disk", path.display())]
    Differs {
        /// The file.
        path: PathBuf,
    },
    /// The plugin could not be asked for its versions.
    #[error("{} does not answer VERSION: {what}", path.display())]
    NoAnswer {
        /// The file.
        path: PathBuf,
        /// What happened instead.
        what: String,
    },
}

/// One binary that is in place now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// Its file name, which is the `type` of entries that call it.
    pub name: OsString,
    /// Its size.
    pub bytes: u64,
    /// False when it was there already.
    pub written: bool,
}

/// Copies every regular, non-hidden file of `source` to `target`, in the order of their names. A running old binary
/// goes on running; one with equal content is left alone. Each is read back and compared.
pub fn install(source: &Path, target: &Path) -> Result<Vec<Installed>, BinaryError> {
    let mut names = names(source)?;
    names.sort();
    if names.is_empty() {
        return Err(BinaryError::Nothing { path: source.to_owned() });
    }
    names.into_iter().map(|name| install_one(source, target, name)).collect()
}

fn names(source: &Path) -> Result<Vec<OsString>, BinaryError> {
    let failed = |error| BinaryError::Source { path: source.to_owned(), source: error };
    let mut names = Vec::new();
    for entry in fs::read_dir(source).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let regular = fs::metadata(entry.path()).is_ok_and(|found| found.is_file());
        if regular && !entry.file_name().as_bytes().starts_with(b".") {
            names.push(entry.file_name());
        }
    }
    Ok(names)
}

fn install_one(source: &Path, target: &Path, name: OsString) -> Result<Installed, BinaryError> {
    let (from, to) = (source.join(&name), target.join(&name));
    let failed = |error| BinaryError::Source { path: from.clone(), source: error };
    let found = fs::metadata(&from).map_err(failed)?;
    // Whatever the image says, a runtime must be able to run it; and nobody else may write it.
    let mode = (found.mode() & 0o755) | 0o555;
    let bytes = found.len();
    if mode_of(&to) == Some(mode) && equal(&from, &to).unwrap_or(false) {
        return Ok(Installed { name, bytes, written: false });
    }
    let mut reader = File::open(&from).map_err(failed)?;
    put(target, &name, mode, |file| io::copy(&mut reader, file).map(|_| ()))
        .map_err(|source| BinaryError::Write { path: to.clone(), source })?;
    match equal(&from, &to) {
        Ok(true) => Ok(Installed { name, bytes, written: true }),
        _ => Err(BinaryError::Differs { path: to }),
    }
}

/// The mode of a regular file; `None` for anything else, such as a link into another directory.
fn mode_of(path: &Path) -> Option<u32> {
    fs::symlink_metadata(path).ok().filter(fs::Metadata::is_file).map(|found| found.mode() & 0o7777)
}

fn equal(a: &Path, b: &Path) -> io::Result<bool> {
    let (a, b) = (File::open(a)?, File::open(b)?);
    if a.metadata()?.len() != b.metadata()?.len() {
        return Ok(false);
    }
    let (mut a, mut b) = (io::BufReader::new(a), io::BufReader::new(b));
    let (mut one, mut two) = ([0; 8192], [0; 8192]);
    loop {
        let count = a.read(&mut one)?;
        if count == 0 {
            return Ok(true);
        }
        let (Some(one), Some(two)) = (one.get(..count), two.get_mut(..count)) else { return Ok(false) };
        b.read_exact(two)?;
        if one != two {
            return Ok(false);
        }
    }
}

/// Whether a runtime could run this plugin.
pub fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// Removes one binary; false when it was not there.
pub fn remove(dir: &Path, name: &OsStr) -> Result<bool, BinaryError> {
    let path = dir.join(name);
    match fs::remove_file(&path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(BinaryError::Write { path, source }),
    }
}

/// Asks a plugin which spec versions it supports, as a runtime would
/// (<https://github.com/containernetworking/cni/blob/1c6a4cc/SPEC.md>, `VERSION`).
pub async fn supported_versions(path: &Path, timeout: Duration) -> Result<Vec<String>, BinaryError> {
    let failed = |what: String| BinaryError::NoAnswer { path: path.to_owned(), what };
    let answer = tokio::time::timeout(timeout, ask(path)).await;
    let answer = match answer {
        Ok(answer) => answer.map_err(|error| failed(error.to_string()))?,
        Err(_) => return Err(failed(format!("nothing within {} s", timeout.as_secs_f32()))),
    };
    versions(&answer).ok_or_else(|| failed("it says something else".to_owned()))
}

/// The versions in a `VERSION` answer.
fn versions(answer: &[u8]) -> Option<Vec<String>> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Answer {
        supported_versions: Vec<String>,
    }
    let answer: Answer = serde_json::from_slice(answer).ok()?;
    (!answer.supported_versions.is_empty()).then_some(answer.supported_versions)
}

async fn ask(path: &Path) -> io::Result<Vec<u8>> {
    let mut tries = 0;
    let mut child = loop {
        let spawned = Command::new(path)
            .env_clear()
            .env("CNI_COMMAND", "VERSION")
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn();
        match spawned {
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy && tries < BUSY_TRIES => {
                tries += 1;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            other => break other?,
        }
    };
    let mut input = child.stdin.take();
    let output = child.stdout.take();
    let mut answer = Vec::new();
    let write = async {
        if let Some(input) = &mut input {
            // A plugin that answers without reading is fine.
            let _ = input.write_all(br#"{"cniVersion":"1.0.0"}"#).await;
        }
        drop(input.take());
    };
    let read = async {
        match output {
            Some(output) => output.take(MAX_ANSWER).read_to_end(&mut answer).await,
            None => Ok(0),
        }
    };
    let ((), read) = tokio::join!(write, read);
    read?;
    let status = child.wait().await?;
    if status.success() { Ok(answer) } else { Err(io::Error::other(format!("it ended with {status}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(dir: &Path, name: &str, text: &str) -> PathBuf {
        let path = dir.join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn installs_verifies_and_leaves_equal_files() {
        let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        script(source.path(), "linkerd-cni", "one");
        fs::write(source.path().join(".hidden"), "").unwrap();
        fs::create_dir(source.path().join("dir")).unwrap();
        let once = |written| {
            let installed = install(source.path(), target.path()).unwrap();
            let found: Vec<_> =
                installed.iter().map(|one| (one.name.to_str().unwrap(), one.written)).collect();
            assert_eq!(found, [("linkerd-cni", written)]);
        };
        once(true);
        let inode = fs::metadata(target.path().join("linkerd-cni")).unwrap().ino();
        once(false);
        assert_eq!(fs::metadata(target.path().join("linkerd-cni")).unwrap().ino(), inode);
        script(source.path(), "linkerd-cni", "two");
        once(true);
        fs::set_permissions(target.path().join("linkerd-cni"), fs::Permissions::from_mode(0o644)).unwrap();
        once(true);
        assert!(is_executable(&target.path().join("linkerd-cni")));
        assert_eq!(fs::read_dir(target.path()).unwrap().count(), 1, "no temporary file is left");
        assert!(remove(target.path(), OsStr::new("linkerd-cni")).unwrap());
        assert!(!remove(target.path(), OsStr::new("linkerd-cni")).unwrap());
    }

    #[test]
    fn says_what_is_wrong() {
        let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        assert!(matches!(install(source.path(), target.path()), Err(BinaryError::Nothing { .. })));
        let gone = source.path().join("gone");
        assert!(matches!(install(&gone, target.path()), Err(BinaryError::Source { .. })));
        script(source.path(), "p", "");
        let error = install(source.path(), &gone).unwrap_err();
        assert!(error.to_string().contains("is the host's CNI binary directory mounted"), "{error}");
    }

    /// multus-cni#1221, #1445: "text file busy" when a plugin runs while its binary is replaced.
    /// multus-cni#1445: the same.
    #[test]
    fn multus_cni_1221_replaces_a_running_binary() {
        let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let sleep =
            ["/bin/sleep", "/usr/bin/sleep"].into_iter().map(Path::new).find(|path| path.exists()).unwrap();
        fs::copy(sleep, target.path().join("plugin")).unwrap();
        let mut running = std::process::Command::new(target.path().join("plugin")).arg("60").spawn().unwrap();
        script(source.path(), "plugin", "echo new");
        let installed = install(source.path(), target.path());
        let alive = running.try_wait().unwrap().is_none();
        running.kill().unwrap();
        running.wait().unwrap();
        assert!(installed.unwrap()[0].written && alive);
    }

    #[tokio::test]
    async fn versions_are_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let good = r#"cat >/dev/null; [ "$CNI_COMMAND" = VERSION ] && echo '{"cniVersion":"1.0.0","supportedVersions":["0.4.0","1.0.0"]}'"#;
        let good = script(dir.path(), "good", good);
        let limit = Duration::from_secs(20);
        assert_eq!(supported_versions(&good, limit).await.unwrap(), ["0.4.0", "1.0.0"]);
        let deaf = script(dir.path(), "deaf", r#"echo '{"supportedVersions":["1.0.0"]}'"#);
        assert_eq!(supported_versions(&deaf, limit).await.unwrap(), ["1.0.0"]);
        for (name, text, what) in [
            ("fails", "exit 3", "exit status: 3"),
            ("nonsense", "echo hello", "something else"),
            ("empty", r#"echo '{"supportedVersions":[]}'"#, "something else"),
        ] {
            let path = script(dir.path(), name, text);
            let error = supported_versions(&path, limit).await.unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
        let hangs = script(dir.path(), "hangs", "exec sleep 60");
        let error = supported_versions(&hangs, Duration::from_millis(200)).await.unwrap_err().to_string();
        assert!(error.contains("nothing within 0.2 s"), "{error}");
        let error = supported_versions(&dir.path().join("gone"), limit).await.unwrap_err().to_string();
        assert!(error.contains("does not answer VERSION"), "{error}");
    }
}
