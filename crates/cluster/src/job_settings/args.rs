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
    CacheModeSetting, ImageReference, ImageRegistry, Namespace, ObjectName, PullPolicy,
    RecordsSetting, Whole,
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
    /// Who fills the plugin cache: `runs`, or `fill`, with which runs only read it and Jobs fetch what they lacked
    /// [default: runs].
    #[arg(long, env = env::PROVIDER_CACHE_MODE)]
    pub provider_cache_mode: Option<Setting<CacheModeSetting>>,
    /// Registries of which these Jobs fetch packages, separated by commas
    /// [default: registry.terraform.io,registry.opentofu.org].
    #[arg(long, env = env::PROVIDER_CACHE_REGISTRIES)]
    pub provider_cache_registries: Option<String>,
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
    pub identity: IdentityArgs,
    #[command(flatten)]
    pub defaults: DefaultsArgs,
}

/// Makes the options from a table of their names and variables.
macro_rules! identity_args {
    ($($(#[$attribute:meta])* $option:ident: $variable:ident,)*) => {
        /// Whom runs are at the clouds.
        #[derive(Args, Clone, Debug, Default)]
        #[command(next_help_heading = "Identities of runs")]
        pub struct IdentityArgs {
            $($(#[$attribute])* #[arg(long, env = env::$variable)] pub $option: Option<String>,)*
        }

        impl IdentityArgs {
            /// The value of a variable.
            pub(super) fn value(&self, name: &str) -> Option<String> {
                let all = [$((env::$variable, &self.$option)),*];
                all.into_iter().find(|(known, _)| *known == name)?.1.clone()
            }
        }
    };
}

identity_args! {
    /// ARN of the role on AWS.
    identity_aws_role_arn: IDENTITY_AWS_ROLE,
    /// Provider of a workload identity pool on Google Cloud: `projects/NUMBER/locations/global/workloadIdentityPools/…`.
    identity_gcp_provider: IDENTITY_GCP_PROVIDER,
    /// Service account on Google Cloud that the identity acts as.
    identity_gcp_service_account: IDENTITY_GCP_SERVICE_ACCOUNT,
    /// Id of the application or managed identity on Azure.
    identity_azure_client_id: IDENTITY_AZURE_CLIENT_ID,
    /// Its tenant.
    identity_azure_tenant_id: IDENTITY_AZURE_TENANT_ID,
    /// The subscription of runs.
    identity_azure_subscription_id: IDENTITY_AZURE_SUBSCRIPTION_ID,
}

/// Makes the options from a table of their names and variables.
macro_rules! defaults_args {
    ($($(#[$attribute:meta])* $option:ident: $variable:ident,)*) => {
        /// Defaults of what workspaces can say themselves.
        #[derive(Args, Clone, Default)]
        #[command(
            next_help_heading = "Defaults of workspaces, each of which a workspace variable of that name overrides"
        )]
        pub struct DefaultsArgs {
            $($(#[$attribute])* #[arg(long, env = env::$variable)] pub $option: Option<String>,)*
        }

        impl DefaultsArgs {
            /// The variables as a workspace would have them.
            pub(super) fn variables(&self) -> BTreeMap<String, String> {
                [$((env::$variable, &self.$option)),*]
                    .into_iter()
                    .filter_map(|(name, value)| Some((name.to_owned(), value.clone()?)))
                    .collect()
            }
        }
    };
}

defaults_args! {
    /// Labels that the node of a pod must have: `key=value;key=value`.
    node_selector: EPHEMERAL_NODE_SELECTOR,
    /// Taints that pods tolerate: `key[=value][:operator[:effect[:seconds]]]`, joined by `;`.
    tolerations: EPHEMERAL_TOLERATIONS,
    /// Service account of pods.
    service_account: EPHEMERAL_SERVICE_ACCOUNT,
    /// Annotations of the Job: `key=value;key=value`.
    job_annotations: EPHEMERAL_ANNOTATIONS,
    /// Annotations of the pod: `key=value;key=value`.
    default_pod_annotations: EPHEMERAL_POD_ANNOTATIONS,
    /// Labels of the Job and its pod: `key=value;key=value`.
    labels: EPHEMERAL_LABELS,
    /// Config map to mount.
    config_map: EPHEMERAL_CONFIG_MAP,
    /// Where to mount the config map [default: /data].
    config_map_path: EPHEMERAL_CONFIG_MAP_PATH,
    /// Config maps that become environment of the tool and scripts, separated by commas.
    default_env_config_maps: EPHEMERAL_ENV_CONFIG_MAPS,
    /// Security context of the pod, such as `runAsUser=1000;fsGroup=1000`.
    pod_security_context: EPHEMERAL_POD_SECURITY,
    /// Security context of the container, such as `readOnlyRootFilesystem=true`.
    security_context: EPHEMERAL_SECURITY,
    /// CPU that the node must have for the pod, such as `500m` [default: 250m].
    cpu_request: EPHEMERAL_CPU_REQUEST,
    /// CPU that the pod may use at most, such as `2`. Without it there is no limit.
    cpu_limit: EPHEMERAL_CPU_LIMIT,
    /// Memory that the node must have for the pod [default: 512Mi].
    memory_request: EPHEMERAL_MEMORY_REQUEST,
    /// Memory above which the executor is killed [default: 2Gi].
    memory_limit: EPHEMERAL_MEMORY_LIMIT,
    /// Disk that the node must have for the pod [default: 2Gi].
    storage_request: EPHEMERAL_STORAGE_REQUEST,
    /// Disk above which the pod is evicted, such as `20Gi`. Without it there is no limit.
    storage_limit: EPHEMERAL_STORAGE_LIMIT,
    /// Environment of the executor: `key=value;key=value`.
    #[arg(hide_env_values = true, hide = true)]
    executor_env: EPHEMERAL_ENV,
    /// Path at which the plugin cache is mounted, for every workspace.
    plugin_cache_dir: DEPLOYMENT_PLUGIN_CACHE_DIR,
    /// Claim of the plugin cache [default: terrakube-plugin-pvc].
    plugin_cache_claim: DEPLOYMENT_PLUGIN_CACHE_CLAIM,
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
