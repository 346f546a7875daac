//! What the platform says about a step: whether it may run, what it needs to know, and whether it is to stop.

use backon::{BackoffBuilder as _, ConstantBuilder};
use job_contract::StepType;
use job_contract::status::JobStatus;
use tokio::time::{Instant, sleep};
use tracing::{debug, info};

use super::document::JobDocument;
use super::{ORDINARY, Terrakube, TerrakubeError, template};
use crate::patience::Patience;
use crate::platform::{Admission, Standing, StepRef};

impl Terrakube {
    /// What the platform says about the step now.
    pub async fn standing(
        &self,
        step: &StepRef,
        patience: &Patience,
    ) -> Result<Standing, TerrakubeError> {
        Ok(standing(&self.job(step, patience).await?, step))
    }

    /// Whether the step may run. The platform records a dispatch only after it was accepted, and deletes the log of
    /// the step before in between: nothing may be written until then (contract 2.5).
    pub async fn admission(&self, step: &StepRef) -> Result<Admission, TerrakubeError> {
        let mut asked_since = None;
        loop {
            let document = self.job(step, &Patience::lasting(ORDINARY)).await?;
            let status = &document.job().status;
            if !status.is_over()
                && let Some(outcome) = standing(&document, step).outcome()
            {
                return Ok(Admission::Settled(outcome));
            }
            match status {
                JobStatus::Queue | JobStatus::Running => {
                    return Ok(Admission::Granted(standing(&document, step)));
                }
                // The scripts of a rejection arrive as the approval step that was rejected.
                JobStatus::Rejected if step.step_type == StepType::Approval.name() => {
                    return Ok(Admission::Granted(standing(&document, step)));
                }
                JobStatus::Rejected => return Ok(Admission::Over(status.clone())),
                over if over.is_over() => return Ok(Admission::Over(over.clone())),
                _ => {}
            }
            let since = *asked_since.get_or_insert_with(|| {
                info!(%status, "waiting for the platform to record the dispatch");
                Instant::now()
            });
            if since.elapsed() >= self.config().dispatch_wait {
                return Ok(Admission::NotDispatched(status.clone()));
            }
            sleep(self.0.pace.dispatch_poll).await;
        }
    }

    /// Returns once the job was cancelled, or failed by somebody else: nothing else tells an executor
    /// (contract 11.4). A platform that does not answer has cancelled nothing.
    pub async fn cancelled(&self, step: &StepRef) -> JobStatus {
        // Pauses of once to twice the time, so that many executors do not ask at the same moment.
        let pauses = ConstantBuilder::default()
            .with_delay(self.config().status_poll)
            .with_jitter()
            .without_max_times()
            .build();
        for pause in pauses {
            sleep(pause).await;
            match self.job(step, &Patience::lasting(ORDINARY)).await {
                Ok(document) => {
                    let status = document.into_job().status;
                    if matches!(status, JobStatus::Cancelled | JobStatus::Failed) {
                        return status;
                    }
                }
                Err(error) => debug!(%error, "the job's status is not known at the moment"),
            }
        }
        std::future::pending().await
    }
}

fn standing(document: &JobDocument, step: &StepRef) -> Standing {
    let job = document.job();
    Standing {
        status: job.status.clone(),
        step: document.step(&step.step_id).and_then(|known| known.status),
        template_steps: document.template_steps().max(1),
        terraform_plan: job.terraform_plan.clone(),
        planned: job.terraform_plan.is_some()
            || job
                .tcl
                .as_deref()
                .is_some_and(|tcl| template::was_planned(tcl, document.steps())),
    }
}
