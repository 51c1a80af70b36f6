//! Learns of pod cgroups by inotify, where the kernel's tracepoints cannot be used.
//!
//! A watch sees only direct children, so it follows the tree: parent, QoS classes, pods. Each new directory is
//! watched first and listed afterwards; what appears twice is sent once. Pods are known tens of milliseconds before
//! their first process this way, but not with certainty before it, so this is a fall-back.

use std::{
    collections::HashMap,
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    time::Duration,
};

use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags},
    io::Errno,
};

use tokio::io::unix::AsyncFd;

use super::{
    model::{CgroupDir, CgroupEvent, CgroupEventKind},
    parents::PodParent,
    path::parse_below,
    scan::{child, children, on_disk},
    stream::CgroupSender,
};
use crate::sys::poll::readable;

/// Directories between a parent and its pods that are still followed, as in a scan.
const CLASS_DEPTH: u32 = 2;

/// How often a scan is asked for when watching is impossible.
const POLL: Duration = Duration::from_secs(1);

/// Why watching ended.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// A pod parent was removed.
    #[error("the pod parent {path} was removed: look for the pod parents again")]
    ParentGone {
        /// Which.
        path: PathBuf,
    },
    /// The kernel refused.
    #[error("cannot watch {path} for pod cgroups: {source}")]
    Io {
        /// What was to be watched.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Sends every pod and container cgroup that comes or goes below `parents` to `out`, those that exist already first.
/// Ends when nobody listens any more.
///
/// When the node has no inotify instance or watch left (`fs.inotify.max_user_{instances,watches}`), it says so once
/// and asks for a scan every second instead.
///
/// # Errors
/// [`WatchError`]; a removed parent is one, because the caller has to find the new one.
pub async fn run(parents: &[PodParent], out: &CgroupSender) -> Result<(), WatchError> {
    match Watch::start(parents, out) {
        Ok(watch) => watch.follow(out).await,
        Err(WatchError::Io { path, source }) if is_exhausted(&source) => {
            tracing::warn!(path = %path.display(), error = %source, "out of inotify watches, scanning pod cgroups every second instead");
            poll(parents, out).await
        }
        Err(error) => Err(error),
    }
}

fn is_exhausted(error: &io::Error) -> bool {
    let of = |errno: Errno| error.raw_os_error() == Some(errno.raw_os_error());
    of(Errno::MFILE) || of(Errno::NFILE) || of(Errno::NOSPC) || of(Errno::NOMEM)
}

async fn poll(parents: &[PodParent], out: &CgroupSender) -> Result<(), WatchError> {
    loop {
        if let Some(gone) = parents.iter().find(|parent| !parent.path.exists()) {
            return Err(WatchError::ParentGone { path: gone.path.clone() });
        }
        out.rescan();
        tokio::select! {
            () = out.closed() => return Ok(()),
            () = tokio::time::sleep(POLL) => {}
        }
    }
}

/// What a watched directory is.
#[derive(Debug, Clone)]
struct Watched {
    dir: CgroupDir,
    /// Index of its parent in the list of parents.
    parent: usize,
    /// The directory is a pod's: its children are containers and nothing below is followed.
    pod: bool,
}

#[derive(Debug)]
struct Watch {
    fd: AsyncFd<OwnedFd>,
    parents: Vec<PodParent>,
    watched: HashMap<i32, Watched>,
    /// Every cgroup that was sent as made, by its path, with its id: the id cannot be asked for after removal.
    known: HashMap<String, u64>,
    /// Send nothing, because the receiver will be asked for a scan.
    silent: bool,
}

/// One event of the kernel's queue, copied out of the read buffer.
struct Raw {
    wd: i32,
    flags: ReadFlags,
    name: String,
}

impl Watch {
    fn start(parents: &[PodParent], out: &CgroupSender) -> Result<Self, WatchError> {
        let first = parents.first().map(|parent| parent.path.clone()).unwrap_or_default();
        let io = |source: io::Error| WatchError::Io { path: first.clone(), source };
        let fd = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).map_err(|e| io(e.into()))?;
        let fd = readable(fd).map_err(io)?;
        let mut watch = Self {
            fd,
            parents: parents.to_vec(),
            watched: HashMap::new(),
            known: HashMap::new(),
            silent: false,
        };
        watch.cover(out)?;
        Ok(watch)
    }

    /// Watches and lists everything below all parents; what is watched already stays so.
    fn cover(&mut self, out: &CgroupSender) -> Result<(), WatchError> {
        for (index, parent) in self.parents.clone().iter().enumerate() {
            let dir = CgroupDir { id: parent.id, level: parent.level, path: parent.rel.clone() };
            self.enter(&Watched { dir, parent: index, pod: false }, out)?;
        }
        Ok(())
    }

    /// Watches one directory, then reports and enters its children. A directory that is gone is no error.
    fn enter(&mut self, entry: &Watched, out: &CgroupSender) -> Result<(), WatchError> {
        let Some(parent) = self.parents.get(entry.parent) else { return Ok(()) };
        let path = on_disk(parent, &entry.dir);
        let flags = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::DELETE_SELF
            | WatchFlags::ONLYDIR
            | WatchFlags::EXCL_UNLINK;
        match inotify::add_watch(self.fd.get_ref(), &path, flags) {
            Ok(wd) => self.watched.insert(wd, entry.clone()),
            Err(Errno::NOENT | Errno::NODEV | Errno::NOTDIR) => return self.gone(entry, path),
            Err(errno) => return Err(WatchError::Io { path, source: errno.into() }),
        };
        let Ok(found) = children(&path, &entry.dir) else { return self.gone(entry, path) };
        found.into_iter().try_for_each(|dir| self.made(dir, entry, out))
    }

    fn gone(&self, entry: &Watched, path: PathBuf) -> Result<(), WatchError> {
        let is_parent = self.parents.get(entry.parent).is_some_and(|parent| parent.id == entry.dir.id);
        if is_parent { Err(WatchError::ParentGone { path }) } else { Ok(()) }
    }

    fn made(&mut self, dir: CgroupDir, above: &Watched, out: &CgroupSender) -> Result<(), WatchError> {
        let Some(parent) = self.parents.get(above.parent) else { return Ok(()) };
        let pod = parse_below(&parent.rel, &dir.path);
        let new = pod.is_some() && self.known.insert(dir.path.clone(), dir.id) != Some(dir.id);
        if new && !self.silent {
            out.send(event(CgroupEventKind::Made, &dir));
        }
        let follow = !above.pod && (pod.is_some() || dir.level.saturating_sub(parent.level) < CLASS_DEPTH);
        if follow {
            let entry = Watched { dir, parent: above.parent, pod: pod.is_some() };
            self.enter(&entry, out)?;
        }
        Ok(())
    }

    fn removed(&mut self, dir: &CgroupDir, out: &CgroupSender) {
        if let Some(id) = self.known.remove(&dir.path) {
            out.send(event(CgroupEventKind::Removed, &CgroupDir { id, ..dir.clone() }));
        }
    }

    async fn follow(mut self, out: &CgroupSender) -> Result<(), WatchError> {
        loop {
            let events = tokio::select! {
                () = out.closed() => return Ok(()),
                ready = self.fd.readable() => {
                    let mut ready = ready.map_err(|source| WatchError::Io { path: "inotify".into(), source })?;
                    let events = read(self.fd.get_ref())
                        .map_err(|source| WatchError::Io { path: "inotify".into(), source })?;
                    if events.is_empty() {
                        ready.clear_ready();
                    }
                    events
                }
            };
            for event in events {
                self.handle(&event, out)?;
            }
        }
    }

    fn handle(&mut self, event: &Raw, out: &CgroupSender) -> Result<(), WatchError> {
        if event.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            tracing::warn!("inotify queue overflow, scanning all pod cgroups");
            self.known.clear();
            self.silent = true;
            let covered = self.cover(out);
            self.silent = false;
            out.rescan();
            return covered;
        }
        if event.flags.contains(ReadFlags::IGNORED) {
            let Some(entry) = self.watched.remove(&event.wd) else { return Ok(()) };
            return match self.parents.get(entry.parent) {
                Some(parent) if parent.id == entry.dir.id => self.gone(&entry, parent.path.clone()),
                _ => Ok(()),
            };
        }
        let Some(above) = self.watched.get(&event.wd).cloned() else { return Ok(()) };
        if !event.flags.contains(ReadFlags::ISDIR) {
            return Ok(());
        }
        let mut dir = child(&above.dir, &event.name, 0);
        if event.flags.contains(ReadFlags::DELETE) {
            self.removed(&dir, out);
        } else if event.flags.contains(ReadFlags::CREATE)
            && let Some(parent) = self.parents.get(above.parent)
            && let Ok(stat) = rustix::fs::stat(on_disk(parent, &dir))
        {
            dir.id = stat.st_ino;
            self.made(dir, &above, out)?;
        }
        Ok(())
    }
}

