//! What an operator can get wrong, and what others can do to a node: the agent says what is the matter and what to do,
//! ends with the documented code, and leaves nothing half attached.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the helpers of a test may panic as the test may"
)]

mod support {
    #![allow(dead_code, reason = "each test target uses its part")]
    pub mod agent;
    pub mod machine;
    pub mod mounts;
}

use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;

use nobypass_testkit::cgroup::{Qos, v2_root};
use nobypass_testkit::foreign::{Foreign, Sharing};
use nobypass_testkit::netns::{FAR4, world_with_pod};
use nobypass_testkit::traffic::Traffic;
use support::agent::{Agent, BIN, Launch, run};
use support::machine::{HOOKS, Machine, UID, hook, says, sees_pod};
use support::mounts::Mounts;

#[test]
fn without_cgroup2_it_says_how_to_get_it() {
    let root = v2_root().unwrap();
    let mounts = Mounts::with(&format!("umount {}", root.display()));
    let ended = Launch::new(mounts.command(BIN), tempfile::tempdir().unwrap().path()).fail();
    says(
        &ended,
        69,
        &["no cgroup v2 hierarchy is mounted", "systemd.unified_cgroup_hierarchy=1", "/sys/fs/cgroup"],
    );
}

#[test]
fn a_view_that_a_cgroup_namespace_cut_short_is_refused() {
    let machine = Machine::new();
    let inside = machine.scratch.pod(Qos::Guaranteed, UID).unwrap();
    let root = v2_root().unwrap();
    let remount = format!("umount {0} && mount -t cgroup2 cgroup2 {0} && exec \"$0\" \"$@\"", root.display());
    let inherited: &[&str] = &["-C", BIN];
    let fresh: &[&str] = &["-C", "-m", "--propagation", "private", "sh", "-ec", &remount, BIN];
    for (args, why) in [(inherited, "the mount shows"), (fresh, "cgroup.type")] {
        let mut command = machine.mounts.command("unshare");
        inside.start(&mut command).unwrap();
        command.args(args);
        let ended = Launch::new(command, machine.home.path()).args(["--metrics-addr", "none"]).fail();
        says(&ended, 69, &["is not the root of the cgroup v2 hierarchy", why, "--cgroup-root", "hostPath"]);
    }
    fs::remove_dir(inside.path()).unwrap();
    machine.nothing_is_left();
}

#[test]
fn a_place_that_cannot_hold_pins_is_refused_before_anything_is_waited_for() {
    let machine = Machine::new();
    let on_disk = machine.home.path().join("bpf").display().to_string();
    // Without pod cgroups a sound agent would wait for the kubelet.
    for (dir, code, words) in [
        (on_disk.as_str(), 69, &["is not on a BPF file system", "mount -t bpf", "--bpf-dir"][..]),
        ("/sys/fs/bpf/no.bypass", 64, &["/sys/fs/bpf/no.bypass", "names with a dot", "--bpf-dir"]),
        ("/sys/fs/bpf/a/b.c/d", 64, &["/sys/fs/bpf/a/b.c/d", "dot"]),
        ("/proc/nobypass", 69, &["/proc/nobypass is not on a BPF file system"]),
    ] {
        says(&machine.launch_bare().args(["--bpf-dir", dir]).fail(), code, words);
    }
    assert!(!Path::new(&on_disk).exists());
    machine.nothing_is_left();
}

