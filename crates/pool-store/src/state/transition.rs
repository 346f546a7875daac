//! What each event does.

use pool_protocol::id::InstanceId;
use pool_protocol::lease::{Acceptance, Decline, DeclineReason, End, Holder};
use pool_protocol::token::JobGrant;

use super::event::Event;
use super::task::{EndReason, State, Task, TaskEnd};
use crate::clock::{Millis, between, millis};
use crate::error::Refusal;
use crate::model::{Ending, Found};
use crate::rules::Rules;
use crate::text::{DIAGNOSTIC, NOTE, cut};

/// The pause after a lease that an agent without room has handed back, unless it names one.
const NO_ROOM: Millis = 10_000;
/// The shortest pause after a lease that was handed back like the one before it, and neither counts.
const REPEATED: Millis = 5_000;
/// The longest pause an agent may ask for.
const LONGEST_PAUSE: Millis = 300_000;

/// What is to be written and done after an event.
#[derive(Clone, Debug)]
pub struct Transition {
    pub task: Task,
    /// Whether the task is to be written.
    pub changed: bool,
    /// What people see of it.
    pub record: Option<Record>,
    /// The payload is not needed any more.
    pub drops_payload: bool,
    /// What it says of an instance.
    pub instance: Option<(InstanceId, LeaseOutcome)>,
}

/// An entry in the history of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Who did it.
    pub actor: String,
    pub note: String,
}

/// What a lease says of the instance that had it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseOutcome {
    /// An executor exists.
    Started,
    /// It failed.
    Failed,
}

/// Decides what an event does to a task.
///
/// # Errors
/// If the event is not allowed in the state of the task. Then nothing is to be written.
pub fn apply(
    task: &Task,
    event: Event<'_>,
    now: Millis,
    rules: &Rules,
) -> Result<Transition, Refusal> {
    let step = Step { task, now, rules };
    match event {
        Event::Found(found) => Ok(step.found(found)),
        Event::Cancel => Ok(step.cancel()),
        Event::Reported => Ok(step.reported()),
        Event::Lease {
            lease,
            instance,
            agent,
        } => {
            if task.state != State::Available || task.not_before > now {
                return Ok(step.nothing());
            }
            let mut next = task.clone();
            next.state = State::Leased;
            next.fencing_token += 1;
            next.lease = Some(lease);
            next.instance = Some(instance);
            next.agent = Some(agent.clone());
            next.executor = None;
            next.leased_at = now;
            next.heard_at = now;
            Ok(step.to(next, format!("agent {agent}"), String::new()))
        }
        Event::Named { instance } => Ok(step.named(instance)),
        Event::Started { grant, executor } => step.started(grant, executor),
        Event::Decline { grant, decline } => step.decline(grant, decline),
        Event::Accept { grant, holder } => step.accept(grant, holder),
        Event::Beat { grant, beat } => step.beat(grant, beat),
        Event::End { grant, ending, end } => step.end(grant, ending, end),
        Event::TimeOut => Ok(step.time_out()),
    }
}

/// One event on its way.
#[derive(Clone, Copy)]
struct Step<'a> {
    task: &'a Task,
    now: Millis,
    rules: &'a Rules,
}

