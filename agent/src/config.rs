//! What the agent is told by flags and environment; a flag wins. What may change while it runs is not here.

use std::net::SocketAddr;
use std::path::PathBuf;

use nobypass_common::ids::{Mode, UnknownPolicy};

use crate::bpf::pins::DEFAULT_DIR;
use crate::node::flags::GateArgs;
use crate::remedy::flags::RemedyArgs;
use crate::server::DEFAULT_SOCKET;
use crate::telemetry::LogFormat;

/// The node's mode, as a flag's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ModeFlag {
    /// Judge nothing
    Off,
    /// Count and report bypasses, let them pass
    Audit,
    /// Count, report and drop bypasses
    Enforce,
}

impl From<ModeFlag> for Mode {
    fn from(flag: ModeFlag) -> Self {
        match flag {
            ModeFlag::Off => Self::Off,
            ModeFlag::Audit => Self::Audit,
            ModeFlag::Enforce => Self::Enforce,
        }
    }
}

/// What happens to connections of pods that nobody has classified yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum UnknownFlag {
    /// Count and let pass
    Pass,
    /// Hold the first SYNs until the pod is classified, for --hold-ms at most
    Hold,
}

impl From<UnknownFlag> for UnknownPolicy {
    fn from(flag: UnknownFlag) -> Self {
        match flag {
            UnknownFlag::Pass => Self::Pass,
            UnknownFlag::Hold => Self::Hold,
        }
    }
}

/// What an application sees of a connection that enforce drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RefusalFlag {
    /// connect() fails in about a millisecond (ECONNABORTED), and at once (EPERM) while the pod is known to bypass
    Fast,
    /// connect() fails in about a millisecond (ECONNABORTED)
    Abort,
    /// connect() hangs until its time-out, or goes through the proxy once the pod is repaired
    Hang,
}

/// Where facts about pods come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PodsFlag {
    /// Both in a cluster, the container runtime elsewhere
    Auto,
    /// The container runtime's socket: no cluster needed
    Cri,
    /// The API server
    Kube,
    /// The container runtime and the API server; either may be away
    Both,
}

/// What happens to traffic that no mesh redirects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum NonTcpFlag {
    /// Not judged: costs nothing
    Ignore,
    /// Counted (some 30 ns a packet)
    Count,
    /// Counted, and dropped where the mode is enforce
    Drop,
}

/// Whether inbound connections are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum InboundFlag {
    /// Not judged
    Off,
    /// Counted and reported
    Audit,
    /// Counted and reported, and dropped where the mode is enforce
    Enforce,
}

