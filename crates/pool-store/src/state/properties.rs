//! Checks the invariants of tasks with random events in any order.

use std::collections::HashSet;

use pool_protocol::id::{AgentName, InstanceId, LeaseId};
use pool_protocol::lease::{DeclineReason, End, LeaseRef};
use proptest::prelude::*;

use super::tests::{CREDENTIAL, declined, end, heartbeat, holder, submitted};
use super::*;
use crate::clock::Millis;
use crate::error::Refusal;
use crate::model::{Ending, PlatformState};
use crate::rules::Rules;

/// A random event or a wait. Numbers select an agent, an executor, or one of the leases so far.
#[derive(Clone, Debug)]
enum Move {
    PlatformState(PlatformState),
    Cancel,
    Reported,
    Lease(usize),
    Renewed(usize),
    Started(usize),
    Decline(usize, DeclineReason),
    Accept(usize, usize),
    Heartbeat(usize, usize),
    /// A heartbeat for a lease that the store does not know, because it was restored from a backup.
    ForgottenHeartbeat(usize),
    Revoked,
    /// The heartbeat of an executor whose agent's token was removed from the file of the pools.
    RevokedHeartbeat(usize),
    Unreadable,
    End(usize, Ending, bool),
    Wait(Millis),
}

fn any_move() -> impl Strategy<Value = Move> {
    let lease = 0..4_usize;
    let executor = 0..3_usize;
    let platform = prop_oneof![
        8 => Just(PlatformState::Waiting),
        1 => Just(PlatformState::Over),
        1 => Just(PlatformState::Running),
    ];
    let reason = prop_oneof![
        Just(DeclineReason::Draining),
        Just(DeclineReason::Quota),
        Just(DeclineReason::Failed),
    ];
    let ending = prop_oneof![
        Just(Ending::Completed),
        Just(Ending::Failed),
        Just(Ending::Cancelled),
    ];
    prop_oneof![
        6 => platform.prop_map(Move::PlatformState),
        1 => Just(Move::Cancel),
        1 => Just(Move::Reported),
        8 => (0..3_usize).prop_map(Move::Lease),
        2 => (0..3_usize).prop_map(Move::Renewed),
        4 => lease.clone().prop_map(Move::Started),
        3 => (lease.clone(), reason).prop_map(|(lease, reason)| Move::Decline(lease, reason)),
        4 => (lease.clone(), executor.clone()).prop_map(|(lease, executor)| Move::Accept(lease, executor)),
        4 => (lease.clone(), executor.clone()).prop_map(|(lease, executor)| Move::Heartbeat(lease, executor)),
        1 => executor.clone().prop_map(Move::ForgottenHeartbeat),
        1 => Just(Move::Revoked),
        1 => executor.prop_map(Move::RevokedHeartbeat),
        1 => Just(Move::Unreadable),
        1 => (lease, ending, any::<bool>()).prop_map(|(lease, ending, reported)| Move::End(lease, ending, reported)),
        6 => prop_oneof![Just(0_i64), 1..40_000_i64, 1..700_000_i64].prop_map(Move::Wait),
    ]
}

/// A task with its past leases, and the checks of its invariants.
struct Scenario {
    task: Task,
    now: Millis,
    rules: Rules,
    agents: Vec<(InstanceId, AgentName)>,
    leases: Vec<LeaseRef>,
    /// The leases and executors that have accepted the task.
    granted: HashSet<(LeaseId, String)>,
    /// The leases that have ended.
    ended: HashSet<LeaseId>,
    adopted: bool,
    ends: u32,
}

