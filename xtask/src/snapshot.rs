//! What a test run could leave behind on a machine: taken before and after, compared, each difference named.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::bpf;
use crate::exec::{find_program, output, tool};
use crate::process::{self, Process};

/// A set of things of one kind, each as the line that a message shows.
type Things = BTreeSet<String>;

/// The state of the machine, by kind of thing.
#[derive(Debug, Default)]
pub struct Snapshot {
    things: BTreeMap<&'static str, Things>,
    processes: Vec<Process>,
}

/// Directories in which a test, a container runtime or the agent may create entries, and which of them count.
const DIRECTORIES: [(&str, Option<&str>); 9] = [
    ("/run/netns", None),
    ("/run", Some("nobypass")),
    ("/run/containerd", None),
    ("/etc/cni/net.d", None),
    ("/opt/cni/bin", None),
    ("/var/lib/cni", None),
    ("/var/lib", Some("nobypass")),
    ("/tmp", Some("nobypass")),
    ("/sys/class/net", None),
];

/// cgroups that come and go with the system's own services and logins.
const FOREIGN_CGROUPS: [&str; 3] = ["/system.slice", "/user.slice", "/init.scope"];

impl Snapshot {
    pub fn take() -> Self {
        let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let mounts = mounts(&mountinfo);
        let at = |kinds: &[&str]| -> Vec<PathBuf> {
            mounts
                .iter()
                .filter(|mount| kinds.contains(&mount.kind.as_str()))
                .map(|m| m.point.clone())
                .collect()
        };
        let mut things = BTreeMap::new();
        things.insert("mount", mounts.iter().map(|mount| mount.line.clone()).collect());
        things.insert("cgroup", at(&["cgroup", "cgroup2"]).iter().flat_map(|root| cgroups(root)).collect());
        things.insert("pin", at(&["bpf"]).iter().flat_map(|root| tree(root, false)).collect());
        things.insert("entry", entries());
        things.insert("firewall rule", firewall());
        things.insert("BPF object", bpf_objects());
        Self { things, processes: process::all() }
    }

    /// What is different now: one line each. `mark` is in the environment of what this run started.
    pub fn differences(&self, after: &Self, mark: &str) -> Vec<String> {
        let mut lines = Vec::new();
        for (kind, after) in &after.things {
            let empty = Things::new();
            let before = self.things.get(kind).unwrap_or(&empty);
            lines.extend(after.difference(before).map(|thing| format!("{kind} left behind: {thing}")));
            lines.extend(before.difference(after).map(|thing| format!("{kind} gone: {thing}")));
        }
        let left = process::left_behind(&self.processes, &after.processes, mark);
        lines.extend(left.iter().map(|process| format!("process left behind: {process}")));
        lines
    }
}

#[derive(Debug, PartialEq, Eq)]
pub struct Mount {
    pub point: PathBuf,
    pub kind: String,
    /// Mount point, file system, source and root, without the ids that differ from time to time.
    line: String,
}

/// Reads `/proc/self/mountinfo`, see proc_pid_mountinfo(5).
pub fn mounts(mountinfo: &str) -> Vec<Mount> {
    mountinfo.lines().filter_map(mount).collect()
}

fn mount(line: &str) -> Option<Mount> {
    let (place, what) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let (root, point) = (place.next()?, place.next()?);
    let mut what = what.split(' ');
    let (kind, source) = (what.next()?, what.next()?);
    Some(Mount {
        point: PathBuf::from(point.replace("\\040", " ")),
        kind: kind.to_owned(),
        line: format!("{point} ({kind} {source}, root {root})"),
    })
}

/// All directories below a cgroup mount, but those of the system's own services.
fn cgroups(root: &Path) -> Vec<String> {
    let foreign = |path: &String| {
        let inside = path.strip_prefix(&*root.to_string_lossy()).unwrap_or(path);
        FOREIGN_CGROUPS.iter().any(|slice| inside.starts_with(slice))
    };
    tree(root, true).into_iter().filter(|path| !foreign(path)).collect()
}

