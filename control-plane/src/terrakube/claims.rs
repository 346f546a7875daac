//! At most one executor runs a step that changes something (contract 11.1, W-01).

use job_contract::status::{JobStatus, StepStatus};

use super::{ORDINARY, Terrakube, TerrakubeError};
use crate::patience::Patience;
use crate::platform::{Claim, Holder, StepRef};

impl Terrakube {
    /// Claims the step by its status: a step that is running, or has ended, is somebody's. The report that follows
    /// makes it ours for everybody who asks later.
    pub async fn claim(&self, step: &StepRef, holder: &Holder) -> Result<Claim, TerrakubeError> {
        let standing = self.standing(step, &Patience::lasting(ORDINARY)).await?;
        let taken = match standing.step {
            Some(StepStatus::Running | StepStatus::Completed) => true,
            // The platform ends the steps of a rejected job before it has the rejection's scripts run.
            Some(StepStatus::Failed | StepStatus::Cancelled | StepStatus::NotExecuted) => {
                standing.status != JobStatus::Rejected
            }
            Some(StepStatus::Pending) | None => false,
        };
        let _ = holder;
        Ok(if taken {
            Claim::Held(Holder::unknown())
        } else {
            Claim::Granted
        })
    }
}