#[test]
fn without_tracefs_it_runs_says_so_and_sees_pods_all_the_same() {
    let machine = Machine::with(Mounts::with("mount -t bpf bpf /sys/fs/bpf"));
    let pod =
        |qos, n: u32| machine.scratch.pod(qos, &format!("2c48913c-b29f-11e7-9350-0209681477{n:02}")).unwrap();
    let before = pod(Qos::Burstable, 1);
    let agent = machine.launch_through("setpriv", &["--bounding-set", "-sys_admin"]).start().attached();
    agent.line(&["WARN", "tracefs is not mounted", "mount -t tracefs"]);
    agent.line(&["WARN", "a hook does not work", "cgroup_mkdir", "first packet"]);
    let status = agent.status();
    assert_eq!(hook(&status, "egress")["effective"], true, "{status}");
    assert_eq!(hook(&status, "cgroup_mkdir")["effective"], false, "{status}");
    assert_ne!(hook(&status, "cgroup_mkdir")["reason"], "", "{status}");
    assert_eq!(agent.metrics().sum("hook_effective", &[("hook", "cgroup_mkdir")]), 0);

    for after in [pod(Qos::Guaranteed, 2), pod(Qos::BestEffort, 3), before] {
        let id = after.id().unwrap();
        agent.until("the pod", |agent| sees_pod(agent, id).then_some(()));
        fs::remove_dir(after.path()).unwrap();
        agent.until("the pod's end", |agent| (!sees_pod(agent, id)).then_some(()));
    }
}

#[test]
fn a_tracefs_that_is_not_mounted_is_mounted_for_the_agent_alone() {
    let machine = Machine::with(Mounts::with("mount -t bpf bpf /sys/fs/bpf"));
    let agent = machine.launch().start().attached();
    assert_eq!(hook(&agent.status(), "cgroup_mkdir")["effective"], true);
    machine.all_is_attached();
    assert!(!machine.mounts.sh("cat /proc/mounts").contains("tracefs"), "others do not see it");
}

