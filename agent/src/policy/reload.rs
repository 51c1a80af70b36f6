//! The policy file as it comes and goes: the last good one holds. No tasks here; somebody says when to look.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use nobypass_common::ids::Mode;
use serde::Serialize;

use super::check::{self, Problem};
use super::effective::Effective;
use super::file::PolicyFile;
use crate::config::Config;
use crate::mesh::Profiles;

/// Larger files are no policies.
const LARGEST: u64 = 1 << 20;
/// So many problems are told in one line of the log.
const TOLD: usize = 3;

/// Why a file does not become the policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// It cannot be read.
    #[error("cannot read the policy {}: {reason}", path.display())]
    Read { path: PathBuf, reason: String },
    /// It says something wrong.
    #[error("the policy {} is not valid: {}", path.display(), told(problems))]
    Invalid { path: PathBuf, problems: Vec<Problem> },
}

fn told(problems: &[Problem]) -> String {
    let mut told: Vec<String> = problems.iter().take(TOLD).map(ToString::to_string).collect();
    if problems.len() > TOLD {
        told.push(format!("and {} more", problems.len() - TOLD));
    }
    told.join("; ")
}

/// The policy in force, and how it came to be.
#[derive(Clone, Debug)]
pub struct PolicyState {
    /// Grows with each change.
    pub revision: u64,
    /// What holds.
    pub effective: Arc<Effective>,
    /// Mesh profiles, the ones to try first in front.
    pub profiles: Arc<Profiles>,
    /// The file, if there is one.
    pub path: Option<PathBuf>,
    /// When the one in force was read.
    pub loaded_at: SystemTime,
    /// Why the file as it is now is not in force.
    pub problem: Option<PolicyError>,
    /// Files taken since the start, the first one included.
    pub taken: u64,
    /// Files refused since the start.
    pub refused: u64,
}

/// [`PolicyState`] for people and machines: `nobypass policy show`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Shown {
    /// The file.
    pub file: Option<PathBuf>,
    /// When the one in force was read, in seconds since 1970.
    pub loaded_at: u64,
    /// Why the file as it is now is not in force.
    pub problem: Option<String>,
    /// What holds.
    pub policy: Effective,
    /// Names of the mesh profiles, the ones to try first in front.
    pub profiles: Vec<Box<str>>,
}

impl PolicyState {
    /// See [`Shown`].
    pub fn shown(&self) -> Shown {
        let loaded_at =
            self.loaded_at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Shown {
            file: self.path.clone(),
            loaded_at,
            problem: self.problem.as_ref().map(ToString::to_string),
            policy: Effective::clone(&self.effective),
            profiles: self.profiles.as_slice().iter().map(|profile| profile.name.clone()).collect(),
        }
    }
}

/// What a look at the file found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// Nothing new.
    Same,
    /// It is another one now, and valid.
    Changed,
    /// It cannot be used; the last good one holds.
    Refused(PolicyError),
}

/// See the module.
#[derive(Debug)]
pub struct Loader {
    flags: Config,
    /// Those of `--profiles` and the built-in ones.
    profiles: Profiles,
    /// What the last look found, to say each thing once.
    seen: Result<String, PolicyError>,
    file: PolicyFile,
    hand: Option<Mode>,
    state: PolicyState,
}

impl Loader {
    /// Reads the file that the flags name, if they name one.
    ///
    /// # Errors
    /// [`PolicyError`]: to start with less than what was asked for would be silent.
    pub fn start(flags: &Config, profiles: Profiles) -> Result<Self, PolicyError> {
        let (seen, file) = match &flags.policy {
            None => (String::new(), PolicyFile::default()),
            Some(path) => {
                let text = read(path)?;
                let file = parse(path, &text)?;
                (text, file)
            }
        };
        let state = PolicyState {
            revision: 1,
            effective: Arc::new(Effective::new(flags, &file, None)),
            profiles: Arc::new(joined(&profiles, &file)),
            path: flags.policy.clone(),
            loaded_at: SystemTime::now(),
            problem: None,
            taken: u64::from(flags.policy.is_some()),
            refused: 0,
        };
        Ok(Self { flags: flags.clone(), profiles, seen: Ok(seen), file, hand: None, state })
    }

    /// The policy in force.
    pub fn state(&self) -> &PolicyState {
        &self.state
    }

    /// Looks at the file. One that is taken ends what was set by hand.
    pub fn look(&mut self) -> Look {
        let Some(path) = self.flags.policy.clone() else { return Look::Same };
        let seen = read(&path);
        if seen == self.seen {
            return Look::Same;
        }
        let parsed = seen.as_ref().map_err(Clone::clone).and_then(|text| parse(&path, text));
        self.seen = seen;
        match parsed {
            Ok(file) => {
                self.file = file;
                self.hand = None;
                self.state.problem = None;
                self.state.taken += 1;
                self.state.loaded_at = SystemTime::now();
                self.state.profiles = Arc::new(joined(&self.profiles, &self.file));
                self.renew();
                Look::Changed
            }
            Err(error) => {
                self.state.problem = Some(error.clone());
                self.state.refused += 1;
                Look::Refused(error)
            }
        }
    }

    /// Sets the node's mode until the next policy is taken; `None` ends that.
    pub fn by_hand(&mut self, mode: Option<Mode>) {
        self.hand = mode;
        self.renew();
    }

    fn renew(&mut self) {
        self.state.revision += 1;
        self.state.effective = Arc::new(Effective::new(&self.flags, &self.file, self.hand));
    }
}

fn joined(profiles: &Profiles, file: &PolicyFile) -> Profiles {
    // They were checked with the file.
    profiles.clone().preceded_by(file.profiles.clone()).unwrap_or_else(|_| profiles.clone())
}

fn parse(path: &Path, text: &str) -> Result<PolicyFile, PolicyError> {
    check::parse(text).map_err(|problems| PolicyError::Invalid { path: path.into(), problems })
}

/// The file's text.
///
/// # Errors
/// [`PolicyError::Read`].
pub fn read(path: &Path) -> Result<String, PolicyError> {
    let error = |reason: String| PolicyError::Read { path: path.into(), reason };
    let text = || -> io::Result<String> {
        let mut text = String::new();
        let file = File::open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is no file"));
        }
        file.take(LARGEST + 1).read_to_string(&mut text)?;
        Ok(text)
    };
    let text = text().map_err(|source| error(source.to_string()))?;
    if u64::try_from(text.len()).is_ok_and(|len| len > LARGEST) {
        return Err(error("it is larger than 1 MiB".into()));
    }
    Ok(text)
}

#[cfg(test)]
mod tests;
