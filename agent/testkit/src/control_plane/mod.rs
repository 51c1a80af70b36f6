//! A real control plane: etcd and kube-apiserver, with certificates of its own, RBAC on, in a private directory.
//!
//! No controller runs: nothing makes service accounts, binds pods or empties namespaces. The programs are those of
//! envtest's convention: `TEST_ASSET_ETCD` and `TEST_ASSET_KUBE_APISERVER`, else those in `KUBEBUILDER_ASSETS`.
//! `cargo xtask test --tier cluster` builds them and says where they are.

mod audit;
mod pki;
mod request;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

use anyhow::{Context as _, Result, anyhow, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::port::Port;
use crate::proc::{self, Proc};
use crate::wait;
pub use audit::Asked;
use pki::{Authority, Signed};
use request::Https;

/// How much of a log an error shows.
const LOG_LINES: usize = 15;

/// A running control plane. Dropping it kills both processes and removes their directory.
pub struct ControlPlane {
    // Processes come before their directory: fields are dropped in this order.
    processes: Mutex<[Process; 2]>,
    program: PathBuf,
    flags: Vec<String>,
    files: Files,
    authority: Authority,
    admin: Https,
    url: String,
    ports: [Port; 3],
    dir: TempDir,
}

impl std::fmt::Debug for ControlPlane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlPlane").field("url", &self.url).field("dir", &self.dir).finish_non_exhaustive()
    }
}

/// A program by its name in envtest's convention, or what to do.
fn program(name: &str, variable: &str) -> Result<PathBuf> {
    let named = std::env::var_os(variable).map(PathBuf::from);
    let found = named.or_else(|| Some(Path::new(&std::env::var_os("KUBEBUILDER_ASSETS")?).join(name)));
    let found = found.with_context(|| {
        format!(
            "{name}: neither {variable} nor KUBEBUILDER_ASSETS is set: run `cargo xtask test --tier cluster`, or set one"
        )
    })?;
    if found.is_file() { Ok(found) } else { bail!("no {name} at {}", found.display()) }
}

