//! What is printed: one flat JSON object on one line.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::time::{Duration, Instant};

/// Prints a line at once; a reader that has gone away is no problem.
pub fn say(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// A JSON object in the making.
pub struct Line(String);

impl Line {
    pub fn new(command: &str) -> Self {
        Self("{".to_owned()).text("cmd", command)
    }

    fn key(mut self, name: &str) -> Self {
        if !self.0.ends_with('{') {
            self.0.push(',');
        }
        let _ = write!(self.0, "\"{name}\":");
        self
    }

    /// `value` printed as it is: a number, a truth value, or JSON.
    pub fn raw(self, name: &str, value: impl std::fmt::Display) -> Self {
        let mut line = self.key(name);
        let _ = write!(line.0, "{value}");
        line
    }

    pub fn text(self, name: &str, value: &str) -> Self {
        let quoted = quote(value);
        self.raw(name, quoted)
    }

    /// `null` for nothing.
    pub fn maybe(self, name: &str, value: Option<&str>) -> Self {
        match value {
            Some(value) => self.text(name, value),
            None => self.raw(name, "null"),
        }
    }

    pub fn counts<K: std::fmt::Display>(self, name: &str, counts: &BTreeMap<K, u64>) -> Self {
        let items: Vec<String> =
            counts.iter().map(|(key, count)| format!("{}:{count}", quote(&key.to_string()))).collect();
        self.raw(name, format!("{{{}}}", items.join(",")))
    }

    pub fn end(mut self) -> String {
        self.0.push('}');
        self.0
    }
}

fn quote(text: &str) -> String {
    let mut out = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c < ' ' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// One try of an application, step by step.
pub struct Try {
    command: String,
    start: Instant,
    connected: Option<Duration>,
    pub local: Option<String>,
    pub answer: Option<String>,
    pub bytes: usize,
}

/// The step that failed, and how.
pub struct Failed {
    pub stage: &'static str,
    pub error: io::Error,
}

/// Names the step for `?`.
pub trait At<T> {
    fn at(self, stage: &'static str) -> Result<T, Failed>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, stage: &'static str) -> Result<T, Failed> {
        self.map_err(|error| Failed { stage, error })
    }
}

impl Try {
    pub fn new(command: &str) -> Self {
        let command = command.to_owned();
        Self { command, start: Instant::now(), connected: None, local: None, answer: None, bytes: 0 }
    }

    /// Notes how long connect() took.
    pub fn connected(&mut self) {
        self.connected = Some(self.start.elapsed());
    }

    pub fn line(&self, result: &Result<(), Failed>) -> Line {
        let (ok, stage, errno) = match result {
            Ok(()) => (true, "done", None),
            Err(Failed { stage, error }) => (false, *stage, Some(errno_name(error))),
        };
        let line = Line::new(&self.command)
            .raw("ok", ok)
            .text("stage", stage)
            .maybe("errno", errno.as_deref())
            .maybe("answer", self.answer.as_deref())
            .raw("bytes", self.bytes)
            .maybe("local", self.local.as_deref())
            .raw("total_us", self.start.elapsed().as_micros());
        match self.connected {
            Some(after) => line.raw("connect_us", after.as_micros()),
            None => line.raw("connect_us", "null"),
        }
    }

    pub fn report(&self, result: &Result<(), Failed>) -> String {
        self.line(result).end()
    }
}

/// `EPERM` and so on; `TIMEOUT` when this program's own patience ended, `EOF` when the peer closed.
pub fn errno_name(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => return "EOF".to_owned(),
        io::ErrorKind::TimedOut if error.raw_os_error().is_none() => return "TIMEOUT".to_owned(),
        _ => {}
    }
    let Some(number) = error.raw_os_error() else { return error.to_string() };
    match number {
        libc::EPERM => "EPERM",
        libc::ENOENT => "ENOENT",
        libc::EBADF => "EBADF",
        libc::EAGAIN => "EAGAIN",
        libc::ENOMEM => "ENOMEM",
        libc::EACCES => "EACCES",
        libc::EBUSY => "EBUSY",
        libc::ENODEV => "ENODEV",
        libc::EINVAL => "EINVAL",
        libc::EMFILE => "EMFILE",
        libc::EPIPE => "EPIPE",
        libc::ENOPROTOOPT => "ENOPROTOOPT",
        libc::EPROTONOSUPPORT => "EPROTONOSUPPORT",
        libc::EOPNOTSUPP => "EOPNOTSUPP",
        libc::EAFNOSUPPORT => "EAFNOSUPPORT",
        libc::EADDRINUSE => "EADDRINUSE",
        libc::EADDRNOTAVAIL => "EADDRNOTAVAIL",
        libc::ENETUNREACH => "ENETUNREACH",
        libc::ECONNABORTED => "ECONNABORTED",
        libc::ECONNRESET => "ECONNRESET",
        libc::ENOBUFS => "ENOBUFS",
        libc::ENOTCONN => "ENOTCONN",
        libc::ETIMEDOUT => "ETIMEDOUT",
        libc::ECONNREFUSED => "ECONNREFUSED",
        libc::EHOSTUNREACH => "EHOSTUNREACH",
        libc::EINPROGRESS => "EINPROGRESS",
        other => return format!("E{other}"),
    }
    .to_owned()
}

/// This program's own patience ended.
pub fn timed_out() -> io::Error {
    io::ErrorKind::TimedOut.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_one_line_of_json() {
        let counts = BTreeMap::from([("EPERM", 3), ("ETIMEDOUT", 4)]);
        let line =
            Line::new("x").text("a", "q\"\n\\").maybe("n", None).raw("k", 7).counts("e", &counts).end();
        assert_eq!(line, r#"{"cmd":"x","a":"q\"\u000a\\","n":null,"k":7,"e":{"EPERM":3,"ETIMEDOUT":4}}"#);
    }

    #[test]
    fn tells_our_timeout_from_the_kernels() {
        assert_eq!(errno_name(&timed_out()), "TIMEOUT");
        assert_eq!(errno_name(&io::Error::from_raw_os_error(libc::ETIMEDOUT)), "ETIMEDOUT");
    }
}