impl Step<'_> {
    fn nothing(self) -> Transition {
        Transition {
            task: self.task.clone(),
            changed: false,
            record: None,
            drops_payload: false,
            instance: None,
        }
    }

    /// Written, and no news for people.
    fn quietly(self, task: Task) -> Transition {
        Transition {
            task,
            changed: true,
            ..self.nothing()
        }
    }

    fn to(self, task: Task, actor: String, note: String) -> Transition {
        let drops_payload = task.state.is_over() || task.state.is_accepted();
        Transition {
            drops_payload,
            record: Some(Record {
                actor: cut(actor, NOTE),
                note: cut(note, NOTE),
            }),
            ..self.quietly(task)
        }
    }

    fn with_outcome(self, transition: Transition, outcome: LeaseOutcome) -> Transition {
        Transition {
            instance: self.task.instance.map(|instance| (instance, outcome)),
            ..transition
        }
    }

    fn agent(self) -> String {
        match &self.task.agent {
            Some(agent) => format!("agent {agent}"),
            None => "agent".to_owned(),
        }
    }

    /// It is over, for a reason that the hub found.
    fn over(self, reason: EndReason, actor: &str, diagnostic: String) -> Transition {
        let mut next = self.task.clone();
        next.state = match reason {
            EndReason::Cancelled | EndReason::Superseded => State::Cancelled,
            _ => State::Failed,
        };
        let note = diagnostic.clone();
        next.end = Some(TaskEnd {
            reason,
            diagnostic: cut(diagnostic, DIAGNOSTIC),
            exit_code: None,
            verdict: None,
            final_log_sequence: None,
            at: self.now,
            reported: reason == EndReason::Superseded,
        });
        self.to(next, actor.to_owned(), format!("{}: {note}", reason.name()))
    }

    fn found(self, found: Found) -> Transition {
        if self.task.state != State::Submitted {
            return self.nothing();
        }
        let mut next = self.task.clone();
        let note = match found {
            Found::Waiting => {
                next.state = State::Available;
                String::new()
            }
            Found::Running => {
                next.state = State::Running;
                next.heard_at = self.now;
                next.holder = None;
                "the platform says that it runs".to_owned()
            }
            Found::Over => {
                let note = "the platform does not want it any more".to_owned();
                return self.over(EndReason::Superseded, "platform", note);
            }
        };
        self.to(next, "platform".to_owned(), note)
    }

    fn cancel(self) -> Transition {
        if self.task.cancel_requested || self.task.state.is_over() {
            return self.nothing();
        }
        if !self.task.state.is_active() {
            let note = "cancelled before an agent had it".to_owned();
            return self.over(EndReason::Cancelled, "platform", note);
        }
        let mut next = self.task.clone();
        next.cancel_requested = true;
        self.to(next, "platform".to_owned(), "cancel requested".to_owned())
    }

    fn reported(self) -> Transition {
        if !self.task.is_unreported() {
            return self.nothing();
        }
        let mut next = self.task.clone();
        if let Some(end) = &mut next.end {
            end.reported = true;
        }
        let note = "the platform has the outcome".to_owned();
        self.to(next, "hub".to_owned(), note)
    }

    fn named(self, instance: InstanceId) -> Transition {
        if !self.task.state.is_active() {
            return self.nothing();
        }
        let mut next = self.task.clone();
        next.instance = Some(instance);
        next.heard_at = self.now;
        if next.state == State::Orphaned {
            next.state = State::Running;
            return self.to(next, self.agent(), "the agent follows it".to_owned());
        }
        self.quietly(next)
    }

    /// Refuses all but the current lease.
    fn current(self, grant: JobGrant) -> Result<(), Refusal> {
        let task = self.task;
        if task.state.is_over() {
            return Err(Refusal::TaskAlreadyTerminal);
        }
        if grant.fencing_token > task.fencing_token {
            // The store was restored: it knows nothing of this lease.
            return Err(Refusal::LeaseExpired);
        }
        if task.grant() != Some(grant) {
            return Err(Refusal::LeaseSuperseded);
        }
        if task.state.is_active() {
            Ok(())
        } else {
            Err(Refusal::LeaseExpired)
        }
    }

    fn started(self, grant: JobGrant, executor: &str) -> Result<Transition, Refusal> {
        self.current(grant)?;
        let executor = Some(cut(executor.to_owned(), NOTE));
        if self.task.executor == executor && self.task.state != State::Leased {
            return Ok(self.nothing());
        }
        let mut next = self.task.clone();
        next.executor = executor;
        next.heard_at = self.now;
        if self.task.state != State::Leased {
            return Ok(self.quietly(next));
        }
        next.state = if self.task.stock {
            State::Running
        } else {
            State::Started
        };
        let note = next.executor.clone().unwrap_or_default();
        Ok(self.with_outcome(self.to(next, self.agent(), note), LeaseOutcome::Started))
    }

    fn decline(self, grant: JobGrant, decline: &Decline) -> Result<Transition, Refusal> {
        match self.current(grant) {
            // It is back already: this is a repetition, or the lease expired.
            Err(Refusal::LeaseExpired) if self.task.grant() == Some(grant) => {
                return Ok(self.nothing());
            }
            current => current?,
        }
        if self.task.state.is_accepted() {
            return Err(Refusal::LeaseAccepted);
        }
        let reason = format!(
            "{} declined it ({:?}): {}",
            self.agent(),
            decline.reason,
            decline.diagnostic
        );
        if decline.reason == DeclineReason::Refused {
            return Ok(self.over(EndReason::Refused, &self.agent(), reason));
        }
        let mut task = self.task.clone();
        if decline.reason == DeclineReason::Sealed {
            match &task.sealed_for {
                Some(agent) if Some(agent) != task.agent.as_ref() => {
                    let reason = format!("{reason}. Neither had {agent} a key for it");
                    return Ok(self.over(EndReason::Refused, &self.agent(), reason));
                }
                _ => task.sealed_for.clone_from(&task.agent),
            }
        }
        let requested = decline
            .delay_seconds
            .map(|seconds| Millis::from(seconds) * 1000);
        let is_repeated = task.reasons.len() > usize::try_from(task.attempts).unwrap_or(usize::MAX);
        let shortest = if is_repeated { REPEATED } else { 0 };
        let pause = match decline.reason {
            DeclineReason::Quota => requested.unwrap_or(NO_ROOM),
            _ => requested.unwrap_or_default(),
        };
        let pause = pause.clamp(shortest, LONGEST_PAUSE);
        let step = Step {
            task: &task,
            ..self
        };
        let counts = decline.reason.counts();
        let back = step.back(&self.agent(), reason, counts, pause);
        Ok(if counts {
            self.with_outcome(back, LeaseOutcome::Failed)
        } else {
            back
        })
    }

    /// A lease failed.
    fn back(self, actor: &str, reason: String, counts: bool, pause: Millis) -> Transition {
        if self.task.cancel_requested {
            let note = format!("cancelled before an executor accepted it. {reason}");
            return self.over(EndReason::Cancelled, actor, note);
        }
        let mut next = self.task.clone();
        next.state = State::Submitted;
        let counted = usize::try_from(next.attempts).unwrap_or(usize::MAX);
        next.reasons.truncate(counted);
        next.reasons.push(cut(reason.clone(), NOTE));
        let mut pause = pause;
        if counts {
            let delay = self.rules.delays.get(counted);
            let delay = delay.or(self.rules.delays.last());
            pause = pause.max(delay.copied().map_or(0, millis));
            next.attempts += 1;
        }
        if next.attempts >= self.rules.attempts {
            let tries = next.reasons.iter().zip(1..);
            let tries: Vec<_> = tries
                .map(|(reason, number)| format!("{number}. {reason}"))
                .collect();
            let diagnostic = format!(
                "given up after {} attempts:\n{}",
                next.attempts,
                tries.join("\n")
            );
            let step = Step {
                task: &next,
                ..self
            };
            return step.over(EndReason::Poison, actor, diagnostic);
        }
        next.not_before = self.now.saturating_add(pause);
        self.to(next, actor.to_owned(), reason)
    }

    fn accept(self, grant: JobGrant, holder: &Holder) -> Result<Transition, Refusal> {
        self.current(grant)?;
        if self.task.state.is_accepted() {
            let same = |known: &Holder| known.uid == holder.uid;
            return if self.task.holder.as_ref().is_some_and(same) {
                Ok(self.heard(None))
            } else {
                Err(Refusal::LeaseSuperseded)
            };
        }
        if self.task.cancel_requested {
            return Err(Refusal::TaskCancelled);
        }
        Ok(self.accepted(grant, holder, "accepted", None))
    }

    fn accepted(
        self,
        grant: JobGrant,
        holder: &Holder,
        note: &str,
        phase: Option<&str>,
    ) -> Transition {
        let mut next = self.task.clone();
        next.state = State::Running;
        next.lease = Some(grant.lease);
        next.fencing_token = grant.fencing_token;
        next.holder = Some(Holder {
            uid: holder.uid.clone(),
            name: cut(holder.name.clone(), NOTE),
        });
        next.phase = phase.map(|phase| cut(phase.to_owned(), NOTE));
        next.heard_at = self.now;
        let actor = format!("executor {}", holder.name);
        self.with_outcome(self.to(next, actor, note.to_owned()), LeaseOutcome::Started)
    }

    /// The holder lives.
    fn heard(self, phase: Option<&str>) -> Transition {
        let mut next = self.task.clone();
        next.heard_at = self.now;
        if let Some(phase) = phase {
            next.phase = Some(cut(phase.to_owned(), NOTE));
        }
        if next.state == State::Orphaned {
            next.state = State::Running;
            let silent = between(self.task.heard_at, self.now).as_secs();
            let note = format!("heard again after {silent} s");
            return self.to(next, "executor".to_owned(), note);
        }
        self.quietly(next)
    }

    fn beat(self, grant: JobGrant, beat: &Acceptance) -> Result<Transition, Refusal> {
        let task = self.task;
        if task.state.is_over() {
            return Err(Refusal::TaskAlreadyTerminal);
        }
        if grant.fencing_token < task.fencing_token {
            return Err(Refusal::LeaseSuperseded);
        }
        match &task.holder {
            Some(holder) if task.state.is_accepted() => {
                if holder.uid == beat.holder.uid {
                    Ok(self.heard(beat.phase.as_deref()))
                } else {
                    Err(Refusal::LeaseSuperseded)
                }
            }
            // Executors beat once their task is accepted. This one has it, and the store has forgotten that.
            _ => Ok(self.accepted(
                grant,
                &beat.holder,
                "it had accepted the task before",
                beat.phase.as_deref(),
            )),
        }
    }

    fn end(self, grant: JobGrant, ending: Ending, end: &End) -> Result<Transition, Refusal> {
        let task = self.task;
        let state = match ending {
            Ending::Completed => State::Completed,
            Ending::Failed => State::Failed,
            Ending::Cancelled => State::Cancelled,
        };
        if let Some(known) = &task.end {
            let same = known.reason == EndReason::Finished && task.state == state;
            if !same || task.grant() != Some(grant) {
                return Err(Refusal::TaskAlreadyTerminal);
            }
            return Ok(if end.reported {
                self.reported()
            } else {
                self.nothing()
            });
        }
        self.current(grant)?;
        let allowed = match ending {
            // What cannot be started is failed by the agent.
            Ending::Failed => true,
            Ending::Completed => task.state.is_accepted(),
            Ending::Cancelled => task.state.is_accepted() || task.cancel_requested,
        };
        if !allowed {
            return Err(Refusal::LeaseNotAccepted);
        }
        let mut next = task.clone();
        next.state = state;
        next.end = Some(TaskEnd {
            reason: EndReason::Finished,
            diagnostic: cut(end.diagnostic.clone(), DIAGNOSTIC),
            exit_code: end.exit_code,
            verdict: end.verdict.clone().map(|verdict| cut(verdict, NOTE)),
            final_log_sequence: end.final_log_sequence,
            at: self.now,
            reported: end.reported,
        });
        let actor = match &task.holder {
            Some(holder) => format!("executor {} or {}", holder.name, self.agent()),
            None => self.agent(),
        };
        Ok(self.to(next, actor, end.diagnostic.clone()))
    }

    fn time_out(self) -> Transition {
        let task = self.task;
        if task.state.is_over() || task.deadline(self.rules) > self.now {
            return self.nothing();
        }
        let silent = between(task.heard_at, self.now).as_secs();
        match task.state {
            State::Leased | State::Started => {
                let reason = format!("no word from {} for {silent} s", self.agent());
                let back = self.back("hub", reason, true, 0);
                self.with_outcome(back, LeaseOutcome::Failed)
            }
            State::Running => {
                let mut next = task.clone();
                next.state = State::Orphaned;
                let note = format!("no word from {} for {silent} s", self.agent());
                self.to(next, "hub".to_owned(), note)
            }
            State::Orphaned => {
                let diagnostic = format!(
                    "no word from the executor or {} for {silent} s. It may have changed the infrastructure, and may hold the lock of the state",
                    self.agent()
                );
                self.over(EndReason::Lost, "hub", diagnostic)
            }
            _ => {
                let waited = between(task.submitted_at, self.now).as_secs();
                let last = task.reasons.last();
                let last = last.map_or(String::new(), |reason| format!(". Last: {reason}"));
                let diagnostic = format!(
                    "no executor of pool `{}` accepted it within {waited} s{last}",
                    task.pool
                );
                self.over(EndReason::Expired, "hub", diagnostic)
            }
        }
    }
}
