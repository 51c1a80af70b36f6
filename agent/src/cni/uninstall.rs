//! Takes everything of the agent off a node again, in the order that keeps pods working: entries, a grace time for
//! calls that are under way, then kubeconfig and binary. As long as any config names the plugin, the files it needs
//! stay: an entry without its binary makes even the deletion of pods fail.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, RenameFlags};

use super::drop_in;
use super::edit;
use super::entry::WantedEntry;
use super::lock::{self, DirLock, MARK};
use super::memory::{self, State};
use super::plan::{self, FileKind, Leave, Options, Plan, Remove, list_name, original_name};
use super::refusal::Refusal;
use super::swap::{Outcome, SwapError, Swapper};
use super::{binaries, listing, put};

/// How long a runtime may still be calling the plugin after its entry is gone.
pub const GRACE: Duration = Duration::from_secs(2);

/// Which entries go.
#[derive(Clone, Debug)]
pub enum Which {
    /// Those that mean the same as this one: what this agent wrote. A different entry of the same plugin is somebody
    /// else's.
    Exactly(WantedEntry),
    /// All of this plugin type.
    Type(String),
}

impl Which {
    /// The plugin's type.
    pub fn plugin(&self) -> &str {
        match self {
            Self::Exactly(wanted) => wanted.plugin(),
            Self::Type(plugin) => plugin,
        }
    }

    /// The config without them. What was there before comes back, unless everything of the type is to go.
    fn plan(&self, kind: FileKind, bytes: &[u8], state: &State) -> Plan {
        match self {
            Self::Exactly(wanted) => match plan::give_back(kind, bytes, wanted, &state.replaced) {
                // Where the entry was in a drop-in file, the list has none whose place the other one could take.
                Plan::Leave(Leave::Satisfied) if state.drop_in => append_replaced(kind, bytes, wanted, state),
                plan => plan,
            },
            Self::Type(plugin) => plan::unplan(kind, bytes, Remove::Type(plugin)),
        }
    }
}

fn append_replaced(kind: FileKind, bytes: &[u8], ours: &WantedEntry, state: &State) -> Plan {
    let entry = plan::entries(kind, bytes, ours.plugin())
        .filter(|(_, found)| found.is_empty())
        .and_then(|(network, _)| WantedEntry::from_text(state.replaced.get(&network)?, ours.place()).ok());
    match entry {
        Some(entry) => plan::plan(kind, bytes, &entry, Options { convert: false, ..Options::default() }),
        None => Plan::Leave(Leave::Satisfied),
    }
}

/// What is to be removed.
#[derive(Clone, Debug)]
pub struct Removal {
    /// The CNI directory, as seen from here.
    pub dir: PathBuf,
    /// Its path on the host.
    pub host: PathBuf,
    /// The entries.
    pub which: Which,
    /// The kubeconfig's name in the directory; `None` leaves it.
    pub kubeconfig: Option<OsString>,
    /// The plugins' directory as seen from here; `None` leaves the binary.
    pub bin_dir: Option<PathBuf>,
    /// See [`GRACE`].
    pub grace: Duration,
}

/// Why nothing could be done.
#[derive(Debug, thiserror::Error)]
pub enum UninstallError {
    /// The directory cannot be opened or read.
    #[error("cannot read the CNI directory {}: {source}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// An agent is at work there and would put everything back.
    #[error("an agent (generation {generation}) still looks after {}: stop it first", path.display())]
    Busy {
        /// The directory.
        path: PathBuf,
        /// The agent's number.
        generation: u64,
    },
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Files that lost their entry.
    pub cleaned: Vec<OsString>,
    /// Files that have the entry of another writer again that nobypass' had replaced; its files stay for it.
    pub given_back: Vec<OsString>,
    /// Single-plugin files that are back in their place.
    pub restored: Vec<OsString>,
    /// Hidden originals that stay, since the list made from them was changed or removed by somebody else.
    pub kept_aside: Vec<OsString>,
    /// Files that still name the plugin or cannot be read, and why they were left.
    pub remaining: Vec<(OsString, String)>,
    /// Files of the plugin that were removed.
    pub removed: Vec<PathBuf>,
    /// Files of the plugin that could not be removed, with the reason.
    pub failed: Vec<(PathBuf, String)>,
}

impl Report {
    /// Whether nothing of the agent is left.
    pub fn complete(&self) -> bool {
        let Self { cleaned: _, given_back: _, restored: _, kept_aside: _, remaining, removed: _, failed } =
            self;
        remaining.is_empty() && failed.is_empty()
    }
}

