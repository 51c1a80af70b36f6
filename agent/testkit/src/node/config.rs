//! Files of a private node: containerd's configuration and the CNI network.

use std::path::Path;

use serde_json::{Value, json};

/// Pods of a node are 10.50.0.0/24 and fd50::/64, as on any other node of the kit: nodes do not see each other.
pub(super) const POD_SUBNET4: &str = "10.50.0.0/24";
pub(super) const POD_SUBNET6: &str = "fd50::/64";

/// A version 2 configuration, which containerd 1.4 to 2.x read.
pub(super) fn containerd(base: &Path, runc: &str) -> String {
    let base = base.display();
    let cri = "plugins.\"io.containerd.grpc.v1.cri\"";
    let snapshotters = ["btrfs", "zfs", "devmapper", "aufs"]
        .map(|name| format!("\"io.containerd.snapshotter.v1.{name}\""))
        .join(", ");
    format!(
        r#"version = 2
root = "{base}/root"
state = "{base}/state"
oom_score = 0
disabled_plugins = [{snapshotters}, "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing", "io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri"]
[grpc]
  address = "{base}/containerd.sock"
[{cri}]
  sandbox_image = "{pause}"
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  restrict_oom_score_adj = true
  [{cri}.cni]
    bin_dir = "{base}/bin"
    conf_dir = "{base}/net.d"
  [{cri}.containerd]
    default_runtime_name = "runc"
    snapshotter = "overlayfs"
    [{cri}.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [{cri}.containerd.runtimes.runc.options]
        SystemdCgroup = false
        BinaryName = "{runc}"
        Root = "{base}/runc"
"#,
        pause = crate::images::PAUSE,
    )
}

/// The network's list: bridge with host-local addresses, then `more`.
pub(super) fn conflist(base: &Path, more: &[Value]) -> String {
    let mut plugins = vec![json!({
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": true,
        "hairpinMode": true,
        "ipam": {
            "type": "host-local",
            "ranges": [[{ "subnet": POD_SUBNET4 }], [{ "subnet": POD_SUBNET6 }]],
            "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }],
            "dataDir": base.join("ipam"),
        },
    })];
    plugins.extend_from_slice(more);
    let list = json!({ "cniVersion": "1.0.0", "name": "node-net", "plugins": plugins });
    format!("{list:#}\n")
}

/// The entry of a mesh plugin with linkerd-cni's defaults; `log` gets a line for each call.
pub(super) fn mesh_entry(plugin: &str, log: &Path) -> Value {
    json!({
        "name": plugin,
        "type": plugin,
        "log_level": "info",
        "kubernetes": { "kubeconfig": "/etc/cni/net.d/ZZZ-linkerd-cni-kubeconfig" },
        "linkerd": {
            "incoming-proxy-port": 4143,
            "outgoing-proxy-port": 4140,
            "proxy-uid": 2102,
            "ports-to-redirect": [],
            "inbound-ports-to-ignore": ["4191", "4190"],
            "simulate": false,
            "use-wait-flag": false,
            "iptables-mode": "nft",
            "ipv6": false,
        },
        "testkit": { "log": log },
    })
}
