//! Pauses between tries, each a little different, so that the nodes of a cluster do not move in step.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use tokio::time::Instant;

/// Ever longer pauses.
#[derive(Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    tries: u32,
    random: RandomState,
}

impl Backoff {
    /// Pauses from about `first` to about `longest`, each twice the one before.
    #[must_use]
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, tries: 0, random: RandomState::new() }
    }

    /// The next pause.
    pub fn pause(&mut self) -> Duration {
        let pause = self.first.saturating_mul(1 << self.tries.min(16)).min(self.longest);
        self.tries = self.tries.saturating_add(1);
        self.about(pause)
    }

    /// How often it paused since it was [`Self::reset`].
    #[must_use]
    pub fn tries(&self) -> u32 {
        self.tries
    }

    /// All is well again.
    pub fn reset(&mut self) {
        self.tries = 0;
    }

    /// `period`, give or take a fifth.
    #[must_use]
    pub fn about(&self, period: Duration) -> Duration {
        let random = self.random.hash_one(Instant::now()) % 401;
        let factor = u32::try_from(800 + random).unwrap_or(1000);
        period.saturating_mul(factor) / 1000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_longest_and_begin_again() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
        for wanted in [100, 200, 400, 800, 1600, 3200, 5000, 5000] {
            let pause = backoff.pause().as_millis();
            assert!((wanted * 8 / 10..=wanted * 12 / 10).contains(&pause), "{pause} for {wanted}");
        }
        backoff.reset();
        assert!(backoff.pause() <= Duration::from_millis(120));
    }

    #[test]
    fn never_overflows() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::MAX);
        for _ in 0..100 {
            backoff.pause();
        }
        assert_eq!(backoff.tries(), 100);
    }
}