impl ControlPlane {
    /// The one of this process, started when first asked for: tests in it use namespaces of their own. It ends with
    /// the process.
    pub fn shared() -> Result<&'static Self> {
        static SHARED: OnceLock<Result<ControlPlane, String>> = OnceLock::new();
        let shared = SHARED.get_or_init(|| {
            let made = Self::start().and_then(|plane| {
                plane.remove_directory_at_exit()?;
                Ok(plane)
            });
            made.map_err(|error| format!("{error:#}"))
        });
        shared.as_ref().map_err(|error| anyhow!("no control plane: {error}"))
    }

    /// Starts etcd and kube-apiserver and waits until both are ready.
    pub fn start() -> Result<Self> {
        Self::start_with(&[])
    }

    /// The same, with more flags for kube-apiserver.
    pub fn start_with(flags: &[&str]) -> Result<Self> {
        let etcd = program("etcd", "TEST_ASSET_ETCD")?;
        let apiserver = program("kube-apiserver", "TEST_ASSET_KUBE_APISERVER")?;
        let dir = tempfile::Builder::new().prefix("nobypass-cluster-").tempdir()?;
        let ports = [Port::reserve()?, Port::reserve()?, Port::reserve()?];
        let flags: Vec<String> = flags.iter().map(ToString::to_string).collect();
        let authority = Authority::new()?;
        let admin = authority.client("admin", Some("system:masters"))?;
        let files = Files::write(dir.path(), &authority)?;
        let processes = [
            Process::start(etcd_command(&etcd, dir.path(), &ports), &files.etcd_log)?,
            Process::start(apiserver_command(&apiserver, &files, &ports, &flags), &files.apiserver_log)?,
        ];
        let [_, _, secure] = &ports;
        let plane = Self {
            admin: Https::new(secure.address(), &authority.certificate, &admin)?,
            url: format!("https://{}", secure.address()),
            processes: Mutex::new(processes),
            program: apiserver,
            flags,
            files,
            authority,
            ports,
            dir,
        };
        plane.wait_ready()?;
        Ok(plane)
    }

    /// Ends kube-apiserver, and starts it anew on the same port: its cache is empty then, so that watches of older
    /// resource versions have expired.
    pub fn restart_apiserver(&self) -> Result<()> {
        let command = apiserver_command(&self.program, &self.files, &self.ports, &self.flags);
        {
            let mut processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
            let [_, apiserver] = &mut *processes;
            // Asked to end, it would wait for the watches of its clients.
            apiserver.proc.kill();
            *apiserver = Process::start(command, &self.files.apiserver_log)?;
        }
        self.wait_ready()
    }

    fn wait_ready(&self) -> Result<()> {
        let mut processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut last = String::from("none");
        let mut ended = None;
        let ready = wait::until("/readyz of kube-apiserver", wait::LONG, || {
            ended =
                processes.iter_mut().find_map(|process| (!process.proc.is_running()).then(|| process.tail()));
            match self.admin.send("GET", "/readyz", "") {
                _ if ended.is_some() => return Some(()),
                Ok((200, _)) => return Some(()),
                Ok((code, body)) => last = format!("{code}: {body}"),
                Err(error) => last = format!("{error:#}"),
            }
            None
        });
        if let Some(log) = ended {
            bail!("a process of the control plane has ended:\n{log}");
        }
        ready.with_context(|| {
            let logs = processes.iter().map(Process::tail).collect::<Vec<_>>().join("\n");
            format!("last answer: {last}\n{logs}")
        })
    }

    /// A process that outlives us by the time that it takes to remove the directory: statics are not dropped.
    fn remove_directory_at_exit(&self) -> Result<()> {
        let mut command = Command::new("sh");
        command.args(["-c", "read -r _; until rm -rf \"$0\"; do sleep 0.1; done"]).arg(self.dir.path());
        // Dropping it would kill it; the end of its input tells it that we are gone.
        std::mem::forget(proc::spawn_orphan(command)?);
        Ok(())
    }

    /// The private directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Process ids of etcd and kube-apiserver.
    #[must_use]
    pub fn pids(&self) -> [u32; 2] {
        let processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        processes.each_ref().map(|process| process.proc.pid())
    }

    /// `https://127.0.0.1:PORT`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Kubeconfig of a member of `system:masters`, as JSON, which is YAML as well.
    pub fn admin_kubeconfig(&self) -> Result<String> {
        self.user_kubeconfig("admin", Some("system:masters"))
    }

    /// Kubeconfig of a user with a client certificate; RBAC says what it may.
    pub fn user_kubeconfig(&self, user: &str, group: Option<&str>) -> Result<String> {
        let Signed { certificate, key } = self.authority.client(user, group)?;
        Ok(self.kubeconfig(&json!({
            "client-certificate-data": STANDARD.encode(certificate),
            "client-key-data": STANDARD.encode(key),
        })))
    }

    /// Kubeconfig with a token of a service account, which is made if it is missing, as is its namespace.
    pub fn service_account_kubeconfig(&self, namespace: &str, name: &str) -> Result<String> {
        let object = |kind: &str, name: &str| {
            json!({ "apiVersion": "v1", "kind": kind, "metadata": { "name": name } }).to_string()
        };
        let accounts = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
        for (path, object) in [
            ("/api/v1/namespaces", object("Namespace", namespace)),
            (&accounts, object("ServiceAccount", name)),
        ] {
            match self.admin.send("POST", path, &object)? {
                (201 | 409, _) => {}
                (code, body) => bail!("POST {path}: {code}: {body}"),
            }
        }
        let request = json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {} });
        let answer = self.admin.post(&format!("{accounts}/{name}/token"), &request)?;
        Ok(self.kubeconfig(&json!({ "token": answer["status"]["token"] })))
    }

    fn kubeconfig(&self, user: &Value) -> String {
        let authority = STANDARD.encode(&self.authority.certificate);
        let cluster = json!({ "server": self.url, "certificate-authority-data": authority });
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{ "name": "test", "cluster": cluster }],
            "users": [{ "name": "test", "user": user }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        })
        .to_string()
    }

    /// What a service account has asked for so far, as the API server noted it.
    pub fn asked_by(&self, namespace: &str, account: &str) -> Result<Vec<Asked>> {
        let user = format!("system:serviceaccount:{namespace}:{account}");
        audit::read(&self.files.audit_log, &user)
    }

    /// Creates an object as admin: POST to `path`.
    pub fn create(&self, path: &str, object: &Value) -> Result<Value> {
        self.admin.post(path, object)
    }
}

