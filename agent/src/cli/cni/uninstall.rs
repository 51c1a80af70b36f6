//! `nobypass cni uninstall`.

use std::ffi::OsString;
use std::path::PathBuf;

use serde_json::json;

use super::{Failure, Format, Mode, Where, Which, contract, printable, unreadable};
use crate::cli::exit::{Exit, print};
use crate::cni::uninstall::{self as removal, GRACE, Removal, Report, UninstallError};

/// `nobypass cni uninstall`.
#[derive(Debug, clap::Args)]
pub struct Uninstall {
    #[command(flatten)]
    place: Where,
    #[command(flatten)]
    which: Which,
    /// How nobypass was used here. As a guard it owns neither entry nor plugin: nothing is removed
    #[arg(long, value_name = "MODE", env = "NOBYPASS_CNI_MODE", default_value = "guard")]
    cni_mode: Mode,
    /// Remove every entry of the plugin, also those that nobypass did not write
    #[arg(long)]
    all: bool,
    /// Directory of the plugin binaries [default: /opt/cni/bin, or what CONTAINER_MOUNT_PREFIX and DEST_CNI_BIN_DIR
    /// say]
    #[arg(long, value_name = "DIR", env = "NOBYPASS_CNI_BIN_DIR")]
    cni_bin_dir: Option<PathBuf>,
    /// Name of the plugin's kubeconfig in the CNI directory [default: KUBECONFIG_FILE_NAME, or
    /// ZZZ-linkerd-cni-kubeconfig]
    #[arg(long, value_name = "NAME")]
    cni_kubeconfig: Option<OsString>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// Runs it.
pub fn run(args: &Uninstall) -> Result<Exit, Failure> {
    if args.cni_mode != Mode::Install {
        return Ok(print(
            "nothing removed: in guard mode the entry, the kubeconfig and the binary are the mesh installer's. To remove \
             what nobypass installed, use --cni-mode=install\n",
        ));
    }
    let contract = contract()?;
    let (dir, host) = args.place.dirs(&contract);
    let given = args.which.given(&contract)?;
    let which = match (given, &args.which.cni_plugin) {
        (Some(wanted), _) if !args.all => removal::Which::Exactly(wanted.entry),
        (_, Some(plugin)) if args.all => removal::Which::Type(plugin.clone()),
        (Some(wanted), None) => removal::Which::Type(wanted.entry.plugin().to_owned()),
        _ => {
            let message = "which entry? Use --cni-entry FILE or set CNI_NETWORK_CONFIG to remove the one that nobypass \
                           wrote, or --all --cni-plugin TYPE for every entry of a plugin";
            return Err((Exit::Usage, message.to_owned()));
        }
    };
    let removal = Removal {
        dir: dir.clone(),
        host,
        which,
        kubeconfig: Some(args.cni_kubeconfig.clone().unwrap_or_else(|| contract.kubeconfig.clone())),
        bin_dir: Some(args.cni_bin_dir.clone().unwrap_or_else(|| contract.mounted_bin_dir())),
        grace: GRACE,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| (Exit::Failed, format!("cannot start: {error}")))?;
    let report = runtime.block_on(removal::uninstall(&removal)).map_err(|error| match error {
        UninstallError::Directory { source, .. } => unreadable(&dir, &source),
        error @ UninstallError::Busy { .. } => (Exit::Failed, error.to_string()),
    })?;
    let shown = match args.output {
        Format::Table => printable(&as_text(&report)),
        Format::Json => format!("{:#}\n", as_json(&report)),
    };
    match print(&shown) {
        Exit::Ok if !report.complete() => Ok(Exit::Failed),
        exit => Ok(exit),
    }
}

fn as_text(report: &Report) -> String {
    let Report { cleaned, given_back, restored, kept_aside, remaining, removed, failed } = report;
    let mut lines = Vec::new();
    lines.extend(cleaned.iter().map(|name| format!("{}: entry removed", name.to_string_lossy())));
    lines.extend(given_back.iter().map(|name| {
        format!(
            "{}: has the entry again that it had before nobypass; kubeconfig and binary stay for it",
            name.to_string_lossy()
        )
    }));
    lines.extend(restored.iter().map(|name| format!("{}: put back", name.to_string_lossy())));
    lines.extend(
        kept_aside
            .iter()
            .map(|name| format!("{}: stays, its list was changed by somebody else", name.to_string_lossy())),
    );
    lines.extend(removed.iter().map(|path| format!("{}: removed", path.display())));
    lines.extend(failed.iter().map(|(path, why)| format!("{}: FAILED: {why}", path.display())));
    lines.extend(
        remaining
            .iter()
            .map(|(name, why)| format!("{}: still needs the plugin: {why}", name.to_string_lossy())),
    );
    if !remaining.is_empty() {
        lines.push(
            "the kubeconfig and the binary stay: without them pods could neither start nor end".to_owned(),
        );
    }
    if lines.is_empty() {
        lines.push("nothing to remove".to_owned());
    }
    lines.join("\n") + "\n"
}

fn as_json(report: &Report) -> serde_json::Value {
    let Report { cleaned, given_back, restored, kept_aside, remaining, removed, failed } = report;
    let names =
        |names: &[OsString]| names.iter().map(|name| name.to_string_lossy().into_owned()).collect::<Vec<_>>();
    json!({
        "complete": report.complete(),
        "cleaned": names(cleaned),
        "givenBack": names(given_back),
        "restored": names(restored),
        "keptAside": names(kept_aside),
        "removed": removed,
        "remaining": remaining.iter().map(|(name, why)| json!({ "file": name.to_string_lossy(), "message": why })).collect::<Vec<_>>(),
        "failed": failed.iter().map(|(path, why)| json!({ "path": path, "message": why })).collect::<Vec<_>>(),
    })
}
