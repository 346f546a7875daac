//! Builds the objects that a run needs in the cluster: a Job, and a Secret with its job data.
//!
//! - [`build`] makes the [`Manifest`] of a document and a [`Deployment`], and [`deployment_errors`] says what no document can work
//!   with.
//! - [`overrides`] reads the variables of a workspace, [`policy`] says which of them count, [`overlay`] lays a pod template over
//!   the result.
//! - [`fill`] makes the Job that fills the store of providers.
//! - [`references()`] lists what a pod refers to, for those who check whether it is there.
//!
//! Pure: no client, clock, randomness or environment. The same document and deployment give the same bytes. So a second
//! delivery creates nothing new. This crate must not know how a Job is created or watched, and why.

pub mod check;
mod container;
pub mod deployment;
mod environment;
pub mod error;
pub mod executor_kind;
pub mod fill;
pub mod grace_period;
mod identity;
pub mod image;
pub mod job_data;
pub mod names;
pub mod overlay;
pub mod overrides;
pub mod pod;
pub mod pod_security;
pub mod policy;
pub mod quantity;
pub mod references;
mod second_pod;
mod setting_values;
pub mod tolerations;

use std::collections::BTreeMap;

use job_contract::labels;
use job_contract::{Document, JobData, StepType, env};
use k8s_openapi::ByteString;
use k8s_openapi::api::batch::v1::{Job, JobSpec};
use k8s_openapi::api::core::v1::{PodTemplateSpec, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use runtime::setting::SettingError;
use serde_json::{Value, json};

pub use self::deployment::Deployment;
pub use self::error::{ManifestErrors, Origin};

use self::error::{CollectErrors as _, quote};
use self::executor_kind::ExecutorKind;
use self::job_data::Transport;
use self::overrides::{Names, Overrides};
use self::references::References;

/// The objects of one run, before their creation. The Secret has no owner yet, because the owner is the Job's UID. The
/// Secret has the Job's name until [`Manifest::of_attempt`] gives it its own.
#[derive(Clone, PartialEq)]
pub struct Manifest {
    /// The Job, suspended. It is released when its Secret exists.
    pub job: Job,
    /// The Secret with the job data. `None`: the Job itself holds the job data.
    pub secret: Option<Secret>,
    /// Lines for the run log about settings that have no effect.
    pub notes: Vec<String>,
}

/// Shows the names of the objects, and never the data in them.
impl std::fmt::Debug for Manifest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Manifest")
            .field("job", &self.job.metadata.name)
            .field("secret", &self.secret.is_some())
            .finish_non_exhaustive()
    }
}

impl Manifest {
    /// Returns the objects of one attempt to create the Job. The Job's name is the same in every attempt. The Secret's
    /// name is new in each. So a Secret with this name belongs to this Job, and the launcher need not read it.
    #[must_use]
    pub fn of_attempt(&self, attempt: &str) -> Self {
        let job = self.job_of_attempt(attempt);
        let secret = self.secret.clone().map(|mut secret| {
            let name = self.job.metadata.name.as_deref().unwrap_or_default();
            secret.metadata.name = Some(names::secret_name(name, attempt));
            secret
        });
        Self {
            job,
            secret,
            notes: self.notes.clone(),
        }
    }

    /// The Job of [`Manifest::of_attempt`], which holds the Secret's name.
    #[must_use]
    pub fn job_of_attempt(&self, attempt: &str) -> Job {
        let mut job = self.job.clone();
        let own = job.metadata.name.clone().unwrap_or_default();
        let name = names::secret_name(&own, attempt);
        let spec = job.spec.as_mut();
        if let Some(spec) = spec.and_then(|spec| spec.template.spec.as_mut()) {
            pod::read_from_attempt(spec, &own, &name);
        }
        job
    }

