//! What the local platform is told by the launcher itself: that a step waits, and what became of one whose
//! executor did not say.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use control_plane::local::{LocalPlatform, StepRecord};
use control_plane::platform::{Outcome, PlanReference};
use control_plane::{Platform, PlatformError, StepRef};
use job_contract::keys::ObjectKey;
use job_contract::settlement::{self, Ending};
use job_contract::status::{JobStatus, StepStatus};
use job_contract::{JobData, StepType};

/// Why a run could not be settled.
#[derive(Debug, thiserror::Error)]
pub(in crate::dispatch) enum SettleError {
    #[error(transparent)]
    Platform(#[from] PlatformError),
    #[error("could not store the step's output `{}`", path.display())]
    Output {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Where a step stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::dispatch) struct Stand {
    pub(in crate::dispatch) job: JobStatus,
    pub(in crate::dispatch) step: StepStatus,
}

impl Stand {
    /// Whether the step has an outcome.
    pub(in crate::dispatch) const fn is_settled(&self) -> bool {
        !matches!(self.step, StepStatus::Pending | StepStatus::Running)
    }
}

/// The local platform, in the launcher's words.
#[derive(Clone, Debug)]
pub(in crate::dispatch) struct Desk {
    pub(in crate::dispatch) platform: LocalPlatform,
    pub(in crate::dispatch) data: PathBuf,
}

impl Desk {
    /// Queues the step as the platform does after a dispatch. A step that has begun, and a job that is
    /// cancelled, rejected or failed, stay as they are.
    pub(in crate::dispatch) fn queue(&self, job: &JobData) -> Result<(), SettleError> {
        self.platform.update_job(&StepRef::of(job), |record| {
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

    /// Where the step stands now. A step nobody has queued is pending.
    pub(in crate::dispatch) fn stand(&self, job: &JobData) -> Result<Stand, SettleError> {
        let record = self.platform.job(&job.job_id)?;
        Ok(record.map_or(
            Stand {
                job: JobStatus::Queue,
                step: StepStatus::Pending,
            },
            |record| Stand {
                step: record
                    .step(&job.step_id)
                    .map_or(StepStatus::Pending, |step| step.status),
                job: record.status,
            },
        ))
    }

    /// Whether an executor has taken the step.
    pub(in crate::dispatch) fn is_claimed(&self, job: &JobData) -> Result<bool, SettleError> {
        Ok(self.platform.claimed_by(&StepRef::of(job))?.is_some())
    }

    /// Ends a step that never ran because its job was over.
    pub(in crate::dispatch) fn skip(&self, job: &JobData) -> Result<(), SettleError> {
        self.platform.update_job(&StepRef::of(job), |record| {
            let status = if record.status == JobStatus::Cancelled {
                StepStatus::Cancelled
            } else {
                StepStatus::NotExecuted
            };
            let step = record.steps.iter_mut().find(|step| step.id == job.step_id);
            if let Some(step) = step {
                step.status = status;
            }
        })?;
        Ok(())
    }

    /// Fails step and job on behalf of an executor that did not. The step's output is what it had printed,
    /// from `log`, and the reason.
    pub(in crate::dispatch) async fn fail(
        &self,
        job: &JobData,
        reason: &str,
        log: &Path,
    ) -> Result<(), SettleError> {
        let output = self.write_output(job, reason, log)?;
        let step = StepRef::of(job);
        let commit_id = self
            .platform
            .job(&job.job_id)?
            .and_then(|record| record.commit_id)
            .unwrap_or_default();
        let outcome = Outcome {
            settlement: settlement::settle(
                job.step_type().unwrap_or(StepType::Approval),
                Ending::NotReached,
                true,
                false,
                1,
            ),
            output: Some(output),
            plan: PlanReference::Keep,
            commit_id,
        };
        let platform = Platform::Local(self.platform.clone());
        Ok(platform.report_outcome(&step, &outcome).await?)
    }

    /// Fails a step that waits on record and will never run.
    pub(in crate::dispatch) async fn refuse(
        &self,
        job: &JobData,
        reason: &str,
    ) -> Result<(), SettleError> {
        let waits = self.platform.job(&job.job_id)?.is_some_and(|record| {
            let step = record.step(&job.step_id).map(|step| step.status);
            !record.status.is_over() && step == Some(StepStatus::Pending)
        });
        if waits {
            let reason = format!("The run was refused: {reason}");
            self.fail(job, &reason, Path::new("")).await?;
        }
        Ok(())
    }

    /// The step of a job on record, with as much of its document as the platform knows.
    pub(in crate::dispatch) fn known(
        &self,
        job_id: &str,
        step_id: &str,
    ) -> Result<Option<JobData>, SettleError> {
        Ok(self.platform.job(job_id)?.map(|record| JobData {
            job_id: job_id.to_owned(),
            step_id: step_id.to_owned(),
            step_type: record.step(step_id).map(|step| step.step_type.clone()),
            organization_id: record.organization_id,
            workspace_id: record.workspace_id,
            ..JobData::default()
        }))
    }

    /// Adds a line to the output of a step whose executor does not write it yet.
    pub(in crate::dispatch) fn note(&self, job: &JobData, line: &str) -> Result<(), SettleError> {
        self.write_output(job, line, Path::new("")).map(drop)
    }

    fn write_output(&self, job: &JobData, reason: &str, log: &Path) -> Result<String, SettleError> {
        let key = ObjectKey::step_output(&job.organization_id, &job.job_id, &job.step_id);
        let path = self.data.join(key.area.local_folder()).join(&key.path);
        let write = || {
            let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
            fs::create_dir_all(folder)?;
            if path.exists() {
                let mut output = OpenOptions::new().append(true).open(&path)?;
                return writeln!(output, "{reason}");
            }
            let mut output = tempfile::NamedTempFile::new_in(folder)?;
            if let Ok(mut log) = File::open(log) {
                io::copy(&mut log, &mut output)?;
            }
            writeln!(output, "{reason}")?;
            output.as_file().sync_all()?;
            output.persist(&path)?;
            Ok(())
        };
        write().map_err(|source| SettleError::Output {
            path: path.clone(),
            source,
        })?;
        Ok(path.display().to_string())
    }
}
