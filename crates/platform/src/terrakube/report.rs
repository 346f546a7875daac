//! Reports the start and the outcome of a step to the platform (contract 5.3, 5.4).
//!
//! A report never changes a job that has ended. So the job is read again before each attempt to change it: an attempt
//! whose answer was lost may have succeeded, and the platform may have started the next step since.

use std::borrow::Cow;
use std::time::Duration;

use job_contract::StepType;
use job_contract::final_statuses::FinalStatuses;
use job_contract::status::{JobStatus, StepStatus};
use tracing::{error, info, warn};

use super::document::{
    JOB_COMMIT_WIDTH, JOB_OUTPUT_WIDTH, JOB_PLAN_WIDTH, JobChange, JobDocument, STEP_NAME_WIDTH,
    STEP_OUTPUT_WIDTH, StepChange,
};
use super::step_view::has_ended;
use super::{Terrakube, TerrakubeError};
use crate::calls::text::{fits, fitting};
use crate::lease::Lease;
use crate::{Outcome, PlanReference, StartReport, StepRef};
use runtime::Deadline;

/// The step starts only after this report or its timeout. So the timeout is short: the report of the outcome has the same
/// content.
const START_REPORT_TIMEOUT: Duration = Duration::from_secs(30);

impl Terrakube {
    /// Reports that the step runs, unless its job or the step itself has ended. A step must not be set back to running:
    /// its outcome would be reported a second time, and would change its job a second time.
    pub async fn report_running(
        &self,
        step: &StepRef,
        commit_id: &str,
        output: &str,
    ) -> Result<StartReport, TerrakubeError> {
        let deadline = Deadline::after(START_REPORT_TIMEOUT);
        let found = self
            .change_job(step, &deadline, |document| {
                may_start(document, step).then(|| JobChange {
                    status: Some(&JobStatus::Running),
                    commit_id: Some(fitting(commit_id, JOB_COMMIT_WIDTH)),
                    ..JobChange::default()
                })
            })
            .await?;
        let status = &found.job().status;
        let rejection =
            *status == JobStatus::Rejected && step.step_type == StepType::Approval.name();
        if !may_start(&found, step) && !rejection {
            return Ok(StartReport::Ended(status.clone()));
        }
        let change = StepChange {
            status: Some(StepStatus::Running),
            output: Some(output).filter(|output| fits(output, STEP_OUTPUT_WIDTH)),
            ..StepChange::default()
        };
        let call = self.step_change(step, change);
        self.0.client.request(&call, &deadline).await?;
        Ok(StartReport::Accepted)
    }

    /// Reports the outcome, unless the hub has given up the run: then the hub reports it.
    pub async fn report_outcome(
        &self,
        step: &StepRef,
        outcome: &Outcome,
        deadline: &Deadline,
    ) -> Result<(), TerrakubeError> {
        let is_lost = self.0.lease.as_ref().is_some_and(Lease::is_lost);
        if !is_lost {
            match self.change_statuses(step, outcome, deadline).await {
                Err(error) if error.lost_lease().is_some() => {}
                told => return told,
            }
        }
        warn!("the hub has given the run up: its statuses are left alone");
        Ok(())
    }

    /// The step before the job, because any change of the job makes the platform look for the next step that is still
    /// pending.
    async fn change_statuses(
        &self,
        step: &StepRef,
        outcome: &Outcome,
        deadline: &Deadline,
    ) -> Result<(), TerrakubeError> {
        let outcome = recordable(outcome);
        let before = self.job(step, deadline).await?;
        let status = &before.job().status;
        if is_waiting(status) {
            info!(%status, "the dispatch is not recorded, or has ended: the job is not changed");
            return Ok(());
        }
        if let Some(change) = step_change(&before, step, &outcome) {
            let call = self.step_change(step, change);
            self.0.client.request(&call, deadline).await?;
        }
        let after = self
            .change_job(step, deadline, |now| {
                awaits_report(&before, now, &step.step_id).then(|| job_change(now, step, &outcome))
            })
            .await?;
        let status = &after.job().status;
        if !is_live(status) {
            info!(%status, "the job is not changed");
        }
        Ok(())
    }

    /// Applies `change` to the job with retries, and returns the job as last read. `change` gets the current job, and
    /// returns `None` if nothing is to be changed.
    async fn change_job<'c>(
        &self,
        step: &StepRef,
        deadline: &Deadline,
        change: impl Fn(&JobDocument) -> Option<JobChange<'c>>,
    ) -> Result<JobDocument, TerrakubeError> {
        let mut retry = self.0.client.retry(deadline);
        loop {
            let now = self.job(step, deadline).await?;
            let Some(change) = change(&now) else {
                return Ok(now);
            };
            let call = self.job_change(step, change);
            match self.0.client.request_once(&call, deadline).await {
                Ok(_) => return Ok(now),
                Err(error) => retry.after(error).await?,
            }
        }
    }
}

