//! At most one executor runs a step that changes something (contract 11.1, W-01).
//!
//! In Redis the claim is atomic. The step's status is asked in any case: it outlives a Redis that was emptied, and is
//! all there is without one.

use std::time::Duration;

use job_contract::status::{JobStatus, StepStatus};
use tracing::warn;

use super::{ORDINARY, Terrakube, TerrakubeError};
use crate::patience::Patience;
use crate::platform::{Claim, Holder, Standing, StepRef};
use crate::redis::{Redis, Taken};

/// Longer than any job lives, with its waiting for an approval.
const EXPIRY: Duration = Duration::from_hours(7 * 24);

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
            return Ok(Claim::Held(known.unwrap_or_else(Holder::unknown)));
        }
        let Some(redis) = redis else {
            return Ok(Claim::Granted);
        };
        let value = serde_json::to_vec(holder).expect("a holder has no failing serialiser");
        Ok(match redis.take(&key(step), &value, EXPIRY).await {
            Ok(Taken::Ours) => Claim::Granted,
            Ok(Taken::Held(value)) => Claim::Held(read(&value).unwrap_or_else(Holder::unknown)),
            Err(error) => {
                warn!(
                    error = error.chain(),
                    "claiming the step by its status alone"
                );
                Claim::Granted
            }
        })
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
            warn!(error = error.chain(), "it is not known who holds the step");
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
