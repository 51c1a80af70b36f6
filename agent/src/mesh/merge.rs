//! Profiles from several places.

use std::collections::BTreeSet;

use super::profile::{Profile, Profiles};

impl Profiles {
    /// The profile of this name.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<&Profile> {
        self.0.iter().find(|profile| *profile.name == *name)
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
}
