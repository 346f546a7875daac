//! Reports to the platform what executors cannot: that a step waits and why, that its job is alive, and the outcome of a
//! step whose executor did not report it.
//!
//! - [`PlatformReporter`] is what differs between platforms: [`TerrakubeReporter`] and [`LocalReporter`]. Its inherent methods, in
//!   `outcome` and `output`, are the same for all.
//! - [`HeartbeatKeeper`] keeps the heartbeats of runs that have no executor to send them.
//! - [`settings`] has the options of the platform, and [`dispatch`] what becomes of a dispatch.
//!
//! This crate must not know why an executor cannot report: neither Kubernetes nor pools.

pub mod dispatch;
mod heartbeat_keeper;
mod local;
mod outcome;
mod output;
mod output_store;
pub mod settings;
mod step_output;
mod terrakube;

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use artifact_store::StoreError;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use job_contract::JobData;
use job_contract::status::{JobStatus, StepStatus};
use platform::heartbeat::{Beat, HeartbeatState, Heartbeats};
use platform::redis::RedisError;
use platform::{Platform, PlatformError, StepRef};
use tokio_util::task::TaskTracker;

pub use self::heartbeat_keeper::HeartbeatKeeper;
pub use self::local::LocalReporter;
use self::output_store::OutputStore;
pub use self::terrakube::TerrakubeReporter;
use crate::dispatch::{Acceptance, DispatchError, ResponseSent};

/// Longer than any run may take.
const NO_LIMIT: Duration = Duration::from_hours(365 * 24);
/// How long an outcome waits for the log of a container that cannot be fetched.
const LOG_PATIENCE: Duration = Duration::from_mins(2);

/// Why a report failed.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error(transparent)]
    Platform(#[from] PlatformError),
    #[error("could not store the step's output")]
    Output(#[from] StoreError),
    #[error("could not assemble the step's output")]
    Draft(#[source] io::Error),
    #[error("could not write into the run's live log")]
    Log(#[from] RedisError),
    /// Terrakube either records the dispatch soon or takes it back. Until then the job must not change (contract 2.5).
    #[error("the platform has not recorded the dispatch yet, its job is `{0}`")]
    NotDispatched(JobStatus),
}

impl ReportError {
    /// Returns whether every further attempt would fail too.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Platform(PlatformError::Terrakube(error)) if error.is_final())
    }
}

/// The statuses of a step and its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepState {
    pub job: JobStatus,
    pub step: StepStatus,
}

impl StepState {
    /// Returns whether the step has an outcome.
    pub const fn has_outcome(&self) -> bool {
        !matches!(self.step, StepStatus::Pending | StepStatus::Running)
    }
}

/// Reports to one platform.
pub trait PlatformReporter: Debug + Send + Sync {
    /// Returns the client of the platform.
    fn platform(&self) -> &Platform;

    /// Returns the store of step outputs.
    fn outputs(&self) -> Option<&OutputStore>;

    /// Returns the heartbeats of jobs, if the platform expects any.
    fn heartbeats(&self) -> Option<&Heartbeats> {
        None
    }

    /// Returns who sent the last heartbeat of the job, if that is known.
    fn heartbeat_state<'a>(&'a self, _job_id: &'a str) -> BoxFuture<'a, Option<HeartbeatState>> {
        std::future::ready(None).boxed()
    }

    /// Returns how long the launcher sends heartbeats after the end of a run while the platform does not take the report.
    /// After that the platform must be free to end the job itself.
    fn report_patience(&self) -> Duration;

    /// Returns how long after the end of a run its report waits for the log of the container.
    fn log_patience(&self) -> Duration;

    /// Returns whether the launcher completes steps that have nothing to run.
    fn completes_empty_steps(&self) -> bool;

    /// Returns whether a report fails if the output of the step cannot be stored.
    fn requires_stored_output(&self) -> bool;

    /// Marks the step as queued after its dispatch. A step that has begun, and a job that is cancelled, rejected or failed,
    /// stay as they are.
    fn mark_queued(&self, job: &JobData) -> Result<(), ReportError>;

    /// Gives a step that never ran its status after its job is over.
    fn mark_not_executed(&self, step: &StepRef) -> Result<(), ReportError>;

    /// Returns the statuses of the step if they are on record on this machine.
    fn recorded_state(&self, step: &StepRef) -> Result<Option<StepState>, ReportError>;

    /// Completes the reference to a step with what the platform knows. Returns `None` for an unknown job.
    fn find_step(&self, step: StepRef) -> Result<Option<StepRef>, ReportError>;

    /// Returns whether the platform has yet to record the dispatch, or has taken it back.
    fn awaits_dispatch(&self, _state: &StepState) -> bool {
        false
    }

    /// Writes what the live log has of the step into a new file. What cannot be read is missing there.
    fn copy_live_log<'a>(
        &'a self,
        _step: &'a StepRef,
        target: &'a Path,
    ) -> BoxFuture<'a, io::Result<()>> {
        std::future::ready(File::create_new(target).map(drop)).boxed()
    }

    /// Writes into the live log of the step.
    fn write_live_log<'a>(
        &'a self,
        _step: &'a StepRef,
        _text: &'a str,
    ) -> BoxFuture<'a, Result<(), ReportError>> {
        std::future::ready(Ok(())).boxed()
    }

    /// Writes a line into the log of a step, unless the step has an outcome.
    fn add_log_line<'a>(
        &'a self,
        step: &'a StepRef,
        line: &'a str,
    ) -> BoxFuture<'a, Result<(), ReportError>>;

    /// Rejects a dispatch that can never run, in the way that shows the reason to people. Work after the response becomes
    /// one of `tasks`.
    fn reject(
        self: Arc<Self>,
        job: JobData,
        reason: String,
        response_sent: ResponseSent,
        tasks: &TaskTracker,
    ) -> BoxFuture<'static, Result<Acceptance, DispatchError>>;
}

impl dyn PlatformReporter + '_ {
    /// Sends heartbeats for a job without an executor until the value is dropped.
    pub fn start_heartbeat(&self, job_id: &str) -> Option<Beat> {
        self.heartbeats().map(|heartbeats| heartbeats.beat(job_id))
    }

    /// Sends heartbeats until the executor of the job sends its own, and no longer than `within`.
    pub fn start_heartbeat_until_executor(
        &self,
        job_id: &str,
        within: Option<Duration>,
    ) -> Option<Beat> {
        let within = within.unwrap_or(NO_LIMIT);
        self.heartbeats()
            .map(|heartbeats| heartbeats.beat_until_taken_over(job_id, within))
    }
}

/// The line in the log of a step whose dispatch was rejected.
fn rejection_text(reason: &str) -> String {
    format!("The run was refused: {reason}")
}

#[cfg(test)]
mod tests;
