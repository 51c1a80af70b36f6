//! From another writer's `close` or `rename` until the patched config can be read, for `nobypass cni run` and, in the
//! same run, for another installer with the environment of linkerd's.
//!
//! `cargo bench -p nobypass --bench cni_latency` measures nobypass alone.
//!
//! | variable | meaning |
//! |---|---|
//! | `NOBYPASS_BENCH_PEER` | shell command that runs the other installer |
//! | `NOBYPASS_BENCH_PEER_SETUP` | shell commands before it, in its own mount namespace |
//! | `NOBYPASS_BENCH_PROGRAM` | the nobypass to measure, such as the image's; the one just built |
//! | `NOBYPASS_BENCH_FILES` | files for each writer style; 200 |
//! | `NOBYPASS_BENCH_DIR` | where the directories are made; the build directory, or /var/tmp |
//!
//! Needs root, for mount and PID namespaces: an installer that kills what it finds must not find this machine's
//! processes.
#![allow(missing_docs, reason = "benchmark")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "benchmark")]
#![allow(clippy::print_stdout, reason = "its result")]

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nobypass_testkit::figures::Figure;
use rustix::fs::inotify;

const ENTRY: &str = r#"{"name":"linkerd-cni","type":"linkerd-cni","log_level":"info","kubernetes":{"kubeconfig":"__KUBECONFIG_FILEPATH__"},"linkerd":{"incoming-proxy-port":4143,"outgoing-proxy-port":4140,"proxy-uid":2102,"ports-to-redirect":[],"inbound-ports-to-ignore":["4191","4190"],"simulate":false,"use-wait-flag":false,"iptables-mode":"nft","ipv6":false}}"#;
/// Runs in the installer's own namespaces: the host's /run, /tmp and service account are not there.
const SETUP: &str = r#"mount --make-rprivate / && mount -t tmpfs tmpfs /run &&
mkdir -p /run/secrets/kubernetes.io/serviceaccount/..1 && cd /run/secrets/kubernetes.io/serviceaccount &&
printf token > ..1/token && printf ca > ..1/ca.crt && ln -s ..1 ..data && ln -s ..data/token token &&
ln -s ..data/ca.crt ca.crt && cd / && mount -t tmpfs tmpfs /tmp"#;
/// Between two files.
const PAUSE: Duration = Duration::from_millis(20);
const HANG: Duration = Duration::from_secs(20);
const BURST: usize = 50;

fn list(n: usize) -> String {
    format!(
        "{{\n  \"cniVersion\": \"0.4.0\",\n  \"name\": \"k8s-pod-network-{n}\",\n  \"plugins\": [\n    {{\n      \"type\": \"calico\",\n      \"log_level\": \"info\",\n      \"datastore_type\": \"kubernetes\",\n      \"nodename\": \"node-{n}\",\n      \"mtu\": 1500,\n      \"ipam\": {{ \"type\": \"calico-ipam\" }},\n      \"policy\": {{ \"type\": \"k8s\" }},\n      \"kubernetes\": {{ \"kubeconfig\": \"/etc/cni/net.d/calico-kubeconfig\" }}\n    }},\n    {{ \"type\": \"portmap\", \"snat\": true, \"capabilities\": {{ \"portMappings\": true }} }}\n  ]\n}}\n"
    )
}

/// Not below /tmp, which installers find empty.
fn base() -> PathBuf {
    let built = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let usual = if built.starts_with("/tmp") { Path::new("/var/tmp") } else { built };
    std::env::var_os("NOBYPASS_BENCH_DIR").map_or_else(|| usual.to_owned(), PathBuf::from)
}

/// The binary where the installers' namespaces show it; removed at the end.
struct Program(PathBuf);

