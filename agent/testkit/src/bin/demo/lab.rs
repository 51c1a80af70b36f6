//! The node of the demo, the agent on it, and whom to ask.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nobypass_testkit::node::{EXT_PORT, EXT4, Node, Pod, PodSpec};
use nobypass_testkit::proc::{self, Proc};
use nobypass_testkit::{bin, cgroup};
use serde_json::Value;

use crate::interrupt::{check, until};

/// Names the agent's binary.
const BIN_ENV: &str = "NOBYPASS_BIN";
/// Where everything is on a real node too: the demo's node has a `/run` and a `/sys/fs/bpf` of its own.
const SOCKET: &str = "/run/nobypass/agent.sock";
const BPF_DIR: &str = "/sys/fs/bpf/nobypass";
const METRICS_PORT: u16 = 9910;
/// How long an application waits for its connection, ms. The first retransmitted SYN comes after one second.
const PATIENCE_MS: &str = "1500";
/// For anything that takes milliseconds on an idle machine.
pub const LIMIT: Duration = Duration::from_secs(15);

/// A node, and what runs on it for the demo.
pub struct Lab {
    // In the order in which they have to end.
    events: Option<Proc>,
    agent: Option<Proc>,
    node: Node,
    nobypass: PathBuf,
    starts: u32,
}

/// What became of one connection.
pub struct Outcome {
    /// `plain`, `mesh`, or the name of an error.
    pub app_saw: String,
    /// TCP SYNs that reached the server's machine meanwhile, by a counter of its firewall.
    pub syns: u64,
    /// Connections meanwhile that the server found to come from the application itself.
    pub plain: u64,
    /// Connections meanwhile that it found to come from the proxy.
    pub mesh: u64,
}

impl Lab {
    /// Starts a node whose network has no mesh plugin yet.
    pub fn new() -> Result<Self> {
        let nobypass = match std::env::var_os(BIN_ENV) {
            Some(path) => PathBuf::from(path),
            None => bin("nobypass")?,
        };
        ensure!(nobypass.is_file(), "{} is missing; {BIN_ENV} names the agent's binary", nobypass.display());
        let node = Node::new().context("cannot start a private containerd node")?;
        let lab = Self { events: None, agent: None, node, nobypass, starts: 0 };
        check()?;
        lab.node.ext().count_syns("eth0")?;
        lab.node.write_conflist(false)?;
        Ok(lab)
    }

    /// Adds the mesh's plugin to the node's network, as its installer would.
    pub fn install_mesh_plugin(&self) -> Result<()> {
        self.node.write_conflist(true).map(drop)
    }

    /// What a primary CNI does when it starts again: its configuration as it knows it, without the mesh's plugin.
    /// Waits until somebody has put the plugin back, in the file and in the runtime; tells how long the file took.
    pub fn primary_rewrites(&self) -> Result<Duration> {
        let dir = self.node.cni_net_dir();
        let (path, temporary) = (dir.join("10-node.conflist"), dir.join(".10-node.tmp"));
        fs::write(&temporary, self.node.conflist(&[]))?;
        let start = Instant::now();
        fs::rename(&temporary, &path)?;
        let has_mesh = |text: &str| text.contains("linkerd-cni");
        until("the mesh's entry in the conflist", LIMIT, || {
            Ok(has_mesh(&fs::read_to_string(&path)?).then_some(()))
        })?;
        let took = start.elapsed();
        until("the runtime to load the entry", LIMIT, || {
            Ok(has_mesh(&self.node.loaded_conflist()?.to_string()).then_some(()))
        })?;
        Ok(took)
    }

    /// The node's CNI directory.
    pub fn cni_dir(&self) -> PathBuf {
        self.node.cni_net_dir()
    }

    /// Starts a meshed pod and waits until its proxy listens.
    pub fn meshed_pod(&self, name: &str) -> Result<Pod> {
        check()?;
        let spec = PodSpec { namespace: "shop".to_owned(), ..PodSpec::meshed(name)? };
        let pod = self.node.run_pod(spec)?;
        self.node.wait_for_log(&pod, "linkerd-proxy", |line| line.contains("\"ready\":true"))?;
        Ok(pod)
    }

