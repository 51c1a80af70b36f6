//! Where the agent looks on the nodes of each platform: nodes are directories here that are laid out like them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::render;

/// A platform, and where its nodes keep CNI configurations, CNI plugins, the runtime's socket and the cgroup hierarchy, as
/// its documentation has it; nothing here is read from the chart.
/// k3s: <https://docs.k3s.io/networking/multus-ipams>; GKE, MicroK8s, OpenShift:
/// <https://istio.io/latest/docs/ambient/install/platform-prerequisites/>; the others keep to containerd's defaults.
const NODES: [(&str, [&str; 4]); 10] = [
    ("generic", USUAL),
    ("kind", USUAL),
    ("eks", USUAL),
    ("aks", USUAL),
    ("talos", USUAL),
    ("bottlerocket", USUAL),
    ("gke", [USUAL[0], "/home/kubernetes/bin", USUAL[2], USUAL[3]]),
    (
        "k3s",
        [
            "/var/lib/rancher/k3s/agent/etc/cni/net.d",
            "/var/lib/rancher/k3s/data/cni",
            "/run/k3s/containerd/containerd.sock",
            USUAL[3],
        ],
    ),
    (
        "microk8s",
        [
            "/var/snap/microk8s/current/args/cni-network",
            "/var/snap/microk8s/current/opt/cni/bin",
            "/var/snap/microk8s/common/run/containerd.sock",
            USUAL[3],
        ],
    ),
    ("openshift", ["/etc/cni/multus/net.d", "/var/lib/cni/bin", "/run/crio/crio.sock", USUAL[3]]),
];

const USUAL: [&str; 4] =
    ["/etc/cni/net.d", "/opt/cni/bin", "/run/containerd/containerd.sock", "/sys/fs/cgroup"];

/// The agent's pod as the chart makes it for one platform.
struct Agent {
    pod: Value,
}

impl Agent {
    fn new(platform: &str) -> Self {
        let set = format!("platform={platform}");
        let objects = render("nobypass", "nobypass-system", &["--set", &set]);
        let daemon_set = objects.iter().find(|object| object["kind"] == "DaemonSet").unwrap();
        Self { pod: daemon_set["spec"]["template"]["spec"].clone() }
    }

    fn items(&self, path: &str) -> &[Value] {
        self.pod.pointer(path).and_then(Value::as_array).unwrap_or_else(|| panic!("{path}: {}", self.pod))
    }

    fn variable(&self, name: &str) -> Option<&str> {
        self.items("/containers/0/env").iter().find(|one| one["name"] == name)?["value"].as_str()
    }

    /// What of the node is at this path of the container.
    fn on_node(&self, path: &Path) -> Option<PathBuf> {
        self.items("/containers/0/volumeMounts").iter().find_map(|mount| {
            let below = path.strip_prefix(mount["mountPath"].as_str()?).ok()?;
            let volume = self.items("/volumes").iter().find(|volume| volume["name"] == mount["name"])?;
            // Joining an empty path would append a slash.
            Some(Path::new(volume["hostPath"]["path"].as_str()?).join(below).components().collect())
        })
    }
}

#[test]
fn the_agent_finds_the_paths_of_each_platform() {
    for (platform, [conf, bin, socket, cgroup]) in NODES {
        let agent = Agent::new(platform);
        let prefix = Path::new(agent.variable("CONTAINER_MOUNT_PREFIX").unwrap());
        let below = |name: &str| {
            let path = Path::new(agent.variable(name).unwrap_or_else(|| panic!("{platform}: no {name}")));
            prefix.join(path.strip_prefix("/").unwrap())
        };
        let [net_dir, bin_dir] = ["DEST_CNI_NET_DIR", "DEST_CNI_BIN_DIR"].map(below);
        let [endpoint, root] = ["NOBYPASS_CRI_ENDPOINT", "NOBYPASS_CGROUP_ROOT"]
            .map(|name| PathBuf::from(agent.variable(name).unwrap()));
        for (found, documented) in [(&net_dir, conf), (&bin_dir, bin), (&endpoint, socket), (&root, cgroup)] {
            let found = agent.on_node(found);
            assert_eq!(found.as_deref(), Some(Path::new(documented)), "{platform}");
        }
        let level = agent.variable("NOBYPASS_CGROUP_ROOT_LEVEL");
        assert_eq!(level, (platform == "kind").then_some("2"), "{platform}");

        // A node that is laid out so, with the prefix in place of the mounts.
        let node = tempfile::tempdir().unwrap();
        let on = |path: &str| node.path().join(path.trim_start_matches('/'));
        fs::create_dir_all(on(conf)).unwrap();
        let entry = json!({ "type": "linkerd-cni", "kubernetes": { "kubeconfig": "/x" } });
        let list = json!({ "cniVersion": "1.0.0", "name": "n", "plugins": [{ "type": "bridge" }, entry] });
        fs::write(on(conf).join("10-node.conflist"), list.to_string()).unwrap();

        let said = run(&agent, node.path(), &["cni", "status", "-o", "json"]);
        assert_eq!(said["active"], "10-node.conflist", "{platform}: {said}");
        assert_eq!(said["protected"], true, "{platform}: {said}");
        assert_eq!(said["directory"], on(conf).to_str().unwrap(), "{platform}");
    }
}

/// What a command prints with the variables of the pod, whose prefix is the node's directory.
fn run(agent: &Agent, node: &Path, words: &[&str]) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nobypass"));
    command.args(words).env_clear();
    for variable in agent.items("/containers/0/env") {
        let (name, value) = (variable["name"].as_str().unwrap(), variable["value"].as_str());
        let Some(value) = value else { continue };
        let prefix = name == "CONTAINER_MOUNT_PREFIX";
        command.env(name, if prefix { node } else { Path::new(value) });
    }
    let out = command.output().unwrap();
    serde_json::from_slice(&out.stdout).unwrap_or_else(|error| panic!("{error}: {out:?}"))
}