    /// The same with these variables in the executor's environment, and their values in the Secret.
    ///
    /// # Panics
    /// If the job data travels in the Job: then there is no Secret.
    #[must_use]
    pub fn with_secret_environment(mut self, variables: &[(&str, &str)]) -> Self {
        let name = self.job.metadata.name.clone().unwrap_or_default();
        let secret = self.secret.as_mut().expect("leases have Secrets");
        let data = secret.data.get_or_insert_default();
        let spec = self.job.spec.as_mut();
        let spec = spec.and_then(|spec| spec.template.spec.as_mut());
        for (variable, value) in variables {
            let value = ByteString(value.as_bytes().to_vec());
            data.insert((*variable).to_owned(), value);
        }
        if let Some(spec) = spec {
            let variables = variables.iter().map(|(variable, _)| *variable);
            pod::read_from_secret(spec, &name, variables);
        }
        self
    }

    /// The same with these labels on the Job and its pods, and these annotations on the Job.
    #[must_use]
    pub fn labelled(mut self, labels: &[(&str, &str)], annotations: &[(&str, &str)]) -> Self {
        let owned = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            let pairs = pairs.iter();
            pairs
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect()
        };
        let meta = &mut self.job.metadata;
        meta.labels.get_or_insert_default().extend(owned(labels));
        meta.annotations
            .get_or_insert_default()
            .extend(owned(annotations));
        if let Some(spec) = &mut self.job.spec {
            let meta = spec.template.metadata.get_or_insert_default();
            meta.labels.get_or_insert_default().extend(owned(labels));
        }
        self
    }

    /// The claim of the plugin cache that the pod mounts.
    #[must_use]
    pub fn cache_claim(&self) -> Option<&str> {
        let spec = self.job.spec.as_ref()?.template.spec.as_ref()?;
        pod::cache_claim(spec)
    }

    /// The same with an empty folder in the place of that claim, which does not exist.
    #[must_use]
    pub fn without_cache_claim(mut self) -> Self {
        let Some(claim) = self.cache_claim().map(str::to_owned) else {
            return self;
        };
        let spec = self.job.spec.as_mut();
        if let Some(spec) = spec.and_then(|spec| spec.template.spec.as_mut()) {
            pod::empty_cache(spec);
        }
        self.notes.push(format!(
            "The claim {} of the plugin cache does not exist. The run has an empty folder in its place.",
            quote(&claim)
        ));
        self
    }

    /// Both objects in a `v1/List`, in the order they are created.
    pub fn to_list(&self) -> Value {
        let object = |object: Result<Value, _>| object.expect("Kubernetes objects are plain JSON");
        let mut items = vec![object(serde_json::to_value(&self.job))];
        items.extend(
            self.secret
                .iter()
                .map(|secret| object(serde_json::to_value(secret))),
        );
        json!({"apiVersion": "v1", "kind": "List", "items": items})
    }
}

/// Builds the objects of a step, or returns all errors in the settings of its workspace.
pub fn build(job: &Document, deployment: &Deployment) -> Result<Manifest, ManifestErrors> {
    let mut errors = Vec::new();
    let step_type = check_job(job, &mut errors);
    let request = Request::read(job, deployment, &mut errors);
    let transport = Transport::choose(job, request.kind, deployment.job_data_mode);
    let (transport, step_type) = match (transport, step_type) {
        (Ok(transport), Some(step_type)) if errors.is_empty() => (transport, step_type),
        (transport, _) => {
            let mut origin = Origin::Run;
            if let Err(wrong) = transport {
                origin = wrong.origin;
                errors.extend(wrong.errors);
            }
            return Err(ManifestErrors { origin, errors });
        }
    };
    assemble(job, deployment, request, transport, step_type)
}

/// The settings of a workspace.
struct Request {
    requested: Overrides,
    /// `requested`, with the deployment's defaults for what it does not set.
    merged: Overrides,
    kind: ExecutorKind,
    /// Lines for the run log about variables that have no effect.
    notes: Vec<String>,
}

