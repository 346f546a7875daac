//! What the platform says about a step: whether it may run, what it needs to know, and whether it is to stop.

use backon::{BackoffBuilder as _, ConstantBuilder};
use job_contract::StepType;
use job_contract::status::{JobStatus, StepStatus};
use tokio::time::{Instant, sleep};
use tracing::{debug, info, warn};

use super::document::JobDocument;
use super::{ORDINARY, Terrakube, TerrakubeError, template};
use crate::{StartPermission, StepRef, StepView};
use runtime::Deadline;

/// So often in a row the platform does not know a job before it counts as removed: about a minute and a half. One such answer
/// may come from a proxy in front of it.
const GONE_READS: u32 = 12;
/// How often a job that has no steps is read again.
const STEP_READS: u32 = 5;

impl Terrakube {
    /// What the platform says about the step now.
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

    /// Whether the step may run. The platform records a dispatch only after it was accepted, and deletes the log of
    /// the step before in between: nothing may be written until then (contract 2.5).
    pub async fn start_permission(
        &self,
        step: &StepRef,
    ) -> Result<StartPermission, TerrakubeError> {
        let (mut asked_since, mut looked) = (None, 0);
        loop {
            let document = self.job(step, &Deadline::after(ORDINARY)).await?;
            let status = &document.job().status;
            // A dispatch that came late: the job may already be at another step.
            if !status.is_over()
                && let Some(outcome) = step_view(&document, step).outcome()
            {
                return Ok(StartPermission::Settled(outcome));
            }
            if is_awaited(status) && self.lacks_steps(&document, step, &mut looked).await? {
                continue;
            }
            match status {
                JobStatus::Queue | JobStatus::Running => {
                    return Ok(StartPermission::Granted(step_view(&document, step)));
                }
                // The scripts of a rejection arrive as the approval step that was rejected.
                JobStatus::Rejected if step.step_type == StepType::Approval.name() => {
                    return Ok(StartPermission::Granted(step_view(&document, step)));
                }
                JobStatus::Rejected => return Ok(StartPermission::Over(status.clone())),
                over if over.is_over() => return Ok(StartPermission::Over(over.clone())),
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

    /// Whether the document has to be read again, after a pause, because the platform has not told the job's steps yet
    /// (contract 5.3). What becomes of a job depends on how many they are: none at all is no answer.
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

    /// Returns once the job was cancelled, or failed by another client, or once a hub says so of the step.
    pub async fn cancelled(&self, step: &StepRef) -> JobStatus {
        match &self.0.lease {
            Some(lease) => tokio::select! {
                status = self.cancelled_by_platform(step) => status,
                status = lease.stopped() => status,
            },
            None => self.cancelled_by_platform(step).await,
        }
    }

    /// Returns once the job was cancelled, or failed by another client: nothing else of the platform tells an executor
    /// (contract 11.4). A platform that does not answer has cancelled nothing. One that has not known the job for
    /// [`GONE_READS`] times has removed it, which ends it as well.
    async fn cancelled_by_platform(&self, step: &StepRef) -> JobStatus {
        let mut gone = 0;
        // Pauses of once to twice the time, so that many executors do not ask at the same moment.
        let pauses = ConstantBuilder::default()
            .with_delay(self.config().status_poll)
            .with_jitter()
            .without_max_times()
            .build();
        for pause in pauses {
            sleep(pause).await;
            match self.job(step, &Deadline::after(ORDINARY)).await {
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
                        warn!("the platform does not know the job any more");
                        return JobStatus::Cancelled;
                    }
                }
                Err(error) => debug!(%error, "the job's status is not known at the moment"),
            }
        }
        std::future::pending().await
    }
}

/// Whether an executor of the job has something to do, or to tell.
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

/// A job's output tells which steps it has heard of: the first one by being there, each other by name (contract 5.4). An
/// executor tells the job of its start before the step, so that whoever acts on this looks twice.
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
