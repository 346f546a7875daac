//! Reports the outcome of a step whose executor did not.

use std::path::Path;
use std::time::Duration;

use job_contract::final_statuses::{Ending, FinalStatuses};
use job_contract::report::{FinalReport, UnreportedStep};
use job_contract::status::{JobStatus, StepStatus};
use job_contract::{JobData, StepType, chain};
use platform::{Outcome, PlanReference, StartPermission, StartReport, StepRef, StepView};
use runtime::Deadline;
use tracing::{info, warn};

use super::output::LogSource;
use super::{PlatformReporter, ReportError, StepState};

/// How long a question to the platform may take. Callers retry.
const QUESTION: Duration = Duration::from_secs(10);
/// How long a report may take. Callers retry.
const REPORT: Duration = Duration::from_mins(1);
/// How long a report that is only on the step is given to reach the job too. An executor reports both one after the
/// other, and so does the executor of the next step.
const SECOND_LOOK: Duration = Duration::from_secs(3);

/// Why a job fails whose plan succeeded.
const LOST_PLAN: &str = "The plan was made, but its executor ended before the platform knew where it is stored: it cannot be \
                         applied. Nothing was changed. Plan again.";
/// Why a job fails whose plan succeeded as far as is known.
const UNREPORTED_PLAN: &str = "The plan ended, and its executor could not report whether it found changes: it cannot be \
                           applied. Nothing was changed. Plan again.";