impl Request {
    fn read(job: &JobData, deployment: &Deployment, errors: &mut Vec<SettingError>) -> Self {
        let (mut requested, unreadable) =
            overrides::read(&job.environment_variables, Names::WORKSPACE);
        errors.extend(unreadable);
        errors.extend(deployment.policy.refusals(&requested));
        let merged = requested.clone().over(deployment.defaults.clone());
        let kind = deployment.executor_kind_of(&merged);
        errors.extend(combined_setting_errors(&requested, &merged, deployment));
        let (env, notes) = environment::of_container(
            std::mem::take(&mut requested.env),
            kind,
            deployment.policy.environment.as_ref(),
        );
        requested.env = env;
        let mut notes = notes;
        if requested.plugin_cache_dir.is_some()
            && deployment.filled_store_for(&requested, kind).is_some()
        {
            notes.push(format!(
                "`{}` has no effect: providers come from the store of this cluster, which runs only read.",
                env::PLUGIN_CACHE_DIR
            ));
        }
        Self {
            requested,
            merged,
            kind,
            notes,
        }
    }
}

fn assemble(
    job: &JobData,
    deployment: &Deployment,
    request: Request,
    transport: Transport,
    step_type: StepType,
) -> Result<Manifest, ManifestErrors> {
    let Request {
        requested,
        merged,
        kind,
        notes,
    } = request;
    let name = names::job_name(&job.job_id, &job.step_id);
    let labels_of_run = all_labels(job, step_type, &merged);
    let (template, records) = pod::template(&pod::PodInput {
        deployment,
        kind,
        requested: &requested,
        merged: &merged,
        transport: &transport,
        name: &name,
        labels: &labels_of_run,
        deadline_seconds: deployment.active_deadline_seconds,
        grace_seconds: deployment.grace_for(step_type),
    });
    check_template(&template, deployment)?;
    let metadata = ObjectMeta {
        name: Some(name),
        namespace: Some(deployment.namespace.clone()),
        labels: Some(labels_of_run),
        ..ObjectMeta::default()
    };
    if merged.labels.contains_key(labels::KUEUE_QUEUE) && !second_pod::finds_claims(kind, records) {
        let refusal = SettingError::new(labels::KUEUE_QUEUE, second_pod::queue_refusal(kind));
        return Err(ManifestErrors {
            origin: Origin::Run,
            errors: vec![refusal],
        });
    }
    let backoff_limit = second_pod::backoff_limit(kind, records, deployment);
    Ok(Manifest {
        secret: secret(&metadata, transport),
        notes,
        job: Job {
            metadata: ObjectMeta {
                annotations: Some(merged.annotations).filter(|map| !map.is_empty()),
                ..metadata
            },
            spec: Some(job_spec(deployment, template, backoff_limit)),
            status: None,
        },
    })
}

/// Returns the errors that every run of this deployment would have. They come from settings that conflict, so no single
/// setting shows them.
pub fn deployment_errors(deployment: &Deployment) -> Vec<SettingError> {
    let run = match any_run(deployment) {
        Ok(run) => run,
        Err(errors) => return errors.errors,
    };
    let honoured = run.job.spec.and_then(|spec| spec.backoff_limit);
    let limit = deployment.backoff_limit;
    let ignored = limit.filter(|limit| honoured != Some(*limit));
    let kind = deployment.executor_kind_of(&deployment.defaults);
    let refusal = ignored.map(|limit| second_pod::refusal(limit, kind));
    let refusal = refusal.map(|rule| SettingError::new(env::BACKOFF_LIMIT, rule));
    let store = fill::FillTemplate::of(deployment).err();
    let store = store.into_iter().flat_map(|errors| errors.errors);
    refusal.into_iter().chain(store).collect()
}

/// Returns the objects that runs of this deployment refer to. Settings of workspaces can add more.
pub fn references(deployment: &Deployment) -> Result<References, ManifestErrors> {
    let manifest = any_run(deployment)?;
    let name = manifest.job.metadata.name.unwrap_or_default();
    let spec = manifest.job.spec.and_then(|spec| spec.template.spec);
    Ok(References::of(&spec.unwrap_or_default(), &name))
}

fn any_run(deployment: &Deployment) -> Result<Manifest, ManifestErrors> {
    let job = JobData {
        step_type: Some(StepType::Apply.name().to_owned()),
        organization_id: "organization".to_owned(),
        workspace_id: "workspace".to_owned(),
        job_id: "1".to_owned(),
        step_id: "step".to_owned(),
        ..JobData::default()
    };
    build(&Document::written(&job), deployment)
}

