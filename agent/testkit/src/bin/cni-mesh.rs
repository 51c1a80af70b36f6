//! A chained CNI plugin that does what linkerd's does: redirect rules in the pod's network namespace on ADD.
//!
//! It reads linkerd-cni's own configuration (`linkerd.{incoming-proxy-port,outgoing-proxy-port,proxy-uid}`). It asks no API
//! server, so it redirects every pod outside kube-system. Where its entry has the capability
//! `io.kubernetes.cri.pod-annotations`, it reads the pod's annotations: it leaves alone what they name, and does for a pod of
//! Istio's what Istio's plugin does. For tests, `testkit.log` names a file that gets one line a call,
//! `testkit.delay-ms` makes it slow, and `testkit.fail` makes ADD fail with that text.

#![expect(clippy::print_stdout, reason = "the protocol's answer goes to standard output")]

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nobypass_testkit::redirect::{self, Skips, Variant};
use nobypass_testkit::{netns::Netns, wait};
use serde_json::{Value, json};

/// Versions of the CNI specification spoken; nothing here depends on the version.
const VERSIONS: [&str; 6] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0", "0.2.0"];

fn main() {
    match run() {
        Ok(answer) => println!("{answer}"),
        Err(error) => {
            // Code 100 and above are a plugin's own (CNI specification, "Error").
            println!("{}", json!({ "cniVersion": "1.0.0", "code": 100, "msg": format!("{error:#}") }));
            std::process::exit(1);
        }
    }
}

fn run() -> Result<String> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let command = variable("CNI_COMMAND")?;
    if command == "VERSION" {
        return Ok(json!({ "cniVersion": "1.0.0", "supportedVersions": VERSIONS }).to_string());
    }
    let config: Value = serde_json::from_str(&text).context("configuration is not JSON")?;
    record(&config, &command)?;
    if command != "ADD" {
        return Ok(String::new());
    }
    let test = &config["testkit"];
    if let Some(delay) = test["delay-ms"].as_u64() {
        let end = Instant::now() + Duration::from_millis(delay);
        wait::until("the delay", wait::HANG, || (Instant::now() >= end).then_some(()))?;
    }
    if let Some(problem) = test["fail"].as_str() {
        bail!("{problem}");
    }
    if argument("K8S_POD_NAMESPACE").as_deref() != Some("kube-system") {
        let path = variable("CNI_NETNS")?;
        let ns = Netns::from_file(&path, File::open(&path).with_context(|| format!("cannot open {path}"))?);
        let annotations = &config["runtimeConfig"]["io.kubernetes.cri.pod-annotations"];
        let list = |key: &str| {
            let text = annotations[key].as_str().unwrap_or_default();
            text.split(',').filter(|item| !item.is_empty()).map(str::to_owned).collect()
        };
        if annotations["sidecar.istio.io/status"].is_string() {
            let skips = Skips {
                ports: list("traffic.sidecar.istio.io/excludeOutboundPorts"),
                cidrs: list("traffic.sidecar.istio.io/excludeOutboundIPRanges"),
            };
            redirect::apply_skipping(&ns, Variant::IptablesIstio, redirect::Ports::ISTIO, &skips)?;
        } else {
            let skips = Skips { ports: list("config.linkerd.io/skip-outbound-ports"), ..Skips::default() };
            redirect::apply_skipping(&ns, Variant::V4Only, ports(&config), &skips)?;
        }
    }
    Ok(config["prevResult"].to_string())
}

fn ports(config: &Value) -> redirect::Ports {
    let number = |key: &str| config["linkerd"][key].as_u64();
    let port = |key: &str, default| number(key).and_then(|n| n.try_into().ok()).unwrap_or(default);
    let default = redirect::Ports::LINKERD;
    redirect::Ports {
        uid: number("proxy-uid").and_then(|n| n.try_into().ok()).unwrap_or(default.uid),
        outbound: port("outgoing-proxy-port", default.outbound),
        inbound: port("incoming-proxy-port", default.inbound),
    }
}

fn record(config: &Value, command: &str) -> Result<()> {
    let Some(path) = config["testkit"]["log"].as_str() else { return Ok(()) };
    let line = json!({
        "command": command,
        "namespace": argument("K8S_POD_NAMESPACE"),
        "pod": argument("K8S_POD_NAME"),
        "uid": argument("K8S_POD_UID"),
        "container": variable("CNI_CONTAINERID").ok(),
        "netns": variable("CNI_NETNS").ok(),
        "prevResult": config["prevResult"],
    });
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    Ok(file.write_all(format!("{line}\n").as_bytes())?)
}

fn variable(name: &str) -> Result<String> {
    std::env::var(name).with_context(|| format!("{name} is not set"))
}

/// One of the `key=value` pairs of CNI_ARGS.
fn argument(key: &str) -> Option<String> {
    let args = variable("CNI_ARGS").ok()?;
    args.split(';').find_map(|pair| Some(pair.strip_prefix(key)?.strip_prefix('=')?.to_owned()))
}
