//! `nobypass preflight`: what this machine has and lacks, and what to do.

mod permissions;

use std::path::PathBuf;

use crate::bpf::features::{Check, Level, checks};
use crate::bpf::pins::DEFAULT_DIR;
use crate::cgroup::root::{CgroupRoot, RootError, RootKind, RootOptions, find};
use crate::cli::exit::{Exit, print};
use crate::cli::table::Table;
use crate::cli::{Format, json};

/// Arguments of `preflight`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Directory of the pins, on a BPF file system
    #[arg(long, env = "NOBYPASS_BPF_DIR", value_name = "DIR", default_value = DEFAULT_DIR)]
    bpf_dir: PathBuf,
    /// Where cgroup2 is mounted [default: from /proc/self/mountinfo]
    #[arg(long, env = "NOBYPASS_CGROUP_ROOT", value_name = "DIR")]
    cgroup_root: Option<PathBuf>,
    /// Level of --cgroup-root in the hierarchy, if it is not the hierarchy's root
    #[arg(long, env = "NOBYPASS_CGROUP_ROOT_LEVEL", value_name = "N", requires = "cgroup_root")]
    cgroup_root_level: Option<u32>,
    #[command(flatten)]
    cluster: permissions::Cluster,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// Runs all checks; exits 69 if nobypass cannot run here.
pub fn run(args: &Args) -> Exit {
    let (cgroup, root) =
        cgroup(find(&RootOptions { path: args.cgroup_root.clone(), level: args.cgroup_root_level }));
    let mut checks = checks(&args.bpf_dir, root.as_deref());
    checks.insert(1, cgroup);
    checks.extend(permissions::checks(&args.cluster));
    let text = match args.output {
        Format::Json => json(&checks),
        Format::Table => table(&checks),
    };
    match print(&text) {
        Exit::Ok if checks.iter().any(|check| check.level == Level::Fail) => Exit::Unavailable,
        exit => exit,
    }
}

/// The check of the cgroup hierarchy, and its root if that can be used.
fn cgroup(found: Result<CgroupRoot, RootError>) -> (Check, Option<PathBuf>) {
    match found {
        Ok(root) => {
            let kind = match root.kind {
                RootKind::Unified => "unified",
                RootKind::Hybrid => "beside version 1: the runtime must put pods into it",
                RootKind::Given => "as given",
            };
            (Check::pass("cgroup2", format!("{} ({kind})", root.path.display())), Some(root.path))
        }
        Err(error) => {
            // `what is the matter: what to do`
            let text = error.to_string();
            let (found, remedy) = text.split_once(": ").unwrap_or((&text, "name it with --cgroup-root"));
            (Check::not(Level::Fail, "cgroup2", found, remedy), None)
        }
    }
}

fn table(checks: &[Check]) -> String {
    let mut table = Table::new(&["CHECK", "", "FOUND"]);
    let mut remedies = String::new();
    for Check { name, level, found, remedy } in checks {
        let level = match level {
            Level::Pass => "pass",
            Level::Warn => "warn",
            Level::Fail => "FAIL",
        };
        table.row([name.as_str(), level, found.as_str()]);
        if !remedy.is_empty() {
            remedies.push_str(&format!("{level} {name}: {remedy}\n"));
        }
    }
    let text = table.to_string();
    if remedies.is_empty() { text } else { format!("{text}\n{remedies}") }
}
