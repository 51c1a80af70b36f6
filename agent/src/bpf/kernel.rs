//! Loading, attaching and adopting.
//!
//! Links and maps are pinned: without an agent they go on working, and the next agent takes them over. A link is
//! never removed and made anew but updated in place, so that no packet passes between two programs.

use std::fs;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use aya::programs::links::FdLink;
use aya::programs::trace_point::TracePointLink;
use aya::{Ebpf, EbpfLoader, VerifierLogLevel};
use nobypass_common::abi::Config;

use super::OBJECT;
use super::attach::{
    attach_program, attach_tracepoint, check_not_stacked, explain_refusal, load_program, overridden,
    pin_link, program_fd,
};
use super::carry::{Older, Taken, give_back};
use super::error::{BpfError, Chain};
use super::hooks::Hook;
use super::maps::{Maps, PER_POD, PINNED};
use super::parents::{Parent, starts_at_the_root, with_parents};
use super::pins::PinDir;
use crate::sys::bpf as raw;
use crate::sys::clock::ticks_per_second;

/// What the verifier writes down when it refuses a program. aya asks for it in a second attempt, after any failure: with
/// no level the kernel answers that attempt with `EINVAL`, which hides the reason, and which fails a load that a signal
/// interrupted (`EAGAIN`).
pub const LOG_LEVEL: VerifierLogLevel = VerifierLogLevel::DEBUG;

/// What [`Kernel::start`] needs.
#[derive(Clone, Debug)]
pub struct Options {
    /// `--bpf-dir`.
    pub dir: PathBuf,
    /// Pods that the maps shall have room for.
    pub max_pods: u32,
    /// The settings to start with; parents and levels are filled in here.
    pub config: Config,
}

/// Parts of a second after which a held SYN is repeated.
const SYN_RETRY: u32 = 10;

/// A hook that does not work, and why. Egress is never among them: without it nothing starts.
#[derive(Clone, Debug)]
pub struct Degraded {
    /// The hook.
    pub hook: Hook,
    /// What happened.
    pub reason: String,
}

/// The running kernel half.
#[derive(Debug)]
pub struct Kernel {
    /// Typed maps.
    pub maps: Maps,
    ebpf: Ebpf,
    dir: PinDir,
    config: Config,
    parents: Vec<Parent>,
    degraded: Vec<Degraded>,
    adopted: bool,
    /// Tracepoint links that this kernel cannot pin (before 5.15): they live as long as the agent.
    unpinned: Vec<(Hook, TracePointLink)>,
    /// Links of another version, until it is replaced.
    taken: Vec<Taken>,
    /// Held for as long as this lives.
    _lock: Option<File>,
}

impl Kernel {
    /// Loads the programs, adopts or makes the pins, and attaches to the parents.
    ///
    /// # Errors
    /// [`BpfError`]; nothing new stays attached then, and what an earlier agent attached stays as it was.
    pub fn start(options: &Options, parents: &[Parent]) -> Result<Self, BpfError> {
        let dir = PinDir::new(&options.dir);
        dir.prepare()?;
        let lock = dir.lock()?;
        let adopted = dir.map("CONFIG").exists();
        let mut taken = Vec::new();
        match Self::start_in(&dir, adopted, options, parents, &mut taken) {
            Ok(kernel) => Ok(Self { taken, _lock: Some(lock), ..kernel }),
            Err(error) => {
                give_back(taken);
                if !adopted {
                    discard(&dir);
                }
                Err(error)
            }
        }
    }

    fn start_in(
        dir: &PinDir,
        adopted: bool,
        options: &Options,
        parents: &[Parent],
        taken: &mut Vec<Taken>,
    ) -> Result<Self, BpfError> {
        let older = Older::find(dir)?;
        for parent in parents {
            check_not_stacked(dir, parent)?;
        }
        let mut ebpf = load_object(dir, options.max_pods)?;
        check_layouts(dir)?;
        let mut degraded = Vec::new();
        load_programs(&mut ebpf, &mut degraded)?;
        let maps = Maps::open(dir)?;
        let mut kernel = Self {
            maps,
            ebpf,
            dir: dir.clone(),
            config: options.config,
            parents: Vec::new(),
            degraded,
            adopted,
            unpinned: Vec::new(),
            taken: Vec::new(),
            _lock: None,
        };
        kernel.maps.beat()?;
        if let Some(older) = &older {
            older.carry_pods(dir)?;
            older.take_links(dir, &kernel.wanted(), parents, taken)?;
        }
        kernel.set_parents(parents)?;
        if let Some(older) = &older {
            older.carry_counters(&mut kernel.maps)?;
        }
        if !parents.iter().all(starts_at_the_root) {
            for hook in Hook::TRACEPOINT {
                kernel.degrade(
                    hook,
                    "the cgroup root is not the hierarchy's, from which its paths start".into(),
                );
            }
        }
        kernel.attach_tracepoints(&Hook::TRACEPOINT)?;
        Ok(kernel)
    }

