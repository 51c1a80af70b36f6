//! Takes the place of a mesh's CNI installer: its environment, and the order of its steps.
//!
//! The order is what keeps pods from failing: binary, then kubeconfig, then the entry that needs both. When either
//! cannot be kept, the entry goes again.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::binaries::{self, Installed};
use super::entry::{EntryError, Place, WantedEntry};
use super::kubeconfig::{SERVICE_ACCOUNT_DIR, Spec, Trust};
use super::plan::{self, FileKind, Options, Plan, Remove};

/// Reads one environment variable. An empty one counts as not set, as in the shell script it replaces.
pub type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// What Linkerd's installers take from their environment (`linkerd2-proxy-init`, `install-cni.sh` and its successor in
/// Go), with their defaults.
#[derive(Clone, Debug)]
pub struct Contract {
    /// `CONTAINER_MOUNT_PREFIX`: where the host's directories are mounted.
    pub prefix: PathBuf,
    /// The CNI directory as seen from here, where that is not its path below the prefix.
    pub mounted_net: Option<PathBuf>,
    /// The same for the plugins' directory.
    pub mounted_bin: Option<PathBuf>,
    /// `DEST_CNI_NET_DIR`: the CNI directory's path on the host.
    pub net_dir: PathBuf,
    /// `DEST_CNI_BIN_DIR`: the plugins' directory on the host.
    pub bin_dir: PathBuf,
    /// `CONTAINER_CNI_BIN_DIR`: where the image keeps the plugins.
    pub source_dir: PathBuf,
    /// `CNI_NETWORK_CONFIG`, or `CNI_NETWORK_CONFIG_FILE` when that is not set. (The shell script preferred the file;
    /// its successor prefers the text.)
    pub template: Option<Template>,
    /// `KUBECONFIG_FILE_NAME`.
    pub kubeconfig: OsString,
    /// `KUBECONFIG_MODE`, octal.
    pub mode: u32,
    /// `KUBE_CA_FILE`, or none at all with `SKIP_TLS_VERIFY=true`.
    pub trust: Trust,
    /// `NOBYPASS_SERVICE_ACCOUNT_DIR`: where the token is mounted.
    pub service_account: PathBuf,
    /// `KUBERNETES_SERVICE_PROTOCOL`, `_HOST` and `_PORT`; the host is not set outside of a cluster.
    pub server: Option<Server>,
}

/// Where the entry comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Template {
    /// The text itself.
    Text(String),
    /// A file that holds it.
    File(PathBuf),
}

/// The API server, as a pod is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// `https` by default.
    pub protocol: String,
    /// Name or address.
    pub host: String,
    /// 443 by default.
    pub port: u16,
}

