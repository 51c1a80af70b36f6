//! The DaemonSet of deploy/manifests, as a kubelet hands it to the container runtime.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use k8s_cri::v1 as cri;
use nobypass_testkit::cgroup;
use nobypass_testkit::node::{Node, Pod, PodSpec};
use serde_json::Value;

use super::yaml::{documents, repository};

/// The container's name in the manifest.
pub const CONTAINER: &str = "nobypass";

/// Runs `cargo xtask image --dev` and gives the archive.
pub fn build_image(to: &Path) -> Vec<u8> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(repository()).args(["run", "--quiet", "--package", "xtask", "--", "image", "--dev"]);
    // This package's own, which would make build scripts of others run anew.
    cargo.env_remove("OUT_DIR");
    let out = cargo.arg("--output").arg(to).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    fs::read(to).unwrap()
}

/// The image, built once for all tests of a target.
fn image() -> &'static Path {
    static IMAGE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = IMAGE.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nobypass.tar");
        build_image(&path);
        (dir, path)
    });
    path
}

/// The DaemonSet for one node.
pub struct Manifest {
    pod: Value,
    /// Settings in place of the manifest's.
    settings: BTreeMap<String, String>,
    run: PathBuf,
    policy: PathBuf,
    pod_parent: String,
}

impl Manifest {
    /// The one for `mode`, with the paths of this node in place of the usual ones, as the chart's `paths` do it.
    pub fn read(node: &Node, mode: &str) -> Self {
        let file = repository().join("deploy/manifests").join(mode).join("nobypass.yaml");
        let mut text = fs::read_to_string(file).unwrap();
        let cgroup = cgroup::v2_root().unwrap();
        for (usual, here) in [
            ("/etc/cni/net.d", node.cni_net_dir().as_path()),
            ("/opt/cni/bin", &node.cni_bin_dir()),
            ("/run/containerd", node.base_dir()),
            ("/sys/fs/cgroup", &cgroup),
        ] {
            assert!(text.contains(usual), "{usual}");
            text = text.replace(usual, here.to_str().unwrap());
        }
        let documents = documents(&text);
        let of_kind = |kind: &str| documents.iter().find(|document| document["kind"] == kind).unwrap();
        let run = node.base_dir().join("agent-run");
        let policy = node.base_dir().join("agent-policy");
        for dir in [&run, &policy] {
            fs::create_dir_all(dir).unwrap();
        }
        let text = of_kind("ConfigMap")["data"]["policy.yaml"].as_str().unwrap();
        fs::write(policy.join("policy.yaml"), text).unwrap();
        let pod_parent = format!("/host{}", node.kubepods().display());
        let pod = of_kind("DaemonSet")["spec"]["template"]["spec"].clone();
        Self { pod, settings: BTreeMap::new(), run, policy, pod_parent }
    }

    /// Another value for a variable that the manifest sets, as one of the chart's values would give it.
    pub fn set(&mut self, name: &str, value: &str) {
        let known = array(&self.container()["env"]).iter().any(|variable| variable["name"] == name);
        assert!(known, "{name} is no variable of the manifest");
        self.settings.insert(name.to_owned(), value.to_owned());
    }

    fn container(&self) -> &Value {
        &self.pod["containers"][0]
    }

    /// What the manifest adds to nothing.
    pub fn capabilities(&self) -> Vec<String> {
        let capabilities = &self.container()["securityContext"]["capabilities"];
        assert_eq!(capabilities["drop"], serde_json::json!(["ALL"]));
        strings(&capabilities["add"])
    }

    /// The agent's socket, as seen from the machine.
    pub fn socket(&self) -> PathBuf {
        self.run.join("agent.sock")
    }

    /// What a kubelet does some time after the ConfigMap has changed.
    pub fn change_policy(&self, from: &str, to: &str) {
        let path = self.policy.join("policy.yaml");
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{text}");
        let new = self.policy.join("..new");
        fs::write(&new, text.replace(from, to)).unwrap();
        fs::rename(new, path).unwrap();
    }

    /// Starts the pod with these capabilities.
    pub fn start(&self, node: &Node, capabilities: &[String]) -> Pod {
        node.import(image()).unwrap();
        let mut spec = PodSpec::new("nobypass-agent", Vec::new()).unwrap();
        spec.namespace = "nobypass-system".to_owned();
        spec.host_network = self.pod["hostNetwork"] == true;
        spec.host_pid = self.pod["hostPID"] == true;
        let config = self.config(&spec, capabilities);
        let mut pod = node.run_sandbox(spec).unwrap();
        node.start_container_with(&mut pod, CONTAINER, config).unwrap();
        pod
    }

