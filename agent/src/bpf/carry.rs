//! The upgrade from another layout of the maps: its links run our programs from one packet to the next, and what its maps
//! know goes into ours.
//!
//! In this order: who the pods are and what is exempt, before our programs judge anything; the links, each updated in
//! place; then the counters, which nobody changes any more. An agent that dies in between leaves a state from which the next
//! one does the same again: what is copied is what is there, not what is added.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::{fs, io};

use aya::Pod;
use aya::maps::lpm_trie::LpmTrie;
use aya::maps::{HashMap, Map, MapData, MapError, PerCpuArray, PerCpuHashMap};
use nobypass_common::abi::{
    CARRIED_NODE, CidrKey, IdKey, LedgerKey, LedgerSums, PodCounters, PodName, PodPolicy, PortKey, Refusal,
};

use super::error::BpfError;
use super::hooks::Hook;
use super::maps::{Maps, is_errno, sum};
use super::parents::Parent;
use super::pins::PinDir;
use crate::sys::bpf as raw;

/// Earlier layouts, and which of their maps have records like ours. What is not named is not carried over, and a record that
/// changes needs a reader here. One that has `CARRIED` must add it to what it counted.
const EARLIER: [(u32, &[&str]); 3] = [
    // What is exempt had other keys; nothing is until the agent has classified the pods anew.
    (1, &["POLICY", "NAMES", "LEDGER", "COUNTERS", "TOTALS"]),
    // `CONFIG` had no `max_silence_ns`; an agent writes it anew anyway.
    (2, ALL_THREE),
    // No `CARRIED`.
    (3, ALL_THREE),
];
const ALL_THREE: &[&str] = &[
    "EXEMPT_PORTS",
    "EXEMPT_CIDRS",
    "EXEMPT_IDS",
    "REFUSALS",
    "POLICY",
    "NAMES",
    "LEDGER",
    "COUNTERS",
    "TOTALS",
];

/// The map flag for "only where there is none" (`BPF_NOEXIST`).
const NO_EXIST: u64 = 1;

/// A link of another layout that is ours now, and how to undo that.
#[derive(Debug)]
pub struct Taken {
    from: PathBuf,
    to: PathBuf,
    program: OwnedFd,
}

/// The layout to carry over: the latest before ours. Older ones beside it are leftovers of upgrades that were cut short.
#[derive(Debug)]
pub struct Older {
    dir: PathBuf,
    version: u32,
    maps: &'static [&'static str],
}

impl Older {
    /// What there is to carry over into `dir`.
    ///
    /// # Errors
    /// [`BpfError::Newer`]: there is nothing to be known of a later layout.
    pub fn find(dir: &PinDir) -> Result<Option<Self>, BpfError> {
        dir.check_none_newer()?;
        Ok(dir.others().into_iter().max().map(|(version, dir)| {
            let known = EARLIER.iter().find(|(earlier, _)| *earlier == version);
            if known.is_none() {
                tracing::warn!(
                    layout = version,
                    "the pins of another version have an unknown layout: counters \
                    begin at 0, and until a pod is classified anew it is treated as unknown"
                );
            }
            Self { dir, version, maps: known.map_or(&[], |(_, maps)| maps) }
        }))
    }

    /// Copies what our programs need to judge as the old ones do.
    ///
    /// # Errors
    /// [`BpfError::Map`] for our own maps only: an old map that cannot be read is left out, and said.
    pub fn carry_pods(&self, dir: &PinDir) -> Result<(), BpfError> {
        // Before the pods that refer to them.
        self.copy(dir, "EXEMPT_PORTS", copy_trie::<PortKey>)?;
        self.copy(dir, "EXEMPT_CIDRS", copy_trie::<CidrKey>)?;
        self.copy(dir, "EXEMPT_IDS", copy_hash::<IdKey, u8>)?;
        self.copy(dir, "REFUSALS", copy_hash::<u64, Refusal>)?;
        self.copy(dir, "POLICY", copy_hash::<u64, PodPolicy>)?;
        self.copy(dir, "NAMES", copy_hash::<u64, PodName>)?;
        self.copy(dir, "LEDGER", copy_hash::<LedgerKey, LedgerSums>)
    }

    fn copy(
        &self,
        dir: &PinDir,
        map: &'static str,
        copy: fn(MapData, MapData) -> Result<Copied, MapError>,
    ) -> Result<(), BpfError> {
        let Some(old) = self.open(map) else { return Ok(()) };
        let failed = |source| BpfError::Map { map, source };
        let new = MapData::from_pin(dir.map(map)).map_err(failed)?;
        let Copied { entries, no_room } = copy(old, new).map_err(failed)?;
        if no_room > 0 {
            tracing::warn!(
                map,
                layout = self.version,
                entries,
                no_room,
                "no room for all entries of another \
                version: give it a larger --max-pods"
            );
        }
        Ok(())
    }

    /// One of its maps, if its records are as ours.
    fn open(&self, map: &str) -> Option<MapData> {
        if !self.maps.contains(&map) {
            return None;
        }
        let pin = self.dir.join(map);
        let complain = |error: &dyn std::fmt::Display| {
            tracing::warn!(pin = %pin.display(), %error, "cannot carry over a map of another version");
        };
        match MapData::from_pin(&pin) {
            Ok(data) => match super::maps::has_our_layout(map, &data) {
                Ok(true) => return Some(data),
                Ok(false) => complain(&"it has another layout than that version's"),
                Err(error) => complain(&error),
            },
            Err(error) => complain(&error),
        }
        None
    }

