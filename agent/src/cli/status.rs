//! `nobypass status`: from the agent, or from the pins when there is none.

use std::path::Path;

use hyper::Method;

use crate::bpf::pins::PinDir;
use crate::cli::client::{ClientError, Place, read, runtime, send};
use crate::cli::exit::{Exit, fail, print};
use crate::cli::table::Table;
use crate::cli::{Format, json};
use crate::status::{FamilyStatus, PodStatus, Status, from_pins};

/// Arguments of `status`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    place: Place,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
    /// Also pods that are not meshed
    #[arg(short, long)]
    all: bool,
}

/// Shows this node's pods.
pub fn run(args: &Args) -> Exit {
    let status = match ask(&args.place.socket) {
        Ok(status) => status,
        Err(error) if error.is_absent() => match from_pins(&PinDir::new(&args.place.bpf_dir)) {
            Ok(status) => status,
            Err(pins) => return fail(pins.exit(), &format!("no agent runs, and {pins}")),
        },
        Err(error) => return fail(error.exit(), &error.to_string()),
    };
    print(&match args.output {
        Format::Json => json(&status),
        Format::Table => text(&status, args.all, false),
        Format::Wide => text(&status, args.all, true),
    })
}

fn ask(socket: &Path) -> Result<Status, ClientError> {
    let runtime = runtime().map_err(|error| ClientError::Broken(error.to_string()))?;
    let text = runtime
        .block_on(async { read(send(socket, Method::GET, "/v1/status", String::new()).await?).await })?;
    serde_json::from_str(&text)
        .map_err(|error| ClientError::Broken(format!("{error}; is the agent of another version?")))
}

fn text(status: &Status, all: bool, wide: bool) -> String {
    let Status { agent, mode, mode_source, unknown_pods, hooks, pods, totals } = status;
    let mut text = String::new();
    if agent.running && !agent.version.is_empty() {
        text.push_str(&format!("agent {} running", agent.version));
    } else {
        text.push_str(&format!(
            "NO AGENT (last seen {:.0} s ago): from pins; what is attached stays in effect",
            agent.last_seen_seconds
        ));
    }
    let source = if mode_source.is_empty() { String::new() } else { format!(" (by {mode_source})") };
    let total = |name: &str| totals.get(name).copied().unwrap_or(0);
    // Also after the hold was switched off.
    let held = match total("held") {
        0 => String::new(),
        held => format!(" ({held} connections held so far)"),
    };
    text.push_str(&format!(", mode {mode}{source}, unknown pods {unknown_pods}{held}\n"));
    for pending in &agent.pending {
        text.push_str(&format!("not ready: {pending}\n"));
    }
    for note in &agent.notes {
        text.push_str(&format!("note: {note}\n"));
    }
    for hook in hooks.iter().filter(|hook| !hook.effective) {
        text.push_str(&format!("hook {} NOT IN EFFECT: {}\n", hook.hook, hook.reason));
    }
    text.push_str(&format!(
        "events: {} emitted, {} suppressed, {} lost\n\n",
        total("events_emitted"),
        total("events_suppressed"),
        total("events_ring_full")
    ));
    let shown: Vec<&PodStatus> =
        pods.iter().filter(|pod| all || pod.kind != "exempt" || pod.v4.verdict == "unsupported").collect();
    if shown.is_empty() {
        text.push_str(&format!("no meshed pods on this node ({} others, see --all)\n", pods.len()));
        return text;
    }
    text.push_str(&table(&shown, wide));
    for pod in shown.iter().filter(|pod| !pod.packet_sockets.is_empty()) {
        text.push_str(&format!(
            "note: {}/{} may send by packet sockets, which nothing here sees (CAP_NET_RAW in {})\n",
            pod.namespace,
            pod.name,
            pod.packet_sockets.join(", ")
        ));
    }
    text
}

fn table(pods: &[&PodStatus], wide: bool) -> String {
    let mut headings =
        vec!["NAMESPACE", "POD", "MESH", "MODE", "IPV4", "IPV6", "REDIRECTED", "BYPASSES", "DROPPED"];
    if wide {
        headings.extend([
            "WOULD-DROP",
            "EXEMPT",
            "PROXY",
            "HELD",
            "RETRIES",
            "CLASS",
            "CGROUP",
            "PROXY-CGROUP",
        ]);
    }
    let mut table = Table::new(&headings);
    for pod in pods {
        let count = |name: &str| pod.counters.get(name).copied().unwrap_or(0).to_string();
        let mut row = vec![
            pod.namespace.clone(),
            if pod.name.is_empty() { format!("(cgroup {})", pod.cgroup) } else { pod.name.clone() },
            pod.mesh.clone(),
            pod.mode.clone(),
            family(&pod.v4),
            family(&pod.v6),
            count("redirected"),
            pod.bypasses.to_string(),
            pod.dropped.to_string(),
        ];
        if wide {
            row.extend([count("would_drop"), count("exempt"), count("proxy"), count("held"), count("retry")]);
            let class = if pod.reason.is_empty() { pod.kind.clone() } else { pod.reason.clone() };
            row.extend([class, pod.cgroup.to_string(), pod.proxy_cgroup.to_string()]);
        }
        table.row(row);
    }
    table.to_string()
}

fn family(family: &FamilyStatus) -> String {
    match (family.verdict.as_str(), family.reason.as_str()) {
        ("unknown", _) => String::new(),
        (verdict, "" | "not_redirected") => verdict.into(),
        (verdict, reason) => format!("{verdict} ({reason})"),
    }
}
