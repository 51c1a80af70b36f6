//! What a mesh lets a particular pod do past its proxy.

use ipnet::IpNet;

use super::{
    grammar::{CidrGrammar, Parsed, PortRange, UserPorts, complement, devices, ids, normalise, user_ports},
    profile::{Empty, ExemptRules, IdSource, ListRule, Merge, Mode, OnlyRules, PortRule, PortsAlone},
};
use crate::pods::model::{Container, PodFacts};

/// So much of a bad value is quoted.
const QUOTE: usize = 64;

/// The exemptions of one pod, as its annotations stood.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Exemptions {
    /// Destination ports of outgoing connections; sorted, without overlaps.
    pub out_ports: Vec<PortRange>,
    /// Destinations of outgoing connections.
    pub out_cidrs: Vec<IpNet>,
    /// Of what is not exempt by the rest only this is redirected. `None`: everything is.
    pub listed: Option<Listed>,
    /// Users beside the proxy's.
    pub uids: Vec<u32>,
    /// Users whose connections to some ports are exempt.
    pub user_ports: Vec<UserPorts>,
    /// Groups beside the proxy's.
    pub gids: Vec<u32>,
    /// Names of the devices whose connections are exempt; `net+` means all that start with `net`.
    pub devices: Vec<Box<str>>,
    /// Ports of incoming connections; sorted, without overlaps.
    pub in_ports: Vec<PortRange>,
    /// Sources of incoming connections.
    pub in_sources: Vec<IpNet>,
}

/// What alone is redirected: a connection to one of these ports, or to one of these networks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Listed {
    /// Destination ports; sorted, without overlaps.
    pub ports: Vec<PortRange>,
    /// Destinations.
    pub cidrs: Vec<IpNet>,
}

/// An annotation's value that cannot be taken as it is. It was read as the mesh reads it, or else as exempting
/// nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The annotation.
    pub annotation: Box<str>,
    /// The first bad element, shortened, or what is wrong.
    pub element: Box<str>,
}

impl Problem {
    pub(super) fn new(annotation: &str, element: &str) -> Self {
        Self {
            annotation: annotation.into(),
            element: element.chars().take(QUOTE).collect::<String>().into(),
        }
    }
}

/// Reads the annotations of one pod, and collects what cannot be read.
struct Reader<'a> {
    pod: &'a PodFacts,
    mode: Mode,
    problems: &'a mut Vec<Problem>,
}

/// Reads the exemptions of a pod.
pub(super) fn exemptions(
    rules: &ExemptRules,
    pod: &PodFacts,
    mode: Mode,
    problems: &mut Vec<Problem>,
) -> Exemptions {
    let ExemptRules {
        out_ports,
        out_cidrs,
        only,
        uids,
        user_ports,
        gids,
        by_group: _,
        devices: device_key,
        in_ports,
        in_only,
        in_sources,
        in_off,
    } = rules;
    let mut reader = Reader { pod, mode, problems };
    let listed = reader.listed(only);
    // A list of ports alone takes the place of the exempt ones.
    let void = only.ports_alone == PortsAlone::Limit
        && listed.as_ref().is_some_and(|listed| !listed.ports.is_empty());
    let out_ports = if void { Vec::new() } else { reader.ports(out_ports) };
    let in_ports = if in_off.iter().any(|marker| marker.is_on(pod)) {
        vec![PortRange::ALL]
    } else {
        let limited = in_only.as_deref().and_then(|key| reader.in_only(key, in_ports));
        limited.unwrap_or_else(|| reader.ports(in_ports))
    };
    Exemptions {
        out_ports,
        out_cidrs: reader.list(out_cidrs, |text| out_cidrs.grammar.parse(text)),
        listed,
        uids: reader.list(uids, ids),
        user_ports: reader.plain(user_ports.as_deref(), user_ports_of),
        gids: reader.list(gids, ids),
        devices: reader.plain(device_key.as_deref(), devices),
        in_ports,
        in_sources: reader.list(in_sources, |text| in_sources.grammar.parse(text)),
    }
}

fn user_ports_of(text: &str) -> Parsed<UserPorts> {
    user_ports(text.split(';'))
}

