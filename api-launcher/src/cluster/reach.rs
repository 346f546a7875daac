//! Whether the cluster can be asked at all, for the launcher's readiness.

use super::{Cluster, ClusterError};

impl Cluster {
    /// Asks for one Job that need not exist: the cheapest question that needs the API server, the namespace and
    /// the right to look at runs.
    pub async fn reach(&self) -> Result<(), ClusterError> {
        let jobs = self.jobs();
        self.ask("reach the namespace of runs", || {
            jobs.get_opt("mayfly-readiness")
        })
        .await
        .map(drop)
    }

    /// Whether the API server would look at a Job at all: the namespace is there, and the launcher may create Jobs. What it
    /// says to the Job itself does not matter. Nothing is created.
    pub async fn lets_create(&self) -> Result<(), ClusterError> {
        match self.try_to_create().await {
            Err(error) if !error.is_transient() && !error.concerns_every_run() => Ok(()),
            tried => tried,
        }
    }
}
