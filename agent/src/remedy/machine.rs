//! What to do about each bypassing pod, and when: a state machine without I/O.
//!
//! bypassing → Event and label → the node's gate is open and the grace time over → repair in place → proven, or → evict.
//! With the gate closed nothing is done but to say so: the pod's successor would bypass as well.

mod case;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use super::action::{Action, Saying, Task};
use super::budget::{Breaker, Bucket, Pauses, back_off, jitter};
use super::metrics::{End, Kind, Metrics, Stage};
use super::policy::{Remedies, Step};
use super::subject::{Evicted, Inspected, Outcome, Owner, Pod, Repaired, Seen, Subject, Workload};
use crate::pods::PodUid;
use case::{Case, Next, Phase};

/// Repairs under way at the same time.
pub const PARALLEL: usize = 4;
/// Before the second try of a repair; grows fourfold.
const RETRY: Duration = Duration::from_secs(1);
/// Before the second try of an eviction; doubles.
const EVICT_RETRY: Duration = Duration::from_secs(10);
/// The longest pause between two tries for one pod.
const MAX_RETRY: Duration = Duration::from_secs(600);
/// The longest pause before a repair that lacks something of the node is tried again.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// A missing permission is looked for again after this.
const FORBIDDEN: Duration = Duration::from_secs(600);
/// A connection that was begun before the repair may still be counted for so long.
const SLACK: Duration = Duration::from_secs(2);
/// A pod that was well for this long begins with new attempts.
const FORGIVEN: Duration = Duration::from_secs(600);

/// All bypassing pods of the node.
#[derive(Clone, Debug)]
pub struct Machine {
    limits: Remedies,
    metrics: Metrics,
    cases: BTreeMap<PodUid, Case>,
    gate_open: bool,
    repairs: Bucket,
    evictions: Bucket,
    pauses: Pauses,
    breaker: Breaker,
}

impl Machine {
    /// With nothing to do yet.
    pub fn new(limits: Remedies, metrics: Metrics, now: Instant) -> Self {
        Self {
            limits,
            metrics,
            cases: BTreeMap::new(),
            gate_open: false,
            repairs: Bucket::new(now),
            evictions: Bucket::new(now),
            pauses: Pauses::default(),
            breaker: Breaker::default(),
        }
    }

    /// Other limits from now on; what was given up is looked at again.
    pub fn set_limits(&mut self, limits: Remedies, now: Instant) {
        if limits == self.limits {
            return;
        }
        self.limits = limits;
        for case in
            self.cases.values_mut().filter(|case| matches!(case.phase, Phase::Over | Phase::Later(..)))
        {
            case.phase = Phase::Announced(now);
            case.put_off = 0;
        }
    }

