//! Which pod is asked next, and when. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::time::{Duration, Instant};

/// Between two questions to a pod that its evidence asks for.
const PAUSE: Duration = Duration::from_secs(1);
/// Before a pod that could not be asked yet is asked again; doubles up to the interval, since a pod may be without a
/// process for long, and what changes it is news.
const EARLY: Duration = Duration::from_millis(50);

/// See the module.
#[derive(Debug)]
pub struct Schedule {
    interval: Duration,
    pods: BTreeMap<u64, Pod>,
}

#[derive(Clone, Copy, Debug)]
struct Pod {
    due: Instant,
    asked: Option<Instant>,
    failures: u32,
    turns: u64,
}

impl Schedule {
    /// `interval`: between two questions to a pod of which there is no news.
    pub fn new(interval: Duration) -> Self {
        Self { interval, pods: BTreeMap::new() }
    }

    /// These pods are there, and no others. New ones are asked at once.
    pub fn keep(&mut self, live: &BTreeSet<u64>, now: Instant) {
        self.pods.retain(|cgroup, _| live.contains(cgroup));
        for cgroup in live {
            self.pods.entry(*cgroup).or_insert(Pod { due: now, asked: None, failures: 0, turns: 0 });
        }
    }

    /// Whether a pod is among them.
    pub fn knows(&self, cgroup: u64) -> bool {
        self.pods.contains_key(&cgroup)
    }

    /// There is news of a pod: it is asked at once, but not all the time.
    pub fn soon(&mut self, cgroup: u64, now: Instant) {
        if let Some(pod) = self.pods.get_mut(&cgroup) {
            let earliest = pod.asked.map_or(now, |asked| (asked + PAUSE).max(now));
            pod.due = pod.due.min(earliest);
        }
    }

    /// A pod is another than it was: who could not be asked yet may be asked now.
    pub fn changed(&mut self, cgroup: u64, now: Instant) {
        if self.pods.get(&cgroup).is_some_and(|pod| pod.failures > 0) {
            self.soon(cgroup, now);
        }
    }

    /// A pod is asked at this time, if not before.
    pub fn by(&mut self, cgroup: u64, when: Instant) {
        if let Some(pod) = self.pods.get_mut(&cgroup) {
            pod.due = pod.due.min(when);
        }
    }

    /// The pod whose turn it is.
    pub fn next(&self, now: Instant) -> Option<u64> {
        let (cgroup, pod) = self.pods.iter().min_by_key(|(_, pod)| pod.due)?;
        (pod.due <= now).then_some(*cgroup)
    }

    /// When [`Schedule::next`] will have one.
    pub fn wake(&self) -> Option<Instant> {
        self.pods.values().map(|pod| pod.due).min()
    }

    /// A pod was asked. `early`: it could not be, but may be in a moment.
    pub fn done(&mut self, cgroup: u64, early: bool, now: Instant) {
        let interval = self.interval;
        let Some(pod) = self.pods.get_mut(&cgroup) else { return };
        pod.asked = Some(now);
        pod.turns += 1;
        if early {
            pod.due = now
                + EARLY.saturating_mul(1 << pod.failures.min(20)).min(spread(interval, cgroup, pod.turns));
            pod.failures += 1;
        } else {
            pod.failures = 0;
            pod.due = now + spread(interval, cgroup, pod.turns);
        }
    }
}

/// Within a fifth of the interval, another each time: pods that came together are not asked together for ever.
fn spread(interval: Duration, cgroup: u64, turn: u64) -> Duration {
    let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one((cgroup, turn));
    let part = u32::try_from(hash % 401).unwrap_or(200);
    interval.saturating_mul(800 + part) / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn schedule(pods: &[u64]) -> (Schedule, Instant) {
        let now = Instant::now();
        let mut schedule = Schedule::new(MINUTE);
        schedule.keep(&pods.iter().copied().collect(), now);
        (schedule, now)
    }

    #[test]
    fn new_pods_are_asked_at_once_and_then_after_the_interval() {
        let (mut schedule, now) = schedule(&[1, 2]);
        for _ in 0..2 {
            let pod = schedule.next(now).unwrap();
            schedule.done(pod, false, now);
        }
        assert_eq!(schedule.next(now), None);
        let wake = schedule.wake().unwrap();
        assert!(wake >= now + MINUTE * 4 / 5 && wake <= now + MINUTE * 6 / 5);
        assert!(schedule.next(wake).is_some());
        schedule.keep(&BTreeSet::new(), now);
        assert_eq!((schedule.next(wake), schedule.wake()), (None, None));
    }

    #[test]
    fn news_ask_again_but_at_most_once_a_second() {
        let (mut schedule, now) = schedule(&[1]);
        schedule.done(1, false, now);
        schedule.soon(1, now);
        assert_eq!(schedule.next(now), None);
        assert_eq!(schedule.wake(), Some(now + PAUSE));
        // News of later do not put it off, news of long after come at once.
        schedule.soon(1, now + PAUSE / 2);
        assert_eq!(schedule.wake(), Some(now + PAUSE));
        schedule.done(1, false, now + PAUSE);
        schedule.soon(1, now + 5 * PAUSE);
        assert_eq!(schedule.next(now + 5 * PAUSE), Some(1));
        schedule.soon(7, now);
        assert!(!schedule.knows(7));
    }

    #[test]
    fn a_pod_that_cannot_be_asked_yet_is_asked_more_and_more_rarely() {
        let (mut schedule, now) = schedule(&[1]);
        let waits: Vec<Duration> = (0..30)
            .map(|_| {
                schedule.done(1, true, now);
                schedule.wake().unwrap() - now
            })
            .collect();
        assert_eq!((waits[0], waits[1], waits[8]), (EARLY, 2 * EARLY, 256 * EARLY));
        assert!(waits[11..].iter().all(|wait| *wait >= MINUTE * 4 / 5 && *wait <= MINUTE * 6 / 5));
        // It gets a sandbox after that.
        schedule.changed(1, now + 2 * PAUSE);
        assert_eq!(schedule.next(now + 2 * PAUSE), Some(1));
        schedule.done(1, false, now);
        schedule.changed(1, now + 2 * PAUSE);
        assert_eq!(schedule.next(now + 2 * PAUSE), None, "it could be asked: its change says nothing new");
        schedule.done(1, true, now);
        assert_eq!(schedule.wake(), Some(now + EARLY));
    }

    #[test]
    fn pods_that_came_together_are_spread() {
        let waits: BTreeSet<Duration> = (0..100).map(|pod| spread(MINUTE, pod, 1)).collect();
        assert!(waits.len() > 50);
        assert_ne!(spread(MINUTE, 1, 1), spread(MINUTE, 1, 2));
    }
}
