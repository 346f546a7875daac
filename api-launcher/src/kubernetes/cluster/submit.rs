//! Creates exactly one Job for each run, whatever crashes.
//!
//! The Job is created suspended. Its Secret is stored, with the Job as owner. Then the Job is released. A delivery that gets
//! 409 continues where the one before it stopped. Two rules keep a crash or a race from losing an accepted run:
//!
//! - A delivery that continues a Job of another one writes to that Job after it stored the Secret.
//! - An incomplete Job is removed only if nothing was written to it since the Secret was looked for.
//!
//! No Secret is ever read. Each request that may create the Job names another Secret in it. So the name in a Job's spec can
//! only belong to that Job's own Secret. If storing it again fails because it exists, that counts as success. A dry run
//! of storing it tells whether it exists. The garbage collector removes a Secret whose Job is gone.

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tracing::info;
use uuid::Uuid;

use super::{Cluster, ClusterError, annotation, annotations, label, labels};
use crate::kubernetes::manifest::{Manifest, names, pod};
use crate::kubernetes::verdict::{is_suspended, terminal};

/// Name under which writes appear in managed fields.
const FIELD_MANAGER: &str = "mayfly";
/// A Secret is tried to be stored.
pub(super) const DRY_RUN_ACTION: &str = "look for the job data";
/// How often the objects of one run may change under a delivery before it is left to the next one.
const ROUNDS: usize = 8;
/// A delivery slower than this may have met the reconciler, and writes to the Job before it answers.
const SLOW: Duration = Duration::from_secs(15);

/// How long an ended Job is kept of whose end the platform was not told. Terrakube gives a job six hours in all; a night
/// without the platform or the launcher must not cost a verdict and a log.
pub(super) const KEPT_UNREPORTED: Duration = Duration::from_hours(24);

/// What a delivery found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// This delivery created the Job.
    Created,
    /// An earlier delivery had.
    AlreadyThere,
}

/// A Job in which the run is safe.
#[derive(Clone, Debug)]
struct Accepted {
    submitted: Submitted,
    uid: String,
    /// No other replica releases it.
    to_release: bool,
}

/// The state of a Job that an earlier delivery created.
enum JobState {
    /// Released or over.
    Released,
    /// Suspended and never released.
    Held(HeldJob),
    /// Being deleted, and never released.
    Deleting,
}

struct HeldJob {
    uid: String,
    stored: bool,
}

impl Cluster {
    /// Makes sure that the run's Job exists, has its Secret, and is released (with a limit on runs in flight: will
    /// be released by the watcher).
    pub async fn submit(&self, objects: &Manifest) -> Result<Submitted, ClusterError> {
        let name = name_of(&objects.job.metadata)?;
        for _ in 0..ROUNDS {
            let accepted = self.store(objects).await?;
            if !accepted.to_release {
                return Ok(accepted.submitted);
            }
            match self.release_uid(name, &accepted.uid).await {
                // The Job was deleted in between: start again.
                Err(error) if error.is_not_found() || error.is_conflict() => {}
                Err(error) => return Err(error),
                Ok(()) => return Ok(accepted.submitted),
            }
        }
        Err(unsettled())
    }

    /// As [`Cluster::submit`], but answers as soon as the run is safe in the cluster and releases it in the
    /// background. Should that fail, the watcher releases it.
    ///
    /// The Job is kept until its end is reported, which the watcher sees to.
    pub async fn accept(&self, objects: &Manifest) -> Result<Submitted, ClusterError> {
        let objects = &kept_until_reported(objects);
        let name = name_of(&objects.job.metadata)?.to_owned();
        let accepted = self.store(objects).await?;
        if accepted.to_release {
            let cluster = self.clone();
            tokio::spawn(async move { cluster.release_uid(&name, &accepted.uid).await });
        }
        Ok(accepted.submitted)
    }

