//! Pods of every mesh as its webhook makes them, in `agent/tests/manifests`: what they are recognised as, what is exempt
//! for them and what their containers are to the mesh. Each manifest says at its top what is expected of it.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::facts::{facts, kept};
use super::object;
use crate::mesh::recognise::Exempt;
use crate::mesh::role::runs_to_completion;
use crate::mesh::{Exemptions, Membership, Meshed, PortRange, Profiles, profile::OwnAddress, recognise};
use crate::pods::model::{PodFacts, Wanted};

const NODE: &str = "node-1";
/// All meshes have these; what a mesh has no word for is left out.
const KINDS: [&str; 9] = [
    "healthy",
    "broken",
    "excluded",
    "malformed",
    "native-sidecar",
    "gateway",
    "host-network",
    "job",
    "static",
];

fn manifests() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/manifests");
    let entries = |dir: &Path| -> Vec<PathBuf> {
        fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path()).collect()
    };
    let mut all: Vec<PathBuf> = entries(&dir).iter().flat_map(|mesh| entries(mesh)).collect();
    all.sort();
    all
}

/// The facts of a manifest's pod, with what its namespace says, as the watch would have them.
pub(super) fn read(text: &str, wanted: &Wanted) -> PodFacts {
    let (mut pod, mut namespace) = (None, None);
    for document in text.split("\n---\n") {
        let value: Value = serde_saphyr::from_str(document).expect("YAML");
        match value["kind"].as_str() {
            Some("Pod") => pod = Some(serde_json::from_value::<object::Pod>(value).expect("a pod")),
            Some("Namespace") => {
                namespace = Some(serde_json::from_value::<object::Namespace>(value).expect("a namespace"));
            }
            other => panic!("{other:?}"),
        }
    }
    let mut facts = facts(pod.expect("a pod"), NODE, wanted).expect("of this node");
    if let Some(object::Namespace { metadata }) = namespace {
        facts.namespace_labels = Some(kept(metadata.labels.as_ref(), &wanted.keys));
        facts.namespace_annotations = Some(kept(metadata.annotations.as_ref(), &wanted.keys));
    }
    facts
}

