//! The Jobs of an agent's leases.

use job_contract::{annotations, labels};
use k8s_openapi::api::batch::v1::Job;
use kube::api::{DeleteParams, ListParams};
use pool_protocol::lease::LeaseRef;
use tracing::warn;
use verdict::{is_suspended, terminal};

use super::job::this_job;
use super::{Cluster, ClusterError, RunRef, annotation};

impl Cluster {
    /// The runs of an agent that were released, and whose end was not reported. A Job that was never released has no lease that
    /// counts: the hub gives it again, and then the Job is completed.
    pub async fn leased(&self, agent: &str) -> Result<Vec<RunRef>, ClusterError> {
        let jobs = self.jobs();
        let params = ListParams::default().labels(&labels::of_agent(agent));
        let found = self
            .request_with_retries("list the runs of the agent", || jobs.list(&params))
            .await?;
        let has = |job: &Job, name| annotation(&job.metadata, name).is_some();
        let is_open = |job: &Job| {
            let was_released = !is_suspended(job) || has(job, annotations::RELEASED_AT);
            was_released
                && !has(job, annotations::REPORTED_AT)
                && !has(job, annotations::REPORT_REFUSED)
        };
        let open = found.items.iter().filter(|job| is_open(job));
        Ok(open.filter_map(|job| RunRef::of(&job.metadata)).collect())
    }

    /// Whether there is a Job of this name.
    pub async fn is_there(&self, name: &str) -> Result<bool, ClusterError> {
        Ok(self.find_job(name).await?.is_some())
    }

    /// Removes the Job of a run unless it has this lease. Returns whether no Job has it: the Job had another one, or is gone.
    ///
    /// # Errors
    /// Refuses a Job that is of no run.
    pub async fn remove_unless_leased(
        &self,
        name: &str,
        lease: &LeaseRef,
    ) -> Result<bool, ClusterError> {
        let Some(job) = self.find_job(name).await? else {
            return Ok(true);
        };
        let Some(run) = RunRef::of(&job.metadata) else {
            return Err(ClusterError::NameTaken {
                kind: "Job",
                name: name.to_owned(),
            });
        };
        if run.lease == Some(*lease) && job.metadata.deletion_timestamp.is_none() {
            return Ok(false);
        }
        self.remove_job(&job).await?;
        Ok(true)
    }

    /// Removes a run whose executor has not started.
    pub async fn withdraw(&self, name: &str) -> Result<(), ClusterError> {
        let job = self.job(name).await?;
        if self.may_have_begun(&job).await? || terminal(&job).is_some() {
            return Ok(());
        }
        self.remove_job(&job).await
    }

    /// Ends a run at once. Its containers have no time to stop.
    pub async fn kill(&self, name: &str) -> Result<(), ClusterError> {
        let job = self.job(name).await?;
        let pods = self.pods();
        let at_once = DeleteParams::default().grace_period(0);
        for pod in self.visible_pods_of(&job).await?.unwrap_or_default() {
            let pod = pod.metadata.name.unwrap_or_default();
            let killed = self
                .request_with_retries("end the pod of the run at once", || {
                    pods.delete(&pod, &at_once)
                })
                .await;
            match killed {
                // Without the right, its Job ends it in its grace period.
                Err(error) if !error.is_not_found() => {
                    warn!(pod, %error, "a pod could not be ended at once");
                }
                _ => {}
            }
        }
        self.remove_job(&job).await
    }

    async fn remove_job(&self, job: &Job) -> Result<(), ClusterError> {
        let name = job.metadata.name.as_deref().unwrap_or_default();
        let params = DeleteParams::background();
        self.delete_job("remove the run", name, params, this_job(job))
            .await
            .map(drop)
    }
}

#[cfg(test)]
mod tests {
    use pool_protocol::id::{LeaseId, TaskId};
    use serde_json::{Value, json};

    use super::super::fake_server::{Server, objects};
    use super::*;
    use manifest::Manifest;

    fn lease() -> LeaseRef {
        LeaseRef {
            task: TaskId::new(),
            lease: LeaseId::new(),
            fencing_token: 2,
        }
    }

