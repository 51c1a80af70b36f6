//! `nobypass cni plan`.

use std::ffi::OsStr;

use serde_json::{Value, json};
use similar::TextDiff;

use super::{Failure, Format, Where, Which, contract, list, printable};
use crate::cli::exit::{Exit, print};
use crate::cni::discover::Listed;
use crate::cni::entry::WantedEntry;
use crate::cni::plan::{
    FileKind, Leave, Options, Plan, Remove, aside_name, is_list_of, list_name, plan, unplan,
};
use crate::cni::refusal::Refusal;

/// `nobypass cni plan`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    place: Where,
    #[command(flatten)]
    which: Which,
    /// Leave single-plugin files (.conf, .json) as they are
    #[arg(long, env = "NOBYPASS_CNI_KEEP_CONF")]
    cni_keep_conf: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// What would happen to one file.
struct Step {
    file: String,
    action: Action,
}

enum Action {
    Leave(Leave),
    Refuse(Refusal),
    Write { before: String, after: String },
    Convert { list: String, aside: String, before: String, after: String },
}

/// Runs it.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let contract = contract()?;
    let (dir, host) = args.place.dirs(&contract);
    let listed = list(&dir, &host)?;
    let Some(wanted) = args.which.find(&contract, &listed)? else {
        let message = "no config carries the mesh's entry, and none is given: use --cni-entry FILE or set \
                       CNI_NETWORK_CONFIG";
        return Err((Exit::Usage, message.to_owned()));
    };
    let options = Options { convert: !args.cni_keep_conf, ..Options::default() };
    let steps: Vec<Step> = listed
        .iter()
        .filter_map(|file| step(file, FileKind::of(&file.name)?, &listed, &wanted.entry, options))
        .collect();
    Ok(print(&match args.output {
        Format::Table => printable(&as_text(&steps)),
        Format::Json => format!("{:#}\n", Value::from_iter(steps.iter().map(as_json))),
    }))
}

fn step(
    file: &Listed,
    kind: FileKind,
    all: &[Listed],
    wanted: &WantedEntry,
    options: Options,
) -> Option<Step> {
    let name = file.name.to_string_lossy().into_owned();
    let lossy = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let action = match &file.content {
        Err(refusal) => Action::Refuse(refusal.clone()),
        Ok(bytes) => match plan(kind, bytes, wanted, options) {
            Plan::Leave(leave) => Action::Leave(leave),
            Plan::Refuse(refusal) => Action::Refuse(refusal),
            Plan::Write(after) => Action::Write { before: lossy(bytes), after: lossy(&after) },
            Plan::Convert(after) => {
                let list = list_name(&file.name)?;
                let existing = all.iter().find(|other| other.name == list);
                if existing.is_some_and(|existing| !made_from(existing, bytes, wanted)) {
                    Action::Refuse(Refusal::ListExists { list: list.to_string_lossy().into_owned() })
                } else {
                    Action::Convert {
                        list: list.to_string_lossy().into_owned(),
                        aside: aside_name(&file.name).to_string_lossy().into_owned(),
                        before: existing
                            .and_then(|file| file.content.as_ref().ok())
                            .map_or_else(String::new, |b| lossy(b)),
                        after: lossy(&after),
                    }
                }
            }
        },
    };
    Some(Step { file: name, action })
}

/// Whether this list is an earlier conversion of the single-plugin file.
fn made_from(list: &Listed, original: &[u8], wanted: &WantedEntry) -> bool {
    let Ok(bytes) = &list.content else { return false };
    match unplan(FileKind::Conflist, bytes, Remove::Type(wanted.plugin())) {
        Plan::Write(bare) => is_list_of(&bare, original),
        _ => is_list_of(bytes, original),
    }
}

fn diff(before: &str, after: &str, from: &str, to: &str) -> String {
    let diff = TextDiff::from_lines(before, after);
    diff.unified_diff().context_radius(3).header(from, to).to_string()
}

fn as_text(steps: &[Step]) -> String {
    let mut text = String::new();
    let mut writes = 0;
    for Step { file, action } in steps {
        match action {
            Action::Leave(Leave::Satisfied) => {}
            Action::Leave(leave) => text.push_str(&format!("# {file}: left, {}\n", explain(*leave))),
            Action::Refuse(refusal) => text.push_str(&format!("# {file}: not touched: {refusal}\n")),
            Action::Write { before, after } => {
                writes += 1;
                text.push_str(&diff(before, after, file, file));
            }
            Action::Convert { list, aside, before, after } => {
                writes += 1;
                let from = if before.is_empty() { OsStr::new("/dev/null") } else { OsStr::new(list) };
                text.push_str(&diff(before, after, &from.to_string_lossy(), list));
                text.push_str(&format!("# {file}: then kept as {aside}\n"));
            }
        }
    }
    let left = steps.iter().filter(|step| matches!(step.action, Action::Leave(Leave::Satisfied))).count();
    text.push_str(&format!("# {writes} to write, {left} satisfied, {} left\n", steps.len() - writes - left));
    text
}

fn explain(leave: Leave) -> &'static str {
    match leave {
        Leave::Satisfied => "satisfied",
        Leave::SinglePlugin => "a single plugin that may not become a list: its pods are not protected",
        Leave::Loopback => "loopback is no pod network",
        Leave::MetaPlugin => "a meta-plugin: the file it delegates to carries the entry",
        Leave::OnlyMesh => "it holds nothing but the mesh's entry",
    }
}

fn as_json(step: &Step) -> Value {
    let Step { file, action } = step;
    match action {
        Action::Leave(leave) => json!({ "file": file, "action": "leave", "reason": leave.label() }),
        Action::Refuse(refusal) => json!({
            "file": file,
            "action": "refuse",
            "reason": refusal.label(),
            "message": refusal.to_string(),
        }),
        Action::Write { before, after } => json!({
            "file": file,
            "action": "write",
            "diff": diff(before, after, file, file),
            "content": after,
        }),
        Action::Convert { list, aside, before, after } => json!({
            "file": file,
            "action": "convert",
            "list": list,
            "keptAs": aside,
            "diff": diff(before, after, if before.is_empty() { "/dev/null" } else { list }, list),
            "content": after,
        }),
    }
}