    /// Removes what other versions left. To be called once our programs are proven to work: from then on there is no way
    /// back.
    ///
    /// # Errors
    /// [`BpfError::Pin`].
    pub fn replace_others(&mut self) -> Result<(), BpfError> {
        self.taken.clear();
        let old = self.dir.remove_others()?;
        if old > 0 {
            tracing::info!(pins = old, "removed the pins of another version");
        }
        Ok(())
    }

    /// Detaches what [`Kernel::start`] attached, because it turned out not to work. What was adopted stays as it was, and
    /// what was another version's works as before.
    pub fn withdraw(self) {
        give_back(self.taken);
        if !self.adopted {
            discard(&self.dir);
        }
    }

    /// Whether the maps of an earlier agent were taken over.
    pub const fn adopted(&self) -> bool {
        self.adopted
    }

    /// Programs of others that ours keep from running for pods.
    pub fn overridden(&self) -> Vec<String> {
        self.parents.iter().flat_map(overridden).collect()
    }

    /// Where the programs are attached.
    pub fn parents(&self) -> &[Parent] {
        &self.parents
    }

    /// Hooks that do not work.
    pub fn degraded(&self) -> &[Degraded] {
        &self.degraded
    }

    /// The pin directory.
    pub const fn dir(&self) -> &PinDir {
        &self.dir
    }

    /// The object, for the log reader.
    pub const fn object(&mut self) -> &mut Ebpf {
        &mut self.ebpf
    }

    /// Makes the programs judge the pods below these parents: settings first, then the links, then links of
    /// parents that are gone.
    ///
    /// # Errors
    /// [`BpfError`].
    pub fn set_parents(&mut self, parents: &[Parent]) -> Result<(), BpfError> {
        self.config = with_parents(self.config, parents);
        self.maps.set_config(&self.config)?;
        for parent in parents {
            for hook in self.wanted() {
                self.attach_cgroup(hook, parent)?;
            }
        }
        self.parents = parents.to_vec();
        self.remove_links_of_other_parents();
        Ok(())
    }

    /// The cgroup hooks that the settings call for.
    fn wanted(&self) -> Vec<Hook> {
        Hook::CGROUP.into_iter().filter(|hook| hook.is_wanted(&self.config)).collect()
    }

    /// Changes the settings, and attaches or detaches what they ask for; parents stay.
    ///
    /// # Errors
    /// [`BpfError`].
    pub fn set_config(&mut self, change: impl FnOnce(&mut Config)) -> Result<(), BpfError> {
        // What the command line changed meanwhile counts.
        let mut config = self.maps.config()?;
        change(&mut config);
        let before = self.wanted();
        self.config = with_parents(config, &self.parents);
        if self.wanted() == before {
            return self.maps.set_config(&self.config);
        }
        let parents = self.parents.clone();
        self.set_parents(&parents)
    }

    /// Hooks that the settings call for, and whether they are in effect: the kernel's answer, not ours.
    pub fn effective(&self) -> Vec<(Hook, bool)> {
        let mut effective = Vec::with_capacity(Hook::ALL.len());
        for hook in self.wanted() {
            let everywhere = self.parents.iter().all(|parent| self.is_effective(hook, parent));
            effective.push((hook, everywhere && !self.parents.is_empty()));
        }
        for hook in Hook::TRACEPOINT {
            let attached = self.dir.link(hook, None).exists() || self.unpinned.iter().any(|on| on.0 == hook);
            effective.push((hook, attached && !self.degraded.iter().any(|degraded| degraded.hook == hook)));
        }
        effective
    }

