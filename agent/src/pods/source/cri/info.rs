//! The runtimes' own details: the `info` JSON of a verbose status.
//!
//! CRI leaves its form to the runtime. containerd: `SandboxInfo`
//! (<https://github.com/containerd/containerd/blob/v2.1.0/internal/cri/server/podsandbox/types/sandbox_info.go>) and
//! `ContainerInfo`; CRI-O: `createSandboxInfo`
//! (<https://github.com/cri-o/cri-o/blob/v1.33.0/server/sandbox_status.go>), which leaves `pid` out when the pod has no
//! infra container. Both include the OCI runtime spec. Everything is optional here.

use std::collections::HashMap;

use serde::Deserialize;

use crate::pods::model::{KeyValues, Keys, MAX_ARGS, User};

/// The part of `info` that is of use.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Info {
    pub(super) pid: Option<u32>,
    pub(super) netns: Option<Box<str>>,
    pub(super) cgroup_parent: Option<Box<str>>,
    pub(super) runtime_type: Option<Box<str>>,
    pub(super) user: Option<User>,
    pub(super) cgroup: Option<Box<str>>,
    /// What the kubelet passed, without the image's command. CRI-O does not tell.
    pub(super) args: Box<[Box<str>]>,
    /// Those variables that are wanted.
    pub(super) env: KeyValues,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Raw {
    pid: Option<i64>,
    runtime_type: Option<Box<str>>,
    runtime_spec: Option<Spec>,
    config: Option<Config>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Config {
    linux: Option<ConfigLinux>,
    args: Option<Vec<Box<str>>>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct ConfigLinux {
    cgroup_parent: Option<Box<str>>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Spec {
    process: Option<Process>,
    linux: Option<SpecLinux>,
    annotations: Option<Annotations>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Process {
    user: Option<SpecUser>,
    /// `NAME=value`
    env: Option<Vec<Box<str>>>,
}

#[derive(Deserialize)]
struct SpecUser {
    // Zero is left out by some writers.
    #[serde(default)]
    uid: u32,
    #[serde(default)]
    gid: u32,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct SpecLinux {
    namespaces: Option<Vec<Namespace>>,
    cgroups_path: Option<Box<str>>,
}

#[derive(Deserialize)]
struct Namespace {
    r#type: Box<str>,
    #[serde(default)]
    path: Box<str>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Annotations {
    #[serde(rename = "io.kubernetes.cri-o.CgroupParent")]
    cgroup_parent: Option<Box<str>>,
}

/// Reads the `info` map of a verbose answer.
///
/// # Errors
/// What is wrong with its JSON. A missing `info` is no error.
pub(super) fn parse(info: &HashMap<String, String>, env: &Keys) -> Result<Info, serde_json::Error> {
    let Some(text) = info.get("info") else { return Ok(Info::default()) };
    let Raw { pid, runtime_type, runtime_spec, config } = serde_json::from_str(text)?;
    let Spec { process, linux, annotations } = runtime_spec.unwrap_or_default();
    let SpecLinux { namespaces, cgroups_path } = linux.unwrap_or_default();
    let Process { user, env: variables } = process.unwrap_or_default();
    let Config { linux: configured, args } = config.unwrap_or_default();
    let netns = namespaces.unwrap_or_default().into_iter().find(|namespace| &*namespace.r#type == "network");
    let configured = configured.and_then(|linux| linux.cgroup_parent);
    let variables = variables.unwrap_or_default();
    Ok(Info {
        pid: pid.and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid != 0),
        netns: netns.map(|netns| netns.path).filter(|path| !path.is_empty()),
        cgroup_parent: configured.or_else(|| annotations?.cgroup_parent).filter(|parent| !parent.is_empty()),
        runtime_type: runtime_type.filter(|name| !name.is_empty()),
        user: user.map(|SpecUser { uid, gid }| User { uid, gid }),
        cgroup: cgroups_path.filter(|path| !path.is_empty()),
        args: args.unwrap_or_default().into_iter().take(MAX_ARGS).collect(),
        env: KeyValues::filtered(variables.iter().filter_map(|variable| variable.split_once('=')), env),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn info(value: &serde_json::Value) -> Info {
        let env = ["DISABLE_ENVOY", "ISTIO_META_*"].into_iter().collect();
        parse(&HashMap::from([("info".to_owned(), value.to_string())]), &env).expect("valid")
    }

    #[test]
    fn containerd_sandbox() {
        let got = info(&json!({
            "pid": 4711, "processStatus": "running", "runtimeType": "io.containerd.runc.v2",
            "runtimeOptions": {"systemd_cgroup": true},
            "config": {"metadata": {"name": "web"}, "linux": {"cgroup_parent": "kubepods-pod1.slice"}},
            "runtimeSpec": {
                "process": {"user": {"uid": 65535, "gid": 65535}},
                "linux": {
                    "cgroupsPath": "kubepods-pod1.slice:cri-containerd:ab",
                    "namespaces": [{"type": "pid"}, {"type": "network", "path": "/var/run/netns/cni-1"}],
                },
            },
            "cniResult": {"Interfaces": {}},
        }));
        let want = Info {
            pid: Some(4711),
            netns: Some("/var/run/netns/cni-1".into()),
            cgroup_parent: Some("kubepods-pod1.slice".into()),
            runtime_type: Some("io.containerd.runc.v2".into()),
            user: Some(User { uid: 65535, gid: 65535 }),
            cgroup: Some("kubepods-pod1.slice:cri-containerd:ab".into()),
            ..Info::default()
        };
        assert_eq!(got, want);
    }

    #[test]
    fn crio_sandbox_with_and_without_infra_container() {
        let spec = json!({
            "annotations": {"io.kubernetes.cri-o.CgroupParent": "kubepods-pod1.slice", "io.kubernetes.cri-o.Name": "x"},
            "linux": {"namespaces": [{"type": "network", "path": "/var/run/netns/1"}]},
        });
        let with = info(&json!({"image": "pause", "pid": 7, "runtimeSpec": spec}));
        assert_eq!((with.pid, with.netns.as_deref()), (Some(7), Some("/var/run/netns/1")));
        assert_eq!(with.cgroup_parent.as_deref(), Some("kubepods-pod1.slice"));
        assert_eq!(info(&json!({"runtimeSpec": spec})), Info { pid: None, ..with });
    }

    #[test]
    fn containers_run_as_somebody() {
        let user = |user: serde_json::Value| info(&json!({"runtimeSpec": {"process": {"user": user}}})).user;
        assert_eq!(user(json!({"uid": 2102, "gid": 2102})), Some(User { uid: 2102, gid: 2102 }));
        assert_eq!(user(json!({})), Some(User { uid: 0, gid: 0 }));
        assert_eq!(info(&json!({"pid": 0})).user, None);
    }

    #[test]
    fn arguments_and_wanted_variables() {
        let got = info(&json!({
            "config": {"args": ["proxy", "sidecar"]},
            "runtimeSpec": {"process": {
                "args": ["/usr/local/bin/pilot-agent", "proxy", "sidecar"],
                "env": ["PATH=/bin", "DISABLE_ENVOY=true", "ISTIO_META_DNS_CAPTURE=a=b", "ISTIO_META_EMPTY=", "odd"],
            }},
        }));
        assert_eq!(&*got.args, ["proxy".into(), "sidecar".into()]);
        let env = [("DISABLE_ENVOY", "true"), ("ISTIO_META_DNS_CAPTURE", "a=b"), ("ISTIO_META_EMPTY", "")];
        assert_eq!(got.env.iter().collect::<Vec<_>>(), env);
    }

    #[test]
    fn missing_and_odd_values() {
        let none = Keys::default();
        assert_eq!(parse(&HashMap::new(), &none).expect("no info"), Info::default());
        for odd in [
            json!({}),
            json!({"pid": 0, "config": null, "runtimeSpec": null}),
            json!({"pid": -1, "runtimeSpec": {"linux": null, "process": null}}),
            json!({"runtimeSpec": {"linux": {"namespaces": [{"type": "network"}], "cgroupsPath": ""}}}),
        ] {
            assert_eq!(info(&odd), Info::default(), "{odd}");
        }
        assert!(parse(&HashMap::from([("info".to_owned(), "{".to_owned())]), &none).is_err());
    }
}
