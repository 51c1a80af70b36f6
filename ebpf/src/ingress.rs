//! `cgroup_skb/ingress`: at delivery to a socket; a SYN comes with the listener that will accept it.

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::programs::SkBuffContext;
use nobypass_common::abi::CONFIG_INBOUND;
use nobypass_common::headers::Kind;
use nobypass_common::ids::{Hook, LOOPBACK_IFINDEX};
use nobypass_common::verdict::{self, Facts as _};

use crate::count::{self, Seen};
use crate::egress::{pod_of, settings};
use crate::facts::{self, SkbFacts};
use crate::{DROP, PASS, packet, pod};

/// Judges one packet.
#[inline(always)]
pub fn run(ctx: &SkBuffContext) -> i32 {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    let Some(packet) = packet::read(skb) else { return PASS };
    if !matches!(packet.transport.kind, Kind::Syn) || packet.ifindex == LOOPBACK_IFINDEX {
        return PASS;
    }
    let Some(config) = pod::config() else { return PASS };
    if config.flags & CONFIG_INBOUND == 0 {
        return PASS;
    }
    let owner = pod::owner(config, |level| facts::ancestor(skb, level));
    let settings = settings(config);
    let mut facts = SkbFacts::new(ctx, Hook::Ingress, packet.family);
    let judgement = verdict::ingress(&packet, &settings, pod_of(&owner), &mut facts);
    let (level, pod_mode) = owner.policy.map_or((0, 0), |policy| (policy.level, policy.mode));
    count::record(config, &packet, &judgement, owner.id, || Seen {
        pod: owner.id,
        container: if level == 0 { 0 } else { facts::ancestor(skb, level + 1) },
        // The socket here is the listener: its cookie says nothing of the connection.
        cookie: 0,
        uid: facts.uid(),
        hook: Hook::Ingress,
        mode: verdict::effective_mode(settings.mode, pod_mode),
    });
    if judgement.drop { DROP } else { PASS }
}
