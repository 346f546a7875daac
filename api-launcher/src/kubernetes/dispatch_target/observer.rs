//! Reports to the platform what the watcher sees: that the job of a run is alive, why a run waits, and the end of a run
//! whose executor did not report it. Stops the runs that the platform has cancelled.

mod cancellation;
mod end;
mod notes;
mod tracked;

use std::sync::Arc;
use std::time::Duration;

use cluster::watch::{Heartbeat, ReportOutcome, RunCounts, RunObserver};
use cluster::{Cluster, RunRef};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use job_contract::chain;
use platform::StepRef;
use platform::heartbeat::HeartbeatState;
use reporter::PlatformReporter;
use tokio::sync::Semaphore;
use tracing::{info, warn};
use verdict::{Observation, Verdict, VerdictKind};

use self::notes::Notes;
use self::tracked::TrackedRuns;
use crate::metrics::Metrics;

/// How many logs are recovered at a time.
const RECOVERIES: usize = 2;
/// How long the container of an executor has to run before only its own heartbeat counts. A stock executor sends the first
/// one 15 s after its Java has started. The launcher's last heartbeat is valid for another 45 s.
const TAKE_OVER: Duration = Duration::from_mins(1);
/// How long a started executor has to notice a cancellation itself, and to stop.
const HEAD_START: Duration = Duration::from_secs(30);

/// Reports runs to the platform. Without a reporter, it only logs.
#[derive(Debug)]
pub(super) struct Observer {
    reporter: Option<Arc<dyn PlatformReporter>>,
    /// The cluster that has the logs of containers.
    cluster: Option<Cluster>,
    metrics: Metrics,
    head_start: Duration,
    /// A recovered log stays on disk until it is part of an output, and may be large.
    recoveries: Semaphore,
    runs: TrackedRuns,
}

/// While this value lives, its observer sends the heartbeats of runs.
#[derive(Debug)]
pub(super) struct WatchGuard(Arc<Observer>);

impl Drop for WatchGuard {
    fn drop(&mut self) {
        self.0.runs.release();
    }
}

impl Observer {
    pub(super) fn new(reporter: Option<Arc<dyn PlatformReporter>>, metrics: Metrics) -> Self {
        Self {
            runs: TrackedRuns::new(reporter.clone()),
            reporter,
            cluster: None,
            metrics,
            head_start: HEAD_START,
            recoveries: Semaphore::const_new(RECOVERIES),
        }
    }

    /// Sets the cluster from which lost logs are recovered.
    #[must_use]
    pub(super) fn recovering_from(mut self, cluster: Cluster) -> Self {
        self.cluster = Some(cluster);
        self
    }

    /// Starts the watch, which ends when the guard is dropped. The next watch needs a new observer.
    pub(super) fn start_watch(self: &Arc<Self>) -> WatchGuard {
        WatchGuard(Arc::clone(self))
    }

    /// Writes why a run waits into its log.
    fn note(&self, run: &RunRef, sentence: &str) {
        let Some(reporter) = &self.reporter else {
            return;
        };
        if let Some(tracked) = self.runs.tracked().get_mut(run) {
            tracked
                .notes
                .get_or_insert_with(|| Notes::start(Arc::clone(reporter), run.clone()))
                .add(sentence);
        }
    }

    fn report_result(
        &self,
        run: &RunRef,
        result: Result<(), end::EndReportError>,
    ) -> ReportOutcome {
        match result {
            Ok(()) => {
                self.runs.forget(run);
                ReportOutcome::Delivered
            }
            Err(error) if error.is_final() => {
                let why = chain(&error);
                warn!(%run, error = why, "the end of a run cannot be reported to the platform");
                self.metrics.report_failed();
                self.runs.forget(run);
                ReportOutcome::Refused(why)
            }
            Err(error) => {
                warn!(%run, error = chain(&error), "the verdict could not be reported, trying again");
                self.metrics.report_failed();
                ReportOutcome::Retry
            }
        }
    }
}

impl RunObserver for Observer {
    fn on_held(&self, run: &RunRef) {
        self.runs.hold(run);
    }

    fn on_forgotten(&self, run: &RunRef) {
        self.runs.forget(run);
    }

    fn on_observation(&self, run: &RunRef, observation: &Observation) {
        match observation {
            Observation::Ended(verdict) => {
                // After a restart, the platform may know the end already. A run that was first seen after its end was
                // counted by the replica that saw it end.
                let tracked = self.runs.forget(run);
                if tracked.is_some_and(|tracked| tracked.ended.is_none()) {
                    self.metrics.ended(verdict.kind);
                }
            }
            Observation::Waiting(wait) => {
                self.runs.track_waiting(run);
                if wait.reason.is_news() {
                    info!(%run, sentence = wait.sentence, "a run waits");
                    self.note(run, &wait.sentence);
                }
            }
            Observation::InProgress => {
                self.runs.track(run);
                // From now on only the executor writes the log. A note stored later would replace it.
                if let Some(tracked) = self.runs.tracked().get_mut(run) {
                    tracked.notes = None;
                }
            }
        }
    }

    fn on_running(&self, run: &RunRef, since: Option<Duration>) {
        // Without the status of the container, it is not known when the executor starts.
        let within = since.map(|since| TAKE_OVER.saturating_sub(since));
        self.runs.track_running(run, within);
    }

    fn check_heartbeat<'a>(&'a self, run: &'a RunRef) -> BoxFuture<'a, Heartbeat> {
        async move {
            let Some(reporter) = &self.reporter else {
                return Heartbeat::Unknown;
            };
            match reporter.heartbeat_state(&run.job_id).await {
                Some(HeartbeatState::FromExecutor) => Heartbeat::Present,
                Some(HeartbeatState::Missing) => Heartbeat::Missing,
                // A launcher sends heartbeats only while the executor may not have begun to.
                Some(HeartbeatState::FromLauncher) | None => Heartbeat::Unknown,
            }
        }
        .boxed()
    }

    fn on_ended<'a>(
        &'a self,
        run: &'a RunRef,
        verdict: &'a Verdict,
    ) -> BoxFuture<'a, ReportOutcome> {
        async move {
            self.runs.mark_ended(run);
            let result = match verdict.kind {
                // A stock executor ends with 0 after it has reported, or has given up between step and job.
                VerdictKind::Completed if verdict.report.is_none() => self.finish_report(run).await,
                _ => self.report_end(run, verdict).await,
            };
            self.report_result(run, result)
        }
        .boxed()
    }

    fn on_more<'a>(&'a self, run: &'a RunRef, verdict: &'a Verdict) -> BoxFuture<'a, ()> {
        async move {
            if let Err(error) = self.complete_output(run, verdict).await {
                warn!(%run, error = chain(&error), "the log of the run could not be completed");
            }
        }
        .boxed()
    }

    fn on_counts(&self, counts: RunCounts) {
        self.metrics.stand(counts);
    }
}

/// The step of a run, as its Job names it.
fn step_of(run: &RunRef) -> StepRef {
    StepRef {
        organization_id: run.organization_id.clone(),
        workspace_id: run.workspace_id.clone(),
        job_id: run.job_id.clone(),
        step_id: run.step_id.clone(),
        step_type: run.step_type.to_owned(),
    }
}

#[cfg(test)]
mod tests;
