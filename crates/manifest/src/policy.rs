//! Decides what a workspace may override. The operator's own settings are not subject to the policy.

mod defaults;
mod patterns;
mod security;

use std::collections::BTreeMap;

use job_contract::env;
use runtime::setting::SettingError;
use serde::Deserialize;

use self::defaults::{ANNOTATIONS, MOUNT_PATHS};
pub use self::patterns::Patterns;
use super::error::{CollectErrors as _, quote};
use super::image::Reference;
use super::overrides::{Overrides, Span};
use super::pod_security::Level;
use super::quantity::Amount;

/// The policy, as in its file. Missing fields keep their default.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Policy {
    /// Service accounts.
    pub service_accounts: Patterns,
    /// `ConfigMap`s, mounted or as environment.
    pub config_maps: Patterns,
    /// Claims of plugin caches.
    pub persistent_volume_claims: Patterns,
    /// Keys of node selectors.
    pub node_selector_keys: Patterns,
    /// Keys of tolerated taints. `:Exists` is the toleration of every taint.
    pub toleration_keys: Patterns,
    /// Keys of labels.
    pub label_keys: Patterns,
    /// Keys of annotations, of Jobs and of pods.
    pub annotation_keys: Patterns,
    /// Folders at or in which a config map or a plugin cache may be mounted. Folders of the system and of the executor
    /// are never allowed.
    pub mount_paths: Patterns,
    /// Names in `EPHEMERAL_JOB_ENV_VARS`. `None`: all names. The container of a stock executor gets only the harmless
    /// ones.
    pub environment: Option<Patterns>,
    /// Registries, or repositories with their registry, of images.
    pub image_registries: Patterns,
    /// Keys of both security contexts.
    pub security_context_keys: Patterns,
    /// The Pod Security Standard of every pod, wherever its settings come from.
    pub pod_security: Level,
    /// Largest requests and limits.
    pub resources: Ceilings,
}

/// Largest requests and limits of a workspace. `None`: no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Ceilings {
    pub cpu: Option<Amount>,
    pub memory: Option<Amount>,
    pub ephemeral_storage: Option<Amount>,
}

/// The default policy is as open as the stock launcher, except where a workspace could take over the platform. It
/// forbids:
/// - an image that the workspace chooses;
/// - a pod below the restricted Pod Security Standard;
/// - the toleration of every taint;
/// - annotations that change what the pod is;
/// - mounts outside of folders for data.
impl Default for Policy {
    fn default() -> Self {
        let any = || Patterns::new(["*"]);
        Self {
            service_accounts: any(),
            config_maps: any(),
            persistent_volume_claims: any(),
            node_selector_keys: any(),
            toleration_keys: Patterns::new(["*", "!:Exists"]),
            label_keys: any(),
            annotation_keys: Patterns::new(ANNOTATIONS.iter().copied()),
            mount_paths: Patterns::new(MOUNT_PATHS.iter().copied()),
            environment: None,
            image_registries: Patterns::new([]),
            security_context_keys: any(),
            pod_security: Level::Restricted,
            resources: Ceilings::default(),
        }
    }
}

/// Every taint, in [`Policy::toleration_keys`].
const EVERY_TAINT: &str = ":Exists";

impl Policy {
    /// Returns the settings of a workspace that the policy forbids.
    pub fn refusals(&self, requested: &Overrides) -> Vec<SettingError> {
        let mut refusals = Refusals(Vec::new());
        self.refuse_names(requested, &mut refusals);
        self.refuse_keys(requested, &mut refusals);
        self.refuse_paths(requested, &mut refusals);
        self.refuse_resources(requested, &mut refusals);
        self.refuse_security(requested, &mut refusals);
        refusals.0
    }

    fn refuse_names(&self, requested: &Overrides, refusals: &mut Refusals) {
        refusals.names(
            env::EPHEMERAL_SERVICE_ACCOUNT,
            &requested.service_account,
            &self.service_accounts,
            "serviceAccounts",
        );
        refusals.names(
            env::EPHEMERAL_CONFIG_MAP,
            &requested.config_map,
            &self.config_maps,
            "configMaps",
        );
        refusals.names(
            env::EPHEMERAL_ENV_CONFIG_MAPS,
            requested.env_config_maps.iter().flatten(),
            &self.config_maps,
            "configMaps",
        );
        refusals.names(
            env::PLUGIN_CACHE_CLAIM,
            &requested.plugin_cache_claim,
            &self.persistent_volume_claims,
            "persistentVolumeClaims",
        );
        if let Some(image) = &requested.image
            && let Ok(reference) = Reference::parse(image)
        {
            let (registry, repository) = reference.origin();
            if !self.image_registries.allow(registry) && !self.image_registries.allow(&repository) {
                refusals.add(env::EPHEMERAL_IMAGE, image, "imageRegistries");
            }
        }
    }

