//! Eight writers, four files, every way to write one, and a reader who never rests.
//!
//! `NOBYPASS_CAMPAIGN=N` makes each writer do N changes instead of the few hundred of a quick run.
#![allow(missing_docs, reason = "test binary")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "test code")]

mod cni_support;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Seek as _, Write as _};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cni_support::*;
use nobypass::cni::guard::{Config, Guard, Want};
use nobypass::cni::metrics::Metrics;

const FILES: usize = 4;
const WRITERS: usize = 8;
/// Changes of each writer before all rest.
const AT_ONCE: usize = 6;

/// A generator of the same numbers in each run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: u64) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % below
    }
}

/// The file's owners agree among themselves who writes when, so that "the newest" is well defined; with the agent
/// nobody agrees on anything.
struct Shared {
    dir: PathBuf,
    /// The newest bytes of each file; `None` when its owner deleted it.
    newest: [Mutex<Option<String>>; FILES],
    changes: AtomicU64,
    serial: AtomicU64,
}

impl Shared {
    fn path(&self, file: usize) -> PathBuf {
        self.dir.join(format!("{file}0-net.conflist"))
    }

    /// A new version of random length.
    fn version(&self, numbers: &mut Numbers) -> String {
        let serial = self.serial.fetch_add(1, Ordering::SeqCst);
        list(&serial.to_string(), usize::try_from(numbers.next(3000)).unwrap())
    }
}

fn pause(numbers: &mut Numbers, micros: u64) {
    let (start, length) = (Instant::now(), Duration::from_micros(numbers.next(micros + 1)));
    while start.elapsed() < length {
        std::thread::yield_now();
    }
}

fn writer(shared: &Shared, seed: usize, rounds: usize) {
    let mut numbers = Numbers((seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    for _ in 0..rounds {
        let file = usize::try_from(numbers.next(FILES as u64)).unwrap();
        let path = shared.path(file);
        let text = shared.version(&mut numbers);
        let mut newest = shared.newest[file].lock().unwrap();
        let temp = shared.dir.join(format!(".writer-{seed}"));
        let how = numbers.next(8);
        match how {
            0 | 1 => {
                fs::write(&temp, &text).unwrap();
                fs::rename(&temp, &path).unwrap();
            }
            2 | 3 => in_pieces(&path, &text, &mut numbers),
            4 => held(&path, &text, &mut numbers),
            5 => {
                let _ = fs::remove_file(&path);
                pause(&mut numbers, 300);
                fs::write(&path, &text).unwrap();
            }
            6 => {
                fs::write(&temp, &text).unwrap();
                let _ = fs::remove_file(&path);
                fs::hard_link(&temp, &path).unwrap();
                fs::remove_file(&temp).unwrap();
            }
            _ => {
                // The name becomes a link, whose file was never under a config's name.
                let real = shared.dir.join(format!("real-{file}-{}", numbers.next(1 << 30)));
                fs::write(&real, &text).unwrap();
                symlink(real.file_name().unwrap(), &temp).unwrap();
                fs::rename(&temp, &path).unwrap();
            }
        }
        shared.changes.fetch_add(1, Ordering::SeqCst);
        *newest = Some(text);
        drop(newest);
        pause(&mut numbers, 1500);
    }
}

/// Truncates and writes.
fn in_pieces(path: &Path, text: &str, numbers: &mut Numbers) {
    let mut file = File::create(path).unwrap();
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        let length = usize::try_from(numbers.next(1200)).unwrap().max(1).min(rest.len());
        let (piece, later) = rest.split_at(length);
        file.write_all(piece).unwrap();
        rest = later;
        pause(numbers, 200);
    }
}

/// Opens, takes its time, and writes through the old descriptor.
fn held(path: &Path, text: &str, numbers: &mut Numbers) {
    let Ok(mut file) = OpenOptions::new().write(true).open(path) else {
        return in_pieces(path, text, numbers);
    };
    pause(numbers, 2000);
    file.set_len(0).unwrap();
    pause(numbers, 500);
    file.rewind().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    pause(numbers, 500);
}

/// What a reader saw.
#[derive(Default)]
struct Seen {
    reads: AtomicU64,
    entries: AtomicU64,
}

/// As close to a snapshot as reading gets.
fn read_once(file: &File) -> String {
    let mut bytes = vec![0; 64 << 10];
    let length = std::os::unix::fs::FileExt::read_at(file, &mut bytes, 0).unwrap();
    bytes.truncate(length);
    String::from_utf8(bytes).unwrap()
}

/// Every state is the owner's own, whole or not, or whole with one entry.
fn reader(shared: &Shared, seen: &Seen, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        for file in 0..FILES {
            let Ok(open) = File::open(shared.path(file)) else { continue };
            let text = read_once(&open);
            seen.reads.fetch_add(1, Ordering::Relaxed);
            if !text.contains("linkerd-cni") {
                continue; // the owner's, in whatever state
            }
            seen.entries.fetch_add(1, Ordering::Relaxed);
            let value: serde_json::Value = match serde_json::from_str(&text) {
                Ok(value) => value,
                // An owner writes in place over what we wrote, and the read got some of both.
                Err(_) if read_once(&open) != text => continue,
                Err(error) => panic!("{error} in what we wrote:\n{text}"),
            };
            assert_eq!(entries(&text), 1, "{value}");
        }
    }
}

