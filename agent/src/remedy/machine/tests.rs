//! The truth table of remedies, and storms.

mod world;

use super::super::metrics::StageLabel;
use super::*;
use world::{ANNOUNCED, World};

const S: Duration = Duration::from_secs(1);

fn uid(n: u32) -> PodUid {
    PodUid::parse(&format!("2c48913c-b29f-11e7-9350-{n:012}")).unwrap()
}

fn subject(n: u32, seen: Seen) -> Subject {
    let pod = Pod {
        uid: uid(n),
        namespace: "shop".into(),
        name: format!("cart-{n}").into(),
        mesh: "linkerd".into(),
        cgroup: n.into(),
        sandbox: None,
        families: [true, true],
        blocked: false,
    };
    Subject { pod: Arc::new(pod), seen, terminating: false, labelled: false }
}

fn workload(kind: &str) -> Workload {
    Workload { kind: kind.into(), uid: format!("uid-of-{kind}"), name: "shop/cart".into() }
}

fn all_on() -> Remedies {
    Remedies {
        label: Step::On,
        repair: Step::On,
        evict: Step::On,
        grace_seconds: 0,
        repair_attempts: 1,
        ..Remedies::default()
    }
}

#[test]
fn the_truth_table() {
    let owner = |owner| Inspected::Owner(owner);
    let controlled = |kind| owner(Owner::Workload(workload(kind)));
    let blocked = |after: Option<u64>| Evicted::Blocked { retry_after: after.map(Duration::from_secs) };
    for (name, inspected, evicted, then, counts) in [
        ("bare", owner(Owner::Bare), None, "say helpless", "repair:failed=1 evict:unowned=1"),
        ("mirror, static", owner(Owner::Mirror), None, "say helpless", "repair:failed=1 evict:mirror=1"),
        ("terminating", owner(Owner::Terminating), None, "", "repair:failed=1 evict:ending=1"),
        ("finished", owner(Owner::Finished), None, "", "repair:failed=1 evict:ending=1"),
        ("gone", Inspected::Gone, None, "", "repair:failed=1 evict:gone=1"),
        ("no permission to look", Inspected::Forbidden, None, "", "repair:failed=1 evict:forbidden=1"),
        ("API down", Inspected::Unavailable, None, "", "repair:failed=1 evict:unavailable=1"),
        ("DaemonSet", controlled("DaemonSet"), Some(Evicted::Done), "", "repair:failed=1 evict:success=1"),
        ("Deployment", controlled("ReplicaSet"), Some(Evicted::Done), "", "repair:failed=1 evict:success=1"),
        (
            "Job, never restarted",
            controlled("Job"),
            Some(Evicted::Done),
            "",
            "repair:failed=1 evict:success=1",
        ),
        (
            "StatefulSet",
            controlled("StatefulSet"),
            Some(Evicted::Done),
            "",
            "repair:failed=1 evict:success=1",
        ),
        ("429", controlled("ReplicaSet"), Some(blocked(None)), "", "repair:failed=1 evict:blocked_pdb=1"),
        (
            "429, later",
            controlled("ReplicaSet"),
            Some(blocked(Some(77))),
            "",
            "repair:failed=1 evict:blocked_pdb=1",
        ),
        ("404", controlled("ReplicaSet"), Some(Evicted::Gone), "", "repair:failed=1 evict:gone=1"),
        ("409", controlled("ReplicaSet"), Some(Evicted::Conflict), "", "repair:failed=1 evict:conflict=1"),
        ("403", controlled("ReplicaSet"), Some(Evicted::Forbidden), "", "repair:failed=1 evict:forbidden=1"),
        (
            "500",
            controlled("ReplicaSet"),
            Some(Evicted::Failed { detail: "oops".into() }),
            "",
            "repair:failed=1 evict:failed=1",
        ),
    ] {
        let mut world = World::new(all_on(), 1);
        world.owner = inspected;
        let mut expected = ANNOUNCED.to_owned();
        if let Some(evicted) = &evicted {
            world.evict = evicted.clone();
            expected += ", say evicting, evict";
        }
        if !then.is_empty() {
            expected = format!("{expected}, {then}");
        }
        assert_eq!(world.at_once(), expected, "{name}");
        assert_eq!(world.counts(), counts, "{name}");
        assert_eq!(world.at_once(), "", "{name}: no second time");
    }
}

