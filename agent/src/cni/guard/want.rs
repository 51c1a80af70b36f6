//! Which entry every config is to carry, and how a config's bytes become a plan.

mod learned;

use std::collections::VecDeque;
use std::path::Path;

use super::super::drop_in;
use super::super::edit;
use super::super::entry::{Place, WantedEntry};
use super::super::memory::{Memory, Remember, State};
use super::super::plan::{self, FileKind, Leave, Options, Plan, Remove};
use super::super::refusal::Refusal;
use super::super::swap::hash;

/// Own contents remembered: more than can be on their way through events at once.
const OWN: usize = 512;

/// Where the wanted entry comes from.
#[derive(Clone, Debug)]
pub enum Want {
    /// It is given.
    Entry(WantedEntry),
    /// From the configs themselves: the mesh's installer puts it into one of them, and that is the one to keep in
    /// all. When the installer changes it, the newer one counts.
    Learn {
        /// Plugin types, the first one found counts.
        plugins: Vec<String>,
        /// Where it belongs.
        place: Place,
    },
    /// None: entries that mean the same as this one go.
    Withdraw(WantedEntry),
}

/// Plans with the entry that is wanted now, and learns it on the way.
#[derive(Debug)]
pub(super) struct Planner {
    want: Want,
    options: Options,
    learned: Option<WantedEntry>,
    /// A newer agent writes here.
    pub superseded: bool,
    /// The configs that are looked at now were just changed, so another entry in them is the installer's newest. Found
    /// at start or in a rescan, it may be older than the known one.
    pub news: bool,
    /// Hashes of what this agent wrote lately: an entry in it is not the installer's word.
    own: VecDeque<u64>,
    /// Another entry is wanted now, so all configs must be looked at again.
    pub changed: bool,
    remember: Remember,
    /// What is known from before a restart.
    memory: Option<Memory>,
    /// A drop-in file changed, which no runtime notices.
    pub poke: bool,
    /// The learned entry's way from one run to the next, and its end.
    life: learned::Life,
}

impl Planner {
    pub fn new(want: Want, options: Options, remember: Remember) -> Self {
        Self {
            remember,
            memory: None,
            poke: false,
            life: learned::Life::default(),
            want,
            options,
            learned: None,
            superseded: false,
            news: false,
            own: VecDeque::new(),
            changed: false,
        }
    }

    pub fn set(&mut self, want: Want) {
        if let Want::Learn { plugins, .. } = &want
            && !self
                .learned
                .as_ref()
                .is_some_and(|entry| plugins.iter().any(|plugin| plugin == entry.plugin()))
        {
            self.learned = None;
        }
        self.want = want;
        self.changed = true;
    }

    /// The entry to keep; `None` while it is not known, or withdrawn.
    pub fn wanted(&self) -> Option<&WantedEntry> {
        match &self.want {
            Want::Entry(entry) => Some(entry),
            Want::Learn { .. } => self.learned.as_ref(),
            Want::Withdraw(_) => None,
        }
    }

    /// Reads what is remembered of a directory that was just opened.
    pub fn open(&mut self, dir: &Path) {
        self.memory = (!matches!(self.remember, Remember::Nothing)).then(|| Memory::open(dir));
        self.life = learned::Life::default();
    }

