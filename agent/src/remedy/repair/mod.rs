//! Repair in place: the mesh's own plugin puts its rules into a running pod, called as the runtime would have called it.
//!
//! Everything happens in the runtime's mount and network namespaces: the plugin's binary, the tools that it calls and
//! libcni's cache are the host's, not the agent's image's.

pub mod cache;
pub mod call;
pub mod run;

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;
use tokio::sync::watch;

use self::call::{Call, Target};
use self::run::Ran;
use crate::cni::guard::Summary;
use crate::cni::window::Protection;
use crate::pods::ContainerId;
use crate::pods::source::cri::client::{Deadlines, Runtime};
use crate::pods::source::cri::{CriError, sandbox};
use crate::sys::ns;

/// How long the plugin may take to undo what it had begun.
const UNDO: Duration = Duration::from_secs(5);
/// Longest detail of a failure, in bytes: an Event's note has room for 1024.
const DETAIL: usize = 512;
const DEADLINES: Deadlines = Deadlines { list: Duration::from_secs(5), detail: Duration::from_secs(2) };
/// Where plugins are when the runtime does not tell.
const BIN_DIRS: [&str; 3] = ["/opt/cni/bin", "/usr/libexec/cni", "/usr/lib/cni"];

/// Why a pod could not be repaired.
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    /// The sandbox is no more.
    #[error("the pod's sandbox is gone")]
    Gone,
    /// The node itself is not protected.
    #[error("the node's CNI configuration has no mesh plugin at the moment")]
    NotProtected,
    /// The runtime does not answer.
    #[error(transparent)]
    Runtime(#[from] CriError),
    /// The runtime's process cannot be found.
    #[error("the container runtime's process is not visible: {0}; run the agent with hostPID")]
    Hidden(String),
    /// Its namespaces cannot be entered.
    #[error(
        "cannot enter the container runtime's namespaces: {0}; SYS_ADMIN, SYS_CHROOT and SYS_PTRACE are needed"
    )]
    Enter(io::Error),
    /// The plugin itself is missing: its installer may be late, or gone.
    #[error("{plugin} is not in {dirs}: the mesh's CNI installer has to put it there")]
    NotInstalled { plugin: String, dirs: String },
    /// The pod cannot be called for.
    #[error("{0}")]
    Impossible(String),
    /// The plugin could not be started.
    #[error("cannot start {path}: {source}")]
    Start { path: PathBuf, source: io::Error },
    /// The plugin failed.
    #[error("{plugin} {how}: {complaint}")]
    Failed { plugin: String, how: String, complaint: String },
    /// It did not end.
    #[error("{plugin} did not end within {after:?} and was killed: {complaint}")]
    TimedOut { plugin: String, after: Duration, complaint: String },
}

impl RepairError {
    /// For an Event's note.
    pub fn detail(&self) -> String {
        let mut text = self.to_string();
        if text.len() > DETAIL {
            let cut = text.floor_char_boundary(DETAIL);
            text.truncate(cut);
            text.push('…');
        }
        text
    }
}

/// Whom to repair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patient {
    /// The sandbox.
    pub sandbox: ContainerId,
    /// Namespace of the pod.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

/// Repairs pods.
#[derive(Clone, Debug)]
pub struct Repairer {
    /// The runtime's socket; `None` takes the first usual one.
    pub endpoint: Option<PathBuf>,
    /// What the guard says of the active config.
    pub config: watch::Receiver<Summary>,
}

impl Repairer {
    /// Calls the plugin for a running pod. It has put its rules in place when this succeeds, which a probe has to prove;
    /// when it fails, the plugin has been told to undo what it did.
    ///
    /// # Errors
    /// [`RepairError`].
    pub async fn repair(&self, patient: &Patient, limit: Duration) -> Result<(), RepairError> {
        let (config, plugin) = {
            let summary = self.config.borrow();
            match (&summary.content, &summary.wanted) {
                (Some(content), Some(wanted)) if summary.protection == Protection::Protected => {
                    (content.clone(), wanted.plugin().to_owned())
                }
                _ => return Err(RepairError::NotProtected),
            }
        };
        let runtime = Runtime::connect(self.endpoint.as_deref(), Path::new("/"), DEADLINES).await?;
        let live = sandbox::live(&runtime, patient.sandbox).await?.ok_or(RepairError::Gone)?;
        let bin_dirs = bin_dirs(runtime.status().await?.info.get("cniconfig").map(String::as_str));
        let pid = peer(runtime.path())?;
        let target = Target {
            sandbox: patient.sandbox.to_string(),
            namespace: patient.namespace.clone(),
            name: patient.name.clone(),
            uid: patient.uid.clone(),
            pid: live.pid,
            netns: live.netns,
        };
        let path = search_path(pid);
        let work = move || {
            let call = prepare(&config, &plugin, &target, &bin_dirs)?;
            perform(&call, &bin_dirs, path.as_ref(), limit)
        };
        ns::inside(pid, work).await.map_err(RepairError::Enter)?
    }
}

/// The process that listens on the runtime's socket.
fn peer(socket: &Path) -> Result<u32, RepairError> {
    let hidden = |why: String| RepairError::Hidden(why);
    let stream = UnixStream::connect(socket).map_err(|error| hidden(error.to_string()))?;
    // A process of a PID namespace that ours does not contain has the id 0 here.
    let peer = socket_peercred(&stream).map_err(|error| hidden(error.to_string()))?;
    u32::try_from(peer.pid.as_raw_nonzero().get()).map_err(|_| hidden("it has no id here".to_owned()))
}

