//! What a mesh profile is, and where profiles come from.

use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{
    grammar::{PortGrammar, PortRange},
    linkerd,
};
use crate::pods::model::{KeyValues, Keys};

/// Everything that is to be known about one mesh. In a file: YAML (or JSON), names in camelCase.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Profile {
    /// The name in metrics, logs and reports.
    pub name: Box<str>,
    /// Which pods are meshed.
    #[serde(default)]
    pub recognise: Recognise,
    /// The containers that the mesh adds to a pod.
    pub containers: Containers,
    /// Who sets up the redirection as long as the pod does not show it.
    #[serde(default)]
    pub assume_mode: Mode,
    /// How the proxy's own connections are told from the application's.
    #[serde(default)]
    pub proxy: ProxyIdentity,
    /// The ports that the proxy listens on.
    pub ports: ProxyPorts,
    /// What the mesh lets out, or in, past the proxy.
    #[serde(default)]
    pub exempt: ExemptRules,
    /// The IP families that the mesh redirects.
    #[serde(default)]
    pub families: Families,
    /// Addresses that the mesh's own validator connects to: a connection that leaves the pod for one of them proves
    /// that it is not redirected, and is not the application's.
    #[serde(default)]
    pub validator_addresses: Vec<SocketAddr>,
}

/// Which pods are meshed: (a proxy container, or one of `any`) and all of `all` and none of `not`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Recognise {
    /// Each of these alone says that a proxy was injected, even before its container exists.
    pub any: Vec<Marker>,
    /// Without all of these nothing is redirected, whatever containers there are.
    pub all: Vec<Marker>,
    /// Each of these says that the pod is not meshed.
    pub not: Vec<Marker>,
    /// Each of these says that the pod belongs to the mesh itself and is not judged.
    pub control_plane: Vec<Marker>,
}

/// A label or an annotation that means something.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Marker {
    /// A label.
    Label(KeyMatch),
    /// An annotation.
    Annotation(KeyMatch),
}

/// A key, and possibly its value.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KeyMatch {
    /// The key; one that ends with `*` means all keys that start so.
    pub key: Box<str>,
    /// The value; without one any value but the empty one counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<Box<str>>,
}

/// The names of containers that the mesh adds. A name that ends with `*` means all names that start so.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Containers {
    /// The proxy.
    pub proxy: Vec<Box<str>>,
    /// The init container that sets up the redirection when no CNI plugin does.
    pub init: Vec<Box<str>>,
    /// The init container that checks what the CNI plugin did.
    pub validator: Vec<Box<str>>,
}

/// Who sets up the redirection of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Mode {
    /// The mesh's CNI plugin, before any container starts: whatever leaves from then on is judged.
    #[default]
    Cni,
    /// An init container of the pod: what leaves before it has ended is none of the mesh's business.
    Init,
}

/// How the proxy's connections are told from others while its container's cgroup is not known.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ProxyIdentity {
    /// Its UID: the first source that says something.
    pub uid: Vec<IdSource>,
    /// Its GID: the first source that says something.
    pub gid: Vec<IdSource>,
    /// Socket marks that it sets.
    pub marks: Vec<Mark>,
}

/// Where a numeric id is to be read.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum IdSource {
    /// An annotation of the pod.
    Annotation(Box<str>),
    /// What the proxy's container runs as, once the runtime tells.
    Container,
    /// Always this.
    Fixed(u32),
}

/// A socket mark under a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mark {
    /// The bits.
    pub value: u32,
    /// Which bits count.
    pub mask: u32,
}

/// The ports that the proxy listens on in every pod.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ProxyPorts {
    /// Where outgoing connections are redirected to.
    pub outbound: u16,
    /// Where incoming connections are redirected to.
    pub inbound: u16,
    /// Others that it serves itself (admin, metrics, probes).
    #[serde(default)]
    pub own: Vec<u16>,
}

/// What the mesh lets pass un-redirected.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ExemptRules {
    /// Destination ports of outgoing connections.
    pub out_ports: PortRule,
    /// Destinations of outgoing connections.
    pub out_cidrs: ListRule<IpNet>,
    /// Users whose connections are not redirected, beside the proxy's.
    pub uids: ListRule<u32>,
    /// Ports of incoming connections.
    pub in_ports: PortRule,
    /// Sources of incoming connections.
    pub in_sources: ListRule<IpNet>,
}

/// Exempt ports: the mesh's defaults, and an annotation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PortRule {
    /// The mesh's defaults with a CNI plugin.
    pub cni: Vec<PortRange>,
    /// The mesh's defaults with an init container.
    pub init: Vec<PortRange>,
    /// The annotation; an empty value counts as absent.
    pub annotation: Option<Box<str>>,
    /// How the annotation is written.
    pub grammar: PortGrammar,
    /// What the annotation does to the defaults.
    pub merge: Merge,
}

