//! Who says whether a repair worked.

use std::fmt::Debug;
use std::pin::Pin;

use super::subject::Pod;
use crate::probe::Answer;

/// A future that a trait object gives.
pub type Later<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Asks whether new connections of a pod are redirected now.
pub trait Proof: Debug + Send + Sync {
    /// Comes before the pod's rules change.
    fn prepare<'a>(&'a self, pod: &'a Pod) -> Later<'a, ()>;

    /// Of IPv4 and IPv6.
    fn prove<'a>(&'a self, pod: &'a Pod) -> Later<'a, [Answer; 2]>;
}

/// What the answers say of the families that the mesh redirects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// At least one is redirected, and none is not.
    Redirected,
    /// One is not.
    NotRedirected(String),
    /// Nobody knows.
    Unknown(String),
}

/// Sums the answers up; `families` are those that the mesh redirects.
pub fn sum_up(answers: [Answer; 2], families: [bool; 2]) -> Said {
    let (mut redirected, mut failed) = (false, None);
    for ((answer, redirects), name) in answers.into_iter().zip(families).zip(["IPv4", "IPv6"]) {
        match answer {
            _ if !redirects => {}
            Answer::NotRedirected { .. } => {
                return Said::NotRedirected(format!("new {name} connections still leave directly"));
            }
            Answer::Failed { reason } => failed = Some(format!("the probe of {name} failed: {reason}")),
            Answer::Redirected { .. } => redirected = true,
            Answer::NoRoute => {}
        }
    }
    match failed {
        Some(why) => Said::Unknown(why),
        None if redirected => Said::Redirected,
        None => Said::Unknown("no family that the mesh redirects has a route".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_probe_proves_nothing_and_one_family_spoils_it() {
        let yes = Answer::Redirected { port: 4140 };
        let no = Answer::NotRedirected { ifindex: 2 };
        let failed = Answer::Failed { reason: "no_process" };
        for (answers, families, expected) in [
            ([yes, Answer::NoRoute], [true, true], Some(true)),
            ([yes, yes], [true, true], Some(true)),
            ([yes, no], [true, false], Some(true)),
            ([yes, no], [true, true], Some(false)),
            ([failed, no], [true, true], Some(false)),
            ([failed, yes], [true, true], None),
            ([yes, failed], [true, true], None),
            ([Answer::NoRoute, Answer::NoRoute], [true, true], None),
            ([yes, yes], [false, false], None),
        ] {
            let said = match sum_up(answers, families) {
                Said::Redirected => Some(true),
                Said::NotRedirected(_) => Some(false),
                Said::Unknown(_) => None,
            };
            assert_eq!(said, expected, "{answers:?} {families:?}");
        }
    }
}
