//! Why a pod's verdict is what it is, for a person: everything that is known of one pod, and what to do next.

mod advice;
pub mod find;
mod sentence;

use std::collections::BTreeMap;
use std::sync::Arc;

use nobypass_common::abi::{Config, PodCounters, PodPolicy};
use nobypass_common::ids::{Counter, MODE_INHERIT, Mode, PodKind};
use serde::{Deserialize, Serialize};

use crate::bpf::Maps;
use crate::detect::report::Report;
use crate::detect::verdict::{count, mode_label};
use crate::detect::{Family, PodState};
use crate::mesh::role::runs_to_completion;
use crate::mesh::{Exemptions, Listed, Membership, MeshRole, Profiles, UserPorts, recognise};
use crate::pods::model::{Container, State};
use crate::policy::effective::Traffic;
use crate::policy::mode::{Downgrade, Said};
use crate::policy::text;
use crate::policy::{Effective, PodView};
use crate::sys::clock::monotonic_ns;

/// Everything about one pod. Times are seconds ago.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// An agent said this; else it is what the pins alone can tell.
    pub agent: bool,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID; empty without an agent.
    pub uid: String,
    /// Mesh profile; empty if none.
    pub mesh: String,
    /// Cgroup id.
    pub cgroup: u64,
    /// The sandbox's id; empty while not known.
    pub sandbox: String,
    /// `unknown`, `exempt`, `meshed`.
    pub kind: String,
    /// Why, in a word.
    pub reason: String,
    /// Why, in a sentence.
    pub recognition: String,
    /// Where a meshed pod stands (`before_redirect`, `starting`, `running`, `draining`, `finished`); else empty.
    pub phase: String,
    /// A meshed pod is meant to end, as a job's; false while only the container runtime has told of it.
    pub ends_by_itself: bool,
    /// The verdicts, in the order IPv4, IPv6.
    pub families: Vec<FamilyExplained>,
    /// The mode.
    pub mode: ModeExplained,
    /// What holds beside the mode; `None` without an agent.
    pub traffic: Option<TrafficExplained>,
    /// What enforce does or would do.
    pub enforce: String,
    /// Containers, in the source's order.
    pub containers: Vec<ContainerExplained>,
    /// What the mesh lets out or in past its proxy, by kind.
    pub exemptions: BTreeMap<String, Vec<String>>,
    /// Counters that are not zero.
    pub counters: BTreeMap<String, u64>,
    /// The last bypasses, the latest first: a sample.
    pub events: Vec<Report>,
    /// Annotations that are not taken as they are.
    pub problems: Vec<String>,
    /// Containers that may send by packet sockets, which nothing here sees.
    #[serde(default)]
    pub packet_sockets: Vec<String>,
    /// What to do.
    pub next: Vec<String>,
}

/// One family's verdict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FamilyExplained {
    /// `ipv4` or `ipv6`.
    pub family: String,
    /// The verdict.
    pub verdict: String,
    /// Why it is not `redirected`.
    pub reason: String,
    /// Since when; `None` without an agent.
    pub since_seconds: Option<f64>,
    /// The signs, the latest first.
    pub evidence: Vec<Sign>,
}

/// One piece of evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sign {
    /// What was seen, in words.
    pub what: String,
    /// When.
    pub seconds_ago: f64,
}

/// The mode and where it comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModeExplained {
    /// In effect.
    pub mode: String,
    /// Who says so; empty without an agent.
    pub level: String,
    /// Who says what of the node's mode; empty without an agent.
    pub node: String,
    /// All who said something, the strongest first.
    pub said: Vec<Said>,
    /// Why it is less than was asked for.
    pub downgrade: Option<Downgrade>,
}

/// What holds beside the mode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrafficExplained {
    /// UDP (but DNS) and other protocols.
    pub non_tcp: String,
    /// QUIC.
    pub quic: String,
    /// Families that the mesh does not redirect.
    pub family_gap: String,
    /// Inbound connections.
    pub inbound: String,
}

