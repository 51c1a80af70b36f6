//! The process that asks: `nobypass probe-helper`, started by the agent.
//!
//! A process of its own, because a socket belongs to the cgroup of the process that makes it, and the program that answers
//! is attached to a cgroup in which there is nothing else. It has one thread, asks one question at a time, and ends
//! with its standard input.

use std::fs::File;
use std::io::{self, BufRead as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use super::Answer;
use super::ask::ask;
use super::failure::Failure;
use super::wire::{Ask, Said, Word};
use crate::bpf::probe::Records;
use crate::cgroup::netns::{Finder, NetnsError};
use crate::sys::netns::enter;

/// The hidden sub-command.
pub const COMMAND: &str = "probe-helper";

/// Arguments of the helper.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Directory of the pins
    #[arg(long)]
    pub bpf_dir: PathBuf,
    /// Any directory of the cgroup v2 file system
    #[arg(long)]
    pub cgroup_root: PathBuf,
}

/// What the helper says once it has proven that its packets are seen and dropped.
pub const READY: &str = "ready";

/// Answers until its standard input ends.
///
/// # Errors
/// One sentence, when it cannot work at all.
pub fn run(Args { bpf_dir, cgroup_root }: &Args) -> Result<(), String> {
    let mut records = Records::open(bpf_dir).map_err(|error| error.to_string())?;
    let finder =
        Finder::new(cgroup_root).map_err(|error| format!("cannot look for network namespaces: {error}"))?;
    let home = File::open("/proc/self/ns/net")
        .map_err(|error| format!("cannot open this network namespace: {error}"))?;
    is_seen(&mut records)?;
    say(READY).map_err(|error| error.to_string())?;
    for line in io::stdin().lock().lines() {
        let line = line.map_err(|error| error.to_string())?;
        let question: Ask = serde_json::from_str(&line).map_err(|error| error.to_string())?;
        let said = answer(&mut records, &finder, &home, &question)?;
        let said = serde_json::to_string(&said).map_err(|error| error.to_string())?;
        say(&said).map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn say(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(line.as_bytes())?;
    out.write_all(b"\n")?;
    out.flush()
}

/// A packet that is not seen would leave: none is sent to a pod's device before one on loopback was seen.
fn is_seen(records: &mut Records) -> Result<(), String> {
    let to = SocketAddr::from((Ipv4Addr::LOCALHOST, 9));
    match ask(records, to, 0) {
        answer if answer == Failure::LocalRoute.into() => Ok(()),
        answer => Err(format!("the program does not see this process's packets: {answer:?}")),
    }
}

fn answer(records: &mut Records, finder: &Finder, home: &File, question: &Ask) -> Result<Said, String> {
    let Ask { cgroup, netns, id, to } = question;
    let failed = |error| {
        let word = Word::from(Answer::from(Failure::Netns(error)));
        Ok(Said([word.clone(), word]))
    };
    match finder.open(*cgroup, netns.as_deref().map(Path::new)) {
        Ok(netns) if enter(&netns).is_ok() => {}
        Ok(_) => return failed(NetnsError::Denied),
        Err(error) => return failed(error),
    }
    let answers = to.map(|to| match to {
        Some(to) => ask(records, to, *id).into(),
        None => Answer::from(Failure::NoTarget).into(),
    });
    // Otherwise the pod's network would live as long as this process.
    enter(home).map_err(|error| format!("cannot leave a pod's network namespace: {error}"))?;
    // Somebody's rule there, or no program here any more?
    if answers.contains(&Answer::from(Failure::NotSeen).into()) {
        is_seen(records)?;
    }
    Ok(Said(answers))
}
