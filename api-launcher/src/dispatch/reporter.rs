//! What the platform is told by the launcher itself: that a step waits and why, that its job is alive, and what became
//! of one whose executor did not say.
//!
//! Only the platform's own records are needed for that. Where there is a store, reasons reach the step's output; where
//! there is Redis, they reach the live log too, and the job has a heartbeat.

mod step_output;

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use artifact_store::{Store, StoreError};
use job_contract::keys::ObjectKey;
use job_contract::report::{FinalReport, Untold};
use job_contract::settlement::{self, Ending, Settlement};
use job_contract::status::{JobStatus, StepStatus};
use job_contract::{JobData, StepType, chain};
use platform::heartbeat::{self, Beat, HeartbeatError, Heartbeats, Sign};
#[cfg(test)]
use platform::local::JobRecord;
use platform::local::{LocalPlatform, StepRecord};
use platform::redis::{Redis, RedisError};
use platform::sinks::JobStream;
use platform::terrakube::Terrakube;
use platform::{Outcome, PlanReference, Start, StartPermission, StepView};
use platform::{Platform, PlatformError, StepRef};
use runtime::Deadline;
use tokio::sync::Semaphore;
use tracing::{debug, info, warn};

use crate::cluster::SaveError;
use crate::cluster::watch::Heartbeat;

/// How long the platform is asked where a step stands. Whoever asks asks again.
const QUESTION: Duration = Duration::from_secs(10);
/// How long one report is tried. Whoever reports reports again.
const REPORT: Duration = Duration::from_mins(1);
/// How long a report that looks half told is given to become whole: its executor may be between its halves, and the next
/// step's between telling of its job and of itself.
const SECOND_LOOK: Duration = Duration::from_secs(3);
/// So much of a live log becomes part of a step's output that its executor could not store.
const SALVAGED_BYTES: usize = 16 * 1024 * 1024;

/// Longer than any run may take.
const ANY_TIME: Duration = Duration::from_hours(365 * 24);

/// So many outputs are put together at a time.
const DRAFTS: usize = 2;
/// How long a verdict waits at most for the log of a container that is not to be had at the moment.
const LOG_PATIENCE: Duration = Duration::from_mins(2);

/// Why a job fails whose plan was good.
const LOST_PLAN: &str = "The plan was made, and whoever made it ended before the platform knew where it is: it cannot be \
                         applied. Nothing was changed. Plan again.";
/// Why a job fails whose plan ended well, for all that is known.
const UNTOLD_PLAN: &str = "The plan ended, and its executor could neither tell the platform nor leave word whether it found \
                           changes: it cannot be applied. Nothing was changed. Plan again.";