    /// Makes its links at these parents ours; their programs are still the old ones.
    ///
    /// # Errors
    /// [`BpfError::Pin`]. What is in `taken` by then is to be given back.
    pub fn take_links(
        &self,
        dir: &PinDir,
        hooks: &[Hook],
        parents: &[Parent],
        taken: &mut Vec<Taken>,
    ) -> Result<(), BpfError> {
        for parent in parents {
            for hook in hooks {
                let to = dir.link(*hook, Some(parent.cgroup_id));
                let Some(from) = to.file_name().map(|name| self.dir.join(name)) else { continue };
                if to.exists() {
                    continue;
                }
                if let Some(program) = attached_program(&from, parent.cgroup_id) {
                    fs::rename(&from, &to).map_err(|source| BpfError::Pin {
                        what: "take over",
                        path: from.clone(),
                        source,
                    })?;
                    taken.push(Taken { from, to, program });
                }
            }
        }
        Ok(())
    }

    /// Writes down what its programs counted, once none of them runs any more.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn carry_counters(&self, maps: &mut Maps) -> Result<(), BpfError> {
        let failed = |map| move |source| BpfError::Map { map, source };
        if let Some(old) = self.open("TOTALS") {
            let old: PerCpuArray<_, PodCounters> =
                Map::PerCpuArray(old).try_into().map_err(failed("TOTALS"))?;
            maps.set_carried(CARRIED_NODE, &sum(old.get(&0, 0).map_err(failed("TOTALS"))?.iter()))?;
        }
        let Some(old) = self.open("COUNTERS") else { return Ok(()) };
        let old: PerCpuHashMap<_, u64, PodCounters> =
            Map::PerCpuHashMap(old).try_into().map_err(failed("COUNTERS"))?;
        let (mut pods, mut no_room) = (0, 0);
        for (pod, counters) in old.iter().filter_map(Result::ok) {
            match maps.set_carried(pod, &sum(counters.iter())) {
                Ok(()) => pods += 1,
                Err(BpfError::Map { source, .. }) if is_full(&source) => no_room += 1,
                Err(error) => return Err(error),
            }
        }
        if no_room > 0 {
            tracing::warn!(no_room, "no room for the counters of all pods: give it a larger --max-pods");
        }
        tracing::info!(layout = self.version, pods, "carried over what another version knew and counted");
        Ok(())
    }
}

/// Puts the old programs back: ours turned out not to work.
pub fn give_back(taken: Vec<Taken>) {
    for Taken { from, to, program } in taken {
        let back = raw::open_pin(&to)
            .and_then(|link| raw::update_link(link.as_fd(), program.as_fd()))
            .and_then(|()| fs::rename(&to, &from));
        if let Err(error) = back {
            tracing::error!(link = %from.display(), %error, "cannot give a link back to the version before");
        }
    }
}

/// The program of a pinned link, if that is attached to this cgroup.
fn attached_program(pin: &Path, cgroup: u64) -> Option<OwnedFd> {
    let link = raw::open_pin(pin).and_then(|link| raw::cgroup_link(link.as_fd())).ok().flatten()?;
    let program = (link.cgroup_id == cgroup).then(|| raw::program(link.program_id))?;
    program
        .inspect_err(
            |error: &io::Error| tracing::warn!(pin = %pin.display(), %error, "cannot open its program"),
        )
        .ok()
}

#[derive(Debug, Default)]
struct Copied {
    entries: usize,
    no_room: usize,
}

impl Copied {
    /// Counts an attempt; an entry that is there already is newer.
    fn count(&mut self, attempt: Result<(), MapError>) -> Result<(), MapError> {
        match attempt {
            Ok(()) => self.entries += 1,
            Err(error) if is_errno(&error, libc::EEXIST) => {}
            Err(error) if is_full(&error) => self.no_room += 1,
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

fn is_full(error: &MapError) -> bool {
    is_errno(error, libc::E2BIG) || is_errno(error, libc::ENOSPC)
}

fn copy_hash<K: Pod, V: Pod>(old: MapData, new: MapData) -> Result<Copied, MapError> {
    let old: HashMap<_, K, V> = Map::HashMap(old).try_into()?;
    let mut new: HashMap<_, K, V> = Map::HashMap(new).try_into()?;
    let mut copied = Copied::default();
    for (key, value) in old.iter().filter_map(Result::ok) {
        copied.count(new.insert(key, value, NO_EXIST))?;
    }
    Ok(copied)
}

fn copy_trie<K: Pod>(old: MapData, new: MapData) -> Result<Copied, MapError> {
    let old: LpmTrie<_, K, u8> = Map::LpmTrie(old).try_into()?;
    let mut new: LpmTrie<_, K, u8> = Map::LpmTrie(new).try_into()?;
    let mut copied = Copied::default();
    for (key, value) in old.iter().filter_map(Result::ok) {
        copied.count(new.insert(&key, value, NO_EXIST))?;
    }
    Ok(copied)
}
