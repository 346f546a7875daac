//! Answers whether the target could accept a dispatch now.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex as SyncMutex};
use std::time::{Duration, Instant};

use cluster::lease::LeaseState;
use cluster::rights::LEASE;
use cluster::{Cluster, ClusterError};
use http_service::Readiness;
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::start_failure::{CheckedBy, DispatchMode, StartFailureTracker};

/// How long a result is valid. Every client may send this request, so a response must be cheap.
const VALIDITY: Duration = Duration::from_secs(5);
/// Kubernetes probes time out after a few seconds.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The state of the Lease as this replica sees it, once that is known.
pub(super) type SharedLeaseState = Arc<SyncMutex<Option<LeaseState>>>;

#[derive(Debug)]
pub(super) struct ReadinessProbe {
    cluster: Cluster,
    pub(super) start_failures: Arc<StartFailureTracker>,
    /// The watcher keeps it up to date.
    pub(super) lease: SharedLeaseState,
    pub(super) last: Mutex<Option<(Instant, Readiness)>>,
    /// Whether the cluster has accepted a Job of this launcher, in a dry run.
    accepts_jobs: AtomicBool,
}

impl ReadinessProbe {
    pub(super) fn new(cluster: Cluster, start_failures: Arc<StartFailureTracker>) -> Self {
        Self {
            cluster,
            start_failures,
            lease: SharedLeaseState::default(),
            last: Mutex::new(None),
            accepts_jobs: AtomicBool::new(false),
        }
    }

    /// Returns whether the cluster answers, lets this launcher see runs, and has a watcher.
    pub(super) async fn check(&self) -> Readiness {
        // One request at a time. Callers that wait get its result.
        let mut last = self.last.lock().await;
        if let Some((at, readiness)) = &*last
            && at.elapsed() < VALIDITY
        {
            return readiness.clone();
        }
        let readiness = match timeout(TIMEOUT, self.probe()).await {
            Ok(Ok(())) => {
                self.start_failures.record_success(CheckedBy::Probe);
                self.with_start_failures()
            }
            Ok(Err(error)) if error.concerns_every_run() => {
                self.start_failures
                    .record_failure(CheckedBy::Probe, &error.to_string());
                self.with_start_failures()
            }
            Ok(Err(error)) => Readiness::NotReady(error.to_string()),
            Err(_) => Readiness::NotReady("the Kubernetes API does not answer".to_owned()),
        };
        *last = Some((Instant::now(), readiness.clone()));
        readiness
    }

    /// Lists runs. Until it succeeds once, it also creates a Job in a dry run, which concerns admission webhooks.
    async fn probe(&self) -> Result<(), ClusterError> {
        self.cluster.check_access().await?;
        if !self.accepts_jobs.load(Ordering::Relaxed) {
            self.cluster.check_creation().await?;
            self.accepts_jobs.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    fn with_start_failures(&self) -> Readiness {
        match self.start_failures.mode() {
            DispatchMode::Accept => self.with_lease(),
            DispatchMode::Delay(reason) => Readiness::NotReady(reason),
            DispatchMode::Fail(reason) => Readiness::Impaired(reason),
        }
    }

    /// A standby replica is as ready as the holder of the Lease. A replica that could not take over is not ready, because
    /// possibly no replica watches.
    fn with_lease(&self) -> Readiness {
        let lease = runtime::lock(&self.lease);
        match &*lease {
            None | Some(LeaseState::Holder | LeaseState::StandsBy) => Readiness::Ready,
            Some(LeaseState::NotAllowed) => Readiness::Impaired(format!(
                "no right to hold the Lease `{LEASE}`: this replica watches the runs without one, which only a single replica \
                 may do. Grant it what `rbac/launcher.yaml` does"
            )),
            Some(LeaseState::OutOfReach(cause)) => Readiness::NotReady(format!(
                "the Lease `{LEASE}` cannot be taken, so perhaps no replica watches the runs: {cause}"
            )),
        }
    }
}
