//! Marks on a pod, and texts to read on it.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::grammar::truth;
use crate::pods::model::{Container, KeyValues, PodFacts};

/// A text somewhere on a pod.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Source {
    /// The value of a label.
    Label(Box<str>),
    /// The value of an annotation.
    Annotation(Box<str>),
    /// The value of a label of the pod's namespace.
    NamespaceLabel(Box<str>),
    /// The value of an annotation of the pod's namespace.
    NamespaceAnnotation(Box<str>),
    /// The literal value of a container's environment variable.
    Env(Variable),
}

/// An environment variable.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Variable {
    /// The container; a name that ends with `*` means all names that start so.
    pub container: Box<str>,
    /// The variable.
    pub key: Box<str>,
}

/// Something on a pod that means something.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Marker {
    /// A label.
    Label(KeyMatch),
    /// An annotation.
    Annotation(KeyMatch),
    /// A label of the pod's namespace.
    NamespaceLabel(KeyMatch),
    /// An annotation of the pod's namespace.
    NamespaceAnnotation(KeyMatch),
    /// An environment variable of a container.
    Env(EnvMatch),
    /// Several places of which the first that says anything counts, such as a pod's label before its namespace's.
    First(FirstMatch),
    /// A container of this name; one that ends with `*` means all names that start so.
    Container(Box<str>),
    /// A container has this argument.
    Arg(ArgMatch),
    /// The pod's namespace.
    Namespace(Box<str>),
}

/// A key, and possibly its value.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KeyMatch {
    /// The key; one that ends with `*` means all keys that start so.
    pub key: Box<str>,
    /// The value; without any of these three any value but the empty one counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<Box<str>>,
    /// What the value means as a truth value (`true`, `1`, `enabled` …).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truth: Option<bool>,
    /// A part of the value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contains: Option<Box<str>>,
}

/// An environment variable, and possibly its value as for [`KeyMatch`].
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EnvMatch {
    /// The container.
    pub container: Box<str>,
    /// The variable.
    pub key: Box<str>,
    /// See [`KeyMatch`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<Box<str>>,
    /// See [`KeyMatch`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truth: Option<bool>,
    /// See [`KeyMatch`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contains: Option<Box<str>>,
}

/// The first of several places, and its value as for [`KeyMatch`].
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FirstMatch {
    /// The places.
    pub of: Vec<Source>,
    /// See [`KeyMatch`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<Box<str>>,
    /// See [`KeyMatch`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truth: Option<bool>,
    /// See [`KeyMatch`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contains: Option<Box<str>>,
}

/// An argument of a container.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ArgMatch {
    /// The container.
    pub container: Box<str>,
    /// The whole argument.
    pub value: Box<str>,
}

/// A marker that counts only where another one is not on the pod.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Unless {
    /// The marker.
    pub when: Marker,
    /// The other one.
    #[serde(default)]
    pub unless: Option<Marker>,
}

/// A name of a marker or source, for a pod source to keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish<'a> {
    Key(&'a str),
    Container(&'a str),
    Env(&'a str),
}

impl Source {
    /// What it says. `None`: it is not there, or nobody has told.
    #[must_use]
    pub fn read<'a>(&self, pod: &'a PodFacts) -> Option<&'a str> {
        match self {
            Self::Label(key) => pod.labels.get(key),
            Self::Annotation(key) => pod.annotations.get(key),
            Self::NamespaceLabel(key) => pod.namespace_labels.as_ref()?.get(key),
            Self::NamespaceAnnotation(key) => pod.namespace_annotations.as_ref()?.get(key),
            Self::Env(Variable { container, key }) => {
                named(pod, container).find_map(|container| container.env.get(key))
            }
        }
    }

    /// Its key, for a person.
    #[must_use]
    pub fn key(&self) -> &str {
        match self {
            Self::Label(key)
            | Self::Annotation(key)
            | Self::NamespaceLabel(key)
            | Self::NamespaceAnnotation(key)
            | Self::Env(Variable { key, .. }) => key,
        }
    }

    pub(super) fn wishes(&self) -> impl Iterator<Item = Wish<'_>> {
        let (first, second) = match self {
            Self::Label(key)
            | Self::Annotation(key)
            | Self::NamespaceLabel(key)
            | Self::NamespaceAnnotation(key) => (Wish::Key(key), None),
            Self::Env(Variable { container, key }) => (Wish::Env(key), Some(Wish::Container(container))),
        };
        std::iter::once(first).chain(second)
    }
}

impl fmt::Display for Source {
    /// For people: `annotation example.com/x`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Label(key) => write!(f, "label {key}"),
            Self::Annotation(key) => write!(f, "annotation {key}"),
            Self::NamespaceLabel(key) => write!(f, "label {key} of the namespace"),
            Self::NamespaceAnnotation(key) => write!(f, "annotation {key} of the namespace"),
            Self::Env(Variable { container, key }) => write!(f, "variable {key} of container {container}"),
        }
    }
}

