//! libcni's cache: what the runtime knows of a pod's network since it set that up.
//!
//! libcni writes `<cache>/results/<network>-<sandbox id>-<interface>`, kind `cniCacheV1`
//! (<https://github.com/containernetworking/cni/blob/v1.3.0/libcni/api.go>). containerd and CRI-O leave the cache's
//! directory at its default.

use serde::Deserialize;
use serde_json::{Map, Value};

/// Where results lie on the host: libcni's default, and that of versions before 0.8.
pub const DIRS: [&str; 2] = ["/var/lib/cni/results", "/var/lib/cni/cache/results"];

/// One cached attachment of a sandbox.
#[derive(Clone, Debug, PartialEq)]
pub struct Cached {
    /// The network's name; empty in old files.
    pub network: String,
    /// The interface in the pod.
    pub interface: String,
    /// Path of the pod's network namespace on the host; newer versions note it.
    pub netns: Option<String>,
    /// The pairs of `CNI_ARGS`; old files have none.
    pub args: Vec<(String, String)>,
    /// What the runtime offers to plugins that ask for it.
    pub capability_args: Map<String, Value>,
    /// The result of the whole chain.
    pub result: Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    container_id: String,
    #[serde(default)]
    network_name: String,
    #[serde(default)]
    if_name: String,
    #[serde(default)]
    netns: Option<String>,
    #[serde(default)]
    cni_args: Option<Vec<(String, String)>>,
    #[serde(default)]
    capability_args: Option<Map<String, Value>>,
    result: Value,
}

/// Whether a file of this name is about the sandbox; gives its network and interface.
pub fn names<'a>(file: &'a str, sandbox: &str) -> Option<(&'a str, &'a str)> {
    let (network, interface) = file.split_once(sandbox)?;
    Some((network.strip_suffix('-')?, interface.strip_prefix('-')?))
}

/// Reads a file that [`names`] the sandbox.
///
/// # Errors
/// What is wrong with it.
pub fn read(bytes: &[u8], file: &str, sandbox: &str) -> Result<Cached, String> {
    let (network, interface) = names(file, sandbox).ok_or("it is another sandbox's")?;
    let value: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if value.get("kind").is_none() && value.get("cniVersion").is_some() {
        // Before libcni 0.8: the result alone.
        return Ok(Cached {
            network: network.to_owned(),
            interface: interface.to_owned(),
            netns: None,
            args: Vec::new(),
            capability_args: Map::new(),
            result: value,
        });
    }
    let kind = value.get("kind").and_then(Value::as_str).unwrap_or_default();
    if kind != "cniCacheV1" {
        return Err(format!("its kind is {kind:?} and not cniCacheV1"));
    }
    let File { container_id, network_name, if_name, netns, cni_args, capability_args, result } =
        serde_json::from_value(value).map_err(|error| error.to_string())?;
    if container_id != sandbox {
        return Err(format!("it is of the container {container_id}"));
    }
    if !result.is_object() {
        return Err("it has no result".to_owned());
    }
    let or = |text: String, other: &str| if text.is_empty() { other.to_owned() } else { text };
    Ok(Cached {
        network: or(network_name, network),
        interface: or(if_name, interface),
        netns: netns.filter(|path| !path.is_empty()),
        args: cni_args.unwrap_or_default(),
        capability_args: capability_args.unwrap_or_default(),
        result,
    })
}