impl Program {
    fn copy() -> Self {
        let copy = base().join(format!("nobypass-{}", std::process::id()));
        let program = std::env::var_os("NOBYPASS_BENCH_PROGRAM");
        fs::copy(program.unwrap_or_else(|| env!("CARGO_BIN_EXE_nobypass").into()), &copy).unwrap();
        Self(copy)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

struct Installer {
    child: Child,
    net: PathBuf,
    root: PathBuf,
}

impl Installer {
    fn start(name: &str, setup: &str, command: &str) -> Self {
        let root = base().join(format!("cni-latency-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let (net, bin, source) =
            (root.join("host/etc/cni/net.d"), root.join("host/opt/cni/bin"), root.join("bin"));
        for dir in [&net, &bin, &source] {
            fs::create_dir_all(dir).unwrap();
        }
        let plugin = source.join("linkerd-cni");
        fs::write(&plugin, "#!/bin/sh\necho '{\"cniVersion\":\"1.0.0\",\"supportedVersions\":[\"0.3.1\",\"0.4.0\",\"1.0.0\"]}'\n").unwrap();
        fs::set_permissions(&plugin, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let log = File::create(root.join("log")).unwrap();
        let script = format!("{SETUP} && {setup} exec {command}");
        let child = Command::new("unshare")
            .args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", &script])
            .env("CONTAINER_MOUNT_PREFIX", root.join("host"))
            .env("DEST_CNI_NET_DIR", "/etc/cni/net.d")
            .env("DEST_CNI_BIN_DIR", "/opt/cni/bin")
            .env("CONTAINER_CNI_BIN_DIR", &source)
            .env("KUBERNETES_SERVICE_HOST", "10.96.0.1")
            .env("KUBERNETES_SERVICE_PORT", "443")
            .env("KUBERNETES_SERVICE_PROTOCOL", "https")
            .env("CNI_NETWORK_CONFIG", ENTRY)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let installer = Self { child, net, root };
        installer.until_it_works();
        installer
    }

    /// Ready when it patches.
    fn until_it_works(&self) {
        let path = self.net.join("00-warm-up.conflist");
        let start = Instant::now();
        fs::write(self.net.join(".warm"), list(0)).unwrap();
        fs::rename(self.net.join(".warm"), &path).unwrap();
        while !patched(&path) {
            if start.elapsed() > HANG {
                panic!("does not work: {}", fs::read_to_string(self.root.join("log")).unwrap_or_default());
            }
            std::thread::park_timeout(Duration::from_millis(20));
        }
        // What it does once at its start does not count.
        let quiet = Instant::now();
        while quiet.elapsed() < Duration::from_secs(4) {
            std::thread::park_timeout(Duration::from_millis(100));
        }
    }

    /// The installer and its children.
    fn processes(&self) -> Vec<u32> {
        let mut all = vec![self.child.id()];
        let mut at = 0;
        while let Some(pid) = all.get(at) {
            let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
            all.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
            at += 1;
        }
        all.remove(0);
        all
    }

    /// CPU time so far: exact for what lives, in hundredths of a second for children that ended.
    fn cpu(&self) -> Duration {
        let mut total = Duration::ZERO;
        for pid in self.processes() {
            for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
                let stat = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
                total +=
                    Duration::from_nanos(stat.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0));
            }
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let fields: Vec<_> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
            let ticks: u64 = [13, 14].iter().filter_map(|at| fields.get(*at)?.parse::<u64>().ok()).sum();
            total += Duration::from_millis(ticks * 10);
        }
        total
    }

    /// Resident memory in KiB: all of it, and without the pages of files (the binary itself).
    fn memory(&self) -> (u64, u64, u64) {
        let field = |text: &str, name: &str| -> u64 {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
            line.split_whitespace().nth(1).and_then(|kb| kb.parse().ok()).unwrap_or(0)
        };
        self.processes().iter().fold((0, 0, 0), |(rss, pss, anon), pid| {
            let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
            (rss + field(&text, "Rss:"), pss + field(&text, "Pss:"), anon + field(&text, "Anonymous:"))
        })
    }
}

impl Drop for Installer {
    fn drop(&mut self) {
        // `unshare` was started here, and takes its child with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn patched(path: &Path) -> bool {
    let Ok(text) = fs::read(path) else { return false };
    let value: Option<serde_json::Value> = serde_json::from_slice(&text).ok();
    let plugins = value.as_ref().and_then(|value| value.get("plugins")?.as_array());
    plugins.is_some_and(|plugins| plugins.iter().any(|plugin| plugin["type"] == "linkerd-cni"))
}

/// Sees changes of names without opening anything: opening would wake those who are measured.
struct Observer {
    fd: OwnedFd,
}

impl Observer {
    fn new(dir: &Path) -> Self {
        let fd = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC).unwrap();
        let what = inotify::WatchFlags::MOVED_TO | inotify::WatchFlags::CLOSE_WRITE;
        inotify::add_watch(&fd, dir, what).unwrap();
        Self { fd }
    }

    /// Names of configs that changed since the last call.
    fn changed(&self) -> Vec<String> {
        let mut buffer = [std::mem::MaybeUninit::uninit(); 16 << 10];
        let mut reader = inotify::Reader::new(&self.fd, &mut buffer);
        let mut names = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => {
                    let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()).to_owned());
                    names.extend(
                        name.and_then(|name| name.into_string().ok()).filter(|name| !name.starts_with('.')),
                    );
                }
                Err(_) => return names,
            }
            if reader.is_buffer_empty() {
                return names;
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Style {
    Rename,
    InPlace,
}

/// Writes a file; the moment of the last call that makes it whole.
fn write(dir: &Path, name: &str, text: &str, style: Style) -> Instant {
    match style {
        Style::Rename => {
            let temp = dir.join(".owner");
            fs::write(&temp, text).unwrap();
            let start = Instant::now();
            fs::rename(temp, dir.join(name)).unwrap();
            start
        }
        Style::InPlace => {
            let mut file = File::create(dir.join(name)).unwrap();
            file.write_all(text.as_bytes()).unwrap();
            let start = Instant::now();
            drop(file);
            start
        }
    }
}

struct Figures {
    /// Sorted, in milliseconds.
    latency: Vec<f64>,
    cpu_ms: f64,
    writes: usize,
    files: usize,
}

impl Figures {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a few hundred at most, and never below zero"
    )]
    fn quantile(&self, q: f64) -> f64 {
        let at = ((self.latency.len() as f64) * q).ceil() as usize;
        self.latency.get(at.saturating_sub(1)).copied().unwrap_or(f64::NAN)
    }
}

/// One file after the other.
fn one_by_one(installer: &Installer, style: Style, files: usize) -> Result<Figures, String> {
    let observer = Observer::new(&installer.net);
    let (before, mut latency, mut events) = (installer.cpu(), Vec::new(), 0);
    let kind = if style == Style::Rename { "rename" } else { "in-place" };
    for n in 0..files {
        let name = format!("{n:03}-{kind}.conflist");
        let path = installer.net.join(&name);
        let start = write(&installer.net, &name, &list(n), style);
        let mut seen = None;
        while seen.is_none() {
            let changed = observer.changed();
            events += changed.len();
            if changed.contains(&name) && patched(&path) {
                seen = Some(start.elapsed());
            }
            if start.elapsed() > Duration::from_secs(2) {
                return Err(format!("file {n} not patched in 2 s"));
            }
            std::hint::spin_loop();
        }
        latency.extend(seen.map(|seen| seen.as_secs_f64() * 1e3));
        while start.elapsed() < PAUSE {
            std::thread::park_timeout(PAUSE.saturating_sub(start.elapsed()));
        }
        events += observer.changed().len();
    }
    latency.sort_by(f64::total_cmp);
    let cpu_ms = (installer.cpu() - before).as_secs_f64() * 1e3;
    // The owner's own rename or close is one event each.
    Ok(Figures { latency, cpu_ms, writes: events.saturating_sub(files), files })
}

/// All at once; the time of each from its own rename, and of the last from the first.
fn burst(installer: &Installer) -> Result<(Figures, f64), String> {
    let observer = Observer::new(&installer.net);
    let before = installer.cpu();
    let names: Vec<_> = (0..BURST).map(|n| format!("9{n:02}-burst.conflist")).collect();
    for name in &names {
        fs::write(installer.net.join(format!(".{name}.owner")), list(1)).unwrap();
    }
    let first = Instant::now();
    let mut waiting: Vec<(&String, Instant)> = Vec::new();
    for name in &names {
        waiting.push((name, Instant::now()));
        fs::rename(installer.net.join(format!(".{name}.owner")), installer.net.join(name)).unwrap();
    }
    let (mut latency, mut events) = (Vec::new(), 0);
    while !waiting.is_empty() {
        let changed = observer.changed();
        events += changed.len();
        waiting.retain(|(name, start)| {
            let done = changed.contains(name) && patched(&installer.net.join(name));
            if done {
                latency.push(start.elapsed().as_secs_f64() * 1e3);
            }
            !done
        });
        if first.elapsed() > HANG {
            return Err(format!("{} of {BURST} not patched", waiting.len()));
        }
    }
    let last = first.elapsed().as_secs_f64() * 1e3;
    let quiet = Instant::now();
    while quiet.elapsed() < Duration::from_secs(3) {
        std::thread::park_timeout(Duration::from_millis(50));
    }
    events += observer.changed().len();
    latency.sort_by(f64::total_cmp);
    let cpu_ms = (installer.cpu() - before).as_secs_f64() * 1e3;
    Ok((Figures { latency, cpu_ms, writes: events.saturating_sub(BURST), files: BURST }, last))
}

struct Row {
    what: &'static str,
    figures: Result<Figures, String>,
    last: Option<f64>,
}

/// KiB resident, and of that its own.
type Memory = (u64, u64);

/// The most that may be resident, KiB, and the most CPU time a file, ms.
const PROMISE: (u64, f64) = (5_000, 1.0);

/// What the README's table says.
fn tell(own: &[Row], other: Option<&[Row]>, [idle, after]: [Memory; 2]) {
    for (n, row) in own.iter().enumerate() {
        let Ok(figures) = &row.figures else { continue };
        let pair = |figures: &Figures| {
            format!("p50 {:.2} ms, p99 {:.2} ms", figures.quantile(0.5), figures.quantile(0.99))
        };
        let cpu = figures.cpu_ms / figures.files as f64;
        let mut text = format!(
            "{}; {cpu:.2} ms CPU and {:.1} writes a file",
            pair(figures),
            figures.writes as f64 / figures.files as f64
        );
        let mut kept = cpu <= PROMISE.1;
        match other.and_then(|other| other.get(n)).map(|row| &row.figures) {
            Some(Ok(theirs)) => {
                text += &format!("; the other installer {}", pair(theirs));
                kept &= [0.5, 0.99].iter().all(|q| figures.quantile(*q) <= theirs.quantile(*q));
            }
            Some(Err(why)) => text += &format!("; the other installer: {why}"),
            None => {}
        }
        let what = format!("another writer's change → patched, fsync included: {}", row.what);
        let promise = format!("≤ {} ms CPU a file; not above the other installer", PROMISE.1);
        let _ = Figure::new(what, text).promised(promise, kept).tell().unwrap();
    }
    let mb = |kib: u64| kib as f64 * 1.024 / 1000.0;
    let show = |(rss, anon)| format!("{:.1} MB, of which its own {:.1} MB", mb(rss), mb(anon));
    let text = format!("{}; after all files {}", show(idle), show(after));
    let promise = format!("≤ {} MB", PROMISE.0 / 1000);
    let kept = mb(idle.0) <= 5.0 && mb(after.0) <= 5.0;
    let _ =
        Figure::new("`nobypass cni run` alone, resident, idle", text).promised(promise, kept).tell().unwrap();
}

fn measure(name: &str, setup: &str, command: &str, files: usize) -> (Vec<Row>, [Memory; 2]) {
    let mut rows = Vec::new();
    let mut memory = Vec::new();
    for (what, style) in [("rename", Style::Rename), ("in place", Style::InPlace)] {
        let installer = Installer::start(name, setup, command);
        let idle = installer.memory();
        rows.push(Row { what, figures: one_by_one(&installer, style, files), last: None });
        if what == "rename" {
            for (when, (rss, pss, anon)) in [("idle", idle), ("after the files", installer.memory())] {
                println!("{name:<10} memory {when}: RSS {rss} KiB, PSS {pss} KiB, anonymous {anon} KiB");
                memory.push((rss, anon));
            }
        }
    }
    let installer = Installer::start(name, setup, command);
    let (figures, last) = match burst(&installer) {
        Ok((figures, last)) => (Ok(figures), Some(last)),
        Err(why) => (Err(why), None),
    };
    rows.push(Row { what: "burst of 50", figures, last });
    for Row { what, figures, last } in &rows {
        match figures {
            Ok(figures) => println!(
                "{name:<10} {what:<12} p50 {:>8.3} ms  p90 {:>8.3}  p99 {:>8.3}  max {:>8.3}  CPU {:>7.3} ms/file  writes {}/{}{}",
                figures.quantile(0.5),
                figures.quantile(0.9),
                figures.quantile(0.99),
                figures.quantile(1.0),
                figures.cpu_ms / figures.files as f64,
                figures.writes,
                figures.files,
                last.map(|last| format!("  last {last:.1} ms")).unwrap_or_default(),
            ),
            Err(why) => println!("{name:<10} {what:<12} FAILED: {why}"),
        }
    }
    (rows, [memory[0], memory[1]])
}

fn main() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root for mount and PID namespaces");
        return;
    }
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse().ok());
    let files = number("NOBYPASS_BENCH_FILES").unwrap_or(200);
    let program = Program::copy();
    let (own, memory) = measure("nobypass", "", &format!("{} cni run", program.0.display()), files);
    let Ok(peer) = std::env::var("NOBYPASS_BENCH_PEER") else {
        tell(&own, None, memory);
        return;
    };
    let setup =
        std::env::var("NOBYPASS_BENCH_PEER_SETUP").map(|setup| format!("{setup} &&")).unwrap_or_default();
    let (other, _) = measure("peer", &setup, &peer, files);
    tell(&own, Some(&other), memory);
    for (own, other) in own.iter().zip(&other) {
        if let (Ok(ours), Ok(theirs)) = (&own.figures, &other.figures) {
            let ratio = |q| theirs.quantile(q) / ours.quantile(q);
            println!(
                "ratio      {:<12} p50 {:.2}  p99 {:.2}  CPU {:.2}   (peer ÷ nobypass)",
                own.what,
                ratio(0.5),
                ratio(0.99),
                theirs.cpu_ms / ours.cpu_ms
            );
        }
    }
}
