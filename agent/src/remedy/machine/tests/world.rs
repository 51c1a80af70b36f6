//! A node that remedies work on.

use super::*;

/// A node with its clock and answers; notes what is done.
pub(super) struct World {
    pub machine: Machine,
    pub metrics: Metrics,
    pub now: Instant,
    pub gate_open: bool,
    pub subjects: Vec<Subject>,
    pub repair: Repaired,
    pub owner: Inspected,
    pub evict: Evicted,
    pub did: Vec<String>,
    pub wake: Option<Instant>,
}

impl World {
    pub fn new(limits: Remedies, pods: u32) -> Self {
        let now = Instant::now();
        let metrics = Metrics::default();
        Self {
            machine: Machine::new(limits, metrics.clone(), now),
            metrics,
            now,
            gate_open: true,
            subjects: (0..pods).map(|n| subject(n, Seen::Bypassing { last: now })).collect(),
            repair: Repaired::Failed { detail: "no".into() },
            owner: Inspected::Owner(Owner::Workload(workload("ReplicaSet"))),
            evict: Evicted::Done,
            did: Vec::new(),
            wake: None,
        }
    }

    /// Ticks until nothing is left to do at this moment.
    pub fn settle(&mut self) {
        for turn in 0.. {
            assert!(turn < 1000, "never settles: {:?}", self.did);
            let (tasks, wake) = self.machine.tick(&self.subjects, self.gate_open, self.now);
            assert!(wake.is_none_or(|wake| wake > self.now), "a wake in the past is a busy loop");
            self.wake = wake;
            if tasks.is_empty() {
                return;
            }
            for Task { pod, actions } in tasks {
                for action in actions {
                    self.perform(&pod, &action);
                }
            }
        }
    }

    pub fn perform(&mut self, pod: &Pod, action: &Action) {
        let (word, outcome) = match action {
            Action::Say(Saying::Detected { gate_open: true }) => ("say detected".to_owned(), None),
            Action::Say(Saying::Detected { gate_open: false }) => ("say detected closed".to_owned(), None),
            Action::Say(saying) => {
                let text = format!("{saying:?}");
                let word = text.split([' ', '{']).next().unwrap_or_default().to_lowercase();
                (format!("say {word}"), None)
            }
            Action::Label => ("label".to_owned(), None),
            Action::Unlabel => ("unlabel".to_owned(), None),
            Action::Repair => ("repair".to_owned(), Some(Outcome::Repair(self.repair.clone()))),
            Action::Inspect => ("inspect".to_owned(), Some(Outcome::Inspect(self.owner.clone()))),
            Action::Evict => ("evict".to_owned(), Some(Outcome::Evict(self.evict.clone()))),
        };
        self.did.push(word);
        if let Some(outcome) = outcome {
            self.machine.done(pod.uid, outcome, self.now);
        }
    }

    pub fn after(&mut self, pause: Duration) -> Vec<String> {
        self.now += pause;
        self.settle();
        std::mem::take(&mut self.did)
    }

    pub fn at_once(&mut self) -> String {
        self.after(Duration::ZERO).join(", ")
    }

    /// Runs as the shell would, and gives how often `what` was done.
    pub fn run(&mut self, time: Duration, what: &str) -> usize {
        let end = self.now + time;
        self.did.clear();
        loop {
            self.settle();
            let next = self.wake.unwrap_or(end).min(self.now + 30 * S);
            if next >= end {
                self.now = end;
                return self.did.iter().filter(|did| *did == what).count();
            }
            self.now = next;
        }
    }

    pub fn counts(&self) -> String {
        const ENDS: [End; 19] = [
            End::Success,
            End::DryRun,
            End::Failed,
            End::Timeout,
            End::Unproven,
            End::Unconfirmed,
            End::Impossible,
            End::NotReady,
            End::GateClosed,
            End::RateLimited,
            End::Paused,
            End::BlockedPdb,
            End::Unowned,
            End::Mirror,
            End::Ending,
            End::Gone,
            End::Conflict,
            End::Forbidden,
            End::Unavailable,
        ];
        let all = Kind::ALL.iter().flat_map(|kind| ENDS.iter().map(move |end| (*kind, *end)));
        let seen = all.filter(|(kind, end)| self.metrics.counted(*kind, *end) > 0);
        let text = seen.map(|(kind, end)| {
            format!("{}:{}={}", kind.label(), end.label(), self.metrics.counted(kind, end))
        });
        text.collect::<Vec<_>>().join(" ")
    }
}

pub(super) const ANNOUNCED: &str = "say detected, label, say repairing, repair, say repairfailed, inspect";
