//! What is known of each config file, from the last look at it.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::Serialize;

use super::super::discover::{self, Directory, Listed, Look, Runtime};
use super::super::drop_in;
use super::super::plan::{FileKind, Leave};
use super::super::refusal::Refusal;
use super::super::window::Protection;

/// A file that does not parse for this long was probably left like that.
pub(super) const UNFINISHED: Duration = Duration::from_secs(10);

/// What the last look at a file said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Judged {
    Fine(Leave),
    Refused(Refusal),
}

impl Judged {
    fn label(&self) -> &'static str {
        match self {
            Self::Fine(leave) => leave.label(),
            Self::Refused(refusal) => refusal.label(),
        }
    }

    fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::Fine(_) => None,
            Self::Refused(refusal) => Some(refusal),
        }
    }
}

/// The state of one config file.
#[derive(Clone, Debug)]
pub(super) struct FileState {
    /// What it holds; `None` when it cannot be read or is no config.
    pub bytes: Option<Bytes>,
    pub judged: Judged,
    pub since: Instant,
    /// This agent put it in place, and nobody has changed it since.
    pub ours: bool,
    pub writes: u64,
    /// The refusal was reported.
    pub reported: bool,
}

/// One config file in a [`super::Snapshot`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileReport {
    /// Its name.
    pub name: String,
    /// `satisfied` and the like, or the reason of a refusal.
    pub state: &'static str,
    /// The refusal's sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Seconds since it is in this state.
    pub seconds: u64,
    /// Times that this agent put it in place.
    pub writes: u64,
    /// It was last written by `nobypass`, or by an `other` program.
    pub by: &'static str,
    /// Patches that another writer undid, when that is a fight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub undone: Option<u32>,
}

/// All config files.
#[derive(Debug, Default)]
pub(super) struct Files {
    states: BTreeMap<OsString, FileState>,
    /// Names that are symbolic links: a change of any other name may be one of theirs.
    pub links: Vec<OsString>,
    /// The active file as it was at the last evaluation, which needs no second one.
    evaluated: Option<(OsString, Bytes, Protection)>,
}

impl Files {
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    pub fn names(&self) -> impl Iterator<Item = &OsString> {
        self.states.keys()
    }

    pub fn remove(&mut self, name: &OsStr) {
        if self.states.remove(name).is_some() {
            self.evaluated = None;
        }
    }

    /// Forgets the evaluation, since another entry is wanted.
    pub fn wanted_changed(&mut self) {
        self.evaluated = None;
    }

    /// Notes what a look at a file showed. True when it is a refusal that was not there before.
    pub fn set(&mut self, name: &OsStr, bytes: Option<Bytes>, judged: Judged, now: Instant) -> bool {
        let refused = judged.refusal().is_some();
        let Some(state) = self.states.get_mut(name) else {
            let state = FileState { bytes, judged, since: now, ours: false, writes: 0, reported: !refused };
            self.states.insert(name.to_owned(), state);
            return refused;
        };
        let same = state.judged.label() == judged.label();
        if !same {
            state.since = now;
            state.reported = !refused;
        }
        state.ours &= state.bytes == bytes;
        state.bytes = bytes;
        state.judged = judged;
        refused && !same
    }

    /// Notes a patch.
    pub fn wrote(&mut self, name: &OsStr, writes: u32) {
        if let Some(state) = self.states.get_mut(name) {
            state.ours = true;
            state.writes += u64::from(writes);
        }
    }

    /// Files that are refused for long enough to say so, each once.
    pub fn overdue(&mut self, now: Instant) -> Vec<(OsString, Refusal)> {
        let mut overdue = Vec::new();
        for (name, state) in &mut self.states {
            let Some(refusal) = state.judged.refusal() else { continue };
            if !state.reported && now.saturating_duration_since(state.since) >= UNFINISHED {
                state.reported = true;
                overdue.push((name.clone(), refusal.clone()));
            }
        }
        overdue
    }

