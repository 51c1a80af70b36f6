//! Rules of this repository that no other tool checks: where `unsafe` may be, which module may know which, and
//! how long a file may get.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::exec::{output, repo_root};

const MAX_LINES: usize = 500;
/// Of a test target: a table of cases reads better in one piece.
const MAX_TEST_LINES: usize = 700;

/// Everything else is safe Rust.
const UNSAFE_ALLOWED: [&str; 7] = [
    "agent/build.rs",
    "agent/src/sys/",
    "agent/testkit/",
    "common/src/",
    "ebpf/",
    "xtask/src/bpf.rs",
    "xtask/src/rules.rs",
];

/// Which directory must not mention what; the arrows of ARCHITECTURE.md.
const ARROWS: [(&str, &[&str], &str); 4] = [
    (
        "agent/src/cni/",
        &["crate::bpf", "crate::policy", "kube::"],
        "`cni` works with no eBPF and no API server",
    ),
    ("agent/src/bpf/", &["crate::cni", "crate::pods", "kube::"], "`bpf` works with no Kubernetes"),
    ("agent/src/sys/", &["crate::cni", "crate::bpf", "crate::pods", "kube::"], "`sys` knows nobody"),
    ("agent/src/mesh/", &["crate::bpf", "crate::cni", "kube::"], "`mesh` is data and pure recognition"),
];

/// What makes a test ignored, in two pieces lest this file be found by those who look for it.
const IGNORE: &str = concat!("#[", "ignore");
/// Reasons to ignore a test: another one runs it.
const BODIES: [&str; 2] = ["= \"body of", "= \"started by"];

/// One line for each breach in the files that git knows.
pub fn check_repository() -> Result<Vec<String>> {
    let files = output(std::process::Command::new("git").current_dir(repo_root()).args([
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "*.rs",
    ]))?;
    let mut breaches = Vec::new();
    for file in files.lines().filter(|file| repo_root().join(file).is_file()) {
        let text = fs::read_to_string(repo_root().join(Path::new(file)));
        breaches.extend(check(file, &text.with_context(|| format!("cannot read {file}"))?));
    }
    Ok(breaches)
}

fn check(file: &str, text: &str) -> Vec<String> {
    let mut breaches = Vec::new();
    let lines = text.lines().count();
    let most = if file.contains("/tests/") { MAX_TEST_LINES } else { MAX_LINES };
    if lines > most {
        breaches.push(format!("{file}: {lines} lines; split it (at most {most})"));
    }
    for (number, line) in text.lines().enumerate() {
        let code = code_of(line);
        let place = format!("{file}:{}", number + 1);
        if has_word(&code, "unsafe") && !UNSAFE_ALLOWED.iter().any(|allowed| file.starts_with(allowed)) {
            breaches.push(format!("{place}: `unsafe` outside of agent/src/sys"));
        }
        if code.trim_start().starts_with(IGNORE) && !BODIES.iter().any(|body| line.contains(body)) {
            breaches.push(format!(
                "{place}: an ignored test that no other one runs: `#[ignore = \"body of …\"]`"
            ));
        }
        for (dir, forbidden, why) in ARROWS {
            let name = forbidden.iter().find(|name| file.starts_with(dir) && code.contains(**name));
            breaches.extend(name.map(|name| format!("{place}: `{name}` here: {why}")));
        }
    }
    breaches
}

/// The line without comments and without the content of strings.
fn code_of(line: &str) -> String {
    let mut code = String::new();
    let mut quoted = false;
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' if quoted => drop(chars.next()),
            '"' => quoted = !quoted,
            '/' if !quoted && chars.peek() == Some(&'/') => break,
            _ if quoted => {}
            _ => code.push(c),
        }
    }
    code
}

fn has_word(code: &str, word: &str) -> bool {
    let inside = |c: char| c.is_alphanumeric() || c == '_';
    code.split(|c| !inside(c)).any(|part| part == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_is_found_only_in_code_and_only_where_it_must_not_be() {
        for (file, line, breaches) in [
            ("agent/src/app.rs", "    unsafe { f() }", 1),
            ("agent/src/app.rs", "let x = 1; // unsafe { }", 0),
            ("agent/src/app.rs", "warn!(\"unsafe \\\" thing\");", 0),
            ("agent/src/app.rs", "#[expect(unsafe_code)]", 0),
            ("agent/src/sys/mod.rs", "unsafe fn f() {}", 0),
            ("agent/tests/a.rs", "unsafe impl Send for X {}", 1),
        ] {
            assert_eq!(check(file, line).len(), breaches, "{file}: {line}");
        }
    }

    #[test]
    fn arrows_are_kept() {
        assert_eq!(check("agent/src/cni/plan.rs", "use crate::bpf::load;").len(), 1);
        assert_eq!(check("agent/src/cni/plan.rs", "//! unlike crate::bpf").len(), 0);
        assert_eq!(check("agent/src/app.rs", "use crate::bpf::load;").len(), 0);
        assert_eq!(check("agent/src/bpf/links.rs", "use kube::Client;").len(), 1);
    }

    #[test]
    fn long_files_are_named() {
        assert_eq!(check("a.rs", &"x\n".repeat(MAX_LINES)), [""; 0]);
        assert_eq!(check("a.rs", &"x\n".repeat(MAX_LINES + 1)).len(), 1);
    }
}