impl Scenario {
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
            ended: HashSet::new(),
            adopted: false,
            ends: 0,
        }
    }

    /// Returns one of the leases so far. 0 is the last one.
    fn lease(&self, back: usize) -> Option<LeaseRef> {
        let last = self.leases.len().checked_sub(1)?;
        self.leases.get(last - back.min(last)).copied()
    }

    fn apply_move(&mut self, next: &Move) -> Result<(), TestCaseError> {
        let (task, now) = (self.task.clone(), self.now);
        let agents = self.agents.clone();
        let finished = |reported| End { reported, ..end() };
        match next {
            Move::Wait(time) => {
                self.now += time;
                // A sweep does this too.
                self.apply_twice(&Event::TimeOut, None)
            }
            Move::PlatformState(state) => {
                self.adopted |= *state == PlatformState::Running && task.state == State::Submitted;
                self.apply_twice(&Event::PlatformState(*state), None)
            }
            Move::Cancel => self.apply_twice(&Event::Cancel, None),
            Move::Reported => self.apply_twice(&Event::Reported, None),
            Move::Lease(agent) => {
                let (instance, agent) = &agents[*agent];
                let lease = LeaseId::new();
                let event = Event::Lease {
                    lease,
                    instance: *instance,
                    agent,
                    credential: CREDENTIAL,
                };
                self.apply_twice(&event, None)?;
                if self.task.lease == Some(lease) {
                    // I4: an accepted task is never leased again.
                    prop_assert!(self.granted.is_empty() && !self.adopted);
                    prop_assert!(task.state == State::Available && task.not_before <= now);
                    // I2: each lease has its own fencing token, and only the last one is valid.
                    prop_assert_eq!(self.task.fencing_token, task.fencing_token + 1);
                    self.leases.extend(self.task.grant());
                }
                Ok(())
            }
            Move::Renewed(agent) => {
                let instance = agents[*agent].0;
                self.apply_twice(
                    &Event::Renewed {
                        instance,
                        credential: CREDENTIAL,
                        reason: None,
                    },
                    None,
                )
            }
            Move::Started(lease) => self.with(*lease, |scenario, grant| {
                let executor = "ns/job";
                scenario.apply_twice(&Event::Started { grant, executor }, Some(grant))
            }),
            Move::Decline(lease, reason) => self.with(*lease, |scenario, grant| {
                let decline = &declined(*reason);
                scenario.apply_twice(&Event::Decline { grant, decline }, Some(grant))
            }),
            Move::Accept(lease, executor) => self.with(*lease, |scenario, grant| {
                let holder = &holder(&executor.to_string());
                let result = apply(
                    &scenario.task,
                    Event::Accept { grant, holder },
                    now,
                    &scenario.rules,
                );
                scenario.apply_twice(&Event::Accept { grant, holder }, Some(grant))?;
                if result.is_ok() {
                    scenario.granted.insert((grant.lease, holder.uid.clone()));
                }
                // I3: at most one executor ever accepts the task.
                prop_assert!(scenario.granted.len() <= 1, "{:?}", scenario.granted);
                Ok(())
            }),
            Move::Heartbeat(lease, executor) => self.with(*lease, |scenario, grant| {
                scenario.send_heartbeat(grant, *executor)
            }),
            Move::ForgottenHeartbeat(executor) => self.send_forgotten_heartbeat(*executor),
            Move::Revoked => self.revoke(),
            Move::RevokedHeartbeat(executor) => {
                self.revoke()?;
                self.with(0, |scenario, grant| {
                    scenario.send_heartbeat(grant, *executor)
                })
            }
            Move::Unreadable => self.apply_twice(&Event::Unreadable { reason: "no key" }, None),
            Move::End(lease, ending, reported) => self.with(*lease, |scenario, grant| {
                let (ending, end) = (*ending, &finished(*reported));
                scenario.apply_twice(&Event::End { grant, ending, end }, Some(grant))
            }),
        }
    }

    /// Removes the token of all agents.
    fn revoke(&mut self) -> Result<(), TestCaseError> {
        let credential = CREDENTIAL;
        self.apply_twice(&Event::Revoked { credential }, None)?;
        // Only a lease of a restored store has another credential.
        prop_assert!(!self.task.state.is_active() || self.task.credential.is_none());
        Ok(())
    }

    /// A heartbeat grants nothing that an acceptance would not.
    fn send_heartbeat(&mut self, grant: LeaseRef, executor: usize) -> Result<(), TestCaseError> {
        let heartbeat = &heartbeat(&executor.to_string());
        let holder = &heartbeat.holder;
        let beat = Event::Heartbeat { grant, heartbeat };
        let accept = Event::Accept { grant, holder };
        let result = |event| apply(&self.task, event, self.now, &self.rules).map(|_| ());
        let beat_result = result(beat);
        prop_assert_eq!(&beat_result, &result(accept));
        self.apply_twice(&beat, Some(grant))?;
        if beat_result.is_ok() {
            self.granted.insert((grant.lease, holder.uid.clone()));
        }
        prop_assert!(self.granted.len() <= 1, "{:?}", self.granted);
        Ok(())
    }

    /// The heartbeat of a lease that the store has lost, because it was restored.
    fn send_forgotten_heartbeat(&mut self, executor: usize) -> Result<(), TestCaseError> {
        let grant = LeaseRef {
            task: self.task.id,
            lease: LeaseId::new(),
            fencing_token: self.task.fencing_token + 1,
        };
        let heartbeat = &heartbeat(&executor.to_string());
        self.apply_twice(&Event::Heartbeat { grant, heartbeat }, None)?;
        if self.task.grant() == Some(grant) {
            // No executor that the store knows had accepted it.
            prop_assert!(self.granted.is_empty());
            self.granted
                .insert((grant.lease, heartbeat.holder.uid.clone()));
            self.leases.push(grant);
        }
        Ok(())
    }

    fn with(
        &mut self,
        lease: usize,
        play: impl FnOnce(&mut Self, LeaseRef) -> Result<(), TestCaseError>,
    ) -> Result<(), TestCaseError> {
        match self.lease(lease) {
            Some(grant) => play(self, grant),
            None => Ok(()),
        }
    }

    /// Applies an event twice, because requests may be repeated.
    fn apply_twice(
        &mut self,
        event: &Event<'_>,
        grant: Option<LeaseRef>,
    ) -> Result<(), TestCaseError> {
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
        // One long silence can cause two time-outs.
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
        // I6: a lease that has ended never comes back.
        let active = |task: &Task| task.lease.filter(|_| task.state.is_active());
        let (was, is) = (active(before), active(task));
        self.ended.extend(was.filter(|_| was != is));
        prop_assert!(is.is_none_or(|lease| !self.ended.contains(&lease)));
        // I5: a task ends once. Afterwards only `reported` changes.
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
            (Some(_), None) => prop_assert!(false, "a task that was over is not over"),
        }
        prop_assert!(self.ends <= 1);
        prop_assert_eq!(task.state.is_over(), task.end.is_some());
        prop_assert!(task.attempts <= self.rules.attempts);
        Ok(())
    }
}

/// Checks that a lease that is not the last one changes nothing, and that the refusal shows this.
fn stale_leases_change_nothing(
    task: &Task,
    grant: LeaseRef,
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
    fn the_invariants_hold(moves in proptest::collection::vec(any_move(), 1..60)) {
        let mut scenario = Scenario::new();
        for next in &moves {
            scenario.apply_move(next)?;
        }
        // I5: the task ends even if all are silent from here on.
        for _ in 0..3 {
            if !scenario.task.state.is_over() {
                scenario.now = scenario.now.max(scenario.task.deadline(&scenario.rules));
                scenario.apply_twice(&Event::TimeOut, None)?;
            }
        }
        prop_assert!(scenario.task.state.is_over(), "{:?}", scenario.task.state);
    }
}