#[test]
fn whom_nothing_is_done_to() {
    let now = Instant::now();
    for (name, seen, terminating) in [
        ("redirected", Seen::Redirected, false),
        ("silent", Seen::Unknown, false),
        ("gVisor, the node's network", Seen::Unsupported, false),
        ("terminating", Seen::Bypassing { last: now }, true),
    ] {
        let mut world = World::new(all_on(), 0);
        world.subjects = vec![Subject { terminating, ..subject(1, seen) }];
        assert_eq!(world.run(600 * S, ""), 0, "{name}");
        assert_eq!((world.did.join(", "), world.counts()), (String::new(), String::new()), "{name}");
    }
}

#[test]
fn every_step_off_dry_and_on() {
    let base = Remedies { grace_seconds: 0, ..Remedies::default() };
    for (name, limits, did, counts) in [
        ("default", base, "say detected", ""),
        ("nothing", Remedies { event: Step::Off, ..base }, "", ""),
        (
            "dry",
            Remedies {
                event: Step::DryRun,
                label: Step::DryRun,
                repair: Step::DryRun,
                evict: Step::On,
                ..base
            },
            "",
            "event:dry_run=1 label:dry_run=1 repair:dry_run=1",
        ),
        (
            "said",
            Remedies { repair: Step::DryRun, ..base },
            "say detected, say wouldrepair",
            "repair:dry_run=1",
        ),
        (
            "evict dry",
            Remedies { evict: Step::DryRun, ..base },
            "say detected, inspect, say wouldevict",
            "evict:dry_run=1",
        ),
        (
            "evict alone",
            Remedies { evict: Step::On, ..base },
            "say detected, inspect, say evicting, evict",
            "evict:success=1",
        ),
        (
            "repair alone",
            Remedies { repair: Step::On, repair_attempts: 1, ..base },
            "say detected, say repairing, repair, say repairfailed, say helpless",
            "repair:failed=1",
        ),
    ] {
        let mut world = World::new(limits, 1);
        assert_eq!((world.at_once().as_str(), world.counts().as_str()), (did, counts), "{name}");
        assert_eq!(world.run(3600 * S, ""), 0);
        assert_eq!(world.did, Vec::<String>::new(), "{name}: once");
    }
}

#[test]
fn a_closed_gate_waits_and_an_open_one_does_not_wait_again() {
    let mut world = World::new(Remedies { grace_seconds: 5, ..all_on() }, 1);
    world.gate_open = false;
    world.repair = Repaired::Proven { took: S };
    assert_eq!(world.at_once(), "say detected closed, label");
    assert_eq!(world.run(600 * S, ""), 0);
    assert_eq!((world.counts().as_str(), world.wake), ("repair:gate_closed=1", None));
    world.gate_open = true;
    assert_eq!(world.at_once(), "say repairing, repair, say repaired, unlabel", "the grace time is over");
    assert_eq!(world.counts(), "repair:success=1 repair:gate_closed=1");
}

#[test]
fn the_grace_time_is_kept() {
    let mut world = World::new(Remedies { grace_seconds: 5, ..all_on() }, 1);
    world.repair = Repaired::Proven { took: S };
    assert_eq!(world.at_once(), "say detected, label");
    assert_eq!(world.wake, Some(world.now + 5 * S));
    assert_eq!(world.after(4 * S), Vec::<String>::new());
    assert_eq!(world.after(S).join(", "), "say repairing, repair, say repaired, unlabel");
}

#[test]
fn a_pod_that_heals_by_itself_is_left_alone() {
    let mut world = World::new(Remedies { grace_seconds: 5, ..all_on() }, 1);
    world.at_once();
    world.subjects[0].seen = Seen::Redirected;
    assert_eq!(world.at_once(), "unlabel");
    assert_eq!(world.run(600 * S, "repair"), 0);
}

