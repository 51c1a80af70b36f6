//! Configurations that a mesh's injector wrote down on the pod: what they say is what the mesh does.

mod consul;
mod kuma;

use super::{
    exempt::{Exemptions, Problem},
    marker::Source,
    profile::{self, MaterialisedKind},
};
use crate::pods::model::PodFacts;

/// More than any mesh writes; an annotation cannot be longer than 256 KiB together with all others.
const MAX_BYTES: usize = 128 * 1024;

/// What a configuration says. `None`: nothing of that.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Written {
    pub(super) proxy_uid: Option<u32>,
    pub(super) outbound_port: Option<u16>,
    pub(super) inbound_port: Option<u16>,
    pub(super) ipv6: Option<bool>,
    pub(super) dns: Option<Dns>,
    /// All of them: what is missing here is not exempt.
    pub(super) exemptions: Exemptions,
}

/// What happens to DNS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dns {
    pub(super) tcp_exempt: bool,
    pub(super) udp_captured: bool,
}

/// The configuration on this pod, `None` where there is none. One that cannot be read exempts nothing: the mesh's plugin
/// refuses it.
pub(super) fn read(
    rule: &profile::Materialised,
    pod: &PodFacts,
    problems: &mut Vec<Problem>,
) -> Option<Written> {
    let profile::Materialised { kind, from } = rule;
    let said = |source: &Source| {
        source.read(pod).filter(|text| !text.is_empty()).map(|text| (source.key().to_owned(), text))
    };
    let (key, text) = from.iter().find_map(said)?;
    let mut bad = Vec::new();
    let written = match kind {
        _ if text.len() > MAX_BYTES => Err(format!("longer than {MAX_BYTES} bytes")),
        MaterialisedKind::Consul => consul::read(text, &mut bad),
        MaterialisedKind::Kuma => kuma::read(text, &mut bad),
    };
    problems.extend(bad.iter().map(|element| Problem::new(&key, element)));
    Some(written.unwrap_or_else(|reason| {
        problems.push(Problem::new(&key, &reason));
        let dns = Some(Dns { tcp_exempt: false, udp_captured: false });
        Written { dns, ..Written::default() }
    }))
}

#[cfg(test)]
mod tests;
