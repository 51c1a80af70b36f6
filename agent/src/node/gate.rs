//! Whether this node is safe for meshed pods: a state machine without I/O.
//!
//! The gate closes at once when protection is lost, and opens when everything has been right for the settle time. A gate
//! that flaps has to be right for longer and longer, so that a storm makes a bounded number of writes.

use std::time::{Duration, Instant};

/// What is not known yet leaves a gate that was open in this boot open for so long: a restart of the agent is no loss of
/// protection, since configs and pinned programs stay.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Each loss within this time of the last one doubles the settle time.
pub const CALM: Duration = Duration::from_secs(300);
/// The longest settle time that flapping leads to, unless the operator's own is longer.
pub const MAX_SETTLE: Duration = Duration::from_secs(60);

/// Why the gate is as it is. CamelCase, as a Node condition's reason has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Open.
    Protected,
    /// The parts have not said anything yet.
    Starting,
    /// All is well, but not for long enough.
    Settling,
    /// The machine was started anew since the gate was last open.
    Rebooted,
    /// A pod that starts now gets no mesh plugin.
    CniUnprotected,
    /// The config is right, and the container runtime has not loaded it.
    RuntimeNotReloaded,
    /// The runtime has no pod network.
    NoNetwork,
    /// Changes of the CNI directory would not be noticed at once.
    CniNotWatched,
    /// The programs do not see the pods' connections.
    HooksNotEffective,
    /// Other pods of this node that the operator named are not ready.
    PodsNotReady,
}

impl Reason {
    /// All values.
    pub const ALL: [Self; 10] = [
        Self::Protected,
        Self::Starting,
        Self::Settling,
        Self::Rebooted,
        Self::CniUnprotected,
        Self::RuntimeNotReloaded,
        Self::NoNetwork,
        Self::CniNotWatched,
        Self::HooksNotEffective,
        Self::PodsNotReady,
    ];

    /// The reason of the Node condition.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Protected => "Protected",
            Self::Starting => "Starting",
            Self::Settling => "Settling",
            Self::Rebooted => "Rebooted",
            Self::CniUnprotected => "CNIUnprotected",
            Self::RuntimeNotReloaded => "RuntimeNotReloaded",
            Self::NoNetwork => "NoNetwork",
            Self::CniNotWatched => "CNINotWatched",
            Self::HooksNotEffective => "HooksNotEffective",
            Self::PodsNotReady => "PodsNotReady",
        }
    }
}

/// What one part says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// It is switched off and asked for nothing.
    Off,
    /// It has not said anything yet.
    Pending(&'static str),
    /// As it should be.
    Good,
    /// Not as it should be, and what is the matter.
    Bad(Reason, String),
}

/// What all parts say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inputs {
    /// The CNI half: config verified, runtime reloaded.
    pub cni: Part,
    /// The kernel half: hooks in effect.
    pub hooks: Part,
    /// Other pods that have to be ready.
    pub pods: Part,
}

/// What the cluster is to be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Safe for meshed pods.
    pub open: bool,
    /// Why.
    pub reason: Reason,
    /// For people.
    pub message: String,
}

impl Verdict {
    fn closed(reason: Reason, message: impl Into<String>) -> Self {
        Self { open: false, reason, message: message.into() }
    }

    fn open() -> Self {
        Self {
            open: true,
            reason: Reason::Protected,
            message: "new meshed pods are redirected to their proxy".into(),
        }
    }
}

/// What was known when the agent started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// The gate was open, and the machine has not been started anew since.
    Open,
    /// The gate was open in an earlier boot: the cluster has to be told first of all.
    OtherBoot,
    /// It was not open, or nothing is known.
    Closed,
}

/// The gate.
#[derive(Clone, Debug)]
pub struct Gate {
    settle: Duration,
    started: Instant,
    before: Before,
    verdict: Verdict,
    /// Since when everything is well.
    good_since: Option<Instant>,
    /// When it last closed, and how many times in a row without calm between.
    lost: Option<(Instant, u32)>,
}

