//! Devices of a pod's network namespace by name.

use std::collections::BTreeSet;
use std::fs;

use crate::pods::model::{PodFacts, State};

/// The indices of a pod's devices with these names (`net+` means all that start with `net`), sorted. A device that is
/// not there, or a pod without a process, gives none: it is not exempt then.
pub fn indices(pod: &PodFacts, names: &[Box<str>]) -> Vec<u32> {
    if names.is_empty() {
        return Vec::new();
    }
    let sandbox = pod.sandbox.as_ref().filter(|sandbox| sandbox.ready).and_then(|sandbox| sandbox.pid);
    let running = pod.containers.iter().filter(|container| container.state == State::Running);
    let pids = sandbox.into_iter().chain(running.filter_map(|container| container.pid));
    // Both list the devices of the process's network namespace, the one those that speak IPv4, the other IPv6.
    let tables =
        |pid: u32| ["igmp", "igmp6"].map(|table| fs::read_to_string(format!("/proc/{pid}/net/{table}")));
    let found = pids.map(tables).find(|tables| tables.iter().any(Result::is_ok));
    let tables = found.into_iter().flatten().flatten();
    let all: BTreeSet<u32> = tables.flat_map(|table| matching(&table, names).collect::<Vec<_>>()).collect();
    all.into_iter().collect()
}

/// Indices of the devices with these names in `/proc/<pid>/net/igmp` (`2\teth0      :     1      V3`) or `igmp6`
/// (`2    eth0            ff02…`). Lines of an IPv4 device's groups are indented.
fn matching<'a>(table: &'a str, names: &'a [Box<str>]) -> impl Iterator<Item = u32> + 'a {
    table.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_digit())).filter_map(move |line| {
        let mut words = line.split_whitespace();
        let index = words.next()?.parse().ok()?;
        let device = words.next()?.trim_end_matches(':');
        names.iter().any(|name| is_named(name, device)).then_some(index)
    })
}

fn is_named(name: &str, device: &str) -> bool {
    match name.strip_suffix('+') {
        Some(prefix) => device.starts_with(prefix),
        None => name == device,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::PodUid;
    use crate::pods::model::{Container, PodFacts};

    const IGMP: &str = "Idx\tDevice    : Count Querier\tReporter\n1\tlo        :     1      V3\n\t\t\t\t010000E0     1 \
                        0:00000000\t\t0\n2\teth0      :     1      V3\n\t\t\t\t010000E0     1 0:00000000\t\t0\n3\tnet1      \
                        :     1      V3\n14\ta-long-device-1:     1      V3\n";
    const IGMP6: &str = "1    lo              ff020000000000000000000000000001     1 0000000C 0\n3    net1            \
                         ff0200000000000000000001ff000002     1 00000004 0\n5    net2            ff02 1 4 0\n";

    fn find(table: &str, names: &[&str]) -> Vec<u32> {
        let names: Vec<Box<str>> = names.iter().map(|name| (*name).into()).collect();
        matching(table, &names).collect()
    }

    #[test]
    fn devices_by_name() {
        assert_eq!(find(IGMP, &["net1"]), [3]);
        assert_eq!(find(IGMP, &["eth0", "net+"]), [2, 3]);
        assert_eq!(find(IGMP, &["net", "eth"]), [0; 0]);
        assert_eq!(find(IGMP, &["a-long-device-1"]), [14]);
        assert_eq!(find(IGMP6, &["net+"]), [3, 5]);
        assert_eq!(find("", &["+"]), [0; 0]);
    }

    /// The loopback device is 1 in every namespace.
    #[test]
    fn of_a_live_process() {
        let container =
            Container { state: State::Running, pid: Some(std::process::id()), ..Container::new("app") };
        let uid = PodUid::parse("72f9a42e-50d3-47ee-8ec7-0bccfb6ea7ae").unwrap();
        let pod = PodFacts { containers: vec![container], ..PodFacts::new(uid, "n", "p") };
        assert_eq!(indices(&pod, &["lo".into()]), [1]);
        assert_eq!(indices(&pod, &["no-such-device".into()]), [0; 0]);
        assert_eq!(indices(&PodFacts { containers: Vec::new(), ..pod }, &["lo".into()]), [0; 0]);
    }
}
