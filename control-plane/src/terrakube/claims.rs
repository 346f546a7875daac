//! At most one executor runs a step that changes something (contract 11.1, W-01).
//!
//! In Redis the claim is atomic. The step's status is asked in any case: it outlives a Redis that was emptied. Without a
//! Redis, the job context holds the claim. The platform has no "if it is not there yet", so whoever has written himself
//! down waits for longer than others take between looking and writing, and looks whose name stands there then.

use std::time::Duration;

use job_contract::StepType;
use job_contract::chain;
use job_contract::status::{JobStatus, StepStatus};
use serde_json::{Map, Value, json};
use tracing::warn;

use super::{ORDINARY, Terrakube, TerrakubeError};
use crate::patience::Patience;
use crate::platform::{Claim, Holder, Standing, StepRef};
use crate::redis::{Redis, Taken};

/// Longer than any job lives, with its waiting for an approval.
const EXPIRY: Duration = Duration::from_hours(7 * 24);

/// Key of the job context under which claims are noted, by step.
const CONTEXT_KEY: &str = "mayflyClaims";
/// Longer than a platform takes to write what another executor has begun to write.
const SETTLING: Duration = Duration::from_secs(2);

impl Terrakube {
    /// Claims the step for `holder`.
    pub async fn claim(&self, step: &StepRef, holder: &Holder) -> Result<Claim, TerrakubeError> {
        let standing = self.standing(step, &Patience::lasting(ORDINARY)).await?;
        let redis = self.0.redis.as_ref();
        if is_taken(&standing) {
            let known = match redis {
                Some(redis) => holder_in(redis, step).await,
                None => None,
            };
            let known = match known {
                None => self.noted(step).await,
                known => known,
            };
            return Ok(Claim::Held(known.unwrap_or_else(Holder::unknown)));
        }
        let Some(redis) = redis else {
            return Ok(self.claim_by_note(step, holder).await);
        };
        let value = serde_json::to_vec(holder).expect("a holder has no failing serialiser");
        Ok(match redis.take(&key(step), &value, EXPIRY).await {
            Ok(Taken::Ours) => Claim::Granted,
            Ok(Taken::Held(value)) => Claim::Held(read(&value).unwrap_or_else(Holder::unknown)),
            Err(error) => {
                warn!(
                    error = chain(&error),
                    "claiming the step in the job context"
                );
                self.claim_by_note(step, holder).await
            }
        })
    }

    /// Claims the step in the job context, unless it may be run twice. Where that cannot be written, the status has to do.
    async fn claim_by_note(&self, step: &StepRef, holder: &Holder) -> Claim {
        let kind = StepType::parse(&step.step_type);
        if kind.is_some_and(|kind| kind.uses_tool() && !kind.changes_infrastructure()) {
            return Claim::Granted;
        }
        if let Some(other) = self.noted(step).await {
            return Claim::Held(other);
        }
        let mut patch = Map::new();
        patch.insert(
            CONTEXT_KEY.to_owned(),
            json!({ step.step_id.as_str(): holder }),
        );
        if let Err(error) = self.merge_context(step, &patch).await {
            warn!(%error, "claiming the step by its status alone");
            return Claim::Granted;
        }
        tokio::time::sleep(SETTLING).await;
        match self.noted(step).await {
            Some(other) if other.uid != holder.uid => Claim::Held(other),
            _ => Claim::Granted,
        }
    }

    /// Who has claimed the step in the job context.
    async fn noted(&self, step: &StepRef) -> Option<Holder> {
        let context = self.brief_context(step).await;
        let context = context.inspect_err(|error| warn!(%error, "claims could not be read"));
        let holder = context
            .ok()?
            .remove(CONTEXT_KEY)?
            .get_mut(&step.step_id)
            .map(Value::take);
        serde_json::from_value(holder?).ok()
    }
}

/// Whether the step is, or was, somebody's by its status. The report that follows a claim makes it so.
const fn is_taken(standing: &Standing) -> bool {
    match standing.step {
        Some(StepStatus::Running | StepStatus::Completed) => true,
        // The platform ends the steps of a rejected job before it has the rejection's scripts run.
        Some(StepStatus::Failed | StepStatus::Cancelled | StepStatus::NotExecuted) => {
            !matches!(standing.status, JobStatus::Rejected)
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
