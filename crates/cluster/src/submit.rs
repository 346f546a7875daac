//! Creates exactly one Job for each run, also after crashes:
//!
//! 1. Create the Job, suspended.
//! 2. Store its Secret, with the Job as owner.
//! 3. Release the Job. If it has a queue of the cluster, the Job enters that queue instead. Until then it names a queue that
//!    does not exist, because a queue may release a Job at any time.
//!
//! A delivery that gets 409 continues after the last completed step. Two rules prevent the loss of an accepted run in a
//! crash or a race:
//! - A delivery that continues the Job of another delivery writes to that Job after it stored the Secret.
//! - An incomplete Job is removed only if nothing was written to it since the launcher looked for its Secret.
//!
//! The platform may encode the document of a step anew for each delivery. A Job runs only the document whose digest it
//! names. So a delivery with another document stores no Secret for a Job that it finds. If that Job has its Secret, the
//! run is the one that was accepted. If not, and no delivery can be about to store it, the Job is created again.
//!
//! The launcher never reads a Secret. Each request that may create the Job names another Secret in it. So the name in a
//! Job's specification can only belong to that Job's own Secret. If storing it fails because it exists, that counts as
//! success. A dry run of storing it shows whether it exists. The garbage collector removes a Secret whose Job is gone.

use std::time::Duration;

use job_contract::{annotations, labels};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, PostParams};
use manifest::{Manifest, names, pod};
use serde_json::json;
use tokio::time::Instant;
use tracing::info;
use uuid::Uuid;
use verdict::{is_queued_by_cluster, is_suspended, terminal};

use super::job::{Deletion, this_version};
use super::{Cluster, ClusterError, FIELD_MANAGER, annotation, label};

/// The action of the dry run that shows whether a Secret exists.
pub(super) const DRY_RUN_ACTION: &str = "look for the job data";
/// How often the objects of a run may change during a delivery. After that, the next delivery continues.
const ROUNDS: usize = 8;
/// A slower delivery may overlap with the watcher. It writes to the Job before it responds.
const SLOW: Duration = Duration::from_secs(15);
/// A delivery of a Job of this age is slow, if it has not ended. The API server's clock is known to the second.
const ABANDONED: Duration = SLOW.saturating_add(Duration::from_secs(2));

/// How long an ended Job is kept while its end is not reported to the platform. Terrakube gives a job six hours in all.
/// After a night without the platform or the launcher, verdict and log must still exist.
pub(super) const KEPT_UNREPORTED: Duration = Duration::from_hours(24);

/// What a delivery found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// This delivery created the Job.
    Created,
    /// An earlier delivery created it.
    AlreadyThere,
}

/// A Job that holds the accepted run.
#[derive(Clone, Debug)]
struct Accepted {
    submitted: Submitted,
    uid: String,
    /// What this delivery must do with the Job.
    release: Option<Release>,
}

#[derive(Clone, Debug)]
pub(super) enum Release {
    /// `suspend` becomes false.
    Start,
    /// It enters this queue of the cluster, which starts it.
    Enqueue(String),
}

/// The state of a Job that an earlier delivery created.
enum JobState {
    /// Released or over.
    Released,
    /// Suspended and never released. Also a Job that a queue of the cluster releases, until its end.
    Held(HeldJob),
    /// Being deleted, and never released.
    Deleting,
}

struct HeldJob {
    uid: String,
    stored: bool,
}

impl Cluster {
    /// Ensures that the run's Job exists, has its Secret, and is released. With a limit on runs in flight, the watcher
    /// releases it.
    pub async fn submit(&self, objects: &Manifest) -> Result<Submitted, ClusterError> {
        let name = name_of(&objects.job.metadata)?;
        for _ in 0..ROUNDS {
            let accepted = self.store(objects).await?;
            let Some(release) = &accepted.release else {
                return Ok(accepted.submitted);
            };
            match self.release_uid(name, &accepted.uid, release).await {
                // The Job was deleted meanwhile. Start again.
                Err(error) if error.is_not_found() || error.is_conflict() => {}
                Err(error) => return Err(error),
                Ok(()) => return Ok(accepted.submitted),
            }
        }
        Err(unsettled())
    }

