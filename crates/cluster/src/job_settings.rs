//! The settings of Jobs, from options and environment. Terrakube's names keep their meaning; Mayfly's start with `MAYFLY_`.
//! [`DeploymentArgs::resolve`] parses all values and finds every error before it reports any.

mod args;
mod java_options;
pub mod values;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use job_contract::env;
use job_contract::identity::Identities;
use job_contract::pairs::{parse_list, parse_pairs};
use job_contract::provider_cache::{CacheMode, DEFAULT_REGISTRIES, WantedPackage};
use manifest::check;
use manifest::deployment::{DEFAULT_IMAGE, FilledStore};
use manifest::error::{CollectErrors as _, quote};
use manifest::grace_period::MIN_GRACE_SECONDS;
use manifest::overlay::Overlay;
use manifest::overrides::{self, Names, Overrides};
use manifest::policy::Policy;
use manifest::quantity::SLIP;
use runtime::setting::{ReadSetting, SettingError, present};

pub use self::args::{DefaultsArgs, DeploymentArgs};
use self::values::{Namespace, PullPolicy};
pub use manifest::Deployment;

impl DeploymentArgs {
    /// Looks at every setting. Reads the two files some of them name, and nothing else. `api_url` is the platform's API
    /// as the launcher knows it.
    pub fn resolve(&self, api_url: Option<&str>) -> Result<Deployment, Vec<SettingError>> {
        let mut found = Vec::new();
        let mut deployment = Deployment {
            reports_to_platform: api_url.is_some_and(|url| !url.trim().is_empty()),
            ..Deployment::default()
        };
        self.resolve_objects(&mut deployment, &mut found);
        self.resolve_image(&mut deployment, &mut found);
        self.resolve_times(&mut deployment, &mut found);
        self.resolve_job_data(&mut deployment, &mut found);
        self.resolve_files(&mut deployment, &mut found);
        match Identities::read(|name| self.identity.value(name)) {
            Ok(identities) => deployment.identities = identities,
            Err(problems) => {
                for (name, problem) in problems {
                    found.add(name, problem);
                }
            }
        }
        let (defaults, unreadable) = overrides::read(&self.defaults.variables(), Names::DEPLOYMENT);
        let below = self.platform_defaults(&mut found);
        deployment.defaults = defaults.over(below);
        found.extend(unreadable);
        self.resolve_filled_store(&mut deployment, &mut found);
        if found.is_empty() {
            // What only shows when the settings meet, in every run alike.
            found.extend(manifest::deployment_errors(&deployment));
        }
        if found.is_empty() {
            Ok(deployment)
        } else {
            Err(found)
        }
    }

    fn resolve_objects(&self, deployment: &mut Deployment, found: &mut Vec<SettingError>) {
        if let Some(Namespace(namespace)) = self.namespace.read(found) {
            deployment.namespace = namespace;
        }
        let mut names = |name, value: &Option<String>, list: &mut Vec<String>| {
            if let Some(value) = value {
                *list = parse_list(value);
            }
            for element in list.iter() {
                if let Err(rule) = check::object_name(element) {
                    found.add(name, format!("names {}, which {rule}", quote(element)));
                }
            }
        };
        names(
            env::ENV_SECRETS,
            &self.env_secrets,
            &mut deployment.env_secrets,
        );
        names(
            env::ENV_CONFIG_MAPS,
            &self.env_config_maps,
            &mut deployment.env_config_maps,
        );
        names(
            env::IMAGE_PULL_SECRETS,
            &self.image_pull_secrets,
            &mut deployment.image_pull_secrets,
        );
        deployment.priority_class = self.priority_class.read(found).map(|name| name.0);
        if let Some(amount) = self.work_size_limit.read(found) {
            if amount.is_a_slip() {
                found.add(env::WORK_SIZE_LIMIT, format!("is {amount}, {SLIP}"));
            }
            deployment.work_size_limit = amount;
        }
        if let Some(amount) = self.tmp_size_limit.read(found) {
            deployment.tmp_size_limit = amount;
        }
    }

    fn resolve_image(&self, deployment: &mut Deployment, found: &mut Vec<SettingError>) {
        deployment.image = self
            .image
            .read(found)
            .map_or_else(|| DEFAULT_IMAGE.to_owned(), |image| image.0);
        deployment.executor_kind = self.executor_kind.read(found).unwrap_or_default();
        deployment.image_registry = self.image_registry.read(found).map(|registry| registry.0);
        if let Some(PullPolicy(policy)) = self.image_pull_policy.read(found) {
            deployment.image_pull_policy = Some(policy.to_owned());
        }
    }