/// Arguments of `nobypass agent`.
#[derive(Clone, Debug, clap::Args)]
pub struct Config {
    /// What happens to a bypass, unless --policy says; `nobypass mode` changes it while the agent runs
    #[arg(
        long,
        help_heading = "What happens to connections",
        env = "NOBYPASS_MODE",
        value_enum,
        default_value = "audit"
    )]
    pub mode: ModeFlag,
    /// What happens to connections of pods that nobody has classified yet
    #[arg(
        long,
        help_heading = "What happens to connections",
        env = "NOBYPASS_UNKNOWN_PODS",
        value_enum,
        default_value = "pass"
    )]
    pub unknown_pods: UnknownFlag,
    /// How long an unclassified pod is held at most, in milliseconds
    #[arg(long, help_heading = "What happens to connections", env = "NOBYPASS_HOLD_MS", default_value_t = 3000, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub hold_ms: u32,
    /// UDP (but DNS) and other protocols of meshed pods
    #[arg(
        long,
        help_heading = "What happens to connections",
        env = "NOBYPASS_NON_TCP",
        value_enum,
        default_value = "ignore"
    )]
    pub non_tcp: NonTcpFlag,
    /// QUIC (UDP port 443) of meshed pods; dropping makes clients fall back to TCP
    #[arg(
        long,
        help_heading = "What happens to connections",
        env = "NOBYPASS_QUIC",
        value_enum,
        default_value = "ignore"
    )]
    pub quic: NonTcpFlag,
    /// Connections that reach a meshed pod's application past its proxy
    #[arg(
        long,
        help_heading = "What happens to connections",
        env = "NOBYPASS_INBOUND",
        value_enum,
        default_value = "audit"
    )]
    pub inbound: InboundFlag,
    /// What an application sees of a connection that enforce drops
    #[arg(
        long,
        help_heading = "What happens to connections",
        env = "NOBYPASS_REFUSAL",
        value_enum,
        default_value = "fast"
    )]
    pub refusal: RefusalFlag,
    /// File with what may change while the agent runs (see deploy/policy.example.yaml); read again when it changes.
    /// Where it says nothing, these flags hold
    #[arg(long, help_heading = "What happens to connections", env = "NOBYPASS_POLICY", value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Where facts about pods come from
    #[arg(long, help_heading = "Pods and meshes", env = "NOBYPASS_PODS", value_enum, default_value = "auto")]
    pub pods: PodsFlag,
    /// This node's name in the cluster
    #[arg(long, help_heading = "Pods and meshes", env = "NOBYPASS_NODE_NAME", value_name = "NAME", value_parser = node_name)]
    pub node_name: Option<String>,
    /// How to reach the API server [default: the pod's service account]
    #[arg(long, help_heading = "Pods and meshes", env = "NOBYPASS_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Node gate")]
    pub gate: GateArgs,
    #[command(flatten, next_help_heading = "Remedies")]
    pub remedies: RemedyArgs,
    /// The container runtime's socket [default: the first that exists of the usual ones]
    #[arg(long, help_heading = "Pods and meshes", env = "NOBYPASS_CRI_ENDPOINT", value_name = "SOCKET")]
    pub cri_endpoint: Option<String>,
    /// File with mesh profiles of your own (YAML or JSON), tried before the built-in ones
    #[arg(long, help_heading = "Pods and meshes", env = "NOBYPASS_PROFILES", value_name = "FILE")]
    pub profiles: Option<PathBuf>,
    /// Where cgroup2 is mounted [default: from /proc/self/mountinfo]
    #[arg(long, help_heading = "This node", env = "NOBYPASS_CGROUP_ROOT", value_name = "DIR")]
    pub cgroup_root: Option<PathBuf>,
    /// Level of --cgroup-root in the hierarchy, if it is not the hierarchy's root
    #[arg(
        long,
        help_heading = "This node",
        env = "NOBYPASS_CGROUP_ROOT_LEVEL",
        value_name = "N",
        requires = "cgroup_root"
    )]
    pub cgroup_root_level: Option<u32>,
    /// Cgroup whose descendants are pods; may be given up to four times [default: kubepods and its like]
    #[arg(
        long,
        help_heading = "This node",
        env = "NOBYPASS_POD_PARENT",
        value_name = "DIR",
        value_delimiter = ','
    )]
    pub pod_parent: Vec<PathBuf>,
    /// Directory of the pins, on a BPF file system
    #[arg(long, help_heading = "This node", env = "NOBYPASS_BPF_DIR", value_name = "DIR", default_value = DEFAULT_DIR)]
    pub bpf_dir: PathBuf,
    /// Pods that the kernel's maps have room for
    #[arg(long, help_heading = "This node", env = "NOBYPASS_MAX_PODS", value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(16..=65_536))]
    pub max_pods: u32,
    /// Bypass events a pod may report in a second, per CPU; counters are not limited
    #[arg(long, help_heading = "Reports", env = "NOBYPASS_EVENT_RATE", value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub event_rate: u32,
    /// How often a meshed pod's network is asked whether its connections are redirected, in seconds; news ask at once
    #[arg(long = "probe-interval-s", help_heading = "Probes", env = "NOBYPASS_PROBE_INTERVAL_S", value_name = "S", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub probe_interval: u32,
    /// How long connections past the proxy that are older than nobypass or a repair may go on where it enforces, in seconds
    #[arg(long = "preexisting-grace-s", help_heading = "Probes", env = "NOBYPASS_PREEXISTING_GRACE_S", value_name = "S", default_value_t = 30, value_parser = clap::value_parser!(u32).range(0..=86_400))]
    pub preexisting_grace: u32,
    /// Address for /metrics, /livez and /readyz; `none` for the socket alone
    #[arg(long, help_heading = "Reports", env = "NOBYPASS_METRICS_ADDR", value_name = "ADDR", default_value = "0.0.0.0:9910", value_parser = address)]
    pub metrics_addr: Address,
    /// Unix socket for the command line
    #[arg(long, help_heading = "Reports", env = "NOBYPASS_SOCKET", value_name = "PATH", default_value = DEFAULT_SOCKET)]
    pub socket: PathBuf,
    /// Log filter: a level, or target=level terms
    #[arg(
        long,
        help_heading = "Reports",
        env = "NOBYPASS_LOG",
        value_name = "FILTER",
        default_value = "info"
    )]
    pub log: String,
    /// Format of log lines
    #[arg(long, help_heading = "Reports", env = "NOBYPASS_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,
}

