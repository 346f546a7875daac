//! Builds the pod template. The defaults come first, then the deployment's settings, the operator's overlay, and the
//! workspace's settings. Each can change the earlier ones.

use std::collections::BTreeMap;

use job_contract::provider_cache::CacheMode;
use job_contract::{Records, encoding, env};
use k8s_openapi::api::core::v1::{
    Capabilities, ConfigMapEnvSource, ConfigMapVolumeSource, Container, EmptyDirVolumeSource,
    EnvFromSource, EnvVar, EnvVarSource, LocalObjectReference, ObjectFieldSelector,
    PersistentVolumeClaimVolumeSource, PodSecurityContext, PodSpec, PodTemplateSpec,
    ResourceRequirements, SeccompProfile, SecretEnvSource, SecretKeySelector, SecurityContext,
    Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::container::{
    self, CONTAINER, CPU, EPHEMERAL_STORAGE, MEMORY, amounts, literal, set_env,
};
use super::deployment::{self, Deployment, FilledStore, PluginCache};
use super::executor_kind::ExecutorKind;
use super::grace_period;
use super::identity;
use super::image::Reference;
use super::job_data::Transport;
use super::overrides::{Overrides, Resources, SecurityKeys};
use super::quantity::Amount;
use super::second_pod;

/// Key of the Secret for the job data, or for their first part.
const JOB_DATA_KEY: &str = "job-data";
/// The executor's home. It is a volume, because the root file system is read-only.
pub const HOME: &str = "/home/mayfly";
/// Where the run's workspace is prepared, whatever the data directory is.
const WORK_DIR: &str = "/home/mayfly/work";
const TMP: &str = "/tmp";
/// Default mount path of the `ConfigMap` (contract 3.3).
const CONFIG_MAP_PATH: &str = "/data";
/// Default claim of a plugin cache (contract 3.3).
const PLUGIN_CACHE_CLAIM: &str = "terrakube-plugin-pvc";
const CONFIG_MAP_VOLUME: &str = "config-volume";
const PLUGIN_CACHE_VOLUME: &str = "tf-plugin-volume";
const WORK_VOLUME: &str = "work";
const TMP_VOLUME: &str = "tmp";
/// Default time that a run may wait for a node and then for its start. The manifest does not depend on the watcher's
/// settings.
const WAITS_SECONDS: i64 = 900 + 300;
/// User and group of the executor's image.
const USER: i64 = 1000;

/// The input for the template.
pub(super) struct PodInput<'a> {
    pub deployment: &'a Deployment,
    /// The kind of executor in the run's image.
    pub kind: ExecutorKind,
    /// The workspace's own settings. The policy allows them.
    pub requested: &'a Overrides,
    /// `requested`, with the deployment's defaults for what it does not set.
    pub merged: &'a Overrides,
    pub transport: &'a Transport,
    /// Name of the Job and of the Secret.
    pub name: &'a str,
    pub labels: &'a BTreeMap<String, String>,
    pub deadline_seconds: i64,
    pub grace_seconds: i64,
}

impl PodInput<'_> {
    /// The store of providers that the run reads.
    fn filled_store(&self) -> Option<&FilledStore> {
        self.deployment.filled_store_for(self.requested, self.kind)
    }
}

/// Builds the template. Also returns where its executor keeps its records.
pub(super) fn template(from: &PodInput<'_>) -> (PodTemplateSpec, Option<Records>) {
    let mut template = PodTemplateSpec {
        metadata: Some(ObjectMeta {
            annotations: Some(deployment::default_pod_annotations()),
            ..ObjectMeta::default()
        }),
        spec: Some(skeleton(from)),
    };
    apply(&mut template, &from.deployment.defaults, str::to_owned);
    if let Some(overlay) = &from.deployment.overlay {
        if let Some(executor) = template.spec.as_mut().and_then(container::executor_mut) {
            // This comes before the merge, because the merge would not let a default be removed.
            let resources = overlay.resources();
            apply_resources(executor.resources.get_or_insert_default(), &resources);
        }
        overlay.merge_into(&mut template);
    }
    apply(&mut template, from.requested, unexpanded);
    finish(&mut template, from);
    let spec = template.spec.get_or_insert_default();
    let records = second_pod::records(spec, from.deployment);
    if from.kind == ExecutorKind::Mayfly {
        identity::give(spec, &from.deployment.identities);
    }
    if from.kind == ExecutorKind::Mayfly
        && let (Some(records), Some(executor)) = (records, container::executor_mut(spec))
    {
        // The executor refuses to run if this is not set.
        set_env(
            executor.env.get_or_insert_default(),
            literal(env::RECORDS, records.name()),
        );
    }
    (template, records)
}

