//! Reports that a step runs. Without this report, a platform that lost its other records of the claim could start the step
//! a second time (docs/decisions/0002-at-most-once.md). So a failed report is retried in parallel with the step, until it
//! succeeds or the step is over.

use std::time::Duration;

use job_contract::chain;
use platform::StartReport;
use platform::{Platform, PlatformError, StepRef};
use runtime::Deadline;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

/// The pause between two attempts. Each attempt has retries of its own.
const RETRY_PAUSE: Duration = Duration::from_secs(5);
/// How long the end of a step waits at most for an attempt in progress: as long as an attempt may last. If the attempt
/// arrived later, it would reset the step's status.
pub(crate) const LAST_ATTEMPT_TIMEOUT: Duration = Duration::from_secs(30);

/// The content of the report.
#[derive(Clone, Debug)]
pub(crate) struct RunningReport {
    pub(crate) platform: Platform,
    pub(crate) step: StepRef,
    pub(crate) commit_id: String,
    pub(crate) output: String,
}

/// Retries the report that the step runs, in parallel with the step.
#[derive(Debug)]
pub(crate) struct StartReportRetry {
    cancel: CancellationToken,
    task: AbortOnDropHandle<()>,
}

impl RunningReport {
    pub(crate) async fn send(&self) -> Result<StartReport, PlatformError> {
        self.platform
            .report_running(&self.step, &self.commit_id, &self.output)
            .await
    }

    /// Starts to repeat the report in parallel with the step.
    pub(crate) fn repeat(self) -> StartReportRetry {
        let cancel = CancellationToken::new();
        let cancelled = cancel.clone();
        let task = tokio::spawn(async move {
            loop {
                tokio::select! {
                    biased;
                    () = cancelled.cancelled() => return,
                    () = sleep(RETRY_PAUSE) => {}
                }
                match self.send().await {
                    Ok(_) => {
                        info!("the step is now reported as running");
                        return;
                    }
                    Err(error) => warn!(
                        error = chain(&error),
                        "the step could not be reported as running, trying again"
                    ),
                }
            }
        });
        StartReportRetry {
            cancel,
            task: AbortOnDropHandle::new(task),
        }
    }
}

impl StartReportRetry {
    /// Ends the retries before the outcome is reported. After this returns, no further report is sent.
    pub(crate) async fn end(mut self, deadline: &Deadline) {
        self.cancel.cancel();
        tokio::select! {
            biased;
            _ = &mut self.task => {}
            () = deadline.over() => {
                warn!("the last attempt to report that the step runs took too long");
                self.task.abort();
                // Until the task has ended, it may still send.
                let _ = self.task.await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use job_contract::status::StepStatus;
    use platform::local::LocalPlatform;
    use tempfile::TempDir;
    use tokio::sync::oneshot::{self, error::TryRecvError};
    use tokio::time::Instant;

    use super::*;

    /// A platform whose records cannot be written until the test removes a file in their place.
    fn unwritable_platform() -> (TempDir, RunningReport) {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("platform"), "").unwrap();
        let step = StepRef {
            organization_id: "org".into(),
            workspace_id: "ws".into(),
            job_id: "1".into(),
            step_id: "step".into(),
            step_type: "terraformApply".into(),
        };
        let running = RunningReport {
            platform: Platform::Local(LocalPlatform::new(folder.path())),
            step,
            commit_id: "c".into(),
            output: "o".into(),
        };
        (folder, running)
    }

    fn status(folder: &TempDir) -> Option<StepStatus> {
        let job = LocalPlatform::new(folder.path()).job("1").ok()??;
        Some(job.step("step")?.status)
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_report_is_repeated_until_it_succeeds() {
        let (folder, running) = unwritable_platform();
        running.send().await.unwrap_err();
        let repeated = running.repeat();
        sleep(RETRY_PAUSE * 3).await;
        assert_eq!(status(&folder), None);
        fs::remove_file(folder.path().join("platform")).unwrap();
        sleep(RETRY_PAUSE * 2).await;
        assert_eq!(status(&folder), Some(StepStatus::Running));
        repeated.end(&Deadline::after(LAST_ATTEMPT_TIMEOUT)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn no_report_is_sent_after_the_repetition_has_ended() {
        let (folder, running) = unwritable_platform();
        let repeated = running.repeat();
        repeated.end(&Deadline::after(LAST_ATTEMPT_TIMEOUT)).await;
        fs::remove_file(folder.path().join("platform")).unwrap();
        sleep(RETRY_PAUSE * 5).await;
        assert_eq!(status(&folder), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_hanging_attempt_ends_at_the_deadline() {
        let (attempt, mut watch) = oneshot::channel::<()>();
        let (start, started) = oneshot::channel();
        let task = tokio::spawn(async move {
            let _under_way = attempt;
            start.send(()).unwrap();
            std::future::pending::<()>().await;
        });
        started.await.unwrap();
        let repeated = StartReportRetry {
            cancel: CancellationToken::new(),
            task: AbortOnDropHandle::new(task),
        };
        let began = Instant::now();
        repeated.end(&Deadline::after(Duration::from_secs(1))).await;
        assert_eq!(began.elapsed().as_secs(), 1);
        assert_eq!(watch.try_recv(), Err(TryRecvError::Closed));
    }
}
