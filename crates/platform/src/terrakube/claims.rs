//! At most one executor runs a step that changes something (contract 11.1, W-01).
//!
//! In Redis the claim is atomic. The step's status is asked in any case: it outlives a Redis that was emptied. Without a
//! Redis, or while it does not answer, the job context holds the claim, and is asked by those Redis grants it. The
//! platform cannot write a note only if there is none. So a note counts only if it was written promptly after a look that
//! found no other. The writer waits for longer than that. Then it looks whose name the note has, and whether the step is
//! still unclaimed. What cannot be read is no claim.

use std::time::Duration;

use job_contract::StepType;
use job_contract::chain;
use job_contract::status::{JobStatus, StepStatus};
use serde_json::Value;
use tokio::time::sleep;
use tracing::warn;

use super::context::Note;
use super::{ORDINARY, Terrakube, TerrakubeError};
use crate::lease::Lease;
use crate::redis::{Redis, Taken};
use crate::{Claim, Holder, StepRef, StepView};
use runtime::Deadline;

/// Longer than any job lives, with its waiting for an approval.
const EXPIRY: Duration = Duration::from_hours(7 * 24);

/// Key of the job context under which claims are noted, by step.
const CONTEXT_KEY: &str = "mayflyClaims";
/// The longest from looking whose note is there until one's own is known to be written.
const PROMPT: Duration = Duration::from_secs(1);
/// Longer than that by far, so that whoever looked before a note was written has given up, or written his own.
const SETTLING: Duration = Duration::from_secs(2);

impl Terrakube {
    /// Claims the step for `holder`.
    pub async fn claim(&self, step: &StepRef, holder: &Holder) -> Result<Claim, TerrakubeError> {
        if let Some(lease) = &self.0.lease {
            return self.claim_by_lease(lease, step, holder).await;
        }
        let view = self.step_view(step, &Deadline::after(ORDINARY)).await?;
        let redis = self.0.redis.as_ref();
        if is_taken(&view) {
            let known = match redis {
                Some(redis) => holder_in(redis, step).await,
                None => None,
            };
            let known = match known {
                None => self.named(step).await,
                known => known,
            };
            return Ok(Claim::Held(known.unwrap_or_else(Holder::unknown)));
        }
        let Some(redis) = redis else {
            return self.claim_by_note(step, holder, &view).await;
        };
        let value = serde_json::to_vec(holder).expect("a holder has no failing serialiser");
        Ok(match redis.take(&key(step), &value, EXPIRY).await {
            Ok(Taken::Ours) => self.unless_noted(step, holder, &view).await,
            Ok(Taken::Held(value)) => Claim::Held(read(&value).unwrap_or_else(Holder::unknown)),
            Err(error) => {
                warn!(
                    error = chain(&error),
                    "claiming the step in the job context"
                );
                self.claim_by_note(step, holder, &view).await?
            }
        })
    }

    /// Claims the step at the hub, unless it was begun already: a hub that was restored may not know of it.
    async fn claim_by_lease(
        &self,
        lease: &Lease,
        step: &StepRef,
        holder: &Holder,
    ) -> Result<Claim, TerrakubeError> {
        let view = match self.step_view(step, &Deadline::after(ORDINARY)).await {
            Ok(view) => view,
            Err(error) => return error.lost_lease().map(Claim::Refused).ok_or(error),
        };
        if is_taken(&view) && !is_repeatable(step) {
            let text = "the platform says that the step was begun before";
            return Ok(Claim::Refused(text.to_owned()));
        }
        lease.accept(holder).await
    }

