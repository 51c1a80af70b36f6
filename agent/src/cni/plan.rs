//! What to do with one CNI config file, decided from its bytes alone.
//!
//! Pure and idempotent: planning the bytes of a [`Plan::Write`] gives [`Leave::Satisfied`].

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use bytes::Bytes;

use super::document::{Body, Document, Plugin};
use super::edit;
use super::entry::{Place, WantedEntry};
use super::layout::{Layout, line_end};
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
    /// The entry is in a drop-in file, so that a list carries none (default: no).
    pub drop_in: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { convert: true, clean_meta: false, drop_in: false }
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
    let document = match Document::read(kind, bytes) {
        Ok(document) => document,
        Err(refusal) => return Plan::Refuse(refusal),
    };
    let own = |plugin: &Plugin<'_>| plugin.plugin == wanted.plugin();
    let mut others = document.plugins().iter().filter(|plugin| !own(plugin)).peekable();
    if others.peek().is_none() {
        return Plan::Leave(Leave::OnlyMesh);
    }
    if others.clone().all(Plugin::is_loopback) {
        return Plan::Leave(Leave::Loopback);
    }
    let meta = others.any(Plugin::is_meta);
    let plan = match &document.body {
        Body::List(plugins) if meta && options.clean_meta => {
            remove(&document, plugins, own, Leave::MetaPlugin)
        }
        _ if meta => Plan::Leave(Leave::MetaPlugin),
        Body::List(plugins) if options.drop_in => remove(&document, plugins, own, Leave::Satisfied),
        Body::List(plugins) => chain(&document, plugins, wanted),
        Body::Single(_) if !options.convert => Plan::Leave(Leave::SinglePlugin),
        Body::Single(plugin) => convert(&document, plugin, wanted, options.drop_in),
    };
    let entry_goes_in = match plan {
        Plan::Write(_) | Plan::Convert(_) => true,
        Plan::Leave(Leave::Satisfied) => options.drop_in,
        _ => false,
    };
    if entry_goes_in && !meta && !document.supported_by(wanted) {
        let version = document.version.unwrap_or_else(|| "(none)".to_owned());
        return Plan::Refuse(Refusal::Version { version, plugin: wanted.plugin().to_owned() });
    }
    plan
}

/// Decides how to take the agent's entries out of a file of this kind again; every other byte stays.
///
/// A file made of nothing but entries is left ([`Leave::OnlyMesh`]): without them it would not be valid.
pub fn unplan(kind: FileKind, bytes: &[u8], which: Remove<'_>) -> Plan {
    let document = match Document::read(kind, bytes) {
        Ok(document) => document,
        Err(refusal) => return Plan::Refuse(refusal),
    };
    let own = |plugin: &Plugin<'_>| match which {
        Remove::Exactly(wanted) => edit::same(plugin.text, wanted.text()),
        Remove::Type(name) => plugin.plugin == name,
    };
    if document.plugins().iter().all(own) {
        return Plan::Leave(Leave::OnlyMesh);
    }
    match &document.body {
        Body::List(plugins) => remove(&document, plugins, own, Leave::Satisfied),
        Body::Single(_) => Plan::Leave(Leave::Satisfied),
    }
}

/// As [`unplan`] of exactly this entry, but where it took the place of another writer's (by the network's name), that one
/// comes back.
pub fn give_back(
    kind: FileKind,
    bytes: &[u8],
    ours: &WantedEntry,
    replaced: &BTreeMap<String, String>,
) -> Plan {
    let own = |plugin: &Plugin<'_>| edit::same(plugin.text, ours.text());
    let alike = |plugin: &&Plugin<'_>| plugin.plugin == ours.plugin();
    let unplan = || unplan(kind, bytes, Remove::Exactly(ours));
    let Ok(document) = Document::read(kind, bytes) else { return unplan() };
    let Body::List(plugins) = &document.body else { return unplan() };
    let usable = |text: &&String| {
        WantedEntry::from_text(text, ours.place()).is_ok_and(|entry| entry.plugin() == ours.plugin())
    };
    let theirs = replaced.get(&document.name).filter(usable);
    let (Some(theirs), Some(first)) = (theirs, plugins.iter().position(own)) else { return unplan() };
    if plugins.iter().all(own) || plugins.iter().filter(alike).any(|plugin| !own(plugin)) {
        return unplan();
    }
    let kept: Vec<_> = (0..)
        .zip(plugins)
        .filter(|(at, plugin)| *at == first || !own(plugin))
        .map(|(at, _)| (at, (at == first).then_some(theirs.as_str())))
        .collect();
    finish(rebuild(document.text, plugins, &kept), |written| {
        let mut alike = written.iter().filter(alike);
        alike.next().is_some_and(|entry| edit::same(entry.text, theirs)) && alike.next().is_none()
    })
}

