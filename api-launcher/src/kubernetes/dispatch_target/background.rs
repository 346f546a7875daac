//! Work that follows the response to a dispatch.

use std::sync::Arc;
use std::time::Duration;

use cluster::Cluster;
use http_service::Shutdown;
use job_contract::{JobData, chain};
use platform::StepRef;
use platform::heartbeat::{self, Beat};
use reporter::PlatformReporter;
use reporter::dispatch::ResponseSent;
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};

/// How long the launcher keeps the heartbeat of a run that it accepted. That is one heartbeat, valid for 45 seconds. By then
/// the replica that watches has noticed the run. The heartbeat of a short run ends soon after its end (contract 2.6).
const UNTIL_WATCHED: Duration = Duration::from_secs(heartbeat::INTERVAL.as_secs() - 2);
/// How long the report of a step that has nothing to run may take. It is less than the watcher leaves to the launcher.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(15);
/// How long the launcher tries to write notes into the log of a run.
const NOTES_TIMEOUT: Duration = Duration::from_mins(2);
const NOTES_RETRY: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct BackgroundTasks {
    cluster: Cluster,
    shutdown: Shutdown,
    tracker: TaskTracker,
}

impl BackgroundTasks {
    pub(super) fn new(cluster: Cluster, shutdown: Shutdown) -> Self {
        Self {
            cluster,
            shutdown,
            tracker: TaskTracker::new(),
        }
    }

    pub(super) const fn tracker(&self) -> &TaskTracker {
        &self.tracker
    }

    /// Waits for the tasks. No further task is started.
    pub(super) async fn finish(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }

    /// Keeps the heartbeat until it has been sent once. The watcher, perhaps of another replica, continues.
    pub(super) fn send_one_heartbeat(&self, beat: Option<Beat>) {
        if let Some(beat) = beat {
            let stop = self.shutdown.graceful.clone();
            tokio::spawn(async move {
                tokio::select! {
                    () = tokio::time::sleep(UNTIL_WATCHED) => {}
                    () = stop.cancelled() => {}
                }
                drop(beat);
            });
        }
    }

    /// Writes notes on settings without effect into the log of a run.
    pub(super) fn write_notes(
        &self,
        reporter: &Arc<dyn PlatformReporter>,
        job: &JobData,
        notes: Vec<String>,
        response_sent: ResponseSent,
    ) {
        let (reporter, step) = (Arc::clone(reporter), StepRef::of(job));
        self.tracker.spawn(async move {
            response_sent.wait().await;
            let written = async {
                for note in &notes {
                    while let Err(error) = reporter.add_log_line(&step, note).await {
                        debug!(error = chain(&error), "a note has to wait");
                        tokio::time::sleep(NOTES_RETRY).await;
                    }
                }
            };
            if tokio::time::timeout(NOTES_TIMEOUT, written).await.is_err() {
                warn!(
                    job_id = step.job_id,
                    step_id = step.step_id,
                    "settings without effect could not be named in the run's log"
                );
            }
        });
    }

    /// Reports a step that has nothing to run, and deletes its held Job. If the report fails, the Job is released and does
    /// the step.
    pub(super) fn complete_empty_step(
        &self,
        reporter: &Arc<dyn PlatformReporter>,
        job: JobData,
        held_job: String,
        response_sent: ResponseSent,
    ) {
        let (reporter, cluster) = (Arc::clone(reporter), self.cluster.clone());
        self.tracker.spawn(async move {
            response_sent.wait().await;
            let report = reporter.complete_empty_step(&job);
            let done = match tokio::time::timeout(COMPLETION_TIMEOUT, report).await {
                Ok(Ok(())) => {
                    info!(
                        job_id = job.job_id,
                        step_id = job.step_id,
                        "completed a step with nothing to run"
                    );
                    cluster.dismiss(&held_job).await
                }
                failed => {
                    let error = match &failed {
                        Ok(Err(error)) => chain(error),
                        _ => "the platform takes too long".to_owned(),
                    };
                    warn!(
                        job_id = job.job_id,
                        step_id = job.step_id,
                        error,
                        "a step with nothing to run could not be completed, a pod does it"
                    );
                    cluster.release(&held_job).await
                }
            };
            if let Err(error) = done {
                warn!(%error, run = held_job, "the watcher has to see to a run with nothing to do");
            }
        });
    }
}
