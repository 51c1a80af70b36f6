//! How much of nobypass a virtual machine runs.

use std::fmt;
use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::ValueEnum;

use super::machine::{BEGIN, DONE, END};
use super::programs::Built;
use crate::tier::{TIERS, invocations};
use crate::workspace::Workspace;

/// From the least to the most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Level {
    /// The programs: they load, attach, and judge packets and connections as they should
    Object,
    /// The whole agent: pins, promises, wrong input and the other kernel tests of the agent
    Agent,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Object => "object",
            Self::Agent => "agent",
        })
    }
}

/// The test targets of the level `object`.
const OBJECT: [&str; 2] = ["kernel_golden", "kernel_matrix"];

/// Parts of the names of tests of the level `object` that run on every kernel in CI: each program and helper, with and
/// without redirection, held and refused. All of them take four times as long and differ by what happens above the kernel.
pub const CHOSEN: [&str; 10] = [
    "a_raw_socket",
    "nothing_is_dropped",
    "pods_that",
    "switches_and_exemptions",
    "what_arrives",
    "what_leaves",
    "a_pod_without_an_entry",
    "a_held_connection_goes_out_by_itself",
    "a_retransmit",
    "with_linkerds_rules",
];

/// Fewer repetitions than on real hardware, see `kernel_promises`: emulation is ten times slower.
const FEWER: &str =
    "NOBYPASS_TEST_FIRST_PACKETS=500 NOBYPASS_TEST_FLOOD=3000 NOBYPASS_TEST_PODS=500 NOBYPASS_TEST_CHURN=500";

/// What redirect rules, conntrack, network devices and socket listings need. Others load them by name, on demand.
const NETWORK: &[&str] = &[
    "af_packet",
    "br_netfilter",
    "bridge",
    "dummy",
    "inet_diag",
    "ip6_tables",
    "ip6table_nat",
    "ip_tables",
    "ipv6",
    "iptable_nat",
    "nf_conntrack_netlink",
    "nf_nat",
    "nf_tables",
    "nft_chain_nat",
    "nft_compat",
    "nft_counter",
    "nft_ct",
    "nft_nat",
    "nft_objref",
    "nft_redir",
    "nft_socket",
    "nft_tproxy",
    "overlay",
    "tcp_diag",
    "udp_diag",
    "veth",
    "xt_REDIRECT",
    "xt_conntrack",
    "xt_mark",
    "xt_multiport",
    "xt_nat",
    "xt_owner",
    "xt_tcpudp",
];

/// Why no virtual machine runs here, if none does.
pub fn ruled_out() -> Option<String> {
    (std::env::consts::ARCH != "x86_64").then(|| {
        format!(
            "the machine runs this machine's own programs on an x86_64 kernel, and this is {}",
            std::env::consts::ARCH
        )
    })
}

impl Level {
    /// Arguments of each `cargo test` that builds its tests.
    pub fn invocations(self, workspace: &Workspace) -> Vec<Vec<String>> {
        let tier = TIERS.iter().find(|tier| tier.name == "kernel");
        let all = tier.map(|tier| invocations(tier, workspace)).unwrap_or_default();
        // The test kit's own tests try nothing of nobypass on a kernel.
        let of_agent = all.iter().filter(|args| args.iter().any(|word| word == "nobypass"));
        let object = |name: &str| OBJECT.contains(&name);
        match self {
            Self::Object => of_agent.filter_map(|args| only(args, object)).collect(),
            Self::Agent => of_agent.filter_map(|args| only(args, |name| !object(name))).collect(),
        }
    }

    /// Kernel modules that it needs.
    pub const fn modules(self) -> &'static [&'static str] {
        NETWORK
    }

    pub const fn memory_mib(self) -> u32 {
        match self {
            Self::Object => 1024,
            Self::Agent => 2048,
        }
    }

    /// Many times what it takes on a machine that has nothing else to do.
    pub const fn limit(self) -> Duration {
        Duration::from_secs(match self {
            Self::Object => 1800,
            Self::Agent => 3600,
        })
    }

    /// The shell script that runs the tests, for [`super::machine`] to read.
    pub fn script(self, built: &Built, filter: &[String]) -> Result<String> {
        let mut args = String::from("--test-threads=1");
        for word in filter {
            let _ = write!(args, " {}", quoted(word)?);
        }
        let mut script = format!("export {FEWER}\n");
        for (name, file) in &built.tests {
            let file = quoted(&file.display().to_string())?;
            let _ = writeln!(script, "echo '{BEGIN}{name}'\n{file} {args}\necho \"{END}{name} $?\"");
        }
        let _ = writeln!(script, "echo '{DONE}'");
        Ok(script)
    }
}

/// For a shell.
fn quoted(word: &str) -> Result<String> {
    if word.contains(['\'', '\n']) {
        bail!("no quotes and no line breaks, please: {word:?}");
    }
    Ok(format!("'{word}'"))
}

/// The arguments with these `--test`s alone; `None` if none is left.
fn only(args: &[String], wanted: impl Fn(&str) -> bool) -> Option<Vec<String>> {
    let mut kept = Vec::new();
    let mut any = false;
    let mut words = args.iter();
    while let Some(word) = words.next() {
        if word != "--test" {
            kept.push(word.clone());
        } else if let Some(name) = words.next().filter(|name| wanted(name)) {
            kept.extend([word.clone(), name.clone()]);
            any = true;
        }
    }
    any.then_some(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_named_targets() {
        let args = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let all = args("--package p --features x --test a --test b --test c");
        assert_eq!(only(&all, |name| name != "b"), Some(args("--package p --features x --test a --test c")));
        assert_eq!(only(&all, |name| name == "z"), None);
    }

    #[test]
    fn the_targets_of_the_level_exist() {
        let workspace = Workspace::read().unwrap();
        let text = format!("{:?}", Level::Object.invocations(&workspace));
        for name in OBJECT {
            assert!(text.contains(name), "{name}: {text}");
        }
        let text = format!("{:?}", Level::Agent.invocations(&workspace));
        assert!(text.contains("kernel_promises") && !OBJECT.iter().any(|name| text.contains(name)), "{text}");
    }

    #[test]
    fn the_script_says_how_each_program_ended() {
        let built = |file: &str| Built::of(&[("a", file)]);
        let script = Level::Object.script(&built("/t/a-1"), &["x y".into()]).unwrap();
        assert_eq!(
            script,
            "export NOBYPASS_TEST_FIRST_PACKETS=500 NOBYPASS_TEST_FLOOD=3000 NOBYPASS_TEST_PODS=500 NOBYPASS_TEST_CHURN=500\necho '== begin a'\n'/t/a-1' --test-threads=1 'x y'\necho \"== end a $?\"\necho '== done'\n"
        );
        assert!(Level::Object.script(&built("/it's"), &[]).is_err());
    }
}