fn event(kind: CgroupEventKind, dir: &CgroupDir) -> CgroupEvent {
    CgroupEvent { kind, id: dir.id, level: dir.level, path: dir.path.clone() }
}

/// All events that one read returns; none when the queue is empty.
fn read(fd: impl AsFd) -> io::Result<Vec<Raw>> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(fd, &mut buffer);
    let mut events = Vec::new();
    loop {
        match reader.next() {
            Ok(event) => events.push(Raw {
                wd: event.wd(),
                flags: event.events(),
                name: event.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
            }),
            Err(Errno::AGAIN) => return Ok(events),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        if reader.is_buffer_empty() {
            return Ok(events);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt, path::Path};

    use super::{
        super::{
            parents::Driver,
            stream::{CgroupReceiver, Item, channel},
        },
        *,
    };

    const UID: &str = "72f9a42e-50d3-47ee-8ec7-0bccfb6ea7ae";
    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const BOUND: Duration = Duration::from_secs(20);

    fn parent(root: &Path) -> PodParent {
        let path = root.join("kubepods");
        fs::create_dir_all(&path).expect("mkdir");
        let id = fs::metadata(&path).expect("stat").ino();
        PodParent { path, rel: "/kubepods".into(), level: 1, id, driver: Driver::Cgroupfs }
    }

    async fn next(receiver: &mut CgroupReceiver) -> CgroupEvent {
        match tokio::time::timeout(BOUND, receiver.recv()).await.expect("an item in time") {
            Some(Item::Event(event)) => event,
            other => panic!("expected an event, got {other:?}"),
        }
    }

    /// Runs `test` beside a watch of one parent and returns how the watch ended.
    async fn with_watch<F>(
        parent: &PodParent,
        capacity: usize,
        test: impl FnOnce(CgroupReceiver) -> F,
    ) -> Result<(), WatchError>
    where
        F: Future<Output = ()>,
    {
        let (sender, receiver) = channel(capacity);
        let parents = [parent.clone()];
        let watch =
            async { tokio::time::timeout(BOUND, run(&parents, &sender)).await.expect("the watch ends") };
        tokio::join!(watch, test(receiver)).0
    }

    #[tokio::test]
    async fn existing_and_new_pods_and_their_removal() {
        let dir = tempfile::tempdir().expect("tempdir");
        let parent = parent(dir.path());
        let old = parent.path.join(format!("burstable/pod{UID}"));
        fs::create_dir_all(old.join(ID)).expect("mkdir");
        let id = fs::metadata(&old).expect("stat").ino();
        let path = parent.path.clone();

        with_watch(&parent, 64, |mut events| async move {
            let pod = next(&mut events).await;
            assert_eq!((pod.kind, pod.id, pod.level), (CgroupEventKind::Made, id, 3));
            assert_eq!(pod.path, format!("/kubepods/burstable/pod{UID}"));
            assert_eq!(next(&mut events).await.path, format!("/kubepods/burstable/pod{UID}/{ID}"));

            // A class, a pod and a container made at once: the watches must be followed by listings.
            let new = path.join("besteffort/pod2c48913c-b29f-11e7-9350-020968147796");
            fs::create_dir_all(new.join(ID)).expect("mkdir");
            let pod = next(&mut events).await;
            assert_eq!((pod.level, pod.id), (3, fs::metadata(&new).expect("stat").ino()));
            let container = next(&mut events).await;
            assert_eq!((container.level, container.path.ends_with(ID)), (4, true));

            fs::remove_dir(new.join(ID)).expect("rmdir");
            let gone = next(&mut events).await;
            assert_eq!((gone.kind, gone.id), (CgroupEventKind::Removed, container.id));
            fs::remove_dir(&new).expect("rmdir");
            let gone = next(&mut events).await;
            assert_eq!((gone.kind, gone.id), (CgroupEventKind::Removed, pod.id));
        })
        .await
        .expect("ends when the receiver goes");
    }

    /// Pods that are made while the watch starts are reported exactly once.
    #[tokio::test]
    async fn none_lost_and_none_twice_while_starting() {
        let dir = tempfile::tempdir().expect("tempdir");
        let parent = parent(dir.path());
        let made = parent.path.clone();
        let maker = std::thread::spawn(move || {
            for n in 0..200 {
                let pod = made.join(format!("burstable/pod00000000-0000-0000-0000-{n:012x}"));
                fs::create_dir_all(pod.join(ID)).expect("mkdir");
            }
        });
        with_watch(&parent, 1024, |mut events| async move {
            let mut seen = std::collections::HashSet::new();
            while seen.len() < 400 {
                let event = next(&mut events).await;
                assert!(seen.insert(event.path.clone()), "twice: {}", event.path);
            }
        })
        .await
        .expect("ends when the receiver goes");
        maker.join().expect("maker");
    }

    #[tokio::test]
    async fn a_removed_parent_ends_the_watch() {
        let dir = tempfile::tempdir().expect("tempdir");
        let parent = parent(dir.path());
        let (sender, _receiver) = channel(8);
        let parents = [parent.clone()];
        let remove = async {
            tokio::task::yield_now().await;
            fs::remove_dir(&parent.path).expect("rmdir");
        };
        let watch = tokio::time::timeout(BOUND, run(&parents, &sender));
        let (ended, ()) = tokio::join!(watch, remove);
        let ended = ended.expect("ends in time");
        assert!(matches!(ended, Err(WatchError::ParentGone { .. })), "{ended:?}");
    }

    /// After an overflow the watch covers what it missed, and the receiver scans.
    #[tokio::test]
    async fn overflow_asks_for_one_scan_and_then_goes_on() {
        let dir = tempfile::tempdir().expect("tempdir");
        let parent = parent(dir.path());
        let (sender, mut receiver) = channel(8);
        let mut watch = Watch::start(std::slice::from_ref(&parent), &sender).expect("watch");
        let pod = parent.path.join(format!("pod{UID}"));
        fs::create_dir(&pod).expect("mkdir");
        let lost = Raw { wd: -1, flags: ReadFlags::QUEUE_OVERFLOW, name: String::new() };
        watch.handle(&lost, &sender).expect("covers again");
        assert_eq!(receiver.recv().await, Some(Item::Rescan));

        fs::create_dir(pod.join(ID)).expect("mkdir");
        let follow = async { tokio::time::timeout(BOUND, watch.follow(&sender)).await.expect("ends") };
        let check = async {
            let made = next(&mut receiver).await;
            assert!(made.path.ends_with(ID), "the missed pod is watched, but not sent again: {made:?}");
            drop(receiver);
        };
        tokio::join!(follow, check).0.expect("follow");
    }

    #[tokio::test]
    async fn polling_asks_for_scans() {
        let dir = tempfile::tempdir().expect("tempdir");
        let parents = [parent(dir.path())];
        let (sender, mut receiver) = channel(1);
        let ask = async {
            assert_eq!(receiver.recv().await, Some(Item::Rescan));
            drop(receiver);
        };
        let (ended, ()) = tokio::join!(poll(&parents, &sender), ask);
        ended.expect("ends when the receiver goes");
        assert!(is_exhausted(&Errno::NOSPC.into()) && is_exhausted(&Errno::MFILE.into()));
        assert!(!is_exhausted(&Errno::ACCESS.into()));
    }

    /// A directory of the real hierarchy, removed with everything below it.
    #[cfg(feature = "kernel-tests")]
    struct Scratch(PathBuf);

    #[cfg(feature = "kernel-tests")]
    impl Drop for Scratch {
        fn drop(&mut self) {
            fn remove(dir: &Path) {
                for entry in fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok) {
                    if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                        remove(&entry.path());
                    }
                }
                let _ = fs::remove_dir(dir);
            }
            remove(&self.0);
        }
    }

    /// The same on a cgroup file system, whose directories are full of files and whose inodes are the cgroups' ids.
    #[cfg(feature = "kernel-tests")]
    #[tokio::test]
    async fn real_cgroups() {
        use super::super::{parents, root, scan};

        let root = root::find(&root::RootOptions::default()).expect("the root of cgroup v2");
        let name = format!("nobypass-test-{}", std::process::id());
        let scratch = Scratch(root.path.join(&name));
        let parent_dir = scratch.0.join("kubepods");
        fs::create_dir_all(&parent_dir).expect("mkdir");
        let found = parents::find_parents(&root, std::slice::from_ref(&parent_dir)).expect("explicit");
        let parent = &found[0];
        assert_eq!((parent.level, parent.id), (2, fs::metadata(&parent_dir).expect("stat").ino()));
        let pod = parent_dir.join(format!("burstable/pod{UID}"));

        with_watch(parent, 64, |mut events| async move {
            fs::create_dir_all(pod.join(ID)).expect("mkdir");
            let (made_pod, made_container) = (next(&mut events).await, next(&mut events).await);
            assert_eq!((made_pod.level, made_container.level), (4, 5));
            let scan = scan::scan(parent).expect("scan");
            assert_eq!((scan.pods[0].dir.id, scan.vanished), (made_pod.id, 0));
            assert_eq!(scan.pods[0].containers[0].dir.id, made_container.id);
            fs::remove_dir(pod.join(ID)).expect("rmdir");
            assert_eq!(next(&mut events).await.id, made_container.id);
        })
        .await
        .expect("ends when the receiver goes");
    }
}