impl Gate {
    /// A gate as the agent finds it.
    pub fn new(settle: Duration, before: Before, now: Instant) -> Self {
        let verdict = match before {
            Before::Open => Verdict::open(),
            Before::OtherBoot => Verdict::closed(Reason::Rebooted, "the machine was started anew"),
            Before::Closed => Verdict::closed(Reason::Starting, "the agent starts"),
        };
        Self { settle, started: now, before, verdict, good_since: None, lost: None }
    }

    /// What the cluster is to be told now.
    pub fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    /// Takes what the parts say at `now`, and gives the time at which to call again although nothing changes.
    pub fn update(&mut self, inputs: &Inputs, now: Instant) -> Option<Instant> {
        let Inputs { cni, hooks, pods } = inputs;
        let parts = [cni, hooks, pods];
        let bad = parts.into_iter().find_map(|part| match part {
            Part::Bad(reason, message) => Some((*reason, message.clone())),
            _ => None,
        });
        let pending = parts.into_iter().find_map(|part| match part {
            Part::Pending(what) => Some(*what),
            _ => None,
        });
        let (verdict, wake) = match (bad, pending) {
            (Some((reason, message)), _) => {
                self.good_since = None;
                (Verdict::closed(reason, message), None)
            }
            (None, Some(what)) => {
                self.good_since = None;
                self.waiting(what, now)
            }
            (None, None) => self.well(now),
        };
        if self.verdict.open && !verdict.open {
            let times = match self.lost {
                Some((at, times)) if now.duration_since(at) < CALM => times.saturating_add(1),
                _ => 0,
            };
            self.lost = Some((now, times));
        }
        self.verdict = verdict;
        wake
    }

    fn waiting(&self, what: &str, now: Instant) -> (Verdict, Option<Instant>) {
        let until = self.started + PATIENCE;
        if self.verdict.open && now < until {
            return (self.verdict.clone(), Some(until));
        }
        // What a reboot closed stays known as that until there is more to say.
        let reason = match self.before {
            Before::OtherBoot => Reason::Rebooted,
            Before::Open | Before::Closed => Reason::Starting,
        };
        (Verdict::closed(reason, what), None)
    }

    fn well(&mut self, now: Instant) -> (Verdict, Option<Instant>) {
        let since = *self.good_since.get_or_insert(now);
        let settle = self.settle_now(now);
        if self.verdict.open || now.duration_since(since) >= settle {
            return (Verdict::open(), None);
        }
        let message = format!("all is well; open once that has lasted for {settle:?}");
        (Verdict::closed(Reason::Settling, message), Some(since + settle))
    }

