//! `nobypass explain`: why a pod's verdict is what it is, and what to do.

use std::fmt::Write as _;

use hyper::Method;

use crate::bpf::Maps;
use crate::bpf::pins::PinDir;
use crate::cli::client::{ClientError, Place, read, runtime, send};
use crate::cli::exit::{Exit, fail, print};
use crate::cli::table::{Table, printable};
use crate::cli::{Format, json};
use crate::explain::find::{Named, find};
use crate::explain::{Explanation, FamilyExplained, Kernel, Sign, from_pins};
use crate::policy::mode::Said;
use crate::policy::text;

/// Arguments of `explain`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The pod: NAMESPACE/NAME, or NAME alone where one pod has it
    #[arg(value_name = "NAMESPACE/POD")]
    pod: String,
    #[command(flatten)]
    place: Place,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// Explains a pod.
pub fn run(args: &Args) -> Exit {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '/');
    if !args.pod.chars().all(plain) || args.pod.is_empty() {
        return fail(Exit::Usage, &format!("{:?} is no pod's name: write NAMESPACE/NAME", args.pod));
    }
    let explained = match ask(args) {
        Ok(explained) => explained,
        Err(error) if error.is_absent() => match without_agent(args) {
            Ok(explained) => explained,
            Err((exit, why)) => return fail(exit, &why),
        },
        Err(error) => return fail(error.exit(), &error.to_string()),
    };
    print(&match args.output {
        Format::Json => json(&explained),
        Format::Table => for_people(&explained),
    })
}

fn ask(args: &Args) -> Result<Explanation, ClientError> {
    let runtime = runtime().map_err(|error| ClientError::Broken(error.to_string()))?;
    let path = format!("/v1/explain?pod={}", args.pod);
    let text = runtime
        .block_on(async { read(send(&args.place.socket, Method::GET, &path, String::new()).await?).await })?;
    serde_json::from_str(&text)
        .map_err(|error| ClientError::Broken(format!("{error}; is the agent of another version?")))
}

/// What the pins alone can tell.
fn without_agent(args: &Args) -> Result<Explanation, (Exit, String)> {
    let error = |error: crate::bpf::BpfError| (error.exit(), format!("no agent runs, and {error}"));
    let maps = Maps::open(&PinDir::new(&args.place.bpf_dir)).map_err(error)?;
    let named = |id: u64| -> Option<Named> {
        let name = maps.name(id)?;
        Some((text(&name.namespace), text(&name.name), id))
    };
    let pods: Vec<Named> = maps.named().into_iter().filter_map(named).collect();
    let cgroup = find(&args.pod, &pods).map_err(|error| (Exit::Failed, format!("no agent runs; {error}")))?;
    let kernel = Kernel::read(&maps, cgroup).map_err(error)?;
    Ok(from_pins(&maps, cgroup, &kernel))
}

/// The whole as text; what comes from the cluster cannot reach the terminal as anything else.
fn for_people(explained: &Explanation) -> String {
    let mut text = String::new();
    let Explanation {
        agent,
        namespace,
        name,
        uid,
        mesh,
        cgroup,
        kind,
        recognition,
        phase,
        ends_by_itself,
        enforce,
        ..
    } = explained;
    if !agent {
        text.push_str("NO AGENT: this is what the kernel's maps can tell\n");
    }
    let _ = writeln!(text, "pod        {namespace}/{name}");
    let mesh = if mesh.is_empty() { "no mesh" } else { mesh };
    let _ = writeln!(text, "mesh       {mesh} ({kind}): {recognition}");
    if !phase.is_empty() {
        let end = if *ends_by_itself { ", ends by itself" } else { "" };
        let _ = writeln!(text, "phase      {}{end}", phase.replace('_', " "));
    }
    let identity = if uid.is_empty() { String::new() } else { format!("uid {uid}, ") };
    let _ = writeln!(text, "identity   {identity}cgroup {cgroup}");
    for family in &explained.families {
        of_family(&mut text, family);
    }
    of_mode(&mut text, explained);
    let _ = writeln!(text, "enforce    {enforce}");
    of_lists(&mut text, explained);
    heading(&mut text, "what to do");
    for step in &explained.next {
        let _ = writeln!(text, "  - {step}");
    }
    text.lines().map(|line| printable(line) + "\n").collect()
}

