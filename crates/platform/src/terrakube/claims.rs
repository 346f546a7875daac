//! Claims a step, so that at most one executor runs a step that changes something (contract 11.1, W-01).
//!
//! 1. The executor reads the step's status. A running or ended step is claimed. The status outlives a Redis that was emptied.
//! 2. With Redis, the executor takes the claim's key there. This is atomic: Redis grants it to one claimant.
//! 3. The winner also reads the job context. If another executor has written a note there, the step is claimed. That
//!    executor made its claim while Redis did not answer. A context that cannot be read has no note.
//! 4. Without Redis, or while it does not answer, the executor writes a note to the job context. The platform has no write
//!    that fails if a note exists. So the executor:
//!    1. reads the context, and stops if it has a note;
//!    2. writes its note within `claim_write` after the start of the read;
//!    3. waits for `claim_settle`, which is longer: until then, each claimant that saw no note has written its own or
//!       given up;
//!    4. reads the note again, and continues only if the note is its own;
//!    5. reads the step's status again, because another executor may have claimed the step in Redis.
//!
//! `Pace` has both times. If a call of 4.1, 4.2 or 4.4 fails, the claim is uncertain, and the executor does not start the step.

use std::time::Duration;

use job_contract::StepType;
use job_contract::chain;
use job_contract::status::{JobStatus, StepStatus};
use serde_json::Value;
use tokio::time::sleep;
use tracing::warn;

use super::context::Insertion;
use super::{CALL_TIMEOUT, Terrakube, TerrakubeError};
use crate::lease::Lease;
use crate::redis::{Redis, Taken};
use crate::{Claim, Holder, StepRef, StepView};
use runtime::Deadline;

/// How long a claim is kept in Redis: longer than any job, with its wait for an approval.
const EXPIRY: Duration = Duration::from_hours(7 * 24);

/// The key of the job context for claims. Each step has its own note below it.
const CONTEXT_KEY: &str = "mayflyClaims";

impl Terrakube {
    /// Claims the step for `holder`.
    pub async fn claim(&self, step: &StepRef, holder: &Holder) -> Result<Claim, TerrakubeError> {
        if let Some(lease) = &self.0.lease {
            return self.claim_by_lease(lease, step, holder).await;
        }
        let view = self.step_view(step, &Deadline::after(CALL_TIMEOUT)).await?;
        let redis = self.0.redis.as_ref();
        if is_taken(&view) {
            let known = match redis {
                Some(redis) => holder_in(redis, step).await,
                None => None,
            };
            let known = match known {
                None => self.context_holder(step).await,
                known => known,
            };
            return Ok(Claim::Taken(known.unwrap_or_else(Holder::unknown)));
        }
        let Some(redis) = redis else {
            return self.claim_in_context(step, holder, &view).await;
        };
        let value = serde_json::to_vec(holder).expect("a holder has no failing serialiser");
        Ok(match redis.take(&key(step), &value, EXPIRY).await {
            Ok(Taken::Ours) => self.check_context_claim(step, holder, &view).await,
            Ok(Taken::ByOther(value)) => Claim::Taken(read(&value).unwrap_or_else(Holder::unknown)),
            Err(error) => {
                warn!(
                    error = chain(&error),
                    "claiming the step in the job context"
                );
                self.claim_in_context(step, holder, &view).await?
            }
        })
    }

    /// Claims the step at the hub. A hub whose store was restored may not know that the step has started, so the executor
    /// first reads the step's status.
    async fn claim_by_lease(
        &self,
        lease: &Lease,
        step: &StepRef,
        holder: &Holder,
    ) -> Result<Claim, TerrakubeError> {
        let view = match self.step_view(step, &Deadline::after(CALL_TIMEOUT)).await {
            Ok(view) => view,
            Err(error) => return error.lost_lease().map(Claim::Refused).ok_or(error),
        };
        if is_taken(&view) && !is_repeatable(step) {
            let text = "according to the platform, the step has already started";
            return Ok(Claim::Refused(text.to_owned()));
        }
        lease.accept(holder).await
    }

