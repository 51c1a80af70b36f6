//! Shared by the CNI tests: configs with a serial number, and what must be true of them afterwards.
#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::missing_panics_doc, reason = "test code")]

use std::ffi::OsStr;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use nobypass::cni::entry::{Place, WantedEntry};
use nobypass::cni::plan::{FileKind, Options, Plan, plan};
use nobypass::cni::swap::{Outcome, Swapper};

pub const ENTRY: &str = r#"{"type":"linkerd-cni","name":"linkerd-cni","linkerd":{"proxy-uid":2102}}"#;
/// No test waits longer than this for something that takes milliseconds.
pub const HANG: Duration = Duration::from_secs(30);

pub fn wanted() -> WantedEntry {
    WantedEntry::from_text(ENTRY, Place::Last).unwrap()
}

/// A list as a primary CNI would write it; `serial` tells the versions apart, `pad` makes it longer.
pub fn list(serial: &str, pad: usize) -> String {
    let pad = "x".repeat(pad);
    format!(
        "{{\n  \"cniVersion\": \"0.4.0\",\n  \"name\": \"net\",\n  \"serial\": \"{serial}\",\n  \"pad\": \"{pad}\",\n  \
         \"plugins\": [\n    {{ \"type\": \"bridge\", \"mtu\": 12345678901234567890 }}\n  ]\n}}\n"
    )
}

/// A single-plugin config.
pub fn single(serial: &str) -> String {
    format!(
        "{{ \"cniVersion\": \"0.3.0\", \"name\": \"terway\", \"serial\": \"{serial}\", \"type\": \"bridge\" }}\n"
    )
}

pub fn planner() -> impl FnMut(FileKind, &[u8]) -> Plan {
    let wanted = wanted();
    move |kind, bytes| plan(kind, bytes, &wanted, Options::default())
}

pub fn open_dir(path: &Path) -> OwnedFd {
    fs::File::open(path).unwrap().into()
}

pub fn swapper(path: &Path) -> Swapper {
    let mut swapper = Swapper::new(open_dir(path), vec![path.to_path_buf()]);
    swapper.set_grace(Duration::ZERO);
    swapper
}

/// Does what the guard does on events, until nothing changes any more.
pub fn calm(swapper: &mut Swapper, names: &[&str]) {
    let mut plan = planner();
    let start = Instant::now();
    loop {
        let mut quiet = true;
        swapper.settle_all(&mut plan, &mut |_, _| quiet = false);
        for name in names {
            let outcome = swapper.replace(OsStr::new(name), &mut plan);
            quiet &= matches!(outcome, Ok(Outcome::Left(..) | Outcome::Gone | Outcome::Refused(_)));
        }
        if quiet && swapper.kept() == 0 {
            return;
        }
        assert!(start.elapsed() < HANG, "never calms down: {swapper:?}");
    }
}

pub fn serial_of(text: &str) -> Option<String> {
    let value: serde_json::Value = serde_json::from_str(text).ok()?;
    Some(value.get("serial")?.as_str()?.to_owned())
}

pub fn entries(text: &str) -> usize {
    let value: serde_json::Value = serde_json::from_str(text).unwrap();
    let plugins = value.get("plugins").and_then(|plugins| plugins.as_array()).cloned().unwrap_or_default();
    plugins.iter().filter(|plugin| plugin.get("type").is_some_and(|kind| kind == "linkerd-cni")).count()
}

/// The file holds the owner's bytes of `serial`, and one entry, and nothing else.
pub fn assert_patched(path: &Path, owner: &str) {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    match planner()(FileKind::Conflist, owner.as_bytes()) {
        Plan::Write(bytes) => assert_eq!(text, String::from_utf8_lossy(&bytes), "{}", path.display()),
        other => panic!("not a list to patch: {other:?}"),
    }
    assert_eq!(entries(&text), 1);
}

/// Hidden files of the agent in the directory.
pub fn hidden(path: &Path) -> Vec<String> {
    let names = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with(".nobypass-") && name.ends_with(".tmp")).collect()
}
