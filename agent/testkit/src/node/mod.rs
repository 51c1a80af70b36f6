//! A private container node: containerd with its own directories, mounts, network and cgroups, and a world outside of it.
//!
//! ```text
//!  ext  198.51.100.2, 2001:db8:64::2   server on 8080 that answers "plain" or "mesh"
//!   |
//!  node 198.51.100.1, 2001:db8:64::1   containerd; bridge cni0
//!   |
//!  pods 10.50.0.0/24, fd50::/64        cgroups /nobypass-node-<pid>-<n>/kubepods/...
//! ```
//!
//! Nothing of the machine is touched: the node's /run, /var/lib, bpffs and tracefs are mounts of its own. A supervisor process
//! removes everything when the [`Node`] is dropped, and also when the test is killed.

mod config;
mod containerd;
mod cri;
mod pod;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail, ensure};
use k8s_cri::v1 as api;
use serde_json::Value;

pub use containerd::Containerd;
pub use cri::Cri;
pub use pod::{ContainerSpec, ExecOutput, Pod, PodSpec};

use crate::netns::Netns;
use crate::proc::{self, Proc};
use crate::traffic::{Running, Traffic};
use crate::{bin, cgroup, images, wait};

/// Address of the server outside the node.
pub const EXT4: &str = "198.51.100.2";
/// As [`EXT4`].
pub const EXT6: &str = "2001:db8:64::2";
/// Port of the server outside the node.
pub const EXT_PORT: &str = "8080";

/// How a node is to be.
#[derive(Clone, Debug)]
pub struct Options {
    /// The containerd to run; `ctr` and the shim are looked for beside it first.
    pub containerd: PathBuf,
    /// runc's absolute path, or its name.
    pub runc: String,
    /// Name under which the mesh's plugin is installed and called.
    pub mesh_plugin: String,
    /// Mounts a bpffs on /sys/fs/bpf and tracefs on /sys/kernel/tracing inside the node.
    pub kernel_mounts: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            containerd: "containerd".into(),
            runc: "runc".to_owned(),
            mesh_plugin: "linkerd-cni".to_owned(),
            kernel_mounts: true,
        }
    }
}

/// A running node. Dropping it removes its pods and everything else.
#[derive(Debug)]
pub struct Node {
    options: Options,
    base: PathBuf,
    cgroup: String,
    cri: Cri,
    supervisor: Proc,
    containerd_pid: u32,
    server: Running,
    netns: Netns,
    ext: Netns,
}

impl Node {
    /// Starts a node with the default options.
    pub fn new() -> Result<Self> {
        Self::start(Options::default())
    }

