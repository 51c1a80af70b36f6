//! Pods on a private node, made as a kubelet makes them.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use k8s_cri::v1 as cri;
use serde_json::Value;

use super::Node;
use crate::cgroup::{Driver, Qos, pod_path};
use crate::netns::Netns;
use crate::traffic::Report;
use crate::{images, proc, wait};

/// What a pod is to be.
#[derive(Clone, Debug)]
pub struct PodSpec {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Pod UID; random by default.
    pub uid: String,
    /// Labels of the pod's metadata, without the kubelet's own, which are added.
    pub labels: HashMap<String, String>,
    /// Annotations of the pod's metadata.
    pub annotations: HashMap<String, String>,
    /// Decides the parent cgroup.
    pub qos: Qos,
    /// Uses the node's network namespace.
    pub host_network: bool,
    /// Sees the node's processes.
    pub host_pid: bool,
    /// Started in this order.
    pub containers: Vec<ContainerSpec>,
}

/// What a container is to be.
#[derive(Clone, Debug)]
pub struct ContainerSpec {
    /// Name within the pod.
    pub name: String,
    /// Image reference, [`images::MESHTEST`] by default.
    pub image: String,
    /// User it runs as.
    pub uid: u32,
    /// Program and arguments.
    pub command: Vec<String>,
}

impl ContainerSpec {
    /// A container of the test image.
    #[must_use]
    pub fn new(name: &str, uid: u32, command: &[&str]) -> Self {
        let command = command.iter().map(ToString::to_string).collect();
        Self { name: name.to_owned(), image: images::MESHTEST.to_owned(), uid, command }
    }

    /// Linkerd's proxy, stood in for by `traffic proxy`.
    #[must_use]
    pub fn linkerd_proxy() -> Self {
        Self::new("linkerd-proxy", 2102, &["/bin/traffic", "proxy", "4140", "4143"])
    }

    /// An application that does nothing until told to by [`Node::exec`].
    #[must_use]
    pub fn idle_app() -> Self {
        Self::new("app", 1000, &["/bin/traffic", "pause"])
    }
}

impl PodSpec {
    /// A burstable pod in namespace `default` with a random UID.
    pub fn new(name: &str, containers: Vec<ContainerSpec>) -> Result<Self> {
        let uid = fs::read_to_string("/proc/sys/kernel/random/uuid").context("no random UUID")?;
        Ok(Self {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            uid: uid.trim().to_owned(),
            labels: HashMap::new(),
            annotations: HashMap::new(),
            qos: Qos::Burstable,
            host_network: false,
            host_pid: false,
            containers,
        })
    }

    /// A pod as Linkerd's injector leaves it: proxy, idle application, its labels and annotations.
    pub fn meshed(name: &str) -> Result<Self> {
        let mut spec = Self::new(name, vec![ContainerSpec::linkerd_proxy(), ContainerSpec::idle_app()])?;
        spec.labels.insert("linkerd.io/control-plane-ns".to_owned(), "linkerd".to_owned());
        spec.annotations.insert("linkerd.io/inject".to_owned(), "enabled".to_owned());
        spec.annotations.insert("linkerd.io/proxy-version".to_owned(), "test".to_owned());
        Ok(spec)
    }

