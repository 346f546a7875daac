//! Reads from the platform whether a step may run, its statuses, and whether it was cancelled.

use std::time::Duration;

use backon::{BackoffBuilder as _, ConstantBuilder};
use job_contract::StepType;
use job_contract::status::{JobStatus, StepStatus};
use tokio::time::{Instant, sleep};
use tracing::{debug, info, warn};

use super::document::JobDocument;
use super::{CALL_TIMEOUT, Terrakube, TerrakubeError, template};
use crate::{StartPermission, StepRef, StepView};
use runtime::Deadline;

/// After so many 404 answers in a row, about a minute and a half, a job counts as removed. A single one may come from a proxy
/// in front of the platform.
const GONE_READS: u32 = 12;
/// How often a job that has no steps is read again.
const STEP_READS: u32 = 5;

impl Terrakube {
    /// The current view of the step.
    pub async fn step_view(
        &self,
        step: &StepRef,
        deadline: &Deadline,
    ) -> Result<StepView, TerrakubeError> {
        let mut looked = 0;
        loop {
            let document = self.job(step, deadline).await?;
            if !self.lacks_steps(&document, step, &mut looked).await? {
                return Ok(step_view(&document, step));
            }
        }
    }

    /// Whether the step may run. The platform records a dispatch only after the launcher has accepted it. In between, it
    /// deletes the log of the previous step. So nothing may be written before that (contract 2.5).
    pub async fn start_permission(
        &self,
        step: &StepRef,
    ) -> Result<StartPermission, TerrakubeError> {
        let (mut asked_since, mut looked) = (None, 0);
        loop {
            let document = self.job(step, &Deadline::after(CALL_TIMEOUT)).await?;
            let status = &document.job().status;
            // The dispatch came late: the job may already run another step.
            if !status.is_over()
                && let Some(outcome) = step_view(&document, step).outcome()
            {
                return Ok(StartPermission::StepEnded(outcome));
            }
            if is_awaited(status) && self.lacks_steps(&document, step, &mut looked).await? {
                continue;
            }
            match status {
                JobStatus::Queue | JobStatus::Running => {
                    return Ok(StartPermission::Granted(step_view(&document, step)));
                }
                // The platform dispatches a rejection's scripts as the rejected approval step.
                JobStatus::Rejected if step.step_type == StepType::Approval.name() => {
                    return Ok(StartPermission::Granted(step_view(&document, step)));
                }
                JobStatus::Rejected => return Ok(StartPermission::JobEnded(status.clone())),
                over if over.is_over() => return Ok(StartPermission::JobEnded(over.clone())),
                _ => {}
            }
            let since = *asked_since.get_or_insert_with(|| {
                info!(%status, "waiting for the platform to record the dispatch");
                Instant::now()
            });
            if since.elapsed() >= self.config().dispatch_wait {
                return Ok(StartPermission::NotDispatched(status.clone()));
            }
            sleep(self.0.pace.dispatch_poll).await;
        }
    }

    /// Whether the document must be read again because it lists no steps yet (contract 5.3). Pauses before it returns
    /// `true`. The statuses of a job depend on the number of its steps, so a document without steps cannot be used.
    async fn lacks_steps(
        &self,
        document: &JobDocument,
        step: &StepRef,
        looked: &mut u32,
    ) -> Result<bool, TerrakubeError> {
        if document.template_steps() > 0 {
            return Ok(false);
        }
        if *looked >= STEP_READS {
            return Err(TerrakubeError::NoSteps {
                job_id: step.job_id.clone(),
            });
        }
        sleep(self.0.pace.first_pause * (*looked + 1)).await;
        *looked += 1;
        Ok(true)
    }

    /// Returns when the job was cancelled, or failed by another client, or when the hub of the lease stops the run.
    pub async fn cancelled(&self, step: &StepRef) -> JobStatus {
        match &self.0.lease {
            Some(lease) => tokio::select! {
                status = self.cancelled_by_platform(step) => status,
                status = lease.stopped() => status,
            },
            None => self.cancelled_by_platform(step).await,
        }
    }

    /// Returns when the hub of the lease has not answered for too long, and for how long it has not. `stopping` is the time that
    /// stopping the run takes. Never returns without a lease.
    pub async fn cut_off(&self, stopping: Duration) -> Duration {
        match &self.0.lease {
            Some(lease) => lease.cut_off(stopping).await,
            None => std::future::pending().await,
        }
    }

    /// Returns when the job was cancelled, or failed by another client. Without a lease, an executor has no other way to
    /// notice it (contract 11.4). A platform that does not answer does not cancel a job. A job that the platform does not
    /// know [`GONE_READS`] times in a row was removed, and counts as cancelled.
    async fn cancelled_by_platform(&self, step: &StepRef) -> JobStatus {
        let mut gone = 0;
        // Pauses of once to twice the time, so that many executors do not send requests at the same moment.
        let pauses = ConstantBuilder::default()
            .with_delay(self.config().status_poll)
            .with_jitter()
            .without_max_times()
            .build();
        for pause in pauses {
            sleep(pause).await;
            match self.job(step, &Deadline::after(CALL_TIMEOUT)).await {
                Ok(document) => {
                    let status = document.into_job().status;
                    if matches!(status, JobStatus::Cancelled | JobStatus::Failed) {
                        return status;
                    }
                    gone = 0;
                }
                Err(TerrakubeError::Gone { .. }) => {
                    gone += 1;
                    if gone >= GONE_READS {
                        warn!(
                            "the platform does not know the job any more, so the run counts as cancelled"
                        );
                        return JobStatus::Cancelled;
                    }
                }
                Err(error) => debug!(%error, "could not read the job's status"),
            }
        }
        std::future::pending().await
    }
}

/// Whether an executor of the job may have to run or report a step.
const fn is_awaited(status: &JobStatus) -> bool {
    matches!(
        status,
        JobStatus::Queue | JobStatus::Running | JobStatus::Rejected
    )
}

/// Whether the step has an outcome, from any reporter.
pub(super) fn has_ended(document: &JobDocument, step: &StepRef) -> bool {
    step_view(document, step).step_has_ended()
}

fn step_view(document: &JobDocument, step: &StepRef) -> StepView {
    let job = document.job();
    StepView {
        status: job.status.clone(),
        step: document.step(&step.step_id).and_then(|known| known.status),
        template_steps: document.template_steps(),
        terraform_plan: job.terraform_plan.clone(),
        planned: job.terraform_plan.is_some()
            || job
                .tcl
                .as_deref()
                .is_some_and(|tcl| template::was_planned(tcl, document.steps())),
        half_reported: is_half_told(document, &step.step_id),
    }
}

/// Whether the step has an outcome that the job lacks. The job's output shows which outcomes it has: the first step's if
/// there is an output, and every other step's by name (contract 5.4). An executor reports a start to the job before the
/// step, so callers check twice.
fn is_half_told(document: &JobDocument, step_id: &str) -> bool {
    let job = document.job();
    let ended = |status: Option<StepStatus>| {
        matches!(status, Some(StepStatus::Completed | StepStatus::Failed))
    };
    let Some(step) = document.step(step_id).filter(|known| ended(known.status)) else {
        return false;
    };
    let is_first = !document
        .steps()
        .any(|other| other.id != step_id && ended(other.status) && other.number < step.number);
    let is_known = job
        .output
        .as_deref()
        .is_some_and(|output| is_first || output.contains(&format!("Step {step_id} completed")));
    let another_runs = document
        .steps()
        .any(|other| other.status == Some(StepStatus::Running));
    job.status == JobStatus::Running && !is_known && !another_runs
}