/// One container.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContainerExplained {
    /// Its name.
    pub name: String,
    /// What it is for.
    pub role: String,
    /// Its state.
    pub state: String,
    /// Its exit code, once it has ended.
    pub exit_code: Option<i32>,
    /// Its user, if known.
    pub uid: Option<u32>,
    /// Its cgroup id, once it has one.
    pub cgroup: Option<u64>,
}

/// What a running agent knows.
#[derive(Debug)]
pub struct Known<'a> {
    /// The pod.
    pub view: &'a Arc<PodView>,
    /// Its verdicts, if it belongs to a mesh.
    pub state: Option<&'a PodState>,
    /// The policy.
    pub policy: &'a Effective,
    /// The profiles.
    pub profiles: &'a Profiles,
    /// Its last reports.
    pub events: Vec<Arc<Report>>,
    /// Hooks that are not in effect.
    pub lost_hooks: Vec<String>,
    /// Containers that may send by packet sockets.
    pub packet_sockets: Vec<String>,
}

/// What the kernel knows.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// The node's settings.
    pub config: Config,
    /// The pod's entry.
    pub entry: Option<PodPolicy>,
    /// Its counters.
    pub counters: PodCounters,
    /// Now, ns of `CLOCK_MONOTONIC`.
    pub now: u64,
}

impl Kernel {
    /// Reads what it knows of a pod.
    ///
    /// # Errors
    /// [`crate::bpf::BpfError::Map`].
    pub fn read(maps: &Maps, cgroup: u64) -> Result<Self, crate::bpf::BpfError> {
        Ok(Self {
            config: maps.config()?,
            entry: maps.policy(cgroup),
            counters: maps.counters(cgroup).unwrap_or(PodCounters::ZERO),
            now: monotonic_ns(),
        })
    }

    fn mode(&self) -> u32 {
        match self.entry {
            Some(entry) if entry.mode != MODE_INHERIT => entry.mode,
            _ => self.config.mode,
        }
    }
}

/// Explains a pod of a running agent.
pub fn explain(known: &Known<'_>, kernel: &Kernel) -> Explanation {
    let Known { view, state, policy, profiles, events, packet_sockets, lost_hooks: _ } = known;
    let fresh = match state {
        Some(state) => state.with(&kernel.counters, kernel.now),
        None => PodState::new(Arc::clone(view), 0, kernel.now),
    };
    let membership = view.facts.as_deref().map(|facts| recognise(facts, profiles.as_slice()));
    let meshed = match &membership {
        Some(Membership::Meshed(meshed)) => Some(meshed),
        _ => None,
    };
    let profile = profiles.named(&view.mesh);
    let choice = view.choice.as_ref();
    let mode = ModeExplained {
        mode: mode_label(kernel.mode()).into(),
        level: choice.map_or("", |choice| choice.level.label()).into(),
        node: format!("{} by {}", Mode::from(policy.mode).label(), policy.mode_source.label()),
        said: choice.map_or_else(Vec::new, |choice| choice.said.clone()),
        downgrade: choice.and_then(|choice| choice.downgrade),
    };
    let mut explanation = Explanation {
        agent: true,
        namespace: view.namespace.to_string(),
        name: view.name.to_string(),
        uid: view.uid.to_string(),
        mesh: view.mesh.to_string(),
        cgroup: view.cgroup,
        sandbox: view.sandbox.map_or_else(String::new, |sandbox| sandbox.to_string()),
        kind: view.kind.label().into(),
        reason: view.reason.into(),
        recognition: sentence::recognition(view, membership.as_ref(), profile),
        phase: meshed.map_or("", |meshed| meshed.phase.as_str()).into(),
        ends_by_itself: meshed.is_some() && view.facts.as_deref().and_then(runs_to_completion) == Some(true),
        families: Family::ALL.iter().map(|family| family_of(&fresh, *family, kernel.now)).collect(),
        mode,
        traffic: view.traffic.map(traffic),
        enforce: String::new(),
        containers: containers(view, membership.as_ref()),
        exemptions: membership.as_ref().map_or_else(BTreeMap::new, exemptions),
        counters: counters(&kernel.counters),
        events: events.iter().map(|report| Report::clone(report)).collect(),
        problems: view.problems.clone(),
        packet_sockets: packet_sockets.clone(),
        next: Vec::new(),
    };
    explanation.enforce = sentence::enforce(&explanation);
    explanation.next = advice::next(&explanation, &known.lost_hooks);
    explanation
}