    fn leased_objects(lease: LeaseRef) -> Manifest {
        objects("1", "a").labelled(
            &[
                (labels::AGENT, "eu-1"),
                (labels::TASK, &lease.task.to_string()),
                (labels::LEASE, &lease.lease.to_string()),
            ],
            &[(annotations::FENCING_TOKEN, "2")],
        )
    }

    /// A pod of the Job, whose executor is in this state.
    fn pod(server: &Server, state: &Value) -> Value {
        let uid = server.object("jobs", "job-1-a").unwrap()["metadata"]["uid"].clone();
        json!({
            "metadata": {"name": "job-1-a-x", "labels": {"batch.kubernetes.io/job-name": "job-1-a"},
                "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "job-1-a", "uid": uid}]},
            "spec": {"containers": [{"name": "executor"}]},
            "status": {"phase": "Running", "containerStatuses": [{"name": "executor", "image": "", "imageID": "",
                "ready": true, "restartCount": 0, "state": state}]},
        })
    }

    #[tokio::test]
    async fn a_job_is_found_with_its_lease_once_it_was_released_and_until_its_end_is_reported() {
        let server = Server::start();
        let cluster = server.cluster().with_max_in_flight(1);
        let lease = lease();
        cluster.accept(&leased_objects(lease)).await.unwrap();
        assert_eq!(cluster.leased("eu-1").await.unwrap(), []);
        cluster.release("job-1-a").await.unwrap();
        let found = cluster.leased("eu-1").await.unwrap();
        assert_eq!(found[0].lease, Some(lease));
        let reported = json!({"metadata": {"name": "job-1-a", "annotations": {annotations::REPORTED_AT: "now"}}});
        server.put("jobs", reported);
        assert_eq!(cluster.leased("eu-1").await.unwrap(), []);
    }

    #[tokio::test]
    async fn the_job_of_another_lease_is_removed_and_that_of_this_one_is_kept() {
        let server = Server::start();
        let cluster = server.cluster();
        let (first, second) = (lease(), lease());
        cluster.accept(&leased_objects(first)).await.unwrap();
        let removed = cluster.remove_unless_leased("job-1-a", &first).await;
        assert!(!removed.unwrap());
        let removed = cluster.remove_unless_leased("job-1-a", &second).await;
        assert!(removed.unwrap());
        assert_eq!((server.count("jobs"), server.count("secrets")), (0, 0));
        let removed = cluster.remove_unless_leased("job-1-a", &second).await;
        assert!(removed.unwrap(), "it is gone");
        server.put("jobs", json!({"metadata": {"name": "job-1-a"}}));
        let foreign = cluster.remove_unless_leased("job-1-a", &second).await;
        assert!(matches!(foreign, Err(ClusterError::NameTaken { .. })));
        assert_eq!(server.count("jobs"), 1);
    }

    #[tokio::test]
    async fn a_lease_that_is_over_removes_its_job_unless_the_executor_is_at_work() {
        let server = Server::start();
        let cluster = server.cluster();
        cluster.submit(&leased_objects(lease())).await.unwrap();
        server.put("pods", pod(&server, &json!({"running": {}})));
        cluster.withdraw("job-1-a").await.unwrap();
        assert_eq!(server.count("jobs"), 1);
        server.remove("pods", "job-1-a-x");
        let waits = json!({"waiting": {"reason": "ContainerCreating"}});
        server.put("pods", pod(&server, &waits));
        cluster.withdraw("job-1-a").await.unwrap();
        assert_eq!(server.count("jobs"), 0);
    }

    #[tokio::test]
    async fn a_killed_run_leaves_nothing() {
        let server = Server::start();
        let cluster = server.cluster();
        cluster.submit(&leased_objects(lease())).await.unwrap();
        server.put("pods", pod(&server, &json!({"running": {}})));
        cluster.kill("job-1-a").await.unwrap();
        let left = ["jobs", "pods", "secrets"].map(|kind| server.count(kind));
        assert_eq!(left, [0, 0, 0]);
        assert!(matches!(
            cluster.kill("job-1-a").await,
            Err(ClusterError::NoSuchRun(_))
        ));
    }
}
