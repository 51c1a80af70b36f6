//! What the agent and its helper say to each other: one JSON object a line.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Answer;
use super::failure::Failure;

/// A question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    /// Of the pod with this cgroup id.
    pub cgroup: u64,
    /// Its network namespace, if the runtime names it.
    pub netns: Option<PathBuf>,
    /// User and group.
    pub id: u32,
    /// Destinations, IPv4 and IPv6.
    pub to: [Option<SocketAddr>; 2],
}

/// The answers, IPv4 and IPv6.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Said(pub [Word; 2]);

/// [`Answer`] for another process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Word {
    /// See [`Answer`].
    Redirected(u16),
    /// See [`Answer`].
    NotRedirected(u32),
    /// See [`Answer`].
    NoRoute,
    /// See [`Answer`].
    Failed(String),
}

impl From<Answer> for Word {
    fn from(answer: Answer) -> Self {
        match answer {
            Answer::Redirected { port } => Self::Redirected(port),
            Answer::NotRedirected { ifindex } => Self::NotRedirected(ifindex),
            Answer::NoRoute => Self::NoRoute,
            Answer::Failed { reason } => Self::Failed(reason.into()),
        }
    }
}

impl From<Word> for Answer {
    fn from(word: Word) -> Self {
        match word {
            Word::Redirected(port) => Self::Redirected { port },
            Word::NotRedirected(ifindex) => Self::NotRedirected { ifindex },
            Word::NoRoute => Self::NoRoute,
            Word::Failed(label) => Failure::from_label(&label).into(),
        }
    }
}