/// The runtime's own search path, which its plugins inherit.
fn search_path(pid: u32) -> Option<OsString> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let path = environment.split(|byte| *byte == 0).find_map(|variable| variable.strip_prefix(b"PATH="))?;
    Some(OsString::from_vec(path.to_vec()))
}

/// Directories of plugins, in containerd's verbose status (go-cni's `ConfigResult`).
fn bin_dirs(cniconfig: Option<&str>) -> Vec<PathBuf> {
    let told: Option<serde_json::Value> = cniconfig.and_then(|text| serde_json::from_str(text).ok());
    let dirs = told.as_ref().and_then(|told| told.get("PluginDirs")).and_then(serde_json::Value::as_array);
    let dirs: Vec<PathBuf> =
        dirs.into_iter().flatten().filter_map(|dir| dir.as_str()).map(PathBuf::from).collect();
    if dirs.is_empty() { BIN_DIRS.map(PathBuf::from).to_vec() } else { dirs }
}

/// From here on in the runtime's namespaces.
fn prepare(config: &[u8], plugin: &str, target: &Target, bin_dirs: &[PathBuf]) -> Result<Call, RepairError> {
    let (network, entry) = call::entry(config, plugin).map_err(RepairError::Impossible)?;
    let cached = cache::choose(cached(&target.sandbox)?, &network).map_err(RepairError::Impossible)?;
    let call = call::call(entry, plugin, &cached, target, bin_dirs).map_err(RepairError::Impossible)?;
    same_pod(call.netns(), target.pid).map_err(RepairError::Impossible)?;
    Ok(call)
}

/// All attachments of a sandbox.
fn cached(sandbox: &str) -> Result<Vec<cache::Cached>, RepairError> {
    let mut all = Vec::new();
    for dir in cache::DIRS {
        for file in fs::read_dir(dir).into_iter().flatten().flatten() {
            let name = file.file_name().to_string_lossy().into_owned();
            if cache::names(&name, sandbox).is_none() {
                continue;
            }
            let bytes = fs::read(file.path()).map_err(|error| error.to_string());
            let read = bytes.and_then(|bytes| cache::read(&bytes, &name, sandbox));
            all.push(
                read.map_err(|why| RepairError::Impossible(format!("{}: {why}", file.path().display())))?,
            );
        }
    }
    Ok(all)
}

/// Rules must never get into the node's own network, nor into another pod's.
fn same_pod(netns: &Path, pid: Option<u32>) -> Result<(), String> {
    let id = |path: &Path| {
        let meta = fs::metadata(path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok::<_, String>((meta.dev(), meta.ino()))
    };
    let target = id(netns)?;
    if target == id(Path::new("/proc/thread-self/ns/net"))? {
        return Err(format!("{} is the node's own network", netns.display()));
    }
    match pid {
        Some(pid) if id(&PathBuf::from(format!("/proc/{pid}/ns/net")))? != target => {
            Err(format!("{} is not the network of the pod's sandbox", netns.display()))
        }
        _ => Ok(()),
    }
}

fn perform(
    call: &Call,
    bin_dirs: &[PathBuf],
    path: Option<&OsString>,
    limit: Duration,
) -> Result<(), RepairError> {
    let Some(program) = run::find(&call.plugin, bin_dirs) else {
        let dirs: Vec<String> = bin_dirs.iter().map(|dir| dir.display().to_string()).collect();
        return Err(RepairError::NotInstalled { plugin: call.plugin.clone(), dirs: dirs.join(", ") });
    };
    let start = |source| RepairError::Start { path: program.clone(), source };
    let plugin = call.plugin.clone();
    let error = match run::run(&program, call, "ADD", path, limit).map_err(start)? {
        Ran::Ok => return Ok(()),
        Ran::Failed { how, stdout, stderr } => {
            RepairError::Failed { plugin, how, complaint: call::complaint(&stdout, &stderr) }
        }
        Ran::TimedOut { after, stderr } => {
            RepairError::TimedOut { plugin, after, complaint: call::complaint("", &stderr) }
        }
    };
    // As a runtime does after an ADD that failed (CNI specification, "Lifecycle & Ordering").
    match run::run(&program, call, "DEL", path, UNDO) {
        Ok(Ran::Ok) => {}
        Ok(undone) => tracing::warn!(?undone, "the CNI plugin failed and could not undo what it had begun"),
        Err(error) => tracing::warn!(%error, "the CNI plugin failed and could not be told to undo it"),
    }
    Err(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_plugins() {
        let told = r#"{"PluginDirs":["/opt/cni/bin","/x"],"PluginConfDir":"/etc/cni/net.d","Networks":[]}"#;
        assert_eq!(bin_dirs(Some(told)), [PathBuf::from("/opt/cni/bin"), "/x".into()]);
        for nothing in [None, Some("{"), Some("{}"), Some(r#"{"PluginDirs":null}"#)] {
            assert_eq!(bin_dirs(nothing).len(), 3, "{nothing:?}");
        }
    }

    #[test]
    fn the_nodes_own_network_is_refused() {
        let own = same_pod(Path::new("/proc/self/ns/net"), None).unwrap_err();
        assert!(own.contains("the node's own network"), "{own}");
        assert!(same_pod(Path::new("/nonexistent"), None).unwrap_err().contains("No such file"));
    }

    #[test]
    fn a_long_complaint_is_cut() {
        let error = RepairError::Impossible("ä".repeat(2000));
        assert!(error.detail().len() <= DETAIL + '…'.len_utf8());
    }
}