    /// When [`overdue`](Self::overdue) may have something to say.
    pub fn next_overdue(&self) -> Option<Instant> {
        let waiting =
            self.states.values().filter(|state| state.judged.refusal().is_some() && !state.reported);
        waiting.map(|state| state.since + UNFINISHED).min()
    }

    /// Marks a refusal as reported.
    pub fn reported(&mut self, name: &OsStr) {
        if let Some(state) = self.states.get_mut(name) {
            state.reported = true;
        }
    }

    /// What new pods get, as far as files can tell, and which file decides.
    /// With a directory, its drop-in files count.
    pub fn protection(
        &mut self,
        runtime: Runtime,
        look: Option<Look<'_>>,
        drop_ins: Option<&Path>,
    ) -> (Protection, Option<OsString>) {
        let active = self.first_loadable(runtime);
        let Some((name, Some(bytes))) = active else { return (Protection::NoNetwork, None) };
        if let Some((known, content, protection)) = &self.evaluated
            && known == name
            && content == bytes
            && drop_ins.is_none()
        {
            return (*protection, Some(name.clone()));
        }
        let name = name.clone();
        let Some(look) = look else { return (Protection::Unprotected, Some(name)) };
        let kind = FileKind::of(&name).unwrap_or(FileKind::Conflist);
        let loaded = drop_ins.map_or_else(|| bytes.clone(), |dir| drop_in::effective(dir, kind, bytes));
        let alone = Listed { name: name.clone(), content: Ok(loaded) };
        let found = discover::discover(std::slice::from_ref(&alone), runtime, look);
        if found.active().is_none() {
            return (Protection::NoNetwork, None);
        }
        if found.delegate.is_some() {
            // What counts is in other files, which may change without this one.
            return (protection(&self.directory(runtime, look)), Some(name));
        }
        let protection = protection(&found);
        self.evaluated = Some((name.clone(), bytes.clone(), protection));
        (protection, Some(name))
    }

    /// The bytes of a file.
    pub fn bytes(&self, name: &OsStr) -> Option<&Bytes> {
        self.states.get(name)?.bytes.as_ref()
    }

    /// The file that the runtime takes: for containerd the first, for CRI-O the first that it can load.
    fn first_loadable(&self, runtime: Runtime) -> Option<(&OsString, Option<&Bytes>)> {
        // Runtimes skip directories.
        let skipped = |state: &FileState| state.judged.refusal() == Some(&Refusal::NotRegular);
        let mut configs = self
            .states
            .iter()
            .filter(|(_, state)| !skipped(state))
            .map(|(name, state)| (name, state.bytes.as_ref()));
        match runtime {
            Runtime::Containerd => configs.next(),
            Runtime::Crio => configs.find(|(_, bytes)| bytes.is_some()),
        }
    }

    fn directory(&self, runtime: Runtime, look: Look<'_>) -> Directory {
        let content = |state: &FileState| match (&state.bytes, state.judged.refusal()) {
            (Some(bytes), _) => Ok(bytes.clone()),
            (None, refusal) => Err(refusal.cloned().unwrap_or(Refusal::Empty)),
        };
        let listed: Vec<_> = self
            .states
            .iter()
            .filter(|(name, _)| FileKind::of(name).is_some())
            .map(|(name, state)| Listed { name: name.clone(), content: content(state) })
            .collect();
        discover::discover(&listed, runtime, look)
    }

    pub fn reports(&self, now: Instant, undone: impl Fn(&OsStr) -> Option<u32>) -> Vec<FileReport> {
        let report = |(name, state): (&OsString, &FileState)| FileReport {
            name: name.to_string_lossy().into_owned(),
            state: state.judged.label(),
            why: state.judged.refusal().map(ToString::to_string),
            seconds: now.saturating_duration_since(state.since).as_secs(),
            writes: state.writes,
            by: if state.ours { "nobypass" } else { "other" },
            undone: undone(name),
        };
        self.states.iter().map(report).collect()
    }
}

fn protection(directory: &Directory) -> Protection {
    match (directory.active().is_some(), directory.protected()) {
        (false, _) => Protection::NoNetwork,
        (true, true) => Protection::Protected,
        (true, false) => Protection::Unprotected,
    }
}
