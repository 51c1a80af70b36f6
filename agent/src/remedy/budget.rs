//! What keeps remedies from becoming a storm. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::subject::Workload;

const MINUTE: Duration = Duration::from_secs(60);
/// The longest pause between two evictions of a workload.
const MAX_PAUSE: Duration = Duration::from_secs(3600);
/// Workloads that are remembered; the one whose pause ends first is forgotten first.
const WORKLOADS: usize = 1024;

/// A token bucket: `per_minute` at once, and in each minute.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// Time that is worth a token, saved up.
    saved: Duration,
    at: Instant,
}

impl Bucket {
    /// A full one.
    pub fn new(now: Instant) -> Self {
        Self { saved: MINUTE, at: now }
    }

    /// Takes a token, or says when there will be one.
    ///
    /// # Errors
    /// The time at which to come again.
    pub fn take(&mut self, per_minute: u32, now: Instant) -> Result<(), Instant> {
        self.peek(per_minute, now)?;
        self.saved = self.saved.saturating_sub(price(per_minute));
        Ok(())
    }

    /// As [`take`](Self::take), taking nothing.
    ///
    /// # Errors
    /// As there.
    pub fn peek(&mut self, per_minute: u32, now: Instant) -> Result<(), Instant> {
        self.saved = (self.saved + now.saturating_duration_since(self.at)).min(MINUTE);
        self.at = now;
        let price = price(per_minute);
        if self.saved >= price { Ok(()) } else { Err(now + (price - self.saved)) }
    }

    /// Gives one back that was not used after all.
    pub fn refund(&mut self, per_minute: u32) {
        self.saved = (self.saved + price(per_minute)).min(MINUTE);
    }
}

fn price(per_minute: u32) -> Duration {
    MINUTE / per_minute.max(1)
}

/// `first`, doubled `times` times, up to `most`.
pub fn back_off(first: Duration, times: u32, most: Duration) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(times)).min(most)
}

/// Spreads what would otherwise come at one moment: up to a quarter more, the same for the same seed.
pub fn jitter(pause: Duration, seed: u128) -> Duration {
    let part = u32::try_from((seed ^ (seed >> 64)) & 0xff).unwrap_or(0);
    pause + pause * part / 1024
}

/// When each workload may lose its next pod.
#[derive(Clone, Debug, Default)]
pub struct Pauses {
    by_workload: BTreeMap<Workload, (Instant, u32)>,
}

impl Pauses {
    /// Whether a pod of it may be evicted.
    ///
    /// # Errors
    /// The time at which to come again.
    pub fn check(&self, workload: &Workload, now: Instant) -> Result<(), Instant> {
        match self.by_workload.get(workload) {
            Some((until, _)) if *until > now => Err(*until),
            _ => Ok(()),
        }
    }

    /// A pod of it was evicted.
    pub fn evicted(&mut self, workload: &Workload, first: Duration, now: Instant) {
        // One that was left alone for as long as its longest pause begins anew.
        self.by_workload.retain(|_, (until, _)| *until + MAX_PAUSE > now);
        let times = self.by_workload.get(workload).map_or(0, |(_, times)| *times);
        let until = now + back_off(first, times, MAX_PAUSE);
        if self.by_workload.len() >= WORKLOADS {
            let first = self.by_workload.iter().min_by_key(|(_, (until, _))| *until);
            if let Some(first) = first.map(|(workload, _)| workload.clone()) {
                self.by_workload.remove(&first);
            }
        }
        self.by_workload.insert(workload.clone(), (until, times.saturating_add(1)));
    }
}

/// Failures in a row, of whichever pods, that mean that the plugin itself is broken.
const FAILURES: u32 = 5;
/// The first pause after that.
const BROKEN: Duration = Duration::from_secs(30);
/// The longest.
const MAX_BROKEN: Duration = Duration::from_secs(600);

/// Stops everything while the plugin fails for every pod: an evicted one would not start again either.
#[derive(Clone, Debug, Default)]
pub struct Breaker {
    failures: u32,
    trips: u32,
    until: Option<Instant>,
    /// One repair is under way to see whether it works again.
    trial: bool,
}

