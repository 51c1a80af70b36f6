//! The agent binary as a process under test: start it, ask it, read its log, see how it ends.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use nobypass_testkit::proc::{self, Proc};
use nobypass_testkit::wait;
use serde_json::Value;

/// The binary under test.
pub const BIN: &str = env!("CARGO_BIN_EXE_nobypass");

/// Removes the settings of whoever runs the tests.
pub fn without_settings(command: &mut Command) -> &mut Command {
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("NOBYPASS_")) {
        command.env_remove(name);
    }
    command
}

/// An agent about to be started.
pub struct Launch {
    command: Command,
    socket: PathBuf,
    log: PathBuf,
}

/// How a process ended that should not have started.
#[derive(Debug)]
pub struct Ended {
    /// Exit code.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error, which is the log too.
    pub err: String,
}

impl Ended {
    /// The last line: for people, and for whoever reads `kubectl logs`.
    pub fn last(&self) -> &str {
        self.err.lines().last().unwrap_or_default()
    }
}

/// Runs a command to its end.
pub fn run(mut command: Command) -> Ended {
    without_settings(&mut command);
    let out = proc::output(command, "", wait::HANG).unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let ended = Ended { code: out.status.code(), out: text(&out.stdout), err: text(&out.stderr) };
    assert!(!ended.err.contains("panicked"), "{}", ended.err);
    ended
}

impl Launch {
    /// `command` is the binary, or a program with arguments that runs it; socket and log are in `home`. No metrics
    /// port and no container runtime, unless [`Launch::args`] says otherwise.
    pub fn new(mut command: Command, home: &Path) -> Self {
        let socket = home.join("agent.sock");
        without_settings(&mut command);
        // The CNI half has tests of its own; nothing here may look at the machine's own CNI directory.
        command.env("NOBYPASS_CNI_MODE", "off");
        // Nor at the cluster that the tests may run in.
        command.env("NOBYPASS_PODS", "cri");
        command.args(["agent", "--socket"]).arg(&socket);
        Self { command, socket, log: home.join("agent.log") }
    }

    /// More arguments.
    pub fn args<S: AsRef<std::ffi::OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.command.args(args);
        self
    }

    /// Starts it.
    pub fn start(mut self) -> Agent {
        let log = fs::File::options().create(true).append(true).open(&self.log).unwrap();
        // What an earlier agent wrote into the same file is not this one's.
        let from = usize::try_from(log.metadata().unwrap().len()).unwrap();
        self.command.stderr(log);
        let proc = proc::spawn(self.command).unwrap();
        Agent { proc, socket: self.socket, log: self.log, from }
    }

    /// Runs it to the end that it has to come to by itself.
    pub fn fail(self) -> Ended {
        let ended = run(self.command);
        assert!(!self.socket.exists(), "the socket is still there: {}", ended.err);
        ended
    }
}

/// A running agent. Killed when dropped.
pub struct Agent {
    proc: Proc,
    socket: PathBuf,
    log: PathBuf,
    from: usize,
}

impl Agent {
    /// Waits until `/readyz` says ready.
    pub fn ready(self) -> Self {
        self.until("readiness", |agent| agent.get("/readyz").filter(|(code, _)| *code == 200));
        self
    }

    /// Waits until the programs are attached and tested, and the routes answer.
    pub fn attached(self) -> Self {
        self.until("the programs", |agent| {
            let (_, body) = agent.get("/readyz")?;
            let (code, _) = agent.get("/metrics")?;
            (code == 200 && !body.contains("hooks:")).then_some(())
        });
        self
    }

    /// Waits for something, and shows the log if it does not come.
    pub fn until<T>(&self, what: &str, poll: impl Fn(&Self) -> Option<T>) -> T {
        let found = wait::until(what, wait::HANG, || poll(self));
        found.unwrap_or_else(|error| panic!("{error}; the agent's log:\n{}", self.log()))
    }

    /// Waits for a log line with all these words.
    pub fn line(&self, words: &[&str]) -> String {
        self.until(&format!("a log line with {words:?}"), |agent| {
            agent.log().lines().find(|line| words.iter().all(|word| line.contains(word))).map(str::to_owned)
        })
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        let bytes = fs::read(&self.log).unwrap();
        let log = String::from_utf8_lossy(&bytes[self.from..]).into_owned();
        assert!(!log.contains("panicked"), "{log}");
        log
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.proc.pid()
    }

    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Whether it has not ended.
    pub fn is_running(&mut self) -> bool {
        self.proc.is_running()
    }