    pub fn plan(&mut self, kind: FileKind, bytes: &[u8]) -> Plan {
        let plan = match &self.want {
            Want::Entry(wanted) => plan::plan(kind, bytes, wanted, self.options),
            Want::Withdraw(entry) => match &self.memory {
                Some(memory) => plan::give_back(kind, bytes, entry, &memory.state().replaced),
                None => plan::unplan(kind, bytes, Remove::Exactly(entry)),
            },
            Want::Learn { plugins, place } => {
                let found = learn(kind, bytes, plugins, *place);
                let bare = found.is_none();
                self.adopt(found, bytes);
                match (&self.learned, self.life.gone()) {
                    (Some(wanted), _) => {
                        let plan = plan::plan(kind, bytes, wanted, self.options);
                        if bare && matches!(plan, Plan::Write(_)) {
                            self.life.put_back();
                        }
                        plan
                    }
                    (None, Some(gone)) => match plan::unplan(kind, bytes, Remove::Exactly(gone)) {
                        Plan::Leave(Leave::Satisfied) => Plan::Refuse(Refusal::NoEntry),
                        plan => plan,
                    },
                    (None, None) => unlearned(kind, bytes),
                }
            }
        };
        if let Err(refusal) = self.before(&plan, kind, bytes) {
            return Plan::Refuse(refusal);
        }
        match plan {
            Plan::Write(_) | Plan::Convert(_) if self.superseded => Plan::Refuse(Refusal::Superseded),
            Plan::Write(bytes) => {
                if matches!(self.want, Want::Learn { .. }) {
                    self.own.truncate(OWN);
                    self.own.push_front(hash(&bytes));
                }
                Plan::Write(bytes)
            }
            plan => plan,
        }
    }

    /// What has to be on disk before a plan is carried out. A runtime reads drop-in files only when it loads the list, so
    /// the exchange of the list makes both count at once.
    fn before(&mut self, plan: &Plan, kind: FileKind, bytes: &[u8]) -> Result<(), Refusal> {
        if self.superseded
            || !matches!(plan, Plan::Write(_) | Plan::Convert(_) | Plan::Leave(Leave::Satisfied))
        {
            return Ok(());
        }
        if matches!(plan, Plan::Write(_)) {
            self.keep_replaced(kind, bytes)?;
        }
        let (Remember::Replaced, Some(memory)) = (&self.remember, &mut self.memory) else { return Ok(()) };
        let Some(network) = plan::network(kind, bytes) else { return Ok(()) };
        if memory.state().drop_in != self.options.drop_in {
            let next = State { drop_in: self.options.drop_in, ..memory.state().clone() };
            memory.set(next).map_err(|error| Refusal::from(&error))?;
        }
        self.poke |= match &self.want {
            Want::Entry(wanted) if self.options.drop_in => drop_in::place(memory.dir(), &network, wanted)?,
            _ => drop_in::withdraw(memory.dir(), &network)?,
        };
        Ok(())
    }

    /// Before an entry of another writer is replaced, it is on disk: it comes back when this agent is uninstalled.
    fn keep_replaced(&mut self, kind: FileKind, bytes: &[u8]) -> Result<(), Refusal> {
        let (Want::Entry(wanted), Remember::Replaced, Some(memory)) =
            (&self.want, &self.remember, &mut self.memory)
        else {
            return Ok(());
        };
        let Some((network, found)) = plan::entries(kind, bytes, wanted.plugin()) else { return Ok(()) };
        match memory.state().with(&network, &found, wanted) {
            Some(next) => memory.set(next).map_err(|error| Refusal::from(&error)),
            None => Ok(()),
        }
    }

    fn adopt(&mut self, found: Option<WantedEntry>, from: &[u8]) {
        let Some(found) = found else { return };
        let news = match &self.learned {
            None => !self.life.gone().is_some_and(|gone| edit::same(gone.text(), found.text())),
            Some(known) => {
                let other = !edit::same(known.text(), found.text()) && !self.own.contains(&hash(from));
                other && (self.news || self.is_older(known))
            }
        };
        if news {
            tracing::info!(plugin = found.plugin(), entry = found.text(), "learned the mesh's CNI entry");
            self.changed = true;
            self.learned = Some(found);
        }
    }
}

fn learn(kind: FileKind, bytes: &[u8], plugins: &[String], place: Place) -> Option<WantedEntry> {
    if kind != FileKind::Conflist {
        return None;
    }
    // Most configs do not even hold the name.
    let named = |plugin: &&String| memmem(bytes, plugin.as_bytes());
    plugins.iter().filter(named).find_map(|plugin| WantedEntry::learn(bytes, plugin, place))
}

fn memmem(bytes: &[u8], word: &[u8]) -> bool {
    !word.is_empty() && bytes.windows(word.len()).any(|window| window == word)
}

