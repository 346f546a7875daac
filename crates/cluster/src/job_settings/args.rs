//! The options that describe the Jobs of the launcher.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use job_contract::env;
use manifest::deployment::PluginCache;
use manifest::executor_kind::ExecutorKindSetting;
use manifest::grace_period::MIN_GRACE_SECONDS;
use manifest::job_data::Mode;
use manifest::quantity::Amount;
use runtime::setting::Setting;

use super::values::{
    ImageReference, ImageRegistry, Namespace, ObjectName, PullPolicy, RecordsSetting, Whole,
};

/// Which objects are made, where, and from what. Lists and annotations stay text: a blank list is an empty one.
#[derive(Args, Clone, Default)]
#[command(next_help_heading = "Jobs")]
pub struct DeploymentArgs {
    /// Namespace of Jobs [default: terrakube].
    #[arg(long, env = env::NAMESPACE)]
    pub namespace: Option<Setting<Namespace>>,
    #[arg(long, env = env::IMAGE, help = concat!(
        "Image of the executor [default: mayfly-executor:", env!("CARGO_PKG_VERSION"), "]"
    ))]
    pub image: Option<Setting<ImageReference>>,
    /// Which executor the image holds: `mayfly`, `stock`, or `auto`, which is `mayfly` when the last part of the image's
    /// repository begins with `mayfly-executor`.
    #[arg(long, env = env::EXECUTOR_KIND)]
    pub executor_kind: Option<Setting<ExecutorKindSetting>>,
    /// Registry, or registry and path, that images are pulled from instead of their own.
    #[arg(long, env = env::IMAGE_REGISTRY)]
    pub image_registry: Option<Setting<ImageRegistry>>,
    /// `Always`, `IfNotPresent` or `Never` [default: `IfNotPresent`].
    #[arg(long, env = env::IMAGE_PULL_POLICY)]
    pub image_pull_policy: Option<Setting<PullPolicy>>,
    /// Secrets with which images are pulled, separated by commas.
    #[arg(long, env = env::IMAGE_PULL_SECRETS)]
    pub image_pull_secrets: Option<String>,
    /// Secrets that become the executor's environment, separated by commas [default: terrakube-executor-secrets].
    #[arg(long, env = env::ENV_SECRETS)]
    pub env_secrets: Option<String>,
    /// Config maps that become the executor's environment, separated by commas.
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
    pub job_data_mode: Option<Setting<Mode>>,
    /// Seconds a Job may take, including the wait for a node [default: 21600].
    #[arg(long, env = env::ACTIVE_DEADLINE_SECONDS)]
    pub active_deadline_seconds: Option<Setting<Whole<1>>>,
    /// How often a pod that failed before its step began is replaced [default: 2 where the next pod finds its claim,
    /// else 0].
    #[arg(long, env = env::BACKOFF_LIMIT)]
    pub backoff_limit: Option<Setting<Whole<0>>>,
    /// Where executors keep their records, claims above all: `platform`, `shared`, a data folder of all pods, `pod`, or
    /// `auto`, which follows from their settings [default: auto].
    #[arg(long, env = env::RECORDS)]
    pub records: Option<Setting<RecordsSetting>>,
    /// Seconds between SIGTERM and SIGKILL [default: 300 for apply and destroy, 60 otherwise].
    #[arg(long, env = env::TERMINATION_GRACE_PERIOD_SECONDS)]
    pub termination_grace_period_seconds: Option<Setting<Whole<0>>>,
    /// The same, for apply and destroy.
    #[arg(long, env = env::APPLY_GRACE_PERIOD_SECONDS)]
    pub apply_grace_period_seconds: Option<Setting<Whole<MIN_GRACE_SECONDS>>>,
    /// Seconds a finished Job is kept [default: 600].
    #[arg(long, env = env::TTL_SECONDS_AFTER_FINISHED)]
    pub ttl_seconds_after_finished: Option<Setting<Whole<0>>>,
    /// Priority class of pods.
    #[arg(long, env = env::PRIORITY_CLASS)]
    pub priority_class: Option<Setting<ObjectName>>,
    /// What is mounted where a plugin cache is asked for: its `claim`, or an `empty-dir`.
    #[arg(long, env = env::PLUGIN_CACHE)]
    pub plugin_cache: Option<Setting<PluginCache>>,
    /// Size of the volume runs work in [default: 10Gi].
    #[arg(long, env = env::WORK_SIZE_LIMIT)]
    pub work_size_limit: Option<Setting<Amount>>,
    /// Size of the volume of temporary files [default: 1Gi].
    #[arg(long, env = env::TMP_SIZE_LIMIT)]
    pub tmp_size_limit: Option<Setting<Amount>>,
    /// YAML or JSON file: a pod template that is merged over the built one.
    #[arg(long, env = env::POD_TEMPLATE_FILE)]
    pub pod_template_file: Option<Setting<PathBuf>>,
    /// YAML or JSON file: what workspaces may override.
    #[arg(long, env = env::POLICY_FILE)]
    pub policy_file: Option<Setting<PathBuf>>,
    #[command(flatten)]
    pub defaults: DefaultsArgs,
}