    fn sandbox_config(&self, node: &Node) -> cri::PodSandboxConfig {
        let parent = node.cgroup_parent().join(pod_path(Driver::Cgroupfs, self.qos, &self.uid));
        let metadata = cri::PodSandboxMetadata {
            name: self.name.clone(),
            uid: self.uid.clone(),
            namespace: self.namespace.clone(),
            attempt: 0,
        };
        let security_context = cri::LinuxSandboxSecurityContext {
            namespace_options: Some(self.namespaces()),
            ..Default::default()
        };
        cri::PodSandboxConfig {
            metadata: Some(metadata),
            hostname: if self.host_network { String::new() } else { self.name.clone() },
            log_directory: node.log_dir(&self.uid).display().to_string(),
            // Without servers the runtime copies the host's file, which may lie in the /run that is hidden from it.
            dns_config: Some(cri::DnsConfig { servers: vec!["127.0.0.1".to_owned()], ..Default::default() }),
            labels: self.kubelet_labels(),
            annotations: self.annotations.clone(),
            linux: Some(cri::LinuxPodSandboxConfig {
                cgroup_parent: parent.display().to_string(),
                security_context: Some(security_context),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    /// For the sandbox and for each container.
    #[must_use]
    pub fn namespaces(&self) -> cri::NamespaceOption {
        let network = if self.host_network { cri::NamespaceMode::Node } else { cri::NamespaceMode::Pod };
        let pid = if self.host_pid { cri::NamespaceMode::Node } else { cri::NamespaceMode::Container };
        cri::NamespaceOption { network: network.into(), pid: pid.into(), ..Default::default() }
    }

    /// Labels with those a kubelet adds (kubernetes/pkg/kubelet/types/labels.go).
    fn kubelet_labels(&self) -> HashMap<String, String> {
        let mut labels = self.labels.clone();
        for (key, value) in [("name", &self.name), ("namespace", &self.namespace), ("uid", &self.uid)] {
            labels.insert(format!("io.kubernetes.pod.{key}"), value.clone());
        }
        labels
    }
}

/// A running pod.
#[derive(Clone, Debug)]
pub struct Pod {
    /// What it was asked to be.
    pub spec: PodSpec,
    /// Sandbox id, 64 hex digits.
    pub sandbox: String,
    /// First address; empty for host-network pods.
    pub ip: String,
    /// All addresses.
    pub ips: Vec<String>,
    /// Process id of the sandbox process.
    pub pid: u32,
    /// Name of the network namespace file, valid in the node's mount namespace.
    pub netns: String,
    /// The pod's directory in the cgroup2 hierarchy.
    pub cgroup: PathBuf,
    /// Container ids by name.
    pub containers: HashMap<String, String>,
}

impl Pod {
    /// Id of the container called `name`.
    pub fn container(&self, name: &str) -> Result<&str> {
        let id = self
            .containers
            .get(name)
            .with_context(|| format!("pod {} has no container {name}", self.spec.name))?;
        Ok(id)
    }

    /// The container's directory in the cgroup2 hierarchy.
    pub fn container_cgroup(&self, name: &str) -> Result<PathBuf> {
        Ok(self.cgroup.join(self.container(name)?))
    }

    /// The pod's network namespace.
    pub fn enter(&self) -> Result<Netns> {
        Netns::of_pid(self.pid)
    }
}

/// What a command in a container did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecOutput {
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Exit code.
    pub exit_code: i32,
}

impl Node {
    /// Makes the sandbox and starts the containers.
    pub fn run_pod(&self, spec: PodSpec) -> Result<Pod> {
        let containers = spec.containers.clone();
        let mut pod = self.run_sandbox(spec)?;
        for container in containers {
            self.start_container(&mut pod, &container)?;
        }
        Ok(pod)
    }

    /// Makes the sandbox alone: network and cgroup exist, no container has run.
    pub fn run_sandbox(&self, spec: PodSpec) -> Result<Pod> {
        let config = spec.sandbox_config(self);
        fs::create_dir_all(self.log_dir(&spec.uid))?;
        let mut client = self.cri().runtime();
        let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() };
        let what = format!("RunPodSandbox {}/{}", spec.namespace, spec.name);
        let sandbox =
            self.cri().call(&what, async move { client.run_pod_sandbox(request).await })?.pod_sandbox_id;

        let mut client = self.cri().runtime();
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: sandbox.clone(), verbose: true };
        let answer =
            self.cri().call("PodSandboxStatus", async move { client.pod_sandbox_status(request).await })?;
        let network = answer.status.and_then(|status| status.network).unwrap_or_default();
        let more = network.additional_ips.into_iter().map(|ip| ip.ip);
        let ips: Vec<String> =
            std::iter::once(network.ip.clone()).chain(more).filter(|ip| !ip.is_empty()).collect();
        let info: Value = serde_json::from_str(answer.info.get("info").context("no verbose information")?)?;
        let pid =
            info["pid"].as_u64().and_then(|pid| pid.try_into().ok()).context("no pid of the sandbox")?;
        let namespaces = info["runtimeSpec"]["linux"]["namespaces"].as_array();
        let netns = namespaces
            .and_then(|all| all.iter().find(|ns| ns["type"] == "network"))
            .and_then(|ns| ns["path"].as_str())
            .unwrap_or_default()
            .to_owned();
        let cgroup = self.cgroup_top().join(pod_path(Driver::Cgroupfs, spec.qos, &spec.uid));
        Ok(Pod { spec, sandbox, ip: network.ip, ips, pid, netns, cgroup, containers: HashMap::new() })
    }

    /// Adds a container to a running pod.
    pub fn start_container(&self, pod: &mut Pod, spec: &ContainerSpec) -> Result<()> {
        let user = cri::LinuxContainerSecurityContext {
            run_as_user: Some(cri::Int64Value { value: spec.uid.into() }),
            ..Default::default()
        };
        let config = cri::ContainerConfig {
            image: Some(cri::ImageSpec { image: spec.image.clone(), ..Default::default() }),
            command: spec.command.clone(),
            linux: Some(cri::LinuxContainerConfig { security_context: Some(user), ..Default::default() }),
            ..Default::default()
        };
        self.start_container_with(pod, &spec.name, config)
    }

    /// As [`Node::start_container`], with a configuration to which name, labels and log are added.
    pub fn start_container_with(
        &self,
        pod: &mut Pod,
        name: &str,
        mut config: cri::ContainerConfig,
    ) -> Result<()> {
        config.metadata = Some(cri::ContainerMetadata { name: name.to_owned(), attempt: 0 });
        config.labels = pod.spec.kubelet_labels();
        config.labels.insert("io.kubernetes.container.name".to_owned(), name.to_owned());
        config.log_path = format!("{name}.log");
        let request = cri::CreateContainerRequest {
            pod_sandbox_id: pod.sandbox.clone(),
            config: Some(config),
            sandbox_config: Some(pod.spec.sandbox_config(self)),
        };
        let mut client = self.cri().runtime();
        let what = format!("container {name} of {}", pod.spec.name);
        let id = self.cri().call(&what, async move { client.create_container(request).await })?.container_id;
        let mut client = self.cri().runtime();
        let request = cri::StartContainerRequest { container_id: id.clone() };
        self.cri().call(&what, async move { client.start_container(request).await })?;
        pod.containers.insert(name.to_owned(), id);
        Ok(())
    }

    /// The exit code of a container; `None` while it runs.
    pub fn exit_code(&self, pod: &Pod, container: &str) -> Result<Option<i32>> {
        let request = cri::ContainerStatusRequest {
            container_id: pod.container(container)?.to_owned(),
            verbose: false,
        };
        let mut client = self.cri().runtime();
        let answer =
            self.cri().call("ContainerStatus", async move { client.container_status(request).await })?;
        let status = answer.status.context("a container without status")?;
        let ended = status.state == i32::from(cri::ContainerState::ContainerExited);
        Ok(ended.then_some(status.exit_code))
    }

    /// Kills and removes a container, as before the kubelet starts it anew.
    pub fn remove_container(&self, pod: &mut Pod, name: &str) -> Result<()> {
        let id = pod.container(name)?.to_owned();
        let mut client = self.cri().runtime();
        let request = cri::StopContainerRequest { container_id: id.clone(), timeout: 0 };
        self.cri().call("StopContainer", async move { client.stop_container(request).await })?;
        let mut client = self.cri().runtime();
        let request = cri::RemoveContainerRequest { container_id: id };
        self.cri().call("RemoveContainer", async move { client.remove_container(request).await })?;
        pod.containers.remove(name);
        Ok(())
    }

    /// Runs a command in a container, at most 20 s.
    pub fn exec(&self, pod: &Pod, container: &str, command: &[&str]) -> Result<ExecOutput> {
        let cmd = command.iter().map(ToString::to_string).collect();
        let request =
            cri::ExecSyncRequest { container_id: pod.container(container)?.to_owned(), cmd, timeout: 20 };
        let mut client = self.cri().runtime();
        let what = format!("exec in {container} of {}: {}", pod.spec.name, command.join(" "));
        let out = self.cri().call(&what, async move { client.exec_sync(request).await })?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(ExecOutput { stdout: text(&out.stdout), stderr: text(&out.stderr), exit_code: out.exit_code })
    }

    /// Runs `traffic` with `words` in a container and reads its report.
    pub fn traffic(&self, pod: &Pod, container: &str, words: &[&str]) -> Result<Report> {
        let out = self.exec(pod, container, &[&["/bin/traffic"], words].concat())?;
        ensure!(out.exit_code == 0, "traffic {words:?}: exit code {}: {}", out.exit_code, out.stderr);
        Report::parse(out.stdout.trim_end())
    }

    /// What a container has written so far, without the time stamps.
    pub fn logs(&self, pod: &Pod, container: &str) -> Result<String> {
        let path = self.log_dir(&pod.spec.uid).join(format!("{container}.log"));
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        // Format: time, stream, tag, text (kubernetes/pkg/kubelet/kuberuntime/logs).
        Ok(text
            .lines()
            .filter_map(|line| line.splitn(4, ' ').nth(3))
            .map(|line| format!("{line}\n"))
            .collect())
    }

    /// Waits until a line of a container's log satisfies `wanted`.
    pub fn wait_for_log(&self, pod: &Pod, container: &str, wanted: impl Fn(&str) -> bool) -> Result<String> {
        let found = wait::until(&format!("a line in the log of {container}"), wait::HANG, || {
            self.logs(pod, container).ok()?.lines().find(|line| wanted(line)).map(str::to_owned)
        });
        found.with_context(|| format!("log so far: {:?}", self.logs(pod, container)))
    }

    /// Stops and removes a pod and its cgroups, which on a node is the kubelet's work.
    pub fn remove_pod(&self, pod: &Pod) -> Result<()> {
        self.remove_sandbox(&pod.sandbox)?;
        for root in crate::cgroup::all_roots()? {
            let relative = self.cgroup_parent().join(pod_path(Driver::Cgroupfs, pod.spec.qos, &pod.spec.uid));
            crate::cgroup::remove_tree(&root.join(relative.strip_prefix("/")?))?;
        }
        Ok(())
    }

    pub(super) fn remove_sandbox(&self, sandbox: &str) -> Result<()> {
        let mut client = self.cri().runtime();
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: sandbox.to_owned() };
        self.cri().call("StopPodSandbox", async move { client.stop_pod_sandbox(request).await })?;
        let mut client = self.cri().runtime();
        let request = cri::RemovePodSandboxRequest { pod_sandbox_id: sandbox.to_owned() };
        self.cri().call("RemovePodSandbox", async move { client.remove_pod_sandbox(request).await }).map(drop)
    }

    /// A command that starts as a process of the node: its network and its mounts, as a DaemonSet's with hostPID sees them.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Result<std::process::Command> {
        let mut command = self.netns().command(program)?;
        proc::Place::in_mount_ns_fd(
            &mut command,
            fs::File::open(format!("/proc/{}/ns/mnt", self.supervisor_pid()))?.into(),
        );
        Ok(command)
    }
}
