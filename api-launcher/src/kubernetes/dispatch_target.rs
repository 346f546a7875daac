//! The Kubernetes target: a dispatch becomes one Job, and one replica watches all Jobs. The cluster alone stores runs; the
//! launcher keeps nothing.

mod background;
mod observer;
mod readiness;
pub(crate) mod settings;
mod start_failure;
mod submitter;
mod watcher;

use std::sync::Arc;

use cluster::Cluster;
use cluster::settings::ClusterSettings;
use data_dir::DataDir;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http_service::{Readiness, Shutdown};
use job_contract::report::ReportKey;
use job_contract::status::JobStatus;
use job_contract::{Document, Exit, JobData, chain, env};
use manifest::Deployment;
use platform::StepRef;
use reporter::dispatch::{Acceptance, DispatchError, ResponseSent};
use reporter::{LocalReporter, PlatformReporter};
use tracing::{info, warn};

use self::background::BackgroundTasks;
use self::readiness::ReadinessProbe;
use self::settings::KubernetesSettings;
use self::start_failure::StartFailureTracker;
use self::submitter::{JobSubmitter, Submission, SubmitError};
use self::watcher::RunWatcher;
use crate::dispatch::{DispatchTarget, has_nothing_to_run};
use crate::failure::Failure;
use crate::metrics::Metrics;

#[derive(Debug)]
pub(crate) struct KubernetesTarget {
    submitter: JobSubmitter,
    background: BackgroundTasks,
    readiness: ReadinessProbe,
    watcher: RunWatcher,
    /// The platform that runs are reported to, if one is configured.
    reporter: Option<Arc<dyn PlatformReporter>>,
}

impl KubernetesTarget {
    /// Connects to the cluster and to the platform. `key` verifies the final reports of executors.
    pub(crate) async fn connect(
        settings: KubernetesSettings,
        key: Option<ReportKey>,
        metrics: Metrics,
        shutdown: Shutdown,
    ) -> Result<Self, Failure> {
        let deployment = settings.deployment;
        for warning in &deployment.warnings {
            warn!("{warning}");
        }
        if key.is_none() {
            warn!(
                hint = format!("give launcher and executors the same {}", env::REPORT_KEY),
                "final reports cannot be verified: runs are judged by exit codes alone"
            );
        }
        let cluster = Cluster::connect(Some(deployment.namespace.clone()))
            .await
            .map_err(|error| Failure::of(error.exit(), error))?;
        let cluster = cluster.with_report_key(key);
        let reporter: Option<Arc<dyn PlatformReporter>> =
            match (settings.platform, settings.data_dir) {
                (Some(platform), _) => {
                    let reporter = platform.open();
                    let reporter =
                        reporter.map_err(|error| Failure::of(Exit::Infrastructure, error))?;
                    Some(Arc::new(reporter))
                }
                (None, Some(path)) => {
                    let data = DataDir::locate(Some(&path))?.create()?;
                    Some(Arc::new(LocalReporter::new(data.path())))
                }
                (None, None) => None,
            };
        Ok(Self::new(
            cluster,
            deployment,
            settings.cluster,
            reporter,
            metrics,
            shutdown,
        ))
    }

    /// Without a reporter, verdicts are only logged.
    fn new(
        cluster: Cluster,
        deployment: Deployment,
        settings: ClusterSettings,
        reporter: Option<Arc<dyn PlatformReporter>>,
        metrics: Metrics,
        shutdown: Shutdown,
    ) -> Self {
        let cluster = cluster.with_max_in_flight(settings.max_in_flight);
        let metrics = metrics.for_cluster();
        let start_failures = Arc::new(StartFailureTracker::new(
            start_failure::FAILURE_TIMEOUT,
            metrics.clone(),
        ));
        let readiness = ReadinessProbe::new(cluster.clone(), Arc::clone(&start_failures));
        let watcher = RunWatcher {
            cluster: cluster.clone(),
            namespace: deployment.namespace.clone(),
            settings,
            reporter: reporter.clone(),
            metrics,
            lease: Arc::clone(&readiness.lease),
            shutdown: shutdown.clone(),
        };
        Self {
            submitter: JobSubmitter {
                cluster: cluster.clone(),
                deployment,
                start_failures,
                timeout: submitter::TIMEOUT,
            },
            background: BackgroundTasks::new(cluster, shutdown),
            readiness,
            watcher,
            reporter,
        }
    }

