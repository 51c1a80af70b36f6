//! What can go wrong with the kernel half, each with what to do.

use std::io;
use std::path::PathBuf;

use nobypass_common::abi::ABI_VERSION;

use crate::cli::exit::Exit;
use crate::sys::caps::Capabilities;

/// An error of the kernel half.
#[derive(Debug, thiserror::Error)]
pub enum BpfError {
    /// The pin directory is not on a bpffs.
    #[error(
        "{dir} is not on a BPF file system: mount one (mount -t bpf bpf /sys/fs/bpf), or give a directory on one \
         with --bpf-dir"
    )]
    NotBpffs { dir: PathBuf },
    /// bpffs refuses dots in names.
    #[error("{dir} cannot hold pins: a BPF file system refuses names with a dot; choose another --bpf-dir")]
    DotInName { dir: PathBuf },
    /// Reading or changing the pin directory failed.
    #[error("cannot {what} {path}: {source}{}", if source.kind() == io::ErrorKind::PermissionDenied { "; run as root" } else { "" })]
    Pin { what: &'static str, path: PathBuf, source: io::Error },
    /// Another agent works with the same pins.
    #[error(
        "another nobypass agent works with {dir}: stop it first, or give this one its own --bpf-dir and cgroup \
         parents"
    )]
    Busy { dir: PathBuf },
    /// Our programs are attached, but not from these pins.
    #[error(
        "nobypass is already attached to {cgroup} (program {program} on {hook}), but its pins are not in {dir}: \
         either another agent uses another --bpf-dir, or a second BPF file system is mounted over the one with \
         the pins (see `findmnt -t bpf`); unmount it, or stop the other agent and run `nobypass cleanup` there"
    )]
    Stacked { cgroup: PathBuf, hook: &'static str, program: u32, dir: PathBuf },
    /// Pinned maps of this ABI have another layout.
    #[error(
        "the pinned map {map} in {dir} has another layout ({found}, expected {expected}): it was made by a \
         modified build; run `nobypass cleanup` and start again"
    )]
    Layout { map: &'static str, dir: PathBuf, found: String, expected: String },
    /// A later version has been here.
    #[error(
        "the pins in {dir} were made by a later version of nobypass (layout {version}, this one knows layouts up to \
         {ABI_VERSION}): its programs stay in effect and go on enforcing. Run that version or a later one again; to go back \
         to this one, run `nobypass cleanup` on this node first, after which nothing is judged or enforced here until this \
         one has started and classified the pods"
    )]
    Newer { dir: PathBuf, version: u32 },
    /// The kernel refused the object or its maps.
    #[error("the kernel refused {what}: {source}; {remedy}")]
    Load { what: String, source: Box<dyn std::error::Error + Send + Sync>, remedy: &'static str },
    /// Attaching failed.
    #[error("cannot attach {hook} to {cgroup}: {source}; {remedy}")]
    Attach {
        hook: &'static str,
        cgroup: PathBuf,
        source: Box<dyn std::error::Error + Send + Sync>,
        remedy: String,
    },
    /// A program sits exclusively on an ancestor.
    #[error(
        "cannot attach {hook} to {cgroup}: program {program} ({name}) is attached exclusively to {ancestor} and \
         forbids any other below it; detach it or attach it with BPF_F_ALLOW_MULTI (systemd: IPAccounting or \
         IPAddressDeny on that unit; add Delegate=yes or drop the setting). nobypass leaves it alone"
    )]
    ForeignExclusive { hook: &'static str, cgroup: PathBuf, ancestor: PathBuf, program: u32, name: String },
    /// A map operation failed.
    #[error("map {map}: {source}")]
    Map { map: &'static str, source: aya::maps::MapError },
    /// No pins: nobypass has not run here, or was cleaned up.
    #[error("no nobypass pins in {dir}: the agent has not run on this node, or uses another --bpf-dir")]
    NoPins { dir: PathBuf },
    /// The programs are attached but a test connection was not seen.
    #[error(
        "the programs are attached to {cgroup} but did not see a test connection: {reason}; pods on this node are \
         not covered"
    )]
    NotEffective { cgroup: PathBuf, reason: String },
}