/// What is wrong with the environment.
#[derive(Debug, thiserror::Error)]
pub enum ContractError {
    /// A variable has an unusable value.
    #[error("{name}={value:?}: {problem}")]
    Variable {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A variable is missing.
    #[error("{name} is not set: {problem}")]
    Missing {
        /// Its name.
        name: &'static str,
        /// What it is needed for.
        problem: &'static str,
    },
    /// The template's file cannot be read.
    #[error("CNI_NETWORK_CONFIG_FILE={}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The template is no mesh entry.
    #[error("CNI_NETWORK_CONFIG: {0}")]
    Entry(#[from] EntryError),
}

impl Contract {
    /// Reads the environment.
    pub fn from_env(env: Env<'_>) -> Result<Self, ContractError> {
        let get = |name: &str| env(name).filter(|value| !value.is_empty());
        let path = |name: &str, default: &str| PathBuf::from(get(name).unwrap_or_else(|| default.to_owned()));
        let absolute = |name: &'static str, default: &str| {
            let path = path(name, default);
            let value = || path.to_string_lossy().into_owned();
            let problem = "must be an absolute path";
            if path.is_absolute() {
                Ok(path.clone())
            } else {
                Err(ContractError::Variable { name, value: value(), problem })
            }
        };
        let template = get("CNI_NETWORK_CONFIG").map(Template::Text);
        let template = template.or_else(|| Some(Template::File(get("CNI_NETWORK_CONFIG_FILE")?.into())));
        let skip = get("SKIP_TLS_VERIFY").is_some_and(|value| value == "true");
        let service_account = path("NOBYPASS_SERVICE_ACCOUNT_DIR", SERVICE_ACCOUNT_DIR);
        let ca = get("KUBE_CA_FILE").map_or_else(|| service_account.join("ca.crt"), PathBuf::from);
        Ok(Self {
            prefix: path("CONTAINER_MOUNT_PREFIX", "/host"),
            mounted_net: None,
            mounted_bin: None,
            net_dir: absolute("DEST_CNI_NET_DIR", "/etc/cni/net.d")?,
            bin_dir: absolute("DEST_CNI_BIN_DIR", "/opt/cni/bin")?,
            source_dir: path("CONTAINER_CNI_BIN_DIR", "/opt/cni/bin"),
            template,
            kubeconfig: kubeconfig_name(get("KUBECONFIG_FILE_NAME"))?,
            mode: mode(get("KUBECONFIG_MODE"))?,
            trust: if skip { Trust::Nothing } else { Trust::Ca(ca) },
            service_account,
            server: server(&get)?,
        })
    }

    /// The CNI directory, as seen from here.
    pub fn mounted_net_dir(&self) -> PathBuf {
        self.mounted_net.clone().unwrap_or_else(|| under(&self.prefix, &self.net_dir))
    }

    /// The plugins' directory on the host, as seen from here.
    pub fn mounted_bin_dir(&self) -> PathBuf {
        self.mounted_bin.clone().unwrap_or_else(|| under(&self.prefix, &self.bin_dir))
    }

    /// The wanted entry, with the kubeconfig's path on the host filled in.
    pub fn wanted(&self) -> Result<WantedEntry, ContractError> {
        let text = match &self.template {
            Some(Template::Text(text)) => text.clone(),
            Some(Template::File(path)) => std::fs::read_to_string(path)
                .map_err(|source| ContractError::File { path: path.clone(), source })?,
            None => {
                return Err(ContractError::Missing {
                    name: "CNI_NETWORK_CONFIG",
                    problem: "the mesh entry to install (or CNI_NETWORK_CONFIG_FILE)",
                });
            }
        };
        let kubeconfig = self.net_dir.join(&self.kubeconfig);
        Ok(WantedEntry::from_template(&text, &kubeconfig.to_string_lossy(), Place::Last)?)
    }

    /// What the kubeconfig of this plugin must hold.
    pub fn spec(&self, plugin: &str) -> Result<Spec, ContractError> {
        let Some(Server { protocol, host, port }) = self.server.clone() else {
            let problem = "the plugin's kubeconfig needs the API server's address";
            return Err(ContractError::Missing { name: "KUBERNETES_SERVICE_HOST", problem });
        };
        Ok(Spec {
            protocol,
            host,
            port,
            plugin: plugin.to_owned(),
            token: self.service_account.join("token"),
            trust: self.trust.clone(),
            dir: self.mounted_net_dir(),
            name: self.kubeconfig.clone(),
            mode: self.mode,
        })
    }
}

/// `path` of the host below the mount prefix.
fn under(prefix: &Path, path: &Path) -> PathBuf {
    match path.strip_prefix("/") {
        Ok(relative) if !prefix.as_os_str().is_empty() => prefix.join(relative),
        _ => path.to_owned(),
    }
}

fn kubeconfig_name(value: Option<String>) -> Result<OsString, ContractError> {
    let value = value.unwrap_or_else(|| "ZZZ-linkerd-cni-kubeconfig".to_owned());
    let name = "KUBECONFIG_FILE_NAME";
    if value.contains('/') || value.starts_with('.') {
        return Err(ContractError::Variable { name, value, problem: "must be a plain file name" });
    }
    if FileKind::of(OsStr::new(&value)).is_some() {
        let problem = "container runtimes would read a file of this name as a network";
        return Err(ContractError::Variable { name, value, problem });
    }
    Ok(value.into())
}

fn mode(value: Option<String>) -> Result<u32, ContractError> {
    let value = value.unwrap_or_else(|| "600".to_owned());
    match u32::from_str_radix(&value, 8) {
        Ok(mode) if mode & 0o400 != 0 && mode <= 0o777 => Ok(mode),
        _ => Err(ContractError::Variable {
            name: "KUBECONFIG_MODE",
            value,
            problem: "must be an octal file mode that the owner can read, such as 600",
        }),
    }
}

fn server(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Server>, ContractError> {
    let Some(host) = get("KUBERNETES_SERVICE_HOST") else { return Ok(None) };
    let protocol = get("KUBERNETES_SERVICE_PROTOCOL").unwrap_or_else(|| "https".to_owned());
    let port = get("KUBERNETES_SERVICE_PORT").unwrap_or_else(|| "443".to_owned());
    match port.parse() {
        Ok(port) if port > 0 => Ok(Some(Server { protocol, host, port })),
        _ => Err(ContractError::Variable {
            name: "KUBERNETES_SERVICE_PORT",
            value: port,
            problem: "must be a port number",
        }),
    }
}

/// Something the entry needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// In place and current.
    Current,
    /// An older one is in place, since this went wrong.
    Old(String),
    /// None is in place, since this went wrong.
    Missing(String),
}

impl Part {
    /// What went wrong.
    pub fn problem(&self) -> Option<&str> {
        match self {
            Self::Current => None,
            Self::Old(problem) | Self::Missing(problem) => Some(problem),
        }
    }