#[test]
fn a_label_that_an_earlier_agent_set_goes() {
    let mut world = World::new(all_on(), 0);
    world.subjects = vec![Subject { labelled: true, ..subject(1, Seen::Redirected) }];
    assert_eq!(world.at_once(), "unlabel");
    assert_eq!(world.at_once(), "");
}

#[test]
fn a_repair_that_does_not_last_leads_to_eviction() {
    let mut world = World::new(Remedies { repair_attempts: 2, ..all_on() }, 1);
    world.repair = Repaired::Proven { took: S };
    assert_eq!(world.at_once(), "say detected, label, say repairing, repair, say repaired, unlabel");
    // What was begun before is still seen.
    assert_eq!(world.after(S), Vec::<String>::new());
    for expected in [
        "say detected, label, say repairing, repair, say repaired, unlabel",
        "say detected, label, inspect, say evicting, evict",
    ] {
        world.now += 10 * S;
        world.subjects[0].seen = Seen::Bypassing { last: world.now };
        assert_eq!(world.at_once(), expected);
    }
}

#[test]
fn retries_of_a_repair_are_spaced_and_counted_by_how_they_failed() {
    let mut world = World::new(Remedies { repair_attempts: 3, ..all_on() }, 1);
    world.repair = Repaired::TimedOut { detail: "killed".into() };
    assert_eq!(world.at_once(), "say detected, label, say repairing, repair, say repairfailed");
    world.repair = Repaired::Unproven { detail: "v4 bypasses".into() };
    assert_eq!(world.after(2 * S).join(", "), "say repairing, repair, say repairfailed");
    world.repair = Repaired::Failed { detail: "exit 1".into() };
    assert_eq!(
        world.after(5 * S).join(", "),
        "say repairing, repair, say repairfailed, inspect, say evicting, evict"
    );
    assert_eq!(world.counts(), "repair:failed=1 repair:timeout=1 repair:unproven=1 evict:success=1");

    let mut world = World::new(Remedies { repair_attempts: 3, ..all_on() }, 1);
    world.repair = Repaired::Impossible { detail: "no cached result".into() };
    assert_eq!(world.at_once(), format!("{ANNOUNCED}, say evicting, evict"), "not tried again");
    let mut world = World::new(all_on(), 1);
    world.repair = Repaired::Gone;
    assert_eq!(world.at_once(), "say detected, label, say repairing, repair");
    assert_eq!(world.run(600 * S, "evict"), 0);
}

/// The mesh's installer is late: a pod that is evicted meanwhile could not start either.
#[test]
fn a_plugin_that_is_not_installed_yet_is_waited_for_and_nobody_is_evicted() {
    let mut world = World::new(all_on(), 1);
    world.repair = Repaired::NotYet { detail: "linkerd-cni is not in /opt/cni/bin".into() };
    assert_eq!(world.at_once(), "say detected, label, say repairing, repair, say repairfailed");
    assert_eq!(world.run(3600 * S, "evict"), 0);
    let tries = world.did.iter().filter(|did| *did == "repair").count();
    assert!((90..=130).contains(&tries), "{tries}");
    assert_eq!(world.did.iter().filter(|did| did.starts_with("say")).count(), 0, "said once");
    assert_eq!(world.counts(), "repair:not_ready=1");
    world.did.clear();
    world.repair = Repaired::Proven { took: S };
    assert_eq!(world.after(40 * S).join(", "), "repair, say repaired, unlabel");
}

#[test]
fn a_repair_that_nobody_can_confirm_is_no_failure_until_it_bypasses_again() {
    let mut world = World::new(all_on(), 1);
    world.repair = Repaired::Unconfirmed { detail: "the probe failed".into() };
    assert_eq!(world.at_once(), "say detected, label, say repairing, repair, say unconfirmed, unlabel");
    assert_eq!(world.run(600 * S, "evict"), 0);
    world.subjects[0].seen = Seen::Bypassing { last: world.now };
    assert_eq!(world.run(S, "evict"), 0, "it was well for long and begins anew");
    assert_eq!(world.counts(), "repair:unconfirmed=2");
}

