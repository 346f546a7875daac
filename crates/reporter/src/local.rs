//! Reports to the records on this machine.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use artifact_store::Store;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use job_contract::status::{JobStatus, StepStatus};
use job_contract::{JobData, chain};
use platform::local::{LocalPlatform, StepRecord};
use platform::{Platform, StepRef};
use tokio_util::task::TaskTracker;
use tracing::warn;

use super::output::LogSource;
use super::output_store::OutputStore;
use super::{LOG_PATIENCE, PlatformReporter, ReportError, StepState, rejection_text};
use crate::dispatch::{Acceptance, DispatchError, ResponseSent};

/// Reports to the records and the artifact store of a data directory.
#[derive(Debug)]
pub struct LocalReporter {
    records: LocalPlatform,
    platform: Platform,
    outputs: OutputStore,
}

impl LocalReporter {
    pub fn new(data_dir: &Path) -> Self {
        let records = LocalPlatform::new(data_dir);
        Self {
            platform: Platform::Local(records.clone()),
            records,
            outputs: OutputStore::new(Store::local(data_dir)),
        }
    }

    /// Fails the step if its job waits on record.
    async fn record_rejection(&self, job: &JobData, reason: &str) -> Result<(), ReportError> {
        let waits = self.records.job(&job.job_id)?.is_some_and(|record| {
            let step = record.step(&job.step_id).map(|step| step.status);
            !record.status.is_over() && step == Some(StepStatus::Pending)
        });
        if waits {
            let reporter: &dyn PlatformReporter = self;
            let (step, reason) = (StepRef::of(job), rejection_text(reason));
            reporter
                .fail_step(&step, &reason, LogSource::Live(None))
                .await?;
        }
        Ok(())
    }

    /// Returns the records.
    pub const fn records(&self) -> &LocalPlatform {
        &self.records
    }
}

impl PlatformReporter for LocalReporter {
    fn platform(&self) -> &Platform {
        &self.platform
    }

    fn outputs(&self) -> Option<&OutputStore> {
        Some(&self.outputs)
    }

    fn report_patience(&self) -> Duration {
        // The records do not expect heartbeats.
        Duration::ZERO
    }

    fn log_patience(&self) -> Duration {
        LOG_PATIENCE
    }

    fn completes_empty_steps(&self) -> bool {
        false
    }

    fn requires_stored_output(&self) -> bool {
        true
    }

    fn mark_queued(&self, job: &JobData) -> Result<(), ReportError> {
        self.records.update_job(&StepRef::of(job), |record| {
            match record.step(&job.step_id) {
                Some(step) if step.status != StepStatus::Pending => return,
                Some(_) => {}
                None => record.steps.push(StepRecord::pending(
                    &job.step_id,
                    job.step_type.as_deref().unwrap_or_default(),
                )),
            }
            if !matches!(
                record.status,
                JobStatus::Cancelled | JobStatus::Rejected | JobStatus::Failed
            ) {
                record.status = JobStatus::Queue;
            }
        })?;
        Ok(())
    }

    fn mark_not_executed(&self, step: &StepRef) -> Result<(), ReportError> {
        self.records.update_job(step, |record| {
            let status = if record.status == JobStatus::Cancelled {
                StepStatus::Cancelled
            } else {
                StepStatus::NotExecuted
            };
            let known = record
                .steps
                .iter_mut()
                .find(|known| known.id == step.step_id);
            if let Some(known) = known
                && matches!(known.status, StepStatus::Pending | StepStatus::Running)
            {
                known.status = status;
            }
        })?;
        Ok(())
    }

    fn recorded_state(&self, step: &StepRef) -> Result<Option<StepState>, ReportError> {
        Ok(self.records.job(&step.job_id)?.map(|record| StepState {
            step: record
                .step(&step.step_id)
                .map_or(StepStatus::Pending, |known| known.status),
            job: record.status,
        }))
    }

    fn find_step(&self, step: StepRef) -> Result<Option<StepRef>, ReportError> {
        Ok(self.records.job(&step.job_id)?.map(|record| StepRef {
            step_type: record
                .step(&step.step_id)
                .map(|known| known.step_type.clone())
                .unwrap_or_default(),
            organization_id: record.organization_id,
            workspace_id: record.workspace_id,
            ..step
        }))
    }

    fn add_log_line<'a>(
        &'a self,
        step: &'a StepRef,
        line: &'a str,
    ) -> BoxFuture<'a, Result<(), ReportError>> {
        async move {
            let reporter: &dyn PlatformReporter = self;
            if reporter.step_state(step).await?.has_outcome() {
                return Ok(());
            }
            reporter
                .write_output(step, line, LogSource::Live(None))
                .await
                .map(drop)
        }
        .boxed()
    }

    fn reject(
        self: Arc<Self>,
        job: JobData,
        reason: String,
        _response_sent: ResponseSent,
        _tasks: &TaskTracker,
    ) -> BoxFuture<'static, Result<Acceptance, DispatchError>> {
        async move {
            if let Err(error) = self.record_rejection(&job, &reason).await {
                warn!(
                    error = chain(&error),
                    job_id = job.job_id,
                    step_id = job.step_id,
                    "the reason of a refusal could not be recorded"
                );
            }
            // The sender shows the reason.
            Err(DispatchError::Invalid(reason))
        }
        .boxed()
    }
}
