//! What building, testing and the demo need, as a table: how to see that it is there and where it comes from.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::debian::{self, DebianPackage};
use super::go::{self, GoProgram};
use super::python::{self, PythonProgram};
use super::rust::Rust;
use super::toolchain;
use crate::exec::find_program;

/// One thing that a command may need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    RustSrc,
    BpfLinker,
    Rustfmt,
    Clippy,
    Protoc,
    Cc,
    Cxx,
    Containerd,
    Containerd17,
    Containerd2,
    Runc,
    CniPlugins,
    Iptables,
    Nft,
    Iproute2,
    Busybox,
    Conntrack,
    UtilLinux,
    Helm,
    KubernetesValidate,
    Prometheus,
    Etcd,
    KubeApiserver,
    Qemu,
}

/// How a need is met.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// A system package (Debian's name).
    Package(&'static str),
    /// A component of the Rust toolchain.
    Component(&'static str),
    /// rust-src: rustup, else Debian's package of the same version.
    RustSrc,
    /// bpf-linker, built here.
    BpfLinker,
    /// A program of PyPI.
    Python(&'static PythonProgram),
    /// Built here from Go modules, where Go is.
    Go(&'static GoProgram),
    /// Unpacked beside what is installed, on Debian.
    Debian(&'static DebianPackage),
}

/// How to see that it is there, without asking a package manager.
#[derive(Clone, Copy, Debug)]
pub enum Probe {
    /// All of these programs.
    Programs(&'static [&'static str]),
    /// This program, linked statically: it has to run in images that hold nothing else.
    StaticProgram(&'static str),
    /// One of these files.
    AnyFile(&'static [&'static str]),
    /// The program in the toolchain's `bin`.
    RustProgram(&'static str),
    RustSrc,
    BpfLinker,
    Python(&'static PythonProgram),
    Go(&'static GoProgram),
    Debian(&'static DebianPackage),
}

#[derive(Debug)]
pub struct Row {
    pub need: Need,
    /// What `--only` calls it.
    pub name: &'static str,
    pub what: &'static str,
    pub probe: Probe,
    pub source: Source,
}

const fn row(need: Need, name: &'static str, what: &'static str, probe: Probe, source: Source) -> Row {
    Row { need, name, what, probe, source }
}

use Probe::{AnyFile, Programs, RustProgram, StaticProgram};
use Source::{Component, Package};

pub const TABLE: &[Row] = &[
    row(Need::Cxx, "g++", "compiles libFuzzer", Programs(&["c++"]), Package("g++")),
    row(Need::Cc, "gcc", "C compiler and linker", Programs(&["cc", "gcc"]), Package("gcc")),
    row(
        Need::Protoc,
        "protoc",
        "compiles the CRI protocol",
        Programs(&["protoc"]),
        Package("protobuf-compiler"),
    ),
    row(
        Need::RustSrc,
        "rust-src",
        "source of `core`, built for the BPF target",
        Probe::RustSrc,
        Source::RustSrc,
    ),
    row(Need::BpfLinker, "bpf-linker", "links the eBPF programs", Probe::BpfLinker, Source::BpfLinker),
    row(Need::Rustfmt, "rustfmt", "formatter", RustProgram("cargo-fmt"), Component("rustfmt")),
    row(Need::Clippy, "clippy", "linter", RustProgram("cargo-clippy"), Component("clippy")),
    row(
        Need::UtilLinux,
        "util-linux",
        "namespaces of test nodes",
        Programs(&["unshare", "nsenter", "mount"]),
        Package("util-linux"),
    ),
    row(
        Need::Iproute2,
        "iproute2",
        "links and addresses of test nodes",
        Programs(&["ip"]),
        Package("iproute2"),
    ),
    row(
        Need::Iptables,
        "iptables",
        "a mesh's redirect rules",
        Programs(&["iptables", "ip6tables", "iptables-restore"]),
        Package("iptables"),
    ),
    row(Need::Nft, "nftables", "a mesh's redirect rules", Programs(&["nft"]), Package("nftables")),
    row(
        Need::Conntrack,
        "conntrack",
        "looks at connection tracking",
        Programs(&["conntrack"]),
        Package("conntrack"),
    ),
    row(
        Need::Busybox,
        "busybox-static",
        "content of test images",
        StaticProgram("busybox"),
        Package("busybox-static"),
    ),
    row(
        Need::Containerd,
        "containerd",
        "container runtime of test nodes",
        Programs(&["containerd", "containerd-shim-runc-v2", "ctr"]),
        Package("containerd"),
    ),
    row(
        Need::Containerd17,
        "containerd-1.7",
        "a newer container runtime for test nodes",
        Probe::Debian(&debian::CONTAINERD_1_7),
        Source::Debian(&debian::CONTAINERD_1_7),
    ),
    row(
        Need::Containerd2,
        "containerd-2",
        "a newer container runtime for test nodes",
        Probe::Debian(&debian::CONTAINERD_2),
        Source::Debian(&debian::CONTAINERD_2),
    ),
    row(Need::Runc, "runc", "starts the containers", Programs(&["runc"]), Package("runc")),
    row(
        Need::CniPlugins,
        "cni-plugins",
        "pod network of test nodes",
        AnyFile(&["/usr/lib/cni/bridge", "/opt/cni/bin/bridge"]),
        Package("containernetworking-plugins"),
    ),
    row(Need::Helm, "helm", "renders the chart", Probe::Go(&go::HELM), Source::Go(&go::HELM)),
    row(
        Need::KubernetesValidate,
        "kubernetes-validate",
        "checks manifests against Kubernetes' schemas",
        Probe::Python(&python::KUBERNETES_VALIDATE),
        Source::Python(&python::KUBERNETES_VALIDATE),
    ),
    row(
        Need::Prometheus,
        "prometheus",
        "checks the alerts and scrapes the agent",
        Programs(&["prometheus", "promtool"]),
        Package("prometheus"),
    ),
    row(Need::Etcd, "etcd", "store of a test control plane", Probe::Go(&go::ETCD), Source::Go(&go::ETCD)),
    row(
        Need::KubeApiserver,
        "kube-apiserver",
        "API server of a test control plane",
        Probe::Go(&go::KUBE_APISERVER),
        Source::Go(&go::KUBE_APISERVER),
    ),
    row(
        Need::Qemu,
        "qemu",
        "runs other kernels",
        Programs(&["qemu-system-x86_64"]),
        Package("qemu-system-x86"),
    ),
];

/// For `cargo build` and everything that builds.
pub const BUILD: &[Need] = &[Need::Cc, Need::Protoc, Need::RustSrc, Need::BpfLinker];
/// Beside [`BUILD`]: for `cargo xtask lint`.
pub const LINT: &[Need] = &[Need::Rustfmt, Need::Clippy];
/// Beside [`BUILD`]: for `cargo xtask fuzz`.
pub const FUZZ: &[Need] = &[Need::Cxx];
/// Beside [`BUILD`]: network namespaces and redirect rules.
pub const KERNEL: &[Need] =
    &[Need::UtilLinux, Need::Iproute2, Need::Iptables, Need::Nft, Need::Conntrack, Need::Busybox];
/// Beside [`BUILD`] and [`KERNEL`]: a container runtime with pods, and who watches them.
pub const NODE: &[Need] = &[Need::Containerd, Need::Runc, Need::CniPlugins, Need::Prometheus];
/// Beside [`NODE`], where they can be had: other versions of the container runtime.
pub const RUNTIMES: &[Need] = &[Need::Containerd17, Need::Containerd2];
/// What checks `deploy/`.
pub const DEPLOY: &[Need] = &[Need::Helm, Need::KubernetesValidate, Need::Prometheus];
/// Beside [`BUILD`]: a real API server, and what renders the chart for it.
pub const CLUSTER: &[Need] = &[Need::Etcd, Need::KubeApiserver, Need::Helm];

/// Beside [`BUILD`] and [`KERNEL`]: other kernels.
pub const VM: &[Need] = &[Need::Qemu];

/// Which command needs what, for messages.
const COMMANDS: &[(&str, &[&[Need]])] = &[
    ("cargo build", &[BUILD]),
    ("cargo xtask lint", &[LINT, DEPLOY]),
    ("cargo xtask fuzz", &[FUZZ]),
    ("cargo xtask test --tier kernel", &[KERNEL]),
    ("cargo xtask test --tier node", &[KERNEL, NODE, RUNTIMES]),
    ("cargo xtask test --tier cluster", &[CLUSTER]),
    ("cargo xtask demo", &[KERNEL, NODE]),
    ("cargo xtask vm", &[KERNEL, VM]),
];

impl Row {
    /// The commands that do not work without it.
    pub fn needed_by(&self) -> String {
        let uses = |(_, lists): &&(&str, &[&[Need]])| lists.iter().any(|list| list.contains(&self.need));
        let commands: Vec<_> = COMMANDS.iter().filter(uses).map(|(name, _)| format!("`{name}`")).collect();
        commands.join(", ")
    }

    /// Is it there? `Ok` says where, `Err` what is wrong.
    pub fn probe(&self, rust: &Rust) -> Result<PathBuf, String> {
        match self.probe {
            Programs(names) => all_programs(names),
            StaticProgram(name) => static_program(name),
            AnyFile(files) => {
                let found = files.iter().map(Path::new).find(|file| file.is_file());
                found.map(Path::to_path_buf).ok_or_else(|| format!("none of {} exists", files.join(", ")))
            }
            RustProgram(name) => {
                let file = rust.sysroot.join("bin").join(name);
                let found =
                    if file.is_file() { Some(file) } else { find_program(name).filter(|_| !rust.rustup()) };
                found.ok_or_else(|| format!("the toolchain in {} has no {name}", rust.sysroot.display()))
            }
            Probe::RustSrc => toolchain::rust_src(rust),
            Probe::BpfLinker => toolchain::bpf_linker(rust),
            Probe::Python(program) => program.find(),
            Probe::Go(program) => program.find(),
            Probe::Debian(package) => package.find(),
        }
    }
}

fn all_programs(names: &[&str]) -> Result<PathBuf, String> {
    let mut first = None;
    for name in names {
        let found = find_program(name).ok_or_else(|| format!("no program `{name}`"))?;
        first.get_or_insert(found);
    }
    first.ok_or_else(|| String::from("nothing to look for"))
}

fn static_program(name: &str) -> Result<PathBuf, String> {
    let file = find_program(name).ok_or_else(|| format!("no program `{name}`"))?;
    let mut head = [0; 4096];
    let read = File::open(&file).and_then(|mut file| file.read(&mut head));
    let read = read.map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    if names_a_loader(head.get(..read).unwrap_or_default()) {
        return Err(format!("{} is not linked statically", file.display()));
    }
    Ok(file)
}

/// A dynamic ELF file names its loader (PT_INTERP) right behind its headers: `/lib64/ld-linux-x86-64.so.2`.
pub fn names_a_loader(head: &[u8]) -> bool {
    head.windows(6).any(|part| part == b"/ld-li" || part == b"/ld-mu")
}

/// The row of a need.
pub fn lookup(need: Need) -> &'static Row {
    // The test below shows that each need has its row.
    TABLE.iter().find(|row| row.need == need).unwrap_or(&TABLE[0])
}

/// What `--only` accepts: each row's name, and the two groups.
pub fn only_names() -> Vec<&'static str> {
    ["tools", "packages"].into_iter().chain(TABLE.iter().map(|row| row.name)).collect()
}

/// The rows that `--only` selects; all if it names none.
pub fn select(only: &[String]) -> Vec<Need> {
    let wanted = |row: &&Row| {
        let group = if matches!(row.source, Package(_)) { "packages" } else { "tools" };
        only.is_empty() || only.iter().any(|name| name == row.name || name == group)
    };
    TABLE.iter().filter(wanted).map(|row| row.need).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_need_of_a_command_has_its_own_row_and_each_row_a_command() {
        for need in [BUILD, LINT, FUZZ, KERNEL, NODE, RUNTIMES, DEPLOY, CLUSTER, VM].concat() {
            assert_eq!(lookup(need).need, need);
        }
        for row in TABLE {
            assert!(!row.needed_by().is_empty(), "{} is needed by no command", row.name);
            assert_eq!(TABLE.iter().filter(|other| other.name == row.name).count(), 1, "{}", row.name);
        }
    }

    #[test]
    fn says_which_command_needs_it() {
        assert_eq!(lookup(Need::Runc).needed_by(), "`cargo xtask test --tier node`, `cargo xtask demo`");
        assert_eq!(lookup(Need::Protoc).needed_by(), "`cargo build`");
    }

    #[test]
    fn only_selects_names_and_groups() {
        let only = |names: &[&str]| select(&names.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(only(&[]).len(), TABLE.len());
        assert_eq!(only(&["runc", "rust-src"]), [Need::RustSrc, Need::Runc]);
        let tools = [Need::RustSrc, Need::BpfLinker, Need::Rustfmt, Need::Clippy];
        assert_eq!(
            only(&["tools"]),
            [&tools[..], RUNTIMES, &[Need::Helm, Need::KubernetesValidate, Need::Etcd, Need::KubeApiserver]]
                .concat()
        );
        assert_eq!(only(&["tools", "packages"]).len(), TABLE.len());
    }

    #[test]
    fn tells_static_from_dynamic() {
        assert!(names_a_loader(b"\x7fELF\0\0/lib64/ld-linux-x86-64.so.2\0"));
        assert!(names_a_loader(b"\x7fELF\0\0/lib/ld-musl-x86_64.so.1\0"));
        assert!(!names_a_loader(b"\x7fELF\0\0GNU\0 nothing here"));
    }

    #[test]
    fn a_missing_program_is_named() {
        assert_eq!(all_programs(&["sh", "no-such-nobypass"]), Err("no program `no-such-nobypass`".into()));
    }
}