/// Ends the reader.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn eight_writers_lose_nothing() {
    let rounds: usize =
        std::env::var("NOBYPASS_CAMPAIGN").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(120);
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("net.d");
    fs::create_dir(&dir).unwrap();
    let shared = Arc::new(Shared {
        dir: dir.clone(),
        newest: Default::default(),
        changes: AtomicU64::new(0),
        serial: AtomicU64::new(0),
    });
    let metrics = Metrics::default();
    let config = Config { burst: 1_000_000, ..Config::new(dir.clone()) };
    let guard = Guard::start(config, Want::Entry(wanted()), metrics.clone()).unwrap();
    let (seen, stop) = (Seen::default(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| reader(&shared, &seen, &stop));
        // Also when this fails.
        let stop = Stop(&stop);
        // All writers rest now and then, so that a change that was lost is found.
        for round in 0..rounds.div_ceil(AT_ONCE) {
            std::thread::scope(|writers| {
                for seed in 1..=WRITERS {
                    let shared = &shared;
                    writers.spawn(move || writer(shared, round * WRITERS + seed, AT_ONCE));
                }
            });
            wait_for_the_newest(&shared, &guard);
        }
        drop(stop);
    });
    let (changes, writes) = (shared.changes.load(Ordering::SeqCst), metrics.writes.get());
    println!(
        "{changes} changes, {writes} own writes, {} reads of which {} with an entry; {:?}",
        seen.reads.load(Ordering::Relaxed),
        seen.entries.load(Ordering::Relaxed),
        nobypass::cni::metrics::RESULTS.map(|result| (result, metrics.counted(result)))
    );
    assert!(writes <= changes, "{writes} own writes for {changes} changes");
    guard.stop();
    assert_eq!(hidden(&dir), Vec::<String>::new());
}

fn wait_for_the_newest(shared: &Shared, guard: &Guard) {
    let start = Instant::now();
    let expected: BTreeMap<_, _> = (0..FILES)
        .filter_map(|file| Some((shared.path(file), shared.newest[file].lock().unwrap().clone()?)))
        .collect();
    let good = |path: &Path, owner: &str| {
        let text = fs::read_to_string(path).unwrap_or_default();
        serial_of(&text) == serial_of(owner) && entries(&text) == 1
    };
    while !expected.iter().all(|(path, owner)| good(path, owner)) {
        if start.elapsed() > HANG {
            for (path, owner) in &expected {
                let text = fs::read_to_string(path).unwrap_or_default();
                println!("{}: has {:?}, wants {:?}", path.display(), serial_of(&text), serial_of(owner));
            }
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            panic!("lost: {:#?}", runtime.block_on(guard.snapshot()));
        }
        std::thread::park_timeout(Duration::from_millis(2));
    }
    for (path, owner) in &expected {
        assert_patched(path, owner);
    }
    assert_eq!(expected.len(), FILES);
}