    /// Claims the step in the job context, unless it may be run twice, or belongs to a rejected job: the platform takes no
    /// context of those (contract 6.6), so that their status has to do.
    async fn claim_by_note(
        &self,
        step: &StepRef,
        holder: &Holder,
        view: &StepView,
    ) -> Result<Claim, TerrakubeError> {
        if !takes_note(step, view) {
            return Ok(Claim::Granted);
        }
        let value = serde_json::to_value(holder).expect("a holder has no failing serialiser");
        let note = self.note(step, CONTEXT_KEY, &value, PROMPT).await;
        match note.map_err(unclaimed)? {
            Note::Ours => {}
            Note::Anothers(other) => return Ok(Claim::Held(holder_of(other))),
        }
        sleep(SETTLING).await;
        let noted = self.noted(step).await.map_err(unclaimed)?;
        match noted.map(holder_of) {
            Some(settled) if settled.uid == holder.uid => {}
            Some(other) => return Ok(Claim::Held(other)),
            None => return Err(unclaimed(lost(step))),
        }
        // Whoever claimed it in a Redis that answers no more has left no note, but has begun.
        let view = self.step_view(step, &Deadline::after(ORDINARY)).await?;
        if is_taken(&view) {
            return Ok(Claim::Held(Holder::unknown()));
        }
        Ok(Claim::Granted)
    }

    /// The claim on a step that Redis has granted: whoever claimed it while Redis did not answer has left a note, and may
    /// not have been able to say that it runs. Where the context is not to be had, nobody can have noted anything.
    async fn unless_noted(&self, step: &StepRef, holder: &Holder, view: &StepView) -> Claim {
        if !takes_note(step, view) {
            return Claim::Granted;
        }
        match self.named(step).await {
            Some(other) if other != *holder => Claim::Held(other),
            _ => Claim::Granted,
        }
    }

    /// Who has claimed the step in the job context, as far as that can be told.
    async fn named(&self, step: &StepRef) -> Option<Holder> {
        let noted = self.noted(step).await;
        let noted = noted.inspect_err(|error| warn!(%error, "claims could not be read"));
        Some(holder_of(noted.ok()??))
    }

    /// The note on the step in the job context.
    async fn noted(&self, step: &StepRef) -> Result<Option<Value>, TerrakubeError> {
        let mut context = self.brief_context(step).await?;
        let notes = context.get_mut(CONTEXT_KEY);
        Ok(notes.and_then(|notes| notes.get_mut(&step.step_id).map(Value::take)))
    }
}

/// Whether claims on the step are noted: neither on one that may be run twice, nor in a job of which the platform takes no
/// context.
fn takes_note(step: &StepRef, view: &StepView) -> bool {
    !is_repeatable(step) && view.status != JobStatus::Rejected
}

/// Whether the step may be run twice.
fn is_repeatable(step: &StepRef) -> bool {
    let kind = StepType::parse(&step.step_type);
    kind.is_some_and(|kind| kind.uses_tool() && !kind.changes_infrastructure())
}

/// A note that cannot be read still counts as a claim.
fn holder_of(note: Value) -> Holder {
    serde_json::from_value(note).unwrap_or_else(|_| Holder::unknown())
}

fn unclaimed(source: TerrakubeError) -> TerrakubeError {
    TerrakubeError::Unclaimed(Box::new(source))
}

fn lost(step: &StepRef) -> TerrakubeError {
    TerrakubeError::NoteLost {
        step_id: step.step_id.clone(),
    }
}

/// Whether the status of the step shows a claim. The report after a claim sets it.
const fn is_taken(view: &StepView) -> bool {
    match view.step {
        Some(StepStatus::Running | StepStatus::Completed) => true,
        // The platform ends the steps of a rejected job before it has the rejection's scripts run.
        Some(StepStatus::Failed | StepStatus::Cancelled | StepStatus::NotExecuted) => {
            !matches!(view.status, JobStatus::Rejected)
        }
        Some(StepStatus::Pending) | None => false,
    }
}

async fn holder_in(redis: &Redis, step: &StepRef) -> Option<Holder> {
    match redis.get(&key(step)).await {
        Ok(value) => read(&value?),
        Err(error) => {
            warn!(error = chain(&error), "it is not known who holds the step");
            None
        }
    }
}

/// Ours alone, so in plain text.
fn key(step: &StepRef) -> Vec<u8> {
    format!("mayfly:claim:{}:{}", step.job_id, step.step_id).into_bytes()
}

fn read(value: &[u8]) -> Option<Holder> {
    serde_json::from_slice(value).ok()
}