/// Whether the platform accepts reports on the job.
const fn is_live(status: &JobStatus) -> bool {
    matches!(status, JobStatus::Queue | JobStatus::Running)
}

/// Whether the step is the one its job waits for.
fn may_start(document: &JobDocument, step: &StepRef) -> bool {
    is_live(&document.job().status) && !has_ended(document, step)
}

/// Whether the job waits until the platform dispatches its next step. No executor runs that step yet.
const fn is_waiting(status: &JobStatus) -> bool {
    matches!(
        status,
        JobStatus::Pending | JobStatus::WaitingApproval | JobStatus::Approved
    )
}

/// Whether the job, first read as `before`, still waits for this step's report. It does not if it has ended, or if an
/// earlier attempt to report has succeeded.
fn awaits_report(before: &JobDocument, now: &JobDocument, step_id: &str) -> bool {
    let (first, status) = (&before.job().status, &now.job().status);
    let moved_on = *first == JobStatus::Running && *status == JobStatus::Queue
        || now.job().output != before.job().output
        || now
            .steps()
            .any(|other| other.id != step_id && other.status == Some(StepStatus::Running));
    is_live(status) && !moved_on
}

/// The change of the step, or `None` if nothing changes. A step that the platform has ended keeps its status, but gets its
/// output.
fn step_change<'o>(
    before: &JobDocument,
    step: &StepRef,
    outcome: &'o Outcome,
) -> Option<StepChange<'o>> {
    let known = before.step(&step.step_id);
    let is_over = has_ended(before, step);
    let rejected = before.job().status == JobStatus::Rejected;
    let output = outcome
        .output
        .as_deref()
        .filter(|output| fits(output, STEP_OUTPUT_WIDTH));
    // Without an output, users see only the step's name.
    let name = outcome.note.as_deref().filter(|_| output.is_none());
    let change = StepChange {
        status: match outcome.statuses.step {
            _ if is_over => None,
            _ if rejected => Some(StepStatus::Failed),
            status => Some(status),
        },
        output: output.filter(|output| {
            !is_over || known.and_then(|step| step.output).as_deref() != Some(*output)
        }),
        name: name
            .filter(|_| !is_over)
            .map(|name| fitting(name, STEP_NAME_WIDTH)),
    };
    let is_empty = change.status.is_none() && change.output.is_none();
    (!is_empty).then_some(change)
}

fn job_change<'o>(now: &JobDocument, step: &StepRef, outcome: &'o Outcome) -> JobChange<'o> {
    let FinalStatuses {
        job, plan_changes, ..
    } = &outcome.statuses;
    let said = match &now.job().output {
        None => String::new(),
        Some(before) => format!("{before} Step {} completed\n", step.step_id),
    };
    JobChange {
        status: Some(job),
        // The platform requires it (contract 5.4).
        plan_changes: Some(*plan_changes || *job == JobStatus::Pending),
        output: Some(said).filter(|said| fits(said, JOB_OUTPUT_WIDTH)),
        terraform_plan: match &outcome.plan {
            PlanReference::Keep => None,
            PlanReference::Set(reference) => Some(reference),
            PlanReference::Clear => Some(""),
        },
        commit_id: outcome
            .commit_id
            .as_deref()
            .map(|commit| fitting(commit, JOB_COMMIT_WIDTH))
            // The commit of a source that was never read is empty.
            .or_else(|| now.job().commit_id.is_none().then_some("")),
    }
}

/// The outcome. If the plan's address is too long for the record, the plan could not be applied, so the step has failed.
fn recordable(outcome: &Outcome) -> Cow<'_, Outcome> {
    match &outcome.plan {
        PlanReference::Set(reference) if !fits(reference, JOB_PLAN_WIDTH) => {
            error!(
                length = reference.chars().count(),
                limit = JOB_PLAN_WIDTH,
                "the address of the stored plan is too long for the platform's record: the step is reported as failed"
            );
            Cow::Owned(Outcome {
                statuses: FinalStatuses {
                    step: StepStatus::Failed,
                    job: JobStatus::Failed,
                    plan_changes: true,
                },
                plan: PlanReference::Clear,
                ..outcome.clone()
            })
        }
        _ => Cow::Borrowed(outcome),
    }
}