impl dyn PlatformReporter + '_ {
    /// Returns the statuses of the step and its job. A step that the platform does not know is pending.
    pub async fn step_state(&self, step: &StepRef) -> Result<StepState, ReportError> {
        let view = self.step_view(step).await?;
        Ok(StepState {
            job: view.status,
            step: view.step.unwrap_or(StepStatus::Pending),
        })
    }

    /// Fails the step, unless it has an outcome or its job is over. If only the step has its outcome, the job gets it too.
    /// `container` is the file of what the container printed of the log.
    pub async fn report_failure(
        &self,
        step: &StepRef,
        reason: &str,
        container: Option<&Path>,
    ) -> Result<(), ReportError> {
        if !self.needs_outcome(step, reason, container).await? {
            return Ok(());
        }
        self.fail_step(step, reason, LogSource::Live(container))
            .await
    }

    /// Reports the success that an executor left in its final report, under the conditions of
    /// `report_failure`.
    pub async fn report_success(
        &self,
        step: &StepRef,
        report: &FinalReport,
        sentence: &str,
        container: Option<&Path>,
    ) -> Result<(), ReportError> {
        if !self.is_half_reported_success(step, report).await?
            && !self.needs_outcome(step, sentence, container).await?
        {
            return Ok(());
        }
        self.complete_step(step, report, sentence, LogSource::Live(container))
            .await
    }

    /// Returns whether only the job lacks the success that an executor left in its final report. The report then says more
    /// than [`finish_report`](Self::finish_report) knows: what the step found, and where its plan is.
    async fn is_half_reported_success(
        &self,
        step: &StepRef,
        report: &FinalReport,
    ) -> Result<bool, ReportError> {
        if report.unreported_step.is_none() {
            return Ok(false);
        }
        let view = self.half_reported(step).await?;
        Ok(view.is_some_and(|view| view.step == Some(StepStatus::Completed)))
    }

    /// Gives the job the outcome of its step, if a report was interrupted between the two. The step does not change.
    ///
    /// The outcome of the step is known, but not what it found. After an apply, a destroy and scripts the job continues,
    /// and the platform completes a job of which nothing is left (contract 4.6). After a plan the job fails, unless the
    /// plan was all there was to do: the address of the stored plan was part of the job's report. An approval would lead
    /// to an apply of nothing, which some executors then do unplanned.
    pub async fn finish_report(&self, step: &StepRef) -> Result<(), ReportError> {
        let Some(view) = self.half_reported(step).await? else {
            return Ok(());
        };
        let statuses = statuses_of_job(step, &view);
        warn!(
            job_id = step.job_id,
            step_id = step.step_id,
            job_status = %statuses.job,
            "the report of a step did not reach its job and is finished"
        );
        let loses_its_plan =
            statuses.job == JobStatus::Failed && statuses.step == StepStatus::Completed;
        if loses_its_plan
            && let Err(error) = self
                .write_output(step, LOST_PLAN, LogSource::Live(None))
                .await
        {
            warn_of(step, &error, "the reason of a failure could not be stored");
        }
        // The step has its outcome already, so the report says nothing about it.
        self.send_outcome(step, &outcome(statuses)).await
    }

    /// Reports a step that has nothing to run: first that it runs, then that it is complete (contract 2.9). If the step
    /// has an outcome, nothing is reported again: its job may be at the next step.
    pub async fn complete_empty_step(&self, job: &JobData) -> Result<(), ReportError> {
        let step = StepRef::of(job);
        let view = match self.platform().start_permission(&step).await? {
            StartPermission::Granted(view) => view,
            StartPermission::JobEnded(_) => return self.mark_not_executed(&step),
            StartPermission::StepEnded(_) => return self.finish_report(&step).await,
            StartPermission::NotDispatched(status) => {
                return Err(ReportError::NotDispatched(status));
            }
        };
        let commit_id = job.commit_id.clone();
        let line = "This step has nothing to run.";
        let output = match self.write_output(&step, line, LogSource::Live(None)).await {
            Err(error) if !self.requires_stored_output() => {
                info!(
                    job_id = step.job_id,
                    step_id = step.step_id,
                    error = chain(&error),
                    "a step's output could not be stored"
                );
                None
            }
            output => output?,
        };
        let started = self
            .platform()
            .report_running(
                &step,
                commit_id.as_deref().unwrap_or_default(),
                output.as_deref().unwrap_or_default(),
            )
            .await?;
        if let StartReport::Ended(_) = started {
            return Ok(());
        }
        let statuses = FinalStatuses::of(
            type_of(&step),
            Ending::Success,
            true,
            false,
            view.template_steps,
        );
        let outcome = Outcome {
            output,
            commit_id,
            ..outcome(statuses)
        };
        self.send_outcome(&step, &outcome).await
    }

    /// Fails step and job. The output gets the rest of the log and the reason.
    pub(super) async fn fail_step(
        &self,
        step: &StepRef,
        reason: &str,
        source: LogSource<'_>,
    ) -> Result<(), ReportError> {
        let output = match self.write_output(step, reason, source).await {
            // The platform then shows the reason in the name of the step.
            Err(error) if !self.requires_stored_output() => {
                warn_of(step, &error, "the reason of a failure could not be stored");
                None
            }
            output => output?,
        };
        if let Err(error) = self.write_live_log(step, reason).await {
            let what = "the reason of a failure could not be written into the run's live log";
            warn_of(step, &error, what);
        }
        let statuses = FinalStatuses::of(type_of(step), Ending::NotReached, true, false, 1);
        let outcome = Outcome {
            output,
            note: Some(reason.to_owned()),
            ..outcome(statuses)
        };
        self.send_outcome(step, &outcome).await
    }

    async fn complete_step(
        &self,
        step: &StepRef,
        report: &FinalReport,
        sentence: &str,
        source: LogSource<'_>,
    ) -> Result<(), ReportError> {
        let kind = type_of(step);
        let is_plan = matches!(kind, StepType::Plan | StepType::PlanDestroy);
        let unreported = match &report.unreported_step {
            Some(unreported) => unreported.clone(),
            None if is_plan => return self.fail_step(step, UNREPORTED_PLAN, source).await,
            // Every success of another step is reported like this.
            None => UnreportedStep {
                ending: Ending::Success,
                after_ok: true,
                ignore_error: false,
                plan: None,
            },
        };
        let view = self.step_view(step).await?;
        let statuses = FinalStatuses::of(
            kind,
            unreported.ending,
            unreported.after_ok,
            unreported.ignore_error,
            view.template_steps,
        );
        let plan = match unreported.plan {
            Some(address) if is_plan => PlanReference::Set(address),
            None if is_plan && statuses.job == JobStatus::Pending => {
                return self.fail_step(step, LOST_PLAN, source).await;
            }
            None if is_plan => PlanReference::Clear,
            _ => PlanReference::Keep,
        };
        let outcome = Outcome {
            output: self.write_output(step, sentence, source).await?,
            plan,
            commit_id: report.commit_id.clone(),
            ..outcome(statuses)
        };
        self.send_outcome(step, &outcome).await
    }

    /// Returns whether the step needs its outcome. If it does not, this does what else is missing. If the log has to be
    /// restored then, `reason` follows it.
    async fn needs_outcome(
        &self,
        step: &StepRef,
        reason: &str,
        container: Option<&Path>,
    ) -> Result<bool, ReportError> {
        let state = self.step_state(step).await?;
        if state.has_outcome() {
            let restored = match container {
                Some(container) => self.restore_log(step, container, Some(reason)).await,
                None => Ok(()),
            };
            // The job gets its outcome after the log, and even if the log could not be restored.
            self.finish_report(step).await?;
            restored?;
            return Ok(false);
        }
        if state.job.is_over() {
            self.mark_not_executed(step)?;
            return Ok(false);
        }
        if self.awaits_dispatch(&state) {
            return Err(ReportError::NotDispatched(state.job));
        }
        Ok(true)
    }

    /// Returns what the platform has of a step whose report did not reach its job.
    async fn half_reported(&self, step: &StepRef) -> Result<Option<StepView>, ReportError> {
        if !self.step_view(step).await?.half_reported {
            return Ok(None);
        }
        tokio::time::sleep(SECOND_LOOK).await;
        let view = self.step_view(step).await?;
        Ok(view.half_reported.then_some(view))
    }

    async fn step_view(&self, step: &StepRef) -> Result<StepView, ReportError> {
        let deadline = Deadline::after(QUESTION);
        Ok(self.platform().step_view(step, &deadline).await?)
    }

    async fn send_outcome(&self, step: &StepRef, outcome: &Outcome) -> Result<(), ReportError> {
        let deadline = Deadline::after(REPORT);
        Ok(self
            .platform()
            .report_outcome(step, outcome, &deadline)
            .await?)
    }
}

