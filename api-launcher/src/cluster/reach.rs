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
}
