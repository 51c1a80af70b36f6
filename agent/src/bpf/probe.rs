//! The program that answers probes, and its map.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use aya::Ebpf;
use aya::maps::{HashMap, Map, MapData};
use aya::programs::{CgroupSkb, ProgramError};
use nobypass_common::abi::ProbeRecord;

use super::error::BpfError;
use super::pins::PinDir;
use crate::sys::bpf::{AttachType, create_link};

/// The program's name.
pub const PROGRAM: &str = "nb_probe";

/// Loads the program and attaches it to a cgroup, for as long as the result lives.
///
/// # Errors
/// [`BpfError`].
pub fn attach(ebpf: &mut Ebpf, path: &Path) -> Result<OwnedFd, BpfError> {
    let load = |error: ProgramError| BpfError::load(format!("program {PROGRAM}"), error);
    let program: &mut CgroupSkb =
        ebpf.program_mut(PROGRAM).ok_or(ProgramError::NotLoaded).and_then(TryInto::try_into).map_err(load)?;
    program.load().map_err(load)?;
    let failed = |source: std::io::Error| BpfError::Attach {
        hook: "probe",
        cgroup: path.into(),
        source: Box::new(source),
        remedy: BpfError::NEEDS_CAPS.into(),
    };
    let cgroup = File::open(path).map_err(failed)?;
    let program = program.fd().map_err(load)?;
    create_link(program.as_fd(), cgroup.as_fd(), AttachType::Egress).map_err(failed)
}

/// The map of probes under way.
#[derive(Debug)]
pub struct Records(HashMap<MapData, u64, ProbeRecord>);

impl Records {
    /// Opens it from its pin below `--bpf-dir`.
    ///
    /// # Errors
    /// [`BpfError::Map`].
    pub fn open(bpf_dir: &Path) -> Result<Self, BpfError> {
        let map = |source| BpfError::Map { map: "PROBES", source };
        let data = MapData::from_pin(PinDir::new(bpf_dir).map("PROBES")).map_err(map)?;
        Ok(Self(Map::HashMap(data).try_into().map_err(map)?))
    }

    /// Expects the SYN of the socket with this cookie.
    ///
    /// # Errors
    /// [`BpfError::Map`], `E2BIG` when too many are under way.
    pub fn begin(&mut self, cookie: u64) -> Result<(), BpfError> {
        self.0
            .insert(cookie, ProbeRecord::default(), 0)
            .map_err(|source| BpfError::Map { map: "PROBES", source })
    }

    /// What came of it.
    pub fn end(&mut self, cookie: u64) -> Option<ProbeRecord> {
        let record = self.0.get(&cookie, 0).ok();
        // It is there: `begin` put it there.
        let _ = self.0.remove(&cookie);
        record
    }
}
