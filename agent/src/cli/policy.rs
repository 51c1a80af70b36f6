//! `nobypass policy`: checks a policy file, shows what holds.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use hyper::Method;
use serde_json::Value;

use crate::cli::client::{ClientError, Place, read, runtime, send};
use crate::cli::exit::{Exit, fail, print};
use crate::cli::table::Table;
use crate::cli::{Format, json};
use crate::policy::{check, reload};

/// Arguments of `policy`.
#[derive(Debug, clap::Args)]
pub struct Policy {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Check policy files: one line a problem, with its place and what would be right
    #[command(after_help = crate::cli::exit::CHECK)]
    Check(CheckArgs),
    /// Show what holds on this node
    #[command(after_help = crate::cli::exit::SHOW)]
    Show(ShowArgs),
    /// Print the JSON schema of a policy, for editors
    Schema,
}

#[derive(Debug, clap::Args)]
struct CheckArgs {
    /// The files
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

#[derive(Debug, clap::Args)]
struct ShowArgs {
    #[command(flatten)]
    place: Place,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// Runs the sub-command.
pub fn run(args: &Policy) -> Exit {
    match &args.command {
        Command::Check(args) => check(args),
        Command::Show(args) => show(args),
        Command::Schema => print(check::SCHEMA),
    }
}

/// 0: all are valid; 1: at least one is not; 64: at least one cannot be read.
fn check(args: &CheckArgs) -> Exit {
    let (mut unreadable, mut invalid) = (false, false);
    let (mut text, mut files) = (String::new(), Vec::new());
    for path in &args.files {
        let (error, problems) = match reload::read(path) {
            Err(error) => (Some(error.to_string()), Vec::new()),
            Ok(content) => (None, check::parse(&content).err().unwrap_or_default()),
        };
        unreadable |= error.is_some();
        invalid |= !problems.is_empty();
        // The form that compilers have, which editors and pipelines understand.
        for problem in &problems {
            let check::Problem { line, column, path: within, what } = problem;
            let within = if within.is_empty() { String::new() } else { format!("{within}: ") };
            let _ = writeln!(text, "{}:{line}:{column}: {within}{what}", path.display());
        }
        if let Some(error) = &error {
            let _ = writeln!(text, "{error}");
        } else if problems.is_empty() {
            let _ = writeln!(text, "{}: valid", path.display());
        }
        files.push(serde_json::json!({
            "file": path, "valid": error.is_none() && problems.is_empty(), "error": error,
            "problems": problems.iter().map(|problem| serde_json::json!({
                "line": problem.line, "column": problem.column, "path": problem.path, "problem": problem.what,
            })).collect::<Vec<_>>(),
        }));
    }
    let printed = match args.output {
        Format::Json => print(&json(&files)),
        Format::Table => print(&text),
    };
    match (printed, unreadable, invalid) {
        (Exit::Ok, true, _) => Exit::Usage,
        (Exit::Ok, false, true) => Exit::Failed,
        (printed, _, _) => printed,
    }
}

fn show(args: &ShowArgs) -> Exit {
    let shown = match ask(&args.place.socket) {
        Ok(shown) => shown,
        Err(error) => return fail(error.exit(), &error.to_string()),
    };
    print(&match args.output {
        Format::Json => json(&shown),
        Format::Table => table(&shown),
    })
}

fn ask(socket: &Path) -> Result<Value, ClientError> {
    let runtime = runtime().map_err(|error| ClientError::Broken(error.to_string()))?;
    let text = runtime
        .block_on(async { read(send(socket, Method::GET, "/v1/policy", String::new()).await?).await })?;
    serde_json::from_str(&text).map_err(|error| ClientError::Broken(error.to_string()))
}

fn table(shown: &Value) -> String {
    let mut text = match shown["file"].as_str() {
        Some(file) => format!("policy file {file}\n"),
        None => "no policy file: flags and defaults\n".to_owned(),
    };
    if let Some(problem) = shown["problem"].as_str() {
        let _ = writeln!(text, "NOT TAKEN as it is now: {problem}\nthe last good one holds:");
    }
    let policy = &shown["policy"];
    if policy["modeSource"] == "hand" {
        let _ = writeln!(
            text,
            "mode {} is set by hand (nobypass mode); the policy says {}",
            scalar(&policy["mode"]),
            scalar(&policy["modeWithoutHand"])
        );
    }
    text.push('\n');
    let mut rows = Table::new(&["SETTING", "VALUE"]);
    for (name, value) in policy.as_object().into_iter().flatten() {
        match (name.as_str(), value) {
            ("namespaces", _) => {}
            ("traffic", Value::Object(traffic)) => {
                for (name, value) in traffic {
                    rows.row([name.clone(), scalar(value)]);
                }
            }
            _ => rows.row([name.clone(), scalar(value)]),
        }
    }
    rows.row(["profiles".to_owned(), scalar(&shown["profiles"])]);
    text.push_str(&rows.to_string());
    let rules = policy["namespaces"].as_array().map_or(&[][..], Vec::as_slice);
    if !rules.is_empty() {
        let mut rows =
            Table::new(&["NAMESPACES", "LABELS", "MODE", "NONTCP", "QUIC", "FAMILYGAP", "INBOUND"]);
        for rule in rules {
            let labels: Vec<String> = rule["matchLabels"]
                .as_object()
                .into_iter()
                .flatten()
                .map(|(key, value)| format!("{key}={}", scalar(value)))
                .collect();
            let mut row = vec![scalar(&rule["names"]), labels.join(",")];
            row.extend(["mode", "nonTcp", "quic", "familyGap", "inbound"].map(|name| scalar(&rule[name])));
            rows.row(row);
        }
        let _ = write!(text, "\n{rows}");
    }
    text
}

fn scalar(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(scalar).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}