fn skeleton(from: &PodInput<'_>) -> PodSpec {
    let deployment = from.deployment;
    PodSpec {
        automount_service_account_token: Some(false),
        containers: vec![executor(from)],
        enable_service_links: Some(false),
        image_pull_secrets: none_if_empty(
            deployment
                .image_pull_secrets
                .iter()
                .map(|name| LocalObjectReference { name: name.clone() })
                .collect(),
        ),
        priority_class_name: deployment.priority_class.clone(),
        restart_policy: Some("Never".to_owned()),
        security_context: Some(PodSecurityContext {
            fs_group: Some(USER),
            // Without this, the kubelet visits every file of a large cache before the container starts.
            fs_group_change_policy: Some("OnRootMismatch".to_owned()),
            run_as_group: Some(USER),
            run_as_non_root: Some(true),
            run_as_user: Some(USER),
            seccomp_profile: Some(SeccompProfile {
                type_: "RuntimeDefault".to_owned(),
                localhost_profile: None,
            }),
            ..PodSecurityContext::default()
        }),
        termination_grace_period_seconds: Some(from.grace_seconds),
        volumes: Some(vec![
            empty_dir(WORK_VOLUME, Some(&deployment.work_size_limit)),
            empty_dir(TMP_VOLUME, Some(&deployment.tmp_size_limit)),
        ]),
        ..PodSpec::default()
    }
}

fn executor(from: &PodInput<'_>) -> Container {
    let deployment = from.deployment;
    let image = deployment.image_of(from.merged);
    Container {
        name: CONTAINER.to_owned(),
        image: Some(
            match (&deployment.image_registry, Reference::parse(image)) {
                (Some(registry), Ok(reference)) => reference.in_registry(registry),
                _ => image.to_owned(),
            },
        ),
        image_pull_policy: deployment.image_pull_policy.clone(),
        env: Some(own_env(from)),
        env_from: Some(env_from(deployment)),
        resources: Some(default_requirements()),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            capabilities: Some(Capabilities {
                drop: Some(vec!["ALL".to_owned()]),
                ..Capabilities::default()
            }),
            privileged: Some(false),
            read_only_root_filesystem: Some(true),
            ..SecurityContext::default()
        }),
        // If a container was killed before it could report, its last log lines become the termination message.
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        volume_mounts: Some(vec![mount(WORK_VOLUME, HOME), mount(TMP_VOLUME, TMP)]),
        ..Container::default()
    }
}

fn default_requirements() -> ResourceRequirements {
    let mut requirements = ResourceRequirements::default();
    apply_resources(&mut requirements, &Deployment::default_resources());
    requirements
}

/// Key of the Secret that holds a part of the job data.
pub(super) fn job_data_key(index: usize) -> String {
    match index {
        0 => JOB_DATA_KEY.to_owned(),
        index => format!("{JOB_DATA_KEY}-{index}"),
    }
}

/// The variables of the job data. Whoever may create Secrets could put another document into the place of the run's, so the
/// Job names the digest of a document that it does not hold itself.
fn job_data(from: &PodInput<'_>) -> Vec<EnvVar> {
    match from.transport {
        Transport::Literal(parts) => parts
            .iter()
            .enumerate()
            .map(|(index, part)| literal(&env::job_data_part(index), part))
            .collect(),
        Transport::Secret(parts) => (0..parts.len())
            .map(|index| {
                let name = env::job_data_part(index);
                secret_variable(&name, from.name, job_data_key(index))
            })
            .chain([literal(env::JOB_DATA_DIGEST, &encoding::digest(parts))])
            .collect(),
    }
}

