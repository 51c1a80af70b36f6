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
    pub mod mounts;
}

use std::fs::{self, File};
use std::io::Write as _;
use std::net::TcpListener;
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nobypass::sys::bpf::{AttachType, attached, program_name};
use nobypass_testkit::cgroup::{Qos, Scratch, v2_root};
use nobypass_testkit::foreign::{Foreign, Sharing, pin_map};
use nobypass_testkit::netns::{FAR4, world_with_pod};
use nobypass_testkit::traffic::Traffic;
use nobypass_testkit::wait;
use support::agent::{Agent, BIN, Ended, Launch, run};
use support::mounts::Mounts;

const BPF_DIR: &str = "/sys/fs/bpf/nobypass";
const HOOKS: [AttachType; 4] =
    [AttachType::Egress, AttachType::Ingress, AttachType::Connect4, AttachType::Connect6];
const UID: &str = "2c48913c-b29f-11e7-9350-020968147796";
/// Pins of a complete start with one parent: 15 maps, 4 links to it and 2 to the tracepoints.
const PINS: usize = 21;

/// A machine to run an agent on: mounts, pods' cgroups, a directory for socket and log.
struct Machine {
    mounts: Mounts,
    scratch: Scratch,
    home: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        Self::with(Mounts::new())
    }

    fn with(mounts: Mounts) -> Self {
        Self { mounts, scratch: Scratch::new().unwrap(), home: tempfile::tempdir().unwrap() }
    }

    fn launch(&self) -> Launch {
        self.launch_by(self.mounts.command(BIN))
    }

    /// Through another program, which runs the agent in the end: `setpriv ... nobypass agent ...`.
    fn launch_through(&self, program: &str, args: &[&str]) -> Launch {
        let mut command = self.mounts.command(program);
        command.args(args).arg(BIN);
        self.launch_by(command)
    }

    fn launch_by(&self, command: Command) -> Launch {
        let runtime = self.home.path().join("no-runtime.sock").display().to_string();
        let kubepods = self.scratch.kubepods().display().to_string();
        let args = ["--metrics-addr", "none", "--cri-endpoint", &runtime, "--pod-parent", &kubepods];
        Launch::new(command, self.home.path()).args(args)
    }

    /// As [`Machine::launch`] without `--pod-parent` and the other defaults.
    fn launch_bare(&self) -> Launch {
        Launch::new(self.mounts.command(BIN), self.home.path()).args(["--metrics-addr", "none"])
    }

    fn nobypass(&self, args: &[&str]) -> Ended {
        let mut command = self.mounts.command(BIN);
        command.args(args);
        run(command)
    }

    fn cleanup(&self) -> Ended {
        self.nobypass(&["cleanup"])
    }

    /// Names of the programs attached to the pods' parent and to the directory that holds it.
    fn programs(&self) -> Vec<String> {
        let mut found = Vec::new();
        for dir in [self.scratch.top(), &self.scratch.kubepods()] {
            let cgroup = File::open(dir).unwrap();
            for hook in HOOKS {
                let programs = attached(cgroup.as_fd(), hook, false).unwrap().programs;
                found.extend(programs.into_iter().map(|id| program_name(id).unwrap()));
            }
        }
        found
    }

    fn nothing_is_left(&self) {
        assert_eq!(self.mounts.pins(), [""; 0]);
        assert_eq!(self.programs(), [""; 0]);
        let inside: Vec<_> = fs::read_dir(self.scratch.kubepods()).unwrap().flatten().collect();
        assert!(inside.iter().all(|entry| !entry.file_type().unwrap().is_dir()), "{inside:?}");
    }

    fn all_is_attached(&self) {
        let pins = self.mounts.pins();
        assert_eq!(pins.len(), PINS, "{pins:?}");
        assert_eq!(self.programs(), ["nb_egress", "nb_ingress", "nb_connect4", "nb_connect6"]);
    }
}

fn says(ended: &Ended, code: i32, words: &[&str]) {
    assert_eq!(ended.code, Some(code), "{}", ended.err);
    assert!(ended.last().starts_with("nobypass: "), "{}", ended.err);
    for word in words {
        assert!(ended.last().contains(word), "should say {word:?}: {}", ended.err);
    }
}

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

fn hook<'a>(status: &'a serde_json::Value, name: &str) -> &'a serde_json::Value {
    let hooks = status["hooks"].as_array().unwrap();
    hooks.iter().find(|hook| hook["hook"] == name).unwrap_or_else(|| panic!("no hook {name} in {status}"))
}