/// Exempt things of another kind: the mesh's defaults, and an annotation with a list separated by commas.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ListRule<T> {
    /// The mesh's defaults.
    pub defaults: Vec<T>,
    /// The annotation; an empty value counts as absent.
    pub annotation: Option<Box<str>>,
    /// What the annotation does to the defaults.
    pub merge: Merge,
}

impl<T> Default for ListRule<T> {
    fn default() -> Self {
        Self { defaults: Vec::new(), annotation: None, merge: Merge::default() }
    }
}

/// What an annotation does to the defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Merge {
    /// It takes their place.
    #[default]
    Replace,
    /// It adds to them.
    Append,
}

/// IP families.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Families {
    /// IPv4.
    pub ipv4: bool,
    /// IPv6.
    pub ipv6: bool,
}

impl Default for Families {
    fn default() -> Self {
        Self { ipv4: true, ipv6: true }
    }
}

impl Marker {
    /// Whether a pod with these labels and annotations carries it.
    #[must_use]
    pub fn is_on(&self, labels: &KeyValues, annotations: &KeyValues) -> bool {
        let (map, wanted) = match self {
            Self::Label(wanted) => (labels, wanted),
            Self::Annotation(wanted) => (annotations, wanted),
        };
        map.iter().any(|(key, value)| {
            matches(&wanted.key, key)
                && wanted.value.as_deref().map_or(!value.is_empty(), |wanted| wanted == value)
        })
    }

    fn key(&self) -> &str {
        match self {
            Self::Label(wanted) | Self::Annotation(wanted) => &wanted.key,
        }
    }
}

/// Whether `name` is what `pattern` means: itself, or anything with that beginning when it ends with `*`.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => pattern == name,
    }
}

impl Profile {
    /// The labels and annotations that this profile reads.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        let Recognise { any, all, not, control_plane } = &self.recognise;
        let ExemptRules { out_ports, out_cidrs, uids, in_ports, in_sources } = &self.exempt;
        let markers = [any, all, not, control_plane].into_iter().flatten().map(Marker::key);
        let rules = [
            &out_ports.annotation,
            &out_cidrs.annotation,
            &uids.annotation,
            &in_ports.annotation,
            &in_sources.annotation,
        ];
        let ids = self.proxy.uid.iter().chain(&self.proxy.gid).filter_map(|source| match source {
            IdSource::Annotation(key) => Some(&**key),
            IdSource::Container | IdSource::Fixed(_) => None,
        });
        markers.chain(rules.into_iter().filter_map(Option::as_deref)).chain(ids)
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let Containers { proxy, init: _, validator: _ } = &self.containers;
        let Recognise { any, .. } = &self.recognise;
        if self.name.is_empty()
            || !self.name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
        {
            return Err("the name must be made of letters, digits, `-` and `_`".to_owned());
        }
        if proxy.is_empty() && any.is_empty() {
            return Err("neither containers.proxy nor recognise.any says which pods are meshed".to_owned());
        }
        if proxy.iter().any(|name| name.trim_end_matches('*').is_empty()) {
            return Err("containers.proxy would match every container".to_owned());
        }
        if self.keys().any(|key| key.trim_end_matches('*').is_empty()) {
            return Err("an empty label or annotation key would match every pod".to_owned());
        }
        Ok(())
    }
}

/// Why the profiles cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file cannot be read.
    #[error("cannot read the mesh profiles in {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The file is not a list of profiles.
    #[error("the mesh profiles in {path} are not valid: {reason}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        reason: String,
    },
    /// A profile makes no sense.
    #[error("mesh profile `{name}` in {path}: {reason}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The profile.
        name: Box<str>,
        /// What is wrong.
        reason: String,
    },
}

/// The file given by `--profiles`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    profiles: Vec<Profile>,
}

/// What the parser says first, `line 2 column 11: …`; the picture of the place that follows is for a terminal, not for
/// a log.
fn one_line(error: &str) -> String {
    let first = error.lines().next().unwrap_or_default();
    first.strip_prefix("error: ").unwrap_or(first).to_owned()
}

/// All profiles in use, the ones to try first in front.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Profiles(pub(super) Vec<Profile>);

impl Profiles {
    /// The built-in profiles.
    #[must_use]
    pub fn built_in() -> Self {
        Self(vec![linkerd::profile()])
    }

    /// The profiles in the file at `path` (YAML or JSON: `profiles: [...]`), then the built-in ones. A profile with a
    /// built-in one's name takes its place.
    ///
    /// # Errors
    /// [`ProfileError`]; it names the file, and the line or the profile.
    pub fn load(path: &Path) -> Result<Self, ProfileError> {
        let text =
            fs::read_to_string(path).map_err(|source| ProfileError::Read { path: path.into(), source })?;
        Self::parse(path, &text)
    }

    fn parse(path: &Path, text: &str) -> Result<Self, ProfileError> {
        let parse = |reason: String| ProfileError::Parse { path: path.into(), reason };
        let File { profiles } =
            serde_saphyr::from_str(text).map_err(|error| parse(one_line(&error.to_string())))?;
        let invalid = |(name, reason)| ProfileError::Invalid { path: path.into(), name, reason };
        Self::built_in().preceded_by(profiles).map_err(invalid)
    }