    /// Makes sure that the run's Job exists and has its Secret, and leaves it suspended. The caller does what the
    /// run is for, and then calls [`Cluster::dismiss`], or [`Cluster::release`] when that fails. Should neither happen, the
    /// watcher releases it in the end.
    pub async fn hold(&self, objects: &Manifest) -> Result<Submitted, ClusterError> {
        let mut marked = kept_until_reported(objects);
        marked
            .job
            .metadata
            .annotations
            .get_or_insert_default()
            .insert(annotations::NOTHING_TO_RUN.to_owned(), "true".to_owned());
        // A Job that is made by one request would be made to run.
        let held = Self {
            max_in_flight: usize::MAX,
            ..self.clone()
        };
        Ok(Box::pin(held.store(&marked)).await?.submitted)
    }

    /// Removes a Job that was held and never released. Only as it was looked at: it may be released at any moment.
    pub async fn dismiss(&self, name: &str) -> Result<(), ClusterError> {
        let jobs = self.jobs();
        for _ in 0..ROUNDS {
            let job = match self.job(name).await {
                Ok(job) => job,
                Err(ClusterError::NoSuchRun(_)) => return Ok(()),
                Err(error) => return Err(error),
            };
            if !is_suspended(&job) || annotation(&job.metadata, annotations::RELEASED_AT).is_some()
            {
                return Ok(());
            }
            let params = DeleteParams::background().preconditions(Preconditions {
                uid: job.metadata.uid.clone(),
                resource_version: job.metadata.resource_version.clone(),
            });
            let removed = self
                .request_with_retries("remove a run with nothing to do", || {
                    jobs.delete(name, &params)
                })
                .await;
            match removed {
                // The Job has changed since, for example its conditions by the Job controller: read it again.
                Err(error) if error.is_conflict() => {}
                Err(error) if !error.is_not_found() => return Err(error),
                _ => return Ok(()),
            }
        }
        Err(unsettled())
    }

    /// Lets a suspended Job run, whatever the limit. Releasing a released one changes nothing.
    pub async fn release(&self, name: &str) -> Result<(), ClusterError> {
        let job = self.job(name).await?;
        if !is_suspended(&job) || terminal(&job).is_some() {
            return Ok(());
        }
        self.release_uid(name, &uid_of(&job.metadata)?).await
    }

    pub(super) async fn job(&self, name: &str) -> Result<Job, ClusterError> {
        let jobs = self.jobs();
        let job = self
            .request_with_retries("read the Job", || jobs.get(name))
            .await;
        job.map_err(|error| {
            if error.is_not_found() {
                ClusterError::NoSuchRun(name.to_owned())
            } else {
                error
            }
        })
    }