/// Removes everything; can be run again after any interruption.
pub async fn uninstall(removal: &Removal) -> Result<Report, UninstallError> {
    let mut report = Report::default();
    let (dir, mut swapper) = open(removal)?;
    // Keeps an agent that starts now from writing in between.
    let _lock = alone(removal, &dir).await?;
    // What an agent that was killed left behind.
    let state = State::load(&removal.dir);
    let mut without = |kind: FileKind, bytes: &[u8]| removal.which.plan(kind, bytes, &state);
    if let Err(error) = swapper.recover(&mut without) {
        tracing::warn!(%error, "cannot look for files of an earlier agent");
    }
    let mut refused = Vec::new();
    // First: the runtime notices only the lists, and finds what they have now without these.
    let removed = remove_drop_ins(removal, &mut report);
    clean(removal, &state, &mut swapper, &mut report, &mut refused)?;
    if removed && let Err(error) = swapper.poke() {
        tracing::debug!(%error, "cannot wake the container runtime");
    }
    restore(removal, &mut report)?;
    if !(report.cleaned.is_empty() && report.restored.is_empty()) {
        tokio::time::sleep(removal.grace).await;
    }
    swapper.settle_all(&mut without, &mut |_, _| {});
    remaining(removal, &state, &refused, &mut report)?;
    report.cleaned.retain(|name| !report.given_back.contains(name));
    remove_files(removal, &mut report);
    if report.complete() {
        let _ = rustix::fs::unlinkat(&dir, MARK, AtFlags::empty()); // holds nothing but a number
        let _ = memory::remove(&removal.dir); // of no use any more
    }
    for dir in [Some(&removal.dir), removal.bin_dir.as_ref()].into_iter().flatten() {
        let _ = put::clean(dir); // a directory that is gone needs no cleaning
    }
    Ok(report)
}

fn open(removal: &Removal) -> Result<(Arc<OwnedFd>, Swapper), UninstallError> {
    let failed = |source| UninstallError::Directory { path: removal.dir.clone(), source };
    let dir = File::open(&removal.dir).map_err(failed)?;
    if !dir.metadata().map_err(failed)?.is_dir() {
        return Err(failed(io::ErrorKind::NotADirectory.into()));
    }
    let again = dir.try_clone().map_err(failed)?;
    let swapper = Swapper::new(dir.into(), vec![removal.dir.clone(), removal.host.clone()]);
    Ok((Arc::new(again.into()), swapper))
}

