//! What to do with one CNI config file, decided from its bytes alone.
//!
//! Pure and idempotent: planning the bytes of a [`Plan::Write`] gives [`Leave::Satisfied`].

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use bytes::Bytes;

use super::entry::WantedEntry;
use super::refusal::Refusal;

/// Larger files are refused: 1 MiB.
pub const MAX_BYTES: usize = 1 << 20;
/// Deepest nesting that Go's `encoding/json`, and so libcni, accepts.
pub const MAX_DEPTH: usize = 10_000;

const ASIDE_SUFFIX: &str = ".nobypass-original";

/// How runtimes read a file, by the end of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// `.conf`: one plugin.
    Conf,
    /// `.json`: one plugin, as `.conf`.
    Json,
    /// `.conflist`: a list.
    Conflist,
}

impl FileKind {
    /// The kind of a file name; `None` for everything that runtimes do not read: other endings, `*.cilium_bak`,
    /// the agent's own temporary files. A hidden `.x.conf` *is* read, as libcni looks at the ending alone
    /// (<https://github.com/containernetworking/cni/blob/1c6a4cc49dc36456babaf0835e4a7f7d71ced9b4/libcni/conf.go>,
    /// `ConfFiles`), so the agent's own names never end like this.
    pub fn of(name: &OsStr) -> Option<Self> {
        let name = name.as_encoded_bytes();
        let dot = name.iter().rposition(|byte| *byte == b'.')?;
        match name.get(dot..)? {
            b".conf" => Some(Self::Conf),
            b".json" => Some(Self::Json),
            b".conflist" => Some(Self::Conflist),
            _ => None,
        }
    }
}

/// The name of the list made from a single-plugin file: `10-x.conf` gives `10-x.conflist`, which sorts directly after
/// it. `None` when `name` is not a single-plugin name.
pub fn list_name(name: &OsStr) -> Option<OsString> {
    if !matches!(FileKind::of(name)?, FileKind::Conf | FileKind::Json) {
        return None;
    }
    let mut list = PathBuf::from(name).file_stem()?.to_owned();
    list.push(".conflist");
    Some(list)
}

/// The hidden name under which a converted single-plugin file is kept until uninstall: `10-x.conf` is kept as
/// `.10-x.conf.nobypass-original`.
pub fn aside_name(name: &OsStr) -> OsString {
    let mut aside = OsString::from(".");
    aside.push(name);
    aside.push(ASIDE_SUFFIX);
    aside
}

/// The opposite of [`aside_name`].
pub fn original_name(aside: &OsStr) -> Option<OsString> {
    let name = aside.as_bytes().strip_prefix(b".")?.strip_suffix(ASIDE_SUFFIX.as_bytes())?;
    let name = OsStr::from_bytes(name);
    list_name(name).map(|_| name.to_owned())
}

/// What to do with a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Nothing.
    Leave(Leave),
    /// Replace the file's content by this; only the mesh entry differs.
    Write(Bytes),
    /// The file holds a single plugin: put this list under [`list_name`], then move the file aside to
    /// [`aside_name`]. Until that move the single plugin is still the active one, so there is no gap.
    Convert(Bytes),
    /// Do not touch it until it changes.
    Refuse(Refusal),
}

/// Why a readable file needs no edit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Leave {
    /// Exactly one equal entry, in its place (after [`unplan`]: none).
    Satisfied,
    /// A single plugin that may not be converted: pods of this network are not protected.
    SinglePlugin,
    /// A list of loopback plugins only: not a pod network.
    Loopback,
    /// A meta-plugin (multus and the like): the file it delegates to carries the entry.
    MetaPlugin,
    /// Holds nothing but the mesh entry: not a network either.
    OnlyMesh,
}

impl Leave {
    /// Bounded label for metrics and JSON.
    pub fn label(self) -> &'static str {
        match self {
            Self::Satisfied => "satisfied",
            Self::SinglePlugin => "single_plugin",
            Self::Loopback => "loopback",
            Self::MetaPlugin => "meta_plugin",
            Self::OnlyMesh => "only_mesh",
        }
    }
}

/// What the operator allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Turn single-plugin files into lists (default); some owners look for their `.conf`.
    pub convert: bool,
    /// Take the entry out of meta-plugin files (default: no, since a mesh's own installer would put it back).
    pub clean_meta: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { convert: true, clean_meta: false }
    }
}

/// Which entries [`unplan`] takes out.
#[derive(Clone, Copy, Debug)]
pub enum Remove<'a> {
    /// Entries that mean the same as this one: what this agent wrote, and nothing of anyone else.
    Exactly(&'a WantedEntry),
    /// Every entry of this plugin type.
    Type(&'a str),
}

/// Decides what to do with a file of this kind that holds `bytes`, so that it carries exactly the wanted entry.
pub fn plan(kind: FileKind, bytes: &[u8], wanted: &WantedEntry, options: Options) -> Plan {
    let _ = (kind, bytes, wanted, options);
    Plan::Refuse(Refusal::SelfCheck)
}

/// Decides how to take the agent's entries out of a file of this kind again; every other byte stays.
pub fn unplan(kind: FileKind, bytes: &[u8], remove: Remove<'_>) -> Plan {
    let _ = (kind, bytes, remove);
    Plan::Refuse(Refusal::SelfCheck)
}