#[test]
fn a_blocked_eviction_comes_back_when_told_to_and_else_ever_later() {
    for (retry_after, least) in [(Some(77 * S), 77 * S), (None, 10 * S)] {
        let mut world = World::new(Remedies { repair: Step::Off, ..all_on() }, 1);
        world.evict = Evicted::Blocked { retry_after };
        world.at_once();
        let pause = world.wake.unwrap() - world.now;
        assert!((least..least * 5 / 4).contains(&pause), "{pause:?}");
        world.now += pause;
        assert_eq!(world.at_once(), "inspect, say evicting, evict", "asked anew whose pod it is");
        if retry_after.is_none() {
            assert!(world.wake.unwrap() - world.now >= 20 * S);
        }
    }
    let mut world = World::new(Remedies { repair: Step::Off, ..all_on() }, 1);
    world.evict = Evicted::Blocked { retry_after: None };
    let tries = world.run(24 * 3600 * S, "evict");
    assert!((100..=150).contains(&tries), "{tries} in a day");
}

#[test]
fn one_budget_a_workload_and_one_a_node() {
    let mut world = World::new(Remedies { repair: Step::Off, evictions_per_minute: 10, ..all_on() }, 5);
    world.settle();
    assert_eq!(world.metrics.counted(Kind::Evict, End::Success), 1, "one pod of a workload");
    assert_eq!(world.metrics.counted(Kind::Evict, End::RateLimited), 4, "counted once each");
    // 1, 2, 4, 8 minutes.
    assert_eq!(world.run(14 * 60 * S, "evict"), 3, "{:?}", world.did);

    let mut world = World::new(Remedies { repair: Step::Off, evictions_per_minute: 2, ..all_on() }, 0);
    world.subjects = (0..9).map(|n| subject(n, Seen::Bypassing { last: world.now })).collect();
    let mut of_each = 0;
    for minute in 0..4 {
        // Each pod is of a workload of its own.
        world.owner = Inspected::Owner(Owner::Workload(workload(&format!("kind-{minute}"))));
        of_each += world.run(60 * S, "evict");
    }
    assert!((4..=5).contains(&of_each), "{of_each}");
}

#[test]
fn a_mass_start_is_repaired_and_nobody_is_evicted() {
    let mut world = World::new(Remedies { grace_seconds: 5, ..all_on() }, 250);
    world.gate_open = false;
    world.repair = Repaired::Proven { took: S };
    world.run(10 * S, "");
    world.gate_open = true;
    world.settle();
    assert_eq!(world.metrics.counted(Kind::Repair, End::Success), 250);
    assert!(world.machine.evictions.take(1, world.now).is_ok(), "the eviction budget is untouched");
    assert_eq!(world.did.iter().filter(|did| *did == "evict" || *did == "inspect").count(), 0);
}

#[test]
fn no_more_repairs_at_once_than_allowed() {
    let mut world = World::new(all_on(), 30);
    let (tasks, _) = world.machine.tick(&world.subjects, true, world.now);
    let repairs = |tasks: &[Task]| tasks.iter().filter(|task| task.actions.contains(&Action::Repair)).count();
    assert_eq!((tasks.len(), repairs(&tasks)), (30, PARALLEL));
    let (tasks, wake) = world.machine.tick(&world.subjects, true, world.now);
    assert_eq!((tasks.len(), wake), (0, None));
    let proven = Outcome::Repair(Repaired::Proven { took: S });
    world.machine.done(uid(0), proven, world.now);
    let (tasks, _) = world.machine.tick(&world.subjects, true, world.now);
    assert_eq!(repairs(&tasks), 1);
}

#[test]
fn a_plugin_that_fails_for_all_is_no_storm() {
    let limits = Remedies { repair_attempts: 10, evictions_per_minute: 600, ..all_on() };
    let mut world = World::new(limits, 100);
    let first = world.run(60 * S, "repair");
    assert!((5..=10).contains(&first), "{first} in the first minute");
    assert_eq!(world.did.iter().filter(|did| *did == "evict").count(), 0, "a successor would not start");
    let hour = world.run(3600 * S, "repair");
    assert!((5..=20).contains(&hour), "{hour} in the next hour");
    let events = world.did.iter().filter(|did| did.starts_with("say")).count();
    assert!(events <= 3 * hour, "{events}");
    assert_eq!(world.metrics.paused.get(), 1);
    // And when it works again, everything is repaired.
    world.repair = Repaired::Proven { took: S };
    world.run(1200 * S, "");
    assert_eq!(world.metrics.counted(Kind::Repair, End::Success), 100);
    assert_eq!(world.metrics.paused.get(), 0);
}