    /// Does the same as [`Cluster::submit`], but returns as soon as the Job and its Secret exist. It releases the Job
    /// in the background. If that fails, the watcher releases it.
    ///
    /// The Job is kept until the watcher has reported its end.
    pub async fn accept(&self, objects: &Manifest) -> Result<Submitted, ClusterError> {
        let objects = &kept_until_reported(objects);
        let name = name_of(&objects.job.metadata)?.to_owned();
        let accepted = self.store(objects).await?;
        if let Some(release) = accepted.release {
            let cluster = self.clone();
            tokio::spawn(async move { cluster.release_uid(&name, &accepted.uid, &release).await });
        }
        Ok(accepted.submitted)
    }

    /// Ensures that the run's Job exists and has its Secret, and leaves it suspended. The caller does the work of the
    /// run, and then calls [`Cluster::dismiss`]. If the work fails, the caller calls [`Cluster::release`]. If neither
    /// is called, the watcher releases the Job.
    pub async fn hold(&self, objects: &Manifest) -> Result<Submitted, ClusterError> {
        let mut marked = kept_until_reported(objects);
        marked
            .job
            .metadata
            .annotations
            .get_or_insert_default()
            .insert(annotations::NOTHING_TO_RUN.to_owned(), "true".to_owned());
        // A Job that is created by one request would start at once.
        let held = Self {
            max_in_flight: usize::MAX,
            ..self.clone()
        };
        Ok(Box::pin(held.store(&marked)).await?.submitted)
    }

    /// Removes a Job that was held and never released. The deletion applies only to the version that was read, because
    /// the Job may be released at any time.
    pub async fn dismiss(&self, name: &str) -> Result<(), ClusterError> {
        let action = "remove a run with nothing to do";
        for _ in 0..ROUNDS {
            let Some(job) = self.find_job(name).await? else {
                return Ok(());
            };
            if !is_suspended(&job) || annotation(&job.metadata, annotations::RELEASED_AT).is_some()
            {
                return Ok(());
            }
            let (params, meant) = (DeleteParams::background(), this_version(&job));
            // The Job may have changed, for example its conditions by the Job controller. Then it is read again.
            if self.delete_job(action, name, params, meant).await? != Deletion::Changed {
                return Ok(());
            }
        }
        Err(unsettled())
    }

    /// Releases a suspended Job, without regard to the limit. A released Job stays as it is.
    pub async fn release(&self, name: &str) -> Result<(), ClusterError> {
        let job = self.job(name).await?;
        if !is_suspended(&job) || terminal(&job).is_some() {
            return Ok(());
        }
        match release_of(&job) {
            Some(release) => {
                self.release_uid(name, &uid_of(&job.metadata)?, &release)
                    .await
            }
            None => Ok(()),
        }
    }

    /// Whether an earlier delivery of this step was accepted.
    ///
    /// # Errors
    /// Fails also while another delivery may still store the job data.
    pub async fn has_run(&self, job_id: &str, step_id: &str) -> Result<bool, ClusterError> {
        let Some(job) = self.find_job(&names::job_name(job_id, step_id)).await? else {
            return Ok(false);
        };
        let is_abandoned = self.is_abandoned(&job);
        let [of_job, of_step] =
            [labels::JOB_ID, labels::STEP_ID].map(|of| label(&job.metadata, of));
        if of_job != Some(job_id) || of_step != Some(step_id) {
            return Ok(false);
        }
        match job_state(&job)? {
            JobState::Released => Ok(true),
            JobState::Deleting => Ok(false),
            JobState::Held(held) if self.has_job_data(&job, &held).await? => Ok(true),
            JobState::Held(_) if is_abandoned => Ok(false),
            JobState::Held(_) => Err(unsettled()),
        }
    }