/// Why something could not be said for a run.
#[derive(Debug, thiserror::Error)]
pub(in crate::dispatch) enum ReportError {
    #[error(transparent)]
    Platform(#[from] PlatformError),
    #[error("could not store the step's output")]
    Output(#[from] StoreError),
    #[error("could not put the step's output together")]
    Draft(#[source] io::Error),
    #[error("could not write into the run's live log")]
    Log(#[from] RedisError),
    #[error("could not recover the log of the run")]
    Container(#[source] SaveError),
    /// It will, or it takes the dispatch back; until then the job is not to be touched (contract 2.5).
    #[error("the platform has not recorded the dispatch yet, its job is `{0}`")]
    NotDispatched(JobStatus),
}

impl ReportError {
    /// Whether the platform will not be told, however often it is tried.
    pub(in crate::dispatch) fn is_final(&self) -> bool {
        matches!(self, Self::Platform(PlatformError::Terrakube(error)) if error.is_final())
    }
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
        has_outcome(self.step)
    }
}

/// Where what a step's executor printed last is to be had.
#[derive(Clone, Copy, Debug)]
enum Latest<'p> {
    /// In its output already.
    Stored,
    /// In a file.
    File(&'p Path),
    /// Where the platform shows it, and in what its container printed.
    Live(Option<&'p Path>),
}

/// Whether nothing more is to be said of a step.
const fn has_outcome(step: StepStatus) -> bool {
    !matches!(step, StepStatus::Pending | StepStatus::Running)
}

/// The platform, in the launcher's words.
#[derive(Clone, Debug)]
pub(crate) struct PlatformReporter {
    platform: Platform,
    outputs: Option<Store>,
    redis: Option<Redis>,
    heartbeats: Option<Arc<Heartbeats>>,
    turns: Arc<Turns>,
    /// Outputs are put together on disk, and any of them may be large.
    drafts: Arc<Semaphore>,
}

/// Outputs are read, added to and written back: of two who do that to one of them, the second has to wait, or a reason
/// for waiting takes the place of a verdict. Steps share a few turns.
#[derive(Debug, Default)]
struct Turns([tokio::sync::Mutex<()>; 16]);

impl Turns {
    async fn of(&self, step_id: &str) -> tokio::sync::MutexGuard<'_, ()> {
        let mut hasher = DefaultHasher::new();
        step_id.hash(&mut hasher);
        let turn = usize::try_from(hasher.finish() % 16).unwrap_or_default();
        self.0[turn].lock().await
    }
}

impl PlatformReporter {
    /// The platform and the store in a data directory.
    pub(crate) fn local(data_dir: &Path) -> Self {
        Self {
            platform: Platform::Local(LocalPlatform::new(data_dir)),
            outputs: Some(Store::local(data_dir)),
            redis: None,
            heartbeats: None,
            turns: Arc::default(),
            drafts: Arc::new(Semaphore::new(DRAFTS)),
        }
    }

    /// Terrakube, with as much around it as there is.
    pub(crate) fn terrakube(
        terrakube: Terrakube,
        outputs: Option<Store>,
        redis: Option<Redis>,
    ) -> Result<Self, HeartbeatError> {
        let heartbeats = redis.as_ref().map(Heartbeats::start).transpose()?;
        Ok(Self {
            platform: Platform::Terrakube(terrakube),
            outputs,
            redis,
            heartbeats: heartbeats.map(Arc::new),
            turns: Arc::default(),
            drafts: Arc::new(Semaphore::new(DRAFTS)),
        })
    }

    /// Whether jobs can be kept alive at all.
    pub(in crate::dispatch) const fn has_heartbeats(&self) -> bool {
        self.heartbeats.is_some()
    }

    /// Keeps a job that has no executor alive in the platform's eyes as long as the value lives; `None` where nobody looks.
    pub(in crate::dispatch) fn beat(&self, job_id: &str) -> Option<Beat> {
        self.heartbeats
            .as_ref()
            .map(|heartbeats| heartbeats.beat(job_id))
    }

    /// The same until the job's executor does it itself, and for that time at most. `None`: however long it takes.
    pub(in crate::dispatch) fn beat_until_taken_over(
        &self,
        job_id: &str,
        within: Option<Duration>,
    ) -> Option<Beat> {
        let within = within.unwrap_or(ANY_TIME);
        self.heartbeats
            .as_ref()
            .map(|heartbeats| heartbeats.beat_until_taken_over(job_id, within))
    }

    /// Whether the executor of a job shows signs of life.
    pub(in crate::dispatch) async fn listen(&self, job_id: &str) -> Heartbeat {
        let Some(redis) = &self.redis else {
            return Heartbeat::Unknown;
        };
        match heartbeat::sign_of(redis, job_id).await {
            Ok(Sign::Executor) => Heartbeat::Present,
            Ok(Sign::Nobody) => Heartbeat::Missing,
            // A launcher beats only while the executor may not have begun to.
            Ok(Sign::Launcher) => Heartbeat::Unknown,
            Err(error) => {
                debug!(
                    job_id,
                    error = chain(&error),
                    "whether its executor lives is not known"
                );
                Heartbeat::Unknown
            }
        }
    }

    /// How long after the end of a run its job is kept alive while the platform does not take the report: after that it
    /// must be free to end the job itself.
    pub(in crate::dispatch) fn report_patience(&self) -> Duration {
        match &self.platform {
            Platform::Terrakube(terrakube) => terrakube.config().report_patience,
            // Nobody looks for signs of life there.
            Platform::Local(_) => Duration::ZERO,
        }
    }

    /// How long after the end of a run the log of its container is asked for before the report goes without it; time is
    /// left for the report itself.
    pub(in crate::dispatch) fn log_patience(&self) -> Duration {
        match &self.platform {
            Platform::Terrakube(_) => LOG_PATIENCE.min(self.report_patience() / 2),
            Platform::Local(_) => LOG_PATIENCE,
        }
    }

    /// Whether the platform queues steps itself, and fails what it is refused without a reason.
    pub(in crate::dispatch) const fn is_remote(&self) -> bool {
        matches!(self.platform, Platform::Terrakube(_))
    }

    /// Queues the step as the platform does after a dispatch; Terrakube does it itself. A step that has begun, and a
    /// job that is cancelled, rejected or failed, stay as they are.
    pub(in crate::dispatch) fn queue(&self, job: &JobData) -> Result<(), ReportError> {
        let Platform::Local(local) = &self.platform else {
            return Ok(());
        };
        local.update_job(&StepRef::of(job), |record| {
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

    /// Where the step stands now. A step the platform does not know is pending.
    pub(in crate::dispatch) async fn stand(&self, step: &StepRef) -> Result<Stand, ReportError> {
        let deadline = Deadline::after(QUESTION);
        let view = self.platform.step_view(step, &deadline).await?;
        Ok(Stand {
            job: view.status,
            step: view.step.unwrap_or(StepStatus::Pending),
        })
    }

    /// Where the step stands in the records of this machine. A platform elsewhere is not asked while it waits for the
    /// answer to its dispatch.
    pub(in crate::dispatch) fn on_record(
        &self,
        step: &StepRef,
    ) -> Result<Option<Stand>, ReportError> {
        let Platform::Local(local) = &self.platform else {
            return Ok(None);
        };
        Ok(local.job(&step.job_id)?.map(|record| Stand {
            step: record
                .step(&step.step_id)
                .map_or(StepStatus::Pending, |known| known.status),
            job: record.status,
        }))
    }

    /// Whether an executor has taken the step.
    pub(in crate::dispatch) async fn is_claimed(
        &self,
        step: &StepRef,
    ) -> Result<bool, ReportError> {
        match &self.platform {
            Platform::Local(local) => Ok(local.claimed_by(step)?.is_some()),
            // It reports that it runs as soon as it has taken it.
            Platform::Terrakube(_) => Ok(self.stand(step).await?.step != StepStatus::Pending),
        }
    }

    /// Ends a step that never ran because its job was over; Terrakube does it itself.
    pub(in crate::dispatch) fn skip(&self, step: &StepRef) -> Result<(), ReportError> {
        let Platform::Local(local) = &self.platform else {
            return Ok(());
        };
        local.update_job(step, |record| {
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

    /// The step of a run as far as the platform knows it; `None` for a job it has no record of.
    pub(in crate::dispatch) fn known(&self, step: StepRef) -> Result<Option<StepRef>, ReportError> {
        let Platform::Local(local) = &self.platform else {
            return Ok(Some(step));
        };
        Ok(local.job(&step.job_id)?.map(|record| StepRef {
            step_type: record
                .step(&step.step_id)
                .map(|known| known.step_type.clone())
                .unwrap_or_default(),
            organization_id: record.organization_id,
            workspace_id: record.workspace_id,
            ..step
        }))
    }

    /// Whether the platform has still to record the dispatch, or has taken it back.
    pub(in crate::dispatch) const fn awaits_dispatch(&self, stand: &Stand) -> bool {
        self.is_remote() && !stand.job.is_over() && !is_dispatched(&stand.job)
    }

    /// Speaks for an executor that did not: fails the step, unless it has an outcome or its job is over. Of a step with
    /// an outcome the job is told, where it was not. `container` is what its container printed of the step's log, where
    /// it is to be had and may be more than has arrived.
    pub(in crate::dispatch) async fn settle(
        &self,
        step: &StepRef,
        reason: &str,
        container: Option<&Path>,
    ) -> Result<(), ReportError> {
        if !self.is_open(step, reason, container).await? {
            return Ok(());
        }
        self.fail_with(step, reason, Latest::Live(container)).await
    }

    /// Reports a step that was done and whose executor could not say so, by what it left in its report; otherwise as
    /// [`PlatformReporter::settle`].
    pub(in crate::dispatch) async fn vouch(
        &self,
        step: &StepRef,
        report: &FinalReport,
        sentence: &str,
        container: Option<&Path>,
    ) -> Result<(), ReportError> {
        if !self.is_open(step, sentence, container).await? {
            return Ok(());
        }
        self.vouch_with(step, report, sentence, Latest::Live(container))
            .await
    }

    /// As [`PlatformReporter::vouch`] of a step that waits for its outcome, and whose log is a file.
    pub(in crate::dispatch) async fn vouch_with_log(
        &self,
        step: &StepRef,
        report: &FinalReport,
        sentence: &str,
        log: &Path,
    ) -> Result<(), ReportError> {
        self.vouch_with(step, report, sentence, Latest::File(log))
            .await
    }

    async fn vouch_with(
        &self,
        step: &StepRef,
        report: &FinalReport,
        sentence: &str,
        latest: Latest<'_>,
    ) -> Result<(), ReportError> {
        let kind = StepType::parse(&step.step_type).unwrap_or(StepType::Approval);
        let is_plan = matches!(kind, StepType::Plan | StepType::PlanDestroy);
        let untold = match &report.untold {
            Some(untold) => untold.clone(),
            None if is_plan => return self.fail_with(step, UNTOLD_PLAN, latest).await,
            // Whatever an executor calls done is told in one way of these.
            None => Untold {
                ending: Ending::Success,
                after_ok: true,
                ignore_error: false,
                plan: None,
            },
        };
        let deadline = Deadline::after(QUESTION);
        let view = self.platform.step_view(step, &deadline).await?;
        let settlement = settlement::settle(
            kind,
            untold.ending,
            untold.after_ok,
            untold.ignore_error,
            view.template_steps,
        );
        let plan = match untold.plan {
            Some(place) if is_plan => PlanReference::Set(place),
            None if is_plan && settlement.job == JobStatus::Pending => {
                return self.fail_with(step, LOST_PLAN, latest).await;
            }
            None if is_plan => PlanReference::Clear,
            _ => PlanReference::Keep,
        };
        let output = self.write_output(step, sentence, latest).await?;
        let outcome = Outcome {
            settlement,
            output,
            note: None,
            plan,
            commit_id: report.commit_id.clone(),
        };
        let deadline = Deadline::after(REPORT);
        Ok(self
            .platform
            .report_outcome(step, &outcome, &deadline)
            .await?)
    }

    /// Whether the step waits for its outcome. What else there is to do for one that does not is done; `reason` stands
    /// behind its log then, should that have to be put in place.
    async fn is_open(
        &self,
        step: &StepRef,
        reason: &str,
        container: Option<&Path>,
    ) -> Result<bool, ReportError> {
        let stand = self.stand(step).await?;
        if stand.is_settled() {
            let restored = match container {
                Some(container) => self.restore_log(step, container, Some(reason)).await,
                None => Ok(()),
            };
            // Behind the log, and said whatever became of that.
            self.finish(step).await?;
            restored?;
            return Ok(false);
        }
        if stand.job.is_over() {
            self.skip(step)?;
            return Ok(false);
        }
        if self.awaits_dispatch(&stand) {
            return Err(ReportError::NotDispatched(stand.job));
        }
        Ok(true)
    }

    /// Puts what a container printed in the place of the part of the step's output that is missing some of it, and the
    /// line behind it.
    pub(in crate::dispatch) async fn restore_log(
        &self,
        step: &StepRef,
        container: &Path,
        line: Option<&str>,
    ) -> Result<(), ReportError> {
        let (container, line) = (container.to_owned(), line.map(str::to_owned));
        let change = move |output: &Path| step_output::restore(output, &container, line.as_deref());
        self.change_output(step, change).await.map(drop)
    }

    /// Adds a line to the output of a step that has its outcome.
    pub(in crate::dispatch) async fn append(
        &self,
        step: &StepRef,
        line: &str,
    ) -> Result<(), ReportError> {
        self.write_output(step, line, Latest::Stored)
            .await
            .map(drop)
    }

    /// Fails step and job on behalf of an executor that did not. The step's output is what it had printed, from `log`, and
    /// the reason.
    pub(in crate::dispatch) async fn fail(
        &self,
        step: &StepRef,
        reason: &str,
        log: &Path,
    ) -> Result<(), ReportError> {
        self.fail_with(step, reason, Latest::File(log)).await
    }

    async fn fail_with(
        &self,
        step: &StepRef,
        reason: &str,
        latest: Latest<'_>,
    ) -> Result<(), ReportError> {
        let output = match self.write_output(step, reason, latest).await {
            // The reason is the step's name then.
            Err(error) if self.is_remote() => {
                warn!(
                    job_id = step.job_id,
                    step_id = step.step_id,
                    error = chain(&error),
                    "the reason of a failure could not be stored"
                );
                None
            }
            output => output?,
        };
        if let Err(error) = self.remark(step, reason).await {
            warn!(
                job_id = step.job_id,
                step_id = step.step_id,
                error = chain(&error),
                "the reason of a failure could not be written into the run's live log"
            );
        }
        let settlement = settlement::settle(
            StepType::parse(&step.step_type).unwrap_or(StepType::Approval),
            Ending::NotReached,
            true,
            false,
            1,
        );
        self.report(step, settlement, output, Some(reason.to_owned()), None)
            .await
    }

    /// Fails a step that will never run. With Terrakube it has been accepted, so that the platform shows the reason; a
    /// local one must still wait on record.
    pub(in crate::dispatch) async fn refuse(
        &self,
        job: &JobData,
        reason: &str,
    ) -> Result<(), ReportError> {
        let step = StepRef::of(job);
        let reason = format!("The run was refused: {reason}");
        match &self.platform {
            Platform::Local(local) => {
                let waits = local.job(&job.job_id)?.is_some_and(|record| {
                    let step = record.step(&job.step_id).map(|step| step.status);
                    !record.status.is_over() && step == Some(StepStatus::Pending)
                });
                if waits {
                    self.fail_with(&step, &reason, Latest::Live(None)).await?;
                }
                Ok(())
            }
            Platform::Terrakube(_) => match self.platform.start_permission(&step).await? {
                // An earlier delivery was accepted, and runs.
                StartPermission::Granted(view) if view.step == Some(StepStatus::Running) => Ok(()),
                StartPermission::Granted(_) => self.settle(&step, &reason, None).await,
                StartPermission::Over(_) | StartPermission::Settled(_) => Ok(()),
                StartPermission::NotDispatched(status) => Err(ReportError::NotDispatched(status)),
            },
        }
    }

    /// Tells the job of a step that has an outcome, where a report was interrupted between the two; the step is not
    /// touched again.
    ///
    /// How the step ended is known, and not what it found. An apply, a destroy and scripts are followed by whatever
    /// comes next, and the platform completes a job of which nothing is left (contract 4.6). A plan is another matter: the
    /// address of what it stored went with the job's half, and an approval would lead to an apply of nothing, which
    /// some executors then do unplanned. So its job fails, unless the plan was all there was to do.
    pub(in crate::dispatch) async fn finish(&self, step: &StepRef) -> Result<(), ReportError> {
        let deadline = Deadline::after(QUESTION);
        if !self
            .platform
            .step_view(step, &deadline)
            .await?
            .half_reported
        {
            return Ok(());
        }
        tokio::time::sleep(SECOND_LOOK).await;
        let deadline = Deadline::after(QUESTION);
        let view = self.platform.step_view(step, &deadline).await?;
        if !view.half_reported {
            return Ok(());
        }
        let settlement = half_settled(step, &view);
        warn!(
            job_id = step.job_id,
            step_id = step.step_id,
            job_status = %settlement.job,
            "the report of a step did not reach its job and is finished"
        );
        let loses_its_plan =
            settlement.job == JobStatus::Failed && settlement.step == StepStatus::Completed;
        if loses_its_plan
            && let Err(error) = self.write_output(step, LOST_PLAN, Latest::Live(None)).await
        {
            warn!(
                job_id = step.job_id,
                step_id = step.step_id,
                error = chain(&error),
                "the reason of a failure could not be stored"
            );
        }
        // Nothing about the step: it is settled.
        self.report(step, settlement, None, None, None).await
    }

    /// Reports a step that has nothing to run: that it runs, and that it is done (contract 2.9). Of one that has an
    /// outcome nothing is said again, since its job may be at the next step by now.
    pub(in crate::dispatch) async fn complete(&self, job: &JobData) -> Result<(), ReportError> {
        let step = StepRef::of(job);
        let view = match self.platform.start_permission(&step).await? {
            StartPermission::Granted(view) => view,
            StartPermission::Over(_) => return self.skip(&step),
            StartPermission::Settled(_) => return self.finish(&step).await,
            StartPermission::NotDispatched(status) => {
                return Err(ReportError::NotDispatched(status));
            }
        };
        let commit_id = job.commit_id.clone();
        let output = match self
            .write_output(&step, "This step has nothing to run.", Latest::Live(None))
            .await
        {
            Err(error) if self.is_remote() => {
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
        let place = output.clone().unwrap_or_default();
        let started = self
            .platform
            .report_running(&step, commit_id.as_deref().unwrap_or_default(), &place)
            .await?;
        if let Start::Over(_) = started {
            return Ok(());
        }
        let settlement = settlement::settle(
            StepType::parse(&step.step_type).unwrap_or(StepType::Approval),
            Ending::Success,
            true,
            false,
            view.template_steps,
        );
        self.report(&step, settlement, output, None, commit_id)
            .await
    }

    /// Writes why a run waits into its log, unless its step has an outcome.
    pub(in crate::dispatch) async fn note(
        &self,
        step: &StepRef,
        line: &str,
    ) -> Result<(), ReportError> {
        match &self.platform {
            Platform::Local(_) => {
                if self.stand(step).await?.is_settled() {
                    return Ok(());
                }
                self.write_output(step, line, Latest::Live(None))
                    .await
                    .map(drop)
            }
            // Deletes the live log when it records the dispatch, so that nothing may stand there before.
            Platform::Terrakube(_) if self.redis.is_some() => {
                match self.platform.start_permission(step).await? {
                    StartPermission::Granted(_) => self.remark(step, line).await,
                    StartPermission::Over(_) | StartPermission::Settled(_) => Ok(()),
                    StartPermission::NotDispatched(status) => {
                        Err(ReportError::NotDispatched(status))
                    }
                }
            }
            Platform::Terrakube(_) => Ok(()),
        }
    }

    async fn report(
        &self,
        step: &StepRef,
        settlement: Settlement,
        output: Option<String>,
        note: Option<String>,
        commit_id: Option<String>,
    ) -> Result<(), ReportError> {
        let outcome = Outcome {
            settlement,
            output,
            note,
            plan: PlanReference::Keep,
            commit_id,
        };
        let deadline = Deadline::after(REPORT);
        Ok(self
            .platform
            .report_outcome(step, &outcome, &deadline)
            .await?)
    }

    async fn remark(&self, step: &StepRef, text: &str) -> Result<(), ReportError> {
        let Some(redis) = &self.redis else {
            return Ok(());
        };
        let stream = JobStream::new(redis, &step.job_id, &step.step_id);
        Ok(stream.remark(text).await?)
    }

    /// Adds to the output of the step and returns how the platform names it; `None` where there is no store.
    async fn write_output(
        &self,
        step: &StepRef,
        line: &str,
        latest: Latest<'_>,
    ) -> Result<Option<String>, ReportError> {
        if self.outputs.is_none() {
            return Ok(None);
        }
        let (log, container, shown) = match latest {
            Latest::Stored => (None, None, Vec::new()),
            Latest::File(log) => (Some(log.to_owned()), None, Vec::new()),
            Latest::Live(container) => {
                let container = container.map(Path::to_owned);
                (None, container, self.live_text(step).await)
            }
        };
        let line = line.to_owned();
        let change = move |output: &Path| {
            let (latest, scope) = if let Some(log) = log {
                (log, step_output::Scope::Start)
            } else {
                let latest = output.with_extension("live");
                fs::write(&latest, shown)?;
                if let Some(container) = container {
                    step_output::restore(&latest, &container, None)?;
                }
                (latest, step_output::Scope::Step)
            };
            step_output::complete(output, &latest, scope, &line)
        };
        self.change_output(step, change).await
    }

    /// Changes the output of the step and returns how the platform names it; `None` where there is no store.
    async fn change_output(
        &self,
        step: &StepRef,
        change: impl FnOnce(&Path) -> io::Result<()> + Send + 'static,
    ) -> Result<Option<String>, ReportError> {
        let Some(store) = &self.outputs else {
            return Ok(None);
        };
        let _turn = self.turns.of(&step.step_id).await;
        let key = ObjectKey::step_output(&step.organization_id, &step.job_id, &step.step_id);
        let _place = self.drafts.acquire().await;
        // Logs may be larger than this program's memory.
        let folder = tempfile::tempdir().map_err(ReportError::Draft)?;
        let draft = folder.path().join("output");
        match store.fetch(&store.reference(&key), &draft).await {
            Ok(_) | Err(StoreError::Missing { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let into = draft.clone();
        tokio::task::spawn_blocking(move || change(&into))
            .await
            .map_err(io::Error::other)
            .flatten()
            .map_err(ReportError::Draft)?;
        let stored = store.put_file(&key, &draft).await?;
        Ok(Some(self.platform.step_output(step, stored)))
    }

    /// The log of an executor that had no time to store it.
    async fn live_text(&self, step: &StepRef) -> Vec<u8> {
        let Some(redis) = &self.redis else {
            return Vec::new();
        };
        let stream = JobStream::new(redis, &step.job_id, &step.step_id);
        match stream.text(SALVAGED_BYTES).await {
            Ok(text) => text.into_bytes(),
            Err(error) => {
                warn!(
                    job_id = step.job_id,
                    step_id = step.step_id,
                    error = chain(&error),
                    "the live log of a lost run could not be read"
                );
                Vec::new()
            }
        }
    }

    /// Changes the record of a job on this machine.
    #[cfg(test)]
    pub(in crate::dispatch) fn edit(&self, step: &StepRef, change: impl FnOnce(&mut JobRecord)) {
        if let Platform::Local(local) = &self.platform {
            local.update_job(step, change).unwrap();
        }
    }

    /// The record of a job on this machine.
    #[cfg(test)]
    pub(in crate::dispatch) fn record(&self, job_id: &str) -> Option<JobRecord> {
        match &self.platform {
            Platform::Local(local) => local.job(job_id).unwrap(),
            Platform::Terrakube(_) => None,
        }
    }
}

/// Whether the platform has recorded the dispatch. `rejected` stays as it is while its scripts run.
const fn is_dispatched(status: &JobStatus) -> bool {
    matches!(
        status,
        JobStatus::Queue | JobStatus::Running | JobStatus::Rejected
    )
}

/// What a step's job is told when all that is known is how the step ended.
fn half_settled(step: &StepRef, view: &StepView) -> Settlement {
    let kind = StepType::parse(&step.step_type).unwrap_or(StepType::Approval);
    let ending = match (view.step, kind) {
        (Some(StepStatus::Completed), StepType::Plan | StepType::PlanDestroy) => Ending::Changes,
        (Some(StepStatus::Completed), _) => Ending::Success,
        _ => Ending::NotReached,
    };
    let settlement = settlement::settle(kind, ending, true, false, view.template_steps);
    if ending == Ending::Changes
        && settlement.job == JobStatus::Pending
        && view.terraform_plan.is_none()
    {
        return Settlement {
            job: JobStatus::Failed,
            ..settlement
        };
    }
    settlement
}

#[cfg(test)]
mod tests;
