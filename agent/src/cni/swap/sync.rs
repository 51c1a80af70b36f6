//! Durability of versions that are in place already: on a thread of its own, since a disk may take its time while
//! other files wait to be patched.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use super::{Step, Swapper};

/// A directory, and a file in it (`None` when only names changed).
pub(super) type Unsynced = (Arc<OwnedFd>, Option<Arc<OwnedFd>>);

/// The thread.
#[derive(Debug)]
pub(super) struct Syncer {
    jobs: Option<Sender<Vec<Unsynced>>>,
    /// Batches that are durable.
    done: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Syncer {
    fn start() -> io::Result<Self> {
        let (jobs, inbox) = channel::<Vec<Unsynced>>();
        let done = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&done);
        let thread = std::thread::Builder::new().name("cni-sync".to_owned()).spawn(move || {
            while let Ok(first) = inbox.recv() {
                // Everything that waits shares one flush.
                let batches: Vec<_> = std::iter::once(first).chain(inbox.try_iter()).collect();
                sync_all(&batches.concat());
                count.fetch_add(batches.len() as u64, Ordering::Release);
            }
        })?;
        Ok(Self { jobs: Some(jobs), done, thread: Some(thread) })
    }
}

impl Drop for Syncer {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that syncs CNI configs had panicked");
        }
    }
}

impl Swapper {
    /// From now on a thread waits for the disk; its end is waited for when this is dropped.
    pub fn sync_in_background(&mut self) -> io::Result<()> {
        self.syncer = Some(Syncer::start()?);
        self.batches = 0;
        Ok(())
    }

    /// Waits until everything is durable, and ends the thread.
    pub fn finish_sync(&mut self) {
        self.syncer = None;
    }

    /// The batch that versions put in place now belong to.
    pub(super) fn batch(&self) -> u64 {
        self.batches + 1
    }

    pub(super) fn is_durable(&self, batch: u64) -> bool {
        self.syncer.as_ref().is_none_or(|syncer| syncer.done.load(Ordering::Acquire) >= batch)
    }

    /// Makes what was put in place durable.
    pub(super) fn make_durable(&mut self) {
        if self.to_sync.is_empty() {
            return;
        }
        let batch = std::mem::take(&mut self.to_sync);
        self.batches += 1;
        let step = |step| self.seam.before(step).is_ok();
        if !step(Step::SyncFile) || !step(Step::SyncDir) {
            return self.batches -= 1;
        }
        let jobs = self.syncer.as_ref().and_then(|syncer| syncer.jobs.as_ref());
        let unsent = match jobs {
            Some(jobs) => jobs.send(batch).err().map(|unsent| unsent.0),
            None => Some(batch),
        };
        if let Some(batch) = unsent {
            sync_all(&batch);
        }
    }
}

fn sync_all(batch: &[Unsynced]) {
    let mut directories: Vec<&Arc<OwnedFd>> = Vec::new();
    for (directory, file) in batch {
        if let Some(file) = file {
            report(rustix::fs::fsync(file), "file");
        }
        if !directories.iter().any(|known| Arc::ptr_eq(known, directory)) {
            directories.push(directory);
        }
    }
    for directory in directories {
        report(rustix::fs::fsync(directory), "directory");
    }
}

fn report(synced: rustix::io::Result<()>, what: &'static str) {
    if let Err(error) = synced {
        // The disk has a problem that others report louder; after a power cut the next start puts things right.
        tracing::warn!(what, %error, "cannot make a patched CNI config durable");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_in_place_is_synced_before_the_end() {
        let temp = tempfile::tempdir().unwrap();
        let open = || Arc::new(OwnedFd::from(std::fs::File::open(temp.path()).unwrap()));
        let syncer = Syncer::start().unwrap();
        for _ in 0..10 {
            syncer.jobs.as_ref().unwrap().send(vec![(open(), Some(open())), (open(), None)]).unwrap();
        }
        drop(syncer);
    }
}
