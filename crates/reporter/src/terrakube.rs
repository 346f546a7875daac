//! Reports to Terrakube's API, with live logs and heartbeats in its Redis.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use artifact_store::Store;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use job_contract::status::{JobStatus, StepStatus};
use job_contract::{JobData, chain};
use platform::heartbeat::{self, HeartbeatError, HeartbeatState, Heartbeats};
use platform::redis::Redis;
use platform::sinks::{CopyError, JobStream, Repeated};
use platform::terrakube::Terrakube;
use platform::{Platform, StartPermission, StepRef};
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use super::output_store::OutputStore;
use super::{LOG_PATIENCE, PlatformReporter, ReportError, StepState, rejection_text};
use crate::dispatch::{Acceptance, DispatchError, ResponseSent};

/// How much of a live log becomes part of the output of a step whose executor could not store it.
const LIVE_LOG_BYTES: u64 = 16 * 1024 * 1024;
/// How long it is read. Other reports wait meanwhile.
const LIVE_LOG_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the reason of a rejection is tried to be reported.
const REJECTION_TIMEOUT: Duration = Duration::from_mins(2);
const REJECTION_RETRY: Duration = Duration::from_secs(5);

/// Reports to Terrakube. Without a store, reasons do not reach step outputs. Without Redis, there are no heartbeats and
/// no live logs.
#[derive(Debug)]
pub struct TerrakubeReporter {
    report_patience: Duration,
    platform: Platform,
    pub(super) outputs: Option<OutputStore>,
    redis: Option<Redis>,
    heartbeats: Option<Heartbeats>,
    repeated: Repeated,
}

impl TerrakubeReporter {
    pub fn new(
        terrakube: Terrakube,
        outputs: Option<Store>,
        redis: Option<Redis>,
    ) -> Result<Self, HeartbeatError> {
        let heartbeats = redis.as_ref().map(Heartbeats::start).transpose()?;
        Ok(Self {
            report_patience: terrakube.config().report_patience,
            platform: Platform::Terrakube(terrakube),
            outputs: outputs.map(OutputStore::new),
            redis,
            heartbeats,
            repeated: Repeated::Keep,
        })
    }

    /// For executors that write their live logs through the API.
    #[must_use]
    pub fn of_hub(self) -> Self {
        Self {
            repeated: Repeated::Skip,
            ..self
        }
    }

    /// Fails the step of a rejected dispatch, unless an earlier delivery was accepted.
    async fn report_rejection(&self, job: &JobData, reason: &str) -> Result<(), ReportError> {
        let step = StepRef::of(job);
        match self.platform.start_permission(&step).await? {
            // An earlier delivery was accepted, and its executor runs.
            StartPermission::Granted(view) if view.step == Some(StepStatus::Running) => Ok(()),
            StartPermission::Granted(_) => {
                let reporter: &dyn PlatformReporter = self;
                reporter
                    .report_failure(&step, &rejection_text(reason), None)
                    .await
            }
            StartPermission::JobEnded(_) | StartPermission::StepEnded(_) => Ok(()),
            StartPermission::NotDispatched(status) => Err(ReportError::NotDispatched(status)),
        }
    }

    async fn retry_rejection(&self, job: &JobData, reason: &str) {
        while let Err(error) = self.report_rejection(job, reason).await {
            let is_final = error.is_final();
            warn!(
                error = chain(&error),
                job_id = job.job_id,
                step_id = job.step_id,
                reason,
                again = !is_final,
                "the reason of a refusal could not be reported"
            );
            if is_final {
                return;
            }
            tokio::time::sleep(REJECTION_RETRY).await;
        }
    }
}

impl PlatformReporter for TerrakubeReporter {
    fn platform(&self) -> &Platform {
        &self.platform
    }

    fn outputs(&self) -> Option<&OutputStore> {
        self.outputs.as_ref()
    }

    fn heartbeats(&self) -> Option<&Heartbeats> {
        self.heartbeats.as_ref()
    }

    fn heartbeat_state<'a>(&'a self, job_id: &'a str) -> BoxFuture<'a, Option<HeartbeatState>> {
        async move {
            let redis = self.redis.as_ref()?;
            match heartbeat::heartbeat_state(redis, job_id).await {
                Ok(sign) => Some(sign),
                Err(error) => {
                    debug!(
                        job_id,
                        error = chain(&error),
                        "it is not known whether its executor is alive"
                    );
                    None
                }
            }
        }
        .boxed()
    }

