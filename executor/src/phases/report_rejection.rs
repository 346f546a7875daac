//! Reports a run that could not be opened, if possible.
//!
//! It works without a run context, because that could not be created.

use job_contract::final_statuses::{Ending, FinalStatuses};
use job_contract::report::FinalReport;
use job_contract::{Exit, JobData, StepType};
use platform::{Outcome, PlanReference, StartPermission, StepRef};
use tracing::error;

use crate::config::Config;
use crate::connections::Connections;
use crate::error::StepError;
use crate::final_report::{FinishedRun, identify};
use crate::phases::claim_step::claim_to_report;
use crate::step_result::StepResult;
use crate::stop::{Budget, Stop};

/// Ends a run whose failure cannot be reported.
pub(crate) fn end_unreported(job: &JobData, failure: &StepError) -> FinishedRun {
    let result = StepResult::failed(failure);
    log_rejection(&result);
    finish(job, result, false)
}

/// Ends a run that could not be opened. It reports the run if the document identifies the step.
pub(crate) async fn reject_run(
    config: &Config,
    connections: &Connections,
    job: &JobData,
    failure: &StepError,
    stop: &Stop,
) -> FinishedRun {
    let result = StepResult::failed(failure);
    let is_tried_again = result.exit == Exit::Infrastructure && config.run.outcome_exit_code;
    if !is_addressable(job) || config.run.disable_acknowledge || is_tried_again {
        return end_unreported(job, failure);
    }
    log_rejection(&result);
    match report_rejection(config, connections, job, result.error.clone(), stop).await {
        Ok(None) => finish(job, result, true),
        Ok(Some(not_run)) => finish(job, not_run, false),
        Err(error) => {
            error!(%error, "the failure could not be reported");
            finish(job, result, false)
        }
    }
}

/// Waits until the platform accepts a report: the dispatch must be recorded, and the job must not be over. Returns
/// `Some` if another executor reports the step.
async fn report_rejection(
    config: &Config,
    connections: &Connections,
    job: &JobData,
    note: Option<String>,
    stop: &Stop,
) -> Result<Option<StepResult>, StepError> {
    let rejected = &StepRef::of(job);
    let permission = tokio::select! {
        permission = connections.platform.start_permission(rejected) => permission?,
        _ = stop.ordered() => return Err(StepError::stopped()),
    };
    if !matches!(permission, StartPermission::Granted(_)) {
        return Ok(None);
    }
    if let Some(not_run) = claim_to_report(&connections.platform, config, job).await? {
        return Ok(Some(not_run));
    }
    let outcome = Outcome {
        statuses: FinalStatuses::of(StepType::Approval, Ending::NotReached, true, false, 1),
        output: None,
        note,
        plan: PlanReference::Keep,
        commit_id: Some(String::new()),
    };
    let budget = Budget::of(Budget::default_grace(StepType::Approval));
    let deadline = connections.deadline(stop, budget.report);
    connections
        .platform
        .report_outcome(rejected, &outcome, &deadline)
        .await?;
    Ok(None)
}

fn log_rejection(result: &StepResult) {
    error!(
        error = result.error,
        hint = result.hint,
        "the step cannot run"
    );
}

fn finish(job: &JobData, result: StepResult, reported: bool) -> FinishedRun {
    let report = FinalReport {
        outcome: result.exit.code(),
        unreported: !reported,
        error: result.error,
        hint: result.hint,
        ..identify(job)
    };
    FinishedRun { report, reported }
}

/// Whether an unusable document at least identifies the step.
fn is_addressable(job: &JobData) -> bool {
    let plain = JobData {
        step_type: Some(StepType::Approval.name().to_owned()),
        ..job.clone()
    };
    plain.validate().is_ok()
}