/// Explains a pod without an agent.
pub fn from_pins(maps: &Maps, cgroup: u64, kernel: &Kernel) -> Explanation {
    let name = maps.name(cgroup);
    let field = |of: fn(&nobypass_common::abi::PodName) -> &[u8]| {
        name.as_ref().map_or_else(String::new, |name| text(of(name)))
    };
    let kind = kernel.entry.and_then(|entry| PodKind::from_code(entry.kind)).unwrap_or(PodKind::Unknown);
    let verdicts = crate::detect::verdict::of_pod(&kernel.counters, false, kernel.now);
    let flags = kernel.entry.map_or(0, |entry| entry.flags);
    let families = Family::ALL.iter().zip(verdicts).map(|(family, verdict)| {
        use crate::detect::verdict::{PodVerdict, reason};
        let bad = matches!(verdict, PodVerdict::Bypassing | PodVerdict::Partial);
        let times = [
            (kernel.counters.redirect_ns, "a connection was redirected to the proxy"),
            (kernel.counters.bypass_ns, "a connection left the pod past the proxy"),
        ];
        let signs = times.iter().filter_map(|(times, what)| {
            let at = times.get(family.index()).copied().filter(|at| *at != 0)?;
            Some(Sign { what: (*what).into(), seconds_ago: seconds(kernel.now, at) })
        });
        FamilyExplained {
            family: family.label().into(),
            verdict: verdict.label().into(),
            reason: if bad { reason(&kernel.counters, flags, family.index()).into() } else { String::new() },
            since_seconds: None,
            evidence: signs.collect(),
        }
    });
    let mut explanation = Explanation {
        agent: false,
        namespace: field(|name| &name.namespace),
        name: field(|name| &name.name),
        uid: String::new(),
        mesh: field(|name| &name.mesh),
        cgroup,
        sandbox: String::new(),
        kind: kind.label().into(),
        reason: String::new(),
        recognition: "only a running agent knows why".into(),
        phase: String::new(),
        ends_by_itself: false,
        families: families.collect(),
        mode: ModeExplained {
            mode: mode_label(kernel.mode()).into(),
            level: String::new(),
            node: String::new(),
            said: Vec::new(),
            downgrade: None,
        },
        traffic: None,
        enforce: String::new(),
        containers: Vec::new(),
        exemptions: BTreeMap::new(),
        counters: counters(&kernel.counters),
        events: Vec::new(),
        problems: Vec::new(),
        packet_sockets: Vec::new(),
        next: Vec::new(),
    };
    explanation.enforce = sentence::enforce(&explanation);
    explanation.next = advice::next(&explanation, &[]);
    explanation
}

fn seconds(now: u64, at: u64) -> f64 {
    let millis = u32::try_from(now.saturating_sub(at) / 1_000_000).unwrap_or(u32::MAX);
    f64::from(millis) / 1000.0
}