/// Defaults of what workspaces can say themselves.
#[derive(Args, Clone, Default)]
#[command(
    next_help_heading = "Defaults of workspaces, each of which a workspace variable of that name overrides"
)]
pub struct DefaultsArgs {
    /// Labels that the node of a pod must have: `key=value;key=value`.
    #[arg(long, env = env::EPHEMERAL_NODE_SELECTOR)]
    pub node_selector: Option<String>,
    /// Taints that pods tolerate: `key[=value][:operator[:effect[:seconds]]]`, joined by `;`.
    #[arg(long, env = env::EPHEMERAL_TOLERATIONS)]
    pub tolerations: Option<String>,
    /// Service account of pods.
    #[arg(long, env = env::EPHEMERAL_SERVICE_ACCOUNT)]
    pub service_account: Option<String>,
    /// Annotations of the Job: `key=value;key=value`.
    #[arg(long, env = env::EPHEMERAL_ANNOTATIONS)]
    pub job_annotations: Option<String>,
    /// Annotations of the pod: `key=value;key=value`.
    #[arg(long, env = env::EPHEMERAL_POD_ANNOTATIONS)]
    pub default_pod_annotations: Option<String>,
    /// Labels of the Job and its pod: `key=value;key=value`.
    #[arg(long, env = env::EPHEMERAL_LABELS)]
    pub labels: Option<String>,
    /// Config map to mount.
    #[arg(long, env = env::EPHEMERAL_CONFIG_MAP)]
    pub config_map: Option<String>,
    /// Where to mount the config map [default: /data].
    #[arg(long, env = env::EPHEMERAL_CONFIG_MAP_PATH)]
    pub config_map_path: Option<String>,
    /// Config maps that become environment of the tool and scripts, separated by commas.
    #[arg(long, env = env::EPHEMERAL_ENV_CONFIG_MAPS)]
    pub default_env_config_maps: Option<String>,
    /// Security context of the pod, such as `runAsUser=1000;fsGroup=1000`.
    #[arg(long, env = env::EPHEMERAL_POD_SECURITY)]
    pub pod_security_context: Option<String>,
    /// Security context of the container, such as `readOnlyRootFilesystem=true`.
    #[arg(long, env = env::EPHEMERAL_SECURITY)]
    pub security_context: Option<String>,
    /// CPU that the node must have for the pod, such as `500m` [default: 250m].
    #[arg(long, env = env::EPHEMERAL_CPU_REQUEST)]
    pub cpu_request: Option<String>,
    /// CPU that the pod may use at most, such as `2`. Without it there is no limit.
    #[arg(long, env = env::EPHEMERAL_CPU_LIMIT)]
    pub cpu_limit: Option<String>,
    /// Memory that the node must have for the pod [default: 512Mi].
    #[arg(long, env = env::EPHEMERAL_MEMORY_REQUEST)]
    pub memory_request: Option<String>,
    /// Memory above which the executor is killed [default: 2Gi].
    #[arg(long, env = env::EPHEMERAL_MEMORY_LIMIT)]
    pub memory_limit: Option<String>,
    /// Disk that the node must have for the pod [default: 2Gi].
    #[arg(long, env = env::EPHEMERAL_STORAGE_REQUEST)]
    pub storage_request: Option<String>,
    /// Disk above which the pod is evicted, such as `20Gi`. Without it there is no limit.
    #[arg(long, env = env::EPHEMERAL_STORAGE_LIMIT)]
    pub storage_limit: Option<String>,
    /// Environment of the executor: `key=value;key=value`.
    #[arg(long, env = env::EPHEMERAL_ENV, hide_env_values = true, hide = true)]
    pub executor_env: Option<String>,
    /// Path at which the plugin cache is mounted, for every workspace.
    #[arg(long, env = env::DEPLOYMENT_PLUGIN_CACHE_DIR)]
    pub plugin_cache_dir: Option<String>,
    /// Claim of the plugin cache [default: terrakube-plugin-pvc].
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
    pub(super) fn variables(&self) -> BTreeMap<String, String> {
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