    fn settle_now(&self, now: Instant) -> Duration {
        let Some((at, times)) = self.lost else { return self.settle };
        if now.duration_since(at) >= CALM {
            return self.settle;
        }
        let longer = self.settle.saturating_mul(2_u32.saturating_pow(times.min(16)));
        longer.min(MAX_SETTLE).max(self.settle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTLE: Duration = Duration::from_secs(2);

    fn inputs(cni: Part) -> Inputs {
        Inputs { cni, hooks: Part::Good, pods: Part::Off }
    }

    fn good() -> Inputs {
        inputs(Part::Good)
    }

    fn bad() -> Inputs {
        inputs(Part::Bad(Reason::CniUnprotected, "10-net.conflist has no entry".into()))
    }

    #[test]
    fn opens_after_the_settle_time_and_closes_at_once() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut gate = Gate::new(SETTLE, Before::Closed, start);
        let pending = inputs(Part::Pending("the CNI half has not looked yet"));
        for (ms, input, open, reason, wake) in [
            (0, pending, false, Reason::Starting, None),
            (10, good(), false, Reason::Settling, Some(2010)),
            (2009, good(), false, Reason::Settling, Some(2010)),
            (2010, good(), true, Reason::Protected, None),
            (3000, bad(), false, Reason::CniUnprotected, None),
            (3001, good(), false, Reason::Settling, Some(5001)),
            // Not in a row: the settle time starts again.
            (4000, bad(), false, Reason::CniUnprotected, None),
            (4001, good(), false, Reason::Settling, Some(6001)),
            (6001, good(), true, Reason::Protected, None),
        ] {
            let next = gate.update(&input, at(ms));
            assert_eq!((gate.verdict().open, gate.verdict().reason), (open, reason), "at {ms}");
            assert_eq!(next, wake.map(at), "at {ms}");
        }
        assert!(!gate.verdict().message.is_empty());
    }

    #[test]
    fn each_part_closes_and_a_part_that_is_off_does_not() {
        let start = Instant::now();
        for (cni, hooks, pods, reason) in [
            (Part::Good, Part::Off, Part::Off, Reason::Protected),
            (
                Part::Good,
                Part::Bad(Reason::HooksNotEffective, String::new()),
                Part::Off,
                Reason::HooksNotEffective,
            ),
            (Part::Good, Part::Good, Part::Bad(Reason::PodsNotReady, String::new()), Reason::PodsNotReady),
            (
                Part::Bad(Reason::NoNetwork, String::new()),
                Part::Pending("hooks"),
                Part::Off,
                Reason::NoNetwork,
            ),
            (Part::Good, Part::Pending("hooks"), Part::Good, Reason::Starting),
        ] {
            let mut gate = Gate::new(Duration::ZERO, Before::Closed, start);
            let inputs = Inputs { cni, hooks, pods };
            gate.update(&inputs, start);
            assert_eq!(gate.verdict().reason, reason, "{inputs:?}");
            assert_eq!(gate.verdict().open, reason == Reason::Protected);
        }
    }

    #[test]
    fn a_restarted_agent_does_not_close_and_a_rebooted_machine_does_first() {
        let start = Instant::now();
        let pending = inputs(Part::Pending("the CNI half has not looked yet"));
        let mut gate = Gate::new(SETTLE, Before::Open, start);
        assert!(gate.verdict().open);
        assert_eq!(gate.update(&pending, start), Some(start + PATIENCE));
        assert!(gate.verdict().open, "nothing is known to be wrong");
        gate.update(&good(), start + Duration::from_secs(1));
        assert!(gate.verdict().open, "without a settle time");

        let mut gate = Gate::new(SETTLE, Before::Open, start);
        gate.update(&pending, start + PATIENCE);
        assert_eq!((gate.verdict().open, gate.verdict().reason), (false, Reason::Starting));

        let mut gate = Gate::new(SETTLE, Before::Open, start);
        gate.update(&bad(), start);
        assert!(!gate.verdict().open);

        let mut gate = Gate::new(SETTLE, Before::OtherBoot, start);
        assert_eq!(
            (gate.verdict().open, gate.verdict().reason),
            (false, Reason::Rebooted),
            "before any input"
        );
        gate.update(&pending, start);
        assert_eq!((gate.verdict().open, gate.verdict().reason), (false, Reason::Rebooted));
        gate.update(&good(), start);
        gate.update(&good(), start + SETTLE);
        assert!(gate.verdict().open);
    }

    /// Lost again as soon as it opens, for an hour.
    #[test]
    fn a_storm_makes_few_changes() {
        let start = Instant::now();
        let mut gate = Gate::new(SETTLE, Before::Closed, start);
        let (mut now, mut changes) = (start, 0_u32);
        let end = start + Duration::from_secs(3600);
        while now < end {
            let wake = gate.update(&good(), now);
            if gate.verdict().open {
                changes += 2;
                gate.update(&bad(), now + Duration::from_millis(1));
            }
            now = wake.unwrap_or(now + Duration::from_millis(2));
        }
        assert!((100..=132).contains(&changes), "{changes}: about two a minute");
        // Calm again: the operator's settle time.
        let later = now + CALM;
        gate.update(&bad(), later);
        let wake = gate.update(&good(), later);
        assert_eq!(wake, Some(later + SETTLE));
    }
}
