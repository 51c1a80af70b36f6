//! The kubeconfig that the mesh's CNI plugin uses, kept as fresh as the service account's token.
//!
//! The kubelet rotates a projected token by swapping the `..data` link of its directory. A plugin with a dead token
//! fails every pod of the node, so the file follows within a second, whole at every moment.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::net::Ipv6Addr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use notify::Watcher as _;
use tokio::sync::{Notify, watch};

use super::put::put;

/// Where Kubernetes mounts a pod's token.
pub const SERVICE_ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// How often the sources are compared with the file although no event came: a net under the watch.
const RESYNC: Duration = Duration::from_secs(30);
/// The same where the directory cannot be watched.
const POLL: Duration = Duration::from_millis(500);

/// How the plugin is to check the API server's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// By this CA file.
    Ca(PathBuf),
    /// Not at all (`SKIP_TLS_VERIFY=true`).
    Nothing,
}

/// What goes into the file, and where it goes.
#[derive(Clone, Debug)]
pub struct Spec {
    /// `https` unless told otherwise.
    pub protocol: String,
    /// Host name or address of the API server, IPv6 without brackets.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// The plugin's type; user and context are named after it, as its own installer does.
    pub plugin: String,
    /// The token's file.
    pub token: PathBuf,
    /// The certificate's.
    pub trust: Trust,
    /// Directory of the kubeconfig, as seen from here.
    pub dir: PathBuf,
    /// Its name, which must not look like a CNI config.
    pub name: OsString,
    /// Its mode; it holds a token, so 0600 unless told otherwise.
    pub mode: u32,
}

/// Why there is no fresh kubeconfig.
#[derive(Debug, thiserror::Error)]
pub enum KubeconfigError {
    /// A source cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Source {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The token's file is empty.
    #[error("{} is empty: the service account has no token (yet)", path.display())]
    NoToken {
        /// The file.
        path: PathBuf,
    },
    /// The CA file holds no certificate.
    #[error("{} holds no PEM certificate", path.display())]
    NoCertificate {
        /// The file.
        path: PathBuf,
    },
    /// The kubeconfig cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

/// What one look at the sources did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refreshed {
    /// The file was as it should be.
    Unchanged,
    /// It was written.
    Written,
}

/// The state of the kubeconfig, for readiness and `cni status`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KubeconfigState {
    /// Written and equal to its sources.
    Fresh,
    /// Why not. The older file, if there is one, stays.
    Stale(String),
}

/// The URL of an API server; only an IPv6 literal is put in brackets.
pub fn server_url(protocol: &str, host: &str, port: u16) -> String {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    match bare.parse::<Ipv6Addr>() {
        Ok(_) => format!("{protocol}://[{bare}]:{port}"),
        Err(_) => format!("{protocol}://{host}:{port}"),
    }
}

/// The kubeconfig's text. `ca` is the PEM file; `None` switches the check off.
pub fn render(spec: &Spec, token: &str, ca: Option<&[u8]>) -> String {
    let quoted = |text: &str| serde_json::Value::from(text).to_string(); // JSON strings are YAML strings
    let server = quoted(&server_url(&spec.protocol, &spec.host, spec.port));
    let trust = match ca {
        Some(pem) => format!("certificate-authority-data: {}", STANDARD.encode(pem)),
        None => "insecure-skip-tls-verify: true".to_owned(),
    };
    let (user, context) = (quoted(&spec.plugin), quoted(&format!("{}-context", spec.plugin)));
    let mut text = String::with_capacity(4096);
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        "# For the CNI plugin; written by nobypass, which follows the service account's token.\n\
         apiVersion: v1\nkind: Config\n\
         clusters:\n- name: local\n  cluster:\n    server: {server}\n    {trust}\n\
         users:\n- name: {user}\n  user:\n    token: {token}\n\
         contexts:\n- name: {context}\n  context:\n    cluster: local\n    user: {user}\n\
         current-context: {context}\n",
        token = quoted(token),
    );
    text
}

impl Spec {
    /// Where the file is, as seen from here.
    pub fn path(&self) -> PathBuf {
        self.dir.join(&self.name)
    }

    /// Brings the file in line with its sources; writes only when they differ.
    pub fn refresh(&self) -> Result<Refreshed, KubeconfigError> {
        let token = read(&self.token)?;
        let token = String::from_utf8_lossy(&token);
        let token = token.trim();
        if token.is_empty() {
            return Err(KubeconfigError::NoToken { path: self.token.clone() });
        }
        let ca = match &self.trust {
            Trust::Nothing => None,
            Trust::Ca(path) => {
                let pem = read(path)?;
                if !pem.windows(27).any(|window| window == b"-----BEGIN CERTIFICATE-----") {
                    return Err(KubeconfigError::NoCertificate { path: path.clone() });
                }
                Some(pem)
            }
        };
        let text = render(self, token, ca.as_deref());
        if self.is_there(&text) {
            return Ok(Refreshed::Unchanged);
        }
        put(&self.dir, &self.name, self.mode, |file| file.write_all(text.as_bytes()))
            .map_err(|source| KubeconfigError::Write { path: self.path(), source })?;
        Ok(Refreshed::Written)
    }

