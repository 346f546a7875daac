//! Reports the end of a run whose executor did not, with the log of its container.

use std::path::PathBuf;

use cluster::{Cluster, RunRef, SaveError};
use job_contract::chain;
use platform::StepRef;
use reporter::{PlatformReporter, ReportError};
use tempfile::TempDir;
use tracing::{debug, warn};
use verdict::{Verdict, VerdictKind};

use super::{Observer, step_of};

/// Why the end of a run could not be reported.
#[derive(Debug, thiserror::Error)]
pub(super) enum EndReportError {
    #[error(transparent)]
    Report(#[from] ReportError),
    #[error("could not recover the log of the run")]
    Container(#[source] SaveError),
}

impl EndReportError {
    /// Returns whether every further attempt would fail too.
    pub(super) fn is_final(&self) -> bool {
        matches!(self, Self::Report(error) if error.is_final())
    }
}

/// What a container printed of the log of a run. The file is removed when this is dropped.
struct SavedLog(TempDir);

impl SavedLog {
    fn path(&self) -> PathBuf {
        self.0.path().join("container")
    }
}

impl Observer {
    /// Reports the end of the run, unless the platform has an outcome of its step.
    pub(super) async fn report_end(
        &self,
        run: &RunRef,
        verdict: &Verdict,
    ) -> Result<(), EndReportError> {
        let Some((reporter, step)) = self.find_step(run)? else {
            return Ok(());
        };
        let (_permit, saved) = match self.pod_with_log(verdict) {
            Some(pod) => {
                // No log is fetched while the platform does not answer.
                reporter.step_state(&step).await?;
                let permit = self.recoveries.acquire().await;
                (Some(permit), self.save_log(run, verdict, pod).await?)
            }
            None => (None, None),
        };
        let log = saved.as_ref().map(SavedLog::path);
        match verdict.unreported_success() {
            Some(report) => {
                reporter
                    .report_success(&step, report, &verdict.sentence, log.as_deref())
                    .await?;
            }
            None => {
                reporter
                    .report_failure(&step, &verdict.text(), log.as_deref())
                    .await?;
            }
        }
        Ok(())
    }

    /// Gives the job the outcome of its step, if the executor reported only the step.
    pub(super) async fn finish_report(&self, run: &RunRef) -> Result<(), EndReportError> {
        if let Some((reporter, step)) = self.find_step(run)? {
            reporter.finish_report(&step).await?;
        }
        Ok(())
    }

    /// Adds to the output of a reported run what its executor could not know, or not deliver.
    pub(super) async fn complete_output(
        &self,
        run: &RunRef,
        verdict: &Verdict,
    ) -> Result<(), EndReportError> {
        let Some((reporter, step)) = self.find_step(run)? else {
            return Ok(());
        };
        let remark = verdict.lock_remark();
        if let Some(pod) = self.pod_with_log(verdict) {
            let _permit = self.recoveries.acquire().await;
            if let Some(saved) = self.save_log(run, verdict, pod).await? {
                reporter
                    .restore_log(&step, &saved.path(), remark.as_deref())
                    .await?;
            }
        }
        if let Some(line) = remark {
            reporter.append_line(&step, &line).await?;
        }
        Ok(())
    }

    /// Returns the step of a run with the reporter of its platform, or `None` if one of them is missing.
    fn find_step(
        &self,
        run: &RunRef,
    ) -> Result<Option<(&dyn PlatformReporter, StepRef)>, ReportError> {
        let Some(reporter) = self.reporter.as_deref() else {
            return Ok(None);
        };
        let step = reporter.find_step(step_of(run))?;
        Ok(step.map(|step| (reporter, step)))
    }

    /// Returns the cluster and the pod that may have the log that the platform lacks.
    fn pod_with_log<'a>(&'a self, verdict: &'a Verdict) -> Option<(&'a Cluster, &'a str)> {
        // A lost node does not answer, and would be asked for as long as the platform waits.
        let is_there = verdict.job_over || verdict.kind != VerdictKind::NodeLost;
        let pod = verdict.pod.as_deref();
        let pod = pod.filter(|_| verdict.lacks_log() && is_there)?;
        Some((self.cluster.as_ref()?, pod))
    }

    /// Saves what the container of the run printed. After an error, another attempt may succeed.
    async fn save_log(
        &self,
        run: &RunRef,
        verdict: &Verdict,
        (cluster, pod): (&Cluster, &str),
    ) -> Result<Option<SavedLog>, EndReportError> {
        let fetched = async {
            let saved = SavedLog(tempfile::tempdir()?);
            let size = cluster.save_log(pod, &saved.path()).await?;
            Ok::<_, SaveError>((size > 0).then_some(saved))
        };
        match fetched.await {
            Ok(saved) => Ok(saved),
            // The pod is gone, or the launcher has no right to read its log.
            Err(error) if error.is_final() => {
                debug!(%run, error = chain(&error), "the log of the container is not available");
                Ok(None)
            }
            Err(error) if self.may_retry_log(run, verdict) => Err(EndReportError::Container(error)),
            Err(error) => {
                warn!(%run, error = chain(&error), "the log of the container is lost");
                Ok(None)
            }
        }
    }

    /// Returns whether there is time to fetch the log again. A lost node does not answer.
    fn may_retry_log(&self, run: &RunRef, verdict: &Verdict) -> bool {
        let Some(reporter) = &self.reporter else {
            return false;
        };
        let ended = self
            .runs
            .tracked()
            .get(run)
            .and_then(|tracked| tracked.ended);
        verdict.kind != VerdictKind::NodeLost
            && ended.is_some_and(|ended| ended.elapsed() < reporter.log_patience())
    }
}
