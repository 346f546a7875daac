//! What holds whatever happens, in whatever order, however often.

use std::collections::HashSet;

use pool_protocol::id::{AgentName, InstanceId, LeaseId};
use pool_protocol::lease::{DeclineReason, End};
use pool_protocol::token::JobGrant;
use proptest::prelude::*;

use super::tests::{beat, declined, end, holder, submitted};
use super::*;
use crate::clock::Millis;
use crate::error::Refusal;
use crate::model::{Ending, Found};
use crate::rules::Rules;

/// Something that somebody does. Numbers choose among what there is: an agent, an executor, a lease of any time.
#[derive(Clone, Debug)]
enum Move {
    Found(Found),
    Cancel,
    Reported,
    Lease(usize),
    Named(usize),
    Started(usize),
    Decline(usize, DeclineReason),
    Accept(usize, usize),
    /// Only of an executor whose task was accepted.
    Beat(usize, usize),
    End(usize, Ending, bool),
    Passes(Millis),
}

fn moves() -> impl Strategy<Value = Move> {
    let lease = 0..4_usize;
    let executor = 0..3_usize;
    let found = prop_oneof![
        8 => Just(Found::Waiting),
        1 => Just(Found::Over),
        1 => Just(Found::Running),
    ];
    let reason = prop_oneof![
        Just(DeclineReason::Draining),
        Just(DeclineReason::Quota),
        Just(DeclineReason::Failed),
        Just(DeclineReason::Sealed),
    ];
    let ending = prop_oneof![
        Just(Ending::Completed),
        Just(Ending::Failed),
        Just(Ending::Cancelled),
    ];
    prop_oneof![
        6 => found.prop_map(Move::Found),
        1 => Just(Move::Cancel),
        1 => Just(Move::Reported),
        8 => (0..3_usize).prop_map(Move::Lease),
        2 => (0..3_usize).prop_map(Move::Named),
        4 => lease.clone().prop_map(Move::Started),
        3 => (lease.clone(), reason).prop_map(|(lease, reason)| Move::Decline(lease, reason)),
        4 => (lease.clone(), executor.clone()).prop_map(|(lease, executor)| Move::Accept(lease, executor)),
        4 => (lease.clone(), executor).prop_map(|(lease, executor)| Move::Beat(lease, executor)),
        1 => (lease, ending, any::<bool>()).prop_map(|(lease, ending, reported)| Move::End(lease, ending, reported)),
        6 => prop_oneof![Just(0_i64), 1..40_000_i64, 1..700_000_i64].prop_map(Move::Passes),
    ]
}

/// All that has happened, and what must never happen.
struct World {
    task: Task,
    now: Millis,
    rules: Rules,
    agents: Vec<(InstanceId, AgentName)>,
    leases: Vec<JobGrant>,
    /// The lease and the executor of each grant of the task.
    granted: HashSet<(LeaseId, String)>,
    adopted: bool,
    ends: u32,
}

impl World {
    fn new() -> Self {
        let agents = ["one", "two", "three"];
        Self {
            task: submitted(),
            now: 0,
            rules: Rules::default(),
            agents: agents
                .map(|name| (InstanceId::new(), name.parse().unwrap()))
                .to_vec(),
            leases: Vec::new(),
            granted: HashSet::new(),
            adopted: false,
            ends: 0,
        }
    }

    /// One of the leases there were, the last one for 0.
    fn lease(&self, back: usize) -> Option<JobGrant> {
        let last = self.leases.len().checked_sub(1)?;
        self.leases.get(last - back.min(last)).copied()
    }

