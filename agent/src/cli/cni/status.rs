//! `nobypass cni status`.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::ValueEnum;
use serde_json::{Value, json};

use super::agent::Agent;
use super::{Failure, Format, RuntimeName, Wanted, Where, Which, contract, list, printable};
use crate::cli::exit::{Exit, print};
use crate::cni::discover::{ConfigFile, Delegate, Directory, EntryState, Look, MESH_PLUGINS, Role, discover};
use crate::cni::drop_in;

/// `nobypass cni status`.
#[derive(Debug, clap::Args)]
pub struct Status {
    #[command(flatten)]
    place: Where,
    #[command(flatten)]
    which: Which,
    /// How the node's container runtime chooses its config
    #[arg(long, value_name = "RUNTIME", env = "NOBYPASS_CNI_RUNTIME", default_value = "containerd")]
    cni_runtime: RuntimeName,
    /// Socket of the agent, which knows what the container runtime has loaded and what it has done itself
    #[arg(long, env = "NOBYPASS_SOCKET", value_name = "PATH", default_value = crate::server::DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// Runs it.
pub fn run(args: &Status) -> Result<Exit, Failure> {
    let contract = contract()?;
    let (dir, host) = args.place.dirs(&contract);
    let mut listed = list(&dir, &host)?;
    drop_in::expand(&dir, &mut listed);
    let wanted = args.which.find(&contract, &listed)?;
    let fallback = args.which.cni_plugin.as_deref().unwrap_or(MESH_PLUGINS[0]);
    let look = wanted.as_ref().map_or(Look::Type(fallback), |wanted| Look::For(&wanted.entry));
    let found = discover(&listed, args.cni_runtime.into(), look);
    let agent = Agent::ask(&args.socket, &dir);
    let text = match args.output {
        Format::Json => {
            let mut value = as_json(&dir, args.cni_runtime, &found, wanted.as_ref());
            value["agent"] = agent.as_json();
            format!("{value:#}\n")
        }
        Format::Table => printable(&as_text(&dir, &found, wanted.as_ref(), &agent)),
    };
    match print(&text) {
        Exit::Ok if !found.protected() || agent.contradicts() => Ok(Exit::Failed),
        exit => Ok(exit),
    }
}

/// Seconds since the file's content changed, and that time as seconds since 1970.
fn changed(dir: &Path, name: &OsStr) -> Option<(u64, u64)> {
    let time = std::fs::metadata(dir.join(name)).ok()?.modified().ok()?;
    let since = time.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs();
    Some((SystemTime::now().duration_since(time).unwrap_or_default().as_secs(), since))
}

fn shown(name: &OsStr) -> String {
    name.to_string_lossy().into_owned()
}

fn as_json(dir: &Path, runtime: RuntimeName, found: &Directory, wanted: Option<&Wanted>) -> Value {
    let file = |file: &ConfigFile| {
        let ConfigFile { name, role, problem, network, version, plugins, entry } = file;
        json!({
            "name": shown(name),
            "role": role.label(),
            "behind": match role { Role::Standby { behind } => Some(shown(behind)), _ => None },
            "network": network,
            "cniVersion": version,
            "plugins": plugins,
            "entry": entry.label(),
            "problem": problem.as_ref().map(|problem| json!({
                "reason": problem.label(),
                "message": problem.to_string(),
            })),
            "changedUnixSeconds": changed(dir, name).map(|(_, since)| since),
        })
    };
    let delegate = found.delegate.as_ref().map(|delegate| match delegate {
        Delegate::File(name) => json!({ "file": shown(name) }),
        Delegate::Copy { of, entry } => json!({ "copyOf": of.as_deref().map(shown), "entry": entry.label() }),
        Delegate::Elsewhere(what) => json!({ "elsewhere": what }),
    });
    json!({
        "directory": dir.to_string_lossy(),
        "runtime": runtime.to_possible_value().map(|value| value.get_name().to_owned()),
        "protected": found.protected(),
        "active": found.active().map(|file| shown(&file.name)),
        "why": found.why,
        "entry": found.entry.map(EntryState::label),
        "delegate": delegate,
        "ciliumExclusive": found.cilium_exclusive(),
        "wanted": wanted.map(|wanted| json!({
            "type": wanted.entry.plugin(),
            "source": wanted.source.text(),
            "entry": serde_json::from_str::<Value>(wanted.entry.text()).ok(),
        })),
        "files": found.files.iter().map(file).collect::<Vec<_>>(),
    })
}

fn as_text(dir: &Path, found: &Directory, wanted: Option<&Wanted>, agent: &Agent) -> String {
    let mut rows = vec![("directory", dir.display().to_string()), ("active", found.why.clone())];
    if let Some(delegate) = &found.delegate {
        rows.push((
            "delegates to",
            match delegate {
                Delegate::File(name) => shown(name),
                Delegate::Copy { of: Some(name), .. } => format!("its own copy of {}", shown(name)),
                Delegate::Copy { of: None, .. } => "its own copy of a network that is not here".to_owned(),
                Delegate::Elsewhere(what) => what.clone(),
            },
        ));
    }
    rows.push((
        "mesh entry",
        match wanted {
            Some(wanted) => format!("{}, from {}", wanted.entry.plugin(), wanted.source.text()),
            None => "not known: no config carries one, and none is given".to_owned(),
        },
    ));
    rows.push(("protected", protection(found)));
    rows.extend(agent.rows());
    if found.cilium_exclusive() {
        rows.push(("note", "cilium (cni-exclusive) renames configs of others away here".to_owned()));
    }
    let mut text: String = rows.iter().map(|(key, value)| format!("{key:<13} {value}\n")).collect();
    if !found.files.is_empty() {
        text.push('\n');
        text.push_str(&table(&file_rows(dir, found, agent)));
    }
    for file in &found.files {
        if let Some(problem) = &file.problem {
            text.push_str(&format!("\n{}: {problem}", shown(&file.name)));
        }
    }
    if !text.ends_with('\n') {
        text.push('\n');
    }
    text
}

fn protection(found: &Directory) -> String {
    match found.entry {
        Some(EntryState::Good) => "yes".to_owned(),
        None => "no: pods get no network at all".to_owned(),
        Some(EntryState::Missing) => "no: the mesh's entry is missing, new pods bypass the mesh".to_owned(),
        Some(EntryState::Outdated) => "no: the mesh's entry differs from the wanted one".to_owned(),
        Some(EntryState::Misplaced) => "no: the mesh's entry is not in its place".to_owned(),
        Some(EntryState::Duplicated) => "no: the mesh's plugin would run more than once".to_owned(),
        Some(EntryState::Unknown) => "not known: the pod network is not in a file here".to_owned(),
    }
}

fn file_rows(dir: &Path, found: &Directory, agent: &Agent) -> Vec<[String; 8]> {
    let head =
        ["FILE", "STATE", "ENTRY", "NETWORK", "VERSION", "CHANGED", "BY", "PLUGINS"].map(str::to_owned);
    let dash = |text: Option<&str>| text.filter(|text| !text.is_empty()).unwrap_or("-").to_owned();
    let row = |file: &ConfigFile| {
        [
            shown(&file.name),
            file.role.label().to_owned(),
            file.entry.label().to_owned(),
            dash(file.network.as_deref()),
            dash(file.version.as_deref()),
            changed(dir, &file.name)
                .map_or_else(|| "-".to_owned(), |(age, _)| format!("{} ago", age_text(age))),
            agent.writer(&file.name).unwrap_or("-").to_owned(),
            dash(Some(&file.plugins.join(","))),
        ]
    };
    std::iter::once(head).chain(found.files.iter().map(row)).collect()
}

/// Columns as wide as they need.
fn table(rows: &[[String; 8]]) -> String {
    let mut widths = [0; 8];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let line: String = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}  ")).collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// The largest unit alone, as kubectl shows ages.
pub(super) fn age_text(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7_200 => format!("{}m", seconds / 60),
        7_200..172_800 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}