    /// Starts a node, imports the test images and waits until the runtime answers. No network is configured yet:
    /// see [`Node::write_conflist`].
    pub fn start(options: Options) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("nobypass-node-{}-{n}", std::process::id());
        let dir = tempfile::Builder::new().prefix(&format!("{name}-")).tempdir()?;
        let (netns, ext) = networks(&name)?;
        let server = Traffic::new().netns(&ext).server(&[8080])?;
        lay_out(dir.path(), &options)?;
        images::write_pause(&dir.path().join("pause.tar"))?;
        images::write_meshtest(&dir.path().join("meshtest.tar"))?;
        let cri = Cri::new(&dir.path().join("containerd.sock"))?;
        let supervisor = supervisor(dir.path(), &name, &options, &netns)?;
        // From here on the supervisor owns the directory.
        let base = dir.keep();
        let mut node =
            Self { options, base, cgroup: name, cri, supervisor, containerd_pid: 0, server, netns, ext };
        node.read_runtime_pid()?;
        node.await_runtime()?;
        for archive in ["pause.tar", "meshtest.tar"] {
            node.import(&node.base.join(archive))?;
        }
        // The kubelet makes these before any pod.
        for qos in ["burstable", "besteffort"] {
            fs::create_dir_all(node.cgroup_top().join("kubepods").join(qos))?;
        }
        Ok(node)
    }

    fn await_runtime(&self) -> Result<()> {
        let ready = wait::until("containerd", wait::HANG, || {
            let mut client = self.cri.runtime();
            let request = api::VersionRequest { version: "v1".to_owned() };
            self.cri.call("Version", async move { client.version(request).await }).ok()
        });
        ready.map(drop).with_context(|| format!("its log ends with:\n{}", self.runtime_log()))
    }

    /// Imports an OCI archive.
    pub fn import(&self, archive: &Path) -> Result<()> {
        let mut ctr = Command::new(beside(&self.options.containerd, "ctr"));
        ctr.arg("-a").arg(self.cri_socket()).args(["-n", "k8s.io", "images", "import"]).arg(archive);
        proc::check(ctr, "").map(drop)
    }

    /// The last lines of containerd's log.
    #[must_use]
    pub fn runtime_log(&self) -> String {
        let text = fs::read_to_string(self.base.join("containerd.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines.get(lines.len().saturating_sub(20)..).unwrap_or_default().join("\n")
    }

    /// The runtime's socket.
    #[must_use]
    pub fn cri_socket(&self) -> PathBuf {
        self.base.join("containerd.sock")
    }

    /// Client of the runtime.
    #[must_use]
    pub fn cri(&self) -> &Cri {
        &self.cri
    }

    /// The runtime's directory of CNI configurations.
    #[must_use]
    pub fn cni_net_dir(&self) -> PathBuf {
        self.base.join("net.d")
    }

    /// The runtime's directory of CNI plugins.
    #[must_use]
    pub fn cni_bin_dir(&self) -> PathBuf {
        self.base.join("bin")
    }

    /// libcni's result cache, `/var/lib/cni` inside the node.
    #[must_use]
    pub fn cni_cache_dir(&self) -> PathBuf {
        self.base.join("cni-cache")
    }

    /// A directory for whatever else a test wants to be gone with the node.
    #[must_use]
    pub fn base_dir(&self) -> &Path {
        &self.base
    }

    /// The node's network namespace.
    #[must_use]
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// The network namespace of the world outside.
    #[must_use]
    pub fn ext(&self) -> &Netns {
        &self.ext
    }

    /// The server outside, on port 8080.
    pub fn server(&mut self) -> &mut Running {
        &mut self.server
    }

    /// Process id of containerd.
    #[must_use]
    pub fn containerd_pid(&self) -> u32 {
        self.containerd_pid
    }

    /// Process id of a process that is in the node's mount and network namespaces as long as the node exists.
    #[must_use]
    pub fn supervisor_pid(&self) -> u32 {
        self.supervisor.pid()
    }

    /// The node's directory in the cgroup2 hierarchy, which holds `kubepods`.
    #[must_use]
    pub fn cgroup_top(&self) -> PathBuf {
        cgroup::v2_root().unwrap_or_default().join(&self.cgroup)
    }

    /// The parent of all pods' cgroups in the cgroup2 hierarchy.
    #[must_use]
    pub fn kubepods(&self) -> PathBuf {
        self.cgroup_top().join("kubepods")
    }

    /// The same directory as a path within a hierarchy, as the runtime takes it.
    fn cgroup_parent(&self) -> PathBuf {
        Path::new("/").join(&self.cgroup)
    }

    fn log_dir(&self, uid: &str) -> PathBuf {
        self.base.join("pods").join(uid)
    }

    /// The mesh plugin's entry for a conflist, to be changed at will.
    #[must_use]
    pub fn mesh_entry(&self) -> Value {
        config::mesh_entry(&self.options.mesh_plugin, &self.mesh_log())
    }

    /// The file in which the mesh plugin notes each call as a line of JSON.
    #[must_use]
    pub fn mesh_log(&self) -> PathBuf {
        self.base.join("mesh-plugin.log")
    }

    /// Text of the network's conflist with `more` plugins behind the bridge.
    #[must_use]
    pub fn conflist(&self, more: &[Value]) -> String {
        config::conflist(&self.base, more)
    }

    /// Writes `10-node.conflist`, with or without the mesh's plugin, and waits until the runtime uses it.
    pub fn write_conflist(&self, with_mesh: bool) -> Result<PathBuf> {
        let more = if with_mesh { vec![self.mesh_entry()] } else { Vec::new() };
        self.install_conflist(&self.conflist(&more))
    }

    /// As [`Node::write_conflist`], with any text that is a valid list.
    pub fn install_conflist(&self, text: &str) -> Result<PathBuf> {
        let path = self.cni_net_dir().join("10-node.conflist");
        // In the same directory: containerd does not notice a file renamed in from elsewhere.
        let temporary = self.cni_net_dir().join(".10-node.tmp");
        fs::write(&temporary, text)?;
        fs::rename(&temporary, &path)?;
        let wanted: Value = serde_json::from_str(text).context("not a valid conflist")?;
        wait::until("the runtime to load the conflist", wait::HANG, || {
            self.loaded_conflist().ok().filter(|loaded| *loaded == wanted)
        })
        .with_context(|| format!("the runtime's log ends with:\n{}", self.runtime_log()))?;
        Ok(path)
    }

    /// The network configuration the runtime uses now.
    pub fn loaded_conflist(&self) -> Result<Value> {
        let mut client = self.cri.runtime();
        let request = api::StatusRequest { verbose: true };
        let status = self.cri.call("Status", async move { client.status(request).await })?;
        let info: Value = serde_json::from_str(status.info.get("cniconfig").context("no CNI information")?)?;
        let networks = info["Networks"].as_array().context("no networks")?;
        let source = networks
            .iter()
            .filter_map(|net| net["Config"]["Source"].as_str())
            .find(|s| !s.contains("cni-loopback"));
        Ok(serde_json::from_str(source.context("no network but loopback")?)?)
    }

    /// Kills containerd. Its pods live on.
    pub fn kill_runtime(&mut self) -> Result<()> {
        self.supervisor.write_line("kill")?;
        let said = self.supervisor.line(wait::HANG)?;
        ensure!(said == "killed", "the supervisor said {said:?}");
        Ok(())
    }

    /// Starts containerd again and waits until it answers.
    pub fn start_runtime(&mut self) -> Result<()> {
        self.supervisor.write_line("start")?;
        self.read_runtime_pid()?;
        self.await_runtime()
    }

    fn read_runtime_pid(&mut self) -> Result<()> {
        let started = self.supervisor.line(wait::HANG)?;
        let pid = started.strip_prefix("started ").and_then(|pid| pid.parse().ok());
        self.containerd_pid = pid.with_context(|| format!("the supervisor said {started:?}"))?;
        Ok(())
    }

    /// Removes the pods, ends the node and says what could not be cleaned up.
    pub fn stop(mut self) -> Result<()> {
        self.tear_down()
    }

    fn tear_down(&mut self) -> Result<()> {
        if self.supervisor.take_stdin().is_none() {
            return Ok(());
        }
        let said = self.supervisor.line(wait::LONG)?;
        let status = self.supervisor.wait(wait::HANG)?;
        ensure!(
            status.success() && said == "clean",
            "the node's supervisor ended with {status}, saying {said:?}"
        );
        Ok(())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Err(error) = self.tear_down() {
            cgroup::report(&error);
        }
    }
}

/// The node's and the outside's network namespace, joined.
fn networks(name: &str) -> Result<(Netns, Netns)> {
    let (node, ext) = (Netns::new(name)?, Netns::new(&format!("{name}-ext"))?);
    node.ip(&format!("link add up0 type veth peer name eth0 netns {}", ext.path().display()))?;
    node.ip("addr add 198.51.100.1/24 dev up0\n\
         addr add 2001:db8:64::1/64 dev up0 nodad\n\
         link set up0 up")?;
    ext.ip(&format!(
        "addr add {EXT4}/24 dev eth0\n\
         addr add {EXT6}/64 dev eth0 nodad\n\
         link set eth0 up\n\
         route add {} via 198.51.100.1\n\
         route add {} via 2001:db8:64::1",
        config::POD_SUBNET4,
        config::POD_SUBNET6,
    ))?;
    node.sysctl("net/ipv4/ip_forward", "1")?;
    node.sysctl("net/ipv6/conf/all/forwarding", "1")?;
    Ok((node, ext))
}

/// Directories, containerd's configuration and the plugins.
fn lay_out(base: &Path, options: &Options) -> Result<()> {
    for dir in ["root", "state", "net.d", "bin", "pods", "cni-cache"] {
        fs::create_dir(base.join(dir))?;
    }
    let runc = find(&options.runc)?;
    fs::write(base.join("config.toml"), config::containerd(base, &runc.to_string_lossy()))?;
    let link = |from: PathBuf, name: &str| {
        let to = base.join("bin").join(name);
        std::os::unix::fs::symlink(&from, &to).with_context(|| format!("cannot link {}", to.display()))
    };
    let plugins = ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"]
        .into_iter()
        .map(Path::new)
        .find(|dir| dir.join("bridge").is_file())
        .context("the standard CNI plugins are missing: install containernetworking-plugins")?;
    for name in ["bridge", "host-local", "loopback", "portmap", "bandwidth"] {
        link(plugins.join(name), name)?;
    }
    link(bin("cni-mesh")?, &options.mesh_plugin)
}

fn supervisor(base: &Path, cgroup: &str, options: &Options, netns: &Netns) -> Result<Proc> {
    let containerd = find(&options.containerd.to_string_lossy())?;
    let mut command = netns.command(bin("node-supervisor")?)?;
    command.arg(base).arg(cgroup);
    if options.kernel_mounts {
        command.arg("bpf");
    }
    command.arg("--").arg(&containerd).arg("--config").arg(base.join("config.toml"));
    if let (Some(dir), Some(path)) = (containerd.parent(), std::env::var_os("PATH")) {
        // The shim of this containerd, not the machine's.
        let dirs = std::iter::once(dir.to_path_buf()).chain(std::env::split_paths(&path));
        command.env("PATH", std::env::join_paths(dirs)?);
    }
    proc::spawn_orphan(command)
}

/// The tool that lies beside `program`, or the one in the search path.
fn beside(program: &Path, tool: &str) -> PathBuf {
    let sibling = program.with_file_name(tool);
    if program.components().count() > 1 && sibling.is_file() { sibling } else { tool.into() }
}

/// Absolute path of a program given by path or name.
fn find(program: &str) -> Result<PathBuf> {
    if program.contains('/') {
        return fs::canonicalize(program).with_context(|| format!("no program {program}"));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let Some(found) = std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file())
    else {
        bail!("{program} is not installed (looked in PATH)");
    };
    Ok(found)
}