fn heading(text: &mut String, heading: &str) {
    let _ = writeln!(text, "\n{heading}");
}

fn of_family(text: &mut String, family: &FamilyExplained) {
    let FamilyExplained { family, verdict, reason, since_seconds, evidence } = family;
    let reason = if reason.is_empty() { String::new() } else { format!(" ({reason})") };
    let since = since_seconds.map_or_else(String::new, |since| format!(" for {}", span(since)));
    let _ = writeln!(text, "{family:<10} {verdict}{reason}{since}");
    if evidence.is_empty() {
        let _ = writeln!(text, "             nothing was seen");
    }
    for Sign { what, seconds_ago } in evidence {
        let _ = writeln!(text, "             {} ago: {what}", span(*seconds_ago));
    }
}

fn of_mode(text: &mut String, explained: &Explanation) {
    let mode = &explained.mode;
    let by =
        if mode.level.is_empty() { String::new() } else { format!(", by {}", mode.level.replace('_', " ")) };
    let _ = writeln!(text, "mode       {}{by}", mode.mode);
    for Said { level, value, fate } in &mode.said {
        let word = |debug: String| debug.to_lowercase();
        let node = if *level == crate::policy::mode::Level::Node {
            format!(" ({})", mode.node)
        } else {
            String::new()
        };
        let _ = writeln!(
            text,
            "             {} says {value}{node}: {}",
            level.label().replace('_', " "),
            word(format!("{fate:?}"))
        );
    }
    if let Some(traffic) = &explained.traffic {
        let crate::explain::TrafficExplained { non_tcp, quic, family_gap, inbound } = traffic;
        let _ = writeln!(
            text,
            "traffic    nonTcp {non_tcp}, quic {quic}, familyGap {family_gap}, inbound {inbound}"
        );
    }
}

fn of_lists(text: &mut String, explained: &Explanation) {
    if !explained.exemptions.is_empty() {
        heading(text, "let past the proxy by the mesh itself");
        for (kind, values) in &explained.exemptions {
            let _ = writeln!(text, "  {kind:<12} {}", values.join(", "));
        }
    }
    if !explained.containers.is_empty() {
        let mut table = Table::new(&["CONTAINER", "ROLE", "STATE", "EXIT", "UID", "CGROUP"]);
        for container in &explained.containers {
            let number = |n: Option<String>| n.unwrap_or_default();
            table.row([
                container.name.clone(),
                container.role.clone(),
                container.state.clone(),
                number(container.exit_code.map(|code| code.to_string())),
                number(container.uid.map(|uid| uid.to_string())),
                number(container.cgroup.map(|id| id.to_string())),
            ]);
        }
        let _ = write!(text, "\n{table}");
    }
    if !explained.counters.is_empty() {
        heading(text, "counters");
        let counters: Vec<String> =
            explained.counters.iter().map(|(name, n)| format!("{name} {n}")).collect();
        let _ = writeln!(text, "  {}", counters.join(", "));
    }
    if !explained.events.is_empty() {
        let mut table = Table::new(&["LAST BYPASSES", "TO", "CONTAINER", "UID", "REASON", "ACTION"]);
        for event in &explained.events {
            let peer = if event.direction == "inbound" { &event.src } else { &event.dst };
            table.row([
                event.direction.clone(),
                peer.clone(),
                event.container.clone(),
                event.uid.to_string(),
                event.reason.clone(),
                event.action.clone(),
            ]);
        }
        let _ = write!(text, "\n{table}");
    }
    if !explained.problems.is_empty() {
        heading(text, "problems");
        for problem in &explained.problems {
            let _ = writeln!(text, "  {problem}");
        }
    }
}

/// A time as people say it.
fn span(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => "less than a second".into(),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.0} h", s / 3600.0),
    }
}
