//! A CNI config file as libcni reads it, with the place of every plugin in its text.
//!
//! The rules are those of `NetworkConfFromBytes` and `NetworkPluginConfFromBytes` in libcni
//! (<https://github.com/containernetworking/cni/blob/1c6a4cc49dc36456babaf0835e4a7f7d71ced9b4/libcni/conf.go>). A list
//! is decoded into a map, so `plugins` and `name` are matched exactly and the last of two wins; a single plugin is
//! decoded into a struct, so its `type` and `name` are matched without regard to case. Field types that no edit
//! depends on (`disableCheck`, `ipam`, `dns` …) are not judged: versions of libcni differ there.

use std::ops::Range;

use super::edit::{self, Field, Origin};
use super::entry::WantedEntry;
use super::plan::{FileKind, MAX_BYTES};
use super::refusal::Refusal;

/// A file that has the shape of a network.
#[derive(Clone, Debug)]
pub struct Document<'a> {
    /// The whole text.
    pub text: &'a str,
    /// The network's name; empty where a single plugin has none.
    pub name: String,
    /// `cniVersion`, where there is one.
    pub version: Option<String>,
    /// Whether there is a `cniVersions`, out of which libcni picks the version itself (libcni ≥ 1.2).
    pub negotiates: bool,
    /// A list or a single plugin.
    pub body: Body<'a>,
}

/// What the file holds.
#[derive(Clone, Debug)]
pub enum Body<'a> {
    /// `plugins`, at least one.
    List(Vec<Plugin<'a>>),
    /// One plugin: the whole file.
    Single(Plugin<'a>),
}

/// One plugin's object.
#[derive(Clone, Debug)]
pub struct Plugin<'a> {
    /// Its object's text.
    pub text: &'a str,
    /// Where that is in the file.
    pub span: Range<usize>,
    /// Its `type`, never empty.
    pub plugin: String,
}

impl Plugin<'_> {
    /// Whether it calls other networks' plugins instead of making an interface: multus, and whatever names
    /// `delegates` or a `clusterNetwork`.
    pub fn is_meta(&self) -> bool {
        let names =
            |name: &str| edit::members(self.text).iter().any(|member| edit::folds_to(&member.key, name));
        matches!(self.plugin.as_str(), "multus" | "multus-shim")
            || names("delegates")
            || names("clusternetwork")
    }

    /// Whether it is the loopback plugin, which is no pod network.
    pub fn is_loopback(&self) -> bool {
        self.plugin == "loopback"
    }
}

impl<'a> Document<'a> {
    /// The plugins in their order; one for a single-plugin file.
    pub fn plugins(&self) -> &[Plugin<'a>] {
        match &self.body {
            Body::List(plugins) => plugins,
            Body::Single(plugin) => std::slice::from_ref(plugin),
        }
    }

    /// Whether the entry's plugin can run in this network, as far as that is known.
    pub fn supported_by(&self, wanted: &WantedEntry) -> bool {
        self.negotiates || wanted.supports(self.version.as_deref())
    }

    /// Reads a file of this kind.
    pub fn read(kind: FileKind, bytes: &'a [u8]) -> Result<Self, Refusal> {
        let text = text(bytes)?;
        match kind {
            FileKind::Conflist => list(text),
            FileKind::Conf | FileKind::Json => single(text),
        }
    }
}

/// The text of a file, if it is one JSON object.
fn text(bytes: &[u8]) -> Result<&str, Refusal> {
    if bytes.len() > MAX_BYTES {
        return Err(Refusal::TooLarge { bytes: bytes.len() as u64 });
    }
    if bytes.iter().all(|byte| b" \t\r\n".contains(byte)) {
        return Err(Refusal::Empty);
    }
    if [&b"\xef\xbb\xbf"[..], b"\xfe\xff", b"\xff\xfe"].iter().any(|mark| bytes.starts_with(mark)) {
        return Err(Refusal::Bom);
    }
    let text = std::str::from_utf8(bytes).map_err(|error| match error.error_len() {
        None => Refusal::Incomplete,
        Some(_) => Refusal::NotUtf8 { at: error.valid_up_to() },
    })?;
    edit::check(text)?;
    if text.trim_start().starts_with('{') { Ok(text) } else { Err(Refusal::NotAnObject) }
}

fn list(text: &str) -> Result<Document<'_>, Refusal> {
    let members = edit::members(text);
    // The last of equal keys, as in a Go map.
    let find = |key: &str| members.iter().rev().find(|member| member.key == key);
    let string = |key: &'static str| match find(key).map(|member| member.value) {
        None => Ok(None),
        Some(value) if value.starts_with('"') => Ok(Some(edit::string(value).into_owned())),
        Some(_) => Err(Refusal::Field { key, problem: "not a string" }),
    };
    let name = string("name")?.ok_or(Refusal::Field { key: "name", problem: "missing" })?;
    let version = string("cniVersion")?;
    let array = find("plugins").ok_or(Refusal::Field { key: "plugins", problem: "missing" })?;
    if !array.value.starts_with('[') {
        return Err(Refusal::Field { key: "plugins", problem: "not an array" });
    }
    let plugin = |span: Range<usize>| {
        let span = array.value_span.start + span.start..array.value_span.start + span.end;
        let text = text.get(span.clone()).unwrap_or_default();
        if !text.starts_with('{') {
            return Err(Refusal::Field { key: "plugins[]", problem: "not an object" });
        }
        Ok(Plugin { text, span, plugin: plugin_type(text, Origin::Element, "plugins[].type")? })
    };
    let plugins = edit::elements(array.value).into_iter().map(plugin).collect::<Result<Vec<_>, _>>()?;
    if plugins.is_empty() {
        return Err(Refusal::NoPlugins);
    }
    let negotiates = find("cniVersions").is_some();
    Ok(Document { text, name, version, negotiates, body: Body::List(plugins) })
}

fn single(text: &str) -> Result<Document<'_>, Refusal> {
    let start = text.len() - text.trim_start().len();
    let object = text.trim();
    let plugin = match plugin_type(object, Origin::File, "type") {
        Ok(plugin) => plugin,
        Err(_) if edit::members(object).iter().any(|member| member.key == "plugins") => {
            return Err(Refusal::ListInConf);
        }
        Err(refusal) => return Err(refusal),
    };
    let string = |key: &'static str, name: &str| match edit::field(object, name, Origin::File) {
        Field::Missing => Ok(None),
        Field::Text(text) => Ok(Some(text)),
        Field::Wrong => Err(Refusal::Field { key, problem: "not a string" }),
    };
    let name = string("name", "name")?.unwrap_or_default();
    let version = string("cniVersion", "cniversion")?;
    let plugin = Plugin { text: object, span: start..start + object.len(), plugin };
    Ok(Document { text, name, version, negotiates: false, body: Body::Single(plugin) })
}

fn plugin_type(object: &str, origin: Origin, key: &'static str) -> Result<String, Refusal> {
    match edit::field(object, "type", origin) {
        Field::Text(text) if !text.is_empty() => Ok(text),
        Field::Text(_) => Err(Refusal::Field { key, problem: "empty" }),
        Field::Missing => Err(Refusal::Field { key, problem: "missing" }),
        Field::Wrong => Err(Refusal::Field { key, problem: "not a string" }),
    }
}
