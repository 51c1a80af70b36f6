//! Where profiles come from.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use serde::Deserialize;

use super::{marker::Wish, profile::Profile};
use crate::pods::model::{Keys, Wanted};

/// The built-in ones, the ones to try first in front: a mesh with a sidecar claims a pod before one without.
const BUILT_IN: [(&str, &str); 5] = [
    ("linkerd", include_str!("builtin/linkerd.yaml")),
    ("istio-sidecar", include_str!("builtin/istio-sidecar.yaml")),
    ("istio-ambient", include_str!("builtin/istio-ambient.yaml")),
    ("consul", include_str!("builtin/consul.yaml")),
    ("kuma", include_str!("builtin/kuma.yaml")),
];

/// Why profiles cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file cannot be read.
    #[error("cannot read the mesh profiles in {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The file is not a list of profiles.
    #[error("the mesh profiles in {path} are not valid: {reason}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        reason: String,
    },
    /// A profile makes no sense.
    #[error("mesh profile `{name}` in {path}: {reason}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The profile.
        name: Box<str>,
        /// What is wrong.
        reason: String,
    },
}

/// The file given by `--profiles`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    profiles: Vec<Profile>,
}

/// What the parser says first, `line 2 column 11: …`; the picture of the place that follows is for a terminal, not for
/// a log.
pub(super) fn one_line(error: &str) -> String {
    let first = error.lines().next().unwrap_or_default();
    first.strip_prefix("error: ").unwrap_or(first).to_owned()
}

/// All profiles in use, the ones to try first in front.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Profiles(Vec<Profile>);

impl Profiles {
    /// The built-in profiles.
    #[must_use]
    pub fn built_in() -> Self {
        static ALL: LazyLock<Vec<Profile>> =
            LazyLock::new(|| BUILT_IN.iter().filter_map(parse_built_in).collect());
        Self(ALL.clone())
    }

    /// The profiles in the file at `path` (YAML or JSON: `profiles: [...]`), then the built-in ones. A profile with a
    /// built-in one's name takes its place.
    ///
    /// # Errors
    /// [`ProfileError`]; it names the file, and the line or the profile.
    pub fn load(path: &Path) -> Result<Self, ProfileError> {
        let text =
            fs::read_to_string(path).map_err(|source| ProfileError::Read { path: path.into(), source })?;
        Self::parse(path, &text)
    }

    /// As [`Profiles::load`], of a text that was read already; `path` is for messages.
    ///
    /// # Errors
    /// [`ProfileError`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, ProfileError> {
        let File { profiles } = serde_saphyr::from_str(text).map_err(|error| ProfileError::Parse {
            path: path.into(),
            reason: one_line(&error.to_string()),
        })?;
        Self::with(path, profiles)
    }

    /// These profiles, then the built-in ones, with the same rules; for a file that has profiles among other things.
    /// `path` is for messages.
    ///
    /// # Errors
    /// [`ProfileError::Invalid`].
    pub fn with(path: &Path, profiles: Vec<Profile>) -> Result<Self, ProfileError> {
        let invalid = |(name, reason)| ProfileError::Invalid { path: path.into(), name, reason };
        Self::built_in().preceded_by(profiles).map_err(invalid)
    }

    /// These profiles with others before them; one with the same name takes the other's place.
    ///
    /// # Errors
    /// The name of a profile that makes no sense, and why.
    pub fn preceded_by(self, mut first: Vec<Profile>) -> Result<Self, (Box<str>, String)> {
        let mut names = BTreeSet::new();
        for profile in &first {
            profile.check().map_err(|reason| (profile.name.clone(), reason))?;
            if !names.insert(profile.name.clone()) {
                return Err((profile.name.clone(), "there are two of this name".to_owned()));
            }
        }
        first.extend(self.0.into_iter().filter(|profile| !names.contains(&profile.name)));
        Ok(Self(first))
    }

    /// The profiles in the order in which they are tried.
    #[must_use]
    pub fn as_slice(&self) -> &[Profile] {
        &self.0
    }

    /// The profile of this name.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<&Profile> {
        self.0.iter().find(|profile| &*profile.name == name)
    }

    /// What any of them reads of pods, for a source to keep.
    #[must_use]
    pub fn wanted(&self) -> Wanted {
        let mut wanted = Wanted::default();
        for profile in &self.0 {
            for wish in profile.wishes() {
                let (keys, name) = match wish {
                    Wish::Key(key) => (&mut wanted.keys, key),
                    Wish::Container(name) => (&mut wanted.containers, name),
                    Wish::Env(name) => (&mut wanted.env, name),
                };
                keys.extend([name]);
            }
        }
        wanted.keys.extend(super::recognise::OWN_KEYS);
        wanted
    }

    /// Of [`Profiles::wanted`] the labels and annotations.
    #[must_use]
    pub fn keys(&self) -> Keys {
        self.wanted().keys
    }
}

/// A built-in profile; a test makes sure that all of them can be read.
fn parse_built_in((name, text): &(&str, &str)) -> Option<Profile> {
    match serde_saphyr::from_str(text) {
        Ok(profile) => Some(profile),
        Err(error) => {
            tracing::error!(profile = name, %error, "a built-in mesh profile cannot be read");
            None
        }
    }
}

#[cfg(test)]
mod tests;