/// The job data come first, as in the stock launcher. Variables that only Mayfly's executor reads come next.
fn own_env(from: &PodInput<'_>) -> Vec<EnvVar> {
    let field = |path: &str| EnvVarSource {
        field_ref: Some(ObjectFieldSelector {
            field_path: path.to_owned(),
            ..ObjectFieldSelector::default()
        }),
        ..EnvVarSource::default()
    };
    let by_source = |name: &str, source| EnvVar {
        name: name.to_owned(),
        value_from: Some(source),
        value: None,
    };
    let mut variables = vec![literal(env::BATCH, "true")];
    variables.extend(job_data(from));
    variables.extend([
        literal(env::OUTCOME_EXIT_CODE, "true"),
        literal(env::LOG_FORMAT, "json"),
        by_source(env::POD_NAME, field("metadata.name")),
        by_source(env::POD_UID, field("metadata.uid")),
        literal("HOME", HOME),
        literal("TMPDIR", TMP),
        literal(env::WORK_DIR, WORK_DIR),
    ]);
    variables
}

fn env_from(deployment: &Deployment) -> Vec<EnvFromSource> {
    let secrets = deployment.env_secrets.iter().map(|name| EnvFromSource {
        secret_ref: Some(SecretEnvSource {
            name: name.clone(),
            optional: None,
        }),
        ..EnvFromSource::default()
    });
    secrets
        .chain(config_map_sources(&deployment.env_config_maps))
        .collect()
}

fn config_map_sources(names: &[String]) -> impl Iterator<Item = EnvFromSource> {
    names.iter().map(|name| EnvFromSource {
        config_map_ref: Some(ConfigMapEnvSource {
            name: name.clone(),
            optional: None,
        }),
        ..EnvFromSource::default()
    })
}

/// Applies the settings of one level over the existing ones.
fn apply(template: &mut PodTemplateSpec, level: &Overrides, env_text: fn(&str) -> String) {
    let metadata = template.metadata.get_or_insert_default();
    metadata
        .annotations
        .get_or_insert_default()
        .extend(level.pod_annotations.clone());
    let spec = template.spec.get_or_insert_default();
    if let Some(selector) = &level.node_selector {
        spec.node_selector = Some(selector.clone()).filter(|selector| !selector.is_empty());
    }
    if let Some(tolerations) = &level.tolerations {
        spec.tolerations = none_if_empty(tolerations.clone());
    }
    if let Some(account) = &level.service_account {
        spec.service_account_name = Some(account.clone());
    }
    apply_security(
        spec.security_context.get_or_insert_default(),
        &level.pod_security,
    );
    let Some(executor) = container::executor_mut(spec) else {
        return;
    };
    apply_security(
        executor.security_context.get_or_insert_default(),
        &level.container_security,
    );
    apply_resources(executor.resources.get_or_insert_default(), &level.resources);
    let variables = executor.env.get_or_insert_default();
    for (name, value) in &level.env {
        set_env(variables, literal(name, &env_text(value)));
    }
}

/// Escapes a text, because Kubernetes expands variables in it. `$(InternalSecret)` would become the platform's secret,
/// and the tool gets the workspace's own variables.
fn unexpanded(text: &str) -> String {
    text.replace('$', "$$")
}

/// Sets the keys of one level in a security context.
fn apply_security<C: Serialize + DeserializeOwned>(context: &mut C, level: &SecurityKeys) {
    let mut level = level.clone();
    // If the policy allows UID 0, a workspace can set it.
    if level.get("runAsUser") == Some(&json!(0)) {
        level.entry("runAsNonRoot").or_insert(json!(false));
    }
    // Kubernetes refuses a privileged container that may not escalate privileges.
    if level.get("privileged") == Some(&json!(true)) {
        level
            .entry("allowPrivilegeEscalation")
            .or_insert(json!(true));
    }
    let mut all = serde_json::to_value(&*context).expect("Kubernetes objects are plain JSON");
    if let Some(all) = all.as_object_mut() {
        all.extend(level);
    }
    *context = serde_json::from_value(all).expect("each key was read with its type");
}

