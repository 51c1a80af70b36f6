//! This process's capabilities.

use std::fs;

/// Capabilities that matter here, with their numbers (`linux/capability.h`).
pub const CAP_NET_ADMIN: u32 = 12;
/// See [`CAP_NET_ADMIN`].
pub const CAP_NET_RAW: u32 = 13;
/// See [`CAP_NET_ADMIN`].
pub const CAP_SYS_PTRACE: u32 = 19;
/// See [`CAP_NET_ADMIN`].
pub const CAP_SYS_ADMIN: u32 = 21;
/// See [`CAP_NET_ADMIN`].
pub const CAP_PERFMON: u32 = 38;
/// See [`CAP_NET_ADMIN`].
pub const CAP_BPF: u32 = 39;

/// The effective set, from the `CapEff` line of /proc/self/status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities(u64);

impl Capabilities {
    /// Reads this process's set; empty if /proc cannot be read.
    pub fn current() -> Self {
        Self::parse(&fs::read_to_string("/proc/self/status").unwrap_or_default())
    }

    /// Another process's set; `None` for one that is gone.
    pub fn of(pid: u32) -> Option<Self> {
        fs::read_to_string(format!("/proc/{pid}/status")).ok().as_deref().map(Self::parse)
    }

    fn parse(status: &str) -> Self {
        let mask = status
            .lines()
            .find_map(|line| line.strip_prefix("CapEff:"))
            .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
        Self(mask.unwrap_or(0))
    }

    /// Whether a capability is in the set; `CAP_SYS_ADMIN` stands for those that were split from it in 5.8.
    pub const fn has(self, capability: u32) -> bool {
        let split = matches!(capability, CAP_BPF | CAP_PERFMON);
        self.0 & (1 << capability) != 0 || (split && self.0 & (1 << CAP_SYS_ADMIN) != 0)
    }
}

/// What loading and attaching take, with its names.
const NEEDED: [(u32, &str); 3] =
    [(CAP_BPF, "CAP_BPF"), (CAP_NET_ADMIN, "CAP_NET_ADMIN"), (CAP_PERFMON, "CAP_PERFMON")];

impl Capabilities {
    /// Names of the needed ones that are not in the set.
    pub fn missing(self) -> Vec<&'static str> {
        NEEDED.iter().filter(|(capability, _)| !self.has(*capability)).map(|(_, name)| *name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_effective_set() {
        let status = |mask: &str| Capabilities::parse(&format!("Name:\tx\nCapPrm:\t0\nCapEff:\t{mask}\n"));
        assert!(status("000001ffffffffff").has(CAP_BPF));
        assert!(!status("0000000000000000").has(CAP_NET_ADMIN));
        assert!(status("0000000000001000").has(CAP_NET_ADMIN));
        assert!(status("0000000000200000").has(CAP_BPF), "CAP_SYS_ADMIN includes it");
        assert!(!status("0000000000200000").has(CAP_NET_ADMIN));
        assert!(!Capabilities::parse("").has(CAP_BPF));
        assert_eq!(status("0000008000001000").missing(), ["CAP_PERFMON"]);
    }
}
