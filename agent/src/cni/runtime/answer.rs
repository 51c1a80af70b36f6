//! What a container runtime's Status answer says about the pod network.
//!
//! containerd puts `cniconfig` into the verbose part: go-cni's `ConfigResult`, with each loaded list's text as it was
//! read and the plugins that will really run, and `lastCNILoadStatus`
//! (<https://github.com/containerd/containerd/blob/03e932c/internal/cri/server/status.go>). Loading holds the lock that
//! this part is read under, so an answer is never older than the last finished load. CRI-O says only whether it has a
//! network (<https://github.com/cri-o/cri-o/blob/043cae7/server/runtime_status.go>).

use std::collections::HashMap;
use std::hash::BuildHasher;

use serde::Deserialize;

/// The name of the condition that says whether pods can get a network (`NetworkReady` of the CRI).
pub const NETWORK_READY: &str = "NetworkReady";

/// One Status answer, as far as it concerns the pod network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Why pods get no network now.
    pub not_ready: Option<String>,
    /// `None` when the runtime does not tell what it has loaded.
    pub loaded: Option<Loaded>,
}

/// What the runtime has loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// The directory it reads, on the host.
    pub dir: String,
    /// Why its last load failed.
    pub failure: Option<String>,
    /// The pods' network; `None` if it has none but loopback.
    pub network: Option<Network>,
}

/// The network of new pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// Its name.
    pub name: String,
    /// The list's text; for a single-plugin file the runtime's own list with that plugin.
    pub source: String,
    /// Types of the plugins that run, in their order; those of drop-in files too.
    pub plugins: Vec<String>,
}

impl Answer {
    /// Reads an answer: the network's condition as `(true, reason)`, and the verbose part, whose values are JSON texts.
    /// What cannot be read counts as not told.
    pub fn read<S: BuildHasher>(ready: bool, message: &str, info: &HashMap<String, String, S>) -> Self {
        let not_ready = (!ready).then(|| match message.trim() {
            "" => "no reason given".to_owned(),
            message => message.to_owned(),
        });
        let failure = info.get("lastCNILoadStatus").map(|text| text.trim_matches('"'));
        let failure = failure.filter(|text| !text.is_empty() && *text != "OK").map(str::to_owned);
        let loaded = info.get("cniconfig").and_then(|text| cniconfig(text));
        Self { not_ready, loaded: loaded.map(|loaded| Loaded { failure, ..loaded }) }
    }
}

/// go-cni's `ConfigResult` (<https://github.com/containerd/go-cni/blob/3dbce1d/result.go>); Go writes an empty list as null.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ConfigResult {
    plugin_conf_dir: String,
    networks: Option<Vec<ConfNetwork>>,
}

#[derive(Deserialize)]
struct ConfNetwork {
    #[serde(rename = "Config")]
    config: ConfList,
    #[serde(rename = "IFName", default)]
    interface: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ConfList {
    name: String,
    plugins: Option<Vec<Conf>>,
    source: String,
}

#[derive(Deserialize)]
struct Conf {
    #[serde(rename = "Network")]
    network: NetConf,
}

#[derive(Deserialize)]
struct NetConf {
    #[serde(rename = "type", default)]
    plugin: String,
}

fn cniconfig(text: &str) -> Option<Loaded> {
    let result: ConfigResult = serde_json::from_str(text).ok()?;
    // Loopback comes first; with `max_conf_num` above one, the first of the others is eth0.
    let networks = result.networks.unwrap_or_default();
    let network = networks.into_iter().find(|network| network.interface != "lo");
    let network = network.map(|ConfNetwork { config, .. }| Network {
        name: config.name,
        source: config.source,
        plugins: config.plugins.unwrap_or_default().into_iter().map(|conf| conf.network.plugin).collect(),
    });
    Some(Loaded { dir: result.plugin_conf_dir, failure: None, network })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As containerd 1.6.20 answers, shortened; the texts of the lists are what matters.
    const CONTAINERD: &str = r#"{"PluginDirs":["/opt/cni/bin"],"PluginConfDir":"/etc/cni/net.d","PluginMaxConfNum":1,"Prefix":"eth",
        "Networks":[
          {"Config":{"Name":"cni-loopback","CNIVersion":"0.3.1","Plugins":[{"Network":{"type":"loopback","ipam":{},"dns":{}},
            "Source":"{\"type\":\"loopback\"}"}],"Source":"{\"cniVersion\": \"0.3.1\"}"},"IFName":"lo"},
          {"Config":{"Name":"k8s","CNIVersion":"1.0.0","Plugins":[
            {"Network":{"type":"calico","ipam":{},"dns":{}},"Source":"{\"type\":\"calico\"}"},
            {"Network":{"type":"linkerd-cni","ipam":{},"dns":{}},"Source":"{\"type\":\"linkerd-cni\"}"}],
            "Source":"{ \"name\": \"k8s\" }\n"},"IFName":"eth0"}]}"#;

    fn read(ready: bool, message: &str, info: &[(&str, &str)]) -> Answer {
        let owned = info.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Answer::read(ready, message, &owned.collect::<HashMap<_, _>>())
    }

    #[test]
    fn containerd_tells_the_network_that_is_not_loopback() {
        let answer = read(true, "", &[("cniconfig", CONTAINERD), ("lastCNILoadStatus", "OK")]);
        let network = Network {
            name: "k8s".to_owned(),
            source: "{ \"name\": \"k8s\" }\n".to_owned(),
            plugins: vec!["calico".to_owned(), "linkerd-cni".to_owned()],
        };
        let loaded = Loaded { dir: "/etc/cni/net.d".to_owned(), failure: None, network: Some(network) };
        assert_eq!(answer, Answer { not_ready: None, loaded: Some(loaded) });
    }

    #[test]
    fn a_failed_load_leaves_no_network_and_says_why() {
        let empty = r#"{"PluginConfDir":"/etc/cni/net.d","Networks":null}"#;
        let why = "cni config load failed: no network config found in /etc/cni/net.d";
        let answer =
            read(false, "cni plugin not initialized", &[("cniconfig", empty), ("lastCNILoadStatus", why)]);
        assert_eq!(answer.not_ready.as_deref(), Some("cni plugin not initialized"));
        let loaded = answer.loaded.unwrap();
        assert_eq!((loaded.failure.as_deref(), loaded.network), (Some(why), None));
        // Quoted, as JSON.
        let answer = read(true, "", &[("cniconfig", empty), ("lastCNILoadStatus", "\"OK\"")]);
        assert_eq!(answer.loaded.unwrap().failure, None);
    }

    #[test]
    fn what_is_not_told_is_unknown() {
        for info in [
            &[][..],
            &[("config", r#"{"sandboxImage":"registry/pause:3.10"}"#)], // CRI-O
            &[("cniconfig", "")],
            &[("cniconfig", "null")],
            &[("cniconfig", "[1]")],
            &[("cniconfig", r#"{"PluginConfDir":7}"#)],
            &[("cniconfig", r#"{"PluginConfDir":"/x","Networks":[{"Config":{}}]}"#)],
        ] {
            assert_eq!(read(true, "", info), Answer { not_ready: None, loaded: None }, "{info:?}");
        }
        assert_eq!(read(false, " ", &[]).not_ready.as_deref(), Some("no reason given"));
    }
}