fn sees_pod(agent: &Agent, id: u64) -> bool {
    agent.status()["pods"].as_array().unwrap().iter().any(|pod| pod["cgroup"] == id)
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
fn one_set_of_pins_has_one_agent_and_cleanup_waits_for_its_end() {
    let machine = Machine::new();
    let agent = machine.launch().start().attached();
    machine.all_is_attached();

    let home = tempfile::tempdir().unwrap();
    let kubepods = machine.scratch.kubepods();
    let second = || Launch::new(machine.mounts.command(BIN), home.path()).args(["--metrics-addr", "none"]);
    let ended = second().args([Path::new("--pod-parent"), &kubepods]).fail();
    says(&ended, 1, &["another nobypass agent works with", BPF_DIR, "stop it first", "--bpf-dir"]);
    says(&machine.cleanup(), 1, &["another nobypass agent works with", "stop it first"]);
    machine.all_is_attached();
    assert_eq!(hook(&agent.status(), "egress")["effective"], true);

    assert!(agent.terminate().success());
    machine.all_is_attached();
    let status = machine.nobypass(&["status", "--socket", "/nonexistent"]);
    assert_eq!(status.code, Some(0), "{}", status.err);
    assert!(status.out.contains("NO AGENT"), "{}", status.out);
    let first = machine.cleanup();
    assert_eq!(first.code, Some(0), "{}", first.err);
    assert!(first.out.contains(&format!("removed {PINS} pins")), "{}", first.out);
    machine.nothing_is_left();
    let second = machine.cleanup();
    assert_eq!(second.code, Some(0), "{}", second.err);
    assert!(second.out.contains("nothing to do"), "{}", second.out);
}

#[test]
fn pins_that_another_file_system_hides_are_not_attached_a_second_time() {
    let machine = Machine::new();
    let agent = machine.launch().start().attached();
    agent.kill();
    fs::remove_file(machine.home.path().join("agent.sock")).unwrap();
    machine.mounts.sh("mount -t bpf bpf /sys/fs/bpf");
    let ended = machine.launch().fail();
    let words = ["already attached to", "nb_egress", "findmnt -t bpf", "nobypass cleanup"];
    says(&ended, 1, &words.map(|word| if word == "nb_egress" { "on egress" } else { word }));
    assert_eq!(machine.mounts.pins(), [""; 0]);
    machine.mounts.sh("umount /sys/fs/bpf");
    machine.all_is_attached();
    let agent = machine.launch().start().attached();
    agent.line(&["attached", "adopted=true"]);
    machine.all_is_attached();
}

#[test]
fn pins_of_another_version_go_once_ours_work() {
    let machine = Machine::new();
    assert!(machine.launch().start().attached().terminate().success());
    machine.mounts.sh(&format!("mv {BPF_DIR}/v1 {BPF_DIR}/v0"));
    let pins = machine.mounts.pins();
    assert!(pins.len() == PINS && pins.iter().all(|pin| pin.starts_with("nobypass/v0/")), "{pins:?}");

    // A start that fails leaves the old version at work.
    fs::write(machine.scratch.kubepods().join("cgroup.max.descendants"), "0").unwrap();
    says(&machine.launch().fail(), 69, &["did not see a test connection"]);
    fs::write(machine.scratch.kubepods().join("cgroup.max.descendants"), "max").unwrap();
    assert_eq!(machine.programs(), ["nb_egress", "nb_ingress", "nb_connect4", "nb_connect6"]);

    let agent = machine.launch().start().attached();
    agent.line(&["removed the pins of another version", &format!("pins={PINS}")]);
    agent.line(&["attached", "adopted=false"]);
    machine.all_is_attached();
    assert!(machine.mounts.pins().iter().all(|pin| pin.starts_with("nobypass/v1/")));
}

#[test]
fn a_pinned_map_of_another_layout_is_refused() {
    let machine = Machine::new();
    assert!(machine.launch().start().attached().terminate().success());
    let pin = machine.mounts.see(BPF_DIR).join("v1/POLICY");
    fs::remove_file(&pin).unwrap();
    pin_map(&pin).unwrap();
    let ended = machine.launch().fail();
    says(&ended, 1, &["POLICY", "another layout (4+4 bytes, expected 8+", "nobypass cleanup"]);
    machine.all_is_attached();
    assert_eq!(machine.cleanup().code, Some(0));
    machine.nothing_is_left();
    machine.launch().start().attached();
}

#[test]
fn programs_that_cannot_be_proven_to_work_are_withdrawn() {
    let machine = Machine::new();
    fs::write(machine.scratch.kubepods().join("cgroup.max.descendants"), "0").unwrap();
    let ended = machine.launch().fail();
    says(&ended, 69, &["did not see a test connection", "cannot make a scratch cgroup", "not covered"]);
    machine.nothing_is_left();
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
fn a_pods_cgroup_made_anew_ends_the_agent_and_the_next_one_covers_it() {
    let machine = Machine::new();
    let agent = machine.launch().start().attached();
    let old = machine.mounts.pins();
    let kubepods = machine.scratch.kubepods();
    fs::remove_dir(&kubepods).unwrap();
    fs::create_dir(&kubepods).unwrap();
    assert_eq!(machine.programs(), [""; 0], "the kernel detached them");
    let ended = agent.wait();
    says(&ended, 1, &[&kubepods.display().to_string(), "started again"]);

    let agent = machine.launch().start().attached();
    agent.line(&["attached", "adopted=true"]);
    machine.all_is_attached();
    let links =
        |pins: &[String]| pins.iter().filter(|pin| pin.contains("link_egress")).cloned().collect::<Vec<_>>();
    assert_ne!(links(&machine.mounts.pins()), links(&old), "the links of the old one are gone");
}

#[test]
fn pins_that_somebody_removes_are_made_again() {
    let machine = Machine::new();
    let agent = machine.launch().args(["--mode", "enforce"]).start().attached();
    let pins = machine.mounts.pins();
    let links = || machine.mounts.pins().into_iter().filter(|pin| pin.contains("/link_"));
    for which in ["link_egress_", "link_connect6_", "link_cgroup_mkdir", "link_"] {
        let mut removed = 0;
        for pin in links().filter(|pin| pin.contains(which)) {
            fs::remove_file(machine.mounts.see("/sys/fs/bpf").join(pin)).unwrap();
            removed += 1;
        }
        assert!(removed > 0, "{which}");
        agent.until("the pins", |_| (machine.mounts.pins() == pins).then_some(()));
        agent.until("the hooks", |agent| {
            let status = agent.status();
            status["hooks"].as_array().unwrap().iter().all(|hook| hook["effective"] == true).then_some(())
        });
        machine.all_is_attached();
    }
    agent.line(&["ERROR", "somebody detached programs of ours", "egress"]);
    assert_eq!(agent.metrics().sum("mode", &[("mode", "enforce")]), 1, "the mode is as it was");

    // With the directory gone there is nothing to put them into: the next agent begins anew.
    machine.mounts.sh(&format!("rm -r {BPF_DIR}"));
    let ended = agent.wait();
    says(&ended, 1, &["cannot pin", BPF_DIR, "started again"]);
    let agent = machine.launch().start().attached();
    agent.line(&["attached", "adopted=false"]);
    machine.all_is_attached();
}

#[test]
fn an_end_at_any_moment_of_the_start_leaves_all_or_nothing() {
    let machine = Machine::new();
    let mut states = [0, 0];
    let start = Instant::now();
    machine.launch().start().attached().kill();
    // Twice the time of a whole start, in steps.
    let whole = start.elapsed();
    assert_eq!(machine.cleanup().code, Some(0));
    for turn in 0..24_u32 {
        let agent = machine.launch().start();
        let moment = Instant::now() + whole * turn / 16;
        wait::until("the moment", wait::HANG, || (Instant::now() >= moment).then_some(())).unwrap();
        let (status, log) = agent.terminate_and_log();
        assert!(status.success() || status.code().is_none(), "turn {turn}: {status}: {log}");
        if machine.mounts.pins().is_empty() {
            states[0] += 1;
            machine.nothing_is_left();
        } else {
            states[1] += 1;
            machine.all_is_attached();
            assert_eq!(machine.cleanup().code, Some(0));
            machine.nothing_is_left();
        }
    }
    assert!(states[0] > 0 && states[1] > 0, "both kinds of moments were met: {states:?}");
}

#[test]
fn killed_at_any_moment_the_next_start_puts_it_right() {
    let machine = Machine::new();
    for turn in 0..12_u64 {
        let agent = machine.launch().start();
        let moment = Instant::now() + Duration::from_millis(turn * 25);
        wait::until("the moment", wait::HANG, || (Instant::now() >= moment).then_some(())).unwrap();
        agent.kill();
    }
    let agent = machine.launch().start().attached();
    machine.all_is_attached();
    assert!(agent.terminate().success());
    assert_eq!(machine.cleanup().code, Some(0));
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
    machine.mounts.pins().iter().for_each(|pin| panic!("{pin} is too early"));

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