/// The attachment that the mesh's plugin belongs to: that of the network whose list has the entry, else the pod's only one
/// but loopback.
///
/// # Errors
/// Why none can be taken.
pub fn choose(mut all: Vec<Cached>, network: &str) -> Result<Cached, String> {
    all.retain(|cached| cached.interface != "lo");
    if let Some(at) = all.iter().position(|cached| cached.network == network) {
        return Ok(all.swap_remove(at));
    }
    let names: Vec<&str> = all.iter().map(|cached| cached.network.as_str()).collect();
    Err(if names.is_empty() {
        format!("the runtime's CNI cache has no result of this pod's sandbox (looked in {})", DIRS.join(", "))
    } else {
        format!(
            "the pod was attached to {} and not to {network}, the network with the mesh's plugin",
            names.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ID: &str = "3f6940ab5ab43bc522569d15b23f8c1bbde1d7678b080398506924fc01d72755";

    fn name(network: &str, interface: &str) -> String {
        format!("{network}-{ID}-{interface}")
    }

    fn result() -> Value {
        json!({ "cniVersion": "1.0.0", "ips": [{ "address": "10.0.0.5/24" }] })
    }

    #[test]
    fn as_libcni_writes_it() {
        let file = json!({
            "kind": "cniCacheV1", "containerId": ID, "config": "e30=", "ifName": "eth0", "networkName": "k8s-pod-network",
            "netns": "/var/run/netns/cni-1", "cniArgs": [["IgnoreUnknown", "1"], ["K8S_POD_NAME", "web"]],
            "capabilityArgs": { "cgroupPath": "/kubepods/pod1" }, "result": result(),
        });
        let cached = read(file.to_string().as_bytes(), &name("k8s-pod-network", "eth0"), ID).unwrap();
        assert_eq!((cached.network.as_str(), cached.interface.as_str()), ("k8s-pod-network", "eth0"));
        assert_eq!(cached.netns.as_deref(), Some("/var/run/netns/cni-1"));
        assert_eq!(cached.args[1], ("K8S_POD_NAME".into(), "web".into()));
        assert_eq!(cached.capability_args["cgroupPath"], "/kubepods/pod1");
        assert_eq!(cached.result, result());
    }

    #[test]
    fn with_little_in_it() {
        let file = json!({ "kind": "cniCacheV1", "containerId": ID, "cniArgs": null, "capabilityArgs": null, "result": result() });
        let cached = read(file.to_string().as_bytes(), &name("a-b", "eth0"), ID).unwrap();
        assert_eq!((cached.network.as_str(), cached.netns, cached.args.len()), ("a-b", None, 0));
        let old = read(result().to_string().as_bytes(), &name("cbr0", "eth0"), ID).unwrap();
        assert_eq!((old.network.as_str(), old.interface.as_str(), old.result), ("cbr0", "eth0", result()));
    }

    #[test]
    fn what_cannot_be_used() {
        let other = json!({ "kind": "cniCacheV1", "containerId": "x", "result": result() });
        for (text, says) in [
            ("{", "EOF"),
            ("{}", "cniCacheV1"),
            (r#"{"kind":"cniCacheV2","result":{}}"#, "cniCacheV2"),
            (&other.to_string(), "container x"),
            (
                &other
                    .to_string()
                    .replace("\"x\"", &format!("{ID:?}"))
                    .replace(&result().to_string(), "null"),
                "no result",
            ),
        ] {
            let error = read(text.as_bytes(), &name("net", "eth0"), ID).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
        assert_eq!(names("net-0000-eth0", ID), None);
        assert_eq!(names(&format!("net{ID}-eth0"), ID), None);
    }

    #[test]
    fn the_network_with_the_entry_is_chosen() {
        let cached = |network: &str, interface: &str| Cached {
            network: network.into(),
            interface: interface.into(),
            netns: None,
            args: Vec::new(),
            capability_args: Map::new(),
            result: result(),
        };
        let all = || vec![cached("cni-loopback", "lo"), cached("multus", "eth0"), cached("calico", "eth0")];
        assert_eq!(choose(all(), "calico").unwrap().network, "calico");
        let error = choose(all(), "flannel").unwrap_err();
        assert!(error.contains("multus, calico and not to flannel"), "{error}");
        assert!(
            choose(vec![cached("cni-loopback", "lo")], "calico")
                .unwrap_err()
                .contains("/var/lib/cni/results")
        );
    }
}
