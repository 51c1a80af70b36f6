//! The `traffic` helper from a test's side: place it, run it, read what the application saw.

use std::fmt;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::cgroup::Cgroup;
use crate::netns::Netns;
use crate::proc::{self, Proc};
use crate::redirect::{Ports, Variant};
use crate::{bin, wait};

/// Where and as whom traffic is made. Namespaces and cgroups given here must outlive the calls.
#[derive(Clone, Debug, Default)]
pub struct Traffic {
    options: Vec<String>,
}

/// One line of report. Absent fields read as `None` or 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Report(Value);

/// A server, proxy or held connection that runs until it is finished or dropped.
#[derive(Debug)]
pub struct Running {
    proc: Proc,
    /// What it said when it was ready.
    pub ready: Report,
}

impl Traffic {
    /// In the caller's own namespaces, as the caller.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Inside `ns`.
    #[must_use]
    pub fn netns(self, ns: &Netns) -> Self {
        self.option("netns", ns.path().display())
    }

    /// In `cgroup`, entered before anything else.
    #[must_use]
    pub fn cgroup(self, cgroup: &Cgroup) -> Self {
        self.option("cgroup", cgroup.path().display())
    }

    /// As this user (and the group of the same number).
    #[must_use]
    pub fn uid(self, uid: u32) -> Self {
        self.option("uid", uid)
    }

    /// Any option of `traffic`, by its name without dashes.
    #[must_use]
    pub fn option(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.options.extend([format!("--{name}"), value.to_string()]);
        self
    }

    /// Any option that has no value.
    #[must_use]
    pub fn flag(mut self, name: &str) -> Self {
        self.options.push(format!("--{name}"));
        self
    }

    /// The command, for who starts it in a way of his own.
    pub fn command(&self, words: &[&dyn fmt::Display]) -> Result<Command> {
        let mut command = Command::new(bin("traffic")?);
        command.args(words.iter().map(ToString::to_string)).args(&self.options);
        Ok(command)
    }

    /// Runs one command to its end, as `run(&[&"tcp4", &FAR4, &8080])`.
    pub fn run(&self, words: &[&dyn fmt::Display]) -> Result<Report> {
        let out = proc::output(self.command(words)?, "", wait::LONG)?;
        if !out.status.success() {
            bail!("traffic {}: {}", out.status, String::from_utf8_lossy(&out.stderr));
        }
        Report::parse(String::from_utf8_lossy(&out.stdout).trim_end())
    }

    /// Starts `server`, `proxy` or `hold` and waits until it is ready.
    pub fn spawn(&self, words: &[&dyn fmt::Display]) -> Result<Running> {
        let mut command = self.command(words)?;
        command.arg("--stdin");
        let proc = proc::spawn(command)?;
        let ready = Report::parse(&proc.line(wait::HANG)?)?;
        if ready.0["ready"] != true {
            bail!("not ready: {ready}");
        }
        Ok(Running { proc, ready })
    }

    /// TCP and UDP servers on `ports`.
    pub fn server(&self, ports: &[u16]) -> Result<Running> {
        self.spawn(&words(&"server", ports))
    }

    /// The proxy that `variant` needs: its mesh's UID and ports.
    pub fn proxy(&self, variant: Variant) -> Result<Running> {
        self.proxy_with(variant, Ports::of(variant))
    }

    /// As [`Traffic::proxy`] with other ports or another UID.
    pub fn proxy_with(&self, variant: Variant, ports: Ports) -> Result<Running> {
        let mut this = self.clone().uid(ports.uid);
        if variant == Variant::Tproxy {
            this = this.flag("tproxy");
        }
        if variant == Variant::IptablesIstio {
            this = this.option("passthrough", ports.inbound);
        }
        this.spawn(&words(&"proxy", &[ports.outbound, ports.inbound]))
    }
}

fn words<'a>(command: &'a &'a str, ports: &'a [u16]) -> Vec<&'a dyn fmt::Display> {
    let command: &dyn fmt::Display = command;
    std::iter::once(command).chain(ports.iter().map(|port| -> &dyn fmt::Display { port })).collect()
}

impl Running {
    /// Process id of the server.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.proc.pid()
    }

    /// The server's counts now.
    pub fn stats(&mut self) -> Result<Report> {
        self.proc.write_line("stats")?;
        Report::parse(&self.proc.line(wait::HANG)?)
    }

    /// The last report, without asking for the end: a held connection that broke.
    pub fn report(&mut self) -> Result<Report> {
        Report::parse(&self.proc.line(wait::HANG)?)
    }

    /// Ends it and gives its last report.
    pub fn finish(mut self) -> Result<Report> {
        drop(self.proc.take_stdin());
        self.report()
    }
}

impl Report {
    /// Reads one line of `traffic`, as from a container's log.
    pub fn parse(line: &str) -> Result<Self> {
        Ok(Self(serde_json::from_str(line).with_context(|| format!("traffic said {line:?}"))?))
    }

    /// Whether the application got what it wanted.
    #[must_use]
    pub fn ok(&self) -> bool {
        self.0["ok"] == true
    }

    /// Name of the error, as `EPERM`; `TIMEOUT` when the helper's own patience ended, `EOF` when the peer closed.
    #[must_use]
    pub fn errno(&self) -> Option<&str> {
        self.0["errno"].as_str()
    }

    /// `plain`, `mesh`, `synack`, `rst`, `refused`, `echo`.
    #[must_use]
    pub fn answer(&self) -> Option<&str> {
        self.0["answer"].as_str()
    }

    /// The answer, or the error's name: what the application saw, in one word.
    #[must_use]
    pub fn saw(&self) -> &str {
        self.answer().filter(|_| self.ok()).or_else(|| self.errno()).unwrap_or("nothing")
    }

    /// A number by name, as `tcp_accepted` or `connect_us`.
    #[must_use]
    pub fn count(&self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or(0)
    }

    /// The whole report.
    #[must_use]
    pub fn json(&self) -> &Value {
        &self.0
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