/// Returns the executor's own deadline in seconds. It comes before the Job's deadline, so the executor can stop, store
/// its state and report.
///
/// The Job's deadline counts from the release, and the executor's from its start. So the time that a run may wait for a
/// node and an image is subtracted, and one more minute. The result is never less than half of the Job's deadline, or
/// three quarters of that deadline without the grace period if this is less. A second pod starts counting again, so the
/// Job's deadline may then come first.
fn own_deadline(job_seconds: i64, grace_seconds: i64) -> i64 {
    let spare = (job_seconds - grace_seconds).max(1);
    let least = (job_seconds / 2).min(spare - spare / 4);
    (spare - WAITS_SECONDS - 60).max(least).max(1)
}

/// Sets the fields that need both levels, and the fields that no setting can change.
fn finish(template: &mut PodTemplateSpec, from: &PodInput<'_>) {
    let metadata = template.metadata.get_or_insert_default();
    metadata
        .labels
        .get_or_insert_default()
        .extend(from.labels.clone());
    let spec = template.spec.get_or_insert_default();
    // The overlay may have changed the grace period. The executor's own grace period follows the pod's.
    let grace = spec
        .termination_grace_period_seconds
        .unwrap_or(from.grace_seconds);
    harden_others(spec);
    let (mut volumes, mut mounts) = extra_volumes(from);
    if let Some(executor) = container::executor_mut(spec) {
        let own_grace = grace_period::executor_grace(grace, executor);
        let variables = executor.env.get_or_insert_default();
        set_env(
            variables,
            literal(env::GRACE_PERIOD_SECONDS, &own_grace.to_string()),
        );
        let deadline = own_deadline(from.deadline_seconds, grace);
        set_env(
            variables,
            literal(env::DEADLINE_SECONDS, &deadline.to_string()),
        );
        if let Some(store) = from.filled_store() {
            let registries = store.registries.join(",");
            for (name, value) in [
                (env::PROVIDER_CACHE_DIR, store.path.as_str()),
                (env::PROVIDER_CACHE_MODE, CacheMode::Fill.name()),
                (env::PROVIDER_CACHE_REGISTRIES, &registries),
            ] {
                set_env(variables, literal(name, value));
            }
        } else if let Some(path) = &from.merged.plugin_cache_dir {
            // This applies also if only the deployment sets it. Then the job data do not contain the setting.
            set_env(variables, literal(env::PLUGIN_CACHE_DIR, &unexpanded(path)));
        }
        let names = from.merged.env_config_maps.as_deref().unwrap_or_default();
        // A workspace's variables are for its tool and scripts. A stock executor passes its own environment to them.
        let is_for_children =
            from.requested.env_config_maps.is_some() && from.kind == ExecutorKind::Mayfly;
        let sources = executor.env_from.get_or_insert_default();
        for mut source in config_map_sources(names) {
            source.prefix = is_for_children.then(|| env::FOR_CHILDREN_PREFIX.to_owned());
            if !sources.contains(&source) {
                sources.push(source);
            }
        }
        let known = executor.volume_mounts.get_or_insert_default();
        known.retain(|known| !mounts.iter().any(|m| m.mount_path == known.mount_path));
        if let Some(store) = &from.deployment.filled_store {
            // A mount of the operator's template.
            let is_store =
                |mount: &&mut VolumeMount| mount.mount_path.trim_end_matches('/') == store.path;
            for mount in known.iter_mut().filter(is_store) {
                mount.read_only = Some(true);
            }
        }
        known.append(&mut mounts);
    }
    let known = spec.volumes.get_or_insert_default();
    known.retain(|known| !volumes.iter().any(|volume| volume.name == known.name));
    known.append(&mut volumes);
}

/// Applies the same security rules to the overlay's containers, for all fields that the overlay does not set.
fn harden_others(spec: &mut PodSpec) {
    let others = spec.init_containers.iter_mut().flatten();
    for container in others.chain(spec.containers.iter_mut().filter(|c| c.name != CONTAINER)) {
        let context = container.security_context.get_or_insert_default();
        context.allow_privilege_escalation.get_or_insert(false);
        context.capabilities.get_or_insert_with(|| Capabilities {
            drop: Some(vec!["ALL".to_owned()]),
            ..Capabilities::default()
        });
    }
}

