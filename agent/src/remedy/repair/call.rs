//! What the mesh's plugin is called with, as the runtime would call it. Pure.
//!
//! The entry is taken from the active config, `prevResult` from the runtime's cache; the rest is libcni's
//! `buildOneConfig` and `args` (<https://github.com/containernetworking/cni/blob/v1.3.0/libcni/api.go>).

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::cache::Cached;

/// Who is called for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The sandbox's id.
    pub sandbox: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// A process in its network namespace, in the runtime's view.
    pub pid: Option<u32>,
    /// Path of its network namespace, in the runtime's view.
    pub netns: Option<String>,
}

/// One call of a plugin, for `CNI_COMMAND=ADD` and `DEL`.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// File name of the plugin.
    pub plugin: String,
    /// Its standard input.
    pub stdin: String,
    /// Its environment but `CNI_COMMAND` and `PATH`.
    pub env: Vec<(&'static str, String)>,
}

/// The network's name, and the entry with the list's version, of a config that has one.
///
/// # Errors
/// Why there is none.
pub fn entry(config: &[u8], plugin: &str) -> Result<(String, Map<String, Value>), String> {
    let list: Value =
        serde_json::from_slice(config).map_err(|error| format!("the active config: {error}"))?;
    let text = |key: &str| list.get(key).and_then(Value::as_str).map(str::to_owned);
    let name = text("name").ok_or("the active config has no name")?;
    let plugins = list.get("plugins").and_then(Value::as_array);
    let found =
        plugins.into_iter().flatten().find(|entry| entry.get("type").is_some_and(|kind| kind == plugin));
    let found = found
        .and_then(Value::as_object)
        .ok_or_else(|| format!("the active config has no entry of {plugin}"))?;
    let mut entry = found.clone();
    entry.insert("name".to_owned(), name.clone().into());
    entry.insert("cniVersion".to_owned(), text("cniVersion").unwrap_or_else(|| "0.1.0".to_owned()).into());
    Ok((name, entry))
}