/// A process and where it logs.
#[derive(Debug)]
struct Process {
    proc: Proc,
    log: PathBuf,
}

impl Process {
    fn start(mut command: Command, log: &Path) -> Result<Self> {
        let file = fs::File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
        command.stderr(file);
        Ok(Self { proc: proc::spawn(command)?, log: log.to_path_buf() })
    }

    /// The end of its log.
    fn tail(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines.iter().skip(lines.len().saturating_sub(LOG_LINES)).copied().collect::<Vec<_>>().join("\n")
    }
}

/// What the processes read and write.
struct Files {
    authority: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
    token_key: PathBuf,
    token_public: PathBuf,
    audit_policy: PathBuf,
    audit_log: PathBuf,
    etcd_log: PathBuf,
    apiserver_log: PathBuf,
}

impl Files {
    fn write(dir: &Path, authority: &Authority) -> Result<Self> {
        let files = Self {
            authority: dir.join("ca.crt"),
            certificate: dir.join("server.crt"),
            key: dir.join("server.key"),
            token_key: dir.join("tokens.key"),
            token_public: dir.join("tokens.pub"),
            audit_policy: dir.join("audit.json"),
            audit_log: dir.join("audit.log"),
            etcd_log: dir.join("etcd.log"),
            apiserver_log: dir.join("kube-apiserver.log"),
        };
        let server = authority.server()?;
        let (token_key, token_public) = pki::token_key()?;
        let audit = audit::policy();
        for (path, text) in [
            (&files.authority, &authority.certificate),
            (&files.certificate, &server.certificate),
            (&files.key, &server.key),
            (&files.token_key, &token_key),
            (&files.token_public, &token_public),
            (&files.audit_policy, &audit),
        ] {
            fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(files)
    }
}

fn etcd_command(program: &Path, dir: &Path, ports: &[Port; 3]) -> Command {
    let [client, peer, _] = ports.each_ref().map(|port| format!("http://{}", port.address()));
    let mut command = Command::new(program);
    command.arg("--data-dir").arg(dir.join("etcd")).args([
        "--name=test",
        "--log-level=warn",
        // Nothing has to survive a crash.
        "--unsafe-no-fsync",
        &format!("--listen-client-urls={client}"),
        &format!("--advertise-client-urls={client}"),
        &format!("--listen-peer-urls={peer}"),
        &format!("--initial-advertise-peer-urls={peer}"),
        &format!("--initial-cluster=test={peer}"),
    ]);
    command
}

fn apiserver_command(
    program: &Path,
    files: &Files,
    [etcd, _, port]: &[Port; 3],
    flags: &[String],
) -> Command {
    let mut command = Command::new(program);
    for (flag, path) in [
        ("--client-ca-file", &files.authority),
        ("--tls-cert-file", &files.certificate),
        ("--tls-private-key-file", &files.key),
        ("--service-account-signing-key-file", &files.token_key),
        ("--service-account-key-file", &files.token_public),
        ("--audit-policy-file", &files.audit_policy),
        ("--audit-log-path", &files.audit_log),
    ] {
        command.arg(flag).arg(path);
    }
    command.args([
        &format!("--etcd-servers=http://{}", etcd.address()),
        &format!("--secure-port={}", port.address().port()),
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        "--endpoint-reconciler-type=none",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--authorization-mode=Node,RBAC",
        // Without a controller no namespace has a service account, and pods would be refused.
        "--disable-admission-plugins=ServiceAccount",
        "--allow-privileged=true",
        "--profiling=false",
        // An answer comes after its line.
        "--audit-log-mode=blocking",
    ]);
    command.args(flags);
    command
}
