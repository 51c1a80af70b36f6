//! What the agent must still know after a restart, in one hidden file of the CNI directory, which survives whatever the
//! configs survive: the entry that was learned, the entries that it installed, and those of others that they replaced.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::edit;
use super::entry::{MAX_ENTRY_BYTES, WantedEntry};
use super::put::{clean, put};
use super::runtime::equipped::Places;

/// The file's name.
pub const NAME: &str = ".nobypass-state";

/// Own entries remembered: one for each change of the template, the newest count.
const INSTALLED: usize = 8;
/// Networks with a replaced entry; a node has one or two.
const REPLACED: usize = 64;
/// Room for as many entries of the largest size.
const MAX_BYTES: u64 = ((INSTALLED + REPLACED) * 2 * MAX_ENTRY_BYTES) as u64;

/// What is remembered.
#[derive(Clone, Debug, Default)]
pub enum Remember {
    /// Nothing.
    #[default]
    Nothing,
    /// The learned entry; whether its mesh is still installed is seen at these places.
    Learned(Places),
    /// Entries of others that installed ones replaced.
    Replaced,
}

/// What the file holds. Entries are texts, as they stood.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct State {
    /// The entry that was kept last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learned: Option<String>,
    /// The agent's own, newest last: none of them is anyone else's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub installed: Vec<String>,
    /// The entry is in drop-in files, and lists carry none.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub drop_in: bool,
    /// By the network's name, which its owner keeps when it writes the file anew.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub replaced: BTreeMap<String, String>,
}

impl State {
    /// Reads it; empty when there is none, or none that can be read.
    pub fn load(dir: &Path) -> Self {
        match read(&dir.join(NAME)) {
            Ok(state) => state,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::default(),
            Err(error) => {
                let path = dir.join(NAME);
                tracing::warn!(file = %path.display(), %error, "what an earlier agent knew of the CNI entry is lost");
                Self::default()
            }
        }
    }

    /// Whether nobypass installed this entry, or an older version of nobypass' own.
    fn is_own(&self, entry: &str) -> bool {
        self.installed.iter().any(|own| edit::same(own, entry))
    }

    /// The state once `wanted` is in the config of this network, in place of the entries `found`; `None` when it stays
    /// as it is.
    pub fn with(&self, network: &str, found: &[&str], wanted: &WantedEntry) -> Option<Self> {
        let mut next = self.clone();
        if !self.is_own(wanted.text()) {
            next.installed.push(wanted.text().to_owned());
            let surplus = next.installed.len().saturating_sub(INSTALLED);
            next.installed.drain(..surplus);
        }
        let foreign = |entry: &&&str| !edit::same(entry, wanted.text()) && !self.is_own(entry);
        match found.iter().rev().find(foreign) {
            Some(entry) if next.replaced.len() < REPLACED || next.replaced.contains_key(network) => {
                next.replaced.insert(network.to_owned(), (*entry).to_owned());
            }
            Some(_) => {}
            // Its owner has written it without any since.
            None if found.is_empty() => {
                next.replaced.remove(network);
            }
            None => {}
        }
        (next != *self).then_some(next)
    }

    /// Writes it, so that it is there after a power cut too.
    pub fn save(&self, dir: &Path) -> io::Result<()> {
        if *self == Self::default() {
            return remove(dir);
        }
        let text = serde_json::to_string(self).map_err(io::Error::other)?;
        put(dir, OsStr::new(NAME), 0o600, |file| file.write_all(text.as_bytes()))
    }
}

fn read(path: &Path) -> io::Result<State> {
    if !fs::symlink_metadata(path)?.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    let mut text = String::new();
    File::open(path)?.take(MAX_BYTES).read_to_string(&mut text)?;
    serde_json::from_str(&text).map_err(io::Error::other)
}