    async fn store(&self, objects: &Manifest) -> Result<Accepted, ClusterError> {
        let name = name_of(&objects.job.metadata)?;
        for _ in 0..ROUNDS {
            let begun = Instant::now();
            match self.create_job(objects).await {
                Ok(job) => {
                    let uid = uid_of(&job.metadata)?;
                    if let Some(secret) = &objects.secret
                        && let Err(error) = self.store_secret(secret, &job).await
                    {
                        if error.concerns_one_run() {
                            // The delivery is refused. No later one may take its Job for an accepted run.
                            Box::pin(self.give_up_refused(name, &uid)).await?;
                        }
                        return Err(error);
                    }
                    if begun.elapsed() > SLOW && !self.mark_stored(name, &uid).await? {
                        continue;
                    }
                    log_run(&job, "created");
                    return Ok(self.accepted(Submitted::Created, &job, uid));
                }
                Err(error) if error.is_already_exists() => {
                    let continued = Box::pin(self.continue_job(objects, name)).await?;
                    if let Some(accepted) = continued {
                        return Ok(accepted);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Err(unsettled())
    }

    fn accepted(&self, submitted: Submitted, job: &Job, uid: String) -> Accepted {
        self.note_stored(&uid);
        let is_limited = self.max_in_flight > 0;
        let release = release_of(job).filter(|release| match release {
            Release::Start => !is_limited && is_suspended(job),
            Release::Enqueue(_) => true,
        });
        Accepted {
            submitted,
            uid,
            release,
        }
    }

    /// Without a Secret and without a limit, nothing delays the Job's start. So one request creates and releases it.
    fn is_released_at_once(&self, objects: &Manifest) -> bool {
        objects.secret.is_none() && self.max_in_flight == 0 && !is_queued_by_cluster(&objects.job)
    }

    async fn create_job(&self, objects: &Manifest) -> Result<Job, ClusterError> {
        let jobs = self.jobs();
        let at_once = self.is_released_at_once(objects);
        // A request without a response may have succeeded, and its Job may be gone again. So each request is an attempt
        // of its own.
        let create = || {
            let mut job = objects.job_of_attempt(&attempt());
            keep_out_of_queue(&mut job.metadata);
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

    /// Continues an earlier delivery. `None`: the Job is gone or being deleted, so start again.
    async fn continue_job(
        &self,
        objects: &Manifest,
        name: &str,
    ) -> Result<Option<Accepted>, ClusterError> {
        let Some(job) = self.find_job(name).await? else {
            return Ok(None);
        };
        // A delivery may store the Secret after the look for it below. So the age is that of the Job before that look.
        let is_abandoned = self.is_abandoned(&job);
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
                    release: None,
                }));
            }
            JobState::Deleting => {
                tokio::time::sleep(self.retry_policy.first_pause).await;
                return Ok(None);
            }
            JobState::Held(held) => held,
        };
        if !held.stored && job_data_secret(&job).is_some() {
            if !self.complete_job_data(objects, &job, &held).await? {
                if is_abandoned {
                    self.give_up_incomplete(name, &job).await?;
                } else {
                    tokio::time::sleep(self.retry_policy.first_pause).await;
                }
                return Ok(None);
            }
            if !self.mark_stored(name, &held.uid).await? {
                return Ok(None);
            }
        }
        Ok(Some(self.accepted(Submitted::AlreadyThere, &job, held.uid)))
    }

    /// Ensures that a held Job has its Secret. `false`: it has none, and this delivery cannot store what the Job accepts.
    async fn complete_job_data(
        &self,
        objects: &Manifest,
        job: &Job,
        held: &HeldJob,
    ) -> Result<bool, ClusterError> {
        match &objects.secret {
            Some(secret) if accepts_document_of(job, &objects.job) => {
                self.store_secret(secret, job).await?;
                Ok(true)
            }
            Some(_) => self.has_job_data(job, held).await,
            // A launcher with another configuration created this Job. This one may have no right to look for a Secret.
            None => Ok(false),
        }
    }

    /// Whether the delivery that created this Job has had its time to complete it.
    fn is_abandoned(&self, job: &Job) -> bool {
        let created = job.metadata.creation_timestamp.as_ref();
        created.is_none_or(|created| {
            let age = Duration::try_from(self.now().duration_since(created.0));
            age.unwrap_or_default() >= ABANDONED
        })
    }

    /// Removes the Job of a refused delivery, unless another delivery has completed it. The Job controller may change it
    /// at any time.
    async fn give_up_refused(&self, name: &str, uid: &str) -> Result<(), ClusterError> {
        for _ in 0..ROUNDS {
            let job = self.find_job(name).await?;
            let Some(job) = job.filter(|job| job.metadata.uid.as_deref() == Some(uid)) else {
                return Ok(());
            };
            match job_state(&job)? {
                JobState::Held(held) if !held.stored => {
                    self.give_up_incomplete(name, &job).await?;
                }
                _ => return Ok(()),
            }
        }
        Err(unsettled())
    }

    /// Removes a Job that has no Secret and was not accepted, unless it has changed.
    async fn give_up_incomplete(&self, name: &str, job: &Job) -> Result<(), ClusterError> {
        // The watcher would report the end of a deleted Job.
        let patch = json!({"metadata": {
            "uid": job.metadata.uid,
            "resourceVersion": job.metadata.resource_version,
            "annotations": {annotations::NOT_ACCEPTED: "true"},
        }});
        let action = "give up an incomplete Job";
        match self.patch_this_job(action, name, &patch).await? {
            Some(job) => self.remove_incomplete(name, &job).await.map(drop),
            None => Ok(()),
        }
    }

    /// Stores the Secret under the name that this Job reads, with this Job as owner. An existing Secret of that name
    /// belongs to this Job, because no other Job names it.
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

    /// Whether a Secret of that name exists. A dry run of storing one shows it.
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

    /// Records on the Job that its Secret exists. `false`: the Job is gone or being deleted.
    async fn mark_stored(&self, name: &str, uid: &str) -> Result<bool, ClusterError> {
        let now = self.now().to_string();
        let noted = json!({annotations::STORED_AT: now, annotations::NOT_ACCEPTED: null});
        let patch = json!({"metadata": {"uid": uid, "annotations": noted}});
        let job = self.patch_this_job("accept the run", name, &patch).await?;
        Ok(job.is_some_and(|job| job.metadata.deletion_timestamp.is_none()))
    }

    pub(super) async fn release_uid(
        &self,
        name: &str,
        uid: &str,
        release: &Release,
    ) -> Result<(), ClusterError> {
        let now = self.now().to_string();
        let (patch, done) = match release {
            Release::Start => {
                let noted = json!({annotations::RELEASED_AT: now, annotations::NOT_ACCEPTED: null});
                let meta = json!({"uid": uid, "annotations": noted});
                let patch = json!({"metadata": meta, "spec": {"suspend": false}});
                (patch, "released")
            }
            Release::Enqueue(queue) => {
                let noted = json!({annotations::QUEUE: null, annotations::NOT_ACCEPTED: null});
                let queue = json!({labels::KUEUE_QUEUE: queue});
                let meta = json!({"uid": uid, "annotations": noted, "labels": queue});
                (json!({"metadata": meta}), "queued")
            }
        };
        let job = self.patch_job("release the run", name, &patch).await?;
        self.forget_stored(uid);
        log_run(&job, done);
        // The Job was released while it was being deleted. It counts as gone.
        if job.metadata.deletion_timestamp.is_some() {
            return Err(unsettled());
        }
        Ok(())
    }

    /// Releases a suspended Job that was never released. If its job data is missing and `remove_incomplete` is set, it
    /// removes the Job instead, because its submitter is dead.
    pub(super) async fn release_held(
        &self,
        name: &str,
        remove_incomplete: bool,
    ) -> Result<ReleaseOutcome, ClusterError> {
        let Some(job) = self.find_job(name).await? else {
            return Ok(ReleaseOutcome::NotHeld);
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
        let Some(release) = release_of(&job) else {
            return Ok(ReleaseOutcome::Released);
        };
        match self.release_uid(name, &held.uid, &release).await {
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

    /// No delivery of such a Job got a response. So the platform delivers the step again, and a new Job is created.
    async fn remove_incomplete(
        &self,
        name: &str,
        job: &Job,
    ) -> Result<ReleaseOutcome, ClusterError> {
        let (params, meant) = (DeleteParams::background(), this_version(job));
        let action = "remove an incomplete Job";
        Ok(match self.delete_job(action, name, params, meant).await? {
            Deletion::Done => ReleaseOutcome::Removed,
            Deletion::Gone => ReleaseOutcome::NotHeld,
            // Read it again.
            Deletion::Changed => ReleaseOutcome::Incomplete,
        })
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

/// Returns the advice if the cluster refuses the dry run for a Secret. Until that is fixed, the Job stays suspended.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReleaseOutcome {
    Released,
    /// Its job data is not stored yet.
    Incomplete,
    /// It was incomplete and was removed.
    Removed,
    /// It is gone, being deleted, released or over.
    NotHeld,
}

pub(super) fn post() -> PostParams {
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

/// Whether two objects have the labels of the same job and step.
fn is_same_run(one: &ObjectMeta, other: &ObjectMeta) -> bool {
    [labels::JOB_ID, labels::STEP_ID]
        .into_iter()
        .all(|name| label(one, name).is_some() && label(one, name) == label(other, name))
}

/// Returns the queue of the cluster that a Job is still kept out of.
pub(super) fn awaited_queue(job: &Job) -> Option<&str> {
    annotation(&job.metadata, annotations::QUEUE)
}

fn keep_out_of_queue(meta: &mut ObjectMeta) {
    let named = meta.labels.get_or_insert_default();
    if let Some(queue) = named.get_mut(labels::KUEUE_QUEUE) {
        let queue = std::mem::replace(queue, labels::NO_QUEUE.to_owned());
        let noted = meta.annotations.get_or_insert_default();
        noted.insert(annotations::QUEUE.to_owned(), queue);
    }
}

/// How a held Job is released. `None`: it is in a queue of the cluster.
fn release_of(job: &Job) -> Option<Release> {
    match awaited_queue(job) {
        Some(queue) => Some(Release::Enqueue(queue.to_owned())),
        None => (!is_queued_by_cluster(job)).then_some(Release::Start),
    }
}

fn job_state(job: &Job) -> Result<JobState, ClusterError> {
    let released = annotation(&job.metadata, annotations::RELEASED_AT).is_some();
    let is_deleted = job.metadata.deletion_timestamp.is_some();
    // The default queue of a namespace may start a Job whose launcher was killed before it stored the Secret.
    let is_started = !is_suspended(job) && (is_deleted || !is_queued_by_cluster(job));
    if terminal(job).is_some() || is_started || released {
        return Ok(JobState::Released);
    }
    if is_deleted {
        return Ok(JobState::Deleting);
    }
    Ok(JobState::Held(HeldJob {
        uid: uid_of(&job.metadata)?,
        stored: annotation(&job.metadata, annotations::STORED_AT).is_some(),
    }))
}

/// Keeps the Job while platform and launcher are not available. The time to live counts from the Job's end and not from
/// the report. So the Job's own time to live is recorded in an annotation, and set after the report. The longer time
/// still limits how long a Job stays if no launcher comes back.
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

/// Returns the Secret from which the executor of this Job reads its job data.
fn job_data_secret(job: &Job) -> Option<&str> {
    pod::job_data_secret(job.spec.as_ref()?.template.spec.as_ref()?)
}

/// Whether the executor of a Job runs the document of another: a Job of an earlier release names no digest and runs any.
fn accepts_document_of(job: &Job, other: &Job) -> bool {
    let digest = |job: &Job| {
        let spec = job.spec.as_ref()?.template.spec.as_ref()?;
        pod::job_data_digest(spec).map(str::to_owned)
    };
    digest(job).is_none_or(|expected| digest(other) == Some(expected))
}

/// Returns a unique name for this attempt to create a Job. It cannot be predicted.
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
        // `true` needs a right on finalizers in clusters that protect owner references.
        block_owner_deletion: Some(false),
    }]);
    Ok(secret)
}

#[cfg(test)]
mod tests;