fn family_of(state: &PodState, family: Family, now: u64) -> FamilyExplained {
    let [v4, v6] = state.families;
    let of = match family {
        Family::V4 => v4,
        Family::V6 => v6,
    };
    let evidence = of.evidence;
    let signs = [
        evidence.proof.map(|at| ("a connection was redirected to the proxy".to_owned(), at)),
        evidence.bypass.map(|(reason, at)| {
            (format!("a connection left the pod past the proxy ({})", reason.label()), at)
        }),
        evidence.probe.map(|(answer, at)| (sentence::probe(answer), at)),
        evidence
            .validator
            .map(|(code, at)| (format!("the mesh's validator ended with exit code {code}"), at)),
        evidence.canary.map(|at| ("a connection to the validator's address left the pod".to_owned(), at)),
        evidence.preexisting.map(|(n, at)| {
            (
                format!(
                    "{n} connections are older than the programs or the redirection and go around the proxy"
                ),
                at,
            )
        }),
    ];
    let mut signs: Vec<(String, u64)> = signs.into_iter().flatten().collect();
    signs.sort_by_key(|(_, at)| std::cmp::Reverse(*at));
    FamilyExplained {
        family: family.label().into(),
        verdict: of.verdict.label().into(),
        reason: of.reason.map_or("", |reason| reason.label()).into(),
        since_seconds: Some(seconds(now, of.since)),
        evidence: signs.into_iter().map(|(what, at)| Sign { what, seconds_ago: seconds(now, at) }).collect(),
    }
}

fn traffic(traffic: Traffic) -> TrafficExplained {
    let word = |value: Result<serde_json::Value, serde_json::Error>| {
        value.ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
    };
    let Traffic { non_tcp, quic, family_gap, inbound } = traffic;
    TrafficExplained {
        non_tcp: word(serde_json::to_value(non_tcp)),
        quic: word(serde_json::to_value(quic)),
        family_gap: word(serde_json::to_value(family_gap)),
        inbound: word(serde_json::to_value(inbound)),
    }
}

fn containers(view: &PodView, membership: Option<&Membership>) -> Vec<ContainerExplained> {
    let role = |container: &Container| match membership {
        Some(Membership::Meshed(meshed)) => meshed.roles.of(&container.name).map_or("", MeshRole::as_str),
        _ => "",
    };
    let facts = view.facts.iter().flat_map(|facts| &facts.containers);
    let explained = facts.map(|container| ContainerExplained {
        name: container.name.to_string(),
        role: role(container).into(),
        state: match container.state {
            State::Waiting => "waiting",
            State::Unknown => "unknown",
            State::Exited => "exited",
            State::Created => "created",
            State::Running => "running",
        }
        .into(),
        exit_code: container.exit_code,
        uid: container.uid(),
        cgroup: view.containers.iter().find(|(_, name)| *name == container.name).map(|(id, _)| *id),
    });
    explained.collect()
}

fn texts<T: ToString>(values: &[T]) -> Vec<String> {
    values.iter().map(ToString::to_string).collect()
}

fn exemptions(membership: &Membership) -> BTreeMap<String, Vec<String>> {
    let Membership::Meshed(meshed) = membership else { return BTreeMap::new() };
    let Exemptions { out_ports, out_cidrs, listed, uids, user_ports, gids, devices, in_ports, in_sources } =
        &meshed.exemptions;
    let empty = Listed::default();
    let Listed { ports: only_ports, cidrs: only_cidrs } = listed.as_ref().unwrap_or(&empty);
    let users = user_ports.iter().map(|UserPorts { uids: (first, last), ports }| {
        format!("{first}-{last} to {}", texts(ports).join(","))
    });
    let kinds = [
        ("ports out", texts(out_ports)),
        ("networks out", texts(out_cidrs)),
        ("but ports", texts(only_ports)),
        ("but networks", texts(only_cidrs)),
        ("users", texts(uids)),
        ("users' ports", users.collect()),
        ("groups", texts(gids)),
        ("devices", texts(devices)),
        ("ports in", texts(in_ports)),
        ("sources in", texts(in_sources)),
    ];
    let some = kinds.into_iter().filter(|(_, values): &(_, Vec<String>)| !values.is_empty());
    some.map(|(kind, values)| (kind.to_owned(), values)).collect()
}

fn counters(counters: &PodCounters) -> BTreeMap<String, u64> {
    let all = Counter::ALL.iter().map(|counter| (counter.label().to_owned(), count(counters, *counter)));
    all.filter(|(_, n)| *n > 0).collect()
}

#[cfg(test)]
mod tests;