/// Removes the file, if there is one.
pub fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_file(dir.join(NAME)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The state of one directory, on disk before it counts.
#[derive(Debug)]
pub struct Memory {
    dir: PathBuf,
    state: State,
}

impl Memory {
    /// Reads what is there. Hold the directory's lock.
    pub fn open(dir: &Path) -> Self {
        if let Err(error) = clean(dir) {
            tracing::debug!(%error, "cannot look for files of an earlier agent");
        }
        Self { dir: dir.to_owned(), state: State::load(dir) }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What is remembered.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Remembers this from now on, or fails and remembers what was.
    pub fn set(&mut self, state: State) -> io::Result<()> {
        state.save(&self.dir)?;
        self.state = state;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::entry::Place;
    use super::*;

    const OURS: &str = r#"{"type":"m","v":2}"#;
    const OLDER: &str = r#"{"type":"m","v":1}"#;
    const THEIRS: &str = r#"{"type":"m", "theirs": 1.50}"#;

    fn wanted(text: &str) -> WantedEntry {
        WantedEntry::from_text(text, Place::Last).unwrap()
    }

    fn state(installed: &[&str], replaced: &[(&str, &str)]) -> State {
        State {
            learned: None,
            drop_in: false,
            installed: installed.iter().map(ToString::to_string).collect(),
            replaced: replaced.iter().map(|(net, text)| ((*net).to_owned(), (*text).to_owned())).collect(),
        }
    }

    #[test]
    fn what_an_entry_replaces() {
        let spaced = r#"{ "v":1,"type":"m" }"#;
        for (before, found, expected) in [
            (state(&[], &[]), &[][..], Some(state(&[OURS], &[]))),
            (state(&[], &[]), &[THEIRS], Some(state(&[OURS], &[("n", THEIRS)]))),
            // The last of several, as it was the last to run.
            (state(&[OURS], &[]), &[OLDER, THEIRS], Some(state(&[OURS], &[("n", THEIRS)]))),
            // An older one of our own is not somebody else's, in any spelling.
            (state(&[OLDER], &[]), &[spaced], Some(state(&[OLDER, OURS], &[]))),
            (state(&[OURS], &[("n", THEIRS)]), &[OURS], None),
            (state(&[OURS], &[("n", THEIRS)]), &[THEIRS], None),
            // Written anew by its owner: no entry was replaced in what is there now.
            (state(&[OURS], &[("n", THEIRS), ("o", OLDER)]), &[], Some(state(&[OURS], &[("o", OLDER)]))),
        ] {
            assert_eq!(before.with("n", found, &wanted(OURS)), expected, "{before:?} {found:?}");
        }
    }

    #[test]
    fn it_does_not_grow_for_ever() {
        let mut state = State::default();
        for n in 0..200 {
            let ours = wanted(&format!(r#"{{"type":"m","v":{n}}}"#));
            state = state.with(&format!("net{n}"), &[THEIRS], &ours).unwrap();
        }
        assert_eq!((state.installed.len(), state.replaced.len()), (INSTALLED, REPLACED));
        assert_eq!(state.installed.last().map(String::as_str), Some(r#"{"type":"m","v":199}"#));
    }

    #[test]
    fn it_survives_a_restart_and_damage_is_no_failure() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(State::load(dir.path()), State::default());
        let mut memory = Memory::open(dir.path());
        let full = State { learned: Some(OURS.to_owned()), ..state(&[OURS], &[("n", THEIRS)]) };
        memory.set(full.clone()).unwrap();
        assert_eq!(State::load(dir.path()), full);
        let path = dir.path().join(NAME);
        for damaged in [&b""[..], b"{", b"[]", b"{\"learned\":1}", b"\xff\xfe", b"{\"replaced\":[]}"] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(State::load(dir.path()), State::default(), "{damaged:?}");
        }
        // Of a later version.
        fs::write(&path, r#"{"learned":"x","more":1}"#).unwrap();
        assert_eq!(State::load(dir.path()).learned.as_deref(), Some("x"));
        memory.set(State::default()).unwrap();
        assert!(!path.exists());
        fs::create_dir(&path).unwrap();
        assert_eq!(State::load(dir.path()), State::default());
        assert!(memory.set(full).is_err());
        assert_eq!(memory.state(), &State::default(), "what is not on disk does not count");
    }
}
