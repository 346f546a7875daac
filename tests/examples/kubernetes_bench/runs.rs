//! Runs as the launcher would make them, and what a bare client does to make the same.

use anyhow::{Context as _, Result};
use integration_tests::{Repository, job};
use job_contract::{Document, JobData};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource as _, ResourceExt as _};
use manifest::{Deployment, Manifest, names};
use serde_json::json;

use crate::server::BARE;

/// The step every run of a bench is made of.
pub(crate) fn step() -> JobData {
    let mut step = job::plan(&Repository::fixture());
    step.access_token = Some("ghs_0123456789abcdefghijklmnopqrstuvwxyz".into());
    for number in 0..10 {
        let name = format!("variable_{number}");
        step.variables
            .insert(name, "a value of usual length".into());
    }
    step
}

pub(crate) fn manifest_in(namespace: &str, job: &JobData) -> Result<Manifest> {
    let deployment = Deployment {
        namespace: namespace.to_owned(),
        ..Deployment::default()
    };
    manifest::build(&Document::written(job), &deployment)
        .map_err(|errors| anyhow::anyhow!("{errors}"))
}

/// The requests that make a run: Job, Secret, release.
#[derive(Clone)]
pub(crate) struct Bare {
    jobs: Api<Job>,
    secrets: Api<Secret>,
}

impl Bare {
    pub(crate) fn new(client: Client) -> Self {
        Self {
            jobs: Api::namespaced(client.clone(), BARE),
            secrets: Api::namespaced(client, BARE),
        }
    }

    /// Makes a run as a program would that does nothing else.
    pub(crate) async fn launch(&self, manifest: Manifest) -> Result<()> {
        let params = PostParams::default();
        let job = self.jobs.create(&params, &manifest.job).await?;
        let mut secret = manifest.secret.context("job data travels in a Secret")?;
        secret.metadata.owner_references = Some(vec![owner(&job)]);
        self.secrets.create(&params, &secret).await?;
        let release = Patch::Merge(json!({
            "metadata": {
                "uid": job.uid(),
                "annotations": {"mayfly.dev/released-at": job.creation_timestamp().map(|time| time.0)},
            },
            "spec": {"suspend": false},
        }));
        let params = PatchParams::default();
        self.jobs.patch(&job.name_any(), &params, &release).await?;
        Ok(())
    }
}

pub(crate) fn owner(job: &Job) -> OwnerReference {
    OwnerReference {
        api_version: Job::api_version(&()).into_owned(),
        kind: Job::kind(&()).into_owned(),
        name: job.name_any(),
        uid: job.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(false),
    }
}

/// Whether a Job has been let run.
pub(crate) fn is_released(job: &Job) -> bool {
    job.spec.as_ref().and_then(|spec| spec.suspend) == Some(false)
}

/// The name of a run's Job.
pub(crate) fn name(job: &JobData) -> String {
    names::job_name(&job.job_id, &job.step_id)
}
