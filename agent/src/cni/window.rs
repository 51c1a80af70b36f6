//! How long the node was unprotected: the sum of all times in which a pod could start without the mesh's plugin.

use std::time::{Duration, Instant};

/// What a pod that starts now gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protection {
    /// The mesh's plugin runs.
    Protected,
    /// Its network, without the mesh's plugin.
    Unprotected,
    /// It cannot start, since the runtime has no network.
    NoNetwork,
}

impl Protection {
    /// Bounded label for JSON.
    pub fn label(self) -> &'static str {
        match self {
            Self::Protected => "protected",
            Self::Unprotected => "unprotected",
            Self::NoNetwork => "no_network",
        }
    }
}

/// Sums up unprotected time.
#[derive(Clone, Debug)]
pub struct Window {
    state: Protection,
    /// Since when.
    since: Instant,
    total: Duration,
    windows: u64,
}

impl Window {
    /// Nothing is known yet, and no time is counted.
    pub fn new(now: Instant) -> Self {
        Self { state: Protection::NoNetwork, since: now, total: Duration::ZERO, windows: 0 }
    }

    /// From `at` on it is like this; `at` may lie in the past, for what was noticed late.
    pub fn set(&mut self, state: Protection, at: Instant) {
        if state == self.state {
            return;
        }
        let at = at.max(self.since);
        if self.state == Protection::Unprotected {
            self.total += at - self.since;
        }
        self.windows += u64::from(state == Protection::Unprotected);
        self.state = state;
        self.since = at;
    }

    /// The state now.
    pub fn state(&self) -> Protection {
        self.state
    }

    /// Since when.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// How often protection was lost.
    pub fn count(&self) -> u64 {
        self.windows
    }

    /// All unprotected time until `now`, an open window included.
    pub fn total(&self, now: Instant) -> Duration {
        match self.state {
            Protection::Unprotected => self.total + now.saturating_duration_since(self.since),
            _ => self.total,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unprotected_time_counts() {
        use Protection::{NoNetwork, Protected, Unprotected};
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut window = Window::new(start);
        for (ms, state, total, count) in [
            (10, NoNetwork, 0, 0),
            (20, Unprotected, 0, 1),
            (30, Unprotected, 10, 1),
            (50, Protected, 30, 1),
            (90, Protected, 30, 1),
            (100, Unprotected, 30, 2),
            (105, NoNetwork, 35, 2),
            (200, Protected, 35, 2),
        ] {
            window.set(state, at(ms));
            assert_eq!(window.total(at(ms)), Duration::from_millis(total), "{ms}");
            assert_eq!((window.state(), window.count()), (state, count), "{ms}");
        }
    }

    #[test]
    fn an_open_window_grows_and_one_noticed_late_counts_from_its_start() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut window = Window::new(start);
        window.set(Protection::Protected, at(10));
        window.set(Protection::Unprotected, at(100));
        assert_eq!(window.total(at(350)), Duration::from_millis(250));
        // Not before the state that it ends.
        window.set(Protection::Protected, at(50));
        assert_eq!(window.total(at(400)), Duration::ZERO);
    }
}