    fn of(result: Result<(), String>, older: bool) -> Self {
        match result {
            Ok(()) => Self::Current,
            Err(problem) if older => Self::Old(problem),
            Err(problem) => Self::Missing(problem),
        }
    }
}

/// Whether configs may carry the entry now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Yes: keep it in every config.
    Keep,
    /// No: every pod would fail. Entries that this agent wrote go.
    Withdraw,
}

/// Decides from what the entry needs. An older binary or kubeconfig still serves pods; none at all fails each of them.
pub fn verdict(binary: &Part, kubeconfig: &Part) -> Verdict {
    match (binary, kubeconfig) {
        (Part::Missing(_), _) | (_, Part::Missing(_)) => Verdict::Withdraw,
        _ => Verdict::Keep,
    }
}

/// The state before configs are touched.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The entry; knows the versions that its plugin supports, if the plugin said so.
    pub wanted: WantedEntry,
    /// The binaries in place.
    pub installed: Vec<Installed>,
    /// The plugin's binary.
    pub binary: Part,
    /// Its kubeconfig.
    pub kubeconfig: Part,
    /// Why the plugin did not say which versions it supports. Then any list gets the entry.
    pub unasked: Option<String>,
}

impl Prepared {
    /// See [`verdict`].
    pub fn verdict(&self) -> Verdict {
        verdict(&self.binary, &self.kubeconfig)
    }

    /// The plan for any config file in this state.
    pub fn plan(&self, kind: FileKind, bytes: &[u8], options: Options) -> Plan {
        match self.verdict() {
            Verdict::Keep => plan::plan(kind, bytes, &self.wanted, options),
            Verdict::Withdraw => plan::unplan(kind, bytes, Remove::Exactly(&self.wanted)),
        }
    }
}

