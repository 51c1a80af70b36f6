//! Ctrl-C and SIGTERM: the first ends the story at its next breath and cleans up, the second ends the process.

use std::fmt;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use anyhow::Result;
use nobypass_testkit::wait;
use tokio::signal::unix::{SignalKind, signal};

/// The signal that came; 0: none.
static CAME: AtomicI32 = AtomicI32::new(0);

/// Somebody wants the demo to end.
#[derive(Clone, Copy, Debug)]
pub struct Interrupted(pub i32);

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interrupted by signal {}", self.0)
    }
}

impl std::error::Error for Interrupted {}

/// Takes SIGINT, SIGTERM and SIGHUP on a thread of its own. Children are not affected.
pub fn watch() -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let inside = runtime.enter();
    let mut int = signal(SignalKind::interrupt())?;
    let mut term = signal(SignalKind::terminate())?;
    let mut hup = signal(SignalKind::hangup())?;
    drop(inside);
    std::thread::spawn(move || {
        runtime.block_on(async move {
            loop {
                let kind = tokio::select! {
                    _ = int.recv() => SignalKind::interrupt(),
                    _ = term.recv() => SignalKind::terminate(),
                    _ = hup.recv() => SignalKind::hangup(),
                };
                let number = kind.as_raw_value();
                if CAME.swap(number, Ordering::Relaxed) != 0 {
                    end_now(number);
                }
                eprintln!("\ndemo: cleaning up; once more ends it at once");
            }
        });
    });
    Ok(())
}

#[expect(
    clippy::exit,
    reason = "asked for twice; the node's supervisor sees our end and cleans up behind us"
)]
fn end_now(signal: i32) -> ! {
    std::process::exit(128 + signal)
}

/// An error once somebody wants the demo to end.
pub fn check() -> Result<()> {
    match CAME.load(Ordering::Relaxed) {
        0 => Ok(()),
        signal => Err(Interrupted(signal).into()),
    }
}

/// As [`wait::until`], ended early by a signal.
pub fn until<T>(what: &str, limit: Duration, mut poll: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    wait::until(what, limit, || check().and_then(|()| poll()).transpose())?
}
