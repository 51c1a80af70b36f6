//! Which file of a CNI directory the container runtime really loads, and why: decided from names and contents alone.
//!
//! containerd takes the files in byte order of their names and stops at the first error: then there is no network at
//! all (<https://github.com/containerd/go-cni/blob/3dbce1d/opts.go>, `loadFromConfDir`). CRI-O skips what it cannot
//! load and takes the next (<https://github.com/cri-o/ocicni/blob/18fd1eb/pkg/ocicni/ocicni.go>, `loadNetworks`).
//! `10-x.conf` sorts before `10-x.conflist`, so the single plugin wins.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;

use bytes::Bytes;

use super::document::{Document, Plugin};
use super::edit;
use super::entry::{Place, WantedEntry};
use super::plan::FileKind;
use super::refusal::Refusal;

/// A cilium agent with `cni-exclusive` renames every other config to this ending.
pub const CILIUM_BACKUP: &str = ".cilium_bak";

/// One name in the directory, as it was read. Directories are not listed: libcni skips them.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Its name.
    pub name: OsString,
    /// Its content, or why there is none. Only needed for config names.
    pub content: Result<Bytes, Refusal>,
}

/// The container runtime's way to choose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Runtime {
    /// containerd: the first file, or nothing.
    #[default]
    Containerd,
    /// CRI-O: the first file that can be loaded.
    Crio,
}

/// The mesh entry in one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryState {
    /// Exactly one, in its place, and equal to the wanted one where that is known.
    Good,
    /// None.
    Missing,
    /// One, but it differs from the wanted one.
    Outdated,
    /// One, but not in its place.
    Misplaced,
    /// Several: the plugin would run more than once.
    Duplicated,
    /// The file cannot be read.
    Unknown,
}

impl EntryState {
    /// Bounded label for metrics and JSON.
    pub fn label(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Missing => "missing",
            Self::Outdated => "outdated",
            Self::Misplaced => "misplaced",
            Self::Duplicated => "duplicated",
            Self::Unknown => "unknown",
        }
    }
}

/// What a file is to the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// The network of new pods.
    Active,
    /// The active file is a meta-plugin that delegates to this one.
    Delegate,
    /// The runtime stops at this file, so that there is no network.
    Blocks,
    /// Cannot be loaded, and is not needed for now.
    Broken,
    /// Loads, but this other file comes first.
    Standby {
        /// The file that comes first.
        behind: OsString,
    },
    /// Renamed away by cilium's exclusive mode.
    Backup,
}

impl Role {
    /// Bounded label for metrics and JSON.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Delegate => "delegate",
            Self::Blocks => "blocks",
            Self::Broken => "broken",
            Self::Standby { .. } => "standby",
            Self::Backup => "backup",
        }
    }
}

/// One config file.
#[derive(Clone, Debug)]
pub struct ConfigFile {
    /// Its name.
    pub name: OsString,
    /// What it is to the runtime.
    pub role: Role,
    /// Why it cannot be loaded.
    pub problem: Option<Refusal>,
    /// The network's name.
    pub network: Option<String>,
    /// Its `cniVersion`.
    pub version: Option<String>,
    /// The plugins' types in their order.
    pub plugins: Vec<String>,
    /// The mesh entry in it.
    pub entry: EntryState,
}

/// Where a meta-plugin gets the pod network from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delegate {
    /// A file of the directory.
    File(OsString),
    /// A copy inside of the meta-plugin's own file. multus makes it again when the file it copied changes.
    Copy {
        /// The file of the directory that was copied, if it is there.
        of: Option<OsString>,
        /// The mesh entry in the copy, which is what new pods get.
        entry: EntryState,
    },
    /// Something else, such as a custom resource.
    Elsewhere(String),
}

/// The directory as the runtime sees it.
#[derive(Clone, Debug)]
pub struct Directory {
    /// Every config file, in the runtime's order; then cilium's backups.
    pub files: Vec<ConfigFile>,
    /// The active file's delegate, when that is a meta-plugin.
    pub delegate: Option<Delegate>,
    /// One sentence: which file is active, and why.
    pub why: String,
    /// What new pods get: the entry of the active file, or of the file it delegates to; `None` without a network.
    pub entry: Option<EntryState>,
}

impl Directory {
    /// The active file.
    pub fn active(&self) -> Option<&ConfigFile> {
        self.files.iter().find(|file| file.role == Role::Active)
    }

