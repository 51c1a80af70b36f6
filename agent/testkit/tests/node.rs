//! The race that nobypass exists for, on a real container runtime and without nobypass.

#![expect(clippy::unwrap_used, reason = "the helpers of a test may panic as the test may")]

use std::path::{Path, PathBuf};
use std::process::Command;

use nobypass_testkit::node::{ContainerSpec, EXT_PORT, EXT4, EXT6, Node, Pod, PodSpec};
use nobypass_testkit::{cgroup, proc, wait};

fn app_sees(node: &Node, pod: &Pod, address: &str) -> String {
    let command = if address.contains(':') { "tcp6" } else { "tcp4" };
    node.traffic(pod, "app", &[command, address, EXT_PORT]).unwrap().saw().to_owned()
}

fn await_proxy(node: &Node, pod: &Pod) {
    node.wait_for_log(pod, "linkerd-proxy", |line| line.contains("\"ready\":true")).unwrap();
}

#[test]
fn a_pod_that_starts_before_the_plugin_goes_around_its_proxy_for_ever() {
    let mut node = Node::new().unwrap();
    node.write_conflist(false).unwrap();
    let before = node.run_pod(PodSpec::meshed("before").unwrap()).unwrap();
    await_proxy(&node, &before);
    assert_eq!(app_sees(&node, &before, EXT4), "plain");

    node.write_conflist(true).unwrap();
    let after = node.run_pod(PodSpec::meshed("after").unwrap()).unwrap();
    await_proxy(&node, &after);
    assert_eq!(app_sees(&node, &after, EXT4), "mesh");
    // The chart's default: no rules for IPv6.
    assert_eq!(app_sees(&node, &after, EXT6), "plain");
    assert_eq!(app_sees(&node, &before, EXT4), "plain", "nobody repairs the first pod");

    let bare = node.run_pod(PodSpec::new("no-proxy", vec![ContainerSpec::idle_app()]).unwrap()).unwrap();
    assert_eq!(app_sees(&node, &bare, EXT4), "ECONNREFUSED", "rules without a proxy fail closed");

    let outside = node.server().stats().unwrap();
    assert_eq!((outside.count("tcp_plain"), outside.count("tcp_mesh")), (3, 1), "{outside}");
    let calls = std::fs::read_to_string(node.mesh_log()).unwrap();
    assert!(calls.contains("\"pod\":\"after\"") && !calls.contains("\"pod\":\"before\""), "{calls}");
    node.stop().unwrap();
}

#[test]
fn pods_are_where_a_kubelet_would_put_them() {
    let node = Node::new().unwrap();
    node.write_conflist(false).unwrap();
    let pod = node.run_pod(PodSpec::meshed("where").unwrap()).unwrap();
    assert!(pod.cgroup.starts_with(node.kubepods().join("burstable")), "{pod:?}");
    let app = std::fs::read_to_string(pod.container_cgroup("app").unwrap().join("cgroup.procs")).unwrap();
    let pid: u32 = app.trim().parse().unwrap();
    assert_eq!(
        cgroup_inode(&format!("/proc/{pid}/ns/net")),
        pod.enter().unwrap().inode().unwrap(),
        "the process ids are the machine's"
    );
    assert!(pod.ip.starts_with("10.50.0.") && pod.ips.len() == 2, "{pod:?}");

    // A process of the node sees the node's mounts, which the machine does not.
    let mut ls = node.command("ls").unwrap();
    ls.args(["/run/netns", "/var/lib/cni/results"]);
    let seen = proc::check(ls, "").unwrap();
    assert!(seen.contains(pod.netns.rsplit('/').next().unwrap()), "{seen}");
    assert!(!Path::new(&pod.netns).exists());
    assert!(node.cni_cache_dir().join("results").is_dir());

    let out = node.exec(&pod, "app", &["/bin/sh", "-c", "id -u; exit 3"]).unwrap();
    assert_eq!((out.stdout.as_str(), out.exit_code), ("1000\n", 3));
    node.remove_pod(&pod).unwrap();
    assert!(!pod.cgroup.exists());
}

fn cgroup_inode(path: &str) -> u64 {
    std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(path).unwrap())
}

/// What a node named after process `pid` has left on the machine.
fn leftovers(pid: u32) -> Vec<PathBuf> {
    let name = format!("nobypass-node-{pid}-");
    let mut dirs = cgroup::all_roots().unwrap();
    dirs.push(std::env::temp_dir());
    let entries = dirs.iter().flat_map(|dir| std::fs::read_dir(dir).unwrap().flatten());
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&name))
        .map(|entry| entry.path())
        .collect()
}

/// Not a test of its own: the body of the process that the next test kills.
#[test]
#[ignore = "started by a_killed_test_leaves_nothing"]
fn victim() {
    let node = Node::new().unwrap();
    node.write_conflist(true).unwrap();
    let pod = node.run_pod(PodSpec::meshed("victim").unwrap()).unwrap();
    // Read by the other test; by now everything that could stay behind exists.
    std::fs::write(node.base_dir().join("up"), pod.pid.to_string()).unwrap();
    wait::until("being killed", wait::LONG, || None::<()>).unwrap();
}

#[test]
fn a_killed_test_leaves_nothing() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "victim"]);
    let victim = proc::spawn(command).unwrap();
    let pid = victim.pid();
    let sandbox = wait::until("the victim's pod", wait::LONG, || {
        let up = leftovers(pid).iter().find_map(|dir| std::fs::read_to_string(dir.join("up")).ok())?;
        up.parse::<u32>().ok()
    })
    .unwrap();
    assert!(Path::new(&format!("/proc/{sandbox}")).exists());
    drop(victim);
    wait::until("the supervisor's clean-up", wait::LONG, || leftovers(pid).is_empty().then_some(())).unwrap();
    assert!(!Path::new(&format!("/proc/{sandbox}")).exists(), "the pod still runs");
}
