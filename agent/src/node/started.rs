//! Which pods started while the node was not protected. Pure.

use std::collections::{BTreeMap, VecDeque};

/// Windows that are remembered; older ones are of pods that were counted long ago.
const WINDOWS: usize = 64;
/// Names that one Event lists.
pub const NAMES: usize = 10;

/// How long after the plugins were run a runtime may say that it made the sandbox: containerd does so when the pause
/// container is there
/// (`RunPodSandbox` in <https://github.com/containerd/containerd/blob/v1.6.20/pkg/cri/server/sandbox_run.go>).
const LATE: Ns = 10_000_000_000;

/// Times are nanoseconds since 1970.
type Ns = i64;

/// A meshed pod, for this purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod<'a> {
    /// Any key that no other pod ever has.
    pub uid: &'a str,
    /// `namespace/name`.
    pub name: &'a str,
    /// When its sandbox was made.
    pub created: Ns,
    /// It has no redirect rules, that is known.
    pub bypassing: bool,
}

/// Counts pods by when their sandbox was made. Nothing is known of the time before the first look, unless that finds the
/// node unprotected: then it was so since its start. A pod that lacks the rules is counted also if it is from before that
/// look, since an earlier agent may have protected the node and died before it knew the pod; or if it is of shortly after a
/// window, see [`LATE`].
#[derive(Clone, Debug, Default)]
pub struct Started {
    known: bool,
    /// When that was.
    since: Ns,
    /// Closed windows: from, to.
    windows: VecDeque<(Ns, Ns)>,
    open: Option<Ns>,
    counted: BTreeMap<String, Ns>,
    total: u64,
}

impl Started {
    /// The node is protected or not from `at` on.
    pub fn protected(&mut self, protected: bool, at: Ns) {
        match (protected, self.open) {
            (false, None) => self.open = Some(if self.known { at } else { Ns::MIN }),
            (true, Some(from)) => {
                self.open = None;
                self.windows.push_back((from, at));
                if self.windows.len() > WINDOWS {
                    self.windows.pop_front();
                }
            }
            _ => {}
        }
        if !self.known {
            (self.known, self.since) = (true, at);
        }
    }

    /// All pods there are; gives the names of those that are counted now for the first time.
    pub fn pods<'a>(&mut self, pods: impl IntoIterator<Item = Pod<'a>>) -> Vec<&'a str> {
        let mut new = Vec::new();
        let mut still = BTreeMap::new();
        for pod in pods {
            if let Some((uid, created)) = self.counted.remove_entry(pod.uid) {
                still.insert(uid, created);
            } else if self.was_open(pod.created) || (pod.bypassing && self.was_just_open(pod.created)) {
                still.insert(pod.uid.to_owned(), pod.created);
                new.push(pod.name);
            }
        }
        // Only those that still exist: the memory is bounded by the node's pods.
        self.counted = still;
        self.total += u64::try_from(new.len()).unwrap_or(0);
        new
    }

    /// Whether it was said of any time whether the node was protected.
    pub fn is_known(&self) -> bool {
        self.known
    }

    /// How many, since the agent started.
    pub fn total(&self) -> u64 {
        self.total
    }

    fn was_just_open(&self, at: Ns) -> bool {
        let before_first_look = self.known && at < self.since.saturating_add(LATE);
        before_first_look
            || self.windows.iter().any(|(from, to)| (*from..to.saturating_add(LATE)).contains(&at))
    }

    fn was_open(&self, at: Ns) -> bool {
        self.open.is_some_and(|from| at >= from)
            || self.windows.iter().any(|(from, to)| (*from..*to).contains(&at))
    }
}

/// The text of the Event, for at least one pod.
pub fn note(names: &[&str]) -> String {
    let (count, shown) = (names.len(), names.iter().take(NAMES).copied().collect::<Vec<_>>().join(", "));
    let more = match count.saturating_sub(NAMES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let pods = if count == 1 { "meshed pod" } else { "meshed pods" };
    format!(
        "{count} {pods} started while this node's CNI configuration had no mesh plugin and may bypass their proxy: \
         {shown}{more}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pods<'a>(all: &'a [(&'a str, Ns)]) -> Vec<Pod<'a>> {
        all.iter()
            .map(|(name, created)| Pod { uid: name, name, created: *created, bypassing: false })
            .collect()
    }

    #[test]
    fn windows() {
        let mut started = Started::default();
        started.protected(false, 100);
        let all = [("old", 50), ("in", 150), ("edge", 200), ("after", 250)];
        assert_eq!(started.pods(pods(&all[..2])), ["old", "in"], "unprotected since the node's start");
        started.protected(true, 200);
        assert!(started.pods(pods(&all)).is_empty());
        started.protected(false, 300);
        started.protected(true, 310);
        // Seen late.
        let late = [("in", 150), ("gap", 305), ("later", 311)];
        assert_eq!(started.pods(pods(&late)), ["gap"]);
        assert_eq!(started.total(), 3);
        assert!(started.pods(pods(&late)).is_empty(), "once");
    }

    #[test]
    fn what_was_before_a_protected_start_is_not_known() {
        let mut started = Started::default();
        started.protected(true, 100);
        assert!(started.pods(pods(&[("old", 50)])).is_empty());
        started.protected(false, 200);
        assert_eq!(started.pods(pods(&[("old", 50), ("new", 200)])), ["new"]);
    }

    #[test]
    fn a_pod_from_before_a_protected_start_is_known_by_its_missing_rules() {
        let mut started = Started::default();
        let bypassing = |name, created| Pod { uid: name, name, created, bypassing: true };
        assert!(started.pods([bypassing("old", 50)]).is_empty(), "the node has not been looked at");
        started.protected(true, 100);
        assert_eq!(started.pods([bypassing("old", 50), bypassing("much later", 100 + LATE)]), ["old"]);
        assert!(started.pods([bypassing("old", 50)]).is_empty(), "once");
        assert_eq!(started.total(), 1);
    }

    #[test]
    fn a_sandbox_that_was_made_right_after_a_window_is_known_by_its_missing_rules() {
        let second = LATE / 10;
        let mut started = Started::default();
        started.protected(true, 0);
        started.protected(false, 100 * second);
        started.protected(true, 101 * second);
        let pod = |created, bypassing| Pod { uid: "p", name: "p", created, bypassing };
        assert!(started.clone().pods([pod(102 * second, false)]).is_empty());
        assert!(started.clone().pods([pod(99 * second, true)]).is_empty());
        assert!(started.clone().pods([pod(111 * second, true)]).is_empty());
        assert_eq!(started.pods([pod(102 * second, true)]), ["p"]);
    }

    #[test]
    fn the_note_is_bounded() {
        let names: Vec<String> = (0..300).map(|n| format!("shop/pod-{n}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let note = note(&names);
        assert!(note.starts_with("300 meshed pods ") && note.ends_with("shop/pod-9 and 290 more"), "{note}");
        assert!(super::note(&["a/b"]).starts_with("1 meshed pod started"));
    }
}