    /// The profiles in the order in which they are tried.
    #[must_use]
    pub fn as_slice(&self) -> &[Profile] {
        &self.0
    }

    /// The labels and annotations that any of them reads, for a source to keep.
    #[must_use]
    pub fn keys(&self) -> Keys {
        self.0.iter().flat_map(Profile::keys).collect()
    }

    /// The names of the containers that matter to any of them, for a source to ask the runtime about.
    #[must_use]
    pub fn container_names(&self) -> Keys {
        let all = self.0.iter().flat_map(|profile| {
            let Containers { proxy, init, validator } = &profile.containers;
            proxy.iter().chain(init).chain(validator)
        });
        all.map(|name| &**name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
profiles:
- name: osm
  recognise:
    any:
    - label: {key: osm-proxy-uuid}
    not:
    - annotation: {key: openservicemesh.io/sidecar-injection, value: disabled}
  containers: {proxy: [envoy], init: [osm-init]}
  assumeMode: init
  proxy:
    uid: [container, {fixed: 1500}]
    marks: [{value: 1337, mask: 4095}]
  ports: {outbound: 15001, inbound: 15003, own: [15000, 15010]}
  exempt:
    outPorts: {annotation: openservicemesh.io/outbound-port-exclusion-list, merge: append, init: [53, 8000-8100]}
    outCidrs: {annotation: openservicemesh.io/outbound-ip-range-exclusion-list, defaults: [10.0.0.0/8]}
  validatorAddresses: ["192.0.2.2:1404", "[fd00::1]:20001"]
"#;

    fn parse(text: &str) -> Result<Profiles, ProfileError> {
        Profiles::parse(Path::new("/etc/nobypass/profiles.yaml"), text)
    }

    #[test]
    fn a_generic_profile_from_yaml() {
        let profiles = parse(FILE).expect("valid");
        let [osm, linkerd] = profiles.as_slice() else { panic!("{profiles:?}") };
        assert_eq!((&*osm.name, &*linkerd.name), ("osm", "linkerd"));
        assert_eq!(osm.proxy.uid, [IdSource::Container, IdSource::Fixed(1500)]);
        assert_eq!(
            osm.exempt.out_ports.init,
            ["53".parse().expect("port"), "8000-8100".parse().expect("range")]
        );
        assert_eq!(osm.exempt.out_ports.merge, Merge::Append);
        assert_eq!((osm.assume_mode, osm.families), (Mode::Init, Families::default()));

        let keys = profiles.keys();
        for key in
            ["osm-proxy-uuid", "openservicemesh.io/outbound-port-exclusion-list", "linkerd.io/proxy-version"]
        {
            assert!(keys.keeps(key), "{key}");
        }
        assert!(!keys.keeps("app"));
        assert!(profiles.container_names().keeps("osm-init"));
    }

    #[test]
    fn the_example_in_the_readme_is_valid() {
        let readme = include_str!("../../../README.md");
        let example = readme.split("```yaml").nth(1).and_then(|rest| rest.split("```").next());
        let profiles = parse(example.expect("an example")).expect("valid");
        let [osm, _] = profiles.as_slice() else { panic!("{profiles:?}") };
        assert_eq!((&*osm.name, osm.families), ("osm", Families { ipv4: true, ipv6: false }));
    }

    #[test]
    fn json_is_yaml_too_and_a_profile_round_trips() {
        let built_in = Profiles::built_in();
        let json = serde_json::json!({ "profiles": built_in.as_slice() }).to_string();
        assert_eq!(parse(&json).expect("valid"), built_in, "a profile of a built-in's name takes its place");
    }

    #[test]
    fn errors_name_the_file_and_the_place() {
        let minimal =
            "profiles:\n- name: x\n  containers: {proxy: [p]}\n  ports: {outbound: 1, inbound: 2}\n";
        assert!(parse(minimal).is_ok());
        for (text, want) in [
            (minimal.replace("inbound: 2", "inbound: 2, inbuond: 3"), "inbuond"),
            (minimal.replace("name: x", "name: 'a b'"), "letters, digits"),
            (minimal.replace("[p]", "['*']"), "every container"),
            (minimal.replace("[p]", "[]"), "which pods are meshed"),
            (minimal.replace("outbound: 1", "outbound: 70000"), "line 4"),
            (format!("{minimal}  recognise: {{any: [{{label: {{key: ''}}}}]}}\n"), "every pod"),
            (format!("{minimal}{}", minimal.replace("profiles:\n", "")), "two of this name"),
            ("profiles: 3".to_owned(), "line 1"),
            (String::new(), "profiles"),
        ] {
            let error = parse(&text).expect_err(&text).to_string();
            assert!(
                error.contains(want) && error.contains("/etc/nobypass/profiles.yaml"),
                "{text}\n→ {error}"
            );
        }
        assert!(matches!(Profiles::load(Path::new("/nonexistent")), Err(ProfileError::Read { .. })));
    }
}
