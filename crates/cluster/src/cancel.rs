//! Ends a run early.

use std::time::Duration;

use job_contract::annotations;
use kube::api::DeleteParams;
use serde_json::json;
use verdict::terminal;

use super::job::{Deletion, this_job};
use super::{Cluster, ClusterError};

/// The result of a cancellation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancelled {
    /// The executor had not started. The run is gone.
    BeforeStart,
    /// The executor is being stopped. It can save state and report within its pod's grace period.
    Stopping,
    /// The run was over, and stays as it is.
    AlreadyOver,
}

impl Cluster {
    /// Cancels a run by deleting its Job. The garbage collector ends the pod with the pod's own grace period. A started
    /// executor first gets `head_start`, because it may end by itself after the platform's cancellation.
    pub async fn cancel(
        &self,
        name: &str,
        head_start: Duration,
    ) -> Result<Cancelled, ClusterError> {
        let job = self.job(name).await?;
        if terminal(&job).is_some() {
            return Ok(Cancelled::AlreadyOver);
        }
        let now = self.now().to_string();
        let mark = json!({"metadata": {"uid": job.metadata.uid, "annotations": {annotations::CANCELLED_AT: now}}});
        let action = "cancel the run";
        if self.patch_this_job(action, name, &mark).await?.is_none() {
            return Ok(Cancelled::AlreadyOver);
        }
        let started = self.may_have_begun(&job).await?;
        if started && !head_start.is_zero() {
            tokio::time::sleep(head_start).await;
            let job = self.find_job(name).await?;
            if job.is_none_or(|job| terminal(&job).is_some()) {
                return Ok(Cancelled::AlreadyOver);
            }
        }
        let params = DeleteParams::foreground();
        let deleted = self
            .delete_job(action, name, params, this_job(&job))
            .await?;
        Ok(match deleted {
            Deletion::Done if started => Cancelled::Stopping,
            Deletion::Done => Cancelled::BeforeStart,
            Deletion::Gone | Deletion::Changed => Cancelled::AlreadyOver,
        })
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use serde_json::json;

    use super::super::fake_server::{Server, inline, objects, refusal};
    use super::*;

    #[tokio::test]
    async fn cancelling_a_held_run_removes_its_job_and_its_job_data() {
        let server = Server::start();
        let cluster = server.cluster().with_max_in_flight(1);
        cluster.submit(&objects("1", "a")).await.unwrap();
        let cancelled = cluster.cancel("job-1-a", Duration::from_mins(1)).await;
        assert_eq!(cancelled.unwrap(), Cancelled::BeforeStart);
        assert_eq!((server.count("jobs"), server.count("secrets")), (0, 0));
    }

    #[tokio::test]
    async fn a_run_that_is_over_is_left_as_it_is() {
        let server = Server::start();
        let cluster = server.cluster();
        cluster.submit(&inline("1", "a")).await.unwrap();
        server.put(
            "jobs",
            json!({"metadata": {"name": "job-1-a"},
                "status": {"conditions": [{"type": "Complete", "status": "True"}]}}),
        );
        let cancelled = cluster.cancel("job-1-a", Duration::ZERO).await.unwrap();
        assert_eq!(cancelled, Cancelled::AlreadyOver);
        assert_eq!(server.count("jobs"), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn an_executor_that_may_not_be_looked_at_has_its_head_start() {
        let server = Server::start();
        let cluster = server.faulty(|line, _| {
            line.ends_with("/pods")
                .then(|| refusal(StatusCode::FORBIDDEN, "Forbidden", "no pods for you"))
        });
        cluster.submit(&inline("1", "a")).await.unwrap();
        let head_start = Duration::from_secs(50);
        let begun = tokio::time::Instant::now();
        let cancelled = cluster.cancel("job-1-a", head_start).await.unwrap();
        assert_eq!(cancelled, Cancelled::Stopping);
        assert_eq!(begun.elapsed().as_secs(), head_start.as_secs());
        assert_eq!(server.count("jobs"), 0);
        // What was never released has nothing to end.
        let cluster = cluster.with_max_in_flight(1);
        cluster.submit(&objects("1", "b")).await.unwrap();
        let cancelled = cluster.cancel("job-1-b", Duration::from_mins(1)).await;
        assert_eq!(cancelled.unwrap(), Cancelled::BeforeStart);
    }

    #[tokio::test]
    async fn what_is_not_there_cannot_be_cancelled() {
        let error = Server::start()
            .cluster()
            .cancel("job-1-a", Duration::ZERO)
            .await
            .unwrap_err();
        assert!(matches!(error, ClusterError::NoSuchRun(name) if name == "job-1-a"));
    }
}