#[test]
fn missing_privileges_are_named() {
    let machine = Machine::new();
    fs::set_permissions(machine.home.path(), fs::Permissions::from_mode(0o777)).unwrap();
    for args in [
        &["--bounding-set", "-bpf,-sys_admin"][..],
        &["--bounding-set", "-net_admin,-sys_admin"],
        &["--bounding-set", "-perfmon,-sys_admin"],
        &["--bounding-set", "-all"],
        &["--reuid", "65534", "--regid", "65534", "--clear-groups"],
    ] {
        let ended = machine.launch_through("setpriv", args).fail();
        says(&ended, 77, &["run as root"]);
        machine.nothing_is_left();
    }
    fs::set_permissions(machine.home.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let nobody = ["--reuid", "65534", "--regid", "65534", "--clear-groups"];
    let ended = machine.launch_through("setpriv", &nobody).fail();
    says(&ended, 77, &["cannot listen on", "agent.sock", "run as root", "--socket"]);
    machine.nothing_is_left();

    // The commands that need it say so as well.
    let agent = machine.launch().start().attached();
    for words in [&["status"][..], &["mode"], &["cleanup"]] {
        let mut command = machine.mounts.command("setpriv");
        command.args(nobody).arg(BIN).args(words);
        if words[0] == "status" {
            command.arg("--socket").arg(agent.socket());
        }
        says(&run(command), 77, &["ermission denied"]);
    }
    machine.all_is_attached();
}

#[test]
fn an_exclusive_program_above_is_reported_and_left_alone() {
    let machine = Machine::new();
    let foreign = Foreign::attach(machine.scratch.top(), Sharing::Exclusive, true).unwrap();
    let ended = machine.launch().fail();
    let top = format!("exclusively to {} ", machine.scratch.top().display());
    says(
        &ended,
        69,
        &["cannot attach egress", "(foreign)", &top, "BPF_F_ALLOW_MULTI", "nobypass leaves it alone"],
    );
    assert_eq!(machine.programs(), ["foreign"]);
    assert_eq!(machine.mounts.pins(), [""; 0]);

    drop(foreign);
    let _agent = machine.launch().start().attached();
    machine.all_is_attached();
}

/// The old way of sharing: ours takes the place of such a one, for which its owner is told how to attach it.
#[test]
fn a_program_above_whose_place_ours_takes_is_reported_and_left_alone() {
    let machine = Machine::new();
    let _foreign = Foreign::attach(machine.scratch.top(), Sharing::Override, true).unwrap();
    let agent = machine.launch().start().attached();
    let place = format!("(foreign) on {} (egress)", machine.scratch.top().display());
    agent.line(&["WARN", &place, "BPF_F_ALLOW_OVERRIDE", "BPF_F_ALLOW_MULTI"]);
    let status = agent.status();
    let note = status["agent"]["notes"][0].as_str().unwrap();
    assert!(note.starts_with("foreign-programs: ") && note.contains(&place), "{note}");
    assert!(agent.terminate().success());
    assert_eq!(machine.cleanup().code, Some(0));
    assert_eq!(machine.programs(), ["foreign"]);
}

#[test]
fn programs_of_others_and_ours_do_not_disturb_each_other() {
    let machine = Machine::new();
    let (world, net) = world_with_pod("foreign").unwrap();
    let _server = Traffic::new().netns(world.far()).server(&[8080]).unwrap();
    let pod = machine.scratch.pod(Qos::Burstable, UID).unwrap();
    let container = pod.container("app").unwrap();
    let traffic = Traffic::new().netns(&net.ns).cgroup(&container).option("timeout-ms", 200);

    let above = Foreign::attach(machine.scratch.top(), Sharing::Multi, true).unwrap();
    let agent = machine.launch().start().attached();
    let unknown = |agent: &Agent| agent.metrics().sum("kernel_counts_total", &[("counter", "unknown")]);
    let mut connections = unknown(&agent);
    let mut connect = |saw: &str| {
        let report = traffic.run(&[&"tcp4", &FAR4, &8080]).unwrap();
        assert_eq!(report.saw(), saw);
        let now = unknown(&agent);
        assert!(now > connections, "ours has seen no connection: {now}");
        connections = now;
    };
    connect("plain");
    let on_the_pod = Foreign::attach(pod.path(), Sharing::Multi, true).unwrap();
    connect("plain");
    drop(on_the_pod);
    let on_the_pod = Foreign::attach(pod.path(), Sharing::Multi, false).unwrap();
    connect("TIMEOUT");
    drop(on_the_pod);
    drop(above);
    let _above = Foreign::attach(machine.scratch.top(), Sharing::Multi, false).unwrap();
    connect("TIMEOUT");
    // Ours goes, theirs stays.
    assert!(agent.terminate().success());
    assert_eq!(machine.cleanup().code, Some(0));
    assert_eq!(machine.programs(), ["foreign"]);
    assert_eq!(machine.mounts.pins(), [""; 0]);
}

#[test]
fn a_container_runtime_that_does_not_answer_keeps_it_waiting_and_not_from_working() {
    let machine = Machine::new();
    let socket = |name: &str| machine.home.path().join(name);
    let _silent = UnixListener::bind(socket("silent.sock")).unwrap();
    let wrong = UnixListener::bind(socket("wrong.sock")).unwrap();
    std::thread::spawn(move || {
        for mut stream in wrong.incoming().flatten() {
            // The client may have given up.
            let _ = stream.write_all(b"-ERR unknown command\r\n");
        }
    });
    drop(UnixListener::bind(socket("dead.sock")).unwrap());
    fs::write(socket("file.sock"), "").unwrap();
    for (name, words) in [
        ("missing.sock", &["cannot connect to the container runtime", "No such file"][..]),
        ("dead.sock", &["cannot connect to the container runtime", "refused"]),
        ("file.sock", &["cannot connect to the container runtime", "refused"]),
        ("wrong.sock", &["container runtime at"]),
        ("silent.sock", &["did not answer Version within 5s"]),
    ] {
        let path = socket(name).display().to_string();
        let kubepods = machine.scratch.kubepods().display().to_string();
        let args = ["--cri-endpoint", &path, "--pod-parent", &kubepods];
        let mut agent = machine.launch_bare().args(args).start().attached();
        agent.until("the reason in /readyz", |agent| {
            let (code, body) = agent.get("/readyz")?;
            let line = body.lines().find(|line| line.starts_with("pods: "))?.to_owned();
            assert_eq!(code, 503, "{body}");
            (line.contains(&path) && words.iter().all(|word| line.contains(word))).then_some(())
        });
        assert_eq!(agent.get("/livez"), Some((200, "ok\n".into())), "{name}");
        assert_eq!(agent.metrics().sum("ready", &[]), 0);
        agent.line(&["WARN", "container runtime does not answer"]);
        assert!(agent.is_running());
        assert!(agent.terminate().success());
    }
    machine.all_is_attached();
}

#[test]
fn addresses_that_are_taken_are_named_and_what_is_not_ours_is_not_touched() {
    let machine = Machine::with(Mounts::with(
        "mount -t bpf bpf /sys/fs/bpf; mount -t tracefs tracefs /sys/kernel/tracing; mount -t tmpfs -o ro tmpfs /mnt",
    ));
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let metrics = |address: &str| {
        let args = [
            Path::new("--pod-parent"),
            &machine.scratch.kubepods(),
            Path::new("--metrics-addr"),
            Path::new(address),
        ];
        Launch::new(machine.mounts.command(BIN), machine.home.path()).args(args).fail()
    };
    says(&metrics(&address), 1, &["cannot listen on", &address, "in use", "--metrics-addr"]);
    says(&metrics("192.0.2.1:9910"), 1, &["cannot listen on 192.0.2.1:9910", "--metrics-addr"]);
    machine.nothing_is_left();

    // A socket of somebody who lives, a file, a directory, a place where nothing can be made, a name too long.
    let live = machine.home.path().join("live.sock");
    let _listener = UnixListener::bind(&live).unwrap();
    let file = machine.home.path().join("precious");
    fs::write(&file, "precious").unwrap();
    let long = machine.home.path().join("x".repeat(108));
    let try_socket = |path: &Path| {
        let mut command = machine.mounts.command(BIN);
        command.args([
            Path::new("agent"),
            Path::new("--metrics-addr"),
            Path::new("none"),
            Path::new("--socket"),
            path,
        ]);
        command.arg("--pod-parent").arg(machine.scratch.kubepods());
        run(command)
    };
    for (path, words) in [
        (live.as_path(), &["live.sock", "another agent answers on it", "--socket"][..]),
        (&file, &["precious", "not a socket", "--socket"]),
        (machine.home.path(), &["not a socket", "--socket"]),
        (Path::new("/mnt/agent.sock"), &["/mnt/agent.sock", "Read-only", "--socket"]),
        (Path::new("/mnt/new/agent.sock"), &["/mnt/new/agent.sock", "Read-only", "--socket"]),
        (&long, &["--socket"]),
    ] {
        says(&try_socket(path), 1, words);
        machine.nothing_is_left();
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    assert!(live.exists());

    // A dead agent's socket is replaced.
    machine.launch().start().attached().kill();
    assert!(machine.home.path().join("agent.sock").exists());
    let agent = machine.launch().start().attached();
    let mode = fs::metadata(agent.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let socket = agent.socket().to_owned();
    assert!(agent.terminate().success());
    assert!(!socket.exists());
}

#[test]
fn a_pods_cgroup_that_is_not_one_is_named() {
    let machine = Machine::new();
    let missing = machine.scratch.top().join("kubepod").display().to_string();
    for (path, words) in [
        ("/tmp", &["--pod-parent /tmp", "does not exist below", "check the spelling"][..]),
        ("../escape", &["--pod-parent ../escape", "not below the cgroup root"]),
        ("/", &["--pod-parent / ", "not below the cgroup root"]),
        (&missing, &["--pod-parent", "kubepod does not exist", "check the spelling"]),
    ] {
        says(&machine.launch_bare().args(["--pod-parent", path]).fail(), 64, words);
    }
    let root = machine.home.path().display().to_string();
    let ended = machine.launch_bare().args(["--cgroup-root", &root]).fail();
    says(&ended, 69, &["--cgroup-root", &root, "is not on a cgroup v2 file system"]);
    machine.nothing_is_left();
}

#[test]
fn the_kubelet_may_come_later_also_on_a_node_that_is_itself_a_container() {
    let machine = Machine::new();
    let kubepods = machine.scratch.kubepods();
    fs::remove_dir(&kubepods).unwrap();
    let top = machine.scratch.top().display().to_string();
    let at = machine.scratch.top().strip_prefix(v2_root().unwrap()).unwrap().components().count().to_string();
    let agent = machine.launch_bare().args(["--cgroup-root", &top, "--cgroup-root-level", &at]).start();
    agent.until("the reason in /readyz", |agent| {
        let (code, body) = agent.get("/readyz")?;
        assert_eq!(code, 503, "{body}");
        body.contains("pod-cgroups: no pod cgroups yet, waiting for the kubelet").then_some(())
    });
    assert_eq!(agent.get("/livez"), Some((200, "ok\n".into())));
    assert_eq!(agent.get("/metrics").unwrap().0, 503);
    let ended = machine.nobypass(&["status", "--socket", &agent.socket().display().to_string()]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.err.contains("the agent is starting: ") && ended.err.contains("kubelet"), "{}", ended.err);
    assert_eq!(machine.mounts.pins(), [""; 0], "too early");

    fs::create_dir(&kubepods).unwrap();
    let agent = agent.attached();
    let status = agent.status();
    assert_eq!(hook(&status, "cgroup_mkdir")["effective"], false, "the kernel shows other paths: {status}");
    for (qos, uid) in [(Qos::Guaranteed, UID), (Qos::Burstable, "2c48913c-b29f-11e7-9350-020968147797")] {
        let pod = machine.scratch.pod(qos, uid).unwrap();
        let id = pod.id().unwrap();
        agent.until("the pod", |agent| sees_pod(agent, id).then_some(()));
        fs::remove_dir(pod.path()).unwrap();
        agent.until("the pod's end", |agent| (!sees_pod(agent, id)).then_some(()));
    }
}

#[test]
fn preflight_foretells_what_the_agent_will_say() {
    let machine = Machine::new();
    let all = machine.nobypass(&["preflight"]);
    assert_eq!(all.code, Some(0), "{}{}", all.out, all.err);
    assert!(!all.out.contains("FAIL") && !all.out.contains("warn"), "{}", all.out);
    let attached = all.out.lines().filter(|line| line.contains("loads and attaches")).count();
    assert_eq!(attached, HOOKS.len(), "{}", all.out);

    let failing = |mounts: &Mounts, program: &[&str]| {
        let (first, rest) = program.split_first().unwrap();
        let mut command = mounts.command(first);
        command.args(rest).args(["preflight", "-o", "json"]);
        let ended = run(command);
        let checks: Vec<serde_json::Value> = serde_json::from_str(&ended.out).unwrap();
        let failed =
            checks.iter().filter(|check| check["level"] == "fail").map(|check| check["name"].to_string());
        (ended.code, failed.collect::<Vec<_>>(), ended.out)
    };
    let (code, failed, out) = failing(&Mounts::with("true"), &[BIN]);
    assert_eq!((code, failed), (Some(69), vec!["\"bpffs\"".to_owned()]), "{out}");
    let without =
        Mounts::with(&format!("mount -t bpf bpf /sys/fs/bpf; umount {}", v2_root().unwrap().display()));
    let (code, failed, out) = failing(&without, &[BIN]);
    assert_eq!((code, failed), (Some(69), vec!["\"cgroup2\"".to_owned()]), "{out}");
    assert!(out.contains("systemd.unified_cgroup_hierarchy=1"), "{out}");
    let (code, failed, out) =
        failing(&machine.mounts, &["setpriv", "--bounding-set", "-perfmon,-sys_admin", BIN]);
    assert_eq!(code, Some(69), "{out}");
    assert_eq!(failed, ["\"capabilities\"", "\"program egress\""], "{out}");
    assert!(out.contains("missing CAP_PERFMON"), "{out}");
    machine.nothing_is_left();
}