    /// Whether a pod created now gets the mesh's plugin, as far as files can tell.
    pub fn protected(&self) -> bool {
        self.entry == Some(EntryState::Good)
    }

    /// Whether cilium's exclusive mode has renamed files away here.
    pub fn cilium_exclusive(&self) -> bool {
        self.files.iter().any(|file| file.role == Role::Backup)
    }
}

/// The mesh entry to look for.
#[derive(Clone, Copy, Debug)]
pub enum Look<'a> {
    /// This one.
    For(&'a WantedEntry),
    /// Any of this plugin type, after all others: the wanted one is not known.
    Type(&'a str),
}

impl Look<'_> {
    fn state(self, plugins: &[Plugin<'_>]) -> EntryState {
        let (name, place) = match self {
            Self::For(wanted) => (wanted.plugin(), wanted.place()),
            Self::Type(name) => (name, Place::Last),
        };
        let mut own = (1..).zip(plugins).filter(|(_, plugin)| plugin.plugin == name);
        match (own.next(), own.next()) {
            (None, _) => EntryState::Missing,
            (_, Some(_)) => EntryState::Duplicated,
            (Some((at, _)), None) if place == Place::Last && at < plugins.len() => EntryState::Misplaced,
            (Some((_, entry)), None) => match self {
                Self::For(wanted) if !edit::same(entry.text, wanted.text()) => EntryState::Outdated,
                _ => EntryState::Good,
            },
        }
    }
}

/// The plugin types of the meshes that nobypass knows.
pub const MESH_PLUGINS: [&str; 4] = ["linkerd-cni", "istio-cni", "consul-cni", "kuma-cni"];

/// The entry that some list carries already, and that list's name: of type `plugin`, or of any mesh when that is not
/// given. A list that has it in its place comes first, then the runtime's order.
pub fn learn(listed: &[Listed], plugin: Option<&str>, place: Place) -> Option<(WantedEntry, OsString)> {
    let plugins = plugin.map_or_else(|| MESH_PLUGINS.to_vec(), |plugin| vec![plugin]);
    let lists = listed.iter().filter(|file| FileKind::of(&file.name) == Some(FileKind::Conflist));
    let mut found: Vec<_> = lists
        .filter_map(|file| Some((&file.name, file.content.as_ref().ok()?)))
        .flat_map(|(name, bytes)| plugins.iter().map(move |plugin| (name, bytes, *plugin)))
        .filter_map(|(name, bytes, plugin)| {
            let document = Document::read(FileKind::Conflist, bytes).ok()?;
            let meta = document.plugins().iter().any(Plugin::is_meta);
            let state = Look::Type(plugin).state(document.plugins());
            let entry = WantedEntry::learn(bytes, plugin, place).filter(|_| !meta)?;
            Some((state != EntryState::Good, name, entry))
        })
        .collect();
    found.sort_by(|a, b| (a.0, a.1.as_bytes()).cmp(&(b.0, b.1.as_bytes())));
    found.into_iter().next().map(|(_, name, entry)| (entry, name.clone()))
}

/// Says which of these files is active for `runtime`, and in what state the mesh entry is.
pub fn discover(listed: &[Listed], runtime: Runtime, look: Look<'_>) -> Directory {
    let mut listed: Vec<&Listed> = listed.iter().collect();
    listed.sort_by(|a, b| a.name.as_bytes().cmp(b.name.as_bytes()));
    let mut files: Vec<ConfigFile> =
        listed.iter().filter_map(|file| Some(read(file, FileKind::of(&file.name)?, look))).collect();
    let first = match runtime {
        Runtime::Containerd => files.first(),
        Runtime::Crio => files.iter().find(|file| file.problem.is_none()),
    };
    let first = first.map(|file| (file.name.clone(), file.problem.is_none()));
    let active = first.as_ref().filter(|(_, loads)| *loads).map(|(name, _)| name.clone());
    let delegate = active.as_ref().and_then(|name| {
        let content = listed.iter().find(|file| file.name == *name)?.content.as_ref().ok()?;
        delegate(FileKind::of(name)?, content, &files, look)
    });
    let entry_of = |name: &OsStr| files.iter().find(|file| file.name == name).map(|file| file.entry);
    let entry = match (&active, &delegate) {
        (None, _) => None,
        (_, Some(Delegate::File(name))) => entry_of(name),
        (_, Some(Delegate::Copy { entry, .. })) => Some(*entry),
        (_, Some(Delegate::Elsewhere(_))) => Some(EntryState::Unknown),
        (Some(name), None) => entry_of(name),
    };
    let why = why(&files, first.as_ref().map(|(name, _)| name.as_os_str()));
    let target = match &delegate {
        Some(Delegate::File(name) | Delegate::Copy { of: Some(name), .. }) => Some(name),
        _ => None,
    };
    for file in &mut files {
        file.role = match &first {
            Some((name, true)) if *name == file.name => Role::Active,
            Some((name, false)) if *name == file.name => Role::Blocks,
            _ if target == Some(&file.name) => Role::Delegate,
            Some((name, _)) if file.problem.is_none() => Role::Standby { behind: name.clone() },
            _ => Role::Broken,
        };
    }
    let backups = listed.iter().filter(|file| file.name.as_bytes().ends_with(CILIUM_BACKUP.as_bytes()));
    files.extend(backups.map(|file| ConfigFile::new(&file.name, Role::Backup)));
    Directory { files, delegate, why, entry }
}

impl ConfigFile {
    fn new(name: &OsStr, role: Role) -> Self {
        Self {
            name: name.to_owned(),
            role,
            problem: None,
            network: None,
            version: None,
            plugins: Vec::new(),
            entry: EntryState::Unknown,
        }
    }
}

fn read(file: &Listed, kind: FileKind, look: Look<'_>) -> ConfigFile {
    let document = file.content.as_ref().map_err(Clone::clone).and_then(|bytes| Document::read(kind, bytes));
    let mut report = ConfigFile::new(&file.name, Role::Broken);
    match document {
        Err(refusal) => report.problem = Some(refusal),
        Ok(document) => {
            report.entry = look.state(document.plugins());
            report.plugins = document.plugins().iter().map(|plugin| plugin.plugin.clone()).collect();
            report.network = Some(document.name).filter(|name| !name.is_empty());
            report.version = document.version;
        }
    }
    report
}

/// Where the meta-plugin in this file, if there is one, delegates to.
fn delegate(kind: FileKind, bytes: &[u8], files: &[ConfigFile], look: Look<'_>) -> Option<Delegate> {
    let document = Document::read(kind, bytes).ok()?;
    let meta = document.plugins().iter().find(|plugin| plugin.is_meta())?;
    let members = edit::members(meta.text);
    let find = |name: &str| members.iter().rev().find(|member| edit::folds_to(&member.key, name));
    let known = |name: &str| files.iter().find(|file| file.network.as_deref() == Some(name));
    if let Some(network) = find("clusternetwork").filter(|member| member.value.starts_with('"')) {
        // A path, or a network's name (multus-cni docs/configuration.md, `clusterNetwork`).
        let network = edit::string(network.value).into_owned();
        let base = network.rsplit('/').next().unwrap_or_default();
        let file = files.iter().find(|file| file.name.as_bytes() == base.as_bytes());
        let file = file.or_else(|| known(&network)).map(|file| file.name.clone());
        return Some(file.map_or(Delegate::Elsewhere(network), Delegate::File));
    }
    let Some(delegates) = find("delegates").map(|member| member.value) else {
        return Some(Delegate::Elsewhere(format!("{} of {}", document.name, meta.plugin)));
    };
    let Some(first) = edit::elements(delegates).first().and_then(|span| delegates.get(span.clone())) else {
        return Some(Delegate::Elsewhere("nothing: `delegates` is empty".to_owned()));
    };
    let name = edit::members(first).into_iter().rev().find(|member| member.key == "name");
    let name = name.map(|member| edit::string(member.value).into_owned()).unwrap_or_default();
    let entry = [FileKind::Conflist, FileKind::Conf]
        .iter()
        .find_map(|kind| Document::read(*kind, first.as_bytes()).ok())
        .map_or(EntryState::Unknown, |document| look.state(document.plugins()));
    let of = known(&name).filter(|_| name != document.name).map(|file| file.name.clone());
    Some(Delegate::Copy { of, entry })
}

fn why(files: &[ConfigFile], first: Option<&OsStr>) -> String {
    let Some((at, file)) = files.iter().enumerate().find(|(_, file)| Some(file.name.as_os_str()) == first)
    else {
        return match files {
            [] => "no network: there is no file that a container runtime reads".to_owned(),
            _ => "no network: no file can be loaded".to_owned(),
        };
    };
    let name = file.name.to_string_lossy();
    match (&file.problem, at) {
        (Some(problem), _) => format!("no network: {name} sorts first and cannot be loaded: {problem}"),
        (None, 0) => format!("{name} sorts first"),
        (None, _) => format!("{name} is the first that can be loaded"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"name":"good","plugins":[{"type":"calico"},{"type":"m"}]}"#;
    const BARE: &str = r#"{"name":"bare","plugins":[{"type":"calico"}]}"#;

    fn list(files: &[(&str, &str)]) -> Vec<Listed> {
        let file = |(name, text): &(&str, &str)| Listed {
            name: (*name).into(),
            content: match *text {
                "dangling" => Err(Refusal::Symlink),
                "fifo" => Err(Refusal::NotRegular),
                text => Ok(Bytes::copy_from_slice(text.as_bytes())),
            },
        };
        files.iter().map(file).collect()
    }

    fn look(files: &[(&str, &str)], runtime: Runtime) -> Directory {
        discover(&list(files), runtime, Look::Type("m"))
    }

    /// What was seen with containerd 2.4 and read in CRI-O: order, first error, endings.
    #[test]
    fn which_file_is_active() {
        use Runtime::{Containerd, Crio};
        let conf = r#"{"name":"c","type":"bridge"}"#;
        // Files, then the active one for containerd and for CRI-O.
        type Row<'a> = (&'a [(&'a str, &'a str)], Option<&'a str>, Option<&'a str>);
        let a = Some("10-a.conflist");
        let table: &[Row<'_>] = &[
            (&[], None, None),
            (
                &[("10-a.conflist", GOOD), ("05-b.conflist", BARE)],
                Some("05-b.conflist"),
                Some("05-b.conflist"),
            ),
            (&[("10-a.conflist", GOOD), ("10-a.conf", conf)], Some("10-a.conf"), Some("10-a.conf")),
            (&[("10-a.conflist", GOOD), ("05.json", conf)], Some("05.json"), Some("05.json")),
            (&[("10-a.conflist", GOOD), ("05.conflist", "")], None, a),
            (&[("10-a.conflist", GOOD), ("05.conf", GOOD)], None, a),
            (&[("10-a.conflist", GOOD), ("05.conflist", "dangling")], None, a),
            (&[("10-a.conflist", GOOD), ("99.conflist", "{")], a, a),
            (&[("10-a.conflist", GOOD), ("05.conflist", "fifo")], None, a),
            (&[("10-a.conflist", GOOD), (".05.conflist", BARE)], Some(".05.conflist"), Some(".05.conflist")),
            (&[("05.conflist", "{"), ("06.conflist", "\u{feff}{}")], None, None),
            (&[("10-a.conflist", GOOD), ("05.conflist.tmp", "{"), ("README", "x")], a, a),
            (&[("9-a.conflist", GOOD), ("10-a.conflist", GOOD)], a, a),
        ];
        for (files, containerd, crio) in table {
            for (runtime, expected) in [(Containerd, containerd), (Crio, crio)] {
                let found = look(files, runtime);
                let active = found.active().map(|file| file.name.to_string_lossy().into_owned());
                assert_eq!(active.as_deref(), *expected, "{files:?} {runtime:?}");
                assert_eq!(found.entry.is_some(), expected.is_some());
                assert_eq!(found.why.starts_with("no network"), expected.is_none(), "{}", found.why);
            }
        }
    }

    #[test]
    fn what_the_others_are() {
        let files = [
            ("05.conflist", "{"),
            ("10.conflist", GOOD),
            ("20.conflist", "["),
            ("3.conflist.cilium_bak", GOOD),
        ];
        let found = look(&files, Runtime::Containerd);
        let roles: Vec<_> =
            found.files.iter().map(|file| (file.name.to_str().unwrap(), file.role.label())).collect();
        let expected = ["blocks", "standby", "broken", "backup"];
        assert_eq!(
            roles,
            files.iter().zip(expected).map(|((name, _), role)| (*name, role)).collect::<Vec<_>>()
        );
        assert!(found.cilium_exclusive() && !found.protected());
        assert!(
            found.why.contains("05.conflist") && found.why.contains("middle of its JSON"),
            "{}",
            found.why
        );
    }

    #[test]
    fn the_entry_s_state() {
        let wanted = WantedEntry::from_text(r#"{"type":"m","v":1}"#, Place::Last).unwrap();
        for (plugins, by_type, exact) in [
            (r#"{"type":"a"}"#, EntryState::Missing, EntryState::Missing),
            (r#"{"type":"a"},{"type":"m","v":1}"#, EntryState::Good, EntryState::Good),
            (r#"{"type":"a"},{"type":"m","v":2}"#, EntryState::Good, EntryState::Outdated),
            (r#"{"type":"m","v":1},{"type":"a"}"#, EntryState::Misplaced, EntryState::Misplaced),
            (r#"{"type":"m"},{"type":"m","v":1}"#, EntryState::Duplicated, EntryState::Duplicated),
        ] {
            let text = format!(r#"{{"name":"n","plugins":[{plugins}]}}"#);
            let files = list(&[("1.conflist", &text)]);
            assert_eq!(discover(&files, Runtime::Crio, Look::Type("m")).entry, Some(by_type), "{plugins}");
            assert_eq!(discover(&files, Runtime::Crio, Look::For(&wanted)).entry, Some(exact), "{plugins}");
        }
    }

    #[test]
    fn an_entry_is_learnt_from_a_list_that_has_it_right() {
        let learnt = |files: &[(&str, &str)], plugin| {
            learn(&list(files), plugin, Place::Last)
                .map(|(entry, name)| (entry.text().to_owned(), name.into_string().unwrap()))
        };
        let listed = |plugins: &str| format!(r#"{{"name":"n","plugins":[{plugins}]}}"#);
        let misplaced = listed(r#"{"type":"istio-cni","v":1},{"type":"a"}"#);
        let good = listed(r#"{"type":"a"},{"type":"istio-cni","v":2}"#);
        let multus = listed(r#"{"type":"multus"},{"type":"istio-cni","v":3}"#);
        let files = [
            ("00.conflist", &*multus),
            ("10.conflist", &*misplaced),
            ("20.conflist", &*good),
            ("5.conflist", "{"),
        ];
        let expected = Some((r#"{"type":"istio-cni","v":2}"#.to_owned(), "20.conflist".to_owned()));
        assert_eq!(learnt(&files, None), expected);
        assert_eq!(learnt(&files, Some("istio-cni")), expected);
        assert_eq!(learnt(&files, Some("linkerd-cni")), None);
        assert_eq!(learnt(&files[..2], None).unwrap().1, "10.conflist");
    }

    /// linkerd2#11250: with multus in front, its delegate's entry is what counts.
    #[test]
    fn multus_and_its_delegate() {
        let shim =
            r#"{"name":"m","type":"multus-shim","clusterNetwork":"/host/etc/cni/net.d/10-canal.conflist"}"#;
        let by_name = shim.replace("/host/etc/cni/net.d/10-canal.conflist", "good");
        for text in [shim, &by_name] {
            let found = look(&[("00-multus.conf", text), ("10-canal.conflist", GOOD)], Runtime::Containerd);
            assert_eq!(found.delegate, Some(Delegate::File("10-canal.conflist".into())));
            assert!(found.protected());
            assert_eq!(found.files[1].role, Role::Delegate);
        }
        let found = look(&[("00-multus.conf", shim), ("10-other.conflist", BARE)], Runtime::Containerd);
        assert!(matches!(found.delegate, Some(Delegate::Elsewhere(_))) && !found.protected());
        // A copy that is older than its file: pods get the copy.
        let copy =
            format!(r#"{{"name":"mx","type":"multus","delegates":[{}]}}"#, BARE.replace("bare", "good"));
        let found = look(&[("00-multus.conf", &copy), ("10-canal.conflist", GOOD)], Runtime::Containerd);
        let of = Some("10-canal.conflist".into());
        assert_eq!(found.delegate, Some(Delegate::Copy { of, entry: EntryState::Missing }));
        assert!(!found.protected());
        let copy = format!(r#"{{"name":"mx","type":"multus","delegates":[{GOOD}]}}"#);
        assert!(look(&[("00-multus.conf", &copy)], Runtime::Containerd).protected());
        let none = r#"{"name":"mx","type":"multus","delegates":[]}"#;
        assert!(!look(&[("00-multus.conf", none)], Runtime::Containerd).protected());
    }
}
