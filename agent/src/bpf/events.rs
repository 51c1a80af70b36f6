//! Reading the ring buffers.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use aya::maps::{Map, MapData, RingBuf};
use nobypass_common::abi::{CGROUP_PATH_MAX, CgroupRecord, Event};
use nobypass_common::headers::address;
use nobypass_common::ids::CgroupChange;
use tokio::io::unix::AsyncFd;

use super::error::BpfError;
use super::pins::PinDir;
use crate::sys::poll::readable;

/// A cgroup below a parent was made or removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupNotice {
    /// Cgroup id.
    pub id: u64,
    /// Level; the root is 0.
    pub level: u32,
    /// What happened.
    pub change: CgroupChange,
    /// Path below the cgroup root; `None` if it was too long for the record.
    pub path: Option<String>,
}

/// A ring buffer, opened from its pin: what was written while no agent ran is read too.
#[derive(Debug)]
pub struct Ring {
    fd: AsyncFd<Fd>,
}

/// `AsyncFd` wants to own something with a descriptor.
struct Fd(RingBuf<MapData>);

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl std::fmt::Debug for Fd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("RingBuf").finish_non_exhaustive()
    }
}

impl Ring {
    /// Opens ring buffer `name`. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`BpfError::Map`], [`BpfError::Pin`].
    pub fn open(dir: &PinDir, name: &'static str) -> Result<Self, BpfError> {
        let map = |source| BpfError::Map { map: name, source };
        let data = MapData::from_pin(dir.map(name)).map_err(map)?;
        let ring = RingBuf::try_from(Map::RingBuf(data)).map_err(map)?;
        let fd = readable(Fd(ring)).map_err(|source| BpfError::Pin {
            what: "poll",
            path: dir.map(name),
            source,
        })?;
        Ok(Self { fd })
    }

    /// Waits for records and hands all that are there to `take`.
    ///
    /// # Errors
    /// As poll(2) says.
    pub async fn drain(&mut self, mut take: impl FnMut(&[u8])) -> io::Result<()> {
        let mut ready = self.fd.readable_mut().await?;
        let ring = &mut ready.get_inner_mut().0;
        while let Some(record) = ring.next() {
            take(&record);
        }
        ready.clear_ready();
        Ok(())
    }
}

/// Reads fields off a record; a short record reads as zeros.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk::<N>() {
            Some((bytes, rest)) => {
                self.0 = rest;
                *bytes
            }
            None => [0; N],
        }
    }

    fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.bytes())
    }

    fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.bytes())
    }

    fn u16(&mut self) -> u16 {
        u16::from_ne_bytes(self.bytes())
    }
}

/// Reads a record of `EVENTS`; `None` if it is not one.
pub fn event(record: &[u8]) -> Option<Event> {
    if record.len() < size_of::<Event>() {
        return None;
    }
    let mut r = Reader(record);
    Some(Event {
        ts_ns: r.u64(),
        pod: r.u64(),
        container: r.u64(),
        cookie: r.u64(),
        saddr: address(r.bytes()),
        daddr: address(r.bytes()),
        uid: r.u32(),
        ifindex: r.u32(),
        sport: r.u16(),
        dport: r.u16(),
        family: r.u16(),
        protocol: r.u16(),
        verdict: r.u16(),
        action: r.u16(),
        hook: r.u16(),
        mode: r.u16(),
    })
}

/// Reads a record of `CGROUPS`; `None` if it is not one.
pub fn cgroup_notice(record: &[u8]) -> Option<CgroupNotice> {
    if record.len() < size_of::<CgroupRecord>() {
        return None;
    }
    let mut r = Reader(record);
    let (id, level, change, len, _) = (r.u64(), r.u32(), r.u32(), r.u32(), r.u32());
    let path: [u8; CGROUP_PATH_MAX] = r.bytes();
    let len = usize::try_from(len).ok()?;
    // One byte less than the room: the string may have been longer.
    let path = if len + 1 < CGROUP_PATH_MAX { path.get(..len) } else { None };
    Some(CgroupNotice {
        id,
        level,
        change: CgroupChange::from_code(change)?,
        path: path.map(|path| String::from_utf8_lossy(path).into_owned()),
    })
}

#[cfg(test)]
mod tests {
    use nobypass_common::headers::address_bytes;

    use super::*;

    /// The record as the kernel writes it: the structure's own bytes, laid out by the compiler.
    fn cgroup_bytes(id: u64, level: u32, change: u32, path: &str, path_len: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(id.to_ne_bytes());
        for word in [level, change, path_len, 0] {
            bytes.extend(word.to_ne_bytes());
        }
        let mut room = [0; CGROUP_PATH_MAX];
        room[..path.len()].copy_from_slice(path.as_bytes());
        bytes.extend(room);
        assert_eq!(bytes.len(), size_of::<CgroupRecord>());
        assert_eq!(std::mem::offset_of!(CgroupRecord, path), 24);
        assert_eq!(std::mem::offset_of!(CgroupRecord, change), 12);
        bytes
    }

    #[test]
    fn cgroup_records() {
        let bytes = cgroup_bytes(7, 2, 0, "/kubepods/podx", 14);
        let notice =
            CgroupNotice { id: 7, level: 2, change: CgroupChange::Made, path: Some("/kubepods/podx".into()) };
        assert_eq!(cgroup_notice(&bytes), Some(notice));
        assert_eq!(cgroup_notice(&bytes[..100]), None);
        assert_eq!(cgroup_notice(&cgroup_bytes(7, 2, 9, "/x", 2)), None, "an unknown change");
        let cut = cgroup_bytes(7, 2, 1, "/x", u32::try_from(CGROUP_PATH_MAX).unwrap() - 1);
        assert_eq!(cgroup_notice(&cut).unwrap().path, None, "a path that may be cut");
    }

    #[test]
    fn events_are_read_in_the_order_of_the_structure() {
        let mut bytes = vec![0u8; size_of::<Event>()];
        bytes[std::mem::offset_of!(Event, cookie)] = 4;
        bytes[std::mem::offset_of!(Event, daddr)] = 192;
        bytes[std::mem::offset_of!(Event, uid)] = 5;
        bytes[std::mem::offset_of!(Event, dport)] = 80;
        bytes[std::mem::offset_of!(Event, mode)] = 3;
        let event = event(&bytes).unwrap();
        assert_eq!(
            (event.cookie, address_bytes(event.daddr)[0], event.uid, event.dport, event.mode),
            (4, 192, 5, 80, 3)
        );
        assert_eq!(super::event(&bytes[1..]), None);
    }
}