/// The call that puts the plugin's rules into a running pod.
///
/// # Errors
/// Why the pod cannot be called for.
pub fn call(
    mut entry: Map<String, Value>,
    plugin: &str,
    cached: &Cached,
    target: &Target,
    bin_dirs: &[PathBuf],
) -> Result<Call, String> {
    let netns = target.netns.clone().or_else(|| cached.netns.clone()).filter(|path| !path.is_empty());
    let netns = netns.ok_or("the pod has no network namespace of its own")?;
    let version = entry.get("cniVersion").and_then(Value::as_str).unwrap_or_default().to_owned();
    entry.insert("prevResult".to_owned(), as_version(cached.result.clone(), &version));
    let offered: Map<String, Value> = entry
        .get("capabilities")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .filter(|(_, wanted)| **wanted == Value::Bool(true))
        .filter_map(|(name, _)| Some((name.clone(), cached.capability_args.get(name)?.clone())))
        .collect();
    entry.remove("capabilities");
    if !offered.is_empty() {
        entry.insert("runtimeConfig".to_owned(), offered.into());
    }
    let mut args = cached.args.clone();
    if args.is_empty() {
        args = [
            ("IgnoreUnknown", "1"),
            ("K8S_POD_NAMESPACE", &target.namespace),
            ("K8S_POD_NAME", &target.name),
            ("K8S_POD_INFRA_CONTAINER_ID", &target.sandbox),
            ("K8S_POD_UID", &target.uid),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .to_vec();
    }
    let args: Vec<String> = args.into_iter().map(|(key, value)| format!("{key}={value}")).collect();
    let path: Vec<String> = bin_dirs.iter().map(|dir| dir.display().to_string()).collect();
    Ok(Call {
        plugin: plugin.to_owned(),
        stdin: Value::Object(entry).to_string(),
        env: vec![
            ("CNI_CONTAINERID", target.sandbox.clone()),
            ("CNI_NETNS", netns),
            ("CNI_IFNAME", cached.interface.clone()),
            ("CNI_ARGS", args.join(";")),
            ("CNI_PATH", path.join(":")),
        ],
    })
}

impl Call {
    /// Path of the network namespace.
    pub fn netns(&self) -> &Path {
        let netns = self.env.iter().find(|(name, _)| *name == "CNI_NETNS");
        Path::new(netns.map_or("", |(_, path)| path.as_str()))
    }
}

/// A result as a list of another version wants it. What differs between 0.3.0 and 1.1.0 and matters to a chained plugin is
/// that until 0.4.0 each address says its family (CNI specification, "Result").
fn as_version(mut result: Value, version: &str) -> Value {
    let Some(fields) = result.as_object_mut() else { return result };
    let old = ["0.3.0", "0.3.1", "0.4.0"].contains(&version);
    fields.insert("cniVersion".to_owned(), version.into());
    for ip in fields.get_mut("ips").and_then(Value::as_array_mut).into_iter().flatten() {
        let family =
            ip.get("address").and_then(Value::as_str).map(|ip| if ip.contains(':') { "6" } else { "4" });
        if let (Some(ip), Some(family)) = (ip.as_object_mut(), family) {
            if old {
                ip.insert("version".to_owned(), family.into());
            } else {
                ip.remove("version");
            }
        }
    }
    result
}

/// What a plugin that failed says of it: its error object if it printed one, else what it wrote to standard error.
pub fn complaint(stdout: &str, stderr: &str) -> String {
    let error: Value = serde_json::from_str(stdout.trim()).unwrap_or_else(|_| json!({}));
    let text = |key: &str| error.get(key).and_then(Value::as_str).unwrap_or_default().trim().to_owned();
    let parts = [text("msg"), text("details"), stderr.trim().to_owned()];
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    if parts.is_empty() { "it said nothing".to_owned() } else { parts.join(": ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = r#"{"cniVersion": "0.4.0", "name": "net", "plugins": [
        {"type": "bridge"},
        {"type": "linkerd-cni", "name": "linkerd-cni", "capabilities": {"cgroupPath": true, "portMappings": false, "mac": true},
         "linkerd": {"proxy-uid": 2102}}]}"#;

    fn cached() -> Cached {
        Cached {
            network: "net".into(),
            interface: "eth0".into(),
            netns: Some("/var/run/netns/a".into()),
            args: vec![("IgnoreUnknown".into(), "1".into()), ("K8S_POD_NAME".into(), "web".into())],
            capability_args: json!({ "cgroupPath": "/kubepods/x", "portMappings": [] })
                .as_object()
                .unwrap()
                .clone(),
            result: json!({
                "cniVersion": "1.0.0",
                "ips": [{ "address": "10.0.0.5/24", "interface": 2 }, { "address": "fd00::5/64" }],
            }),
        }
    }

    fn target() -> Target {
        Target {
            sandbox: "s1".into(),
            namespace: "shop".into(),
            name: "web".into(),
            uid: "u1".into(),
            pid: None,
            netns: None,
        }
    }

    #[test]
    fn as_the_runtime_would_call_it() {
        let (name, entry) = entry(CONFIG.as_bytes(), "linkerd-cni").unwrap();
        assert_eq!(name, "net");
        let dirs = ["/opt/cni/bin".into(), "/usr/lib/cni".into()];
        let call = call(entry, "linkerd-cni", &cached(), &target(), &dirs).unwrap();
        let stdin: Value = serde_json::from_str(&call.stdin).unwrap();
        let expected = json!({
            "type": "linkerd-cni", "name": "net", "cniVersion": "0.4.0", "linkerd": { "proxy-uid": 2102 },
            "runtimeConfig": { "cgroupPath": "/kubepods/x" },
            "prevResult": {
                "cniVersion": "0.4.0",
                "ips": [{ "address": "10.0.0.5/24", "interface": 2, "version": "4" }, { "address": "fd00::5/64", "version": "6" }],
            },
        });
        assert_eq!(stdin, expected);
        let env: Vec<String> = call.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let expected = [
            "CNI_CONTAINERID=s1",
            "CNI_NETNS=/var/run/netns/a",
            "CNI_IFNAME=eth0",
            "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAME=web",
            "CNI_PATH=/opt/cni/bin:/usr/lib/cni",
        ];
        assert_eq!(env, expected);
    }

    #[test]
    fn an_old_cache_is_completed_and_a_newer_list_drops_what_it_does_not_know() {
        let config = CONFIG.replace("0.4.0", "1.0.0");
        let (_, entry) = entry(config.as_bytes(), "linkerd-cni").unwrap();
        let result = json!({ "cniVersion": "0.3.1", "ips": [{ "version": "4", "address": "10.0.0.5/24" }] });
        let cached = Cached { args: Vec::new(), netns: None, result, ..cached() };
        let target = Target { netns: Some("/run/netns/b".into()), ..target() };
        let call = call(entry, "linkerd-cni", &cached, &target, &[]).unwrap();
        assert_eq!(call.netns(), Path::new("/run/netns/b"));
        let stdin: Value = serde_json::from_str(&call.stdin).unwrap();
        assert_eq!(
            stdin["prevResult"],
            json!({ "cniVersion": "1.0.0", "ips": [{ "address": "10.0.0.5/24" }] })
        );
        let args = &call.env[3].1;
        assert_eq!(
            args,
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web;K8S_POD_INFRA_CONTAINER_ID=s1;K8S_POD_UID=u1"
        );
    }

    #[test]
    fn what_cannot_be_called_for() {
        let (_, entry) = entry(CONFIG.as_bytes(), "linkerd-cni").unwrap();
        let none = Cached { netns: None, ..cached() };
        assert!(
            call(entry, "linkerd-cni", &none, &target(), &[]).unwrap_err().contains("no network namespace")
        );
        assert!(super::entry(b"{", "x").is_err());
        assert!(
            super::entry(br#"{"name": "net", "plugins": []}"#, "x").unwrap_err().contains("no entry of x")
        );
    }

    #[test]
    fn complaints() {
        for (stdout, stderr, says) in [
            ("", "", "it said nothing"),
            ("", " iptables: not found\n", "iptables: not found"),
            (r#"{"code": 11, "msg": "no", "details": "why"}"#, "", "no: why"),
            (r#"{"msg": "no"}"#, "log", "no: log"),
            ("not json", "log", "log"),
        ] {
            assert_eq!(complaint(stdout, stderr), says);
        }
    }
}
