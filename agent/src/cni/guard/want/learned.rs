//! What becomes of a learned entry: it is remembered across restarts, and forgotten when its mesh is uninstalled.
//!
//! That a config lacks the entry says nothing: a primary CNI that writes its config anew leaves it out, and so does an
//! installer that takes the mesh off the node. They are told apart by what the entry needs. An installer that goes takes
//! the plugin's binary and its kubeconfig with it; an entry without them would fail every pod.

use std::time::{Duration, Instant};

use super::super::super::edit;
use super::super::super::entry::WantedEntry;
use super::super::super::memory::{Remember, State};
use super::super::super::runtime::equipped;
use super::{Planner, Want};

/// An entry whose files go this soon after it was put back was taken out on purpose.
const UNINSTALL: Duration = Duration::from_secs(120);
/// Looks in a row at which the files are missing: an installer that is upgraded may replace them one by one.
const LOOKS: u32 = 2;

/// The learned entry beside its text.
#[derive(Debug, Default)]
pub(super) struct Life {
    /// All configs were looked at, so that what is in none of them may come from memory.
    settled: bool,
    /// When it was last put into a config that somebody had written without it.
    put_back: Option<Instant>,
    missing: u32,
    /// Its mesh was uninstalled.
    gone: Option<WantedEntry>,
}

impl Life {
    pub fn gone(&self) -> Option<&WantedEntry> {
        self.gone.as_ref()
    }

    pub fn put_back(&mut self) {
        self.put_back = Some(Instant::now());
    }
}

impl Planner {
    fn remembered(&self) -> Option<WantedEntry> {
        let Want::Learn { plugins, place } = &self.want else { return None };
        let text = self.memory.as_ref()?.state().learned.as_deref()?;
        let entry = WantedEntry::from_text(text, *place).ok()?;
        plugins.iter().any(|plugin| plugin == entry.plugin()).then_some(entry)
    }

    /// True while files are looked at for the first time, for the entry of before the restart: another one that is found
    /// beside it came since.
    pub(super) fn is_older(&self, known: &WantedEntry) -> bool {
        !self.life.settled && self.remembered().is_some_and(|entry| edit::same(entry.text(), known.text()))
    }

    /// All configs were looked at: an entry that none of them has comes from memory, if its mesh is still installed; and
    /// what was learned is remembered.
    pub fn settle(&mut self) {
        if self.superseded || !matches!(self.want, Want::Learn { .. }) {
            return;
        }
        let Remember::Learned(places) = &self.remember else { return };
        if !std::mem::replace(&mut self.life.settled, true)
            && self.learned.is_none()
            && let Some(entry) = self.remembered()
        {
            if equipped::is_installed(&entry, places) {
                tracing::info!(
                    entry = entry.text(),
                    "no config has the mesh's CNI entry; putting back what was kept before the restart"
                );
                self.learned = Some(entry);
                self.changed = true;
                self.life.put_back();
            } else {
                let missing = equipped::problem(&entry, places);
                tracing::info!(
                    missing,
                    "the mesh whose CNI entry was kept before the restart is not installed any more"
                );
            }
        }
        self.save();
    }

    /// Looks whether the mesh is still installed. To be called now and then.
    pub fn look(&mut self) {
        let Remember::Learned(places) = &self.remember else { return };
        if let Some(gone) = &self.life.gone {
            if equipped::is_installed(gone, places) {
                self.life.gone = None;
                self.changed = true;
            }
            return;
        }
        let Some(entry) = self.learned.as_ref().filter(|_| matches!(self.want, Want::Learn { .. })) else {
            return;
        };
        let Some(missing) = equipped::problem(entry, places) else {
            self.life.missing = 0;
            return;
        };
        self.life.missing = self.life.missing.saturating_add(1);
        let on_purpose = self.life.put_back.is_some_and(|then| then.elapsed() < UNINSTALL);
        if on_purpose && self.life.missing >= LOOKS && !self.superseded {
            tracing::warn!(
                plugin = entry.plugin(),
                missing,
                "the mesh's CNI entry and then its files were removed: it was uninstalled, and its entry is taken out again"
            );
            self.life = Life { gone: self.learned.take(), settled: true, ..Life::default() };
            self.changed = true;
            self.save();
        }
    }

    fn save(&mut self) {
        let learned = self.learned.as_ref().map(|entry| entry.text().to_owned());
        let Some(memory) = &mut self.memory else { return };
        if memory.state().learned == learned {
            return;
        }
        let next = State { learned, ..memory.state().clone() };
        if let Err(error) = memory.set(next) {
            tracing::debug!(%error, "cannot remember the mesh's CNI entry; a restart will have to learn it again");
        }
    }
}
