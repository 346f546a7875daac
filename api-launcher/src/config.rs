//! Settings of the launcher for the Jobs it makes, from flags and environment. Terrakube's names mean what they
//! mean there; ours start with `MAYFLY_`. Every value is text until [`DeploymentArgs::resolve`] has looked at
//! all of them, so that all problems are reported at once.

mod java_options;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use clap::Args;
use job_contract::{Records, env};

use crate::manifest::deployment::{DEFAULT_IMAGE, PluginCache};
use crate::manifest::executor_kind::{ExecutorKind, ExecutorKindSetting};
use crate::manifest::grace_period::MIN_GRACE_SECONDS;
use crate::manifest::job_data::{Compression, Mode};
use crate::manifest::overlay::Overlay;
use crate::manifest::overrides::{self, Names, Overrides};
use crate::manifest::pairs::{parse_list, parse_pairs};
use crate::manifest::policy::Policy;
use crate::manifest::problem::{Fault, Problems, quote};
use crate::manifest::quantity::{Amount, SLIP};
use crate::manifest::{self, check, image};

pub use crate::manifest::Deployment;
/// A setting that cannot be used: the variable, and the rule it breaks.
pub use crate::manifest::Problem as ConfigProblem;

/// Which objects are made, where, and from what.
#[derive(Args, Clone, Default)]
#[command(next_help_heading = "Jobs")]
pub struct DeploymentArgs {
    /// Namespace of Jobs [default: terrakube].
    #[arg(long, env = env::NAMESPACE)]
    pub namespace: Option<String>,
    #[arg(long, env = env::IMAGE, help = concat!(
        "Image of the executor [default: mayfly-executor:", env!("CARGO_PKG_VERSION"), "]"
    ))]
    pub image: Option<String>,
    /// Which executor the image holds: `mayfly`, `stock`, or `auto`, which is `mayfly` when the last part of the image's
    /// repository begins with `mayfly-executor`.
    #[arg(long, env = env::EXECUTOR_KIND)]
    pub executor_kind: Option<String>,
    /// Registry, or registry and path, that images are pulled from instead of their own.
    #[arg(long, env = env::IMAGE_REGISTRY)]
    pub image_registry: Option<String>,
    /// `Always`, `IfNotPresent` or `Never` [default: `IfNotPresent`].
    #[arg(long, env = env::IMAGE_PULL_POLICY)]
    pub image_pull_policy: Option<String>,
    /// Comma list of pull secrets.
    #[arg(long, env = env::IMAGE_PULL_SECRETS)]
    pub image_pull_secrets: Option<String>,
    /// Comma list of Secrets that become the executor's environment [default: terrakube-executor-secrets].
    #[arg(long, env = env::ENV_SECRETS)]
    pub env_secrets: Option<String>,
    /// Comma list of config maps that become the executor's environment.
    #[arg(long, env = env::ENV_CONFIG_MAPS)]
    pub env_config_maps: Option<String>,
    /// Annotations of every pod, as a JSON object or as `key=value;key=value`.
    #[arg(long, env = env::POD_ANNOTATIONS)]
    pub pod_annotations: Option<String>,
    /// Options of a Java virtual machine, of which only node selectors are read.
    #[arg(long, env = env::JAVA_TOOL_OPTIONS, hide = true)]
    pub java_tool_options: Option<String>,
    /// How the job document reaches the pod: `secret`, or `env` as the stock launcher does it.
    #[arg(long, env = env::JOB_DATA_MODE)]
    pub job_data_mode: Option<String>,
    /// Whether a document that is too large is compressed: `auto` (in secret mode), `on` or `off`.
    #[arg(long, env = env::JOB_DATA_COMPRESSION)]
    pub job_data_compression: Option<String>,
    /// Seconds a Job may take, waiting for a node included [default: 21600].
    #[arg(long, env = env::ACTIVE_DEADLINE_SECONDS)]
    pub active_deadline_seconds: Option<String>,
    /// How often a pod that failed before its step began is replaced [default: 2 where the next pod finds its claim,
    /// else 0].
    #[arg(long, env = env::BACKOFF_LIMIT)]
    pub backoff_limit: Option<String>,
    /// Where executors keep their records, claims above all: `platform`, `shared`, a data folder of all pods, `pod`, or
    /// `auto`, as follows from what they are given [default: auto].
    #[arg(long, env = env::RECORDS)]
    pub records: Option<String>,
    /// Seconds between SIGTERM and SIGKILL [default: 300 for apply and destroy, 60 otherwise].
    #[arg(long, env = env::TERMINATION_GRACE_PERIOD_SECONDS)]
    pub termination_grace_period_seconds: Option<String>,
    /// The same for steps that change infrastructure.
    #[arg(long, env = env::APPLY_GRACE_PERIOD_SECONDS)]
    pub apply_grace_period_seconds: Option<String>,
    /// Seconds a finished Job is kept [default: 600].
    #[arg(long, env = env::TTL_SECONDS_AFTER_FINISHED)]
    pub ttl_seconds_after_finished: Option<String>,
    /// Priority class of pods.
    #[arg(long, env = env::PRIORITY_CLASS)]
    pub priority_class: Option<String>,
    /// What is mounted where a plugin cache is asked for: its `claim`, or an `empty-dir`.
    #[arg(long, env = env::PLUGIN_CACHE)]
    pub plugin_cache: Option<String>,
    /// Size of the volume runs work in [default: 10Gi].
    #[arg(long, env = env::WORK_SIZE_LIMIT)]
    pub work_size_limit: Option<String>,
    /// Size of the volume of temporary files [default: 1Gi].
    #[arg(long, env = env::TMP_SIZE_LIMIT)]
    pub tmp_size_limit: Option<String>,
    /// YAML or JSON file: a pod template laid over the one that is built.
    #[arg(long, env = env::POD_TEMPLATE_FILE)]
    pub pod_template_file: Option<PathBuf>,
    /// YAML or JSON file: what workspaces may override.
    #[arg(long, env = env::POLICY_FILE)]
    pub policy_file: Option<PathBuf>,
    #[command(flatten)]
    pub defaults: DefaultsArgs,
}