    /// Lets the pod's application connect to the server outside, once.
    pub fn connect(&mut self, pod: &Pod) -> Result<Outcome> {
        check()?;
        let (syns, server) = (self.syns()?, self.node.server().stats()?);
        let words = ["tcp4", EXT4, EXT_PORT, "--timeout-ms", PATIENCE_MS];
        let report = self.node.traffic(pod, "app", &words)?;
        let now = self.node.server().stats()?;
        let meanwhile = |name| now.count(name) - server.count(name);
        Ok(Outcome {
            app_saw: report.saw().to_owned(),
            syns: self.syns()? - syns,
            plain: meanwhile("tcp_plain"),
            mesh: meanwhile("tcp_mesh"),
        })
    }

    /// Starts a process of the pod's application that tries a new connection every few milliseconds until dropped.
    pub fn hammer(&self, pod: &Pod) -> Result<Proc> {
        let mut command = Command::new(bin("traffic")?);
        command.args(["flood", EXT4, EXT_PORT, "1000000", "--wait-ms", "5", "--uid", "1000"]);
        command.arg("--netns").arg(format!("/proc/{}/ns/net", pod.pid));
        command.arg("--cgroup").arg(pod.container_cgroup("app")?);
        proc::spawn(command)
    }

    /// TCP SYNs that have reached the server's machine.
    pub fn syns(&self) -> Result<u64> {
        self.node.ext().syns()
    }

    fn command(&self) -> Result<Command> {
        let mut command = self.node.command(&self.nobypass)?;
        command.env("NOBYPASS_SOCKET", SOCKET).env("NOBYPASS_BPF_DIR", BPF_DIR);
        Ok(command)
    }

    /// Starts the agent and waits until it is ready.
    pub fn start_agent(&mut self, mode: &str) -> Result<()> {
        check()?;
        self.starts += 1;
        let mut command = self.command()?;
        command.args(["agent", "--mode", mode, "--pods", "cri", "--log", "info", "--log-format", "text"]);
        // Each attempt is to be judged at its SYN, and counted.
        command.args(["--refusal", "abort"]);
        command.arg("--cri-endpoint").arg(self.node.cri_socket());
        command.arg("--pod-parent").arg(self.node.kubepods());
        command.arg("--cni-dir").arg(self.node.cni_net_dir());
        command.arg("--metrics-addr").arg(format!("0.0.0.0:{METRICS_PORT}"));
        command.stderr(File::create(self.log_path(self.starts))?);
        let agent = self.agent.insert(proc::spawn(command)?);
        let node = &self.node;
        until("the agent to be ready", LIMIT, || {
            ensure!(agent.is_running(), "the agent ended");
            Ok(get(node, "/readyz").ok().filter(|answer| answer.trim() == "ready"))
        })
        .map(drop)
    }

    /// `kill -9` of the agent.
    pub fn kill_agent(&mut self) -> Result<u32> {
        self.events = None;
        let agent = self.agent.take().context("no agent runs")?;
        Ok(agent.pid())
    }

    /// Asks the agent to end and waits for it.
    pub fn stop_agent(&mut self) -> Result<()> {
        self.events = None;
        let Some(mut agent) = self.agent.take() else { return Ok(()) };
        agent.terminate()?;
        let status = agent.wait(LIMIT)?;
        ensure!(status.success(), "the agent ended with {status}");
        Ok(())
    }

    fn log_path(&self, start: u32) -> PathBuf {
        self.node.base_dir().join(format!("agent-{start}.log"))
    }

    /// The first line of the running agent's log that has `part` in it, from the message on.
    pub fn agent_said(&self, part: &str) -> Result<String> {
        let path = self.log_path(self.starts);
        until(&format!("{part:?} in the agent's log"), LIMIT, || {
            let log = fs::read_to_string(&path)?;
            Ok(log.lines().find(|line| line.contains(part)).map(str::to_owned))
        })
    }

