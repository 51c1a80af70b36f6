//! The entry in a file of its own beside the list, where the runtime reads such files: no primary CNI that writes its list
//! anew can lose it, not even at boot, before any agent runs.
//!
//! libcni since 1.3 appends each `<directory>/<network's name>/*.conf`, in byte order, to the plugins of the network's
//! `.conflist` (<https://github.com/containernetworking/cni/blob/3f51e88/libcni/conf.go>, `NetworkConfFromFile`). An older one
//! does not know them, and a file does not say who will read it (containernetworking/cni#1164), so the runtime is asked. No
//! runtime watches these directories: it is woken when one of the files changed.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use bytes::Bytes;

use super::discover::Listed;
use super::document::{Body, Document};
use super::edit;
use super::entry::WantedEntry;
use super::plan::{self, FileKind, MAX_BYTES};
use super::put::put;
use super::refusal::Refusal;

/// The file's name: after all others, as a mesh's plugin needs the finished interface.
pub const FILE: &str = "zz-nobypass.conf";

/// Whether this runtime, by the name and version that it gives, reads such files; else why not.
pub fn honoured_by(runtime: &str) -> Result<(), String> {
    let version = runtime.strip_prefix("containerd ").map(|version| version.trim_start_matches('v'));
    let mut numbers = version.unwrap_or_default().split('.').map(|part| part.parse::<u64>().ok());
    match (version, numbers.next().flatten(), numbers.next().flatten()) {
        (Some(_), Some(major), Some(minor)) if (major, minor) >= (2, 1) => Ok(()),
        (Some(version), ..) => {
            Err(format!("containerd reads drop-in files from 2.1 on, and this is {version}"))
        }
        (None, ..) => Err(format!("only containerd is known to read drop-in files, and this is {runtime}")),
    }
}

/// libcni's own rule for the names of networks (`utils.ValidateNetworkName`), which keeps them inside of the directory.
fn is_plain(network: &str) -> bool {
    network.starts_with(|first: char| first.is_ascii_alphanumeric())
        && network.chars().all(|letter| letter.is_ascii_alphanumeric() || "_.-".contains(letter))
}

/// Makes sure that the network has the entry; true when it was not there like this.
pub fn place(dir: &Path, network: &str, wanted: &WantedEntry) -> Result<bool, Refusal> {
    if !is_plain(network) {
        return Err(Refusal::Field { key: "name", problem: "not usable as the name of a directory" });
    }
    let home = dir.join(network);
    let text = format!("{}\n", wanted.text());
    if fs::read(home.join(FILE)).is_ok_and(|known| known == text.as_bytes()) {
        return Ok(false);
    }
    let made = (|| {
        match DirBuilder::new().mode(0o755).create(&home) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        if !fs::symlink_metadata(&home)?.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        put(&home, OsStr::new(FILE), 0o644, |file| file.write_all(text.as_bytes()))?;
        File::open(dir)?.sync_all()
    })();
    made.map(|()| true).map_err(|error| Refusal::from(&error))
}

/// Takes the file away, and its directory if nothing else is in it; true when it was there.
pub fn withdraw(dir: &Path, network: &str) -> Result<bool, Refusal> {
    let home = dir.join(network);
    if !is_plain(network) {
        return Ok(false);
    }
    match fs::remove_file(home.join(FILE)) {
        Ok(()) => {}
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(false);
        }
        Err(error) => return Err(Refusal::from(&error)),
    }
    let _ = fs::remove_dir(&home); // not while somebody else has a file there
    Ok(true)
}

/// Networks that have one.
pub fn networks(dir: &Path) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if entry.file_type()?.is_dir() && entry.path().join(FILE).is_file() {
            found.push(name);
        }
    }
    found.sort();
    Ok(found)
}

/// Makes lists what the runtime makes of them, where nobypass has put a drop-in file: it does so only when the runtime reads
/// them.
pub fn expand(dir: &Path, listed: &mut [Listed]) {
    let ours = networks(dir).unwrap_or_default();
    for file in listed {
        let (Some(kind), Ok(bytes)) = (FileKind::of(&file.name), &file.content) else { continue };
        if plan::network(kind, bytes).is_some_and(|network| ours.contains(&network)) {
            file.content = Ok(effective(dir, kind, bytes));
        }
    }
}

/// What the runtime makes of a file: a list with the plugins of its drop-in files. One that cannot be read is appended as it
/// is, since it fails the whole list there too.
pub fn effective(dir: &Path, kind: FileKind, bytes: &Bytes) -> Bytes {
    let plain = || bytes.clone();
    if kind != FileKind::Conflist {
        return plain();
    }
    let Ok(document) = Document::read(kind, bytes) else { return plain() };
    let Body::List(plugins) = &document.body else { return plain() };
    let inline_only = edit::members(document.text)
        .iter()
        .rev()
        .find(|member| member.key == "loadOnlyInlinedPlugins")
        .is_some_and(|member| member.value == "true");
    let (Some(last), false, true) = (plugins.last(), inline_only, is_plain(&document.name)) else {
        return plain();
    };
    let (Some(head), Some(tail)) = (document.text.get(..last.span.end), document.text.get(last.span.end..))
    else {
        return plain();
    };
    let mut text = head.to_owned();
    for plugin in texts(&dir.join(&document.name)) {
        text.push(',');
        text.push_str(&plugin);
    }
    text.push_str(tail);
    Bytes::from(text)
}

