//! Processes, and which of the new ones a run has left behind.

use std::collections::HashSet;
use std::fmt;
use std::fs;

/// One process at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    pub pid: u32,
    pub parent: u32,
    /// In clock ticks since boot: with the pid, it tells a process from a later one of the same number.
    pub start: u64,
    pub name: String,
    pub command_line: String,
    /// The lines of `/proc/<pid>/cgroup`.
    pub cgroups: String,
    /// `net:[4026531840]`
    pub net: String,
    /// `NAME=value` pairs, separated by NUL bytes.
    pub environment: String,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ({})", self.pid, self.name, self.command_line)
    }
}

/// All processes but kernel threads.
pub fn all() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.filter_map(Result::ok).filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(read).filter(|process| process.pid != 2 && process.parent != 2).collect()
}

fn read(pid: u32) -> Option<Process> {
    let file = |name: &str| -> String {
        let bytes = fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let stat = file("stat");
    let (name, state, parent, start) = parse_stat(&stat)?;
    let net = fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    // A zombie is its parent's to collect; the parent counts.
    (state != "Z").then(|| Process {
        pid,
        parent,
        start,
        name,
        command_line: file("cmdline").trim_end_matches('\0').replace('\0', " "),
        cgroups: file("cgroup"),
        net: net.map(|net| net.to_string_lossy().into_owned()).unwrap_or_default(),
        environment: file("environ"),
    })
}

/// Name, state, parent and start time of `/proc/<pid>/stat`; the name may hold blanks and parentheses.
fn parse_stat(stat: &str) -> Option<(String, &str, u32, u64)> {
    let (head, tail) = stat.rsplit_once(") ")?;
    let (_, name) = head.split_once(" (")?;
    let mut fields = tail.split(' ');
    let (state, parent) = (fields.next()?, fields.next()?.parse().ok()?);
    // Field 22 of proc_pid_stat(5); the state is field 3.
    let start = fields.nth(17)?.parse().ok()?;
    Some((name.to_owned(), state, parent, start))
}

/// Those of `after` that were not there before and that this run has started: `mark` is in their environment, or
/// they are in a cgroup or network namespace that is new (as a container is, whose environment is its own), or
/// one of their ancestors is such a process. Ourselves and our ancestors do not count.
pub fn left_behind<'a>(before: &[Process], after: &'a [Process], mark: &str) -> Vec<&'a Process> {
    let old: HashSet<(u32, u64)> = before.iter().map(|process| (process.pid, process.start)).collect();
    let cgroups: HashSet<&str> = before.iter().map(|process| process.cgroups.as_str()).collect();
    let nets: HashSet<&str> = before.iter().map(|process| process.net.as_str()).collect();
    let new = after.iter().filter(|process| !old.contains(&(process.pid, process.start)));
    let new: Vec<&Process> = new.filter(|process| process.pid != std::process::id()).collect();
    let mut ours: HashSet<u32> = HashSet::new();
    loop {
        let count = ours.len();
        for process in &new {
            let marked = process.environment.split('\0').any(|pair| pair == mark);
            let inside = !cgroups.contains(process.cgroups.as_str()) || !nets.contains(process.net.as_str());
            if marked || inside || ours.contains(&process.parent) {
                ours.insert(process.pid);
            }
        }
        if ours.len() == count {
            return new.into_iter().filter(|process| ours.contains(&process.pid)).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARK: &str = "RUN=1";

    fn process(pid: u32, parent: u32, environment: &str) -> Process {
        let cgroups = "0::/\n".into();
        Process { pid, parent, start: 5, environment: environment.into(), cgroups, ..Process::default() }
    }

    fn left(before: &[Process], after: &[Process]) -> Vec<u32> {
        left_behind(before, after, MARK).iter().map(|process| process.pid).collect()
    }

    #[test]
    fn only_new_and_only_ours() {
        let before = [process(10, 1, ""), process(11, 1, "RUN=1")];
        let mut after = before.to_vec();
        assert_eq!(left(&before, &after), [0; 0], "old ones do not count");
        after.push(process(20, 1, "A=b\0RUN=1\0"));
        after.push(process(21, 1, "RUN=12\0XRUN=1"));
        assert_eq!(left(&before, &after), [20], "another's new process does not count");
    }

    #[test]
    fn a_reused_pid_is_a_new_process() {
        let reused = Process { start: 9, ..process(10, 1, "RUN=1") };
        assert_eq!(left(&[process(10, 1, "")], &[reused]), [10]);
    }

    #[test]
    fn children_count_whatever_their_environment_and_order() {
        let before = [process(10, 1, "")];
        let after = [process(32, 31, ""), process(31, 30, ""), process(30, 1, "RUN=1"), process(40, 10, "")];
        assert_eq!(left(&before, &after), [32, 31, 30]);
    }

    #[test]
    fn containers_are_known_by_cgroup_or_network() {
        let before = [process(10, 1, "")];
        let pod = Process { cgroups: "0::/kubepods/pod1\n".into(), ..process(50, 1, "") };
        let netns = Process { net: "net:[7]".into(), ..process(51, 1, "") };
        assert_eq!(left(&before, &[pod, netns]), [50, 51]);
    }

    #[test]
    fn reads_stat_with_an_awkward_name() {
        let stat = "42 (a) b (c) S 7 1 1 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 12345 9 9";
        assert_eq!(parse_stat(stat), Some(("a) b (c".to_owned(), "S", 7, 12345)));
        assert_eq!(parse_stat("42 (x) S"), None);
    }

    #[test]
    fn sees_itself() {
        let own = std::process::id();
        let found = all().into_iter().find(|process| process.pid == own).expect("this process runs");
        assert!(found.start > 0 && !found.name.is_empty());
    }
}