    fn is_there(&self, text: &str) -> bool {
        let path = self.path();
        let mode = std::fs::symlink_metadata(&path).ok().filter(std::fs::Metadata::is_file);
        mode.is_some_and(|found| found.permissions().mode() & 0o7777 == self.mode)
            && std::fs::read(&path).is_ok_and(|found| found == text.as_bytes())
    }

    /// Keeps the file fresh until `stop` turns true or its sender is gone; tells `state` each change. An error never
    /// ends it: it is reported and tried again.
    pub async fn follow(self, state: watch::Sender<KubeconfigState>, mut stop: watch::Receiver<bool>) {
        let spec = Arc::new(self);
        let dir = spec.token.parent().map(Path::to_path_buf).unwrap_or_default();
        let changed = Arc::new(Notify::new());
        let mut watcher = None;
        loop {
            // Watch first, then look, so that nothing is missed in between.
            if watcher.is_none() {
                watcher = watch_dirs([&dir, &spec.dir], &changed);
            }
            let refreshed = tokio::task::spawn_blocking({
                let spec = Arc::clone(&spec);
                move || spec.refresh()
            });
            report(&state, refreshed.await.ok(), &spec);
            let pause = if watcher.is_some() { RESYNC } else { POLL };
            tokio::select! {
                () = changed.notified() => {}
                () = tokio::time::sleep(pause) => {}
                ended = stop.wait_for(|stop| *stop) => {
                    let _ = ended; // true, or nobody is left to say so
                    return;
                }
            }
            // A directory that is made again must be watched again.
            if !(dir.exists() && spec.dir.exists()) {
                watcher = None;
            }
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, KubeconfigError> {
    std::fs::read(path).map_err(|source| KubeconfigError::Source { path: path.to_owned(), source })
}

/// Watches the sources, and the kubeconfig's own directory in case somebody removes the file.
fn watch_dirs(dirs: [&Path; 2], changed: &Arc<Notify>) -> Option<notify::RecommendedWatcher> {
    let changed = Arc::clone(changed);
    // Errors of the watch count as events: the look that follows is cheap.
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        if event.is_ok_and(|event| event.kind.is_access()) {
            return; // our own reading
        }
        changed.notify_one();
    })
    .inspect_err(|error| tracing::warn!(%error, "cannot watch the service account's token; polling it"))
    .ok()?;
    for dir in dirs {
        watcher.watch(dir, notify::RecursiveMode::NonRecursive).ok()?;
    }
    Some(watcher)
}

fn report(
    state: &watch::Sender<KubeconfigState>,
    refreshed: Option<Result<Refreshed, KubeconfigError>>,
    spec: &Spec,
) {
    let now = match refreshed {
        Some(Ok(Refreshed::Written)) => {
            tracing::info!(path = %spec.path().display(), "kubeconfig written");
            KubeconfigState::Fresh
        }
        Some(Ok(Refreshed::Unchanged)) => KubeconfigState::Fresh,
        Some(Err(error)) => KubeconfigState::Stale(error.to_string()),
        None => KubeconfigState::Stale("the writer of the kubeconfig failed".to_owned()),
    };
    state.send_if_modified(|known| {
        let differs = *known != now;
        if let (true, KubeconfigState::Stale(reason)) = (differs, &now) {
            tracing::warn!(path = %spec.path().display(), %reason, "kubeconfig is not fresh");
        }
        *known = now;
        differs
    });
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    const PEM: &str = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";

    /// A projected volume as the kubelet makes it: files are links into `..data`, which is a link that is swapped.
    struct Volume(tempfile::TempDir);

    impl Volume {
        fn new() -> Self {
            let volume = Self(tempfile::tempdir().unwrap());
            volume.rotate("..1", "token-1");
            for name in ["token", "ca.crt"] {
                symlink(format!("..data/{name}"), volume.0.path().join(name)).unwrap();
            }
            volume
        }

        fn rotate(&self, version: &str, token: &str) {
            let root = self.0.path();
            fs::create_dir(root.join(version)).unwrap();
            fs::write(root.join(version).join("token"), token).unwrap();
            fs::write(root.join(version).join("ca.crt"), PEM).unwrap();
            symlink(version, root.join("..data_tmp")).unwrap();
            fs::rename(root.join("..data_tmp"), root.join("..data")).unwrap();
        }
    }

    fn spec(volume: &Volume, dir: &Path) -> Spec {
        Spec {
            protocol: "https".into(),
            host: "10.0.0.1".into(),
            port: 443,
            plugin: "linkerd-cni".into(),
            token: volume.0.path().join("token"),
            trust: Trust::Ca(volume.0.path().join("ca.crt")),
            dir: dir.to_owned(),
            name: "ZZZ-linkerd-cni-kubeconfig".into(),
            mode: 0o600,
        }
    }

    /// linkerd2#13760: only IPv6 literals are bracketed.
    #[test]
    fn linkerd2_13760_server_urls() {
        for (host, expected) in [
            ("10.0.0.1", "https://10.0.0.1:443"),
            ("fd00::1", "https://[fd00::1]:443"),
            ("[fd00::1]", "https://[fd00::1]:443"),
            ("::ffff:10.0.0.1", "https://[::ffff:10.0.0.1]:443"),
            ("kubernetes.default.svc", "https://kubernetes.default.svc:443"),
        ] {
            assert_eq!(server_url("https", host, 443), expected);
        }
    }

    #[test]
    fn the_layout_that_linkerd_s_plugin_reads() {
        let (volume, dir) = (Volume::new(), tempfile::tempdir().unwrap());
        let spec = spec(&volume, dir.path());
        let text = render(&spec, "a.b\"c", Some(PEM.as_bytes()));
        for line in [
            "- name: local",
            "    server: \"https://10.0.0.1:443\"",
            "    certificate-authority-data: LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCk1JSUIKLS0tLS1FTkQgQ0VSVElGSUNBVEUtLS0tLQo=",
            "- name: \"linkerd-cni\"",
            "    token: \"a.b\\\"c\"",
            "- name: \"linkerd-cni-context\"",
            "    cluster: local",
            "    user: \"linkerd-cni\"",
            "current-context: \"linkerd-cni-context\"",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(render(&spec, "t", None).contains("    insecure-skip-tls-verify: true\n"));
    }

    #[test]
    fn refreshing_writes_only_what_changed_with_mode_0600() {
        let (volume, dir) = (Volume::new(), tempfile::tempdir().unwrap());
        let spec = spec(&volume, dir.path());
        assert_eq!(spec.refresh().unwrap(), Refreshed::Written);
        assert_eq!(spec.refresh().unwrap(), Refreshed::Unchanged);
        assert_eq!(fs::metadata(spec.path()).unwrap().permissions().mode() & 0o777, 0o600);
        volume.rotate("..2", "token-2");
        assert_eq!(spec.refresh().unwrap(), Refreshed::Written);
        assert!(fs::read_to_string(spec.path()).unwrap().contains("\"token-2\""));
        fs::set_permissions(spec.path(), fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(spec.refresh().unwrap(), Refreshed::Written, "another mode is put right");
        // A link in its place is replaced, not followed.
        let elsewhere = dir.path().join("elsewhere");
        fs::rename(spec.path(), &elsewhere).unwrap();
        symlink(&elsewhere, spec.path()).unwrap();
        assert_eq!(spec.refresh().unwrap(), Refreshed::Written);
        assert!(fs::symlink_metadata(spec.path()).unwrap().is_file());
    }

    #[test]
    fn bad_sources_keep_the_old_file() {
        let (volume, dir) = (Volume::new(), tempfile::tempdir().unwrap());
        let spec = spec(&volume, dir.path());
        spec.refresh().unwrap();
        let before = fs::read(spec.path()).unwrap();
        volume.rotate("..2", " \n");
        assert!(matches!(spec.refresh(), Err(KubeconfigError::NoToken { .. })));
        fs::remove_file(volume.0.path().join("..data")).unwrap();
        assert!(matches!(spec.refresh(), Err(KubeconfigError::Source { .. })));
        volume.rotate("..3", "token-3");
        fs::write(volume.0.path().join("..3/ca.crt"), "nothing").unwrap();
        assert!(matches!(spec.refresh(), Err(KubeconfigError::NoCertificate { .. })));
        assert_eq!(fs::read(spec.path()).unwrap(), before);
    }

    /// linkerd2#12573, rke2#10271, amazon-vpc-cni-k8s#1831: a rotated token. linkerd2#4807: never half a file.
    /// amazon-vpc-cni-k8s#1831, linkerd2#14643, #11478, istio#57438: a token that is not valid any more.
    #[tokio::test]
    async fn linkerd2_12573_follows_each_rotation() {
        let (volume, dir) = (Volume::new(), tempfile::tempdir().unwrap());
        let spec = spec(&volume, dir.path());
        let path = spec.path();
        let (state, mut seen) = watch::channel(KubeconfigState::Stale("start".into()));
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(spec.follow(state, stopped));
        let limit = Duration::from_secs(10); // a hang bound; the resync alone would take 30 s
        tokio::time::timeout(limit, seen.wait_for(|state| *state == KubeconfigState::Fresh))
            .await
            .unwrap()
            .unwrap();
        for round in 2..6 {
            let token = format!("token-{round}");
            volume.rotate(&format!("..{round}"), &token);
            let written = async {
                loop {
                    let text = fs::read_to_string(&path).unwrap();
                    assert!(
                        text.ends_with("current-context: \"linkerd-cni-context\"\n"),
                        "whole at every moment"
                    );
                    if text.contains(&token) {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::time::timeout(limit, written).await.unwrap();
        }
        fs::remove_file(&path).unwrap();
        let again = async {
            while !path.exists() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(limit, again).await.expect("a removed file is written again");
        stop.send(true).unwrap();
        tokio::time::timeout(limit, task).await.unwrap().unwrap();
    }
}
