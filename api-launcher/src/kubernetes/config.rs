//! The settings of Jobs, from options and environment. Terrakube's names keep their meaning; Mayfly's start with `MAYFLY_`.
//! [`DeploymentArgs::resolve`] parses all values and finds every problem before it reports any.

mod args;
mod java_options;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use job_contract::{Records, env};
use runtime::setting::SettingProblem;

use crate::kubernetes::manifest::deployment::{DEFAULT_IMAGE, PluginCache};
use crate::kubernetes::manifest::executor_kind::{ExecutorKind, ExecutorKindSetting};
use crate::kubernetes::manifest::grace_period::MIN_GRACE_SECONDS;
use crate::kubernetes::manifest::job_data::{Compression, Mode};
use crate::kubernetes::manifest::overlay::Overlay;
use crate::kubernetes::manifest::overrides::{self, Names, Overrides};
use crate::kubernetes::manifest::pairs::{parse_list, parse_pairs};
use crate::kubernetes::manifest::policy::Policy;
use crate::kubernetes::manifest::problem::{Fault, Problems, quote};
use crate::kubernetes::manifest::quantity::{Amount, SLIP};
use crate::kubernetes::manifest::{self, check, image};

pub use self::args::{DefaultsArgs, DeploymentArgs};
pub use crate::kubernetes::manifest::Deployment;
/// A setting that cannot be used: the variable, and the rule it breaks.
pub use crate::kubernetes::manifest::Problem as ConfigProblem;

impl From<&ConfigProblem> for SettingProblem {
    fn from(problem: &ConfigProblem) -> Self {
        Self::new(problem.subject.as_str(), problem.rule.as_str())
    }
}

impl DeploymentArgs {
    /// Looks at every setting. Reads the two files some of them name, and nothing else. `api_url` is the platform's API
    /// as the launcher knows it.
    pub fn resolve(&self, api_url: Option<&str>) -> Result<Deployment, Vec<ConfigProblem>> {
        let mut found = Problems::new(Fault::Deployment);
        let mut deployment = Deployment {
            reports_to_platform: api_url.is_some_and(|url| !url.trim().is_empty()),
            ..Deployment::default()
        };
        self.resolve_objects(&mut deployment, &mut found);
        self.resolve_image(&mut deployment, &mut found);
        self.resolve_times(&mut deployment, &mut found);
        self.resolve_job_data(&mut deployment, &mut found);
        self.resolve_files(&mut deployment, &mut found);
        let (defaults, unreadable) = overrides::read(
            &self.defaults.variables(),
            Names::DEPLOYMENT,
            Fault::Deployment,
        );
        let below = self.platform_defaults(&mut found);
        deployment.defaults = defaults.over(below);
        let mut problems = found.into_vec();
        problems.extend(unreadable);
        if problems.is_empty() {
            // What only shows when the settings meet, in every run alike.
            problems.extend(manifest::trial(&deployment));
        }
        if problems.is_empty() {
            Ok(deployment)
        } else {
            Err(problems)
        }
    }

