//! `nobypass cni`: the CNI half by itself. Needs no cluster, no eBPF, and for looking no root.

mod agent;
mod plan;
pub(super) mod run;
mod status;
mod uninstall;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};

use super::exit::{Exit, fail};
use crate::cni::discover::{self, Listed};
use crate::cni::entry::{Place, WantedEntry};
use crate::cni::install::Contract;
use crate::cni::listing;

/// `nobypass cni`.
#[derive(Debug, Args)]
pub struct Cni {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show each CNI config: is it the active one, does it carry the mesh's entry
    #[command(after_help = super::exit::CNI_STATUS)]
    Status(status::Status),
    /// Show as a diff what would be written; writes nothing
    #[command(after_help = super::exit::CNI_PLAN)]
    Plan(plan::Args),
    /// Keep the mesh's entry in every config of this node, and nothing else: no cluster and no eBPF needed
    #[command(after_help = super::exit::CNI_RUN)]
    Run(run::Run),
    /// Take the entry, then the kubeconfig and the plugin binary off this node
    #[command(after_help = super::exit::CNI_UNINSTALL)]
    Uninstall(uninstall::Uninstall),
}

/// Which directory.
#[derive(Debug, Args)]
struct Where {
    /// CNI directory [default: /etc/cni/net.d, or what CONTAINER_MOUNT_PREFIX and DEST_CNI_NET_DIR say]
    #[arg(long, value_name = "DIR", env = "NOBYPASS_CNI_DIR")]
    cni_dir: Option<PathBuf>,
}

/// Which entry.
#[derive(Debug, Args)]
struct Which {
    /// File with the mesh entry, or with a list that has it [default: CNI_NETWORK_CONFIG, CNI_NETWORK_CONFIG_FILE,
    /// or the entry that a config carries already]
    #[arg(long, value_name = "FILE", env = "NOBYPASS_CNI_ENTRY")]
    cni_entry: Option<PathBuf>,
    /// Type of the mesh's plugin [default: the one that is found]
    #[arg(long, value_name = "TYPE", env = "NOBYPASS_CNI_PLUGIN")]
    cni_plugin: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people
    #[default]
    Table,
    /// For machines (see deploy/json.md)
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Beside the mesh's installer: keep its entry in every config
    Guard,
    /// Instead of the mesh's installer: plugin binaries, kubeconfig and entry
    Install,
    /// Not at all
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RuntimeName {
    /// The first file, or no network
    Containerd,
    /// The first file that can be loaded
    Crio,
}

impl From<RuntimeName> for discover::Runtime {
    fn from(name: RuntimeName) -> Self {
        match name {
            RuntimeName::Containerd => Self::Containerd,
            RuntimeName::Crio => Self::Crio,
        }
    }
}

/// A message for standard error, and the exit code.
pub(super) type Failure = (Exit, String);

/// Runs a sub-command.
pub fn main(cni: &Cni) -> Exit {
    let done = match &cni.command {
        Command::Status(args) => status::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Run(args) => run::run(args),
        Command::Uninstall(args) => uninstall::run(args),
    };
    done.unwrap_or_else(|(exit, message)| fail(exit, &message))
}

fn env(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The installer's environment, as far as it is there.
fn contract() -> Result<Contract, Failure> {
    let mut contract = Contract::from_env(&env).map_err(|error| (Exit::Usage, error.to_string()))?;
    if env("CONTAINER_MOUNT_PREFIX").is_none() {
        // Not in the installer's pod: the host's directories are where they are.
        contract.prefix = PathBuf::new();
    }
    Ok(contract)
}

impl Where {
    /// The directory as seen from here, and its path on the host.
    fn dirs(&self, contract: &Contract) -> (PathBuf, PathBuf) {
        match &self.cni_dir {
            Some(dir) => (dir.clone(), contract.net_dir.clone()),
            None => (contract.mounted_net_dir(), contract.net_dir.clone()),
        }
    }
}

/// Lists a directory, or says in one line why not.
fn list(dir: &Path, host: &Path) -> Result<Vec<Listed>, Failure> {
    listing::list(dir, host).map_err(|error| unreadable(dir, &error))
}

fn unreadable(dir: &Path, error: &io::Error) -> Failure {
    let exit = match error.kind() {
        io::ErrorKind::PermissionDenied => Exit::NoPermission,
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Exit::Unavailable,
        _ => Exit::Failed,
    };
    let hint = if exit == Exit::Unavailable { "; say where it is with --cni-dir" } else { "" };
    (exit, format!("cannot read the CNI directory {}: {}{hint}", dir.display(), reason(error)))
}

/// The system's words without the error's number.
fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

/// Text for a terminal: names and contents of files must not control it.
fn printable(text: &str) -> String {
    let kept = |letter: char| !letter.is_control() || matches!(letter, '\n' | '\t' | '\r');
    text.chars().map(|letter| if kept(letter) { letter } else { '?' }).collect()
}

/// The wanted entry and where it comes from.
#[derive(Debug)]
struct Wanted {
    entry: WantedEntry,
    source: Source,
}

#[derive(Debug)]
enum Source {
    File(PathBuf),
    Environment,
    Config(OsString),
}

impl Source {
    fn text(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Environment => "the environment".to_owned(),
            Self::Config(name) => name.to_string_lossy().into_owned(),
        }
    }
}

impl Which {
    /// What was given: a file before the environment.
    fn given(&self, contract: &Contract) -> Result<Option<Wanted>, Failure> {
        if let Some(path) = &self.cni_entry {
            let usage = |text: String| (Exit::Usage, format!("--cni-entry {}: {text}", path.display()));
            let text = std::fs::read_to_string(path).map_err(|error| usage(reason(&error)))?;
            let entry = WantedEntry::from_file(&text, self.cni_plugin.as_deref(), Place::Last)
                .map_err(|error| usage(error.to_string()))?;
            return Ok(Some(Wanted { entry, source: Source::File(path.clone()) }));
        }
        if contract.template.is_none() {
            return Ok(None);
        }
        let entry = contract.wanted().map_err(|error| (Exit::Usage, error.to_string()))?;
        Ok(Some(Wanted { entry, source: Source::Environment }))
    }

    /// What was given, or else what a config carries already.
    fn find(&self, contract: &Contract, listed: &[Listed]) -> Result<Option<Wanted>, Failure> {
        if let Some(given) = self.given(contract)? {
            return Ok(Some(given));
        }
        let learnt = discover::learn(listed, self.cni_plugin.as_deref(), Place::Last);
        Ok(learnt.map(|(entry, name)| Wanted { entry, source: Source::Config(name) }))
    }
}