impl fmt::Display for Marker {
    /// For people: what is looked at, without the value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Label(wanted) => write!(f, "label {}", wanted.key),
            Self::Annotation(wanted) => write!(f, "annotation {}", wanted.key),
            Self::NamespaceLabel(wanted) => write!(f, "label {} of the namespace", wanted.key),
            Self::NamespaceAnnotation(wanted) => write!(f, "annotation {} of the namespace", wanted.key),
            Self::Env(wanted) => write!(f, "variable {} of container {}", wanted.key, wanted.container),
            Self::First(first) => {
                for (nth, source) in first.of.iter().enumerate() {
                    write!(f, "{}{source}", if nth == 0 { "" } else { " or " })?;
                }
                Ok(())
            }
            Self::Container(name) => write!(f, "container {name}"),
            Self::Arg(arg) => write!(f, "argument {:?} of container {}", arg.value, arg.container),
            Self::Namespace(name) => write!(f, "namespace {name}"),
        }
    }
}

impl Marker {
    /// Whether a pod carries it.
    #[must_use]
    pub fn is_on(&self, pod: &PodFacts) -> bool {
        let in_namespace =
            |map: &Option<KeyValues>, wanted: &KeyMatch| map.as_ref().is_some_and(|map| wanted.is_in(map));
        match self {
            Self::Label(wanted) => wanted.is_in(&pod.labels),
            Self::Annotation(wanted) => wanted.is_in(&pod.annotations),
            Self::NamespaceLabel(wanted) => in_namespace(&pod.namespace_labels, wanted),
            Self::NamespaceAnnotation(wanted) => in_namespace(&pod.namespace_annotations, wanted),
            Self::Env(EnvMatch { container, key, value, truth, contains }) => named(pod, container)
                .filter_map(|container| container.env.get(key))
                .any(|text| says(text, value.as_deref(), *truth, contains.as_deref())),
            Self::First(FirstMatch { of, value, truth, contains }) => of
                .iter()
                .find_map(|source| source.read(pod))
                .is_some_and(|text| says(text, value.as_deref(), *truth, contains.as_deref())),
            Self::Container(name) => named(pod, name).next().is_some(),
            Self::Arg(ArgMatch { container, value }) => {
                named(pod, container).any(|container| container.args.iter().any(|arg| arg == value))
            }
            Self::Namespace(name) => matches(name, &pod.namespace),
        }
    }

    pub(super) fn wishes(&self) -> Vec<Wish<'_>> {
        match self {
            Self::Label(wanted)
            | Self::Annotation(wanted)
            | Self::NamespaceLabel(wanted)
            | Self::NamespaceAnnotation(wanted) => vec![Wish::Key(&wanted.key)],
            Self::Env(EnvMatch { container, key, .. }) => vec![Wish::Env(key), Wish::Container(container)],
            Self::First(FirstMatch { of, .. }) => of.iter().flat_map(Source::wishes).collect(),
            Self::Container(name) | Self::Arg(ArgMatch { container: name, .. }) => {
                vec![Wish::Container(name)]
            }
            Self::Namespace(_) => Vec::new(),
        }
    }
}

impl Unless {
    /// Whether it counts.
    pub(super) fn is_on(&self, pod: &PodFacts) -> bool {
        self.when.is_on(pod) && !self.unless.as_ref().is_some_and(|unless| unless.is_on(pod))
    }

    pub(super) fn wishes(&self) -> impl Iterator<Item = Wish<'_>> {
        self.unless.iter().chain([&self.when]).flat_map(Marker::wishes)
    }
}

impl KeyMatch {
    pub(super) fn is_in(&self, map: &KeyValues) -> bool {
        let Self { key, value, truth, contains } = self;
        map.iter().any(|(have, text)| {
            matches(key, have) && says(text, value.as_deref(), *truth, contains.as_deref())
        })
    }
}

fn says(text: &str, value: Option<&str>, wanted: Option<bool>, contains: Option<&str>) -> bool {
    if (value, wanted, contains) == (None, None, None) {
        return !text.is_empty();
    }
    value.is_none_or(|value| value == text)
        && wanted.is_none_or(|wanted| truth(text) == Some(wanted))
        && contains.is_none_or(|part| text.contains(part))
}

fn named<'a>(pod: &'a PodFacts, pattern: &str) -> impl Iterator<Item = &'a Container> {
    pod.containers.iter().filter(move |container| matches(pattern, &container.name))
}

/// Whether `name` is what `pattern` means: itself, or anything with that beginning when it ends with `*`.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => pattern == name,
    }
}