/// The ids become labels, whose rules are stricter than the rules of path segments.
fn check_job(job: &JobData, errors: &mut Vec<SettingError>) -> Option<StepType> {
    if let Err(error) = job.validate() {
        errors.add("job data", format!("cannot be used: {error}"));
        return None;
    }
    for (field, value) in [
        ("organizationId", &job.organization_id),
        ("workspaceId", &job.workspace_id),
        ("jobId", &job.job_id),
        ("stepId", &job.step_id),
    ] {
        if let Err(rule) = check::label_value(value) {
            errors.add(field, rule);
        }
    }
    job.step_type().ok()
}

/// Returns the errors that follow from the settings of the workspace and the deployment together:
/// - an image without Mayfly's executor for a run with a lease;
/// - a claim for the plugin cache that neither the operator nor the policy names, or that of the store that runs only read;
/// - two mounts at one path, or one inside the other.
fn combined_setting_errors(
    requested: &Overrides,
    merged: &Overrides,
    deployment: &Deployment,
) -> Vec<SettingError> {
    let mut errors = Vec::new();
    if deployment.leased && deployment.executor_kind_of(merged) == ExecutorKind::Stock {
        let image = quote(deployment.image_of(merged));
        errors.add(env::EXECUTOR_KIND,
            format!(
                "must be `mayfly` to say that {image} holds Mayfly's executor: no other one accepts a lease"
            ),
        );
    }
    let kind = deployment.executor_kind_of(merged);
    let store = deployment.filled_store_for(requested, kind);
    if let Some(claim) = &requested.plugin_cache_claim
        && pod::filled_store_claim(deployment) == Some(claim.as_str())
    {
        errors.add(
            env::PLUGIN_CACHE_CLAIM,
            format!(
                "asks for the claim {}, which holds the store of providers that runs only read; without this variable \
                 the run reads it",
                quote(claim)
            ),
        );
    }
    // Nothing is mounted at a path that has no effect.
    let requested_cache_dir = requested.plugin_cache_dir.as_deref();
    let requested_cache_dir = requested_cache_dir.filter(|_| store.is_none());
    if requested_cache_dir.is_some() && deployment.plugin_cache == deployment::PluginCache::Claim {
        let claim = pod::plugin_cache_claim(merged);
        let by_operator = deployment.defaults.plugin_cache_claim.as_deref() == Some(claim);
        let by_name = requested.plugin_cache_claim.is_some();
        if !by_operator && !by_name && !deployment.policy.persistent_volume_claims.allow(claim) {
            errors.add(env::PLUGIN_CACHE_DIR,
                format!(
                    "asks for the claim `{claim}`, which the policy's `persistentVolumeClaims` does not allow"
                ),
            );
        }
    }
    let config_map_path = pod::config_map_path(merged);
    let cache_path = store.map_or(merged.plugin_cache_dir.as_deref(), |store| {
        Some(store.path.as_str())
    });
    if merged.config_map.is_some() && cache_path.is_some_and(|at| check::meet(at, config_map_path))
    {
        errors.add(
            env::EPHEMERAL_CONFIG_MAP_PATH,
            "must stay clear of the path of the plugin cache",
        );
    }
    if let Some(overlay) = &deployment.overlay {
        // A workspace that sets only the path moves the deployment's config map.
        let moves = requested.config_map.is_some() || requested.config_map_path.is_some();
        let config_map = (moves && merged.config_map.is_some()).then_some(config_map_path);
        for (variable, path) in [
            (env::PLUGIN_CACHE_DIR, requested_cache_dir),
            (env::EPHEMERAL_CONFIG_MAP_PATH, config_map),
        ] {
            if let Some(mounted) = path.and_then(|path| overlay.mount_meeting(path)) {
                errors.add(
                    variable,
                    format!("must stay clear of `{mounted}`, which the deployment mounts"),
                );
            }
        }
    }
    errors
}

