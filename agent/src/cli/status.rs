//! `nobypass status`: from the agent, or from the pins when there is none.

use std::io::{ErrorKind, IsTerminal as _, Write as _};
use std::path::Path;
use std::time::Duration;

use hyper::Method;

use crate::bpf::pins::PinDir;
use crate::cli::client::{ClientError, Place, read, runtime, send};
use crate::cli::exit::{Exit, fail, print};
use crate::cli::json;
use crate::cli::table::Table;
use crate::status::{FamilyStatus, PodStatus, Status, from_pins};

/// How it is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// For people
    #[default]
    Table,
    /// For people with a wide terminal
    Wide,
    /// For machines (see deploy/json.md)
    Json,
}

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
    /// Show it anew every so many seconds, 2 unless said otherwise
    #[arg(short, long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2",
        value_parser = clap::value_parser!(u32).range(1..=3600))]
    watch: Option<u32>,
}

/// Shows this node's pods.
pub fn run(args: &Args) -> Exit {
    if let Some(seconds) = args.watch {
        return watch(args, Duration::from_secs(seconds.into()));
    }
    match shown(args) {
        Ok(text) => print(&text),
        Err((exit, why)) => fail(exit, &why),
    }
}

fn shown(args: &Args) -> Result<String, (Exit, String)> {
    let status = match ask(&args.place.socket) {
        Ok(status) => status,
        Err(error) if error.is_absent() => from_pins(&PinDir::new(&args.place.bpf_dir))
            .map_err(|pins| (pins.exit(), format!("no agent runs, and {pins}")))?,
        Err(error) => return Err((error.exit(), error.to_string())),
    };
    Ok(match args.output {
        Format::Json => json(&status),
        Format::Table => text(&status, args.all, false),
        Format::Wide => text(&status, args.all, true),
    })
}

/// Shows it again and again, until interrupted or until nobody reads. An agent that is not there may come.
fn watch(args: &Args, pause: Duration) -> Exit {
    let clock = match runtime() {
        Ok(runtime) => runtime,
        Err(error) => return fail(Exit::Failed, &format!("cannot start: {error}")),
    };
    let mut out = std::io::stdout();
    let terminal = out.is_terminal();
    loop {
        let text = shown(args).unwrap_or_else(|(_, why)| format!("nobypass: {why}\n"));
        let text = if terminal { over(&text) } else { text + "\n" };
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Ok(()) => clock.block_on(async { tokio::time::sleep(pause).await }),
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Exit::Ok,
            Err(error) => return fail(Exit::Failed, &format!("cannot write to standard output: {error}")),
        }
    }
}

/// What puts a text over what a terminal showed before, without a flicker (ECMA-48: CUP, EL, ED).
fn over(text: &str) -> String {
    format!("\x1b[H{}\x1b[J", text.replace('\n', "\x1b[K\n"))
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