    fn refuse_keys(&self, requested: &Overrides, refusals: &mut Refusals) {
        let keys = BTreeMap::keys;
        refusals.names(
            env::EPHEMERAL_NODE_SELECTOR,
            requested.node_selector.iter().flat_map(keys),
            &self.node_selector_keys,
            "nodeSelectorKeys",
        );
        refusals.names(
            env::EPHEMERAL_LABELS,
            requested.labels.keys(),
            &self.label_keys,
            "labelKeys",
        );
        refusals.names(
            env::EPHEMERAL_ANNOTATIONS,
            requested.annotations.keys(),
            &self.annotation_keys,
            "annotationKeys",
        );
        refusals.names(
            env::EPHEMERAL_POD_ANNOTATIONS,
            requested.pod_annotations.keys(),
            &self.annotation_keys,
            "annotationKeys",
        );
        if let Some(environment) = &self.environment {
            refusals.names(
                env::EPHEMERAL_ENV,
                requested.env.keys(),
                environment,
                "environment",
            );
        }
        for toleration in requested.tolerations.iter().flatten() {
            let key = toleration.key.as_deref();
            if !self.toleration_keys.allow(key.unwrap_or(EVERY_TAINT)) {
                let shown = key.unwrap_or(EVERY_TAINT);
                refusals.add(env::EPHEMERAL_TOLERATIONS, shown, "tolerationKeys");
            }
        }
    }

    fn refuse_paths(&self, requested: &Overrides, refusals: &mut Refusals) {
        for (variable, path) in [
            (env::EPHEMERAL_CONFIG_MAP_PATH, &requested.config_map_path),
            (env::PLUGIN_CACHE_DIR, &requested.plugin_cache_dir),
        ] {
            if let Some(path) = path
                && !self.mount_paths.allow_folder(path)
            {
                refusals.add(variable, path, "mountPaths");
            }
        }
    }

    fn refuse_resources(&self, requested: &Overrides, refusals: &mut Refusals) {
        let resources = &requested.resources;
        refusals.span(
            (env::EPHEMERAL_CPU_REQUEST, env::EPHEMERAL_CPU_LIMIT),
            &resources.cpu,
            self.resources.cpu.as_ref(),
            "resources.cpu",
        );
        refusals.span(
            (env::EPHEMERAL_MEMORY_REQUEST, env::EPHEMERAL_MEMORY_LIMIT),
            &resources.memory,
            self.resources.memory.as_ref(),
            "resources.memory",
        );
        refusals.span(
            (env::EPHEMERAL_STORAGE_REQUEST, env::EPHEMERAL_STORAGE_LIMIT),
            &resources.ephemeral_storage,
            self.resources.ephemeral_storage.as_ref(),
            "resources.ephemeralStorage",
        );
    }
}

struct Refusals(Vec<SettingError>);

impl Refusals {
    fn add(&mut self, variable: &str, name: &str, rule: &str) {
        self.0.add(
            variable,
            format!(
                "asks for {}, which the policy's `{rule}` does not allow",
                quote(name)
            ),
        );
    }

    fn names<'a>(
        &mut self,
        variable: &str,
        names: impl IntoIterator<Item = &'a (impl AsRef<str> + ?Sized + 'a)>,
        allowed: &Patterns,
        rule: &str,
    ) {
        for name in names {
            if !allowed.allow(name.as_ref()) {
                self.add(variable, name.as_ref(), rule);
            }
        }
    }

    fn span(&mut self, variables: (&str, &str), span: &Span, ceiling: Option<&Amount>, rule: &str) {
        let Some(ceiling) = ceiling else { return };
        for (variable, amount) in [(variables.0, &span.request), (variables.1, &span.limit)] {
            if let Some(amount) = amount
                && amount > ceiling
            {
                self.0.add(
                    variable,
                    format!("is {amount}, more than the policy's `{rule}` of {ceiling}"),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests;
