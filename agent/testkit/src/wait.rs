//! Waiting for a condition with a deadline, the only way tests here wait for anything.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Generous bound for things that take milliseconds on an idle machine: an emulated one on a busy host takes half a minute.
pub const HANG: Duration = Duration::from_secs(120);

/// Bound for one long run of the traffic helper: a flood, or ten thousand pods.
pub const LONG: Duration = Duration::from_secs(300);

const STEP: Duration = Duration::from_millis(5);

/// Calls `poll` until it gives a value; after `limit` the error names `what`.
pub fn until<T>(what: &str, limit: Duration, mut poll: impl FnMut() -> Option<T>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = poll() {
            return Ok(value);
        }
        if start.elapsed() >= limit {
            bail!("waited {limit:?} in vain for: {what}");
        }
        pause(STEP);
    }
}

/// [`until`] for async tests: lets other tasks of the runtime run meanwhile.
pub async fn until_async<T>(what: &str, limit: Duration, mut poll: impl FnMut() -> Option<T>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = poll() {
            return Ok(value);
        }
        if start.elapsed() >= limit {
            bail!("waited {limit:?} in vain for: {what}");
        }
        tokio::time::sleep(STEP).await;
    }
}

#[expect(clippy::disallowed_methods, reason = "the one place where a poll loop pauses")]
pub(crate) fn pause(step: Duration) {
    std::thread::sleep(step);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gives_the_first_value() {
        let mut calls = 0;
        let got = until("three calls", HANG, || {
            calls += 1;
            (calls == 3).then_some(calls)
        });
        assert_eq!(got.unwrap(), 3);
    }

    #[test]
    fn says_what_it_waited_for() {
        let got = until::<()>("a pig with wings", Duration::ZERO, || None);
        assert!(got.unwrap_err().to_string().contains("a pig with wings"));
    }
}