fn list<T: ToString>(items: &[T]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// What a pod is, as the manifests write it.
fn show(pod: &PodFacts, membership: &Membership, profiles: &Profiles) -> String {
    match membership {
        Membership::NotMeshed { reason } => format!("not meshed: {}\n", reason.as_str()),
        Membership::Exempt { reason } => format!("exempt: {}\n", reason.as_str()),
        Membership::Unsupported { profile, reason } => {
            format!("unsupported {profile}: {}\n", reason.as_str())
        }
        Membership::Meshed(meshed) => show_meshed(pod, meshed, profiles),
    }
}

fn show_meshed(pod: &PodFacts, meshed: &Meshed, profiles: &Profiles) -> String {
    let Meshed { profile, proxy_uid, proxy_gid, outbound_port, inbound_port, families, .. } = meshed;
    let own = profiles.named(profile).expect("a profile");
    let mut text = format!("meshed {profile}: ");
    text += match meshed.mode {
        crate::mesh::profile::Mode::Cni => "cni, ",
        crate::mesh::profile::Mode::Init => "init, ",
    };
    assert!(!meshed.mode_assumed, "a specification shows the mode");
    text += if meshed.redirect_due { "" } else { "not due, " };
    text += meshed.phase.as_str();
    text += if runs_to_completion(pod) == Some(true) { ", ends by itself\n" } else { "\n" };
    if let Some(hash) = pod.static_pod_hash {
        assert_eq!(pod.cgroup_uid(), hash);
        let _ = writeln!(text, "cgroup: {hash}");
    }
    text += "proxy: ";
    text += if meshed.proxy_elsewhere { "elsewhere " } else { "" };
    text += &proxy_uid.map_or_else(String::new, |uid| format!("uid {uid} "));
    text += &proxy_gid.map_or_else(String::new, |gid| format!("gid {gid} "));
    let _ = writeln!(text, "ports {outbound_port}/{inbound_port}");
    let names = [("ipv4", families.ipv4), ("ipv6", families.ipv6)];
    let names: Vec<_> = names.iter().filter_map(|(name, on)| on.then_some(*name)).collect();
    let _ = writeln!(text, "families: {}", names.join(" "));
    text += if meshed.own_address == OwnAddress::Redirected { "own address: redirected\n" } else { "" };
    text += if meshed.dns_captured { "dns: captured\n" } else { "" };
    text += &show_exemptions(&meshed.exemptions);
    // What the validator itself says, or the profile for one that nobody sees.
    let sees_one = meshed.roles.iter().any(|(_, role)| role == crate::mesh::MeshRole::Validator);
    if sees_one || own.validator.addresses.len() > 1 {
        let addresses = list(&meshed.validator_addresses);
        text += &if addresses.is_empty() { String::new() } else { format!("canary: {addresses}\n") };
    }
    text += if meshed.validator_said(pod).is_some_and(|(code, _)| code != 0) {
        "validator: not redirected\n"
    } else {
        ""
    };
    let roles: Vec<_> = meshed.roles.iter().map(|(name, role)| format!("{name}={}", role.as_str())).collect();
    let _ = writeln!(text, "roles: {}", roles.join(" "));
    for problem in &meshed.problems {
        let _ = writeln!(text, "problem: {}: {}", problem.annotation, problem.element);
    }
    text
}

fn show_exemptions(exemptions: &Exemptions) -> String {
    let Exemptions { out_ports, out_cidrs, listed, uids, user_ports, gids, devices, in_ports, in_sources } =
        exemptions;
    assert!(gids.is_empty());
    let named = |name: &str, items: String| (!items.is_empty()).then(|| format!("{name} {items}"));
    let only = listed.as_ref().map(|listed| {
        let parts = [named("networks", list(&listed.cidrs)), named("ports", list(&listed.ports))];
        std::iter::once("only".to_owned()).chain(parts.into_iter().flatten()).collect::<Vec<_>>().join(" ")
    });
    let on = |ports: &[PortRange]| if ports.is_empty() { "any".to_owned() } else { list(ports) };
    let users = user_ports.iter().map(|user| match user.uids {
        (first, last) if first == last => format!("{first} on {}", on(&user.ports)),
        (first, last) => format!("{first}-{last} on {}", on(&user.ports)),
    });
    let users: Vec<_> = users.collect();
    let out = [
        named("ports", list(out_ports)),
        named("networks", list(out_cidrs)),
        only,
        named("users", list(uids)),
        named("users", users.join(", ")),
        named("devices", list(devices)),
    ];
    let inward = [named("ports", list(in_ports)), named("sources", list(in_sources))];
    let line = |name: &str, parts: &[Option<String>]| {
        let parts: Vec<_> = parts.iter().flatten().map(String::as_str).collect();
        if parts.is_empty() { String::new() } else { format!("{name}: {}\n", parts.join("; ")) }
    };
    line("out", &out) + &line("in", &inward)
}

/// Whether a line is as expected; `*` at the end stands for whatever comes.
fn is_line(expected: &str, got: &str) -> bool {
    expected.strip_suffix('*').map_or(expected == got, |beginning| got.starts_with(beginning))
}

#[test]
fn every_manifest_is_recognised_as_it_says() {
    let profiles = Profiles::built_in();
    let wanted = profiles.wanted();
    let (mut rows, mut wrong) = (0, Vec::new());
    for path in manifests() {
        let text = fs::read_to_string(&path).expect("readable");
        let pod = read(&text, &wanted);
        let membership = recognise(&pod, profiles.as_slice());
        let got = show(&pod, &membership, &profiles);
        let expected: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("#= ")).collect();
        let lines: Vec<&str> = got.lines().collect();
        let same = expected.len() == lines.len()
            && expected.iter().zip(&lines).all(|(expected, got)| is_line(expected, got));
        if !same {
            wrong.push(format!("{}\n  expected {expected:#?}\n  got {lines:#?}", path.display()));
        }
        rows += 1;
    }
    assert!(rows >= 100, "{rows} manifests");
    assert!(wrong.is_empty(), "{} of {rows} are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_mesh_has_every_kind_of_pod() {
    let all = manifests();
    for mesh in ["linkerd", "istio-sidecar", "istio-ambient", "consul", "kuma"] {
        let has = |name: &str| all.iter().any(|path| path.ends_with(format!("{mesh}/{name}.yaml")));
        // Linkerd's control plane stands for the gateway that it does not have.
        let has_none = |kind: &str| mesh == "linkerd" && kind == "gateway";
        let missing: Vec<_> = KINDS.iter().filter(|kind| !has_none(kind) && !has(kind)).collect();
        assert!(missing.is_empty(), "{mesh}: {missing:?}");
        assert!(has("gvisor") || has("kata"), "{mesh}");
        assert!(mesh == "istio-ambient" || (has("init-mode-waiting") && has("init-mode-done")), "{mesh}");
    }
}

/// A pod whose container runtime alone is known: no specification, and everything that came from it is missing. It is
/// never taken for a pod of another mesh.
#[test]
fn labels_and_annotations_alone_never_lead_to_another_mesh() {
    let profiles = Profiles::built_in();
    let wanted = profiles.wanted();
    for path in manifests() {
        let whole = read(&fs::read_to_string(&path).expect("readable"), &wanted);
        let Membership::Meshed(meshed) = recognise(&whole, profiles.as_slice()) else { continue };
        let early =
            PodFacts { containers: Vec::new(), containers_complete: false, spec_host_network: None, ..whole };
        match recognise(&early, profiles.as_slice()) {
            Membership::Meshed(early) => assert_eq!(early.profile, meshed.profile, "{}", path.display()),
            Membership::Exempt { reason: Exempt::Gateway { .. } } | Membership::NotMeshed { .. } => {
                panic!("{}: a meshed pod is not known by its marks", path.display())
            }
            other => panic!("{}: {other:?}", path.display()),
        }
    }
}
