//! The mesh entry that every network of the node must carry, kept as the text it was given.

use super::document::{Body, Document};
use super::edit;
use super::plan::FileKind;

/// Longest text of an entry, in bytes.
pub const MAX_ENTRY_BYTES: usize = 64 * 1024;
/// Deepest nesting of an entry; low enough that comparing entries needs little stack.
pub const MAX_ENTRY_DEPTH: usize = 64;
/// The one place-holder that Linkerd's installers replace in `CNI_NETWORK_CONFIG`.
pub const KUBECONFIG_PLACEHOLDER: &str = "__KUBECONFIG_FILEPATH__";

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
    versions: Option<Vec<String>>,
}

/// Why a text is not a mesh entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// Not valid JSON.
    #[error("the mesh entry cannot be read: {0}")]
    Json(String),
    /// Valid JSON, but not an object.
    #[error("the mesh entry is not a JSON object")]
    NotAnObject,
    /// `type` is missing, empty or not a plain file name.
    #[error("the mesh entry has no usable `type`: it must be the file name of a CNI plugin")]
    NoType,
    /// Larger than [`MAX_ENTRY_BYTES`] or deeper than [`MAX_ENTRY_DEPTH`].
    #[error(
        "the mesh entry is larger than {MAX_ENTRY_BYTES} bytes or nested deeper than {MAX_ENTRY_DEPTH} levels"
    )]
    TooLarge,
    /// A whole network was given, which has no such entry.
    #[error(
        "this network configuration has no entry of type {plugin}; give one that has, or the entry alone"
    )]
    NotInList {
        /// The plugin looked for.
        plugin: String,
    },
    /// A whole network was given, but not which of its plugins is the mesh's.
    #[error(
        "this is a whole network configuration: say which plugin of it is the mesh's, or give the entry alone"
    )]
    Ambiguous,
}

impl WantedEntry {
    /// An entry from the text of its JSON object; outer white space is cut, everything else is kept.
    pub fn from_text(text: &str, place: Place) -> Result<Self, EntryError> {
        let text = text.trim();
        if text.len() > MAX_ENTRY_BYTES {
            return Err(EntryError::TooLarge);
        }
        edit::check(text).map_err(|refusal| EntryError::Json(refusal.to_string()))?;
        if !text.starts_with('{') {
            return Err(EntryError::NotAnObject);
        }
        if edit::depth(text) > MAX_ENTRY_DEPTH {
            return Err(EntryError::TooLarge);
        }
        let plugin = edit::plugin_type(text).ok_or(EntryError::NoType)?;
        if plugin.contains(['/', '\0']) || plugin.starts_with('.') {
            return Err(EntryError::NoType);
        }
        Ok(Self { text: text.to_owned(), plugin, place, versions: None })
    }

    /// An entry from an installer's template (`CNI_NETWORK_CONFIG`): `__KUBECONFIG_FILEPATH__` becomes the kubeconfig's
    /// path on the host, and `cniVersion` goes, since a list's own version counts. Other place-holders of old
    /// manifests stay as they are; the plugins ignore them.
    pub fn from_template(template: &str, kubeconfig: &str, place: Place) -> Result<Self, EntryError> {
        // As it stands inside a JSON string.
        let quoted = serde_json::Value::from(kubeconfig).to_string();
        let escaped = quoted.trim_start_matches('"').strip_suffix('"').unwrap_or(&quoted);
        let text = template.trim().replace(KUBECONFIG_PLACEHOLDER, escaped);
        Self::from_text(&text, place)?;
        Self::from_text(&edit::without(&text, "cniVersion"), place)
    }

    /// An entry from a file given by the operator: the entry alone, or a whole list that has one of type `plugin`.
    pub fn from_file(text: &str, plugin: Option<&str>, place: Place) -> Result<Self, EntryError> {
        let is_list = edit::plugin_type(text).is_none()
            && edit::members(text).iter().any(|member| member.key == "plugins");
        match plugin {
            _ if !is_list => Self::from_text(text, place),
            None => Err(EntryError::Ambiguous),
            Some(plugin) => Self::learn(text.as_bytes(), plugin, place)
                .ok_or_else(|| EntryError::NotInList { plugin: plugin.to_owned() }),
        }
    }

    /// The entry of type `plugin` that a list carries: the last one, if there are several.
    pub fn learn(list: &[u8], plugin: &str, place: Place) -> Option<Self> {
        let document = Document::read(FileKind::Conflist, list).ok()?;
        let Body::List(plugins) = &document.body else { return None };
        let entry = plugins.iter().rev().find(|entry| entry.plugin == plugin)?;
        Self::from_text(entry.text, place).ok()
    }

