//! `cgroup_skb/egress`: after NAT and routing, so that packet and device are what will really happen.

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::helpers::generated::bpf_get_socket_cookie;
use aya_ebpf::programs::SkBuffContext;
use nobypass_common::abi::{POD_FASTFAIL4, POD_FASTFAIL6};
use nobypass_common::headers::Kind;
use nobypass_common::ids::{Hook, Verdict};
use nobypass_common::verdict::{self, Facts as _, Judgement, Packet, Pod, Settings, SynOrigin};

use crate::count::{self, Seen};
use crate::facts::{self, MARK_COUNTED, MARK_DROPPED, MARK_HELD, SkbFacts};
use crate::pod::{self, Owner};
use crate::{DROP, PASS, packet, refusal};

/// Judges one packet.
#[inline(always)]
pub fn run(ctx: &SkBuffContext) -> i32 {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    let Some(packet) = packet::read(skb) else { return PASS };
    let Some(config) = pod::config() else { return PASS };
    if let Some(judgement) = verdict::without_pod(&packet, config.flags) {
        return if judgement.drop { DROP } else { PASS };
    }
    let owner = pod::owner(config, |level| facts::ancestor(skb, level));
    let settings = settings(config);
    let mut facts = SkbFacts::new(ctx, Hook::Egress, packet.family);
    let judgement = verdict::egress(&packet, &settings, pod_of(&owner), &mut facts);
    remember(&facts, &packet, &judgement);
    if matches!(judgement.verdict, Verdict::RedirectProof)
        && let Some(policy) = owner.policy
        && policy.flags & (POD_FASTFAIL4 | POD_FASTFAIL6) != 0
    {
        refusal::heal(owner.id, packet.family);
    }
    let (level, pod_mode) = owner.policy.map_or((0, 0), |policy| (policy.level, policy.mode));
    count::record(config, &packet, &judgement, owner.id, || Seen {
        pod: owner.id,
        container: if level == 0 { 0 } else { facts::ancestor(skb, level + 1) },
        // SAFETY: the context.
        cookie: unsafe { bpf_get_socket_cookie(skb.cast()) },
        uid: facts.uid(),
        hook: Hook::Egress,
        mode: verdict::effective_mode(settings.mode, pod_mode),
    });
    if judgement.drop { DROP } else { PASS }
}

/// The part of the configuration that the table needs.
#[inline(always)]
pub fn settings(config: &nobypass_common::abi::Config) -> Settings {
    Settings {
        mode: config.mode,
        unknown_policy: config.unknown_policy,
        flags: config.flags,
        hold_ns: config.hold_ns,
        max_silence_ns: config.max_silence_ns,
    }
}

/// The table's view of a packet's owner.
#[inline(always)]
pub fn pod_of(owner: &Owner) -> Pod<'_> {
    match owner.policy {
        Some(policy) => Pod::Known(policy),
        None if owner.id == 0 => Pod::None,
        None => Pod::Missing { since_ns: owner.since_ns },
    }
}

/// Notes on the socket what became of its SYN, where a retransmit would otherwise be taken for something else.
#[inline(always)]
fn remember(facts: &SkbFacts, packet: &Packet, judgement: &Judgement) {
    if !matches!(packet.transport.kind, Kind::Syn) {
        return;
    }
    match facts.origin {
        None | Some(SynOrigin::Raw) => {}
        Some(SynOrigin::First) if judgement.held => facts.remember(MARK_HELD),
        Some(_) if judgement.held => {}
        // A retry keeps its connection's mark.
        Some(_) if matches!(judgement.verdict, Verdict::Retry | Verdict::Unknown) => {}
        Some(_) if judgement.drop => facts.remember(MARK_DROPPED),
        Some(SynOrigin::RetryOfHeld | SynOrigin::RetryOfDropped) => facts.remember(MARK_COUNTED),
        Some(SynOrigin::First | SynOrigin::Retry) => {}
    }
}
