//! Applies events to tasks.

use pool_protocol::id::InstanceId;
use pool_protocol::lease::{Acceptance, Decline, DeclineReason, End, Holder, LeaseRef};
use serde_json::Value;

use super::event::Event;
use super::task::{EndReason, State, Task, TaskEnd};
use crate::clock::{Millis, between, millis};
use crate::error::Refusal;
use crate::model::{Ending, PlatformState};
use crate::rules::Rules;
use crate::text::{DIAGNOSTIC, NOTE, cut};

/// The pause after an agent without capacity has declined a lease, unless the agent requests another one.
const QUOTA_PAUSE: Millis = 10_000;
/// The shortest pause after two leases in a row that were declined and do not count.
const REPEATED: Millis = 5_000;
/// The longest pause an agent may ask for.
const LONGEST_PAUSE: Millis = 300_000;

/// The result of an event: what the store writes.
#[derive(Clone, Debug)]
pub struct Transition {
    pub task: Task,
    /// Whether the task must be written.
    pub changed: bool,
    /// The entry in the history, if there is one.
    pub entry: Option<HistoryEntry>,
    /// Whether the payload is no longer needed.
    pub drops_payload: bool,
    /// What the event shows about the instance of the lease.
    pub instance: Option<(InstanceId, LeaseOutcome)>,
}

/// An entry in the history of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryEntry {
    /// The platform, the hub, an agent or an executor.
    pub actor: String,
    pub note: String,
}

/// Whether the instance of a lease works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseOutcome {
    /// An executor exists.
    Started,
    /// The lease failed.
    Failed,
}

/// Applies an event to a task.
///
/// # Errors
/// If the state of the task does not allow the event. Then nothing must be written.
pub fn apply(
    task: &Task,
    event: Event<'_>,
    now: Millis,
    rules: &Rules,
) -> Result<Transition, Refusal> {
    let builder = TransitionBuilder { task, now, rules };
    match event {
        Event::PlatformState(state) => Ok(builder.platform_state(state)),
        Event::Cancel => Ok(builder.cancel()),
        Event::Reported => Ok(builder.reported()),
        Event::Lease {
            lease,
            instance,
            agent,
            credential,
        } => {
            if task.state != State::Available || task.not_before > now {
                return Ok(builder.unchanged());
            }
            let mut next = task.clone();
            next.state = State::Leased;
            next.fencing_token += 1;
            next.lease = Some(lease);
            next.instance = Some(instance);
            next.agent = Some(agent.clone());
            next.credential = Some(credential.to_owned());
            next.executor = None;
            next.phase = None;
            next.leased_at = now;
            next.heard_at = now;
            Ok(builder.with_entry(next, format!("agent {agent}"), String::new()))
        }
        Event::Renewed {
            instance,
            credential,
            reason,
        } => Ok(builder.renewed(instance, credential, reason)),
        Event::Started { grant, executor } => builder.started(grant, executor),
        Event::Decline { grant, decline } => builder.decline(grant, decline),
        Event::Accept { grant, holder } => builder.accept(grant, holder),
        Event::Heartbeat { grant, heartbeat } => builder.heartbeat(grant, heartbeat),
        Event::End { grant, ending, end } => builder.end(grant, ending, end),
        Event::Revoked { credential } => Ok(builder.revoked(credential)),
        Event::Unreadable { reason } => Ok(builder.unreadable(reason)),
        Event::TimeOut => Ok(builder.time_out()),
    }
}

/// Builds the transition for one event.
#[derive(Clone, Copy)]
struct TransitionBuilder<'a> {
    task: &'a Task,
    now: Millis,
    rules: &'a Rules,
}