    fn play(&mut self, play: &Move) -> Result<(), TestCaseError> {
        let (task, now) = (self.task.clone(), self.now);
        let agents = self.agents.clone();
        let finished = |reported| End { reported, ..end() };
        match play {
            Move::Passes(time) => {
                self.now += time;
                // As often as a sweep would.
                self.try_it(&Event::TimeOut, None)
            }
            Move::Found(found) => {
                self.adopted |= *found == Found::Running && task.state == State::Submitted;
                self.try_it(&Event::Found(*found), None)
            }
            Move::Cancel => self.try_it(&Event::Cancel, None),
            Move::Reported => self.try_it(&Event::Reported, None),
            Move::Lease(agent) => {
                let (instance, agent) = &agents[*agent];
                let lease = LeaseId::new();
                let event = Event::Lease {
                    lease,
                    instance: *instance,
                    agent,
                };
                self.try_it(&event, None)?;
                if self.task.lease == Some(lease) {
                    // I4: what was accepted is never given out again.
                    prop_assert!(self.granted.is_empty() && !self.adopted);
                    prop_assert!(task.state == State::Available && task.not_before <= now);
                    // I2: each lease has a token of its own, and only the last one is good.
                    prop_assert_eq!(self.task.fencing_token, task.fencing_token + 1);
                    self.leases.extend(self.task.grant());
                }
                Ok(())
            }
            Move::Named(agent) => {
                let instance = agents[*agent].0;
                self.try_it(&Event::Named { instance }, None)
            }
            Move::Started(lease) => self.with(*lease, |world, grant| {
                let executor = "ns/job";
                world.try_it(&Event::Started { grant, executor }, Some(grant))
            }),
            Move::Decline(lease, reason) => self.with(*lease, |world, grant| {
                let decline = &declined(*reason);
                world.try_it(&Event::Decline { grant, decline }, Some(grant))
            }),
            Move::Accept(lease, executor) => self.with(*lease, |world, grant| {
                let holder = &holder(&executor.to_string());
                let result = apply(
                    &world.task,
                    Event::Accept { grant, holder },
                    now,
                    &world.rules,
                );
                world.try_it(&Event::Accept { grant, holder }, Some(grant))?;
                if result.is_ok() {
                    world.granted.insert((grant.lease, holder.uid.clone()));
                }
                // I3: one executor has it, ever.
                prop_assert!(world.granted.len() <= 1, "{:?}", world.granted);
                Ok(())
            }),
            Move::Beat(lease, executor) => self.with(*lease, |world, grant| {
                let beat = &beat(&executor.to_string());
                if world
                    .granted
                    .contains(&(grant.lease, beat.holder.uid.clone()))
                {
                    world.try_it(&Event::Beat { grant, beat }, Some(grant))
                } else {
                    Ok(())
                }
            }),
            Move::End(lease, ending, reported) => self.with(*lease, |world, grant| {
                let (ending, end) = (*ending, &finished(*reported));
                world.try_it(&Event::End { grant, ending, end }, Some(grant))
            }),
        }
    }

    fn with(
        &mut self,
        lease: usize,
        play: impl FnOnce(&mut Self, JobGrant) -> Result<(), TestCaseError>,
    ) -> Result<(), TestCaseError> {
        match self.lease(lease) {
            Some(grant) => play(self, grant),
            None => Ok(()),
        }
    }

    /// Does something twice: a request may arrive again.
    fn try_it(&mut self, event: &Event<'_>, grant: Option<JobGrant>) -> Result<(), TestCaseError> {
        let before = self.task.clone();
        let result = apply(&before, *event, self.now, &self.rules);
        if let Some(grant) = grant {
            stale_leases_change_nothing(&before, grant, result.as_ref())?;
        }
        let Ok(transition) = result else {
            return Ok(());
        };
        self.task = transition.task;
        if !transition.changed {
            prop_assert_eq!(&self.task, &before);
        }
        self.check(&before)?;
        let again = apply(&self.task, *event, self.now, &self.rules);
        let twice = match &again {
            Ok(again) => &again.task,
            Err(_) => &self.task,
        };
        // Silence may be long enough for two steps.
        if !matches!(event, Event::TimeOut) {
            prop_assert_eq!(twice, &self.task);
        }
        Ok(())
    }

    fn check(&mut self, before: &Task) -> Result<(), TestCaseError> {
        let task = &self.task;
        prop_assert!(task.fencing_token >= before.fencing_token);
        if before.state.is_accepted() {
            prop_assert!(task.state.is_accepted() || task.state.is_over());
        }
        // I5: one end, which nothing changes but its report.
        match (&before.end, &task.end) {
            (None, Some(end)) => {
                self.ends += 1;
                prop_assert!(
                    !end.reported
                        || end.reason == EndReason::Superseded
                        || end.reason == EndReason::Finished
                );
            }
            (Some(first), Some(last)) => {
                prop_assert_eq!(before.state, task.state);
                prop_assert!(last.reported || !first.reported);
                let first = TaskEnd {
                    reported: last.reported,
                    ..first.clone()
                };
                prop_assert_eq!(&first, last);
            }
            (None, None) => prop_assert!(!task.state.is_over()),
            (Some(_), None) => prop_assert!(false, "it is not over any more"),
        }
        prop_assert!(self.ends <= 1);
        prop_assert_eq!(task.state.is_over(), task.end.is_some());
        prop_assert!(task.attempts <= self.rules.attempts);
        Ok(())
    }
}

/// A lease that is not the last one changes nothing, and is refused with a code that says so.
fn stale_leases_change_nothing(
    task: &Task,
    grant: JobGrant,
    result: Result<&Transition, &Refusal>,
) -> Result<(), TestCaseError> {
    if task.grant() == Some(grant) {
        return Ok(());
    }
    let refusal = result.err();
    prop_assert!(
        matches!(
            refusal,
            Some(Refusal::LeaseSuperseded | Refusal::TaskAlreadyTerminal)
        ),
        "{:?}",
        refusal
    );
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn the_invariants_hold(played in proptest::collection::vec(moves(), 1..60)) {
        let mut world = World::new();
        for play in &played {
            world.play(play)?;
        }
        // I5: it ends, also if all are silent from here on.
        for _ in 0..3 {
            if !world.task.state.is_over() {
                world.now = world.now.max(world.task.deadline(&world.rules));
                world.try_it(&Event::TimeOut, None)?;
            }
        }
        prop_assert!(world.task.state.is_over(), "{:?}", world.task.state);
    }
}