    /// Whether the run of this step has a Job.
    pub async fn has_run(&self, job_id: &str, step_id: &str) -> Result<bool, ClusterError> {
        match self.job(&names::job_name(job_id, step_id)).await {
            Ok(job) => Ok(label(&job.metadata, labels::JOB_ID) == Some(job_id)
                && label(&job.metadata, labels::STEP_ID) == Some(step_id)),
            Err(ClusterError::NoSuchRun(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The Job with its Secret, durable.
    async fn store(&self, objects: &Manifest) -> Result<Accepted, ClusterError> {
        let name = name_of(&objects.job.metadata)?;
        for _ in 0..ROUNDS {
            let begun = Instant::now();
            match self.create_job(objects).await {
                Ok(job) => {
                    let uid = uid_of(&job.metadata)?;
                    if let Some(secret) = &objects.secret {
                        self.store_secret(secret, &job).await?;
                    }
                    if begun.elapsed() > SLOW && !self.mark_stored(name, &uid).await? {
                        continue;
                    }
                    return Ok(self.accepted(Submitted::Created, objects, uid));
                }
                Err(error) if error.is_already_exists() => {
                    if let Some(accepted) = self.continue_job(objects, name).await? {
                        return Ok(accepted);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Err(unsettled())
    }

    fn accepted(&self, submitted: Submitted, objects: &Manifest, uid: String) -> Accepted {
        log_run(&objects.job, "created");
        self.note_stored(&uid);
        let to_release = self.max_in_flight == 0
            && is_suspended(&objects.job)
            && !self.is_released_at_once(objects)
            && !is_queued_by_cluster(&objects.job);
        Accepted {
            submitted,
            uid,
            to_release,
        }
    }

    /// A Job without a Secret has nothing to wait for when there is no limit: one request makes it.
    fn is_released_at_once(&self, objects: &Manifest) -> bool {
        objects.secret.is_none() && self.max_in_flight == 0 && !is_queued_by_cluster(&objects.job)
    }

    async fn create_job(&self, objects: &Manifest) -> Result<Job, ClusterError> {
        let jobs = self.jobs();
        let at_once = self.is_released_at_once(objects);
        // A request without an answer may have been carried out, and its Job may have come and gone: the next one is
        // another attempt.
        let create = || {
            let mut job = objects.job_of_attempt(&attempt());
            if at_once && let Some(spec) = &mut job.spec {
                spec.suspend = Some(false);
                let noted = job.metadata.annotations.get_or_insert_default();
                noted.insert(annotations::RELEASED_AT.to_owned(), self.now().to_string());
            }
            let jobs = jobs.clone();
            async move { jobs.create(&post(), &job).await }
        };
        self.request_with_retries("create the Job", create).await
    }

    /// Continues what an earlier delivery began. `None`: the Job is gone or going, start anew.
    async fn continue_job(
        &self,
        objects: &Manifest,
        name: &str,
    ) -> Result<Option<Accepted>, ClusterError> {
        let job = match self.job(name).await {
            Ok(job) => job,
            Err(ClusterError::NoSuchRun(_)) => return Ok(None),
            Err(error) => return Err(error),
        };
        if !is_same_run(&job.metadata, &objects.job.metadata) {
            return Err(ClusterError::NameTaken {
                kind: "Job",
                name: name.to_owned(),
            });
        }
        let held = match job_state(&job)? {
            JobState::Released => {
                return Ok(Some(Accepted {
                    submitted: Submitted::AlreadyThere,
                    uid: uid_of(&job.metadata)?,
                    to_release: false,
                }));
            }
            JobState::Deleting => {
                tokio::time::sleep(self.retry_policy.first_pause).await;
                return Ok(None);
            }
            JobState::Held(held) => held,
        };
        if !held.stored && job_data_secret(&job).is_some() {
            let Some(secret) = &objects.secret else {
                // Made by a launcher that was set up otherwise: it gets its job data by the one way it was made for, or
                // not at all.
                self.remove_incomplete(name, &job).await?;
                return Ok(None);
            };
            self.store_secret(secret, &job).await?;
            if !self.mark_stored(name, &held.uid).await? {
                return Ok(None);
            }
        }
        let to_release = self.max_in_flight == 0 && !is_queued_by_cluster(&job);
        self.note_stored(&held.uid);
        Ok(Some(Accepted {
            submitted: Submitted::AlreadyThere,
            uid: held.uid,
            to_release,
        }))
    }

    /// Stores the Secret under the name this Job reads it by, owned by this Job. One that is there already is this Job's:
    /// no other names it.
    async fn store_secret(&self, secret: &Secret, job: &Job) -> Result<(), ClusterError> {
        let secrets = self.secrets();
        let owned = owned_by(secret, job)?;
        let params = post();
        let created = self
            .request_with_retries("store the job data", || secrets.create(&params, &owned))
            .await;
        match created {
            Err(error) if !error.is_already_exists() => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether there is a Secret of that name, told by trying to store one; nothing is stored.
    async fn is_secret_there(&self, name: &str) -> Result<bool, ClusterError> {
        let secrets = self.secrets();
        let mut secret = Secret::default();
        secret.metadata.name = Some(name.to_owned());
        let params = PostParams {
            dry_run: true,
            ..post()
        };
        let tried = self
            .request_with_retries(DRY_RUN_ACTION, || secrets.create(&params, &secret))
            .await;
        match tried {
            Ok(_) => Ok(false),
            Err(error) if error.is_already_exists() => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Writes onto the Job that its Secret is there. `false`: the Job is gone or going.
    async fn mark_stored(&self, name: &str, uid: &str) -> Result<bool, ClusterError> {
        let now = self.now().to_string();
        let patch = json!({"metadata": {"uid": uid, "annotations": {annotations::STORED_AT: now}}});
        match self.patch_job("accept the run", name, &patch).await {
            Ok(job) => Ok(job.metadata.deletion_timestamp.is_none()),
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn release_uid(&self, name: &str, uid: &str) -> Result<(), ClusterError> {
        let now = self.now().to_string();
        let patch = json!({
            "metadata": {"uid": uid, "annotations": {annotations::RELEASED_AT: now}},
            "spec": {"suspend": false},
        });
        let job = self.patch_job("release the run", name, &patch).await?;
        self.forget_stored(uid);
        log_run(&job, "released");
        // Released into its own deletion: as good as not there.
        if job.metadata.deletion_timestamp.is_some() {
            return Err(unsettled());
        }
        Ok(())
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

    /// Releases a suspended Job that was never released. If its job data is missing, this removes the Job instead, if
    /// `remove_incomplete` says that its submitter is dead.
    pub(super) async fn release_held(
        &self,
        name: &str,
        remove_incomplete: bool,
    ) -> Result<ReleaseOutcome, ClusterError> {
        let job = match self.job(name).await {
            Ok(job) => job,
            Err(ClusterError::NoSuchRun(_)) => return Ok(ReleaseOutcome::NotHeld),
            Err(error) => return Err(error),
        };
        let JobState::Held(held) = job_state(&job)? else {
            return Ok(ReleaseOutcome::NotHeld);
        };
        if !self.has_job_data(&job, &held).await? {
            if !remove_incomplete {
                return Ok(ReleaseOutcome::Incomplete);
            }
            return self.remove_incomplete(name, &job).await;
        }
        if is_queued_by_cluster(&job) {
            return Ok(ReleaseOutcome::Released);
        }
        match self.release_uid(name, &held.uid).await {
            Ok(()) => Ok(ReleaseOutcome::Released),
            Err(error) if error.is_not_found() || error.is_conflict() => {
                Ok(ReleaseOutcome::NotHeld)
            }
            Err(error) => Err(error),
        }
    }

    async fn has_job_data(&self, job: &Job, held: &HeldJob) -> Result<bool, ClusterError> {
        if held.stored || self.knows_stored(&held.uid) {
            return Ok(true);
        }
        let Some(secret) = job_data_secret(job) else {
            return Ok(true);
        };
        self.is_secret_there(secret).await
    }

    /// No delivery was answered for such a Job, so the platform delivers again, and a new one is made.
    async fn remove_incomplete(
        &self,
        name: &str,
        job: &Job,
    ) -> Result<ReleaseOutcome, ClusterError> {
        let jobs = self.jobs();
        let params = DeleteParams::background().preconditions(Preconditions {
            uid: job.metadata.uid.clone(),
            resource_version: job.metadata.resource_version.clone(),
        });
        let removed = self
            .request_with_retries("remove an incomplete Job", || jobs.delete(name, &params))
            .await;
        match removed {
            Ok(_) => Ok(ReleaseOutcome::Removed),
            Err(error) if error.is_not_found() => Ok(ReleaseOutcome::NotHeld),
            // The Job has changed since: read it again.
            Err(error) if error.is_conflict() => Ok(ReleaseOutcome::Incomplete),
            Err(error) => Err(error),
        }
    }
}

/// Logs a line about a run, with the ids by which its lines are found.
fn log_run(job: &Job, what: &'static str) {
    let meta = &job.metadata;
    let text = |name| label(meta, name).unwrap_or_default();
    info!(
        job = meta.name,
        job_id = text(labels::JOB_ID),
        step_id = text(labels::STEP_ID),
        organization_id = text(labels::ORGANIZATION),
        workspace_id = text(labels::WORKSPACE),
        "{what} the Job of a run"
    );
}

/// What to do where the cluster does not let the launcher try whether a Secret is there: until then its Job stays suspended.
pub(super) fn trial_advice(error: &ClusterError) -> Option<&'static str> {
    match error {
        ClusterError::Busy {
            action: DRY_RUN_ACTION,
            message,
            ..
        } if message.contains("exceeded quota") => Some(
            "this check needs room for one more Secret in the namespace's quota: raise the quota, or remove Secrets",
        ),
        ClusterError::Refused {
            action: DRY_RUN_ACTION,
            code: 400,
            ..
        } => Some(
            "an admission webhook for Secrets has to support dry runs (`sideEffects: None` or `NoneOnDryRun`), or to exclude the namespace of the runs",
        ),
        ClusterError::Refused {
            action: DRY_RUN_ACTION,
            ..
        } => Some(
            "the launcher has to be let create Secrets, also in a dry run: `api-launcher check` names a right that is \
             missing, and the rest is an admission policy's",
        ),
        _ => None,
    }
}

/// The result of releasing a suspended Job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReleaseOutcome {
    Released,
    /// Its job data is not there yet.
    Incomplete,
    /// It was incomplete, and was removed.
    Removed,
    /// It is gone, going, released or over.
    NotHeld,
}

fn post() -> PostParams {
    PostParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PostParams::default()
    }
}

const fn unsettled() -> ClusterError {
    ClusterError::Unsettled {
        action: "submit the run",
    }
}

fn name_of(meta: &ObjectMeta) -> Result<&str, ClusterError> {
    meta.name.as_deref().ok_or(ClusterError::Incomplete("name"))
}

fn uid_of(meta: &ObjectMeta) -> Result<String, ClusterError> {
    meta.uid.clone().ok_or(ClusterError::Incomplete("uid"))
}

/// Whether two objects carry the same job and step.
fn is_same_run(one: &ObjectMeta, other: &ObjectMeta) -> bool {
    [labels::JOB_ID, labels::STEP_ID]
        .into_iter()
        .all(|name| label(one, name).is_some() && label(one, name) == label(other, name))
}

pub(super) fn is_queued_by_cluster(job: &Job) -> bool {
    label(&job.metadata, labels::KUEUE_QUEUE).is_some()
}

fn job_state(job: &Job) -> Result<JobState, ClusterError> {
    let released = annotation(&job.metadata, annotations::RELEASED_AT).is_some();
    if terminal(job).is_some() || !is_suspended(job) || released {
        return Ok(JobState::Released);
    }
    if job.metadata.deletion_timestamp.is_some() {
        return Ok(JobState::Deleting);
    }
    Ok(JobState::Held(HeldJob {
        uid: uid_of(&job.metadata)?,
        stored: annotation(&job.metadata, annotations::STORED_AT).is_some(),
    }))
}

/// The same, with a Job that outlives a platform that is away, and a launcher that is. Its own time to live, which begins
/// with its end and not with the report, is noted for whoever reports. The long one keeps nothing for ever where no
/// launcher comes back.
fn kept_until_reported(objects: &Manifest) -> Manifest {
    let mut kept = objects.clone();
    let Some(spec) = &mut kept.job.spec else {
        return kept;
    };
    let long = i32::try_from(KEPT_UNREPORTED.as_secs()).unwrap_or(i32::MAX);
    if let Some(seconds) = spec.ttl_seconds_after_finished.filter(|own| *own < long) {
        spec.ttl_seconds_after_finished = Some(long);
        let noted = kept.job.metadata.annotations.get_or_insert_default();
        noted.insert(annotations::KEEP_SECONDS.to_owned(), seconds.to_string());
    }
    kept
}

/// The Secret the executor of this Job reads its job data from.
fn job_data_secret(job: &Job) -> Option<&str> {
    pod::job_data_secret(job.spec.as_ref()?.template.spec.as_ref()?)
}

/// What tells this attempt to create a Job from every other, and what nobody can foresee.
fn attempt() -> String {
    format!("{:016x}", Uuid::new_v4().as_u64_pair().1)
}

fn owned_by(secret: &Secret, job: &Job) -> Result<Secret, ClusterError> {
    let name = job_data_secret(job).ok_or(ClusterError::Incomplete("job data"))?;
    let mut secret = secret.clone();
    secret.metadata.name = Some(name.to_owned());
    secret.metadata.owner_references = Some(vec![OwnerReference {
        api_version: "batch/v1".to_owned(),
        kind: "Job".to_owned(),
        name: name_of(&job.metadata)?.to_owned(),
        uid: uid_of(&job.metadata)?,
        controller: Some(true),
        // `true` would ask for a right on finalizers where owner references are guarded.
        block_owner_deletion: Some(false),
    }]);
    Ok(secret)
}

#[cfg(test)]
mod tests;