    fn config(&self, spec: &PodSpec, capabilities: &[String]) -> cri::ContainerConfig {
        let container = self.container();
        let context = &container["securityContext"];
        let seccomp = match context["seccompProfile"]["type"].as_str() {
            Some("RuntimeDefault") => cri::security_profile::ProfileType::RuntimeDefault,
            other => panic!("{other:?}"),
        };
        assert_eq!(context["privileged"], Value::Null);
        let all = vec!["ALL".to_owned()];
        let security = cri::LinuxContainerSecurityContext {
            capabilities: Some(cri::Capability {
                add_capabilities: capabilities.to_vec(),
                drop_capabilities: all,
                ..Default::default()
            }),
            namespace_options: Some(spec.namespaces()),
            run_as_user: context["runAsUser"].as_i64().map(|value| cri::Int64Value { value }),
            readonly_rootfs: context["readOnlyRootFilesystem"] == true,
            no_new_privs: context["allowPrivilegeEscalation"] == false,
            seccomp: Some(cri::SecurityProfile { profile_type: seccomp.into(), ..Default::default() }),
            // kubernetes/pkg/securitycontext/util.go
            masked_paths: list(&[
                "/proc/asound",
                "/proc/acpi",
                "/proc/interrupts",
                "/proc/kcore",
                "/proc/keys",
                "/proc/latency_stats",
                "/proc/timer_list",
                "/proc/timer_stats",
                "/proc/sched_debug",
                "/proc/scsi",
                "/sys/firmware",
                "/sys/devices/virtual/powercap",
            ]),
            readonly_paths: list(&["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]),
            ..Default::default()
        };
        let mut envs: Vec<cri::KeyValue> = array(&container["env"]).iter().map(variable).collect();
        for variable in &mut envs {
            if let Some(value) = self.settings.get(&variable.key) {
                variable.value.clone_from(value);
            }
        }
        // Nodes of the kit keep their pods in a cgroup of their own.
        envs.push(cri::KeyValue { key: "NOBYPASS_POD_PARENT".to_owned(), value: self.pod_parent.clone() });
        let image = container["image"].as_str().unwrap().to_owned();
        cri::ContainerConfig {
            image: Some(cri::ImageSpec { image, ..Default::default() }),
            command: strings(&container["command"]),
            args: strings(&container["args"]),
            envs,
            mounts: array(&container["volumeMounts"]).iter().map(|mount| self.mount(mount)).collect(),
            linux: Some(cri::LinuxContainerConfig {
                security_context: Some(security),
                resources: Some(self.resources()),
            }),
            ..Default::default()
        }
    }

    /// As the kubelet makes them of requests and limits.
    fn resources(&self) -> cri::LinuxContainerResources {
        cri::LinuxContainerResources { memory_limit_in_bytes: self.memory("limits"), ..Default::default() }
    }

    /// `limits` or `requests`, in bytes.
    pub fn memory(&self, of: &str) -> i64 {
        let text = self.container()["resources"][of]["memory"].as_str().unwrap();
        text.strip_suffix("Mi").unwrap().parse::<i64>().unwrap() << 20
    }

    fn mount(&self, mount: &Value) -> cri::Mount {
        let volumes = array(&self.pod["volumes"]);
        let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).unwrap();
        let host_path = match volume["hostPath"]["path"].as_str() {
            Some("/run/nobypass") => self.run.display().to_string(),
            Some(path) => path.to_owned(),
            None => {
                assert_eq!(volume["configMap"]["name"], "nobypass-policy", "{volume}");
                self.policy.display().to_string()
            }
        };
        let propagation = match mount["mountPropagation"].as_str() {
            None => cri::MountPropagation::PropagationPrivate,
            Some("HostToContainer") => cri::MountPropagation::PropagationHostToContainer,
            Some(other) => panic!("{other}"),
        };
        cri::Mount {
            container_path: mount["mountPath"].as_str().unwrap().to_owned(),
            host_path,
            readonly: mount["readOnly"] == true,
            propagation: propagation.into(),
            ..Default::default()
        }
    }
}

fn variable(variable: &Value) -> cri::KeyValue {
    let key = variable["name"].as_str().unwrap().to_owned();
    let value = match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
        None => variable["value"].as_str().unwrap().to_owned(),
        Some("spec.nodeName") => "node".to_owned(),
        Some(other) => panic!("{other}"),
    };
    cri::KeyValue { key, value }
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn strings(value: &Value) -> Vec<String> {
    array(value).iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

fn list(words: &[&str]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}