    /// The end of the log that matters when something went wrong.
    pub fn logs(&self) -> String {
        if self.starts == 0 {
            return format!("containerd's log ends with:\n{}", self.node.runtime_log());
        }
        let log = fs::read_to_string(self.log_path(self.starts)).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let last = lines.get(lines.len().saturating_sub(10)..).unwrap_or_default();
        format!("the agent's log ends with:\n{}", last.join("\n"))
    }

    /// Runs `nobypass <args>` on the node.
    pub fn nobypass(&self, args: &[&str]) -> Result<String> {
        check()?;
        let mut command = self.command()?;
        command.args(args);
        proc::check(command, "")
    }

    /// What `nobypass status` says about a pod; `Null` if it says nothing.
    pub fn status_of(&self, name: &str) -> Result<Value> {
        let status: Value = serde_json::from_str(&self.nobypass(&["status", "--output", "json"])?)?;
        let pods = status["pods"].as_array().context("no pods in the status")?;
        Ok(pods.iter().find(|pod| pod["name"] == name).cloned().unwrap_or(Value::Null))
    }

    /// Starts `nobypass events -f`; when this returns, no event is missed.
    pub fn follow_events(&mut self) -> Result<()> {
        let said = self.node.base_dir().join("events.err");
        let mut command = self.command()?;
        command.args(["events", "-f"]).stderr(File::create(&said)?);
        let events = self.events.insert(proc::spawn(command)?);
        until("`nobypass events` to listen", LIMIT, || {
            let said = fs::read_to_string(&said)?;
            ensure!(events.is_running(), "`nobypass events -f` ended: {said}");
            Ok(said.contains("waiting").then_some(()))
        })
    }

    /// The next line of `nobypass events -f`.
    pub fn next_event(&self) -> Result<String> {
        let events = self.events.as_ref().context("nobody follows the events")?;
        until("an event", LIMIT, || Ok(events.line(Duration::from_millis(50)).ok()))
    }

    /// The lines of `/metrics` that begin with one of `names`.
    pub fn metrics(&self, names: &[&str]) -> Result<Vec<String>> {
        let text = get(&self.node, "/metrics")?;
        let wanted = |line: &&str| names.iter().any(|name| line.starts_with(name));
        Ok(text.lines().filter(wanted).map(str::to_owned).collect())
    }

    /// How to look around from another terminal.
    pub fn way_in(&self) -> String {
        let pid = self.node.supervisor_pid();
        format!("nsenter --target {pid} --mount --net {} status", self.nobypass.display())
    }

    /// Ends everything and looks whether it is gone.
    pub fn remove(self) -> Result<()> {
        let Self { events, agent, node, nobypass: _, starts: _ } = self;
        drop((events, agent));
        let traces: Vec<PathBuf> = match node.cgroup_top().file_name() {
            Some(name) => cgroup::all_roots()?.into_iter().map(|root| root.join(name)).collect(),
            None => bail!("the node's cgroup has no name"),
        };
        let base = node.base_dir().to_path_buf();
        node.stop()?;
        let left: Vec<_> = traces.into_iter().chain([base]).filter(|path| path.exists()).collect();
        ensure!(left.is_empty(), "left behind: {left:?}");
        Ok(())
    }
}

/// GET from the agent's port on the node.
fn get(node: &Node, path: &str) -> Result<String> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, METRICS_PORT));
    let answer = node.netns().run_in(|| -> Result<String> {
        let mut stream = TcpStream::connect_timeout(&address, LIMIT)?;
        stream.set_read_timeout(Some(LIMIT))?;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    })??;
    let (head, body) = answer.split_once("\r\n\r\n").context("not an HTTP answer")?;
    ensure!(head.contains(" 200 "), "{path}: {}: {body}", head.lines().next().unwrap_or_default());
    Ok(body.to_owned())
}