fn warn_of(step: &StepRef, error: &ReportError, what: &str) {
    let StepRef {
        job_id, step_id, ..
    } = step;
    warn!(job_id, step_id, error = chain(error), "{what}");
}

/// An outcome without anything that is not always known.
const fn outcome(statuses: FinalStatuses) -> Outcome {
    Outcome {
        statuses,
        output: None,
        note: None,
        plan: PlanReference::Keep,
        commit_id: None,
    }
}

/// A step of an unknown type is reported like an approval.
fn type_of(step: &StepRef) -> StepType {
    StepType::parse(&step.step_type).unwrap_or(StepType::Approval)
}

/// Returns the outcome of the job if only the outcome of its step is known.
fn statuses_of_job(step: &StepRef, view: &StepView) -> FinalStatuses {
    let kind = type_of(step);
    let ending = match (view.step, kind) {
        (Some(StepStatus::Completed), StepType::Plan | StepType::PlanDestroy) => Ending::Changes,
        (Some(StepStatus::Completed), _) => Ending::Success,
        _ => Ending::NotReached,
    };
    let statuses = FinalStatuses::of(kind, ending, true, false, view.template_steps);
    if ending == Ending::Changes
        && statuses.job == JobStatus::Pending
        && view.terraform_plan.is_none()
    {
        return FinalStatuses {
            job: JobStatus::Failed,
            ..statuses
        };
    }
    statuses
}
