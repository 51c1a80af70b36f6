//! Keeps the agent from fighting another writer: a bound on all writing, and a detector for one who undoes each patch.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::time::{Duration, Instant};

/// The same content patched again this often within [`WINDOW`] is a fight.
pub const REVERTS: usize = 5;
/// See [`REVERTS`]: 30 s.
pub const WINDOW: Duration = Duration::from_secs(30);
/// Longest pause between two patches of a file that is fought over: 1 min.
pub const MAX_PAUSE: Duration = Duration::from_secs(60);
/// A fight is over when nothing was undone for this long: 5 min.
pub const PEACE: Duration = Duration::from_secs(300);
/// Contents remembered for each file, so that two writers taking turns are noticed too.
const REMEMBERED: usize = 4;

/// A bucket of tokens, one for each write.
#[derive(Clone, Debug)]
pub struct Bucket {
    capacity: f64,
    per_second: f64,
    tokens: f64,
    at: Instant,
}

impl Bucket {
    /// Full at first.
    pub fn new(capacity: u32, per_second: u32, now: Instant) -> Self {
        Self { capacity: capacity.into(), per_second: per_second.into(), tokens: capacity.into(), at: now }
    }

    /// Whole tokens that are there.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "at least zero and at most the capacity, which came from a u32"
    )]
    pub fn available(&mut self, now: Instant) -> usize {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.tokens = passed.mul_add(self.per_second, self.tokens).min(self.capacity);
        self.tokens.max(0.0) as usize
    }

    /// Uses tokens; a debt is paid before the next one.
    pub fn take(&mut self, count: u32) {
        self.tokens -= f64::from(count);
    }

    /// Until there is one again.
    pub fn wait(&self) -> Duration {
        Duration::from_secs_f64((1.0 - self.tokens).max(0.0) / self.per_second)
    }
}

/// Another writer keeps undoing patches of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fight {
    /// Patches undone so far.
    pub reverts: u32,
    /// The file is not patched again before this.
    pub until: Instant,
    /// True for the first one, when it is worth a warning.
    pub new: bool,
}

#[derive(Clone, Debug, Default)]
struct Record {
    /// Hashes of contents that were patched, newest last.
    patched: VecDeque<u64>,
    /// When a patch of one of them was seen undone.
    undone: VecDeque<Instant>,
    reverts: u32,
    pause: Duration,
    until: Option<Instant>,
}

/// Watches for writers who put back what was patched.
#[derive(Clone, Debug, Default)]
pub struct Fights {
    files: BTreeMap<OsString, Record>,
}

impl Fights {
    /// `file` was patched from content with this hash. When that content was patched before, somebody put it back.
    pub fn patched(&mut self, file: &OsStr, from: u64, now: Instant) -> Option<Fight> {
        let record = self.files.entry(file.to_owned()).or_default();
        if record.undone.back().is_some_and(|last| now.saturating_duration_since(*last) > PEACE) {
            *record = Record::default();
        }
        if !record.patched.contains(&from) {
            record.patched.push_back(from);
            if record.patched.len() > REMEMBERED {
                record.patched.pop_front();
            }
            return None;
        }
        record.undone.push_back(now);
        record.reverts += 1;
        let fighting = record.until.is_some();
        let recent = record.undone.iter().filter(|at| now.saturating_duration_since(**at) <= WINDOW).count();
        if record.undone.len() > REVERTS {
            record.undone.pop_front();
        }
        if !fighting && recent < REVERTS {
            return None;
        }
        record.pause = (record.pause * 2).clamp(Duration::from_secs(1), MAX_PAUSE);
        let until = now + record.pause;
        record.until = Some(until);
        Some(Fight { reverts: record.reverts, until, new: !fighting })
    }

    /// Until when a file is left alone.
    pub fn until(&self, file: &OsStr, now: Instant) -> Option<Instant> {
        self.files.get(file)?.until.filter(|until| *until > now)
    }

    /// Files that are fought over, with the number of patches undone.
    pub fn going_on(&self, now: Instant) -> impl Iterator<Item = (&OsStr, u32)> {
        self.files.iter().filter_map(move |(file, record)| {
            let last = record.undone.back()?;
            let on = record.until.is_some() && now.saturating_duration_since(*last) <= PEACE;
            on.then_some((file.as_os_str(), record.reverts))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "05-cilium.conflist";

    #[test]
    fn the_bucket_bounds_bursts_and_the_long_run() {
        let start = Instant::now();
        let mut bucket = Bucket::new(10, 5, start);
        assert_eq!(bucket.available(start), 10);
        bucket.take(12);
        assert_eq!(bucket.available(start), 0);
        assert_eq!(bucket.wait(), Duration::from_millis(600));
        assert_eq!(bucket.available(start + Duration::from_millis(599)), 0);
        assert_eq!(bucket.available(start + Duration::from_millis(601)), 1);
        assert_eq!(bucket.available(start + Duration::from_secs(100)), 10);
    }

    #[test]
    fn a_writer_with_news_is_no_fight() {
        let (mut fights, now) = (Fights::default(), Instant::now());
        for change in 0..1000 {
            assert_eq!(fights.patched(OsStr::new(FILE), change, now), None);
        }
    }

    #[test]
    fn a_writer_who_restarts_now_and_then_is_no_fight() {
        let (mut fights, mut now) = (Fights::default(), Instant::now());
        for _ in 0..100 {
            now += Duration::from_secs(10);
            assert_eq!(fights.patched(OsStr::new(FILE), 7, now), None);
        }
    }

    #[test]
    fn a_fight_is_noticed_and_backed_off_and_ends() {
        let (mut fights, mut now) = (Fights::default(), Instant::now());
        let mut pauses = Vec::new();
        for round in 0..15 {
            // Two contents that take turns.
            if let Some(fight) = fights.patched(OsStr::new(FILE), round % 2, now) {
                assert_eq!(fight.new, pauses.is_empty());
                pauses.push((fight.until - now).as_secs());
                assert_eq!(fights.until(OsStr::new(FILE), now), Some(fight.until));
                now = fight.until;
            }
            now += Duration::from_millis(5);
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(fights.going_on(now).collect::<Vec<_>>(), [(OsStr::new(FILE), 13)]);
        now += PEACE + Duration::from_secs(1);
        assert_eq!(fights.going_on(now).count(), 0);
        assert_eq!(fights.patched(OsStr::new(FILE), 1, now), None);
    }
}