/// Defaults of what workspaces can say themselves.
#[derive(Args, Clone, Default)]
#[command(
    next_help_heading = "Defaults of workspaces, each of which a workspace variable of that name overrides"
)]
pub struct DefaultsArgs {
    /// Pairs.
    #[arg(long, env = env::EPHEMERAL_NODE_SELECTOR)]
    pub node_selector: Option<String>,
    /// `key[=value][:operator[:effect[:seconds]]]`, joined by `;`.
    #[arg(long, env = env::EPHEMERAL_TOLERATIONS)]
    pub tolerations: Option<String>,
    /// Service account of pods.
    #[arg(long, env = env::EPHEMERAL_SERVICE_ACCOUNT)]
    pub service_account: Option<String>,
    /// Pairs.
    #[arg(long, env = env::EPHEMERAL_ANNOTATIONS)]
    pub job_annotations: Option<String>,
    /// Pairs.
    #[arg(long, env = env::EPHEMERAL_POD_ANNOTATIONS)]
    pub default_pod_annotations: Option<String>,
    /// Pairs, of Jobs and pods.
    #[arg(long, env = env::EPHEMERAL_LABELS)]
    pub labels: Option<String>,
    /// Config map to mount.
    #[arg(long, env = env::EPHEMERAL_CONFIG_MAP)]
    pub config_map: Option<String>,
    /// Where to mount it [default: /data].
    #[arg(long, env = env::EPHEMERAL_CONFIG_MAP_PATH)]
    pub config_map_path: Option<String>,
    /// Comma list.
    #[arg(long, env = env::EPHEMERAL_ENV_CONFIG_MAPS)]
    pub default_env_config_maps: Option<String>,
    /// Pairs.
    #[arg(long, env = env::EPHEMERAL_POD_SECURITY)]
    pub pod_security_context: Option<String>,
    /// Pairs.
    #[arg(long, env = env::EPHEMERAL_SECURITY)]
    pub security_context: Option<String>,
    /// Kubernetes quantity [default: 250m].
    #[arg(long, env = env::EPHEMERAL_CPU_REQUEST)]
    pub cpu_request: Option<String>,
    /// Kubernetes quantity.
    #[arg(long, env = env::EPHEMERAL_CPU_LIMIT)]
    pub cpu_limit: Option<String>,
    /// Kubernetes quantity [default: 512Mi].
    #[arg(long, env = env::EPHEMERAL_MEMORY_REQUEST)]
    pub memory_request: Option<String>,
    /// Kubernetes quantity [default: 2Gi].
    #[arg(long, env = env::EPHEMERAL_MEMORY_LIMIT)]
    pub memory_limit: Option<String>,
    /// Kubernetes quantity [default: 2Gi].
    #[arg(long, env = env::EPHEMERAL_STORAGE_REQUEST)]
    pub storage_request: Option<String>,
    /// Kubernetes quantity.
    #[arg(long, env = env::EPHEMERAL_STORAGE_LIMIT)]
    pub storage_limit: Option<String>,
    /// Pairs: environment of the executor.
    #[arg(long, env = env::EPHEMERAL_ENV, hide_env_values = true, hide = true)]
    pub executor_env: Option<String>,
    /// Mounts the plugin cache there, for every workspace.
    #[arg(long, env = env::DEPLOYMENT_PLUGIN_CACHE_DIR)]
    pub plugin_cache_dir: Option<String>,
    /// Its claim [default: terrakube-plugin-pvc].
    #[arg(long, env = env::DEPLOYMENT_PLUGIN_CACHE_CLAIM)]
    pub plugin_cache_claim: Option<String>,
}