    fn resolve_times(&self, deployment: &mut Deployment, found: &mut Vec<SettingError>) {
        let deadline = self
            .active_deadline_seconds
            .read(found)
            .map(|seconds| seconds.0);
        let ttl = self
            .ttl_seconds_after_finished
            .read(found)
            .map(|seconds| seconds.0);
        let backoff = self.backoff_limit.read(found).map(|limit| limit.0);
        let grace = self
            .termination_grace_period_seconds
            .read(found)
            .map(|seconds| seconds.0);
        let apply_grace = self
            .apply_grace_period_seconds
            .read(found)
            .map(|seconds| seconds.0);
        // Stock launchers take any number, so that one is no reason not to start.
        if let Some(short) = grace.filter(|grace| *grace < MIN_GRACE_SECONDS) {
            deployment.warnings.push(format!(
                "`{}` is {short}, and {MIN_GRACE_SECONDS} counts instead: the executor needs so many seconds to stop and \
                 save",
                env::TERMINATION_GRACE_PERIOD_SECONDS
            ));
        }
        let grace = grace.map(|grace| grace.max(MIN_GRACE_SECONDS));
        deployment.records = self.records.read(found).and_then(|records| records.0);
        let small = |value: i64| i32::try_from(value).unwrap_or(i32::MAX);
        deployment.active_deadline_seconds = deadline.unwrap_or(deployment.active_deadline_seconds);
        deployment.ttl_seconds_after_finished =
            ttl.map_or(deployment.ttl_seconds_after_finished, small);
        deployment.backoff_limit = backoff.map(small);
        deployment.grace_seconds = grace.unwrap_or(deployment.grace_seconds);
        deployment.apply_grace_seconds = apply_grace
            .or(grace)
            .unwrap_or(deployment.apply_grace_seconds);
        let longest = deployment.grace_seconds.max(deployment.apply_grace_seconds);
        if deployment.active_deadline_seconds <= longest {
            found.add(
                env::ACTIVE_DEADLINE_SECONDS,
                format!("must be longer than the grace period of {longest} s"),
            );
        }
    }

    fn resolve_job_data(&self, deployment: &mut Deployment, found: &mut Vec<SettingError>) {
        deployment.job_data_mode = self.job_data_mode.read(found).unwrap_or_default();
        deployment.plugin_cache = self.plugin_cache.read(found).unwrap_or_default();
    }

    fn resolve_filled_store(&self, deployment: &mut Deployment, found: &mut Vec<SettingError>) {
        let mut registries = DEFAULT_REGISTRIES.map(str::to_owned).to_vec();
        if let Some(text) = present(self.provider_cache_registries.as_deref()) {
            registries = parse_list(&text.to_ascii_lowercase());
        }
        for host in &registries {
            // Any package of it can be named then.
            if format!("{host}/n/t/1/os_arch")
                .parse::<WantedPackage>()
                .is_err()
            {
                found.add(
                    env::PROVIDER_CACHE_REGISTRIES,
                    format!("names {}, which is no host", quote(host)),
                );
            }
        }
        let mode = self.provider_cache_mode.read(found).map(|mode| mode.0);
        if mode != Some(CacheMode::Fill) {
            return;
        }
        match &deployment.defaults.plugin_cache_dir {
            Some(path) => {
                let path = path.trim_end_matches('/').to_owned();
                deployment.filled_store = Some(FilledStore { path, registries });
            }
            None => found.add(
                self.provider_cache_mode.name(env::PROVIDER_CACHE_MODE),
                format!(
                    "is `fill`, which needs `{}`",
                    env::DEPLOYMENT_PLUGIN_CACHE_DIR
                ),
            ),
        }
    }

    fn resolve_files(&self, deployment: &mut Deployment, found: &mut Vec<SettingError>) {
        let name = self.policy_file.name(env::POLICY_FILE);
        if let Some(text) = read_file(found, name, &self.policy_file) {
            let policy = serde_saphyr::from_str::<Option<Policy>>(&text).map_err(|error| {
                let error = error.to_string();
                format!("is no policy: {}", error.lines().next().unwrap_or_default())
            });
            if let Some(policy) = found.keep(name, policy) {
                deployment.policy = policy.unwrap_or_default();
            }
        }
        let name = self.pod_template_file.name(env::POD_TEMPLATE_FILE);
        if let Some(text) = read_file(found, name, &self.pod_template_file) {
            match Overlay::parse(&text) {
                Ok(overlay) => deployment.overlay = Some(overlay),
                Err(errors) => {
                    for error in errors {
                        found.add(name, error);
                    }
                }
            }
        }
    }

    /// What Terrakube's own names say of settings a workspace can override.
    fn platform_defaults(&self, found: &mut Vec<SettingError>) -> Overrides {
        let mut defaults = Overrides::default();
        if let Some(text) = present(self.pod_annotations.as_deref()) {
            let annotations = annotations(text);
            if let Some(annotations) = found.keep(env::POD_ANNOTATIONS, annotations) {
                defaults.pod_annotations = annotations;
            }
            for key in defaults.pod_annotations.keys() {
                if let Err(rule) = check::qualified_name(&key.to_ascii_lowercase()) {
                    found.add(
                        env::POD_ANNOTATIONS,
                        format!("has a key {} that {rule}", quote(key)),
                    );
                }
            }
        }
        if let Some(text) = present(self.java_tool_options.as_deref()) {
            let selector = java_options::node_selector(text);
            for (key, value) in &selector {
                let rule = check::qualified_name(key).and_then(|()| check::label_value(value));
                if let Err(rule) = rule {
                    found.add(
                        env::JAVA_TOOL_OPTIONS,
                        format!("has a node selector {} that {rule}", quote(key)),
                    );
                }
            }
            defaults.node_selector = Some(selector).filter(|selector| !selector.is_empty());
        }
        defaults
    }
}

fn read_file(
    found: &mut Vec<SettingError>,
    name: &str,
    path: &impl ReadSetting<PathBuf>,
) -> Option<String> {
    let path = path.read(found)?;
    let text = fs::read_to_string(&path)
        .map_err(|error| format!("names `{}`, which cannot be read: {error}", path.display()));
    found.keep(name, text)
}

fn annotations(text: &str) -> Result<BTreeMap<String, String>, &'static str> {
    if text.starts_with('{') {
        serde_json::from_str(text).map_err(|_| "is no JSON object of strings")
    } else {
        Ok(parse_pairs(text))
    }
}

#[cfg(test)]
mod tests;