    /// Claims the step in the job context (step 4 of the module). A step that may run twice needs no claim. The platform takes
    /// no context of a rejected job (contract 6.6), so there the status must be enough.
    async fn claim_in_context(
        &self,
        step: &StepRef,
        holder: &Holder,
        view: &StepView,
    ) -> Result<Claim, TerrakubeError> {
        if !may_claim_in_context(step, view) {
            return Ok(Claim::Granted);
        }
        let pace = self.0.pace;
        let value = serde_json::to_value(holder).expect("a holder has no failing serialiser");
        let note = self
            .insert_note(step, CONTEXT_KEY, &value, pace.claim_write)
            .await;
        match note.map_err(uncertain)? {
            Insertion::Inserted => {}
            Insertion::Existing(other) => return Ok(Claim::Taken(holder_of(other))),
        }
        sleep(pace.claim_settle).await;
        let noted = self.context_claim(step).await.map_err(uncertain)?;
        match noted.map(holder_of) {
            Some(settled) if settled.uid == holder.uid => {}
            Some(other) => return Ok(Claim::Taken(other)),
            None => return Err(uncertain(overwritten(step))),
        }
        // An executor that claimed the step in Redis before it failed has written no note, but has reported its start.
        let view = self.step_view(step, &Deadline::after(CALL_TIMEOUT)).await?;
        if is_taken(&view) {
            return Ok(Claim::Taken(Holder::unknown()));
        }
        Ok(Claim::Granted)
    }

    /// Checks the job context after Redis has granted the claim (step 3 of the module). An executor that claimed the step
    /// while Redis did not answer has left a note, but may not have reported its start. If the context cannot be read, it
    /// is likely that no executor could write to it either.
    async fn check_context_claim(&self, step: &StepRef, holder: &Holder, view: &StepView) -> Claim {
        if !may_claim_in_context(step, view) {
            return Claim::Granted;
        }
        match self.context_holder(step).await {
            Some(other) if other != *holder => Claim::Taken(other),
            _ => Claim::Granted,
        }
    }

    /// The holder of the claim in the job context. `None` if there is no claim or if the context cannot be read.
    async fn context_holder(&self, step: &StepRef) -> Option<Holder> {
        let noted = self.context_claim(step).await;
        let noted =
            noted.inspect_err(|error| warn!(%error, "could not read claims in the job context"));
        Some(holder_of(noted.ok()??))
    }

    /// The claim on the step in the job context.
    async fn context_claim(&self, step: &StepRef) -> Result<Option<Value>, TerrakubeError> {
        let mut context = self.context_for_claim(step).await?;
        let notes = context.get_mut(CONTEXT_KEY);
        Ok(notes.and_then(|notes| notes.get_mut(&step.step_id).map(Value::take)))
    }
}

/// Whether claims on the step are written to the job context. They are not if the step may run twice, or if the platform
/// takes no context of the job.
fn may_claim_in_context(step: &StepRef, view: &StepView) -> bool {
    !is_repeatable(step) && view.status != JobStatus::Rejected
}

/// Whether the step may run twice.
fn is_repeatable(step: &StepRef) -> bool {
    let kind = StepType::parse(&step.step_type);
    kind.is_some_and(|kind| kind.uses_tool() && !kind.changes_infrastructure())
}

/// The holder in a note. A note that cannot be decoded still counts as a claim.
fn holder_of(note: Value) -> Holder {
    serde_json::from_value(note).unwrap_or_else(|_| Holder::unknown())
}

fn uncertain(source: TerrakubeError) -> TerrakubeError {
    TerrakubeError::ClaimUncertain(Box::new(source))
}

fn overwritten(step: &StepRef) -> TerrakubeError {
    TerrakubeError::ClaimOverwritten {
        step_id: step.step_id.clone(),
    }
}

/// Whether the status of the step shows a claim. The report after a claim sets it.
const fn is_taken(view: &StepView) -> bool {
    match view.step {
        Some(StepStatus::Running | StepStatus::Completed) => true,
        // The platform ends the steps of a rejected job before it dispatches the scripts of the rejection.
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
            warn!(
                error = chain(&error),
                "could not read the holder of the step in Redis"
            );
            None
        }
    }
}

/// The key of a claim. Only Mayfly uses it, so it is plain text.
fn key(step: &StepRef) -> Vec<u8> {
    format!("mayfly:claim:{}:{}", step.job_id, step.step_id).into_bytes()
}

fn read(value: &[u8]) -> Option<Holder> {
    serde_json::from_slice(value).ok()
}
