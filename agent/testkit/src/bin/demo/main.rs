//! nobypass at work on this machine, with no cluster: a private containerd node, real pods, the real agent.
//!
//!   demo [--pause]
//!
//! `NOBYPASS_BIN` names the agent's binary; without it, the one beside this program is taken. Every step shows what was
//! really observed and fails if that is not what it says. Nothing of the machine is touched, and nothing stays behind,
//! also when the demo is interrupted.

#![expect(clippy::print_stderr, reason = "usage errors of a program for people")]

mod interrupt;
mod lab;
mod screen;
mod story;

use std::process::ExitCode;

use interrupt::Interrupted;
use lab::Lab;
use screen::Screen;

const USAGE: &str = "\
Shows nobypass at work on a private node on this machine. Needs root; leaves nothing behind.

usage: demo [--pause]

  --pause   wait for Enter after each step, to look around meanwhile";

fn main() -> ExitCode {
    let mut pause = false;
    for arg in std::env::args().skip(1) {
        match arg.as_str() {
            "--pause" => pause = true,
            "--help" | "-h" => {
                // Nothing is left to do when the terminal is gone.
                let _ = screen::print(USAGE);
                return ExitCode::SUCCESS;
            }
            other => {
                eprintln!("demo: no such option: {other}\n{USAGE}");
                return ExitCode::from(64);
            }
        }
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("demo: needs root, for network namespaces, containers and BPF programs");
        return ExitCode::from(77);
    }
    if let Err(error) = interrupt::watch() {
        eprintln!("demo: cannot handle signals: {error}");
        return ExitCode::FAILURE;
    }
    run(pause)
}

fn run(pause: bool) -> ExitCode {
    let mut screen = Screen::new(pause);
    let mut lab = None;
    let told = story::tell(&mut screen, &mut lab);
    // Whatever went wrong may have been caused by the signal: a terminal's Ctrl-C reaches our children as well.
    let told = interrupt::check().and(told);
    if let Err(error) = &told
        && !error.is::<Interrupted>()
    {
        let logs = lab.as_ref().map(Lab::logs).unwrap_or_default();
        screen.failed(error, &logs);
    }
    let removed = lab.map_or(Ok(()), Lab::remove);
    let removed = match removed {
        Ok(()) if told.is_ok() => screen.ok("the node is gone: its processes, its cgroups and its directory"),
        Ok(()) => Ok(()),
        Err(error) => {
            let error = error.context("the clean-up is not complete");
            screen.failed(&error, "");
            Err(error)
        }
    };
    match told {
        Ok(()) if removed.is_ok() => screen.end(),
        Err(error) => match error.downcast::<Interrupted>() {
            Ok(Interrupted(signal)) => screen.interrupted(signal),
            Err(_) => ExitCode::FAILURE,
        },
        Ok(()) => ExitCode::FAILURE,
    }
}