    /// Creates the run's Job and releases it. A second delivery finds the first in the cluster.
    ///
    /// The platform's records change after the cluster, so that every queued record has a Job. If the launcher crashes
    /// between the two, the platform has no response and delivers again.
    async fn accept_dispatch(
        &self,
        job: Document,
        response_sent: ResponseSent,
    ) -> Result<Acceptance, DispatchError> {
        let Some(reporter) = &self.reporter else {
            return Ok(self.submitter.submit(&job, false).await?.acceptance);
        };
        if is_step_over(&**reporter, &job) {
            info!(
                job_id = job.job_id,
                step_id = job.step_id,
                "a dispatch of a step that is over: nothing is run"
            );
            return Ok(Acceptance::Duplicate);
        }
        let hold = reporter.completes_empty_steps() && has_nothing_to_run(&job);
        match self.submitter.submit(&job, hold).await {
            Ok(submission) => self.record_submission(reporter, job, submission, response_sent),
            Err(SubmitError::Invalid(reason) | SubmitError::Blocked(reason)) => {
                let tasks = self.background.tracker();
                Arc::clone(reporter)
                    .reject(job.into_job(), reason, response_sent, tasks)
                    .await
            }
            Err(error @ SubmitError::Unavailable(_)) => Err(error.into()),
        }
    }

    /// Records that the run is queued, and starts what follows the response.
    fn record_submission(
        &self,
        reporter: &Arc<dyn PlatformReporter>,
        job: Document,
        submission: Submission,
        response_sent: ResponseSent,
    ) -> Result<Acceptance, DispatchError> {
        reporter
            .mark_queued(&job)
            .map_err(|error| DispatchError::Unavailable(chain(&error)))?;
        let acceptance = submission.acceptance;
        self.background.send_one_heartbeat(match acceptance {
            Acceptance::Duplicate => reporter.start_heartbeat_until_executor(&job.job_id, None),
            Acceptance::New => reporter.start_heartbeat(&job.job_id),
        });
        match submission.held_job {
            Some(name) => {
                self.background
                    .complete_empty_step(reporter, job.into_job(), name, response_sent);
            }
            None if acceptance == Acceptance::New && !submission.notes.is_empty() => {
                self.background
                    .write_notes(reporter, &job, submission.notes, response_sent);
            }
            None => {}
        }
        Ok(acceptance)
    }
}

impl DispatchTarget for KubernetesTarget {
    fn accept(
        &self,
        job: Document,
        response_sent: ResponseSent,
    ) -> BoxFuture<'_, Result<Acceptance, DispatchError>> {
        self.accept_dispatch(job, response_sent).boxed()
    }

    fn readiness(&self) -> BoxFuture<'_, Readiness> {
        self.readiness.check().boxed()
    }

    fn work(&self) -> BoxFuture<'_, ()> {
        async {
            tokio::join!(
                self.watcher.send_first_heartbeats(&self.background),
                self.watcher.watch_as_leader()
            );
        }
        .boxed()
    }

    fn finish_background_tasks(&self) -> BoxFuture<'_, ()> {
        self.background.finish().boxed()
    }

    fn name(&self) -> &'static str {
        "kubernetes"
    }
}

/// Returns whether the records of this machine have an outcome of the step: the delivery was late, and its Job may be gone.
/// After a rejected job, a step runs even though it has an outcome.
fn is_step_over(reporter: &dyn PlatformReporter, job: &JobData) -> bool {
    match reporter.recorded_state(&StepRef::of(job)) {
        Ok(state) => {
            state.is_some_and(|state| state.has_outcome() && state.job != JobStatus::Rejected)
        }
        Err(error) => {
            // The claim prevents that a step runs twice.
            warn!(
                error = chain(&error),
                job_id = job.job_id,
                step_id = job.step_id,
                "the platform could not be asked whether the step is over"
            );
            false
        }
    }
}

#[cfg(test)]
mod tests;