#[test]
fn a_flapping_gate_is_no_storm() {
    let mut world = World::new(Remedies { repair_attempts: 3, ..all_on() }, 30);
    let mut did = 0;
    for n in 0..3600_u32 {
        world.gate_open = n % 2 == 0;
        did += world.after(S).len();
    }
    // Each pod: detected, label; then what the breaker lets through.
    assert!(did <= 30 * 2 + 3 * 30 + 60, "{did}");
    assert!(world.metrics.counted(Kind::Repair, End::GateClosed) <= 200);
}

/// How many pods are at which stage, those of none left out.
fn stages(world: &World) -> String {
    let stages = Stage::ALL.map(|stage| {
        let label = StageLabel { stage: stage.label() };
        (label.stage, world.metrics.pods.get(&label).map_or(-1, |count| count.get()))
    });
    let some = stages.into_iter().filter(|(_, count)| *count != 0);
    some.map(|(stage, count)| format!("{stage}={count}")).collect::<Vec<_>>().join(" ")
}

/// A mass start, as the metrics show it: who waits, and whose turn it is.
#[test]
fn pods_that_wait_for_their_turn_are_counted() {
    let mut world = World::new(all_on(), 30);
    assert_eq!(stages(&world), "");
    world.gate_open = false;
    world.settle();
    assert_eq!(stages(&world), "waiting=30");
    world.gate_open = true;
    let (tasks, _) = world.machine.tick(&world.subjects, true, world.now);
    let turns = tasks.iter().filter(|task| task.actions.contains(&Action::Repair)).count();
    let waiting = 30 - turns;
    let expected = if waiting > 0 {
        format!("waiting={waiting} repairing={turns}")
    } else {
        format!("repairing={turns}")
    };
    assert!(turns > 0);
    assert_eq!(stages(&world), expected);
}

#[test]
fn other_limits_take_up_what_was_given_up() {
    let mut world = World::new(Remedies { repair: Step::DryRun, ..all_on() }, 1);
    assert_eq!(world.at_once(), "say detected, label, say wouldrepair");
    assert_eq!(stages(&world), "helpless=1");
    world.repair = Repaired::Proven { took: S };
    world.machine.set_limits(all_on(), world.now);
    assert_eq!(world.at_once(), "say repairing, repair, say repaired, unlabel");
    assert_eq!(stages(&world), "healed=1");
}

#[test]
fn a_gate_that_closes_while_the_owner_is_looked_up_stops_the_eviction() {
    let mut world = World::new(Remedies { repair: Step::Off, ..all_on() }, 1);
    let (tasks, _) = world.machine.tick(&world.subjects, true, world.now);
    assert!(tasks[0].actions.contains(&Action::Inspect));
    world.machine.tick(&world.subjects, false, world.now);
    world.machine.done(uid(0), Outcome::Inspect(world.owner.clone()), world.now);
    let (tasks, _) = world.machine.tick(&world.subjects, false, world.now);
    assert!(tasks.is_empty(), "{tasks:?}");
}

#[test]
fn a_pod_that_goes_is_forgotten_but_not_while_it_is_acted_upon() {
    let mut world = World::new(all_on(), 1);
    let pods = std::mem::take(&mut world.subjects);
    world.machine.tick(&pods, true, world.now);
    world.machine.tick(&[], true, world.now);
    assert_eq!(world.machine.cases.len(), 1, "a repair is under way");
    world.machine.done(uid(0), Outcome::Repair(Repaired::Gone), world.now);
    world.machine.tick(&[], true, world.now);
    assert!(world.machine.cases.is_empty());
    world.machine.done(uid(7), Outcome::Evict(Evicted::Done), world.now);
}
