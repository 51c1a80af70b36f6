//! What cgroup events promised and the runtime's lists do not show yet. Pure.
//!
//! A pod's cgroup exists well before the runtime lists its sandbox (networking comes first), and a container's cgroup
//! goes shortly before the runtime notes its end. So after a hint the source looks again, soon at first and ever
//! slower, until the lists agree or it is clear that they never will.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use super::assemble::Known;
use crate::{
    cgroup::model::CgroupEventKind,
    pods::{ContainerId, PodUid, model::State, source::Nudge},
};

/// First and last pause between two looks.
const FIRST: Duration = Duration::from_millis(10);
const LAST: Duration = Duration::from_secs(2);

/// While a promise is young the pauses stay short: what is late by then is about to start, or has just ended.
const YOUNG: Duration = Duration::from_secs(2);

/// After so long the regular rounds must do. Setting up a pod's network can take a while.
const PATIENCE: Duration = Duration::from_secs(60);

/// Most promises kept at a time; beyond that the regular rounds must do.
const MOST: usize = 4096;

/// Something that the lists should show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Expected {
    /// A pod with this UID in its cgroup.
    Pod(PodUid),
    /// A container, or a sandbox, with this id.
    Container(ContainerId),
    /// This container not running any more.
    Ended(ContainerId),
}