    fn report_patience(&self) -> Duration {
        self.report_patience
    }

    fn log_patience(&self) -> Duration {
        LOG_PATIENCE.min(self.report_patience / 2)
    }

    fn completes_empty_steps(&self) -> bool {
        true
    }

    fn requires_stored_output(&self) -> bool {
        false
    }

    // Terrakube changes these statuses itself.
    fn mark_queued(&self, _job: &JobData) -> Result<(), ReportError> {
        Ok(())
    }

    fn mark_not_executed(&self, _step: &StepRef) -> Result<(), ReportError> {
        Ok(())
    }

    // Terrakube must not be asked while it waits for the response to a dispatch.
    fn recorded_state(&self, _step: &StepRef) -> Result<Option<StepState>, ReportError> {
        Ok(None)
    }

    fn find_step(&self, step: StepRef) -> Result<Option<StepRef>, ReportError> {
        Ok(Some(step))
    }

    fn awaits_dispatch(&self, state: &StepState) -> bool {
        // `rejected` stays as it is while the scripts of the job run.
        let is_dispatched = matches!(
            state.job,
            JobStatus::Queue | JobStatus::Running | JobStatus::Rejected
        );
        !state.job.is_over() && !is_dispatched
    }

    fn copy_live_log<'a>(
        &'a self,
        step: &'a StepRef,
        target: &'a Path,
    ) -> BoxFuture<'a, io::Result<()>> {
        async move {
            let mut file = BufWriter::new(File::create_new(target)?);
            if let Some(redis) = &self.redis {
                let stream = JobStream::new(redis, &step.job_id, &step.step_id);
                let copy = stream.copy(&mut file, LIVE_LOG_BYTES, self.repeated);
                let problem = match tokio::time::timeout(LIVE_LOG_TIMEOUT, copy).await {
                    Ok(Ok(())) => None,
                    Ok(Err(CopyError::Write(error))) => return Err(error),
                    Ok(Err(CopyError::Redis(error))) => Some(chain(&error)),
                    Err(_) => Some("it took too long".to_owned()),
                };
                if let Some(error) = problem {
                    let (job_id, step_id) = (&step.job_id, &step.step_id);
                    warn!(
                        job_id,
                        step_id, error, "the live log of a lost run is not complete"
                    );
                }
            }
            file.flush()
        }
        .boxed()
    }

    fn write_live_log<'a>(
        &'a self,
        step: &'a StepRef,
        text: &'a str,
    ) -> BoxFuture<'a, Result<(), ReportError>> {
        async move {
            let Some(redis) = &self.redis else {
                return Ok(());
            };
            let stream = JobStream::new(redis, &step.job_id, &step.step_id);
            Ok(stream.remark(text).await?)
        }
        .boxed()
    }

    fn add_log_line<'a>(
        &'a self,
        step: &'a StepRef,
        line: &'a str,
    ) -> BoxFuture<'a, Result<(), ReportError>> {
        async move {
            if self.redis.is_none() {
                return Ok(());
            }
            // Terrakube deletes the live log when it records the dispatch, so nothing is written before.
            match self.platform.start_permission(step).await? {
                StartPermission::Granted(_) => self.write_live_log(step, line).await,
                StartPermission::JobEnded(_) | StartPermission::StepEnded(_) => Ok(()),
                StartPermission::NotDispatched(status) => Err(ReportError::NotDispatched(status)),
            }
        }
        .boxed()
    }

    /// Terrakube would show nothing but the number of the HTTP status. So the dispatch is accepted, and the step fails
    /// with the reason.
    fn reject(
        self: Arc<Self>,
        job: JobData,
        reason: String,
        response_sent: ResponseSent,
        tasks: &TaskTracker,
    ) -> BoxFuture<'static, Result<Acceptance, DispatchError>> {
        let beat = self
            .heartbeats
            .as_ref()
            .map(|heartbeats| heartbeats.beat(&job.job_id));
        tasks.spawn(async move {
            response_sent.wait().await;
            let report = self.retry_rejection(&job, &reason);
            if tokio::time::timeout(REJECTION_TIMEOUT, report)
                .await
                .is_err()
            {
                warn!(
                    job_id = job.job_id,
                    step_id = job.step_id,
                    reason,
                    "the reason of a refusal could not be reported to the platform"
                );
            }
            drop(beat);
        });
        std::future::ready(Ok(Acceptance::New)).boxed()
    }
}
