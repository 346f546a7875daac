//! Stops the runs whose jobs the platform has cancelled.

use std::time::{Duration, Instant};

use cluster::{Cluster, RunRef};
use futures_util::StreamExt as _;
use job_contract::chain;
use job_contract::status::JobStatus;
use reporter::PlatformReporter;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tracing::{debug, info, warn};

use super::{Observer, step_of};

/// How often the platform is asked whether a run is cancelled (contract 11.4). A run is not asked about before it has been
/// seen for so long: the request that brought it may still be open.
const POLL: Duration = Duration::from_secs(5);
/// How many runs are asked about at a time.
const REQUESTS: usize = 16;

impl Observer {
    /// Stops runs whose jobs the platform has ended. Runs until it is dropped.
    pub(in super::super) async fn stop_cancelled(&self, cluster: &Cluster) {
        let Some(reporter) = &self.reporter else {
            return;
        };
        let mut ticks = tokio::time::interval(POLL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut stops = JoinSet::new();
        loop {
            tokio::select! {
                _ = ticks.tick() => {
                    self.runs
                        .stop_late_heartbeats(reporter.report_patience(), Instant::now());
                    for run in self.select_cancelled(&**reporter).await {
                        let (cluster, head_start) = (cluster.clone(), self.head_start);
                        stops.spawn(async move {
                            let stopped = cluster.cancel(&run.name, head_start).await;
                            (run, stopped)
                        });
                    }
                }
                Some(Ok((run, stopped))) = stops.join_next() => match stopped {
                    Ok(done) => info!(%run, ?done, "its job is over at the platform"),
                    Err(error) => {
                        warn!(%run, %error, "a cancelled run could not be stopped, trying again");
                        if let Some(tracked) = self.runs.tracked().get_mut(&run) {
                            tracked.is_stopping = false;
                        }
                    }
                }
            }
        }
    }

    /// Returns the runs that have to be stopped now, and marks them as stopping.
    async fn select_cancelled(&self, reporter: &dyn PlatformReporter) -> Vec<RunRef> {
        let candidates: Vec<RunRef> = self
            .runs
            .tracked()
            .iter()
            .filter(|(_, tracked)| !tracked.is_stopping && tracked.first_seen.elapsed() >= POLL)
            .map(|(run, _)| run.clone())
            .collect();
        let statuses: Vec<_> = futures_util::stream::iter(candidates)
            .map(|run| async move {
                let status = job_status(reporter, &run).await;
                (run, status)
            })
            .buffer_unordered(REQUESTS)
            .collect()
            .await;
        let mut tracked = self.runs.tracked();
        statuses
            .into_iter()
            .filter_map(|(run, status)| {
                let entry = tracked.get_mut(&run)?;
                entry.is_stopping = match status {
                    Some(JobStatus::Cancelled) => true,
                    Some(JobStatus::Failed) => std::mem::replace(&mut entry.failed_before, true),
                    _ => false,
                };
                entry.is_stopping.then_some(run)
            })
            .collect()
    }
}

/// Returns the status of the run's job. If the platform does not answer, the job counts as not cancelled.
async fn job_status(reporter: &dyn PlatformReporter, run: &RunRef) -> Option<JobStatus> {
    let step = reporter.find_step(step_of(run)).ok()??;
    match reporter.step_state(&step).await {
        Ok(state) => Some(state.job),
        Err(error) => {
            debug!(%run, error = chain(&error), "the status of its job is not known at the moment");
            None
        }
    }
}
