//! Requests that tell whether the cluster can be used, for the launcher's readiness.

use super::{Cluster, ClusterError};

impl Cluster {
    /// Reads a Job that need not exist. This is the cheapest request that needs the API server, the namespace and the right
    /// to read runs.
    pub async fn check_access(&self) -> Result<(), ClusterError> {
        let jobs = self.jobs();
        self.request_with_retries("reach the namespace of runs", || {
            jobs.get_opt("mayfly-readiness")
        })
        .await
        .map(drop)
    }

    /// Checks that the namespace exists and that the launcher may create Jobs in it. What the API server says of the Job
    /// itself does not matter. Nothing is created.
    pub async fn check_creation(&self) -> Result<(), ClusterError> {
        match self.try_to_create().await {
            Err(error) if !error.is_transient() && !error.concerns_every_run() => Ok(()),
            tried => tried,
        }
    }
}