impl Breaker {
    /// Whether a repair may start.
    ///
    /// # Errors
    /// The time at which to come again.
    pub fn check(&self, now: Instant) -> Result<(), Instant> {
        match self.until {
            Some(until) if until > now => Err(until),
            // The trial's end decides.
            Some(_) if self.trial => Err(now + BROKEN),
            _ => Ok(()),
        }
    }

    /// A repair starts.
    pub fn starts(&mut self) {
        self.trial = self.until.is_some();
    }

    /// A repair worked.
    pub fn worked(&mut self) {
        *self = Self::default();
    }

    /// The plugin failed.
    pub fn failed(&mut self, now: Instant) {
        self.failures = self.failures.saturating_add(1);
        if self.trial || (self.until.is_none() && self.failures >= FAILURES) {
            self.until = Some(now + back_off(BROKEN, self.trips, MAX_BROKEN));
            self.trips = self.trips.saturating_add(1);
        }
        self.trial = false;
    }

    /// A repair that says nothing about the plugin.
    pub fn neither(&mut self) {
        self.trial = false;
    }

    /// Whether it has tripped.
    pub fn is_open(&self) -> bool {
        self.until.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_lets_a_minutes_worth_through_at_once_and_then_one_by_one() {
        let start = Instant::now();
        let mut bucket = Bucket::new(start);
        assert!((0..4).all(|_| bucket.take(4, start).is_ok()));
        let next = bucket.take(4, start).unwrap_err();
        assert_eq!(next, start + Duration::from_secs(15));
        assert!(bucket.take(4, next).is_ok());
        assert!(bucket.take(4, next).is_err());
        bucket.refund(4);
        assert!(bucket.peek(4, next).is_ok() && bucket.take(4, next).is_ok());
        let mut at = next;
        let in_an_hour = (0..3600).filter(|_| {
            at += Duration::from_secs(1);
            bucket.take(4, at).is_ok()
        });
        assert_eq!(in_an_hour.count(), 240);
    }

    #[test]
    fn a_workload_pauses_longer_each_time() {
        let start = Instant::now();
        let first = MINUTE;
        let workload =
            |uid: &str| Workload { kind: "ReplicaSet".into(), uid: uid.into(), name: "a/b".into() };
        let (a, b) = (workload("1"), workload("2"));
        let mut pauses = Pauses::default();
        let mut now = start;
        for minutes in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert_eq!(pauses.check(&a, now), Ok(()));
            pauses.evicted(&a, first, now);
            let until = pauses.check(&a, now).unwrap_err();
            assert_eq!(until, now + MINUTE * minutes);
            assert_eq!(pauses.check(&b, now), Ok(()), "the other one is free");
            now = until;
        }
        now += MAX_PAUSE + MINUTE;
        pauses.evicted(&b, first, now);
        pauses.evicted(&a, first, now);
        assert_eq!(pauses.check(&a, now), Err(now + MINUTE), "left alone for an hour");
        for uid in 0..3000 {
            pauses.evicted(&workload(&uid.to_string()), first, now);
        }
        assert!(pauses.by_workload.len() <= WORKLOADS);
    }

    #[test]
    fn a_broken_plugin_is_tried_ever_more_rarely() {
        let start = Instant::now();
        let mut breaker = Breaker::default();
        let (mut now, mut tries) = (start, 0);
        while now < start + Duration::from_secs(3600) {
            match breaker.check(now) {
                Ok(()) => {
                    breaker.starts();
                    breaker.failed(now);
                    tries += 1;
                }
                Err(until) => now = until,
            }
        }
        assert!((10..=16).contains(&tries), "{tries}");
        assert!(breaker.check(now).is_ok());
        breaker.starts();
        assert!(breaker.check(now).is_err(), "one trial at a time");
        breaker.worked();
        assert!(breaker.check(now).is_ok() && !breaker.is_open());
    }

    #[test]
    fn jitter_is_small() {
        let pause = Duration::from_secs(100);
        for seed in [0, 1, u128::MAX, 0x1234_5678_9abc_def0_1122_3344_5566_7788] {
            assert!((pause..pause * 5 / 4).contains(&jitter(pause, seed)));
        }
    }
}
