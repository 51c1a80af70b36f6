//! Outputs that README.md shows: each is what a program printed, and stays it.

use std::fs;
use std::path::PathBuf;

use super::yaml::repository;

const RECORD: &str = "NOBYPASS_RECORD";

fn file() -> PathBuf {
    repository().join("README.md")
}

/// The text before a capture, the capture, and the text behind it: the first block of code after its comment.
fn split<'a>(text: &'a str, name: &str) -> [&'a str; 3] {
    let mark = format!("<!-- capture: {name} -->\n");
    let start = text.find(&mark).unwrap_or_else(|| panic!("README.md has no {}", mark.trim())) + mark.len();
    let fence = "```\n";
    let start = start + text[start..].find(fence).unwrap() + fence.len();
    let end = start + text[start..].find(fence).unwrap();
    [&text[..start], &text[start..end], &text[end..]]
}

/// Names of all captures.
pub fn names() -> Vec<String> {
    let text = fs::read_to_string(file()).unwrap();
    let names = text.split("<!-- capture: ").skip(1).filter_map(|rest| rest.split(" -->").next());
    names.map(str::to_owned).collect()
}

/// Compares a capture with what was printed now, but for times, numbers that differ from run to run, and spacing; or writes it,
/// if NOBYPASS_RECORD is set.
pub fn check(name: &str, printed: &str) {
    let text = fs::read_to_string(file()).unwrap();
    let [before, shown, behind] = split(&text, name);
    // Found some time after a pod's start, and so here or not.
    let later = |line: &&str| !line.contains("may send by packet sockets");
    let printed: String = printed.trim_end().lines().filter(later).map(|line| format!("{line}\n")).collect();
    if std::env::var_os(RECORD).is_some() {
        fs::write(file(), format!("{before}{printed}{behind}")).unwrap();
        return;
    }
    let [shown, printed] = [shown, &printed].map(|text| text.lines().map(normal).collect::<Vec<_>>());
    assert_eq!(
        shown, printed,
        "README.md shows as `{name}` (left) what is not printed any more (right): run the same test with {RECORD}=1"
    );
}

/// A line without what differs from run to run.
fn normal(line: &str) -> String {
    let line = line.replace("less than a second", "0 s");
    let words: Vec<&str> = line.split_whitespace().collect();
    let normal = words.iter().enumerate().map(|(n, word)| {
        // The numbers of what was counted while time went by.
        let next = words.get(n + 1).copied().unwrap_or_default().trim_end_matches(['.', ',']);
        let counted = ["s", "ms", "emitted", "suppressed", "attempts"].contains(&next);
        match word.split_once("nobypass-node-") {
            Some((_, rest)) => format!("#{}", rest.trim_start_matches(|c| c != '/')),
            // A UID.
            None if word.len() >= 36 && word.matches('-').count() == 4 => "#".to_owned(),
            None => digits(word, counted),
        }
    });
    normal.collect::<Vec<_>>().join(" ")
}

/// A word whose numbers are `#`: those of more than one digit, with what belongs to times and addresses, and all if asked.
fn digits(word: &str, all: bool) -> String {
    let number = |c: char| c.is_ascii_digit() || c == '.' || c == ':';
    let mut text = String::new();
    let mut rest = word;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        let (before, from) = rest.split_at(start);
        let run = from.find(|c| !number(c)).unwrap_or(from.len());
        let (run, behind) = from.split_at(run);
        let whole = behind.is_empty() && text.is_empty() && before.is_empty();
        let short = run.trim_end_matches(['.', ':']).len() == 1 && (whole || !behind.starts_with('s'));
        text.push_str(before);
        text.push_str(if short && !all { run } else { "#" });
        rest = behind;
    }
    text + rest
}

#[test]
fn what_differs_from_run_to_run_is_left_out() {
    for (one, other, same) in [
        ("a 13:36:36.153Z b", "a  00:00:00.000Z   b", true),
        ("10.50.0.2:45764 -> 198.51.100.2:8080:", "10.50.0.2:1000 -> 198.51.100.2:8080:", true),
        ("within 172 ms of", "within 5.6 ms of", true),
        ("(last seen 2 s ago)", "(last seen 13 s ago)", true),
        ("since less than a second ago: x", "since 14 s ago: x", true),
        ("uid 90a17f96-76f1-4e26-bb71-661bc505e7d4,", "uid 2c48913c-b29f-11e7-9350-00000000000a,", true),
        ("good  0s ago", "good  12s ago", true),
        ("/tmp/nobypass-node-1-0-aB/net.d", "/var/tmp/nobypass-node-2-0-cD/net.d", true),
        ("[\"/nobypass-node-1-0/kubepods\"] x", "[\"/nobypass-node-22-0/kubepods\"] x", true),
        ("events: 9 emitted, 0 suppressed, 0 lost", "events: 12 emitted, 9 suppressed, 0 lost", true),
        ("events: 9 emitted, 0 suppressed, 0 lost", "events: 9 emitted, 0 suppressed, 1 lost", false),
        ("1 SYN arrived", "0 SYN arrived", false),
        ("1 connection past the proxy, 0 through", "0 connection past the proxy, 1 through", false),
        ("mode audit (by --mode)", "mode audit", false),
    ] {
        assert_eq!(normal(one) == normal(other), same, "{one} | {other}: {}", normal(one));
    }
}