/// Everything below `root`, or only the directories.
fn tree(root: &Path, only_directories: bool) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![root.to_path_buf()];
    while let Some(dir) = open.pop() {
        let Ok(entries) = fs::read_dir(&dir) else { continue };
        for entry in entries.filter_map(Result::ok) {
            let directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if directory {
                open.push(entry.path());
            }
            if directory || !only_directories {
                found.push(entry.path().display().to_string());
            }
        }
    }
    found
}

fn entries() -> Things {
    let mut things = Things::new();
    for (dir, only) in DIRECTORIES {
        let Ok(entries) = fs::read_dir(dir) else { continue };
        let names =
            entries.filter_map(Result::ok).map(|entry| entry.file_name().to_string_lossy().into_owned());
        let counts = |name: &String| only.is_none_or(|part| name.contains(part));
        things.extend(names.filter(counts).map(|name| format!("{dir}/{name}")));
    }
    things
}

/// The rules of this network namespace, without their counters.
fn firewall() -> Things {
    let mut things = Things::new();
    for command in [&["nft", "--stateless", "list", "ruleset"][..], &["iptables-save"], &["ip6tables-save"]] {
        let Some((program, args)) = command.split_first() else { continue };
        if find_program(program).is_none() {
            continue;
        }
        let rules = output(tool(program).args(args)).unwrap_or_default();
        things.extend(rules.lines().filter_map(|line| rule(program, line)));
    }
    things
}

/// Comments hold the time, chain lines their counters.
fn rule(program: &str, line: &str) -> Option<String> {
    let line = line.split(" [").next().unwrap_or_default().trim();
    (!line.is_empty() && !line.starts_with('#') && line != "}").then(|| format!("{program}: {line}"))
}

fn bpf_objects() -> Things {
    let mut things = Things::new();
    for kind in bpf::KINDS {
        for id in bpf::ids(kind).unwrap_or_default() {
            // One that ends while we look is not there.
            if let Some(what) = bpf::describe(kind, id) {
                things.insert(format!("{} {id} ({what})", kind.name));
            }
        }
    }
    things
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(kind: &'static str, things: &[&str]) -> Snapshot {
        let things = things.iter().map(ToString::to_string).collect();
        Snapshot { things: BTreeMap::from([(kind, things)]), processes: Vec::new() }
    }

    #[test]
    fn names_what_came_and_what_went() {
        let before = snapshot("mount", &["/a", "/b"]);
        assert_eq!(before.differences(&before, "m"), [""; 0]);
        let after = snapshot("mount", &["/b", "/c"]);
        assert_eq!(before.differences(&after, "m"), ["mount left behind: /c", "mount gone: /a"]);
    }

    #[test]
    fn a_kind_that_was_not_there_before_counts() {
        let lines = Snapshot::default().differences(&snapshot("pin", &["/p"]), "m");
        assert_eq!(lines, ["pin left behind: /p"]);
    }

    #[test]
    fn reads_mountinfo() {
        let text = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n\
                    99 27 0:4 net:[4026532281] /run/a\\040b rw - nsfs nsfs rw\nbroken\n1 2 3 - x";
        let mounts = mounts(text);
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[0].kind, "cgroup2");
        assert_eq!(mounts[0].line, "/sys/fs/cgroup/unified (cgroup2 cgroup2, root /)");
        assert_eq!(mounts[1].point, PathBuf::from("/run/a b"));
    }

    #[test]
    fn rules_lose_what_changes_by_itself() {
        for (line, want) in [
            ("# Generated by iptables-save on Mon", None),
            (":INPUT ACCEPT [12:3456]", Some("i: :INPUT ACCEPT")),
            ("-A INPUT -j DROP", Some("i: -A INPUT -j DROP")),
            ("\t}", None),
            ("", None),
        ] {
            assert_eq!(rule("i", line).as_deref(), want, "{line}");
        }
    }
}