    /// Takes all meshed pods that there are. Gives what to do, and when to call again although nothing changes.
    pub fn tick<'a>(
        &mut self,
        subjects: impl IntoIterator<Item = &'a Subject>,
        gate_open: bool,
        now: Instant,
    ) -> (Vec<Task>, Option<Instant>) {
        self.gate_open = gate_open;
        let mut before = std::mem::take(&mut self.cases);
        for subject in subjects {
            let uid = subject.pod.uid;
            let case = before.remove(&uid);
            if let Some(case) = self.follow(subject, case, now) {
                self.cases.insert(uid, case);
            }
        }
        // What is under way is waited for.
        self.cases.extend(before.into_iter().filter(|(_, case)| case.phase.is_busy()));
        self.act(now);
        self.metrics.show(self.cases.values().map(|case| case.phase.stage()));
        self.metrics.paused.set(i64::from(self.breaker.is_open()));
        let tasks = self.cases.values_mut().filter(|case| !case.queue.is_empty());
        let tasks =
            tasks.map(|case| Task { pod: Arc::clone(&case.pod), actions: std::mem::take(&mut case.queue) });
        (tasks.collect(), self.wake(now))
    }

    /// What becomes of the case; `None` ends it.
    fn follow(&self, subject: &Subject, case: Option<Case>, now: Instant) -> Option<Case> {
        if let Some(case) = case.as_ref().filter(|case| case.phase.is_busy()) {
            return Some(case.clone());
        }
        if subject.terminating {
            return None;
        }
        match subject.seen {
            Seen::Unsupported => None,
            Seen::Unknown => case,
            Seen::Redirected => {
                // One that an earlier agent labelled has no case.
                let labelled = subject.labelled && self.limits.label == Step::On;
                let new = || Case { labelled, ..Case::new(Arc::clone(&subject.pod)) };
                let mut case = case.or_else(|| labelled.then(new))?;
                if !matches!(case.phase, Phase::Healed(_)) {
                    heal(&mut case, now);
                }
                Some(case)
            }
            Seen::Bypassing { last } => {
                let mut case = case.unwrap_or_else(|| Case::new(Arc::clone(&subject.pod)));
                case.pod = Arc::clone(&subject.pod);
                if let Phase::Healed(at) = case.phase
                    && last > at + SLACK
                {
                    if last.duration_since(at) >= FORGIVEN {
                        (case.repairs, case.tries) = (0, 0);
                    }
                    case.phase = Phase::New;
                }
                Some(case)
            }
        }
    }

    fn act(&mut self, now: Instant) {
        let uids: Vec<PodUid> = self.cases.keys().copied().collect();
        for uid in uids {
            // Taken out, so that the budgets can be asked meanwhile.
            let Some(mut case) = self.cases.remove(&uid) else { continue };
            self.step(&mut case, now);
            self.cases.insert(uid, case);
        }
    }

    fn step(&mut self, case: &mut Case, now: Instant) {
        if case.phase == Phase::New {
            self.announce(case);
            case.phase = Phase::Announced(now);
        }
        let (from, next) = match case.phase {
            Phase::Announced(at) => (at + self.limits.grace(), Next::Repair),
            Phase::Later(until, next) => (until, next),
            _ => return,
        };
        if self.limits.repair == Step::Off && self.limits.evict == Step::Off {
            return;
        }
        if !self.gate_open {
            let kind = if self.limits.repair == Step::Off { Kind::Evict } else { Kind::Repair };
            self.put_off(case, kind, End::GateClosed);
        } else if now >= from {
            match next {
                Next::Repair => self.repair(case, now),
                Next::Evict => self.evict(case, now),
            }
        }
    }

    fn announce(&self, case: &mut Case) {
        match self.limits.event {
            Step::Off => {}
            Step::DryRun => self.metrics.count(Kind::Event, End::DryRun),
            Step::On => case.queue.push(Action::Say(Saying::Detected { gate_open: self.gate_open })),
        }
        match self.limits.label {
            Step::Off => {}
            Step::DryRun => self.metrics.count(Kind::Label, End::DryRun),
            Step::On if case.labelled => {}
            Step::On => {
                case.labelled = true;
                case.queue.push(Action::Label);
            }
        }
    }

    fn say(&self, case: &mut Case, saying: Saying) {
        if self.limits.event == Step::On {
            case.queue.push(Action::Say(saying));
        }
    }

    /// Counts once that something is put off.
    fn put_off(&self, case: &mut Case, kind: Kind, end: End) {
        let bit = 1 << end as u32;
        if case.put_off & bit == 0 {
            case.put_off |= bit;
            self.metrics.count(kind, end);
        }
    }

    fn repair(&mut self, case: &mut Case, now: Instant) {
        match self.limits.repair {
            Step::Off => return self.evict(case, now),
            Step::DryRun => {
                self.metrics.count(Kind::Repair, End::DryRun);
                self.say(case, Saying::WouldRepair);
                case.phase = Phase::Over;
                return;
            }
            Step::On if case.repairs >= self.limits.repair_attempts => return self.evict(case, now),
            Step::On => {}
        }
        if let Err(until) = self.breaker.check(now) {
            self.put_off(case, Kind::Repair, End::Paused);
            case.phase = Phase::Later(until, Next::Repair);
            return;
        }
        if self.cases.values().filter(|case| case.phase == Phase::Repairing).count() >= PARALLEL {
            // The end of one of them brings the next turn.
            return;
        }
        if let Err(until) = self.repairs.take(self.limits.repairs_per_minute, now) {
            self.put_off(case, Kind::Repair, End::RateLimited);
            case.phase = Phase::Later(until, Next::Repair);
            return;
        }
        self.breaker.starts();
        if case.waits == 0 {
            self.say(case, Saying::Repairing);
        }
        case.queue.push(Action::Repair);
        case.put_off = 0;
        case.phase = Phase::Repairing;
    }

    fn evict(&mut self, case: &mut Case, now: Instant) {
        if self.limits.evict == Step::Off {
            self.give_up(case, "no further remedy is switched on; delete the pod so that it is made anew");
            return;
        }
        let broken = if self.limits.repair == Step::On { self.breaker.check(now) } else { Ok(()) };
        if let Err(until) = broken {
            // Its successor would not start: the runtime calls the same plugin.
            self.put_off(case, Kind::Evict, End::Paused);
            case.phase = Phase::Later(until, Next::Evict);
            return;
        }
        if let Err(until) = self.evictions.peek(self.limits.evictions_per_minute, now) {
            self.put_off(case, Kind::Evict, End::RateLimited);
            case.phase = Phase::Later(until, Next::Evict);
            return;
        }
        case.queue.push(Action::Inspect);
        case.phase = Phase::Inspecting;
    }

    fn give_up(&self, case: &mut Case, why: &'static str) {
        self.say(case, Saying::Helpless { why });
        case.phase = Phase::Over;
    }

    /// An action has ended.
    pub fn done(&mut self, uid: PodUid, outcome: Outcome, now: Instant) {
        let Some(mut case) = self.cases.remove(&uid) else { return };
        match outcome {
            Outcome::Repair(repaired) => self.repaired(&mut case, repaired, now),
            Outcome::Inspect(inspected) => self.inspected(&mut case, inspected, now),
            Outcome::Evict(evicted) => self.evicted(&mut case, &evicted, now),
        }
        self.cases.insert(uid, case);
    }

    fn repaired(&mut self, case: &mut Case, repaired: Repaired, now: Instant) {
        let (end, detail) = match repaired {
            Repaired::Proven { took } => {
                self.breaker.worked();
                self.metrics.count(Kind::Repair, End::Success);
                self.metrics.repair_time.observe(took.as_secs_f64());
                case.repairs += 1;
                self.say(case, Saying::Repaired { took });
                return heal(case, now);
            }
            Repaired::Unconfirmed { detail } => {
                self.breaker.neither();
                self.metrics.count(Kind::Repair, End::Unconfirmed);
                case.repairs += 1;
                self.say(case, Saying::Unconfirmed { detail });
                // The next connection that bypasses brings it back.
                return heal(case, now);
            }
            Repaired::Gone => {
                self.breaker.neither();
                self.metrics.count(Kind::Repair, End::Gone);
                case.phase = Phase::Leaving;
                return;
            }
            Repaired::Impossible { detail } => {
                self.breaker.neither();
                // Nothing will make it possible for this pod.
                case.repairs = self.limits.repair_attempts;
                (End::Impossible, detail)
            }
            Repaired::NotYet { detail } => {
                self.breaker.neither();
                // No attempt: a pod that is evicted now could not start either. Said and counted once.
                if case.waits == 0 {
                    self.metrics.count(Kind::Repair, End::NotReady);
                    self.say(case, Saying::RepairFailed { detail, last: false });
                }
                let pause = back_off(RETRY, case.waits, MAX_WAIT);
                case.waits += 1;
                case.phase = Phase::Later(now + jitter(pause, seed(case.pod.uid)), Next::Repair);
                return;
            }
            Repaired::Unproven { detail } => (End::Unproven, detail),
            Repaired::Failed { detail } => (End::Failed, detail),
            Repaired::TimedOut { detail } => (End::Timeout, detail),
        };
        self.metrics.count(Kind::Repair, end);
        if end != End::Impossible {
            self.breaker.failed(now);
            case.repairs += 1;
        }
        let last = case.repairs >= self.limits.repair_attempts;
        self.say(case, Saying::RepairFailed { detail, last });
        case.phase = if last {
            Phase::Later(now, Next::Evict)
        } else {
            let pause = back_off(RETRY, 2 * (case.repairs.saturating_sub(1)), MAX_RETRY);
            Phase::Later(now + jitter(pause, seed(case.pod.uid)), Next::Repair)
        };
    }

    fn inspected(&mut self, case: &mut Case, inspected: Inspected, now: Instant) {
        let workload = match inspected {
            Inspected::Owner(Owner::Workload(workload)) => workload,
            Inspected::Owner(Owner::Bare) => {
                self.metrics.count(Kind::Evict, End::Unowned);
                return self
                    .give_up(case, "no controller would replace this pod; delete it and create it again");
            }
            Inspected::Owner(Owner::Mirror) => {
                self.metrics.count(Kind::Evict, End::Mirror);
                return self.give_up(case, "this is a static pod; restart it by its manifest on the node");
            }
            Inspected::Owner(Owner::Terminating | Owner::Finished) => {
                self.metrics.count(Kind::Evict, End::Ending);
                case.phase = Phase::Leaving;
                return;
            }
            Inspected::Gone => {
                self.metrics.count(Kind::Evict, End::Gone);
                case.phase = Phase::Leaving;
                return;
            }
            Inspected::Forbidden => return self.evict_later(case, End::Forbidden, FORBIDDEN, now),
            Inspected::Unavailable => {
                let pause = back_off(EVICT_RETRY, case.tries, MAX_RETRY);
                return self.evict_later(case, End::Unavailable, pause, now);
            }
        };
        if self.limits.evict == Step::DryRun {
            self.metrics.count(Kind::Evict, End::DryRun);
            self.say(case, Saying::WouldEvict { workload });
            case.phase = Phase::Over;
            return;
        }
        if self.limits.evict == Step::Off || !self.gate_open {
            case.phase = Phase::Later(now, Next::Evict);
            return;
        }
        let busy = self.cases.values().any(|case| case.phase == Phase::Evicting(workload.clone()));
        let free = if busy { Err(now + EVICT_RETRY) } else { self.pauses.check(&workload, now) };
        let free = free.and_then(|()| self.evictions.take(self.limits.evictions_per_minute, now));
        if let Err(until) = free {
            self.put_off(case, Kind::Evict, End::RateLimited);
            case.phase = Phase::Later(until, Next::Evict);
            return;
        }
        self.say(case, Saying::Evicting { workload: workload.clone() });
        case.queue.push(Action::Evict);
        case.put_off = 0;
        case.phase = Phase::Evicting(workload);
    }

    fn evicted(&mut self, case: &mut Case, evicted: &Evicted, now: Instant) {
        let pause = back_off(EVICT_RETRY, case.tries, MAX_RETRY);
        let (end, pause) = match evicted {
            Evicted::Done => {
                self.metrics.count(Kind::Evict, End::Success);
                if let Phase::Evicting(workload) = &case.phase {
                    self.pauses.evicted(workload, self.limits.eviction_pause(), now);
                }
                case.phase = Phase::Leaving;
                return;
            }
            Evicted::Gone => {
                self.evictions.refund(self.limits.evictions_per_minute);
                self.metrics.count(Kind::Evict, End::Gone);
                case.phase = Phase::Leaving;
                return;
            }
            Evicted::Blocked { retry_after } => (End::BlockedPdb, pause.max(retry_after.unwrap_or_default())),
            Evicted::Conflict => (End::Conflict, pause),
            Evicted::Forbidden => (End::Forbidden, FORBIDDEN),
            Evicted::Failed { .. } => (End::Failed, pause),
        };
        self.evictions.refund(self.limits.evictions_per_minute);
        self.evict_later(case, end, pause, now);
    }

    fn evict_later(&self, case: &mut Case, end: End, pause: Duration, now: Instant) {
        self.metrics.count(Kind::Evict, end);
        case.tries = case.tries.saturating_add(1);
        case.phase = Phase::Later(now + jitter(pause, seed(case.pod.uid)), Next::Evict);
    }

    /// What is due already waits for the end of something else, or for the gate.
    fn wake(&self, now: Instant) -> Option<Instant> {
        if !self.gate_open {
            return None;
        }
        let times = self.cases.values().filter_map(|case| match case.phase {
            Phase::Announced(at) => Some(at + self.limits.grace()),
            Phase::Later(until, _) => Some(until),
            _ => None,
        });
        times.filter(|at| *at > now).min()
    }
}

/// Spreads the retries of different pods.
fn seed(uid: PodUid) -> u128 {
    u128::from(uid.to_string().bytes().fold(0_u8, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte)))
}

fn heal(case: &mut Case, now: Instant) {
    case.phase = Phase::Healed(now);
    case.put_off = 0;
    if std::mem::take(&mut case.labelled) {
        case.queue.push(Action::Unlabel);
    }
}

#[cfg(test)]
mod tests;