/// The name of a file's network.
pub fn network(kind: FileKind, bytes: &[u8]) -> Option<String> {
    Document::read(kind, bytes).ok().map(|document| document.name)
}

/// The name of a list's network, and its entries of this plugin; `None` for what is no list.
pub fn entries<'a>(kind: FileKind, bytes: &'a [u8], plugin: &str) -> Option<(String, Vec<&'a str>)> {
    let document = Document::read(kind, bytes).ok()?;
    let Body::List(plugins) = document.body else { return None };
    let own = plugins.iter().filter(|entry| entry.plugin == plugin).map(|entry| entry.text).collect();
    Some((document.name, own))
}

/// The list without its own entries.
fn remove(
    document: &Document<'_>,
    plugins: &[Plugin<'_>],
    own: impl Fn(&Plugin<'_>) -> bool,
    done: Leave,
) -> Plan {
    if !plugins.iter().any(&own) {
        return Plan::Leave(done);
    }
    let kept: Vec<_> =
        (0..).zip(plugins).filter(|(_, plugin)| !own(plugin)).map(|(at, _)| (at, None)).collect();
    finish(rebuild(document.text, plugins, &kept), |written| !written.iter().any(&own))
}

/// The list with exactly one equal entry in its place.
fn chain(document: &Document<'_>, plugins: &[Plugin<'_>], wanted: &WantedEntry) -> Plan {
    let own = |at: usize| plugins.get(at).is_some_and(|plugin| plugin.plugin == wanted.plugin());
    let equal = |at: usize| plugins.get(at).is_some_and(|plugin| edit::same(plugin.text, wanted.text()));
    let last = plugins.len() - 1;
    // The entry that stays where it is, if any.
    let stays = match wanted.place() {
        Place::Last => own(last).then_some(last),
        Place::Anywhere => {
            let mut own = (0..=last).rev().filter(|at| own(*at));
            own.clone().find(|at| equal(*at)).or_else(|| own.next())
        }
    };
    if stays.is_some_and(equal) && (0..=last).filter(|at| own(*at)).count() == 1 {
        return Plan::Leave(Leave::Satisfied);
    }
    let neighbour = (0..=last).rev().find(|at| !own(*at)).and_then(|at| plugins.get(at));
    let text = neighbour.map_or_else(String::new, |neighbour| {
        Layout::of(document.text, neighbour.span.start, neighbour.text).write(wanted.text())
    });
    let mut kept: Vec<(usize, Option<&str>)> =
        (0..=last).filter(|at| !own(*at)).map(|at| (at, None)).collect();
    match stays {
        Some(at) => kept.push((at, (!equal(at)).then_some(text.as_str()))),
        None => kept.push((APPENDED, Some(&text))),
    }
    kept.sort_by_key(|(at, _)| *at);
    finish(rebuild(document.text, plugins, &kept), |written| satisfied(written, wanted))
}

/// Whether exactly one equal entry stands in its place.
fn satisfied(plugins: &[Plugin<'_>], wanted: &WantedEntry) -> bool {
    let mut own = (0..).zip(plugins).filter(|(_, plugin)| plugin.plugin == wanted.plugin());
    let (Some((at, entry)), None) = (own.next(), own.next()) else { return false };
    let placed = wanted.place() == Place::Anywhere || at + 1 == plugins.len();
    placed && edit::same(entry.text, wanted.text())
}

/// Stands for a new element after all others in [`rebuild`].
const APPENDED: usize = usize::MAX;

/// The file's text with these elements of `plugins` in this order, each as it was or with another text. What stands
/// before the first and after the last element stays, and each element keeps what stands before it.
fn rebuild(text: &str, plugins: &[Plugin<'_>], kept: &[(usize, Option<&str>)]) -> Option<String> {
    let (first, last) = (plugins.first()?, plugins.last()?);
    let between =
        |at: usize| text.get(plugins.get(at.checked_sub(1)?)?.span.end..plugins.get(at)?.span.start);
    let mut out = String::with_capacity(text.len() + 1024);
    out.push_str(text.get(..first.span.start)?);
    for (nth, (at, new)) in kept.iter().enumerate() {
        let old = plugins.get(*at);
        if nth > 0 {
            match between(*at) {
                Some(separator) => out.push_str(separator),
                None => {
                    // New: separated as the last two are, or as the only one is from its bracket.
                    let lead = between(plugins.len() - 1).map_or_else(
                        || {
                            let before = text.get(..first.span.start).unwrap_or_default();
                            let lead = before.get(before.trim_end().len()..).unwrap_or_default();
                            format!(",{lead}")
                        },
                        str::to_owned,
                    );
                    out.push_str(&lead);
                }
            }
        }
        out.push_str(new.or(old.map(|old| old.text))?);
    }
    out.push_str(text.get(last.span.end..)?);
    Some(out)
}

/// Turns a single-plugin file into a list that carries the entry, unless that is in a drop-in file.
fn convert(document: &Document<'_>, plugin: &Plugin<'_>, wanted: &WantedEntry, drop_in: bool) -> Plan {
    if document.name.is_empty() {
        return Plan::Refuse(Refusal::Field { key: "name", problem: "missing" });
    }
    // Keys that differ in case alone may mean another plugin inside of a list.
    let meant = |written: &[Plugin<'_>]| {
        let entry = if drop_in { written.len() == 1 } else { satisfied(written, wanted) };
        entry && written.first().is_some_and(|first| first.plugin == plugin.plugin)
    };
    match finish(Some(list_text(document, plugin, (!drop_in).then_some(wanted))), meant) {
        Plan::Write(list) => Plan::Convert(list),
        other => other,
    }
}

/// The single plugin as a list: its name and version move up, its other members stay as they are.
fn list_text(document: &Document<'_>, plugin: &Plugin<'_>, entry: Option<&WantedEntry>) -> String {
    let end = line_end(document.text);
    let members = edit::members(plugin.text);
    let moves = |key: &str| ["cniversion", "name"].iter().any(|name| edit::folds_to(key, name));
    let mut out = format!("{{{end}");
    for (key, name) in [("cniVersion", "cniversion"), ("name", "name")] {
        let set = |member: &&edit::Member<'_>| edit::folds_to(&member.key, name) && member.value != "null";
        if let Some(member) = members.iter().rev().find(set) {
            out.push_str(&format!("  \"{key}\": {},{end}", member.value));
        }
    }
    let inner: Vec<&str> = members
        .iter()
        .filter(|member| !moves(&member.key))
        .filter_map(|member| plugin.text.get(member.span.clone()))
        .collect();
    let layout = Layout::pretty("    ", end);
    let mut plugins = layout.write(&format!("{{{}}}", inner.join(",")));
    if let Some(entry) = entry {
        plugins.push_str(&format!(",{end}    {}", layout.write(entry.text())));
    }
    out.push_str(&format!("  \"plugins\": [{end}    {plugins}{end}  ]{end}}}{end}"));
    out
}

/// Whether a list without mesh entry is what [`plan`] makes of this single-plugin file: its owner has not changed it.
pub fn is_list_of(list: &[u8], original: &[u8]) -> bool {
    let (Ok(list), Ok(document)) = (std::str::from_utf8(list), Document::read(FileKind::Conf, original))
    else {
        return false;
    };
    match &document.body {
        Body::Single(plugin) => {
            edit::check(list).is_ok() && edit::same(list, &list_text(&document, plugin, None))
        }
        Body::List(_) => false,
    }
}

/// Lets only a text out that reads back as what was meant.
fn finish(text: Option<String>, meant: impl Fn(&[Plugin<'_>]) -> bool) -> Plan {
    let Some(text) = text else { return Plan::Refuse(Refusal::SelfCheck) };
    match Document::read(FileKind::Conflist, text.as_bytes()) {
        Ok(written) if meant(written.plugins()) => Plan::Write(Bytes::from(text)),
        Err(refusal @ (Refusal::TooLarge { .. } | Refusal::TooDeep)) => Plan::Refuse(refusal),
        _ => Plan::Refuse(Refusal::SelfCheck),
    }
}