impl TransitionBuilder<'_> {
    fn unchanged(self) -> Transition {
        Transition {
            task: self.task.clone(),
            changed: false,
            entry: None,
            drops_payload: false,
            instance: None,
        }
    }

    /// Writes the task without an entry in the history.
    fn without_entry(self, task: Task) -> Transition {
        Transition {
            task,
            changed: true,
            ..self.unchanged()
        }
    }

    fn with_entry(self, task: Task, actor: String, note: String) -> Transition {
        let drops_payload = task.state.is_over() || task.state.is_accepted();
        Transition {
            drops_payload,
            entry: Some(HistoryEntry {
                actor: cut(actor, NOTE),
                note: cut(note, NOTE),
            }),
            ..self.without_entry(task)
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

    /// Ends the task for a reason that the hub found.
    fn over(self, reason: EndReason, actor: &str, diagnostic: String) -> Transition {
        let mut next = self.task.clone();
        next.state = match reason {
            EndReason::Cancelled | EndReason::Superseded => State::Cancelled,
            _ => State::Failed,
        };
        let note = diagnostic.clone();
        next.end = Some(TaskEnd {
            reported: reason == EndReason::Superseded,
            ..TaskEnd::new(reason, cut(diagnostic, DIAGNOSTIC), self.now)
        });
        self.with_entry(next, actor.to_owned(), format!("{}: {note}", reason.name()))
    }

    fn platform_state(self, state: PlatformState) -> Transition {
        if self.task.state != State::Submitted {
            return self.unchanged();
        }
        let mut next = self.task.clone();
        let note = match state {
            PlatformState::Waiting => {
                next.state = State::Available;
                String::new()
            }
            PlatformState::Running => {
                next.state = State::Running;
                next.heard_at = self.now;
                next.holder = None;
                // The last lease has ended, and another executor has the task. That one may have a lease with this number
                // that a restored store does not know.
                next.lease = None;
                next.fencing_token += 1;
                "the platform says that it runs".to_owned()
            }
            PlatformState::Over => {
                let note = "the platform no longer needs it".to_owned();
                return self.over(EndReason::Superseded, "platform", note);
            }
        };
        self.with_entry(next, "platform".to_owned(), note)
    }

    fn cancel(self) -> Transition {
        if self.task.cancel_requested || self.task.state.is_over() {
            return self.unchanged();
        }
        if !self.task.state.is_active() {
            let note = "cancelled before an agent had it".to_owned();
            return self.over(EndReason::Cancelled, "platform", note);
        }
        let mut next = self.task.clone();
        next.cancel_requested = true;
        self.with_entry(next, "platform".to_owned(), "cancel requested".to_owned())
    }

    fn reported(self) -> Transition {
        if !self.task.is_unreported() {
            return self.unchanged();
        }
        let mut next = self.task.clone();
        if let Some(end) = &mut next.end {
            end.reported = true;
        }
        let note = "the platform has the outcome".to_owned();
        self.with_entry(next, "hub".to_owned(), note)
    }

    fn renewed(self, instance: InstanceId, credential: &str, reason: Option<&str>) -> Transition {
        if !self.task.state.is_active() {
            return self.unchanged();
        }
        let mut next = self.task.clone();
        next.instance = Some(instance);
        next.credential = Some(credential.to_owned());
        next.heard_at = self.now;
        if !next.state.is_accepted() {
            next.phase = reason.map(|reason| cut(reason.to_owned(), NOTE));
        }
        if next.state == State::Orphaned {
            next.state = State::Running;
            return self.with_entry(next, self.agent(), "the agent follows it".to_owned());
        }
        self.without_entry(next)
    }

    /// Refuses every lease except the current one.
    fn require_current(self, grant: LeaseRef) -> Result<(), Refusal> {
        let task = self.task;
        if task.state.is_over() {
            return Err(Refusal::TaskAlreadyTerminal);
        }
        if grant.fencing_token > task.fencing_token {
            // The store was restored from a backup and does not know this lease.
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

    fn started(self, grant: LeaseRef, executor: &str) -> Result<Transition, Refusal> {
        self.require_current(grant)?;
        let executor = Some(cut(executor.to_owned(), NOTE));
        if self.task.executor == executor && self.task.state != State::Leased {
            return Ok(self.unchanged());
        }
        let mut next = self.task.clone();
        next.executor = executor;
        next.heard_at = self.now;
        if self.task.state != State::Leased {
            return Ok(self.without_entry(next));
        }
        next.state = State::Started;
        let note = next.executor.clone().unwrap_or_default();
        Ok(self.with_outcome(
            self.with_entry(next, self.agent(), note),
            LeaseOutcome::Started,
        ))
    }

    fn decline(self, grant: LeaseRef, decline: &Decline) -> Result<Transition, Refusal> {
        match self.require_current(grant) {
            // The task is back in the queue. The request was repeated, or the lease had expired.
            Err(Refusal::LeaseExpired) if self.task.grant() == Some(grant) => {
                return Ok(self.unchanged());
            }
            result => result?,
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
        let requested = decline
            .delay_seconds
            .map(|seconds| Millis::from(seconds) * 1000);
        let task = self.task;
        let is_repeated = task.reasons.len() > usize::try_from(task.attempts).unwrap_or(usize::MAX);
        let shortest = if is_repeated { REPEATED } else { 0 };
        let pause = match decline.reason {
            DeclineReason::Quota => requested.unwrap_or(QUOTA_PAUSE),
            _ => requested.unwrap_or_default(),
        };
        let pause = pause.clamp(shortest, LONGEST_PAUSE);
        let counts = decline.reason.counts();
        let requeued = self.requeue(&self.agent(), reason, counts, pause);
        Ok(if counts {
            self.with_outcome(requeued, LeaseOutcome::Failed)
        } else {
            requeued
        })
    }

    /// Ends a lease, and returns the task to the queue.
    fn requeue(self, actor: &str, reason: String, counts: bool, pause: Millis) -> Transition {
        if self.task.cancel_requested {
            let note = format!("cancelled before an executor accepted it. {reason}");
            return self.over(EndReason::Cancelled, actor, note);
        }
        let mut next = self.task.clone();
        next.state = State::Submitted;
        next.credential = None;
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
            let builder = TransitionBuilder {
                task: &next,
                ..self
            };
            return builder.over(EndReason::Poison, actor, diagnostic);
        }
        next.not_before = self.now.saturating_add(pause);
        self.with_entry(next, actor.to_owned(), reason)
    }

    fn accept(self, grant: LeaseRef, holder: &Holder) -> Result<Transition, Refusal> {
        if self.has_accepted(grant, holder)? {
            return Ok(self.heard(None));
        }
        Ok(self.accepted(grant, holder, "accepted", None))
    }

    /// Returns whether the holder has accepted the task, or may accept it. Refuses it if neither is so.
    fn has_accepted(self, grant: LeaseRef, holder: &Holder) -> Result<bool, Refusal> {
        self.require_current(grant)?;
        if self.task.state.is_accepted() {
            let known = self.task.holder.as_ref();
            return if known.is_some_and(|known| known.uid == holder.uid) {
                Ok(true)
            } else {
                Err(Refusal::LeaseSuperseded)
            };
        }
        if self.task.cancel_requested {
            return Err(Refusal::TaskCancelled);
        }
        Ok(false)
    }

    fn accepted(
        self,
        grant: LeaseRef,
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
        self.with_outcome(
            self.with_entry(next, actor, note.to_owned()),
            LeaseOutcome::Started,
        )
    }

    /// Stores a heartbeat of the holder.
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
            return self.with_entry(next, "executor".to_owned(), note);
        }
        self.without_entry(next)
    }

    fn heartbeat(self, grant: LeaseRef, heartbeat: &Acceptance) -> Result<Transition, Refusal> {
        let (holder, phase) = (&heartbeat.holder, heartbeat.phase.as_deref());
        let is_accepted = if self.is_forgotten(grant)? {
            match &self.task.holder {
                Some(known) if self.task.state.is_accepted() => {
                    if known.uid != holder.uid {
                        return Err(Refusal::LeaseSuperseded);
                    }
                    true
                }
                _ => false,
            }
        } else {
            self.has_accepted(grant, holder)?
        };
        if is_accepted {
            return Ok(self.heard(phase));
        }
        // Executors send heartbeats only after their task is accepted. So the store was restored from an older backup.
        let mut restored = self.accepted(grant, holder, "it had accepted the task before", phase);
        if self.task.grant() != Some(grant) {
            // The credential of another lease says nothing about this one.
            restored.task.credential = None;
        }
        Ok(restored)
    }

    /// Returns whether the store was restored from a backup that is older than the lease. The hub signs each grant, and
    /// gives a fencing token to one lease only.
    fn is_forgotten(self, grant: LeaseRef) -> Result<bool, Refusal> {
        let task = self.task;
        if task.state.is_over() {
            return Err(Refusal::TaskAlreadyTerminal);
        }
        let is_same = grant.fencing_token == task.fencing_token;
        Ok(grant.fencing_token > task.fencing_token || is_same && task.lease != Some(grant.lease))
    }

    /// Ends the lease if this credential has made or renewed it last.
    fn revoked(self, credential: &str) -> Transition {
        let task = self.task;
        if !task.state.is_active() || task.credential.as_deref() != Some(credential) {
            return self.unchanged();
        }
        let revoked = format!("the token of {} is no longer valid", self.agent());
        if !task.state.is_accepted() {
            return self.requeue("hub", revoked, false, 0);
        }
        let diagnostic = format!(
            "{revoked}: it was removed from the file of the pools while the run was in progress. Its executor may have changed the infrastructure, and may hold the lock of the state"
        );
        self.over(EndReason::Revoked, "hub", diagnostic)
    }

    /// Delays a task whose document cannot be read. Another hub may get a new key later than this one, so a few attempts
    /// pass until the task is over.
    fn unreadable(self, reason: &str) -> Transition {
        if !matches!(self.task.state, State::Available | State::Leased) {
            return self.unchanged();
        }
        self.requeue("hub", reason.to_owned(), true, 0)
    }

    fn end(self, grant: LeaseRef, ending: Ending, end: &End) -> Result<Transition, Refusal> {
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
                self.unchanged()
            });
        }
        self.require_current(grant)?;
        let allowed = match ending {
            // The agent also fails tasks whose executor cannot be started.
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
            report: end
                .report
                .clone()
                .map(|report| Value::Object(report).to_string()),
            at: self.now,
            reported: end.reported,
        });
        let actor = match &task.holder {
            Some(holder) => format!("executor {} or {}", holder.name, self.agent()),
            None => self.agent(),
        };
        Ok(self.with_entry(next, actor, end.diagnostic.clone()))
    }

    fn time_out(self) -> Transition {
        let task = self.task;
        if task.state.is_over() || task.deadline(self.rules) > self.now {
            return self.unchanged();
        }
        let silent = between(task.heard_at, self.now).as_secs();
        match task.state {
            State::Leased | State::Started => {
                let has_heartbeat =
                    task.state == State::Leased && silent < self.rules.lease.as_secs();
                let reason = if has_heartbeat {
                    let seconds = between(task.leased_at, self.now).as_secs();
                    format!("{} started no executor within {seconds} s", self.agent())
                } else {
                    format!("no heartbeat from {} for {silent} s", self.agent())
                };
                let requeued = self.requeue("hub", reason, true, 0);
                self.with_outcome(requeued, LeaseOutcome::Failed)
            }
            State::Running => {
                let mut next = task.clone();
                next.state = State::Orphaned;
                let note = format!("no heartbeat from {} for {silent} s", self.agent());
                self.with_entry(next, "hub".to_owned(), note)
            }
            State::Orphaned => {
                let diagnostic = format!(
                    "no heartbeat from the executor or {} for {silent} s. It may have changed the infrastructure, and may hold the lock of the state",
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
