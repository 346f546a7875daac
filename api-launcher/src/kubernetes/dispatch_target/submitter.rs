//! Creates the Job of a dispatch.

use std::sync::Arc;
use std::time::Duration;

use cluster::{Cluster, ClusterError, Submitted};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use job_contract::{Document, JobData, chain};
use manifest::Deployment;
use manifest::Manifest;
use reporter::dispatch::{Acceptance, DispatchError};
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

use super::start_failure::{CheckedBy, DispatchMode, StartFailureTracker};

/// How long a submission may take. Terrakube closes the connection after a minute, and then does not know that it may
/// dispatch again.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct JobSubmitter {
    pub(super) cluster: Cluster,
    pub(super) deployment: Deployment,
    pub(super) start_failures: Arc<StartFailureTracker>,
    pub(super) timeout: Duration,
}

#[derive(Debug)]
pub(super) struct Submission {
    pub(super) acceptance: Acceptance,
    /// The name of its Job, if the Job was not released.
    pub(super) held_job: Option<String>,
    /// Settings of the workspace that have no effect.
    pub(super) notes: Vec<String>,
}

/// Why a dispatch did not become a Job.
#[derive(Debug)]
pub(super) enum SubmitError {
    /// A later attempt may succeed.
    Unavailable(String),
    /// The cluster has accepted no Job for a while.
    Blocked(String),
    /// No attempt can succeed.
    Invalid(String),
}

impl From<SubmitError> for DispatchError {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::Unavailable(reason) => Self::Unavailable(reason),
            SubmitError::Blocked(reason) | SubmitError::Invalid(reason) => Self::Invalid(reason),
        }
    }
}

impl JobSubmitter {
    /// Creates the Job and releases it. With `hold`, the Job stays suspended.
    pub(super) async fn submit(
        &self,
        job: &Document,
        hold: bool,
    ) -> Result<Submission, SubmitError> {
        let deadline = Instant::now() + self.timeout;
        let submitted = match manifest::build(job, &self.deployment) {
            Ok(manifest) => {
                let looking = self.cluster.without_missing_cache(manifest.clone());
                let manifest = timeout_at(deadline, looking).await.unwrap_or(manifest);
                for note in &manifest.notes {
                    info!(job_id = job.job_id, step_id = job.step_id, "{note}");
                }
                self.submit_manifest(manifest, hold, deadline).await
            }
            Err(errors) => Err(SubmitError::Invalid(errors.to_string())),
        };
        match submitted {
            Err(SubmitError::Invalid(reason)) => {
                self.find_earlier_delivery(job, reason, deadline).await
            }
            submitted => submitted,
        }
    }

    async fn submit_manifest(
        &self,
        manifest: Manifest,
        hold: bool,
        deadline: Instant,
    ) -> Result<Submission, SubmitError> {
        let notes = manifest.notes.clone();
        let name = manifest.job.metadata.name.clone();
        let cluster = self.cluster.clone();
        let request = if hold {
            async move { cluster.hold(&manifest).await }.boxed()
        } else {
            // The release is not waited for. The cluster has the run by then, and the watcher releases what is left.
            async move { cluster.accept(&manifest).await }.boxed()
        };
        Ok(Submission {
            acceptance: self.send(deadline, request).await?,
            held_job: name.filter(|_| hold),
            notes,
        })
    }

    /// Sends the requests in a task of its own, so that they end even if the caller hangs up. If they take too long, the
    /// next delivery and the watcher find what they left in the cluster.
    async fn send(
        &self,
        deadline: Instant,
        request: BoxFuture<'static, Result<Submitted, ClusterError>>,
    ) -> Result<Acceptance, SubmitError> {
        let submitted = match tokio::spawn(timeout_at(deadline, request)).await {
            Ok(Ok(Ok(submitted))) => submitted,
            Ok(Ok(Err(error))) => return Err(self.classify(&error)),
            Ok(Err(_)) => {
                let reason = "the Kubernetes API takes too long";
                warn!(reason, "a dispatch did not become a Job");
                return Err(SubmitError::Unavailable(reason.to_owned()));
            }
            Err(_) => {
                return Err(SubmitError::Unavailable(
                    "the launcher is stopping".to_owned(),
                ));
            }
        };
        self.start_failures.record_success(CheckedBy::Dispatch);
        Ok(match submitted {
            Submitted::Created => Acceptance::New,
            Submitted::AlreadyThere => Acceptance::Duplicate,
        })
    }

    /// An error that concerns every run is worth a retry for a while. An error that concerns only this run is not.
    fn classify(&self, error: &ClusterError) -> SubmitError {
        warn!(error = chain(error), "a dispatch did not become a Job");
        if error.is_transient() {
            return SubmitError::Unavailable(error.to_string());
        }
        if error.concerns_one_run() {
            return SubmitError::Invalid(error.to_string());
        }
        match self
            .start_failures
            .record_failure(CheckedBy::Dispatch, &error.to_string())
        {
            DispatchMode::Fail(reason) => SubmitError::Blocked(format!(
                "{reason}. No run can start until that is fixed: `api-launcher check` shows what is missing"
            )),
            DispatchMode::Delay(reason) => SubmitError::Unavailable(reason),
            DispatchMode::Accept => SubmitError::Unavailable(error.to_string()),
        }
    }

    /// An earlier delivery may have been accepted before a setting or a rule of the cluster changed. Then this one is
    /// accepted too: any other response would fail the running job (contract 2.5).
    async fn find_earlier_delivery(
        &self,
        job: &JobData,
        reason: String,
        deadline: Instant,
    ) -> Result<Submission, SubmitError> {
        let found = self.cluster.has_run(&job.job_id, &job.step_id).boxed();
        let error = match timeout_at(deadline, found).await {
            Ok(Ok(true)) => {
                return Ok(Submission {
                    acceptance: Acceptance::Duplicate,
                    held_job: None,
                    notes: Vec::new(),
                });
            }
            Ok(Ok(false)) => return Err(SubmitError::Invalid(reason)),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the Kubernetes API takes too long".to_owned(),
        };
        Err(SubmitError::Unavailable(format!(
            "{reason}; and it is not known whether it was accepted before: {error}"
        )))
    }
}