/// The drop-in files of one network, in libcni's order.
fn texts(home: &Path) -> Vec<String> {
    let entries = fs::read_dir(home).into_iter().flatten().flatten();
    let conf = |path: &Path| path.extension().is_some_and(|extension| extension == "conf");
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).filter(|path| conf(path)).collect();
    paths.sort();
    let read = |path: &Path| {
        let mut text = String::new();
        let file = File::open(path).ok().filter(|file| file.metadata().is_ok_and(|meta| meta.is_file()))?;
        file.take(MAX_BYTES as u64).read_to_string(&mut text).ok()?;
        Some(text)
    };
    // Directories are skipped by libcni too.
    paths.iter().filter(|path| !path.is_dir()).map(|path| read(path).unwrap_or_default()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::entry::Place;
    use super::*;

    #[test]
    fn which_runtimes_read_them() {
        for (runtime, expected) in [
            ("containerd 1.6.20~ds1", false),
            ("containerd v1.7.24", false),
            ("containerd 2.0.5", false),
            ("containerd v2.1.0", true),
            ("containerd 2.1.9+unknown", true),
            ("containerd 2.10.0-beta.1", true),
            ("containerd 3.0", true),
            ("containerd ", false),
            ("containerd unknown", false),
            ("cri-o 1.34.0", false),
            ("", false),
        ] {
            assert_eq!(honoured_by(runtime).is_ok(), expected, "{runtime}");
        }
    }

    #[test]
    fn placed_once_and_taken_away() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let wanted =
            |v: u32| WantedEntry::from_text(&format!(r#"{{"type":"m","v":{v}}}"#), Place::Last).unwrap();
        assert_eq!(place(dir, "k8s", &wanted(1)), Ok(true));
        assert_eq!(place(dir, "k8s", &wanted(1)), Ok(false));
        assert_eq!(place(dir, "k8s", &wanted(2)), Ok(true));
        assert_eq!(fs::read_to_string(dir.join("k8s").join(FILE)).unwrap(), "{\"type\":\"m\",\"v\":2}\n");
        assert_eq!(networks(dir).unwrap(), ["k8s"]);
        // Somebody else's file keeps the directory.
        fs::write(dir.join("k8s/10-other.conf"), r#"{"type":"o"}"#).unwrap();
        assert_eq!((withdraw(dir, "k8s"), withdraw(dir, "k8s")), (Ok(true), Ok(false)));
        assert!(dir.join("k8s/10-other.conf").exists());
        fs::write(dir.join("file"), "").unwrap();
        assert_eq!(withdraw(dir, "file"), Ok(false));
        assert!(place(dir, "file", &wanted(1)).is_err());
        std::os::unix::fs::symlink("/", dir.join("link")).unwrap();
        assert!(place(dir, "link", &wanted(1)).is_err());
        for outside in ["", ".", "..", "../x", "a/b", "/etc", ".hidden", "a\0"] {
            assert!(place(dir, outside, &wanted(1)).is_err(), "{outside:?}");
            assert_eq!(withdraw(dir, outside), Ok(false), "{outside:?}");
        }
    }

    #[test]
    fn what_the_runtime_makes_of_a_list() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        fs::create_dir(dir.join("n")).unwrap();
        fs::create_dir(dir.join("n/c.conf")).unwrap();
        for (name, text) in [("b.conf", r#"{"type":"b"}"#), ("a.conf", r#"{"type":"a"}"#), ("x.json", "{}")] {
            fs::write(dir.join("n").join(name), text).unwrap();
        }
        let list = |rest: &str, plugins: &str| format!(r#"{{"name":"n"{rest},"plugins":[ {plugins} ]}}"#);
        let with = |text: &str, kind| {
            String::from_utf8(effective(dir, kind, &text.to_owned().into()).to_vec()).unwrap()
        };
        let plain = list("", r#"{"type":"p"}"#);
        let full = list("", r#"{"type":"p"},{"type":"a"},{"type":"b"}"#);
        assert_eq!(with(&plain, FileKind::Conflist), full);
        assert_eq!(with(&plain, FileKind::Conf), plain);
        assert_eq!(with("{", FileKind::Conflist), "{");
        let only = list(r#","loadOnlyInlinedPlugins":true"#, r#"{"type":"p"}"#);
        assert_eq!(with(&only, FileKind::Conflist), only);
        // One bad file fails the list.
        fs::write(dir.join("n/b.conf"), "{").unwrap();
        let broken = with(&plain, FileKind::Conflist);
        assert!(Document::read(FileKind::Conflist, broken.as_bytes()).is_err(), "{broken}");
    }
}
