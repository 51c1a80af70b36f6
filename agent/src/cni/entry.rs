//! The mesh entry that every network of the node must carry, kept as the text it was given.

use super::edit;

/// Where the entry stands among the `plugins`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// After all others: linkerd-cni, istio-cni, consul-cni and kuma-cni all need the finished interface.
    #[default]
    Last,
    /// Appended when missing, but an entry that is there may stay where it is.
    Anywhere,
}

/// The entry to keep in every network. Two of them are equal when their JSON means the same.
#[derive(Clone, Debug)]
pub struct WantedEntry {
    text: String,
    plugin: String,
    place: Place,
}

/// Why a text is not a mesh entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// Not valid JSON, or not an object.
    #[error("the mesh entry is not a JSON object: {0}")]
    NotAnObject(String),
    /// `type` is missing, empty or not a plain file name.
    #[error("the mesh entry has no usable `type`: it must be the file name of a CNI plugin")]
    NoType,
    /// A list or whole config was given where one entry was expected.
    #[error("this is a whole network configuration without an entry of type {0}")]
    NotInList(String),
}

impl WantedEntry {
    /// An entry from the text of its JSON object; outer white space is cut, everything else is kept.
    pub fn from_text(text: &str, place: Place) -> Result<Self, EntryError> {
        let text = text.trim_matches([' ', '\t', '\r', '\n']);
        edit::check(text).map_err(|refusal| EntryError::NotAnObject(refusal.to_string()))?;
        let plugin = edit::plugin_type(text).ok_or(EntryError::NoType)?;
        if plugin.is_empty() || plugin.contains('/') || plugin.starts_with('.') {
            return Err(EntryError::NoType);
        }
        Ok(Self { text: text.to_owned(), plugin, place })
    }

    /// The entry's JSON object as it was given.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The entry's `type`: the file name of the plugin. Any entry of this type is the mesh's own.
    pub fn plugin(&self) -> &str {
        &self.plugin
    }

    /// Where it belongs.
    pub fn place(&self) -> Place {
        self.place
    }
}

impl PartialEq for WantedEntry {
    fn eq(&self, other: &Self) -> bool {
        self.place == other.place && edit::same(&self.text, &other.text)
    }
}