    /// The spec versions that the plugin says it supports: no entry goes into a list of another version.
    #[must_use]
    pub fn with_versions(mut self, versions: Vec<String>) -> Self {
        self.versions = Some(versions);
        self
    }

    /// Whether the plugin supports a list of this `cniVersion`; true as long as the plugin was not asked.
    pub fn supports(&self, version: Option<&str>) -> bool {
        // Plugins read a missing version as 0.1.0 (`ConfigDecoder` in the CNI library).
        let version = version.filter(|version| !version.is_empty()).unwrap_or("0.1.0");
        self.versions.as_ref().is_none_or(|versions| versions.iter().any(|supported| supported == version))
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
        let Self { text, plugin: _, place, versions } = self;
        *place == other.place && *versions == other.versions && edit::same(text, &other.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates() {
        let template = r#" {"cniVersion":"0.3.0","name":"linkerd-cni", "type":"linkerd-cni","policy":
            {"k8s_api_root":"https://__KUBERNETES_SERVICE_HOST__"},"kubernetes":{"kubeconfig":"__KUBECONFIG_FILEPATH__"}} "#;
        let entry = WantedEntry::from_template(template, "/etc/cni/net.d/ZZZ-\"x\"", Place::Last).unwrap();
        assert_eq!(
            entry.text(),
            r#"{"name":"linkerd-cni", "type":"linkerd-cni","policy":
            {"k8s_api_root":"https://__KUBERNETES_SERVICE_HOST__"},"kubernetes":{"kubeconfig":"/etc/cni/net.d/ZZZ-\"x\""}}"#
        );
        assert_eq!(entry.plugin(), "linkerd-cni");
    }

    #[test]
    fn a_template_without_its_version_in_any_place() {
        for (template, expected) in [
            (r#"{"type":"m","cniVersion":"1"}"#, r#"{"type":"m"}"#),
            (r#"{"type":"m", "cniVersion":"1" , "a":1}"#, r#"{"type":"m" , "a":1}"#),
            (r#"{"cniVersion":"1","cniVersion":"2","type":"m"}"#, r#"{"type":"m"}"#),
            (r#"{"type":"m","x":{"cniVersion":"1"}}"#, r#"{"type":"m","x":{"cniVersion":"1"}}"#),
        ] {
            assert_eq!(WantedEntry::from_template(template, "", Place::Last).unwrap().text(), expected);
        }
    }

    #[test]
    fn what_is_no_entry() {
        let text = |text: &str| WantedEntry::from_text(text, Place::Last).unwrap_err();
        assert!(matches!(text("{"), EntryError::Json(_)));
        assert_eq!(text("[]"), EntryError::NotAnObject);
        for bad in ["{}", r#"{"type":""}"#, r#"{"type":1}"#, r#"{"type":"../sh"}"#, r#"{"type":"a\u0000"}"#] {
            assert_eq!(text(bad), EntryError::NoType, "{bad}");
        }
        let deep = format!(r#"{{"type":"m","x":{}{}}}"#, "[".repeat(64), "]".repeat(64));
        assert_eq!(text(&deep), EntryError::TooLarge);
        let long = format!(r#"{{"type":"m","x":"{}"}}"#, "x".repeat(MAX_ENTRY_BYTES));
        assert_eq!(text(&long), EntryError::TooLarge);
    }

    #[test]
    fn from_a_file_with_a_whole_list() {
        let list = r#"{"name":"n","plugins":[{"type":"a"},{"type":"m","x":1},{"type":"m","x":2.50}]}"#;
        let entry = WantedEntry::from_file(list, Some("m"), Place::Last).unwrap();
        assert_eq!(entry.text(), r#"{"type":"m","x":2.50}"#);
        let error = WantedEntry::from_file(list, Some("b"), Place::Last).unwrap_err();
        assert_eq!(error, EntryError::NotInList { plugin: "b".into() });
        assert_eq!(WantedEntry::from_file(list, None, Place::Last).unwrap_err(), EntryError::Ambiguous);
        assert!(WantedEntry::from_file(r#"{"type":"m"}"#, Some("other"), Place::Last).is_ok());
    }

    #[test]
    fn versions() {
        let entry = WantedEntry::from_text(r#"{"type":"m"}"#, Place::Last).unwrap();
        assert!(entry.supports(Some("9.9.9")), "not asked yet");
        let entry = entry.with_versions(vec!["0.1.0".into(), "1.0.0".into()]);
        assert!(entry.supports(Some("1.0.0")) && entry.supports(None) && !entry.supports(Some("1.1.0")));
    }
}