/// Without an entry to keep: what is wrong with the file, or that there is none.
fn unlearned(kind: FileKind, bytes: &[u8]) -> Plan {
    // Taking out an entry that cannot be there checks everything else.
    match plan::unplan(kind, bytes, Remove::Type("\0")) {
        Plan::Leave(Leave::Satisfied) => Plan::Refuse(Refusal::NoEntry),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entry: &str) -> String {
        format!(r#"{{"cniVersion":"0.4.0","name":"n","plugins":[{{"type":"bridge"}}{entry}]}}"#)
    }

    fn learner() -> Planner {
        let plugins = vec!["linkerd-cni".to_owned(), "istio-cni".to_owned()];
        Planner::new(Want::Learn { plugins, place: Place::Last }, Options::default(), Remember::Nothing)
    }

    fn is_write(plan: &Plan) -> bool {
        matches!(plan, Plan::Write(_))
    }

    #[test]
    fn the_entry_is_learned_and_then_kept_everywhere() {
        let mut planner = learner();
        let (bare, one) = (list(""), list(r#",{"type":"linkerd-cni","v":1}"#));
        assert_eq!(planner.plan(FileKind::Conflist, bare.as_bytes()), Plan::Refuse(Refusal::NoEntry));
        assert_eq!(planner.plan(FileKind::Conflist, b"{"), Plan::Refuse(Refusal::Incomplete));
        assert!(matches!(planner.plan(FileKind::Conflist, one.as_bytes()), Plan::Leave(Leave::Satisfied)));
        assert!(planner.changed);
        assert!(is_write(&planner.plan(FileKind::Conflist, bare.as_bytes())));
    }

    #[test]
    fn a_newer_entry_of_the_installer_counts_but_not_an_old_one_found_at_start() {
        let mut planner = learner();
        let (one, two) = (list(r#",{"type":"linkerd-cni","v":1}"#), list(r#",{"type":"linkerd-cni","v":2}"#));
        planner.plan(FileKind::Conflist, one.as_bytes());
        assert!(is_write(&planner.plan(FileKind::Conflist, two.as_bytes())));
        planner.news = true;
        planner.changed = false;
        assert!(matches!(planner.plan(FileKind::Conflist, two.as_bytes()), Plan::Leave(_)));
        assert!(planner.changed);
        // What this agent wrote with the older entry is not news when its event comes late.
        let mut planner = learner();
        planner.plan(FileKind::Conflist, one.as_bytes());
        let Plan::Write(own) = planner.plan(FileKind::Conflist, list("").as_bytes()) else {
            panic!("no write")
        };
        planner.news = true;
        planner.plan(FileKind::Conflist, two.as_bytes());
        assert!(is_write(&planner.plan(FileKind::Conflist, &own)));
        // The installer goes back to the older one.
        let back = format!(" {one}");
        assert!(matches!(planner.plan(FileKind::Conflist, back.as_bytes()), Plan::Leave(_)));
    }

    #[test]
    fn a_superseded_agent_writes_nothing() {
        let mut planner = learner();
        planner.set(Want::Entry(WantedEntry::from_text(r#"{"type":"linkerd-cni"}"#, Place::Last).unwrap()));
        assert!(is_write(&planner.plan(FileKind::Conflist, list("").as_bytes())));
        planner.superseded = true;
        let plan = planner.plan(FileKind::Conflist, list("").as_bytes());
        assert_eq!(plan, Plan::Refuse(Refusal::Superseded));
    }

    #[test]
    fn a_withdrawn_entry_is_taken_out() {
        let mut planner = learner();
        let entry = r#"{"type":"linkerd-cni","v":1}"#;
        planner.set(Want::Withdraw(WantedEntry::from_text(entry, Place::Last).unwrap()));
        let plan = planner.plan(FileKind::Conflist, list(&format!(",{entry}")).as_bytes());
        assert_eq!(plan, Plan::Write(list("").into()));
        assert_eq!(planner.wanted(), None);
    }
}