/// Environment of executors may hold secrets, so only the settings' presence is shown.
impl std::fmt::Debug for DeploymentArgs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeploymentArgs")
            .field("namespace", &self.namespace)
            .field("image", &self.image)
            .field("job_data_mode", &self.job_data_mode)
            .finish_non_exhaustive()
    }
}

/// See [`DeploymentArgs`].
impl std::fmt::Debug for DefaultsArgs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DefaultsArgs").finish_non_exhaustive()
    }
}

impl DefaultsArgs {
    /// The variables as a workspace would have them.
    fn variables(&self) -> BTreeMap<String, String> {
        [
            (env::EPHEMERAL_NODE_SELECTOR, &self.node_selector),
            (env::EPHEMERAL_TOLERATIONS, &self.tolerations),
            (env::EPHEMERAL_SERVICE_ACCOUNT, &self.service_account),
            (env::EPHEMERAL_ANNOTATIONS, &self.job_annotations),
            (
                env::EPHEMERAL_POD_ANNOTATIONS,
                &self.default_pod_annotations,
            ),
            (env::EPHEMERAL_LABELS, &self.labels),
            (env::EPHEMERAL_CONFIG_MAP, &self.config_map),
            (env::EPHEMERAL_CONFIG_MAP_PATH, &self.config_map_path),
            (
                env::EPHEMERAL_ENV_CONFIG_MAPS,
                &self.default_env_config_maps,
            ),
            (env::EPHEMERAL_POD_SECURITY, &self.pod_security_context),
            (env::EPHEMERAL_SECURITY, &self.security_context),
            (env::EPHEMERAL_CPU_REQUEST, &self.cpu_request),
            (env::EPHEMERAL_CPU_LIMIT, &self.cpu_limit),
            (env::EPHEMERAL_MEMORY_REQUEST, &self.memory_request),
            (env::EPHEMERAL_MEMORY_LIMIT, &self.memory_limit),
            (env::EPHEMERAL_STORAGE_REQUEST, &self.storage_request),
            (env::EPHEMERAL_STORAGE_LIMIT, &self.storage_limit),
            (env::EPHEMERAL_ENV, &self.executor_env),
            (env::DEPLOYMENT_PLUGIN_CACHE_DIR, &self.plugin_cache_dir),
            (env::DEPLOYMENT_PLUGIN_CACHE_CLAIM, &self.plugin_cache_claim),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), value.clone()?)))
        .collect()
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
