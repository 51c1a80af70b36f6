//! What a mesh lets a particular pod do past its proxy.

use ipnet::IpNet;

use super::{
    grammar::{Parsed, PortRange, cidrs, ids, normalise},
    profile::{ExemptRules, IdSource, ListRule, Merge, Mode, PortRule},
};
use crate::pods::model::{KeyValues, User};

/// So much of a bad value is quoted.
const QUOTE: usize = 64;

/// The exemptions of one pod, as its annotations stood.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Exemptions {
    /// Destination ports of outgoing connections; sorted, without overlaps.
    pub out_ports: Vec<PortRange>,
    /// Destinations of outgoing connections.
    pub out_cidrs: Vec<IpNet>,
    /// Users beside the proxy's.
    pub uids: Vec<u32>,
    /// Ports of incoming connections; sorted, without overlaps.
    pub in_ports: Vec<PortRange>,
    /// Sources of incoming connections.
    pub in_sources: Vec<IpNet>,
}

/// An annotation's value that cannot be taken as it is. It was read as the mesh reads it, or else as exempting
/// nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The annotation.
    pub annotation: Box<str>,
    /// The first bad element, shortened.
    pub element: Box<str>,
}

/// Reads the exemptions of a pod with these annotations.
pub(super) fn exemptions(
    rules: &ExemptRules,
    annotations: &KeyValues,
    mode: Mode,
    problems: &mut Vec<Problem>,
) -> Exemptions {
    let ExemptRules { out_ports, out_cidrs, uids, in_ports, in_sources } = rules;
    Exemptions {
        out_ports: ports(out_ports, annotations, mode, problems),
        out_cidrs: list(out_cidrs, annotations, cidrs, problems),
        uids: list(uids, annotations, ids, problems),
        in_ports: ports(in_ports, annotations, mode, problems),
        in_sources: list(in_sources, annotations, cidrs, problems),
    }
}

fn ports(
    rule: &PortRule,
    annotations: &KeyValues,
    mode: Mode,
    problems: &mut Vec<Problem>,
) -> Vec<PortRange> {
    let PortRule { cni, init, annotation, grammar, merge } = rule;
    let defaults = match mode {
        Mode::Cni => cni,
        Mode::Init => init,
    };
    let parse = |value: &str| grammar.parse(value);
    normalise(merged(defaults, annotation.as_deref(), *merge, annotations, parse, problems))
}

fn list<T: Clone>(
    rule: &ListRule<T>,
    annotations: &KeyValues,
    parse: fn(&str) -> Parsed<T>,
    problems: &mut Vec<Problem>,
) -> Vec<T> {
    let ListRule { defaults, annotation, merge } = rule;
    merged(defaults, annotation.as_deref(), *merge, annotations, parse, problems)
}

fn merged<T: Clone>(
    defaults: &[T],
    annotation: Option<&str>,
    merge: Merge,
    annotations: &KeyValues,
    parse: impl Fn(&str) -> Parsed<T>,
    problems: &mut Vec<Problem>,
) -> Vec<T> {
    let said = annotation.and_then(|key| Some((key, annotations.get(key)?)));
    let Some((key, value)) = said.filter(|(_, value)| !value.is_empty()) else { return defaults.to_vec() };
    let Parsed { values, bad } = parse(value);
    problems.extend(bad.first().map(|element| problem(key, element)));
    match merge {
        Merge::Replace => values,
        Merge::Append => [defaults, &values].concat(),
    }
}

/// The id that the first source with something to say gives. A source that cannot be read ends the search: the
/// mesh would not have fallen back either.
pub(super) fn identity(
    sources: &[IdSource],
    annotations: &KeyValues,
    user: Option<User>,
    pick: fn(User) -> u32,
    problems: &mut Vec<Problem>,
) -> Option<u32> {
    for source in sources {
        match source {
            IdSource::Fixed(id) => return Some(*id),
            IdSource::Container => {
                if let Some(user) = user {
                    return Some(pick(user));
                }
            }
            IdSource::Annotation(key) => {
                let Some(value) = annotations.get(key).filter(|value| !value.is_empty()) else { continue };
                let id = value.parse().ok();
                if id.is_none() {
                    problems.push(problem(key, value));
                }
                return id;
            }
        }
    }
    None
}

fn problem(key: &str, element: &str) -> Problem {
    Problem { annotation: key.into(), element: element.chars().take(QUOTE).collect::<String>().into() }
}