/// Puts the binaries and the kubeconfig in place, in this order, and asks the plugin for its versions.
pub async fn prepare(contract: &Contract, timeout: Duration) -> Result<Prepared, ContractError> {
    let wanted = contract.wanted()?;
    let spec = contract.spec(wanted.plugin())?;
    let bin_dir = contract.mounted_bin_dir();
    for dir in [&bin_dir, &spec.dir] {
        // A directory that is not there is reported by what comes next.
        let _ = super::put::clean(dir);
    }
    let path = bin_dir.join(wanted.plugin());
    let copied = binaries::install(&contract.source_dir, &bin_dir);
    let executable = binaries::is_executable(&path);
    let (installed, result) = match copied {
        Ok(installed) if executable => (installed, Ok(())),
        Ok(installed) => (installed, Err(format!("{} is not there or not executable", path.display()))),
        Err(error) => (Vec::new(), Err(error.to_string())),
    };
    let binary = Part::of(result, executable);
    let (wanted, unasked) = match binaries::supported_versions(&path, timeout).await {
        Ok(versions) => (wanted.with_versions(versions), None),
        Err(error) => (wanted, Some(error.to_string())),
    };
    let older = spec.path().is_file();
    let refreshed = spec.refresh().map(|_| ()).map_err(|error| error.to_string());
    let kubeconfig = Part::of(refreshed, older);
    Ok(Prepared { wanted, installed, binary, kubeconfig, unasked })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn contract(variables: &[(&str, &str)]) -> Result<Contract, ContractError> {
        let variables: BTreeMap<_, _> = variables.iter().copied().collect();
        Contract::from_env(&|name| variables.get(name).map(|value| (*value).to_owned()))
    }

    #[test]
    fn defaults_are_linkerd_s() {
        let contract = contract(&[("DEST_CNI_NET_DIR", "")]).unwrap();
        assert_eq!(contract.mounted_net_dir(), Path::new("/host/etc/cni/net.d"));
        assert_eq!(contract.mounted_bin_dir(), Path::new("/host/opt/cni/bin"));
        assert_eq!(contract.source_dir, Path::new("/opt/cni/bin"));
        assert_eq!(
            (contract.kubeconfig.to_str(), contract.mode),
            (Some("ZZZ-linkerd-cni-kubeconfig"), 0o600)
        );
        assert_eq!(contract.trust, Trust::Ca(format!("{SERVICE_ACCOUNT_DIR}/ca.crt").into()));
        assert!(matches!(contract.wanted(), Err(ContractError::Missing { name: "CNI_NETWORK_CONFIG", .. })));
        assert!(matches!(contract.spec("x"), Err(ContractError::Missing { .. })));
    }

    #[test]
    fn everything_can_be_set() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), r#"{"type":"from-file"}"#).unwrap();
        let path = file.path().to_str().unwrap();
        let text = r#"{"type":"linkerd-cni","kubernetes":{"kubeconfig":"__KUBECONFIG_FILEPATH__"}}"#;
        let set = contract(&[
            ("CONTAINER_MOUNT_PREFIX", "/mnt"),
            ("DEST_CNI_NET_DIR", "/var/lib/cni"),
            ("DEST_CNI_BIN_DIR", "/usr/libexec/cni"),
            ("CONTAINER_CNI_BIN_DIR", "/plugins"),
            ("CNI_NETWORK_CONFIG", text),
            ("CNI_NETWORK_CONFIG_FILE", path),
            ("KUBECONFIG_FILE_NAME", "ZZZ-mine"),
            ("KUBECONFIG_MODE", "640"),
            ("SKIP_TLS_VERIFY", "true"),
            ("KUBERNETES_SERVICE_HOST", "fd00::1"),
            ("KUBERNETES_SERVICE_PORT", "6443"),
        ])
        .unwrap();
        assert_eq!(set.mounted_net_dir(), Path::new("/mnt/var/lib/cni"));
        assert_eq!(set.mounted_bin_dir(), Path::new("/mnt/usr/libexec/cni"));
        let wanted = set.wanted().unwrap();
        assert_eq!(
            wanted.text(),
            r#"{"type":"linkerd-cni","kubernetes":{"kubeconfig":"/var/lib/cni/ZZZ-mine"}}"#
        );
        let spec = set.spec(wanted.plugin()).unwrap();
        assert_eq!((spec.mode, spec.port, spec.path()), (0o640, 6443, "/mnt/var/lib/cni/ZZZ-mine".into()));
        assert_eq!(spec.trust, Trust::Nothing);
        // The text wins over the file; the file alone serves as well.
        let file_only = contract(&[("CNI_NETWORK_CONFIG_FILE", path)]).unwrap();
        assert_eq!(file_only.wanted().unwrap().plugin(), "from-file");
        let bare = contract(&[("CONTAINER_MOUNT_PREFIX", "/")]).unwrap();
        assert_eq!(bare.mounted_net_dir(), Path::new("/etc/cni/net.d"));
    }

    #[test]
    fn nonsense_is_named() {
        for (name, value, problem) in [
            ("DEST_CNI_NET_DIR", "net.d", "absolute"),
            ("KUBECONFIG_FILE_NAME", "a/b", "plain file name"),
            ("KUBECONFIG_FILE_NAME", "zz.conf", "as a network"),
            ("KUBECONFIG_MODE", "rw", "octal"),
            ("KUBECONFIG_MODE", "7777", "octal"),
            ("KUBECONFIG_MODE", "066", "octal"),
        ] {
            let error = contract(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(problem), "{error}");
        }
        let port = contract(&[("KUBERNETES_SERVICE_HOST", "h"), ("KUBERNETES_SERVICE_PORT", "0")]);
        assert!(port.unwrap_err().to_string().contains("KUBERNETES_SERVICE_PORT"));
        let wanted = contract(&[("CNI_NETWORK_CONFIG", "{")]).unwrap().wanted();
        assert!(
            wanted.unwrap_err().to_string().starts_with("CNI_NETWORK_CONFIG: the mesh entry cannot be read")
        );
    }

    /// istio#36821: a failing installer left its entry behind. istio#55894: an entry without a usable kubeconfig.
    #[test]
    fn istio_36821_the_entry_goes_when_what_it_needs_cannot_be_kept() {
        let (old, missing) = (Part::Old("x".into()), Part::Missing("x".into()));
        for (binary, kubeconfig, expected) in [
            (&Part::Current, &Part::Current, Verdict::Keep),
            (&old, &Part::Current, Verdict::Keep),
            (&Part::Current, &old, Verdict::Keep),
            (&missing, &Part::Current, Verdict::Withdraw),
            (&Part::Current, &missing, Verdict::Withdraw),
            (&missing, &old, Verdict::Withdraw),
        ] {
            assert_eq!(verdict(binary, kubeconfig), expected, "{binary:?} {kubeconfig:?}");
            let wanted = WantedEntry::from_text(r#"{"type":"m"}"#, Place::Last).unwrap();
            let prepared = Prepared {
                wanted,
                installed: Vec::new(),
                binary: binary.clone(),
                kubeconfig: kubeconfig.clone(),
                unasked: None,
            };
            let (bare, full) = (
                r#"{"name":"n","plugins":[{"type":"a"}]}"#,
                r#"{"name":"n","plugins":[{"type":"a"},{"type":"m"}]}"#,
            );
            let (from, to) = if expected == Verdict::Keep { (bare, full) } else { (full, bare) };
            let plan = prepared.plan(FileKind::Conflist, from.as_bytes(), Options::default());
            assert_eq!(plan, Plan::Write(to.into()));
        }
    }
}