/// Makes sure that no agent is at work in the directory, and keeps it so.
async fn alone(removal: &Removal, dir: &Arc<OwnedFd>) -> Result<DirLock, UninstallError> {
    let failed = |source| UninstallError::Directory { path: removal.dir.clone(), source };
    loop {
        if let Some(generation) = lock::holder(dir).map_err(failed)? {
            return Err(UninstallError::Busy { path: removal.dir.clone(), generation });
        }
        // Another uninstall, or an agent that is just starting.
        if let Some(lock) = DirLock::try_take(dir).map_err(failed)? {
            return Ok(lock);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn names(removal: &Removal) -> Result<Vec<OsString>, UninstallError> {
    let failed = |source| UninstallError::Directory { path: removal.dir.clone(), source };
    let names = fs::read_dir(&removal.dir).and_then(|entries| {
        entries.map(|entry| entry.map(|entry| entry.file_name())).collect::<Result<Vec<_>, _>>()
    });
    names.map_err(failed)
}

/// Takes the entries out of every config.
fn clean(
    removal: &Removal,
    state: &State,
    swapper: &mut Swapper,
    report: &mut Report,
    refused: &mut Vec<(OsString, String)>,
) -> Result<(), UninstallError> {
    let mut configs = names(removal)?;
    configs.retain(|name| FileKind::of(name).is_some());
    configs.sort();
    let mut without = |kind: FileKind, bytes: &[u8]| removal.which.plan(kind, bytes, state);
    swapper.replace_all(&configs, &mut without, &mut |name, outcome| match outcome {
        Ok(Outcome::Patched(_)) => report.cleaned.push(name.to_owned()),
        Ok(Outcome::Left(Leave::OnlyMesh, _)) => {
            refused.push((name.to_owned(), "it holds nothing but the mesh's entry".to_owned()));
        }
        Ok(Outcome::Refused(refusal)) => refused.push((name.to_owned(), refusal.to_string())),
        Ok(Outcome::Left(..) | Outcome::Gone | Outcome::Converted(_)) => {}
        Ok(Outcome::Changed) => refused.push((name.to_owned(), "its owner is changing it".to_owned())),
        Err(error) => refused.push((name.to_owned(), explain(&error))),
    });
    Ok(())
}

fn explain(error: &SwapError) -> String {
    error.refusal().map_or_else(|| error.to_string(), |refusal| refusal.to_string())
}

fn remove_drop_ins(removal: &Removal, report: &mut Report) -> bool {
    let mut removed = false;
    for network in drop_in::networks(&removal.dir).unwrap_or_default() {
        let name = Path::new(&network).join(drop_in::FILE);
        match drop_in::withdraw(&removal.dir, &network) {
            Ok(_) => report.cleaned.push(name.into()),
            Err(refusal) => report.failed.push((removal.dir.join(name), refusal.to_string())),
        }
        removed = true;
    }
    removed
}

/// Puts single-plugin files back whose list is still the one made from them.
fn restore(removal: &Removal, report: &mut Report) -> Result<(), UninstallError> {
    for aside in names(removal)? {
        let Some(original) = original_name(&aside) else { continue };
        match restore_one(removal, &aside, &original) {
            Ok(true) => report.restored.push(original),
            Ok(false) => report.kept_aside.push(aside),
            Err(error) => {
                report.failed.push((removal.dir.join(&original), format!("cannot be put back: {error}")));
            }
        }
    }
    Ok(())
}

/// The original first, which wins over the list from that moment on; then the list goes, then the hidden name.
fn restore_one(removal: &Removal, aside: &OsStr, original: &OsStr) -> io::Result<bool> {
    let path = |name: &OsStr| removal.dir.join(name);
    let Some(list) = list_name(original) else { return Ok(false) };
    let kept = fs::read(path(aside))?;
    let is_ours = |name: &OsStr| fs::read(path(name)).is_ok_and(|list| plan::is_list_of(&list, &kept));
    let back = fs::symlink_metadata(path(original)).is_ok();
    if !back {
        if !is_ours(&list) {
            return Ok(false);
        }
        match rustix::fs::linkat(CWD, path(aside), CWD, path(original), AtFlags::empty()) {
            // The owner was faster, and its version counts.
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(rustix::io::Errno::PERM | rustix::io::Errno::NOTSUP) => {
                // Without hard links.
                rustix::fs::renameat_with(CWD, path(aside), CWD, path(original), RenameFlags::NOREPLACE)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    // Out of the runtime's sight first, so that it can be looked at while nobody opens it any more.
    let hidden: OsString = format!(".nobypass-put-{:016x}.tmp", std::process::id()).into();
    match fs::rename(path(&list), path(&hidden)) {
        Ok(()) if is_ours(&hidden) => fs::remove_file(path(&hidden))?,
        Ok(()) => rustix::fs::renameat_with(CWD, path(&hidden), CWD, path(&list), RenameFlags::NOREPLACE)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    match fs::remove_file(path(aside)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    File::open(&removal.dir)?.sync_all()?;
    Ok(true)
}

/// Notes configs that still name the plugin, anywhere, or that cannot be read; apart from them those which have the entry
/// of another writer again.
fn remaining(
    removal: &Removal,
    state: &State,
    refused: &[(OsString, String)],
    report: &mut Report,
) -> Result<(), UninstallError> {
    let listed = listing::list(&removal.dir, &removal.host)
        .map_err(|source| UninstallError::Directory { path: removal.dir.clone(), source })?;
    for file in listed.into_iter().filter(|file| FileKind::of(&file.name).is_some()) {
        let why = match &file.content {
            Err(Refusal::Symlink) => continue, // no runtime can load it either, or it is another directory's
            Err(refusal) => refusal.to_string(),
            Ok(bytes) => {
                let text = String::from_utf8_lossy(bytes);
                let plugin = removal.which.plugin();
                if !edit::tokens(&text).any(|token| token.starts_with('"') && edit::string(token) == plugin) {
                    continue;
                }
                if has_its_own_again(&file.name, bytes, plugin, state) {
                    report.given_back.push(file.name);
                    continue;
                }
                let why = refused.iter().find(|(name, _)| *name == file.name).map(|(_, why)| why.clone());
                why.unwrap_or_else(|| format!("it names {plugin} in an entry that nobypass did not write"))
            }
        };
        report.remaining.push((file.name, why));
    }
    Ok(())
}

fn has_its_own_again(name: &OsStr, bytes: &[u8], plugin: &str, state: &State) -> bool {
    let found = FileKind::of(name).and_then(|kind| plan::entries(kind, bytes, plugin));
    let Some((network, found)) = found else { return false };
    let theirs = state.replaced.get(&network);
    theirs.is_some_and(|theirs| !found.is_empty() && found.iter().all(|entry| edit::same(entry, theirs)))
}

/// Kubeconfig and binary, unless a config still needs them.
fn remove_files(removal: &Removal, report: &mut Report) {
    if !(report.remaining.is_empty() && report.given_back.is_empty()) {
        return;
    }
    let mut note = |path: PathBuf, result: Result<bool, String>| match result {
        Ok(true) => report.removed.push(path),
        Ok(false) => {}
        Err(error) => report.failed.push((path, error)),
    };
    if let Some(name) = &removal.kubeconfig {
        let path = removal.dir.join(name);
        let result = match fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error.to_string()),
        };
        note(path, result);
    }
    if let Some(dir) = &removal.bin_dir {
        let plugin = removal.which.plugin();
        let result = binaries::remove(dir, OsStr::new(plugin)).map_err(|error| error.to_string());
        note(Path::new(dir).join(plugin), result);
    }
}