    fn resolve_objects(&self, deployment: &mut Deployment, found: &mut Problems) {
        if let Some(namespace) = filled(self.namespace.as_ref()) {
            found.keep(env::NAMESPACE, check::dns_label(namespace));
            namespace.clone_into(&mut deployment.namespace);
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
        if let Some(class) = filled(self.priority_class.as_ref()) {
            found.keep(env::PRIORITY_CLASS, check::object_name(class));
            deployment.priority_class = Some(class.to_owned());
        }
        let sizes = [
            (
                env::WORK_SIZE_LIMIT,
                &self.work_size_limit,
                &mut deployment.work_size_limit,
            ),
            (
                env::TMP_SIZE_LIMIT,
                &self.tmp_size_limit,
                &mut deployment.tmp_size_limit,
            ),
        ];
        for (name, value, size) in sizes {
            let amount = filled(value.as_ref()).map(|text| {
                Amount::parse(text)
                    .map_err(|error| format!("is {}, a quantity that {error}", quote(text)))
            });
            if let Some(amount) = amount.and_then(|amount| found.keep(name, amount)) {
                if name == env::WORK_SIZE_LIMIT && amount.is_a_slip() {
                    found.add(name, format!("is {amount}, {SLIP}"));
                }
                *size = amount;
            }
        }
    }

    fn resolve_image(&self, deployment: &mut Deployment, found: &mut Problems) {
        let image = filled(self.image.as_ref()).unwrap_or(DEFAULT_IMAGE);
        found.keep(env::IMAGE, image::check(image));
        image.clone_into(&mut deployment.image);
        let kinds = [
            ("auto", ExecutorKindSetting::Auto),
            ("mayfly", ExecutorKindSetting::Always(ExecutorKind::Mayfly)),
            ("stock", ExecutorKindSetting::Always(ExecutorKind::Stock)),
        ];
        deployment.executor_kind = one_of(
            found,
            env::EXECUTOR_KIND,
            self.executor_kind.as_ref(),
            &kinds,
        )
        .unwrap_or_default();
        if let Some(registry) = filled(self.image_registry.as_ref()) {
            found.keep(env::IMAGE_REGISTRY, image::check_registry(registry));
            deployment.image_registry = Some(registry.to_owned());
        }
        let policies = [
            ("Always", "Always"),
            ("IfNotPresent", "IfNotPresent"),
            ("Never", "Never"),
        ];
        let policy = one_of(
            found,
            env::IMAGE_PULL_POLICY,
            self.image_pull_policy.as_ref(),
            &policies,
        );
        if let Some(policy) = policy {
            deployment.image_pull_policy = Some(policy.to_owned());
        }
    }

    fn resolve_times(&self, deployment: &mut Deployment, found: &mut Problems) {
        let mut seconds = |name, value: &Option<String>, least: i64| {
            whole(found, name, value.as_ref(), least, i64::from(i32::MAX))
        };
        let deadline = seconds(
            env::ACTIVE_DEADLINE_SECONDS,
            &self.active_deadline_seconds,
            1,
        );
        let ttl = seconds(
            env::TTL_SECONDS_AFTER_FINISHED,
            &self.ttl_seconds_after_finished,
            0,
        );
        let backoff = seconds(env::BACKOFF_LIMIT, &self.backoff_limit, 0);
        let grace = seconds(
            env::TERMINATION_GRACE_PERIOD_SECONDS,
            &self.termination_grace_period_seconds,
            0,
        );
        let apply_grace = seconds(
            env::APPLY_GRACE_PERIOD_SECONDS,
            &self.apply_grace_period_seconds,
            MIN_GRACE_SECONDS,
        );
        // Stock launchers take any number, so that one is no reason not to start.
        if let Some(short) = grace.filter(|grace| *grace < MIN_GRACE_SECONDS) {
            deployment.warnings.push(ConfigProblem {
                subject: env::TERMINATION_GRACE_PERIOD_SECONDS.to_owned(),
                rule: format!(
                    "is {short}, and {MIN_GRACE_SECONDS} counts instead: the executor needs so many seconds to stop and \
                     save"
                ),
                fault: Fault::Deployment,
            });
        }
        let grace = grace.map(|grace| grace.max(MIN_GRACE_SECONDS));
        let all = [Records::Platform, Records::Shared, Records::Pod];
        let all = all.map(|records| (records.name(), Some(records)));
        let known = [[("auto", None)].as_slice(), &all].concat();
        deployment.records =
            one_of(found, env::RECORDS, self.records.as_ref(), &known).unwrap_or_default();
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

    fn resolve_job_data(&self, deployment: &mut Deployment, found: &mut Problems) {
        let modes = [("secret", Mode::Secret), ("env", Mode::Env)];
        deployment.job_data_mode = one_of(
            found,
            env::JOB_DATA_MODE,
            self.job_data_mode.as_ref(),
            &modes,
        )
        .unwrap_or_default();
        let compression = [
            ("auto", Compression::Auto),
            ("on", Compression::On),
            ("off", Compression::Off),
        ];
        deployment.job_data_compression = one_of(
            found,
            env::JOB_DATA_COMPRESSION,
            self.job_data_compression.as_ref(),
            &compression,
        )
        .unwrap_or_default();
        let caches = [
            ("claim", PluginCache::Claim),
            ("empty-dir", PluginCache::EmptyDir),
        ];
        deployment.plugin_cache = one_of(
            found,
            env::PLUGIN_CACHE,
            self.plugin_cache.as_ref(),
            &caches,
        )
        .unwrap_or_default();
    }

    fn resolve_files(&self, deployment: &mut Deployment, found: &mut Problems) {
        if let Some(text) = read_file(found, env::POLICY_FILE, self.policy_file.as_ref()) {
            let policy = serde_saphyr::from_str::<Option<Policy>>(&text).map_err(|error| {
                let error = error.to_string();
                format!("is no policy: {}", error.lines().next().unwrap_or_default())
            });
            if let Some(policy) = found.keep(env::POLICY_FILE, policy) {
                deployment.policy = policy.unwrap_or_default();
            }
        }
        if let Some(text) = read_file(
            found,
            env::POD_TEMPLATE_FILE,
            self.pod_template_file.as_ref(),
        ) {
            match Overlay::parse(&text) {
                Ok(overlay) => deployment.overlay = Some(overlay),
                Err(errors) => {
                    for error in errors {
                        found.add(env::POD_TEMPLATE_FILE, error.to_string());
                    }
                }
            }
        }
    }

    /// What Terrakube's own names say of settings a workspace can override.
    fn platform_defaults(&self, found: &mut Problems) -> Overrides {
        let mut defaults = Overrides::default();
        if let Some(text) = filled(self.pod_annotations.as_ref()) {
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
        if let Some(text) = filled(self.java_tool_options.as_ref()) {
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

/// A blank setting counts as one that is not made.
fn filled(value: Option<&String>) -> Option<&str> {
    value
        .map(|text| text.trim())
        .filter(|text| !text.is_empty())
}

fn one_of<T: Copy>(
    found: &mut Problems,
    name: &str,
    value: Option<&String>,
    known: &[(&str, T)],
) -> Option<T> {
    let text = filled(value)?;
    let choice = known
        .iter()
        .find(|(word, _)| word.eq_ignore_ascii_case(text))
        .map(|(_, choice)| *choice);
    if choice.is_none() {
        let words: Vec<&str> = known.iter().map(|(word, _)| *word).collect();
        found.add(
            name,
            format!(
                "is {}, and must be one of {}",
                quote(text),
                words.join(", ")
            ),
        );
    }
    choice
}

fn whole(
    found: &mut Problems,
    name: &str,
    value: Option<&String>,
    least: i64,
    most: i64,
) -> Option<i64> {
    let text = filled(value)?;
    let number = text
        .parse()
        .ok()
        .filter(|number| (least..=most).contains(number));
    if number.is_none() {
        found.add(
            name,
            format!(
                "is {}, and must be a whole number from {least} to {most}",
                quote(text)
            ),
        );
    }
    number
}

fn read_file(found: &mut Problems, name: &str, path: Option<&PathBuf>) -> Option<String> {
    let path = path.filter(|path| !path.as_os_str().is_empty())?;
    let text = fs::read_to_string(path)
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