    fn is_effective(&self, hook: Hook, parent: &Parent) -> bool {
        let (Some(attach_type), Ok(cgroup)) = (hook.attach_type(), File::open(&parent.path)) else {
            return false;
        };
        let Ok(link) = raw::open_pin(&self.dir.link(hook, Some(parent.cgroup_id))) else { return false };
        let Ok(Some(link)) = raw::cgroup_link(link.as_fd()) else { return false };
        link.cgroup_id == parent.cgroup_id
            && raw::attached(cgroup.as_fd(), attach_type, true)
                .is_ok_and(|attached| attached.programs.contains(&link.program_id))
    }

    fn is_degraded(&self, hook: Hook) -> bool {
        self.degraded.iter().any(|degraded| degraded.hook == hook)
    }

    /// Updates the pinned link in place, or makes one.
    fn attach_cgroup(&mut self, hook: Hook, parent: &Parent) -> Result<(), BpfError> {
        let Some(attach_type) = hook.attach_type() else { return Ok(()) };
        if self.is_degraded(hook) {
            return Ok(());
        }
        let pin = self.dir.link(hook, Some(parent.cgroup_id));
        if let Ok(link) = raw::open_pin(&pin) {
            let program = program_fd(&mut self.ebpf, hook)?;
            match raw::update_link(link.as_fd(), program.as_fd()) {
                Ok(()) => return Ok(()),
                // The cgroup was removed and made again: this link is attached to nothing.
                Err(error) if error.raw_os_error() == Some(libc::ENOLINK) => {
                    fs::remove_file(&pin).map_err(|source| BpfError::Pin {
                        what: "remove",
                        path: pin.clone(),
                        source,
                    })?;
                }
                Err(source) => {
                    return Err(BpfError::Attach {
                        hook: hook.label(),
                        cgroup: parent.path.clone(),
                        source: Box::new(source),
                        remedy:
                            "the link of an earlier agent cannot be updated; `nobypass cleanup` removes it"
                                .into(),
                    });
                }
            }
        }
        // First of all: where the pins are out of sight, as after an unmount, the programs go on, and others beside them
        // would count each connection twice until this one fails to pin them.
        if let Some(dir) = pin.parent() {
            fs::metadata(dir).map_err(|source| BpfError::Pin {
                what: "pin into",
                path: dir.into(),
                source,
            })?;
        }
        let cgroup = File::open(&parent.path).map_err(|source| BpfError::Pin {
            what: "open",
            path: parent.path.clone(),
            source,
        })?;
        let attached = attach_program(&mut self.ebpf, hook, &cgroup);
        let link = match attached {
            Ok(link) => link,
            Err(source) => {
                let error = explain_refusal(hook, attach_type, parent, source);
                if hook == Hook::Egress {
                    return Err(error);
                }
                self.degrade(hook, error.to_string());
                return Ok(());
            }
        };
        pin_link(link, &pin)
    }

    /// Attaches to these tracepoints, which are optional. One program attaches to a tracepoint once.
    ///
    /// # Errors
    /// [`BpfError::Pin`].
    pub fn attach_tracepoints(&mut self, hooks: &[Hook]) -> Result<(), BpfError> {
        for hook in hooks.iter().copied() {
            if self.is_degraded(hook) {
                continue;
            }
            match attach_tracepoint(&mut self.ebpf, hook) {
                Err(source) => self.degrade(hook, Chain(Box::new(source)).to_string()),
                Ok(link) => self.keep_tracepoint(hook, link)?,
            }
        }
        Ok(())
    }

    /// The kernel updates no tracepoint link: the new one runs beside the old for a moment, which changes
    /// nothing (an entry is only made where there is none), then takes over its pin.
    fn keep_tracepoint(&mut self, hook: Hook, link: TracePointLink) -> Result<(), BpfError> {
        match FdLink::try_from(link) {
            Ok(link) => {
                let pin = self.dir.link(hook, None);
                let new = pin.with_file_name(format!("link_{}_new", hook.label()));
                let _ = fs::remove_file(&new);
                pin_link(link, &new)?;
                fs::rename(&new, &pin).map_err(|source| BpfError::Pin { what: "rename", path: new, source })
            }
            Err(error) => {
                tracing::warn!(hook = hook.label(), %error, "this kernel cannot pin tracepoints: new pods are known \
                    at their first packet while no agent runs");
                // The conversion consumed the link: attach again, and keep it.
                match attach_tracepoint(&mut self.ebpf, hook) {
                    Ok(link) => self.unpinned.push((hook, link)),
                    Err(source) => self.degrade(hook, Chain(Box::new(source)).to_string()),
                }
                Ok(())
            }
        }
    }