impl Expected {
    /// Longest pause between two looks for this, `age` after the hint.
    fn longest_pause(self, age: Duration) -> Duration {
        match self {
            _ if age >= YOUNG => LAST,
            Self::Pod(_) => Duration::from_millis(100),
            Self::Container(_) | Self::Ended(_) => Duration::from_millis(40),
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Wait {
    since: Instant,
    next: Instant,
    pause: Duration,
}

/// All open promises.
#[derive(Debug, Default)]
pub(super) struct Expectations(HashMap<Expected, Wait>);

impl Expectations {
    /// Notes what a hint promises. A hint about a pod's end promises nothing: the runtime keeps ended pods a while.
    pub(super) fn hint(&mut self, nudge: Nudge, now: Instant) {
        let expected = match (nudge.kind, nudge.container) {
            (CgroupEventKind::Made, None) => Expected::Pod(nudge.uid),
            (CgroupEventKind::Made, Some(id)) => Expected::Container(id),
            (CgroupEventKind::Removed, Some(id)) => {
                self.0.remove(&Expected::Container(id));
                Expected::Ended(id)
            }
            (CgroupEventKind::Removed, None) => {
                self.0.remove(&Expected::Pod(nudge.uid));
                return;
            }
        };
        self.add(expected, now);
    }

    pub(super) fn add(&mut self, expected: Expected, now: Instant) {
        if self.0.len() < MOST {
            self.0.entry(expected).or_insert(Wait { since: now, next: now + FIRST, pause: FIRST });
        }
    }

    /// Drops what `known` shows by now and what took too long, and puts the rest off. Returns when to look again.
    pub(super) fn settle(&mut self, known: &Known, now: Instant) -> Option<Instant> {
        let shown = Shown::of(known);
        self.0.retain(|expected, wait| now < wait.since + PATIENCE && !shown.fulfils(expected));
        for (expected, wait) in self.0.iter_mut().filter(|(_, wait)| wait.next <= now) {
            wait.pause = (wait.pause * 2).min(expected.longest_pause(now - wait.since));
            wait.next = now + wait.pause;
        }
        self.0.values().map(|wait| wait.next).min()
    }
}

/// Ids that the lists show, with whether something runs under them.
struct Shown<'a> {
    known: &'a Known,
    running: HashMap<ContainerId, bool>,
}

impl<'a> Shown<'a> {
    fn of(known: &'a Known) -> Self {
        let running = known.values().flat_map(|pod| {
            let sandbox = pod.sandbox.iter().map(|sandbox| (sandbox.id, sandbox.ready));
            let containers = pod.containers.iter().filter_map(|container| {
                Some((container.id?, matches!(container.state, State::Running | State::Created)))
            });
            sandbox.chain(containers)
        });
        Self { known, running: running.collect() }
    }

    fn fulfils(&self, expected: &Expected) -> bool {
        match expected {
            Expected::Pod(uid) => self.known.contains_key(uid),
            Expected::Container(id) => self.running.contains_key(id),
            Expected::Ended(id) => !self.running.get(id).copied().unwrap_or(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::pods::model::{Container, PodFacts};

    fn uid() -> PodUid {
        PodUid::parse("72f9a42e-50d3-47ee-8ec7-0bccfb6ea7ae").expect("uid")
    }

    fn id() -> ContainerId {
        ContainerId::parse(&"a".repeat(64)).expect("id")
    }

    fn known(state: Option<State>) -> Known {
        let containers = state.map(|state| Container { id: Some(id()), state, ..Container::new("c") });
        let pod = PodFacts { containers: containers.into_iter().collect(), ..PodFacts::new(uid(), "n", "p") };
        Known::from([(uid(), Arc::new(pod))])
    }

    fn nudge(kind: CgroupEventKind, container: Option<ContainerId>) -> Nudge {
        Nudge { kind, uid: uid(), container }
    }

    #[test]
    fn looks_again_ever_slower_until_it_gives_up() {
        for (hint, young, most) in [
            (nudge(CgroupEventKind::Made, None), [10, 20, 40, 80, 100, 100], 60),
            (nudge(CgroupEventKind::Made, Some(id())), [10, 20, 40, 40, 40, 40], 95),
        ] {
            let (pauses, given_up) = looks(hint);
            assert_eq!(pauses[..6].iter().map(Duration::as_millis).collect::<Vec<_>>(), young);
            assert_eq!(pauses.iter().max(), Some(&LAST));
            assert!(given_up >= PATIENCE && pauses.len() < most, "{} looks in {given_up:?}", pauses.len());
        }
    }

    /// The pauses between the looks for something that never shows, and their sum.
    fn looks(hint: Nudge) -> (Vec<Duration>, Duration) {
        let start = Instant::now();
        let mut open = Expectations::default();
        open.hint(hint, start);
        let (mut now, mut pauses) = (start, Vec::new());
        while let Some(next) = open.settle(&Known::new(), now) {
            pauses.push(next - now);
            now = next;
        }
        (pauses, now - start)
    }

    #[test]
    fn the_lists_fulfil_promises() {
        let made = CgroupEventKind::Made;
        let removed = CgroupEventKind::Removed;
        for (nudge, known, fulfilled) in [
            (nudge(made, None), Known::new(), false),
            (nudge(made, None), known(None), true),
            (nudge(made, Some(id())), known(None), false),
            (nudge(made, Some(id())), known(Some(State::Created)), true),
            (nudge(removed, Some(id())), known(Some(State::Running)), false),
            (nudge(removed, Some(id())), known(Some(State::Exited)), true),
            (nudge(removed, Some(id())), known(None), true),
            (nudge(removed, None), known(Some(State::Running)), true),
        ] {
            let mut open = Expectations::default();
            let now = Instant::now();
            open.hint(nudge, now);
            assert_eq!(open.settle(&known, now).is_none(), fulfilled, "{nudge:?}");
        }
    }

    #[test]
    fn removal_takes_back_the_promise_of_making() {
        let now = Instant::now();
        let mut open = Expectations::default();
        open.hint(nudge(CgroupEventKind::Made, None), now);
        open.hint(nudge(CgroupEventKind::Made, Some(id())), now);
        open.hint(nudge(CgroupEventKind::Removed, Some(id())), now);
        open.hint(nudge(CgroupEventKind::Removed, None), now);
        assert_eq!(open.settle(&Known::new(), now), None);
    }

    #[test]
    fn bounded() {
        let now = Instant::now();
        let mut open = Expectations::default();
        for n in 0..2 * MOST {
            let id = ContainerId::parse(&format!("{n:064x}")).expect("id");
            open.add(Expected::Container(id), now);
        }
        assert_eq!(open.0.len(), MOST);
    }
}