/// Mayfly's labels come last, so they replace other values of these keys.
fn all_labels(job: &JobData, step_type: StepType, merged: &Overrides) -> BTreeMap<String, String> {
    let mut all = merged.labels.clone();
    for (key, value) in [
        (labels::NAME, labels::NAME_VALUE),
        (labels::MANAGED_BY, labels::MANAGED_BY_VALUE),
        (labels::JOB_ID, &job.job_id),
        (labels::STEP_ID, &job.step_id),
        (labels::STEP_TYPE, labels::step_type_value(step_type)),
        (labels::ORGANIZATION, &job.organization_id),
        (labels::WORKSPACE, &job.workspace_id),
    ] {
        all.insert(key.to_owned(), value.to_owned());
    }
    all
}

/// Checks the finished pod. Wrong settings of a workspace were refused before, by name. So an error here comes from the
/// deployment.
fn check_template(
    template: &PodTemplateSpec,
    deployment: &Deployment,
) -> Result<(), ManifestErrors> {
    let mut errors = Vec::new();
    let spec = template.spec.clone().unwrap_or_default();
    let subject = match deployment.overlay {
        Some(_) => env::POD_TEMPLATE_FILE,
        None => env::EPHEMERAL_POD_SECURITY,
    };
    for violation in pod_security::violations(&spec, deployment.policy.pod_security) {
        errors.add(
            subject,
            format!(
                "breaks the policy's `podSecurity: {}`: {violation}",
                deployment.policy.pod_security
            ),
        );
    }
    let annotations = template.metadata.as_ref();
    let annotations = annotations.and_then(|metadata| metadata.annotations.as_ref());
    for (key, value) in annotations.into_iter().flatten() {
        let level = deployment.policy.pod_security;
        if let Some(rule) = pod_security::annotation_rule(key, value, level) {
            let of_default = deployment.defaults.pod_annotations.contains_key(key);
            errors.add(if of_default {
                    env::EPHEMERAL_POD_ANNOTATIONS
                } else {
                    subject
                },
                format!(
                    "has the annotation `{key}`, which {rule} by the policy's `podSecurity: {level}`"
                ),
            );
        }
    }
    let deadline = deployment.active_deadline_seconds;
    let grace = spec.termination_grace_period_seconds.unwrap_or_default();
    if grace >= deadline {
        errors.add(
            env::ACTIVE_DEADLINE_SECONDS,
            format!("is {deadline} s and must be longer than the grace period of {grace} s"),
        );
    } else {
        for violation in grace_period::violations(&spec) {
            errors.add(subject, violation);
        }
    }
    ManifestErrors::check(Origin::Deployment, errors)
}

fn job_spec(deployment: &Deployment, template: PodTemplateSpec, backoff_limit: i32) -> JobSpec {
    JobSpec {
        active_deadline_seconds: Some(deployment.active_deadline_seconds),
        backoff_limit: Some(backoff_limit),
        completions: Some(1),
        parallelism: Some(1),
        // If no second pod is allowed, every failure and every disruption ends the Job.
        pod_failure_policy: (backoff_limit > 0).then(second_pod::failure_policy),
        // Two pods of one run must never run at the same time.
        pod_replacement_policy: Some("Failed".to_owned()),
        suspend: Some(true),
        template,
        ttl_seconds_after_finished: Some(deployment.ttl_seconds_after_finished),
        ..JobSpec::default()
    }
}

fn secret(metadata: &ObjectMeta, transport: Transport) -> Option<Secret> {
    let parts = match transport {
        Transport::Literal(_) => return None,
        Transport::Secret(parts) => parts,
    };
    let keys = parts.into_iter().enumerate();
    let data = keys.map(|(index, part)| (pod::job_data_key(index), ByteString(part.into_bytes())));
    Some(Secret {
        metadata: metadata.clone(),
        data: Some(data.collect()),
        // A pod must read the dispatched job data, unchanged. The kubelet does not watch an immutable Secret.
        immutable: Some(true),
        type_: Some("Opaque".to_owned()),
        string_data: None,
    })
}

#[cfg(test)]
mod tests;