    fn degrade(&mut self, hook: Hook, reason: String) {
        tracing::warn!(hook = hook.label(), reason, without = hook.without(), "a hook does not work");
        self.degraded.push(Degraded { hook, reason });
    }

    /// Links whose parent is not ours any more (the cgroup is gone, or the operator names others now), or whose hook is not
    /// wanted any more.
    fn remove_links_of_other_parents(&self) {
        let keep: Vec<PathBuf> = self
            .parents
            .iter()
            .flat_map(|parent| {
                self.wanted().into_iter().map(|hook| self.dir.link(hook, Some(parent.cgroup_id)))
            })
            .chain(Hook::TRACEPOINT.map(|hook| self.dir.link(hook, None)))
            .collect();
        for pin in self.dir.links().unwrap_or_default() {
            if !keep.contains(&pin)
                && let Err(error) = fs::remove_file(&pin)
            {
                tracing::warn!(pin = %pin.display(), %error, "cannot remove a link that is not wanted any more");
            }
        }
    }
}

/// Removes pins that never worked, so that nothing half attached stays.
fn discard(dir: &PinDir) {
    if let Err(error) = dir.remove_own() {
        tracing::warn!(%error, "cannot remove the pins of a start that failed");
    }
}

fn load_object(dir: &PinDir, max_pods: u32) -> Result<Ebpf, BpfError> {
    let retry = (ticks_per_second() / SYN_RETRY).max(1);
    let mut loader = EbpfLoader::new();
    loader.verifier_log_level(LOG_LEVEL).override_global("SYN_RETRY_TICKS", &retry, true);
    for (name, _, _) in PINNED {
        loader.map_pin_path(name, dir.map(name));
    }
    for name in PER_POD {
        // One more for the node.
        loader.map_max_entries(name, if name == "CARRIED" { max_pods.saturating_add(1) } else { max_pods });
    }
    loader.load(OBJECT).map_err(|error| BpfError::load("the eBPF maps", error))
}

/// aya takes any pinned map of the right name; this does not.
fn check_layouts(dir: &PinDir) -> Result<(), BpfError> {
    for (map, key, value) in PINNED {
        let info =
            aya::maps::MapInfo::from_pin(dir.map(map)).map_err(|source| BpfError::Map { map, source })?;
        let found = (info.key_size(), info.value_size());
        if found != (key, value) {
            return Err(BpfError::Layout {
                map,
                dir: dir.base().into(),
                found: format!("{}+{} bytes", found.0, found.1),
                expected: format!("{key}+{value} bytes"),
            });
        }
    }
    Ok(())
}

/// Loads all programs; only egress must succeed.
fn load_programs(ebpf: &mut Ebpf, degraded: &mut Vec<Degraded>) -> Result<(), BpfError> {
    for hook in Hook::ALL {
        if let Err(error) = load_program(ebpf, hook) {
            if hook == Hook::Egress {
                return Err(BpfError::load("program nb_egress", error));
            }
            let reason = Chain(Box::new(error)).to_string();
            tracing::warn!(hook = hook.label(), reason, without = hook.without(), "a hook does not work");
            degraded.push(Degraded { hook, reason });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_is_an_elf_file_with_every_program() {
        let mut ebpf = aya_obj_names(OBJECT);
        ebpf.sort();
        for hook in Hook::ALL {
            assert!(ebpf.iter().any(|name| name == hook.program()), "{}", hook.program());
        }
    }

    /// Names of the functions in the object: searched as text, which needs no privilege.
    fn aya_obj_names(object: &[u8]) -> Vec<String> {
        object
            .split(|byte| *byte == 0)
            .filter(|name| name.starts_with(b"nb_"))
            .map(|name| String::from_utf8_lossy(name).into_owned())
            .collect()
    }
}