/// The run's own volumes and their mounts: a `ConfigMap`, a plugin cache.
fn extra_volumes(from: &PodInput<'_>) -> (Vec<Volume>, Vec<VolumeMount>) {
    let mut volumes = Vec::new();
    let mut mounts = Vec::new();
    let mut add = |volume: Volume, path: &str, read_only: Option<bool>| {
        mounts.push(VolumeMount {
            read_only,
            ..mount(&volume.name, path)
        });
        volumes.push(volume);
    };
    let merged = from.merged;
    if let Some(name) = &merged.config_map {
        let volume = Volume {
            name: CONFIG_MAP_VOLUME.to_owned(),
            config_map: Some(ConfigMapVolumeSource {
                name: name.clone(),
                ..ConfigMapVolumeSource::default()
            }),
            ..Volume::default()
        };
        add(volume, config_map_path(merged), None);
    }
    if let Some(store) = from.filled_store() {
        let overlay = from.deployment.overlay.as_ref();
        if !overlay.is_some_and(|overlay| overlay.mounts(&store.path)) {
            let claim = plugin_cache_claim(&from.deployment.defaults);
            add(claim_volume(claim), &store.path, Some(true));
        }
    } else if let Some(path) = &merged.plugin_cache_dir {
        let claim = plugin_cache_claim(merged);
        // An executor of another kind does not read the store, and nothing of a run may write it.
        let is_store = filled_store_claim(from.deployment) == Some(claim);
        let volume = match from.deployment.plugin_cache {
            PluginCache::Claim if !is_store => claim_volume(claim),
            _ => empty_dir(PLUGIN_CACHE_VOLUME, None),
        };
        add(volume, path, None);
    }
    (volumes, mounts)
}

fn claim_volume(claim: &str) -> Volume {
    Volume {
        name: PLUGIN_CACHE_VOLUME.to_owned(),
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
            claim_name: claim.to_owned(),
            read_only: None,
        }),
        ..Volume::default()
    }
}

/// The claim of the plugin cache that a pod mounts.
pub(super) fn cache_claim(spec: &PodSpec) -> Option<&str> {
    let mut volumes = spec.volumes.iter().flatten();
    let cache = volumes.find(|volume| volume.name == PLUGIN_CACHE_VOLUME)?;
    let claim = cache.persistent_volume_claim.as_ref()?;
    Some(&claim.claim_name)
}

/// Puts an empty folder in the place of that claim.
pub(super) fn empty_cache(spec: &mut PodSpec) {
    let volumes = spec.volumes.iter_mut().flatten();
    for cache in volumes.filter(|volume| volume.name == PLUGIN_CACHE_VOLUME) {
        *cache = empty_dir(PLUGIN_CACHE_VOLUME, None);
    }
}

/// Returns the mount path of the `ConfigMap`.
pub(super) fn config_map_path(merged: &Overrides) -> &str {
    merged.config_map_path.as_deref().unwrap_or(CONFIG_MAP_PATH)
}

/// Returns the claim of the plugin cache.
pub(super) fn plugin_cache_claim(merged: &Overrides) -> &str {
    merged
        .plugin_cache_claim
        .as_deref()
        .unwrap_or(PLUGIN_CACHE_CLAIM)
}

/// Returns the claim that holds the store that runs only read. `None` if none does.
pub(super) fn filled_store_claim(deployment: &Deployment) -> Option<&str> {
    let store = deployment.filled_store.as_ref()?;
    match deployment.overlay.as_ref() {
        Some(overlay) if overlay.mounts(&store.path) => overlay.claim_at(&store.path),
        _ => Some(plugin_cache_claim(&deployment.defaults)),
    }
}

/// Returns the Secret from which a pod reads its job data. `None`: the pod contains them.
pub fn job_data_secret(spec: &PodSpec) -> Option<&str> {
    let executor = container::executor(spec)?;
    let mut variables = executor.env.iter().flatten();
    let first = variables.find(|variable| variable.name == env::JOB_DATA)?;
    let key = first.value_from.as_ref()?.secret_key_ref.as_ref()?;
    Some(&key.name)
}

