//! The requests about one Job.

use k8s_openapi::api::batch::v1::Job;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use serde_json::Value;
use verdict::is_suspended;

use super::view::has_begun;
use super::{Cluster, ClusterError, FIELD_MANAGER};

/// What became of a deletion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deletion {
    Done,
    /// There is no Job of the name.
    Gone,
    /// The Job is another one, or has changed since it was read.
    Changed,
}

impl Cluster {
    pub(super) async fn job(&self, name: &str) -> Result<Job, ClusterError> {
        let found = self.find_job(name).await?;
        found.ok_or_else(|| ClusterError::NoSuchRun(name.to_owned()))
    }

    pub(super) async fn find_job(&self, name: &str) -> Result<Option<Job>, ClusterError> {
        let jobs = self.jobs();
        self.request_with_retries("read the Job", || jobs.get_opt(name))
            .await
    }

    pub(super) async fn patch_job(
        &self,
        action: &'static str,
        name: &str,
        patch: &Value,
    ) -> Result<Job, ClusterError> {
        let jobs = self.jobs();
        let params = PatchParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let patch = Patch::Merge(patch);
        self.request_with_retries(action, || jobs.patch(name, &params, &patch))
            .await
    }

    /// Patches a Job. `None`: the Job is gone, is another one, or has changed.
    pub(super) async fn patch_this_job(
        &self,
        action: &'static str,
        name: &str,
        patch: &Value,
    ) -> Result<Option<Job>, ClusterError> {
        match self.patch_job(action, name, patch).await {
            Ok(job) => Ok(Some(job)),
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Deletes a Job if it still is the one that is meant.
    pub(super) async fn delete_job(
        &self,
        action: &'static str,
        name: &str,
        params: DeleteParams,
        meant: Preconditions,
    ) -> Result<Deletion, ClusterError> {
        let jobs = self.jobs();
        let params = params.preconditions(meant);
        let deleted = self
            .request_with_retries(action, || jobs.delete(name, &params))
            .await;
        match deleted {
            Ok(_) => Ok(Deletion::Done),
            Err(error) if error.is_not_found() => Ok(Deletion::Gone),
            Err(error) if error.is_conflict() => Ok(Deletion::Changed),
            Err(error) => Err(error),
        }
    }

    /// Whether the executor of the newest pod may have started.
    pub(super) async fn may_have_begun(&self, job: &Job) -> Result<bool, ClusterError> {
        Ok(match self.visible_pods_of(job).await? {
            Some(pods) => verdict::newest(&pods).is_some_and(has_begun),
            // If the pods cannot be read, it may have.
            None => !is_suspended(job),
        })
    }
}

/// Exactly this Job, whatever its version.
pub(super) fn this_job(job: &Job) -> Preconditions {
    Preconditions {
        uid: job.metadata.uid.clone(),
        resource_version: None,
    }
}

/// Exactly this version of the Job.
pub(super) fn this_version(job: &Job) -> Preconditions {
    Preconditions {
        resource_version: job.metadata.resource_version.clone(),
        ..this_job(job)
    }
}
