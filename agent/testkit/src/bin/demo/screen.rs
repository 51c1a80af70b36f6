//! What the reader sees.

use std::io::{IsTerminal, Read, Write};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::interrupt;

/// The terminal, or whatever standard output is.
pub struct Screen {
    colour: bool,
    pause: bool,
    start: Instant,
    step: u32,
    observed: u32,
}

/// Writes a line; an error means that nobody reads any more.
pub fn print(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("cannot write to standard output")
}

impl Screen {
    pub fn new(pause: bool) -> Self {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let colour = !plain && std::io::stdout().is_terminal();
        Self { colour, pause, start: Instant::now(), step: 0, observed: 0 }
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub fn title(&self, text: &str) -> Result<()> {
        print(&self.paint("1", text))
    }

    pub fn plain(&self, text: &str) -> Result<()> {
        print(text)
    }

    /// Begins a step.
    pub fn step(&mut self, text: &str) -> Result<()> {
        interrupt::check()?;
        self.step += 1;
        print(&format!("\n{}", self.paint("1", &format!("{}  {text}", self.step))))
    }

    /// A command that is really run like this on the node.
    pub fn command(&self, text: &str) -> Result<()> {
        print(&format!("   {}", self.paint("36", &format!("$ {text}"))))
    }

    /// Lines that somebody else wrote.
    pub fn quote(&self, text: &str) -> Result<()> {
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        lines.into_iter().try_for_each(|line| print(&format!("     {}", self.paint("2", line))))
    }

    /// Somebody's part in a connection.
    pub fn says(&self, who: &str, text: &str) -> Result<()> {
        print(&format!("   {who:<7} {text}"))
    }

    /// Something was observed as it should be.
    pub fn ok(&mut self, text: &str) -> Result<()> {
        self.observed += 1;
        print(&format!("   {} {text}", self.paint("32", "✓")))
    }

    /// The end of a step, where the reader may want to look around.
    pub fn pause(&self, how: &str) -> Result<()> {
        if !self.pause {
            return Ok(());
        }
        print(&self.paint("33", &format!("   Look around with: {how}\n   Enter goes on.")))?;
        let step = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        let stdin = std::io::stdin();
        loop {
            interrupt::check()?;
            match poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&step)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                other => {
                    other?;
                    let mut line = [0; 256];
                    return stdin.lock().read(&mut line).map(drop).context("cannot read standard input");
                }
            }
        }
    }

    /// A step that was not observed.
    pub fn failed(&self, error: &anyhow::Error, logs: &str) {
        // Nothing is left to do when the terminal is gone.
        let _ = print(&format!("   {} {error:#}", self.paint("31", "✗")));
        if !logs.is_empty() {
            let _ = self.quote(logs);
        }
    }

    /// All told.
    pub fn end(&self) -> ExitCode {
        let seconds = self.start.elapsed().as_secs();
        let text = format!("{} observations, all as they should be, in {seconds} s.", self.observed);
        match print(&format!("\n{}", self.paint("1", &text))) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        }
    }

    /// The reader had enough.
    pub fn interrupted(&self, signal: i32) -> ExitCode {
        let _ = print("\n   interrupted; everything is removed");
        ExitCode::from(u8::try_from(128 + signal).unwrap_or(1))
    }
}
