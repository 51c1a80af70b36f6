//! Command line: words, `--name value`, and a few flags.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

const FLAGS: [&str; 7] = ["stdin", "tproxy", "connected", "hdrincl", "keep-caps", "nonblock", "mapped"];
const VALUES: [&str; 17] = [
    "cgroup",
    "netns",
    "gid",
    "uid",
    "timeout-ms",
    "interval-ms",
    "dev",
    "via",
    "wait-ms",
    "parallel",
    "parent",
    "prefix",
    "syn-retries",
    "count",
    "enter",
    "mark",
    "passthrough",
];

pub struct Options {
    words: Vec<String>,
    named: BTreeMap<String, String>,
}

impl Options {
    pub fn parse(args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut args = args;
        let (mut words, mut named) = (Vec::new(), BTreeMap::new());
        while let Some(arg) = args.next() {
            let Some(name) = arg.strip_prefix("--") else {
                words.push(arg);
                continue;
            };
            let value = if FLAGS.contains(&name) {
                String::new()
            } else if VALUES.contains(&name) {
                args.next().ok_or_else(|| format!("{arg} needs a value"))?
            } else {
                return Err(format!("no such option: {arg}"));
            };
            named.insert(name.to_owned(), value);
        }
        Ok(Self { words, named })
    }

    pub fn word(&self, n: usize) -> Result<&str, String> {
        self.words.get(n).map(String::as_str).ok_or_else(|| format!("argument {n} is missing"))
    }

    pub fn flag(&self, name: &str) -> bool {
        self.named.contains_key(name)
    }

    pub fn text(&self, name: &str) -> Option<&str> {
        self.named.get(name).map(String::as_str)
    }

    pub fn required(&self, name: &str) -> Result<&str, String> {
        self.text(name).ok_or_else(|| format!("--{name} is missing"))
    }

    pub fn number<T: FromStr>(&self, name: &str) -> Result<Option<T>, String> {
        self.text(name).map(|text| parse(text, &format!("--{name}"))).transpose()
    }

    pub fn timeout(&self, default_ms: u64) -> Result<Duration, String> {
        Ok(Duration::from_millis(self.number("timeout-ms")?.unwrap_or(default_ms)))
    }

    pub fn nth<T: FromStr>(&self, n: usize) -> Result<Option<T>, String> {
        self.words.get(n).map(|text| parse(text, &format!("argument {n}"))).transpose()
    }

    pub fn address(&self, n: usize) -> Result<IpAddr, String> {
        parse(self.word(n)?, "address")
    }

    pub fn target(&self) -> Result<SocketAddr, String> {
        Ok(SocketAddr::new(self.address(1)?, parse(self.word(2)?, "port")?))
    }

    pub fn ports(&self) -> Result<Vec<u16>, String> {
        let ports: Result<Vec<u16>, String> =
            self.words.iter().skip(1).map(|text| parse(text, "port")).collect();
        ports.and_then(|ports| if ports.is_empty() { Err("no port given".to_owned()) } else { Ok(ports) })
    }
}

fn parse<T: FromStr>(text: &str, what: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{what}: cannot read {text:?}"))
}