impl<'a> Reader<'a> {
    fn get(&self, key: &str, namespace: bool) -> Option<&'a str> {
        let pod = self.pod;
        let fallback =
            || pod.namespace_annotations.as_ref().filter(|_| namespace).and_then(|map| map.get(key));
        pod.annotations.get(key).or_else(fallback)
    }

    fn ports(&mut self, rule: &PortRule) -> Vec<PortRange> {
        let PortRule { cni, init, annotation, namespace, grammar, merge, empty } = rule;
        let defaults = match self.mode {
            Mode::Cni => cni,
            Mode::Init => init,
        };
        let parse = |value: &str| grammar.parse(value);
        normalise(self.merged(defaults, annotation.as_deref(), *namespace, *merge, *empty, parse))
    }

    fn list<T: Clone>(&mut self, rule: &ListRule<T>, parse: impl Fn(&str) -> Parsed<T>) -> Vec<T> {
        let ListRule { defaults, annotation, namespace, grammar: _, merge } = rule;
        self.merged(defaults, annotation.as_deref(), *namespace, *merge, Empty::Absent, parse)
    }

    fn plain<T: Clone>(&mut self, annotation: Option<&str>, parse: impl Fn(&str) -> Parsed<T>) -> Vec<T> {
        self.merged(&[], annotation, false, Merge::Replace, Empty::Absent, parse)
    }

    fn merged<T: Clone>(
        &mut self,
        defaults: &[T],
        annotation: Option<&str>,
        namespace: bool,
        merge: Merge,
        empty: Empty,
        parse: impl Fn(&str) -> Parsed<T>,
    ) -> Vec<T> {
        let said = annotation.and_then(|key| Some((key, self.get(key, namespace)?)));
        let values = match said {
            None => return defaults.to_vec(),
            Some((_, "")) if empty == Empty::Absent => return defaults.to_vec(),
            Some((_, "")) => Vec::new(),
            Some((key, value)) => {
                let Parsed { values, bad } = parse(value);
                self.problem(key, &bad);
                values
            }
        };
        match merge {
            Merge::Replace => values,
            Merge::Append => [defaults, &values].concat(),
        }
    }

    fn problem(&mut self, key: &str, bad: &[String]) {
        self.problems.extend(bad.first().map(|element| Problem::new(key, element)));
    }

    fn listed(&mut self, rules: &OnlyRules) -> Option<Listed> {
        let OnlyRules { cidrs, cidr_grammar, empty, ports, port_grammar, ports_alone } = rules;
        let nets = cidrs.as_deref().and_then(|key| self.only_cidrs(key, *cidr_grammar, *empty));
        if nets.is_none() && *ports_alone == PortsAlone::SayNothing {
            return None;
        }
        let ports = normalise(self.plain(ports.as_deref(), |text| port_grammar.parse(text)));
        (nets.is_some() || !ports.is_empty()).then(|| Listed { ports, cidrs: nets.unwrap_or_default() })
    }

    /// `None`: all networks are redirected. A list that cannot be read redirects all, too.
    fn only_cidrs(&mut self, key: &str, grammar: CidrGrammar, empty: Empty) -> Option<Vec<IpNet>> {
        match self.get(key, false)? {
            "*" => None,
            "" => (empty == Empty::List).then(Vec::new),
            value => {
                let Parsed { values, bad } = grammar.parse(value);
                self.problem(key, &bad);
                bad.is_empty().then_some(values)
            }
        }
    }

    /// The exempt ports where a list says which are redirected. `None`: it does not.
    fn in_only(&mut self, key: &str, rule: &PortRule) -> Option<Vec<PortRange>> {
        let value = self.get(key, rule.namespace)?;
        match value {
            "*" => None,
            "" => (rule.empty == Empty::List).then(|| vec![PortRange::ALL]),
            value => {
                let Parsed { values, bad } = rule.grammar.parse(value);
                self.problem(key, &bad);
                bad.is_empty().then(|| complement(&normalise(values)))
            }
        }
    }
}

/// The id that the first source with something to say gives. An annotation that cannot be read ends the search: the
/// mesh would not have fallen back either.
pub(super) fn identity(
    sources: &[IdSource],
    pod: &PodFacts,
    proxy: Option<&Container>,
    pick: fn(&Container) -> Option<u32>,
    problems: &mut Vec<Problem>,
) -> Option<u32> {
    let of_proxy = proxy.and_then(pick);
    for source in sources {
        let said = match source {
            IdSource::Fixed(id) => return Some(*id),
            IdSource::Container => match of_proxy {
                Some(id) => return Some(id),
                None => continue,
            },
            IdSource::ContainerUnlessRoot => match of_proxy.filter(|id| *id != 0) {
                Some(id) => return Some(id),
                None => continue,
            },
            IdSource::Annotation(key) => pod.annotations.get(key).map(|value| (key, value)),
            IdSource::NamespaceAnnotation(key) => {
                pod.namespace_annotations.as_ref().and_then(|map| map.get(key)).map(|value| (key, value))
            }
        };
        let Some((key, value)) = said.filter(|(_, value)| !value.is_empty()) else { continue };
        let id = value.parse().ok();
        if id.is_none() {
            problems.push(Problem::new(key, value));
        }
        return id;
    }
    None
}