impl BpfError {
    /// The exit code of an agent that cannot start for this reason.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Pin { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Exit::NoPermission
            }
            Self::Load { remedy, .. } if *remedy == Self::NEEDS_CAPS => Exit::NoPermission,
            Self::Attach { remedy, .. } if remedy == Self::NEEDS_CAPS => Exit::NoPermission,
            Self::NotBpffs { .. }
            | Self::NoPins { .. }
            | Self::ForeignExclusive { .. }
            | Self::Load { .. }
            | Self::Attach { .. }
            | Self::NotEffective { .. } => Exit::Unavailable,
            Self::DotInName { .. } => Exit::Usage,
            Self::Pin { .. }
            | Self::Busy { .. }
            | Self::Stacked { .. }
            | Self::Layout { .. }
            | Self::Newer { .. }
            | Self::Map { .. } => Exit::Failed,
        }
    }

    /// Remedy for EPERM.
    pub const NEEDS_CAPS: &'static str =
        "run as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON (CAP_SYS_ADMIN before kernel 5.8)";
    /// Remedy for a verifier's or an old kernel's no.
    pub const NEEDS_KERNEL: &'static str = "nobypass needs Linux 5.10 or later with CONFIG_BPF_SYSCALL and CONFIG_CGROUP_BPF; `nobypass preflight` \
         shows what is missing";

    /// A refusal to load, with the remedy that fits its cause.
    pub fn load(what: impl Into<String>, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        let denied = is_denied(&source);
        let remedy = if denied { Self::NEEDS_CAPS } else { Self::NEEDS_KERNEL };
        Self::Load { what: what.into(), source: Box::new(Chain(Box::new(source))), remedy }
    }
}

/// Whether more privilege would have helped. The verifier lets a process without `CAP_PERFMON` do less and then speaks
/// of the program, not of the capability.
pub fn is_denied(error: &(dyn std::error::Error + 'static)) -> bool {
    is_permission_denied(error) || !Capabilities::current().missing().is_empty()
}

/// Whether EPERM is among an error's causes.
pub fn is_permission_denied(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>()
            && io.raw_os_error() == Some(libc::EPERM)
        {
            return true;
        }
        next = error.source();
    }
    false
}

/// An error and its causes on one line; aya's errors name only the outermost.
#[derive(Debug)]
pub struct Chain(pub Box<dyn std::error::Error + Send + Sync>);

impl std::fmt::Display for Chain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A verifier log runs over many lines; its end has the reason, but for some statistics.
        let mut text = self.0.to_string();
        let mut next = self.0.source();
        while let Some(error) = next {
            let cause = error.to_string();
            if !text.contains(&cause) {
                text.push_str(": ");
                text.push_str(&cause);
            }
            next = error.source();
        }
        let counts = |line: &str| {
            ["processed ", "verification time ", "stack depth "].iter().any(|s| line.starts_with(s))
        };
        let line: Vec<&str> =
            text.lines().map(str::trim).filter(|line| !line.is_empty() && !counts(line)).collect();
        match line.as_slice() {
            [] => f.write_str("no reason given"),
            [first, .., last] if line.len() > 4 => write!(f, "{first} … {last}"),
            lines => f.write_str(&lines.join(" ")),
        }
    }
}

impl std::error::Error for Chain {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_log_shrinks_to_its_reason() {
        let text = "refused. Verifier output: 0: R1=ctx()\n1: (bf) r6 = r1\n2: (b7) r0 = 1\n3: (95) exit\n\
                    R2 pointer comparison prohibited\nverification time 93 usec\nstack depth 8\n\
                    processed 3 insns (limit 1000000)\n";
        let chain = Chain(io::Error::other(text).into());
        assert_eq!(
            chain.to_string(),
            "refused. Verifier output: 0: R1=ctx() … R2 pointer comparison prohibited"
        );
        assert_eq!(Chain(io::Error::other("two\nlines\n").into()).to_string(), "two lines");
    }

    #[test]
    fn codes_tell_permission_from_absence() {
        let dir = || PathBuf::from("/sys/fs/bpf/nobypass");
        let pin = |kind: io::ErrorKind| BpfError::Pin { what: "make", path: dir(), source: kind.into() };
        let attach = |remedy: &str| BpfError::Attach {
            hook: "egress",
            cgroup: dir(),
            source: "no".into(),
            remedy: remedy.into(),
        };
        for (error, exit) in [
            (pin(io::ErrorKind::PermissionDenied), Exit::NoPermission),
            (pin(io::ErrorKind::StorageFull), Exit::Failed),
            (attach(BpfError::NEEDS_CAPS), Exit::NoPermission),
            (attach(BpfError::NEEDS_KERNEL), Exit::Unavailable),
            (BpfError::NotBpffs { dir: dir() }, Exit::Unavailable),
            (BpfError::DotInName { dir: dir() }, Exit::Usage),
            (BpfError::Busy { dir: dir() }, Exit::Failed),
        ] {
            assert_eq!(error.exit(), exit, "{error}");
        }
        assert!(pin(io::ErrorKind::PermissionDenied).to_string().ends_with("; run as root"));
    }
}