/// Returns the digest of the job data that the executor of a pod accepts.
pub fn job_data_digest(spec: &PodSpec) -> Option<&str> {
    let executor = container::executor(spec)?;
    let mut variables = executor.env.iter().flatten();
    let digest = variables.find(|variable| variable.name == env::JOB_DATA_DIGEST)?;
    digest.value.as_deref()
}

/// Has the executor read these variables from the Secret of that name.
pub(super) fn read_from_secret<'a>(
    spec: &mut PodSpec,
    secret: &str,
    variables: impl Iterator<Item = &'a str>,
) {
    let Some(executor) = container::executor_mut(spec) else {
        return;
    };
    for name in variables {
        let variable = secret_variable(name, secret, name.to_owned());
        set_env(executor.env.get_or_insert_default(), variable);
    }
}

fn secret_variable(name: &str, secret: &str, key: String) -> EnvVar {
    EnvVar {
        name: name.to_owned(),
        value: None,
        value_from: Some(EnvVarSource {
            secret_key_ref: Some(SecretKeySelector {
                name: secret.to_owned(),
                key,
                optional: None,
            }),
            ..EnvVarSource::default()
        }),
    }
}

/// Has the pod read from the Secret of an attempt what it reads from that with the Job's `own` name.
pub(super) fn read_from_attempt(spec: &mut PodSpec, own: &str, secret: &str) {
    let Some(executor) = container::executor_mut(spec) else {
        return;
    };
    for variable in executor.env.iter_mut().flatten() {
        let source = variable.value_from.as_mut();
        if let Some(key) = source
            .and_then(|source| source.secret_key_ref.as_mut())
            .filter(|key| key.name == own)
        {
            secret.clone_into(&mut key.name);
        }
    }
}

fn mount(volume: &str, path: &str) -> VolumeMount {
    VolumeMount {
        name: volume.to_owned(),
        mount_path: path.to_owned(),
        ..VolumeMount::default()
    }
}

fn empty_dir(name: &str, size_limit: Option<&Amount>) -> Volume {
    Volume {
        name: name.to_owned(),
        empty_dir: Some(EmptyDirVolumeSource {
            medium: None,
            size_limit: size_limit.map(Amount::to_quantity),
        }),
        ..Volume::default()
    }
}

fn none_if_empty<T>(list: Vec<T>) -> Option<Vec<T>> {
    Some(list).filter(|list| !list.is_empty())
}

/// Sets the resources of one level over the existing ones. Other resources of an overlay stay.
fn apply_resources(requirements: &mut ResourceRequirements, level: &Resources) {
    let resources = level.clone().over(amounts(requirements));
    let mut requests = requirements.requests.take().unwrap_or_default();
    let mut limits = requirements.limits.take().unwrap_or_default();
    for (name, span) in [
        (CPU, resources.cpu),
        (MEMORY, resources.memory),
        (EPHEMERAL_STORAGE, resources.ephemeral_storage),
    ] {
        for (map, amount) in [(&mut requests, span.request), (&mut limits, span.limit)] {
            if let Some(amount) = amount {
                map.insert(name.to_owned(), amount.to_quantity());
            }
        }
    }
    requirements.requests = Some(requests).filter(|map| !map.is_empty());
    requirements.limits = Some(limits).filter(|map| !map.is_empty());
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdict::Timeouts;

    #[test]
    fn the_executor_stops_before_its_job_does_however_long_it_has_waited() {
        let usual = Timeouts::default();
        let waits = (usual.unschedulable + usual.start).as_secs();
        assert_eq!(u64::try_from(WAITS_SECONDS).unwrap(), waits);
        let (job, grace) = (21_600, 300);
        assert_eq!(own_deadline(job, grace), 20_040);
        assert!(WAITS_SECONDS + own_deadline(job, grace) + grace < job);
    }

    #[test]
    fn a_short_deadline_leaves_time_to_run_and_to_stop() {
        assert_eq!(own_deadline(1800, 60), 900);
        for (job, grace) in [(600, 300), (400, 300), (120, 60), (31, 30), (2, 1)] {
            let own = own_deadline(job, grace);
            assert!(own >= 1 && own + grace <= job, "{job} {grace}: {own}");
        }
    }
}