/// An address to listen on, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address(pub Option<SocketAddr>);

/// A node's name: a DNS name in lower case, of at most 253 characters (apimachinery's `IsDNS1123Subdomain`).
fn node_name(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let label = |label: &str| {
        label.starts_with(plain) && label.ends_with(plain) && label.chars().all(|c| plain(c) || c == '-')
    };
    if text.len() <= 253 && text.split('.').all(label) {
        Ok(text.into())
    } else {
        Err("a node's name is made of lower-case letters, digits, `-` and `.`".into())
    }
}

/// Reads `HOST:PORT` or `none`.
pub(crate) fn address(text: &str) -> Result<Address, String> {
    if text == "none" {
        return Ok(Address(None));
    }
    text.parse()
        .map(|address| Address(Some(address)))
        .map_err(|_| "write HOST:PORT with a literal address, or none".into())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(flatten)]
        config: Config,
    }

    fn parse(args: &[&str]) -> Result<Config, String> {
        let args = std::iter::once("agent").chain(args.iter().copied());
        Cli::try_parse_from(args).map(|cli| cli.config).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_safe() {
        let config = parse(&[]).unwrap();
        assert_eq!((config.mode, config.unknown_pods), (ModeFlag::Audit, UnknownFlag::Pass));
        assert_eq!((config.non_tcp, config.quic), (NonTcpFlag::Ignore, NonTcpFlag::Ignore));
    }

    #[test]
    fn nonsense_is_refused_with_what_would_be_right() {
        for (args, says) in [
            (&["--mode", "strict"][..], "enforce"),
            (&["--hold-ms", "0"], "1..=60000"),
            (&["--max-pods", "1"], "16..=65536"),
            (&["--metrics-addr", "here"], "HOST:PORT"),
            (&["--cgroup-root-level", "2"], "--cgroup-root"),
            (&["--enforce"], "--enforce"),
            (&["--pods", "none"], "auto, cri, kube, both"),
            (&["--node-name", "a,metadata.name=b"], "lower-case letters"),
            (&["--node-name", "Node"], "lower-case letters"),
            (&["--node-name", "a..b"], "lower-case letters"),
        ] {
            let error = parse(args).unwrap_err();
            assert!(error.contains(says), "{args:?}: {error}");
        }
        assert_eq!(parse(&["--metrics-addr", "none"]).unwrap().metrics_addr, Address(None));
        assert_eq!(parse(&["--pod-parent", "/a,/b"]).unwrap().pod_parent.len(), 2);
        let name = "ip-10-0-0-1.ec2.internal";
        assert_eq!(parse(&["--node-name", name]).unwrap().node_name.as_deref(), Some(name));
    }
}