    /// Status and body of a GET; `None` when nobody answers.
    pub fn get(&self, path: &str) -> Option<(u16, String)> {
        request(&self.socket, "GET", path, "")
    }

    /// Status and body of a PUT.
    pub fn put(&self, path: &str, body: &str) -> (u16, String) {
        request(&self.socket, "PUT", path, body).expect("the agent answers")
    }

    /// The node's state.
    pub fn status(&self) -> Value {
        let (code, body) = self.get("/v1/status").expect("the agent answers");
        assert_eq!(code, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    /// A scrape.
    pub fn metrics(&self) -> Metrics {
        let (code, body) = self.get("/metrics").expect("the agent answers");
        assert_eq!(code, 200, "{body}");
        Metrics::parse(&body)
    }

    /// SIGTERM, and how it ended.
    pub fn terminate(self) -> ExitStatus {
        self.terminate_and_log().0
    }

    /// SIGTERM, how it ended, and its log.
    pub fn terminate_and_log(mut self) -> (ExitStatus, String) {
        self.proc.terminate().unwrap();
        let status = self.proc.wait(wait::HANG);
        (status.unwrap_or_else(|error| panic!("{error}: {}", self.log())), self.log())
    }

    /// Waits for its own end.
    pub fn wait(mut self) -> Ended {
        let status = self.proc.wait(wait::HANG);
        let err = self.log();
        Ended {
            code: status.unwrap_or_else(|error| panic!("{error}: {err}")).code(),
            out: String::new(),
            err,
        }
    }

    /// SIGKILL.
    pub fn kill(self) {
        drop(self);
    }
}

/// One HTTP request over a Unix socket.
/// Status and body; `None` when nobody answers.
pub fn request(socket: &Path, method: &str, path: &str, body: &str) -> Option<(u16, String)> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let code = head.split(' ').nth(1)?.parse().ok()?;
    Some((code, body.to_owned()))
}

/// A scrape: values by series, as `nobypass_mode{mode="audit"}`.
#[derive(Clone, Debug)]
pub struct Metrics(BTreeMap<String, u64>);

impl Metrics {
    fn parse(text: &str) -> Self {
        assert!(text.ends_with("# EOF\n"), "not OpenMetrics: {text}");
        let series = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            let seconds: f64 = value.parse().unwrap();
            // Sums of seconds are no whole numbers, and no test asks for them.
            assert!(seconds >= 0.0, "{line}");
            Some((name.to_owned(), value.parse().ok()?))
        });
        Self(series.collect())
    }

    /// The sum of all series of `name` (without prefix) that have all these `label="value"` pairs.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        self.matching(name, labels).map(|(_, value)| value).sum()
    }

    /// How many series there are.
    pub fn series(&self, name: &str, labels: &[(&str, &str)]) -> usize {
        self.matching(name, labels).count()
    }

    fn matching(&self, name: &str, labels: &[(&str, &str)]) -> impl Iterator<Item = (&str, u64)> {
        let prefix = format!("nobypass_{name}");
        let labels: Vec<String> = labels.iter().map(|(key, value)| format!("{key}=\"{value}\"")).collect();
        self.0
            .iter()
            .filter(move |(series, _)| {
                let rest = series.strip_prefix(&prefix);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('{'))
                    && labels.iter().all(|label| series.contains(label))
            })
            .map(|(series, value)| (series.as_str(), *value))
    }

    /// Counters that are smaller than in `earlier`.
    pub fn went_backwards_since(&self, earlier: &Self) -> Vec<String> {
        let counter = |series: &str| series.split('{').next().is_some_and(|name| name.ends_with("_total"));
        let smaller = |(series, before): (&String, &u64)| {
            let now = self.0.get(series).copied().unwrap_or(0);
            (counter(series) && now < *before).then(|| format!("{series}: {before} → {now}"))
        };
        earlier.0.iter().filter_map(smaller).collect()
    }
}
